"""Control systems: what a table must show for a detector that knows nothing."""

import hashlib
from collections.abc import Iterator

import numpy as np

from anomed import plugins
from anomed.detect import Detector

GRID = 56  # maps of controls are this many pixels wide and high, whatever the image
BATCH = 64


@plugins.register("methods", "controls.random")
class Random(Detector):
    """Random scores and maps, uniform in [0, 1): every rank metric must come out at chance.

    They are drawn from a generator seeded by sha256 of (seed, pixels), so that an image scores the same alone, in any
    batch and in any order; identical images therefore score the same. Maps are white noise on a 56 x 56 grid.
    """

    memory_mb = 500

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See Detector.score. Scores float64 and maps float32 (B, 56, 56), both in [0, 1)."""
        for start in range(0, len(images), BATCH):
            batch = images[start : start + BATCH]
            scores = np.empty(len(batch))
            maps = np.empty((len(batch), GRID, GRID), np.float32)
            for i, image in enumerate(batch):
                key = hashlib.sha256(f"{self.seed}:".encode() + image.tobytes()).digest()
                generator = np.random.default_rng(int.from_bytes(key))
                scores[i] = generator.random()
                generator.random(dtype=np.float32, out=maps[i])
            yield scores, maps


@plugins.register("methods", "controls.constant")
class Constant(Detector):
    """The same score and map, zero, for every image: AUROC must be exactly 0.5, whatever the tie handling hides."""

    deterministic = True
    memory_mb = 500

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See Detector.score. Maps are float32 (B, 56, 56)."""
        for start in range(0, len(images), BATCH):
            count = len(images[start : start + BATCH])
            yield np.zeros(count), np.zeros((count, GRID, GRID), np.float32)
