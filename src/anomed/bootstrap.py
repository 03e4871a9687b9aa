"""Replicates of every metric over resampled subjects, from counts per group of images.

Images are counted once per group, a group being the normal or the abnormal images of one subject. A replicate, or a
part of the data, is a weight per group; its counts are a weighted sum, and `Counts` take many of them at once. Image
scores stay exact. Pixels are counted on some 6,144 bins of codes, cut at quantiles of all pixels, lesion pixels and
regions of the whole set, so that metrics of the binned counts agree with the exact ones to 1e-4. All numbers added
are multiples of one power of 2 and small enough for float64: sums are exact, whatever their order.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from anomed.mapcodes import TOP
from anomed.metrics.counts import Counts, NotComputable, of_images
from anomed.metrics.declare import Metric
from anomed.metrics.histogram import PixelHistogram

BINS = 6144  # aimed at; codes that hold more than a bin's share get one of their own
BLOCK = 2048  # bins that a product takes at a time
STEP = 2.0**20  # overlaps are rounded to 1 / STEP of a region

Weighted = Callable[[np.ndarray], Counts]  # weights (R, groups) to counts with the leading axis R


class ImageGroups:
    """Image scores by group. scores: float (N,). labels: 0 or 1, (N,). group: int (N,), each image's group.

    threshold: as of `counts.of_images`.
    """

    item = "image"

    def __init__(self, scores: np.ndarray, labels: np.ndarray, group: np.ndarray, threshold: float | None):
        self.order = np.argsort(scores, kind="stable")
        self.starts = np.flatnonzero(np.diff(scores[self.order], prepend=-np.inf))
        self.abnormal = labels[self.order].astype(bool)
        self.group = group[self.order]
        self.cut = of_images(scores, labels, threshold).cut

    def counts(self, weights: np.ndarray) -> Counts:
        """Counts (R, K) of weights, float64 (R, groups)."""
        drawn = weights[:, self.group]
        abnormal = np.add.reduceat(drawn * self.abnormal, self.starts, axis=1)
        return Counts(np.add.reduceat(drawn, self.starts, axis=1) - abnormal, abnormal, cut=self.cut, item=self.item)


class PixelGroups:
    """Binned pixel counts by group, some 75 KB each. whole: the exact histogram of all groups; threshold: the code
    from which on a pixel is called abnormal, or None; a bin begins there, so that what it decides stays exact."""

    item = "pixel"

    def __init__(self, whole: PixelHistogram, threshold: int | None, groups: int):
        self.starts = _starts(whole, threshold)
        self.cut = None if threshold is None else int(np.searchsorted(self.starts, threshold))
        self.merged = np.add.reduceat(whole.total > 0, self.starts, dtype=int) > 1
        self.rows = np.zeros((3, groups, len(self.starts)), np.float32)

    def add(self, group: int, histogram: PixelHistogram) -> None:
        """Put the images of one group in."""
        overlap = np.rint(np.add.reduceat(histogram.overlap, self.starts) * STEP) / STEP
        for row, codes in zip(self.rows, (histogram.total, histogram.lesion), strict=False):
            row[group] = np.add.reduceat(codes, self.starts)
        self.rows[2, group] = overlap

    def counts(self, weights: np.ndarray) -> Counts:
        """Counts (R, bins) of weights, float64 (R, groups)."""
        total, lesion, overlap = (self._weighted(weights, row) for row in self.rows)
        return Counts(total - lesion, lesion, overlap, cut=self.cut, item=self.item, merged=self.merged)

    def _weighted(self, weights: np.ndarray, row: np.ndarray) -> np.ndarray:
        sums = np.empty((len(weights), row.shape[1]))
        for start in range(0, row.shape[1], BLOCK):
            part = slice(start, start + BLOCK)
            sums[:, part] = weights @ row[:, part].astype(np.float64)
        return sums


def replicates(
    metrics: Iterable[Metric], counts: Weighted, weights: Iterable[np.ndarray], options: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Values of metrics for each row of the weights, float64 (R,) by name; NaN where there is none. A metric that has
    none for any weights is left out."""
    found: dict[str, list[np.ndarray]] = {metric.name: [] for metric in metrics}
    for part in weights:
        counted = counts(part)
        for metric in metrics:
            try:
                found[metric.name].append(metric.replicates(counted, options))
            except NotComputable:
                found.pop(metric.name, None)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _starts(whole: PixelHistogram, threshold: int | None) -> np.ndarray:
    """Codes at which bins begin, ascending from 0. Half of them part the lesion pixels, few as these are."""
    parts = [one / max(one.sum(), 1) for one in (whole.total, whole.lesion, whole.overlap)]
    mass = (parts[0] + 2 * parts[1] + parts[2]) * BINS / 4
    if np.count_nonzero(whole.total) <= BINS:
        begins = whole.total > 0
    else:
        level = np.floor(np.cumsum(mass) - mass)
        heavy = mass >= 1
        begins = np.diff(level, prepend=-1) > 0
        begins |= heavy | np.append(False, heavy[:-1])
    begins[0] = True
    if threshold is not None and threshold <= TOP:
        begins[threshold] = True
    return np.flatnonzero(begins)
