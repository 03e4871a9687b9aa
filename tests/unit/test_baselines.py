"""What the baselines promise beyond the contract: their numbers, against other ways to compute them."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import ndimage, stats

from anomed import detect, images, prepare
from anomed.detect import Detector, Labelled
from anomed.errors import AnomedError
from anomed.manifest import Prepared
from anomed.methods import supervised
from anomed.methods.knn import Knn
from anomed.methods.metadata import Slice, View
from anomed.methods.statistics import Brightness, Foreground, Gradient, otsu
from anomed.methods.supervised import Supervised, lesion_share, logistic

NOTHING = np.zeros((1, 4, 4), np.uint8)


def discs(count: int, seed: int, size: int = 64) -> np.ndarray:
    """Noisy discs of different size and brightness on a black background: uint8 (count, size, size)."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size] - size / 2
    radii, bright = rng.uniform(0.2, 0.45, (2, count, 1, 1)) * np.array([[[[size]]], [[[400]]]])
    grey = (np.hypot(x, y) < radii) * (bright + rng.normal(0, 5, (count, size, size)))
    return np.clip(grey, 0, 255).astype(np.uint8)


def fitted(method: Any, train: np.ndarray, **params: Any) -> Detector:
    detector: Detector = method(method.Params(**params), 0)
    detector.fit(train)
    return detector


def scores(detector: Detector, of: np.ndarray) -> np.ndarray:
    return np.concatenate([found for found, _ in detector.score(of)])


def maps(detector: Detector, of: np.ndarray) -> np.ndarray:
    return np.concatenate([found for _, found in detector.score(of) if found is not None])


# Statistics --------------------------------------------------------------------------------------------------------


def flat(*levels: int) -> np.ndarray:
    return np.array(levels, np.uint8)[:, None, None] * np.ones((4, 4), np.uint8)


@pytest.mark.parametrize(
    ("direction", "expected"), [("both", [0, 2, 1]), ("high", [50, 70, 40]), ("low", [-50, -70, -40])]
)
def test_brightness_on_either_side(direction: str, expected: list[float]) -> None:
    detector = fitted(Brightness, flat(40, 60, 40, 60), direction=direction)  # mean 50, deviation 10
    assert scores(detector, flat(50, 70, 40)) == pytest.approx(expected)


def test_train_images_of_one_value_leave_the_distance_in_its_own_unit() -> None:
    image = np.random.default_rng(0).integers(0, 256, (1, 7, 7), dtype=np.uint8)  # mean not exact in binary
    detector = fitted(Brightness, np.repeat(image, 3, axis=0))
    assert scores(detector, image)[0] == 0
    assert scores(detector, np.full((1, 7, 7), 255, np.uint8))[0] == pytest.approx(255 - image.mean())


def test_brightness_of_colour_is_its_luma() -> None:
    red = np.zeros((1, 4, 4, 3), np.uint8)
    red[..., 0] = 200
    assert scores(fitted(Brightness, red, direction="high"), red)[0] == pytest.approx(0.299 * 200)


def test_batches_leave_no_trace() -> None:
    many = np.random.default_rng(1).integers(0, 256, (70, 8, 8), dtype=np.uint8)  # three batches
    means = many.reshape(70, -1).mean(1)
    detector = fitted(Brightness, many)
    assert scores(detector, many) == pytest.approx(np.abs(means - means.mean()) / means.std())


def test_foreground_is_the_area_of_the_organ_where_the_background_was_masked_out() -> None:
    train, test = discs(40, 0), discs(10, 1)
    area = [images.foreground(image).mean() for image in test]
    detector = fitted(Foreground, train, direction="high")
    np.testing.assert_allclose(scores(detector, test), area, atol=0.002)  # speckles at the rim


