"""MKD: a small network learns to give a frozen one's activations; where it fails is anomalous."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from anomed import backbones, feed, nets, plugins, training
from anomed.detect import Detector
from anomed.errors import AnomedError
from anomed.patches import paint

if TYPE_CHECKING:
    import torch
    from torch import nn


class Level(NamedTuple):
    """What the student must match at a critical layer: channels, side of the grid, whether values may be negative."""

    channels: int
    side: int
    signed: bool


@plugins.register("methods", "mkd")
class Mkd(Detector):
    """Multiresolution knowledge distillation (Salehi et al., "Multiresolution knowledge distillation for anomaly
    detection", CVPR 2021, arXiv 2011.11108).

    A student of 3 x 3 convolutions (the paper's cloner) sees the input of a frozen, pretrained teacher and learns the
    teacher's activations at the critical `layers`. Loss of an image: the sum over layers of

        (1 - cosine of the angle between both activations, flattened) + value_weight x mean squared difference.

    The paper's total is value + lambda x direction, lambda such that both start equally large; the authors' code, which
    is followed here, divides that by lambda: value_weight is 1 / lambda. Image score: the loss of the image.

    Map: gradient of the score with respect to the pixels in [0, 1], absolute, mean over the three channels, smoothed
    once by a Gaussian at the size of the network's input. Guided gradients pass a ReLU of either network backwards only
    where they are positive (the authors' code: of the student alone). The paper then removes specks of 3 pixels by an
    opening; BMAD smooths twice and scales every map to 0 ... 1: neither is done here, maps are raw.
    """

    gpu = True
    memory_mb = 8000

    class Params(training.Params):
        """Beside those of training.Params:

        backbone, layers: teacher and its critical layers, early ones first. weights: pretrained ones, or random ones
        drawn from the seed (a smoke test). width: channels of the student between the critical layers. value_weight:
        factor of the mean squared difference, beside 1 of the cosine (the authors: 0.01, on MVTec 0.5). score_layers:
        those of `layers` that scores and maps use; null for all, as the paper (the authors' code, and BMAD's, leave out
        the first). gradients: "vanilla", or "guided" for a teacher with ReLU. smoothing_sigma: of the map's Gaussian,
        in pixels of the network's input; 0 for none.
        """

        epochs: int = Field(default=200, ge=1)
        batch_size: int = Field(default=64, ge=1, le=1024)
        backbone: Annotated[str, AfterValidator(backbones.known)] = "tf_efficientnet_lite0"
        weights: Literal["pretrained", "random"] = "pretrained"
        layers: list[str] = Field(default=["blocks.1", "blocks.2", "blocks.4", "blocks.6"], min_length=1)
        width: int = Field(default=16, ge=1, le=1024)
        value_weight: float = Field(default=0.01, ge=0)
        score_layers: list[str] | None = Field(default=None, min_length=1)
        gradients: Literal["vanilla", "guided"] = "guided"
        smoothing_sigma: float = Field(default=4.0, ge=0)

        @model_validator(mode="after")
        def _check_score_layers(self) -> Self:
            for name in ("layers", "score_layers"):
                if len(set(names := getattr(self, name) or [])) < len(names):
                    raise ValueError(f"{name}: found {names}, expected each layer once; it would count twice")
            if unknown := set(self.score_layers or ()) - set(self.layers):
                raise ValueError(
                    f"score_layers: found {sorted(unknown)}, expected some of layers {self.layers}; name those, or add "
                    "them to layers"
                )
            return self

    networks: "nn.ModuleDict"
    size: int  # side of the networks' input

    @classmethod
    def files(cls, params: Params) -> dict[str, Path]:
        """The teacher's weights."""
        return backbones.files(params.backbone, params.weights)

    @classmethod
    def needs_mb(cls, params: Params, size: int) -> int:
        """See Detector.needs_mb: mostly for the gradients of a batch, measured with EfficientNet-Lite0."""
        return round(1500 + 120 * params.batch_size * ((params.image_size or size) / 224) ** 2)

    @functools.cached_property
    def _backbone(self) -> backbones.Backbone:
        return backbones.frozen(self.params, self.device, self.seed)

    def fit(self, images: np.ndarray) -> None:
        """Train the student on the normal images. Raises AnomedError when the teacher lacks a layer, gives none for so
        small an image or has no ReLU for guided gradients, and when the loss is not finite."""
        self._build(self.params.image_size or images.shape[1])
        training.run(self, images, {"mkd": self._phase})

    def state(self) -> dict[str, np.ndarray]:
        """The student's tensors, and "input": the side of its input, int64 (1,)."""
        return nets.arrays(self.networks, self.size)

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the student."""
        self._build(int(state["input"][0]))
        nets.fill(self.networks, state)

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See Detector.score. Maps at the size of the networks' input."""
        import torch

        used = [self.params.layers.index(layer) for layer in self.params.score_layers or self.params.layers]
        for batch, count in feed.batches(images, self.params.batch_size):
            values = self._input(batch).requires_grad_()
            with torch.enable_grad(), self._guided():
                taught, learned = self._taught(values), self._learned(values)
                losses = discrepancy([taught[i] for i in used], [learned[i] for i in used], self.params.value_weight)
                (gradient,) = torch.autograd.grad(losses.sum(), values)  # of a sum: each image its own
            size, sigma = self.size, self.params.smoothing_sigma
            maps = [paint(one, size, size, sigma, "bilinear") for one in gradient[:count].abs().mean(1)]
            yield losses[:count].detach().cpu().numpy(), np.stack(maps)

    def _build(self, size: int) -> None:
        self.size = size
        if self.params.gradients == "guided" and not rectifiers(self._backbone.network):
            raise AnomedError(
                f"mkd: gradients: found guided, but backbone {self.params.backbone} has no ReLU to guide at; set "
                "gradients: vanilla, or choose a backbone with ReLU"
            )
        levels = self._levels()
        self.networks = nets.built(self, lambda: {"student": student(levels, size, self.params.width)})

    def _levels(self) -> list[Level]:
        """What the teacher gives at its critical layers for an image of noise of the input's size."""
        noise = np.random.default_rng(0).integers(0, 256, (1, self.size, self.size), dtype=np.uint8)
        found = self._backbone.features(noise, self.params.layers, 1)
        return [Level(level.shape[1], level.shape[-1], bool(level.min() < 0)) for level in found]

    def _input(self, images: np.ndarray) -> "torch.Tensor":
        return feed.pixels(images, 3, self.size, self.device)

    def _taught(self, values: "torch.Tensor") -> "list[torch.Tensor]":
        """Activations of the teacher for pixels in [0, 1], in full precision even in a training of mixed precision."""
        import torch

        with torch.autocast(self.device, enabled=False):
            return self._backbone.maps(values * 255, self.params.layers)

    def _learned(self, values: "torch.Tensor") -> "list[torch.Tensor]":
        """Activations of the student, shaped as those of the teacher."""
        values, found = (values * 255 - self._backbone.mean) / self._backbone.std, []
        stages: Any = self.networks["student"]
        for stage in stages:
            values = stage(values)
            found.append(values)
        return found

    def _phase(self) -> training.Phase:
        import torch

        network = self.networks["student"]

        def step(images: np.ndarray, at: training.Step) -> training.Losses:
            values = self._input(images)
            with torch.no_grad():
                taught = self._taught(values)
            yield "distillation", discrepancy(taught, self._learned(values), self.params.value_weight).mean()

        adam = torch.optim.Adam(network.parameters(), lr=self.params.learning_rate)
        return training.Phase([network], {"distillation": adam}, step)

    @contextlib.contextmanager
    def _guided(self) -> Iterator[None]:
        """Meanwhile, where `gradients` is guided, negative gradients stop at the output of every ReLU."""
        guided = self.params.gradients == "guided"
        modules = [*rectifiers(self._backbone.network), *rectifiers(self.networks["student"])] if guided else []
        hooks = [module.register_forward_hook(_stop_negative) for module in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def discrepancy(
    taught: "Sequence[torch.Tensor]", learned: "Sequence[torch.Tensor]", value_weight: float
) -> "torch.Tensor":
    """The loss of each image, float32 (B,), from both networks' activations (B, C_i, h_i, w_i)."""
    import torch
    import torch.nn.functional as F

    losses = []
    for target, own in zip(taught, learned, strict=True):
        target, own = target.float().flatten(1), own.float().flatten(1)
        losses.append(1 - F.cosine_similarity(own, target, dim=1) + value_weight * (own - target).square().mean(1))
    return torch.stack(losses).sum(0)


def rectifiers(network: "nn.Module") -> "list[nn.Module]":
    """The modules of a network that are a ReLU, bounded or not."""
    from torch import nn

    return [module for module in network.modules() if isinstance(module, nn.ReLU | nn.ReLU6)]


def _stop_negative(module: Any, given: Any, output: "torch.Tensor") -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.clamp(min=0))


def student(levels: Sequence[Level], size: int, width: int) -> "nn.ModuleList":
    """A stage for each critical layer, from the stage before; the first takes float32 (B, 3, size, size).

    At vgg16's last four poolings (features.9, 16, 23, 30) it is the authors' small cloner, layer by layer.
    """
    from torch import nn

    stages, channels = nn.ModuleList(), 3
    for level in levels:
        stages.append(_stage(channels, size, level, width, convolutions=3 if len(stages) else 2))
        channels, size = level.channels, level.side
    return stages


def _stage(channels: int, side: int, level: Level, width: int, convolutions: int) -> "nn.Sequential":
    """From a grid of `side` to the level's: so many convolutions before each halving, `width` channels until the last.

    A last ReLU would keep the student from negative values, so there is none where the teacher has some. A grid that
    halving does not meet is resized to by the nearest neighbour.
    """
    from torch import nn

    parts: list[nn.Module] = []
    pools = halvings(side, level.side)
    for block in range(max(1, len(pools))):
        last_block = block >= len(pools) - 1
        for number in range(convolutions):
            before_pool = number == convolutions - 1
            made = level.channels if last_block and before_pool else width
            convolution = nn.Conv2d(channels, made, 3, padding=1, bias=False)
            nn.init.xavier_uniform_(convolution.weight)
            parts.append(convolution)
            if not before_pool:
                parts.append(nn.BatchNorm2d(made))
            if not (last_block and before_pool and level.signed):
                parts.append(nn.ReLU(inplace=True))
            channels = made
        if pools:
            parts.append(nn.MaxPool2d(2, ceil_mode=pools[block] * 2 > side))
            side = pools[block]
    if side != level.side:
        parts.append(nn.Upsample(size=(level.side, level.side), mode="nearest"))
    return nn.Sequential(*parts)


def halvings(side: int, target: int) -> list[int]:
    """The sides after each halving from `side` down to `target`, or as near above it as they get; odd ones are rounded
    down where that still leads there, else up."""
    left = 0
    while rounded_up(side, left) > target and rounded_up(side, left + 1) >= target:
        left += 1
    found: list[int] = []
    while left and side > target:
        left -= 1
        side = side // 2 if rounded_up(side // 2, left) >= target else rounded_up(side, 1)
        found.append(side)
    return found


def rounded_up(side: int, times: int) -> int:
    """`side` halved so many times, rounded up each time."""
    return -(-side // 2**times)
