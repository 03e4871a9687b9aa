"""PatchCore: distance of patch features to a coreset of normal ones."""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import AfterValidator, Field

from anomed import backbones, console, plugins
from anomed.detect import Detector
from anomed.errors import AnomedError
from anomed.settings import Settings

if TYPE_CHECKING:
    import torch

BANK_ROWS = 16_384  # bank rows compared at once: bounds the distance matrix, fixed so that results never vary


@plugins.register("methods", "patchcore")
class PatchCore(Detector):
    """PatchCore (Roth et al., "Towards total recall in industrial anomaly detection", CVPR 2022, arXiv 2106.08265).

    Patch features: outputs of `layers`, each averaged over 3 x 3 neighbours (zero padding counted), resized
    bilinearly to the grid of the first layer and concatenated. Memory bank: a greedy k-center coreset of all train
    patches (the paper's algorithm 1), chosen on randomly projected features. Map: distance of each patch to the
    nearest bank entry, upsampled bilinearly to the image size, then smoothed by a Gaussian. Image score: equation 7
    of the paper, (1 - softmax weight) times the distance s* of the most distant patch to its nearest entry m*, the
    softmax running over the distances of that patch to the `n_neighbors` bank entries nearest to m*, m* included
    (as in anomalib; the authors' released code leaves the weight out). With one neighbour, or one bank entry, the
    score is s*. Scores and maps are raw distances, float32.
    """

    gpu = True
    memory_mb = 3000

    class Params(Settings):
        """The keys of the block.

        backbone, layers: network and its stages; the first layer sets the patch grid. coreset_ratio, coreset_max: the
        bank holds max(1, min(int(ratio x patches), coreset_max)) entries. projection_dims: dimensions of the Gaussian
        random projection used to choose the coreset; features with no more dimensions than that are not projected.
        n_neighbors: b of equation 7. smoothing_sigma: of the map's Gaussian, in pixels of the image; 0 for none.
        batch_size: images per forward pass. torch_threads: CPU threads. max_memory_mb: fit refuses to start when
        features would need more.
        """

        backbone: Annotated[str, AfterValidator(backbones.known)] = "tf_efficientnet_lite0"
        layers: list[str] = Field(default=["blocks.2", "blocks.4"], min_length=1)
        coreset_ratio: float = Field(default=0.1, gt=0, le=1)
        coreset_max: int = Field(default=10_000, ge=1)
        projection_dims: int = Field(default=64, ge=1)
        n_neighbors: int = Field(default=9, ge=1)
        smoothing_sigma: float = Field(default=4.0, ge=0)
        batch_size: int = Field(default=8, ge=1)
        torch_threads: int = Field(default=1, ge=1)
        max_memory_mb: int = Field(default=2000, ge=1)

    bank: "torch.Tensor"  # float32 (M, D), on the device

    @classmethod
    def files(cls, params: Params) -> dict[str, Path]:
        """The backbone's weights."""
        return {params.backbone: backbones.weights_path(params.backbone)}

    @functools.cached_property
    def _backbone(self) -> backbones.Backbone:
        backbones.configure(self.params.torch_threads)
        return backbones.load(self.params.backbone, self.device)

    def fit(self, images: np.ndarray) -> None:
        """Fill the memory bank. Raises AnomedError when the features would need more than max_memory_mb."""
        import torch

        generator = np.random.default_rng(self.seed)
        grid_h, grid_w, dims = self._patches(images[:1]).shape[1:]
        per_image = grid_h * grid_w
        total, projected = len(images) * per_image, self.params.projection_dims
        self._check_memory(len(images), per_image, dims + (projected if projected < dims else 0))
        features = np.empty((total, dims), np.float32)
        for start in console.track(range(0, len(images), self.params.batch_size), "patchcore: features"):
            patches = self._patches(images[start : start + self.params.batch_size]).reshape(-1, dims)
            features[start * per_image : start * per_image + len(patches)] = patches.cpu().numpy()
        points = torch.from_numpy(features)
        if projected < dims:
            matrix = generator.standard_normal((dims, projected)) / np.sqrt(projected)
            points = points @ torch.from_numpy(matrix.astype(np.float32))
        count = max(1, min(int(total * self.params.coreset_ratio), self.params.coreset_max))
        chosen = k_center_greedy(points.to(self.device), count, start=int(generator.integers(total)))
        self.restore({"bank": features[chosen.cpu().numpy()]})

    def state(self) -> dict[str, np.ndarray]:
        """The memory bank: "bank", float32 (M, D)."""
        return {"bank": self.bank.cpu().numpy()}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the memory bank."""
        import torch

        self.bank = torch.from_numpy(np.ascontiguousarray(state["bank"])).to(self.device)

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See Detector.score. Maps at the image size."""
        import torch

        height, width = images.shape[1:3]
        for start in range(0, len(images), self.params.batch_size):
            batch = self._patches(images[start : start + self.params.batch_size])
            grid = batch.shape[1:3]
            spread_h, spread_w = (
                torch.from_numpy(spread(cells, size, self.params.smoothing_sigma))
                for cells, size in zip(grid, (height, width), strict=True)
            )
            scores = np.empty(len(batch))
            maps = np.empty((len(batch), height, width), np.float32)
            # One image at a time: equal shapes in every product, whatever the batch.
            for i, patches in enumerate(batch.reshape(len(batch), -1, batch.shape[-1])):
                distances, entries = nearest(patches, self.bank)
                scores[i] = image_score(patches, distances, entries, self.bank, self.params.n_neighbors)
                maps[i] = (spread_h @ distances.cpu().reshape(grid) @ spread_w.T).numpy()
            yield scores, maps

    def _patches(self, images: np.ndarray) -> "torch.Tensor":
        """Locally aware patch features of at most batch_size images: float32 (B, h, w, D)."""
        import torch
        import torch.nn.functional as F

        levels = self._backbone.features(images, self.params.layers, self.params.batch_size)
        levels = [F.avg_pool2d(level, kernel_size=3, stride=1, padding=1) for level in levels]
        grid = levels[0].shape[-2:]
        levels = levels[:1] + [F.interpolate(level, size=grid, mode="bilinear") for level in levels[1:]]
        return torch.cat(levels, dim=1).permute(0, 2, 3, 1).contiguous()

    def _check_memory(self, images: int, per_image: int, dims: int) -> None:
        """Print what the features will need, before anything is allocated; refuse more than max_memory_mb."""
        needed = images * per_image * (dims + 3) * 4 / 2**20  # + 3: norms, running minima and one temporary
        what = f"patchcore: {images} images of {per_image} patches need {needed:.0f} MB for their features"
        print(what, file=sys.stderr)
        if needed > self.params.max_memory_mb:
            raise AnomedError(
                f"{what}, more than max_memory_mb = {self.params.max_memory_mb}; raise max_memory_mb if the machine "
                "has it, or choose later `layers` (a coarser patch grid) or a smaller `size` of the domain"
            )


