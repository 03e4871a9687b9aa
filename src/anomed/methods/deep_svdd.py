"""Deep SVDD: a network that draws normal images together, and how far an image stays from their centre."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from anomed import feed, nets, plugins, training
from anomed.detect import Detector
from anomed.errors import AnomedError

if TYPE_CHECKING:
    import torch
    from torch import nn

WIDTHS = (32, 64, 128)  # feature maps of the network's three convolutions
GRID = 4  # side of the decoder's first maps, which hold the representation
AWAY = 0.1  # least distance from 0 of each number of the centre
FLAT = 1e-3  # least mean absolute deviation that contrast is divided by: the noise of an empty image is no contrast
DISTANCES = "sphere.distances"  # needed by a training that goes on, not by the model


@plugins.register("methods", "deep_svdd")
class DeepSvdd(Detector):
    """Deep SVDD (Ruff et al., "Deep one-class classification", ICML 2018), on its LeNet for CIFAR-10.

    Every image is normalised by its own contrast (mean 0, mean absolute deviation 1), then by the smallest and largest
    value of the train images to [0, 1]. The network is first trained as the encoder of an autoencoder. The mean of the
    train images' representations then becomes the centre, and the network is trained on their mean squared distance to
    it, or, with a soft boundary, on radius² + mean(max(0, distance² − radius²)) / nu. It has no bias and no affine
    batch normalisation, with which it could map everything to the centre (proposition 2).

    Score: squared distance to the centre, with the soft boundary less radius². No map.
    """

    gpu = True
    localises = False
    memory_mb = 4000

    class Params(training.Params):
        """objective: "one_class" or "soft_boundary". nu: share of train images that may lie outside the soft boundary.
        representation: numbers that stand for an image, a multiple of 16. pretrain_epochs: passes as an autoencoder; 0
        for none. pretrain_learning_rate: meanwhile. milestones, pretrain_milestones: epochs after which the learning
        rate is a tenth of what it was. weight_decay: L2 penalty in both. warm_up: epochs in which the radius stays 0.
        The others: see training.Params."""

        objective: Literal["one_class", "soft_boundary"] = "one_class"
        nu: float = Field(default=0.1, gt=0, le=1)
        representation: int = Field(default=128, ge=GRID**2, le=4096)
        pretrain_epochs: int = Field(default=350, ge=0)
        pretrain_learning_rate: float = Field(default=1e-4, gt=0)
        pretrain_milestones: list[Annotated[int, Field(ge=1)]] = Field(default=[250])
        milestones: list[Annotated[int, Field(ge=1)]] = Field(default=[50])
        weight_decay: float = Field(default=5e-7, ge=0)
        warm_up: int = Field(default=10, ge=0)
        epochs: int = Field(default=150, ge=1)
        batch_size: int = Field(default=200, ge=1, le=1024)
        learning_rate: float = Field(default=1e-4, gt=0)
        image_size: int | None = Field(default=32, ge=16, le=2048)

        @field_validator("representation")
        @classmethod
        def _fills_the_grid(cls, value: int) -> int:
            if value % GRID**2:
                raise ValueError(
                    f"must be a multiple of {GRID**2}, for the decoder starts from {GRID} x {GRID} positions; take "
                    f"{max(1, value // GRID**2) * GRID**2}"
                )
            return value

        @model_validator(mode="after")
        def _radius_is_used(self) -> "DeepSvdd.Params":
            if self.objective == "soft_boundary" and self.warm_up >= self.epochs:
                raise ValueError(
                    f"warm_up: found {self.warm_up}, expected fewer than epochs: {self.epochs}, or no epoch of "
                    "objective: soft_boundary has a radius; lower warm_up or raise epochs"
                )
            return self

    networks: "nn.ModuleDict"
    channels: int  # of the network's input
    size: int  # its side

    def fit(self, images: np.ndarray) -> None:
        """Train on the normal images. Raises AnomedError when a loss is not finite, or max_steps leaves no epoch in
        which a soft boundary has a radius."""
        self._check_length(feed.batches_of(len(images), self.params.batch_size))
        self._build(feed.channels_of(images), self.params.image_size or images.shape[1], len(images))
        self._measure_range(images)
        phases = {"autoencoder": self._pretrain} if self.params.pretrain_epochs else {}
        training.run(self, images, {**phases, "sphere": lambda: self._train(images)})

    def state(self) -> dict[str, np.ndarray]:
        """The networks' tensors with centre, radius and range, and "input": channels and side, int64 (2,)."""
        stored = nets.arrays(self.networks, self.channels, self.size)
        return {key: value for key, value in stored.items() if key != DISTANCES}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the networks."""
        channels, size = state["input"].tolist()
        self._build(channels, size, 0)
        nets.fill(self.networks, state | {DISTANCES: np.zeros(0, np.float32)})

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, None]]:
        """See Detector.score."""
        inside = float(self._kept.radius) ** 2 if self.params.objective == "soft_boundary" else 0.0
        centre = self._kept.centre.double().cpu().numpy()
        for represented in self._represented(images):
            yield np.square(represented - centre).sum(axis=1) - inside, None

    def _check_length(self, batches: int) -> None:
        params = self.params
        whole = training.steps_of(params, batches) // batches
        if params.objective == "soft_boundary" and whole <= params.warm_up:
            raise AnomedError(
                f"deep_svdd: max_steps: found {params.max_steps}, {whole} whole epochs of {batches} batches, expected "
                f"more than warm_up: {params.warm_up}, or the soft boundary has no radius; raise it or lower warm_up"
            )

    @property
    def _kept(self) -> Any:
        """What is stored beside weights; see _buffers."""
        return self.networks["sphere"]

    def _build(self, channels: int, size: int, count: int) -> None:
        """count: of the train images."""
        self.channels, self.size, width = channels, size, self.params.representation
        self.networks = nets.built(self, lambda: networks(channels, size, width, count))

    def _contrast(self, images: np.ndarray) -> "torch.Tensor":
        """Pixels of each image with mean 0 and mean absolute deviation 1, of flat ones 0: (B, channels, S, S)."""
        values = feed.pixels(images, self.channels, self.size, self.device)
        values = values - values.mean((1, 2, 3), keepdim=True)
        return values / values.abs().mean((1, 2, 3), keepdim=True).clamp_min(FLAT)

    def _input(self, images: np.ndarray) -> "torch.Tensor":
        """float32 (B, channels, side, side), in [0, 1] for train images. A new image may exceed it: nothing is cut."""
        low, high = self._kept.range
        # The contrast of an image that is not flat spans 2 at least: a range below 1 is one of flat images alone.
        values: torch.Tensor = (self._contrast(images) - low) / (high - low).clamp_min(1)
        return values

    def _measure_range(self, images: np.ndarray) -> None:
        """Smallest and largest contrast of the train images, all channels together."""
        import torch

        found = []
        for batch, count in feed.batches(images, self.params.batch_size):
            found += torch.stack(self._contrast(batch)[:count].aminmax()).tolist()
        self._kept.range.copy_(torch.tensor([min(found), max(found)]))

    def _represented(self, images: np.ndarray) -> Iterator[np.ndarray]:
        """What the network makes of images, batch by batch: float64 (B, representation)."""
        import torch

        for batch, count in feed.batches(images, self.params.batch_size):
            with torch.no_grad():
                values = self.networks["encoder"](self._input(batch))[:count]
            yield values.double().cpu().numpy()

    def _pretrain(self) -> training.Phase:
        """Trains the network as an encoder, on the squared error of the image, summed over its pixels."""
        from torch import nn

        params, encoder, decoder = self.params, self.networks["encoder"], self.networks["decoder"]

        def step(images: np.ndarray, at: training.Step) -> training.Losses:
            values = self._input(images)
            yield "reconstruction", (decoder(encoder(values)).float() - values).square().sum((1, 2, 3)).mean()

        optimiser = self._adam(nn.ModuleList([encoder, decoder]), params.pretrain_learning_rate)
        rate = _tenths(params.pretrain_milestones)
        networks = [encoder, decoder]
        return training.Phase(networks, {"reconstruction": optimiser}, step, epochs=params.pretrain_epochs, rate=rate)

    def _train(self, images: np.ndarray) -> training.Phase:
        """Sets the centre, as the networks stand; trains the encoder alone, and sets the radius at an epoch's end."""
        import torch

        params, sphere, encoder = self.params, self._kept, self.networks["encoder"]
        batches = feed.batches_of(len(images), params.batch_size)
        sphere.centre.copy_(torch.from_numpy(centre_of(self._represented(images), len(images))))

        def step(batch: np.ndarray, at: training.Step) -> training.Losses:
            distances = (encoder(self._input(batch)).float() - sphere.centre).square().sum(1)
            yield params.objective, objective(distances, sphere.radius, params)
            epoch, number = divmod(at.number, batches)
            # What follows happens before a checkpoint: a training that goes on finds the distances of its epoch so far.
            places = feed.span(len(images), params.batch_size, number)
            kept = distances.detach()[: places.stop - places.start]  # an image alone comes twice in its batch
            sphere.distances[places] = kept
            if number == batches - 1 and params.objective == "soft_boundary" and epoch + 1 >= params.warm_up:
                sphere.radius.copy_(torch.quantile(sphere.distances.sqrt(), 1 - params.nu))

        optimisers = {params.objective: self._adam(encoder, params.learning_rate)}
        return training.Phase([encoder], optimisers, step, rate=_tenths(params.milestones))

    def _adam(self, network: "nn.Module", rate: float) -> "torch.optim.Optimizer":
        import torch

        return torch.optim.Adam(network.parameters(), lr=rate, weight_decay=self.params.weight_decay)


