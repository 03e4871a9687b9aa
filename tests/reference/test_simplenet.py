"""SimpleNet against the paper's equations, worked out in plain numpy without the project's code."""

from typing import Any

import numpy as np
import pytest
import torch
from known_features import SIZE, StandIn, levels_of, pixels
from learnable import auroc, scored, tissue
from scipy.ndimage import gaussian_filter, zoom

from anomed import backbones, training
from anomed.errors import AnomedError
from anomed.methods.simplenet import Simplenet, truncated

WIDTH = 8  # of the known features: 3 + 5 channels


class Known(StandIn):
    """The stand-in, of grey levels as a tensor."""

    def maps(self, values: torch.Tensor, layers: list[str], count: int | None = None) -> list[torch.Tensor]:
        return self.features(values[:, 0].round().numpy().astype(np.uint8), layers, len(values))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbones, "load", lambda *given: Known())


def fitted(images: np.ndarray, seed: int = 0, **params: Any) -> Simplenet:
    detector = Simplenet(Simplenet.Params(**{"epochs": 3, "hidden": 6, **params}), seed)
    detector.fit(images)
    return detector


# The oracle. Section numbers are those of arXiv 2303.15140.


def neighbourhoods(level: np.ndarray) -> np.ndarray:
    """3.1: mean of the 3 x 3 places around each; those outside are not there. (C, h, w) to the same."""
    out = np.empty(level.shape)
    for i in range(level.shape[1]):
        for j in range(level.shape[2]):
            out[:, i, j] = level[:, max(i - 1, 0) : i + 2, max(j - 1, 0) : j + 2].mean(axis=(1, 2))
    return out


def features(images: np.ndarray) -> np.ndarray:
    """3.1: both levels on the grid of the first; (N, 6, 6, 8)."""
    out = []
    for image in images:
        first, second = map(neighbourhoods, levels_of(image))
        coarse = [zoom(channel, 2, order=1, mode="nearest", grid_mode=True) for channel in second]
        out.append(np.concatenate([first, coarse]).transpose(1, 2, 0))
    return np.array(out)


def judged(adapted: np.ndarray, state: dict[str, np.ndarray], batch: bool) -> np.ndarray:
    """3.4: the discriminator of (P, C); batch normalisation by the batch itself, or by the running statistics."""
    values = adapted @ state["discriminator.0.weight"].T + state["discriminator.0.bias"]
    mean, variance = state["discriminator.1.running_mean"], state["discriminator.1.running_var"]
    if batch:
        mean, variance = values.mean(axis=0), values.var(axis=0)
    values = (values - mean) / np.sqrt(variance + 1e-5) * state["discriminator.1.weight"] + state[
        "discriminator.1.bias"
    ]
    values = np.where(values > 0, values, 0.2 * values)
    return (values @ state["discriminator.3.weight"].T)[:, 0]


