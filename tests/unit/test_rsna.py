"""The rsna source on trees in Kaggle's layout, with DICOM files written byte by byte."""

import csv
import io
import json
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from anomed import prepare
from anomed.domains import rsna_film
from anomed.domains.division import divide
from anomed.domains.rsna import LIKE_BMAD, Rsna
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Prepared
from anomed.settings import check

NORMAL, OPACITY, OTHER = "Normal", "Lung Opacity", "No Lung Opacity / Not Normal"
BOX = {"a1": [(3.5, 2.0, 10.0, 6.0), (20.0, 4.0, 28.0, 16.0)]}  # x, y, width, height; the second ends in the corner
KINDS = {**{f"n{i}": NORMAL for i in range(6)}, "a1": OPACITY, "a2": OTHER, "a3": OTHER}
VIEWS = {**dict.fromkeys(KINDS, "PA"), "a1": "AP", "n3": "LATERAL", "n4": ""}
HEIGHT, WIDTH = 20, 48
SHARES = {"train": 0.5, "valid": 0.25, "test": 0.25}


def pixels(name: str) -> np.ndarray:
    """Uint8 HEIGHT x WIDTH, smooth, neither symmetric nor square, another for every name."""
    rng = np.random.default_rng(list(name.encode()))
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    return (rows * rng.uniform(1, 5) + columns * rng.uniform(1, 3)).astype(np.uint8)


def element(group: int, number: int, kind: str, value: bytes | str) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    raw += (b"\0" if kind in ("UI", "OB") else b" ") * (len(raw) % 2)
    form, reserved = ("<HH2sHI", (0,)) if kind in ("OB", "OW") else ("<HH2sH", ())
    return struct.pack(form, group, number, kind.encode(), *reserved, len(raw)) + raw


def dicom(image: np.ndarray, patient: str, jpeg: bool = False, photometric: str = "MONOCHROME2", **other: Any) -> bytes:
    """A Part 10 file, explicit little endian, stored raw or as JPEG baseline. other: bits, extra, size, cut, view."""
    bits, (height, width) = other.get("bits", 8), other.get("size", image.shape)
    syntax = "1.2.840.10008.1.2.4.50" if jpeg else "1.2.840.10008.1.2.1"
    meta = element(2, 1, "OB", b"\0\1") + element(2, 2, "UI", "1.2.840.10008.5.1.4.1.1.7")
    meta += element(2, 3, "UI", "1.2.3") + element(2, 0x10, "UI", syntax) + element(2, 0x12, "UI", "1.2")
    body = element(8, 0x16, "UI", "1.2.840.10008.5.1.4.1.1.7") + element(8, 0x18, "UI", "1.2.3")
    body += element(0x10, 0x20, "LO", patient)
    if other.get("view"):
        body += element(0x18, 0x5101, "CS", other["view"])
    numbers = {2: 1, 4: photometric, 0x10: height, 0x11: width, 0x100: bits, 0x101: bits, 0x102: bits - 1, 0x103: 0}
    for number, value in numbers.items():
        kind = "CS" if isinstance(value, str) else "US"
        body += element(0x28, number, kind, value if isinstance(value, str) else struct.pack("<H", value))
    body += other.get("extra", b"")
    if jpeg:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=90)
        frame = buffer.getvalue()[: other.get("cut")]
        frame += b"\0" * (len(frame) % 2)
        items = struct.pack("<HHIHHI", 0xFFFE, 0xE000, 0, 0xFFFE, 0xE000, len(frame)) + frame
        body += struct.pack("<HH2sHI", 0x7FE0, 0x10, b"OB", 0, 0xFFFFFFFF) + items
        body += struct.pack("<HHI", 0xFFFE, 0xE0DD, 0)
    else:
        body += element(0x7FE0, 0x10, "OW", image.tobytes())
    return b"\0" * 128 + b"DICM" + element(2, 0, "UL", struct.pack("<I", len(meta))) + meta + body


def write(path: Path, header: str, rows: list[list[Any]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header.split(","), *rows])


def tree(root: Path, backwards: bool = False) -> Path:
    """The challenge's folder for KINDS; `backwards`: everything is written in another order."""
    (root / "stage_2_train_images").mkdir(parents=True)
    (root / "stage_2_test_images").mkdir()
    (root / "stage_2_test_images" / "t0.dcm").write_bytes(b"unlabelled")
    labels, classes = [], []
    for name in sorted(KINDS, reverse=backwards):
        boxes = BOX.get(name, [])
        jpeg, photometric = name in ("n1", "a1"), "MONOCHROME1" if name == "n2" else "MONOCHROME2"
        image = 255 - pixels(name) if photometric == "MONOCHROME1" else pixels(name)
        path = root / "stage_2_train_images" / f"{name}.dcm"
        path.write_bytes(dicom(image, name, jpeg, photometric, view=VIEWS.get(name)))
        labels += [[name, *box, 1] for box in boxes] or [[name, "", "", "", "", 0]]
        classes += [[name, KINDS[name]]] * max(1, len(boxes))
    write(root / "stage_2_train_labels.csv", "patientId,x,y,width,height,Target", labels)
    write(root / "stage_2_detailed_class_info.csv", "patientId,class", classes)
    return root


