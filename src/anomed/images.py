"""Arrays in and out: the only place that touches axes, spacing and resizing."""

import functools
import io
import re
import struct
import zlib

import numpy as np
from PIL import Image

from anomed.errors import CaseProblem

MAX_PIXELS = 2**26  # 8,192 x 8,192; the largest images of the benchmarks are 1,024 x 1,024
BONE_TOLERANCE = 2  # levels a channel; writers of the colour map round differently by one
_PNG = b"\x89PNG\r\n\x1a\n"
_MAGIC = {
    b"\xff\xd8": "a JPEG",
    b"BM": "a BMP",
    b"GIF8": "a GIF",
    b"II*\0": "a TIFF",
    b"MM\0*": "a TIFF",
    b"PK": "a zip",
}
_FORMATS = {_PNG: "PNG", b"\xff\xd8\xff": "JPEG", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF"}
_MODES = {"P": "palette", "PA": "palette", "LA": "grey_alpha", "CMYK": "colour_model", "LAB": "colour_model"}
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)  # what ends the coded pixels of a scan
_COLOUR_TYPES = {0: "grey", 2: "RGB", 3: "palette", 4: "grey with alpha", 6: "RGBA"}


def encode_png(image: np.ndarray) -> bytes:
    """uint8 H x W or H x W x 3 to the bytes of a PNG."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def decode_png(data: bytes, name: str) -> np.ndarray:
    """The pixels of an 8-bit grey, RGB or RGBA PNG: uint8, H x W, H x W x 3 or H x W x 4, never transposed.

    `name` is what messages call the file. Every chunk's checksum is verified, so that damaged pixels cannot pass.
    Raises CaseProblem.
    """
    return _pixels(data, name, "8-bit grey, RGB or RGBA", {0: (8,), 2: (8,), 6: (8,)})


def read_png(data: bytes, name: str, colour: bool) -> np.ndarray:
    """An image as a user has it: uint8, H x W (grey domain) or H x W x 3 (`colour`).

    Grey domains take grey PNGs, RGB(A) with equal channels, and RGB(A) written through matplotlib's *bone* colour map,
    which is inverted by the nearest of its 256 colours, at most 2 levels a channel away (its luminance is not its
    inverse). Colour domains take RGB(A) as it is; grey becomes three equal channels, the same picture. Alpha must be
    255 everywhere. Raises CaseProblem.
    """
    return _in_channels(decode_png(data, name), name, colour)


def read_image(data: bytes, name: str, colour: bool) -> np.ndarray:
    """The same of a PNG, JPEG, BMP or TIFF of 8 bit: what the file is counts, not what its name ends with.

    A file that ends early is refused, and so are palettes, CMYK, more or fewer than 8 bit, several images in one file,
    and pixels that EXIF declares turned or mirrored: of those it cannot be told which way boxes and masks lie. A JPEG
    has no checksums: bytes that changed inside it are not noticed. Raises CaseProblem.
    """
    kind = format_of(data, name)
    return _in_channels(decode_png(data, name) if kind == "PNG" else _decoded(data, name, kind), name, colour)


def format_of(data: bytes, name: str) -> str:
    """PNG, JPEG, BMP or TIFF, by the first bytes. Raises CaseProblem where it is none of them."""
    kind = next((kind for magic, kind in _FORMATS.items() if data.startswith(magic)), None)
    if kind is None:
        hint = "convert it: renaming a file does not change its format"
        raise CaseProblem(name, "not_an_image", _guess(data), "a PNG, JPEG, BMP or TIFF", hint)
    return kind


def _guess(data: bytes) -> str:
    return next(
        (kind for magic, kind in _MAGIC.items() if data.startswith(magic)), "other bytes" if data else "an empty file"
    )


def _decoded(data: bytes, name: str, kind: str) -> np.ndarray:
    """The pixels of a JPEG, BMP or TIFF: uint8, H x W, H x W x 3 or H x W x 4, never transposed."""
    expected = f"a {kind}, 8-bit grey or RGB"
    if kind == "JPEG":
        _check_jpeg(data, name, expected)
    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                limit, hint = f"at most {MAX_PIXELS:,} pixels", "check the file, or cut it into tiles"
                raise CaseProblem(name, "too_large", f"{height} x {width} pixels", limit, hint)
            if (frames := getattr(image, "n_frames", 1)) > 1:
                raise CaseProblem(
                    name, "several_images", f"{frames} images", expected, "write each as a file of its own"
                )
            bits = _bits(image, data, kind)  # of 16 Pillow takes the upper 8, and stretches fewer than 8
            signed = kind == "TIFF" and {*getattr(image, "tag_v2", {}).get(339, ())} - {1, 4}  # 1: unsigned, 4: untyped
            if image.mode not in ("L", "RGB", "RGBA") or signed or bits != 8:
                mode = f"mode {image.mode}" + f" of {bits} bit" * (bits != 8)
                found = f"signed or real numbers, {mode}" if signed else mode
                code = "bit_depth" if signed or bits != 8 else _MODES.get(image.mode, "bit_depth")
                hint = "map it to 8 bit with a window you choose and state" if code == "bit_depth" else _resave("RGB")
                raise CaseProblem(name, code, found, expected, hint)
            _check_upright(image, name)
            return np.array(image)
    except (OSError, SyntaxError, ValueError, TypeError, struct.error, Image.DecompressionBombError) as error:
        reason = re.sub(r" <.*>", "", str(error))  # an address, other in every run
        raise CaseProblem(name, "damaged_image", f"pixels that do not decode ({reason})", expected, _AGAIN) from None


def _bits(image: Image.Image, data: bytes, kind: str) -> int:
    """Bits of a channel as a TIFF or BMP stores it, the most where channels differ; 8 for a palette."""
    if kind == "TIFF":
        return max({*getattr(image, "tag_v2", {}).get(258, (1,))} - {8}, default=8)
    if kind == "BMP" and image.mode != "P":
        pixel = struct.unpack_from("<H", data, 24 if data[14] == 12 else 28)[0]  # 12: the header of OS/2
        return 8 if pixel in (8, 24, 32) else int(pixel)
    return 8


def _check_upright(image: Image.Image, name: str) -> None:
    """Raises CaseProblem when EXIF turns or mirrors the pixels; Pillow itself obeys it in a TIFF and nowhere else."""
    if (turned := image.getexif().get(0x0112, 1)) not in (0, 1):
        hint = "store the pixels as they are to be seen: ImageOps.exif_transpose(Image.open(f)).save(f)"
        raise CaseProblem(name, "exif_orientation", f"EXIF orientation {turned}", "orientation 1 or none", hint)


def _check_jpeg(data: bytes, name: str, expected: str) -> None:
    """Raises CaseProblem when a JPEG has no end, which Pillow does not always notice, or other than 8 bit."""
    at = 2
    while data[at : at + 2] != b"\xff\xd9":
        if len(data) < at + 4 or data[at] != 0xFF:
            raise CaseProblem(name, "truncated_image", f"{len(data)} bytes and no end", expected, _AGAIN)
        marker = data[at + 1]
        if marker in range(0xC0, 0xD0) and marker not in (0xC4, 0xC8, 0xCC) and data[at + 4 : at + 5] != b"\x08":
            hint = "map it to 8 bit with a window you choose and state"
            raise CaseProblem(name, "bit_depth", f"{data[at + 4 : at + 5].hex() or 'no'} bit", expected, hint)
        at += 1 if marker == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4])  # 0xFF: a byte that fills
        if marker == 0xDA:
            found = _JPEG_MARKER.search(data, at)
            at = found.start() if found else len(data)


def _in_channels(array: np.ndarray, name: str, colour: bool) -> np.ndarray:
    """uint8, H x W (x 3 or 4) to H x W or, where `colour`, H x W x 3, as `read_png` says."""
    if array.ndim == 3 and array.shape[2] == 4:
        if (array[..., 3] != 255).any():
            raise CaseProblem(
                name,
                "transparent_image",
                f"alpha as low as {array[..., 3].min()}",
                "alpha 255 everywhere",
                _resave("RGB"),
            )
        array = np.ascontiguousarray(array[..., :3])
    if colour:
        return array if array.ndim == 3 else np.repeat(array[..., None], 3, axis=2)
    if array.ndim == 2:
        return array
    if (array[..., :1] == array).all():
        return array[..., 0].copy()
    return _from_bone(array, name)


def read_mask(data: bytes, name: str) -> np.ndarray:
    """A pixel mask: bool, H x W; anomalous where any colour channel is above 0, whatever its level. Alpha is no colour.

    Takes grey of 1 to 8 bits, RGB and RGBA (colour-mapped masks have alpha 255 everywhere). A coloured but transparent
    pixel contradicts itself. Raises CaseProblem.
    """
    array = _pixels(data, name, "grey (1 to 8 bit), RGB or RGBA", {0: (1, 2, 4, 8), 2: (8,), 6: (8,)})
    mask = np.asarray(array[..., :3].any(axis=2) if array.ndim == 3 else array > 0)
    if array.ndim == 3 and array.shape[2] == 4 and (mask & (array[..., 3] == 0)).any():
        found = f"{int((mask & (array[..., 3] == 0)).sum())} coloured but fully transparent pixels"
        raise CaseProblem(name, "transparent_mask", found, "opaque pixels", _resave("L", "if they are anomalous, "))
    return mask


def _resave(mode: str, condition: str = "") -> str:
    return f'{condition}save it again with Pillow: Image.open(f).convert("{mode}").save(f)'


def _pixels(data: bytes, name: str, expected: str, accepted: dict[int, tuple[int, ...]]) -> np.ndarray:
    """Decode a PNG whose colour type and bit depth are `accepted`: bool (1-bit) or uint8, H x W (x 3 or 4)."""
    expected = f"a PNG, {expected}"
    if not data.startswith(_PNG):
        hint = "convert it: renaming a file does not change its format"
        raise CaseProblem(name, "not_a_png", _guess(data), expected, hint)
    chunks = _chunks(data, name, expected)
    width, height, depth, kind_code = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    found = f"{depth}-bit {_COLOUR_TYPES.get(kind_code, f'colour type {kind_code}')}"
    if width == 0 or height == 0:
        raise CaseProblem(name, "zero_size", f"{height} x {width} pixels", expected, "write the image again")
    if width * height > MAX_PIXELS:
        limit = f"at most {MAX_PIXELS:,} pixels"
        raise CaseProblem(
            name, "too_large", f"{height} x {width} pixels", limit, "check the file, or cut it into tiles"
        )
    if depth not in accepted.get(kind_code, ()):
        if depth == 16:
            raise CaseProblem(name, "bit_depth", found, expected, "map it to 8 bit with a window you choose and state")
        code = {3: "palette", 4: "grey_alpha"}.get(kind_code, "bit_depth")
        raise CaseProblem(name, code, found, expected, _resave("RGB" if kind_code == 3 else "L"))
    if b"tRNS" in chunks:
        found = f"{found} with a transparent colour"
        raise CaseProblem(name, "transparent_colour", found, expected, _resave("RGB" if kind_code else "L"))
    if b"acTL" in chunks:
        raise CaseProblem(name, "animated_png", "several frames", expected, "write each frame as an image of its own")
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            if b"eXIf" in chunks:
                _check_upright(image, name)
            return np.array(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise CaseProblem(name, "damaged_png", f"pixels that do not decode ({error})", expected, _AGAIN) from None


_AGAIN = "copy or download the file again"


def _chunks(data: bytes, name: str, expected: str) -> dict[bytes, bytes]:
    """First chunk of every type, all checksums verified (Pillow skips that of the pixels)."""
    chunks: dict[bytes, bytes] = {}
    at = len(_PNG)
    while b"IEND" not in chunks:
        length, kind = struct.unpack_from(">I4s", data, at) if at + 12 <= len(data) else (len(data), b"")
        if at + 12 + length > len(data):
            raise CaseProblem(name, "truncated_png", f"{len(data)} bytes and no end", expected, _AGAIN)
        body = memoryview(data)[at + 8 : at + 8 + length]
        if zlib.crc32(body, zlib.crc32(kind)) != struct.unpack_from(">I", data, at + 8 + length)[0]:
            found = f"a wrong checksum in chunk {kind.decode('latin-1')!r}"
            raise CaseProblem(name, "damaged_png", found, expected, _AGAIN)
        chunks.setdefault(kind, b"" if kind == b"IDAT" else bytes(body))
        at += 12 + length
    if len(chunks.get(b"IHDR", b"")) != 13:
        raise CaseProblem(name, "damaged_png", "no image header", expected, _AGAIN)
    return chunks


def bone_colours() -> np.ndarray:
    """The 256 colours of matplotlib's *bone* map: uint8, 256 x 3. Level i is written as row i."""
    level = np.linspace(0, 1, 256)
    red = np.interp(level, [0, 0.746032, 1], [0, 0.652778, 1])
    green = np.interp(level, [0, 0.365079, 0.746032, 1], [0, 0.319444, 0.777778, 1])
    blue = np.interp(level, [0, 0.365079, 1], [0, 0.444444, 1])
    return (255 * np.stack([red, green, blue], axis=1) + 1e-9).astype(np.uint8)  # whole numbers stay whole when cut


