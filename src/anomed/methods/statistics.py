"""Image statistics: what one number of an image tells, as a row that learned detectors should exceed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from anomed import plugins
from anomed.detect import Detector
from anomed.methods.intensity import grey
from anomed.settings import Settings

BATCH = 32


# What counts as anomalous: a value far from that of the train images on either side (both: |x - mean| / sd), a high one
# (high: x itself) or a low one (low: -x).
Direction = Literal["both", "high", "low"]


@dataclass(frozen=True)
class Reference:
    """Mean and population standard deviation of a statistic over the train images. Where all train images have one
    value, sd is 1: the score then is the distance to that value in the statistic's own unit."""

    mean: float
    sd: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Reference":
        if np.ptp(values) == 0:  # not by the computed deviation, in which rounding may leave a trace
            return cls(float(values[0]), 1.0)
        return cls(float(values.mean()), float(values.std()))

    @classmethod
    def restored(cls, state: dict[str, np.ndarray]) -> "Reference":
        return cls(state["mean"].item(), state["sd"].item())

    def state(self) -> dict[str, np.ndarray]:
        """ "mean" and "sd", float64 (1,)."""
        return {"mean": np.array([self.mean]), "sd": np.array([self.sd])}

    def scores(self, values: np.ndarray, direction: str) -> np.ndarray:
        """Scores of the values of images, float64."""
        if direction == "both":
            return np.abs(values - self.mean) / self.sd
        return values if direction == "high" else -values


def _of_all(images: np.ndarray, measure: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """`measure` of all images, a batch of grey levels at a time."""
    starts = range(0, len(images), BATCH)
    return np.concatenate([measure(grey(images[start : start + BATCH])) for start in starts])


def _flat(levels: np.ndarray) -> np.ndarray:
    return levels.reshape(len(levels), -1).astype(np.float64)


@plugins.register("methods", "statistics.brightness")
class Brightness(Detector):
    """Mean grey level of the image (luma where it has colour), compared with that of the train images; no map."""

    deterministic = True
    localises = False
    memory_mb = 500
    reference: Reference

    class Params(Settings):
        """direction: see Direction."""

        direction: Direction = "both"

    def fit(self, images: np.ndarray) -> None:
        """Take mean and deviation of the train images' brightness."""
        self.reference = Reference.of(_of_all(images, self._measure))

    def state(self) -> dict[str, np.ndarray]:
        """See Reference.state; grey levels."""
        return self.reference.state()

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the reference."""
        self.reference = Reference.restored(state)

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, None]]:
        """See Detector.score. Scores in standard deviations (both) or grey levels."""
        for start in range(0, len(images), BATCH):
            values = self._measure(grey(images[start : start + BATCH]))
            yield self.reference.scores(values, self.params.direction), None

    @staticmethod
    def _measure(levels: np.ndarray) -> np.ndarray:
        return _flat(levels).mean(axis=1)


@plugins.register("methods", "statistics.foreground")
class Foreground(Detector):
    """Share of the image's pixels that are brighter than the background, compared with that of the train images.

    One level separates the two in all images: Otsu's threshold (IEEE Transactions on Systems, Man, and Cybernetics
    9(1), 1979) of the grey levels of all train images together, rounded to whole levels. Where the background was
    masked out it lies between the background and the organ, so that the share is the organ's area; in any other image
    (films, retinas, bright histology) it is the area of what is bright. No map.
    """

    deterministic = True
    localises = False
    memory_mb = 500
    reference: Reference
    level: int

    class Params(Settings):
        """direction: see Direction."""

        direction: Direction = "both"

    def fit(self, images: np.ndarray) -> None:
        """Find the level, then the mean and deviation of the share above it, in train images."""
        counts = np.zeros(256, np.int64)
        for start in range(0, len(images), BATCH):
            counts += np.bincount(_whole(grey(images[start : start + BATCH])).ravel(), minlength=256)
        self.level = otsu(counts)
        self.reference = Reference.of(_of_all(images, self._measure))

    def state(self) -> dict[str, np.ndarray]:
        """See Reference.state; shares. And "level", int64 (1,): the brightest grey level of the background."""
        return {**self.reference.state(), "level": np.array([self.level])}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back level and reference."""
        self.reference, self.level = Reference.restored(state), state["level"].item()

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, None]]:
        """See Detector.score. Scores in standard deviations (both) or shares, 0 to 1 (high; negated: low)."""
        for start in range(0, len(images), BATCH):
            values = self._measure(grey(images[start : start + BATCH]))
            yield self.reference.scores(values, self.params.direction), None

    def _measure(self, levels: np.ndarray) -> np.ndarray:
        return _flat(_whole(levels) > self.level).mean(axis=1)


