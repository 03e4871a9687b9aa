"""The resc source on small trees in the challenge's layout: patients, labels, masks, and what is refused."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from anomed import prepare, records
from anomed.domains.resc import Resc
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Prepared
from anomed.settings import check

SHAPE = (40, 20)
CUBES = {  # part -> cube -> level of the label of each of its B-scans
    "training": {
        "P0012_MacularCube512x128_8-7-2014_13-29-39_OS_sn1_cube_z": [0, 255, 0],
        "P0012_MacularCube512x128_8-7-2014_13-30-44_OS_sn2_cube_z": [0, 0],
        "PC004_MacularCube512x128_1-1-2013_9-15-7_OS_sn3_cube_z": [0, 191],  # the patient is in the other part as well
    },
    "validation": {
        "P0067_MacularCube512x128_4-28-2014_17-15-21_OS_sn4_cube_z": [0, 128],
        "P0248_MacularCube512x128_5-22-2014_17-29-22_OS_sn5_cube_z": [255, 0],
        "P0248_MacularCube512x128_5-22-2014_17-29-34_OD_sn6_cube_z": [191, 0],
        "PC004_MacularCube512x128_8-26-2013_9-15-7_OS_sn7_cube_z": [0, 255],
        "PC022_MacularCube512x128_11-12-2013_8-36-31_OD_sn8_cube_z": [0, 255],
    },
}


def bmp(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "BMP")
    return buffer.getvalue()


def scan(name: str) -> np.ndarray:
    return np.random.default_rng(list(name.encode())).integers(0, 256, SHAPE, dtype=np.uint8)


def label(level: int) -> np.ndarray:
    """A lesion in one corner; of REA with subretinal fluid in it."""
    array = np.zeros(SHAPE, np.uint8)
    array[2:9, 11:18] = level
    if level == 255:
        array[4:6, 12:15] = 191
    return array


def files(head: str = "Edema_{part}set/") -> dict[str, bytes]:
    found = {}
    for part, cubes in CUBES.items():
        for cube, levels in cubes.items():
            for number, level in enumerate(levels, 1):
                base = head.format(part=part)
                found[f"{base}original_images/{cube}.img/{number}.bmp"] = bmp(scan(f"{cube}{number}"))
                found[f"{base}label_images/{cube}_labelMark/{number}.bmp"] = bmp(label(level))
    return found


def tree(root: Path, content: dict[str, bytes]) -> Path:
    for name, data in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def source(root: Path, **options: Any) -> Resc:
    return Resc("resc", check(Resc.Options, options, "domains.resc"), root, root.parent / "work")


def prepared(root: Path, out: Path) -> Prepared:
    parameters = {"source": "resc", "size": 32, "release": None, "fingerprint": "0"}
    prepare.prepare("resc", parameters, root, out / "work", out / "resc", out / "problems.csv")
    return Prepared(out / "resc")


def test_patients_stay_together_and_train_is_free_of_lesions(tmp_path: Path) -> None:
    root = tree(tmp_path / "x", files())
    tree(root, {"Edema_testset/original_images/P9_cube_z.img/1.bmp": bmp(scan("t")), "notes.txt": b"x"})
    resc = source(root)
    cases = resc.cases()
    assert resc.problems == []
    train = [case for case in cases if case.split == "train"]
    assert {case.subject_id for case in train} == {"P0012"}
    assert [case.label for case in train] == [0, 0, 0, 0]
    assert resc.ignored == 1 + 2 + 1 + 1  # with a lesion; of a patient held out; of the part testset; notes.txt
    where = {case.subject_id: {other.split for other in cases if other.subject_id == case.subject_id} for case in cases}
    assert sorted(where) == ["P0012", "P0067", "P0248", "PC004", "PC022"]
    assert all(len(splits) == 1 for splits in where.values())
    assert sorted(next(iter(splits)) for splits in where.values()) == ["test"] * 3 + ["train", "valid"]
    chosen = {frozenset(c.subject_id for c in source(root, seed=s).cases() if c.split == "valid") for s in range(6)}
    assert len(chosen) > 1


def test_prepared_and_read_back(tmp_path: Path) -> None:
    domain = prepared(tree(tmp_path / "x", files("ai_challenger_fl2018_{part}set/Edema_{part}set/")), tmp_path)
    counts = domain.card["counts"]
    assert counts["train"] == {"normal": 4, "abnormal": 0}
    assert [counts["valid"][kind] + counts["test"][kind] for kind in ("normal", "abnormal")] == [5, 5]
    assert domain.card["masks"] is True
    levels = {f"{cube}_{n:03d}": level for cube, ls in CUBES["validation"].items() for n, level in enumerate(ls, 1)}
    for row in domain.evaluated().itertuples():
        stem = row.image_id.rpartition("/")[2]
        assert row.label == (levels[stem] > 0)
        np.testing.assert_array_equal(domain.mask(row.mask_row), label(levels[stem]) > 0)
        np.testing.assert_array_equal(domain.native(row.image_id), scan(f"{stem[:-4]}{int(stem[-3:])}"))
        assert row.pathology == {0: "", 128: "PED", 191: "SRF", 255: "REA+SRF"}[levels[stem]]
        assert (row.native_h, row.native_w) == SHAPE


def test_order_of_files_and_packing_do_not_matter(tmp_path: Path) -> None:
    content = files()
    one = prepared(tree(tmp_path / "a" / "x", content), tmp_path / "a")
    two = prepared(tree(tmp_path / "b" / "x", dict(reversed(content.items()))), tmp_path / "b")
    with zipfile.ZipFile(tmp_path / "resc.zip", "w") as packed:
        for name, data in reversed(content.items()):
            packed.writestr(name, data)
    three = prepared(tmp_path / "resc.zip", tmp_path / "c")
    assert one.hash == two.hash == three.hash
    assert records.digest_file(one.folder / "card.json") == records.digest_file(two.folder / "card.json")


def test_fingerprint_covers_both_parts_and_nothing_else(tmp_path: Path) -> None:
    root = tree(tmp_path / "x", files())
    before = source(root).fingerprint()
    tree(
        root, {"Edema_testset/original_images/P9_cube_z.img/1.bmp": b"x", "Edema_validationset/groundtruth/a.npy": b""}
    )
    assert source(root).fingerprint() == before
    name = next(name for name in files() if "label_images" in name)
    (root / name).write_bytes(bmp(label(128)))
    assert source(root).fingerprint() != before


CUBE = "P0067_MacularCube512x128_4-28-2014_17-15-21_OS_sn4_cube_z"
IMAGE = f"Edema_validationset/original_images/{CUBE}.img/2.bmp"
LABEL = f"Edema_validationset/label_images/{CUBE}_labelMark/2.bmp"


@pytest.mark.parametrize(
    ("name", "data", "case", "code", "found"),
    [
        (LABEL, None, IMAGE, "missing_label", "no label image"),
        (IMAGE, None, LABEL, "mask_without_image", "a label image alone"),
        (LABEL, bmp(label(77)), LABEL, "unknown_label", "levels [77]"),
        (LABEL, bmp(label(255))[:-9], LABEL, "damaged_image", "pixels that do not decode"),
        ("Edema_validationset/2.bmp", b"x", "Edema_validationset/2.bmp", "unrecognised_file", "another place"),
        (f"copy/{IMAGE}", b"x", f"copy/{IMAGE}", "duplicate_file", IMAGE),
    ],
)
def test_faults_of_the_release_are_named(
    tmp_path: Path, name: str, data: bytes | None, case: str, code: str, found: str
) -> None:
    root = tree(tmp_path / "x", files())
    if data is None:
        (root / name).unlink()
    else:
        tree(root, {name: data})
    resc = source(root)
    resc.cases()
    rows = [problem.row for problem in resc.problems]
    if code == "duplicate_file":
        assert {rows[0]["case"], rows[0]["found"].removesuffix(" as well")} == {case, found}
    else:
        assert (rows[0]["case"], rows[0]["found"][: len(found)]) == (case, found)
    assert [row["code"] for row in rows] == [code]


def test_a_resized_or_turned_scan_is_refused(tmp_path: Path) -> None:
    root = tree(tmp_path / "x", {**files(), IMAGE: bmp(scan("t").T.copy())})
    case = next(case for case in source(root).cases() if case.source_file == IMAGE)
    with pytest.raises(CaseProblem, match=r"unexpected_size: found 20 x 40 pixels, expected twice as high as wide"):
        case.load()


@pytest.mark.parametrize("part", ["training", "validation"])
def test_a_missing_part_is_named(tmp_path: Path, part: str) -> None:
    root = tree(tmp_path / "x", {name: data for name, data in files().items() if f"_{part}set" not in name})
    with pytest.raises(AnomedError, match=f"no labelled B-scan of the {part} part; expected Edema_"):
        source(root).cases()


def test_real_scans_in_the_layout(real_data: Path, tmp_path: Path) -> None:
    """Real B-scans with real masks, padded to the release's shape: read back as drawn."""
    pictures = sorted((real_data / "retinal_oct" / "amd_mh_masks").glob("*_mask.png"))[:6]
    content = files()
    for number, path in enumerate(pictures, 3):
        mask = np.pad(np.array(Image.open(path)) > 0, ((256, 256), (0, 0)))
        image = np.pad(
            np.array(Image.open(path.with_name(path.name.replace("_mask", ""))).convert("L")), ((256, 256), (0, 0))
        )
        content[IMAGE.replace("/2.bmp", f"/{number}.bmp")] = bmp(image)
        content[LABEL.replace("/2.bmp", f"/{number}.bmp")] = bmp(np.where(mask, 191, 0).astype(np.uint8))
    cases = {case.source_file: case for case in source(tree(tmp_path / "x", content)).cases()}
    for number, path in enumerate(pictures, 3):
        case = cases[IMAGE.replace("/2.bmp", f"/{number}.bmp")]
        pixels, drawn = case.load(), np.array(Image.open(path)) > 0
        assert pixels.image.shape == (1024, 512)
        assert pixels.mask is not None
        np.testing.assert_array_equal(pixels.mask[256:768], drawn)
        assert (case.label, case.pathology) == ((1, "SRF") if drawn.any() else (0, ""))
