"""Metrics of ranking: AUROC, AP and AUPRO of images and pixels; usable alone on numpy arrays.

>>> import numpy as np
>>> image_auroc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
0.75
>>> lesion = np.zeros((8, 8), bool)
>>> lesion[2:4, 2:5] = True
>>> normal = np.zeros((8, 8), bool)
>>> pixel_metrics([lesion.astype(np.float32), np.zeros((8, 8), np.float32)], [lesion, normal])["pixel_aupro"]
1.0
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from anomed.errors import AnomedError
from anomed.mapcodes import TOP, Codec, stride
from anomed.metrics import curves
from anomed.metrics.declare import NotComputable, metric, metrics

MANN_WHITNEY = "Hanley and McNeil 1982, Radiology 143:29-36"
STEPWISE = "scikit-learn, average_precision_score"
REGIONS = np.ones((3, 3), int)  # 8-connectivity


class PixelHistogram:
    """Counts per map code that carry every pixel metric; O(pixels), streaming, mergeable.

    total, lesion: int64 (65536,), all pixels and lesion pixels. overlap: float64 (65536,), lesion pixels weighted by
    1 / area of their region (8-connected). regions, images: how many went in.
    """

    def __init__(self) -> None:
        self.total = np.zeros(TOP + 1, np.int64)
        self.lesion = np.zeros(TOP + 1, np.int64)
        self.overlap = np.zeros(TOP + 1)
        self.regions = self.images = 0

    @property
    def normal(self) -> np.ndarray:
        """Normal pixels per code, int64."""
        return self.total - self.lesion

    def update(self, codes: np.ndarray, mask: np.ndarray) -> None:
        """Count one image: codes uint16 H x W, mask bool H x W. Raises AnomedError on any other type or shape."""
        if codes.dtype != np.uint16 or mask.dtype != bool or codes.ndim != 2 or codes.shape != mask.shape:
            raise AnomedError(
                f"found codes {codes.dtype} {codes.shape} with a mask {mask.dtype} {mask.shape}, expected uint16 "
                "(H, W) with bool (H, W)"
            )
        self.total += np.bincount(codes.ravel(), minlength=TOP + 1)
        self.images += 1
        if not mask.any():
            return
        from scipy.ndimage import label

        numbered, regions = label(mask, REGIONS)
        region, hit = numbered[mask], codes[mask]
        self.lesion += np.bincount(hit, minlength=TOP + 1)
        self.overlap += np.bincount(hit, 1 / np.bincount(region)[region], minlength=TOP + 1)
        self.regions += regions

    def merge(self, other: "PixelHistogram") -> None:
        """Add another histogram's counts; both must come from one codec."""
        self.total += other.total
        self.lesion += other.lesion
        self.overlap += other.overlap
        self.regions += other.regions
        self.images += other.images

    def counts(self) -> dict[str, int]:
        """{"normal": pixels, "abnormal": pixels, "regions": regions}."""
        return {"normal": int(self.normal.sum()), "abnormal": int(self.lesion.sum()), "regions": self.regions}


@metric(
    name="image_auroc",
    label="Image AUROC",
    level="image",
    definition="Area under the ROC curve of the raw image scores over all test images; ties count one half.",
    source=MANN_WHITNEY,
)
def image_auroc(scores: Any, labels: Any) -> float:
    """Scores (N,), any real type, and labels (N,), 0 or 1, to a value in [0, 1].

    Raises NotComputable when a class is absent, AnomedError on wrong shapes, labels or non-finite scores.
    """
    return curves.auroc(*_images(scores, labels))


@metric(
    name="image_ap",
    label="Image AP",
    level="image",
    definition="Average precision of the abnormal class over all test images, step-wise without interpolation; equal "
    "scores cross the threshold together.",
    source=STEPWISE,
)
def image_ap(scores: Any, labels: Any) -> float:
    """As `image_auroc`."""
    return curves.average_precision(*_images(scores, labels))


@metric(
    name="pixel_auroc",
    label="Pixel AUROC",
    level="pixel",
    definition="Area under the ROC curve over all pixels of all test images with pixel truth, on the native grid of "
    "the masks; ties count one half.",
    source=MANN_WHITNEY,
)
def pixel_auroc(histogram: PixelHistogram) -> float:
    """A value in [0, 1]. Raises NotComputable when a class is absent."""
    return curves.auroc(*_pixels(histogram))


@metric(
    name="pixel_ap",
    label="Pixel AP",
    level="pixel",
    definition="Average precision of the lesion pixels over all pixels of all test images with pixel truth, on the "
    "native grid of the masks, step-wise without interpolation.",
    source=STEPWISE,
)
def pixel_ap(histogram: PixelHistogram) -> float:
    """A value in [0, 1]. Raises NotComputable when a class is absent."""
    return curves.average_precision(*_pixels(histogram))


