"""Grey levels 0 to 255 from the values of a volume: the intensity steps as MONAI dictionary transforms.

A volume is a dictionary: `image` float32, 1 x X x Y x Z; `organ` bool or uint8 on the same grid, nonzero inside
(absent: every voxel belongs to the organ); `subject`, the name that messages give. Statistics are float64 over the
organ's voxels alone: background and air would otherwise decide them.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from monai.transforms import Compose, MapTransform, ScaleIntensityRange
from monai.utils import convert_to_dst_type, convert_to_numpy

from anomed.errors import AnomedError, CaseProblem
from anomed.preprocess import intensity_steps
from anomed.settings import Settings

KEYS = ("image",)
HINT = "look at the image and at its organ mask, or exclude the subject"


def _organ(volume: dict[str, Any]) -> np.ndarray:
    """The organ's voxels: bool, 1 x X x Y x Z."""
    if "organ" not in volume:
        return np.ones(tuple(volume["image"].shape), bool)
    return convert_to_numpy(volume["organ"]).astype(bool)


def _values(volume: dict[str, Any]) -> np.ndarray:
    """The values of the organ's voxels: float64, 1-D. Raises CaseProblem when they are none or all alike."""
    values = convert_to_numpy(volume["image"])[_organ(volume)].astype(np.float64)
    if not values.size:
        raise CaseProblem(volume["subject"], "empty_organ", "an organ without voxels", "some", HINT)
    if values.min() == values.max():
        raise _constant(volume, f"{values[0]:g} at each of the {values.size} voxels of the organ")
    return values


def _constant(volume: dict[str, Any], found: str) -> CaseProblem:
    return CaseProblem(volume["subject"], "constant_organ", found, "values that differ", HINT)


def _landmarks(volume: dict[str, Any], percentiles: list[float]) -> np.ndarray:
    """Percentiles (linear interpolation) of the organ's voxels. Raises CaseProblem when first and last are equal."""
    found = np.percentile(_values(volume), percentiles)
    if found[0] == found[-1]:
        spread = f"{found[0]:g} at the percentiles {percentiles[0]:g} and {percentiles[-1]:g} of the organ's voxels"
        raise _constant(volume, spread)
    return found


def _scaled(volume: dict[str, Any], low: float, high: float) -> dict[str, Any]:
    """`low` to 0 and `high` to 255, clipped."""
    return {**volume, "image": ScaleIntensityRange(low, high, 0, 255, clip=True)(volume["image"])}


class Window(MapTransform):
    """See intensity_steps.Window."""

    def __init__(self, options: intensity_steps.Window):
        super().__init__(KEYS)
        self.low, self.high = options.range

    def __call__(self, data: Any) -> dict[str, Any]:
        return _scaled(data, self.low, self.high)


class ZScore(MapTransform):
    """See intensity_steps.ZScore. MONAI's NormalizeIntensity knows no organ: nonzero values are another mask."""

    def __init__(self, options: intensity_steps.ZScore):
        super().__init__(KEYS)
        self.window = options.window

    def __call__(self, data: Any) -> dict[str, Any]:
        values = _values(data)
        mean, deviation = float(values.mean()), float(values.std())
        low, high = self.window
        return _scaled(data, mean + low * deviation, mean + high * deviation)


class Percentile(MapTransform):
    """See intensity_steps.Percentile. MONAI's ScaleIntensityRangePercentiles takes the whole image."""

    def __init__(self, options: intensity_steps.Percentile):
        super().__init__(KEYS)
        self.percentiles: list[float] = [options.low, options.high]

    def __call__(self, data: Any) -> dict[str, Any]:
        low, high = _landmarks(data, self.percentiles).tolist()
        return _scaled(data, low, high)


