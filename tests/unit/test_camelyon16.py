"""The camelyon16 source: patches with and without coordinate files, and patches cut from small tiled slides."""

import functools
import io
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from anomed import images, prepare
from anomed.domains import camelyon16_slide
from anomed.domains.camelyon16 import SIZE, Camelyon16
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Case, Prepared
from anomed.settings import check

LISTS = {
    "train_good": ["normal_001,128,192", "normal_001,640,320", "normal_002,128,128"],
    "valid_good": ["test_003,256,256"],
    "valid_bad": ["test_003,512,256"],
    "test_good": ["test_001,300,200", "test_002,128,512"],
    "test_bad": ["test_001,700,411", "test_001,896,512"],
}
PLACES = {
    line.replace(",", "_"): (stem.split("_")[0], int(stem.endswith("bad"))) for stem in LISTS for line in LISTS[stem]
}
HEIGHT, WIDTH = 650, 1030  # neither square nor a multiple of the tiles


@functools.cache
def slide(name: str) -> np.ndarray:
    """Uint8 HEIGHT x WIDTH x 3: every place of every slide looks different."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    shift = int(name[-1])
    return np.stack([rows // 3 + shift, columns // 5 + 10 * shift, (rows + columns) % 256], axis=2).astype(np.uint8)


def patch(name: str) -> np.ndarray:
    """What lies around the place that a patch's name gives."""
    stem, x, y = name.rsplit("_", 2)
    top, left = int(y) - SIZE // 2, int(x) - SIZE // 2
    return slide(stem)[top : top + SIZE, left : left + SIZE]


def write_lists(root: Path, lists: dict[str, list[str]] = LISTS) -> Path:
    (root / "coords").mkdir(parents=True, exist_ok=True)
    for stem, lines in lists.items():
        (root / "coords" / f"{stem}.txt").write_text("\n".join(lines) + "\n\n\n")  # BMAD's end with empty lines
    return root


def write_patches(root: Path, backwards: bool = False, empty: bool = False) -> Path:
    """Patches in folders that say nothing, two levels deep; `empty`: for tests that read no pixels."""
    for name in sorted(PLACES, reverse=backwards):
        path = root / "patches" / name[:8] / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"" if empty else images.encode_png(patch(name)))
    return root


def write_slides(root: Path, **how: Any) -> Path:
    tifffile = pytest.importorskip("tifffile", reason="whole slides are written and read with tifffile")
    pytest.importorskip("imagecodecs", reason="whole slides are packed with imagecodecs")
    (root / "slides").mkdir(parents=True, exist_ok=True)
    for name in sorted({name.rsplit("_", 2)[0] for name in PLACES}):
        with tifffile.TiffWriter(root / "slides" / f"{name}.tif", bigtiff=True) as file:
            options = {"tile": (256, 256), "photometric": "rgb", **how}
            file.write(slide(name), **options)
            file.write(slide(name)[::2, ::2], subfiletype=1, **options)  # a level that must not be taken
    return root


def source(root: Path | None, **options: Any) -> Camelyon16:
    parsed = check(Camelyon16.Options, options, "domains.histopathology")
    return Camelyon16("histopathology", parsed, root, (root or Path()).parent / "work")


def build(root: Path, out: Path, **options: Any) -> Prepared:
    parameters = {"source": "camelyon16", "size": 32, "release": None, "fingerprint": "", **options}
    prepare.prepare("histopathology", parameters, root, out.parent / "work", out, out.parent / "problems.csv")
    return Prepared(out)


def named(cases: list[Case]) -> dict[str, Case]:
    return {case.image_id.rpartition("/")[2]: case for case in cases}


def codes(faulty: Camelyon16) -> list[str]:
    faulty.cases()
    return sorted(problem.row["code"] for problem in faulty.problems)


def native(folder: Path, image_id: str) -> np.ndarray:
    with zipfile.ZipFile(folder / "native.zip") as archive:
        return np.array(Image.open(io.BytesIO(archive.read(f"{image_id}.png"))))


@pytest.mark.parametrize("write", [write_patches, write_slides])
def test_prepared_domain_is_what_the_lists_say(tmp_path: Path, write: Any) -> None:
    prepared = build(write(write_lists(tmp_path / "raw")), tmp_path / "out")
    table = prepared.table
    assert {row.image_id.rpartition("/")[2]: (row.split, row.label) for row in table.itertuples()} == PLACES
    assert prepared.card["counts"] == {
        "train": {"normal": 3, "abnormal": 0},
        "valid": {"normal": 1, "abnormal": 1},
        "test": {"normal": 2, "abnormal": 2},
    }
    assert prepared.card["colour"]
    assert not prepared.card["masks"]
    assert ((table.native_h == SIZE) & (table.native_w == SIZE)).all()
    assert (table.pathology == ["metastasis" if label else "" for label in table.label]).all()
    for row in table.itertuples():
        name = row.image_id.rpartition("/")[2]
        assert row.subject_id == name.rsplit("_", 2)[0]
        assert row.image_id == f"{row.split}/{'Ungood' if row.label else 'good'}/{name}"
        assert (native(tmp_path / "out", row.image_id) == patch(name)).all()
    assert table.sha256.nunique() == len(table)


