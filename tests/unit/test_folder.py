"""The folder source: layouts, patterns and tables of a user's own images, and every fault by its code."""

import collections
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from anomed import prepare, records
from anomed.domains.folder import FolderSource
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Prepared
from anomed.settings import check

SHAPE = (20, 36)
FORMATS = {"png": "PNG", "jpg": "JPEG", "bmp": "BMP", "tif": "TIFF", "TIFF": "TIFF"}


def pixels(name: str, colour: bool = False) -> np.ndarray:
    shape = (*SHAPE, 3) if colour else SHAPE
    return np.random.default_rng(list(name.encode())).integers(0, 256, shape, dtype=np.uint8)


def drawn(name: str) -> np.ndarray:
    mask = np.zeros(SHAPE, np.uint8)
    mask[3:9, 20 : 22 + len(name) % 9] = 1  # the lowest level that marks
    return mask


def encoded(array: np.ndarray, ending: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, FORMATS[ending])
    return buffer.getvalue()


def picture(name: str, colour: bool = False) -> bytes:
    return encoded(pixels(name, colour), name.rpartition(".")[2])


def tree(root: Path, *names: str, **content: bytes | str) -> Path:
    """Images by their names (masks where a folder is called masks) and other files by their content."""
    files: dict[str, bytes | str] = {name: picture(name) for name in names if "masks/" not in name}
    files |= {name: encoded(drawn(name), name.rpartition(".")[2]) for name in names if "masks/" in name}
    for name, data in (files | content).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return root


def source(root: Path, **options: Any) -> FolderSource:
    return FolderSource("clinic", check(FolderSource.Options, options, "domains.clinic"), root, root.parent / "work")


def prepared(root: Path, out: Path, **options: Any) -> Prepared:
    parameters = {"source": "folder", "size": 32, "release": None, "fingerprint": "0", **options}
    prepare.prepare("clinic", parameters, root, out / "work", out / "clinic", out / "problems.csv")
    return Prepared(out / "clinic")


def faults(folder: FolderSource) -> list[tuple[str, str]]:
    folder.cases()
    return sorted((problem.row["case"], problem.row["code"]) for problem in folder.problems)


FOLDERS = (
    "train/normal/a.png",
    "train/good/b.jpg",
    "valid/normal/c.bmp",
    "val/abnormal/deep/er/d.tif",
    "test/0/e.png",
    "test/Ungood/f.TIFF",
    "test/1/g.png",
)


def test_folders_without_options(tmp_path: Path) -> None:
    root = tree(tmp_path / "x", *FOLDERS, **{"test/Thumbs.db": b"", "notes.txt": b"", "__MACOSX/test/1/._g.png": b""})
    folder = source(root)
    cases = folder.cases()
    assert (folder.problems, folder.ignored, folder.has_masks) == ([], 3, False)
    assert sorted(case.image_id for case in cases) == [
        "test/Ungood/f",
        "test/Ungood/g",
        "test/good/e",
        "train/good/a",
        "train/good/b",
        "valid/Ungood/deep/er/d",
        "valid/good/c",
    ]
    assert all(case.subject_id == case.image_id for case in cases)
    domain = prepared(root, tmp_path)
    assert domain.card["counts"]["test"] == {"normal": 1, "abnormal": 2}
    for row in domain.evaluated().itertuples():
        np.testing.assert_array_equal(domain.native(row.image_id), pixels(row.source_file))
        assert (row.native_h, row.native_w) == SHAPE


MASKED = (
    "img/train/normal/s1_01.png",
    "img/train/normal/s1_02.png",
    "img/test/normal/s2_01.png",
    "img/test/abnormal/s3_01.png",
    "img/valid/abnormal/s4_01.png",
    "masks/test/s3_01.bmp",
    "masks/valid/s4_01.png",
)
PATTERNS = {"image": "img/{split}/{label}/{subject}_{name}", "mask": "masks/{split}/{subject}_{name}"}


