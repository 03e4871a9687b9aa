"""Denoising diffusion: what is lost when an image is partly drowned in noise and drawn out again as a normal one."""

from collections.abc import Iterator
from copy import deepcopy
from math import gcd
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from anomed import feed, nets, plugins, simplex, training
from anomed.detect import Detector
from anomed.errors import AnomedError

if TYPE_CHECKING:
    import torch
    from torch import nn

PUBLISHED_SIDE = 256  # of the images that the published `frequency` is meant for
KEPT_BYTES = 256 * 2**20  # of noise that batches of scoring share


@plugins.register("methods", "ddpm")
class Ddpm(Detector):
    """AnoDDPM (Wyatt, Leach, Schmon & Willcocks, "AnoDDPM: Anomaly detection with denoising diffusion probabilistic
    models using simplex noise", CVPR Workshops 2022), on MONAI's DiffusionModelUNet and the schedule of its
    DDPMScheduler (Ho, Jain & Abbeel, arXiv 2006.11239).

    Pixels in [-1, 1]. A U-Net learns the noise in sqrt(a_t) x + sqrt(1 - a_t) noise, a_t the product of 1 - beta up to
    step t, by the mean squared error; t is uniform over all timesteps, noise drawn anew for each image and channel.
    Scoring takes an image to step `start`, then back step by step:
    x_(t-1) = posterior mean given x_t and the predicted image, clipped to [-1, 1], + sqrt(beta_t) noise, none at the
    last. Noise follows from the seed and the step, the same for every image. Map: (x - rebuilt)^2 at each pixel of the
    network's input, mean over channels; image score: mean of the map. Scored by the moving average of the weights.

    Noise has mean square 1, as the schedule supposes; the published code leaves simplex noise at the scale that its sum
    of octaves happens to have, shares one picture among a batch, clips x_t instead of the predicted image, and for
    simplex noise draws Gaussian noise on the way back, where the noise that was learned is used here.
    """

    gpu = True
    memory_mb = 6000

    class Params(training.Params):
        """timesteps: of the diffusion; beta rises linearly from 0.1 to 20, divided by them. start: step that an image
        is taken to. noise: "simplex", or "gaussian" for each pixel by itself. frequency: pixels to a unit of the
        coarsest octave in an image of side 256, scaled with `image_size`. octaves: each with half as many pixels;
        those with less than one are left out. persistence: amplitude of an octave relative to the one before. channels:
        feature maps of the U-Net's levels, each with half the side. residual_blocks: at each level. attention: how many
        of the coarsest levels have it (with 2 heads; between down and up it always is). ema: share of the old average
        that stays at a step, (1 + step) / (10 + step) if that is less. image_size: divisible by 2 for every level but
        the last. The others: see training.Params."""

        timesteps: int = Field(default=1000, ge=25, le=10_000)
        start: int = Field(default=250, ge=1)
        noise: Literal["simplex", "gaussian"] = "simplex"
        frequency: float = Field(default=64, gt=0)
        octaves: int = Field(default=6, ge=1, le=16)
        persistence: float = Field(default=0.8, gt=0, le=1)
        channels: list[Annotated[int, Field(ge=2)]] = Field(default=[32, 64, 96, 128], min_length=1, max_length=8)
        residual_blocks: int = Field(default=2, ge=1)
        attention: int = Field(default=2, ge=0)
        ema: float = Field(default=0.9999, ge=0, lt=1)
        epochs: int = Field(default=100, ge=1)
        batch_size: int = Field(default=8, ge=1, le=1024)
        learning_rate: float = Field(default=1e-4, gt=0)
        clip_norm: float | None = Field(default=1.0, gt=0)
        image_size: int | None = Field(default=64, ge=16, le=2048)

        @model_validator(mode="after")
        def _fits(self) -> "Ddpm.Params":
            if self.image_size and (fault := unfit(self.image_size, self.channels)):
                raise ValueError(fault)
            if self.start > self.timesteps:
                raise ValueError(f"start is {self.start}, but there are {self.timesteps} timesteps; lower start")
            return self

    networks: "nn.ModuleDict"  # "unet" that is trained, "average" that scores
    channels: int  # of the network's input
    size: int  # its side
    products: list[float]  # of 1 - beta, up to before each step and the last
    drawn: "dict[int, torch.Tensor]"  # noise of scoring that is kept, by step

    def fit(self, images: np.ndarray) -> None:
        """Train on the normal images. Raises AnomedError when the U-Net cannot halve the side, or the loss is not
        finite."""
        size = self.params.image_size or images.shape[1]
        if fault := unfit(size, self.params.channels):
            raise AnomedError(f"ddpm: {fault}")
        self._build(feed.channels_of(images), size)
        training.run(self, images, {"ddpm": self._phase})

    def state(self) -> dict[str, np.ndarray]:
        """The averaged U-Net's tensors, and "input": its channels and side, int64 (2,)."""
        return nets.arrays(self.networks["average"], self.channels, self.size)

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the averaged U-Net."""
        self._build(*state["input"].tolist())
        nets.fill(self.networks["average"], state)

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See Detector.score. Maps at the size of the network's input."""
        import torch

        for batch, count in feed.batches(images, self.params.batch_size):
            with torch.inference_mode():
                values = self._input(batch)
                maps = (values - self._rebuilt(values)).square().mean(1)[:count].cpu().numpy()
            yield maps.astype(np.float64).mean(axis=(1, 2)), maps

    def _build(self, channels: int, size: int) -> None:
        def make() -> "dict[str, nn.Module]":
            made = unet(channels, self.params)
            return {"unet": made, "average": deepcopy(made).requires_grad_(False)}

        self.channels, self.size = channels, size
        self.networks = nets.built(self, make)
        self.schedule, self.drawn = schedule(self.params.timesteps), {}
        # In float64: MONAI's own, in float32, are off by a thousandth in 1 - product at the first steps.
        self.products = [1.0, *(1 - self.schedule.betas.double()).cumprod(0).tolist()]

    def _input(self, images: np.ndarray) -> "torch.Tensor":
        """Images, uint8, as float32 (B, C, S, S) in [-1, 1]."""
        return feed.pixels(images, self.channels, self.size, self.device) * 2 - 1

    def _noise(self, count: int, rng: np.random.Generator) -> "torch.Tensor":
        """Noise of mean square 1 for `count` images: float32 (count, C, S, S)."""
        import torch

        params, pictures = self.params, count * self.channels
        if params.noise == "gaussian":
            drawn = rng.standard_normal((pictures, self.size, self.size), np.float32)
        else:
            frequency = params.frequency * self.size / PUBLISHED_SIDE
            drawn = simplex.fractal(pictures, self.size, rng, frequency, params.octaves, params.persistence)
        return torch.from_numpy(drawn).view(count, self.channels, self.size, self.size).to(self.device)

    def _phase(self) -> training.Phase:
        import torch

        trained, average = self.networks["unet"], self.networks["average"]

        def step(images: np.ndarray, at: training.Step) -> training.Losses:
            values = self._input(images)
            times = torch.randint(self.params.timesteps, (len(values),)).to(self.device)
            noise = self._noise(len(values), at.rng)
            predicted = trained(self.schedule.add_noise(values, noise, times), times)
            yield "noise", (predicted.float() - noise).square().mean()
            follow(average, trained, min(self.params.ema, (1 + at.number) / (10 + at.number)))

        adam = torch.optim.Adam(trained.parameters(), lr=self.params.learning_rate)
        return training.Phase([trained], {"noise": adam}, step)

    def _rebuilt(self, values: "torch.Tensor") -> "torch.Tensor":
        """What the model draws out of images in [-1, 1] that were taken to step `start`; float32 as they are."""
        import torch

        last = torch.tensor([self.params.start - 1])  # steps count from 0 in the schedule
        noised = self.schedule.add_noise(values, self._noise_at(self.params.start), last)
        for time in range(self.params.start - 1, -1, -1):
            predicted = self.networks["average"](noised, torch.full((len(values),), time, device=self.device))
            noised, scale = self._back(noised, predicted.float(), time)
            if time:
                noised = noised + scale * self._noise_at(time)
        return noised

    def _back(self, noised: "torch.Tensor", predicted: "torch.Tensor", time: int) -> "tuple[torch.Tensor, float]":
        """Mean of the posterior of the step before `time`, given the predicted noise, and its standard deviation:
        equations 7 and 15 of arXiv 2006.11239, and its larger variance, beta."""
        before, product = self.products[time], self.products[time + 1]
        beta = 1 - product / before
        image = ((noised - (1 - product) ** 0.5 * predicted) / product**0.5).clamp(-1, 1)
        mean = before**0.5 * beta / (1 - product) * image + (1 - beta) ** 0.5 * (1 - before) / (1 - product) * noised
        return mean, beta**0.5

    def _noise_at(self, time: int) -> "torch.Tensor":
        """The noise that scoring adds at step `time`, the same for every image: float32 (1, C, S, S)."""
        if time in self.drawn:
            return self.drawn[time]
        noise = self._noise(1, np.random.default_rng([self.seed, time]))
        if (len(self.drawn) + 1) * noise.nbytes <= KEPT_BYTES:
            self.drawn[time] = noise
        return noise


