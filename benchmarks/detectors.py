"""How fast PatchCore is and how much memory it takes, beside anomalib's, and whether its memory stays flat.

Every part runs in a fresh process with one thread. Both detectors get the same images, made here, the same weights
(EfficientNet-Lite0, which a package carries), layers, batches and size of the bank. The ratio of times is that of
processor time, which other processes hardly move. Needs no data, but Linux (/proc) with glibc and 3 GB of memory; some
9 minutes on 2 idle cores.

    .venv/bin/python benchmarks/detectors.py [--json]
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from measured import Run, machine, main, once  # type: ignore[import-not-found]

from anomed import backbones
from anomed.methods.patchcore import PatchCore, image_score, k_center_greedy, nearest

BACKBONE, LAYERS = "tf_efficientnet_lite0", ["blocks.2", "blocks.4"]
TRAIN, TEST, SIZE = 200, 120, 224  # images; half of the test images are abnormal
RATIO, BATCH = 0.01, 4
BANK = TRAIN * 28 * 28 // 100
SEEDS = 3
SMALL_MB = 13  # too little for all points of these images: the bank is then chosen in two rounds
GRAIN = (30.0, 80.0)  # grey levels: least and greatest standard deviation of the grain of an anomaly
LIMITED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
FLAT, FLAT_MB, FLAT_BANK = (1000, 10_000), 200, 300  # images, max_memory_mb and entries of the test of memory


def pictures(count: int, seed: int, abnormal: int = 0) -> np.ndarray:
    """Discs with folds and vessels of any size, place and brightness, with noise; the last `abnormal` of them have a
    small grainy patch. uint8 (count, 224, 224)."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:SIZE, :SIZE] / SIZE - 0.5
    out = np.empty((count, SIZE, SIZE))
    for i in range(count):
        angle, phase, other = rng.uniform(0, 2 * np.pi, 3)
        along, across = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
        disc = np.hypot(x - rng.uniform(-0.05, 0.05), y - rng.uniform(-0.05, 0.05)) < rng.uniform(0.3, 0.45)
        folds = np.sin(rng.uniform(30, 60) * along + 2 * np.sin(rng.uniform(8, 14) * across + other) + phase)
        vessels = sum(np.exp(-(((across - rng.uniform(-0.3, 0.3)) / 0.006) ** 2)) for _ in range(3))
        out[i] = disc * (rng.uniform(80, 140) + 25 * folds + 40 * vessels) + rng.normal(10, 3, x.shape)
        if i >= count - abnormal:
            far, turn = rng.uniform(0.05, 0.2), rng.uniform(0, 2 * np.pi)
            distance = np.hypot(x - far * np.cos(turn), y - far * np.sin(turn)) / rng.uniform(0.03, 0.08)
            grain = rng.normal(0, rng.uniform(*GRAIN), (SIZE // 4, SIZE // 4)).repeat(4, axis=0).repeat(4, axis=1)
            out[i] += grain * np.exp(-(distance**4))
    return np.clip(out, 0, 255).astype(np.uint8)


def auroc(scores: Sequence[float]) -> float:
    """Of image scores whose second half is that of the abnormal images; ties count half."""
    normal, abnormal = np.split(np.array(scores), 2)
    gaps = abnormal[:, None] - normal
    return float((gaps > 0).mean() + (gaps == 0).mean() / 2)


def figures(name: str, run: Run, scores: Sequence[float]) -> dict[str, Any]:
    """What a detector answers, and its line of the table."""
    text = f"{run.extra:,.0f} MB above the imports; image AUROC {auroc(scores):.4f}"
    rows = [row(name, f"{TRAIN} + {TEST} images", run, text)]
    return {"rows": rows, "processor": run.processor, "extra": run.extra, "auroc": auroc(scores)}


def native(seed: int, max_memory_mb: int = 2000) -> PatchCore:
    """Our detector with the settings of both."""
    settings: dict[str, Any] = {"coreset_ratio": RATIO, "batch_size": BATCH, "max_memory_mb": max_memory_mb}
    return PatchCore(PatchCore.Params(backbone=BACKBONE, layers=LAYERS, **settings), seed)


def ours() -> dict[str, Any]:
    """Fit and predict as the pipeline does."""
    import timm  # noqa: F401, imports are neither timed nor counted

    train, test = pictures(TRAIN, 1), pictures(TEST, 2, TEST // 2)
    detector = native(seed=0)

    def work() -> list[float]:
        detector.fit(train)
        return [float(score) for scores, _ in detector.score(test) for score in scores]

    run = once(work)
    assert len(detector.bank) == BANK
    return figures("anomed: PatchCore", run, run.value)


def anomalib() -> dict[str, Any]:
    """anomalib's model and its subsampling, called as its Lightning module does; no trainer, no post-processor."""
    import torch
    from anomalib.models.image.patchcore.torch_model import PatchcoreModel

    train, test = pictures(TRAIN, 1), pictures(TEST, 2, TEST // 2)
    backbones.configure(threads=1)
    torch.use_deterministic_algorithms(False)  # as anomalib runs by default
    torch.manual_seed(0)

    def work() -> list[float]:
        same = backbones.load(BACKBONE)
        model = PatchcoreModel(LAYERS, BACKBONE, pre_trained=False)
        network: Any = model.feature_extractor.feature_extractor
        assert not network.load_state_dict(same.network.state_dict(), strict=False).missing_keys

        def batches(images: np.ndarray) -> Any:
            for start in range(0, len(images), BATCH):
                pixels = torch.from_numpy(images[start : start + BATCH, None].repeat(3, axis=1)).float()
                yield (pixels - same.mean) / same.std

        model.train()
        for batch in batches(train):
            model(batch)
        model.subsample_embedding(RATIO)
        model.eval()
        assert len(model.memory_bank) == BANK
        with torch.inference_mode():
            answers = [model(batch) for batch in batches(test)]
        return [float(score) for answer in answers for score in answer.pred_score.reshape(-1)]

    run = once(work)
    return figures("anomalib: PatchCore", run, run.value)


def seeds() -> dict[str, Any]:
    """Image AUROC of banks that several seeds give: chosen at once, in two rounds, and on anomalib's projection.

    The network runs once. The greedy choice and the scores are computed by our code throughout, in a tenth of the time;
    that anomalib's scores are the same for one bank is tested (tests/reference/test_anomalib_parity.py).
    """
    import torch
    from anomalib.models.components.dimensionality_reduction import SparseRandomProjection

    detector = native(seed=0)
    train, test = (
        torch.cat([detector._batch(images, batch) for batch in range(len(images) // BATCH)])
        for images in (pictures(TRAIN, 1), pictures(TEST, 2, TEST // 2))
    )

    def at_once(seed: int, max_memory_mb: int = 2000) -> Any:
        chosen = native(seed, max_memory_mb)
        size = BATCH * len(train) // TRAIN
        chosen.__dict__["_batch"] = lambda images, batch: train[batch * size : (batch + 1) * size]
        chosen.fit(np.zeros((TRAIN, SIZE, SIZE), np.uint8))  # none of their pixels is looked at
        return chosen.bank

    def sparse(seed: int) -> Any:
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002, anomalib draws from the global states of both
        projection = SparseRandomProjection(eps=0.9)
        projection.fit(train)
        return train[k_center_greedy(projection.transform(train), BANK, int(torch.randint(len(train), (1,))))]

    def score(patches: Any, bank: Any) -> float:
        return image_score(patches, *nearest(patches, bank), bank, neighbours=9)

    ways: dict[str, Callable[[int], Any]] = {
        "at once": at_once,
        "two rounds": partial(at_once, max_memory_mb=SMALL_MB),
        "anomalib's projection": sparse,
    }
    rows, found = [], {}
    for way, choose in ways.items():
        banks = [choose(seed) for seed in range(SEEDS)]
        values = [auroc([score(patches, bank) for patches in test.reshape(TEST, -1, test.shape[1])]) for bank in banks]
        found[way] = float(np.mean(values))
        text = f"image AUROC {found[way]:.4f}, standard deviation {np.std(values, ddof=1):.4f}"
        rows.append(row(f"bank chosen: {way}", f"{SEEDS} seeds", None, text))
    return {"rows": rows, "auroc": found}


class Stand:
    """A backbone that costs next to nothing: random filters of tiny images, maps of the shapes of Lite0's."""

    def features(self, images: np.ndarray, layers: Sequence[str], batch_size: int) -> list[Any]:
        import torch
        import torch.nn.functional as F

        generator = torch.Generator().manual_seed(0)
        pixels = torch.from_numpy(images.astype(np.float32) / 64)[:, None]
        return [
            F.conv2d(pixels, torch.randn(channels, 1, 5, 5, generator=generator), stride=stride, padding=2).tanh()
            for channels, stride in ((40, 1), (112, 2))
        ]


def flat(count: int) -> dict[str, Any]:
    """Memory of fit on so many images, whose features are synthetic."""
    import timm  # noqa: F401

    images = np.random.default_rng(0).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    settings: dict[str, Any] = {"coreset_max": FLAT_BANK, "max_memory_mb": FLAT_MB}
    detector = PatchCore(PatchCore.Params(**settings), seed=0)
    backbones.configure(threads=1)
    detector.__dict__["_backbone"] = Stand()
    run = once(lambda: detector.fit(images))
    assert len(detector.bank) == FLAT_BANK
    text = f"{run.extra:,.0f} MB above the imports; a bank of {FLAT_BANK:,}, max_memory_mb: {FLAT_MB}"
    rows = [row("anomed: PatchCore, fit alone, synthetic features", f"{count:,} images", run, text)]
    return {"rows": rows, f"peak_mb_{count}": run.extra}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "ours": ours,
    "anomalib": anomalib,
    "seeds": seeds,
    **{f"flat-{count}": partial(flat, count) for count in FLAT},
}


def row(measured: str, on: str, run: Run | None, result: str) -> dict[str, Any]:
    """A line of the table."""
    timed = {"seconds": run.seconds, "processor": run.processor} if run else {"seconds": None, "processor": None}
    return {"measured": measured, "on": on, **timed, "result": result}


def measure() -> dict[str, Any]:
    """Every part in a process of its own; those whose time is compared alone, the others two at a time."""

    def answer(name: str) -> dict[str, Any]:
        print(f"detectors.py: {name}", file=sys.stderr)
        command = [sys.executable, __file__, "--part", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ | dict.fromkeys(LIMITED, "1"))
        if done.returncode:
            sys.exit(f"detectors.py: the part {name} failed")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    timed = [answer(name) for name in ("ours", "anomalib")]
    with ThreadPoolExecutor(2) as pool:
        return summary(dict(zip(PARTS, [*timed, *pool.map(answer, list(PARTS)[2:])], strict=True)))


def summary(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures of all parts, and what follows from them."""
    own, peer = found["ours"], found["anomalib"]
    ratios = {"time_ratio": own["processor"] / peer["processor"], "memory_ratio": own["extra"] / peer["extra"]}
    text = f"{ratios['time_ratio']:.2f} of anomalib's time, {ratios['memory_ratio']:.2f} of its memory"
    rows = [line for part in found.values() for line in part["rows"]]
    return {
        "rows": [*rows, row("anomed beside anomalib", "", None, text)],
        **ratios,
        "image_auroc": own["auroc"],
        "anomalib_image_auroc": peer["auroc"],
        "mean_image_auroc": found["seeds"]["auroc"],
        **{f"peak_mb_{count}": found[f"flat-{count}"][f"peak_mb_{count}"] for count in FLAT},
        "machine": machine(("torch", "timm", "anomalib")),
    }


def table(result: dict[str, Any]) -> str:
    """One table in Markdown; its last row names the machine."""
    lines = ["| measured | on | seconds | processor seconds | |", "|---|---|---:|---:|---|"]
    for one in result["rows"]:
        seconds, processor = ("" if one[key] is None else f"{one[key]:.1f}" for key in ("seconds", "processor"))
        lines.append(f"| {one['measured']} | {one['on']} | {seconds} | {processor} | {one['result']} |")
    machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items() if name != "processor")
    return "\n".join([*lines, f"| machine | {result['machine']['processor']} | | | {machine} |"])


if __name__ == "__main__":
    main(__doc__.splitlines()[0], PARTS, measure, table)
