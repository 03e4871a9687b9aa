"""What a voxel grid must be: its shape, its affine, the refusals of both, and how far two grids are apart."""

import itertools
import math
from typing import Any

import numpy as np

from anomed.errors import CaseProblem

MIN_VOXELS = 4  # along every axis: fewer are a picture or a localiser, no volume
EDGES = (0.05, 20.0)  # mm; outside it the unit of the file is another (metres, micrometres) or its header is damaged
TOLERANCE = 0.1  # of a voxel edge: how far two grids may be apart and still be one
FLAT = 1e-3  # volume of the parallelepiped that the axes, made one long, span: below it they lie in a plane


def check_shape(name: str, shape: tuple[int, ...]) -> None:
    """Raise CaseProblem dimensions or too_thin unless it is the shape of one volume; trailing axes of 1 are no axes."""
    volumes = math.prod(shape[3:])
    if len(shape) < 3 or volumes != 1:
        found = f"{len(shape)} axes ({times(shape)})" + (f", that is {volumes} volumes" if len(shape) > 3 else "")
        hint = "split it, and give one volume" if len(shape) > 3 else "give the volume, not a slice"
        raise CaseProblem(name, "dimensions", found, "3 axes", hint)
    if min(shape[:3]) < MIN_VOXELS:
        expected = f"at least {MIN_VOXELS} along every axis"
        raise CaseProblem(name, "too_thin", f"{times(shape[:3])} voxels", expected, "give the volume, not a localiser")


def check_affine(name: str, affine: np.ndarray, what: str) -> None:
    """Raise CaseProblem singular_affine unless three axes span space, with edges in mm that a scanner could make.

    affine: 4 x 4, voxel to mm. what: its name in the message.
    """
    if not np.isfinite(affine).all():
        raise singular(name, f"a {what} with NaN or infinity")
    lengths = edges(affine)
    if lengths.min() < EDGES[0] or lengths.max() > EDGES[1]:
        raise singular(name, f"a {what} with voxel edges of {times(lengths)} mm")
    if abs(np.linalg.det(affine[:3, :3] / lengths)) < FLAT:
        raise singular(name, f"a {what} with parallel axes")


def singular(name: str, found: str) -> CaseProblem:
    """The refusal of an affine."""
    expected = f"three axes with edges of {EDGES[0]:g} to {EDGES[1]:g} mm"
    return CaseProblem(name, "singular_affine", found, expected, "correct the header, or convert the source again")


def not_scalar(name: str, found: str) -> CaseProblem:
    """The refusal of voxels that are no single real number."""
    return CaseProblem(name, "not_scalar", found, "one real number a voxel", "give grey values; of complex, magnitudes")


def edges(affine: np.ndarray) -> np.ndarray:
    """Lengths of a voxel's edges in mm: 3 values."""
    return np.linalg.norm(affine[:3, :3], axis=0)


def apart(shape: tuple[int, ...], first: np.ndarray, second: np.ndarray) -> float:
    """The largest distance in mm between what two affines make of one of the eight corner voxels of a grid."""
    corners = np.array([(*corner, 1) for corner in itertools.product(*((0, size - 1) for size in shape))])
    return float(np.linalg.norm(corners @ (first - second).T, axis=1).max())


def times(values: Any) -> str:
    """Numbers as text: "240 x 240 x 155"."""
    return " x ".join(f"{value:.4g}" for value in values)