def test_foreground_of_images_without_a_masked_background() -> None:
    bright = np.array([0.1, 0.3, 0.5, 0.7])
    rng = np.random.default_rng(2)
    dark, light = rng.integers(20, 60, (2, 4, 50, 50))
    films = np.where(np.arange(50)[:, None] < 50 * bright[:, None, None], light + 120, dark).astype(np.uint8)
    assert scores(fitted(Foreground, films, direction="high"), films) == pytest.approx(bright)
    assert scores(fitted(Foreground, films), films) == pytest.approx(np.abs(bright - 0.4) / bright.std())


def variance_between(counts: np.ndarray, level: int) -> float:
    """By the definition: weights and means of the two classes."""
    values = np.repeat(np.arange(len(counts)), counts)
    low, high = values[values <= level], values[values > level]
    return len(low) * len(high) * (low.mean() - high.mean()) ** 2 if len(low) and len(high) else 0.0


@pytest.mark.parametrize("seed", range(5))
def test_otsu_separates_best(seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 9, 30) ** 2
    best = max(range(30), key=lambda level: variance_between(counts, level))
    assert variance_between(counts, otsu(counts)) == pytest.approx(variance_between(counts, best))


def test_otsu_of_one_level_and_of_two() -> None:
    assert otsu(np.bincount([7, 7, 7], minlength=256)) == 7
    assert otsu(np.bincount([7, 7, 200], minlength=256)) == 7


@pytest.mark.parametrize("angle", [(3, 0), (0, 5), (3, 4), (-3, 4)])
def test_gradient_of_a_ramp_is_its_slope(angle: tuple[int, int]) -> None:
    y, x = np.mgrid[:20, :20]
    ramp = (100 + angle[0] * (y - 10) + angle[1] * (x - 10)).astype(np.uint8)[None]
    detector = fitted(Gradient, ramp, direction="high")
    slope = np.hypot(*angle)
    assert scores(detector, ramp)[0] == pytest.approx(slope)
    assert maps(detector, ramp) == pytest.approx(np.full((1, 20, 20), slope), rel=1e-5)


def test_map_of_the_gradient_is_smoothed_and_follows_the_direction() -> None:
    image = np.zeros((1, 32, 32), np.uint8)
    image[0, :, 16:] = 100
    sharp = np.zeros((32, 32))
    sharp[:, 15:17] = 50
    detector = fitted(Gradient, image, smoothing_sigma=2.0)
    np.testing.assert_allclose(maps(detector, image)[0], ndimage.gaussian_filter(sharp, 2.0), atol=1e-4)
    bare, low = (fitted(Gradient, image, smoothing_sigma=0.0, direction=way) for way in ("both", "low"))
    np.testing.assert_array_equal(maps(bare, image)[0], sharp)
    np.testing.assert_array_equal(maps(low, image)[0], -sharp)


def test_gradient_by_a_quantile() -> None:
    image = np.zeros((1, 32, 32), np.uint8)
    image[0, :, 16:] = 100  # 2 of 32 columns have a gradient
    for quantile, expected in ((0.5, 0), (0.95, 50), (1.0, 50)):
        assert scores(fitted(Gradient, image, quantile=quantile, direction="high"), image)[0] == expected
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        Gradient.Params(quantile=95.0)


@pytest.mark.parametrize("method", [Brightness, Foreground, Gradient])
def test_what_fit_stores_gives_the_same_scores(method: Any) -> None:
    detector, again = fitted(method, discs(6, 0)), method(method.Params(), 0)
    again.restore({name: np.ascontiguousarray(array) for name, array in detector.state().items()})  # as `fit` stores it
    assert np.array_equal(scores(again, discs(6, 1)), scores(detector, discs(6, 1)))


@pytest.mark.parametrize("method", [Brightness, Foreground, Gradient])
def test_statistics_refuse_another_direction(method: Any) -> None:
    with pytest.raises(ValidationError, match="'both', 'high' or 'low'"):
        method.Params(direction="up")


# Metadata ----------------------------------------------------------------------------------------------------------


def sliced(train: Sequence[float], test: Sequence[float], **params: Any) -> Slice:
    """The detector of slice numbers after fit, ready to score `test`."""
    detector = Slice(Slice.Params(**params), 0)
    detector.facts = {"slice": np.array(train)}
    detector.fit(np.zeros((len(train), 4, 4), np.uint8))
    again = Slice(Slice.Params(**params), 0)
    again.restore(detector.state())
    again.facts = {"slice": np.array(test)}
    return again


