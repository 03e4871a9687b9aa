"""UTRAD: a U-shaped transformer reconstructs frozen features; what it cannot reconstruct is anomalous."""

import contextlib
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from anomed import backbones, feed, nets, plugins, training
from anomed.detect import Detector
from anomed.patches import joined, paint

if TYPE_CHECKING:
    import torch
    from torch import nn

LEAST_SCALE = 0.01  # of the error that is expected at a token: a head that has not learned yet may say 0
LEAST_VARIANCE = 1e-8  # of a channel over the train images: less is rounding


@plugins.register("methods", "utrad")
class Utrad(Detector):
    """UTRAD (Chen et al., "UTRAD: Anomaly detection and localization with U-Transformer", Neural Networks 147, 2022).

    Features: outputs of frozen `layers`, resized to the grid of the first by the nearest neighbour and concatenated;
    every cell is a token. The grid of the tokens is the product of `patches` on each side; features on another grid are
    resized to it bilinearly. With `standardise`, each channel has mean 0 and standard deviation 1 over the tokens of
    the train images: the values of some networks are too large to be reached otherwise. At each level of the encoder,
    attention runs among the tokens of one patch and a summary, which starts at 0; the summaries of all patches are the
    tokens of the next level, until one is left. Going back, learned queries attend to a patch's summary and to its
    tokens, which pass a narrow bottleneck (the skip).

    Losses: mean squared error of the reconstruction; beside it a small head learns, by squared error, to predict the
    size of each token's error from the last tokens, moving nothing but itself. That size is the root mean square over
    channels (the authors' Euclidean length over a constant, which their quotient, too, would lose). Map: the error's
    size / |predicted one| (at least 0.01), averaged over windows of 1, of a patch, of a patch of patches and so on up
    to the whole grid, each upsampled bilinearly; mean of all, upsampled bilinearly to the network's input. Image score:
    maximum of the map. Scores and maps are raw. The authors' code scales them by the extremes of all test images, keeps
    the epoch of the lowest loss (here the last) and never trains its embeddings of positions (here trained).
    """

    gpu = True
    memory_mb = 4000

    class Params(training.Params):
        """Beside those of training.Params:

        backbone, layers: frozen network and its stages, the first one's grid is that of the features (the paper:
        resnet18, layer1 to layer3). weights: pretrained ones, or random ones drawn from the seed (a smoke test).
        standardise: each channel of the features (the paper: false, the values of resnet18 are small as they are).
        patches: side of a patch of tokens at each level, fine to coarse; their product is the side of the grid (the
        paper: 4, 4, 4 at 256 pixels). width, heads, feedforward: channels of a token, heads of attention, channels of a
        layer's inner part (the paper: 512, 8, 2048). depth: layers of encoder and decoder at each level (the paper: 4).
        dropout: in training.
        """

        epochs: int = Field(default=150, ge=1)
        batch_size: int = Field(default=8, ge=1, le=1024)
        learning_rate: float = Field(default=1e-4, gt=0)
        backbone: Annotated[str, AfterValidator(backbones.known)] = "tf_efficientnet_lite0"
        weights: Literal["pretrained", "random"] = "pretrained"
        layers: list[str] = Field(default=["blocks.2", "blocks.4"], min_length=1)
        standardise: bool = True
        patches: list[Annotated[int, Field(ge=2, le=32)]] = Field(default=[4, 7], min_length=1, max_length=6)
        width: int = Field(default=128, ge=8, le=2048)
        heads: int = Field(default=4, ge=1)
        feedforward: int = Field(default=512, ge=1)
        depth: int = Field(default=2, ge=1, le=12)
        dropout: float = Field(default=0.1, ge=0, lt=1)

        @model_validator(mode="after")
        def _check_shapes(self) -> Self:
            if self.width % self.heads or self.width % 8:
                raise ValueError(f"width: found {self.width}, expected a multiple of 8 and of heads, {self.heads}")
            if (side := math.prod(self.patches)) > 128:
                raise ValueError(f"patches: found a product of {side}, expected at most 128; use fewer or smaller ones")
            return self

    networks: "nn.ModuleDict"
    size: int  # side of the network's input

    @classmethod
    def files(cls, params: Params) -> dict[str, Path]:
        """The backbone's weights."""
        return backbones.files(params.backbone, params.weights)

    @classmethod
    def needs_mb(cls, params: Params, size: int) -> int:
        """See Detector.needs_mb: for what a layer keeps of every token, and for weights with their optimiser."""
        tokens, width, inner = math.prod(params.patches) ** 2, params.width, params.feedforward
        kept = params.batch_size * tokens * params.depth * 12 * (width + inner)
        weights = 4 * params.depth * len(params.patches) * (12 * width**2 + 4 * width * inner)
        return round(1500 + 4e-6 * (kept + weights))

    @functools.cached_property
    def _backbone(self) -> backbones.Backbone:
        return backbones.frozen(self.params, self.device, self.seed)

    def fit(self, images: np.ndarray) -> None:
        """Train on the normal images. Raises AnomedError for an unknown layer, and when a loss is not finite."""
        self.size = self.params.image_size or images.shape[1]
        channels = self._raw(np.zeros((1, *images.shape[1:]), np.uint8)).shape[1]
        self.networks = nets.built(self, lambda: networks(channels, self.params))
        training.run(self, images, {"utrad": functools.partial(self._phase, images)})

    def state(self) -> dict[str, np.ndarray]:
        """The networks' tensors, and "input": channels of the features and side of the images, int64 (2,)."""
        channels = len(self.networks["standard"].get_buffer("running_mean"))
        return nets.arrays(self.networks, channels, self.size)

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the networks."""
        channels, self.size = state["input"].tolist()
        self.networks = nets.built(self, lambda: networks(channels, self.params))
        nets.fill(self.networks, state)

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See Detector.score. Maps at the size of the network's input."""
        import torch

        for batch, count in feed.batches(images, self.params.batch_size):
            with torch.inference_mode():
                features = self.networks["standard"](self._raw(batch))
                rebuilt, scales = self._forward(features)
                ratios = sizes(rebuilt, features) / scales.float().abs().clamp(min=LEAST_SCALE)
                grids = averaged(ratios, self.params.patches)[:count, 0]
                maps = np.stack([paint(one, self.size, self.size, 0, "bilinear") for one in grids])
            yield maps.max(axis=(1, 2)), maps

    def _measure(self, images: np.ndarray) -> None:
        """Mean and variance of each channel over all tokens of `images`; one that hardly varies is left as it is."""
        import torch

        held: Any = self.networks["standard"]
        sums = torch.zeros(2, held.num_features, dtype=torch.float64, device=self.device)
        for batch, count in feed.batches(images, self.params.batch_size):
            raw = self._raw(batch)[:count].double()
            sums += torch.stack([raw, raw.square()]).mean((3, 4)).sum(1)
        held.running_mean.copy_(sums[0] / len(images))
        variance = sums[1] / len(images) - (sums[0] / len(images)).square()
        held.running_var.copy_(torch.where(variance > LEAST_VARIANCE, variance, 1))

    def _raw(self, images: np.ndarray) -> "torch.Tensor":
        """Joined features of uint8 (B, S, S (, 3)) on the tokens' grid, in full precision even in a mixed training."""
        import torch
        import torch.nn.functional as F

        side = math.prod(self.params.patches)
        with torch.no_grad(), torch.autocast(self.device, enabled=False):
            values = feed.pixels(images, 3, self.size, self.device)
            features = joined(self._backbone.maps(values * 255, self.params.layers), "nearest").permute(0, 3, 1, 2)
            if features.shape[-2:] != (side, side):
                features = F.interpolate(features, size=(side, side), mode="bilinear", antialias=True)
            return features.contiguous()

    def _forward(self, features: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Reconstructed features, (B, C, g, g), and the predicted size of each error, (B, 1, g, g)."""
        with _plain_attention():
            tokens, rebuilt = reconstructed(self.networks["transformer"], features, self.params.patches)
        return rebuilt, self.networks["scale"](tokens.detach())

    def _phase(self, images: np.ndarray) -> training.Phase:
        import torch

        if self.params.standardise:
            self._measure(images)

        def step(images: np.ndarray, at: training.Step) -> training.Losses:
            features = self.networks["standard"](self._raw(images))
            rebuilt, scales = self._forward(features)
            errors = sizes(rebuilt, features).detach()
            yield "reconstruction", (rebuilt.float() - features).square().mean()
            yield "scale", (scales.float() - errors).square().mean()

        moved = {"reconstruction": self.networks["transformer"], "scale": self.networks["scale"]}
        adams: dict[str, torch.optim.Optimizer] = {}
        for loss, network in moved.items():
            adams[loss] = torch.optim.Adam(network.parameters(), self.params.learning_rate, (0.5, 0.999))
        return training.Phase(list(moved.values()), adams, step)


def sizes(rebuilt: "torch.Tensor", features: "torch.Tensor") -> "torch.Tensor":
    """Root mean square over channels of the error of each token: float32 (B, 1, g, g)."""
    return (rebuilt.float() - features).square().mean(1, keepdim=True).sqrt()


def averaged(ratios: "torch.Tensor", patches: list[int]) -> "torch.Tensor":
    """Mean over all levels of averages over windows of one token up to the whole grid: (B, 1, g, g)."""
    import torch
    import torch.nn.functional as F

    found = [ratios]
    for level in range(1, len(patches) + 1):
        pooled = F.avg_pool2d(ratios, math.prod(patches[:level]))
        found.append(F.interpolate(pooled, size=ratios.shape[-2:], mode="bilinear"))
    return torch.stack(found).mean(0)


def reconstructed(network: Any, features: "torch.Tensor", patches: list[int]) -> "tuple[torch.Tensor, torch.Tensor]":
    """The last tokens, (B, width, g, g), of features (B, C, g, g), and what they make of these again."""
    import torch

    drop = network["dropout"]
    tokens = network["first"](features).permute(0, 2, 3, 1)
    tokens = drop(tokens + network["position"].weight.reshape(tokens.shape[1:]))
    skips: list[torch.Tensor] = []
    for level, side in zip(network["levels"], patches, strict=True):
        batch, grid, _, width = tokens.shape
        inside = drop(cut(tokens, side) + level["position"].weight)
        encoded = level["encoder"](torch.cat([inside.new_zeros(len(inside), 1, width), inside], dim=1))
        tokens = encoded[:, 0].reshape(batch, grid // side, grid // side, width)
        skips.append(level["bottleneck"](encoded[:, 1:]))
    for level, side, skip in zip(reversed(network["levels"]), reversed(patches), reversed(skips), strict=True):
        batch, grid = tokens.shape[:2]
        memory = torch.cat([tokens.flatten(0, 2)[:, None], skip], dim=1)
        decoded = level["decoder"](level["query"].weight.expand(len(memory), -1, -1), memory)
        tokens = put_back(decoded, batch, grid, side)
    tokens = tokens.permute(0, 3, 1, 2).contiguous()
    return tokens, network["last"](tokens)


def cut(tokens: "torch.Tensor", side: int) -> "torch.Tensor":
    """Patches, (B n n, side side, width), of tokens (B, n side, n side, width): patch by patch, row by row."""
    batch, grid, _, width = tokens.shape
    parts = tokens.reshape(batch, grid // side, side, grid // side, side, width)
    return parts.transpose(2, 3).reshape(-1, side * side, width)


def put_back(parts: "torch.Tensor", batch: int, grid: int, side: int) -> "torch.Tensor":
    """Tokens, (B, n side, n side, width), of patches that `cut` gave on a grid of n."""
    tokens = parts.reshape(batch, grid, grid, side, side, -1).transpose(2, 3)
    return tokens.reshape(batch, grid * side, grid * side, -1)


def networks(channels: int, params: Any) -> "dict[str, nn.Module]":
    """ "transformer", the parts of `reconstructed`; "scale", which predicts the size of a token's error from the last
    tokens; "standard", which holds mean and variance of each channel, at first 0 and 1."""
    from torch import nn

    width, side = params.width, math.prod(params.patches)
    parts = {
        "first": nn.Conv2d(channels, width, 1, bias=False),
        "position": nn.Embedding(side * side, width),
        "dropout": nn.Dropout(params.dropout),
        "levels": nn.ModuleList([_level(patch * patch, params) for patch in params.patches]),
        "last": nn.Conv2d(width, channels, 1, bias=False),
    }
    head: list[nn.Module] = []
    for given, made in ((width, width), (width, width // 2), (width // 2, width // 4), (width // 4, width // 8)):
        head += [nn.Conv2d(given, made, 1, bias=False), nn.BatchNorm2d(made), nn.LeakyReLU(0.2)]
    scale = nn.Sequential(*head, nn.Conv2d(width // 8, 1, 1, bias=False))
    standard = nn.BatchNorm2d(channels, eps=1e-12, affine=False)  # always in evaluation mode
    return {"transformer": _drawn(nn.ModuleDict(parts)), "scale": _drawn(scale), "standard": standard}


def _level(tokens: int, params: Any) -> "nn.ModuleDict":
    """One level of encoder and decoder, for patches of so many tokens."""
    from torch import nn

    width, depth = params.width, params.depth
    shape: dict[str, Any] = {"d_model": width, "nhead": params.heads, "dim_feedforward": params.feedforward}
    shape |= {"dropout": params.dropout, "activation": "gelu", "batch_first": True}
    encoder, decoder = nn.TransformerEncoderLayer(**shape), nn.TransformerDecoderLayer(**shape)
    narrow = [nn.Linear(width, width // 4), nn.LayerNorm(width // 4), nn.GELU()]
    parts = {
        "position": nn.Embedding(tokens, width),
        "query": nn.Embedding(tokens, width),
        "encoder": nn.TransformerEncoder(encoder, depth, nn.LayerNorm(width), enable_nested_tensor=False),
        "decoder": nn.TransformerDecoder(decoder, depth, nn.LayerNorm(width)),
        "bottleneck": nn.Sequential(*narrow, nn.Linear(width // 4, width), nn.LayerNorm(width)),
    }
    return nn.ModuleDict(parts)


def _drawn(network: "nn.Module") -> "nn.Module":
    """Weights of convolutions and linear parts drawn from N(0, 0.02), of batch normalisation from N(1, 0.02)."""
    from torch import nn

    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.02)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.02)
    return network


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """Meanwhile attention is computed in training as in scoring, and repeats itself on a GPU: no fused short cuts."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before, switch = torch.backends.mha.get_fastpath_enabled(), torch.backends.mha.set_fastpath_enabled
    with contextlib.ExitStack() as stack:
        stack.callback(switch, before)
        switch(False)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield
