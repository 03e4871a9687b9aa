"""Loading of frozen backbones: by position, checked, and only ever what was asked for."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anomed import backbones, packages, weights
from anomed.errors import AnomedError

LITE0 = "tf_efficientnet_lite0"
WEIGHTS = weights.BUNDLED.path()


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
    monkeypatch.setattr(packages, "inside", lambda package, file: path)
    return path


def test_features_have_the_documented_shapes(lite0: backbones.Backbone) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 224, 224, 3), dtype=np.uint8)
    shapes = [tuple(f.shape) for f in lite0.features(images, ["blocks.4", "bn1", "blocks.2"], batch_size=4)]
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
    assert not any(module.training for module in lite0.network.modules())
    assert not any(parameter.requires_grad for parameter in lite0.network.parameters())


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
    with pytest.raises(AnomedError, match=r"has no layer 'layer2'; its layers are \['conv_stem', 'bn1', 'blocks.0'"):
        lite0.features(np.zeros((1, 32, 32), np.uint8), ["layer2"], batch_size=1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "resnet19",
            r"no backbone 'resnet19': expected a name of torchvision, or .* with its tag, .*did you mean 'resnet1",
        ),
        ("vit_small_patch14_dinov2", r"timm's networks are named with their tag: vit_small_patch14_dinov2\.lvd142m"),
        ("resnet18.v2", "no backbone 'resnet18.v2'"),
    ],
)
def test_unknown_backbone_is_named(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        backbones.known(name)
    with pytest.raises(AnomedError, match=said):
        backbones.load(name)


def test_a_network_that_timm_does_not_know_is_named() -> None:
    assert backbones.known("resnt18.a1_in1k") == "resnt18.a1_in1k"
    with pytest.raises(AnomedError, match=r"timm has no network 'resnt18\.a1_in1k'; did you mean 'resnet18\.a1_in1k'"):
        backbones.load("resnt18.a1_in1k", weights="random")


def test_cuda_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AnomedError, match="torch sees no CUDA device"):
        backbones.load(LITE0, "cuda")


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
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder and hub caches without any weights."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_CACHE", "TORCH_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return tmp_path


@pytest.fixture
def fetched(random_resnet: torch.nn.Module, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's folder as `anomed fetch weights` leaves it."""
    folder = project / "data/weights"
    folder.mkdir(parents=True)
    torch.save(random_resnet.state_dict(), folder / "new.pth")
    return publish(folder / "new.pth", monkeypatch)