@metric(
    name="pixel_aupro",
    label="AUPRO",
    level="pixel",
    definition="Area under the mean overlap of the lesion regions (8-connected, native grid) as a function of the "
    "false positive rate over all normal pixels of all test images with pixel truth, for a rate of 0 to {aupro_limit}, "
    "linear at the limit, divided by the limit.",
    source="Bergmann et al. 2021, IJCV 129:1038-1059 (PRO), pooled over normal and abnormal images",
)
def pixel_aupro(histogram: PixelHistogram, *, aupro_limit: float = 0.3) -> float:
    """A value in [0, 1]: 1 for a perfect map, aupro_limit / 2 for a constant one.

    Raises NotComputable when a class is absent, AnomedError unless 0 < aupro_limit <= 1.
    """
    if not 0 < aupro_limit <= 1:
        raise AnomedError(f"metrics.aupro_limit: found {aupro_limit}, expected a number above 0 and at most 1")
    _, normal = _pixels(histogram)
    return curves.aupro(normal, histogram.overlap, aupro_limit)


def pixel_metrics(
    maps: Sequence[np.ndarray], masks: Sequence[np.ndarray], *, aupro_limit: float = 0.3
) -> dict[str, float | None]:
    """Every pixel metric of one method's maps, by name; None where it cannot be computed.

    maps: per image floats H x W, higher is more anomalous, normal images among them; taken as float32 and coded in 16
    bits as contract 3 says (`anomed.mapcodes`: values agree with those of the floats to some 1e-5), or uint16 codes,
    taken as they are. masks: per image bool, or integers 0 and 1, H x W, on the same grid (`anomed.images.upsample`
    brings a map there). For the reason of a None, call that metric on a PixelHistogram. Raises AnomedError on any
    other type, on shapes that differ and on NaN or infinity.
    """
    if len(maps) != len(masks) or not len(maps):
        raise AnomedError(
            f"found {len(maps)} maps and {len(masks)} masks, expected one mask for each of at least one map"
        )
    if all(one.dtype.kind == "f" and one.size for one in maps):
        maps = [one.astype(np.float32, copy=False) for one in maps]
        maps = list(map(_fit(maps).encode, maps))
    masks = [
        one.astype(bool) if one.dtype.kind in "iu" and not np.any(one > 1) and not np.any(one < 0) else one
        for one in masks
    ]
    histogram = PixelHistogram()
    for codes, mask in zip(maps, masks, strict=True):
        histogram.update(codes, mask)
    options = {"aupro_limit": aupro_limit}
    return {found.name: found.evaluate(histogram, options=options)[0] for found in metrics("pixel")}


def image_curves(scores: Any, labels: Any) -> dict[str, np.ndarray]:
    """{"image_roc", "image_pr"}, float32 2 x K with K <= 513, as `curves.roc` and so on give them; {} for one class."""
    try:
        positive, negative = _images(scores, labels)
    except NotComputable:
        return {}
    return _thinned(image_roc=curves.roc(positive, negative), image_pr=curves.precision_recall(positive, negative))


def pixel_curves(histogram: PixelHistogram) -> dict[str, np.ndarray]:
    """{"pixel_roc", "pixel_pr", "pixel_pro"}, as `image_curves`; pixel_pro runs on beyond the limit of AUPRO."""
    try:
        positive, negative = _pixels(histogram)
    except NotComputable:
        return {}
    return _thinned(
        pixel_roc=curves.roc(positive, negative),
        pixel_pr=curves.precision_recall(positive, negative),
        pixel_pro=curves.pro(negative, histogram.overlap),
    )


def _thinned(**full: np.ndarray) -> dict[str, np.ndarray]:
    return {name: curves.thin(curve) for name, curve in full.items()}


def _images(scores: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Counts per distinct score, abnormal and normal, of checked input."""
    scores, labels = np.asarray(scores), np.asarray(labels)
    if scores.ndim != 1 or scores.shape != labels.shape:
        raise AnomedError(f"found scores {scores.shape} with labels {labels.shape}, expected (N,) and (N,)")
    if not np.isfinite(scores).all():
        raise AnomedError("scores hold NaN or infinity; every score must be finite")
    if not np.isin(labels, (0, 1)).all():
        raise AnomedError(f"found the labels {np.unique(labels)[:5].tolist()}, expected 0 and 1")
    abnormal = labels.astype(bool)
    _both(int(abnormal.sum()), len(abnormal), "image")
    return curves.counts(scores, abnormal)


def _pixels(histogram: PixelHistogram) -> tuple[np.ndarray, np.ndarray]:
    _both(int(histogram.lesion.sum()), int(histogram.total.sum()), "pixel")
    return histogram.lesion, histogram.normal


def _both(abnormal: int, total: int, item: str) -> None:
    if not total:
        raise NotComputable(f"no {item} to count")
    if abnormal in (0, total):
        raise NotComputable(f"one class only: no {'normal' if abnormal else 'abnormal'} {item} among {total}")


def _fit(maps: Sequence[np.ndarray]) -> Codec:
    step = stride(sum(one.size for one in maps), math.prod({one.size for one in maps}))
    sample = np.concatenate([one.ravel()[::step] for one in maps])
    return Codec.fit(sample, min(float(one.min()) for one in maps), max(float(one.max()) for one in maps))
