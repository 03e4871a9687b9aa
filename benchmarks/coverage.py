"""Do the 95 % intervals hold the true value in 95 % of test sets? By simulation, resampling subjects or images.

Every set has new subjects, with 1 to 8 images (1 to 4 with maps): a third has normal images only, a third abnormal ones
only, a third both. Two images of one subject are alike; how much is the correlation of their scores. Truth is that of
infinitely many subjects, where two images of different subjects meet. Needs no data; some 4 minutes on 2 idle cores.

    .venv/bin/python benchmarks/coverage.py [--json] [--quick]
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

# As in anomed.cli; sets run side by side on all cores.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np

from anomed import bootstrap, stats
from anomed.bootstrap import ImageGroups, PixelGroups
from anomed.metrics.declare import METRICS
from anomed.metrics.histogram import PixelHistogram
from anomed.metrics.ranking import image_auroc, pixel_ap, pixel_aupro, pixel_auroc

REPLICATES = 500
SIDE, LEVELS = 24, 1024  # of simulated maps; few levels keep the bins few
LARGE = (50, 1000)  # sets and subjects of each that together give the truth of pixel metrics
IMAGE = [METRICS[image_auroc.__name__]]
PIXEL = [METRICS[function.__name__] for function in (pixel_auroc, pixel_ap, pixel_aupro)]
DIFFERENCE = "difference of two image_auroc"


class Design(NamedTuple):
    """What is simulated, how many times. auroc: true image AUROC, None: maps and pixel metrics instead. correlation: of
    the scores of two images of a subject."""

    sets: int
    subjects: int
    auroc: float | None = None
    correlation: float = 0.5


QUICK = [Design(200, 80, 0.8)]
FULL = [
    *(Design(1000, subjects, 0.8) for subjects in (40, 80, 200)),
    *(Design(500, subjects) for subjects in (80, 200)),
    Design(500, 80, 0.8, correlation=0),
    Design(500, 20, 0.8),  # the limits: few subjects, few with lesions, a value near 1
    Design(500, 40),
    *(Design(500, subjects, 0.97) for subjects in (40, 200)),
    *(Design(500, subjects, 0.95) for subjects in (8, 12)),
]


class Set(NamedTuple):
    """A test set: whose each image is, int (N,), and its label (N,); scores of two systems (2, N) and no masks, or
    codes and masks (N, H, W)."""

    owner: np.ndarray
    labels: np.ndarray
    scores: np.ndarray
    masks: np.ndarray


def images_of(rng: np.random.Generator, subjects: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Owner and label of each image."""
    owner = np.repeat(np.arange(subjects), rng.integers(1, most + 1, subjects))
    kind = rng.permutation(np.arange(subjects) % 3)[owner]
    return owner, np.where(kind == 2, rng.random(len(owner)) < 0.5, kind).astype(int)


def scored(rng: np.random.Generator, design: Design) -> Set:
    """Scores of two systems of equal AUROC: effect of the subject, half of it shared by the two, noise and a shift of
    abnormal images. Each has variance 1 whatever the correlation, so that of two images of different subjects the
    abnormal one scores higher with the chance Phi(shift / sqrt(2)), the true AUROC; the sizes of subjects have no part
    in it. Pairs within a subject have another chance, but their share falls as 1 / subjects."""
    from scipy.stats import norm

    owner, labels = images_of(rng, design.subjects, 8)
    shared, own = rng.standard_normal((1, design.subjects)), rng.standard_normal((2, design.subjects))
    effect = np.sqrt(design.correlation / 2) * (shared + own)
    noise = np.sqrt(1 - design.correlation) * rng.standard_normal((2, len(owner)))
    shift = np.sqrt(2) * norm.ppf(design.auroc)
    return Set(owner, labels, effect[:, owner] + noise + shift * labels, np.zeros(0))


def mapped(rng: np.random.Generator, subjects: int) -> Set:
    """Maps of 24 x 24: level and contrast of the lesions vary between subjects, level between images, and smooth noise.
    Abnormal images have one or two discs."""
    from scipy.ndimage import gaussian_filter

    owner, labels = images_of(rng, subjects, 4)
    level, contrast = rng.standard_normal((2, subjects))
    y, x = np.mgrid[:SIDE, :SIDE]
    top, left = rng.uniform(3, SIDE - 3, (2, 2, len(owner), 1, 1))
    radius = rng.uniform(1.5, 4, (2, len(owner), 1, 1))
    radius[1] *= rng.random((len(owner), 1, 1)) < 0.5
    masks = ((np.hypot(y - top, x - left) < radius).any(axis=0)) & (labels[:, None, None] == 1)
    noise = gaussian_filter(rng.standard_normal(masks.shape), (0, 1, 1))
    image = 0.6 * level[owner] + 0.4 * rng.standard_normal(len(owner))
    scores = image[:, None, None] + 2.5 * noise + (1.4 + 0.5 * contrast[owner])[:, None, None] * masks
    return Set(owner, labels, np.clip((scores + 6) * LEVELS / 12, 0, LEVELS - 1).astype(np.uint16), masks)


