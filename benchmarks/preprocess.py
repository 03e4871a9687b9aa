"""How fast heads go through the spatial steps and how much memory that takes, beside a plain loop over the libraries.

Every part runs in a fresh process with one thread, as in the pipeline. Heads are synthesised, so no data are needed,
but Linux, 2 GB of memory a core and 10 MB a head in the temporary folder; some 6 minutes for 8 heads on 2 idle cores.

    .venv/bin/python benchmarks/preprocess.py [--heads 8] [--json]
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from measured import machine  # type: ignore[import-not-found]
from plain_loop import loop  # type: ignore[import-not-found]

from anomed import records
from anomed.preprocess import spatial_steps, steps

STEPS = steps.parse(["skull_strip", "bias_field", {"register": {"spacing": 2}}], spatial_steps.STEPS, "STEPS")  # `head`
FILES = spatial_steps.files(STEPS, "STEPS")
DOMAIN = "brain_mri"
SOURCE = {"source": "volumes", "subjects": "subjects.csv"} | {
    key: f"{{subject}}_{name}.nii.gz" for key, name in (("image", "flair"), ("lesion", "lesion"), ("organ", "brain"))
}
SHARDS = 4
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # 1, as in anomed.cli
IMPORTS = 3  # times that MONAI is imported; the fastest counts
LIMIT = 1.0  # mm: how far the loop may carry a point of the brain from where ours does


class Job(NamedTuple):
    """A finished process: what it printed, wall clock seconds, processor seconds, peak of its resident memory (MB)."""

    answer: dict[str, Any]
    seconds: float
    processor: float
    memory: float


class Clock:
    """Processor seconds by label; what a call inside another takes counts for the inner one alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.inner = [0.0]

    @contextlib.contextmanager
    def time(self, label: str) -> Iterator[None]:
        self.inner.append(0.0)
        start = time.process_time()
        yield
        whole = time.process_time() - start
        self.seconds[label] = self.seconds.get(label, 0.0) + whole - self.inner.pop()
        self.inner[-1] += whole

    def watch(self, owner: Any, name: str, label: str) -> None:
        """Time every call of a method or of a module's function from now on."""
        function = getattr(owner, name)
        bound = hasattr(function, "__self__")  # a class method

        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.time(label):
                return function(*arguments, **options)

        setattr(owner, name, staticmethod(timed) if bound else timed)


def heads(root: str, number: int) -> dict[str, Any]:
    """Part: write heads of the embedded domain and their table; returns the folder."""
    from anomed.domains.embedded import Embedded

    source = Embedded(DOMAIN, Embedded.Options(subjects=max(10, number)), None, Path(root))
    scans = source.scans()[:number]
    *_, folder = (scan.fetch().image.parent for scan in scans)
    lines = ["subject,split", *(f"{scan.subject_id},test" for scan in scans)]
    (folder / "subjects.csv").write_text("\n".join(lines) + "\n")
    return {"folder": str(folder)}


def shard(root: str, out: str, index: int, number: int) -> dict[str, Any]:
    """Part: one shard as `anomed prepare spatial` runs it; returns the processor seconds of each step."""
    import deepbet.bet
    import SimpleITK

    from anomed import volumes
    from anomed.preprocess import qc, registration, shard, spatial

    clock = Clock()
    for owner, name, label in (
        (deepbet.bet.BrainExtraction, "__init__", "start"),
        (registration.Template, "load", "start"),
        (spatial.LoadVolumed, "__call__", "load"),
        (spatial.SkullStripd, "__call__", "strip"),
        (spatial.BiasFieldd, "__call__", "bias field"),
        (spatial.Registerd, "__call__", "register"),
        (volumes, "write", "write"),
        (volumes, "write_on_original", "write"),
        (SimpleITK, "WriteTransform", "write"),
        (qc, "picture", "picture"),
    ):
        clock.watch(owner, name, label)
    hashes = {name: records.digest_file(path) for name, path in FILES.items()}
    parameters = {**SOURCE, "spatial": steps.dump(STEPS), "files": hashes}
    folder, listing = Path(out), Path(out) / "problems.csv"
    with clock.time("checks and hashes"):
        shard.spatial(DOMAIN, parameters, FILES, Path(root), folder / "work", folder, (index, number), listing)
    return clock.seconds


