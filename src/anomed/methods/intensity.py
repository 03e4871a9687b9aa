"""The intensity baseline: how far plain brightness goes without learning anything."""

from collections.abc import Iterator

import numpy as np
from pydantic import Field

from anomed import plugins
from anomed.detect import Detector
from anomed.settings import Settings

BATCH = 32
LUMINANCE = np.array([299, 587, 114])  # thousandths of R, G, B (ITU-R BT.601)


def grey(images: np.ndarray) -> np.ndarray:
    """Grey intensity of uint8 N x S x S (x 3) images: float32 N x S x S in [0, 255].

    Grey images are taken as they are. Colour is reduced to the luma of ITU-R BT.601, (299 R + 587 G + 114 B) / 1000,
    unrounded; summed as integers, so that R = G = B gives exactly that level.
    """
    if images.ndim == 4:
        return ((images.astype(np.int64) @ LUMINANCE) / 1000).astype(np.float32)
    return images.astype(np.float32)


@plugins.register("methods", "intensity")
class Intensity(Detector):
    """Raw grey intensity as anomaly map, its high quantile as image score; fits nothing.

    A mandatory row of the table: on FLAIR, where most lesions are bright, thresholding the intensity beats many
    learned detectors (Meissen, Kaissis, Rueckert: "Challenging current semi-supervised anomaly segmentation methods
    for brain MRI", BrainLes 2021, arXiv 2109.06023). A detector that does not exceed it has shown no more than that.
    """

    deterministic = True
    memory_mb = 500

    class Params(Settings):
        """quantile: the image score is this quantile (linear interpolation) of the image's grey levels."""

        quantile: float = Field(default=0.99, ge=0, le=1)

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """See Detector.score. Scores and maps in grey levels [0, 255]; maps at the image size."""
        for start in range(0, len(images), BATCH):
            maps = grey(images[start : start + BATCH])
            scores = np.quantile(maps.reshape(len(maps), -1).astype(np.float64), self.params.quantile, axis=1)
            yield scores, maps
