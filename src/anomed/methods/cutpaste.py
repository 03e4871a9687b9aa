"""CutPaste: a network that tells pasted images from normal ones, and a Gaussian of what it sees in normal ones."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field

from anomed import backbones, feed, nets, plugins, training
from anomed.detect import Detector
from anomed.errors import AnomedError

if TYPE_CHECKING:
    import torch
    from torch import nn

AREA = (0.02, 0.15)  # of the image, which a patch has
ASPECT = (0.3, 1 / 0.3)  # width over height of a patch, 1 between them
SCAR_WIDTH, SCAR_LENGTH = (2, 16), (10, 25)  # pixels of an image of SCAR_SIDE
SCAR_SIDE, SCAR_ANGLE = 256, (-45, 45)  # pixels; degrees
MOMENTUM, WEIGHT_DECAY = 0.9, 3e-5
FLOOR = 1e-9  # least variance in any direction, of embeddings of length 1: constant train images have none


@plugins.register("methods", "cutpaste")
class Cutpaste(Detector):
    """CutPaste, three-way (Li et al., "CutPaste: self-supervised learning for anomaly detection and localization", CVPR
    2021, arXiv 2104.04015); where the paper is silent, as Runinho/pytorch-cutpaste.

    A backbone, pretrained or not, then a perceptron ("head") and a linear classifier of its pooled features learn by
    cross-entropy to tell three versions of every train image apart: itself; one with a rectangle of itself pasted
    elsewhere (CutPaste); one with a thin turned rectangle (CutPaste-Scar). Colours of each image, and again of what is
    pasted, are jittered. SGD with momentum 0.9, weight decay 3e-5, and a rate that falls as a cosine with every batch.
    While the backbone is frozen its batch normalisation is as well, and when it joins, SGD starts without momentum.

    Then a Gaussian of the embeddings, scaled to length 1, of the same train images, unchanged. Image score: Mahalanobis
    distance to it (half its square and a constant are the negative log density of the paper); no map.
    """

    localises = False
    gpu = True
    memory_mb = 4000

    class Params(training.Params):
        """The keys of the block; the others: see training.Params.

        backbone, layers: network, and its stages whose outputs are averaged over positions and concatenated. weights:
        pretrained, or random ones drawn from the seed. head: widths of the perceptron, each with batch normalisation
        and a ReLU. embedding: what the Gaussian is of: "head", the input of the classifier, or "pooled", that of the
        perceptron, as the repository. frozen_steps: of all batches the first, which leave the backbone as it is.
        jitter: largest relative change of brightness, contrast and saturation, and of hue in turns. regularisation:
        variance added to the diagonal of the sample covariance; null for the shrinkage of Ledoit and Wolf (2004), as
        the repository. max_steps is 256 times 256, the paper's 256 "epochs" of 256 batches whatever the images.
        """

        backbone: Annotated[str, AfterValidator(backbones.known)] = "tf_efficientnet_lite0"
        weights: Literal["pretrained", "random"] = "pretrained"
        layers: list[str] = Field(default=["blocks.6"], min_length=1)
        head: list[Annotated[int, Field(ge=1)]] = Field(default=[512, 512, 128], min_length=1)
        embedding: Literal["head", "pooled"] = "pooled"
        frozen_steps: int = Field(default=20, ge=0)
        jitter: float = Field(default=0.1, ge=0, le=0.5)
        regularisation: float | None = Field(default=None, gt=0)
        epochs: int = Field(default=65536, ge=1)
        max_steps: int | None = Field(default=65536, ge=1)
        batch_size: int = Field(default=64, ge=1, le=1024)
        learning_rate: float = Field(default=0.03, gt=0)

    networks: "nn.ModuleDict"
    size: int  # side of the network's input
    backbone: backbones.Backbone  # around networks["backbone"]

    @classmethod
    def files(cls, params: Params) -> dict[str, Path]:
        """The backbone's weights, from which training starts."""
        return backbones.files(params.backbone, params.weights)

    @classmethod
    def needs_mb(cls, params: Params, size: int) -> int:
        """See Detector.needs_mb: mostly for three versions of a batch, measured with EfficientNet-Lite0."""
        return round(1500 + 210 * params.batch_size * ((params.image_size or size) / 224) ** 2)

    def fit(self, images: np.ndarray) -> None:
        """Train on the normal images, then estimate the Gaussian of these alone. Raises AnomedError for a layer that
        the backbone does not have, for frozen_steps that leave no batch, and when the loss is not finite."""
        batches, frozen = feed.batches_of(len(images), self.params.batch_size), self.params.frozen_steps
        total = training.steps_of(self.params, batches)
        if frozen >= total:
            raise AnomedError(
                f"cutpaste: frozen_steps: found {frozen}, expected less than the {total} batches that epochs, "
                f"max_steps and batch_size give for {len(images)} images; lower it, or raise epochs or max_steps"
            )
        self._build(self.params.image_size or images.shape[1], self.params.weights)
        phases = {"all": functools.partial(self._phase, frozen, total, total, batches)}
        if frozen:
            phases = {"head": functools.partial(self._phase, 0, frozen, total, batches), **phases}
        training.run(self, images, phases, lambda: self._estimate(images))

    def state(self) -> dict[str, np.ndarray]:
        """The networks' tensors with the Gaussian, and "input": its side, int64 (1,)."""
        return nets.arrays(self.networks, self.size)

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the networks."""
        self._build(int(state["input"][0]), "random")  # no file is read: every tensor is in the state
        nets.fill(self.networks, state)

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, None]]:
        """See Detector.score. float64."""
        import torch

        gaussian: Any = self.networks["gaussian"]
        for batch, count in feed.batches(images, self.params.batch_size):
            with torch.inference_mode():
                centred = self._embedded(batch).double() - gaussian.mean
                distances = torch.linalg.vector_norm(centred @ gaussian.factor.T, dim=1)
            yield distances[:count].cpu().numpy(), None

    def _build(self, size: int, weights: str) -> None:
        """backbone, head, classifier; gaussian: "mean", float64 (d,), and "factor", float64 (d, d), the inverse of the
        lower Cholesky factor of the covariance."""
        self.size = size
        self.networks = nets.built(self, lambda: self._made(weights))

    def _made(self, weights: str) -> "dict[str, nn.Module]":
        import torch
        from torch import nn

        params = self.params
        self.backbone = backbones.load(params.backbone, self.device, weights, self.seed)
        network: Any = self.backbone.network
        with torch.no_grad():
            width = trim(network, lambda: self._pooled(np.zeros((1, self.size, self.size), np.uint8))).shape[1]
        widths = [width, *params.head]
        head = nn.Sequential()
        for one, other in itertools.pairwise(widths):
            head.extend([nn.Linear(one, other), nn.BatchNorm1d(other), nn.ReLU()])
        dims = width if params.embedding == "pooled" else widths[-1]
        gaussian = nn.Module()
        gaussian.register_buffer("mean", torch.zeros(dims, dtype=torch.float64))
        gaussian.register_buffer("factor", torch.eye(dims, dtype=torch.float64))
        network.requires_grad_(True)
        return {"backbone": network, "head": head, "classifier": nn.Linear(widths[-1], 3), "gaussian": gaussian}

    def _pooled(self, images: np.ndarray) -> "torch.Tensor":
        """Features of images, uint8 (B, S, S (, 3)), averaged over positions: (B, width)."""
        import torch

        values = feed.pixels(images, 3, self.size, self.device) * 255
        return torch.cat([level.mean((2, 3)) for level in self.backbone.maps(values, self.params.layers)], dim=1)

    def _embedded(self, images: np.ndarray) -> "torch.Tensor":
        """Embeddings of images as they are: float32 (B, d), of length 1."""
        import torch.nn.functional as F

        values = self._pooled(images)
        return F.normalize(values if self.params.embedding == "pooled" else self.networks["head"](values), dim=1)

    def _phase(self, start: int, end: int, total: int, batches: int) -> training.Phase:
        """The batches of a training from `start` to `end` of `total`; `batches` are one pass over the images."""
        import torch
        import torch.nn.functional as F

        params, networks = self.params, self.networks
        trained = [*["backbone"] * (end == total), "head", "classifier"]
        values = [value for key in trained for value in networks[key].parameters()]
        sgd = torch.optim.SGD(values, lr=params.learning_rate, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)

        def rate(number: int) -> float:
            return 0.5 * (1 + math.cos(math.pi * (start + number) / total))

        def step(images: np.ndarray, at: training.Step) -> training.Losses:
            for group in sgd.param_groups:  # by the batch: a "phase" may be shorter than a pass over the images
                group["lr"] = params.learning_rate * rate(at.number)
            with torch.set_grad_enabled("backbone" in trained):
                pooled = self._pooled(versions(images, at.rng, params.jitter))
            logits = networks["classifier"](networks["head"](pooled))
            truth = torch.arange(3, device=self.device).repeat_interleave(len(images))
            yield "classification", F.cross_entropy(logits, truth)

        length, modules = end - start, [networks[key] for key in trained]
        return training.Phase(
            modules, {"classification": sgd}, step, length, length, lambda epoch: rate(epoch * batches)
        )

    def _estimate(self, images: np.ndarray) -> None:
        """The Gaussian of train images, uint8 (N, S, S (, 3)). Some 20 N d bytes are needed meanwhile."""
        import torch

        parts = []
        for batch, count in feed.batches(images, self.params.batch_size):
            with torch.inference_mode():
                parts.append(self._embedded(batch)[:count].cpu().numpy())
        mean, covariance = moments(np.concatenate(parts), self.params.regularisation)
        lower = torch.linalg.cholesky(torch.from_numpy(covariance))
        factor = torch.linalg.solve_triangular(lower, torch.eye(len(lower), dtype=torch.float64), upper=False)
        gaussian: Any = self.networks["gaussian"]
        gaussian.mean.copy_(torch.from_numpy(mean))
        gaussian.factor.copy_(factor)


def moments(embeddings: np.ndarray, regularisation: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and regularised covariance of embeddings (N, d): float64 (d,) and (d, d), positive definite.

    regularisation: added to the diagonal of the sample covariance (over N); None: that covariance shrunk towards the
    multiple of the identity of the same trace, as much as Ledoit and Wolf (J. Multivariate Analysis 2004) find best.
    """
    mean = embeddings.mean(axis=0, dtype=np.float64)
    centred = embeddings - mean
    count, dims = centred.shape
    covariance = centred.T @ centred / count
    if regularisation is not None:
        return mean, covariance + (regularisation + FLOOR) * np.eye(dims)
    level = np.trace(covariance) / dims
    square = (covariance**2).sum()
    spread = square / dims - level**2  # of the covariance about its target
    error = ((centred**2).sum(axis=1) @ (centred**2).sum(axis=1) / count - square) / (count * dims)  # of estimating it
    shrinkage = 1.0 if error >= spread else max(error / spread, 0.0)
    return mean, (1 - shrinkage) * covariance + (shrinkage * level + FLOOR) * np.eye(dims)