def of_slices(detector: Slice) -> np.ndarray:
    return scores(detector, np.zeros((len(detector.facts["slice"]), 4, 4), np.uint8))


def test_slice_is_a_kernel_density() -> None:
    train, test = [60, 61, 61, 70, 99], [60, 65.5, 99, 20]
    density = np.mean([stats.norm.pdf(test, number, 3) for number in train], axis=0)
    assert of_slices(sliced(train, test, bandwidth=3.0)) == pytest.approx(-np.log(density))


def test_far_slices_are_finite_and_ordered() -> None:
    found = of_slices(sliced([60, 61], [10_000, 1_000, -1_000, 60]))
    assert np.isfinite(found).all()
    assert found[0] > found[2] > found[1] > found[3]


def test_an_unknown_slice_number_is_as_usual_as_a_train_image_and_told() -> None:
    train = [60, 61, 70, 99, np.nan]
    with pytest.warns(UserWarning, match="unknown of 1 of 5 train images, which are left out"):
        detector = sliced(train, [np.nan, 60, 61, 70, 99])
    with pytest.warns(UserWarning, match="unknown of 1 of 5 images, which get the mean score"):
        unknown, *known = of_slices(detector)
    assert unknown == pytest.approx(np.mean(known))
    assert known == pytest.approx(of_slices(sliced([60, 61, 70, 99], [60, 61, 70, 99])))


def viewed(train: list[str], test: list[str]) -> np.ndarray:
    detector = View(View.Params(), 0)
    detector.facts = {"view": np.array(train)}
    detector.fit(np.zeros((len(train), 4, 4), np.uint8))
    again = View(View.Params(), 0)
    again.restore(detector.state())
    again.facts = {"view": np.array(test)}
    return scores(again, np.zeros((len(test), 4, 4), np.uint8))


def test_view_is_its_rarity() -> None:
    found = viewed(["PA"] * 7 + ["AP"] * 2, ["PA", "AP", "LL", "", "PA"])
    assert found == pytest.approx(-np.log(np.array([8, 3, 1, 1, 8]) / 12))


def test_an_unrecorded_view_is_a_view() -> None:
    usual, unrecorded = viewed(["PA"] * 3 + [""] * 6, ["PA", ""])
    assert unrecorded < usual


# k-NN --------------------------------------------------------------------------------------------------------------


@functools.cache
def lite0(layers: tuple[str, ...], seed: int) -> np.ndarray:
    """Features of discs, pooled and scaled layer by layer, in float64."""
    levels = Knn(Knn.Params(layers=list(layers)), 0)._backbone.features(discs(8, seed), layers, 8)
    pooled = [level.double().mean((2, 3)).numpy() for level in levels]
    return np.concatenate([level / np.linalg.norm(level, axis=1, keepdims=True) for level in pooled], axis=1)


@pytest.mark.parametrize(("layers", "k"), [(("blocks.6",), 1), (("blocks.2", "blocks.4"), 3), (("blocks.6",), 50)])
def test_knn_is_the_mean_distance_to_the_nearest(layers: tuple[str, ...], k: int) -> None:
    train, test = lite0(layers, 0), lite0(layers, 1)
    distances = np.sort(np.linalg.norm(test[:, None] - train, axis=2), axis=1)[:, :k]
    detector = fitted(Knn, discs(8, 0), layers=list(layers), k=k)
    np.testing.assert_allclose(scores(detector, discs(8, 1)), distances.mean(axis=1), rtol=1e-4)


def test_a_train_image_is_its_own_nearest_neighbour() -> None:
    detector = fitted(Knn, discs(8, 0), k=1)
    assert not scores(detector, discs(8, 0)).any()
    assert scores(detector, discs(3, 1)).all()