@functools.cache
def _bone_levels() -> np.ndarray:
    """int16, 256 x 256 x 256: the level of the nearest bone colour (Euclidean; a tie: the lower), -1 if too far."""
    levels = np.full((256, 256, 256), -1, np.int16)
    best = np.full(levels.shape, 127, np.int8)
    for level, colour in enumerate(bone_colours().astype(int)):
        box = tuple(slice(max(0, c - BONE_TOLERANCE), min(256, c + BONE_TOLERANCE + 1)) for c in colour)
        red, green, blue = np.ogrid[box]
        distance = (red - colour[0]) ** 2 + (green - colour[1]) ** 2 + (blue - colour[2]) ** 2
        closer = distance < best[box]
        levels[box][closer] = level
        best[box][closer] = distance[closer]
    return levels


def _from_bone(array: np.ndarray, name: str) -> np.ndarray:
    """uint8 H x W x 3 through the bone map, inverted to uint8 H x W. Raises CaseProblem naming a colour."""
    levels = _bone_levels()[array[..., 0], array[..., 1], array[..., 2]]
    if (levels < 0).any():
        row, column = np.argwhere(levels < 0)[0]
        share = f"{int((levels < 0).sum())} of {levels.size} pixels"
        found = f"RGB {tuple(array[row, column].tolist())} at row {row}, column {column} ({share})"
        hint = "this domain is grey: check that the image belongs here, then save it as 8-bit grey"
        raise CaseProblem(name, "not_grey", found, "grey, equal channels or the 'bone' colour map", hint)
    return levels.astype(np.uint8)


