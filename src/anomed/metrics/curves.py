"""Rank statistics from counts per distinct score: AUROC, AP, AUPRO and the curves behind them.

Every function takes arrays over the distinct scores in ascending order, positive and negative counts among them, each
class at least once; a score above or equal to a threshold is called abnormal. Ties are exact: scores that are equal
cross the threshold together.
"""

import numpy as np

POINTS = 513  # of a thinned curve, at most


def counts(scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(positive, negative), int64, of scores (N,) and labels bool (N,)."""
    values, place = np.unique(scores, return_inverse=True)
    sizes = np.bincount(place, minlength=len(values))
    positive = np.bincount(place[labels], minlength=len(values))
    return positive, sizes - positive


def auroc(positive: np.ndarray, negative: np.ndarray) -> float:
    """Chance that an abnormal item scores above a normal one, ties counting one half (Mann-Whitney)."""
    below = np.cumsum(negative) - negative
    return float(np.sum(positive * (below + 0.5 * negative)) / (float(positive.sum()) * float(negative.sum())))


def average_precision(positive: np.ndarray, negative: np.ndarray) -> float:
    """Sum over thresholds of (recall step) x (precision at the threshold), without interpolation."""
    found, called = np.cumsum(positive[::-1]), np.cumsum((positive + negative)[::-1])
    step = positive[::-1]
    at = step > 0
    return float(np.sum(step[at] * (found[at] / called[at])) / found[-1])


def aupro(negative: np.ndarray, overlap: np.ndarray, limit: float) -> float:
    """Area under `pro` for a false positive rate of 0 to `limit`, linear at the limit, divided by the limit."""
    rate, mean = pro(negative, overlap)
    inside = int(np.searchsorted(rate, limit, side="right"))
    x, y = np.append(rate[:inside], limit), np.append(mean[:inside], np.interp(limit, rate, mean))
    if rate[inside - 1] == limit:  # several points may stand at the limit: none is left out, none added
        x, y = rate[:inside], mean[:inside]
    return float(np.trapezoid(y, x) / limit)


def roc(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """False and true positive rate, 2 x K, from (0, 0) to (1, 1)."""
    return np.stack([_share(negative), _share(positive)])


def precision_recall(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Recall and precision, 2 x K, by falling threshold; begins at recall 0 with the first threshold's precision."""
    used = (positive + negative)[::-1] > 0
    found, called = np.cumsum(positive[::-1])[used], np.cumsum((positive + negative)[::-1])[used]
    recall, precision = found / found[-1], found / called
    return np.stack([np.append(0.0, recall), np.append(precision[0], precision)])


def pro(negative: np.ndarray, overlap: np.ndarray) -> np.ndarray:
    """False positive rate and mean per-region overlap, 2 x K, from (0, 0) to (1, 1).

    overlap: per score the sum over its lesion pixels of 1 / area of the pixel's region, so that the sum over all
    scores is the number of regions.
    """
    used = (negative > 0) | (overlap > 0)
    return np.stack([_share(negative[used]), _share(overlap[used])])


def thin(curve: np.ndarray) -> np.ndarray:
    """At most 513 points of a curve (2 x K), both ends among them, evenly spaced along its length; float32."""
    path = np.append(0.0, np.cumsum(np.abs(np.diff(curve)).sum(axis=0)))
    places = np.searchsorted(path, np.linspace(0, path[-1], POINTS - 1))
    return curve[:, np.unique(np.append(places, len(path) - 1))].astype(np.float32)


def _share(numbers: np.ndarray) -> np.ndarray:
    above = np.cumsum(numbers[::-1])
    return np.append(0.0, above / above[-1])
