"""PatchCore and PaDiM beside anomalib's own torch models: same weights, same images, same maps and scores."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch

from anomed import backbones
from anomed.backbones import Backbone
from anomed.methods.padim import Padim
from anomed.methods.patchcore import PatchCore

SIZE = 96
NETWORKS: dict[
    str, tuple[Literal["pretrained", "random"], list[str], list[str]]
] = {  # name: weights that exist here, layers of PatchCore, layers of PaDiM
    "tf_efficientnet_lite0": ("pretrained", ["blocks.2", "blocks.4"], ["blocks.1", "blocks.2", "blocks.4"]),
    "resnet18": ("random", ["layer2", "layer3"], ["layer1", "layer2", "layer3"]),
}
each_network = pytest.mark.parametrize("name", NETWORKS)


@pytest.fixture(autouse=True, scope="module")
def _torch_as_before() -> Iterator[None]:
    """Methods make torch deterministic, for the process."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.set_num_threads(before[1])


def pictures(count: int, seed: int) -> np.ndarray:
    """Discs with texture and noise: uint8 (count, 96, 96)."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:SIZE, :SIZE] - SIZE / 2
    radii, bright, wave = (
        rng.uniform(low, high, (count, 1, 1)) for low, high in ((20.0, 40.0), (60.0, 180.0), (0.2, 0.9))
    )
    grey = (np.hypot(x, y) < radii) * bright * (1 + 0.3 * np.sin(wave * x)) + rng.uniform(0, 20, (count, SIZE, SIZE))
    return np.clip(grey, 0, 255).astype(np.uint8)


def given(backbone: Backbone, images: np.ndarray) -> torch.Tensor:
    """What anomalib's models take: (B, 3, S, S), normalised as the backbone wants it."""
    repeated = torch.from_numpy(np.repeat(images[:, None].astype(np.float32), 3, axis=1))
    return (repeated - backbone.mean) / backbone.std


def with_weights_of(backbone: Backbone, model: Any) -> Any:
    """anomalib's model, whose own copy of the network gets the weights of ours."""
    found = model.feature_extractor.feature_extractor.load_state_dict(backbone.network.state_dict(), strict=False)
    assert found.missing_keys == []
    return model.eval()


def scored(detector: Any, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    batches = list(detector.score(images))
    return np.concatenate([scores for scores, _ in batches]), np.concatenate([maps for _, maps in batches])


@contextlib.contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    """anomalib's covariance has torch's default type, whatever its features have."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def theirs(model: Any, tensor: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    with torch.no_grad():
        answer = model(tensor)
    return answer.pred_score.reshape(-1).numpy(), answer.anomaly_map[:, 0].numpy()


@each_network
def test_patchcore_gives_the_maps_and_scores_of_anomalib(name: str) -> None:
    from anomalib.models.image.patchcore.torch_model import PatchcoreModel

    weights, layers, _ = NETWORKS[name]
    params = PatchCore.Params(backbone=name, weights=weights, layers=layers, upsampling="nearest", coreset_ratio=0.05)
    detector = PatchCore(params, seed=0)
    detector.fit(pictures(10, seed=1))
    test = pictures(5, seed=2)
    backbone = backbones.load(name, "cpu", weights, 0)
    model = with_weights_of(backbone, PatchcoreModel(layers, name, pre_trained=False, num_neighbors=9))
    model.memory_bank = torch.from_numpy(detector.state()["bank"])
    assert len(model.memory_bank) == int(10 * (SIZE // 8) ** 2 * 0.05)
    scores, maps = scored(detector, test)
    expected, expected_maps = theirs(model, given(backbone, test))
    np.testing.assert_allclose(scores, expected, rtol=1e-4)
    np.testing.assert_allclose(maps, expected_maps, rtol=1e-4)
    assert maps.std() > 0.01 * maps.mean()  # not flat: there is something to agree on


@each_network
def test_patchcore_collects_the_features_of_anomalib(name: str) -> None:
    from anomalib.models.image.patchcore.torch_model import PatchcoreModel

    weights, layers, _ = NETWORKS[name]
    detector = PatchCore(PatchCore.Params(backbone=name, weights=weights, layers=layers, coreset_ratio=1.0), seed=0)
    train = pictures(3, seed=3)
    detector.fit(train)
    backbone = backbones.load(name, "cpu", weights, 0)
    model = with_weights_of(backbone, PatchcoreModel(layers, name, pre_trained=False)).train()
    expected = model(given(backbone, train)).numpy()
    np.testing.assert_allclose(detector.state()["bank"], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "count", "dtype"),
    [
        ("tf_efficientnet_lite0", 60, torch.float32),
        ("resnet18", 60, torch.float32),
        ("tf_efficientnet_lite0", 20, torch.float64),  # fewer images than dimensions: in float32 anomalib is 3e-4 off
    ],
)
def test_padim_gives_the_maps_and_scores_of_anomalib(name: str, count: int, dtype: torch.dtype) -> None:
    """With anomalib's regularisation: 0.01, and 1e-5 more before it inverts. dtype: anomalib's; ours does not vary."""
    from anomalib.models.image.padim.torch_model import PadimModel

    weights, _, layers = NETWORKS[name]
    params = Padim.Params(backbone=name, weights=weights, layers=layers, n_features=40, regularisation=0.01001)
    detector = Padim(params, seed=0)
    train, test = pictures(count, seed=4), pictures(5, seed=5)
    detector.fit(train)
    backbone = backbones.load(name, "cpu", weights, 0)
    model = with_weights_of(backbone, PadimModel(name, layers, pre_trained=False, n_features=40)).to(dtype)
    model.idx = torch.from_numpy(detector.state()["index"])
    model.train()
    with torch.no_grad(), default(dtype):
        for start in range(0, count, 8):
            model(given(backbone, train[start : start + 8]).to(dtype))
        model.fit()
    scores, maps = scored(detector, test)
    expected, expected_maps = theirs(model.eval(), given(backbone, test).to(dtype))
    np.testing.assert_allclose(scores, expected, rtol=1e-4)
    np.testing.assert_allclose(maps, expected_maps, rtol=1e-4)
    assert maps.std() > 0.01 * maps.mean()