def source(root: Path | None, **options: Any) -> Rsna:
    parsed = check(Rsna.Options, {"split": SHARES, **options}, "domains.chest_xray")
    return Rsna("chest_xray", parsed, root, (root or Path()).parent / "work")


def build(root: Path, out: Path, **options: Any) -> Prepared:
    parameters = {"source": "rsna", "size": 32, "release": None, "fingerprint": "", "split": SHARES, **options}
    prepare.prepare("chest_xray", parameters, root, out.parent / "work", out, out.parent / "problems.csv")
    return Prepared(out)


def codes(faulty: Rsna) -> list[str]:
    faulty.cases()
    return [problem.row["code"] for problem in faulty.problems]


def edit(root: Path, table: str, old: str, new: str) -> None:
    path = root / table
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


LABELS, CLASSES = "stage_2_train_labels.csv", "stage_2_detailed_class_info.csv"


def native(folder: Path, image_id: str) -> np.ndarray:
    with zipfile.ZipFile(folder / "native.zip") as archive:
        return np.array(Image.open(io.BytesIO(archive.read(f"{image_id}.png"))))


def test_prepared_domain_holds_labels_boxes_and_upright_pixels(tmp_path: Path) -> None:
    prepared = build(tree(tmp_path / "raw"), tmp_path / "out")
    table = prepared.table.set_index(prepared.table.source_file.str.extract(r"/(\w+)\.dcm", expand=False))
    assert table.pathology.to_dict() == {
        name: {OPACITY: "Lung_Opacity", OTHER: "No-Not-Normal"}.get(kind, "") for name, kind in KINDS.items()
    }
    assert (table.label == [int(KINDS[name] != NORMAL) for name in table.index]).all()
    assert prepared.card["counts"]["train"] == {"normal": 3, "abnormal": 0}
    assert prepared.card["counts"]["valid"]["normal"] + prepared.card["counts"]["test"]["normal"] == 3
    assert json.loads(table.boxes["a1"]) == [[3.5, 2.0, 13.5, 8.0], [20.0, 4.0, 48.0, 20.0]]
    assert prepared.card["ignored_files"] == 1
    assert not prepared.card["masks"]
    assert ((table.native_h == HEIGHT) & (table.native_w == WIDTH)).all()
    assert source(tmp_path / "raw").offers == {"view"}
    assert prepared.clinical == {table.image_id[name]: {"view": view} for name, view in VIEWS.items() if view}
    for name, row in table.iterrows():
        assert row.image_id == f"{row.split}/{'Ungood' if row.label else 'good'}/{name}"
        image = native(tmp_path / "out", row.image_id)
        if name in ("n1", "a1"):  # JPEG: what an independent decoder makes of it
            buffer = io.BytesIO()
            Image.fromarray(pixels(str(name))).save(buffer, "JPEG", quality=90)
            assert np.abs(image.astype(int) - np.array(Image.open(buffer))).max() <= 1
        else:
            assert (image == pixels(str(name))).all()


def test_same_bytes_from_a_zip_in_another_order(tmp_path: Path) -> None:
    build(tree(tmp_path / "raw"), tmp_path / "one" / "out")
    shutil.make_archive(str(tmp_path / "other"), "zip", tree(tmp_path / "backwards", backwards=True))
    build(tmp_path / "other.zip", tmp_path / "two" / "out")
    for name in ("manifest.csv", "images.npy", "native.zip"):
        assert (tmp_path / "one/out" / name).read_bytes() == (tmp_path / "two/out" / name).read_bytes(), name


def test_default_shares_come_near_bmad() -> None:
    divided = divide(map(str, range(8851)), (f"a{i}" for i in range(17833)), LIKE_BMAD, 0, "split", "")
    counts = {
        (split, kind): sum(where == split and name.startswith("a") == kind for name, where in divided.items())
        for split in ("train", "valid", "test")
        for kind in (False, True)
    }
    assert list(counts.values()) == [8000, 0, 68, 1427, 783, 16406]
    assert Rsna.Options().split == LIKE_BMAD


