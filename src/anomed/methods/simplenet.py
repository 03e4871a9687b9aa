"""SimpleNet: a discriminator that tells adapted features of normal patches from the same with noise."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field, field_validator

from anomed import backbones, feed, nets, plugins, training
from anomed.detect import Detector
from anomed.patches import joined, paint

if TYPE_CHECKING:
    import torch
    from torch import nn

SLOPE = 0.2  # of the leaky ReLU
MARGIN = 0.5  # th+ and -th- of the truncated loss
WEIGHT_DECAY = 1e-5


@plugins.register("methods", "simplenet")
class Simplenet(Detector):
    """SimpleNet (Liu et al., "SimpleNet: a simple network for image anomaly detection and localization", CVPR 2023,
    arXiv 2303.15140); where the paper is silent, as DonaldRR/SimpleNet.

    Features: outputs of `layers` of a frozen backbone, each averaged over its neighbourhood, resized bilinearly to the
    grid of the first and concatenated. An adaptor (a linear layer without bias) carries them into a space where
    Gaussian noise makes anomalous ones; a discriminator (linear, batch normalisation, leaky ReLU, linear) learns to be
    above 0.5 for the features and below -0.5 for the noisy ones, by the L1 loss truncated there. One Adam moves both,
    at two rates, with weight decay 1e-5.

    Map: the negative discriminator at every patch, without noise, upsampled bilinearly to the image size and smoothed
    by a Gaussian. Image score: the largest of these values before both.
    """

    gpu = True
    memory_mb = 4000

    class Params(training.Params):
        """The keys of the block; the others: see training.Params.

        backbone, layers: network and its stages; the first layer sets the grid. weights: pretrained ones, or random
        ones drawn from the seed (a smoke test). patch_size: odd side of the neighbourhood, in places of a layer's grid.
        adaptor: whether features are adapted. hidden: width of the discriminator. noise_std: of the noise, in units of
        adapted features (the paper: 0.015 on Wide ResNet-50-2; those of EfficientNet-Lite0 vary many times as much).
        learning_rate: of the discriminator. adaptor_learning_rate: of the adaptor. smoothing_sigma: of the map's
        Gaussian, in pixels of the image; 0 for none.
        """

        backbone: Annotated[str, AfterValidator(backbones.known)] = "tf_efficientnet_lite0"
        weights: Literal["pretrained", "random"] = "pretrained"
        layers: list[str] = Field(default=["blocks.2", "blocks.4"], min_length=1)
        patch_size: int = Field(default=3, ge=1, le=63)
        adaptor: bool = True
        hidden: int = Field(default=1024, ge=1)
        noise_std: float = Field(default=1.0, gt=0)
        smoothing_sigma: float = Field(default=4.0, ge=0)
        epochs: int = Field(default=160, ge=1)
        batch_size: int = Field(default=4, ge=1, le=1024)
        learning_rate: float = Field(default=2e-4, gt=0)
        adaptor_learning_rate: float = Field(default=1e-4, gt=0)

        @field_validator("patch_size")
        @classmethod
        def _odd(cls, value: int) -> int:
            if value % 2 == 0:
                raise ValueError(f"patch_size: found {value}, expected an odd number, for a neighbourhood has a centre")
            return value

    networks: "nn.ModuleDict"
    size: int  # side of the backbone's input
    width: int  # of the features

    @classmethod
    def files(cls, params: Params) -> dict[str, Path]:
        """The backbone's weights."""
        return backbones.files(params.backbone, params.weights)

    @functools.cached_property
    def _backbone(self) -> backbones.Backbone:
        return backbones.frozen(self.params, self.device, self.seed)

    def fit(self, images: np.ndarray) -> None:
        """Train on the normal images. Raises AnomedError for a layer that the backbone does not have, and when the loss
        is not finite."""
        self.size = self.params.image_size or images.shape[1]
        self._build(self._features(images[:1].copy()).shape[-1])
        training.run(self, images, {"simplenet": self._phase})

    def state(self) -> dict[str, np.ndarray]:
        """The networks' tensors, and "input": the side of the input and the width of the features, int64 (2,)."""
        return nets.arrays(self.networks, self.size, self.width)

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the networks."""
        self.size, width = state["input"].tolist()
        self._build(width)
        nets.fill(self.networks, state)

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See Detector.score. Maps at the image size."""
        import torch

        height, width = images.shape[1:3]
        for batch, count in feed.batches(images, self.params.batch_size):
            features = self._features(batch)
            with torch.inference_mode():
                values = -self._judged(self._adapted(features)).reshape(features.shape[:3])[:count]
            sigma = self.params.smoothing_sigma
            maps = np.stack([paint(one, height, width, sigma, "bilinear") for one in values])
            yield values.amax((1, 2)).cpu().numpy(), maps

    def _build(self, width: int) -> None:
        self.width = width
        self.networks = nets.built(self, lambda: networks(width, self.params.hidden, self.params.adaptor))

    def _features(self, images: np.ndarray) -> "torch.Tensor":
        """Features of the patches of images, uint8 (B, S, S (, 3)): float32 (B, h, w, width), without gradient."""
        import torch

        with torch.no_grad(), torch.autocast(self.device, enabled=False):  # trained on what is scored
            values = feed.pixels(images, 3, self.size, self.device) * 255
            levels = self._backbone.maps(values, self.params.layers)
            return joined([averaged(level.float(), self.params.patch_size) for level in levels], "bilinear")

    def _adapted(self, features: "torch.Tensor") -> "torch.Tensor":
        """float32 (P, width) of features (B, h, w, width)."""
        adapted: torch.Tensor = self.networks["adaptor"](features.flatten(0, 2))
        return adapted

    def _judged(self, adapted: "torch.Tensor") -> "torch.Tensor":
        """The discriminator of adapted features (P, width): float32 (P,), large where normal."""
        judged: torch.Tensor = self.networks["discriminator"](adapted).squeeze(1)
        return judged

    def _phase(self) -> training.Phase:
        import torch

        params = self.params
        adaptor, discriminator = self.networks["adaptor"], self.networks["discriminator"]

        def step(images: np.ndarray, at: training.Step) -> training.Losses:
            features = self._features(images)
            # In float32 whatever the loop computes in: noise this small vanishes in the rounding of bfloat16.
            with torch.autocast(features.device.type, enabled=False):
                normal = self._adapted(features)
                noisy = normal + params.noise_std * torch.randn_like(normal)
                # Both at once, for batch normalisation must not see which is which.
                judged = self._judged(torch.cat([normal, noisy]))
                loss = truncated(*judged.chunk(2))
            yield "discrimination", loss

        groups: list[Any] = [{"params": list(discriminator.parameters()), "lr": params.learning_rate}]
        if params.adaptor:
            groups.append({"params": list(adaptor.parameters()), "lr": params.adaptor_learning_rate})
        adam = torch.optim.Adam(groups, weight_decay=WEIGHT_DECAY)
        return training.Phase([adaptor, discriminator], {"discrimination": adam}, step)