def trim(network: "nn.Module", run: "Callable[[], torch.Tensor]") -> "torch.Tensor":
    """What `run` gives; the parts of `network` that it did not reach, such as its own classifier, are taken out."""
    from torch import nn

    used: set[Any] = set()
    hooks = [part.register_forward_pre_hook(lambda part, given: used.add(part)) for part in network.modules()]
    result = run()
    for hook in hooks:
        hook.remove()
    for parent in [network, *(part for part in network.children() if isinstance(part, nn.Sequential))]:
        for name, part in list(parent.named_children()):
            if used.isdisjoint(part.modules()):
                setattr(parent, name, nn.Identity())
    return result


def versions(images: np.ndarray, rng: np.random.Generator, jitter: float) -> np.ndarray:
    """Images, uint8 (B, S, S (, 3)), jittered, then with patches, then with scars: uint8 (3 B, S, S (, 3))."""
    normal = [jittered(image, rng, jitter) for image in images]
    patched = [patch(image, rng, jitter) for image in normal]
    return np.stack([*normal, *patched, *(scar(image, rng, jitter) for image in normal)])


def jittered(image: np.ndarray, rng: np.random.Generator, strength: float) -> np.ndarray:
    """An image or a part, uint8 (h, w (, 3)), with brightness, contrast, and saturation times 1 ± strength, and hue
    turned by ± strength, each uniformly."""
    from PIL import Image, ImageEnhance

    picture = Image.fromarray(np.ascontiguousarray(image))
    for kind in [ImageEnhance.Brightness, ImageEnhance.Contrast, *[ImageEnhance.Color] * (image.ndim == 3)]:
        picture = kind(picture).enhance(rng.uniform(1 - strength, 1 + strength))
    if image.ndim == 3:
        hue, *others = picture.convert("HSV").split()
        turned = np.array(hue) + np.uint8(round(256 * rng.uniform(-strength, strength)) % 256)  # a circle: it wraps
        picture = Image.merge("HSV", [Image.fromarray(turned), *others]).convert("RGB")
    return np.array(picture)


