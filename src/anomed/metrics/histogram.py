"""Counting pixels: one histogram over map codes carries every pixel metric."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from anomed.errors import AnomedError
from anomed.mapcodes import TOP
from anomed.metrics.counts import Counts

REGIONS = np.ones((3, 3), bool)  # 8-connectivity


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
        masks = (mask,) if within is None else (mask, within)
        kind = str(getattr(codes, "dtype", type(codes).__name__))
        if (
            kind not in ("uint16", "torch.int32")
            or codes.ndim < 2
            or any(str(getattr(one, "dtype", "")) != "bool" or one.shape != tuple(codes.shape) for one in masks)
        ):
            found = " and ".join(f"{getattr(one, 'dtype', type(one).__name__)} {np.shape(one)}" for one in masks)
            raise AnomedError(
                f"found codes {kind} {tuple(np.shape(codes))} with a mask {found}, expected uint16 (..., H, W) with "
                "bool (..., H, W)"
            )
        if within is not None:
            mask = mask & within
        self.total += _bincount(codes if within is None else codes[within])
        self.images += int(np.prod(codes.shape[:-2]))
        for place in np.ndindex(codes.shape[:-2]):
            self._lesions(codes[place], mask[place])

    def _lesions(self, codes: Any, mask: np.ndarray) -> None:
        """Of one image. Added pixel by pixel, so that batches of any size give the same sums."""
        rows = np.flatnonzero(mask.any(axis=1))
        if not rows.size:
            return
        codes, mask = codes[rows[0] : rows[-1] + 1], mask[rows[0] : rows[-1] + 1]
        columns = np.flatnonzero(mask.any(axis=0))
        codes, mask = codes[:, columns[0] : columns[-1] + 1], mask[:, columns[0] : columns[-1] + 1]
        region, regions = labelled(mask)
        hit = (codes if isinstance(codes, np.ndarray) else codes.cpu().numpy())[mask]
        np.add.at(self.lesion, hit, 1)
        np.add.at(self.overlap, hit, 1 / np.bincount(region)[region])
        self.regions += regions

    def merge(self, other: "PixelHistogram") -> None:
        """Add another histogram's counts; both must come from one codec."""
        self.total += other.total
        self.lesion += other.lesion
        self.overlap += other.overlap
        self.regions += other.regions
        self.images += other.images

    def counts(self, threshold: int | None = None) -> Counts:
        """What metrics take. threshold: the code from which on a pixel is called abnormal, up to 65,536 (none is).

        Neighbouring codes without lesion pixels share a place: no curve bends there. Raises AnomedError for a
        threshold that is no code.
        """
        if threshold is not None and not (isinstance(threshold, int | np.integer) and 0 <= threshold <= TOP + 1):
            raise AnomedError(f"threshold: found {threshold!r}, expected a code, a whole number from 0 to {TOP + 1}")
        begins = self.lesion > 0
        begins[1:] |= begins[:-1]
        begins[0] = True
        return self.binned(_starts(begins, threshold), threshold)

    def binned(self, starts: np.ndarray, threshold: int | None) -> Counts:
        """Counts with one place from each code in `starts` to the next: ascending from 0, `threshold` among them."""
        total, lesion, overlap = (np.add.reduceat(one, starts) for one in (self.total, self.lesion, self.overlap))
        several = np.add.reduceat(self.lesion > 0, starts, dtype=int) > 0
        several &= np.add.reduceat(self.total > 0, starts, dtype=int) > 1
        cut = None if threshold is None else int(np.searchsorted(starts, threshold))
        merged = several if several.any() else None
        return Counts(total - lesion, lesion, overlap, cut, item="pixel", scores=starts, merged=merged)


def labelled(mask: np.ndarray) -> tuple[np.ndarray, int]:
    """Of each lesion pixel of a mask, bool H x W, in reading order, the number of its region (8-connected, from 1 on),
    and how many regions there are."""
    from scipy.ndimage import label

    numbered, regions = label(mask, REGIONS)
    return numbered[mask], regions


def paired(maps: Sequence[Any], masks: Sequence[Any]) -> None:
    """Raises AnomedError unless there is one mask for each of at least one map."""
    if len(maps) != len(masks) or not len(maps):
        raise AnomedError(
            f"found {len(maps)} maps and {len(masks)} masks, expected one mask for each of at least one map"
        )


def _starts(begins: np.ndarray, threshold: int | None) -> np.ndarray:
    if threshold is not None and threshold <= TOP:
        begins[threshold] = True
    return np.flatnonzero(begins)


def bins(whole: PixelHistogram, threshold: int | None, number: int) -> np.ndarray:
    """Codes at which some `number` bins of a set of pixels begin, for `PixelHistogram.binned`.

    Where lesions have few codes, every one is a bin and nothing is lost. Else bins are cut at quantiles, half of them
    of the lesion pixels, a quarter each of all pixels and of regions; a code of more than a bin's share has its own.
    """
    exact = whole.counts(threshold).scores
    assert exact is not None
    if len(exact) <= 4 * number:
        return exact
    parts = [one / max(one.sum(), 1) for one in (whole.total, whole.lesion, whole.overlap)]
    mass = (parts[0] + 2 * parts[1] + parts[2]) * number / 4
    heavy = mass >= 1
    begins = np.diff(np.floor(np.cumsum(mass) - mass), prepend=-1) > 0
    begins |= heavy | np.append(False, heavy[:-1])
    return _starts(begins, threshold)


def _bincount(codes: Any) -> np.ndarray:
    if isinstance(codes, np.ndarray):
        return np.bincount(codes.ravel(), minlength=TOP + 1)
    found = codes.flatten().bincount(minlength=TOP + 1).cpu()
    if len(found) > TOP + 1:
        raise AnomedError(f"found the code {len(found) - 1}, expected codes from 0 to {TOP}")
    return np.asarray(found)
