"""Fit and predict: what a detection method is, and the two commands that run one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from anomed.plugins import Settings


class Detector:
    """Base of every method: subclass it once, register it, and fill `fit` and `score`.

    A detector sees prepared pixels only: uint8, N x S x S (grey) or N x S x S x 3, never a label, mask or file name.
    Class attributes state what it needs: `deterministic` (one seed is enough), `localises` (it gives maps), `gpu`
    (it can use one), `memory_mb` (what its jobs ask of a scheduler).
    """

    deterministic: ClassVar[bool] = False
    localises: ClassVar[bool] = True
    gpu: ClassVar[bool] = False
    memory_mb: ClassVar[int] = 1000

    class Params(Settings):
        """The keys of the method's block in params.yaml."""

    def __init__(self, params: Any, seed: int, device: str = "cpu"):
        self.params, self.seed, self.device = params, seed, device

    @classmethod
    def files(cls, params: Any) -> dict[str, Path]:
        """Files outside the project that decide the result (weights), by name; their hashes join the parameters."""
        return {}

    def fit(self, images: np.ndarray) -> None:
        """Learn from the normal train images: uint8, N x S x S (x 3), memory-mapped, N >= 1."""

    def state(self) -> dict[str, np.ndarray]:
        """What `fit` learned, as arrays by name (stored as safetensors)."""
        return {}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Yield for consecutive batches of `images` (uint8, N x S x S (x 3)) a pair: scores, float (B,), higher is
        more anomalous, raw; and maps, float32 (B, h, w), or None when the method does not localise. An image must
        score alone as in a batch."""
        raise TypeError(f"{type(self).__name__} does not define score()")
