"""PatchCore: distance of patch features to a coreset of normal ones, in bounded memory."""

import functools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, Field

from anomed import backbones, console, plugins
from anomed.detect import Detector
from anomed.errors import AnomedError
from anomed.patches import Upsampling, joined, paint
from anomed.settings import Settings

if TYPE_CHECKING:
    import torch

BANK_ROWS = 16_384  # bank rows compared at once: bounds the distance matrix, fixed so that results never vary
KEPT_MB = 64  # features of the train images no larger than this stay in memory; larger ones are computed again
BASE_MB = 2000  # a job beside what max_memory_mb bounds: libraries, network, forward passes, blocks of distances


class Sizes(NamedTuple):
    """What a fit handles: patches of an image and in all, dimensions of a feature and of a point (a feature
    projected), entries of the bank; points of a chunk, and candidates that all chunks give, each its share."""

    per_image: int
    total: int
    dims: int
    width: int
    bank: int
    chunk: int
    candidates: int


@plugins.register("methods", "patchcore")
class PatchCore(Detector):
    """PatchCore (Roth et al., "Towards total recall in industrial anomaly detection", CVPR 2022, arXiv 2106.08265).

    Patch features: outputs of `layers`, each averaged over 3 x 3 neighbours (zero padding counted), resized
    bilinearly to the grid of the first layer and concatenated. Memory bank: a greedy k-center coreset of all train
    patches (the paper's algorithm 1), chosen on randomly projected features. Map: distance of each patch to the
    nearest bank entry, upsampled to the image size, then smoothed by a Gaussian. Image score: equation 7 of the paper,
    (1 - softmax weight) times the distance s* of the most distant patch to its nearest entry m*, the softmax running
    over the distances of that patch to the `n_neighbors` bank entries nearest to m*, m* included (as in anomalib; the
    authors' released code leaves the weight out). With one neighbour, or one bank entry, the score is s*. Scores and
    maps are raw distances, float32.

    Memory is bounded: the bank is chosen from points, features projected to `projection_dims`, and the features of the
    chosen patches are computed a second time at the end. Where max_memory_mb holds all points, the choice is algorithm
    1 as it stands. Elsewhere half of it holds candidates, of which every chunk of images gives its share, no fewer than
    the bank has entries, by the same greedy choice, and the bank is chosen from the candidates (the two rounds of
    Malkomes et al., "Fast distributed k-center clustering with outliers on massive data", NeurIPS 2015, whose radius
    is at most four times the best one; one round alone guarantees twice).
    """

    gpu = True
    memory_mb = 4000

    class Params(Settings):
        """The keys of the block.

        backbone, layers: network and its stages; the first layer sets the patch grid. weights: pretrained ones, or
        random ones drawn from the seed (a smoke test). coreset_ratio, coreset_max: the bank holds
        max(1, min(int(ratio x patches), coreset_max)) entries. projection_dims: dimensions of the Gaussian random
        projection used to choose the coreset; features with no more dimensions than that are not projected.
        n_neighbors: b of equation 7. upsampling: of patch scores to the image, bilinear as in the paper or nearest as
        in anomalib. smoothing_sigma: of the map's Gaussian, in pixels of the image; 0 for none. batch_size: images per
        forward pass. torch_threads: CPU threads. max_memory_mb: of the points that the coreset is chosen from (on the
        GPU, where there is one), and of the bank; where it does not hold all points, the choice takes two rounds.
        """

        backbone: Annotated[str, AfterValidator(backbones.known)] = "tf_efficientnet_lite0"
        weights: Literal["pretrained", "random"] = "pretrained"
        layers: list[str] = Field(default=["blocks.2", "blocks.4"], min_length=1)
        coreset_ratio: float = Field(default=0.1, gt=0, le=1)
        coreset_max: int = Field(default=10_000, ge=1)
        projection_dims: int = Field(default=64, ge=1)
        n_neighbors: int = Field(default=9, ge=1)
        upsampling: Upsampling = "bilinear"
        smoothing_sigma: float = Field(default=4.0, ge=0)
        batch_size: int = Field(default=8, ge=1, le=1024)
        torch_threads: int = Field(default=1, ge=1, le=1024)
        max_memory_mb: int = Field(default=2000, ge=1)

    bank: "torch.Tensor"  # float32 (M, D), on the device

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
        """Fill the memory bank. Raises AnomedError when max_memory_mb is too little for the bank or to choose it."""
        import torch

        sizes = self._sizes(images)
        generator = np.random.default_rng(self.seed)
        matrix = projection(sizes.dims, sizes.width, generator)
        pool = torch.empty((sizes.candidates + sizes.chunk, sizes.width), device=self.device)
        numbers = np.empty(len(pool), np.int64)  # which patch each point is
        kept: dict[int, torch.Tensor] = {}
        held = end = seen = 0  # the pool begins with the candidates; the points of the chunk come behind them
        for batch in console.track(range(-(-len(images) // self.params.batch_size)), "patchcore: features"):
            patches = self._batch(images, batch)
            if sizes.total * sizes.dims * 4 <= KEPT_MB * 2**20:
                kept[batch] = patches.cpu()
            new = slice(end, end + len(patches))
            pool[new] = patches if matrix is None else patches @ matrix.to(self.device)
            numbers[new] = np.arange(seen, seen + len(patches))
            end, seen = new.stop, seen + len(patches)
            if end - held >= sizes.chunk or seen == sizes.total:
                share = sizes.candidates * seen // sizes.total - held
                held = end = held + reduce(pool[held:end], numbers[held:end], share, generator)
        reduce(pool[:held], numbers[:held], sizes.bank, generator)
        del pool
        self.restore({"bank": self._features(images, numbers[: sizes.bank], sizes, kept)})

    def state(self) -> dict[str, np.ndarray]:
        """The memory bank: "bank", float32 (M, D)."""
        return {"bank": self.bank.cpu().numpy()}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the memory bank."""
        import torch

        self.bank = torch.from_numpy(np.ascontiguousarray(state["bank"])).to(self.device)

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See Detector.score. Maps at the image size."""
        height, width = images.shape[1:3]
        for start in range(0, len(images), self.params.batch_size):
            batch = self._patches(images[start : start + self.params.batch_size])
            grid = batch.shape[1:3]
            scores = np.empty(len(batch))
            maps = np.empty((len(batch), height, width), np.float32)
            # One image at a time: equal shapes in every product, whatever the batch.
            for i, patches in enumerate(batch.reshape(len(batch), -1, batch.shape[-1])):
                distances, entries = nearest(patches, self.bank)
                scores[i] = image_score(patches, distances, entries, self.bank, self.params.n_neighbors)
                sigma, upsampling = self.params.smoothing_sigma, self.params.upsampling
                maps[i] = paint(distances.reshape(grid), height, width, sigma, upsampling)
            yield scores, maps

    def _patches(self, images: np.ndarray) -> "torch.Tensor":
        """Locally aware patch features of at most batch_size images: float32 (B, h, w, D)."""
        import torch.nn.functional as F

        levels = self._backbone.features(images, self.params.layers, self.params.batch_size)
        return joined([F.avg_pool2d(level, kernel_size=3, stride=1, padding=1) for level in levels], "bilinear")

    def _batch(self, images: np.ndarray, batch: int) -> "torch.Tensor":
        """Features of the patches of one batch of `images`: float32 (patches, D)."""
        start = batch * self.params.batch_size
        return self._patches(images[start : start + self.params.batch_size]).flatten(0, 2)

    def _features(
        self, images: np.ndarray, numbers: np.ndarray, sizes: Sizes, kept: "dict[int, torch.Tensor]"
    ) -> np.ndarray:
        """Features of the patches numbered `numbers`, (M,): float32 (M, D). kept: features by batch, where there."""
        found = np.empty((len(numbers), sizes.dims), np.float32)
        batches, within = np.divmod(numbers, self.params.batch_size * sizes.per_image)
        for batch in console.track(np.unique(batches).tolist(), "patchcore: bank"):
            rows = np.flatnonzero(batches == batch)
            patches = kept[batch] if batch in kept else self._batch(images, batch)
            found[rows] = patches[within[rows]].cpu().numpy()
        return found

    def _sizes(self, images: np.ndarray) -> Sizes:
        """What the fit will handle, printed before anything large is allocated.

        Raises AnomedError when max_memory_mb holds neither all points nor two rounds, or not the bank.
        """
        params, (height, width, dims) = self.params, self._patches(images[:1]).shape[1:]
        per_image, point = height * width, min(dims, params.projection_dims)
        total, batch = len(images) * per_image, params.batch_size * per_image
        bank = max(1, min(int(total * params.coreset_ratio), params.coreset_max))
        row = (point + 3) * 4 + 8  # a point, its norm, its running minimum, one temporary; its number
        rows = params.max_memory_mb * 2**20 // row
        # A chunk is as large as the share of it that becomes candidates, candidates / total, makes it give `bank`.
        least = min(total, 2 * (math.isqrt(bank * total) + batch))
        needed = math.ceil(max(least * row, bank * dims * 4) / 2**20)
        what = f"patchcore: {len(images)} images of {per_image} patches, a bank of {bank}"
        if rows < least or needed > params.max_memory_mb:
            raise AnomedError(
                f"{what}: it needs {needed} MB at least, more than max_memory_mb = {params.max_memory_mb}; raise "
                "max_memory_mb if the machine has it, or lower coreset_max or batch_size"
            )
        chunk, candidates, how = 0, total, "at once"
        if rows < total:
            candidates = rows // 2
            chunk = -(-bank * total // (candidates * batch)) * batch
            how = f"in {-(-total // chunk)} chunks, from {candidates} candidates of them"
        print(f"{what}: {total} points of {total * row / 2**20:.0f} MB, chosen {how}", file=sys.stderr)
        return Sizes(per_image, total, dims, point, bank, chunk, candidates)


def projection(dims: int, width: int, generator: np.random.Generator) -> "torch.Tensor | None":
    """A Gaussian random projection, float32 (dims, width), that keeps distances on average; None where it keeps all."""
    import torch

    if width >= dims:
        return None
    return torch.from_numpy((generator.standard_normal((dims, width)) / np.sqrt(width)).astype(np.float32))


def reduce(points: "torch.Tensor", numbers: np.ndarray, count: int, generator: np.random.Generator) -> int:
    """Bring `count` of the points and their numbers to the front, in the order in which the greedy choice from a random
    start takes them; all of them stay as they are. Gives back `count`."""
    if count < len(points):
        chosen = k_center_greedy(points, count, start=int(generator.integers(len(points))))
        points[:count] = points[chosen]
        numbers[:count] = numbers[chosen.cpu().numpy()]
    return count


def k_center_greedy(points: "torch.Tensor", count: int, start: int) -> "torch.Tensor":
    """Greedy k-center selection: from `start`, repeatedly the point farthest from all chosen ones.

    points: float32 (N, d), 1 <= count <= N. Returns int64 (count,) different indices in the order chosen; ties go to
    the lowest index. O(N) memory beside the points, O(count x N x d) time (Sener & Savarese 2018, arXiv 1708.00489).
    """
    import torch

    norms = torch.linalg.vector_norm(points, dim=1).square_()
    closest, squared = torch.full_like(norms, torch.inf), torch.empty_like(norms)
    chosen = torch.empty(count, dtype=torch.int64, device=points.device)
    index = torch.tensor(start, device=points.device)
    for step in console.track(range(count), "patchcore: coreset"):
        chosen[step] = index
        torch.addmv(norms, points, points[index], alpha=-2, out=squared).add_(norms[index])
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
