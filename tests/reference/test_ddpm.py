"""AnoDDPM and its simplex noise against the papers' equations, worked out in numpy with known networks in their place."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from learnable import auroc, scored, tissue
from scipy.integrate import dblquad
from torch import nn

from anomed import simplex, training
from anomed.errors import AnomedError
from anomed.methods.ddpm import Ddpm

SMALL: dict[str, Any] = {
    "channels": [4, 8],
    "residual_blocks": 1,
    "attention": 1,
    "image_size": 16,
    "timesteps": 40,
    "start": 6,
    "epochs": 1,
    "batch_size": 4,
}


class Known(nn.Module):
    """In place of a U-Net: says what `rule` computes, and keeps what it was asked."""

    def __init__(self, rule: Any):
        super().__init__()
        self.rule, self.asked = rule, list[tuple[np.ndarray, np.ndarray]]()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, noised: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        self.asked.append((noised.double().numpy(), times.numpy()))
        said = self.rule(noised.double().numpy(), times.numpy().reshape(-1, 1, 1, 1))
        return torch.from_numpy(said.astype(np.float32)) + 0 * self.weight


def built(seed: int = 0, channels: int = 1, **params: Any) -> Ddpm:
    detector = Ddpm(Ddpm.Params(**{**SMALL, **params}), seed)
    detector._build(channels, detector.params.image_size)
    return detector


def products(timesteps: int) -> tuple[np.ndarray, np.ndarray]:
    """Betas, and a_t: the product of 1 - beta up to t (Ho et al., with the published scaling to fewer steps)."""
    betas = np.linspace(1e-4, 0.02, timesteps) * 1000 / timesteps
    return betas, np.cumprod(1 - betas)


def noise_at(detector: Ddpm, step: int, channels: int) -> np.ndarray:
    """The noise of a step when scoring: of the seed and the step alone."""
    rng, params, side = np.random.default_rng([detector.seed, step]), detector.params, detector.size
    if params.noise == "gaussian":
        return rng.standard_normal((channels, side, side), np.float32).astype(float)
    frequency = params.frequency * side / 256
    return simplex.fractal(channels, side, rng, frequency, params.octaves, params.persistence).astype(float)


def rule(noised: np.ndarray, times: np.ndarray) -> np.ndarray:
    """A nonlinear stand-in, such that some predicted images leave [-1, 1] and are clipped."""
    return np.asarray(np.sin(3 * noised) + 0.05 * times)


@pytest.mark.parametrize("noise", ["simplex", "gaussian"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("timesteps", [40, 1000])
def test_scores_and_maps_follow_the_chain(noise: str, channels: int, timesteps: int) -> None:
    detector = built(seed=3, channels=channels, noise=noise, timesteps=timesteps)
    detector.networks["average"] = Known(rule)
    images = np.random.default_rng(0).integers(0, 256, (6, 16, 16, channels)).astype(np.uint8)
    images = images[..., 0] if channels == 1 else images
    scores, maps = scored(detector, images)
    betas, a = products(timesteps)
    planes = images[:, None] if channels == 1 else np.moveaxis(images, -1, 1)
    x0 = planes / 127.5 - 1
    x = math.sqrt(a[5]) * x0 + math.sqrt(1 - a[5]) * noise_at(detector, 6, channels)
    clipped = 0
    for t in range(5, -1, -1):
        said = rule(x, np.full((6, 1, 1, 1), t))
        image = (x - math.sqrt(1 - a[t]) * said) / math.sqrt(a[t])
        clipped += int((np.abs(image) > 1).sum())
        image = np.clip(image, -1, 1)
        before = a[t - 1] if t else 1.0
        mean = math.sqrt(before) * betas[t] * image + math.sqrt(1 - betas[t]) * (1 - before) * x
        x = mean / (1 - a[t]) + (math.sqrt(betas[t]) * noise_at(detector, t, channels) if t else 0)
    assert clipped > 0
    expected = ((x0 - x) ** 2).mean(axis=1)
    assert maps is not None
    np.testing.assert_allclose(maps, expected, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(scores, expected.mean(axis=(1, 2)), rtol=1e-4)


def test_a_model_that_knows_the_normal_image_leaves_the_anomaly() -> None:
    detector = built(image_size=32)
    normal = np.full((32, 32), 100, np.uint8)
    ill = normal.copy()
    ill[8:16, 20:28] = 220
    _, a = products(40)

    def told(noised: np.ndarray, times: np.ndarray) -> np.ndarray:
        return np.asarray((noised - np.sqrt(a[times]) * (100 / 127.5 - 1)) / np.sqrt(1 - a[times]))

    detector.networks["average"] = Known(told)
    scores, maps = scored(detector, np.stack([normal, ill]))
    assert maps is not None
    assert scores[0] < 1e-6 < scores[1]
    np.testing.assert_allclose(maps[1][8:16, 20:28], (120 / 127.5) ** 2, rtol=1e-3)
    assert maps[1].sum() == pytest.approx(maps[1][8:16, 20:28].sum(), rel=1e-3)


@pytest.mark.parametrize("channels", [1, 3])
def test_loss_is_the_error_of_the_predicted_noise(channels: int) -> None:
    detector = built(channels=channels)
    known = detector.networks["unet"] = Known(rule)
    images = tissue(5, 1, side=16)
    images = images if channels == 1 else np.stack([images, images // 2, 255 - images], axis=-1)
    torch.manual_seed(4)
    (key, loss) = next(detector._phase().step(images, training.Step(0, 9, np.random.default_rng(8))))
    drawn = simplex.fractal(5 * channels, 16, np.random.default_rng(8), 64 * 16 / 256, 6, 0.8)
    noise = drawn.reshape(5, channels, 16, 16)
    ((noised, times),) = known.asked
    a = products(40)[1][times].reshape(-1, 1, 1, 1)
    planes = images[:, None] if channels == 1 else np.moveaxis(images, -1, 1)
    np.testing.assert_allclose(noised, np.sqrt(a) * (planes / 127.5 - 1) + np.sqrt(1 - a) * noise, atol=1e-5)
    assert len(set(times.tolist())) > 1
    assert key == "noise"
    assert loss.item() == pytest.approx(((rule(noised, times.reshape(-1, 1, 1, 1)) - noise) ** 2).mean(), rel=1e-4)


def test_times_cover_all_steps_alike() -> None:
    detector = built(timesteps=25, start=2)
    known = detector.networks["unet"] = Known(rule)
    phase = detector._phase()
    torch.manual_seed(0)
    for number in range(10):
        next(phase.step(np.zeros((100, 16, 16), np.uint8), training.Step(number, 9, np.random.default_rng(number))))
    counts = np.bincount(np.concatenate([times for _, times in known.asked]), minlength=25)
    assert len(counts) == 25
    assert counts.min() > 15  # 40 expected
    assert counts.max() < 75


def test_average_follows_the_trained_network() -> None:
    """After two steps: shares (1 + n) / (10 + n) of the old average stay, or `ema` if that is less."""
    images = tissue(8, 2, side=16)
    for ema, shares in ((0.9999, (1 / 10, 2 / 11)), (0.05, (0.05, 0.05))):
        weights = [dict(built().networks["unet"].named_parameters())]
        for steps in (1, 2):
            detector = Ddpm(Ddpm.Params(**{**SMALL, "epochs": 9, "max_steps": steps, "ema": ema}), 0)
            detector.fit(images)
            weights.append(dict(detector.networks["unet"].named_parameters()))
        for key, value in detector.networks["average"].named_parameters():
            expected, *later = (stage[key].detach().double().numpy() for stage in weights)
            for share, new in zip(shares, later, strict=True):
                expected = share * expected + (1 - share) * new
            np.testing.assert_allclose(value.numpy(), expected, atol=1e-6)


def test_loss_moves_the_trained_network_and_the_average_has_no_gradient() -> None:
    detector = Ddpm(Ddpm.Params(**{**SMALL, "epochs": 3, "learning_rate": 1e-2}), 0)
    detector.fit(tissue(8, 3, side=16))
    before = dict(built().networks["unet"].named_parameters())
    still = [key for key, value in detector.networks["unet"].named_parameters() if torch.equal(value, before[key])]
    assert still == []
    assert not any(value.requires_grad for value in detector.networks["average"].parameters())
    assert set(detector.state()) == {"input", *detector.networks["average"].state_dict()}


def test_scoring_is_one_for_all_images_and_draws_nothing() -> None:
    detector = Ddpm(Ddpm.Params(**{**SMALL, "epochs": 3, "learning_rate": 1e-2}), 0)
    detector.fit(tissue(8, 4, side=16))
    images = tissue(1, 5, side=16).repeat(6, axis=0)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    scores, _ = scored(detector, images)
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_allclose(scores, scores[0], rtol=1e-5)
    again = Ddpm(detector.params, 1)  # another seed, other noise
    again.restore(detector.state())
    assert abs(scored(again, images)[0][0] / scores[0] - 1) > 1e-3


def test_noise_that_is_not_kept_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    detector, images = built(), tissue(6, 6, side=16)
    kept = scored(detector, images)[0]
    assert len(detector.drawn) == 6
    monkeypatch.setattr("anomed.methods.ddpm.KEPT_BYTES", 2 * 16 * 16 * 4)
    other = built()
    assert scored(other, images)[0].tobytes() == kept.tobytes()
    assert len(other.drawn) == 2


def test_bad_settings_are_refused() -> None:
    for size, near in ((50, "48 or 56"), (17, "16 or 24"), (16, "")):
        if near:
            with pytest.raises(
                ValueError, match=f"image_size is {size}, but 4 levels .* of 8, at least 16; set .*: {near}"
            ):
                Ddpm.Params(image_size=size)
        else:
            Ddpm.Params(image_size=size)
    with pytest.raises(
        ValueError, match=r"image_size is 16, but 5 levels .* at least 32; set image_size: 32, or fewer"
    ):
        Ddpm.Params(image_size=16, channels=[8] * 5)
    with pytest.raises(AnomedError, match=r"image_size is 33.* 32 or 34"):
        Ddpm(Ddpm.Params(image_size=None, channels=[8, 8]), 0).fit(np.zeros((3, 33, 33), np.uint8))
    with pytest.raises(ValueError, match="start is 300, but there are 200 timesteps; lower start"):
        Ddpm.Params(start=300, timesteps=200)
    for wrong in ({"noise": "perlin"}, {"persistence": 0.0}, {"channels": [1]}, {"timesteps": 10}, {"ema": 1.0}):
        (key,) = wrong
        with pytest.raises(ValueError, match=key):
            Ddpm.Params(**wrong)


@pytest.mark.parametrize("widths", [[4], [6, 10, 15], [32, 64]])
def test_any_widths_make_a_network(widths: list[int]) -> None:
    detector = Ddpm(Ddpm.Params(**{**SMALL, "channels": widths, "attention": 9}), 0)
    detector._build(1, 16)
    assert np.isfinite(scored(detector, tissue(1, 7, side=16))[0]).all()


# Simplex noise. The oracle: K. Perlin, "Noise hardware" (2001), for one point in plain Python.


def tables(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permuted(np.tile(np.arange(256, dtype=np.uint8), (count, 1)), axis=1)


def at_point(x: float, y: float, table: list[int]) -> float:
    """Sum over all near corners of the triangular lattice, none chosen by the triangle that the point is in."""
    scale = 1 / math.sqrt(MEAN_SQUARE)
    skewed = (x + y) * (math.sqrt(3) - 1) / 2
    i0, j0 = math.floor(x + skewed), math.floor(y + skewed)
    total = 0.0
    for i in range(i0 - 2, i0 + 4):
        for j in range(j0 - 2, j0 + 4):
            back = (i + j) * (3 - math.sqrt(3)) / 6
            across, along = x - (i - back), y - (j - back)
            fade = 0.5 - across * across - along * along
            if fade > 0:
                turn = table[(i + table[j % 256]) % 256] % 16 * math.pi / 8
                total += fade**4 * (math.cos(turn) * across + math.sin(turn) * along)
    return total * scale


# One part's mean square over the lattice: half its squared length, for directions are alike all round; one corner
# per area sqrt(1/3).
MEAN_SQUARE = (
    math.sqrt(3)
    * dblquad(lambda r, angle: (0.5 - r * r) ** 8 * r * r / 2 * r, 0, 2 * math.pi, 0, math.sqrt(0.5), epsabs=1e-12)[0]
)


def test_simplex_equals_the_sum_over_all_near_corners() -> None:
    x, y = np.random.default_rng(1).uniform(-300, 300, (2, 200))
    drawn = tables(2)
    expected = [[at_point(a, b, table) for a, b in zip(x, y, strict=True)] for table in drawn.tolist()]
    np.testing.assert_allclose(simplex.simplex(x, y, drawn), expected, atol=1e-9)


def test_simplex_is_continuous_and_bounded() -> None:
    rng = np.random.default_rng(2)
    start, angle = rng.uniform(-50, 50, (2, 40, 1)), rng.uniform(0, 2 * np.pi, (40, 1))
    way = np.linspace(0, 3, 3001)
    values = simplex.simplex(start[0] + way * np.cos(angle), start[1] + way * np.sin(angle), tables(1))[0]
    assert np.abs(np.diff(values, axis=1)).max() < 0.02  # a step of 0.001
    x, y = rng.uniform(-500, 500, (2, 100_000))
    many = simplex.simplex(x, y, tables(4))
    assert np.abs(many).max() < 1.8553
    assert np.abs(many).max() > 1.7


def test_simplex_has_mean_0_and_mean_square_1() -> None:
    x, y = np.random.default_rng(3).uniform(-500, 500, (2, 100_000))
    values = simplex.simplex(x, y, tables(8))
    assert abs(values.mean()) < 0.02
    assert (values**2).mean() == pytest.approx(1, abs=0.03)
    assert np.abs(np.corrcoef(values) - np.eye(8)).max() < 0.05  # tables share nothing


def test_directions_do_not_depend_on_where_a_corner_lies() -> None:
    """Neither near the origin nor far from it, and a neighbour's direction tells nothing."""
    i, j = np.mgrid[-40:40, -40:40]
    for away in (0, 1000):
        corner = (i + away, j - away)
        back = (corner[0] + corner[1]) * (3 - math.sqrt(3)) / 6
        x, y, h = corner[0] - back, corner[1] - back, 1e-4
        drawn = tables(1, seed=away)
        slopes = np.stack(
            [
                simplex.simplex(x + h, y, drawn)[0] - simplex.simplex(x - h, y, drawn)[0],
                simplex.simplex(x, y + h, drawn)[0] - simplex.simplex(x, y - h, drawn)[0],
            ]
        )
        turns = np.round(np.arctan2(slopes[1], slopes[0]) * 8 / np.pi).astype(int) % 16
        counts = np.bincount(turns.ravel(), minlength=16)
        assert counts.min() > 250  # 400 expected
        assert counts.max() < 550
        for axis in (0, 1):
            alike = (turns == np.roll(turns, 1, axis=axis)).mean()
            assert alike == pytest.approx(1 / 16, abs=0.02)


