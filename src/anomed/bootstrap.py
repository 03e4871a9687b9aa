"""Replicates of every metric over resampled subjects, from counts per group of images.

Images are counted once per group, a group being the normal or the abnormal images of one subject. A replicate, or a
part of the data, is a weight per group; its counts are a weighted sum, and `Counts` take many of them at once. Image
scores stay exact. Pixels are counted on some 6,144 bins of codes, cut at quantiles of the whole set
(`histogram.bins`), so that its metrics agree with the exact ones to about 1e-4; lesions of few codes lose nothing, and
each run records by how much they differ. All numbers added are multiples of one power of 2 and small enough for
float64: sums are exact, whatever their order.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from anomed.metrics.counts import Counts, of_images
from anomed.metrics.declare import Metric
from anomed.metrics.histogram import PixelHistogram, bins

BINS = 6144  # aimed at
BLOCK = 2048  # bins that a product takes at a time
STEP = 2.0**20  # overlaps are rounded to 1 / STEP of a region

Weighted = Callable[[np.ndarray], Counts]  # weights (R, groups) to counts with the leading axis R


class ImageGroups:
    """Image scores by group. scores: float (N,). labels: 0 or 1, (N,). group: int (N,), each image's group.

    threshold: as of `counts.of_images`.
    """

    def __init__(self, scores: np.ndarray, labels: np.ndarray, group: np.ndarray, threshold: float | None):
        self.order = np.argsort(scores, kind="stable")
        self.starts = np.flatnonzero(np.diff(scores[self.order], prepend=-np.inf))
        self.abnormal = labels[self.order].astype(bool)
        self.group = group[self.order]
        self.whole = of_images(scores, labels, threshold)

    def counts(self, weights: np.ndarray) -> Counts:
        """Counts (R, K) of weights, float64 (R, groups)."""
        drawn = weights[:, self.group]
        abnormal = np.add.reduceat(drawn * self.abnormal, self.starts, axis=1)
        normal = np.add.reduceat(drawn, self.starts, axis=1) - abnormal
        return replace(self.whole, normal=normal, abnormal=abnormal)


class PixelGroups:
    """Binned pixel counts by group, some 75 KB each. whole: the exact histogram of all groups; threshold: the code
    from which on a pixel is called abnormal, or None; a bin begins there, so that what it decides stays exact."""

    def __init__(self, whole: PixelHistogram, threshold: int | None, groups: int):
        self.starts = bins(whole, threshold, BINS)
        self.whole = whole.binned(self.starts, threshold)
        self.rows = np.zeros((3, groups, len(self.starts)), np.float32)

    def add(self, group: int, histogram: PixelHistogram) -> None:
        """Put the images of one group in."""
        counts = histogram.binned(self.starts, None)
        assert counts.overlap is not None
        self.rows[:, group] = counts.normal, counts.abnormal, np.rint(counts.overlap * STEP) / STEP

    def counts(self, weights: np.ndarray) -> Counts:
        """Counts (R, bins) of weights, float64 (R, groups)."""
        normal, abnormal, overlap = (self._weighted(weights, row) for row in self.rows)
        return replace(self.whole, normal=normal, abnormal=abnormal, overlap=overlap)

    def _weighted(self, weights: np.ndarray, row: np.ndarray) -> np.ndarray:
        sums = np.empty((len(weights), row.shape[1]))
        for start in range(0, row.shape[1], BLOCK):
            part = slice(start, start + BLOCK)
            sums[:, part] = weights @ row[:, part].astype(np.float64)
        return sums


def replicates(
    metrics: Iterable[Metric], counts: Weighted, weights: Iterable[np.ndarray], options: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Values for each row of the weights, float64 (R,) by name, NaN where there is none, of metrics that have one for
    the whole."""
    found: dict[str, list[np.ndarray]] = {metric.name: [] for metric in metrics}
    for part in weights if found else ():
        counted = counts(part)
        for metric in metrics:
            found[metric.name].append(metric.replicates(counted, options))
    return {name: np.concatenate(parts) for name, parts in found.items()}
