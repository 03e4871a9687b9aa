"""Problems of the cases of a domain: list them in a file, and refuse all that are not known."""

import collections
import io
from pathlib import Path

import pandas as pd

from anomed import records
from anomed.errors import AnomedError, CaseProblem


def judge(
    found: list[CaseProblem], known: dict[str, int], path: Path, by_design: frozenset[str] = frozenset()
) -> dict[str, int]:
    """Write the problems to `path`, one line each; return their number by code.

    known: exact counts by code that a card allows. by_design: codes that the source has on purpose. Raises AnomedError
    naming the first of any others.
    """
    found = list({str(problem): problem for problem in found}.values())  # a volume's fault meets each of its slices
    counts = dict(sorted(collections.Counter(problem.row["code"] for problem in found).items()))
    path.unlink(missing_ok=True)
    if found:
        table = pd.DataFrame([problem.row for problem in found]).sort_values(["code", "case", "found"])
        buffer = io.StringIO()
        table.to_csv(buffer, index=False, lineterminator="\n")
        records.write_text(path, buffer.getvalue())
    unknown = {code: n for code, n in counts.items() if known.get(code) != n and code not in by_design}
    if unknown:
        first = [str(problem) for problem in found if problem.row["code"] in unknown]
        shown = "\n".join(f"  {line}" for line in first[:10]) + (
            f"\n  ... {len(first) - 10} more" if len(first) > 10 else ""
        )
        total = ", ".join(f"{n} {code}" for code, n in unknown.items())
        raise AnomedError(f"{total}; all are listed in {path}\n{shown}")
    return counts
