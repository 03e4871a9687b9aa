"""MKD against the paper's equations: losses and gradients worked out by hand in numpy."""

from typing import Any

import learnable
import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from torch import nn

from anomed import backbones
from anomed.errors import AnomedError
from anomed.methods import mkd
from anomed.methods.mkd import Level, Mkd
from anomed.training import Step

MEAN, STD = (100.0, 110.0, 120.0), (60.0, 50.0, 40.0)


def fitted(images: np.ndarray, seed: int = 0, **params: Any) -> Mkd:
    detector = Mkd(Mkd.Params(**{**learnable.BRIEF["mkd"], **params}), seed)
    detector.fit(images)
    return detector


def loss(taught: list[np.ndarray], learned: list[np.ndarray], weight: float) -> float:
    """Section 3.1: one image's value and direction losses over the critical layers."""
    total = 0.0
    for t, s in zip(taught, learned, strict=True):
        t, s = t.ravel().astype(np.float64), s.ravel().astype(np.float64)
        total += 1 - t @ s / np.sqrt(t @ t) / np.sqrt(s @ s) + weight * sum((t - s) ** 2) / len(t)
    return total


def test_loss_and_score_follow_the_equations() -> None:
    images = learnable.tissue(5, seed=1)
    for kept in (None, ["blocks.2"]):
        detector = fitted(images, value_weight=0.3, score_layers=kept)
        values = detector._input(images[:4])
        with torch.no_grad():
            taught, learned = ([level.numpy() for level in f(values)] for f in (detector._taught, detector._learned))
        first = 1 if kept else 0
        expected = [loss([t[i] for t in taught[first:]], [s[i] for s in learned[first:]], weight=0.3) for i in range(4)]
        scores, _ = learnable.scored(detector, images)
        np.testing.assert_allclose(scores[:4], expected, rtol=1e-4)


def test_training_minimises_the_mean_of_that_loss() -> None:
    images = learnable.tissue(4, seed=2)
    detector = fitted(images, value_weight=0.3)
    phase = detector._phase()
    (pair,) = list(phase.step(images, Step(0, 1, np.random.default_rng(0))))
    expected = np.mean(learnable.scored(detector, images)[0])  # both in evaluation mode
    assert pair[0] == "distillation"
    assert float(pair[1].detach()) == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def pixelwise(monkeypatch: pytest.MonkeyPatch) -> backbones.Backbone:
    """A teacher of two 1 x 1 convolutions with ReLU: every pixel on its own."""
    torch.manual_seed(5)
    network = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(inplace=True), nn.Conv2d(6, 5, 1), nn.ReLU(inplace=True))
    teacher = backbones.Backbone("pixelwise", network, (MEAN, STD), "cpu")
    monkeypatch.setattr(backbones, "load", lambda *given: teacher)
    return teacher


