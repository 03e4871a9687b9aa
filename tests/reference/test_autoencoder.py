"""The autoencoder beside its definition: loss, map and score are squared errors of the reconstruction."""

import numpy as np
import pytest
import torch
from learnable import auroc, scored, tissue

from anomed import nets
from anomed.methods.autoencoder import Autoencoder

IMAGES = tissue(6, 0, side=32)


def detector(**keys: object) -> Autoencoder:
    return Autoencoder(Autoencoder.Params.model_validate({"channels": [8, 4], "epochs": 1, "batch_size": 8} | keys), 0)


def rebuilt(fitted: Autoencoder, images: np.ndarray) -> np.ndarray:
    """What the network alone makes of images in [0, 1], channels first."""
    values = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    with torch.no_grad():
        made: np.ndarray = fitted.networks["autoencoder"](torch.from_numpy(values / np.float32(255))).numpy()
    return made


def form(fitted: Autoencoder, images: np.ndarray) -> tuple[int, ...]:
    """The shape of all maps."""
    _, maps = scored(fitted, images)
    assert maps is not None
    return maps.shape


@pytest.mark.parametrize("channels", [1, 3])
def test_map_and_score_are_the_squared_error(channels: int) -> None:
    images = IMAGES if channels == 1 else np.stack([IMAGES, IMAGES // 2, 255 - IMAGES], axis=3)
    fitted = detector()
    fitted.fit(images)
    scores, maps = scored(fitted, images)
    assert maps is not None
    planes = (images[:, None] if channels == 1 else images.transpose(0, 3, 1, 2)) / 255
    errors = (rebuilt(fitted, images).astype(np.float64) - planes) ** 2
    np.testing.assert_allclose(maps, errors.mean(1), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(scores, errors.mean((1, 2, 3)), rtol=1e-5)


def test_loss_is_the_mean_squared_error_before_the_step() -> None:
    """One batch: what the untrained network of the seed makes of it."""
    start, fitted = detector(), detector()
    start._build(1, 32)
    start.networks["autoencoder"].train()  # batches are normalised by their own moments
    errors = (rebuilt(start, IMAGES).astype(np.float64) - IMAGES[:, None] / 255) ** 2
    fitted.fit(IMAGES)
    assert fitted.progress
    assert fitted.progress.rows[0]["reconstruction"] == pytest.approx(errors.mean(), rel=1e-4)


@pytest.mark.parametrize("side", [32, 37, 50])
def test_any_side_and_another_size_of_the_input(side: int) -> None:
    images = tissue(3, 1, side=side)
    fitted = detector(channels=[4, 4, 4])
    fitted.fit(images)
    assert form(fitted, images) == (3, side, side)
    resized = detector(image_size=48)
    resized.fit(images)
    assert form(resized, images) == (3, 48, 48)


def test_training_lowers_the_loss_and_takes_the_network_off_its_start() -> None:
    fitted = detector(epochs=5)
    fitted.fit(IMAGES)
    assert fitted.progress
    losses = [row["reconstruction"] for row in fitted.progress.rows]
    assert losses[-1] < losses[0]
    start = detector()
    start._build(1, 32)
    assert any(
        (nets.arrays(start.networks)[key] != value).any() for key, value in fitted.state().items() if key != "input"
    )


def test_it_learns() -> None:
    fitted = detector(channels=[16, 32, 4], epochs=60, batch_size=16)
    fitted.fit(tissue(64, 0))
    assert auroc(fitted) >= 0.8
