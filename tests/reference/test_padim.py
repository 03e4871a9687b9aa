"""PaDiM against the paper's equations, worked out in plain numpy loops without the project's code."""

from typing import Any

import numpy as np
import pytest
import torch
from known_features import SIZE, StandIn, levels_of, pixels
from scipy.ndimage import gaussian_filter, zoom

from anomed import backbones
from anomed.errors import AnomedError
from anomed.methods import padim
from anomed.methods.padim import Padim


@pytest.fixture(autouse=True)
def known_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbones, "load", lambda *given: StandIn())


def fitted(images: np.ndarray, seed: int = 0, **params: Any) -> Padim:
    detector = Padim(Padim.Params(**{"n_features": 5, "batch_size": 4, **params}), seed)
    detector.fit(images)
    return detector


def scored(detector: Padim, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    batches = list(detector.score(images))
    return np.concatenate([scores for scores, _ in batches]), np.concatenate([maps for _, maps in batches])


# The oracle. Section numbers are those of arXiv 2011.08785.


def embeddings(images: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """3.1: concatenated activations of each position, the coarser level's repeated; (N, 6, 6, dimensions)."""
    out = np.empty((len(images), 6, 6, 8))
    for n, image in enumerate(images):
        first, second = levels_of(image)
        for i in range(6):
            for j in range(6):
                out[n, i, j] = np.concatenate([first[:, i, j], second[:, i // 2, j // 2]])
    return out[..., kept]


def distances(train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """3.2 and 3.3: Gaussian of every position with 0.01 on the diagonal, and equation 2; (N, 6, 6)."""
    out = np.empty(test.shape[:3])
    for i in range(6):
        for j in range(6):
            mean = train[:, i, j].mean(axis=0)
            covariance = np.zeros((len(mean), len(mean)))
            for x in train[:, i, j]:
                covariance += np.outer(x - mean, x - mean) / max(len(train) - 1, 1)
            inverse = np.linalg.inv(covariance + 0.01 * np.eye(len(mean)))
            for n, x in enumerate(test[:, i, j]):
                out[n, i, j] = np.sqrt((x - mean) @ inverse @ (x - mean))
    return out


@pytest.mark.parametrize("count", [40, 3, 1])  # more images than dimensions, fewer, and one
def test_scores_and_maps_follow_the_equations(count: int) -> None:
    train, test = pixels(count, seed=1), pixels(6, seed=2)
    detector = fitted(train)
    kept = detector.state()["index"]
    assert len(np.unique(kept)) == 5
    expected = distances(embeddings(train, kept), embeddings(test, kept))
    scores, maps = scored(detector, test)
    assert maps.shape == (6, SIZE, SIZE)
    assert maps.dtype == np.float32
    for grid, score, painted in zip(expected, scores, maps, strict=True):
        upsampled = zoom(grid, SIZE / 6, order=1, mode="nearest", grid_mode=True)
        smooth = gaussian_filter(upsampled, 4, mode="mirror", truncate=4)
        np.testing.assert_allclose(painted, smooth, rtol=1e-4)
        assert score == pytest.approx(smooth.max(), rel=1e-4)


def test_moments_survive_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features far from the origin, of little variance: a plain sum of squares in float32 would lose all of it."""

    class Far(StandIn):
        def features(self, images: np.ndarray, layers: list[str], batch_size: int) -> list[torch.Tensor]:
            return [1000 + level for level in super().features(images, layers, batch_size)]

    train, test = pixels(50, seed=3), pixels(4, seed=4)
    near, _ = scored(fitted(train), test)
    monkeypatch.setattr(backbones, "load", lambda *given: Far())
    far, _ = scored(fitted(train), test)
    np.testing.assert_allclose(far, near, rtol=1e-3)  # the features themselves are rounded to 6e-5


def test_batches_and_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = pixels(11, seed=5), pixels(5, seed=6)
    scores, maps = scored(fitted(train), test)
    monkeypatch.setattr(padim, "BLOCK", 7 * 25)  # 7 positions at once, the last block one
    other, others = scored(fitted(train, batch_size=3), test)
    np.testing.assert_allclose(other, scores, rtol=1e-5)
    np.testing.assert_allclose(others, maps, rtol=1e-5)


def test_constant_train_images_leave_the_regularisation() -> None:
    """The distance is then the Euclidean one, ten times over."""
    train, test = np.full((5, SIZE, SIZE), 130, np.uint8), pixels(2, seed=7)
    detector = fitted(train, smoothing_sigma=0)
    kept = detector.state()["index"]
    expected = np.linalg.norm(embeddings(test, kept) - embeddings(train[:1], kept), axis=-1) * 10
    _, maps = scored(detector, test)
    for grid, painted in zip(expected, maps, strict=True):
        np.testing.assert_allclose(painted, zoom(grid, 8, order=1, mode="nearest", grid_mode=True), rtol=1e-4)
    assert scored(detector, train)[1].max() < 1e-3


def test_seed_draws_the_dimensions() -> None:
    train = pixels(6, seed=8)
    drawn = {tuple(fitted(train, seed).state()["index"]) for seed in range(4)}
    assert len(drawn) > 1
    assert fitted(train, 3).state()["factors"].tobytes() == fitted(train, 3).state()["factors"].tobytes()
    assert fitted(train, n_features=8).state()["index"].tolist() == list(range(8))


def test_a_level_without_a_kept_dimension_is_no_obstacle() -> None:
    train, test = pixels(6, seed=9), pixels(2, seed=10)
    found = set()
    for seed in range(12):
        detector = fitted(train, seed, n_features=1)
        kept = detector.state()["index"]
        found.add(int(kept[0] >= 3))
        _, maps = scored(detector, test)
        expected = distances(embeddings(train, kept), embeddings(test, kept))
        upsampled = zoom(expected[0], 8, order=1, mode="nearest", grid_mode=True)
        np.testing.assert_allclose(maps[0], gaussian_filter(upsampled, 4, mode="mirror", truncate=4), rtol=1e-4)
    assert found == {0, 1}


def test_state_is_one_triangle_per_position() -> None:
    state = fitted(pixels(6, seed=11)).state()
    assert {name: (array.shape, str(array.dtype)) for name, array in state.items()} == {
        "index": ((5,), "int64"),
        "mean": ((36, 5), "float32"),
        "factors": ((36, 15), "float32"),
    }


def test_bad_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AnomedError, match=r"n_features is 9, but layers .* of tf_efficientnet_lite0 have 8 dimensions"):
        fitted(pixels(1, seed=12), n_features=9)

    class Large(StandIn):
        def features(self, images: np.ndarray, layers: list[str], batch_size: int) -> list[torch.Tensor]:
            return [torch.zeros(len(images), 1792, 56, 56)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backbones, "load", lambda *given: Large())
        with pytest.raises(
            AnomedError, match=r"550 dimensions at 56 x 56 positions: 5464 MB, more .* lower n_features"
        ):
            fitted(pixels(1, seed=12), n_features=550)
    assert "5464 MB" in capsys.readouterr().err
    with pytest.raises(ValueError, match="greater than 0"):
        Padim.Params(regularisation=0.0)


def test_needs_and_marks() -> None:
    assert Padim.needs_mb(Padim.Params(max_memory_mb=6000), 224) == 8000
    assert Padim.mark(Padim.Params()) == ""
    assert Padim.mark(Padim.Params(weights="random")) == "smoke: random weights"
    assert Padim.files(Padim.Params(weights="random")) == {}