def counted(codes: np.ndarray, masks: np.ndarray) -> PixelHistogram:
    found = PixelHistogram()
    found.update(codes, masks)
    return found


def replicates(made: Set, owner: np.ndarray, system: int = 0) -> tuple[dict[str, np.ndarray], int]:
    """Value and replicates of every metric, by groups and owners as in anomed.evaluation, and how many were resampled.
    owner: that of the set, or another number for every image."""
    keys, group = np.unique(2 * owner + made.labels, return_inverse=True)
    units, holder = np.unique(keys // 2, return_inverse=True)
    weights = chain([np.ones((1, len(keys)))], (drawn[:, holder] for drawn in stats.draws(len(units), REPLICATES)))
    if not made.masks.size:
        images = ImageGroups(made.scores[system], made.labels, group, None)
        return bootstrap.replicates(IMAGE, images.counts, weights, {}), len(units)
    pixels = PixelGroups(counted(made.scores, made.masks), None, len(keys))
    for key in range(len(keys)):
        pixels.add(key, counted(made.scores[group == key], made.masks[group == key]))
    return bootstrap.replicates(PIXEL, pixels.counts, weights, {}), len(units)


def intervals(design: Design, number: int) -> dict[str, list[stats.Interval]]:
    """Of one simulated set, by metric: over subjects, and as if every image were a subject of its own."""
    rng = np.random.default_rng([number, design.subjects])
    made = mapped(rng, design.subjects) if design.auroc is None else scored(rng, design)
    found: dict[str, list[stats.Interval]] = {}
    for owner in (made.owner, np.arange(len(made.owner))):
        drawn, units = replicates(made, owner)
        for name, values in drawn.items():
            found.setdefault(name, []).append(stats.interval(values[1:], units, values[0]))
        if design.auroc is not None:
            other = replicates(made, owner, 1)[0]
            difference = stats.difference(drawn["image_auroc"][1:], other["image_auroc"][1:], units).interval
            found.setdefault(DIFFERENCE, []).append(difference)
    return found


def truths(design: Design) -> dict[str, float]:
    """The true values of the metrics."""
    return very_many() if design.auroc is None else {"image_auroc": design.auroc, DIFFERENCE: 0.0}


@cache
def very_many() -> dict[str, float]:
    """Pixel metrics of very many subjects."""
    whole = PixelHistogram()
    for number in range(LARGE[0]):
        whole.merge(counted(*mapped(np.random.default_rng([number, 0]), LARGE[1])[2:]))
    return {metric.name: metric.function(whole) for metric in PIXEL}


def measure(designs: Iterable[Design]) -> list[dict[str, Any]]:
    """A row for each design and metric. coverage: share of the sets whose interval holds the truth; error: its standard
    error; width: mean; none: sets without an interval, left out."""
    rows = []
    with ProcessPoolExecutor() as pool:
        for design in designs:
            sets = list(pool.map(partial(intervals, design), range(design.sets), chunksize=10))
            for name, truth in truths(design).items():
                row: dict[str, Any] = {"metric": name, "truth": truth, **design._asdict()}
                for place, unit in enumerate(("subject", "image")):
                    ends = np.array([one[name][place][:2] for one in sets], float)
                    ends = ends[np.isfinite(ends).all(axis=1)]
                    held = float(np.mean((ends[:, 0] <= truth) & (truth <= ends[:, 1])))
                    error = float(np.sqrt(held * (1 - held) / len(ends)))
                    width, none = float(np.diff(ends).mean()), len(sets) - len(ends)
                    row[unit] = {"coverage": held, "error": error, "width": width, "none": none}
                rows.append(row)
            print(f"coverage.py: {design}", file=sys.stderr)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """One table in Markdown; coverage in %, with its standard error."""
    head = ("metric", "truth", "subjects", "correlation", "sets", "subjects drawn", "width", "images drawn", "width")
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    for row in rows:
        correlation = "" if row["auroc"] is None else f"{row['correlation']:g}"
        cells = [row["metric"], f"{row['truth']:.3f}", f"{row['subjects']}", correlation, f"{row['sets']}"]
        for found in (row["subject"], row["image"]):
            cells += [f"{100 * found['coverage']:.1f} ± {100 * found['error']:.1f}", f"{found['width']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--quick", action="store_true", help="200 sets of one design")
    arguments = parser.parse_args()
    rows = measure(QUICK if arguments.quick else FULL)
    print(json.dumps({"replicates": REPLICATES, "rows": rows}) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
