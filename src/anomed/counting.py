"""The pixels of one run: its maps on the native grids of the masks, counted."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from anomed import counting_gpu, images
from anomed.errors import AnomedError
from anomed.manifest import Prepared
from anomed.mapcodes import Codec
from anomed.metrics.declare import LEVELS, Level
from anomed.metrics.histogram import PixelHistogram
from anomed.predictions import Predictions

Histograms = dict[Level, PixelHistogram]


class Counter:
    """Counts the pixels of a run's images. device: auto (CUDA if the job sees it), cpu or cuda. Memory does not grow
    with the number of images. Raises AnomedError when CUDA is demanded and there is none."""

    def __init__(self, prepared: Prepared, predictions: Predictions, device: str):
        assert predictions.maps is not None
        assert predictions.codec is not None
        self.prepared, self.maps = prepared, predictions.maps
        self.regrid: Any = _regrid(predictions.codec, device)
        self.levels = LEVELS[1:] if prepared.card["foreground"] else LEVELS[1:2]

    def empty(self) -> Histograms:
        """Nothing counted yet."""
        return {level: PixelHistogram() for level in self.levels}

    def count(self, table: pd.DataFrame) -> Histograms:
        """Of images with pixel truth, rows of a manifest with `map_row`: all pixels, and those of the organ."""
        found = self.empty()
        for mask_row, map_row in zip(table.mask_row, table.map_row, strict=True):
            mask, codes = self.prepared.mask(int(mask_row)), np.asarray(self.maps[int(map_row)])
            grid = self.regrid(codes, *mask.shape)
            found["pixel"].update(grid, mask)
            if "foreground" in found:
                found["foreground"].update(grid, mask, self.prepared.foreground(int(mask_row)))
        return found


def merge(into: Histograms, other: Histograms) -> None:
    """Add the counts of `other`."""
    for level, histogram in into.items():
        histogram.merge(other[level])


def on_grid(codec: Codec, codes: np.ndarray, height: int, width: int) -> np.ndarray:
    """Codes of a map, uint16 h x w, on another grid: decoded, upsampled, coded again."""
    if codes.shape == (height, width):
        return codes
    return codec.encode(images.upsample(codec.decode(codes), height, width))


def _regrid(codec: Codec, device: str) -> Any:
    """(codes, height, width) -> codes on that grid, for numpy or a tensor on the GPU. Torch is imported only where a
    GPU is to be used: it costs more memory and time than all of scoring."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1") and Path("/dev/nvidiactl").exists()
    if device == "cuda" or (device == "auto" and visible):
        import torch

        if torch.cuda.is_available():
            return counting_gpu.Regrid(codec, "cuda")
        if device == "cuda":
            raise AnomedError("device cuda: torch sees no CUDA device; use --device cpu or auto, or check the driver")
    return lambda codes, height, width: on_grid(codec, codes, height, width)
