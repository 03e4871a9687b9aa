"""k-NN: distance of an image's pooled features to its nearest train images."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Field

from anomed import backbones, console, plugins
from anomed.detect import Detector
from anomed.settings import Settings

if TYPE_CHECKING:
    import torch


@plugins.register("methods", "knn")
class Knn(Detector):
    """Mean Euclidean distance to the `k` nearest train images, in the features of a frozen backbone; no map.

    After DN2 (Bergman, Cohen, Hoshen, "Deep nearest neighbor anomaly detection", arXiv 2002.10445): features averaged
    over all positions of a late stage, mean distance to the k nearest. As in Sun et al. ("Out-of-distribution detection
    with deep nearest neighbors", ICML 2022, arXiv 2204.06507) features are scaled to length 1; of several layers each
    one's own, so that all weigh the same in the distance. With fewer train images than k, all count.
    """

    deterministic = True
    localises = False
    gpu = True
    memory_mb = 3000

    class Params(Settings):
        """backbone, layers: network and its stages. k: number of neighbours. batch_size: images per forward pass.
        torch_threads: CPU threads. weights: pretrained, or random (a smoke test that needs no weight file)."""

        backbone: Annotated[str, AfterValidator(backbones.known)] = "tf_efficientnet_lite0"
        layers: list[str] = Field(default=["blocks.6"], min_length=1)
        k: int = Field(default=2, ge=1)
        batch_size: int = Field(default=8, ge=1, le=1024)
        torch_threads: int = Field(default=1, ge=1, le=1024)
        weights: Literal["pretrained", "random"] = "pretrained"

    bank: "torch.Tensor"  # float32 (N, D), on the device

    @classmethod
    def files(cls, params: Params) -> dict[str, Path]:
        """The backbone's weights."""
        return backbones.files(params.backbone, params.weights)

    @functools.cached_property
    def _backbone(self) -> backbones.Backbone:
        return backbones.frozen(self.params, self.device)

    def fit(self, images: np.ndarray) -> None:
        """Keep the pooled features of all train images: 4 x D bytes each."""
        size = self.params.batch_size
        starts = console.track(range(0, len(images), size), "knn: features")
        self.restore({"bank": np.concatenate([self._pooled(images[at : at + size]).cpu().numpy() for at in starts])})

    def state(self) -> dict[str, np.ndarray]:
        """The features of the train images: "bank", float32 (N, D)."""
        return {"bank": self.bank.cpu().numpy()}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the features."""
        import torch

        self.bank = torch.from_numpy(np.ascontiguousarray(state["bank"])).to(self.device)

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, None]]:
        """See Detector.score. Scores from 0 to 2 times the root of the number of layers."""
        norms = self.bank.square().sum(1)
        for start in range(0, len(images), self.params.batch_size):
            pooled = self._pooled(images[start : start + self.params.batch_size])
            # One image at a time: equal shapes in every product, whatever the batch, and O(N) memory.
            yield np.array([mean_distance(one, self.bank, norms, self.params.k) for one in pooled]), None

    def _pooled(self, images: np.ndarray) -> "torch.Tensor":
        """Features of at most batch_size images: float32 (B, D), of length 1 in each layer."""
        import torch
        import torch.nn.functional as F

        levels = self._backbone.features(images, self.params.layers, self.params.batch_size)
        return torch.cat([F.normalize(level.mean((2, 3)), dim=1) for level in levels], dim=1)


def mean_distance(point: "torch.Tensor", bank: "torch.Tensor", norms: "torch.Tensor", k: int) -> float:
    """Mean Euclidean distance of a point (D,) to its k nearest entries of the bank (N, D), whose squares are `norms`.

    The entries are found by the expanded square, which cancels; their distances are then taken from the differences.
    """
    import torch

    found = torch.addmv(norms, bank, point, alpha=-2).topk(min(k, len(bank)), largest=False).indices
    return float(torch.linalg.vector_norm((bank[found] - point).double(), dim=1).mean())
