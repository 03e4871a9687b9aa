"""Metadata baselines: how far an image's place or acquisition goes without a look at its pixels."""

import json
import warnings
from collections import Counter
from collections.abc import Iterator

import numpy as np
from pydantic import Field

from anomed import plugins, records
from anomed.detect import Detector
from anomed.settings import Settings

BATCH = 1024


@plugins.register("methods", "metadata.slice")
class Slice(Detector):
    """How unusual the number of a slice is among those of the train images; no pixel is read, and there is no map.

    The score is the negative logarithm of a Gaussian kernel density of the train images' slice numbers. What it reaches
    above chance says where slices were cut: in BMAD's brain set the normal test slices and the abnormal ones are cut by
    different rules. Numbers are those that the source gives, on each volume's own grid.

    An image whose number is unknown gets the mean score of the train images, so that nothing speaks for or against it;
    in training it is left out. Either is counted in a warning of the run card.
    """

    deterministic = True
    localises = False
    memory_mb = 500
    reads = ("slice",)

    class Params(Settings):
        """bandwidth: standard deviation of the kernel, in slices."""

        bandwidth: float = Field(default=2.0, gt=0)

    numbers: np.ndarray  # different slice numbers of the train images, float64, ascending
    shares: np.ndarray  # how much of the train images each has, float64, sum 1

    def fit(self, images: np.ndarray) -> None:
        """Count the slice numbers of the train images; without a known one, every score is 0."""
        known = self._known(self._numbers(), "train images, which are left out")
        self.numbers, counts = np.unique(known, return_counts=True)
        self.shares = counts / max(counts.sum(), 1)

    def state(self) -> dict[str, np.ndarray]:
        """ "numbers" and "shares", float64 (M,)."""
        return {"numbers": self.numbers, "shares": self.shares}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the numbers and their shares."""
        self.numbers, self.shares = state["numbers"], state["shares"]

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, None]]:
        """See Detector.score. Scores in nats."""
        numbers = self._numbers()
        self._known(numbers, "images, which get the mean score of the train images")
        usual = float(self._surprise(self.numbers) @ self.shares)
        for start in range(0, len(images), BATCH):
            batch = numbers[start : start + BATCH]
            yield np.where(np.isnan(batch), usual, self._surprise(np.nan_to_num(batch))), None

    def _numbers(self) -> np.ndarray:
        return self.facts["slice"].astype(np.float64)

    def _surprise(self, numbers: np.ndarray) -> np.ndarray:
        """Negative log density, float64. Taken from the nearest kernel on, so that it is finite at any distance."""
        if not len(self.numbers):
            return np.zeros(len(numbers))
        width = self.params.bandwidth
        terms = np.log(self.shares) - 0.5 * ((numbers[:, None] - self.numbers) / width) ** 2
        top = terms.max(axis=1)
        return np.log(width * np.sqrt(2 * np.pi)) - top - np.log(np.exp(terms - top[:, None]).sum(axis=1))

    @staticmethod
    def _known(numbers: np.ndarray, what: str) -> np.ndarray:
        unknown = np.isnan(numbers)
        if unknown.any():
            warnings.warn(
                f"the slice number is unknown of {unknown.sum()} of {len(numbers)} {what}: none stands in their entry "
                "in clinical.jsonl",
                stacklevel=3,
            )
        return numbers[~unknown]


@plugins.register("methods", "metadata.view")
class View(Detector):
    """How rare the view of a film (AP, PA) is among the train images; no pixel is read, and there is no map.

    The score is -log((n + 1) / (N + K + 1)): n of the N train images have this view, K views are among them. One count
    is added to each view and one kept for all that never occurred, which share the highest score. An unknown view is a
    value like any other: that nobody recorded it may tell who took the film. The sick are often filmed lying (AP):
    what this row reaches above chance needs no lung.
    """

    deterministic = True
    localises = False
    memory_mb = 500
    reads = ("view",)
    counts: dict[str, int]

    def fit(self, images: np.ndarray) -> None:
        """Count the views of the train images."""
        self.counts = dict(sorted(Counter(map(str, self.facts["view"])).items()))

    def state(self) -> dict[str, np.ndarray]:
        """ "views": how many train images have each, as the bytes of a JSON object."""
        return {"views": np.frombuffer(records.canonical(self.counts).encode(), np.uint8)}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back the counts."""
        self.counts = json.loads(state["views"].tobytes())

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, None]]:
        """See Detector.score. Scores in nats, at least 0."""
        total = sum(self.counts.values()) + len(self.counts) + 1
        rarity = np.array([-np.log((self.counts.get(str(view), 0) + 1) / total) for view in self.facts["view"]])
        for start in range(0, len(images), BATCH):
            yield rarity[start : start + BATCH], None
