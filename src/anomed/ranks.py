"""Ranks of systems over several domains, and which systems they tell apart (Demšar 2006, JMLR 7:1-30).

Domains are the samples: one rank of a system in each, whatever the scale of the metric there. With the handful of
domains of this benchmark these tests separate little; within a domain, `anomed.stats.difference` does.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from anomed.errors import AnomedError

ALPHA = 0.05


class Friedman(NamedTuple):
    """Friedman's chi-square and the F of Iman and Davenport (1980, Communications in Statistics A9:571-595), each with
    its p value. Report `f` and `p`: chi-square is conservative. `f` is infinite where all domains rank alike."""

    chi2: float
    p_chi2: float
    f: float
    p: float


def ranks(values: np.ndarray, higher: bool) -> np.ndarray:
    """Ranks (N, K), 1 the best, of K systems in each of N domains from values (N, K) of a metric.

    higher: whether a higher value is better. Equal values share the average of their ranks.
    Raises AnomedError for another shape or a NaN.
    """
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 2:
        raise AnomedError(f"ranks: values of shape {values.shape}, expected one row per domain, one column per system")
    if np.isnan(values).any():
        row, column = np.argwhere(np.isnan(values))[0]
        raise AnomedError(f"ranks: NaN in domain {row} for system {column}; leave out what has no value")
    own, other = values[:, :, None], values[:, None, :]
    better = other > own if higher else other < own
    return 0.5 + better.sum(2) + (other == own).sum(2) / 2


def friedman(ranked: np.ndarray) -> Friedman:
    """Whether any of K systems differ, from their ranks (N, K) in N domains: both statistics corrected for ties
    (Conover 1999, Practical Nonparametric Statistics).

    `p` is the tail of F with K - 1 and (K - 1)(N - 1) degrees of freedom, yet never below what chance reaches: renaming
    the systems keeps the statistic, so no outcome is rarer than the largest number of orders of a domain over the
    number of orders of all. Two domains that rank three systems alike have p = 1/6, where F alone would say 0.
    If all systems tie everywhere, both statistics are 0 and both p values 1.
    Raises AnomedError for fewer than 2 domains or 3 systems and for numbers that are no ranks.
    """
    from scipy.stats import chi2, f

    ranked = np.asarray(ranked, dtype=np.float64)
    if ranked.ndim != 2 or len(ranked) < 2 or ranked.shape[1] < 3:
        raise AnomedError(f"friedman: ranks of shape {ranked.shape}, expected at least 2 domains and 3 systems")
    if not np.array_equal(ranked, ranks(ranked, higher=False)):
        raise AnomedError("friedman: these are no ranks from 1 with ties averaged; make them with `ranks`")
    n, k = ranked.shape
    # Ranks are halves of whole numbers: systems that all tie, and domains that all agree, give zeros that are exact.
    mean = ranked.mean(0)
    between, within = n * float(((mean - (k + 1) / 2) ** 2).sum()), float(((ranked - mean) ** 2).sum())
    if within:
        ratio = (n - 1) * between / within
    else:
        ratio = math.inf if between else 0.0
    statistic = n * (k - 1) * between / (between + within) if between else 0.0
    orders = [math.factorial(k) // math.prod(map(math.factorial, ties(row))) for row in ranked]
    p = max(float(f.sf(ratio, k - 1, (k - 1) * (n - 1))), max(orders) / math.prod(orders))
    return Friedman(statistic, float(chi2.sf(statistic, k - 1)), ratio, p)


def ties(row: np.ndarray) -> list[int]:
    """How many systems share each rank."""
    return np.unique(row, return_counts=True)[1].tolist()


def pairwise(mean_ranks: Sequence[float] | np.ndarray, domains: int) -> np.ndarray:
    """Two-sided p values (K, K) that two of K systems differ, from mean ranks over N domains, not yet corrected for
    the number of pairs: z = (R_i - R_j) / sqrt(K (K + 1) / (6 N)). Diagonal 1."""
    from scipy.stats import norm

    mean = np.asarray(mean_ranks, dtype=np.float64)
    return 2 * norm.sf(np.abs(mean[:, None] - mean) / deviation(len(mean), domains))


def deviation(systems: int, domains: int) -> float:
    """Standard error of the difference of two mean ranks if no system differs."""
    return math.sqrt(systems * (systems + 1) / (6 * domains))


def holm(p: Sequence[float] | np.ndarray) -> np.ndarray:
    """p values (M,) of M tests, adjusted so that the chance of any false rejection is at most alpha (Holm 1979,
    Scandinavian Journal of Statistics 6:65-70): in the given order, at most 1. Raises AnomedError outside 0 to 1."""
    given = np.asarray(p, dtype=np.float64)
    if not ((given >= 0) & (given <= 1)).all():
        raise AnomedError(f"holm: p values {given.tolist()}, expected numbers from 0 to 1")
    order = np.argsort(given, kind="stable")
    adjusted = np.empty_like(given)
    adjusted[order] = np.minimum(np.maximum.accumulate(given[order] * np.arange(len(given), 0, -1)), 1)
    return adjusted


def critical_difference(systems: int, domains: int, alpha: float = ALPHA) -> float:
    """Difference of mean ranks from which on two of K >= 2 systems differ over N domains, all pairs taken together
    (Nemenyi's test): the studentized range over sqrt 2, times the standard error."""
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(1 - alpha, systems, math.inf)) / math.sqrt(2) * deviation(systems, domains)


