"""Variational autoencoder: what is unlikely under a model of normal images, or what such a model removes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from anomed import feed, nets, plugins, training
from anomed.detect import Detector

if TYPE_CHECKING:
    import torch
    from torch import nn


@plugins.register("methods", "vae")
class Vae(Detector):
    """Variational autoencoder (Kingma & Welling, arXiv 1312.6114) on MONAI's VarAutoEncoder, scored by its bound or by
    restoration (You et al., "Unsupervised lesion detection via image restoration with a normative prior", MIDL 2019;
    Chen, You, Tezcan & Konukoglu, MedIA 2020, arXiv 2005.00031).

    Negative evidence lower bound of an image x, pixels in [0, 1]: sum of (x - decoded)^2 / 2, a Gaussian likelihood of
    variance 1 without its constant, plus beta times the divergence of the posterior from N(0, I). The loss is its mean
    over the batch, with z drawn from the posterior; score "elbo" is its value at the mean of the posterior, and nothing
    is drawn. Both are divided by the number of pixels and channels, which changes no minimum and no ranking. Map:
    squared error at each pixel of the network's input, mean over channels.

    Score "restoration": `restoration_steps` times x grows by `restoration_rate` times the gradient of
    -(bound above, not divided) - `restoration_weight` * TV(x - image), from x = image, where TV is the sum of absolute
    differences of vertical and horizontal neighbours. Map: |image - x|, mean over channels; score: mean of the map.
    The published code draws z in each step and leaves pixels outside a brain mask alone; here z is the mean of the
    posterior, so that an image has one score, and there is no mask.
    """

    gpu = True
    memory_mb = 4000

    class Params(training.Params):
        """channels: feature maps after each halving of the side. latent_size: numbers that describe an image. beta:
        weight of the divergence; up to a factor this is the bound of a likelihood of variance beta, so 0.04 supposes
        errors of 0.2 in pixels of [0, 1]. score: see the class. restoration_steps, restoration_rate,
        restoration_weight: of the restoration, which a large rate makes diverge. The others: see training.Params."""

        channels: list[Annotated[int, Field(ge=1)]] = Field(default=[32, 64, 128, 256], min_length=2, max_length=8)
        latent_size: int = Field(default=128, ge=1)
        beta: float = Field(default=0.04, ge=0)
        score: Literal["elbo", "restoration"] = "elbo"
        restoration_steps: int = Field(default=500, ge=1)
        restoration_rate: float = Field(default=5e-3, gt=0)
        restoration_weight: float = Field(default=0.2, ge=0)

    networks: "nn.ModuleDict"
    channels: int  # of the network's input
    size: int  # its side

    def fit(self, images: np.ndarray) -> None:
        """Train on the normal images. Raises AnomedError when the loss is not finite."""
        self._build(feed.channels_of(images), self.params.image_size or images.shape[1])
        training.run(self, images, {"vae": self._phase})

    def state(self) -> dict[str, np.ndarray]:
        """The network's tensors, and "input": its channels and side, int64 (2,)."""
        return nets.arrays(self.networks, self.channels, self.size)

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the network."""
        self._build(*state["input"].tolist())
        nets.fill(self.networks, state)

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See Detector.score. Maps at the size of the network's input."""
        scored = self._restored if self.params.score == "restoration" else self._bounded
        for batch, count in feed.batches(images, self.params.batch_size):
            scores, maps = scored(feed.pixels(batch, self.channels, self.size, self.device))
            yield scores[:count], maps[:count].cpu().numpy()

    def _build(self, channels: int, size: int) -> None:
        self.channels, self.size = channels, size
        self.networks = nets.built(self, lambda: {"vae": network(channels, size, self.params)})

    def _terms(self, values: "torch.Tensor", draw: bool) -> "tuple[torch.Tensor, torch.Tensor]":
        """Squared errors, float32 as `values`, and the divergence of each posterior from N(0, I), float32 (B,).

        draw: decode a draw from the posterior, else its mean. The decoder doubles the side at every level, so what
        exceeds an input that cannot be halved so often is cut off.
        """
        import torch

        vae: Any = self.networks["vae"]
        mean, logarithm = (value.float() for value in vae.encode_forward(values))  # of the variance
        z = mean + (logarithm / 2).exp() * torch.randn_like(mean) if draw else mean
        decoded = vae.decode_forward(z, use_sigmoid=False)[..., : self.size, : self.size].float()
        divergence = (mean.square() + logarithm.exp() - 1 - logarithm).sum(1) / 2
        return (decoded - values).square(), divergence

    def _bound(self, errors: "torch.Tensor", divergence: "torch.Tensor") -> "torch.Tensor":
        """Negative evidence lower bound of each image, float32 (B,)."""
        return errors.sum((1, 2, 3)) / 2 + self.params.beta * divergence

    def _phase(self) -> training.Phase:
        import torch

        def step(images: np.ndarray, at: training.Step) -> training.Losses:
            values = feed.pixels(images, self.channels, self.size, self.device)
            yield "bound", self._bound(*self._terms(values, draw=True)).mean() / values[0].numel()

        vae = self.networks["vae"]
        adam = torch.optim.Adam(vae.parameters(), lr=self.params.learning_rate)
        return training.Phase([vae], {"bound": adam}, step)

    def _bounded(self, values: "torch.Tensor") -> "tuple[np.ndarray, torch.Tensor]":
        """Scores, float64 (B,), and maps, float32 (B, S, S), of the bound."""
        import torch

        with torch.inference_mode():
            errors, divergence = self._terms(values, draw=False)
            bound = self._bound(errors.double(), divergence.double()) / values[0].numel()
        return bound.cpu().numpy(), errors.mean(1)

    def _restored(self, values: "torch.Tensor") -> "tuple[np.ndarray, torch.Tensor]":
        """Scores, float64 (B,), and maps, float32 (B, S, S), of the restoration."""
        import torch

        params, restored = self.params, values.clone()
        for _ in range(params.restoration_steps):
            with torch.enable_grad():
                restored.requires_grad_()
                loss = self._bound(*self._terms(restored, draw=False))
                loss = loss + params.restoration_weight * total_variation(restored - values)
                (gradient,) = torch.autograd.grad(loss.sum(), restored)  # images share nothing, so each has its own
            restored = restored.detach() - params.restoration_rate * gradient
        maps = (values - restored).abs().mean(1)
        return maps.double().mean((1, 2)).cpu().numpy(), maps


def total_variation(values: "torch.Tensor") -> "torch.Tensor":
    """Sum of absolute differences between neighbours, of each of (B, C, H, W): (B,)."""
    vertical, horizontal = values.diff(dim=2), values.diff(dim=3)
    return vertical.abs().sum((1, 2, 3)) + horizontal.abs().sum((1, 2, 3))


def network(channels: int, size: int, params: Any) -> Any:
    """MONAI's VarAutoEncoder for float32 (B, channels, size, size); every width halves the side, rounded up.

    Batch normalisation, for that of each image alone would hide from the encoder how bright it is.
    """
    from monai.networks.nets import VarAutoEncoder

    return VarAutoEncoder(
        spatial_dims=2,
        in_shape=(channels, size, size),
        out_channels=channels,
        latent_size=params.latent_size,
        channels=params.channels,
        strides=[2] * len(params.channels),
        norm="batch",
    )
