"""PaDiM: Mahalanobis distance of patch features to a Gaussian at every position, from moments summed as images come."""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, Field

from anomed import backbones, console, plugins
from anomed.detect import Detector
from anomed.errors import AnomedError
from anomed.patches import joined, paint
from anomed.settings import Settings

if TYPE_CHECKING:
    import torch

BLOCK = 1 << 22  # matrix entries worked on at once: bounds what is unpacked, fixed so that results never vary
BASE_MB = 2000  # a job beside what max_memory_mb bounds: libraries, network, forward passes, blocks of matrices


class Moments(NamedTuple):
    """Sums over images of features less `shift`, float64: positions P, dimensions d, lower triangles packed.

    The shift, features of one image, keeps cancellation harmless, and makes constant images give exactly no variance.
    """

    shift: "torch.Tensor"  # (P, d)
    first: "torch.Tensor"  # (P, d)
    second: "torch.Tensor"  # (P, d (d + 1) / 2)


@plugins.register("methods", "padim")
class Padim(Detector):
    """PaDiM (Defard et al., "PaDiM: a patch distribution modeling framework for anomaly detection and localization",
    ICPR 2021, arXiv 2011.08785).

    Features: outputs of `layers`, resized to the grid of the first by the nearest neighbour and concatenated;
    `n_features` of their dimensions, drawn by the seed, are kept. At every position of the grid a Gaussian is
    estimated from the train images: mean, and sample covariance plus `regularisation` on its diagonal (one image:
    that alone). Map: Mahalanobis distance at each position, upsampled bilinearly to the image size, then smoothed by a
    Gaussian. Image score: maximum of the map. Scores and maps are raw distances, float32.

    Memory does not grow with the number of images: the moments are summed, in float64. The state holds the inverse of
    each covariance's Cholesky factor, packed: the distance is the length of factor x (features - mean), which rounding
    never makes negative, at half the size of the inverse covariance.
    """

    gpu = True
    memory_mb = 4000

    class Params(Settings):
        """The keys of the block.

        backbone, layers: network and its stages; the first layer sets the grid. weights: pretrained ones, or random
        ones drawn from the seed (a smoke test). n_features: dimensions kept (the paper: 100 for ResNet-18, 550 for
        Wide ResNet-50-2). regularisation: added to the diagonal of every covariance (the paper 0.01, anomalib 0.01001).
        smoothing_sigma: of the map's Gaussian, in pixels of the image; 0 for none. batch_size: images per forward
        pass. torch_threads: CPU threads. max_memory_mb: fit refuses to start when the moments and what is made of
        them need more (on the GPU, where there is one).
        """

        backbone: Annotated[str, AfterValidator(backbones.known)] = "tf_efficientnet_lite0"
        weights: Literal["pretrained", "random"] = "pretrained"
        layers: list[str] = Field(default=["blocks.1", "blocks.2", "blocks.4"], min_length=1)
        n_features: int = Field(default=100, ge=1)
        regularisation: float = Field(default=0.01, gt=0)
        smoothing_sigma: float = Field(default=4.0, ge=0)
        batch_size: int = Field(default=8, ge=1, le=1024)
        torch_threads: int = Field(default=1, ge=1, le=1024)
        max_memory_mb: int = Field(default=2000, ge=1)

    index: np.ndarray  # int64 (d,): the dimensions kept, ascending
    mean: "torch.Tensor"  # float32 (P, d), on the device
    factors: "torch.Tensor"  # float32 (P, d (d + 1) / 2), on the device: lower triangles, row by row

    @classmethod
    def files(cls, params: Params) -> dict[str, Path]:
        """The backbone's weights."""
        return backbones.files(params.backbone, params.weights)

    @classmethod
    def needs_mb(cls, params: Params, size: int) -> int:
        """See Detector.needs_mb."""
        return BASE_MB + params.max_memory_mb

    @functools.cached_property
    def _backbone(self) -> backbones.Backbone:
        return backbones.frozen(self.params, self.device, self.seed)

    def fit(self, images: np.ndarray) -> None:
        """Estimate the Gaussians. Raises AnomedError when the network has fewer dimensions than n_features, or the
        moments would need more than max_memory_mb."""
        levels = self._levels(images[:1])
        self.index = self._draw(sum(level.shape[1] for level in levels))
        height, width = levels[0].shape[-2:]
        self._check_memory(len(images), height, width)
        moments = self._moments(images, height * width, self.params.n_features)
        self.mean = (moments.shift + moments.first / len(images)).float()
        self.factors = self._factors(moments, len(images))

    def state(self) -> dict[str, np.ndarray]:
        """ "index", int64 (d,); "mean", float32 (P, d); "factors", float32 (P, d (d + 1) / 2): row by row the lower
        triangle of the inverse Cholesky factor at each position, positions row by row."""
        return {"index": self.index, "mean": self.mean.cpu().numpy(), "factors": self.factors.cpu().numpy()}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the Gaussians."""
        import torch

        self.index = state["index"]
        self.mean, self.factors = (torch.from_numpy(state[key]).to(self.device) for key in ("mean", "factors"))

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See Detector.score. Maps at the image size."""
        height, width = images.shape[1:3]
        for start in range(0, len(images), self.params.batch_size):
            features = self._embed(images[start : start + self.params.batch_size])
            distances = self._distances(features.flatten(1, 2)).reshape(features.shape[:3])
            sigma = self.params.smoothing_sigma
            maps = np.stack([paint(one, height, width, sigma, "bilinear") for one in distances])
            yield maps.max(axis=(1, 2)), maps

    def _levels(self, images: np.ndarray) -> "list[torch.Tensor]":
        return self._backbone.features(images, self.params.layers, self.params.batch_size)

    def _draw(self, dims: int) -> np.ndarray:
        """Which of `dims` dimensions to keep, drawn by the seed: int64 (n_features,), ascending."""
        params = self.params
        if params.n_features > dims:
            raise AnomedError(
                f"padim: n_features is {params.n_features}, but layers {params.layers} of {params.backbone} have "
                f"{dims} dimensions; lower n_features or add a layer"
            )
        return np.sort(np.random.default_rng(self.seed).choice(dims, params.n_features, replace=False))

    def _embed(self, images: np.ndarray) -> "torch.Tensor":
        """The kept dimensions of the features of at most batch_size images: float32 (B, h, w, d)."""
        levels: list[torch.Tensor] = []
        first = 0
        for level in self._levels(images):
            own = self.index[(first <= self.index) & (self.index < first + level.shape[1])] - first
            if len(own) or not levels:  # the first level gives the grid, whether or not a dimension of it is kept
                levels.append(level[:, own])
            first += level.shape[1]
        return joined(levels, "nearest")

    def _check_memory(self, images: int, height: int, width: int) -> None:
        """Print what the Gaussians will need, before anything is allocated; refuse more than max_memory_mb."""
        dims, limit = self.params.n_features, self.params.max_memory_mb
        # Second moments in float64 and factors in float32, each one triangle; shift and first moments in float64.
        needed = height * width * (12 * dims * (dims + 1) // 2 + 16 * dims) / 2**20
        what = (
            f"padim: {images} images, Gaussians of {dims} dimensions at {height} x {width} positions: {needed:.0f} MB"
        )
        print(what, file=sys.stderr)
        if needed > limit:
            raise AnomedError(
                f"{what}, more than max_memory_mb = {limit}; raise max_memory_mb if the machine has it, lower "
                "n_features or choose later `layers` (a coarser grid)"
            )

    def _moments(self, images: np.ndarray, positions: int, dims: int) -> Moments:
        import torch

        shift = self._embed(images[:1]).reshape(positions, dims).double()
        lower = triangle(dims, self.device)
        moments = Moments(shift, torch.zeros_like(shift), shift.new_zeros(positions, len(lower)))
        for start in console.track(range(0, len(images), self.params.batch_size), "padim: moments"):
            features = self._embed(images[start : start + self.params.batch_size])
            centred = features.flatten(1, 2).transpose(0, 1) - shift[:, None]  # (P, B, d)
            moments.first.add_(centred.sum(1))
            for block in blocks(positions, dims):
                products = centred[block].mT @ centred[block]
                moments.second[block] += products.flatten(1)[:, lower]
        return moments

    def _factors(self, moments: Moments, count: int) -> "torch.Tensor":
        """Inverse Cholesky factors of the covariances of `count` images: float32, packed as in the state."""
        import torch

        positions, dims = moments.shift.shape
        lower = triangle(dims, self.device)
        factors = torch.empty(moments.second.shape, device=self.device)
        identity = torch.eye(dims, dtype=torch.float64, device=self.device)
        for block in console.track(blocks(positions, dims), "padim: factors"):
            mean = moments.first[block] / count
            half = unpack(moments.second[block], lower, dims)
            second = half + half.tril(-1).mT
            covariance = (second - count * mean[:, :, None] * mean[:, None]) / max(count - 1, 1)
            factor = torch.linalg.cholesky(covariance + self.params.regularisation * identity)
            inverse = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=False)
            factors[block] = inverse.flatten(1)[:, lower].float()
        return factors

    def _distances(self, features: "torch.Tensor") -> "torch.Tensor":
        """Mahalanobis distances of features (B, P, d): float32 (B, P). Filled up to batch_size with means: the shape
        of the products never changes, and with it no last bit of an image's distances."""
        import torch

        count, positions, dims = features.shape
        centred = features.new_zeros(positions, dims, self.params.batch_size)
        centred[..., :count] = (features - self.mean).permute(1, 2, 0)
        lower = triangle(dims, self.device)
        found = [
            torch.linalg.vector_norm(unpack(self.factors[block], lower, dims) @ centred[block], dim=1)
            for block in blocks(positions, dims)
        ]
        return torch.cat(found)[:, :count].T


def triangle(dims: int, device: str) -> "torch.Tensor":
    """Where the lower triangle of a dims x dims matrix lies in it, row by row: int64 (dims (dims + 1) / 2,)."""
    import torch

    rows, columns = torch.tril_indices(dims, dims, device=device)
    return rows * dims + columns


def unpack(packed: "torch.Tensor", lower: "torch.Tensor", dims: int) -> "torch.Tensor":
    """Lower triangular matrices (N, dims, dims) from their packed entries (N, dims (dims + 1) / 2)."""
    return packed.new_zeros(len(packed), dims * dims).index_copy_(1, lower, packed).reshape(-1, dims, dims)


def blocks(positions: int, dims: int) -> list[slice]:
    """Consecutive positions, so many that their matrices have BLOCK entries at most, or one."""
    step = max(1, BLOCK // dims**2)
    return [slice(start, min(start + step, positions)) for start in range(0, positions, step)]
