"""AUPRO and mask rules as other code bases have them, under their own names: one column heading hides many definitions.

Ours is `anomed.metrics.ranking.pixel_aupro`: the normal pixels of all images in one pool, 8-connected regions, every
distinct score a threshold, area up to the limit divided by the limit. Nothing here enters a table of ours;
docs/metric-variants.md says how far each definition moves the number. All of them use 8-connected regions too: no
published code with 4-connected ones was found.

Arguments of every pro_ function. maps: per image real numbers H x W, higher is more anomalous, finite. masks: per
image bool H x W. limit: false positive rate, above 0 and at most 1. Raises NotComputable with a reason where the
definition gives no value, AnomedError on other input.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from anomed import images
from anomed.errors import AnomedError
from anomed.metrics.counts import NotComputable
from anomed.metrics.histogram import labelled, paired

Arrays = Sequence[np.ndarray]
STEPS = 200


def pro_200(maps: Arrays, masks: Arrays, limit: float = 0.3, *, from_smallest: bool = False) -> float:
    """200 thresholds at equal steps of the score between the lowest and the highest score of all maps, pooled.

    Used by Dinomaly (`evaluation_batch`) and BMAD's copy of MKD (`compute_localization_auc`); with `from_smallest` by
    ADer's CPU code and AnomalyCLIP. Differs in three ways. Thresholds follow the scale of the scores, so that a
    strictly increasing transform moves the value. Points with a rate below the limit are kept, and their rates divided
    by the largest kept one, however far below the limit it is (`from_smallest`: the smallest is subtracted first). No
    point (0, 0) is added: what lies left of the smallest kept rate counts nothing.

    Abnormal is a score above lowest + k / 200 (highest - lowest), k = 0 to 199, in float64; the originals step with
    `numpy.arange`, where rounding can add a threshold at the maximum. Time O(pixels). No value when fewer than two
    points are kept or their rates are all 0 (`from_smallest`: all equal): a map of zeros and ones has none.
    Sources: guojiajeremy/Dinomaly utils.py; DorisBao/BMAD MKD/test_functions.py; zhangzjn/ADer util/metric.py;
    zqhang/AnomalyCLIP metrics.py.
    """
    _check(maps, masks, limit)
    return _stepped(maps, masks, limit, from_smallest)


def pro_per_image(maps: Arrays, masks: Arrays, limit: float = 0.3) -> float:
    """Ours, but within each abnormal image: its own normal pixels alone; the mean over the abnormal images.

    No published code does exactly this: it is the half of `pro_bmad` that has nothing to do with the 200 steps.
    Differs in that normal images do not exist for it, so that a false alarm there costs nothing, and in that every
    image weighs the same however many regions it has. Time O(pixels log pixels).
    """
    _check(maps, masks, limit)
    return _mean_of_images(maps, masks, lambda one, mask: _exact(one, mask, limit))


def pro_bmad(maps: Arrays, masks: Arrays, limit: float = 0.3) -> float:
    """`pro_200` within each abnormal image, between that map's lowest and highest score; the mean over these images.

    Used by RD4AD, and from there by BMAD for the methods outside anomalib (UTRAD, MKD, CS-Flow; the calls are commented
    out in its release) and by Dinomaly's `evaluation`. Differs as `pro_200` and `pro_per_image` do together: also a
    change of scale from one image to the next leaves it alone. Time O(pixels). No value when one image has none.
    Sources: hq-deng/RD4AD test.py; DorisBao/BMAD UTRAD/valid.py, MKD/test_functions.py and cs-flow/evaluate.py.
    """
    _check(maps, masks, limit)
    return _mean_of_images(maps, masks, lambda one, mask: _stepped([one], [mask], limit))


def pro_anomalib_fork(maps: Arrays, masks: Arrays, limit: float = 0.3) -> float:
    """Curves of the single regions, resampled by position in their list of points, averaged, divided by the last rate.

    Used by anomalib until 2.2 and so by the eight anomalib methods of BMAD. What is computed:

    1. n: the points with a rate of at most the limit on the ROC of all pixels, one per distinct score and (0, 0).
    2. Per region the ROC of its pixels against the normal pixels of all images: its points up to the last rate of at
       most the limit if that is the limit (within 1e-5, relative), else one point more; if all these rates are 0, up
       to the last point of the smallest rate above the limit.
    3. That list, whatever its length, is read at n equidistant positions, linearly between points; the last reading is
       moved to where the rate is the limit. Rates and overlaps are each averaged over the regions.
    4. The points are sorted by rate; the area under them is divided by the rate of the last reading.

    Where one score of many normal pixels crosses the limit (clamped or 8-bit maps), readings before the last can have
    higher rates than the last: the area then reaches beyond the limit but is divided by the limit, and the value can
    pass 1 (anomalib issues 1651, 2442 and 3718; gone in 2.3.0, pull request 3115).

    Known: these steps, from anomalib 0.5.1; the fork calls itself 0.5.0-dev. Not known: the fork's own copy, whose
    source could not be read. Not imitated: float32 sums, a term of 1e-7 in the slopes, and that in 0.5.1 maps are
    normalised and clamped to [0, 1] before this metric sees them, which makes ties. Time O(pixels log pixels + regions
    n): give large sets as 16-bit codes. Holds all normal pixels. No value when the highest score of all is that of
    normal pixels with a rate above the limit (n = 1), as in a constant map.
    """
    _check(maps, masks, limit)
    normal = np.concatenate([one[~mask] for one, mask in zip(maps, masks, strict=True)])
    regions = [scores for one, mask in zip(maps, masks, strict=True) for scores in _regions(one, mask)]
    values, sizes = np.unique(normal, return_counts=True)
    rates = np.append(0, np.cumsum(sizes[::-1])) / len(normal)  # after the 0, 1, 2 ... highest normal scores
    alone = _without(np.concatenate(regions), values)
    inside = int(np.searchsorted(rates, limit, side="right"))
    points = inside + int((rates[_above(values, alone)] <= limit).sum())
    if points == 1:
        raise NotComputable(f"the highest score of all is already that of more than {limit:g} of the normal pixels")
    rates = rates[: inside + 1]  # beyond the first rate above the limit no curve is read
    values = np.append(-np.inf, values)[-inside - 1 :]
    rate, overlap = np.zeros(points), np.zeros(points)
    for scores in regions:
        curve = _curve(scores, values, rates)
        last, end = _cut(curve[0], limit)
        at = np.arange(points) * (last / (points - 1))
        at[-1] = end
        lower = np.minimum(at.astype(np.intp), last - 1)
        at -= lower
        for total, line in zip((rate, overlap), curve, strict=True):
            start = line[lower]
            total += start + at * (line[lower + 1] - start)
    order = np.argsort(rate.round(12), kind="stable")  # rates that differ by rounding alone stay in order
    return float(np.trapezoid(overlap[order], rate[order]) / rate[-1] / len(regions))


def any_level(grey: np.ndarray, size: int = 0) -> np.ndarray:
    """Ours (before any resizing), ADer, MedIAnomaly and current anomalib: above 0."""
    return grey > 0


def at_least_a_tenth(grey: np.ndarray, size: int = 0) -> np.ndarray:
    """BMAD's loaders outside anomalib: at least 0.1 of full scale (there after a bilinear resize, not imitated)."""
    return grey >= 0.1 * 255


