"""Ranks over domains against scipy, brute force and the worked example of Demšar 2006 (table 6 and section 3.2.2)."""

import itertools
import json
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import f as f_distribution
from scipy.stats import friedmanchisquare, rankdata

from anomed.errors import AnomedError
from anomed.ranks import cliques, critical_difference, friedman, holm, pairwise, ranks, summary

# Ranks of C4.5, C4.5+m, C4.5+cf and C4.5+m+cf on 14 data sets.
PAPER = np.array(
    [
        [4, 3, 2, 1],
        [1, 2, 3, 4],
        [4, 1, 2, 3],
        [4, 1, 3, 2],
        [4, 2, 3, 1],
        [1, 2.5, 4, 2.5],
        [3, 2, 4, 1],
        [2.5, 2.5, 4, 1],
        [4, 3, 2, 1],
        [2.5, 2.5, 2.5, 2.5],
        [4, 2.5, 1, 2.5],
        [3, 2, 4, 1],
        [4, 1, 2, 3],
        [3, 1, 4, 2],
    ]
)
TIES = 3 * (2**3 - 2) + (4**3 - 4)  # three pairs and one four
SHAPES = st.tuples(st.integers(2, 7), st.integers(3, 6))
TABLES = SHAPES.flatmap(lambda shape: hnp.arrays(np.float64, shape, elements=st.integers(0, 4).map(float)))
P_VALUES = st.lists(st.floats(0, 1) | st.sampled_from([0.01, 0.02, 0.5]), min_size=1, max_size=12)
MEANS = st.lists(st.integers(2, 14).map(lambda halves: halves / 2), min_size=1, max_size=7)


# --- the paper -------------------------------------------------------------------------------------------------------


def test_friedman_of_the_paper():
    """The paper's 9.28 and 3.69 ignore ties; dividing by the share of the variance that ties leave corrects it."""
    n, k = PAPER.shape
    untied = 1 - TIES / (n * (k**3 - k))
    found = friedman(PAPER)
    assert PAPER.mean(0) == pytest.approx([3.143, 2.000, 2.893, 1.964], abs=5e-4)
    assert found.chi2 * untied == pytest.approx(9.28, abs=5e-3)
    assert (n - 1) * found.chi2 * untied / (n * (k - 1) - found.chi2 * untied) == pytest.approx(3.69, abs=5e-3)
    assert found.f == pytest.approx((n - 1) * found.chi2 / (n * (k - 1) - found.chi2))
    assert found.p < found.p_chi2 < 0.05


def test_nemenyi_of_the_paper():
    n, k = PAPER.shape
    assert critical_difference(k, n) == pytest.approx(1.25, abs=6e-3)
    assert critical_difference(k, n, alpha=0.10) == pytest.approx(1.12, abs=6e-3)
    assert cliques(PAPER.mean(0), critical_difference(k, n)) == [[3, 1, 2, 0]]
    assert cliques(PAPER.mean(0), critical_difference(k, n, alpha=0.10)) == [[3, 1, 2], [2, 0]]


def test_pairs_of_the_paper():
    """Against C4.5, Holm rejects for C4.5+m+cf and C4.5+m and not for C4.5+cf."""
    p = pairwise(PAPER.mean(0), len(PAPER))[0, [3, 1, 2]]
    assert p == pytest.approx([0.016, 0.019, 0.607], abs=1.5e-3)
    assert (holm(p) < 0.05).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("alpha", "values"),
    [
        (0.05, [1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164]),
        (0.10, [1.645, 2.052, 2.291, 2.459, 2.589, 2.693, 2.780, 2.855, 2.920]),
    ],
)
def test_critical_values(alpha, values):
    """Table 5a, 2 to 10 systems; its third decimal is not always rounded."""
    found = [critical_difference(k, 1, alpha) / math.sqrt(k * (k + 1) / 6) for k in range(2, 11)]
    assert found == pytest.approx(values, abs=1.1e-3)


# --- against scipy ---------------------------------------------------------------------------------------------------


@given(TABLES, st.booleans())
def test_ranks_equal_scipy(values, higher):
    np.testing.assert_array_equal(ranks(values, higher), rankdata(-values if higher else values, axis=1))


@given(TABLES)
def test_chi_square_equals_scipy(values):
    ranked = ranks(values, higher=True)
    assume((ranked != ranked[:, :1]).any())
    expected = friedmanchisquare(*values.T)
    found = friedman(ranked)
    assert found.chi2 == pytest.approx(expected.statistic, abs=1e-9)
    assert found.p_chi2 == pytest.approx(expected.pvalue, abs=1e-9)


