"""What the training loop costs beside a plain PyTorch loop over the same network, and whether its memory stays flat.

Every part runs in a fresh process with one thread, on images made here. Both loops train the same autoencoder from the
same weights on the same file of images, with torch's own DataLoader in the plain one; the ratio is that of processor
time, which other processes hardly move, of the median epoch. Memory: one epoch over files of 500 and of 5,000 images,
the peak above that after the imports. Needs no data, but Linux (/proc) with glibc; some 3 minutes on 2 idle cores.

    .venv/bin/python benchmarks/training.py [--json]
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from measured import machine, main, once  # type: ignore[import-not-found]

from anomed import backbones
from anomed.methods.autoencoder import Autoencoder, network

SIZE, INPUT, BATCH = 224, 64, 32  # side of the images, and of the network's input
EPOCHS, IMAGES = 7, 400  # of the comparison of time; the first epoch warms up
FLAT = (500, 5000)  # images, of the test of memory
WIDTHS = [16, 32, 32, 8]
LIMITED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def written(folder: str, count: int) -> np.ndarray:
    """A file of smooth noise, uint8 (count, 224, 224), memory-mapped as a prepared domain's; made block by block."""
    path, rng = Path(folder) / "images.npy", np.random.default_rng(0)
    images = np.lib.format.open_memmap(path, "w+", np.uint8, (count, SIZE, SIZE))
    for start in range(0, count, 100):
        block = images[start : start + 100]
        block[:] = rng.integers(0, 256, (len(block), 28, 28), np.uint8).repeat(SIZE // 28, 1).repeat(SIZE // 28, 2)
    images.flush()
    del images
    return np.asanyarray(np.load(path, mmap_mode="r"))


def epochs(clock: list[float]) -> float:
    """Seconds of the median epoch but the first."""
    return statistics.median(b - a for a, b in itertools.pairwise(clock[1:]))


def ours(selection: str = "fixed") -> dict[str, Any]:
    """The method as `anomed fit` trains it, with a checkpoint due at no time."""
    import monai.networks.nets  # noqa: F401, imports are not timed

    settings: dict[str, Any] = {"channels": WIDTHS, "image_size": INPUT, "batch_size": BATCH, "epochs": EPOCHS}
    detector = Autoencoder(Autoencoder.Params(**settings), 0)
    make, clock = detector._phase, [time.process_time()]

    def watched() -> Any:
        phase = make()
        rate = phase.rate

        def timed(epoch: int) -> float:
            if epoch == len(clock):  # the first batch of the next epoch
                clock.append(time.process_time())
            return rate(epoch)

        phase.rate = timed
        return phase

    detector.__dict__["_phase"] = watched
    with tempfile.TemporaryDirectory() as folder:
        detector.fit(written(folder, IMAGES))
    clock.append(time.process_time())
    assert detector.progress
    return {"epoch": epochs(clock), "loss": detector.progress.rows[-1]["reconstruction"]}


def plain() -> dict[str, Any]:
    """The loop of a tutorial: a Dataset over the file, a DataLoader, an optimiser."""
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, Dataset

    backbones.configure(1)
    torch.manual_seed(0)
    model = network(1, WIDTHS)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as folder:
        images = written(folder, IMAGES)

        class Images(Dataset[Any]):
            def __len__(self) -> int:
                return len(images)

            def __getitem__(self, index: int) -> Any:
                return torch.from_numpy(images[index].copy())

        loader, clock = DataLoader(Images(), BATCH, shuffle=True), [time.process_time()]
        for _ in range(EPOCHS):
            losses = []
            for batch in loader:
                values = batch[:, None].float() / 255
                values = F.interpolate(values, size=(INPUT, INPUT), mode="bilinear", antialias=True).clamp(0, 1)
                loss = F.mse_loss(model(values), values)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.item())
            clock.append(time.process_time())
    return {"epoch": epochs(clock), "loss": float(np.mean(losses))}


def flat(count: int) -> dict[str, Any]:
    """Memory of one epoch over so many images."""
    import monai.networks.nets  # noqa: F401

    settings: dict[str, Any] = {"channels": WIDTHS, "image_size": INPUT, "batch_size": BATCH, "epochs": 1}
    with tempfile.TemporaryDirectory() as folder:
        images = written(folder, count)
        detector = Autoencoder(Autoencoder.Params(**settings), 0)
        detector.fit(images[:BATCH])  # what the first step allocates for good
        return {"extra": once(lambda: detector.fit(images)).extra}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "ours": ours,
    "plain": plain,
    **{f"flat-{count}": partial(flat, count) for count in FLAT},
}


def measure() -> dict[str, Any]:
    """Every part in a process of its own, one after the other."""
    found = {}
    for name in PARTS:
        print(f"training.py: {name}", file=sys.stderr)
        environment = {**os.environ, **dict.fromkeys(LIMITED, "1")}
        run = subprocess.run(
            [sys.executable, __file__, "--part", name], env=environment, stdout=subprocess.PIPE, check=True
        )
        found[name] = json.loads(run.stdout)
    return {
        **found,
        "ratio": found["ours"]["epoch"] / found["plain"]["epoch"],
        "machine": machine(["torch", "monai"]),
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    facts = ", ".join(f"{key} {value}" for key, value in result["machine"].items() if key != "processor")
    rows = ["| measured | on | processor seconds | |", "|---|---|---:|---|"]
    for key, name in {"ours": "anomed: autoencoder", "plain": "plain PyTorch loop, same network"}.items():
        epoch, loss = result[key]["epoch"], result[key]["loss"]
        rows.append(f"| {name} | an epoch of {IMAGES} images | {epoch:.2f} | last loss {loss:.4f} |")
    for count in FLAT:
        extra = result[f"flat-{count}"]["extra"]
        rows.append(f"| anomed: autoencoder, peak memory | {count:,} images | | {extra:.0f} MB above the imports |")
    rows.append(f"| anomed beside the plain loop | | | {result['ratio']:.2f} of its time |")
    return "\n".join([*rows, f"| machine | {result['machine']['processor']} | | {facts} |"])


if __name__ == "__main__":
    main((__doc__ or "").splitlines()[0], PARTS, measure, table)
