"""Ranking metrics against brute force and scikit-learn, and the laws that every one of them must obey."""

import doctest
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flood import regions
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from paths import ROOT
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score, roc_curve

from anomed.errors import AnomedError
from anomed.metrics import curves, ranking
from anomed.metrics.__main__ import page
from anomed.metrics.counts import Counts, NotComputable, of_images
from anomed.metrics.declare import METRICS, metric, metrics
from anomed.metrics.histogram import PixelHistogram
from anomed.metrics.ranking import (
    image_ap,
    image_ap_normal,
    image_auroc,
    image_f1,
    image_f1_oracle,
    image_sensitivity,
    pixel_ap,
    pixel_aupro,
    pixel_auroc,
    pixel_dice,
    pixel_dice_oracle,
    pixel_sensitivity,
)

SHIPPED = [
    "image_auroc", "image_ap", "image_ap_normal", "image_sensitivity", "image_f1", "image_f1_oracle",
    "pixel_auroc", "pixel_ap", "pixel_aupro", "pixel_sensitivity", "pixel_dice", "pixel_dice_oracle",
]  # fmt: skip
IMAGE: dict[str, Callable[..., float]] = {found.name: found.function for found in metrics("image")}
PIXEL: dict[str, Callable[..., float]] = {found.name: found.function for found in metrics("pixel")}
CUT = ("image_f1", "pixel_dice")  # these need a threshold
BEST = {name: found.high if found.direction == "higher" else found.low for name, found in METRICS.items()}
Pair = tuple[list[np.ndarray], list[np.ndarray]]


# --- independent oracles ---------------------------------------------------------------------------------------------


def pairs(scores: np.ndarray, labels: np.ndarray) -> float:
    """AUROC by looking at every pair of an abnormal and a normal item."""
    won = [(a > n) + 0.5 * (a == n) for a in scores[labels].tolist() for n in scores[~labels].tolist()]
    return math.fsum(won) / len(won)


def thresholds(scores: np.ndarray, labels: np.ndarray) -> float:
    """AP by calling everything at or above each distinct score abnormal."""
    total, before = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        called = scores >= threshold
        recall, precision = (called & labels).sum() / labels.sum(), (called & labels).sum() / called.sum()
        total, before = total + (recall - before) * precision, recall
    return total


def best_f1(scores: np.ndarray, labels: np.ndarray) -> float:
    """F1 at every distinct score, by scikit-learn."""
    return max(float(f1_score(labels, scores >= threshold)) for threshold in set(scores.tolist()))


def found_at(scores: np.ndarray, labels: np.ndarray, rate: float) -> float:
    """Sensitivity at a false positive rate, on scikit-learn's ROC curve; at a vertical step its upper end."""
    false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
    if rate in false:
        return float(true[false == rate].max())
    return float(np.interp(rate, false, true))


def per_region(maps: list[np.ndarray], masks: list[np.ndarray], limit: float) -> float:
    """AUPRO by one pass over all regions for each threshold."""
    lesions = [(scores, region) for scores, mask in zip(maps, masks, strict=True) for region in regions(mask)]
    normal = np.concatenate([scores[~mask] for scores, mask in zip(maps, masks, strict=True)])
    points = [(0.0, 0.0)]
    for threshold in sorted(set(np.concatenate([one.ravel() for one in maps]).tolist()), reverse=True):
        overlap = [sum(scores[place] >= threshold for place in region) / len(region) for scores, region in lesions]
        points.append(((normal >= threshold).mean(), float(np.mean(overlap))))
    area = 0.0
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 < limit < x1:
            x1, y1 = limit, y0 + (y1 - y0) * (limit - x0) / (x1 - x0)
        if x1 <= limit:
            area += (x1 - x0) * (y0 + y1) / 2
    return area / limit


# --- data ------------------------------------------------------------------------------------------------------------


def histogram(maps: list[np.ndarray], masks: list[np.ndarray]) -> PixelHistogram:
    counted = PixelHistogram()
    for codes, mask in zip(maps, masks, strict=True):
        counted.update(codes, mask)
    return counted