def test_patterns_tell_subjects_and_masks(tmp_path: Path) -> None:
    root = tree(tmp_path / "x", *MASKED)
    folder = source(root, **PATTERNS)
    assert folder.has_masks
    assert {case.image_id: case.subject_id for case in folder.cases()} == {
        "train/good/img/s1_01": "s1",
        "train/good/img/s1_02": "s1",
        "test/good/img/s2_01": "s2",
        "test/Ungood/img/s3_01": "s3",
        "valid/Ungood/img/s4_01": "s4",
    }
    domain = prepared(root, tmp_path, **PATTERNS)
    masks = {row.image_id: domain.mask(row.mask_row) for row in domain.evaluated().itertuples()}
    np.testing.assert_array_equal(masks["test/Ungood/img/s3_01"], drawn("masks/test/s3_01.bmp") > 0)
    np.testing.assert_array_equal(masks["valid/Ungood/img/s4_01"], drawn("masks/valid/s4_01.png") > 0)
    assert not masks["test/good/img/s2_01"].any()


def test_masks_beside_images_are_no_images(tmp_path: Path) -> None:
    root = tree(tmp_path / "x", "test/abnormal/a.png", **{"test/abnormal/a_mask.png": encoded(drawn("a"), "png")})
    folder = source(root, mask="{split}/{label}/{name}_mask.png")
    assert [case.source_file for case in folder.cases()] == ["test/abnormal/a.png"]
    assert folder.problems == []
    mask = folder.cases()[0].load().mask
    assert mask is not None
    np.testing.assert_array_equal(mask, drawn("a") > 0)


TABLE = """image,split,label,subject,mask,boxes,pathology,ward
i/a.png,train,0,s1,,,,W1
i/b.png,val,normal,s2,,[],,W1
i/c.png,valid,Ungood,s3,masks/c.png,"[[20, 3, 24.5, 9]]",nodule,W2
i/d.png,test,1,s4,,"[[0, 0, 36, 20], [1, 2, 3, 4]]",mass,
i/e.png,test,good,,,,,
"""
LISTED = ("i/a.png", "i/b.png", "i/c.png", "i/d.png", "i/e.png", "masks/c.png")


def test_a_table_tells_everything(tmp_path: Path) -> None:
    root = tree(tmp_path / "x", *LISTED, **{"images.csv": TABLE})
    domain = prepared(root, tmp_path, table="images.csv")
    rows = domain.table.set_index("source_file")
    assert list(rows.split[sorted(rows.index)]) == ["train", "valid", "valid", "test", "test"]
    assert list(rows.subject_id[sorted(rows.index)]) == ["s1", "s2", "s3", "s4", "test/good/i/e"]
    assert json.loads(rows.boxes["i/c.png"]) == [[20, 3, 24.5, 9]]
    assert json.loads(rows.boxes["i/d.png"]) == [[0, 0, 36, 20], [1, 2, 3, 4]]
    assert list(rows.pathology[["i/c.png", "i/d.png", "i/a.png"]]) == ["nodule", "mass", ""]
    assert (domain.card["masks"], domain.card["boxes"], domain.card["ignored_files"]) == (True, True, 0)
    np.testing.assert_array_equal(domain.mask(rows.mask_row["i/c.png"]), drawn("masks/c.png") > 0)
    assert rows.mask_row.isna()["i/d.png"], "its truth is unknown"
    assert not domain.mask(rows.mask_row["i/e.png"]).any()


def test_table_and_pattern_complete_each_other(tmp_path: Path) -> None:
    table = "image,label,mask\nimg/p1-1.png,0,\nimg/p2-1.png,1,\nimg/p2-2.png,1,masks/other.png\nimg/p3-1.png,0,\n"
    names = ("img/p1-1.png", "img/p2-1.png", "img/p2-2.png", "img/p3-1.png", "masks/p2-1.png", "masks/other.png")
    root = tree(tmp_path / "x", *names, **{"t.csv": table})
    folder = source(
        root,
        table="t.csv",
        image="img/{subject}-{name}.png",
        mask="masks/{subject}-{name}.png",
        split={"train": 0.5, "valid": 0.0, "test": 0.5},
    )
    # A mask that the table names elsewhere fits no pattern: it belongs to its image all the same.
    cases = {case.source_file: case for case in folder.cases()}
    assert folder.problems == []
    assert [cases[f"img/p2-{n}.png"].subject_id for n in (1, 2)] == ["p2", "p2"]
    assert {cases[f"img/p2-{n}.png"].split for n in (1, 2)} == {"test"}
    assert {cases["img/p1-1.png"].split, cases["img/p3-1.png"].split} == {"train", "test"}
    for n, name in ((1, "masks/p2-1.png"), (2, "masks/other.png")):
        mask = cases[f"img/p2-{n}.png"].load().mask
        assert mask is not None
        np.testing.assert_array_equal(mask, drawn(name) > 0)


