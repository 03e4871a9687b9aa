"""Supervised upper bound: what frozen features reach when the labels of the valid images may be learned from."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from pydantic import AfterValidator, Field

from anomed import backbones, console, patches, plugins
from anomed.detect import Detector
from anomed.errors import AnomedError
from anomed.settings import Settings

if TYPE_CHECKING:
    import torch

CHUNK = 65_536  # rows taken to float64 at once
STEPS = 1000
SETTLED = 1e-5  # largest entry of the gradient at the solution


class Head(NamedTuple):
    """A linear function of raw features: weight, float64 (D,), and bias, float64 (1,); its value is a logit."""

    weight: "torch.Tensor"
    bias: "torch.Tensor"

    def __call__(self, features: "torch.Tensor") -> "torch.Tensor":
        return features.double() @ self.weight + self.bias


@plugins.register("methods", "supervised")
class Supervised(Detector):
    """Logistic regression on a frozen backbone, fitted on the labelled valid images; train images are not used.

    It breaks the rule of the benchmark on purpose: a reader sees what the features would give if somebody had labels,
    and the table marks the row as not comparable. Patch features: outputs of `layers`, resized bilinearly to the grid
    of the first and concatenated; an image's are the largest value of each over all patches, for a lesion is small and
    a mean would hide it. The image head learns from the images' labels and gives the score. The patch head learns the
    share of lesion in each patch, where a valid image's pixel truth is known, and gives the map; where no valid mask
    marks a lesion, the map is the image head's value at each patch (after the class activation map of Zhou et al., CVPR
    2016, arXiv 1512.04150). Both classes weigh the same in either head. Scores and maps are logits.
    """

    deterministic = True
    gpu = True
    memory_mb = 4000

    class Params(Settings):
        """backbone, layers: network and its stages; the first layer sets the patch grid. l2: weight of the penalty on
        the squared weights, see `logistic`. batch_size: images per forward pass.
        torch_threads: CPU threads. weights: pretrained, or random (a smoke test that needs no weight file)."""

        backbone: Annotated[str, AfterValidator(backbones.known)] = "tf_efficientnet_lite0"
        layers: list[str] = Field(default=["blocks.2", "blocks.4"], min_length=1)
        l2: float = Field(default=0.1, gt=0)
        batch_size: int = Field(default=8, ge=1, le=1024)
        torch_threads: int = Field(default=1, ge=1, le=1024)
        weights: Literal["pretrained", "random"] = "pretrained"

    image_head: Head
    patch_head: Head

    @classmethod
    def files(cls, params: Params) -> dict[str, Path]:
        """The backbone's weights."""
        return backbones.files(params.backbone, params.weights)

    @classmethod
    def mark(cls, params: Params) -> str:
        """No detector of the table sees these labels; random weights are told as well."""
        marks = ["not comparable: trained on the labelled valid images", super().mark(params)]
        return "; ".join(filter(None, marks))

    @classmethod
    def labels(cls, params: Params) -> str:
        """See Detector.labels."""
        return "valid"

    @functools.cached_property
    def _backbone(self) -> backbones.Backbone:
        return backbones.frozen(self.params, self.device)

    def fit(self, images: np.ndarray) -> None:
        """Fit both heads on `self.labelled`; `images` (train) are left alone. Holds the patch features of the valid
        images with pixel truth: 4 x D bytes a patch. Raises AnomedError when all valid images have one label."""
        import torch

        valid, size = self.labelled, self.params.batch_size
        found = {"normal": int((valid.labels == 0).sum()), "abnormal": int((valid.labels == 1).sum())}
        if not all(found.values()):
            raise AnomedError(
                f"supervised: found {found['normal']} normal and {found['abnormal']} abnormal valid images, expected "
                "both; put labelled images of both into valid, or leave the method out of run.systems"
            )
        pooled, marked, shares = [], [], []
        for start in console.track(range(0, len(valid.images), size), "supervised: features"):
            batch = self._patches(valid.images[start : start + size]).cpu()
            pooled.append(batch.amax((1, 2)))
            for index, cells in enumerate(batch, start):
                mask = valid.mask(index)
                if mask is not None:
                    marked.append(cells.flatten(0, 1))
                    shares.append(lesion_share(mask, *cells.shape[:2]).flatten())
        self.image_head = self.patch_head = logistic(
            torch.cat(pooled), torch.from_numpy(valid.labels.astype(np.float64)), self.params.l2
        )
        if any(share.any() for share in shares):
            self.patch_head = logistic(torch.cat(marked), torch.cat(shares), self.params.l2)

    def state(self) -> dict[str, np.ndarray]:
        """ "image_weight" and "patch_weight", float64 (D,), with "image_bias" and "patch_bias", float64 (1,)."""
        heads = {"image": self.image_head, "patch": self.patch_head}
        return {f"{name}_{part}": getattr(head, part).numpy() for name, head in heads.items() for part in Head._fields}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back both heads."""
        import torch

        self.image_head, self.patch_head = (
            Head(*(torch.from_numpy(np.array(state[f"{name}_{part}"])) for part in Head._fields))
            for name in ("image", "patch")
        )

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See Detector.score. Maps at the grid of the first layer."""
        for start in range(0, len(images), self.params.batch_size):
            batch = self._patches(images[start : start + self.params.batch_size]).cpu()
            # One image at a time: equal shapes in every product, whatever the batch.
            scores = [float(self.image_head(cells.amax((0, 1)))) for cells in batch]
            maps = [self.patch_head(cells).numpy().astype(np.float32) for cells in batch]
            yield np.array(scores), np.stack(maps)

    def _patches(self, images: np.ndarray) -> "torch.Tensor":
        """Patch features of at most batch_size images: float32 (B, h, w, D)."""
        return patches.joined(
            self._backbone.features(images, self.params.layers, self.params.batch_size), upsampling="bilinear"
        )


