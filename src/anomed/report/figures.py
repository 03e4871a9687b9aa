"""Small pictures for the report: image, truth and anomaly map, every map of a run on that run's one scale."""

import base64
import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from PIL import Image

from anomed.manifest import Prepared
from anomed.predictions import Predictions

ABNORMAL, NORMAL = 6, 3  # test images shown per domain
WIDTH, HEIGHT = 144, 112  # a thumbnail fits into this box, in pixels; six side by side fit a page
QUANTILES = (0.01, 0.999)  # ends of a colour scale, over every pixel of a run's maps
OUTLINE = (0, 229, 255)  # cyan: in no place of the colour map, and apart from it for colour-blind readers
CHUNK = 64  # maps read at a time


@dataclass(frozen=True)
class Scale:
    """The colour scale of one run, in raw score units: ends of the colours, and the extremes of the stored maps."""

    low: float
    high: float
    smallest: float
    largest: float


def pick(prepared: Prepared, available: Collection[str]) -> pd.DataFrame:
    """Manifest rows of the test images to show: abnormal ones spread over pathologies, then normal ones.

    available: ids that every shown method has a map of. Evenly spaced in manifest order, so always the same ones.
    """
    test = prepared.table[(prepared.table.split == "test") & prepared.table.image_id.isin(list(available))]
    groups = [group.index.to_list() for _, group in test[test.label == 1].groupby("pathology", sort=True)]
    groups = [groups[i] for i in _spread(len(groups), ABNORMAL)]
    shown: list[int] = []
    for place, group in enumerate(groups):
        shown += [group[i] for i in _spread(len(group), _share(ABNORMAL, len(groups), place))]
    normal = test.index[test.label == 0].to_list()
    return test.loc[shown + [normal[i] for i in _spread(len(normal), NORMAL)]]


def _share(total: int, parts: int, place: int) -> int:
    return total // parts + (place < total % parts)


def _spread(length: int, wanted: int) -> list[int]:
    """At most `wanted` of the indices 0 ... length - 1, in the middle of equal stretches."""
    count = min(length, wanted)
    return [(2 * i + 1) * length // (2 * count) for i in range(count)]


def scale(run: Predictions) -> Scale:
    """One scale for all maps of a run (valid and test): exact quantiles, by counting codes, which keep the order."""
    assert run.maps is not None, run.folder
    assert run.codec is not None, run.folder
    histogram = np.zeros(2**16, np.int64)
    for start in range(0, len(run.maps), CHUNK):
        histogram += np.bincount(np.asarray(run.maps[start : start + CHUNK]).ravel(), minlength=2**16)
    used = np.flatnonzero(histogram)
    ends = np.searchsorted(np.cumsum(histogram), np.array(QUANTILES) * histogram.sum())
    codes = np.array([*ends, used[0], used[-1]], np.uint16)
    values = run.codec.decode(codes).astype(float)
    values[np.abs(values) < 1e-9 * np.ptp(values)] = 0  # what decoding leaves of a zero is not worth printing
    return Scale(*values.tolist())


def photo(image: np.ndarray, mask: np.ndarray | None = None) -> str:
    """Thumbnail of an image (uint8, H x W or H x W x 3) as a data URI, with the outline of `mask` (bool, H x W)."""
    size = _size(image.shape)
    small = Image.fromarray(image).resize(size, Image.Resampling.BILINEAR)
    if mask is None or not mask.any():
        return _uri(small)
    pixels = np.asarray(small.convert("RGB")).copy()
    pixels[_outline(mask, size)] = OUTLINE
    return _uri(Image.fromarray(pixels))


def heat(values: np.ndarray, shape: tuple[int, ...], ends: Scale, mask: np.ndarray | None = None) -> str:
    """An anomaly map (float32, h x w) as a data URI: stretched to the image's `shape`, coloured between `ends`.

    A constant run has the lowest colour: nothing stands out. The outline of `mask` (bool, H x W) is drawn over it.
    """
    size = _size(shape)
    smooth = np.asarray(Image.fromarray(values.astype(np.float32)).resize(size, Image.Resampling.BILINEAR))
    span = ends.high - ends.low
    share = (smooth.astype(np.float64) - ends.low) / span if span > 0 else np.zeros(smooth.shape)
    levels = np.rint(np.clip(share, 0, 1) * 254).astype(np.uint8)
    if mask is not None and mask.any():
        levels[_outline(mask, size)] = 255
    return _uri(_paletted(levels))


def boxed(boxes: Sequence[Sequence[float]], shape: tuple[int, ...]) -> np.ndarray:
    """The pixels inside [x0, y0, x1, y1] boxes, to be outlined as a mask is: bool, H x W."""
    inside = np.zeros(shape[:2], bool)
    for x0, y0, x1, y1 in boxes:
        inside[int(y0) : max(int(y0) + 1, round(y1)), int(x0) : max(int(x0) + 1, round(x1))] = True
    return inside


def colour_bar() -> str:
    """The colours from low to high, left to right, as a data URI."""
    return _uri(_paletted(np.tile(np.arange(255, dtype=np.uint8), (8, 1))))


def _size(shape: tuple[int, ...]) -> tuple[int, int]:
    """Width and height of a thumbnail of an array of this shape, aspect ratio kept."""
    factor = min(WIDTH / shape[1], HEIGHT / shape[0])
    return max(1, round(shape[1] * factor)), max(1, round(shape[0] * factor))


def _outline(mask: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The ring of pixels just outside a mask at thumbnail size: even a one-pixel lesion stays visible inside it."""
    covered = Image.fromarray(mask.astype(np.float32)).resize(size, Image.Resampling.BOX)
    inside = np.pad(np.asarray(covered) > 0, 1)
    grown = inside.copy()
    for axis in (0, 1):
        for step in (-1, 1):
            grown |= np.roll(inside, step, axis)
    return (grown & ~inside)[1:-1, 1:-1]


def _paletted(levels: np.ndarray) -> Image.Image:
    """uint8 levels 0 ... 254 in inferno (even steps of lightness, for any colour vision), 255 in the outline's."""
    import matplotlib

    colours = matplotlib.colormaps["inferno"](np.linspace(0, 1, 255), bytes=True)[:, :3]
    picture = Image.fromarray(levels).convert("L")
    picture.putpalette(np.vstack([colours, np.array([OUTLINE], np.uint8)]).tobytes())
    return picture


def _uri(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
