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


def interval(replicates: np.ndarray, units: int) -> Interval:
    """95 % percentile interval of replicates (R,), NaN where a replicate has no value.

    units: number of subjects drawn. With few, percentiles come out too narrow by the factor sqrt((n - 1) / n) and by
    that of the normal to the t distribution; the quantiles are taken further out by both (Hesterberg 2015, American
    Statistician 69:371-386, expanded percentiles).
    """
    from scipy.special import ndtr, stdtrit

    if units < 2:
        return Interval(None, None, "one subject: nothing to resample")
    known = replicates[np.isfinite(replicates)]
    if len(known) < COMPUTABLE * len(replicates) or not len(known):
        missing = f"{len(replicates) - len(known)} of {len(replicates)} replicates"
        return Interval(None, None, f"too few subjects: {missing} have no value")
    tail = ndtr(np.sqrt(units / (units - 1)) * stdtrit(units - 1, (1 - CONFIDENCE) / 2))
    low, high = np.quantile(known.astype(np.float64), (tail, 1 - tail))
    return Interval(float(low), float(high), None)


def difference(first: np.ndarray, second: np.ndarray, units: int) -> Difference:
    """`second` minus `first`, paired replicates (R,) of two systems over the same subjects.

    The p value is twice the smaller share of replicates on or beyond 0, with one added to count and number (never 0),
    and widened for few subjects as the interval is: below 0.05 where 0 lies outside the interval.
    """
    from scipy.special import ndtri, stdtr

    both = second.astype(np.float64) - first.astype(np.float64)
    found = interval(both, units)
    if found.reason:
        return Difference(found, None)
    known = both[np.isfinite(both)]
    beyond = min(int((known <= 0).sum()), int((known >= 0).sum()))
    tail = min(0.5, (beyond + 1) / (len(known) + 1))
    return Difference(found, float(2 * stdtr(units - 1, ndtri(tail) * np.sqrt((units - 1) / units))))
