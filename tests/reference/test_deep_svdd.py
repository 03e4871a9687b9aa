"""Deep SVDD against the paper's equations, worked out in plain numpy without the project's code."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learnable import auroc, scored, tissue

from anomed.methods import deep_svdd
from anomed.methods.deep_svdd import DeepSvdd
from anomed.progress import Progress

SIDE = 16
SMALL: dict[str, Any] = {"image_size": SIDE, "representation": 16, "batch_size": 4, "pretrain_epochs": 1, "epochs": 2}


def pixels(count: int, seed: int, colour: bool = False) -> np.ndarray:
    shape = (count, SIDE, SIDE, 3) if colour else (count, SIDE, SIDE)
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def made(seed: int = 0, **params: Any) -> DeepSvdd:
    return DeepSvdd(DeepSvdd.Params(**{**SMALL, **params}), seed)


def fitted(images: np.ndarray, seed: int = 0, **params: Any) -> DeepSvdd:
    detector = made(seed, **params)
    detector.fit(images)
    return detector


# The oracle. Pages and equations are those of Ruff et al., ICML 2018.


def contrast(images: np.ndarray) -> np.ndarray:
    """4.1: global contrast normalisation with the L1 norm, of each image as a whole; (N, channels, S, S)."""
    values = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    out = []
    for image in values.astype(np.float64) / 255:
        image = image - image.mean()
        out.append(image / np.abs(image).mean())
    return np.array(out)


def prepared(train: np.ndarray, images: np.ndarray) -> np.ndarray:
    """4.1: then the range of the train images becomes [0, 1]."""
    low, high = contrast(train).min(), contrast(train).max()
    return (contrast(images) - low) / (high - low)


def represented(state: dict[str, np.ndarray], values: np.ndarray) -> np.ndarray:
    """The LeNet without biases: three times convolution, normalisation, leaky ReLU, maximum of 2 x 2; then a matrix."""
    values = values.astype(np.float64)
    for first in (0, 4, 8):
        padded = np.pad(values, [(0, 0), (0, 0), (2, 2), (2, 2)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, (5, 5), axis=(2, 3))
        values = np.einsum("ncijkl,ockl->noij", windows, state[f"encoder.{first}.weight"].astype(np.float64))
        mean, variance = (state[f"encoder.{first + 1}.running_{name}"][:, None, None] for name in ("mean", "var"))
        values = (values - mean) / np.sqrt(variance.astype(np.float64) + 1e-4)
        values = np.where(values > 0, values, 0.01 * values)
        n, c, s, _ = values.shape
        values = values.reshape(n, c, s // 2, 2, s // 2, 2).max(axis=(3, 5))
    return values.reshape(len(values), -1) @ state["encoder.13.weight"].astype(np.float64).T


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("kind", ["one_class", "soft_boundary"])
def test_score_follows_the_equations(kind: str, colour: bool) -> None:
    train, test = pixels(9, 1, colour), pixels(5, 2, colour)
    detector = fitted(train, objective=kind, warm_up=0)
    state = detector.state()
    distances = np.square(represented(state, prepared(train, test)) - state["sphere.centre"]).sum(axis=1)
    radius = float(state["sphere.radius"])
    assert (radius > 0) == (kind == "soft_boundary")
    scores, maps = scored(detector, test)
    assert maps is None
    np.testing.assert_allclose(scores, distances - radius**2, rtol=1e-3, atol=1e-5)


def test_range_is_that_of_the_train_images_and_nothing_is_cut() -> None:
    train, test = pixels(7, 3) // 4 + 100, pixels(3, 4)
    test[:, :4] = 255
    test[:, 4, 4] = 0
    detector = made()
    detector._build(1, SIDE, len(train))
    detector._measure_range(train)
    values = detector._input(train).numpy()
    assert values.min() == pytest.approx(0, abs=1e-6)
    assert values.max() == pytest.approx(1, abs=1e-6)
    found, expected = detector._input(test).numpy(), prepared(train, test)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert expected.min() < 0 or expected.max() > 1
    assert not detector._contrast(np.full((1, SIDE, SIDE), 37, np.uint8)).any()  # flat: no contrast, no division by 0


def test_centre_is_the_mean_of_the_train_images_and_away_from_zero() -> None:
    train = pixels(9, 5)
    first = made(pretrain_epochs=0)
    first._build(1, SIDE, 9)  # the same seed: the networks as they start
    mean = represented(first.state(), prepared(train, train)).mean(axis=0)
    assert (np.abs(mean) < 0.1).any()
    assert (np.abs(mean) > 0.1).any()
    near = np.abs(mean) < 0.1
    expected = np.where(near, np.copysign(0.1, mean), mean)
    centre = fitted(train, pretrain_epochs=0, epochs=3).state()["sphere.centre"]
    np.testing.assert_allclose(centre, expected, atol=1e-5)  # and it never moves
    assert deep_svdd.centre_of(iter([np.zeros((2, 1)), np.zeros((1, 1))]), 3) == [0.1]


def test_losses_follow_the_equations() -> None:
    distances, radius = np.array([0.5, 4.0, 9.0, 2.0]), 1.5
    given = torch.tensor(distances), torch.tensor(radius)
    one, soft = DeepSvdd.Params(), DeepSvdd.Params(objective="soft_boundary", nu=0.25)
    assert float(deep_svdd.objective(*given, one)) == pytest.approx(distances.mean())
    outside = [max(0.0, value - radius**2) for value in distances]
    assert float(deep_svdd.objective(*given, soft)) == pytest.approx(radius**2 + sum(outside) / (0.25 * 4))


class Recorder:
    """What the objective was given: distances and radius of every batch."""

    def __init__(self, patch: pytest.MonkeyPatch, then: Any = None) -> None:
        self.distances: list[np.ndarray] = []
        self.radii: list[float] = []
        original = deep_svdd.objective

        def objective(distances: torch.Tensor, radius: torch.Tensor, params: Any) -> torch.Tensor:
            if then is not None and not self.radii:
                then()
            self.distances.append(distances.detach().numpy().copy())
            self.radii.append(float(radius))
            return original(distances, radius, params)

        patch.setattr(deep_svdd, "objective", objective)


@pytest.mark.parametrize(("count", "size", "sizes"), [(10, 4, [4, 4, 2]), (9, 4, [4, 5]), (3, 1, [1, 1, 1])])
def test_radius_is_the_quantile_of_the_last_epoch(
    monkeypatch: pytest.MonkeyPatch, count: int, size: int, sizes: list[int]
) -> None:
    seen, warm_up, epochs, nu = Recorder(monkeypatch), 2, 4, 0.3
    params: dict[str, Any] = {
        "objective": "soft_boundary",
        "nu": nu,
        "warm_up": warm_up,
        "epochs": epochs,
        "learning_rate": 1e-2,
    }
    detector = fitted(pixels(count, 6), batch_size=size, **params)
    batches = len(sizes)
    assert len(seen.radii) == epochs * batches
    assert seen.radii[: warm_up * batches] == [0] * (warm_up * batches)
    after = [seen.radii[(epoch + 1) * batches : (epoch + 2) * batches] for epoch in range(epochs - 1)]
    after.append([float(detector.state()["sphere.radius"])])
    for epoch in range(warm_up - 1, epochs):
        parts = seen.distances[epoch * batches : (epoch + 1) * batches]
        taken = np.concatenate([part[:rows] for part, rows in zip(parts, sizes, strict=True)])
        assert len(taken) == count
        expected = np.quantile(np.sqrt(taken.astype(np.float64)), 1 - nu)
        np.testing.assert_allclose(after[epoch], expected, rtol=1e-5)


def test_each_phase_moves_its_own_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    detector, kept = made(), {}
    Recorder(monkeypatch, lambda: kept.update({key: value.copy() for key, value in detector.state().items()}))
    detector.fit(pixels(8, 7))
    start, end = fitted_start(), detector.state()
    for key in end:
        if key.endswith("weight"):
            assert not np.array_equal(start[key], kept[key]), f"{key}: the autoencoder trains both parts"
        if key.startswith("decoder"):
            assert np.array_equal(kept[key], end[key]), f"{key}: the sphere trains the encoder alone"
        if key.startswith("encoder") and key.endswith("weight"):
            assert not np.array_equal(kept[key], end[key])
    names = [name for name, _ in detector.networks.named_parameters()]
    assert not [name for name in names if "bias" in name], "proposition 2: a bias could meet the centre alone"
    assert len(names) == 4 + 4  # convolutions and one matrix; no affine normalisation


def fitted_start() -> dict[str, np.ndarray]:
    detector = made()
    detector._build(1, SIDE, 8)
    return detector.state()


def test_autoencoder_loss_is_summed_over_pixels() -> None:
    images = pixels(4, 8)
    detector = made()
    detector._build(1, SIDE, 4)
    detector._measure_range(images)
    phase = detector._pretrain()
    detector.networks.eval()
    ((name, loss),) = phase.step(images, None)  # type: ignore[arg-type]
    values = prepared(images, images)
    code = represented(detector.state(), values)
    rebuilt = detector.networks["decoder"](torch.tensor(code, dtype=torch.float32)).detach().numpy()
    assert rebuilt.shape == (4, 1, SIDE, SIDE)
    assert name == "reconstruction"
    assert float(loss.detach()) == pytest.approx(np.square(rebuilt - values).sum() / 4, rel=1e-4)


def test_rates_fall_to_a_tenth() -> None:
    detector = fitted(pixels(4, 9), pretrain_epochs=3, pretrain_milestones=[2], epochs=4, milestones=[1, 3])
    assert detector.progress is not None
    rates = [row["rate"] for row in detector.progress.rows]
    np.testing.assert_allclose(rates, [1, 1, 0.1, 1, 0.1, 0.1, 0.01])


@pytest.mark.parametrize("stop", [2, 5, 6])  # in the first phase; between the batches of an epoch; after one
def test_a_killed_training_goes_on_to_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stop: int
) -> None:
    train = pixels(10, 10)
    params: dict[str, Any] = {"objective": "soft_boundary", "warm_up": 1, "epochs": 3, "learning_rate": 1e-2}
    whole = fitted(train, **params)
    killed = made(**params)
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
    again = made(**params)
    again.progress = Progress(tmp_path / "checkpoint", "key", 0.0)
    again.fit(train)
    assert again.progress.facts["resumed"] == 1
    for key, value in whole.state().items():
        assert again.state()[key].tobytes() == value.tobytes(), key


@pytest.mark.parametrize(("count", "side", "size"), [(1, 33, None), (3, 40, 32), (5, 37, 21)])
def test_few_images_and_any_side(count: int, side: int, size: int | None) -> None:
    images = np.random.default_rng(11).integers(0, 256, (count, side, side)).astype(np.uint8)
    for batch_size in (1, 4):
        scores, _ = scored(fitted(images, image_size=size, batch_size=batch_size), images)
        assert scores.shape == (count,)
        assert np.isfinite(scores).all()


def test_scoring_has_no_chance_and_leaves_the_model() -> None:
    detector, test = fitted(pixels(6, 12)), pixels(6, 13)
    before = detector.state()
    torch.manual_seed(1)
    first, _ = scored(detector, test)
    torch.manual_seed(2)
    assert scored(detector, test)[0].tobytes() == first.tobytes()
    assert all(detector.state()[key].tobytes() == value.tobytes() for key, value in before.items())
    assert "sphere.distances" not in before, "no number of train images in the model"
    assert not np.allclose(scored(detector, test[:, :, ::-1])[0], first)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"multiple of 16, .* take 96"):
        DeepSvdd.Params(representation=100)
    with pytest.raises(ValueError, match=r"warm_up: found 10, expected fewer than epochs: 10"):
        DeepSvdd.Params(objective="soft_boundary", epochs=10)
    with pytest.raises(ValueError, match="greater than 0"):
        DeepSvdd.Params(nu=0.0)
    with pytest.raises(ValueError, match="one_class"):
        DeepSvdd.Params(objective="one-class")  # type: ignore[arg-type]
    assert DeepSvdd.Params(epochs=5).warm_up == 10  # which the other objective does not read


@pytest.mark.parametrize("kind", ["one_class", "soft_boundary"])
def test_it_learns(kind: str) -> None:
    epochs: dict[str, Any] = {"pretrain_epochs": 10, "epochs": 10, "warm_up": 3, "pretrain_learning_rate": 1e-3}
    detector = DeepSvdd(DeepSvdd.Params(objective=kind, image_size=SIDE, batch_size=16, **epochs), 0)  # type: ignore[arg-type]
    detector.fit(tissue(64, seed=1))
    assert auroc(detector) >= 0.8