def test_fingerprint_follows_what_is_used_only(tmp_path: Path) -> None:
    root = tree(tmp_path / "raw")
    before = source(root).fingerprint()
    (root / "stage_2_test_images" / "t1.dcm").write_bytes(b"more")
    assert source(root).fingerprint() == before
    (root / "stage_2_train_images" / "n1.dcm").write_bytes(dicom(pixels("new"), "n1"))
    assert source(root).fingerprint() != before


def test_with_the_mapping_subjects_are_patients_in_one_split(tmp_path: Path) -> None:
    root = tree(tmp_path / "raw")
    owners = {"n0": "00000001", "a1": "00000001", "n1": "00000002", "n2": "00000002"}
    rows = [
        {"subset_img_id": name, "img_id": f"{owners.get(name, f'{100 + i:08d}')}_{i:03d}.png"}
        for i, name in enumerate(KINDS)
    ]
    (root / "map.json").write_text(json.dumps(rows))
    cases = {case.image_id.rpartition("/")[2]: case for case in source(root, mapping="map.json").cases()}
    assert cases["n0"].subject_id == cases["a1"].subject_id == "00000001"
    assert cases["n0"].split == cases["a1"].split != "train", "a patient with an abnormal film stays out of train"
    assert cases["n1"].split == cases["n2"].split
    without = source(root).cases()
    assert all(case.subject_id == case.image_id for case in without), "unknown subjects are marked per image"
    rows.pop()
    (root / "map.json").write_text(json.dumps(rows))
    assert codes(source(root, mapping="map.json")) == ["image_without_patient"]
    (root / "map.json").write_text("[" * 100_000)
    with pytest.raises(AnomedError, match=r"map\.json: .*expected a JSON list of objects"):
        source(root, mapping="map.json").cases()
    (root / "map.json").write_text('[{"subset_img_id": "n0", "img_id": "somebody"}]')
    with pytest.raises(AnomedError, match=r"map\.json: unexpected entry 'somebody'.*subset_img_id"):
        source(root, mapping="map.json").cases()


@pytest.mark.parametrize(
    ("table", "old", "new", "expected"),
    [
        (LABELS, "n0,,,,,0", "zz,,,,,0", ["image_without_row", "image_without_class", "missing_image"]),
        (CLASSES, "n0,Normal", "a2,Normal", ["contradictory_class", "image_without_class"]),
        (CLASSES, "n0,Normal", f"n0,{OPACITY}", ["contradictory_class"]),
        (CLASSES, f"a1,{OPACITY}", "a1,Normal", ["contradictory_class"]),
        (LABELS, "n0,,,,,0", "n0,1,1,3,3,1", ["contradictory_class"]),
        (CLASSES, "n0,Normal", "n0,normal", ["image_without_class", "malformed_row"]),
        (LABELS, "n0,,,,,0", "n0,1,1,3,3,0", ["image_without_row", "malformed_row"]),
        (LABELS, "n0,,,,,0", "n0,1,1,nan,3,1", ["image_without_row", "malformed_row"]),
        (LABELS, "3.5,2.0,10.0,6.0,1", "3.5,-2.0,10.0,6.0,1", ["malformed_row"]),
        (LABELS, "3.5,2.0,10.0,6.0,1", "3.5,2.0,10.0", ["malformed_row"]),
        (LABELS, "3.5,2.0,10.0,6.0,1", "3.5,2.0,1_0,6.0,1", ["malformed_row"]),
        (LABELS, "a1,20.0,4.0,28.0,16.0,1", "a1,,,,,0", ["malformed_row"]),
        (LABELS, "n0,,,,,0", "n0,,,,,0,1", ["image_without_row", "malformed_row"]),
        (CLASSES, "n0,Normal", f"n0,Normal,{OPACITY}", ["image_without_class", "malformed_row"]),
    ],
)
def test_tables_that_contradict_are_listed(tmp_path: Path, table: str, old: str, new: str, expected: list[str]) -> None:
    root = tree(tmp_path / "raw")
    edit(root, table, old, new)
    faulty = source(root)
    assert sorted(codes(faulty)) == sorted(expected)
    lines = (root / table).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if new in line)
    named = [problem.row["case"] for problem in faulty.problems if problem.row["code"] == "malformed_row"]
    assert named in ([], [f"{table}, line {number}"])


def test_missing_films_and_films_without_row(tmp_path: Path) -> None:
    root = tree(tmp_path / "raw")
    (root / "stage_2_train_images" / "n0.dcm").rename(root / "stage_2_train_images" / "n9.dcm")
    assert codes(source(root)) == ["missing_image", "image_without_row", "image_without_class"]
    kept = source(root, exclude={"n0": "lost", "n9": "of whom?"})
    assert {case.image_id.rpartition("/")[2] for case in kept.cases()} == KINDS.keys() - {"n0"}
    assert kept.problems == []
    with pytest.raises(AnomedError, match=r"exclude: no film 'n33'; did you mean 'n3'"):
        source(root, exclude={"n33": "typing error"}).cases()