def integer_cast(grey: np.ndarray, size: int = 0) -> np.ndarray:
    """BMAD's anomalib fork: divided by 255 and cast to an integer, so that 255 alone is left (anomalib issue 2803)."""
    return grey // 255 > 0


def above_a_half(grey: np.ndarray, size: int = 0) -> np.ndarray:
    """MVFA, also RD4AD: above 0.5 of full scale (there after a bilinear resize, not imitated)."""
    return grey > 0.5 * 255


def after_shrinking(grey: np.ndarray, size: int) -> np.ndarray:
    """Dinomaly: above 0 after a bilinear resize to the model's grid; bool size x size, and scored on that grid."""
    return images.resize(grey, size) > 0


# What counts as anomalous in a colour-mapped mask: grey levels uint8 H x W (59, 122 and 255 where BraTS labels 1, 2 and
# 4 are in the slice) to bool H x W; only the last looks at the size of the model's grid.
MASK_RULES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "any": any_level,
    "at_least_0.1": at_least_a_tenth,
    "integer_cast": integer_cast,
    "above_0.5": above_a_half,
    "after_shrinking": after_shrinking,
}


def _stepped(maps: Arrays, masks: Arrays, limit: float, from_smallest: bool = False) -> float:
    low, high = float(min(one.min() for one in maps)), float(max(one.max() for one in maps))
    if low == high:
        raise NotComputable("all scores are equal: no steps between the lowest and the highest")
    steps = low + (high - low) * np.arange(STEPS) / STEPS
    normal, overlap = np.zeros(STEPS + 1), np.zeros(STEPS + 1)
    for one, mask in zip(maps, masks, strict=True):
        exceeded = np.searchsorted(steps, one)  # how many thresholds the score is above
        normal += np.bincount(exceeded[~mask], minlength=STEPS + 1)
        overlap += np.bincount(exceeded[mask], _weights(mask), minlength=STEPS + 1)
    rate, mean = (np.cumsum(counts[:0:-1]) / counts.sum() for counts in (normal, overlap))
    rate, mean = rate[rate < limit], mean[rate < limit]
    rate = rate - rate[:1] * from_smallest
    if len(rate) < 2 or rate[-1] == 0:
        why = "which is no curve" if len(rate) < 2 else "all with the same rate"
        raise NotComputable(f"{len(rate)} of {STEPS} steps have a false positive rate below {limit:g}, {why}")
    return float(np.trapezoid(mean, rate / rate[-1]))


