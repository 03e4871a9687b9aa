"""Rank statistics of counts per score: AUROC, AP, AUPRO, Dice, sensitivity, and the curves behind them.

Statistics take `Counts` with any leading axes and return float64 of those axes. They are defined where both classes
occur; `declare` gives a reason or NaN elsewhere. Ties are exact: items of equal score cross a threshold together.
"""

import numpy as np

from anomed.metrics.counts import Counts

LOSS = 2e-4  # of AUROC or AP, above which a coding of maps is refused
POINTS = 513  # of a thinned curve, at most


def auroc(counts: Counts) -> np.ndarray:
    """Chance that an abnormal item scores above a normal one, ties counting one half (Mann-Whitney)."""
    beaten = counts.false[..., -1:] - counts.false[..., ::-1] + 0.5 * counts.normal
    pairs = counts.true[..., -1] * counts.false[..., -1]
    return _ratio(np.sum(counts.abnormal * beaten, axis=-1), pairs)


def average_precision(counts: Counts) -> np.ndarray:
    """Sum over thresholds of (recall step) x (precision at the threshold), without interpolation. Where scores were
    merged, the precision in the middle of a place stands for that of all its items."""
    step, called = counts.abnormal[..., ::-1], counts.true + counts.false
    true = counts.true
    if counts.merged is not None:
        half = 0.5 * counts.merged[::-1]
        true, called = true - half * step, called - half * (step + counts.normal[..., ::-1])
    return _ratio(np.sum(step * _ratio(true, called, 0.0), axis=-1), counts.true[..., -1])


def mirrored(counts: Counts) -> Counts:
    """The counts when normal is what is looked for, by falling score."""
    merged = None if counts.merged is None else counts.merged[::-1]
    return Counts(counts.abnormal[..., ::-1], counts.normal[..., ::-1], item=counts.item, merged=merged)


def aupro(counts: Counts, limit: float) -> np.ndarray:
    """Area under `pro` for a false positive rate of 0 to `limit`, linear at the limit, divided by the limit."""
    rate, mean = pro(counts)
    width, reached = np.diff(rate), _reached(rate, limit)
    area = width * reached * (mean[..., :-1] + 0.5 * reached * np.diff(mean))
    return np.sum(area, axis=-1) / limit


def sensitivity(counts: Counts, rate: float) -> np.ndarray:
    """True positive rate at a false positive rate, linear between the points of the ROC curve."""
    false, true = roc(counts)
    return np.sum(np.diff(true) * _reached(false, rate), axis=-1)


def dice(counts: Counts) -> np.ndarray:
    """Dice (F1) at every threshold, falling: (..., K)."""
    return _ratio(2 * counts.true, counts.true[..., -1:] + counts.true + counts.false)


def dice_at_cut(counts: Counts, cut: int) -> np.ndarray:
    """Dice when all from place `cut` on is called abnormal; at K nothing is, which is 0."""
    places = counts.normal.shape[-1]
    return dice(counts)[..., places - 1 - cut] if cut < places else np.zeros(counts.normal.shape[:-1])


def best_threshold(counts: Counts) -> float:
    """The score whose threshold has the best Dice, the highest of equal ones. Raises NotComputable for one class."""
    counts.require()
    assert counts.scores is not None
    return counts.scores[::-1][np.argmax(dice(counts))].item()


def loss(exact: Counts, coded: Counts) -> tuple[float, float]:
    """How much of AUROC and of AP a coding of the scores loses, both classes present."""
    pairs = ((statistic(exact), statistic(coded)) for statistic in (auroc, average_precision))
    of_auroc, of_ap = (abs(float(one - other)) for one, other in pairs)
    return of_auroc, of_ap


def roc(counts: Counts) -> np.ndarray:
    """False and true positive rate, 2 x ... x (K + 1), from (0, 0) to (1, 1)."""
    return np.stack([_share(counts.false), _share(counts.true)])


def precision_recall(counts: Counts) -> np.ndarray:
    """Recall and precision of one set of counts, 2 x up to K + 1, by falling threshold; begins at recall 0 with the
    first threshold's precision."""
    used = (counts.normal + counts.abnormal)[::-1] > 0
    found, called = counts.true[used], (counts.true + counts.false)[used]
    recall, precision = found / found[-1], found / called
    return np.stack([np.append(0.0, recall), np.append(precision[0], precision)])


def pro(counts: Counts) -> np.ndarray:
    """False positive rate and mean per-region overlap, 2 x ... x (K + 1), from (0, 0) to (1, 1)."""
    return np.stack([_share(counts.false), _share(counts.covered)])


def thin(curve: np.ndarray) -> np.ndarray:
    """At most 513 points of a curve (2 x K), both ends among them, evenly spaced along its length; float32."""
    path = np.append(0.0, np.cumsum(np.abs(np.diff(curve)).sum(axis=0)))
    places = np.searchsorted(path, np.linspace(0, path[-1], POINTS - 1))
    return curve[:, np.unique(np.append(places, len(path) - 1))].astype(np.float32)


def _ratio(part: np.ndarray, whole: np.ndarray, otherwise: float = np.nan) -> np.ndarray:
    """part / whole, and `otherwise` where whole is 0."""
    return np.divide(part, whole, out=np.full(np.shape(part), otherwise), where=np.asarray(whole) > 0)


def _share(above: np.ndarray) -> np.ndarray:
    """Cumulated counts as shares of all, with the 0 before the first: (..., K + 1)."""
    whole = np.broadcast_to(above[..., -1:], above.shape)
    return np.concatenate([np.zeros((*above.shape[:-1], 1)), _ratio(above, whole)], axis=-1)


def _reached(rate: np.ndarray, limit: float) -> np.ndarray:
    """How much of each segment of a curve lies at or below `limit` on its x axis: 0 to 1, (..., K)."""
    start, width = rate[..., :-1], np.diff(rate)
    part = np.divide(limit - start, width, out=(start <= limit).astype(np.float64), where=width > 0)
    return np.clip(part, 0, 1, out=part)