def objective(distances: "torch.Tensor", radius: "torch.Tensor", params: Any) -> "torch.Tensor":
    """Equation 4, or with the soft boundary 3, both without the weight decay, which the optimiser adds.

    distances: squared, (B,). The radius is no parameter: it is set, not descended.
    """
    if params.objective == "one_class":
        return distances.mean()
    return radius.square() + (distances - radius.square()).clamp_min(0).mean() / params.nu


def centre_of(represented: Iterator[np.ndarray], count: int) -> np.ndarray:
    """Mean of `count` representations, float64; a number near 0 moves to ±0.1, for zero weights would meet it."""
    centre: np.ndarray = np.sum([part.sum(axis=0) for part in represented], axis=0) / count
    return np.where(np.abs(centre) < AWAY, np.where(centre < 0, -AWAY, AWAY), centre)


def _tenths(milestones: list[int]) -> Callable[[int], float]:
    """Factor of the learning rate at an epoch, from 0."""
    return lambda epoch: float(0.1 ** sum(epoch >= milestone for milestone in milestones))


def networks(channels: int, size: int, width: int, count: int) -> "dict[str, nn.Module]":
    """encoder: images to representations, (B, width). decoder: back to images in [0, 1]. sphere: what is no weight."""
    from torch import nn

    encoder, decoder = _encoder(channels, size, width), _decoder(channels, size, width)
    for module in (*encoder.modules(), *decoder.modules()):
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.xavier_uniform_(module.weight, gain=nn.init.calculate_gain("leaky_relu"))
    return {"encoder": encoder, "decoder": decoder, "sphere": _buffers(width, count)}