@pytest.mark.parametrize("gradients", ["vanilla", "guided"])
@pytest.mark.parametrize("sigma", [0, 4])
def test_maps_are_gradients(pixelwise: backbones.Backbone, gradients: str, sigma: float) -> None:
    """Back-propagation by hand, with the rule of guided back-propagation (arXiv 1412.6806) at every ReLU."""
    images = np.random.default_rng(3).integers(0, 256, (3, 32, 32, 3), np.uint8)
    detector = fitted(images, layers=["3"], gradients=gradients, smoothing_sigma=sigma, width=7, value_weight=0.2)
    stage: Any = detector.networks["student"]
    first, norm, second = (stage[0][i] for i in (0, 1, 3))
    for module in (first, second):  # centres alone, so that the student is pixelwise too
        kept = module.weight[..., 1, 1].detach().clone()
        module.weight.data.zero_()
        module.weight.data[..., 1, 1] = kept
    teacher: Any = pixelwise.network
    a, b, c, d = (
        module.weight.detach().numpy().astype(np.float64)[..., at, at]
        for module, at in ((teacher[0], 0), (teacher[2], 0), (first, 1), (second, 1))
    )
    a0, b0 = (teacher[i].bias.numpy()[:, None] for i in (0, 2))
    mean, var, gain, shift = (
        value.detach().numpy()[:, None] for value in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    )
    gain = gain / np.sqrt(var + 1e-5)
    scores, maps = learnable.scored(detector, images)
    assert maps is not None

    def back(gradient: np.ndarray, output: np.ndarray) -> np.ndarray:
        if gradients == "guided":
            gradient = np.maximum(gradient, 0)
        return gradient * (output > 0)

    for image, score, painted in zip(images, scores, maps, strict=True):
        x = image.reshape(-1, 3).T.astype(np.float64)
        z = (x - np.array(MEAN)[:, None]) / np.array(STD)[:, None]
        h = np.maximum(a @ z + a0, 0)
        t = np.maximum(b @ h + b0, 0)
        k = np.maximum((c @ z - mean) * gain + shift, 0)
        s = np.maximum(d @ k, 0)
        assert score == pytest.approx(loss([t], [s], 0.2), rel=1e-4)
        lt, ls, ts, count = np.sqrt((t * t).sum()), np.sqrt((s * s).sum()), (t * s).sum(), t.size
        by_t = -(s / lt / ls - ts * t / lt**3 / ls) + 0.2 * 2 * (t - s) / count
        by_s = -(t / lt / ls - ts * s / ls**3 / lt) + 0.2 * 2 * (s - t) / count
        by_z = a.T @ back(b.T @ back(by_t, t), h) + c.T @ (gain * back(d.T @ back(by_s, s), k))
        expected = np.abs(by_z * 255 / np.array(STD)[:, None]).mean(axis=0).reshape(32, 32)
        if sigma:
            expected = gaussian_filter(expected, sigma, mode="mirror", truncate=4)
        np.testing.assert_allclose(painted, expected, rtol=2e-3, atol=2e-4 * expected.max())


def test_neighbours_in_a_batch_leave_a_gradient_alone() -> None:
    detector = fitted(learnable.tissue(4, seed=4))
    one, others = learnable.tissue(1, seed=5), learnable.tissue(3, seed=6, blobs=True)
    alone, beside = (learnable.scored(detector, x)[1] for x in (one, np.concatenate([one, others])))
    assert alone is not None
    assert beside is not None
    np.testing.assert_allclose(beside[0], alone[0], rtol=1e-5, atol=1e-6 * alone.max())