def publish(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the file at `path` the published one, by the first digits of its hash in its name."""
    digits = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    monkeypatch.setitem(weights.TORCHVISION, "resnet18", f"resnet18-{digits}.pth")
    return path.rename(path.with_name(f"resnet18-{digits}.pth"))


def test_torchvision_layers_equal_the_whole_network(fetched: Path, random_resnet: Any) -> None:
    """Oracle: torchvision's own layers one by one, the input normalised in float64 as its transforms do."""
    backbone = backbones.load("resnet18")
    images = np.random.default_rng(1).integers(0, 256, (2, 64, 96, 3), dtype=np.uint8)
    values = (images / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    expected = torch.from_numpy(values.transpose(0, 3, 1, 2).astype(np.float32))
    layers = ["bn1", "maxpool", "layer1", "layer2", "layer3", "layer4"]
    shapes = [(64, 32, 48), (64, 16, 24), (64, 16, 24), (128, 8, 12), (256, 4, 6), (512, 2, 3)]
    found = backbone.features(images, layers, batch_size=2)
    assert [tuple(f.shape[1:]) for f in found] == shapes
    with torch.no_grad():
        normalised = random_resnet.bn1(random_resnet.conv1(expected))
        assert (normalised < 0).any()  # the activation that follows overwrites its input, and must not change ours
        torch.testing.assert_close(found[0], normalised, rtol=1e-4, atol=1e-4)
        expected = random_resnet.maxpool(random_resnet.relu(normalised))
        for name, feature in zip(layers[2:], found[2:], strict=True):
            expected = getattr(random_resnet, name)(expected)
            torch.testing.assert_close(feature, expected, rtol=1e-4, atol=1e-4)


def test_order_and_number_of_layers_do_not_matter(fetched: Path) -> None:
    backbone = backbones.load("resnet18")
    images = np.random.default_rng(4).integers(0, 256, (2, 64, 64), dtype=np.uint8)
    first, second = backbone.features(images, ["layer1", "layer2"], batch_size=2)
    again = backbone.features(images, ["layer2", "layer1.1", "layer2"], batch_size=2)
    assert torch.equal(again[0], second)
    assert torch.equal(again[1], first)
    assert torch.equal(again[2], second)


def test_nothing_runs_behind_the_last_layer(fetched: Path) -> None:
    backbone = backbones.load("resnet18")
    ran = []
    for name in ("layer1", "layer2"):
        backbone.network.get_submodule(name).register_forward_hook(lambda *given, name=name: ran.append(name))
    backbone.features(np.zeros((1, 32, 32), np.uint8), ["layer1"], batch_size=1)
    assert ran == ["layer1"]


def test_a_layer_without_maps_is_refused(fetched: Path) -> None:
    with pytest.raises(AnomedError, match=r"resnet18: layer 'fc' gives no maps; layers are \['conv1', .*'layer4'\]"):
        backbones.load("resnet18").features(np.zeros((1, 32, 32), np.uint8), ["layer1", "fc"], batch_size=1)


def test_other_networks_of_torchvision_give_maps_as_well() -> None:
    images = np.zeros((1, 64, 64), np.uint8)
    for name, layer, shape in (
        ("densenet121", "features.denseblock2", (1, 512, 8, 8)),
        ("efficientnet_b0", "features.5", (1, 112, 4, 4)),
        ("resnet50.v2", "layer3", (1, 1024, 4, 4)),
    ):
        backbone = backbones.load(name, weights="random")
        [found] = backbone.features(images, [layer], batch_size=1)
        assert tuple(found.shape) == shape
        assert layer in backbone.listed


def test_weights_that_were_not_fetched(project: Path) -> None:
    assert backbones.files("resnet18") == {"resnet18": Path("data/weights/resnet18-f37072fd.pth")}
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


# Weights of timm, as its hub's own library keeps them. The files are of the test's own making.

VIT = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"  # timm's weights for it are of 224 x 224: 14 x 14 patches


@pytest.fixture
def in_hub(project: Path) -> Any:
    """in_hub(name): a network with random weights, and the same in the hub's cache, from where it may be read."""
    import timm
    from safetensors.torch import save_file

    def store(name: str, drop: str = "") -> Any:
        torch.manual_seed(7)
        network = timm.create_model(name, pretrained=False).eval()
        folder = project / "HF_HUB_CACHE" / f"models--timm--{name}"
        for path in (folder / "refs/main", folder / "snapshots/abc/model.safetensors"):
            path.parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs/main").write_text("abc")
        state = {key: value for key, value in network.state_dict().items() if key != drop}
        save_file(state, folder / "snapshots/abc/model.safetensors")
        return network

    return store


def test_a_network_of_timm_is_read_from_the_hub_s_cache(in_hub: Any, project: Path) -> None:
    name = "resnet18.a1_in1k"
    network = in_hub(name)
    [path] = backbones.files(name).values()
    assert path.is_relative_to(project / "HF_HUB_CACHE")
    images = np.random.default_rng(5).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    values = (images / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    with torch.no_grad():
        maps = network.forward_intermediates(
            torch.from_numpy(values.transpose(0, 3, 1, 2).astype(np.float32)), intermediates_only=True
        )
    second, third = backbones.load(name).features(images, ["layer2", "layer3"], batch_size=2)
    torch.testing.assert_close(second, maps[2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(third, maps[3], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [(224, 224), (96, 64)])
def test_tokens_become_maps_after_the_final_norm(size: tuple[int, int], in_hub: Any) -> None:
    """Oracle: the blocks one by one; the positions resized by timm where the image is not of the network's own size."""
    from timm.layers import resample_abs_pos_embed

    network = in_hub(VIT)
    images = np.random.default_rng(6).integers(0, 256, (2, *size, 3), dtype=np.uint8)
    rows, columns = (length // 16 for length in size)
    values = torch.from_numpy(((images / 255 - 0.5) / 0.5).transpose(0, 3, 1, 2).astype(np.float32))
    expected = {}
    with torch.no_grad():
        patches = network.patch_embed.proj(values).flatten(2).transpose(1, 2)
        positions = network.pos_embed
        if size != (224, 224):
            positions = resample_abs_pos_embed(positions, (rows, columns), num_prefix_tokens=1)
        tokens = torch.cat([network.cls_token.expand(2, -1, -1), patches], 1) + positions
        for index, block in enumerate(network.blocks):
            tokens = block(tokens)
            expected[f"blocks.{index}"] = network.norm(tokens)[:, 1:].transpose(1, 2).reshape(2, -1, rows, columns)
    layers = ["blocks.11", "blocks.2"]
    for layer, found in zip(layers, backbones.load(VIT).features(images, layers, batch_size=3), strict=True):
        assert tuple(found.shape) == (2, 192, rows, columns)
        torch.testing.assert_close(found, expected[layer], rtol=1e-4, atol=1e-4)


def test_tokens_do_not_depend_on_the_company(in_hub: Any) -> None:
    in_hub(VIT)
    backbone = backbones.load(VIT)
    images = np.random.default_rng(8).integers(0, 256, (3, 64, 64), dtype=np.uint8)
    [together] = backbone.features(images, ["blocks.5"], batch_size=4)
    [alone] = backbone.features(images[1:2], ["blocks.5"], batch_size=4)
    torch.testing.assert_close(alone[0], together[1], rtol=1e-6, atol=1e-6)


def test_what_a_transformer_cannot_take_is_refused() -> None:
    backbone = backbones.load(VIT, weights="random")
    with pytest.raises(AnomedError, match=r"100 x 96 pixels, expected multiples of its patches' 16; .* to 96"):
        backbone.features(np.zeros((1, 100, 96), np.uint8), ["blocks.1"], batch_size=1)
    with pytest.raises(AnomedError, match=r"has no layer 'blocks.1.attn'; its layers are \['blocks.0', 'blocks.1'"):
        backbone.features(np.zeros((1, 96, 96), np.uint8), ["blocks.1.attn"], batch_size=1)
    fixed = backbones.load("cait_xxs24_224.fb_dist_in1k", weights="random")
    with pytest.raises(AnomedError, match=r"found images of 96 x 96 pixels, expected 224 x 224; set `size`"):
        fixed.features(np.zeros((1, 96, 96), np.uint8), ["blocks.1"], batch_size=1)


@pytest.mark.parametrize(
    ("name", "layer", "shape"),
    [
        ("swin_tiny_patch4_window7_224.ms_in1k", "layers.1", (1, 192, 8, 12)),
        ("mambaout_femto.in1k", "stages.1", (1, 96, 8, 12)),
    ],
)
def test_maps_whose_channels_stand_last_inside_a_network_are_turned(
    name: str, layer: str, shape: tuple[int, ...]
) -> None:
    backbone = backbones.load(name, weights="random")
    [found] = backbone.features(np.zeros((1, 64, 96), np.uint8), [layer], batch_size=1)
    assert tuple(found.shape) == shape


def test_one_tensor_of_timm_s_weights_too_few(in_hub: Any) -> None:
    in_hub(VIT, drop="blocks.3.attn.qkv.weight")
    with pytest.raises(AnomedError, match=rf"not the weights of {VIT}: Missing key.*blocks\.3\.attn\.qkv\.weight"):
        backbones.load(VIT)


def test_a_truncated_file_of_timm(in_hub: Any) -> None:
    in_hub(VIT)
    path = backbones.files(VIT)[VIT]
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(AnomedError, match=r"model\.safetensors: not the weights of vit_tiny.*anomed fetch weights"):
        backbones.load(VIT)


def test_weights_of_timm_that_were_not_fetched(project: Path) -> None:
    with pytest.raises(AnomedError, match=rf"data/weights/{VIT}\.safetensors not found; run `anomed fetch weights`"):
        backbones.load(VIT)


# Random weights: no file, only a seed.


@pytest.mark.parametrize("name", [LITE0, "resnet18", VIT])
def test_random_weights_follow_the_seed_alone(name: str, project: Path) -> None:
    images = np.random.default_rng(9).integers(0, 256, (1, 64, 64), dtype=np.uint8)
    layer = "layer1" if name == "resnet18" else "blocks.1"

    def features(seed: int) -> torch.Tensor:
        [found] = backbones.load(name, weights="random", seed=seed).features(images, [layer], batch_size=1)
        return found

    assert backbones.files(name, "random") == {}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = features(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(features(0), first)
    assert not torch.equal(features(1), first)
