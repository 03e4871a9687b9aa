"""MNI152 as an atlas of a head: the tissue maps that nilearn ships, and what they lack."""

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anomed import packages
from anomed.errors import AnomedError

ORIGIN = (-98.0, -134.0, -72.0)  # mm, MNI position of the first voxel of nilearn's 1 mm maps
SHAPE = (197, 233, 189)


def template_files() -> dict[str, Path]:
    """The maps inside the installed nilearn, by tissue; nilearn itself is not imported. AnomedError when absent."""
    names = {name: f"mni_icbm152_{name}_tal_nlin_sym_09a_converted.nii.gz" for name in ("t1", "gm", "wm")}
    return {name: packages.inside("nilearn", f"datasets/data/{file}") for name, file in names.items()}


@dataclass(frozen=True)
class Atlas:
    """MNI152 at 1 mm, float32. grey, white, csf: tissue fractions, sum at most 1. caps: closeness to the ventricles,
    0 to 1. depth: signed distance from the brain's hull in mm, at 2 mm, negative inside.
    """

    grey: np.ndarray
    white: np.ndarray
    csf: np.ndarray
    caps: np.ndarray
    depth: np.ndarray

    @classmethod
    def load(cls) -> "Atlas":
        """Read the maps and derive what they lack: CSF = brain - GM - WM, ventricles and the hull."""
        import nibabel
        from scipy import ndimage

        maps = {}
        for name, path in template_files().items():
            data = np.asanyarray(nibabel.load(path).dataobj)
            if data.shape != SHAPE:
                raise AnomedError(
                    f"{path.name}: found shape {data.shape}, expected {SHAPE}; install the locked nilearn"
                )
            maps[name] = data.astype(np.float32) / data.max()
        brain = maps["t1"] > 0
        # The maps average many people: raising them to a power and normalising gives back an individual's sharp edges.
        parts = [maps["gm"] ** 2, maps["wm"] ** 2, np.clip(brain - maps["gm"] - maps["wm"], 0, 1) ** 1.5]
        total = np.maximum(parts[0] + parts[1] + parts[2], 1e-3)
        grey, white, csf = (ndimage.gaussian_filter(part / total * brain, 0.6) for part in parts)
        depth = _hull_depth(brain[::2, ::2, ::2])
        deep = ndimage.zoom(
            (depth < -22).astype(np.float32), [n / m for n, m in zip(SHAPE, depth.shape, strict=True)], order=1
        )
        caps = np.clip(3 * ndimage.gaussian_filter(csf * (csf > 0.5) * deep, 2.5), 0, 1)
        return cls(grey, white, csf, caps, depth)


def _hull_depth(brain: np.ndarray) -> np.ndarray:
    """Signed distance in mm (2 mm voxels) from the brain closed by 20 mm, so that the skull does not follow sulci."""
    from scipy import ndimage

    grown = ndimage.distance_transform_edt(~np.pad(brain, 16)) < 10
    hull = (ndimage.distance_transform_edt(grown) > 10)[16:-16, 16:-16, 16:-16]
    depth = ndimage.distance_transform_edt(~hull) - ndimage.distance_transform_edt(hull)
    return ndimage.gaussian_filter((2 * depth).astype(np.float32), 2.0)


@functools.cache
def shared() -> Atlas:
    """The atlas, loaded once (some two seconds)."""
    return Atlas.load()
