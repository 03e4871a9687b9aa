"""What the phantoms share: a picture to paint and a painted one, random numbers by name, smooth random fields."""

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from anomed import records

Box = tuple[float, float, float, float]


class Picture(NamedTuple):
    """One image to paint: enough to paint it alone, in any order. kind: "normal" or the pathology."""

    image_id: str
    subject_id: str
    split: str
    kind: str


class Painted(NamedTuple):
    """image: uint8, H x W or H x W x 3. mask: bool, H x W, None where the domain has no pixel truth. boxes: [x0, y0,
    x1, y1] in pixels. clinical: as `manifest.Case.clinical`."""

    image: np.ndarray
    mask: np.ndarray | None = None
    boxes: tuple[Box, ...] = ()
    clinical: Mapping[str, Any] = MappingProxyType({})


def generator(seed: int, name: str) -> np.random.Generator:
    """Random numbers of `name` in the cohort `seed`: what is painted does not depend on its neighbours or on order."""
    return np.random.default_rng(int.from_bytes(hashlib.sha256(records.canonical([seed, name]).encode()).digest()[:16]))


def field(rng: np.random.Generator, shape: tuple[int, int], wavelength: float) -> np.ndarray:
    """A smooth random field, float32 of about unit variance: white noise every `wavelength` pixels, by cubic spline."""
    from scipy import ndimage

    coarse = rng.standard_normal([max(2, round(n / wavelength) + 1) for n in shape]).astype(np.float32)
    zoom = [n / m for n, m in zip(shape, coarse.shape, strict=True)]
    return np.float32(1.4) * ndimage.zoom(coarse, zoom, order=3, mode="nearest", grid_mode=False)


def field3(
    rng: np.random.Generator, shape: tuple[int, ...], spacing: tuple[float, ...], wavelength: float
) -> np.ndarray:
    """The same in three dimensions, `spacing` and `wavelength` in mm: interpolated by cubics to a third of the voxels
    and linearly to all."""
    from scipy import ndimage

    points = [max(2, round(n * step / wavelength) + 1) for n, step in zip(shape, spacing, strict=True)]
    coarse = rng.standard_normal(points).astype(np.float32)
    middle = [max(m, -(-n // 3)) for n, m in zip(shape, coarse.shape, strict=True)]
    fine = ndimage.zoom(coarse, [n / m for n, m in zip(middle, coarse.shape, strict=True)], order=3, mode="nearest")
    for axis, size in enumerate(shape):
        fine = _stretch(fine, size, axis)
    return np.float32(1.4) * fine


def _stretch(values: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Linear interpolation along one axis to `size` samples, ends kept."""
    at = np.linspace(0, values.shape[axis] - 1, size)
    low = np.minimum(at.astype(int), values.shape[axis] - 2)
    share = (at - low).astype(np.float32).reshape([-1 if i == axis else 1 for i in range(values.ndim)])
    start = values.take(low, axis)
    return start + share * (values.take(low + 1, axis) - start)