@plugins.register("methods", "statistics.gradient")
class Gradient(Detector):
    """Magnitude of the grey levels' gradient: its mean or a quantile, compared with that of the train images.

    Central differences (one-sided at the edges), in grey levels per pixel of the prepared image. The map is the
    magnitude itself, smoothed by a Gaussian and, with `direction: low`, negated; it is not compared with anything, so
    a map says where an image is rough, whatever the train images are.
    """

    deterministic = True
    memory_mb = 500
    reference: Reference

    class Params(Settings):
        """direction: see Direction. quantile: the statistic is this quantile (linear interpolation) of the
        magnitudes before smoothing; None: their mean. smoothing_sigma: of the map's Gaussian, in pixels; 0: none."""

        direction: Direction = "both"
        quantile: float | None = Field(default=None, ge=0, le=1)
        smoothing_sigma: float = Field(default=4.0, ge=0)

    def fit(self, images: np.ndarray) -> None:
        """Take mean and deviation of the statistic of the train images."""
        self.reference = Reference.of(_of_all(images, lambda levels: self._measure(magnitude(levels))))

    def state(self) -> dict[str, np.ndarray]:
        """See Reference.state; grey levels per pixel."""
        return self.reference.state()

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the reference."""
        self.reference = Reference.restored(state)

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See Detector.score. Scores in standard deviations (both) or grey levels per pixel; maps, at the image size,
        in grey levels per pixel."""
        from scipy import ndimage

        sigma, direction = self.params.smoothing_sigma, self.params.direction
        for start in range(0, len(images), BATCH):
            rough = magnitude(grey(images[start : start + BATCH]))
            maps = ndimage.gaussian_filter(rough, (0, sigma, sigma)) if sigma else rough
            yield self.reference.scores(self._measure(rough), direction), -maps if direction == "low" else maps

    def _measure(self, rough: np.ndarray) -> np.ndarray:
        quantile = self.params.quantile
        return _flat(rough).mean(axis=1) if quantile is None else np.quantile(_flat(rough), quantile, axis=1)


def magnitude(levels: np.ndarray) -> np.ndarray:
    """Length of the gradient of images: float32 N x H x W, from grey levels of the same shape, H and W at least 2."""
    down, right = np.gradient(levels, axis=(1, 2))
    return np.hypot(down, right).astype(np.float32)


def otsu(counts: np.ndarray) -> int:
    """Otsu's threshold of a histogram: the level t for which the classes `<= t` and `> t` have the largest variance
    between them, the lowest such t; the level itself where there is one alone.

    counts: int, (levels,), at least one of them above 0.
    """
    levels = np.arange(len(counts))
    below, total = np.cumsum(counts), counts.sum()
    sums = np.cumsum(counts * levels)
    above = total - below
    apart = (below > 0) & (above > 0)
    if not apart.any():
        return int(counts.argmax())
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = sums / below - (sums[-1] - sums) / above
    return int(np.where(apart, below / total * (above / total) * distance**2, -1).argmax())


def _whole(levels: np.ndarray) -> np.ndarray:
    """Grey levels to the nearest whole one: luma of colour is not whole."""
    return np.rint(levels).astype(np.uint8)