@given(TABLES)
def test_f_is_the_analysis_of_variance_of_ranks(values):
    """F of the systems in the two-way layout without interaction, here by least squares on indicator columns."""
    ranked = ranks(values, higher=True)
    n, k = ranked.shape
    blocks = np.repeat(np.eye(n), k, axis=0)
    both = np.hstack([blocks, np.tile(np.eye(k), (n, 1))])
    without, with_systems = (residual(columns, ranked.ravel()) for columns in (blocks, both))
    assume(with_systems > 1e-9)
    found = friedman(ranked)
    f = (without - with_systems) / (k - 1) / (with_systems / ((k - 1) * (n - 1)))
    assert found.f == pytest.approx(f, abs=1e-8)
    assert found.p == pytest.approx(max(f_distribution.sf(f, k - 1, (k - 1) * (n - 1)), rarest(ranked)), abs=1e-9)


def orders(row: np.ndarray) -> set[tuple[float, ...]]:
    return set(itertools.permutations(row.tolist()))


def rarest(ranked: np.ndarray) -> float:
    """Chance that no outcome falls below: the most orders of one domain over the orders of all."""
    counts = [len(orders(row)) for row in ranked]
    return max(counts) / math.prod(counts)


def residual(columns: np.ndarray, target: np.ndarray) -> float:
    return float(((target - columns @ np.linalg.lstsq(columns, target, rcond=None)[0]) ** 2).sum())


# --- against brute force ---------------------------------------------------------------------------------------------


@given(hnp.arrays(np.float64, (3, 3), elements=st.integers(0, 2).map(float)))
def test_no_outcome_is_rarer_than_p_says(values):
    """If no system differs, all orders of a domain are equally likely: list them all. The bound of p holds for every
    outcome, and is the chance itself when all domains agree."""
    ranked = ranks(values, higher=True)
    found = friedman(ranked)
    every = [friedman(np.array(table)).chi2 for table in itertools.product(*map(orders, ranked))]
    same = np.mean(np.isclose(every, found.chi2))
    assert same >= rarest(ranked) - 1e-12
    assert found.p >= rarest(ranked)
    if math.isinf(found.f):
        assert found.p == pytest.approx(same)


@given(P_VALUES)
def test_holm_by_definition(p):
    """The adjusted p of a test is the largest, over the tests at most as large, of p times how many are not smaller."""
    by_size = sorted(range(len(p)), key=lambda index: p[index])
    expected = [0.0] * len(p)
    for place, index in enumerate(by_size):
        expected[index] = min(1.0, max((len(p) - i) * p[by_size[i]] for i in range(place + 1)))
    assert holm(p).tolist() == expected


def test_holm_by_hand():
    assert holm([0.03, 0.01, 0.04]).tolist() == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.9, 0.6]).tolist() == [1, 1]


@given(MEANS, st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.5, 7.0]))
def test_cliques_are_the_maximal_sets(means, cd):
    sets = [
        frozenset(chosen)
        for size in range(2, len(means) + 1)
        for chosen in itertools.combinations(range(len(means)), size)
        if max(means[i] for i in chosen) - min(means[i] for i in chosen) <= cd
    ]
    found = cliques(means, cd)
    assert {frozenset(group) for group in found} == {one for one in sets if not any(one < other for other in sets)}
    assert all(group == sorted(group, key=lambda index: (means[index], index)) for group in found)
    assert [means[group[0]] for group in found] == sorted(means[group[0]] for group in found)
    assert len(set(map(tuple, found))) == len(found)


# --- degenerate and refused ------------------------------------------------------------------------------------------


def test_all_tie():
    assert friedman(np.full((4, 3), 2.0)) == (0, 1, 0, 1)


def test_systems_with_equal_mean_ranks():
    cycle = np.array([[1, 2, 3], [2, 3, 1], [3, 1, 2]])
    assert friedman(cycle) == (0, 1, 0, 1)


@pytest.mark.parametrize(("domains", "row", "p"), [(2, [1, 2, 3], 1 / 6), (3, [1, 2.5, 2.5], 1 / 9)])
def test_all_domains_agree(domains, row, p):
    found = friedman(np.array([row] * domains))
    assert math.isinf(found.f)
    assert found.p == pytest.approx(p)
    assert found.chi2 == pytest.approx(domains * 2)


def test_many_systems_and_domains_that_agree():
    assert friedman(np.tile(np.arange(1.0, 41), (7, 1))).p < 1e-200


