"""PatchCore against the paper's equations, worked out in plain numpy loops without the project's code."""

from typing import Any

import numpy as np
import pytest
import torch
from known_features import SIZE, StandIn, levels_of, pixels
from scipy.ndimage import gaussian_filter

from anomed import backbones
from anomed.errors import AnomedError
from anomed.methods.patchcore import PatchCore, image_score, k_center_greedy, nearest
from anomed.patches import spread

NEIGHBOURS = 3


@pytest.fixture(autouse=True)
def known_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbones, "load", lambda name, device, weights, seed: StandIn(["blocks.2", "blocks.4"]))


# The oracle. Section numbers are those of arXiv 2106.08265.


def neighbourhood_mean(level: np.ndarray) -> np.ndarray:
    """3.1: each position averaged over its 3 x 3 neighbourhood, zeros outside."""
    channels, height, width = level.shape
    out = np.zeros_like(level)
    for c in range(channels):
        for i in range(height):
            for j in range(width):
                for di in (-1, 0, 1):
                    for dj in (-1, 0, 1):
                        if 0 <= i + di < height and 0 <= j + dj < width:
                            out[c, i, j] += level[c, i + di, j + dj] / 9
    return out


def bilinear(level: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resized with half-pixel centres, edges repeated; (C, h, w) to (C, height, width)."""
    _, h, w = level.shape
    out = np.zeros((len(level), height, width))
    for i in range(height):
        for j in range(width):
            y = min(max((i + 0.5) * h / height - 0.5, 0), h - 1)
            x = min(max((j + 0.5) * w / width - 0.5, 0), w - 1)
            y0, x0 = int(y), int(x)
            y1, x1 = min(y0 + 1, h - 1), min(x0 + 1, w - 1)
            top = level[:, y0, x0] * (1 - (x - x0)) + level[:, y0, x1] * (x - x0)
            bottom = level[:, y1, x0] * (1 - (x - x0)) + level[:, y1, x1] * (x - x0)
            out[:, i, j] = top * (1 - (y - y0)) + bottom * (y - y0)
    return out


def patch_features(image: np.ndarray) -> np.ndarray:
    """3.1: locally aware patch features of both levels on the first one's grid: (36, 8)."""
    first, second = (neighbourhood_mean(level) for level in levels_of(image))
    joined = np.concatenate([first, bilinear(second, *first.shape[1:])])
    return joined.reshape(len(joined), -1).T


def greedy_coreset(points: np.ndarray, count: int, start: int) -> list[int]:
    """Algorithm 1: repeatedly the point whose nearest chosen one is farthest, from the full distance table."""
    table = np.sqrt(((points[:, None] - points[None]) ** 2).sum(-1))
    chosen = [start]
    while len(chosen) < count:
        gaps = [min(table[i, c] for c in chosen) if i not in chosen else -1 for i in range(len(points))]
        chosen.append(int(np.argmax(gaps)))
    return chosen


def score_and_map(patches: np.ndarray, bank: np.ndarray, neighbours: int, sigma: float) -> tuple[float, np.ndarray]:
    """Equations 6 and 7, and the map of 3.3."""
    table = np.sqrt(((patches[:, None] - bank[None]) ** 2).sum(-1))
    worst = int(np.argmax(table.min(axis=1)))
    star = int(np.argmin(table[worst]))
    s_star = table[worst, star]
    around = np.argsort(np.sqrt(((bank - bank[star]) ** 2).sum(-1)), kind="stable")[:neighbours]
    assert around[0] == star
    weight = 1 - np.exp(s_star) / sum(np.exp(table[worst, k]) for k in around)
    side = int(np.sqrt(len(patches)))
    upsampled = bilinear(table.min(axis=1).reshape(1, side, side), SIZE, SIZE)[0]
    return float(weight * s_star), gaussian_filter(upsampled, sigma, mode="mirror", truncate=4)


def fitted(ratio: float, **params: Any) -> tuple[PatchCore, np.ndarray]:
    images = pixels(6, seed=1)
    settings: dict[str, Any] = {"coreset_ratio": ratio, "n_neighbors": NEIGHBOURS, "batch_size": 4, **params}
    detector = PatchCore(PatchCore.Params(**settings), seed=0)
    detector.fit(images)
    return detector, np.concatenate([patch_features(image) for image in images])


def test_bank_is_the_greedy_coreset() -> None:
    detector, features = fitted(0.1)
    bank = detector.state()["bank"]
    assert bank.shape == (21, 8)  # int(0.1 x 216)
    rows = [int(np.argmin(((features - entry) ** 2).sum(1))) for entry in bank]
    assert np.abs(features[rows] - bank).max() < 1e-5
    assert rows == greedy_coreset(features, 21, start=rows[0])


def test_seed_moves_the_start() -> None:
    starts = set()
    for seed in range(4):
        detector = PatchCore(PatchCore.Params(coreset_ratio=0.01), seed=seed)
        detector.fit(pixels(6, seed=1))
        starts.add(detector.state()["bank"][0].tobytes())
    assert len(starts) > 1


def test_scores_and_maps_follow_the_equations() -> None:
    detector, _ = fitted(0.1)
    bank = detector.state()["bank"].astype(np.float64)
    images = pixels(5, seed=2)
    images[3] = pixels(6, seed=1)[0]  # a train image: some of its patches lie in the bank
    batches = list(detector.score(images))
    scores = np.concatenate([scores for scores, _ in batches])
    maps = np.concatenate([maps for _, maps in batches])
    for image, score, map_ in zip(images, scores, maps, strict=True):
        expected, expected_map = score_and_map(patch_features(image), bank, NEIGHBOURS, sigma=4)
        assert score == pytest.approx(expected, rel=1e-5)
        np.testing.assert_allclose(map_, expected_map, rtol=1e-4, atol=1e-5)


def test_one_neighbour_or_one_entry_leaves_the_weight_out() -> None:
    image = pixels(1, seed=3)
    for detector in (fitted(0.1, n_neighbors=1)[0], fitted(0.001)[0]):
        bank = detector.state()["bank"]
        table = np.sqrt(((patch_features(image[0])[:, None] - bank[None]) ** 2).sum(-1))
        [(scores, _)] = detector.score(image)
        assert scores[0] == pytest.approx(table.min(axis=1).max(), rel=1e-5)


def test_cap_and_projection() -> None:
    detector, features = fitted(1.0, coreset_max=50, projection_dims=4)
    bank = detector.state()["bank"]
    assert bank.shape == (50, 8)  # features themselves are kept, not their projections
    distances = np.sqrt(((features[:, None] - bank[None]) ** 2).sum(-1))
    assert (distances.min(axis=0) < 1e-5).all()
    assert len(np.unique(bank, axis=0)) == 50
    random = features[np.random.default_rng(0).choice(len(features), 50, replace=False)]
    radius = np.sqrt(((features[:, None] - random[None]) ** 2).sum(-1)).min(axis=1).max()
    assert distances.min(axis=1).max() < radius  # covers the features better than a random subset


def test_greedy_selection_on_many_shapes() -> None:
    rng = np.random.default_rng(4)
    for count, total, dims in ((1, 5, 2), (5, 5, 3), (12, 60, 4), (30, 90, 2)):
        points = rng.normal(size=(total, dims))
        start = int(rng.integers(total))
        chosen = k_center_greedy(torch.from_numpy(points.astype(np.float32)), count, start)
        assert chosen.tolist() == greedy_coreset(points.astype(np.float32).astype(np.float64), count, start)


def test_greedy_selection_never_repeats_a_duplicate() -> None:
    points = torch.full((7, 3), 0.1)
    assert sorted(k_center_greedy(points, 7, 2).tolist()) == list(range(7))


def test_distances_survive_cancellation() -> None:
    """Far from the origin the expanded square loses everything in float32; distances must not."""
    rng = np.random.default_rng(5)
    bank = (1000 + rng.normal(size=(50, 6)) * 100).astype(np.float32)
    patches = bank[[3, 8]] + np.array([[0.0], [0.25]], np.float32)
    distances, entries = nearest(torch.from_numpy(patches), torch.from_numpy(bank))
    assert entries.tolist() == [3, 8]
    assert distances[0] == 0
    assert float(distances[1]) == pytest.approx(0.25 * np.sqrt(6), rel=1e-3)


def test_bank_is_compared_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    bank, patches = (torch.from_numpy(rng.normal(size=(n, 4)).astype(np.float32)) for n in (23, 9))
    whole = nearest(patches, bank)
    monkeypatch.setattr("anomed.methods.patchcore.BANK_ROWS", 5)
    chunked = nearest(patches, bank)
    assert torch.equal(whole[0], chunked[0])
    assert torch.equal(whole[1], chunked[1])


def test_score_stays_finite_at_large_distances() -> None:
    """exp(distance) overflows beyond 709 in float64; the softmax must not."""
    bank = torch.tensor([[0.0], [1.0], [5.0]])
    patches = torch.tensor([[1e5]])
    distances, entries = nearest(patches, bank)
    # m* = 5; distances to (5, 1) are 99995 and 99999: weight 1 - 1 / (1 + e^4)
    expected = (1 - 1 / (1 + np.exp(4))) * 99995
    assert image_score(patches, distances, entries, bank, 2) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("cells", "size", "sigma"), [(6, 48, 4.0), (28, 224, 4.0), (4, 10, 4.0), (1, 8, 2.0), (5, 5, 0.0)]
)
def test_spread_is_upsampling_then_smoothing(cells: int, size: int, sigma: float) -> None:
    scores = np.random.default_rng(7).normal(size=(cells, cells))
    expected = bilinear(scores[None], size, size)[0]
    if sigma:
        expected = gaussian_filter(expected, sigma, mode="mirror", truncate=4)
    matrix = spread(cells, size, sigma)
    np.testing.assert_allclose(matrix @ scores @ matrix.T, expected, atol=1e-6)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(("cells", "size"), [(6, 48), (3, 7), (28, 224)])