def monai() -> dict[str, Any]:
    """Part: what importing MONAI's transforms adds where torch is there."""
    import torch  # noqa: F401

    def resident() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * 1024 / 1e6

    before, start = resident(), time.process_time()
    import monai.transforms  # noqa: F401

    return {"processor": time.process_time() - start, "mb": resident() - before}


def apart(ours: str, loops: str) -> dict[str, Any]:
    """Part: share of the brain's voxels on which both disagree, and how far apart (mm) both carry a point of the
    template's brain; the largest of all heads."""
    import nibabel
    import numpy as np
    import SimpleITK as sitk

    from anomed.preprocess.registration import FINEST, Template, matrix

    template = Template.load(FILES["template"], 2 * FINEST)
    points = np.c_[np.argwhere(template.brain), np.ones(template.brain.sum())] @ template.affine.T
    voxels, distances = [], []
    for folder in sorted(path for path in Path(ours).glob("sub-*") if path.is_dir()):
        own, other = (
            np.asarray(nibabel.load(path).dataobj) > 0
            for path in (folder / "organ_native.nii.gz", Path(loops) / f"{folder.name}_mask.nii.gz")
        )
        voxels.append(float((own != other).sum() / own.sum()))
        first, second = (
            matrix(sitk.AffineTransform(sitk.ReadTransform(str(path))))
            for path in (folder / "transform.tfm", Path(loops) / f"{folder.name}.tfm")
        )
        distances.append(float(np.linalg.norm(points @ (first - second).T, axis=1).max()))
    return {"voxels": max(voxels), "mm": max(distances)}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function for function in (heads, shard, loop, monai, apart)
}


def run(part: str, **options: Any) -> Job:
    """A part in a process of its own. The kernel counts its memory, from before Python started to after it ended."""
    command = [sys.executable, __file__, "--part", part, "--options", json.dumps(options)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | dict.fromkeys(THREADS, "1"))
    assert process.stdout is not None
    with process.stdout as pipe:
        text = pipe.read()
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"preprocess.py: the part {part} failed")
    return Job(json.loads(text), seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6)


def folder_hash(folder: Path) -> str:
    """SHA-256 over names and bytes of all files of the volumes."""
    total = hashlib.sha256()
    for path in sorted(folder.glob("sub-*/*")):
        total.update(f"{path.relative_to(folder)} {records.digest_file(path)}\n".encode())
    return total.hexdigest()