@st.composite
def coded(draw: Any, top: int = 12) -> Pair:
    """One to three small images of different sizes, few codes (so, many ties), both classes present."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=3))
    maps = [draw(hnp.arrays(np.uint16, size, elements=st.integers(0, top))) for size in sizes]
    masks = [draw(hnp.arrays(bool, size)) for size in sizes]
    shares = np.concatenate([mask.ravel() for mask in masks])
    if not shares.any():
        masks[0][0, 0] = True
    if shares.all():
        masks[0][0, 0] = False
    if sum(mask.size for mask in masks) == 1:
        maps, masks = [np.array([[0, 1]], np.uint16)], [np.array([[False, True]])]
    return maps, masks


def scored(count: int = 2) -> st.SearchStrategy[tuple[np.ndarray, np.ndarray]]:
    """Image scores full of ties with labels of both classes."""
    items = st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=count, max_size=30)
    both = items.filter(lambda found: len({label for _, label in found}) == 2)
    return both.map(lambda found: (np.array([s / 8 for s, _ in found]), np.array([label for _, label in found])))


@pytest.fixture(scope="module")
def large() -> Pair:
    """Twelve non-square images of two sizes with several regions; half of them normal."""
    generator = np.random.default_rng(5)
    maps, masks = [], []
    for number in range(12):
        shape = (60, 90) if number % 2 else (75, 50)
        mask = np.zeros(shape, bool)
        for _ in range(4 if number < 6 else 0):
            y, x, side = generator.integers((0, 0, 1), (shape[0] - 12, shape[1] - 12, 13))
            mask[y : y + side, x : x + side] = True
        scores = generator.normal(size=shape) + mask * generator.random()
        maps.append(np.clip(30_000 + 7_000 * scores, 0, 65_535).astype(np.uint16))
        masks.append(mask)
    return maps, masks


# --- agreement -------------------------------------------------------------------------------------------------------


@given(scored())
def test_image_metrics_equal_brute_force_and_scikit_learn(data: tuple[np.ndarray, np.ndarray]) -> None:
    assert image_auroc(*data) == pytest.approx(pairs(*data), abs=1e-12)
    assert image_ap(*data) == pytest.approx(thresholds(*data), abs=1e-12)
    scores, labels = data
    assert image_auroc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert image_ap(scores, labels) == pytest.approx(average_precision_score(labels, scores), abs=1e-12)
    assert image_ap_normal(scores, labels) == pytest.approx(average_precision_score(~labels, -scores), abs=1e-12)
    assert image_f1_oracle(scores, labels) == pytest.approx(best_f1(scores, labels), abs=1e-12)


@given(scored(), st.sampled_from([0.05, 0.2, 0.5, 0.9]), st.integers(-5, 5))
def test_image_metrics_at_a_point_equal_scikit_learn(
    data: tuple[np.ndarray, np.ndarray], rate: float, threshold: int
) -> None:
    scores, labels = data
    found = image_sensitivity(scores, labels, sensitivity_fpr=rate)
    assert found == pytest.approx(found_at(scores, labels, rate), abs=1e-12)
    called = scores >= threshold / 8
    assert image_f1(scores, labels, threshold=threshold / 8) == pytest.approx(f1_score(labels, called), abs=1e-12)


@given(coded(), st.sampled_from([0.05, 0.3, 0.5, 1.0]))
@settings(deadline=None)
def test_pixel_metrics_equal_brute_force(data: Pair, limit: float) -> None:
    counted = histogram(*data)
    scores, labels = (np.concatenate([one.ravel() for one in part]) for part in data)
    assert pixel_auroc(counted) == pytest.approx(pairs(scores, labels), abs=1e-12)
    assert pixel_ap(counted) == pytest.approx(thresholds(scores, labels), abs=1e-12)
    assert pixel_aupro(counted, aupro_limit=limit) == pytest.approx(per_region(*data, limit), abs=1e-12)
    assert counted.regions == sum(len(regions(mask)) for mask in data[1])
    assert pixel_dice_oracle(counted) == pytest.approx(best_f1(scores, labels), abs=1e-12)
    assert pixel_dice(counted, threshold=7) == pytest.approx(f1_score(labels, scores >= 7), abs=1e-12)
    found = pixel_sensitivity(counted, sensitivity_fpr=min(limit, 0.9))
    assert found == pytest.approx(found_at(scores, labels, min(limit, 0.9)), abs=1e-12)


def test_pixel_metrics_equal_scikit_learn_on_codes(large: Pair) -> None:
    counted = histogram(*large)
    scores, labels = (np.concatenate([one.ravel() for one in part]) for part in large)
    assert pixel_auroc(counted) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert pixel_ap(counted) == pytest.approx(average_precision_score(labels, scores), abs=1e-12)
    assert counted.counts().sizes() == {
        "normal": int((~labels).sum()),
        "abnormal": int(labels.sum()),
        "regions": sum(len(regions(mask)) for mask in large[1]),
    }
    assert counted.images == 12


def test_aupro_equals_brute_force_on_larger_images(large: Pair) -> None:
    maps = [(one >> 9) for one in large[0]]  # 128 thresholds: the brute force takes one pass for each
    assert pixel_aupro(histogram(maps, large[1])) == pytest.approx(per_region(maps, large[1], 0.3), abs=1e-12)


def test_a_limit_that_is_a_point_of_the_curve_is_met_exactly() -> None:
    """Two normal pixels: the rates are 0, 0.5 and 1; at 0.5 the curve jumps within one vertical line."""
    codes, mask = np.array([[9, 8, 7, 6]], np.uint16), np.array([[False, True, False, True]])
    value = pixel_aupro(histogram([codes], [mask]), aupro_limit=0.5)
    assert value == per_region([codes], [mask], 0.5) == 0.0
    assert pixel_aupro(histogram([codes], [mask]), aupro_limit=1.0) == 0.25


def test_aupro_equals_anomalib(large: Pair) -> None:
    """anomalib 2.3 and later; it sums in float32. Its limit is a point of the curve, ours is met exactly: the limits
    are chosen from the rates that occur."""
    torch = pytest.importorskip("torch")
    from anomalib.metrics.aupro import _AUPRO

    counted = histogram(*large)
    rates = np.cumsum((counted.total - counted.lesion)[::-1]) / (counted.total - counted.lesion).sum()
    sides = {mask.shape for mask in large[1]}
    for wanted in (0.05, 0.3, 1.0):
        limit = float(rates[np.searchsorted(rates, wanted)])
        theirs = _AUPRO(fpr_limit=limit)
        height, width = (max(side[axis] for side in sides) for axis in (0, 1))
        for codes, mask in zip(*large, strict=True):
            # it takes images of one size: pad with the lowest score of all, on our side as well
            scores, truth = np.zeros((height, width), np.float32), np.zeros((height, width), int)
            scores[: mask.shape[0], : mask.shape[1]], truth[: mask.shape[0], : mask.shape[1]] = codes / 65_536, mask
            theirs.update(torch.from_numpy(scores)[None], torch.from_numpy(truth)[None])
        padded = [np.zeros((height, width), np.uint16) for _ in large[0]]
        truths = [np.zeros((height, width), bool) for _ in large[1]]
        for codes, mask, wide, truth in zip(*large, padded, truths, strict=True):
            wide[: mask.shape[0], : mask.shape[1]], truth[: mask.shape[0], : mask.shape[1]] = codes, mask
        ours = pixel_aupro(histogram(padded, truths), aupro_limit=limit)
        assert ours == pytest.approx(float(theirs.compute()), abs=1e-5), wanted


def test_fifty_million_pixels_lose_no_count() -> None:
    """float32 sums stop counting at 16.8 million: here the lowest code alone has 45 million pixels."""
    counted = PixelHistogram()
    codes, mask = np.zeros((1000, 1000), np.uint16), np.zeros((1000, 1000), bool)
    codes[:100] = np.arange(1000, dtype=np.uint16)[None]
    codes[200, 0] = 0  # and one pixel apart, so that the count of code 0 is odd in every image
    codes[200, 1] = 1
    mask[90:100] = True
    for _ in range(50):
        counted.update(codes, mask)
    assert counted.total[0] == 50 * (900_000 - 1 + 100)
    assert counted.total[1] == 50 * 101
    assert counted.counts().sizes() == {"normal": 49_500_000, "abnormal": 500_000, "regions": 50}
    # by hand: lesions have every code from 0 to 999 as often; so have 90,000 normals an image, one more has 1, the others 0
    k = np.arange(1000)
    below = np.where(k == 0, 0, 900_000 + 90 * k) - (k == 1)
    same = np.where(k == 0, 900_089, np.where(k == 1, 91, 90))
    assert pixel_auroc(counted) == pytest.approx(float(np.mean(below + same / 2)) / 990_000, abs=1e-15)


def test_of_equal_thresholds_the_highest_is_chosen() -> None:
    """Called from 3 on: 1 right of 1, 1 missed, F1 2/3; from 1 on: 2 right of 4, F1 2/3."""
    counts = of_images([3, 1, 1, 1, 0], [1, 1, 0, 0, 0])
    assert curves.dice(counts).tolist() == pytest.approx([2 / 3, 2 / 3, 4 / 7])
    assert curves.best_threshold(counts) == 3
    mask = np.array([[True, True, False, False, False]])
    assert curves.best_threshold(histogram([np.array([[3, 1, 1, 1, 0]], np.uint16)], [mask]).counts()) == 3


def test_diagonal_neighbours_are_one_region() -> None:
    mask = np.eye(4, dtype=bool)
    assert histogram([np.zeros((4, 4), np.uint16)], [mask]).regions == 1


# --- laws ------------------------------------------------------------------------------------------------------------


@given(scored())
def test_image_metrics_obey_the_laws(data: tuple[np.ndarray, np.ndarray]) -> None:
    scores, labels = data
    order = np.random.default_rng(0).permutation(len(scores))
    for name, function in IMAGE.items():
        at: Any = {"threshold": 0.0} if name in CUT else {}
        moved: Any = {"threshold": 1.0} if name in CUT else {}
        value = function(scores, labels, **at)
        assert METRICS[name].low <= value <= METRICS[name].high, name
        assert function(np.exp(6 * scores), labels, **moved) == value, name  # strictly increasing
        assert function(scores[order], labels[order], **at) == value, name
        assert function(np.tile(scores, 2), np.tile(labels, 2), **at) == pytest.approx(value, abs=1e-12), name
        assert function(labels.astype(float), labels, **moved) == BEST[name], name
    assert image_auroc(scores, ~labels) == pytest.approx(1 - image_auroc(scores, labels), abs=1e-12)
    assert image_auroc(np.full(len(labels), 0.1), labels) == 0.5
    assert image_ap(np.zeros(len(labels)), labels) == pytest.approx(labels.mean(), abs=1e-12)
    assert image_ap_normal(np.zeros(len(labels)), labels) == pytest.approx((~labels).mean(), abs=1e-12)
    assert image_sensitivity(np.zeros(len(labels)), labels, sensitivity_fpr=0.2) == pytest.approx(0.2, abs=1e-15)
    share = labels.mean()
    assert image_f1_oracle(np.zeros(len(labels)), labels) == pytest.approx(2 * share / (1 + share), abs=1e-12)


@given(coded())
@settings(deadline=None)
def test_pixel_metrics_obey_the_laws(data: Pair) -> None:
    maps, masks = data
    table = np.sort(np.random.default_rng(0).choice(65_536, 13, replace=False)).astype(np.uint16)
    counted = histogram(maps, masks)
    for name, function in PIXEL.items():
        at: Any = {"threshold": 5} if name in CUT else {}
        moved: Any = {"threshold": int(table[5])} if name in CUT else {}
        value = function(counted, **at)
        assert METRICS[name].low <= value <= METRICS[name].high, name
        other = histogram([table[one] for one in maps], masks)
        assert function(other, **moved) == pytest.approx(value, abs=1e-12), name
        assert function(histogram(maps[::-1], masks[::-1]), **at) == pytest.approx(value, abs=1e-12), name
        assert function(histogram(maps * 2, masks * 2), **at) == pytest.approx(value, abs=1e-12), name
        oracle = [mask.astype(np.uint16) * 9 for mask in masks]
        assert function(histogram(oracle, masks), **at) == BEST[name], name
    flipped = histogram(maps, [~mask for mask in masks])
    assert pixel_auroc(flipped) == pytest.approx(1 - pixel_auroc(counted), abs=1e-12)
    constant = histogram([np.full_like(one, 77) for one in maps], masks)
    assert pixel_auroc(constant) == 0.5
    assert pixel_aupro(constant) == pytest.approx(0.15, abs=1e-15)
    assert pixel_aupro(constant, aupro_limit=1) == 0.5
    assert pixel_sensitivity(constant) == pytest.approx(0.05, abs=1e-15)


@given(coded())
@settings(deadline=None)
def test_merged_histograms_equal_one(data: Pair) -> None:
    maps, masks = data
    parts = PixelHistogram()
    for pair in zip(maps, masks, strict=True):
        parts.merge(histogram(*[[one] for one in pair]))
    whole = histogram(maps, masks)
    stacked = histogram([np.stack([one, one]) for one in maps], [np.stack([one, one]) for one in masks])
    np.testing.assert_array_equal(stacked.total, 2 * whole.total)
    again = PixelHistogram()
    for codes, mask in zip(maps, masks, strict=True):
        again.update(codes, mask)
        again.update(codes, mask)
    np.testing.assert_array_equal(stacked.overlap, again.overlap)  # to the last bit, whatever the batch
    np.testing.assert_allclose(stacked.overlap, 2 * whole.overlap, rtol=1e-14)
    assert (stacked.regions, stacked.images) == (2 * whole.regions, 2 * whole.images)
    np.testing.assert_array_equal(parts.total, whole.total)
    np.testing.assert_array_equal(parts.lesion, whole.lesion)
    np.testing.assert_allclose(parts.overlap, whole.overlap, rtol=1e-14)
    assert (parts.regions, parts.images) == (whole.regions, whole.images)
    assert parts.overlap.sum() == pytest.approx(parts.regions, rel=1e-12)


@given(coded(), st.integers(0, 5))
@settings(deadline=None)
def test_only_the_pixels_within_count(data: Pair, seed: int) -> None:
    """Pixels outside the organ as if they were not in the image: a lesion cut in two is two regions."""
    random = np.random.default_rng(seed)
    inside = [random.random(mask.shape) < 0.7 for mask in data[1]]
    counted = PixelHistogram()
    for codes, mask, within in zip(*data, inside, strict=True):
        counted.update(codes, mask, within)
    scores, labels = (np.concatenate([one[within] for one, within in zip(part, inside, strict=True)]) for part in data)
    assert counted.regions == sum(len(regions(mask & within)) for mask, within in zip(data[1], inside, strict=True))
    assert counted.overlap.sum() == pytest.approx(counted.regions, rel=1e-12)
    np.testing.assert_array_equal(counted.total, np.bincount(scores, minlength=65_536))
    np.testing.assert_array_equal(counted.lesion, np.bincount(scores[labels], minlength=65_536))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3)), min_size=2, max_size=9))
def test_many_counts_at_once_equal_one_by_one(items: list[tuple[int, int, int]]) -> None:
    """With leading axes every metric gives what it gives alone, and NaN where it has no value alone."""
    normal, abnormal, regions = (np.array(part, float) for part in zip(*items, strict=True))
    overlap = np.where(abnormal > 0, regions + 0.25, 0)
    rows = np.array([[1.0] * len(items), [0.0] * len(items), [2.0, *[1.0] * (len(items) - 1)]])
    for name, found in METRICS.items():
        tied = None if found.level == "image" else rows * overlap
        many = found.replicates(Counts(rows * normal, rows * abnormal, tied, 1), {})
        for row, value in zip(rows, many, strict=True):
            one = Counts(row * normal, row * abnormal, None if tied is None else row * overlap, 1)
            alone, _ = found.evaluate(one, {})
            if alone is None:
                assert np.isnan(value), name
            else:
                assert value == pytest.approx(alone, abs=1e-12), name


# --- what cannot be computed or is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "reason"),
    [([], "no image to count"), ([0, 0], "no abnormal image among 2"), ([1, 1, 1], "no normal image among 3")],
)
@pytest.mark.parametrize("name", IMAGE)
def test_one_class_of_images_has_a_reason(name: str, labels: list[int], reason: str) -> None:
    scores = np.arange(len(labels), dtype=float)
    value, found = METRICS[name].evaluate(of_images(scores, labels, 0.0), {})
    assert value is None
    assert found
    assert found.endswith(reason) or name not in SHIPPED  # another metric words it in its own way
    with pytest.raises(NotComputable, match=f"^{re.escape(found)}$"):
        IMAGE[name](scores, labels)
    assert ranking.points(of_images(scores, labels), "image") == {}


@pytest.mark.parametrize("name", PIXEL)
def test_one_class_of_pixels_has_a_reason(name: str) -> None:
    codes = np.zeros((2, 3), np.uint16)
    for counted, reason in (
        (PixelHistogram(), "no pixel to count"),
        (histogram([codes], [np.zeros((2, 3), bool)]), "one class only: no abnormal pixel among 6"),
        (histogram([codes], [np.ones((2, 3), bool)]), "one class only: no normal pixel among 6"),
    ):
        value, found = METRICS[name].evaluate(counted.counts(), {"aupro_limit": 0.3})
        assert value is None
        assert found
        assert found == reason or name not in SHIPPED  # another metric words it in its own way
        assert ranking.points(counted.counts(), "pixel") == {}


def test_without_a_threshold_there_is_a_reason() -> None:
    with pytest.raises(NotComputable, match="no threshold was chosen on valid"):
        image_f1([0, 1], [0, 1])
    counts = of_images([0, 1], [0, 1])
    assert METRICS["image_f1"].evaluate(counts, {}) == (None, "no threshold was chosen on valid")
    assert METRICS["image_f1_oracle"].evaluate(counts, {}) == (1.0, None)


def test_bad_input_is_refused() -> None:
    codes, mask = np.zeros((2, 3), np.uint16), np.zeros((2, 3), bool)
    for wrong in ((codes.astype(float), mask), (codes, mask.astype(int)), (codes, mask.T), (codes[0], mask[0])):
        with pytest.raises(AnomedError, match=r"expected uint16 \(..., H, W\) with bool \(..., H, W\)"):
            PixelHistogram().update(*wrong)
    for scores, labels in ((["a", "b"], [0, 1]), ([None, 1], [0, 1]), ([1, 2], [None, 1]), ([[1], [1, 2]], [0, 1])):
        with pytest.raises(AnomedError, match=r"found (scores|labels) of type .*, expected real numbers"):
            image_auroc(scores, labels)
    with pytest.raises(AnomedError, match=r"found codes list \(2, 3\) with a mask bool \(2, 3\), expected uint16"):
        PixelHistogram().update(codes.tolist(), mask)
    with pytest.raises(AnomedError, match=r"with a mask list \(2, 3\), expected uint16"):
        PixelHistogram().update(codes, mask.tolist())  # type: ignore[arg-type]
    with pytest.raises(AnomedError, match=r"image_auroc: found list, expected scores and labels"):
        image_auroc([1, 2])
    with pytest.raises(
        AnomedError, match=r"pixel_ap: found ndarray, ndarray, expected a PixelHistogram \(`ranking.pix"
    ):
        pixel_ap(codes, mask)
    with pytest.raises(AnomedError, match=r"found scores \(2,\) with labels \(3,\)"):
        image_auroc([1, 2], [0, 1, 1])
    with pytest.raises(AnomedError, match=r"found the labels \[0, 2\], expected 0 and 1"):
        image_auroc([1, 2], [0, 2])
    with pytest.raises(AnomedError, match="scores hold NaN or infinity"):
        image_ap([1, np.nan], [0, 1])
    for limit in (0, -0.1, 1.01):
        with pytest.raises(AnomedError, match=r"aupro_limit: found .*, expected a number above 0 and at most 1"):
            pixel_aupro(histogram([codes], [np.eye(2, 3, dtype=bool)]), aupro_limit=limit)
    for rate in (0, 1, 1.5):
        with pytest.raises(AnomedError, match=r"sensitivity_fpr: found .*, expected a number above 0 and"):
            image_sensitivity([0, 1], [0, 1], sensitivity_fpr=rate)


# --- the entry for plain arrays, curves, declarations ----------------------------------------------------------------


def test_examples_of_the_documentation_hold() -> None:
    result = doctest.testmod(ranking)
    assert result.attempted >= 7
    assert result.failed == 0


def test_pixel_metrics_on_float_maps(large: Pair) -> None:
    maps = [np.exp((one.astype(np.float32) - 30_000) / 2_000) for one in large[0]]  # heavy-tailed
    found = ranking.pixel_metrics(maps, large[1])
    on_codes = ranking.pixel_metrics(*large)
    scores, labels = (np.concatenate([one.ravel() for one in part]) for part in (maps, large[1]))
    assert list(found) == list(PIXEL)
    assert found["pixel_auroc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-5)
    assert found["pixel_ap"] == pytest.approx(average_precision_score(labels, scores), abs=1e-4)
    assert found["pixel_aupro"] == pytest.approx(on_codes["pixel_aupro"], abs=1e-4)
    assert found["pixel_dice"] is None
    threshold = np.float32(np.quantile(scores, 0.97))
    dice = ranking.pixel_metrics(maps, large[1], threshold=float(threshold))["pixel_dice"]
    assert dice == pytest.approx(f1_score(labels, scores >= threshold), abs=1e-3)
    assert ranking.pixel_metrics(maps[6:], large[1][6:]) == dict.fromkeys(PIXEL)
    with pytest.raises(AnomedError, match="found 12 maps and 11 masks"):
        ranking.pixel_metrics(maps, large[1][1:])
    assert ranking.pixel_metrics([one.astype(float) for one in maps], [one.astype(int) for one in large[1]]) == found
    with pytest.raises(AnomedError, match="found codes int64"):
        ranking.pixel_metrics([one.astype(int) for one in large[0]], large[1])
    with pytest.raises(AnomedError, match="masks: found uint8 up to 255, expected bool or 0 and 1; give mask > 0"):
        ranking.pixel_metrics(maps, [one.astype(np.uint8) * 255 for one in large[1]])
    maps[3] = np.full_like(maps[3], np.nan)
    with pytest.raises(AnomedError, match="NaN or infinity"):
        ranking.pixel_metrics(maps, large[1])


def test_a_threshold_is_taken_as_it_is() -> None:
    mask = np.zeros((4, 5), bool)
    mask[1:3, 1:4] = True
    perfect, constant = mask.astype(float), np.full(mask.shape, 3.0)
    for maps, threshold, dice in (
        (perfect, 2.0, 0.0), (perfect, 1.0, 1.0), (perfect, 0.5, 1.0), (perfect, -1.0, 12 / 26), (constant, 9.0, 0.0),
        (constant, 3.0, 12 / 26), (mask * np.uint16(4), 3.5, 1.0), (mask * np.uint16(4), 4.5, 0.0),
        (mask * np.uint16(4), 1e9, 0.0), (mask * np.uint16(4), -7, 12 / 26),
    ):  # fmt: skip
        assert ranking.pixel_metrics([maps], [mask], threshold=threshold)["pixel_dice"] == pytest.approx(dice), (
            threshold
        )
    counted = histogram([mask * np.uint16(4)], [mask])
    assert [pixel_dice(counted, threshold=code) for code in (4, 5, 65_536)] == [1.0, 0.0, 0.0]
    for wrong in (-1, 65_537, 3.5, float("nan"), "a"):
        with pytest.raises(AnomedError, match=r"threshold: found .*, expected a code, a whole number from 0 to 65536"):
            pixel_dice(counted, threshold=wrong)
    never: list[Any] = [float("nan"), float("inf"), "a", [1]]
    for wrong in never:
        with pytest.raises(AnomedError, match=r"threshold: found .*, expected a finite number"):
            image_f1([0, 1], [0, 1], threshold=wrong)
        with pytest.raises(AnomedError, match=r"threshold: found .*, expected a finite number"):
            ranking.pixel_metrics([perfect], [mask], threshold=wrong)


def test_maps_that_codes_cannot_hold_are_refused() -> None:
    random = np.random.default_rng(0)
    mask = random.random((200, 200)) < 0.5
    near = np.where(random.random(mask.shape) < 0.5, 1e-12, 1e-5) * (random.random(mask.shape) + 0.3 * mask)
    maps = np.where(near > 1e-10, 1, 0) + near  # two heaps, each far narrower than the way between them
    with pytest.raises(AnomedError, match=r"coded in 16 bits the maps lose .* of pixel AUROC"):
        ranking.pixel_metrics([maps], [mask])


def test_curves_pass_through_the_points_they_stand_for(large: Pair) -> None:
    counted = histogram(*large)
    counts = counted.counts()
    full = {
        "pixel_roc": curves.roc(counts),
        "pixel_pr": curves.precision_recall(counts),
        "pixel_pro": curves.pro(counts),
    }
    thinned = ranking.points(counts, "pixel")
    assert list(thinned) == list(full)
    for name, curve in thinned.items():
        assert curve.dtype == np.float32
        assert curve.shape[0] == 2
        assert 100 < curve.shape[1] <= 513
        np.testing.assert_array_equal(curve[:, [0, -1]], full[name][:, [0, -1]].astype(np.float32))
        assert (np.diff(curve[0]) >= 0).all()
        assert {*map(tuple, curve.T)} <= {*map(tuple, full[name].T.astype(np.float32))}
        assert np.diff(curve[0]).max() < 0.05, name
        assert name == "pixel_pr" or np.diff(curve[1]).max() < 0.05  # precision jumps at its first few pixels
    scores, labels = (np.concatenate([one.ravel() for one in part]) for part in large)
    false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
    grid = np.linspace(0, 1, 101)
    np.testing.assert_allclose(np.interp(grid, *full["pixel_roc"]), np.interp(grid, false, true), atol=1e-12)
    assert np.trapezoid(*full["pixel_roc"][::-1]) == pytest.approx(pixel_auroc(counted), abs=1e-12)
    recall, precision = full["pixel_pr"]
    assert np.sum(np.diff(recall) * precision[1:]) == pytest.approx(pixel_ap(counted), abs=1e-12)


def test_few_images_keep_every_point_of_their_curve() -> None:
    found = ranking.points(of_images([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]), "image")
    assert list(found) == ["image_roc", "image_pr"]
    np.testing.assert_array_equal(found["image_roc"], [[0, 0, 0.5, 0.5, 1], [0, 0.5, 0.5, 1, 1]])
    np.testing.assert_array_equal(
        found["image_pr"], np.array([[0, 0.5, 0.5, 1, 1], [1, 1, 0.5, 2 / 3, 0.5]], np.float32)
    )


def test_every_metric_declares_what_it_is() -> None:
    assert set(METRICS) == {*IMAGE, *PIXEL, *(f"{name}_foreground" for name in PIXEL)}
    for name in PIXEL:
        twin, whole = METRICS[f"{name}_foreground"], METRICS[name]
        assert (twin.level, twin.function, twin.options) == ("foreground", whole.function, whole.options)
        assert twin.definition.startswith(whole.definition)
        assert twin.definition != whole.definition
    assert [name for name in (*IMAGE, *PIXEL) if name in SHIPPED] == SHIPPED
    assert {name: BEST[name] for name in SHIPPED} == dict.fromkeys(SHIPPED, 1.0)
    assert {METRICS[name].low for name in SHIPPED} == {0.0}
    for found in METRICS.values():
        text = found.described({"aupro_limit": 0.25, "sensitivity_fpr": 0.1})
        assert text.endswith("."), found.name
        assert "{" not in text
        assert found.direction in ("higher", "lower")
        assert found.low < found.high
        assert found.source
    assert "0 to 0.25," in METRICS["pixel_aupro"].described({"aupro_limit": 0.25, "other": 1})
    assert METRICS["pixel_aupro"].options == {"aupro_limit": 0.3}
    assert METRICS["pixel_aupro"].identifier({"aupro_limit": 0.25, "other": 1}) == "pixel_aupro.v1[aupro_limit=0.25]"
    assert METRICS["pixel_ap"].identifier({"aupro_limit": 0.25}) == "pixel_ap.v1"


def test_the_documentation_lists_every_metric_as_declared() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == page(), "run `python -m anomed.metrics > docs/metrics.md`"


def test_a_value_outside_the_declared_range_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anomed.metrics.declare.METRICS", {})

    @metric(name="wrong", label="wrong", level="image", definition="Too high.", source="none")
    def wrong(counts: Counts, *, excess: float = 0.0) -> np.ndarray:
        return np.full(counts.normal.shape[:-1], 1 + excess)

    with pytest.raises(ValueError, match="two metrics are called 'wrong'"):
        metric(name="wrong", label="w", level="image", definition="Other.", source="none")(lambda counts: counts)
    with pytest.raises(ValueError, match="other: a fraction goes from 0 to 1, found -1 to 1; name another unit"):
        metric(name="other", label="o", level="image", definition="O.", source="none", low=-1, high=1)(lambda counts: 0)
    assert "Call it with scores and labels" in str(wrong.__doc__)
    assert wrong([0, 1], [0, 1], excess=1e-15) == 1.0
    with pytest.raises(ValueError, match=r"wrong is 1.21, outside \[0.0, 1.0\]"):
        wrong([0, 1], [0, 1], excess=0.21)