@pytest.mark.parametrize(
    ("data", "code", "found"),
    [
        (dicom(pixels("n0"), "n5"), "patient_id", "'n5'"),
        (dicom(pixels("n0").astype(np.uint16), "n0", bits=16), "pixel_format", "BitsAllocated 16, BitsStored 16"),
        (dicom(pixels("n0"), "n0", extra=element(0x28, 0x1053, "DS", "2")), "pixel_format", "RescaleSlope 2"),
        (dicom(pixels("n0"), "n0")[:-50], "damaged_dicom", "no image"),
        (dicom(pixels("n0"), "n0", jpeg=True, cut=-50), "damaged_dicom", "no image"),
        (dicom(pixels("n0"), "n0", jpeg=True, size=(WIDTH, HEIGHT)), "damaged_dicom", ""),
        (dicom(pixels("n0"), "n0", size=(WIDTH, WIDTH)), "damaged_dicom", "960 bytes of pixels"),
        (dicom(pixels("n0"), "n0", size=(HEIGHT - 1, WIDTH)), "damaged_dicom", "960 bytes of pixels"),
        (dicom(pixels("n0"), "n0", size=(60_000, 60_000)), "too_large", "60000 x 60000 pixels"),
        (b"\x89PNG", "damaged_dicom", "no image"),
        (b"", "damaged_dicom", "no image"),
    ],
)
def test_films_that_are_refused(tmp_path: Path, data: bytes, code: str, found: str) -> None:
    with pytest.raises(CaseProblem) as caught:
        rsna_film.read(data, "films/n0.dcm", "n0", tmp_path)
    assert caught.value.row["code"] == code
    assert caught.value.row["case"] == "films/n0.dcm"
    assert found in caught.value.row["found"]
    assert list(tmp_path.iterdir()) == [], "no temporary file is left"


def test_a_box_outside_its_film_stops_the_domain(tmp_path: Path) -> None:
    root = tree(tmp_path / "raw")
    edit(root, LABELS, "20.0,4.0,28.0,16.0", "20.0,4.0,16.0,28.0")  # width and height exchanged
    with pytest.raises(AnomedError, match=r"a1\.dcm: box_outside: .*32\.0\).*20 x 48 pixels"):
        build(root, tmp_path / "out")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda root: (root / LABELS).unlink(), r"stage_2_train_labels\.csv found 0 times"),
        (lambda root: (root / CLASSES).unlink(), r"stage_2_detailed_class_info\.csv: not found"),
        (lambda root: edit(root, LABELS, "Target", "target"), r"no column 'Target'; expected .*patientId, x, y"),
        (lambda root: (root / CLASSES).write_bytes(b"\xff\xfe\0"), r"class_info\.csv: 'utf-8'"),
        (lambda root: shutil.copytree(root, root / "copy"), r"found 2 times"),
    ],
)
def test_a_root_that_is_not_the_challenge(tmp_path: Path, break_it: Any, message: str) -> None:
    root = tree(tmp_path / "raw")
    break_it(root)
    with pytest.raises(AnomedError, match=message):
        source(root).cases()


def test_a_root_one_folder_above_and_none(tmp_path: Path) -> None:
    tree(tmp_path / "data" / "rsna")
    assert {case.source_file.split("/")[0] for case in source(tmp_path / "data").cases()} == {"rsna"}
    with pytest.raises(AnomedError, match=r"domains\.chest_xray\.root: missing"):
        source(None).cases()


def test_real_films_keep_their_levels(tmp_path: Path, real_data: Path) -> None:
    """Real NIH films through DICOM: the pixels that Pillow reads from the same JPEG, boxes of RSNA's readers inside."""
    rows = list(csv.DictReader((real_data / "chest_xray" / "labels.csv").open()))
    row = next(row for row in rows if len(json.loads(row["boxes_xywh_256"])) == 2)
    with Image.open(real_data / "chest_xray" / "images" / row["file"]) as film:
        image = np.array(film.convert("L"))[10:]  # not square
    read, view = rsna_film.read(dicom(image, row["rsna_id"]), "film", row["rsna_id"], tmp_path)
    assert view == ""
    assert (read == image).all()
    packed, _ = rsna_film.read(dicom(image, row["rsna_id"], jpeg=True), "film", row["rsna_id"], tmp_path)
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=90)
    assert np.abs(packed.astype(int) - np.array(Image.open(buffer))).max() <= 1