@pytest.mark.usefixtures("known")
def test_features_are_means_of_neighbourhoods_on_one_grid() -> None:
    detector = fitted(pixels(4, seed=1), epochs=1)
    test = pixels(3, seed=2)
    np.testing.assert_allclose(detector._features(test).numpy(), features(test), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("adaptor", [True, False])
def test_scores_and_maps_follow_the_equations(adaptor: bool) -> None:
    detector = fitted(pixels(6, seed=3), adaptor=adaptor)
    state, test = detector.state(), pixels(5, seed=4)
    flat = features(test).reshape(-1, WIDTH)
    adapted = flat @ state["adaptor.weight"].T if adaptor else flat
    expected = -judged(adapted, state, batch=False).reshape(5, 6, 6)
    scores, maps = scored(detector, test)
    assert maps is not None
    np.testing.assert_allclose(scores, expected.max(axis=(1, 2)), rtol=1e-3, atol=1e-5)
    for grid, painted in zip(expected, maps, strict=True):
        smooth = gaussian_filter(
            zoom(grid, SIZE / 6, order=1, mode="nearest", grid_mode=True), 4, mode="mirror", truncate=4
        )
        np.testing.assert_allclose(painted, smooth, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("known")
def test_loss_follows_the_equations() -> None:
    """3.3 to 3.5: noise on adapted features, truncated L1; a large deviation shows the noise in the loss."""
    train = pixels(4, seed=5)
    detector = fitted(train, epochs=1, noise_std=0.7)
    phase, state = detector._phase(), detector.state()
    for network in phase.networks:
        network.train()
    torch.manual_seed(7)
    ((name, loss),) = phase.step(train, training.Step(0, 1, np.random.default_rng(0)))
    torch.manual_seed(7)
    adapted = features(train).reshape(-1, WIDTH) @ state["adaptor.weight"].T
    noisy = adapted + 0.7 * torch.randn(adapted.shape, dtype=torch.float32).numpy()
    values = judged(np.concatenate([adapted, noisy]), state, batch=True)
    normal, abnormal = values[: len(adapted)], values[len(adapted) :]
    expected = np.maximum(0, 0.5 - normal).mean() + np.maximum(0, 0.5 + abnormal).mean()
    assert name == "discrimination"
    assert loss.item() == pytest.approx(expected, rel=1e-3)


def test_loss_is_truncated() -> None:
    normal, noisy = torch.tensor([0.5, 9.0, 0.25, -1.0]), torch.tensor([-0.5, -9.0, 0.0, 2.0])
    assert truncated(normal, noisy).item() == pytest.approx((0.25 + 1.5) / 4 + (0.5 + 2.5) / 4)


def test_only_adaptor_and_discriminator_move_each_at_its_rate() -> None:
    detector = Simplenet(Simplenet.Params(epochs=1, batch_size=4, hidden=8), 0)
    frozen = {key: value.clone() for key, value in detector._backbone.network.state_dict().items()}
    images = tissue(4, seed=1)
    detector.size = images.shape[1]
    detector._build(152)
    before = {key: value.copy() for key, value in detector.state().items()}
    training.run(detector, images, {"simplenet": detector._phase})
    assert all(torch.equal(value, frozen[key]) for key, value in detector._backbone.network.state_dict().items())
    after = detector.state()
    step = {key: np.abs(after[key] - before[key]).max() for key in before}
    # The first step of Adam is the rate itself, wherever there is a gradient.
    assert step["adaptor.weight"] == pytest.approx(1e-4, rel=0.01)
    assert step["discriminator.0.weight"] == step["discriminator.3.weight"] == pytest.approx(2e-4, rel=0.01)


@pytest.mark.usefixtures("known")
def test_nothing_is_random_at_scoring_and_nothing_is_scaled() -> None:
    detector, test = fitted(pixels(4, seed=6), noise_std=5.0), pixels(4, seed=7)
    scores, maps = scored(detector, test)
    again, others = scored(detector, test[::-1])
    assert again[::-1].tobytes() == scores.tobytes()
    assert maps is not None
    assert others is not None
    assert others[::-1].tobytes() == maps.tobytes()
    alone = np.concatenate([scored(detector, test[i : i + 1])[0] for i in range(4)])
    np.testing.assert_allclose(alone, scores, rtol=1e-6)  # no smallest and largest of a set in it


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("layers", "size"), [(["layer2", "layer3"], None), (["layer1"], 32)])
def test_any_backbone_few_images_and_any_size(count: int, layers: list[str], size: int | None) -> None:
    params: dict[str, Any] = {
        "backbone": "resnet18",
        "weights": "random",
        "layers": layers,
        "image_size": size,
        "batch_size": 1,
    }
    images = np.repeat(tissue(count, seed=2)[..., None], 3, axis=3)
    detector = fitted(images, epochs=1, **params)
    scores, maps = scored(detector, images)
    assert maps is not None
    assert maps.shape == (count, 64, 64)
    assert np.isfinite(scores).all()
    assert Simplenet.mark(detector.params) == "smoke: random weights"
    assert Simplenet.files(detector.params) == {}


def test_bad_settings_are_refused() -> None:
    with pytest.raises(AnomedError, match=r"resnet18 has no layer 'blocks.2'; its layers are .*layer1"):
        fitted(tissue(1, seed=3), backbone="resnet18", weights="random")
    with pytest.raises(ValueError, match="patch_size: found 4, expected an odd number"):
        Simplenet.Params(patch_size=4)
    with pytest.raises(ValueError, match="no backbone 'resnet81'"):
        Simplenet.Params(backbone="resnet81")


def test_it_learns() -> None:
    rates: dict[str, Any] = {"learning_rate": 2e-3, "adaptor_learning_rate": 1e-3}
    detector = fitted(tissue(24, seed=4), epochs=10, hidden=64, noise_std=1.0, **rates)
    assert auroc(detector) >= 0.9
    assert detector.progress is not None
    losses = [row["discrimination"] for row in detector.progress.rows]
    assert losses[-1] < 0.8 * losses[0]