def measure(number: int, work: Path) -> dict[str, Any]:
    """All parts, one after another; only the shards run beside each other, as many at a time as there are cores.

    Rates, ratio and shares are of processor time: one thread waits for little, and other processes count less.
    """
    cores, count = len(os.sched_getaffinity(0)), min(SHARDS, number)

    def folder(name: str) -> str:
        print(f"preprocess.py: {name}", file=sys.stderr)
        (work / name).mkdir()
        return str(work / name)

    def shards(root: str, out: str, count: int) -> list[Job]:
        with ThreadPoolExecutor(cores) as pool:
            return list(
                pool.map(lambda index: run("shard", root=root, out=out, index=index, number=count), range(count))
            )

    root, more = (run("heads", root=folder(f"heads-{n}"), number=n).answer["folder"] for n in (number, 2 * number))
    one, many, plain = (folder(name) for name in ("one", "many", "plain"))
    [ours] = shards(root, one, 1)
    theirs = run("loop", root=root, out=plain, template=str(FILES["template"]))
    start = time.perf_counter()
    parts = shards(root, many, count)
    together = time.perf_counter() - start
    [twice] = shards(more, folder("twice"), 1)
    imported = min((run("monai").answer for _ in range(IMPORTS)), key=lambda found: found["processor"])
    gap = run("apart", ours=one, loops=plain).answer
    if gap["voxels"] or gap["mm"] > LIMIT:
        sys.exit(f"preprocess.py: the loop differs from ours by {gap}, expected the same masks and at most {LIMIT} mm")
    if folder_hash(Path(one)) != folder_hash(Path(many)):
        sys.exit(f"preprocess.py: 1 shard and {count} shards give other bytes")

    spent = dict(ours.answer)
    spent["start"] += ours.processor - sum(ours.answer.values())  # interpreter, imports, exit
    memory = {-(-number // count): max(job.memory for job in parts), number: ours.memory, 2 * number: twice.memory}
    rate, ratio = 60 * number / ours.processor, theirs.processor / ours.processor
    share = imported["processor"] / ours.processor
    on = f"{number} heads"
    rows = [row("anomed, one shard", on, ours.processor, f"{rate:.1f} heads per minute and core", ours.seconds)]
    for label, seconds in spent.items():
        where, each = ("a shard", seconds) if label == "start" else ("a head", seconds / number)
        rows.append(row(f"· {label}", where, each, f"{seconds / ours.processor:.1%}"))
    found = f"of the start: {imported['mb']:.0f} MB, {share:.1%}"
    rows.append(row("· MONAI's import, beside torch", "a shard", imported["processor"], found))
    found = f"{ratio:.2f} times ours; same masks, transforms within {gap['mm']:.2f} mm; {theirs.memory:,.0f} MB"
    rows.append(row("plain loop over the same libraries", on, theirs.processor, found, theirs.seconds))
    found = f"same bytes; {60 * number / together:.1f} heads per minute"
    total = sum(job.processor for job in parts)
    rows.append(row(f"anomed, {count} shards, {min(count, cores)} at a time", on, total, found, together))
    rows += [row("peak memory of a shard", f"{n} heads", None, f"{peak:,.0f} MB") for n, peak in memory.items()]
    return {
        "rows": rows,
        "machine": {**machine(("monai", "deepbet", "SimpleITK", "torch", "nibabel")), "cores": cores},
        "heads_per_minute_and_core": rate,
        "heads_per_minute_in_shards": 60 * number / together,
        "loop_to_ours": ratio,
        "shares": {label: seconds / ours.processor for label, seconds in spent.items()},
        "peak_memory_mb": memory,
        "loop_peak_memory_mb": theirs.memory,
        "monai": {**imported, "share": share},
        "same_bytes": True,  # or it would have failed
    }


def row(measured: str, on: str, processor: float | None, result: str, seconds: float | None = None) -> dict[str, Any]:
    """A line of the table."""
    return {"measured": measured, "on": on, "seconds": seconds, "processor": processor, "result": result}


def table(result: dict[str, Any]) -> str:
    """One table in Markdown; its last row names the machine."""
    lines = ["| measured | on | seconds | processor seconds | |", "|---|---|---:|---:|---|"]
    for one in result["rows"]:
        seconds, processor = ("" if one[key] is None else f"{one[key]:.2f}" for key in ("seconds", "processor"))
        lines.append(f"| {one['measured']} | {one['on']} | {seconds} | {processor} | {one['result']} |")
    versions = ", ".join(f"{name} {value}" for name, value in result["machine"].items() if name != "processor")
    return "\n".join([*lines, f"| machine | {result['machine']['processor']} | | | {versions} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, choices=range(2, 50), default=8, metavar="N", help="2 to 49 (default: 8)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        with contextlib.redirect_stdout(sys.stderr):  # libraries may print
            found = PARTS[arguments.part](**arguments.options)
        print(json.dumps(found))
    else:
        with tempfile.TemporaryDirectory() as work:
            result = measure(arguments.heads, Path(work))
        print(json.dumps(result) if arguments.json else table(result))


if __name__ == "__main__":
    main()
