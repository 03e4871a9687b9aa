"""How long the plan of the paper's whole table takes beside a bare Snakemake with as many trivial jobs.

Both are dry runs in fresh folders, three each, alternating; the ratio is that of processor seconds, at their medians.
The bare workflow chains fit, predict and score by wildcards alone, without parameters, code or resources, and ends in
one table. Needs no data: the roots that the plan asks for are empty folders.

    .venv/bin/python benchmarks/planning.py [--json]
"""

import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from measured import machine, main  # type: ignore[import-not-found]

from anomed.params import combined

PROJECT = Path(__file__).resolve().parents[1]
ROUNDS = 3
BARE = """
RUNS = [(d, s, k) for d in {domains} for s in {systems} for k in {seeds}]

rule all:
    input: "table.csv"
rule prepare:
    output: "data/{{domain}}.csv"
    shell: "touch {{output}}"
rule fit:
    input: "data/{{domain}}.csv"
    output: "models/{{domain}}/{{system}}/{{seed}}.csv"
    shell: "touch {{output}}"
rule predict:
    input: "models/{{domain}}/{{system}}/{{seed}}.csv"
    output: "runs/{{domain}}/{{system}}/{{seed}}.csv"
    shell: "touch {{output}}"
rule score:
    input: "runs/{{domain}}/{{system}}/{{seed}}.csv"
    output: "scores/{{domain}}/{{system}}/{{seed}}.csv"
    shell: "touch {{output}}"
rule table:
    input: [f"scores/{{d}}/{{s}}/{{k}}.csv" for d, s, k in RUNS]
    output: "table.csv"
    shell: "touch {{output}}"
"""


def planned(folder: Path, *options: str) -> tuple[float, float, int]:
    """Seconds of the processor and of the clock, and jobs, of a dry run."""
    before, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "snakemake", "-n", "--cores", "1", "--quiet", "rules", *options]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    seconds, after = time.perf_counter() - clock, resource.getrusage(resource.RUSAGE_CHILDREN)
    total = re.search(r"^total\s+(\d+)", run.stdout + run.stderr, re.MULTILINE)
    assert total, run.stderr
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent, seconds, int(total[1])


def project(folder: Path) -> tuple[str, ...]:
    """A copy of the project's workflow, its roots empty."""
    for name in ("Snakefile", "workflow", "src", "params", "params.yaml", "profiles", "data/cards"):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (PROJECT / name).is_dir() else shutil.copy)(PROJECT / name, place)
    (folder / "data/raw/bmad").mkdir(parents=True)
    return ("--configfile", "params/paper.yaml")


def measure() -> dict[str, Any]:
    """Both plans, in turn."""
    run = combined([PROJECT / "params.yaml", PROJECT / "params/paper.yaml"])["run"]
    times: dict[str, list[tuple[float, float, int]]] = {"anomed": [], "bare": []}
    for number in range(ROUNDS):
        print(f"planning.py: round {number + 1} of {ROUNDS}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as bare:
            times["anomed"].append(planned(Path(ours), *project(Path(ours))))
            (Path(bare) / "Snakefile").write_text(
                BARE.format(**{key: run[key] for key in ("domains", "systems", "seeds")})
            )
            times["bare"].append(planned(Path(bare)))
    found: dict[str, Any] = {
        name: {
            "processor": statistics.median(one[0] for one in rounds),
            "seconds": statistics.median(one[1] for one in rounds),
            "jobs": rounds[0][2],
        }
        for name, rounds in times.items()
    }
    ratio = found["anomed"]["processor"] / found["bare"]["processor"]
    runs = len(run["domains"]) * len(run["systems"]) * len(run["seeds"])
    return {**found, "ratio": ratio, "runs": runs, "machine": machine(["snakemake"])}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = ["| dry run of | jobs | seconds | processor seconds |", "|---|---:|---:|---:|"]
    for key, name in {"anomed": f"params/paper.yaml, {result['runs']} runs", "bare": "bare Snakemake"}.items():
        one = result[key]
        rows.append(f"| {name} | {one['jobs']:,} | {one['seconds']:.1f} | {one['processor']:.1f} |")
    rows.append(f"| ratio | | | {result['ratio']:.2f} |")
    version, cores = result["machine"]["snakemake"], result["machine"]["cores"]
    return "\n".join([*rows, f"| {result['machine']['processor']} | | cores {cores} | snakemake {version} |"])


if __name__ == "__main__":
    main((__doc__ or "").splitlines()[0], {}, measure, table)
