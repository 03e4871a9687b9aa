"""CutPaste against the paper's equations, worked out in plain numpy without the project's code."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from learnable import auroc, scored, tissue
from sklearn.covariance import LedoitWolf

from anomed import backbones, training
from anomed.errors import AnomedError
from anomed.methods import cutpaste
from anomed.methods.cutpaste import Cutpaste

SMALL: dict[str, Any] = {
    "backbone": "resnet18",
    "weights": "random",
    "layers": ["layer2"],
    "head": [12, 6],
    "frozen_steps": 0,
    "max_steps": 2,
    "batch_size": 4,
}


def made(seed: int = 0, **params: Any) -> Cutpaste:
    return Cutpaste(Cutpaste.Params(**{**SMALL, **params}), seed)


def fitted(images: np.ndarray, seed: int = 0, **params: Any) -> Cutpaste:
    detector = made(seed, **params)
    detector.fit(images)
    return detector


def copied(detector: Cutpaste) -> dict[str, np.ndarray]:
    return {key: value.copy() for key, value in detector.state().items()}


# The oracle: all that follows the backbone's features.


def pooled(detector: Cutpaste, images: np.ndarray) -> np.ndarray:
    """What the backbone says of grey images, averaged over positions."""
    values = torch.from_numpy(images[:, None]).float().expand(-1, 3, -1, -1)
    with torch.no_grad():
        (level,) = detector.backbone.maps(values, detector.params.layers)
    return level.numpy().astype(np.float64).mean(axis=(2, 3))


def perceptron(values: np.ndarray, state: dict[str, np.ndarray], batch: bool) -> np.ndarray:
    """Linear, batch normalisation (by the batch, or by the running statistics) and ReLU, twice."""
    for at in (0, 3):
        weight, shift = state[f"head.{at + 1}.weight"], state[f"head.{at + 1}.bias"]
        values = values @ state[f"head.{at}.weight"].T + state[f"head.{at}.bias"]
        mean, variance = state[f"head.{at + 1}.running_mean"], state[f"head.{at + 1}.running_var"]
        if batch:
            mean, variance = values.mean(axis=0), values.var(axis=0)
        values = np.maximum(0, (values - mean) / np.sqrt(variance + 1e-5) * weight + shift)
    return values


@pytest.mark.parametrize("embedding", ["head", "pooled"])
@pytest.mark.parametrize("regularisation", [None, 1e-3])
def test_scores_are_distances_to_the_gaussian_of_these_train_images(
    embedding: str, regularisation: float | None
) -> None:
    train, test = tissue(30, seed=1), tissue(5, seed=2, blobs=True)
    detector = fitted(train, embedding=embedding, regularisation=regularisation)
    state = detector.state()
    near, far = pooled(detector, train), pooled(detector, test)
    if embedding == "head":
        near, far = (perceptron(values, state, batch=False) for values in (near, far))
    near, far = (values / np.linalg.norm(values, axis=1, keepdims=True) for values in (near, far))
    mean = near.mean(axis=0)
    if regularisation is None:
        precision = np.linalg.inv(LedoitWolf().fit(near).covariance_ + 1e-9 * np.eye(len(mean)))
    else:
        precision = np.linalg.inv((near - mean).T @ (near - mean) / 30 + regularisation * np.eye(len(mean)))
    expected = np.sqrt([(one - mean) @ precision @ (one - mean) for one in far])
    scores, maps = scored(detector, test)
    assert maps is None
    np.testing.assert_allclose(scores, expected, rtol=2e-3)
    np.testing.assert_allclose(state["gaussian.mean"], mean, atol=1e-5)


def test_gaussian_is_of_the_images_it_was_fitted_on() -> None:
    """Not, as in BMAD, of one domain whatever was trained: the same networks, another set, another Gaussian."""
    detector = fitted(tissue(12, seed=3), embedding="pooled")
    before = copied(detector)
    detector._estimate(255 - tissue(12, seed=3))
    after = copied(detector)
    changed = {key for key in before if before[key].tobytes() != after[key].tobytes()}
    assert changed == {"gaussian.mean", "gaussian.factor"}


@pytest.mark.parametrize(("count", "dims"), [(40, 5), (6, 20), (2, 3)])
def test_shrinkage_is_that_of_ledoit_and_wolf(count: int, dims: int) -> None:
    rng = np.random.default_rng(count)
    values = rng.normal(size=(count, dims)) * np.linspace(0.1, 1, dims) + 5
    mean, covariance = cutpaste.moments(values, None)
    expected = LedoitWolf().fit(values)
    np.testing.assert_allclose(mean, expected.location_)
    np.testing.assert_allclose(covariance, expected.covariance_, atol=1e-8)


@pytest.mark.parametrize("count", [1, 4])
def test_images_without_variation_have_a_gaussian(count: int) -> None:
    _, covariance = cutpaste.moments(np.full((count, 3), 0.5), None)
    np.testing.assert_allclose(covariance, 1e-9 * np.eye(3))


def test_loss_is_cross_entropy_of_three_versions() -> None:
    detector, images = made(), tissue(4, seed=4)
    detector._build(64, "random")
    phase, state = detector._phase(0, 1, 2, 1), copied(detector)
    for network in phase.networks:
        network.train()
    ((name, loss),) = phase.step(images, training.Step(0, 1, np.random.default_rng(5)))
    three = cutpaste.versions(images, np.random.default_rng(5), 0.1)
    assert len(three) == 12
    hidden = perceptron(pooled(detector, three), state, batch=True)
    logits = hidden @ state["classifier.weight"].T + state["classifier.bias"]
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    truth = [0] * 4 + [1] * 4 + [2] * 4  # normal, CutPaste, CutPaste-Scar
    assert name == "classification"
    assert loss.item() == pytest.approx(-np.log(shares[np.arange(12), truth]).mean(), rel=1e-3)


def test_backbone_is_frozen_first_and_trained_then() -> None:
    detector, images = made(), tissue(4, seed=6)
    detector._build(64, "random")
    first = copied(detector)
    training.run(detector, images, {"head": functools.partial(detector._phase, 0, 2, 9, 1)})
    second = copied(detector)
    training.run(detector, images, {"all": functools.partial(detector._phase, 2, 3, 3, 1)})
    third = copied(detector)
    for key in first:
        part = key.partition(".")[0]
        assert part != "backbone" or first[key].tobytes() == second[key].tobytes(), key
    for key in ("head.0.weight", "head.1.running_mean", "classifier.weight"):
        assert first[key].tobytes() != second[key].tobytes()
    for key in ("backbone.conv1.weight", "backbone.bn1.running_mean", "head.0.weight", "classifier.weight"):
        assert second[key].tobytes() != third[key].tobytes()


def test_phases_share_the_batches_and_the_rate_falls_as_a_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: dict[str, list[float]] = {}
    run = training.run

    def watched(detector: Any, images: np.ndarray, phases: Any, finish: Any) -> None:
        def spied(name: str, make: Any) -> training.Phase:
            phase = make()
            (sgd,) = phase.optimisers.values()
            inner = phase.step

            def step(images: np.ndarray, at: training.Step) -> training.Losses:
                for pair in inner(images, at):
                    rates.setdefault(name, []).append(sgd.param_groups[0]["lr"])
                    yield pair

            phase.step = step
            return phase

        run(detector, images, {name: functools.partial(spied, name, make) for name, make in phases.items()}, finish)

    monkeypatch.setattr(training, "run", watched)
    detector = fitted(tissue(10, seed=7), frozen_steps=2, max_steps=8, epochs=100, learning_rate=0.03)
    assert [len(rates[name]) for name in ("head", "all")] == [2, 6]
    expected = [0.03 * (1 + np.cos(np.pi * number / 8)) / 2 for number in range(8)]
    np.testing.assert_allclose(rates["head"] + rates["all"], expected)
    assert detector.progress is not None
    told = [(row["phase"], row["epoch"], row["rate"]) for row in detector.progress.rows]
    starts = [("head", 1, 0), ("all", 1, 2), ("all", 2, 5)]  # three batches are a pass
    assert told == [(name, epoch, pytest.approx(expected[at] / 0.03)) for name, epoch, at in starts]


def noise(side: int = 128) -> np.ndarray:
    return np.random.default_rng(8).integers(0, 256, (side, side), dtype=np.uint8)


def box(one: np.ndarray, other: np.ndarray) -> tuple[slice, slice]:
    """The smallest rectangle in which two images differ."""
    rows, columns = np.nonzero(one != other)
    return slice(rows.min(), rows.max() + 1), slice(columns.min(), columns.max() + 1)


def test_patches_are_rectangles_of_the_image_itself() -> None:
    image, shapes, places = noise(), [], set()
    before = image.copy()
    windows = np.lib.stride_tricks.sliding_window_view(image, (6, 6))
    for seed in range(200):
        found = cutpaste.patch(image, np.random.default_rng(seed), 0)
        where = box(found, image)
        rows, columns = where
        shapes.append((rows.stop - rows.start, columns.stop - columns.start))
        places.add((rows.start, columns.start))
        if seed < 10:
            assert (windows == found[where][:6, :6]).all(axis=(2, 3)).any(), "not of this image"
    assert np.array_equal(image, before)
    assert len(places) > 150
    heights, widths = np.array(shapes).T
    areas, aspects = heights * widths / 128**2, widths / heights
    assert areas.min() > 0.018
    assert areas.max() < 0.155
    assert areas.max() - areas.min() > 0.1
    assert aspects.min() > 0.27
    assert aspects.max() < 3.6
    assert 0.4 < (aspects < 1).mean() < 0.6


@pytest.mark.parametrize("side", [32, 64, 256])
def test_scars_are_thin_and_turned(side: int) -> None:
    image = noise(side)
    areas, angles = [], []
    for seed in range(200):
        found = cutpaste.scar(image, np.random.default_rng(seed), 0)
        rows, columns = np.nonzero(found != image)
        areas.append(len(rows))
        if len(rows) > 80:
            values, vectors = np.linalg.eigh(np.cov(rows, columns))
            if values[1] > 9 * values[0]:  # long enough to have a direction
                angles.append(np.degrees(np.arctan(vectors[1, 1] / vectors[0, 1])))
    assert min(areas) >= 1
    assert max(areas) <= max(9, 1.3 * 16 * 25 * (side / 256) ** 2)
    if side == 256:
        assert max(areas) > 250
        assert -50 < min(angles) < -20
        assert 20 < max(angles) < 50


def test_colours_are_jittered_within_bounds_and_alike_in_all_versions() -> None:
    grey = np.full((64, 64), 100, np.uint8)
    drawn = [cutpaste.jittered(grey, np.random.default_rng(seed), 0.1)[0, 0] for seed in range(60)]
    assert min(drawn) in range(89, 95)
    assert max(drawn) in range(106, 112)
    colour = np.random.default_rng(9).integers(0, 256, (1, 40, 40, 3), dtype=np.uint8)
    np.testing.assert_allclose(cutpaste.versions(colour, np.random.default_rng(0), 0)[0], colour[0], atol=8)
    normal, patched, scarred = cutpaste.versions(colour, np.random.default_rng(0), 0.1)
    assert (normal != colour[0]).any()
    for other in (patched, scarred):
        assert 0 < (other != normal).any(axis=2).mean() < 0.16  # beside what was pasted, they are equal


def test_restored_detector_needs_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    images = tissue(3, seed=10)
    detector = fitted(images, max_steps=1)
    asked, load = [], backbones.load

    def watched(name: str, device: str, weights: str, seed: int) -> backbones.Backbone:
        asked.append(weights)
        return load(name, device, "random", seed)

    monkeypatch.setattr(backbones, "load", watched)
    again = made(weights="pretrained")
    again.restore(copied(detector))
    assert asked == ["random"]
    assert scored(again, images)[0].tobytes() == scored(detector, images)[0].tobytes()


@pytest.mark.parametrize(
    ("backbone", "layer"),
    [pytest.param("vgg16", "features.9", marks=pytest.mark.full), ("tf_efficientnet_lite0", "blocks.6")],
)
def test_parts_that_nothing_reaches_are_not_kept(backbone: str, layer: str) -> None:
    detector = made(backbone=backbone, layers=[layer], image_size=32)
    detector._build(32, "random")
    names = {key for key in detector.state() if key.startswith("backbone.")}
    assert any(key.startswith(f"backbone.{layer.partition('.')[0]}.0.") for key in names)
    assert not [key for key in names if "classifier" in key or "conv_head" in key or "features.28" in key]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("colour", [False, True])
def test_few_images_and_any_size(count: int, colour: bool) -> None:
    images = tissue(count, seed=11, side=40)
    images = np.repeat(images[..., None], 3, axis=3) if colour else images
    detector = fitted(images, batch_size=1, layers=["layer1", "layer3"], image_size=32)
    assert np.isfinite(scored(detector, images)[0]).all()
    assert Cutpaste.mark(detector.params) == "smoke: random weights"
    assert Cutpaste.files(detector.params) == {}


def test_bad_settings_are_refused() -> None:
    with pytest.raises(AnomedError, match=r"frozen_steps: found 20, expected less than the 4 batches .* for 5 images"):
        fitted(tissue(5, seed=12), frozen_steps=20, epochs=4, max_steps=None, batch_size=5)
    with pytest.raises(AnomedError, match=r"resnet18 has no layer 'blocks.6'; its layers are .*layer4"):
        fitted(tissue(1, seed=12), layers=["blocks.6"])
    with pytest.raises(ValueError, match="no backbone 'resnet81'"):
        Cutpaste.Params(backbone="resnet81")
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Cutpaste.Params(head=[16, 0])


def test_it_learns() -> None:
    detector = fitted(tissue(24, seed=13), max_steps=30, head=[64, 32], batch_size=6, image_size=48)
    assert auroc(detector) >= 0.9
    assert detector.progress is not None
    losses = [row["classification"] for row in detector.progress.rows]
    assert np.mean(losses[-3:]) < 0.9 * np.mean(losses[:2])
