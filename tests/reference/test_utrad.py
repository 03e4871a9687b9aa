"""UTRAD: losses, scores and the order of tokens, worked out in numpy beside the project's code."""

from typing import Any

import learnable
import numpy as np
import pytest
import torch
from scipy.ndimage import zoom

from anomed.errors import AnomedError
from anomed.methods import utrad
from anomed.methods.utrad import Utrad
from anomed.training import Step

BRIEF = learnable.BRIEF["utrad"]


def fitted(images: np.ndarray, seed: int = 0, **params: Any) -> Utrad:
    detector = Utrad(Utrad.Params(**{**BRIEF, **params}), seed)
    detector.fit(images)
    return detector


def outputs(detector: Utrad, images: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, reconstruction and predicted sizes of one batch, float64."""
    with torch.inference_mode():
        features = detector.networks["standard"](detector._raw(images))
        rebuilt, scales = detector._forward(features)
    one, two, three = (value.numpy().astype(np.float64) for value in (features, rebuilt, scales))
    return one, two, three


def upsampled(grid: np.ndarray, factor: float) -> np.ndarray:
    return zoom(grid, factor, order=1, mode="nearest", grid_mode=True) if len(grid) > 1 else np.full([8, 8], grid[0, 0])


@pytest.mark.parametrize("trained", [True, False])
def test_scores_and_maps_follow_the_equations(trained: bool) -> None:
    images = learnable.tissue(4, seed=1)
    detector = fitted(images, epochs=2, learning_rate=0.002)
    head: Any = detector.networks["scale"]
    head[-1].weight.data.copy_(torch.tensor([[-100.0], [-40.0]]).T[..., None, None] if trained else torch.tensor(1e-4))
    features, rebuilt, scales = outputs(detector, images)
    scores, maps = learnable.scored(detector, images)
    assert maps is not None
    for n in range(4):
        errors = np.sqrt(((rebuilt[n] - features[n]) ** 2).mean(axis=0))
        assert (np.abs(scales[n, 0]) > 0.01).all() == trained
        ratio = errors / (np.abs(scales[n, 0]) if trained else 0.01)
        total = ratio.copy()
        for window in (2, 8):
            cells = 8 // window
            means = np.array(
                [
                    [ratio[i * window : (i + 1) * window, j * window : (j + 1) * window].mean() for j in range(cells)]
                    for i in range(cells)
                ]
            )
            total += upsampled(means, window)
        expected = zoom(total / 3, 8, order=1, mode="nearest", grid_mode=True)
        np.testing.assert_allclose(maps[n], expected, rtol=1e-4)
        assert scores[n] == pytest.approx(expected.max(), rel=1e-4)


def test_losses_follow_the_equations_and_move_their_own_network() -> None:
    images = learnable.tissue(4, seed=2)
    detector = fitted(images)
    phase = detector._phase(images)
    features, rebuilt, scales = outputs(detector, images)  # in evaluation mode, as the step below
    errors = np.sqrt(((rebuilt - features) ** 2).mean(axis=1, keepdims=True))
    expected = {"reconstruction": ((rebuilt - features) ** 2).mean(), "scale": ((scales - errors) ** 2).mean()}
    own = {"reconstruction": "transformer", "scale": "scale"}
    found = dict(phase.step(images, Step(0, 1, np.random.default_rng(0))))
    assert set(found) == set(expected)
    for name, loss in found.items():
        assert float(loss.detach()) == pytest.approx(expected[name], rel=1e-4)
        detector.networks.zero_grad()
        loss.backward()
        for other, network in detector.networks.items():
            moved = [value.grad is not None and bool(value.grad.any()) for value in network.parameters()]
            assert any(moved) == (other == own[name])


def test_backbone_stays_and_the_rest_learns() -> None:
    images = learnable.tissue(6, seed=3)
    detector = Utrad(Utrad.Params(**BRIEF), 0)
    frozen = {key: value.clone() for key, value in detector._backbone.network.state_dict().items()}
    detector.size = 64
    channels = detector._raw(images[:1]).shape[1]
    before = utrad.nets.built(detector, lambda: utrad.networks(channels, detector.params)).state_dict()
    detector.fit(images)
    assert all(torch.equal(value, frozen[key]) for key, value in detector._backbone.network.state_dict().items())
    after = detector.networks.state_dict()
    # Of all parts the positions too, which the authors' code leaves as drawn.
    for part in ("transformer.first", "transformer.position", "transformer.levels.1.query", "transformer.last"):
        assert not torch.equal(after[f"{part}.weight"], before[f"{part}.weight"])
    assert not torch.equal(
        after["transformer.levels.0.position.weight"], before["transformer.levels.0.position.weight"]
    )
    assert not torch.equal(after["scale.0.weight"], before["scale.0.weight"])


@pytest.mark.parametrize("count", [7, 1])  # the last batch is not full
def test_features_have_mean_0_and_deviation_1(count: int) -> None:
    images = learnable.tissue(count, seed=4)
    detector = fitted(images)
    raw = np.concatenate([detector._raw(image[None]).numpy() for image in images]).astype(np.float64)
    mean, deviation = raw.mean(axis=(0, 2, 3), keepdims=True), raw.std(axis=(0, 2, 3), keepdims=True)
    features, _, _ = outputs(detector, images)
    np.testing.assert_allclose(features, (raw - mean) / deviation, rtol=1e-3, atol=1e-3)
    plain = fitted(images, standardise=False)
    np.testing.assert_allclose(outputs(plain, images)[0], raw, rtol=1e-3, atol=1e-3)


def test_a_channel_that_never_varies_is_left_as_it_is() -> None:
    detector = fitted(learnable.tissue(2, seed=4))
    raw = detector._raw
    detector._raw = lambda images: torch.cat([raw(images)[:, :-1], torch.full((len(images), 1, 8, 8), 3.0)], 1)  # type: ignore[method-assign]
    detector._measure(learnable.tissue(2, seed=4))
    held: Any = detector.networks["standard"]
    assert held.running_var[-1] == 1
    assert held.running_mean[-1] == 3


def test_features_are_joined_on_the_first_grid_and_resized_to_the_tokens() -> None:
    images = learnable.tissue(2, seed=5)
    detector = fitted(images)
    fine, coarse = (level.numpy() for level in detector._backbone.features(images, ["blocks.2", "blocks.4"], 2))
    expected = np.concatenate([fine, coarse.repeat(2, axis=2).repeat(2, axis=3)], axis=1)
    np.testing.assert_allclose(detector._raw(images).numpy(), expected, rtol=1e-3, atol=1e-3)
    larger = fitted(images, patches=[3, 4])
    assert larger._raw(images).shape == (2, expected.shape[1], 12, 12)


def test_tokens_are_cut_into_patches_and_put_back() -> None:
    tokens = np.random.default_rng(6).normal(size=(2, 6, 6, 5)).astype(np.float32)
    parts = utrad.cut(torch.from_numpy(tokens), 3).numpy()
    expected = [tokens[n, i : i + 3, j : j + 3].reshape(9, 5) for n in range(2) for i in (0, 3) for j in (0, 3)]
    np.testing.assert_array_equal(parts, np.stack(expected))
    np.testing.assert_array_equal(utrad.put_back(torch.from_numpy(parts), 2, 2, 3).numpy(), tokens)


def test_attention_keeps_to_patches_but_for_the_summaries() -> None:
    """With the coarse decoder's answer fixed, a token is told of its own patch alone; without, of every token."""
    detector = fitted(learnable.tissue(4, seed=7))
    features = torch.randn(4, 152, 8, 8, generator=torch.Generator().manual_seed(0))
    other = features.clone()
    other[0, :, 7, 7] += 3

    def change() -> np.ndarray:
        with torch.inference_mode():
            (one, _), (two, _) = detector._forward(features), detector._forward(other)
        return (one - two).abs().amax(1).numpy()

    changed = change()
    assert (changed[0] > 0).all()
    assert (changed[1:] == 0).all(), "images do not see each other"
    network: Any = detector.networks["transformer"]
    coarse = network["levels"]
    coarse[1]["decoder"].norm.weight.data.zero_()
    changed = change()[0] > 0
    assert changed[6:, 6:].all()
    assert changed.sum() == 4


def test_scoring_is_without_chance_and_leaves_torch_as_it_was() -> None:
    images = learnable.tissue(5, seed=8)
    detector = fitted(images, dropout=0.5)
    state = torch.random.get_rng_state()
    before = torch.backends.mha.get_fastpath_enabled()
    first, second = (learnable.scored(detector, images) for _ in range(2))
    assert first[0].tobytes() == second[0].tobytes()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled() == before


@pytest.mark.parametrize(("backbone", "layers"), [("resnet18", ["layer1", "layer2", "layer3"])])
def test_other_backbones_and_sides(backbone: str, layers: list[str]) -> None:
    for side in (32, 45):
        images = learnable.tissue(3, seed=9, side=side)
        detector = fitted(images, backbone=backbone, layers=layers, weights="random", standardise=False)
        scores, maps = learnable.scored(detector, images)
        assert np.isfinite(scores).all()
        assert maps is not None
        assert maps.shape == (3, side, side)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"width: found 24, expected a multiple of 8 and of heads, 5"):
        Utrad.Params(width=24, heads=5)
    with pytest.raises(ValueError, match=r"patches: found a product of 256, expected at most 128"):
        Utrad.Params(patches=[16, 16])
    with pytest.raises(AnomedError, match=r"no layer 'layer1'"):
        fitted(learnable.tissue(2, seed=10), layers=["layer1"])


def test_needs_and_marks() -> None:
    assert Utrad.mark(Utrad.Params()) == ""
    assert "random" in Utrad.mark(Utrad.Params(weights="random"))
    assert Utrad.files(Utrad.Params(weights="random")) == {}


def test_it_learns() -> None:
    detector = fitted(
        learnable.tissue(32, seed=11), epochs=10, batch_size=8, width=32, feedforward=64, learning_rate=0.003
    )
    assert learnable.auroc(detector) >= 0.8