def k_center_greedy(points: "torch.Tensor", count: int, start: int) -> "torch.Tensor":
    """Greedy k-center selection: from `start`, repeatedly the point farthest from all chosen ones.

    points: float32 (N, d), 1 <= count <= N. Returns int64 (count,) different indices in the order chosen; ties go to
    the lowest index. O(N) memory beside the points, O(count x N x d) time (Sener & Savarese 2018, arXiv 1708.00489).
    """
    import torch

    norms = torch.linalg.vector_norm(points, dim=1).square_()
    closest = torch.full_like(norms, torch.inf)
    chosen = torch.empty(count, dtype=torch.int64, device=points.device)
    index = torch.tensor(start, device=points.device)
    for step in console.track(range(count), "patchcore: coreset"):
        chosen[step] = index
        squared = torch.addmv(norms, points, points[index], alpha=-2).add_(norms[index])
        torch.minimum(closest, squared, out=closest)
        closest[index] = -torch.inf  # never chosen twice, although rounding may leave it above a duplicate
        index = closest.argmax()
    return chosen


def nearest(patches: "torch.Tensor", bank: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """Euclidean distance of each patch (P, D) to its nearest bank entry (M, D), and that entry's index; both (P,).

    The entry is found by the expanded square, which cancels; its distance is then taken from the difference itself,
    never negative under the root and exactly 0 for an equal vector.
    """
    import torch

    best = torch.full((len(patches),), torch.inf, device=patches.device)
    entries = torch.zeros(len(patches), dtype=torch.int64, device=patches.device)
    for start in range(0, len(bank), BANK_ROWS):
        rows = bank[start : start + BANK_ROWS]
        value, index = torch.addmm(rows.square().sum(1), patches, rows.T, alpha=-2).min(dim=1)
        closer = value < best
        best = torch.where(closer, value, best)
        entries = torch.where(closer, index + start, entries)
    return torch.linalg.vector_norm(patches - bank[entries], dim=1), entries


def image_score(
    patches: "torch.Tensor", distances: "torch.Tensor", entries: "torch.Tensor", bank: "torch.Tensor", neighbours: int
) -> float:
    """Equation 7 for one image: patches (P, D), their `nearest` distances and entries (P,), bank (M, D)."""
    import torch

    worst = distances.argmax()
    star = entries[worst]
    count = min(neighbours, len(bank))
    if count == 1:
        return float(distances[worst])
    around = torch.linalg.vector_norm(bank - bank[star], dim=1)
    around[star] = -1  # m* comes first among its own neighbours, before any duplicate of it
    support = bank[around.topk(count, largest=False).indices]
    weights = torch.linalg.vector_norm(support - patches[worst], dim=1).double().softmax(0)
    return float((1 - weights[0]) * distances[worst])


@functools.cache
def spread(cells: int, size: int, sigma: float) -> np.ndarray:
    """The linear map from a row of `cells` patch scores to `size` pixels: float32 (size, cells).

    Bilinear upsampling with half-pixel centres, then a Gaussian cut at 4 sigma with mirrored edges (the kernel of
    anomalib: 2 x int(4 sigma + 0.5) + 1 taps, normalised). A map is spread_h @ scores @ spread_w.T: plain products,
    the same on every device. anomalib repeats the nearest patch instead of interpolating; the paper interpolates.
    """
    centres = np.clip((np.arange(size) + 0.5) * cells / size - 0.5, 0, cells - 1)
    lower = np.minimum(centres.astype(int), max(cells - 2, 0))
    upsample = np.zeros((size, cells))
    upsample[np.arange(size), lower] += 1 - (centres - lower)
    upsample[np.arange(size), np.minimum(lower + 1, cells - 1)] += centres - lower
    radius = int(4 * sigma + 0.5)
    if radius == 0:
        return upsample.astype(np.float32)
    offsets = np.arange(-radius, radius + 1)
    kernel = np.exp(-0.5 * (offsets / sigma) ** 2)
    kernel /= kernel.sum()
    period = max(2 * size - 2, 1)
    pixels = (np.arange(size)[:, None] + offsets) % period
    pixels = np.where(pixels < size, pixels, period - pixels)
    blur = np.zeros((size, size))
    np.add.at(blur, (np.arange(size)[:, None], pixels), np.broadcast_to(kernel, pixels.shape))
    return (blur @ upsample).astype(np.float32)