def follow(average: "nn.Module", trained: "nn.Module", share: float) -> None:
    """Move every number of `average` towards that of `trained`; `share` of the old one stays."""
    import torch

    with torch.no_grad():
        for old, new in zip(average.parameters(), trained.parameters(), strict=True):
            old.lerp_(new, 1 - share)


def schedule(timesteps: int) -> Any:
    """MONAI's DDPMScheduler with betas that end in the same noise whatever the number of steps."""
    from monai.networks.schedulers import DDPMScheduler

    return DDPMScheduler(timesteps, "linear_beta", beta_start=0.1 / timesteps, beta_end=20 / timesteps)


def unet(channels: int, params: Any) -> Any:
    """MONAI's DiffusionModelUNet: float32 (B, channels, S, S) and times, int64 (B,), to the noise in them."""
    from monai.networks.nets import DiffusionModelUNet

    widths = params.channels
    return DiffusionModelUNet(
        spatial_dims=2,
        in_channels=channels,
        out_channels=channels,
        num_res_blocks=params.residual_blocks,
        channels=widths,
        attention_levels=[level >= len(widths) - params.attention for level in range(len(widths))],
        norm_num_groups=gcd(32, *widths),
        num_head_channels=[width // 2 if width % 2 == 0 else width for width in widths],
    )


def unfit(size: int, channels: list[int]) -> str:
    """Why a U-Net of these levels cannot take images of this side; empty if it can."""
    step = 2 ** (len(channels) - 1)
    least = max(16, 2 * step)  # one pixel at the coarsest level would be too few to normalise
    if size % step == 0 and size >= least:
        return ""
    near = sorted({max(least, size // step * step), max(least, -(-size // step) * step)})
    sides = " or ".join(map(str, near))
    return (
        f"image_size is {size}, but {len(channels)} levels (channels: {channels}) halve it {len(channels) - 1} times: "
        f"it must be a multiple of {step}, at least {least}; set image_size: {sides}, or fewer levels"
    )
