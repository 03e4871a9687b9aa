"""Images in: what is accepted, what is refused and with which words, and that no axis is swapped."""

import io
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from anomed import images
from anomed.errors import CaseProblem


def png(array: np.ndarray, mode: str | None = None) -> bytes:
    """Bytes of a PNG, written by Pillow, optionally converted to `mode` first."""
    buffer = io.BytesIO()
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(buffer, "PNG")
    return buffer.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def header(width: int, height: int, depth: int, colour: int) -> bytes:
    return images._PNG + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))


def rgba(rgb: np.ndarray, alpha: int = 255) -> np.ndarray:
    return np.concatenate([rgb, np.full((*rgb.shape[:2], 1), alpha, np.uint8)], axis=2)


@pytest.fixture
def ramp() -> np.ndarray:
    """All 256 levels on a 16 x 48 image that is not its own transpose or flip."""
    return np.random.default_rng(1).permutation(np.repeat(np.arange(256, dtype=np.uint8), 3)).reshape(16, 48)


def test_bone_table_is_that_of_matplotlib() -> None:
    from matplotlib import colormaps

    written = colormaps["bone"](np.arange(256), bytes=True)[:, :3]
    np.testing.assert_array_equal(images.bone_colours(), written)


@pytest.mark.parametrize("alpha", [False, True])
def test_bone_is_inverted_exactly_on_all_levels(ramp: np.ndarray, alpha: bool) -> None:
    coloured = images.bone_colours()[ramp]
    data = png(rgba(coloured) if alpha else coloured)
    np.testing.assert_array_equal(images.read_png(data, "x.png", colour=False), ramp)


def test_bone_written_by_matplotlib_itself(ramp: np.ndarray) -> None:
    from matplotlib.image import imsave

    buffer = io.BytesIO()
    imsave(buffer, ramp, cmap="bone", format="png")
    np.testing.assert_array_equal(images.read_png(buffer.getvalue(), "x.png", colour=False), ramp)


def test_bone_off_by_two_is_read_and_off_by_three_is_refused() -> None:
    level = 100
    colour = images.bone_colours()[level].astype(int)
    near = np.tile(np.add(colour, [1, 1, 1]).astype(np.uint8), (4, 5, 1))
    assert np.abs(images.read_png(png(near), "x.png", False).astype(int) - level).max() <= 1
    edge = np.tile(np.add(images.bone_colours()[0], [0, 0, 2]).astype(np.uint8), (4, 5, 1))
    assert images.read_png(png(edge), "x.png", False).max() <= 2
    far = np.tile(np.add(colour, [3, -3, 3]).astype(np.uint8), (4, 5, 1))
    with pytest.raises(
        CaseProblem, match=r"a/x\.png: not_grey: found RGB \(.*\) at row 0, column 0 \(20 of 20 pixels\)"
    ):
        images.read_png(png(far), "a/x.png", False)


def test_one_coloured_pixel_in_a_grey_image_is_named(ramp: np.ndarray) -> None:
    array = np.repeat(ramp[..., None], 3, axis=2)
    array[3, 7] = (200, 10, 10)
    with pytest.raises(CaseProblem, match=r"not_grey: .*save it as 8-bit grey"):
        images.read_png(png(array), "x.png", False)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_grey_domain_reads_every_grey_encoding_alike(ramp: np.ndarray, mode: str) -> None:
    image = images.read_png(png(ramp, mode), "x.png", colour=False)
    assert image.dtype == np.uint8
    np.testing.assert_array_equal(image, ramp)


def test_colour_domain(ramp: np.ndarray) -> None:
    colour = np.random.default_rng(0).integers(0, 256, (5, 9, 3), dtype=np.uint8)
    np.testing.assert_array_equal(images.read_png(png(colour), "x.png", True), colour)
    np.testing.assert_array_equal(images.read_png(png(rgba(colour)), "x.png", True), colour)
    np.testing.assert_array_equal(images.read_png(png(ramp), "x.png", True), np.repeat(ramp[..., None], 3, axis=2))


