"""What every ranking metric is computed from: how many normal and abnormal items have each score."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from anomed.errors import AnomedError


class NotComputable(AnomedError):
    """The value does not exist for these data. The message is the reason that the records carry."""


@dataclass(frozen=True)
class Counts:
    """Items per distinct score, in ascending order of the score along the last axis, K; leading axes, if any, are
    replicates or groups that are counted at once. An item is called abnormal when its score is at or above a threshold:
    items of equal score cross it together.

    normal, abnormal: (..., K), whole numbers of any type. overlap: (..., K), abnormal pixels weighted by 1 / area of
    their region; None for images. cut: place along K from which on the threshold chosen on valid calls items abnormal;
    None when there is none, and `uncut` says why. item: what is counted, for messages. scores: (K,), the lowest score
    of each place. merged: bool (K,), places where several neighbouring scores, abnormal items among them, are counted
    together; None: there is none.
    """

    normal: np.ndarray
    abnormal: np.ndarray
    overlap: np.ndarray | None = None
    cut: int | None = None
    uncut: str = "no threshold was chosen on valid"
    item: str = "item"
    scores: np.ndarray | None = None
    merged: np.ndarray | None = None

    @cached_property
    def false(self) -> np.ndarray:
        """Normal items called abnormal, float64 (..., K), by falling threshold."""
        return _above(self.normal)

    @cached_property
    def true(self) -> np.ndarray:
        """Abnormal items called abnormal, float64 (..., K), by falling threshold."""
        return _above(self.abnormal)

    @cached_property
    def covered(self) -> np.ndarray:
        """Sum over regions of the share called abnormal, float64 (..., K), by falling threshold."""
        if self.overlap is None:
            raise TypeError(f"the counts of each {self.item} know no regions")
        return _above(self.overlap)

    def sizes(self) -> dict[str, np.ndarray]:
        """Numbers of "normal" and "abnormal" items, and of pixels also of "regions": int64 of the leading axes."""
        found = {"normal": self.normal, "abnormal": self.abnormal}
        if self.overlap is not None:
            found["regions"] = self.overlap
        return {name: np.rint(counts.sum(axis=-1)).astype(np.int64) for name, counts in found.items()}

    def require(self) -> None:
        """Raises NotComputable when one set of counts has no item or one class only; of several, nothing is asked."""
        if self.normal.ndim > 1:
            return
        abnormal, total = int(self.abnormal.sum()), int(self.abnormal.sum() + self.normal.sum())
        if not total:
            raise NotComputable(f"no {self.item} to count")
        if abnormal in (0, total):
            missing = "normal" if abnormal else "abnormal"
            raise NotComputable(f"one class only: no {missing} {self.item} among {total}")


def of_images(scores: Any, labels: Any, threshold: float | None = None) -> Counts:
    """Counts over the distinct scores of images: scores (N,), any real type, labels (N,), 0 or 1.

    threshold: the score from which on an image is called abnormal, chosen on other images. Raises AnomedError on
    wrong types, shapes, labels or non-finite numbers.
    """
    scores, labels = _reals("scores", scores), _reals("labels", labels)
    if scores.ndim != 1 or scores.shape != labels.shape:
        raise AnomedError(f"found scores {scores.shape} with labels {labels.shape}, expected (N,) and (N,)")
    if not np.isfinite(scores).all():
        raise AnomedError("scores hold NaN or infinity; every score must be finite")
    if not np.isin(labels, (0, 1)).all():
        raise AnomedError(f"found the labels {np.unique(labels)[:5].tolist()}, expected 0 and 1")
    values, place = np.unique(scores, return_inverse=True)
    sizes = np.bincount(place, minlength=len(values))
    abnormal = np.bincount(place[labels.astype(bool)], minlength=len(values))
    cut = None if threshold is None else int(np.searchsorted(values, finite("threshold", threshold)))
    return Counts(sizes - abnormal, abnormal, cut=cut, item="image", scores=values)


def finite(name: str, value: Any) -> float:
    """The number. Raises AnomedError when it is none, NaN or infinite."""
    if not isinstance(value, int | float | np.integer | np.floating) or not np.isfinite(value):
        raise AnomedError(f"{name}: found {value!r}, expected a finite number")
    return float(value)


def _reals(name: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:  # rows of several lengths
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf" and array.size + (array.dtype.kind == "O"):
        raise AnomedError(f"found {name} of type {array.dtype}, expected real numbers")
    return array


def _above(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts[..., ::-1], axis=-1, dtype=np.float64)