def test_pairwise_is_symmetric():
    p = pairwise([1.0, 2.0, 3.0], 6)
    np.testing.assert_array_equal(p, p.T)
    assert np.diag(p).tolist() == [1, 1, 1]
    assert p[0, 2] == pytest.approx(math.erfc(2 / math.sqrt(1 / 3) / math.sqrt(2)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ranks(np.array([[0.1, 0.2], [0.3, np.nan]]), True), "NaN in domain 1 for system 1"),
        (lambda: ranks(np.array([0.1, 0.2]), True), r"shape \(2,\)"),
        (lambda: friedman(np.array([[1.0, 2, 3]])), "at least 2 domains"),
        (lambda: friedman(np.array([[1.0, 2], [1, 2]])), "3 systems"),
        (lambda: friedman(np.array([[0.9, 0.8, 0.7], [0.9, 0.8, 0.7]])), "no ranks"),
        (lambda: holm([0.1, math.nan]), "from 0 to 1"),
        (lambda: holm([0.1, 1.1]), "from 0 to 1"),
        (lambda: summary({"a": [0.1]}, ["x", "y"], True), "1 values of a, expected one for each of 2"),
        (lambda: summary({name: [0.1, math.nan] for name in "abc"}, ["x", "y"], True), "NaN"),
    ],
)
def test_refused(call, message):
    with pytest.raises(AnomedError, match=message):
        call()


# --- summary ---------------------------------------------------------------------------------------------------------


VALUES: dict[str, list[float | None]] = {
    "random": [0.5, 0.4, 0.5, 0.5],
    "padim": [0.8, 0.7, 0.9, None],
    "mean": [None, None, None, None],
    "patchcore": [0.9, 0.8, 0.8, 0.9],
    "constant": [0.5, 0.5, 0.4, 0.5],
}
DOMAINS = ["brain", "liver", "resc", "chest"]


def test_summary():
    found = summary(VALUES, DOMAINS, higher=True)
    json.dumps(found, allow_nan=False)
    assert found["left_out"] == {
        "systems": {"mean": "no value in any domain"},
        "domains": {"chest": "no value of padim"},
    }
    assert found["domains"] == ["brain", "liver", "resc"]
    assert found["systems"] == ["patchcore", "padim", "random", "constant"]
    assert found["mean_ranks"] == pytest.approx([4 / 3, 5 / 3, 3.5, 3.5])
    ranked = np.array([[1, 2, 3.5, 3.5], [1, 2, 4, 3], [2, 1, 3, 4]])
    assert found["friedman"] == friedman(ranked)._asdict()
    assert found["critical_difference"] == critical_difference(4, 3)
    assert found["groups"] == [["patchcore", "padim", "random", "constant"]]
    names = [(pair["first"], pair["second"]) for pair in found["pairs"]]
    assert names == list(itertools.combinations(found["systems"], 2))
    p = pairwise(found["mean_ranks"], 3)
    assert [pair["p"] for pair in found["pairs"]] == [p[0, 1], p[0, 2], p[0, 3], p[1, 2], p[1, 3], p[2, 3]]
    assert [pair["holm"] for pair in found["pairs"]] == holm([pair["p"] for pair in found["pairs"]]).tolist()


def test_summary_lower_is_better():
    turned = {system: [None if v is None else -v for v in row] for system, row in VALUES.items()}
    assert summary(turned, DOMAINS, higher=False) == summary(VALUES, DOMAINS, higher=True)


def test_summary_groups():
    systems = [f"s{place}" for place in range(6)]
    found = summary({system: [-float(systems.index(system))] * 7 for system in systems}, list("abcdefg"), True)
    assert found["critical_difference"] == pytest.approx(2.850, abs=1e-3)
    assert found["groups"] == [["s0", "s1", "s2"], ["s1", "s2", "s3"], ["s2", "s3", "s4"], ["s3", "s4", "s5"]]
    assert found["friedman"]["f"] is None
    assert found["friedman"]["p"] == pytest.approx(math.factorial(6) ** -6.0)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "0 systems have values: ranks over domains are tested for 3 or more"),
        ({"a": [1, 1], "b": [None, None], "c": [None, None]}, "1 system has values: .*"),
        ({"a": [1, 1], "b": [0, 0], "c": [None, None]}, "2 systems have values: .*"),
        (
            {"a": [1, 1], "b": [0, 0], "c": [None, 1]},
            r"1 of 2 domains with a value of every system, at least 2 are needed \(c has values in 1\)",
        ),
        ({"a": [1, None], "b": [None, 0], "c": [1, 1]}, "0 of 2 domains with .*"),
    ],
)
def test_summary_gives_a_reason(values: dict[str, Any], reason: str) -> None:
    found = summary(values, ["x", "y"], True)
    assert set(found) == {"left_out", "reason"}
    assert re.fullmatch(reason, found["reason"])
