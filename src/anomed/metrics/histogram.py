"""Counting pixels: one histogram over map codes carries every pixel metric."""

from typing import Any

import numpy as np

from anomed.errors import AnomedError
from anomed.mapcodes import TOP
from anomed.metrics.counts import Counts

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

    def update(self, codes: Any, mask: np.ndarray, within: np.ndarray | None = None) -> None:
        """Count one image, or several at once.

        codes: uint16 (..., H, W), or an int32 tensor of torch on any device, holding 0 to 65,535. mask: bool of that
        shape. within: bool of that shape, the pixels to count; None: all. A lesion's area is that of the part counted.
        Raises AnomedError on any other type or shape.
        """
        plain = isinstance(codes, np.ndarray)
        kinds = codes.dtype == np.uint16 if plain else str(codes.dtype) == "torch.int32"
        masks = (mask,) if within is None else (mask, within)
        fits = all(one.dtype == bool and one.shape == tuple(codes.shape) for one in masks)
        if not kinds or not fits or codes.ndim < 2:
            found = " and ".join(f"{one.dtype} {one.shape}" for one in masks)
            raise AnomedError(
                f"found codes {codes.dtype} {tuple(codes.shape)} with a mask {found}, expected uint16 (..., H, W) with "
                "bool (..., H, W)"
            )
        self.images += int(np.prod(codes.shape[:-2]))
        if within is not None:
            mask = mask & within
        self.total += _bincount(codes if within is None else codes[within])
        lesions = [_lesions(codes[at], mask[at]) for at in np.ndindex(codes.shape[:-2]) if mask[at].any()]
        if lesions:
            hit = np.concatenate([found[0] for found in lesions])
            self.lesion += np.bincount(hit, minlength=TOP + 1)
            self.overlap += np.bincount(hit, np.concatenate([found[1] for found in lesions]), minlength=TOP + 1)
            self.regions += sum(found[2] for found in lesions)

    def merge(self, other: "PixelHistogram") -> None:
        """Add another histogram's counts; both must come from one codec."""
        self.total += other.total
        self.lesion += other.lesion
        self.overlap += other.overlap
        self.regions += other.regions
        self.images += other.images

    def counts(self, threshold: int | None = None) -> Counts:
        """What metrics take: K = 65,536 codes. threshold: the code from which on a pixel is called abnormal."""
        return Counts(self.total - self.lesion, self.lesion, self.overlap, threshold, item="pixel")


def _lesions(codes: Any, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Of one image with lesion pixels: their codes, 1 / area of their regions, and the number of regions."""
    from scipy.ndimage import label

    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    box = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
    inside = mask[box]
    numbered, regions = label(inside, REGIONS)
    region = numbered[inside]
    part = codes[box] if isinstance(codes, np.ndarray) else codes[box].cpu().numpy()
    return part[inside], 1 / np.bincount(region)[region], regions


def _bincount(codes: Any) -> np.ndarray:
    if isinstance(codes, np.ndarray):
        return np.bincount(codes.ravel(), minlength=TOP + 1)
    return np.asarray(codes.flatten().bincount(minlength=TOP + 1).cpu())
