"""Synthetic masks and anomaly maps in any number and on any grid: what benchmarks/metrics.py measures on."""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from anomed.counting import Counter
from anomed.mapcodes import Codec

SEED, POOL = 11, 64  # POOL: distinct textures, and distinct masks


class Scenes:
    """Images by number: a mask with one to three round lesions or none, and a map of smooth noise with finer noise on
    it, brighter in the lesions. Stands for a prepared domain.

    count, abnormal: how many images, and how many of them, evenly spread, have lesions. grid: side of a map. height,
    width: of a mask.
    """

    def __init__(self, count: int, abnormal: int, grid: int, height: int, width: int):
        from scipy.ndimage import gaussian_filter

        rng = np.random.default_rng(SEED)
        self.card, self.count, self.grid, self.width = {"foreground": False}, count, grid, width
        self.labels = np.diff(np.arange(count + 1) * abnormal // count)
        fields = rng.standard_normal((POOL, grid, grid), np.float32)
        smooth = np.stack([gaussian_filter(field, 6, mode="wrap") for field in fields])
        self.layers = smooth / smooth.std(), 0.2 * fields[::-1]
        y, x = np.ogrid[0 : 1 : 1j * height, 0 : 1 : 1j * width]
        rows, columns = (np.linspace(0, side - 1, grid).round().astype(int) for side in (height, width))
        self.lesions, self.packed = [], []
        for _ in range(POOL):
            discs = rng.uniform((0.15, 0.15, 0.02), (0.85, 0.85, 0.09), (rng.integers(1, 4), 3))
            mask = np.any([np.hypot(y - top, x - left) < radius for top, left, radius in discs], axis=0)
            self.lesions.append(mask[np.ix_(rows, columns)])
            self.packed.append(np.packbits(mask, axis=1))
        self.codec = Codec.fit(np.stack([self._scores(row) for row in range(min(count, POOL))]), -9, 9)

    def mask(self, row: int) -> np.ndarray:
        """bool H x W."""
        mask = np.unpackbits(self.packed[row % POOL], axis=1, count=self.width).astype(bool)
        return mask if self.labels[row] else np.zeros_like(mask)

    def codes(self, row: int) -> np.ndarray:
        """uint16 h x w."""
        return self.codec.encode(self._scores(row))

    def table(self) -> pd.DataFrame:
        """The columns of a manifest that counting needs."""
        return pd.DataFrame({"mask_row": range(self.count), "map_row": range(self.count), "label": self.labels})

    def loaded(self) -> tuple[np.ndarray, np.ndarray]:
        """All maps and masks in memory: uint16 and bool, N x H x W; both on one grid."""
        codes = np.empty((self.count, self.grid, self.grid), np.uint16)
        masks = np.empty(codes.shape, bool)
        for row in range(self.count):
            codes[row], masks[row] = self.codes(row), self.mask(row)
        return codes, masks

    @contextlib.contextmanager
    def counters(self, *devices: str) -> Iterator[list[Counter]]:
        """Counters over codes in a memory-mapped file, as a run's predictions are."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "maps.npy"
            with path.open("wb") as file:
                shape = (self.count, self.grid, self.grid)
                np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": shape})
                file.writelines(self.codes(row).data for row in range(self.count))
            domain: Any = self
            run: Any = argparse.Namespace(maps=np.load(path, mmap_mode="r"), codec=self.codec)
            yield [Counter(domain, run, device) for device in devices]

    def _scores(self, row: int) -> np.ndarray:
        rng = np.random.default_rng([SEED, row])
        found = np.float32(1.6 * self.labels[row]) * self.lesions[row % POOL]
        for layer in self.layers:
            found += np.roll(layer[rng.integers(POOL)], rng.integers(self.grid, size=2), (0, 1))
        return found
