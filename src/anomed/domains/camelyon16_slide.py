"""A piece of a whole slide: a square cut from the full resolution of a tiled TIFF, other tiles left unread."""

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from anomed.errors import AnomedError, CaseProblem


def require() -> None:
    """Raises AnomedError unless the libraries that read slides are installed."""
    missing = [name for name in ("tifffile", "imagecodecs") if importlib.util.find_spec(name) is None]
    if missing:
        raise AnomedError(f"whole slides need {' and '.join(missing)}: pip install tifffile imagecodecs")


def cut(path: Path, name: str, left: int, top: int, size: int) -> tuple[np.ndarray, str]:
    """uint8, size x size x 3, whose upper left pixel is column `left`, row `top` of the first page; and the sha256 of
    the encoded tiles it was cut from.

    Tiles that the scanner left out (no bytes: there was no tissue) are white. name: what messages call the slide.
    Raises CaseProblem: damaged_slide, slide_format, outside_slide or empty_patch.
    """
    import tifffile

    case = f"{name} at {left}, {top}"
    try:
        with tifffile.TiffFile(path) as file:
            page: Any = file.pages[0]
            _check(page, case, left, top, size)
            pixels, digest = _paste(file.filehandle, page, left, top, size)
    except (tifffile.TiffFileError, OSError, ValueError, RuntimeError, IndexError, TypeError, KeyError) as error:
        if isinstance(error, CaseProblem):
            raise
        found, hint = f"tiles that do not decode ({error})", "copy or download the slide again"
        raise CaseProblem(case, "damaged_slide", found, "a whole tiled TIFF", hint) from None
    if digest is None:
        hint = "correct the coordinates: the scanner left this place out"
        raise CaseProblem(case, "empty_patch", "no stored tile at all", "tissue", hint)
    return pixels, digest


def _check(page: Any, case: str, left: int, top: int, size: int) -> None:
    if not page.is_tiled or page.dtype != np.uint8 or page.ndim != 3 or page.shape[2] != 3:
        found = f"{'tiles' if page.is_tiled else 'strips'}, {page.dtype}, shape {page.shape}"
        hint = "give the slide as Camelyon16 distributes it"
        raise CaseProblem(case, "slide_format", found, "tiles, uint8, height x width x 3", hint)
    height, width = page.shape[:2]
    if left < 0 or top < 0 or left + size > width or top + size > height:
        found, expected = f"a square of {size} pixels there", f"one inside {width} x {height} (width x height)"
        hint = "correct the coordinates or `anchor`, or get the slide they were made for"
        raise CaseProblem(case, "outside_slide", found, expected, hint)


def _paste(file: Any, page: Any, left: int, top: int, size: int) -> tuple[np.ndarray, str | None]:
    """The square, and the digest of the tiles under it; None where none is stored."""
    pixels = np.full((size, size, 3), 255, np.uint8)
    digest, stored = hashlib.sha256(), False
    high, wide = page.tilelength, page.tilewidth
    across = -(-page.shape[1] // wide)
    for row in range(top // high, (top + size - 1) // high + 1):
        for column in range(left // wide, (left + size - 1) // wide + 1):
            index = row * across + column
            if not page.databytecounts[index]:
                continue
            file.seek(page.dataoffsets[index])
            data = file.read(page.databytecounts[index])
            if len(data) != page.databytecounts[index]:  # the decoder would fill the rest with grey
                raise ValueError(f"tile {index} goes beyond the end of the file")
            stored = True
            digest.update(data)
            tile = page.decode(data, index, jpegtables=page.jpegtables, jpegheader=page.jpegheader)[0][0]
            y, x = row * high - top, column * wide - left  # of the tile's corner, in the square
            part = tile[max(0, -y) : size - y, max(0, -x) : size - x]
            y, x = max(0, y), max(0, x)
            pixels[y : y + part.shape[0], x : x + part.shape[1]] = part
    return pixels, digest.hexdigest() if stored else None
