"""Map codes: order kept on every score shape of the traps, the choice of the coordinate, decode then encode."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from anomed.errors import AnomedError
from anomed.mapcodes import TOP, Codec, stride
from anomed.metrics import counts, curves

COUNT = 400_000
_generator = np.random.default_rng(7)
LESION = _generator.random(COUNT) < 0.02
Z = _generator.normal(size=COUNT) + 1.5 * LESION
BACKGROUND = (_generator.random(COUNT) < 0.6) & ~LESION
MOST = (_generator.random(COUNT) < 0.9) & ~LESION

SHAPES = {
    "normal": lambda: Z,
    "signed x 1e3": lambda: 1e3 * Z,
    "exp(6z)": lambda: np.exp(6 * Z),
    "exp(2z) 1e4": lambda: 1e4 * np.exp(2 * Z),
    "-exp(-3m^2)": lambda: -np.exp(-3 * Z**2),
    "-exp(-(z+4)^2)": lambda: -np.exp(-((Z + 4) ** 2)),
    "1e-8 exp(z)": lambda: 1e-8 * np.exp(Z),
    "1e-6 (1+z/100)": lambda: 1e-6 * (1 + Z / 100),
    "100+z/100": lambda: 100 + Z / 100,
    "sinh(3z)": lambda: np.sinh(3 * Z),
    "-1e5+sinh(2z)": lambda: -1e5 + np.sinh(2 * Z),
    "background 0, exp(6z)": lambda: np.where(BACKGROUND, 0, np.exp(6 * Z)),
    "background 99, 100+z/100": lambda: np.where(BACKGROUND, 99, 100 + Z / 100),
    "background -1e5, -1e5+sinh(2z)": lambda: np.where(BACKGROUND, -1e5, -1e5 + np.sinh(2 * Z)),
    "lowest background, sinh(3z)": lambda: np.where(BACKGROUND, np.sinh(3 * Z).min(), np.sinh(3 * Z)),
    "lowest background, -1e5+sinh(2z)": lambda: -1e5 + np.where(BACKGROUND, np.sinh(2 * Z).min(), np.sinh(2 * Z)),
    "background 0, sinh(3z)": lambda: np.where(BACKGROUND, 0, np.sinh(3 * Z)),
    "background 0, normal": lambda: np.where(BACKGROUND, 0, Z),
    "background -1, sinh(3z)": lambda: np.where(BACKGROUND, -1, np.sinh(3 * Z)),
    "background amid, -1e5+sinh(2z)": lambda: -1e5 + np.where(BACKGROUND, 0, np.sinh(2 * Z)),
    "highest background, normal": lambda: np.where(BACKGROUND, 9, Z),
    "background 0 of nine in ten, sinh(3z)": lambda: np.where(MOST, 0, np.sinh(3 * Z)),
    "8-bit image": lambda: np.clip(np.rint(60 + 30 * Z), 0, 255),
}


def fitted(scores: np.ndarray) -> Codec:
    return Codec.fit(scores, float(scores.min()), float(scores.max()))


@pytest.mark.parametrize("name", SHAPES)
def test_ranks_survive_on_every_shape(name: str) -> None:
    scores = SHAPES[name]().astype(np.float32)
    codec = fitted(scores)
    codes = codec.encode(scores)
    exact, coded = counts.of_images(scores, LESION), counts.of_images(codes, LESION)
    assert abs(curves.auroc(exact) - curves.auroc(coded)) < 1e-5
    assert abs(curves.average_precision(exact) - curves.average_precision(coded)) < 1e-4
    assert (np.diff(codes[np.argsort(scores)].astype(int)) >= 0).all()
    assert codes.max() == TOP
    np.testing.assert_array_equal(codec.encode(codec.decode(codes)), codes)


def test_a_saturated_sigmoid_shows_in_the_excess_ties() -> None:
    with np.errstate(over="ignore"):
        codec = fitted((1 / (1 + np.exp(-8 * Z))).astype(np.float32))
    assert codec.excess_ties > 10 * fitted(SHAPES["normal"]().astype(np.float32)).excess_ties
    codes = codec.encode((1 / (1 + np.exp(-8 * Z))).astype(np.float32))
    np.testing.assert_array_equal(codec.encode(codec.decode(codes)), codes)


def test_each_coordinate_has_its_shape() -> None:
    chosen = {fitted(SHAPES[name]().astype(np.float32)).coordinate for name in ("normal", "exp(6z)")}
    saturated = fitted((1 / (1 + np.exp(-8 * Z))).astype(np.float32)).coordinate
    assert (chosen, saturated) == ({"asinh", "bits"}, "below")


def test_the_code_is_the_formula_of_the_contract() -> None:
    scores = Z[:1000].astype(np.float32)
    codec = fitted(scores)
    assert codec.coordinate == "asinh"
    x = np.sort(scores).astype(float)
    low, median, high = np.quantile(x, (0.25, 0.5, 0.75))
    t = np.arcsinh((x - median) / (high - low))
    assert (codec.lo, codec.hi) == (t[0], t[-1])  # 0.1 % of 1,000 scores: the lowest
    np.testing.assert_array_equal(codec.encode(np.sort(scores)), np.rint((t - t[0]) * TOP / (t[-1] - t[0])))


def test_a_sample_and_the_extremes_are_enough() -> None:
    scores = np.exp(6 * Z).astype(np.float32)
    codec = Codec.fit(scores[:: stride(COUNT, COUNT, 20_000)], float(scores.min()), float(scores.max()))
    exact, coded = counts.of_images(scores, LESION), counts.of_images(codec.encode(scores), LESION)
    assert codec.encode(scores.max()) == TOP
    assert abs(curves.auroc(exact) - curves.auroc(coded)) < 1e-5


@pytest.mark.parametrize("value", [0.0, -3.5, 1e-40, 3e38])
def test_equal_scores_are_code_0_and_come_back(value: float) -> None:
    scores = np.full(50, value, np.float32)
    codec = fitted(scores)
    np.testing.assert_array_equal(codec.encode(scores), 0)
    np.testing.assert_array_equal(codec.decode(codec.encode(scores)), scores)


@pytest.mark.parametrize("share", [0.02, 0.9995])
def test_a_mask_as_a_map_keeps_two_codes(share: float) -> None:
    """IQR 0; where ones are nearly all, the 0.1 % quantile is the maximum and code 0 must still be free for zero."""
    scores = np.zeros(10_000, np.float32)
    scores[: int(share * len(scores))] = 1
    codec = fitted(scores)
    assert codec.coordinate != "asinh"
    np.testing.assert_array_equal(codec.encode(scores), scores * TOP)
    np.testing.assert_array_equal(codec.decode(codec.encode(scores)), scores)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_scores_are_refused(bad: float) -> None:
    scores = np.array([0, bad, 1], np.float32)
    with pytest.raises(AnomedError, match="anomaly maps hold NaN or infinity"):
        fitted(scores)
    with pytest.raises(AnomedError, match="anomaly maps hold NaN or infinity"):
        Codec.fit(scores[[0, 2]], 0.0, np.inf)


def test_a_range_beyond_float32_is_refused() -> None:
    with pytest.raises(AnomedError, match=r"anomaly maps span -3e\+38 to 2e\+38, a range that float32 cannot hold"):
        fitted(np.array([-3e38, 0, 2e38], np.float32))


def test_minus_zero_is_zero() -> None:
    codec = fitted(np.array([-1, -0.0, 0.0, 1, 2, 3], np.float32))
    assert codec.encode(np.float32(-0.0)) == codec.encode(np.float32(0.0))


def test_constants_travel_through_json() -> None:
    scores = np.sinh(3 * Z[:5000]).astype(np.float32)
    codec = fitted(scores)
    again = Codec.from_dict(json.loads(json.dumps(codec.to_dict())))
    assert again == codec
    np.testing.assert_array_equal(again.encode(scores), codec.encode(scores))
    for damage in ({"lo": float("nan")}, {"coordinate": "linear"}, {"extra": 1}):
        with pytest.raises(AnomedError, match=r"expected \['coordinate', 'lo', 'hi'"):
            Codec.from_dict({**codec.to_dict(), **damage})


@given(hnp.arrays(np.float32, st.integers(1, 60), elements=st.floats(-(2.0**126), 2.0**126, width=32)))
@settings(max_examples=100, deadline=None)
def test_order_and_identity_on_any_finite_scores(scores: np.ndarray) -> None:
    codec = fitted(scores)
    codes = codec.encode(scores)
    assert (np.diff(codes[np.argsort(scores)].astype(int)) >= 0).all()
    assert codes.max() == (TOP if scores.min() < scores.max() else 0)
    decoded = codec.decode(codes)
    assert decoded.dtype == np.float32
    assert np.isfinite(decoded).all()
    np.testing.assert_array_equal(codec.encode(decoded), codes)


@given(st.integers(0, 10**10), st.integers(1, 10**7))
def test_stride_is_within_the_cap_and_walks_over_all_columns(total: int, factor: int) -> None:
    step = stride(total, factor)
    assert total / step <= 1_000_000
    assert np.gcd(step, factor) == 1


@given(
    hnp.arrays(np.float32, st.integers(2, 60), elements=st.floats(-1000, 1000, width=32)),
    st.floats(-1000, 1000, width=32),
    st.integers(1, 200),
)
@settings(max_examples=100, deadline=None)
def test_a_background_shares_its_code_with_nothing(scores: np.ndarray, value: float, times: int) -> None:
    scores = np.concatenate([scores, np.full(times + len(scores), value, np.float32)])
    codec = fitted(scores)
    codes = codec.encode(scores)
    assert (np.diff(codes[np.argsort(scores)].astype(int)) >= 0).all()
    np.testing.assert_array_equal(codec.encode(codec.decode(codes)), codes)
    if codec.lo < codec.hi:
        assert (scores[codes == codec.encode(np.float32(value))] == np.float32(value)).all()
        assert codec.decode(codec.encode(np.float32(value))) == np.float32(value)