def test_subjects_are_divided_where_nothing_gives_splits(tmp_path: Path) -> None:
    names = [f"normal/h{n}/{k}.png" for n in range(10) for k in range(2)]
    names += [f"{kind}/i{n}/0.png" for n in range(4) for kind in ("normal", "abnormal")]
    root = tree(tmp_path / "x", *names)
    options = {"image": "{label}/{subject}/{name}", "split": {"train": 0.5, "valid": 0.2, "test": 0.3}}
    cases = source(root, **options).cases()
    splits = collections.defaultdict(set)
    for case in cases:
        splits[case.subject_id].add(case.split)
    assert all(len(where) == 1 for where in splits.values())
    assert collections.Counter(where for (where,) in (splits[f"h{n}"] for n in range(10))) == {
        "train": 5,
        "valid": 2,
        "test": 3,
    }
    assert {where for (where,) in (splits[f"i{n}"] for n in range(4))} == {"valid", "test"}
    assert {case.split for case in cases if case.label} == {"valid", "test"}
    moved = {case.subject_id: case.split for case in source(root, seed=1, **options).cases()}
    assert moved != {case.subject_id: case.split for case in cases}
    for n in range(1, 4):
        (root / f"abnormal/i{n}/0.png").rename(root / f"abnormal/i{n}.png")
    with pytest.raises(
        AnomedError, match=r"found 1, expected at least 2.*; first of 3 problems: abnormal/i1\.png: unrec"
    ):
        source(root, **options).cases()


def test_domains_of_one_root_do_not_read_again_what_the_other_read(tmp_path: Path) -> None:
    root = tree(tmp_path / "x", "a/train/normal/a.png", "b/train/normal/b.png")
    for domain, letter in (("first", "a"), ("second", "b")):
        options = check(FolderSource.Options, {"image": f"{letter}/{{split}}/{{label}}/{{name}}"}, "domains")
        FolderSource(domain, options, root, tmp_path / "work").fingerprint()
    assert len(list((tmp_path / "work" / "hashes").iterdir())) == 2


def test_colour(tmp_path: Path) -> None:
    coloured = {
        name: picture(name, colour=True) for name in ("train/normal/a.png", "test/normal/b.bmp", "test/1/c.tif")
    }
    root = tree(tmp_path / "x", **coloured)
    domain = prepared(root, tmp_path, colour=True)
    np.testing.assert_array_equal(domain.native("test/good/b"), pixels("test/normal/b.bmp", colour=True))
    with pytest.raises(CaseProblem, match="not_grey"):
        source(root).cases()[0].load()


def test_order_of_files_and_packing_do_not_matter(tmp_path: Path) -> None:
    one = prepared(tree(tmp_path / "a" / "x", *MASKED), tmp_path / "a", **PATTERNS)
    two = prepared(tree(tmp_path / "b" / "x", *reversed(MASKED)), tmp_path / "b", **PATTERNS)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as packed:
        for name in reversed(MASKED):
            packed.write(tmp_path / "a" / "x" / name, name)
    three = prepared(tmp_path / "x.zip", tmp_path / "c", **PATTERNS)
    assert one.hash == two.hash == three.hash
    assert records.digest_file(one.folder / "card.json") == records.digest_file(two.folder / "card.json")


def test_fingerprint_covers_table_images_and_masks(tmp_path: Path) -> None:
    root = tree(tmp_path / "x", *LISTED, **{"images.csv": TABLE})
    hashes = [source(root, table="images.csv").fingerprint()]
    tree(root, **{"notes.txt": b"x", "other.csv": b"y"})
    assert source(root, table="images.csv").fingerprint() == hashes[0]
    changes: dict[str, bytes | str] = {
        "images.csv": TABLE.replace("W1", "W9"),
        "i/a.png": picture("x.png"),
        "masks/c.png": encoded(drawn("longer"), "png"),
        "i/stray.png": picture("y.png"),
    }
    for name, data in changes.items():
        tree(root, **{name: data})
        hashes.append(source(root, table="images.csv").fingerprint())
    assert len(set(hashes)) == 5