class Nyul(MapTransform):
    """See intensity_steps.Nyul. percentiles, levels: what `fit` learned, the standard level of each landmark."""

    def __init__(self, percentiles: list[float], levels: list[float]):
        super().__init__(KEYS)
        self.percentiles, self.levels = percentiles, np.array(levels)

    def __call__(self, data: Any) -> dict[str, Any]:
        organ, values = _organ(data), _values(data)
        # Landmarks coincide where many voxels share a value; that value goes to the mean of their levels.
        found, place = np.unique(_landmarks(data, self.percentiles), return_inverse=True)
        levels = np.bincount(place, self.levels) / np.bincount(place)
        slopes = np.diff(levels) / np.diff(found)
        ends = np.array([min(values.min(), found[0]), max(values.max(), found[-1])])
        outer = levels[[0, -1]] + slopes[[0, -1]] * (ends - found[[0, -1]])
        mapped = np.interp(values, np.r_[ends[0], found, ends[1]], np.r_[outer[0], levels, outer[1]])
        image = np.zeros(organ.shape, np.float32)
        image[organ] = mapped.clip(0, 255)
        return {**data, "image": convert_to_dst_type(image, data["image"])[0]}


class Background(MapTransform):
    """Voxels outside the organ to 0, the black of every image."""

    def __init__(self) -> None:
        super().__init__(KEYS)

    def __call__(self, data: Any) -> dict[str, Any]:
        image = np.where(_organ(data), convert_to_numpy(data["image"]), np.float32(0))
        return {**data, "image": convert_to_dst_type(image, data["image"])[0]}


TRANSFORMS: dict[str, Any] = {"window": Window, "z_score": ZScore, "percentile": Percentile}


def compose(steps: list[tuple[str, Settings]], fitted: dict[str, Any]) -> Compose:
    """The steps of whole volumes as one transform from volume to volume; `slice_min_max` is left to the slices.

    fitted: what `fit` returned for the same steps. The image becomes float32, 0..255 in the organ (its own values
    when `slice_min_max` stands alone) and 0 outside. Of a bad volume the transform raises MONAI's RuntimeError,
    caused by CaseProblem `constant_organ` or `empty_organ`.
    """
    transforms: list[MapTransform] = []
    for name, options in steps:
        if name == "nyul":
            transforms.append(Nyul(**fitted["nyul"]))
        elif name != "slice_min_max":
            transforms.append(TRANSFORMS[name](options))
    return Compose([*transforms, Background()])


def fit(steps: list[tuple[str, Settings]], volumes: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What the steps learn from the train volumes, for JSON: {} or {"nyul": {"percentiles": [...], "levels": [...]}}.

    volumes: of train alone, one in memory at a time; untouched when no step learns. Each volume's landmarks are moved
    linearly so that the outermost two are the ends of the scale, then averaged over the volumes. Raises CaseProblem
    `constant_organ` or `empty_organ`, AnomedError when there is no volume.
    """
    for place, (_, options) in enumerate(steps):
        if isinstance(options, intensity_steps.Nyul):
            before, percentiles = compose(steps[:place], {}), list(options.landmarks)
            moved = []
            for volume in volumes:
                found = _landmarks(before(volume), percentiles)
                moved.append(np.interp(found, found[[0, -1]], options.scale))
            if not moved:
                raise AnomedError("nyul: found no train volume, expected some; its standard histogram is learned there")
            return {"nyul": {"percentiles": percentiles, "levels": np.mean(moved, axis=0).tolist()}}
    return {}


def slice_min_max(image: np.ndarray) -> np.ndarray:
    """A finished slice, H x W, with its minimum at 0 and its maximum at 255: float64; all 0 when they are equal.

    Images written by matplotlib, as BMAD's, are the same to two levels: it cuts where `to_uint8` rounds.
    """
    low, high = float(image.min()), float(image.max())
    return (image.astype(np.float64) - low) * (255 / (high - low) if high > low else 0)


def to_uint8(array: np.ndarray) -> np.ndarray:
    """Grey levels as uint8: clipped to 0..255, rounded half to even."""
    return np.rint(np.clip(array, 0, 255)).astype(np.uint8)
