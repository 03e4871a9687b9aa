"""Resampling of subjects: intervals of a metric and paired differences between systems, from shared replicates.

A replicate draws as many subjects as there are, with replacement, and takes all images of each as often as it was
drawn: images of one subject are alike, so drawing images would promise more precision than there is (Davison and
Hinkley 1997, section 3.8). Draws depend on the number of subjects alone. Replicate r of one system and replicate r of
another saw the same subjects, so their difference is a replicate of the paired difference.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
SEED = 0
FEWEST = 8  # subjects of which an interval is given: of fewer, too many miss the truth (docs/intervals.md)
TINY = 1e-12  # quantile below which no p value looks
CHUNK = 64  # replicates drawn at a time
COMPUTABLE = 0.95  # share of the replicates that must have a value for an interval to be given


class Interval(NamedTuple):
    """Ends of an interval, or None and the reason why there is none."""

    low: float | None
    high: float | None
    reason: str | None


class Difference(NamedTuple):
    """A paired difference: interval, and two-sided bootstrap p value of no difference (None without interval)."""

    interval: Interval
    p: float | None


def draws(units: int, replicates: int) -> Iterator[np.ndarray]:
    """How often each of `units` subjects was drawn: float64 (r, units) of whole numbers, rows summing to `units`;
    r <= 64, `replicates` rows in all. The same for equal arguments, whatever else is computed."""
    random = np.random.default_rng(SEED)
    for start in range(0, replicates, CHUNK):
        rows = min(CHUNK, replicates - start)
        picked = random.integers(units, size=(rows, units)) + units * np.arange(rows)[:, None]
        yield np.bincount(picked.ravel(), minlength=rows * units).reshape(rows, units).astype(np.float64)


def interval(replicates: np.ndarray, units: int, value: float | None = None) -> Interval:
    """95 % interval of replicates (R,), NaN where a replicate has no value. units: number of subjects drawn.

    value: what the replicates are of, for a metric from 0 to 1. Its interval is symmetric in log odds: the standard
    error of the replicates times sqrt(n / (n - 1)), taken to log odds by the delta method, times the quantile of t with
    n - 1 degrees of freedom, and no further than the outermost replicates. Near 1 percentiles are skewed to the wrong
    side (the interval LT of Kottas, Kuss and Zapf 2014, BMC Medical Research Methodology 14:26, with the error of the
    bootstrap). Without a value, as for differences, and for 0 and 1: percentiles, taken further out by the same two
    factors, by which they are too narrow with few subjects (Hesterberg 2015, American Statistician 69:371-386, expanded
    percentiles). Where that is beyond the outermost replicate, and of fewer than eight subjects, there is no interval.
    """
    from scipy.special import expit, logit, ndtr, stdtrit

    if units < FEWEST:
        return Interval(None, None, f"{units} of the {FEWEST} subjects that an interval needs")
    known = replicates[np.isfinite(replicates)].astype(np.float64)
    if len(known) < COMPUTABLE * len(replicates) or not len(known):
        missing = f"{len(replicates) - len(known)} of {len(replicates)} replicates"
        return Interval(None, None, f"too few subjects: {missing} have no value")
    reach = np.sqrt(units / (units - 1)) * stdtrit(units - 1, (1 + CONFIDENCE) / 2)  # in standard errors
    tail = float(ndtr(-reach))
    if tail * (len(known) + 1) <= 1:
        return Interval(None, None, f"{len(known)} replicates where {units} subjects need {int(1 / tail)}")
    if value is None or not 0 < value < 1:
        low, high = np.quantile(known, (tail, 1 - tail))
        return Interval(float(low), float(high), None)
    half = reach * known.std() / (value * (1 - value))
    low, high = expit(logit(value) - half), expit(logit(value) + half)
    low, high = min(value, max(low, known.min())), max(value, min(high, known.max()))  # rounding moves no end past it
    return Interval(float(low), float(high), None)


def difference(first: np.ndarray, second: np.ndarray, units: int) -> Difference:
    """`second` minus `first`, paired replicates (R,) of two systems over the same subjects.

    The p value is twice the quantile at which 0 stands among the replicates, or stands in the other direction, brought
    back from where `interval` takes its quantiles: below 0.05 where 0 lies outside the interval, and there alone. Where
    0 lies beyond the outermost replicate, its quantile is that of the normal distribution of their mean and spread.
    """
    from scipy.special import ndtr, ndtri, stdtr

    both = second.astype(np.float64) - first.astype(np.float64)
    found = interval(both, units)
    if found.reason:
        return Difference(found, None)
    known = np.sort(both[np.isfinite(both)])
    tail = min(_quantile(known), _quantile(-known[::-1]), 0.5)
    if tail == 0:
        spread = max(known.std(), np.finfo(np.float32).eps)  # replicates are stored in float32
        tail = max(min(float(ndtr(-abs(known.mean()) / spread)), 1 / (len(known) + 1)), TINY)
    return Difference(found, float(2 * stdtr(units - 1, ndtri(tail) * np.sqrt((units - 1) / units))))


def _quantile(ordered: np.ndarray) -> float:
    """Of ascending values the highest quantile that is not above 0, as `np.quantile` interpolates."""
    below = int(np.searchsorted(ordered, 0, side="right"))
    if below in (0, len(ordered)):
        return float(below > 0)
    least, most = ordered[below - 1], ordered[below]
    return float((below - 1 - least / (most - least)) / (len(ordered) - 1))
