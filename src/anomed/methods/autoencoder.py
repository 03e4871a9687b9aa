"""Convolutional autoencoder: what it cannot reconstruct is anomalous."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from anomed import feed, nets, plugins, training
from anomed.detect import Detector

if TYPE_CHECKING:
    import torch
    from torch import nn


@plugins.register("methods", "autoencoder")
class Autoencoder(Detector):
    """Autoencoder with a narrow waist (Baur et al., "Autoencoders for unsupervised anomaly segmentation in brain MR
    images: a comparative study", MedIA 2021, arXiv 2004.03271: the spatial one), on MONAI's AutoEncoder.

    Trained on the mean squared error of the reconstruction, pixels in [0, 1]. Map: squared error at each pixel of the
    network's input, mean over channels. Image score: mean of the map, which is the loss of the image.
    """

    gpu = True
    memory_mb = 4000

    class Params(training.Params):
        """channels: feature maps after each halving of the side; the last number is the waist. The others: see
        training.Params."""

        channels: list[Annotated[int, Field(ge=1)]] = Field(default=[32, 64, 128, 16], min_length=1, max_length=8)

    networks: "nn.ModuleDict"
    size: int  # side of the network's input

    def fit(self, images: np.ndarray) -> None:
        """Train on the normal images. Raises AnomedError when the loss is not finite."""
        self._build(feed.channels_of(images), self.params.image_size or images.shape[1])
        training.run(self, images, {"autoencoder": self._phase})

    def state(self) -> dict[str, np.ndarray]:
        """The network's tensors, and "input": its channels and side, int64 (2,)."""
        return nets.arrays(self.networks, self.channels, self.size)

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the network."""
        self._build(*state["input"].tolist())
        nets.fill(self.networks, state)

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See Detector.score. Maps at the size of the network's input."""
        import torch

        for batch, count in feed.batches(images, self.params.batch_size):
            with torch.inference_mode():
                values = self._input(batch)
                maps = self._errors(values).mean(1)[:count].float().cpu().numpy()
            yield maps.astype(np.float64).mean(axis=(1, 2)), maps

    def _build(self, channels: int, size: int) -> None:
        self.channels, self.size = channels, size
        self.networks = nets.built(self, lambda: {"autoencoder": network(channels, self.params.channels)})

    def _input(self, images: np.ndarray) -> "torch.Tensor":
        return feed.pixels(images, self.channels, self.size, self.device)

    def _errors(self, values: "torch.Tensor") -> "torch.Tensor":
        """Squared errors of the reconstruction, float32 as `values`. A side that cannot be halved so often grows."""
        rebuilt = self.networks["autoencoder"](values)[..., : self.size, : self.size]
        errors: torch.Tensor = (rebuilt.float() - values).square()
        return errors

    def _phase(self) -> training.Phase:
        import torch

        network = self.networks["autoencoder"]

        def step(images: np.ndarray, at: training.Step) -> training.Losses:
            values = self._input(images)
            yield "reconstruction", self._errors(values).mean()

        adam = torch.optim.Adam(network.parameters(), lr=self.params.learning_rate)
        return training.Phase([network], {"reconstruction": adam}, step)


def network(channels: int, widths: list[int]) -> Any:
    """MONAI's AutoEncoder: float32 (B, channels, S, S) to the same; every width halves the side, rounded up.

    With batch normalisation: MONAI's own choice, that of each image alone, would take its contrast away.
    """
    from monai.networks.nets import AutoEncoder

    strides = [2] * len(widths)
    return AutoEncoder(2, channels, out_channels=channels, channels=widths, strides=strides, norm="batch")
