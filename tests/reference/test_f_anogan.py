"""f-AnoGAN against the equations of its paper and of WGAN-GP, worked out in plain numpy without the project's code."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learnable import auroc, scored, tissue

from anomed.errors import AnomedError
from anomed.methods.f_anogan import FAnoGan
from anomed.progress import Progress
from anomed.training import Step

SIDE = 32
SMALL: dict[str, Any] = {
    "image_size": SIDE, "width": 2, "latent_size": 3, "batch_size": 4, "epochs": 2, "encoder_epochs": 2, "n_critic": 2
}  # fmt: skip


def pixels(count: int, seed: int, colour: bool = False) -> np.ndarray:
    shape = (count, SIDE, SIDE, 3) if colour else (count, SIDE, SIDE)
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def made(seed: int = 0, **params: Any) -> FAnoGan:
    return FAnoGan(FAnoGan.Params(**{**SMALL, **params}), seed)


def built(**params: Any) -> FAnoGan:
    detector = made(**params)
    detector._build(1, SIDE)
    return detector


def fitted(images: np.ndarray, seed: int = 0, **params: Any) -> FAnoGan:
    detector = made(seed, **params)
    detector.fit(images)
    return detector


# The oracle.


def scaled(images: np.ndarray) -> np.ndarray:
    """(N, channels, S, S) in [-1, 1]."""
    values = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    return values.astype(np.float64) / 127.5 - 1


def features(state: dict[str, np.ndarray], values: np.ndarray) -> np.ndarray:
    """Of the critic for 32 x 32: three convolutions 4 x 4 of stride 2; layer normalisation but in the first; leaky."""
    weights = {key: value.astype(np.float64) for key, value in state.items()}
    for layer in (0, 2, 5):
        windows = np.lib.stride_tricks.sliding_window_view(
            np.pad(values, [(0, 0), (0, 0), (1, 1), (1, 1)]), (4, 4), (2, 3)
        )
        kernel = weights[f"critic.0.{layer}.weight"]
        n, (_, _, high, wide) = len(values), windows[:, :, ::2, ::2].shape[:4]
        columns = windows[:, :, ::2, ::2].transpose(0, 2, 3, 1, 4, 5).reshape(n, high * wide, -1)
        values = (columns @ kernel.reshape(len(kernel), -1).T).transpose(0, 2, 1).reshape(n, -1, high, wide)
        if layer == 0:
            values = values + weights["critic.0.0.bias"][:, None, None]
        else:
            axes = (1, 2, 3)
            values = (values - values.mean(axes, keepdims=True)) / np.sqrt(values.var(axes, keepdims=True) + 1e-5)
            scale, shift = (weights[f"critic.0.{layer + 1}.{name}"][:, None, None] for name in ("weight", "bias"))
            values = values * scale + shift
        values = np.where(values > 0, values, 0.2 * values)
    return values.reshape(len(values), -1)


def judged(state: dict[str, np.ndarray], values: np.ndarray) -> np.ndarray:
    """The critic's number for each image."""
    return features(state, values) @ state["critic.1.weight"][0].astype(np.float64) + float(state["critic.1.bias"][0])


def slopes(state: dict[str, np.ndarray], values: np.ndarray, step: float = 1e-4) -> np.ndarray:
    """Norm of the critic's gradient at each image, by central differences."""
    norms = []
    for image in values:
        moved = np.eye(image.size).reshape(-1, *image.shape) * step
        difference = judged(state, image + moved) - judged(state, image - moved)
        norms.append(np.linalg.norm(difference / (2 * step)))
    return np.array(norms)