@pytest.mark.parametrize(
    ("extra", "options", "expected"),
    [
        (["a.png"], {}, [("a.png", "unrecognised_file")]),
        (["test/normal/a.gif.webp"], {}, [("test/normal/a.gif.webp", "unrecognised_file")]),
        (["other/normal/a.png"], {}, [("other/normal/a.png", "unknown_split")]),
        (["test/strange/a.png"], {}, [("test/strange/a.png", "unknown_label")]),
        (["test/1/mask/g.png"], {}, [("test/1/mask/g.png", "mask_as_image")]),
        (
            ["masks/nobody.png"],
            {"mask": "masks/{name}.png"},
            [
                ("masks/nobody.png", "mask_without_image"),
                ("test/1/g.png", "missing_mask"),
                ("test/Ungood/f.TIFF", "missing_mask"),
                ("val/abnormal/deep/er/d.tif", "missing_mask"),
            ],
        ),
        (
            ["test/normal/s_1_a.png"],
            {"image": "{split}/{label}/{subject}_{name}"},
            [*((name, "unrecognised_file") for name in sorted(FOLDERS)), ("test/normal/s_1_a.png", "ambiguous_name")],
        ),
    ],
)
def test_faults_of_names(tmp_path: Path, extra: list[str], options: Any, expected: list[tuple[str, str]]) -> None:
    root = tree(tmp_path / "x", *FOLDERS, "test/normal/t_1.png", **dict.fromkeys(extra, b"x"))
    folder = source(root, **options)
    assert faults(folder) == sorted(expected)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("i/none.png,test,1,,,,,", [("i/none.png", "missing_image")]),
        ("i/a.png,test,1,,,,,", [("i/a.png", "duplicate_row")]),
        ("images.csv,test,0,,,,,", [("images.csv", "not_an_image")]),
        ("i/f.png,test,1,,masks/f.png,,,", [("i/f.png", "missing_mask")]),
        ("i/f.png,test,1,,masks/c.png,,,", [("i/f.png", "shared_mask")]),
        ("", [("i/f.png", "image_not_in_table")]),
        ('i/f.png,test,1,,,"[[1, 2, 3]]",,', [("i/f.png", "bad_boxes")]),
        ('i/f.png,test,1,,,"[1, 2, 3, 4]",,', [("i/f.png", "bad_boxes")]),
        ('i/f.png,test,1,,,"[[1, 2, NaN, 4]]",,', [("i/f.png", "bad_boxes")]),
        ('i/f.png,test,1,,,"[[1, 2, true, 4]]",,', [("i/f.png", "bad_boxes")]),
        (f'i/f.png,test,1,,,"[[1, 2, {10**400}, 4]]",,', [("i/f.png", "bad_boxes")]),
        (f'i/f.png,test,1,,,"{"[" * 100_000}",,', [("i/f.png", "bad_boxes")]),
        ('i/f.png,test,1,,,"[[3, 2, 1, 4]]",,', [("i/f.png", "bad_boxes")]),
        ('i/f.png,test,1,,,"[[1, 2, 1, 4]]",,', [("i/f.png", "bad_boxes")]),
        ("i/f.png,test,1,,,nonsense,,", [("i/f.png", "bad_boxes")]),
        ('i/f.png,test,0,,,"[[1, 2, 3, 4]]",,', [("i/f.png", "boxes_in_normal")]),
    ],
)
def test_faults_of_a_table(tmp_path: Path, line: str, expected: list[tuple[str, str]]) -> None:
    more = () if "none" in line or "i/a" in line or "csv" in line else ("i/f.png",)
    root = tree(tmp_path / "x", *LISTED, *more, **{"images.csv": TABLE + line + "\n"})
    assert faults(source(root, table="images.csv")) == expected


