"""Methods anomalib.*: what the library computes, raw, on any machine, from declared files alone.

Networks are small and random. `make test` runs a few of the models, `make test-full` every one.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anomalib_rows import SIDE, TEST, discs, fitted, nowhere
from learnable import scored
from paths import ROOT
from safetensors.numpy import load, save

from anomed import anomalib_signatures, anomalib_weights
from anomed.anomalib_models import LEFT_OUT, MODELS

NORMALIZED = (np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225]))


def by_hand(network: Any, detector: Any, images: np.ndarray = TEST) -> tuple[Any, Any]:
    """A network of the library with the detector's tensors, and the images as it expects them."""
    import torch

    state = {key: torch.from_numpy(value.copy()) for key, value in detector.state().items() if key != "input_size"}
    for key, buffer in network.named_buffers():
        if buffer.shape != state[key].shape:
            owner, _, attribute = key.rpartition(".")
            network.get_submodule(owner)._buffers[attribute] = state[key]
    network.load_state_dict(state)
    mean, std = NORMALIZED
    values = (np.repeat(images[..., None] / 255.0, 3, axis=3) - mean) / std
    return network.eval(), torch.from_numpy(values.transpose(0, 3, 1, 2).astype(np.float32))


def test_every_model_of_the_library_runs_or_has_a_reason_and_the_page_names_it() -> None:
    models = anomalib_signatures.models()
    assert sorted(models) == sorted([*MODELS, *LEFT_OUT])
    page = (ROOT / "docs" / "anomalib.md").read_text(encoding="utf-8")
    assert [name for name in models if not re.search(rf"^\| `{name}` \|", page, re.MULTILINE)] == []


def test_arguments_read_from_the_source_are_those_of_the_library() -> None:
    import inspect
    from enum import Enum

    import anomalib.models.image as library

    for name in MODELS:
        signature = inspect.signature(getattr(library, name)).parameters
        expected = {key: item.default for key, item in signature.items() if key not in anomalib_signatures.PARTS}
        found = {key: item.default for key, item in anomalib_signatures.arguments(name).items()}
        for key, value in expected.items():
            plain = value.value if isinstance(value, Enum) else value
            expected[key] = list(plain) if isinstance(plain, tuple) else plain
        assert found == expected, name


def test_maps_and_scores_are_the_librarys_own() -> None:
    import torch
    from anomalib.models.image.padim.torch_model import PadimModel
    from anomalib.models.image.reverse_distillation.torch_model import ReverseDistillationModel
    from anomalib.models.image.stfpm.torch_model import STFPMModel

    layers = ["layer1", "layer2", "layer3"]
    networks = {
        "Stfpm": STFPMModel.__new__(STFPMModel),
        "Padim": PadimModel("resnet18", layers, pre_trained=False),
        "ReverseDistillation": ReverseDistillationModel("resnet18", (SIDE, SIDE), layers, "add", pre_trained=False),
    }
    with anomalib_weights.declared("Stfpm", pretrained=False):  # it has no other way to be built
        networks["Stfpm"].__init__(layers)
    for name, empty in networks.items():
        detector = fitted(name)
        network, images = by_hand(empty, detector)
        with torch.no_grad():
            expected = network(images)
        scores, maps = scored(detector, TEST)
        np.testing.assert_allclose(scores, expected.pred_score.flatten(), rtol=1e-5)
        np.testing.assert_allclose(maps, expected.anomaly_map[:, 0], rtol=1e-4, atol=1e-6)