@pytest.mark.parametrize("colour", [False, True])
def test_what_is_written_is_read_back(ramp: np.ndarray, colour: bool) -> None:
    image = np.stack([ramp, 255 - ramp, ramp // 2], axis=2) if colour else ramp
    np.testing.assert_array_equal(images.decode_png(images.encode_png(image), "x"), image)


REFUSED = {
    "16-bit": (lambda a: png(a.astype(np.uint16) * 257), "bit_depth: found 16-bit grey, expected a PNG, 8-bit grey"),
    "palette": (lambda a: png(a, "P"), r'palette: found 8-bit palette, .*convert\("RGB"\)\.save'),
    "grey and alpha": (lambda a: png(a, "LA"), r'grey_alpha: found 8-bit grey with alpha, .*convert\("L"\)\.save'),
    "1-bit": (lambda a: png(a > 9), "bit_depth: found 1-bit grey, expected a PNG, 8-bit grey"),
    "16-bit RGB": (
        lambda a: header(1, 1, 16, 2) + chunk(b"IDAT", zlib.compress(bytes(7))) + chunk(b"IEND", b""),
        "bit_depth: found 16-bit RGB",
    ),
    "transparent": (
        lambda a: png(rgba(np.repeat(a[..., None], 3, 2), 254)),
        "transparent_image: found alpha as low as 254, expected alpha 255 everywhere",
    ),
    "truncated": (lambda a: png(a)[:-40], r"truncated_png: found \d+ bytes and no end"),
    "without end": (lambda a: png(a)[:-12], "truncated_png"),
    "cut in the header": (lambda a: png(a)[:20], "truncated_png: found 20 bytes and no end"),
    "a flipped bit": (
        lambda a: (d := bytearray(png(a)), d.__setitem__(60, d[60] ^ 1))[0],
        "damaged_png: found a wrong checksum in chunk 'IDAT'",
    ),
    "no pixels": (lambda a: header(48, 16, 8, 0) + chunk(b"IEND", b""), "damaged_png: found pixels that do not decode"),
    "pixels that are no stream": (
        lambda a: header(48, 16, 8, 0) + chunk(b"IDAT", b"nonsense") + chunk(b"IEND", b""),
        "damaged_png: found pixels that do not decode",
    ),
    "zero size": (lambda a: header(0, 3, 8, 0) + chunk(b"IEND", b""), "zero_size: found 3 x 0 pixels"),
    "bomb": (
        lambda a: header(60000, 60000, 8, 0) + chunk(b"IDAT", b"") + chunk(b"IEND", b""),
        "too_large: found 60000 x 60000 pixels, expected at most 67,108,864 pixels",
    ),
    "JPEG": (lambda a: b"\xff\xd8\xff\xe0" + bytes(50), "not_a_png: found a JPEG, .*renaming a file does not change"),
    "empty": (lambda a: b"", "not_a_png: found an empty file"),
    "transparent colour": (
        lambda a: png(a)[:33] + chunk(b"tRNS", b"\0\3") + png(a)[33:],
        "transparent_colour: found 8-bit grey with a transparent colour",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("colour", [False, True])
def test_refused_images(ramp: np.ndarray, name: str, colour: bool) -> None:
    make, message = REFUSED[name]
    with pytest.raises(CaseProblem, match=f"^test/good/img/a.png: {message}"):
        images.read_png(bytes(make(ramp)), "test/good/img/a.png", colour)


def saved(array: np.ndarray, kind: str, mode: str | None = None, **options: Any) -> bytes:
    """Bytes of a file of any format, written by Pillow."""
    buffer = io.BytesIO()
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("TIFF", {"compression": "tiff_deflate"}),
    ],
)
def test_formats_without_loss_read_alike(ramp: np.ndarray, kind: str, mode: str, options: dict[str, str]) -> None:
    data = saved(ramp, kind, mode, **options)
    assert images.format_of(data, "x") == kind
    np.testing.assert_array_equal(images.read_image(data, "x", colour=False), ramp)
    np.testing.assert_array_equal(images.read_image(data, "x", colour=True), np.repeat(ramp[..., None], 3, axis=2))


@pytest.mark.parametrize("mode", ["L", "RGB"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_jpeg_is_read_as_it_decodes(ramp: np.ndarray, mode: str, options: dict[str, Any]) -> None:
    smooth = np.sort(np.sort(ramp, axis=0), axis=1)
    data = saved(smooth, "JPEG", mode, quality=100, **options)
    read = images.read_image(data, "x", colour=False)
    assert read.shape == (16, 48)
    assert read.dtype == np.uint8
    assert np.abs(read.astype(int) - smooth).max() <= 2
    colour = np.stack([smooth, smooth[::-1], smooth // 2], axis=2)
    read = images.read_image(saved(colour, "JPEG", quality=100, subsampling=0), "x", colour=True)
    assert np.abs(read.astype(int) - colour).max() <= 4
    with pytest.raises(CaseProblem, match="not_grey"):
        images.read_image(saved(colour, "JPEG"), "x", colour=False)


def test_white_is_zero_in_a_tiff(ramp: np.ndarray) -> None:
    """Photometric interpretation 0: stored levels are the negative of what is to be seen."""
    data = bytearray(saved(ramp, "TIFF"))
    entry = data.index(struct.pack("<HHI", 262, 3, 1))
    data[entry + 8] = 0
    np.testing.assert_array_equal(images.read_image(bytes(data), "x", colour=False), 255 - ramp)


def turned(array: np.ndarray, kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(array, kind, exif=exif)


@pytest.mark.parametrize("kind", ["JPEG", "TIFF", "PNG"])
def test_turned_pixels_are_refused(ramp: np.ndarray, kind: str) -> None:
    assert images.read_image(turned(ramp, kind, 1), "x", colour=False).shape == (16, 48)
    for orientation in range(2, 9):
        with pytest.raises(
            CaseProblem, match=f"exif_orientation: found EXIF orientation {orientation}.*exif_transpose"
        ):
            images.read_image(turned(ramp, kind, orientation), "x", colour=False)


@pytest.mark.parametrize(
    ("kind", "options"), [("JPEG", {}), ("JPEG", {"progressive": True}), ("BMP", {}), ("TIFF", {}), ("PNG", {})]
)
def test_a_file_that_ends_early_is_refused(ramp: np.ndarray, kind: str, options: dict[str, Any]) -> None:
    data = saved(ramp, kind, **options)
    for length in {len(data) - 1, len(data) - 2, len(data) - 60, len(data) // 2, 40, 9}:
        for cut in (data[:length], data[:length] + bytes(len(data) - length)):  # also as a stopped download leaves it
            if kind in ("BMP", "TIFF") and len(cut) == len(data):
                continue  # zeros may be pixels
            with pytest.raises(CaseProblem) as caught, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                images.read_image(cut, "x.jpg", colour=False)
            assert caught.value.row["case"] == "x.jpg"


def tiff(width: int, bits: int, channels: int) -> bytes:
    """A TIFF of 8 rows, all zero: Pillow reads more and fewer bits than it writes."""
    depths, pixels = struct.pack("<H", bits) * channels, bytes(8 * width * channels * bits // 8)
    start = 8 + 2 + 8 * 12 + 4  # of what does not fit into the entries
    tags = {256: width, 257: 8, 258: bits, 259: 1, 262: 2 if channels == 3 else 1, 273: start + 6, 277: channels}
    entries = [struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags.items()]
    if channels == 3:
        entries[2] = struct.pack("<HHII", 258, 3, 3, start)
    entries.append(struct.pack("<HHII", 279, 4, 1, len(pixels)))
    return b"II*\0" + struct.pack("<IH", 8, 8) + b"".join(entries) + bytes(4) + depths.ljust(6, b"\0") + pixels


def bmp16() -> bytes:
    """A BMP of 8 x 8 pixels with 5 bits a channel."""
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 182, 0, 0, 54, 40, 8, 8, 1, 16, 0, 128, 0, 0, 0, 0) + bytes(128)


OTHERS = {
    "GIF": (lambda a: saved(a, "GIF"), "not_an_image: found a GIF, expected a PNG, JPEG, BMP or TIFF; convert it"),
    "nothing": (lambda a: b"", "not_an_image: found an empty file"),
    "text": (lambda a: b"hello", "not_an_image: found other bytes"),
    "16-bit TIFF": (
        lambda a: saved(a.astype(np.uint16), "TIFF"),
        "bit_depth: found mode I;16 of 16 bit, expected a TIFF",
    ),
    "16-bit PNG": (lambda a: png(a.astype(np.uint16)), "bit_depth"),
    "real TIFF": (lambda a: saved(a.astype(np.float32), "TIFF"), "bit_depth: found signed or real numbers, mode F"),
    "1-bit TIFF": (lambda a: saved(a > 9, "TIFF"), "bit_depth: found mode 1"),
    "16-bit RGB TIFF": (lambda a: tiff(8, 16, 3), "bit_depth: found mode RGB of 16 bit, expected a TIFF, 8-bit"),
    "4-bit TIFF": (lambda a: tiff(8, 4, 1), "bit_depth: found mode L of 4 bit"),
    "16-bit BMP": (lambda a: bmp16(), "bit_depth: found mode RGB of 16 bit, expected a BMP, 8-bit"),
    "no width": (
        lambda a: tiff(0, 8, 1),
        r"damaged_image: found pixels that do not decode \(cannot identify image file\)",
    ),
    "palette BMP": (lambda a: saved(images.bone_colours()[a], "BMP", "P"), "palette: found mode P"),
    "CMYK JPEG": (lambda a: saved(a, "JPEG", "CMYK"), r'colour_model: found mode CMYK.*convert\("RGB"\)'),
    "12-bit JPEG": (lambda a: saved(a, "JPEG").replace(b"\xff\xc0\0\x0b\x08", b"\xff\xc0\0\x0b\x0c"), "bit_depth"),
    "pages": (
        lambda a: saved(a, "TIFF", save_all=True, append_images=[Image.fromarray(a)]),
        "several_images: found 2 images",
    ),
    "transparent TIFF": (lambda a: saved(rgba(np.repeat(a[..., None], 3, 2), 9), "TIFF"), "transparent_image"),
    "no pixels": (lambda a: b"BM" + bytes(60), "damaged_image"),
    "JPEG of nothing": (lambda a: b"\xff\xd8\xff\xd9", "damaged_image"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_images_are_refused(ramp: np.ndarray, name: str) -> None:
    make, message = OTHERS[name]
    with pytest.raises(CaseProblem, match=f"^scan: {message}"):
        images.read_image(make(ramp), "scan", colour=False)


@pytest.fixture
def mask() -> np.ndarray:
    mask = np.zeros((20, 30), bool)
    mask[2:9, 11:28] = True
    return mask


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "RGBA"])
@pytest.mark.parametrize("level", [1, 59, 122, 255])
def test_mask_is_any_level_above_zero(mask: np.ndarray, mode: str, level: int) -> None:
    data = png(mask) if mode == "1" else png(mask.astype(np.uint8) * level, mode)
    read = images.read_mask(data, "m.png")
    assert read.dtype == bool
    np.testing.assert_array_equal(read, mask)


def test_colour_mapped_mask_with_three_levels(mask: np.ndarray) -> None:
    levels = np.where(mask, np.resize([59, 122, 255], mask.shape), 0).astype(np.uint8)
    data = png(rgba(images.bone_colours()[levels]))
    np.testing.assert_array_equal(images.read_mask(data, "m.png"), mask)


def test_one_colour_channel_is_enough_and_alpha_is_none(mask: np.ndarray) -> None:
    colour = np.zeros((*mask.shape, 3), np.uint8)
    colour[..., 2] = mask
    np.testing.assert_array_equal(images.read_mask(png(rgba(colour)), "m.png"), mask)
    assert not images.read_mask(png(rgba(colour * 0)), "m.png").any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: png(m.astype(np.uint8), "P"), "palette: found 8-bit palette, expected a PNG, grey"),
        (lambda m: png(m.astype(np.uint16)), "bit_depth: found 16-bit grey"),
        (lambda m: png(m.astype(np.uint8), "LA"), "grey_alpha"),
        (lambda m: png(m)[:-30], "truncated_png"),
        (
            lambda m: png(rgba(np.repeat(m[..., None].astype(np.uint8), 3, 2), 0)),
            "transparent_mask: found 119 coloured but fully transparent pixels",
        ),
    ],
)
def test_refused_masks(mask: np.ndarray, make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CaseProblem, match=f"^m.png: {message}"):
        images.read_mask(make(mask), "m.png")


@pytest.mark.parametrize("bits", [2, 4])
def test_masks_of_few_bits(bits: int) -> None:
    rows = bytes([0, 0b00011000, 0b00000001, 0, 0, 0b10000000])  # filter byte and two bytes, twice
    data = header(16 // bits, 2, bits, 0) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    bits_of = np.unpackbits(np.frombuffer(rows, np.uint8).reshape(2, 3)[:, 1:], axis=1)
    np.testing.assert_array_equal(images.read_mask(data, "m.png"), bits_of.reshape(2, -1, bits).any(axis=2))


def flooded(image: np.ndarray) -> np.ndarray:
    """The definition of `images.foreground`, pixel by pixel."""
    height, width = image.shape
    border = [(y, x) for y in range(height) for x in range(width) if y in (0, height - 1) or x in (0, width - 1)]
    counts = np.bincount([image[place] for place in border])
    if counts.max() * 2 <= len(border):
        return np.ones(image.shape, bool)
    background = np.zeros(image.shape, bool)
    queue = [place for place in border if image[place] == counts.argmax()]
    while queue:
        y, x = queue.pop()
        if 0 <= y < height and 0 <= x < width and image[y, x] == counts.argmax() and not background[y, x]:
            background[y, x] = True
            queue += [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
    return np.ones(image.shape, bool) if background.all() else ~background


def test_foreground_is_what_a_flood_from_the_border_leaves() -> None:
    draw = np.random.default_rng(0)
    shares = []
    for _ in range(300):
        shape = draw.integers(1, 14, 2)
        image = draw.choice([3, 4, 200], shape, p=draw.dirichlet([1, 1, 1])).astype(np.uint8)
        found = images.foreground(image)
        assert found.dtype == bool
        np.testing.assert_array_equal(found, flooded(image))
        shares.append(found.mean())
    assert min(shares) < 0.1
    assert np.mean(np.array(shares) < 1) > 0.5, "mostly images with a background"


@pytest.mark.parametrize("level", [0, 113, 255])
def test_foreground_whatever_the_level_of_the_background(level: int) -> None:
    organ = np.zeros((30, 50), bool)
    organ[4:20, 9:45] = organ[20:25, 30:40] = organ[10:12, 45:] = True  # reaches the right border
    image = np.where(organ, 90, level).astype(np.uint8)
    image[8:12, 14:20] = level  # as dark as the background, but inside
    image[4, 9] = level  # at the organ's edge: cannot be told from the background
    organ[4, 9] = False
    np.testing.assert_array_equal(images.foreground(image), organ)


def test_background_does_not_pass_a_corner() -> None:
    image = np.zeros((9, 12), np.uint8)
    image[2:7, 3:10] = 50
    image[2, 3] = image[3, 4] = 0  # the second is reached over a corner only
    expected = image > 0
    expected[3, 4] = True
    np.testing.assert_array_equal(images.foreground(image), expected)


def test_without_a_background_all_is_foreground(ramp: np.ndarray) -> None:
    assert images.foreground(ramp).all(), "no level on most of the border"
    assert images.foreground(np.full((5, 7), 9, np.uint8)).all(), "a constant image"