@pytest.mark.parametrize("box", ["[-1, 0, 5, 5]", "[0, 0, 37, 5]", "[0, 0, 5, 20.5]"])
def test_a_box_outside_the_image_is_refused(tmp_path: Path, box: str) -> None:
    table = f'image,split,label,boxes\na.png,test,1,"[{box}]"\n'
    case = source(tree(tmp_path / "x", "a.png", **{"t.csv": table}), table="t.csv").cases()[0]
    with pytest.raises(CaseProblem, match=r"box_outside: found box \[.*expected inside the image of 36 x 20 pixels"):
        case.load()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("image,label\na.png,2\n", r"t\.csv, line 2: found label '2', expected one of normal, good, 0, abnormal"),
        ("image,label,subject\na.png,1,s1 \n", "line 2: found subject 's1 ', expected one without spaces around it"),
        ("image,label,split\na.png,1,dev\n", r"line 2: found split 'dev', expected one of train, valid, val, test"),
        ("image,label\na.png\n", "line 2: found 1 cells, expected 2"),
        ("image,label\n../a.png,1\n", r"line 2: image '\.\./a\.png' has an empty part"),
        ("Image,label\na.png,1\n", "line 1: found columns .*expected 'image' once, without capitals"),
        ("file,label\na.png,1\n", "line 1: found columns .*expected `image` among them"),
        ("image,label\n", "line 2: found no image"),
        ("image,label\na.png,\xe4\n".encode("latin-1"), "line 2: not UTF-8"),
        ("image\na.png\n", "nothing says which images are abnormal, first a.png"),
    ],
)
def test_faulty_tables(tmp_path: Path, table: str | bytes, message: str) -> None:
    root = tree(tmp_path / "x", "a.png", **{"t.csv": table})
    with pytest.raises(AnomedError, match=message):
        source(root, table="t.csv").cases()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": "{split}/*.png"}, r"domains\.clinic\.image: '\{split\}/\*\.png' contains neither"),
        ({"image": "{name}*.png"}, r"has '\*' or a lone brace"),
        ({"image": "{patient}_{name}"}, r"has \{patient\}, expected no other than \{split\}, \{label\}"),
        ({"image": "/data/{name}"}, "is not relative to root"),
        ({"mask": "m/{subject}.png"}, r"domains\.clinic\.mask: .* has \{subject\}, expected no other than"),
        ({"table": "../t.csv"}, r"domains\.clinic\.table: '\.\./t\.csv' has an empty part"),
    ],
)
def test_faulty_options(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(AnomedError, match=message):
        source(tmp_path, **options)


def test_a_missing_table_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    root = tree(tmp_path / "x", **{"notes.txt": b""})
    with pytest.raises(AnomedError, match=r"t\.csv not found; domains\.clinic\.table names"):
        source(root, table="t.csv").cases()
    with pytest.raises(
        AnomedError, match=r"no image among 1 files; expected images named '\{split\}/\{label\}/\{name\}'"
    ):
        source(root).cases()


def test_a_mask_with_loss_is_refused(tmp_path: Path) -> None:
    root = tree(tmp_path / "x", "test/1/a.png", **{"m/a.jpg": encoded(drawn("a") * 255, "jpg")})
    case = source(root, mask="m/{name}").cases()[0]
    with pytest.raises(CaseProblem, match=r"^m/a\.jpg: mask_with_loss: found a JPEG"):
        case.load()


def test_real_scans_with_masks(real_data: Path, tmp_path: Path) -> None:
    folder, table = tmp_path / "x", ["image,split,label,subject"]
    for number, path in enumerate(sorted((real_data / "retinal_oct" / "amd_mh_masks").glob("*_mask.png"))):
        image = path.with_name(path.name.replace("_mask", ""))
        marked = (np.array(Image.open(path)) > 0).any()
        name = f"{'test' if marked or number % 2 else 'train'}/{image.name}"
        tree(folder, **{f"img/{name}": image.read_bytes(), f"msk/{name}": path.read_bytes()})
        table.append(f"img/{name},{name.partition('/')[0]},{int(marked)},{image.stem}")
    tree(folder, **{"t.csv": "\n".join(table)})
    options = {"table": "t.csv", "image": "img/{name}", "mask": "msk/{name}"}
    domain = prepared(folder, tmp_path, **options)
    abnormal = domain.table[domain.table.label == 1]
    assert len(abnormal) > 5
    for row in abnormal.itertuples():
        original = real_data / "retinal_oct" / "amd_mh_masks" / f"{row.subject_id}_mask.png"
        np.testing.assert_array_equal(domain.mask(row.mask_row), np.array(Image.open(original)) > 0)
