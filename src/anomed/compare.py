"""Two systems, or two states of one, against each other: paired differences of every cell that both have."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from anomed import stats
from anomed.errors import AnomedError
from anomed.report.scores import Record, ScoreFile, mean_replicates, read
from anomed.report.summary import ARROWS, Cell, average
from anomed.settings import nearest

HEADER = ("cell", "seeds", "A", "B", "B - A", "95 % interval", "p", "B is")
DECIMALS = 6  # what float32 replicates and sums over seeds hold for sure
WORDS = {"unclear": "not told apart", "regression": "worse: REGRESSION"}  # of verdicts, where they are other words

Files = dict[Path, ScoreFile]  # the seeds of a system on one domain


class Line(NamedTuple):
    """One printed line, and what it says: "better", "worse", "regression", "unclear", "lost" or "only"."""

    texts: tuple[str, ...]
    verdict: str


def compare(first: str, second: str, scores: Path, baseline: Path, tolerance: float) -> int:
    """Print how system `second` (B, read from `scores`) differs from `first` (A, read from `baseline`).

    One line per domain and metric: the means over the seeds of each, B minus A, its paired 95 % interval over the same
    resampled subjects, and p, not corrected for the number of lines. Which sign is better depends on the metric, so
    each line says it in words. A regression is a line whose whole interval says that B is worse by more than
    `tolerance` (in the unit of the metric); without an interval the difference decides. So is a value that A has and
    B, scored on the same domain, has not. Other cells that only one has are listed as such; those that neither has
    a value of are not.

    Returns 1 if there is a regression, else 0. Raises AnomedError when a system has no scores, when the two were
    scored on other images, by other definitions or with another bootstrap, and when they share no cell.
    """
    if not 0 <= tolerance < math.inf:
        raise AnomedError(f"--tolerance: found {tolerance}, expected a number from 0 on")
    one, other = _load(baseline, first), _load(scores, second)
    lines: list[Line] = []
    for domain in dict.fromkeys((*one, *other)):
        lines += _lines(domain, one.get(domain, {}), other.get(domain, {}), tolerance)
    count = [line.verdict for line in lines].count
    alone = count("only") + count("lost")
    if len(lines) == alone:
        where = f"{first} in {baseline} and {second} in {scores}"
        raise AnomedError(f"{where}: nothing to compare, there is no domain and metric that both have a value of")
    print(f"A: {first} in {baseline}\nB: {second} in {scores}\n")
    rows = [HEADER, *(line.texts for line in lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    print(
        f"\n{len(lines) - alone} compared, p not corrected for their number: {count('better')} better, "
        f"{count('unclear')} not told apart, {count('worse') + count('regression')} worse ({count('regression')} by "
        f"more than the tolerance of {tolerance:g}); {alone} only one has ({count('lost')} lost by B)"
    )
    return int(count("regression") + count("lost") > 0)


def _load(folder: Path, system: str) -> dict[str, Files]:
    """The score files of a system by domain, in order of names and seeds; those of one domain are of one state."""
    if not folder.is_dir():
        raise AnomedError(f"{folder}: no such folder; run this in the project, or give the folder of scores")
    every = [path for path in folder.glob("*/*/*.json") if path.stem.isdecimal()]
    found: dict[str, Files] = {}
    for path in sorted(every, key=lambda path: (path.parent, int(path.stem))):
        if path.parent.name == system:
            domain = path.parent.parent.name
            found.setdefault(domain, {})[path] = read(path, domain, system, int(path.stem))
    if not found:
        raise AnomedError(f"{folder}: found no scores of {system!r}{nearest(system, {p.parent.name for p in every})}")
    for files in found.values():
        _agree(files, "manifest_hash", "parameter_hash")
    return found


def _agree(files: Files, *keys: str) -> None:
    """What is averaged or paired was drawn from the same images, in the same way, by the same definitions."""
    first = next(iter(files))
    definitions: dict[str, tuple[Path, str]] = {}
    for path, file in files.items():
        found = [(first, key, getattr(file, key), getattr(files[first], key)) for key in keys]
        found.append((first, "bootstrap", file.bootstrap.drawn(), files[first].bootstrap.drawn()))
        for record in file.records:
            where, identifier = definitions.setdefault(record.metric, (path, record.definition_id))
            found.append((where, f"definition_id of {record.metric}", record.definition_id, identifier))
        for where, key, mine, other in found:
            if mine != other:
                raise AnomedError(
                    f"{path} and {where}: {key} is {mine} and {other}; numbers of the two do not compare: "
                    "score both anew on the same prepared domain, with the same block `metrics:`"
                )


def _lines(domain: str, one: Files, other: Files, tolerance: float) -> list[Line]:
    """The lines of a domain, metrics in the order of the records; a side without files has no value of any."""
    _agree({**one, **other}, "manifest_hash")
    records = {record.metric: record for file in (*one.values(), *other.values()) for record in file.records}
    replicates = mean_replicates(one), mean_replicates(other)
    units = next(iter({**one, **other}.values())).bootstrap.units
    seeds = f"{len(one)}" if len(one) == len(other) else f"{len(one)}, {len(other)}"
    lines = []
    for metric, record in records.items():
        a, b = _cell(one, metric), _cell(other, metric)
        start = f"{domain}.{metric} {ARROWS[record.direction]}", seeds, a.value(), b.value()
        if a.mean is not None and b.mean is not None:
            tested = stats.difference(replicates[0][metric], replicates[1][metric], units)
            lines.append(_compared(start, record, b.mean - a.mean, tested, tolerance))
        elif a.mean is not None or b.mean is not None:
            name, lacking, reason = ("A", "B", b.reason) if b.mean is None else ("B", "A", a.reason)
            lost = b.mean is None and bool(other)
            said = f"only {name}: {lacking} has no value, {reason}" + (": REGRESSION" if lost else "")
            lines.append(Line((*start, "", "", "", said), "lost" if lost else "only"))
    return lines


def _cell(files: Files, metric: str) -> Cell:
    """The mean over the seeds, or the reason why there is none."""
    rows: list[dict[str, Any]] = []
    for file in files.values():
        record = next((record for record in file.records if record.metric == metric), None)
        value, reason = (record.value, record.reason) if record else (None, "not applicable")
        rows.append({"seed": file.seed, "value": value, "reason": reason})
    return average(rows) if rows else Cell(None, None, "not scored on this domain")


def _compared(
    start: tuple[str, ...], record: Record, difference: float, tested: stats.Difference, tolerance: float
) -> Line:
    low, high, reason = tested.interval
    difference = round(difference, DECIMALS) + 0.0  # never -0.0
    ends = [difference if end is None else round(end, DECIMALS) for end in (low, high)]
    least, most = sorted(end if record.direction == "higher" else -end for end in ends)  # how much better B is
    if most < 0:
        verdict = "regression" if most < -tolerance else "worse"
    else:
        verdict = "better" if least > 0 else "unclear"
    said = WORDS.get(verdict, verdict) + (f" (no interval: {reason})" if reason else "")
    interval = "" if reason else f"[{low:+.4f}, {high:+.4f}]"
    p = "" if tested.p is None else f"{tested.p:.4f}" if tested.p >= 1e-4 else "<0.0001"
    return Line((*start, f"{difference:+.4f}", interval, p, said), verdict)
