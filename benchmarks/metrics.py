"""How fast the pixel metrics are and how much memory they take, beside the libraries and loops they stand in for.

Every part runs in a fresh process: ours with one thread a library, as in the pipeline, the peers with what their
libraries take; the peers get maps of the same order and ties as float32. Needs no data, but Linux (/proc) with glibc,
8 GB of memory and 0.4 GB in the temporary folder; some 2 minutes on 2 idle cores.

    .venv/bin/python benchmarks/metrics.py [--json]
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from measured import Run, machine, main, memory, once  # type: ignore[import-not-found]
from scenes import Scenes  # type: ignore[import-not-found]

from anomed import bootstrap, stats
from anomed.bootstrap import PixelGroups
from anomed.counting import merge
from anomed.mapcodes import TOP
from anomed.metrics.declare import metrics
from anomed.metrics.histogram import PixelHistogram
from anomed.metrics.ranking import pixel_ap, pixel_aupro, pixel_auroc

SIDE = 256
REPEATS = {300: {"ours": 9, "libraries": 2}, 1500: {"ours": 5, "libraries": 1}}  # by number of maps
BATCH = 8  # maps that one update takes
LOOP, STEPS, LIMIT = (30, 60), 200, 0.3  # maps, thresholds and largest false positive rate of the threshold loop
AGREE = {"libraries": 1e-4, "cuda": 1e-6}
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # 1 for ours, as in anomed.cli
RESC = (1805, 764, 224, 512, 1024)  # images, abnormal ones, side of a map, native height and width
BRAIN = (3715, 3075, 224, 240, 240)
PATIENTS = (162, 615)  # of BRAIN, normal and abnormal
CUT = 30_000  # code from which on Dice calls a pixel abnormal
COPIED = 1 << 28  # bytes that a copy moves to measure the bandwidth of a GPU


def fastest(functions: Mapping[str, Callable[[], Any]], repeats: Mapping[str, int]) -> list[Run]:
    """The fastest call of each function, called as often as asked, in turns."""
    runs: dict[str, list[Run]] = {name: [] for name in functions}
    for turn in range(max(repeats.values())):
        for name, function in functions.items():
            if turn < repeats[name]:
                runs[name].append(once(function))
    return [min(own, key=lambda run: run.seconds) for own in runs.values()]


def row(measured: str, on: str, run: Run | None, result: str, seconds: float | None = None) -> dict[str, Any]:
    """A line of the table."""
    cores = run.processor / run.seconds if run else None
    return {
        "measured": measured,
        "on": on,
        "seconds": run.seconds if run else seconds,
        "cores": cores,
        "result": result,
    }


def ours(codes: np.ndarray, masks: np.ndarray) -> dict[str, float]:
    """The global pass: all three metrics of maps, regions found as well."""
    histogram = PixelHistogram()
    for start in range(0, len(codes), BATCH):
        histogram.update(codes[start : start + BATCH], masks[start : start + BATCH])
    return values(histogram)


def values(histogram: PixelHistogram) -> dict[str, float]:
    counts = histogram.counts()
    return {"AUROC": pixel_auroc(counts), "AP": pixel_ap(counts), "AUPRO": pixel_aupro(counts)}


def libraries(scores: Any, truth: Any) -> dict[str, float]:
    """AUROC of torchmetrics and AUPRO of anomalib as they come, in one update each: no batches to join afterwards."""
    from anomalib.metrics.aupro import _AUPRO
    from torchmetrics.classification import BinaryAUROC

    found = {}
    for name, metric in (("AUROC", BinaryAUROC(thresholds=None)), ("AUPRO", _AUPRO(fpr_limit=LIMIT))):
        metric.update(scores, truth)
        found[name] = float(metric.compute())
        metric.reset()
    return found


def threshold_loop(maps: np.ndarray, masks: np.ndarray) -> float:
    """AUPRO as BMAD's loop computes it: 200 equal steps of the score, at each of which all maps are binarised and the
    regions of all masks found anew; points of a rate below the limit, rescaled by the largest of them.

    maps: floats, N x H x W. masks: bool of that shape.
    """
    from skimage.measure import label, regionprops

    low, high = float(maps.min()), float(maps.max())
    rates, means = [], []
    for threshold in low + (high - low) * np.arange(STEPS) / STEPS:
        called, overlaps = maps > threshold, []
        for binary, mask in zip(called, masks, strict=True):
            for region in regionprops(label(mask)):
                overlaps.append(binary[region.coords[:, 0], region.coords[:, 1]].sum() / region.area)
        normal = ~masks
        rates.append((called & normal).sum() / normal.sum())
        means.append(np.mean(overlaps))
    rate, mean = np.array(rates)[::-1], np.array(means)[::-1]
    kept = rate < LIMIT
    return float(np.trapezoid(mean[kept], rate[kept] / rate[kept][-1]))


def peers() -> dict[str, Any]:
    """Speed against the libraries, and against the threshold loop on fewer maps."""
    import torch

    codes, masks = Scenes(max(REPEATS), max(REPEATS) // 2, SIDE, SIDE, SIDE).loaded()
    libraries(torch.rand(2, 8, 8), torch.eye(8, dtype=torch.int32).expand(2, 8, 8))  # imports are not timed
    rows, ratios = [], []
    for count in LOOP:
        loop = once(partial(threshold_loop, codes[:count] / np.float32(TOP), masks[:count]))
        rows.append(row("BMAD's loop: AUPRO", f"{count} maps", loop, f"AUPRO {loop.value:.4f}"))
    for count, repeats in REPEATS.items():
        scores, truth = torch.from_numpy(codes[:count] / np.float32(TOP)), torch.from_numpy(masks[:count].astype("i4"))
        calls = {"ours": partial(ours, codes[:count], masks[:count]), "libraries": partial(libraries, scores, truth)}
        own, theirs = fastest(calls, repeats)
        gaps = {name: abs(value - own.value[name]) for name, value in theirs.value.items()}
        if max(gaps.values()) > AGREE["libraries"]:
            sys.exit(f"metrics.py: the libraries differ from ours by {gaps}, expected at most {AGREE['libraries']}")
        looped = loop.seconds * count / LOOP[-1]
        ratios.append((theirs.seconds / own.seconds, looped / own.seconds))
        found = ", ".join(f"{name} {value:.5f}" for name, value in own.value.items())
        rows.append(row("anomed: AUROC, AP, AUPRO", f"{count} maps", own, found))
        found = f"{ratios[-1][0]:.0f} times ours; values within {max(gaps.values()):.0e}; {theirs.extra:,.0f} MB more"
        rows.append(row("torchmetrics AUROC, anomalib AUPRO", f"{count} maps", theirs, found))
        found = f"{ratios[-1][1]:.0f} times ours; that of {LOOP[-1]} maps, scaled by their number"
        rows.append(row("BMAD's loop: AUPRO", f"{count} maps", None, found, looped))
    names = ("speedup_vs_libraries", "speedup_vs_threshold_loop")
    return {"rows": rows, **dict(zip(names, map(min, zip(*ratios, strict=True)), strict=True))}


def alone(count: int) -> dict[str, Any]:
    """Memory of the global pass beside the inputs, where no library has been at work before."""
    run = once(partial(ours, *Scenes(count, count // 2, SIDE, SIDE, SIDE).loaded()))
    rows = [row("anomed, in a process of its own", f"{count} maps", run, f"{run.extra:,.0f} MB more than the maps")]
    return {"rows": rows, "extra_memory_mb": run.extra}


def resc() -> dict[str, Any]:
    """As many pixels as in the test set of RESC, upsampled, from codes in a file; memory of the whole process."""
    scenes = Scenes(*RESC)
    with scenes.counters("cpu") as [counter]:
        run = once(lambda: values(counter.count(scenes.table())["pixel"]))
        peak, mapped = memory("VmHWM"), memory("RssFile")
    speed = pixels(RESC) / run.seconds
    found = f"{speed / 1e6:.0f} million pixels/s; {resident(peak, mapped)}"
    rows = [row("size of RESC's test set: AUROC, AP, AUPRO", grids(RESC), run, found)]
    return {"rows": rows, "resc_peak_memory_mb": peak, "resc_pixels_per_second": speed}


def pixels(scenes: tuple[int, ...]) -> int:
    return scenes[0] * scenes[3] * scenes[4]


def grids(scenes: tuple[int, ...]) -> str:
    count, _, grid, height, width = scenes
    return f"{count:,} maps, {grid} × {grid} to {height} × {width}"


def resident(peak: float, mapped: float) -> str:
    return f"{peak:.0f} MB resident, of which {mapped:.0f} MB are mapped files"


def brain() -> dict[str, Any]:
    """Images and subjects of BMAD's brain test set: exact metrics, then 1,000 replicates of all pixel metrics, in the
    steps of anomed.evaluation."""
    scenes, found = Scenes(*BRAIN), metrics("pixel")
    table, clusters = scenes.table(), sum(PATIENTS)
    rank, sizes = table.groupby("label").cumcount(), np.bincount(scenes.labels)
    table["cluster"] = PATIENTS[0] * table.label + rank * np.take(PATIENTS, table.label) // sizes[table.label]
    with scenes.counters("cpu") as [counter]:

        def exact() -> PixelHistogram:
            whole = counter.empty()
            for _, rows in table.groupby("label"):
                merge(whole, counter.count(rows))
            counts = whole["pixel"].counts(CUT)
            assert all(metric.evaluate(counts, {})[1] is None for metric in found)
            return whole["pixel"]

        def binned(whole: PixelHistogram) -> PixelGroups:
            groups = PixelGroups(whole, CUT, clusters)
            for cluster, rows in table.groupby("cluster"):
                groups.add(int(cluster), counter.count(rows)["pixel"])
            return groups

        first = once(exact)
        second = once(partial(binned, first.value))
        third = once(lambda: bootstrap.replicates(found, second.value.counts, stats.draws(clusters, 1000), {}))
        total = resident(memory("VmHWM"), memory("RssFile"))
    ratio = (second.seconds + third.seconds) / first.seconds
    both = f"with the second pass {ratio:.1f} times the exact metrics; {total}"
    rows = [
        row(f"size of BMAD's brain test set: {len(found)} pixel metrics", grids(BRAIN), first, ""),
        row("second pass: counts per subject", grids(BRAIN), second, f"{second.extra:.0f} MB more"),
        row("1,000 replicates of all", f"{clusters} subjects", third, both),
    ]
    return {"rows": rows, "bootstrap_ratio": ratio}


def cuda() -> dict[str, Any]:
    """The set of `resc` on the GPU, and the share of its bandwidth that this takes, measured by copying.

    Assumed traffic: every kernel reads its arguments from memory and writes its result there, 4 bytes each. Bytes a
    pixel of the native grid: two neighbours taken 16, difference 12, product 8, sum 12, coding 8, counting 12 (the
    extremes are read before). The pass along the width, on as many rows as a map has, takes the first five.
    """
    import torch

    if not torch.cuda.is_available():
        return {"rows": [row("the same on a GPU", grids(RESC), None, "no CUDA device")]}
    scenes = Scenes(*RESC)
    table = scenes.table()
    with scenes.counters("cpu", "cuda") as [on_cpu, on_gpu]:
        on_gpu.count(table[:8])  # starts CUDA
        calls = {
            "cpu": lambda: values(on_cpu.count(table)["pixel"]),
            "gpu": lambda: values(on_gpu.count(table)["pixel"]),
        }
        cpu, gpu = fastest(calls, {"cpu": 1, "gpu": 3})
    gap = max(abs(gpu.value[name] - value) for name, value in cpu.value.items())
    if gap > AGREE["cuda"]:
        sys.exit(f"metrics.py: CUDA differs from the CPU by {gap}, expected at most {AGREE['cuda']}")
    source = torch.ones(COPIED, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(20):
            target.copy_(source)
        torch.cuda.synchronize()

    bandwidth = 20 * 2 * COPIED / fastest({"": copy}, {"": 3})[0].seconds
    speed = pixels(RESC) / gpu.seconds
    share = speed * (68 + 48 * RESC[2] / RESC[3]) / bandwidth
    found = f"{speed / 1e6:.0f} million pixels/s, values within {gap:.0e}; {share:.1%} of {bandwidth / 1e9:.0f} GB/s"
    rows = [row(f"the same on {torch.cuda.get_device_name()}", grids(RESC), gpu, found)]
    return {"rows": rows, "cuda_pixels_per_second": speed, "cuda_bandwidth_share": share}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "peers": peers,
    **{f"alone-{count}": partial(alone, count) for count in REPEATS},
    "resc": resc,
    "cuda": cuda,
    "brain": brain,
}


def measure() -> dict[str, Any]:
    """Every part in a process of its own; of figures that two parts give, the larger."""
    packages = ("numpy", "torch", "torchmetrics", "anomalib", "scikit-image")
    result: dict[str, Any] = {"rows": [], "machine": machine(packages)}
    for name in PARTS:
        print(f"metrics.py: {name}", file=sys.stderr)
        limits = dict.fromkeys(THREADS, "1") if name != "peers" else {}
        environment = {key: value for key, value in os.environ.items() if key not in THREADS} | limits
        answer = subprocess.run([sys.executable, __file__, "--part", name], stdout=subprocess.PIPE, env=environment)
        if answer.returncode:
            sys.exit(f"metrics.py: the part {name} failed")
        found = json.loads(answer.stdout)
        result["rows"] += found.pop("rows")
        result |= {key: max(value, result.get(key, value)) for key, value in found.items()}
    return result


def table(result: dict[str, Any]) -> str:
    """One table in Markdown; its last row names the machine."""
    lines = ["| measured | on | seconds | cores used | |", "|---|---|---:|---:|---|"]
    for one in result["rows"]:
        seconds, cores = ("" if one[key] is None else f"{one[key]:.{n}f}" for key, n in (("seconds", 3), ("cores", 1)))
        lines.append(f"| {one['measured']} | {one['on']} | {seconds} | {cores} | {one['result']} |")
    machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items() if name != "processor")
    return "\n".join([*lines, f"| machine | {result['machine']['processor']} | | | {machine} |"])


if __name__ == "__main__":
    main(__doc__.splitlines()[0], PARTS, measure, table)