@pytest.mark.parametrize("method", [Knn, Supervised])
def test_random_weights_need_no_file_and_are_told(method: Any) -> None:
    usual, smoke = method.Params(), method.Params(weights="random")
    assert method.files(smoke) == {}
    assert list(method.files(usual)) == ["tf_efficientnet_lite0"]
    assert method.mark(smoke).endswith("smoke: random weights")
    assert "smoke" not in method.mark(usual)


def test_knn_with_random_weights_repeats_itself_and_differs_from_the_pretrained() -> None:
    one, two = (scores(fitted(Knn, discs(4, 0), weights="random"), discs(4, 1)) for _ in range(2))
    assert np.array_equal(one, two)
    assert not np.allclose(one, scores(fitted(Knn, discs(4, 0)), discs(4, 1)))


# Supervised upper bound --------------------------------------------------------------------------------------------


def features(count: int, dims: int) -> tuple[Any, Any]:
    import torch

    rng = np.random.default_rng(3)
    points = rng.normal(5, np.linspace(0.1, 30, dims), (count, dims)).astype(np.float32)
    points[:, 1] = 4.2  # does not vary
    chance = 1 / (1 + np.exp(-(points[:, 0] - 5) * 20 - (points[:, -1] - 5) / 20 + 1))
    return torch.from_numpy(points), torch.from_numpy(chance)


def reference(points: Any, rows: np.ndarray, labels: np.ndarray, weights: np.ndarray, l2: float) -> np.ndarray:
    """Logits of scikit-learn's solution, features standardised by all rows once."""
    from sklearn.linear_model import LogisticRegression

    spread = np.where(points.std(0) > 1e-5, points.std(0), 1)
    standard = (points - points.mean(0)) / spread
    found = LogisticRegression(C=1 / l2, tol=1e-10, max_iter=10_000).fit(standard[rows], labels, weights)
    return found.decision_function(standard)


@pytest.mark.parametrize("l2", [0.01, 1.0])
def test_logistic_regression_is_scikit_learns(l2: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "CHUNK", 32)
    points, chance = features(100, 6)
    labels = (chance > 0.7).double()
    assert 5 < labels.sum() < 50, "unequal classes"
    weights = np.where(labels == 1, 1 / (2 * labels.sum()), 1 / (2 * (1 - labels).sum()))
    expected = reference(points.double().numpy(), np.arange(100), labels.numpy(), weights, l2)
    np.testing.assert_allclose(logistic(points, labels, l2)(points), expected, atol=2e-4 * np.abs(expected).max())


def test_a_share_counts_as_that_much_of_a_positive() -> None:
    points, chance = features(100, 6)
    rows, labels = np.tile(np.arange(100), 2), np.repeat([1, 0], 100)
    share = chance.numpy()
    weights = np.concatenate([share / (2 * share.sum()), (1 - share) / (2 * (1 - share).sum())])
    expected = reference(points.double().numpy(), rows, labels, weights, 0.1)
    np.testing.assert_allclose(logistic(points, chance, 0.1)(points), expected, atol=2e-4 * np.abs(expected).max())


def test_a_regression_that_does_not_settle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "STEPS", 1)
    points, chance = features(100, 6)
    with pytest.raises(AnomedError, match=r"100 rows did not settle in 1 steps \(gradient .*raise l2"):
        logistic(points, chance, 0.1)


@pytest.mark.parametrize(("height", "width"), [(12, 12), (10, 17), (3, 5)])
def test_share_of_lesion_in_patches(height: int, width: int) -> None:
    mask = np.random.default_rng(4).random((height, width)) < 0.3
    fine = np.kron(mask, np.ones((4, 6)))  # each pixel 4 x 6, each patch height x width of them
    expected = fine.reshape(4, height, 6, width).mean((1, 3))
    np.testing.assert_allclose(lesion_share(mask, 4, 6), expected, atol=1e-12)
    np.testing.assert_allclose(lesion_share(np.ones((height, width), bool), 4, 6), 1, atol=1e-12)