def test_nearest_upsampling_repeats_patches(cells: int, size: int) -> None:
    scores = np.random.default_rng(9).normal(size=(cells, cells))
    matrix = spread(cells, size, 0.0, "nearest")
    rows = [int(i * cells / size) for i in range(size)]
    np.testing.assert_allclose(matrix @ scores @ matrix.T, scores[np.ix_(rows, rows)], atol=1e-6)
    smoothed = spread(cells, size, 2.0, "nearest")
    expected = gaussian_filter(scores[np.ix_(rows, rows)], 2.0, mode="mirror", truncate=4)
    np.testing.assert_allclose(smoothed @ scores @ smoothed.T, expected, atol=1e-6)


def textures(count: int, seed: int, odd: int = 0) -> np.ndarray:
    """Gratings of three wave lengths, any angle, phase and contrast, with noise; the last `odd` have a square of
    coarser noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:SIZE, :SIZE]
    out = np.empty((count, SIZE, SIZE))
    for i in range(count):
        angle, phase = rng.uniform(0, 2 * np.pi, 2)
        wave = 2 * np.pi / rng.choice([40, 56, 80])
        out[i] = 128 + rng.uniform(30, 80) * np.sin(wave * (np.cos(angle) * x + np.sin(angle) * y) + phase)
        if i >= count - odd:
            top, left = rng.integers(0, SIZE - 16, 2)
            out[i, top : top + 16, left : left + 16] += rng.normal(0, 24, (16, 16))
    return np.clip(out + rng.normal(0, 2, out.shape), 0, 255).astype(np.uint8)


class Filters:
    """A backbone of 24 random filters without a mean, on 12 x 12 patches."""

    def features(self, images: np.ndarray, layers: list[str], batch_size: int) -> list[torch.Tensor]:
        weights = torch.randn(24, 1, 8, 8, generator=torch.Generator().manual_seed(3))
        grey = torch.from_numpy(images.astype(np.float32) / 64)[:, None]
        return [torch.nn.functional.conv2d(grey, weights - weights.mean((2, 3), keepdim=True), stride=4, padding=2)]


def test_two_rounds_find_what_one_finds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Image AUROC no more than 0.5 points lower over two seeds, and no patch much farther from the bank."""
    monkeypatch.setattr(backbones, "load", lambda *given: Filters())
    train, test = textures(300, seed=1), textures(300, seed=2, odd=150)
    aurocs, radii = [], []
    for limit in (6, 2):
        for seed in range(2):
            params = PatchCore.Params(layers=["filters"], coreset_max=600, max_memory_mb=limit)
            detector = PatchCore(params, seed)
            detector.fit(train)
            assert len(np.unique(detector.state()["bank"], axis=0)) == 600
            scores = np.concatenate([scores for scores, _ in detector.score(test)])
            aurocs.append(float((scores[-150:, None] > scores[:-150]).mean()))
            radii.append(max(float(nearest(detector._batch(train, k), detector.bank)[0].max()) for k in range(37)))
    printed = capsys.readouterr().err
    assert "a bank of 600: 43200 points of 5 MB, chosen at once" in printed
    assert "chosen in 13 chunks, from 9039 candidates of them" in printed
    one, two = np.mean(np.reshape(aurocs, (2, 2)), axis=1)
    assert 0.9 < one < 0.9999  # a harder set moves by points from seed to seed, whichever way the bank is chosen
    assert two > one - 0.005
    assert max(radii[2:]) < 1.3 * max(radii[:2])