def resize(image: np.ndarray, size: int) -> np.ndarray:
    """uint8 H x W or H x W x 3 to S x S (x 3): bilinear, antialiased when shrinking, aspect ratio not kept (BMAD)."""
    if image.shape[:2] == (size, size):
        return image
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR))


def foreground(image: np.ndarray) -> np.ndarray:
    """The organ in a grey image whose background was masked out to one level, whatever it is: bool, H x W.

    image: uint8, H x W. Background is what has the level of most border pixels and is 4-connected to the border through
    pixels of that level; all else is foreground, also what is as dark inside the organ. All True where there is no such
    background: no level on most of the border, or nothing but background (a constant image).
    """
    from scipy import ndimage

    border = np.ones(image.shape, bool)
    border[1:-1, 1:-1] = False
    levels = np.bincount(image[border])
    if 2 * levels.max() <= levels.sum():
        return np.ones(image.shape, bool)
    framed = np.pad(image == levels.argmax(), 1, constant_values=True)  # the frame joins all that touches the border
    parts, _ = ndimage.label(framed)
    inside = parts[1:-1, 1:-1] != parts[0, 0]
    return inside if inside.any() else ~inside


def upsample(scores: np.ndarray, height: int, width: int) -> np.ndarray:
    """An anomaly map, float32 h x w, on another grid: float32 height x width.

    Bilinear with half-pixel centres, edges held (align_corners false), no antialiasing when the grid is coarser. In
    float32 multiplications and additions only, along the width first, so that every device can give the same bits.
    Where neighbours are equal the result is their value exactly: a constant map stays constant.
    """
    for axis, size in ((1, width), (0, height)):
        if scores.shape[axis] != size:
            lower, upper, weight = placed(scores.shape[axis], size)
            start = scores.take(lower, axis)
            step = scores.take(upper, axis)
            step -= start
            step *= np.expand_dims(weight, 1 - axis)
            scores = np.add(start, step, out=start)
    return scores


@functools.lru_cache(maxsize=64)
def placed(length: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where `size` samples lie along `length` ones, half-pixel centres: lower and upper neighbour, int64, and the
    weight of the upper, float32."""
    place = np.maximum((np.arange(size) + 0.5) * (length / size) - 0.5, 0)
    lower = place.astype(np.int64)
    return lower, np.minimum(lower + 1, length - 1), (place - lower).astype(np.float32)