def lesion_share(mask: np.ndarray, rows: int, columns: int) -> "torch.Tensor":
    """Share of lesion in each patch of a grid laid over the whole image: float64 (rows, columns) in [0, 1].

    mask: bool, H x W, of any size; a pixel that lies in two patches counts in each by the part that lies there.
    """
    import torch  # its products run on the threads that the parameters give, numpy's on those of the machine

    grid = zip(mask.shape, (rows, columns), strict=True)
    down, across = (torch.from_numpy(_overlaps(size, cells)) for size, cells in grid)
    share = down @ torch.from_numpy(np.asarray(mask, np.float64)) @ across.T
    return share.clamp(0, 1)  # rounding may leave the ends


def _overlaps(size: int, cells: int) -> np.ndarray:
    """Which part of each of `cells` equal cells each of `size` pixels covers: float64 (cells, size), rows sum to 1."""
    edges = np.arange(cells + 1) * (size / cells)
    pixels = np.arange(size)
    covered = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return np.clip(covered, 0, None) * (cells / size)


def logistic(features: "torch.Tensor", targets: "torch.Tensor", l2: float) -> Head:
    """Logistic regression of targets in [0, 1], float64 (N,), on features, float32 (N, D); the bias is not penalised.

    Minimises (mean loss of the positive part + mean loss of the negative part) / 2 + l2 / 2 x squared weights, where a
    target t counts as t of a positive and 1 - t of a negative; neither part may be empty. Weights are those of features
    standardised over the N rows (a feature that does not vary is not scaled), given back for raw ones. L-BFGS in
    float64 from zero; the problem is strictly convex in the weights, so it has one solution. Raises AnomedError when
    the gradient does not settle.
    """
    import torch
    import torch.nn.functional as F

    count, dims = features.shape
    mean = sum((part.double().sum(0) for part in features.split(CHUNK)), torch.zeros(dims).double()) / count
    square = sum(((part.double() - mean).square().sum(0) for part in features.split(CHUNK)), torch.zeros(dims).double())
    sd = (square / count).sqrt()
    sd = torch.where(sd > 1e-7 * mean.abs(), sd, 1.0)  # below that it is the rounding of float32
    positive, negative = targets / (2 * targets.sum()), (1 - targets) / (2 * (1 - targets).sum())
    weight = torch.zeros(dims, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weight, bias], max_iter=STEPS, tolerance_grad=SETTLED / 100, tolerance_change=1e-15,
        history_size=20, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def loss() -> torch.Tensor:
        solver.zero_grad()
        total = l2 / 2 * weight.square().sum()
        total.backward()
        for rows, yes, no in zip(*(all_.split(CHUNK) for all_ in (features, positive, negative)), strict=True):
            logits = ((rows.double() - mean) / sd) @ weight + bias
            part = (yes * F.softplus(-logits) + no * F.softplus(logits)).sum()
            part.backward()
            total = total + part
        return total.detach()

    solver.step(loss)
    loss()
    slope = max(float(part.grad.abs().max()) for part in (weight, bias) if part.grad is not None)
    if not slope <= SETTLED:
        raise AnomedError(
            f"supervised: the regression on {count} rows did not settle in {STEPS} steps (gradient {slope:.1e}, "
            f"expected at most {SETTLED:.0e}); raise l2"
        )
    raw = weight.detach() / sd
    return Head(raw, bias.detach() - raw @ mean)
