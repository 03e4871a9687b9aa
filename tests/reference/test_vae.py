"""The variational autoencoder against its equations, worked out in numpy from what its encoder and decoder say."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from learnable import auroc, scored, tissue
from scipy.integrate import quad

from anomed import training
from anomed.methods.vae import Vae

SMALL: dict[str, Any] = {"channels": [6, 8], "latent_size": 5, "epochs": 2, "batch_size": 4, "beta": 0.3}


def fitted(images: np.ndarray, seed: int = 0, **params: Any) -> Vae:
    detector = Vae(Vae.Params(**{**SMALL, **params}), seed)
    detector.fit(images)
    return detector


def colour(images: np.ndarray) -> np.ndarray:
    return np.stack([images, images // 2, 255 - images], axis=-1)


def inputs(images: np.ndarray) -> np.ndarray:
    """float64 (B, C, S, S) in [0, 1]."""
    planes = images[:, None] if images.ndim == 3 else np.moveaxis(images, -1, 1)
    return np.ascontiguousarray(planes / 255.0)


# The oracle.


def divergence(mean: np.ndarray, variance: np.ndarray) -> float:
    """KL(N(mean, variance) || N(0, 1)), summed over dimensions, by its integral."""
    total = 0.0
    for centre, spread in zip(mean.tolist(), np.sqrt(variance).tolist(), strict=True):

        def part(z: float, centre: float = centre, spread: float = spread) -> float:
            own = -(((z - centre) / spread) ** 2) / 2 - math.log(spread)
            return math.exp(own) / math.sqrt(2 * math.pi) * (own + z * z / 2)

        total += quad(part, centre - 12 * spread, centre + 12 * spread)[0]
    return total


def bounds(values: np.ndarray, decoded: np.ndarray, mean: np.ndarray, variance: np.ndarray, beta: float) -> np.ndarray:
    """-ELBO of each image, a unit Gaussian's constant left out, divided by the number of values."""
    out = []
    for x, y, m, v in zip(values, decoded, mean, variance, strict=True):
        out.append((((x - y) ** 2).sum() / 2 + beta * divergence(m, v)) / x.size)
    return np.array(out)


