"""f-AnoGAN: a generator that knows normal images alone, and an encoder that finds the nearest of them."""

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, field_validator

from anomed import feed, nets, plugins, training
from anomed.detect import Detector
from anomed.errors import AnomedError

if TYPE_CHECKING:
    import torch
    from torch import nn

PENALTY = 10.0  # weight of the gradient penalty
BETAS = (0.5, 0.999)  # of Adam, as BMAD; the code of the authors: (0, 0.9), and RMSprop for the encoder
HALVINGS = 3  # of the image's side, at least


@plugins.register("methods", "f_anogan")
class FAnoGan(Detector):
    """f-AnoGAN (Schlegl et al., "f-AnoGAN: Fast unsupervised anomaly detection with generative adversarial networks",
    MedIA 2019), on networks like those of DCGAN (the authors' have residual blocks).

    First phase, a Wasserstein GAN with gradient penalty: the critic moves at every batch, the generator at every
    `n_critic`-th. Second phase, izi_f: the encoder alone moves, so that the generator's image of its code resembles the
    input, in pixels as in the critic's features. Pixels are scaled to [-1, 1].

    Image score: the loss of the second phase, mean squared error of the pixels + kappa * that of the features. Map:
    squared residual at each pixel of the network's input, mean over channels (the paper shows the absolute one).
    """

    gpu = True
    memory_mb = 4000

    class Params(training.Params):
        """latent_size: numbers in a code. width: feature maps after the first halving of the side; each further one
        doubles them, up to eight times. n_critic: steps of the critic for one of the generator. kappa: weight of the
        features in loss and score. encoder_epochs: passes of the second phase; `epochs` are those of the first.
        image_size: must allow three halvings to a whole side. The others: see training.Params."""

        latent_size: int = Field(default=128, ge=1, le=4096)
        width: int = Field(default=64, ge=1, le=512)
        n_critic: int = Field(default=5, ge=1)
        kappa: float = Field(default=1.0, ge=0)
        encoder_epochs: int = Field(default=100, ge=1)
        batch_size: int = Field(default=64, ge=1, le=1024)
        learning_rate: float = Field(default=1e-4, gt=0)
        image_size: int | None = Field(default=64, ge=16, le=2048)

        @field_validator("image_size")
        @classmethod
        def _halves(cls, value: int | None) -> int | None:
            if value is not None and (fault := unfit(value)):
                raise ValueError(fault)
            return value

    networks: "nn.ModuleDict"
    channels: int  # of the network's input
    size: int  # its side

    def fit(self, images: np.ndarray) -> None:
        """Train on the normal images. Raises AnomedError when a loss is not finite or their side does not fit."""
        size = self.params.image_size or images.shape[1]
        if fault := unfit(size):
            raise AnomedError(f"image_size: {fault}; found {size}, the side of the domain's images")
        self._build(feed.channels_of(images), size)
        training.run(self, images, {"gan": self._gan, "encoder": self._izi_f})

    def state(self) -> dict[str, np.ndarray]:
        """The networks' tensors, and "input": channels and side, int64 (2,)."""
        return nets.arrays(self.networks, self.channels, self.size)

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the networks."""
        self._build(*state["input"].tolist())
        nets.fill(self.networks, state)

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See Detector.score. Maps at the size of the network's input."""
        import torch

        for batch, count in feed.batches(images, self.params.batch_size):
            with torch.inference_mode():
                errors, distances = self._residuals(self._input(batch))
                maps = errors.mean(1)[:count].float().cpu().numpy()
                features = distances.mean(1)[:count].double().cpu().numpy()
            yield maps.astype(np.float64).mean(axis=(1, 2)) + self.params.kappa * features, maps

    def _build(self, channels: int, size: int) -> None:
        self.channels, self.size, params = channels, size, self.params
        self.networks = nets.built(self, lambda: networks(channels, size, params.latent_size, params.width))

    def _input(self, images: np.ndarray) -> "torch.Tensor":
        """float32 (B, channels, side, side) in [-1, 1]."""
        return feed.pixels(images, self.channels, self.size, self.device) * 2 - 1

    def _noise(self, count: int) -> "torch.Tensor":
        import torch

        return torch.randn(count, self.params.latent_size, device=self.device)

    def _residuals(self, values: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Squared errors of the rebuilt images, like `values`, and of the critic's features, (B, features)."""
        critic: Any = self.networks["critic"]
        features = critic[0]
        rebuilt = self.networks["generator"](self.networks["encoder"](values)).float()
        return (rebuilt - values).square(), (features(rebuilt).float() - features(values).float()).square()

    def _gan(self) -> training.Phase:
        import torch

        generator, critic, params = self.networks["generator"], self.networks["critic"], self.params

        def step(images: np.ndarray, at: training.Step) -> training.Losses:
            real = self._input(images)
            with torch.no_grad():
                made = generator(self._noise(len(real))).float()
            share = torch.rand(len(real), 1, 1, 1, device=self.device)
            yield "critic", critic_loss(critic, real, made, share)
            if at.number % params.n_critic == params.n_critic - 1:
                yield "generator", -critic(generator(self._noise(len(real)))).float().mean()

        return training.Phase(
            [generator, critic], {"critic": self._adam(critic), "generator": self._adam(generator)}, step
        )

    def _izi_f(self) -> training.Phase:
        """Generator and critic stay in evaluation mode: their statistics do not move either."""
        encoder, params = self.networks["encoder"], self.params

        def step(images: np.ndarray, at: training.Step) -> training.Losses:
            errors, distances = self._residuals(self._input(images))
            yield "encoder", errors.mean() + params.kappa * distances.mean()

        return training.Phase([encoder], {"encoder": self._adam(encoder)}, step, epochs=params.encoder_epochs)

    def _adam(self, network: "nn.Module") -> "torch.optim.Optimizer":
        import torch

        return torch.optim.Adam(network.parameters(), lr=self.params.learning_rate, betas=BETAS)


def critic_loss(
    critic: "nn.Module", real: "torch.Tensor", made: "torch.Tensor", share: "torch.Tensor"
) -> "torch.Tensor":
    """Wasserstein loss of the critic with gradient penalty (Gulrajani et al., arXiv 1704.00028, algorithm 1).

    share: of the real image in the point between it and the made one where the slope should be 1; (B, 1, 1, 1), [0, 1].
    """
    import torch

    between = (share * real + (1 - share) * made).requires_grad_()
    (slopes,) = torch.autograd.grad(critic(between).float().sum(), between, create_graph=True)
    penalty = (slopes.float().flatten(1).norm(dim=1) - 1).square().mean()
    return critic(made).float().mean() - critic(real).float().mean() + PENALTY * penalty


def halvings(side: int) -> int:
    """How often a side is halved: while it is even and above 7."""
    return 1 + halvings(side // 2) if side % 2 == 0 and side > 7 else 0


def unfit(side: int) -> str:
    """Why the networks cannot be built for images of this side; empty if they can."""
    found = halvings(side)
    if found >= HALVINGS:
        return ""
    return (
        f"a side of {side} can be halved {found} times to a whole number, expected at least {HALVINGS}; set image_size "
        "to 32, 64, 96, 128, 224 or 256, to which images are resized"
    )


def networks(channels: int, size: int, latent_size: int, width: int) -> "dict[str, nn.Module]":
    """Generator: codes (B, latent_size) to images in [-1, 1]; critic: images to (B, 1), its first part to its features;
    encoder: images to codes.

    The critic has layer normalisation, as the authors': its gradient penalty is of single images, and batch
    normalisation would make the slope at one image depend on the others.
    """
    from torch import nn

    levels = halvings(size)
    widths = [width * min(2**level, 8) for level in range(levels)]
    flat = widths[-1] * (size >> levels) ** 2
    return {
        "generator": _generator(channels, widths, size >> levels, latent_size),
        "critic": nn.Sequential(_halving(channels, widths, lambda maps: nn.GroupNorm(1, maps)), nn.Linear(flat, 1)),
        "encoder": nn.Sequential(_halving(channels, widths, nn.BatchNorm2d), nn.Linear(flat, latent_size)),
    }


def _halving(channels: int, widths: list[int], norm: "Callable[[int], nn.Module]") -> Any:
    """Every width halves the side; the first without normalisation. Ends flat."""
    from torch import nn

    layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 4, 2, 1), nn.LeakyReLU(0.2)]
    for before, after in itertools.pairwise(widths):
        layers += [nn.Conv2d(before, after, 4, 2, 1, bias=False), norm(after), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Flatten())


def _generator(channels: int, widths: list[int], side: int, latent_size: int) -> Any:
    """The way back, from `side` pixels, doubled as often as there are widths."""
    from torch import nn

    deepest = widths[-1]
    layers: list[nn.Module] = [nn.Linear(latent_size, deepest * side**2), nn.Unflatten(1, (deepest, side, side))]
    layers += [nn.BatchNorm2d(deepest), nn.ReLU()]
    for before, after in itertools.pairwise(widths[::-1]):
        layers += [nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(widths[0], channels, 4, 2, 1), nn.Tanh())