def test_same_bytes_from_a_zip_in_another_order(tmp_path: Path) -> None:
    build(write_patches(write_lists(tmp_path / "raw")), tmp_path / "one" / "out")
    backwards = {stem: lines[::-1] for stem, lines in LISTS.items()}
    shutil.make_archive(
        str(tmp_path / "other"), "zip", write_patches(write_lists(tmp_path / "back", backwards), backwards=True)
    )
    build(tmp_path / "other.zip", tmp_path / "two" / "out")
    for name in ("manifest.csv", "images.npy", "native.zip"):
        assert (tmp_path / "one/out" / name).read_bytes() == (tmp_path / "two/out" / name).read_bytes(), name


def test_a_corner_is_another_place_than_a_centre(tmp_path: Path) -> None:
    root = write_slides(write_lists(tmp_path / "raw", {**LISTS, "test_bad": ["test_001,700,300"]}))
    taken = named(source(root, anchor="corner").cases())
    image = taken["test_001_300_200"].load().image
    assert (image == slide("test_001")[200:456, 300:556]).all()
    with pytest.raises(CaseProblem, match=r"outside_slide: .*1030 x 650 \(width x height\)"):
        taken["test_002_128_512"].load()
    with pytest.raises(AnomedError, match=r"domains\.histopathology\.anchor"):
        source(root, anchor="middle")


@pytest.mark.parametrize("subsampling", [(1, 1), (2, 2)])
def test_slides_packed_as_camelyon_packs_them(tmp_path: Path, subsampling: tuple[int, int]) -> None:
    """JPEG in YCbCr, tables outside of the tiles or in them: near the stored pixels, in the right colours."""
    how = {"compression": "jpeg", "compressionargs": {"level": 95}, "subsampling": subsampling}
    root = write_slides(write_lists(tmp_path / "raw"), **how)
    for name, case in named(source(root).cases()).items():
        difference = np.abs(case.load().image.astype(int) - patch(name))
        assert np.median(difference) <= 3
        assert difference.mean() < 6