def encoded(detector: Vae, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of the posterior."""
    vae: Any = detector.networks["vae"]
    with torch.no_grad():
        mean, logarithm = vae.encode_forward(torch.from_numpy(values).to(next(vae.parameters()).dtype))
    return mean.double().numpy(), np.exp(logarithm.double().numpy())


def decoded(detector: Vae, z: np.ndarray, side: int) -> np.ndarray:
    vae: Any = detector.networks["vae"]
    with torch.no_grad():
        out = vae.decode_forward(torch.from_numpy(z).to(next(vae.parameters()).dtype), use_sigmoid=False)
    return out[..., :side, :side].double().numpy()


@pytest.mark.parametrize("kind", [np.asarray, colour])
@pytest.mark.parametrize("side", [32, 37])  # 37 cannot be halved: the decoder's surplus is cut off
def test_score_is_the_bound_at_the_mean_of_the_posterior(kind: Any, side: int) -> None:
    detector = fitted(kind(tissue(6, 1, side=side)))
    images = kind(tissue(3, 2, blobs=True, side=side))
    values = inputs(images)
    mean, variance = encoded(detector, values)
    rebuilt = decoded(detector, mean, side)
    scores, maps = scored(detector, images)
    assert maps is not None
    assert maps.shape == (3, side, side)
    np.testing.assert_allclose(scores, bounds(values, rebuilt, mean, variance, beta=0.3), rtol=1e-4)
    np.testing.assert_allclose(maps, ((values - rebuilt) ** 2).mean(axis=1), rtol=1e-4, atol=1e-6)


def test_loss_is_the_bound_at_a_draw_from_the_posterior() -> None:
    detector = fitted(tissue(4, 3, side=32))
    images = tissue(3, 4, side=32)
    values = inputs(images)
    detector.networks["vae"].train()  # batch normalisation by the batch, as in training
    mean, variance = encoded(detector, values)
    torch.manual_seed(7)
    ((key, loss),) = detector._phase().step(images, training.Step(0, 1, np.random.default_rng(0)))
    torch.manual_seed(7)
    z = mean + np.sqrt(variance) * torch.randn(3, 5).double().numpy()
    expected = bounds(values, decoded(detector, z, 32), mean, variance, beta=0.3).mean()
    assert key == "bound"
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_restoration_climbs_the_posterior() -> None:
    """Two steps, their gradients by finite differences in float64 of the objective written in numpy."""
    rate, weight, beta, side, h = 0.05, 0.1, 0.3, 16, 1e-6
    params: dict[str, Any] = {"restoration_steps": 2, "restoration_rate": rate, "restoration_weight": weight}
    detector = fitted(tissue(6, 5, side=side), score="restoration", **params)
    image = tissue(1, 6, blobs=True, side=side)
    scores, maps = scored(detector, image)
    detector.networks.double()

    def objective(x: np.ndarray, start: np.ndarray) -> np.ndarray:
        mean, variance = encoded(detector, x)
        kl = (mean**2 + variance - 1 - np.log(variance)).sum(axis=1) / 2
        errors = ((x - decoded(detector, mean, side)) ** 2).sum(axis=(1, 2, 3)) / 2
        change = x - start
        tv = np.abs(np.diff(change, axis=2)).sum(axis=(1, 2, 3)) + np.abs(np.diff(change, axis=3)).sum(axis=(1, 2, 3))
        return -(errors + beta * kl) - weight * tv

    start = inputs(image)
    x, offsets = start.copy(), h * np.eye(side * side).reshape(-1, 1, side, side)
    for _ in range(2):
        slope = (objective(x + offsets, start) - objective(x - offsets, start)) / (2 * h)
        x = x + rate * slope.reshape(x.shape)
    assert np.abs(x - start).max() > 0.01
    assert maps is not None
    np.testing.assert_allclose(maps[0], np.abs(start - x)[0, 0], atol=2e-5)
    assert scores[0] == pytest.approx(np.abs(start - x).mean(), rel=1e-3)


def test_weight_of_total_variation_keeps_the_change_smooth() -> None:
    train, image = tissue(8, 7, side=32), tissue(2, 8, blobs=True, side=32)
    rough = {}
    for weight in (0.0, 0.1):
        steps: dict[str, Any] = {"restoration_steps": 60, "restoration_rate": 5e-3, "restoration_weight": weight}
        detector = fitted(train, score="restoration", **steps)
        _, maps = scored(detector, image)
        assert maps is not None
        rough[weight] = np.abs(np.diff(maps, axis=1)).sum() / np.abs(maps).sum()
    assert rough[0.1] < 0.7 * rough[0.0]


@pytest.mark.parametrize("score", ["elbo", "restoration"])
def test_scoring_draws_nothing_and_changes_nothing(score: str) -> None:
    detector = fitted(tissue(6, 9, side=32), score=score, restoration_steps=3)
    before = detector.state()
    detector.networks.zero_grad()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one, _ = scored(detector, tissue(3, 10, side=32))
    assert torch.equal(torch.get_rng_state(), state)
    other, _ = scored(detector, tissue(3, 10, side=32))
    assert one.tobytes() == other.tobytes()
    assert all(np.array_equal(value, before[key]) for key, value in detector.state().items())
    assert all(value.grad is None for value in detector.networks.parameters())


def test_training_moves_every_parameter() -> None:
    images = tissue(8, 11, side=32)
    fresh = Vae(Vae.Params(**SMALL), 0)
    fresh._build(1, 32)
    start = {key: value.clone() for key, value in fresh.networks.named_parameters()}
    trained = dict(fitted(images, epochs=3).networks.named_parameters())
    still = [key for key, value in trained.items() if torch.equal(value, start[key])]
    assert still == []


def test_brightness_reaches_the_code() -> None:
    """Normalisation of each image alone would make all uniform images the same to the encoder."""
    detector = fitted(tissue(8, 12, side=32))
    flat = np.stack([np.full((32, 32), level, np.uint8) for level in (30, 90, 200)])
    mean, _ = encoded(detector, inputs(flat))
    assert np.abs(np.diff(mean, axis=0)).max(axis=1).min() > 1e-3


def test_bad_settings_are_refused() -> None:
    for wrong in ({"score": "likelihood"}, {"channels": [8]}, {"channels": [8, 0]}, {"beta": -1.0}, {"latent_size": 0}):
        (key,) = wrong
        with pytest.raises(ValueError, match=key):
            Vae.Params(**wrong)


SCORES: dict[str, dict[str, Any]] = {
    "elbo": {},
    "restoration": {"restoration_steps": 60, "restoration_rate": 0.02, "restoration_weight": 0.05},
}


@pytest.mark.parametrize("score", ["elbo", "restoration"])
def test_it_learns(score: Any) -> None:
    size: dict[str, Any] = {"channels": [8, 16, 32], "latent_size": 32}
    params = Vae.Params(**size, epochs=20, batch_size=8, learning_rate=3e-3, score=score, **SCORES[score])
    detector = Vae(params, 0)
    detector.fit(tissue(64, 0))
    assert auroc(detector) >= 0.8