def cliques(mean_ranks: Sequence[float] | np.ndarray, cd: float) -> list[list[int]]:
    """Bars of a critical-difference diagram: the largest groups of two or more systems whose mean ranks differ by at
    most `cd`. Groups and the indices in them go from the best mean rank on."""
    order = np.argsort(mean_ranks, kind="stable").tolist()
    groups: list[list[int]] = []
    covered = 0
    for start, first in enumerate(order):
        stop = start + sum(mean_ranks[index] - mean_ranks[first] <= cd for index in order[start:])
        if stop > max(covered, start + 1):
            groups.append(order[start:stop])
            covered = stop
    return groups


def summary(values: Mapping[str, Sequence[float | None]], domains: Sequence[str], higher: bool) -> dict[str, Any]:
    """Everything above for one metric, ready for JSON.

    values: per system one value per domain, None where it has none. A system without any value (one that does not
    localise has no pixel metric) is left out first, then each domain in which a remaining system has no value: ranks
    of a domain are comparable only if all took part.

    Returns `left_out` {systems, domains}, each {name: why}, and: `domains` used; `systems`, the best mean rank first;
    `mean_ranks` in that order; `friedman` {chi2, p_chi2, f, p}, f None where it is infinite; `critical_difference` at
    0.05; `groups`, names that it does not separate, worth reading only if Friedman's p is small; `pairs` [{first,
    second, p, holm}]. With fewer than 3 systems or 2 domains left: `left_out` and `reason` alone.
    Raises AnomedError for a number of values other than that of the domains, and for a NaN.
    """
    for system, row in values.items():
        if len(row) != len(domains):
            raise AnomedError(f"ranks: {len(row)} values of {system}, expected one for each of {len(domains)} domains")
    known = {system: [value is not None for value in row] for system, row in values.items()}
    systems = [system for system in values if any(known[system])]
    lacking = [[system for system in systems if not known[system][index]] for index in range(len(domains))]
    left_out = {
        "systems": {system: "no value in any domain" for system in values if system not in systems},
        "domains": {domains[i]: f"no value of {', '.join(without)}" for i, without in enumerate(lacking) if without},
    }
    used = [index for index, without in enumerate(lacking) if not without]
    if len(systems) < 3:
        what = "1 system has" if len(systems) == 1 else f"{len(systems)} systems have"
        return {"left_out": left_out, "reason": f"{what} values: ranks over domains are tested for 3 or more"}
    if len(used) < 2:
        fewest = min(systems, key=lambda system: sum(known[system]))
        what = f"{len(used)} of {len(domains)} domains with a value of every system, at least 2 are needed"
        return {"left_out": left_out, "reason": f"{what} ({fewest} has values in {sum(known[fewest])})"}

    ranked = ranks(np.array([[values[system][index] for system in systems] for index in used]), higher)
    order = np.argsort(ranked.mean(0), kind="stable")
    names = [systems[index] for index in order]
    mean = ranked.mean(0)[order].tolist()
    tested = friedman(ranked)
    cd = critical_difference(len(names), len(used))
    p = pairwise(mean, len(used))[np.triu_indices(len(names), 1)]
    pairs = zip(itertools.combinations(names, 2), p.tolist(), holm(p).tolist(), strict=True)
    return {
        "left_out": left_out,
        "domains": [domains[index] for index in used],
        "systems": names,
        "mean_ranks": mean,
        "friedman": tested._asdict() | {"f": tested.f if math.isfinite(tested.f) else None},
        "critical_difference": cd,
        "groups": [[names[index] for index in group] for group in cliques(mean, cd)],
        "pairs": [{"first": first, "second": second, "p": raw, "holm": held} for (first, second), raw, held in pairs],
    }