def generated(detector: FAnoGan, codes: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        images: np.ndarray = detector.networks["generator"](codes).double().numpy()
    return images


def test_losses_of_the_gan_follow_the_equations() -> None:
    """Gulrajani et al., equation 3, with a share of its own for every image; the generator's from a new code."""
    detector, images = built(), pixels(3, 1)
    step = detector._gan().step
    detector.networks.eval()
    torch.manual_seed(5)
    losses = {name: float(loss.detach()) for name, loss in step(images, Step(1, 9, np.random.default_rng(0)))}
    torch.manual_seed(5)
    first, share, second = torch.randn(3, 3), torch.rand(3, 1, 1, 1).double().numpy(), torch.randn(3, 3)
    state, real, fake = detector.state(), scaled(images), generated(detector, first)
    penalty = np.square(slopes(state, share * real + (1 - share) * fake) - 1).mean()
    expected = judged(state, fake).mean() - judged(state, real).mean() + 10 * penalty
    assert penalty > 0.1
    assert losses["critic"] == pytest.approx(expected, rel=1e-4)
    assert losses["generator"] == pytest.approx(-judged(state, generated(detector, second)).mean(), rel=1e-4)


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("kappa", [1.0, 0.0, 3.5])
def test_score_and_map_follow_the_equations(kappa: float, colour: bool) -> None:
    """Schlegl et al., the residual of the image and kappa times that of the features, each a mean of squares."""
    detector, test = fitted(pixels(6, 2, colour), kappa=kappa), pixels(5, 3, colour)
    values, state = scaled(test), detector.state()
    with torch.no_grad():
        codes = detector.networks["encoder"](torch.tensor(values, dtype=torch.float32))
    assert codes.shape == (5, 3)
    rebuilt = generated(detector, codes)
    errors = np.square(rebuilt - values)
    distances = np.square(features(state, rebuilt) - features(state, values))
    expected = [a.mean() + kappa * b.mean() for a, b in zip(errors, distances, strict=True)]
    scores, maps = scored(detector, test)
    assert maps is not None
    np.testing.assert_allclose(scores, expected, rtol=1e-4)
    np.testing.assert_allclose(maps, errors.mean(axis=1), rtol=1e-3, atol=1e-5)
    ((name, loss),) = detector._izi_f().step(test, Step(0, 1, np.random.default_rng(0)))
    assert name == "encoder"
    assert float(loss.detach()) == pytest.approx(np.mean(expected), rel=1e-4)


@pytest.mark.parametrize(("steps", "moves"), [(2, False), (3, True)])
def test_each_loss_moves_its_own_network(monkeypatch: pytest.MonkeyPatch, steps: int, moves: bool) -> None:
    start, kept, original = built().state(), {}, FAnoGan._izi_f

    def izi_f(self: FAnoGan) -> Any:
        kept.update({key: value.copy() for key, value in self.state().items()})
        return original(self)

    monkeypatch.setattr(FAnoGan, "_izi_f", izi_f)
    end = fitted(pixels(9, 4), n_critic=3, max_steps=steps).state()
    learned = [key for key in start if key.endswith(("weight", "bias")) and key != "critic.1.bias"]  # which cancels out
    for key in learned:
        moved = {"critic": True, "generator": moves, "encoder": False}[key.split(".")[0]]
        assert np.array_equal(start[key], kept[key]) != moved, key
    for key in start:
        if not key.startswith(("encoder", "input")):
            assert np.array_equal(kept[key], end[key]), f"{key}: generator and critic rest, their statistics too"
    assert all(not np.array_equal(kept[key], end[key]) for key in learned if key.startswith("encoder"))


@pytest.mark.parametrize(("n_critic", "expected"), [(1, 6), (2, 3), (4, 1), (7, 0)])
def test_generator_moves_at_every_nth_batch(monkeypatch: pytest.MonkeyPatch, n_critic: int, expected: int) -> None:
    found: list[str] = []
    original = FAnoGan._gan

    def gan(self: FAnoGan) -> Any:
        phase = original(self)
        step = phase.step

        def counted(images: np.ndarray, at: Step) -> Any:
            for name, loss in step(images, at):
                found.append(name)
                yield name, loss

        phase.step = counted
        return phase

    monkeypatch.setattr(FAnoGan, "_gan", gan)
    fitted(pixels(12, 5), n_critic=n_critic)
    assert found.count("critic") == 6
    assert found.count("generator") == expected


def test_critic_judges_every_image_by_itself() -> None:
    """Batch normalisation would make the penalty's slope at one image depend on the others."""
    detector, values = built(), torch.tensor(scaled(pixels(4, 6)), dtype=torch.float32)
    critic = detector.networks["critic"].train()
    torch.testing.assert_close(critic(values)[:1], critic(values[:1]))
    assert not [module for module in critic.modules() if isinstance(module, torch.nn.BatchNorm2d)]


def test_scoring_has_no_chance_and_no_flip() -> None:
    detector, test = fitted(pixels(6, 7)), pixels(6, 8)
    before = detector.state()
    torch.manual_seed(1)
    scores, maps = scored(detector, test)
    torch.manual_seed(2)
    again, others = scored(detector, test)
    assert scores.tobytes() == again.tobytes()
    assert maps is not None
    assert others is not None
    assert maps.tobytes() == others.tobytes()
    assert all(detector.state()[key].tobytes() == value.tobytes() for key, value in before.items())
    assert not np.allclose(scored(detector, test[:, :, ::-1])[0], scores)


@pytest.mark.parametrize("stop", [1, 3, 6])  # between the batches of an epoch of the GAN; after one; in the encoder's
def test_a_killed_training_goes_on_to_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stop: int
) -> None:
    train = pixels(10, 9)
    whole, killed = fitted(train), made()
    killed.progress = Progress(tmp_path / "checkpoint", "key", 0.0)
    saves, save = [0], killed.progress.save

    def dies(state: Any) -> None:
        save(state)
        saves[0] += 1
        if saves[0] == stop:
            raise KeyboardInterrupt

    monkeypatch.setattr(killed.progress, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        killed.fit(train)
    again = made()
    again.progress = Progress(tmp_path / "checkpoint", "key", 0.0)
    again.fit(train)
    assert again.progress.facts["resumed"] == 1
    for key, value in whole.state().items():
        assert again.state()[key].tobytes() == value.tobytes(), key


@pytest.mark.parametrize("side", [32, 40, 48, 64, 72, 96, 128, 224, 256])
def test_networks_fit_the_side(side: int) -> None:
    detector = made(image_size=None)
    detector._build(3, side)
    images = torch.zeros(2, 3, side, side)
    with torch.no_grad():
        codes = detector.networks["encoder"](images)
        assert detector.networks["generator"](codes).shape == images.shape
        assert detector.networks["critic"](images).shape == (2, 1)


@pytest.mark.parametrize(("side", "times"), [(100, 2), (33, 0), (50, 1), (36, 2), (20, 2), (16, 2)])
def test_impossible_sides_are_refused(side: int, times: int) -> None:
    message = rf"side of {side} can be halved {times} times .* at least 3; set image_size to 32, 64"
    with pytest.raises(ValueError, match=message):
        FAnoGan.Params(image_size=side)
    with pytest.raises(AnomedError, match=message):
        made(image_size=None).fit(np.zeros((2, side, side), np.uint8))


def test_bad_settings_are_refused() -> None:
    wrong: dict[str, Any] = {"n_critic": 0, "kappa": -1.0, "latent_size": 0, "width": 0, "encoder_epochs": 0}
    for key, value in wrong.items():
        with pytest.raises(ValueError, match=key):
            FAnoGan.Params(**{key: value})


@pytest.mark.parametrize("count", [1, 3])
def test_few_images(count: int) -> None:
    images = np.random.default_rng(10).integers(0, 256, (count, 50, 50)).astype(np.uint8)
    for batch_size in (1, 4):
        scores, maps = scored(fitted(images, batch_size=batch_size), images)
        assert maps is not None
        assert maps.shape == (count, SIDE, SIDE)
        assert np.isfinite(scores).all()


@pytest.mark.full
def test_it_learns() -> None:
    params = FAnoGan.Params(
        image_size=32,
        width=8,
        latent_size=16,
        epochs=40,
        encoder_epochs=40,
        batch_size=8,
        learning_rate=1e-3,
        n_critic=2,
    )
    detector = FAnoGan(params, 0)
    detector.fit(tissue(64, seed=1))
    assert auroc(detector) >= 0.8