def patch(image: np.ndarray, rng: np.random.Generator, jitter: float) -> np.ndarray:
    """A copy of an image, uint8 (S, S (, 3)), with a jittered rectangle of itself pasted anywhere."""
    aspect = rng.uniform(ASPECT[0], 1) if rng.random() < 0.5 else rng.uniform(1, ASPECT[1])
    area = rng.uniform(*AREA) * len(image) ** 2
    width, height = (max(1, round(math.sqrt(value))) for value in (area * aspect, area / aspect))
    piece = jittered(cut(image, height, width, rng), rng, jitter)
    return pasted(image, piece, np.ones((height, width), bool), rng)


def scar(image: np.ndarray, rng: np.random.Generator, jitter: float) -> np.ndarray:
    """A copy of an image, uint8 (S, S (, 3)), with a jittered thin rectangle of itself pasted anywhere, turned."""
    from PIL import Image

    scale = len(image) / SCAR_SIDE
    width, height = (max(2, round(rng.uniform(*span) * scale)) for span in (SCAR_WIDTH, SCAR_LENGTH))
    piece = jittered(cut(image, height, width, rng), rng, jitter)
    angle = rng.uniform(*SCAR_ANGLE)
    turned, inside = (
        np.array(Image.fromarray(part).rotate(angle, expand=True))
        for part in (piece, np.full((height, width), 255, np.uint8))
    )
    return pasted(image, turned, inside > 0, rng)


def cut(image: np.ndarray, height: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """A view of a rectangle anywhere in an image, uniformly."""
    y, x = rng.integers(0, [len(image) - height + 1, image.shape[1] - width + 1])
    return image[y : y + height, x : x + width]


def pasted(image: np.ndarray, piece: np.ndarray, inside: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A copy of an image with `piece` anywhere in it, where `inside`, bool (h, w), is true."""
    copy = image.copy()
    height, width = inside.shape
    cut(copy, height, width, rng)[inside] = piece[inside]
    return copy