def test_tiles_that_were_left_out(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile", reason="whole slides are written and read with tifffile")
    tiles = iter([full(90), None, full(60)] * 2)
    path = tmp_path / "s.tif"
    tifffile.imwrite(path, tiles, shape=(512, 768, 3), dtype=np.uint8, tile=(256, 256), photometric="rgb")
    image, _ = camelyon16_slide.cut(path, "s.tif", 200, 100, SIZE)
    assert (image[:, :56] == 90).all()
    assert (image[:, 56:] == 255).all()
    with pytest.raises(CaseProblem, match=r"s\.tif at 256, 0: empty_patch"):
        camelyon16_slide.cut(path, "s.tif", 256, 0, SIZE)


def full(level: int) -> np.ndarray:
    return np.full((256, 256, 3), level, np.uint8)


@pytest.mark.parametrize(
    ("left", "top", "fits"),
    [(0, 0, True), (774, 394, True), (775, 0, False), (0, 395, False), (-1, 0, False), (0, -1, False)],
)
def test_a_square_at_the_border(tmp_path: Path, left: int, top: int, fits: bool) -> None:
    tifffile = pytest.importorskip("tifffile", reason="whole slides are written and read with tifffile")
    path = tmp_path / "s.tif"
    tifffile.imwrite(path, slide("test_001"), tile=(256, 256), photometric="rgb")
    if fits:
        image, _ = camelyon16_slide.cut(path, "x", left, top, SIZE)
        assert (image == slide("test_001")[top : top + SIZE, left : left + SIZE]).all()
    else:
        with pytest.raises(CaseProblem, match="outside_slide"):
            camelyon16_slide.cut(path, "x", left, top, SIZE)


def test_slides_that_are_refused(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile", reason="whole slides are written and read with tifffile")
    path = tmp_path / "s.tif"
    tifffile.imwrite(path, slide("test_001"), tile=(256, 256), photometric="rgb", compression="jpeg")
    for name, array in {"strips": slide("test_001"), "grey": slide("test_001")[..., 0]}.items():
        tile = {"tile": (256, 256)} if name == "grey" else {}
        tifffile.imwrite(
            tmp_path / f"{name}.tif", array, photometric="rgb" if array.ndim == 3 else "minisblack", **tile
        )
        with pytest.raises(CaseProblem, match="slide_format"):
            camelyon16_slide.cut(tmp_path / f"{name}.tif", name, 0, 0, SIZE)
    data = path.read_bytes()
    with tifffile.TiffFile(path) as file:
        start = file.pages[0].dataoffsets[0]
    damaged = {
        "empty": b"",
        "other": b"no slide" * 50,
        "cut": data[: start + 1000],
        "tile": data[:start] + b"\0" * 10 + data[start + 10 :],
    }
    for name, content in damaged.items():
        path.write_bytes(content)
        with pytest.raises(CaseProblem, match="damaged_slide"):
            camelyon16_slide.cut(path, name, 0, 0, SIZE)


@pytest.mark.parametrize(
    ("stem", "line", "code", "case"),
    [
        ("test_good", "test_009,5,5", "missing_patch", "test_009_5_5"),
        ("test_good", "test_001,300,200", "listed_twice", "coords/test_good.txt, line 3"),
        ("test_good", "test_001,700,411", "listed_twice", "coords/test_bad.txt, line 1"),
        ("test_good", "test_001,300", "malformed_line", "coords/test_good.txt, line 3"),
        ("test_good", "test_001,-3,200", "malformed_line", "coords/test_good.txt, line 3"),
        ("valid_bad", "slide,x,y", "malformed_line", "coords/valid_bad.txt, line 2"),
        ("test_good", f"test_001,{'9' * 5000},200", "malformed_line", "coords/test_good.txt, line 3"),
    ],
)
def test_lines_that_do_not_fit(tmp_path: Path, stem: str, line: str, code: str, case: str) -> None:
    faulty = source(write_patches(write_lists(tmp_path / "raw", {**LISTS, stem: [*LISTS[stem], line]}), empty=True))
    assert codes(faulty) == [code]
    assert faulty.problems[0].row["case"] == case


def test_patches_in_no_list_and_tumours_where_there_are_none(tmp_path: Path) -> None:
    lists = {**LISTS, "train_good": LISTS["train_good"][1:], "test_bad": [*LISTS["test_bad"], "normal_001,128,192"]}
    assert codes(source(write_patches(write_lists(tmp_path / "raw", lists), empty=True))) == ["tumour_in_normal_slide"]
    lists["test_bad"].pop()
    faulty = source(write_patches(write_lists(tmp_path / "raw", lists), empty=True))
    assert codes(faulty) == ["patch_not_listed"]
    assert faulty.problems[0].row["case"].endswith("/normal_001_128_192.png")


def test_an_empty_list_is_told(tmp_path: Path) -> None:
    faulty = source(write_patches(write_lists(tmp_path / "raw", {**LISTS, "train_good": []}), empty=True))
    assert codes(faulty) == ["empty_list", *["patch_not_listed"] * 3]


def test_a_slide_in_two_splits_stops_the_domain(tmp_path: Path) -> None:
    lists = {**LISTS, "valid_good": ["test_002,128,512"], "test_good": ["test_001,300,200", "test_003,256,256"]}
    root = write_patches(write_lists(tmp_path / "raw", lists))
    with pytest.raises(AnomedError, match=r"test_003: subject_in_two_splits: found test, valid"):
        build(root, tmp_path / "out")


def test_patches_that_are_refused(tmp_path: Path) -> None:
    root = write_patches(write_lists(tmp_path / "raw"), empty=True)
    (root / "patches" / "test_001" / "test_001_300_200.png").write_bytes(
        images.encode_png(slide("test_001")[:255, :256])
    )
    (root / "patches" / "test_002" / "test_002_128_512.png").write_bytes(b"\xff\xd8 a JPEG")
    cases = named(source(root).cases())
    with pytest.raises(CaseProblem, match="patch_size: found 255 x 256 pixels"):
        cases["test_001_300_200"].load()
    with pytest.raises(CaseProblem, match="not_a_png"):
        cases["test_002_128_512"].load()
    (root / "7.png").write_bytes(b"")
    (root / "._test_001_300_200.png").write_bytes(b"")
    (root / "again").mkdir()
    shutil.copy(root / "patches" / "test_003" / "test_003_256_256.png", root / "again")
    assert codes(source(root)) == ["duplicate_patch", "unrecognised_file"]


def test_missing_and_double_slides(tmp_path: Path) -> None:
    root = write_slides(write_lists(tmp_path / "raw"))
    (root / "slides" / "test_003.tif").unlink()
    (root / "again").mkdir()
    shutil.copy(root / "slides" / "test_002.tif", root / "again")
    (root / "slides" / "test_049.tif").write_bytes(b"in no list")
    faulty = source(root)
    assert codes(faulty) == ["duplicate_slide", "missing_slide"]
    assert faulty.ignored == 1
    shutil.make_archive(str(tmp_path / "packed"), "zip", root)
    with pytest.raises(AnomedError, match=r"packed\.zip: a zip; slides are read in place"):
        source(tmp_path / "packed.zip").cases()


def test_without_lists_slides_are_divided(tmp_path: Path) -> None:
    root = tmp_path / "raw"
    for number in range(10):
        for folder, stem in {"normal": f"normal_{number:03d}", "tumor": f"tumor_{number:03d}"}.items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            (root / folder / f"{stem}_10_20.png").write_bytes(b"")
    (root / "normal" / "tumor_001_400_20.png").write_bytes(b"")
    (root / "normal" / "test_001_400_20.png").write_bytes(b"")
    found = source(root, seed=3)
    cases = named(found.cases())
    assert found.problems == []
    counts = [sum(case.split == split for case in cases.values()) for split in ("train", "valid", "test")]
    assert sum(counts) == 22
    assert counts[0] == 6
    assert {case.subject_id[:6] for case in cases.values() if case.split == "train"} == {"normal"}
    assert cases["tumor_001_400_20"].split == cases["tumor_001_10_20"].split
    assert cases["tumor_001_400_20"].label == 0
    assert cases["test_001_400_20"].split != "train", "a test slide without a tumour patch is not known to be normal"
    other = named(source(root, seed=4).cases())
    assert {name: case.split for name, case in other.items()} != {name: case.split for name, case in cases.items()}
    (root / "loose_1_2.png").write_bytes(b"")
    (root / "tumor" / "normal_001_9_9.png").write_bytes(b"")
    (root / "tumor" / "tumor_003_9_9.jpg").write_bytes(b"")
    (root / "normal" / "Normal_004_9_9.png").write_bytes(b"")  # normal_004 once more: it would stand in two splits
    assert codes(source(root)) == ["tumour_in_normal_slide", "two_names", "unrecognised_file", "unrecognised_folder"]


def test_fingerprint_follows_what_is_used_only(tmp_path: Path) -> None:
    root = write_slides(write_lists(tmp_path / "raw"))
    before = source(root).fingerprint()
    (root / "slides" / "test_049.tif").write_bytes(b"in no list")
    assert source(root).fingerprint() == before
    with (root / "slides" / "test_001.tif").open("ab") as file:
        file.write(b"x")
    changed = source(root).fingerprint()
    assert changed != before
    (root / "coords" / "test_bad.txt").write_text("test_001,700,411")
    assert source(root).fingerprint() != changed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: (root / "x.txt").write_text(""), r"neither coordinate files nor patches among 1 files"),
        (write_lists, r"coordinate files, but neither a patch nor a slide among 5 files"),
        (
            lambda root: (write_lists(root), (root / "coords" / "valid_bad.txt").unlink()),
            r"coords/valid_bad\.txt: not found; expected all 5",
        ),
        (
            lambda root: (write_lists(root), shutil.copytree(root / "coords", root / "b" / "coords")),
            r"expected one file of this name",
        ),
    ],
)
def test_a_root_without_what_is_needed(tmp_path: Path, make: Any, message: str) -> None:
    (tmp_path / "raw").mkdir()
    make(tmp_path / "raw")
    with pytest.raises(AnomedError, match=message):
        source(tmp_path / "raw").cases()


