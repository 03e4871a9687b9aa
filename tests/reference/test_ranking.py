"""Ranking metrics against brute force and scikit-learn, and the laws that every one of them must obey."""

import doctest
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from anomed.errors import AnomedError
from anomed.metrics import curves, ranking
from anomed.metrics.declare import METRICS, NotComputable, metric, metrics
from anomed.metrics.ranking import PixelHistogram, image_ap, image_auroc, pixel_ap, pixel_aupro, pixel_auroc

SHIPPED = ["image_auroc", "image_ap", "pixel_auroc", "pixel_ap", "pixel_aupro"]
IMAGE: dict[str, Callable[..., float]] = {found.name: found.function for found in metrics("image")}
PIXEL: dict[str, Callable[..., float]] = {found.name: found.function for found in metrics("pixel")}
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


def regions(mask: np.ndarray) -> list[set[tuple[int, int]]]:
    """8-connected regions, by flood fill."""
    left, found = {(int(y), int(x)) for y, x in np.argwhere(mask)}, []
    while left:
        edge, region = [left.pop()], set()
        while edge:
            y, x = edge.pop()
            region.add((y, x))
            near = {(y + dy, x + dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)} & left
            left -= near
            edge += near
        found.append(region)
    return found


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


@given(coded(), st.sampled_from([0.05, 0.3, 0.5, 1.0]))
@settings(deadline=None)
def test_pixel_metrics_equal_brute_force(data: Pair, limit: float) -> None:
    counted = histogram(*data)
    scores, labels = (np.concatenate([one.ravel() for one in part]) for part in data)
    assert pixel_auroc(counted) == pytest.approx(pairs(scores, labels), abs=1e-12)
    assert pixel_ap(counted) == pytest.approx(thresholds(scores, labels), abs=1e-12)
    assert pixel_aupro(counted, aupro_limit=limit) == pytest.approx(per_region(*data, limit), abs=1e-12)
    assert counted.regions == sum(len(regions(mask)) for mask in data[1])


def test_pixel_metrics_equal_scikit_learn_on_codes(large: Pair) -> None:
    counted = histogram(*large)
    scores, labels = (np.concatenate([one.ravel() for one in part]) for part in large)
    assert pixel_auroc(counted) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert pixel_ap(counted) == pytest.approx(average_precision_score(labels, scores), abs=1e-12)
    assert counted.counts() == {
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


def test_diagonal_neighbours_are_one_region() -> None:
    mask = np.eye(4, dtype=bool)
    assert histogram([np.zeros((4, 4), np.uint16)], [mask]).regions == 1


# --- laws ------------------------------------------------------------------------------------------------------------


@given(scored())
def test_image_metrics_obey_the_laws(data: tuple[np.ndarray, np.ndarray]) -> None:
    scores, labels = data
    order = np.random.default_rng(0).permutation(len(scores))
    for name, function in IMAGE.items():
        value = function(scores, labels)
        assert METRICS[name].low <= value <= METRICS[name].high, name
        assert function(np.exp(6 * scores), labels) == value, name  # strictly increasing
        assert function(scores[order], labels[order]) == value, name
        assert function(np.tile(scores, 2), np.tile(labels, 2)) == pytest.approx(value, abs=1e-12), name
        assert function(labels.astype(float), labels) == BEST[name], name
    assert image_auroc(scores, ~labels) == pytest.approx(1 - image_auroc(scores, labels), abs=1e-12)
    assert image_auroc(np.full(len(labels), 0.1), labels) == 0.5
    assert image_ap(np.zeros(len(labels)), labels) == pytest.approx(labels.mean(), abs=1e-12)


@given(coded())
@settings(deadline=None)
def test_pixel_metrics_obey_the_laws(data: Pair) -> None:
    maps, masks = data
    table = np.sort(np.random.default_rng(0).choice(65_536, 13, replace=False)).astype(np.uint16)
    counted = histogram(maps, masks)
    for name, function in PIXEL.items():
        value = function(counted)
        assert METRICS[name].low <= value <= METRICS[name].high, name
        assert function(histogram([table[one] for one in maps], masks)) == pytest.approx(value, abs=1e-12), name
        assert function(histogram(maps[::-1], masks[::-1])) == pytest.approx(value, abs=1e-12), name
        assert function(histogram(maps * 2, masks * 2)) == pytest.approx(value, abs=1e-12), name
        oracle = [mask.astype(np.uint16) * 9 for mask in masks]
        assert function(histogram(oracle, masks)) == BEST[name], name
    flipped = histogram(maps, [~mask for mask in masks])
    assert pixel_auroc(flipped) == pytest.approx(1 - pixel_auroc(counted), abs=1e-12)
    constant = histogram([np.full_like(one, 77) for one in maps], masks)
    assert pixel_auroc(constant) == 0.5
    assert pixel_aupro(constant) == pytest.approx(0.15, abs=1e-15)
    assert pixel_aupro(constant, aupro_limit=1) == 0.5


@given(coded())
@settings(deadline=None)
def test_merged_histograms_equal_one(data: Pair) -> None:
    maps, masks = data
    parts = PixelHistogram()
    for pair in zip(maps, masks, strict=True):
        parts.merge(histogram(*[[one] for one in pair]))
    whole = histogram(maps, masks)
    np.testing.assert_array_equal(parts.total, whole.total)
    np.testing.assert_array_equal(parts.lesion, whole.lesion)
    np.testing.assert_allclose(parts.overlap, whole.overlap, rtol=1e-14)
    assert (parts.regions, parts.images) == (whole.regions, whole.images)
    assert parts.overlap.sum() == pytest.approx(parts.regions, rel=1e-12)


# --- what cannot be computed or is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "reason"),
    [([], "no image to count"), ([0, 0], "no abnormal image among 2"), ([1, 1, 1], "no normal image among 3")],
)
@pytest.mark.parametrize("name", IMAGE)
def test_one_class_of_images_has_a_reason(name: str, labels: list[int], reason: str) -> None:
    scores = np.arange(len(labels), dtype=float)
    value, found = METRICS[name].evaluate(scores, np.array(labels), options={})
    assert value is None
    assert found
    assert found.endswith(reason) or name not in SHIPPED  # another metric words it in its own way
    with pytest.raises(NotComputable, match=f"^{re.escape(found)}$"):
        IMAGE[name](scores, labels)
    assert ranking.image_curves(scores, labels) == {}


