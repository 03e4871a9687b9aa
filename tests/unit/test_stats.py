"""Resampling: draws that repeat, intervals against their definition, paired differences."""

import numpy as np
import pytest
from scipy.stats import norm, t

from anomed import stats


def test_draws_take_as_many_subjects_as_there_are_and_repeat() -> None:
    parts = list(stats.draws(12, 150))
    drawn = np.concatenate(parts)
    assert [len(part) for part in parts] == [64, 64, 22]
    assert (drawn.sum(axis=1) == 12).all()
    assert len(np.unique(drawn, axis=0)) == 150
    np.testing.assert_array_equal(drawn, np.concatenate(list(stats.draws(12, 150))))
    np.testing.assert_array_equal(drawn[:70], np.concatenate(list(stats.draws(12, 70))))  # more only adds
    # a subject is drawn Poisson-like: mean 1, variance 1 - 1/12
    many = np.concatenate(list(stats.draws(12, 20_000)))
    np.testing.assert_allclose(many.mean(axis=0), 1, atol=0.03)
    np.testing.assert_allclose(many.var(axis=0), 1 - 1 / 12, atol=0.05)


@pytest.mark.parametrize("units", [8, 30, 500])
def test_interval_takes_expanded_percentiles(units: int) -> None:
    values = np.random.default_rng(0).permutation(np.linspace(0, 1, 4001))
    tail = norm.cdf(t.ppf(0.025, units - 1) * (units / (units - 1)) ** 0.5)
    found = stats.interval(values, units)
    assert found.reason is None
    assert found.low == pytest.approx(tail, abs=1e-9)
    assert found.high == pytest.approx(1 - tail, abs=1e-9)
    assert tail < 0.025
    if units == 500:
        assert tail == pytest.approx(0.025, abs=5e-4)


@pytest.mark.parametrize(("value", "units"), [(0.5, 500), (0.97, 40), (0.03, 12)])
def test_interval_of_a_share_is_symmetric_in_log_odds(value: float, units: int) -> None:
    spread = np.random.default_rng(0).normal(0, 0.3 * value * (1 - value), 4000)
    found = stats.interval(value + spread, units, value)
    assert found.low is not None
    assert found.high is not None
    half = t.ppf(0.975, units - 1) * (units / (units - 1)) ** 0.5 * spread.std() / (value * (1 - value))
    odds = np.log([found.low / (1 - found.low), found.high / (1 - found.high)])
    assert odds == pytest.approx(np.log(value / (1 - value)) + np.array([-half, half]), rel=1e-9)
    assert 0 < found.low < value < found.high < 1


def test_interval_stays_among_the_replicates_and_holds_its_value() -> None:
    jumping = np.where(np.arange(1000) < 30, 0.4, 0.99)  # few replicates lose half: log odds alone would say 0.0 to 1.0
    found = stats.interval(jumping, 50, 0.985)
    assert (found.low, found.high) == (0.4, 0.99)
    assert stats.interval(np.full(1000, 0.5), 50, 0.5 + 1e-9) == (0.5 + 1e-9, 0.5 + 1e-9, None)
    for end in (0.0, 1.0):
        assert stats.interval(np.full(1000, end), 50, end) == (end, end, None)
    values = np.linspace(0.9, 1, 1001)
    assert stats.interval(values, 50, 1.0) == stats.interval(values, 50)


def test_no_interval_has_a_reason() -> None:
    for units in (0, 1, 7):
        reason = f"{units} of the 8 subjects that an interval needs"
        assert stats.interval(np.ones(1000), units) == (None, None, reason)
    assert stats.interval(np.ones(999), 8).reason is None
    assert stats.interval(np.ones(100), 8).reason == "100 replicates where 8 subjects need 174"
    assert stats.interval(np.ones(173), 8).reason is not None
    assert stats.interval(np.ones(174), 8).reason is None
    values = np.ones(1000)
    values[:50] = np.nan
    assert stats.interval(values, 50) == (1.0, 1.0, None)
    values[50] = np.nan
    reason = "too few subjects: 51 of 1000 replicates have no value"
    assert stats.interval(values, 50) == (None, None, reason)
    assert stats.difference(values, np.ones(1000), 50) == ((None, None, reason), None)
    assert stats.interval(np.full(3, np.nan), 50).reason == "too few subjects: 3 of 3 replicates have no value"


def test_a_paired_difference_is_narrower_than_its_parts() -> None:
    random = np.random.default_rng(1)
    shared = random.normal(0.8, 0.05, 1000)
    first, second = shared + random.normal(0, 0.002, 1000), shared + 0.01 + random.normal(0, 0.002, 1000)
    found = stats.difference(first, second, 300)
    assert found.interval.low == pytest.approx(0.01 - 1.96 * 0.002 * 2**0.5, abs=1e-3)
    assert found.interval.high == pytest.approx(0.01 + 1.96 * 0.002 * 2**0.5, abs=1e-3)
    assert found.p is not None
    assert found.p < 0.01
    back = stats.difference(second, first, 300)
    assert back.interval.low == pytest.approx(-(found.interval.high or 0), abs=1e-12)
    assert back.p == found.p


def test_p_counts_the_replicates_on_the_other_side() -> None:
    zero = np.zeros(999)
    many = 1_000_000
    assert stats.difference(zero, zero, many).p == 1.0
    noise = np.random.default_rng(0).normal(0, 0.25, 999)
    beyond = stats.difference(zero, 1.25 + noise, many).p  # five standard deviations, further than any replicate
    assert beyond == pytest.approx(2 * norm.cdf(-(1.25 + noise.mean()) / noise.std()), rel=1e-3)
    assert 0 < (stats.difference(zero, zero + 1, many).p or 0) < 1e-11
    one = np.ones(999)
    one[:24] = -1
    assert stats.difference(zero, one, many).p == pytest.approx(
        2 * 23.5 / 998, rel=1e-3
    )  # half-way from the 24th to the 25th


@pytest.mark.parametrize("units", [9, 40])
def test_p_agrees_with_the_interval(units: int) -> None:
    """0 at the end of the interval is p = 0.05, with few subjects as with many."""
    values = np.random.default_rng(2).normal(size=20_001)
    low, high, _ = stats.interval(values, units)
    assert low is not None
    assert high is not None
    for end, outwards in ((low, -1e-9), (high, 1e-9)):
        outside = stats.difference(np.full_like(values, end + outwards), values, units).p
        inside = stats.difference(np.full_like(values, end - outwards), values, units).p
        assert (outside or 1) < 0.05 < (inside or 0)
        assert outside == pytest.approx(inside, abs=1e-6)
    few, lots = (stats.difference(np.zeros(999), np.ones(999), n).p for n in (units, 10_000))
    assert 0 < (lots or 0) < (few or 0) < 1e-3


def test_rounding_turns_no_interval_round() -> None:
    """Replicates that all equal the value but for its last digit."""
    value = 0.05
    for nearby in (np.nextafter(value, 1), np.nextafter(value, 0), value):
        found = stats.interval(np.full(1000, nearby), 12, value)
        assert found.low is not None
        assert found.high is not None
        assert found.low <= value <= found.high