def spotted(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray | None]]:
    """Noise, every second image with a striped square somewhere; masks at twice the size."""
    rng = np.random.default_rng(seed)
    pictures = rng.integers(90, 130, (count, 96, 96), dtype=np.uint8)
    labels, masks = np.arange(count) % 2, np.zeros((count, 192, 192), bool)
    for i in np.flatnonzero(labels):
        row, column = rng.integers(8, 56, 2)
        pictures[i, row : row + 32, column : column + 32 : 4] = 255
        masks[i, 2 * row : 2 * row + 64, 2 * column : 2 * column + 64] = True
    return pictures, labels, list(masks)


def taught(pictures: np.ndarray, labels: np.ndarray, masks: list[np.ndarray | None]) -> Supervised:
    detector = Supervised(Supervised.Params(), 0)
    detector.labelled = Labelled(pictures, labels, masks.__getitem__)
    detector.fit(NOTHING)
    return detector


@pytest.fixture(scope="module")
def known() -> Supervised:
    """Taught with pixel truth."""
    return taught(*spotted(10, 0))


def test_it_learns_image_labels_and_pixel_truth(known: Supervised) -> None:
    pictures, labels, masks = spotted(6, 1)
    found = scores(known, pictures)
    assert found[labels == 1].min() > 0 > found[labels == 0].max()
    assert maps(known, pictures).shape == (6, 12, 12)
    for patch, mask in zip(maps(known, pictures), masks, strict=True):
        assert mask is not None
        lesion = mask.reshape(12, 16, 12, 16).mean((1, 3))
        assert not (lesion == 1).any() or patch[lesion == 1].min() > patch[lesion == 0].max()
        assert (patch[lesion == 0] < 0).mean() > 0.95


@pytest.mark.parametrize("truth", ["unknown", "empty"])
def test_without_pixel_truth_the_map_is_the_image_heads(known: Supervised, truth: str) -> None:
    pictures, labels, _ = spotted(10, 0)
    blind = taught(pictures, labels, [None if truth == "unknown" else np.zeros((5, 5), bool)] * 10)
    test, _, _ = spotted(4, 1)
    assert np.array_equal(scores(known, test), scores(blind, test)), "masks do not change the score"
    assert not np.allclose(maps(known, test), maps(blind, test))
    state = blind.state()
    assert np.array_equal(state["image_weight"], state["patch_weight"])
    assert state["image_bias"] == state["patch_bias"]


@pytest.mark.parametrize(("label", "found"), [(0, "10 normal and 0 abnormal"), (1, "0 normal and 10 abnormal")])
def test_one_class_teaches_nothing(label: int, found: str) -> None:
    pictures, _, _ = spotted(10, 0)
    with pytest.raises(AnomedError, match=f"found {found} valid images, expected both"):
        taught(pictures, np.full(10, label), [None] * 10)


def test_a_supervised_row_is_marked() -> None:
    assert Supervised.labels(Supervised.Params()) == "valid"
    assert Supervised.mark(Supervised.Params()) == "not comparable: trained on the labelled valid images"


# Real images -------------------------------------------------------------------------------------------------------


def test_real_brain_slices_tell_their_number(
    lay_out: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = lay_out("brain") / "bmad"
    monkeypatch.chdir(tmp_path)
    block = {"source": "bmad", "size": 64, "release": None, "fingerprint": ""}
    prepare.prepare("brain_mri", block, root, tmp_path / "work", tmp_path / "out", tmp_path / "problems.csv")
    prepared = Prepared(tmp_path / "out")
    train, test = prepared.table[prepared.table.split == "train"], prepared.table[prepared.table.split == "test"]
    numbers = detect.facts(prepared, test, Slice.reads)["slice"]
    assert numbers.tolist() == [int(name[-3:]) for name in test.image_id]
    known = detect.facts(prepared, train, Slice.reads)["slice"]
    found = of_slices(sliced(known.tolist(), numbers.tolist()))
    away = np.abs(numbers[:, None] - known).min(axis=1)
    assert found[away == away.max()].min() > found[away == 0].max()