def test_fastflow_gives_negative_log_likelihoods() -> None:
    import torch
    import torch.nn.functional as F
    from anomalib.models.image.fastflow.torch_model import FastflowModel

    detector = fitted("Fastflow")
    network, images = by_hand(FastflowModel((SIDE, SIDE), "resnet18", pre_trained=False), detector)
    levels = []
    with torch.no_grad():
        for block, feature in zip(network.fast_flow_blocks, network._get_cnn_features(images), strict=True):
            logs = torch.distributions.Normal(0, 1).log_prob(block(feature)[0]).mean(dim=1, keepdim=True)
            levels.append(F.interpolate(-logs - 0.5 * np.log(2 * np.pi), size=SIDE, mode="bilinear"))
        squashed = network(images).anomaly_map[:, 0]
    scores, maps = scored(detector, TEST)
    assert maps is not None
    np.testing.assert_allclose(maps, torch.cat(levels, dim=1).mean(dim=1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scores, maps.max(axis=(1, 2)), rtol=1e-6)
    assert np.corrcoef(maps.ravel(), squashed.ravel())[0, 1] > 0.9  # the same thing, before exp


def test_cflow_gives_log_likelihoods_that_do_not_depend_on_the_batch() -> None:
    import torch
    import torch.nn.functional as F
    from anomalib.models.image.cflow.torch_model import CflowModel
    from anomalib.models.image.cflow.utils import positional_encoding_2d

    layers = ("layer2", "layer3", "layer4")
    detector, images = fitted("Cflow", image_size=192), discs(3, 5, side=192)
    network, values = by_hand(CflowModel("resnet18", layers, pre_trained=False, coupling_blocks=2), detector, images)
    levels = []
    with torch.no_grad():
        for (_, feature), decoder in zip(network.encoder(values).items(), network.decoders, strict=True):
            count, channels, height, width = feature.shape
            where = positional_encoding_2d(128, height, width).reshape(128, -1).T.repeat(count, 1)
            latent, jacobian = decoder(feature.permute(0, 2, 3, 1).reshape(-1, channels), [where])
            logs = (torch.distributions.Normal(0, 1).log_prob(latent).sum(dim=1) + jacobian) / channels
            level = -logs.reshape(count, 1, height, width)
            levels.append(F.interpolate(level, size=192, mode="bilinear", align_corners=True)[:, 0])
    scores, found = scored(detector, images)
    np.testing.assert_allclose(found, torch.stack(levels).sum(dim=0), rtol=1e-4)
    alone = np.concatenate([scored(detector, images[i : i + 1])[0] for i in range(3)])
    np.testing.assert_allclose(alone, scores, rtol=1e-5)


def test_glass_gives_the_logits_of_the_librarys_probabilities() -> None:
    import torch
    from anomalib.models.image.glass.torch_model import GlassModel

    detector = fitted("Glass")
    shape = {"pretrain_embed_dim": 64, "target_embed_dim": 64, "discriminator_hidden": 64}
    network, images = by_hand(GlassModel((SIDE, SIDE), backbone="resnet18", pre_trained=False, **shape), detector)
    with torch.no_grad():
        expected = network(images).pred_score
    scores, _ = scored(detector, TEST)
    np.testing.assert_allclose(1 / (1 + np.exp(-scores)), expected, rtol=1e-5)


def test_dfkde_gives_the_negative_log_density() -> None:
    detector = fitted("Dfkde")
    kernels = detector.network.classifier.kde_model
    import torch

    with torch.no_grad():
        classifier = detector.network.classifier
        values = detector.steps(torch.from_numpy(np.repeat(TEST[:, None] / 255, 3, axis=1).astype(np.float32)))
        features = classifier.pca_model.transform(detector.network.get_features(values))
        density = kernels(classifier.pre_process(features, classifier.max_length)[0])
    np.testing.assert_allclose(scored(detector, TEST)[0], -np.log(density.numpy()), rtol=1e-4)


EVERY = [pytest.param(name, marks=pytest.mark.full) for name in MODELS]


@pytest.mark.parametrize("name", EVERY)
def test_model_repeats_stores_and_scores_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = nowhere(tmp_path, monkeypatch)
    detector = fitted(name)
    scores, maps = scored(detector, TEST)
    assert np.isfinite(scores).all()
    assert (maps is not None) == type(detector).localises
    state = save(detector.state())
    again = type(detector)(detector.params, 0)
    again.restore(load(state))
    assert scored(again, TEST)[0].tobytes() == scores.tobytes()
    assert save(again.state()) == state
    assert save(fitted(name).state()) == state
    alone = [scored(detector, TEST[i : i + 1]) for i in range(len(TEST))]
    np.testing.assert_allclose(np.concatenate([score for score, _ in alone]), scores, rtol=1e-5)
    if maps is not None:
        assert np.isfinite(maps).all()
        assert maps.dtype == np.float32
        single = np.concatenate([found for _, found in alone if found is not None])
        np.testing.assert_allclose(single, maps, rtol=1e-5, atol=1e-5 * np.abs(maps).max())
    colour = np.repeat(TEST[..., None], 3, axis=3)
    np.testing.assert_allclose(scored(detector, colour)[0], scores, rtol=1e-5)  # grey is repeated to three channels
    assert list(elsewhere.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "options"),
    [("AnomalyDINO", {"masking": True}), ("Rad", {"bank_dtype": "bfloat16"}), ("WinClip", {"k_shot": 2})],
)
def test_options_that_leave_the_usual_path(name: str, options: dict[str, Any]) -> None:
    detector = fitted(name, **options)
    scores, _ = scored(detector, TEST)
    again = type(detector)(detector.params, 0)
    again.restore(load(save(detector.state())))
    assert scored(again, TEST)[0].tobytes() == scores.tobytes()
    alone = np.concatenate([scored(detector, TEST[i : i + 1])[0] for i in range(len(TEST))])
    np.testing.assert_allclose(alone, scores, rtol=1e-5)