def _exact(scores: np.ndarray, mask: np.ndarray, limit: float) -> float:
    """Sum over lesion pixels of the area under the step that their score adds to the curve."""
    normal, weights = np.sort(scores[~mask]), _weights(mask)
    before, after = (1 - np.searchsorted(normal, scores[mask], side=side) / len(normal) for side in ("right", "left"))
    width = after - before  # of the ramp: the normal pixels with just this score
    ramp = np.clip(limit - before, 0, width) ** 2 / (2 * np.where(width > 0, width, 1))
    return float(np.sum(weights * (np.maximum(limit - after, 0) + ramp)) / weights.sum() / limit)


def _mean_of_images(maps: Arrays, masks: Arrays, function: Callable[[np.ndarray, np.ndarray], float]) -> float:
    found = []
    for number, (one, mask) in enumerate(zip(maps, masks, strict=True)):
        if mask.all():
            raise NotComputable(f"image {number} has no normal pixel")
        if mask.any():
            try:
                found.append(function(one, mask))
            except NotComputable as reason:
                raise NotComputable(f"image {number}: {reason}") from None
    return float(np.mean(found))


def _curve(scores: np.ndarray, values: np.ndarray, rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rate and overlap of one region by falling threshold, as far as scores above values[0] go.

    rates (K + 1,): 0, then the rate after each of the K highest distinct normal scores. values: those and the one below
    them, ascending. A score that no normal pixel has is a point more, at the rate of the point before.
    """
    own = _without(scores, values)
    own = own[own > values[0]]
    at = _above(values, own)
    rate = np.insert(rates, at + 1, rates[at])
    place = 1 + _above(values, scores) + _above(own, scores)
    counts = np.bincount(place[place < len(rate)], minlength=len(rate))
    return rate, np.cumsum(counts) / len(scores)


def _cut(rate: np.ndarray, limit: float) -> tuple[int, float]:
    """The index of a curve's last point that is read, and the position (an index with fraction) of the last reading."""
    over = int(np.searchsorted(rate, limit, side="right"))
    last = over - 1
    if np.isclose(rate[last], limit):
        return last, last
    if rate[last] > 0:
        return over, last + (limit - rate[last]) / (rate[over] - rate[last])
    end = int(np.searchsorted(rate, rate[over], side="right")) - 1
    return end, end + (over - end) * limit / rate[over]


def _above(values: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """How many of the ascending values are above each score."""
    return len(values) - np.searchsorted(values, scores, side="right")


def _without(scores: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The distinct scores that are not among the ascending values, ascending."""
    near = np.minimum(np.searchsorted(values, scores), len(values) - 1)
    return np.unique(scores[values[near] != scores])


def _weights(mask: np.ndarray) -> np.ndarray:
    """1 / area of its region for every lesion pixel, row by row."""
    region, _ = labelled(mask)
    return 1 / np.bincount(region)[region]


def _regions(scores: np.ndarray, mask: np.ndarray) -> Iterator[np.ndarray]:
    region, _ = labelled(mask)
    ends = np.cumsum(np.bincount(region, minlength=1)[1:])
    yield from np.split(scores[mask][np.argsort(region, kind="stable")], ends)[:-1]


def _check(maps: Arrays, masks: Arrays, limit: float) -> None:
    if not 0 < limit <= 1:
        raise AnomedError(f"found the limit {limit}, expected a false positive rate above 0 and at most 1")
    paired(maps, masks)
    for number, (one, mask) in enumerate(zip(maps, masks, strict=True)):
        if one.ndim != 2 or one.shape != mask.shape or mask.dtype != bool or not one.size:
            raise AnomedError(
                f"image {number}: found a map {one.shape} with a mask {mask.dtype} {mask.shape}, expected (H, W) and "
                "bool (H, W)"
            )
        if not np.isfinite(one).all():
            raise AnomedError(f"image {number}: the map holds NaN or infinity; every score must be finite")
    if not any(mask.any() for mask in masks):
        raise NotComputable(f"no abnormal image among {len(masks)}")
    if all(mask.all() for mask in masks):
        raise NotComputable("no normal pixel")