def test_features_of_the_bank_are_the_same_kept_or_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    banks = []
    for kept in (64, 0):
        monkeypatch.setattr("anomed.methods.patchcore.KEPT_MB", kept)
        banks.append(fitted(0.1)[0].state()["bank"])
    assert banks[0].tobytes() == banks[1].tobytes()


def test_two_rounds_choose_from_the_shares_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clusters far from each other, of which a chunk holds one: all are in the bank."""
    images = np.concatenate([pixels(400, seed=k) // 8 + shift for k, shift in enumerate((0, 90, 200))]).astype(np.uint8)
    calls: list[tuple[int, int]] = []

    def watched(points: torch.Tensor, count: int, start: int) -> torch.Tensor:
        calls.append((len(points), count))
        return k_center_greedy(points, count, start)

    monkeypatch.setattr("anomed.methods.patchcore.k_center_greedy", watched)
    detector = PatchCore(PatchCore.Params(coreset_max=30, max_memory_mb=1), seed=0)
    detector.fit(images)
    *chunks, last = calls
    assert sum(count for _, count in chunks) == last[0] < 1200 * 36 / 4
    assert last[1] == 30
    assert all(count >= 30 for _, count in chunks[:-1])
    assert max(points for points, _ in calls) * (8 + 3) * 4 < 2**20 / 2
    reds = detector.state()["bank"][:, 0]  # ten times the mean grey level of the patch's neighbourhood
    assert [((low < reds) & (reds < high)).sum() > 0 for low, high in ((0, 1.3), (3.5, 5), (7.5, 10))] == [True] * 3


def test_memory_is_bounded_or_refused_before_the_points_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    many = np.broadcast_to(pixels(1, seed=8), (40_000, SIZE, SIZE))
    detector = PatchCore(PatchCore.Params(max_memory_mb=5), seed=0)
    with pytest.raises(
        AnomedError, match=r"40000 images of 36 patches, a bank of 10000: it needs 12 MB at least, more"
    ):
        detector.fit(many)
    wide = PatchCore(PatchCore.Params(max_memory_mb=1, coreset_max=10**6, coreset_ratio=1.0, projection_dims=1), seed=0)
    with pytest.raises(AnomedError, match="lower coreset_max"):
        wide.fit(many)
    assert PatchCore.needs_mb(PatchCore.Params(max_memory_mb=700), 224) == 2700
    assert capsys.readouterr().err == ""


def test_random_weights_are_marked() -> None:
    assert PatchCore.mark(PatchCore.Params()) == ""
    assert PatchCore.mark(PatchCore.Params(weights="random")) == "smoke: random weights"
    assert PatchCore.files(PatchCore.Params(weights="random")) == {}


def test_parameters_are_checked() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"coreset_ratio": 0.0}, "greater than 0"),
        ({"n_neighbors": 0}, "greater than or equal to 1"),
        ({"layers": []}, "at least 1 item"),
        ({"backbone": "resnet_18"}, "no backbone 'resnet_18'"),
        ({"weights": "imagenet"}, "'pretrained' or 'random'"),
        ({"batch_size": 2.5}, "valid integer"),
    ]
    for bad, message in cases:
        with pytest.raises(ValueError, match=message):
            PatchCore.Params(**bad)
