"""Frozen feature extractors of timm and torchvision: built from one name, normalised, cut at any of their layers.

Light at import: torch and timm load inside `load`; the planner asks for `files` and `known` alone.
"""

import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anomed.errors import AnomedError
from anomed.settings import nearest
from anomed.weights import BUNDLED, TAGGED, TAGS, TORCHVISION, Weights, find

if TYPE_CHECKING:
    import torch

Channels = tuple[float, float, float]  # of the input's red, green and blue, in grey levels

IMAGENET: tuple[Channels, Channels] = (
    (0.485 * 255, 0.456 * 255, 0.406 * 255),
    (0.229 * 255, 0.224 * 255, 0.225 * 255),
)
# Google's input of the Lite networks is (x - 127) / 128 (MEAN_RGB, STDDEV_RGB in efficientnet_lite_builder.py); timm's
# own configuration rounds that to mean 0.5, std 0.5 of [0, 1].
LITE: tuple[Channels, Channels] = ((127.0, 127.0, 127.0), (128.0, 128.0, 128.0))
# The layers that a message lists: the main parts of a network without its head.
PARTS = re.compile(r"(?!fc|head|classifier|avgpool|global_pool|flatten)\w+|(blocks|features|stages|layers)\.\w+")

_AGAIN = "delete it and get it again: reinstall the package that holds it, or run `anomed fetch weights`"


class _Enough(Exception):
    """The last layer that was asked for has been computed."""