def test_layers_double_in_fineness_and_weaken() -> None:
    rng = np.random.default_rng(5)
    made = simplex.fractal(3, 20, rng, frequency=10, octaves=3, persistence=0.8)
    again, rows = np.random.default_rng(5), np.mgrid[:20, :20]
    total = np.zeros((3, 20, 20))
    for unit, amplitude in ((10, 1), (5, 0.8), (2.5, 0.64)):
        drawn = again.permuted(np.tile(np.arange(256, dtype=np.uint8), (3, 1)), axis=1)
        x, y = again.uniform(0, 256, 2)
        total += amplitude * simplex.simplex(rows[1] / unit + x, rows[0] / unit + y, drawn)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, total / math.sqrt(1 + 0.8**2 + 0.64**2), atol=1e-5)
    few = simplex.fractal(1, 8, np.random.default_rng(6), frequency=4, octaves=3, persistence=0.8)
    many = simplex.fractal(1, 8, np.random.default_rng(6), frequency=4, octaves=9, persistence=0.8)
    assert np.array_equal(few, many)  # 4, 2 and 1 pixels; no finer one


def test_every_pixel_has_mean_square_1() -> None:
    drawn = np.concatenate(
        [simplex.fractal(4, 16, np.random.default_rng(seed), 4, 6, 0.8) for seed in range(500)]
    ).astype(float)
    squares = (drawn**2).mean(axis=0)
    assert squares.mean() == pytest.approx(1, abs=0.05)
    assert squares.min() > 0.8  # the first pixel is no corner of every layer
    assert squares.max() < 1.2
    assert np.abs(drawn.mean(axis=0)).max() < 0.15


@pytest.mark.parametrize(("noise", "side"), [("gaussian", 16), pytest.param("simplex", 32, marks=pytest.mark.full)])
def test_it_learns(noise: Any, side: int) -> None:
    size: dict[str, Any] = {"channels": [16, 32], "residual_blocks": 1, "attention": 0, "image_size": side}
    steps: dict[str, Any] = {"timesteps": 50, "start": 10, "epochs": 8, "batch_size": 16, "ema": 0.9}
    detector = Ddpm(Ddpm.Params(**size, **steps, learning_rate=3e-3, noise=noise), 0)
    detector.fit(tissue(80, 0))
    assert auroc(detector) >= 0.8