def test_only_the_student_learns_and_scoring_is_without_chance() -> None:
    images = learnable.tissue(8, seed=7)
    detector = Mkd(Mkd.Params(epochs=2, batch_size=4, layers=["blocks.1"], width=4), 0)
    teacher = {key: value.clone() for key, value in detector._backbone.network.state_dict().items()}
    detector._build(64)
    before = {key: value.clone() for key, value in detector.networks.state_dict().items()}
    detector.fit(images)
    assert all(torch.equal(value, teacher[key]) for key, value in detector._backbone.network.state_dict().items())
    after = detector.networks.state_dict()
    assert not any(torch.equal(after[key], before[key]) for key in after if key.endswith("weight"))
    assert not any(key.startswith("teacher") for key in after)
    state = torch.random.get_rng_state()
    first, second = (learnable.scored(detector, images) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first[0].tobytes() == second[0].tobytes()
    assert not any(module._forward_hooks for module in detector.networks.modules())
    assert not any(module._forward_hooks for module in detector._backbone.network.modules())


def test_student_of_vgg16_is_the_authors_cloner() -> None:
    network: Any = mkd.student([Level(*level, False) for level in ((128, 16), (256, 8), (512, 4), (512, 2))], 64, 16)
    made = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    assert [m.out_channels for m in made] == [16, 16, 16, 128, 16, 16, 256, 16, 16, 512, 16, 16, 512]
    kinds = [type(module).__name__ for stage in network for module in stage]
    three = ["Conv2d", "BatchNorm2d", "ReLU"] * 2 + ["Conv2d", "ReLU", "MaxPool2d"]
    two = three[3:]
    assert kinds == two * 2 + three * 3


@pytest.mark.parametrize(
    ("backbone", "layers", "sides"),
    [
        ("resnet18", ["layer1", "layer2", "layer3", "layer4"], (32, 45, 64)),
        pytest.param(
            "vgg16", ["features.9", "features.16", "features.23", "features.30"], (32, 45), marks=pytest.mark.full
        ),
        ("tf_efficientnet_lite0", ["blocks.4", "blocks.1", "conv_stem"], (33, 50)),
    ],
)
def test_student_meets_every_grid_and_sign(backbone: str, layers: list[str], sides: tuple[int, ...]) -> None:
    for side in sides:
        detector = Mkd(Mkd.Params(backbone=backbone, layers=layers, weights="random"), 0)
        detector._build(side)
        values = detector._input(np.random.default_rng(0).integers(0, 256, (2, side, side), np.uint8))
        with torch.no_grad():
            taught, learned = detector._taught(values), detector._learned(values)
        assert [t.shape for t in taught] == [s.shape for s in learned]
        assert [bool((t < 0).any()) for t in taught] == [bool((s < 0).any()) for s in learned]


def test_halvings() -> None:
    assert mkd.halvings(224, 56) == [112, 56]
    assert mkd.halvings(45, 12) == [23, 12]
    assert mkd.halvings(45, 11) == [22, 11]
    assert mkd.halvings(50, 1) == [25, 12, 6, 3, 1]
    assert mkd.halvings(33, 17) == [17]
    assert mkd.halvings(224, 16) == [112, 56, 28]
    assert mkd.halvings(7, 7) == mkd.halvings(7, 14) == mkd.halvings(1, 1) == []


def test_bad_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"score_layers: found \['blocks.3'\], expected some of layers"):
        Mkd.Params(score_layers=["blocks.3"])
    images = learnable.tissue(2, seed=8)
    with pytest.raises(AnomedError, match=r"no layer 'layer1'"):
        fitted(images, layers=["layer1"])
    pools = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)) for _ in range(5)]
    small = backbones.Backbone("small", nn.Sequential(*pools), (MEAN, STD), "cpu")
    monkeypatch.setattr(backbones, "load", lambda *given: small)
    with pytest.raises(
        AnomedError, match=r"found images of 16 x 16 pixels, which its layers .* do not take .*image_size"
    ):
        fitted(images, layers=["4"], image_size=16)
    smooth = backbones.Backbone("smooth", nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU()), (MEAN, STD), "cpu")
    monkeypatch.setattr(backbones, "load", lambda *given: smooth)
    with pytest.raises(AnomedError, match=r"gradients: found guided, but backbone .* no ReLU .* gradients: vanilla"):
        fitted(images, layers=["1"])
    assert fitted(images, layers=["1"], gradients="vanilla").size == 64


@pytest.mark.parametrize("count", [1, 3])
def test_fits_few_images(count: int) -> None:
    scores, maps = learnable.scored(fitted(learnable.tissue(count, seed=9)), learnable.tissue(2, seed=10))
    assert np.isfinite(scores).all()
    assert maps is not None
    assert maps.shape == (2, 64, 64)


def test_needs_and_marks() -> None:
    assert Mkd.mark(Mkd.Params()) == ""
    assert "random" in Mkd.mark(Mkd.Params(weights="random"))
    assert Mkd.files(Mkd.Params(weights="random")) == {}
    small = Mkd.Params(batch_size=16)
    assert Mkd.needs_mb(small, 224) < Mkd.needs_mb(Mkd.Params(batch_size=64), 224)
    assert (
        Mkd.needs_mb(small, 224)
        < Mkd.needs_mb(small, 512)
        == Mkd.needs_mb(Mkd.Params(batch_size=16, image_size=512), 224)
    )


def test_it_learns() -> None:
    detector = fitted(
        learnable.tissue(32, seed=11), epochs=8, batch_size=8, layers=["blocks.1", "blocks.2", "blocks.4"], width=8
    )
    assert learnable.auroc(detector) >= 0.8
    _, maps = learnable.scored(detector, learnable.tissue(4, seed=12, blobs=True))
    assert maps is not None
    assert maps.min() >= 0