class Backbone:
    """A frozen network in evaluation mode, whose layers are its modules, by name."""

    def __init__(self, name: str, network: "torch.nn.Module", statistics: tuple[Channels, Channels], device: str):
        import torch

        self.name, self.device = name, device
        self.mean, self.std = (torch.tensor(values, device=device).reshape(3, 1, 1) for values in statistics)
        self.network = network.eval().requires_grad_(False).to(device)
        # Networks of patches compute tokens: timm itself gives them back as maps, at the ends of its blocks or stages.
        patches = hasattr(network, "patch_embed") or getattr(network, "output_fmt", "NCHW") != "NCHW"
        info: Any = getattr(network, "feature_info", []) if patches else []
        self.blocks = [stage["module"] for stage in info]

    def features(self, images: np.ndarray, layers: Sequence[str], batch_size: int) -> "list[torch.Tensor]":
        """Outputs of `layers`, in that order: float32 (B, C, h, w) on the device, of 1 <= B <= batch_size images.

        images: uint8 (B, H, W), repeated to three channels, or (B, H, W, 3). The batch is filled up to `batch_size`
        with black images: the shape that the network sees never changes, and with it no last bit of an image's
        features. Layers of a transformer are the ends of its blocks ("blocks.11"): the patch tokens alone, after the
        final norm (timm's forward_intermediates with norm=True). Of a module that runs more than once, the first
        output. Raises AnomedError for a layer that the network does not have or that gives no maps, and for an image
        size that it cannot take.
        """
        import torch

        full = np.zeros((batch_size, 3, *images.shape[1:3]), np.float32)
        full[: len(images)] = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        with torch.inference_mode():
            return self.maps(torch.from_numpy(full).to(self.device), layers, len(images))

    def maps(self, values: "torch.Tensor", layers: Sequence[str], count: int | None = None) -> "list[torch.Tensor]":
        """The same of the first `count` (all) of grey levels, float32 (B, 3, H, W) in [0, 255] on the device, as they
        are: differentiable, and of a network that somebody trains. Raises AnomedError likewise."""
        self._check_layers(layers)
        self._check_size(tuple(values.shape[-2:]))
        count = len(values) if count is None else count
        side = " x ".join(map(str, values.shape[-2:]))
        values = (values - self.mean) / self.std
        try:
            found = self._tokens(values, layers) if self.blocks else self._outputs(values, layers, count)
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # out of memory
                raise
            raise AnomedError(
                f"backbone {self.name}: found images of {side} pixels, which its layers {list(layers)} do not take "
                f"({_reason(error)}); enlarge `size` of the domain or image_size of the row, or name earlier layers"
            ) from None
        return [found[layer][:count] for layer in layers]

    def _outputs(self, values: "torch.Tensor", layers: Sequence[str], count: int) -> "dict[str, torch.Tensor]":
        """What modules give for the first `count` images; the network runs no further than needed."""
        found: dict[str, Any] = {}

        def keep(layer: str, output: Any) -> None:
            if layer not in found:  # a copy: the next module may overwrite its input
                found[layer] = output[:count].clone() if hasattr(output, "clone") else None
            if len(found) == len(set(layers)):
                raise _Enough

        modules = dict(self.network.named_modules())
        hooks = [
            modules[layer].register_forward_hook(lambda module, given, output, layer=layer: keep(layer, output))
            for layer in set(layers)
        ]
        try:
            self.network(values)
        except _Enough:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        for layer in layers:
            if getattr(found.get(layer), "ndim", 0) != 4:
                raise AnomedError(f"backbone {self.name}: layer {layer!r} gives no maps; layers are {self.listed}")
        return found

    def _tokens(self, values: "torch.Tensor", layers: Sequence[str]) -> "dict[str, torch.Tensor]":
        indices = sorted({self.blocks.index(layer) for layer in layers})
        network: Any = self.network
        options = {"norm": True, "stop_early": True, "intermediates_only": True}
        maps = network.forward_intermediates(values, indices=indices, **options)
        return {self.blocks[index]: level for index, level in zip(indices, maps, strict=True)}

    @property
    def listed(self) -> list[str]:
        """The layers that a message proposes."""
        if self.blocks:
            return self.blocks
        names = [name for name, _ in self.network.named_modules() if PARTS.fullmatch(name)]
        return [name for name in names if not any(other.startswith(f"{name}.") for other in names)]

    def _check_layers(self, layers: Sequence[str]) -> None:
        known = self.blocks or [name for name, _ in self.network.named_modules() if name]
        for layer in layers:
            if layer not in known:
                raise AnomedError(f"backbone {self.name} has no layer {layer!r}; its layers are {self.listed}")

    def _check_size(self, size: tuple[int, ...]) -> None:
        """Refuse what a network of patches would refuse with an assertion."""
        embedding = getattr(self.network, "patch_embed", None)
        found, fixed = " x ".join(map(str, size)), getattr(embedding, "img_size", None)
        if getattr(embedding, "strict_img_size", False) and fixed and tuple(fixed) != tuple(size):
            wanted = " x ".join(map(str, fixed))
            raise AnomedError(
                f"backbone {self.name}: found images of {found} pixels, expected {wanted}; set `size` of the domain, "
                "or image_size of a row that has it"
            )
        patch = getattr(embedding, "patch_size", 1)
        patch = patch[0] if isinstance(patch, tuple) else patch
        if any(length % patch for length in size) and not getattr(embedding, "dynamic_img_pad", False):
            near = max(1, round(size[0] / patch)) * patch
            raise AnomedError(
                f"backbone {self.name}: found images of {found} pixels, expected multiples of its patches' {patch}; "
                f"set `size` of the domain, or image_size of a row that has it, to {near}"
            )