def test_no_root_and_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AnomedError, match=r"domains\.histopathology\.root: missing"):
        source(None).cases()
    root = write_lists(tmp_path / "raw")
    (root / "test_001.tif").write_bytes(b"")
    monkeypatch.setattr(camelyon16_slide.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AnomedError, match="pip install tifffile imagecodecs"):
        source(root).cases()


def test_real_patches_keep_their_pixels(tmp_path: Path, real_data: Path) -> None:
    """A real 40x picture as a slide and as a patch: the same pixels, in the same colours."""
    tifffile = pytest.importorskip("tifffile", reason="whole slides are written and read with tifffile")
    with Image.open(real_data / "histopathology" / "camelyon16_40x" / "0.png") as file:
        picture = np.array(file.convert("RGB"))
    picture = np.tile(picture, (-(-300 // picture.shape[0]), -(-400 // picture.shape[1]), 1))
    tifffile.imwrite(tmp_path / "s.tif", picture, tile=(128, 128), photometric="rgb")
    image, _ = camelyon16_slide.cut(tmp_path / "s.tif", "s", 33, 21, SIZE)
    assert (image == picture[21 : 21 + SIZE, 33 : 33 + SIZE]).all()
    assert images.read_png(images.encode_png(image), "p", colour=True).tobytes() == image.tobytes()