def networks(width: int, hidden: int, adaptor: bool) -> "dict[str, nn.Module]":
    """The adaptor, (P, width) to the same, and the discriminator, (P, width) to (P, 1); weights drawn as Xavier."""
    from torch import nn

    judge = nn.Sequential(
        nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.LeakyReLU(SLOPE), nn.Linear(hidden, 1, bias=False)
    )
    made: dict[str, nn.Module] = {
        "adaptor": nn.Linear(width, width, bias=False) if adaptor else nn.Identity(),
        "discriminator": judge,
    }
    for network in made.values():
        for part in network.modules():
            if isinstance(part, nn.Linear):
                nn.init.xavier_normal_(part.weight)
    return made


def averaged(level: "torch.Tensor", side: int) -> "torch.Tensor":
    """Means over the side x side places around each, of a layer's output (B, C, h, w); at the edges of those that are
    there, for no feature lies outside."""
    import torch.nn.functional as F

    return F.avg_pool2d(level, side, stride=1, padding=side // 2, count_include_pad=False)


def truncated(normal: "torch.Tensor", noisy: "torch.Tensor") -> "torch.Tensor":
    """The loss of the discriminator's values (P,) of features and of noisy ones: how far they miss the margin."""
    return (MARGIN - normal).clamp(min=0).mean() + (MARGIN + noisy).clamp(min=0).mean()