def configure(threads: int) -> None:
    """Make torch repeat itself: `threads` CPU threads, deterministic algorithms, full float32 precision."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when CUDA starts; deterministic cuBLAS needs it
    import torch

    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def load(name: str, device: str = "cpu", weights: str = "pretrained", seed: int = 0) -> Backbone:
    """The backbone `name` on `device` ("cpu" or "cuda"), frozen. Call `configure` first.

    weights: "pretrained", or "random": initialised from `seed` as its library does, no file read. Raises AnomedError
    for an unknown name, weights that are missing, damaged or not the published ones, or a CUDA device that torch does
    not see.
    """
    item = _item(name)
    path = item.check() if weights == "pretrained" else None  # before anything slow is imported
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise AnomedError(f"device {device!r} asked for, but torch sees no CUDA device; set device: cpu or auto")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # of the CPU alone: nobody else's random numbers move
        network, statistics = _build(item, path)
    return Backbone(name, network, statistics, device)


def frozen(params: Any, device: str, seed: int = 0) -> Backbone:
    """The backbone of a method, by the keys `backbone`, `weights` and `torch_threads` of its parameters; see `load`."""
    configure(params.torch_threads)
    return load(params.backbone, device, params.weights, seed)


def known(name: str) -> str:
    """`name` itself, checked without any library: torchvision's of the table `weights.TORCHVISION`, the bundled
    EfficientNet-Lite0, or a network of timm with its tag. Raises ValueError (for pydantic) for anything else."""
    if name in (BUNDLED.name, *TORCHVISION) or TAGGED.fullmatch(name):
        return name
    if name in TAGS:
        raise ValueError(f"no backbone {name!r}; timm's networks are named with their tag: {name}.{TAGS[name]}")
    kinds = "expected a name of torchvision, or one of timm with its tag, such as resnet18.a1_in1k"
    raise ValueError(f"no backbone {name!r}: {kinds}{nearest(name, [BUNDLED.name, *TORCHVISION])}")


def files(name: str, weights: str = "pretrained") -> dict[str, Path]:
    """The weight file of a backbone by name, found without importing any library; {} for random weights.

    Raises AnomedError when the package that carries it is missing. A file that is to be fetched may not be there yet.
    """
    return {name: _item(name).path()} if weights == "pretrained" else {}


def _item(name: str) -> Weights:
    try:
        item = find(known(name))
    except ValueError as error:
        raise AnomedError(str(error)) from None
    assert item is not None  # `known` names nothing else
    return item


def _build(item: Weights, path: Path | None) -> "tuple[torch.nn.Module, tuple[Channels, Channels]]":
    """The whole network of `item`, with the weights at `path` or random ones, and its input's mean and std."""
    if item is BUNDLED:
        return _lite0(path), LITE
    if item.name in TORCHVISION:
        return _torchvision(item, path), IMAGENET
    network = timm_network(item, path)
    configuration: Any = network.pretrained_cfg
    mean, std = (tuple(value * 255 for value in configuration[key]) for key in ("mean", "std"))
    return network, (mean, std)


def _lite0(path: Path | None) -> "torch.nn.Module":
    """EfficientNet-Lite0: blocks.0 to blocks.6 (blocks.2: 40 channels, stride 8; blocks.4: 112, stride 16; blocks.6:
    320, stride 32)."""
    import timm

    network: torch.nn.Module = timm.create_model(BUNDLED.name, pretrained=False)
    if path:
        _fill_by_position(network, _read_state(path), path)
    return network


def _torchvision(item: Weights, path: Path | None) -> "torch.nn.Module":
    """A network of torchvision: in a residual one layer1 to layer4 (strides 4, 8, 16, 32; 64, 128, 256, 512 channels in
    resnet18, four times as many in wide_resnet50_2), in others features.0 and so on."""
    import torchvision

    network: torch.nn.Module = torchvision.models.get_model(item.name.partition(".")[0], weights=None)
    if path:
        try:
            network.load_state_dict(_read_state(path))
        except RuntimeError as error:
            raise AnomedError(f"{path}: not the weights of {item.name}: {_reason(error)}; {_AGAIN}") from None
    return network


def timm_network(item: Weights, path: Path | None) -> "torch.nn.Module":
    """A network of timm, filled by timm's own code, every tensor demanded; a transformer takes images of any size."""
    import timm
    from safetensors import SafetensorError

    names = timm.list_pretrained()
    if item.name not in names:
        raise AnomedError(f"timm has no network {item.name!r}{nearest(item.name, names)}")
    options = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(path)}} if path else {"pretrained": False}
    try:
        try:
            network = timm.create_model(item.name, dynamic_img_size=True, **options)
        except TypeError:  # a network that has no such option
            network = timm.create_model(item.name, **options)
    except (SafetensorError, RuntimeError, KeyError) as error:
        raise AnomedError(f"{path}: not the weights of {item.name}: {_reason(error)}; {_AGAIN}") from None
    made: torch.nn.Module = network
    return made


def _reason(error: Exception) -> str:
    """The first fault that a library names: torch gives a heading, then a line for each kind of fault."""
    lines = str(error).splitlines() or [type(error).__name__]
    return textwrap.shorten(lines[min(1, len(lines) - 1)], 200, placeholder=" ...")


def _read_state(path: Path) -> "dict[str, torch.Tensor]":
    """The tensors of a checkpoint, read without executing anything in it. Raises AnomedError when it is damaged."""
    import pickle

    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise AnomedError(f"{path}: not readable as tensors ({_reason(error)}); {_AGAIN}") from None
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