@pytest.mark.parametrize("name", PIXEL)
def test_one_class_of_pixels_has_a_reason(name: str) -> None:
    codes = np.zeros((2, 3), np.uint16)
    for counted, reason in (
        (PixelHistogram(), "no pixel to count"),
        (histogram([codes], [np.zeros((2, 3), bool)]), "one class only: no abnormal pixel among 6"),
        (histogram([codes], [np.ones((2, 3), bool)]), "one class only: no normal pixel among 6"),
    ):
        value, found = METRICS[name].evaluate(counted, options={"aupro_limit": 0.3})
        assert value is None
        assert found
        assert found == reason or name not in SHIPPED  # another metric words it in its own way
        assert ranking.pixel_curves(counted) == {}


def test_bad_input_is_refused() -> None:
    codes, mask = np.zeros((2, 3), np.uint16), np.zeros((2, 3), bool)
    for wrong in ((codes.astype(float), mask), (codes, mask.astype(int)), (codes, mask.T), (codes[None], mask[None])):
        with pytest.raises(AnomedError, match=r"expected uint16 \(H, W\) with bool \(H, W\)"):
            PixelHistogram().update(*wrong)
    with pytest.raises(AnomedError, match=r"found scores \(2,\) with labels \(3,\)"):
        image_auroc([1, 2], [0, 1, 1])
    with pytest.raises(AnomedError, match=r"found the labels \[0, 2\], expected 0 and 1"):
        image_auroc([1, 2], [0, 2])
    with pytest.raises(AnomedError, match="scores hold NaN or infinity"):
        image_ap([1, np.nan], [0, 1])
    for limit in (0, -0.1, 1.01):
        with pytest.raises(AnomedError, match=r"aupro_limit: found .*, expected a number above 0 and at most 1"):
            pixel_aupro(histogram([codes], [mask]), aupro_limit=limit)


# --- the entry for plain arrays, curves, declarations ----------------------------------------------------------------


def test_examples_of_the_documentation_hold() -> None:
    result = doctest.testmod(ranking)
    assert result.attempted >= 6
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
    assert ranking.pixel_metrics(maps[6:], large[1][6:]) == dict.fromkeys(PIXEL)
    with pytest.raises(AnomedError, match="found 12 maps and 11 masks"):
        ranking.pixel_metrics(maps, large[1][1:])
    assert ranking.pixel_metrics([one.astype(float) for one in maps], [one.astype(int) for one in large[1]]) == found
    with pytest.raises(AnomedError, match="found codes int64"):
        ranking.pixel_metrics([one.astype(int) for one in large[0]], large[1])
    with pytest.raises(AnomedError, match="with a mask uint8"):  # 0 and 255
        ranking.pixel_metrics(maps, [one.astype(np.uint8) * 255 for one in large[1]])
    maps[3] = np.full_like(maps[3], np.nan)
    with pytest.raises(AnomedError, match="NaN or infinity"):
        ranking.pixel_metrics(maps, large[1])


def test_curves_pass_through_the_points_they_stand_for(large: Pair) -> None:
    counted = histogram(*large)
    full = {
        "pixel_roc": curves.roc(counted.lesion, counted.normal),
        "pixel_pr": curves.precision_recall(counted.lesion, counted.normal),
        "pixel_pro": curves.pro(counted.normal, counted.overlap),
    }
    thinned = ranking.pixel_curves(counted)
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
    found = ranking.image_curves([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
    np.testing.assert_array_equal(found["image_roc"], [[0, 0, 0.5, 0.5, 1], [0, 0.5, 0.5, 1, 1]])
    np.testing.assert_array_equal(
        found["image_pr"], np.array([[0, 0.5, 0.5, 1, 1], [1, 1, 0.5, 2 / 3, 0.5]], np.float32)
    )


def test_every_metric_declares_what_it_is() -> None:
    assert set(METRICS) == {*IMAGE, *PIXEL}
    assert [name for name in (*IMAGE, *PIXEL) if name in SHIPPED] == SHIPPED
    assert {name: BEST[name] for name in SHIPPED} == dict.fromkeys(SHIPPED, 1.0)
    assert {METRICS[name].low for name in SHIPPED} == {0.0}
    for found in METRICS.values():
        text = found.described({"aupro_limit": 0.25})
        assert text.endswith("."), found.name
        assert "{" not in text
        assert found.direction in ("higher", "lower")
        assert found.low < found.high
        assert found.source
    assert "0 to 0.25," in METRICS["pixel_aupro"].described({"aupro_limit": 0.25, "other": 1})
    assert METRICS["pixel_aupro"].options == {"aupro_limit": 0.3}


def test_a_value_outside_the_declared_range_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anomed.metrics.declare.METRICS", {})

    @metric(name="wrong", label="wrong", level="image", definition="Too high.", source="none")
    def wrong(excess: float) -> float:
        return 1 + excess

    assert wrong(1e-15) == 1.0
    with pytest.raises(ValueError, match=r"wrong is 1.21, outside \[0.0, 1.0\]"):
        wrong(0.21)