def _buffers(width: int, count: int) -> Any:
    """centre (width,), radius (); range: smallest and largest contrast (2,); distances: squared (count,)."""
    import torch
    from torch import nn

    sphere = nn.Module()
    for name, shape in {"centre": [width], "radius": [], "range": [2], "distances": [count]}.items():
        sphere.register_buffer(name, torch.zeros(shape))
    return sphere


def _encoder(channels: int, size: int, width: int) -> Any:
    from torch import nn

    layers: list[nn.Module] = []
    for before, after in zip((channels, *WIDTHS), WIDTHS, strict=False):
        layers += [nn.Conv2d(before, after, 5, padding=2, bias=False), nn.BatchNorm2d(after, eps=1e-4, affine=False)]
        layers += [nn.LeakyReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(WIDTHS[-1] * (size // 8) ** 2, width, bias=False))


def _decoder(channels: int, size: int, width: int) -> Any:
    """Its maps grow from 4 x 4 to a quarter of the side, to half and to all of it: for 32 twice at each step."""
    from torch import nn

    layers: list[nn.Module] = [nn.BatchNorm1d(width, eps=1e-4, affine=False)]
    layers += [nn.Unflatten(1, (width // GRID**2, GRID, GRID)), nn.LeakyReLU()]
    for before, after, part in zip((width // GRID**2, *WIDTHS[::-1]), WIDTHS[::-1], (4, 2, 1), strict=False):
        layers += [nn.ConvTranspose2d(before, after, 5, padding=2, bias=False)]
        layers += [nn.BatchNorm2d(after, eps=1e-4, affine=False), nn.LeakyReLU(), nn.Upsample(size=size // part)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(WIDTHS[0], channels, 5, padding=2, bias=False), nn.Sigmoid())
