"""The other AUPRO definitions and mask rules against slow brute force, and where they depart from a sound measure."""

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from flood import regions
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from anomed.errors import AnomedError
from anomed.metrics.declare import NotComputable
from anomed.metrics.ranking import pixel_metrics
from anomed.metrics.variants import MASK_RULES, pro_200, pro_anomalib_fork, pro_bmad, pro_per_image

Pair = tuple[list[np.ndarray], list[np.ndarray]]
Point = tuple[Fraction, Fraction]


# --- brute force, each from its description -----------------------------------------------------------------------------


def point(called: list[np.ndarray], masks: list[np.ndarray]) -> Point:
    """False positive rate and mean overlap when `called` (bool) is called abnormal; regions are labelled anew."""
    false = sum(int(one[~mask].sum()) for one, mask in zip(called, masks, strict=True))
    shares = [
        Fraction(sum(bool(one[place]) for place in region), len(region))
        for one, mask in zip(called, masks, strict=True)
        for region in regions(mask)
    ]
    return Fraction(false, sum(int((~mask).sum()) for mask in masks)), sum(shares, Fraction(0)) / len(shares)


def area(points: list[Point]) -> Fraction:
    return sum(((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(points)), Fraction(0))


def slow_200(
    maps: list[np.ndarray], masks: list[np.ndarray], limit: float, from_smallest: bool = False
) -> float | None:
    low, high = min(float(one.min()) for one in maps), max(float(one.max()) for one in maps)
    if low == high:
        return None
    points = []
    for k in reversed(range(200)):
        threshold = low + (high - low) * k / 200
        rate, overlap = point([one > threshold for one in maps], masks)
        if float(rate) < limit:
            points.append((rate, overlap))
    if from_smallest and points:
        points = [(rate - points[0][0], overlap) for rate, overlap in points]
    if len(points) < 2 or points[-1][0] == 0:
        return None
    return float(area([(rate / points[-1][0], overlap) for rate, overlap in points]))


def slow_exact(maps: list[np.ndarray], masks: list[np.ndarray], limit: float) -> float:
    points = [(Fraction(0), Fraction(0))]
    for threshold in sorted({float(v) for one in maps for v in one.ravel()}, reverse=True):
        points.append(point([one >= threshold for one in maps], masks))
    cut, end = [points[0]], Fraction(limit)
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= end:
            cut.append((x1, y1) if x1 <= end else (end, y0 + (y1 - y0) * (end - x0) / (x1 - x0)))
    return float(area(cut) / end)


def slow_mean(
    function: Callable[..., float | None], maps: list[np.ndarray], masks: list[np.ndarray], limit: float
) -> float | None:
    if any(mask.all() for mask in masks):
        return None
    found = [function([one], [mask], limit) for one, mask in zip(maps, masks, strict=True) if mask.any()]
    return None if None in found else float(np.mean([value for value in found if value is not None]))


def slow_per_image(maps: list[np.ndarray], masks: list[np.ndarray], limit: float) -> float | None:
    return slow_mean(slow_exact, maps, masks, limit)


def slow_bmad(maps: list[np.ndarray], masks: list[np.ndarray], limit: float) -> float | None:
    return slow_mean(slow_200, maps, masks, limit)


def roc(normal: list[float], abnormal: list[float]) -> list[Point]:
    """(0, 0), then one point for each distinct score, falling."""
    found = [(Fraction(0), Fraction(0))]
    for threshold in sorted({*normal, *abnormal}, reverse=True):
        rates = [Fraction(sum(score >= threshold for score in part), len(part)) for part in (normal, abnormal)]
        found.append((rates[0], rates[1]))
    return found


def read(curve: list[Point], position: Fraction) -> Point:
    """A list of points at a position between two of them."""
    left = min(int(position), len(curve) - 2)
    (x0, y0), (x1, y1), share = curve[left], curve[left + 1], position - left
    return x0 + (x1 - x0) * share, y0 + (y1 - y0) * share


def slow_fork(maps: list[np.ndarray], masks: list[np.ndarray], limit: float) -> float | None:
    normal = [float(v) for one, mask in zip(maps, masks, strict=True) for v in one[~mask]]
    lesions = [[float(one[p]) for p in r] for one, mask in zip(maps, masks, strict=True) for r in regions(mask)]
    n = sum(float(rate) <= limit for rate, _ in roc(normal, [score for lesion in lesions for score in lesion]))
    if n == 1:
        return None
    totals = [[Fraction(0), Fraction(0)] for _ in range(n)]
    for lesion in lesions:
        curve = roc(normal, lesion)
        kept = [rate for rate, _ in curve if float(rate) <= limit]
        if abs(float(kept[-1]) - limit) <= 1e-8 + 1e-5 * limit:
            size, end = len(kept), Fraction(len(kept) - 1)
        elif kept[-1] > 0:
            size, above = len(kept) + 1, curve[len(kept)][0]
            end = len(kept) - 1 + (Fraction(limit) - kept[-1]) / (above - kept[-1])
        else:
            above = curve[len(kept)][0]
            size = sum(rate <= above for rate, _ in curve)
            end = size - 1 - (size - 1 - len(kept)) * Fraction(limit) / above
        positions = [Fraction(k * (size - 1), n - 1) for k in range(n - 1)] + [end]
        for total, position in zip(totals, positions, strict=True):
            rate, overlap = read(curve[:size], position)
            total[0] += rate / len(lesions)
            total[1] += overlap / len(lesions)
    ordered = sorted([(x, y) for x, y in totals], key=lambda p: p[0])
    return float(area(ordered) / totals[-1][0])


# --- data ------------------------------------------------------------------------------------------------------------


@st.composite
def images(draw: Any) -> Pair:
    """One to three small images of different sizes, a lesion somewhere; few scores, some that only lesions have."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=3))
    top = draw(st.sampled_from([1, 3, 9]))
    maps = [draw(hnp.arrays(np.float64, size, elements=st.integers(0, top).map(float))) for size in sizes]
    masks = [draw(hnp.arrays(bool, size)) for size in sizes]
    if not any(mask.any() for mask in masks):
        masks[0][0, 0] = True
    if all(mask.all() for mask in masks):
        masks[0][0, 0] = False
        maps.append(np.ones((1, 2)))
        masks.append(np.array([[True, False]]))
    shift = draw(st.sampled_from([0.0, 0.25, 1.5]))
    return [
        one + shift * np.arange(one.size).reshape(one.shape) % 3 * mask for one, mask in zip(maps, masks, strict=True)
    ], masks


@pytest.fixture(scope="module")
def large() -> Pair:
    """Twelve images of 32 x 40, eight with one to three lesions; two decimals, so that the brute force ends."""
    rng = np.random.default_rng(5)
    y, x = np.mgrid[:32, :40]
    maps, masks = [], []
    for number in range(12):
        mask = np.zeros((32, 40), bool)
        for _ in range(rng.integers(1, 4) if number % 3 else 0):
            mask |= (y - rng.integers(4, 28)) ** 2 + (x - rng.integers(4, 36)) ** 2 < rng.integers(2, 6) ** 2
        scores = rng.normal(0.3, 0.15, mask.shape) + mask * rng.gamma(2, 0.15, mask.shape)
        maps.append(np.maximum(scores, 0).round(2))
        masks.append(mask)
    return maps, masks


def value(
    function: Callable[..., float], maps: list[np.ndarray], masks: list[np.ndarray], limit: float
) -> float | None:
    try:
        return function(maps, masks, limit)
    except NotComputable:
        return None


def shifted_200(maps: list[np.ndarray], masks: list[np.ndarray], limit: float) -> float:
    return pro_200(maps, masks, limit, from_smallest=True)


def slow_shifted_200(maps: list[np.ndarray], masks: list[np.ndarray], limit: float) -> float | None:
    return slow_200(maps, masks, limit, from_smallest=True)


PAIRS = [
    pytest.param(pro_200, slow_200, id="pro_200"),
    pytest.param(shifted_200, slow_shifted_200, id="pro_200_from_smallest"),
    pytest.param(pro_per_image, slow_per_image, id="pro_per_image"),
    pytest.param(pro_bmad, slow_bmad, id="pro_bmad"),
    pytest.param(pro_anomalib_fork, slow_fork, id="pro_anomalib_fork"),
]
ALL = [pro_200, pro_per_image, pro_bmad, pro_anomalib_fork]


# --- against brute force ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fast", "slow"), PAIRS)
@given(data=images(), limit=st.sampled_from([0.05, 0.3, 0.5, 1.0]))
@settings(deadline=None, max_examples=60)
def test_variants_equal_brute_force(
    fast: Callable[..., float], slow: Callable[..., float | None], data: Pair, limit: float
) -> None:
    """Also where there is no value: it must be missing in both."""
    expected = slow(*data, limit)
    found = value(fast, *data, limit)
    assert (found is None) == (expected is None)
    assert found is None or found == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(("fast", "slow"), PAIRS)
def test_variants_equal_brute_force_on_larger_images(
    fast: Callable[..., float], slow: Callable[..., float | None], large: Pair
) -> None:
    found = fast(*large, 0.3)
    assert found == pytest.approx(slow(*large, 0.3), abs=1e-10)
    assert 0.3 < found < 1  # neither end, where much could be wrong unseen


def test_without_normal_images_and_with_one_image_per_image_is_ours(large: Pair) -> None:
    maps, masks = [large[0][1]], [large[1][1]]
    assert pro_per_image(maps, masks) == pytest.approx(pixel_metrics(maps, masks)["pixel_aupro"], abs=1e-4)


# --- laws that hold, and those that do not -------------------------------------------------------------------------------


def apart(masks: list[np.ndarray]) -> list[np.ndarray]:
    """Perfect maps: a gap of many steps between the highest normal and the lowest lesion score, no ties."""
    rng = np.random.default_rng(0)
    return [rng.uniform(0, 0.4, mask.shape) + 0.5 * mask for mask in masks]


@pytest.mark.parametrize("function", [pro_200, shifted_200, pro_per_image, pro_bmad])
def test_a_perfect_map_scores_one(function: Callable[..., float], large: Pair) -> None:
    assert function(apart(large[1]), large[1], 0.3) == pytest.approx(1, abs=1e-12)


def test_a_perfect_map_does_not_score_one_in_the_fork(large: Pair) -> None:
    """Curves are averaged by position in their list of points, and regions differ in how many points they have at rate
    0: where a small region has gone on to higher rates, a large one has still not got all its overlap."""
    assert 0.9 < pro_anomalib_fork(apart(large[1]), large[1]) < 0.999


def test_a_map_of_zeros_and_ones_that_is_perfect(large: Pair) -> None:
    """All 200 steps lie at rate 0, and a rate of 0 divided by the largest kept one is nothing. The fork reads the
    points (0, 0) and (1, 1) of three, and a straight line has the area one half."""
    maps = [mask.astype(float) for mask in large[1]]
    assert pixel_metrics(maps, large[1])["pixel_aupro"] == 1
    assert pro_per_image(maps, large[1]) == pytest.approx(1, abs=1e-12)
    for function in (pro_200, pro_bmad):
        with pytest.raises(NotComputable, match=r"200 of 200 steps have .* below 0\.3, all with the same rate"):
            function(maps, large[1])
    assert pro_anomalib_fork(maps, large[1]) == pytest.approx(0.5, abs=1e-12)


def test_a_constant_map(large: Pair) -> None:
    maps = [np.full(mask.shape, 0.1) for mask in large[1]]
    assert pro_per_image(maps, large[1]) == pytest.approx(0.15, abs=1e-12)
    for function, reason in (
        (pro_200, "^all scores are equal"),
        (pro_bmad, "^image 1: all scores are equal"),
        (pro_anomalib_fork, "more than 0.3 of the normal pixels"),
    ):
        with pytest.raises(NotComputable, match=reason):
            function(maps, large[1])


def test_a_strictly_increasing_transform_moves_only_the_stepped_ones(large: Pair) -> None:
    maps = [np.exp(6 * one) for one in large[0]]
    for function in (pro_per_image, pro_anomalib_fork):
        assert function(maps, large[1]) == pytest.approx(function(*large), abs=1e-12)
    for function in (pro_200, pro_bmad):
        assert abs(function(maps, large[1]) - function(*large)) > 0.05


def test_false_alarms_in_normal_images_cost_nothing_per_image(large: Pair) -> None:
    maps = [one if mask.any() else one + 10 for one, mask in zip(*large, strict=True)]
    for function in (pro_per_image, pro_bmad):
        assert function(maps, large[1]) == function(*large)
    for function in (pro_200, pro_anomalib_fork):
        assert function(maps, large[1]) < function(*large) - 0.1


def test_the_fork_passes_one_where_clamped_scores_tie_across_the_limit(large: Pair) -> None:
    rng, masks = np.random.default_rng(1), large[1][:4]
    maps = [np.maximum(rng.normal(-2, 1, mask.shape), 0) + mask * rng.uniform(3, 4, mask.shape) for mask in masks]
    assert pro_anomalib_fork(maps, masks) == pytest.approx(slow_fork(maps, masks, 0.3), abs=1e-10)
    assert pro_anomalib_fork(maps, masks) > 1
    assert pixel_metrics(maps, masks)["pixel_aupro"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("function", ALL)
def test_order_of_images_and_type_of_scores_do_not_matter(function: Callable[..., float], large: Pair) -> None:
    whole = [(100 * one).round() for one in large[0]]
    expected = function(whole, large[1])
    assert function(whole[::-1], large[1][::-1]) == pytest.approx(expected, abs=1e-12)
    for kind in (np.uint16, np.float32, np.float16):
        assert function([one.astype(kind) for one in whole], large[1]) == pytest.approx(expected, abs=1e-12)


# --- what cannot be computed or is wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ALL)
def test_what_has_no_value_has_a_reason(function: Callable[..., float]) -> None:
    scores, none, full = np.arange(6.0).reshape(2, 3), np.zeros((2, 3), bool), np.ones((2, 3), bool)
    with pytest.raises(NotComputable, match=r"^no abnormal image among 2$"):
        function([scores, scores], [none, none])
    with pytest.raises(NotComputable, match=r"^no normal pixel$"):
        function([scores], [full])


def test_an_abnormal_image_without_normal_pixels_has_no_curve_of_its_own() -> None:
    scores = np.arange(6.0).reshape(2, 3)
    for function in (pro_per_image, pro_bmad):
        with pytest.raises(NotComputable, match=r"^image 1 has no normal pixel$"):
            function([scores, scores], [scores > 3, scores > -1])


def test_one_kept_step_is_no_curve() -> None:
    """Three of four normal pixels lie between the last two steps, 990 and 995."""
    scores, mask = np.array([[0.0, 993.0, 993.0, 993.0, 1000.0]]), np.array([[False, False, False, False, True]])
    assert slow_200([scores], [mask], 0.25) is None
    with pytest.raises(NotComputable, match=r"^1 of 200 steps have .* below 0\.25, which is no curve$"):
        pro_200([scores], [mask], 0.25)


@pytest.mark.parametrize("function", ALL)
def test_bad_input_is_refused(function: Callable[..., float]) -> None:
    scores = np.arange(6.0).reshape(2, 3)
    mask = scores > 3
    for limit in (0, -0.1, 1.01):
        with pytest.raises(AnomedError, match="expected a false positive rate above 0 and at most 1"):
            function([scores], [mask], limit)
    for wrong in ((scores, mask.T), (scores, mask.astype(int)), (scores[0], mask[0]), (scores[:0], mask[:0])):
        with pytest.raises(AnomedError, match="image 0: found a map"):
            function([wrong[0]], [wrong[1]])
    for number in (1, 0):
        with pytest.raises(AnomedError, match=f"found {number} maps and 0 masks, expected one mask for each"):
            function([scores][:number], [])
    with pytest.raises(AnomedError, match="image 1: the map holds NaN or infinity"):
        function([scores, np.where(mask, np.nan, scores)], [mask, mask])


# --- mask rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ("any", [1, 25, 26, 59, 122, 127, 128, 254, 255]),
        ("at_least_0.1", [26, 59, 122, 127, 128, 254, 255]),
        ("integer_cast", [255]),
        ("above_0.5", [128, 254, 255]),
        ("after_shrinking", [1, 25, 26, 59, 122, 127, 128, 254, 255]),  # on a grid of its own size: as `any`
    ],
)
def test_grey_levels_that_a_rule_keeps(rule: str, kept: list[int]) -> None:
    """BraTS labels 1, 2 and 4 are the levels 59, 122 and 255; the others stand on either side of a cut."""
    levels = np.array([[0, 1, 25], [26, 59, 122], [127, 128, 254]], np.uint8)
    both = [levels, np.full((3, 3), 255, np.uint8)]
    found = {int(level) for grey in both for level in grey[MASK_RULES[rule](grey, 3)]}
    assert sorted(found) == kept
    assert all(MASK_RULES[rule](grey, 3).dtype == bool for grey in both)


def test_five_rules_are_tested() -> None:
    assert list(MASK_RULES) == ["any", "at_least_0.1", "integer_cast", "above_0.5", "after_shrinking"]


def test_shrinking_first_lets_a_lesion_grow() -> None:
    """To half the size: a pixel weighs 3/8 and 1/8 along each axis in two outputs, so one becomes four; a grey level
    that falls below one half is lost."""
    grey = np.zeros((8, 8), np.uint8)
    grey[2, 2] = 255
    expected = np.zeros((4, 4), bool)
    expected[:2, :2] = True
    np.testing.assert_array_equal(MASK_RULES["after_shrinking"](grey, 4), expected)
    grey[2, 2] = 1
    assert not MASK_RULES["after_shrinking"](grey, 4).any()
    y, x = np.mgrid[:240, :240]
    disc = ((y - 110) ** 2 + (x - 120) ** 2 < 20**2).astype(np.uint8) * 59
    grown = MASK_RULES["after_shrinking"](disc, 224).sum() / (disc > 0).sum() * (240 / 224) ** 2
    assert 1.05 < grown < 1.25
