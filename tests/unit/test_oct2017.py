"""The oct2017 source on small trees in the release's layout: who goes where, what is left out, and what is refused."""

import collections
import io
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from anomed import prepare, records
from anomed.domains.oct2017 import Oct2017
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Case, Prepared
from anomed.settings import check

FILES = [
    "train/NORMAL/NORMAL-1-1.jpeg",
    "train/NORMAL/NORMAL-1-2.jpeg",
    "train/NORMAL/NORMAL-2-1.jpeg",  # the patient is in test as well
    "train/NORMAL/NORMAL-3-1.jpeg",  # in val as well
    "train/NORMAL/NORMAL-4-1.jpeg",  # a copy of a file of test, under another patient
    "train/NORMAL/NORMAL-10-1.jpeg",
    "train/CNV/CNV-5-1.jpeg",
    "train/DRUSEN/DRUSEN-6-1.jpeg",
    "val/NORMAL/NORMAL-3-2.jpeg",
    "val/NORMAL/NORMAL-8-9.jpeg",  # in test as well
    "val/DME/DME-7-1.jpeg",
    "test/NORMAL/NORMAL-2-2.jpeg",
    "test/NORMAL/NORMAL-8-1.jpeg",
    "test/DRUSEN/DRUSEN-9-1.jpeg",
    "test/CNV/CNV-2-3.jpeg",
]
COPY = {"train/NORMAL/NORMAL-4-1.jpeg": "test/NORMAL/NORMAL-8-1.jpeg"}


def jpeg(name: str) -> bytes:
    """An image of 24 x 40, another for every name, that is not its own flip or transpose."""
    pixels = np.random.default_rng(list(COPY.get(name, name).encode())).integers(0, 200, (24, 40), dtype=np.uint8)
    pixels[:4, :20] = 255
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def tree(root: Path, files: list[str] = FILES) -> Path:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(jpeg(name))
    return root


def without_val(root: Path) -> Path:
    more = [f"train/NORMAL/NORMAL-{n}-1.jpeg" for n in range(20, 26)]
    more += [f"train/DME/DME-{n}-1.jpeg" for n in range(30, 34)] + ["train/NORMAL/NORMAL-30-2.jpeg"]
    return tree(root, [name for name in FILES if not name.startswith("val/")] + more)


def source(root: Path, **options: Any) -> Oct2017:
    return Oct2017("oct", check(Oct2017.Options, options, "domains.oct"), root, root.parent / "work")


def stems(cases: list[Case], split: str) -> set[str]:
    return {case.image_id.rpartition("/")[2] for case in cases if case.split == split}


def prepared(root: Path, out: Path, **options: Any) -> Prepared:
    common = {"source": "oct2017", "size": 32, "release": None, "fingerprint": "0"}
    prepare.prepare("oct", {**common, **options}, root, out / "work", out / "oct", out / "problems.csv")
    return Prepared(out / "oct")


def test_by_default_no_patient_and_no_copy_is_in_two_splits(tmp_path: Path) -> None:
    root = tree(tmp_path / "OCT2017")
    (root / "test" / "Thumbs.db").write_bytes(b"x")
    oct2017 = source(root)
    cases = oct2017.cases()
    assert oct2017.problems == []
    assert stems(cases, "train") == {"NORMAL-1-1", "NORMAL-1-2", "NORMAL-10-1"}
    assert stems(cases, "valid") == {"NORMAL-3-2", "DME-7-1"}
    assert stems(cases, "test") == {"NORMAL-2-2", "NORMAL-8-1", "DRUSEN-9-1", "CNV-2-3"}
    assert oct2017.ignored == len(FILES) + 1 - len(cases)
    facts = {case.image_id: (case.subject_id, case.label, case.pathology) for case in cases}
    assert facts["test/Ungood/CNV-2-3"] == ("2", 1, "CNV")
    assert facts["train/good/NORMAL-10-1"] == ("10", 0, "")


def test_prepared_and_read_back(tmp_path: Path) -> None:
    root = tree(tmp_path / "OCT2017")
    domain = prepared(root, tmp_path)
    assert domain.card["counts"] == {
        "train": {"normal": 3, "abnormal": 0},
        "valid": {"normal": 1, "abnormal": 1},
        "test": {"normal": 2, "abnormal": 2},
    }
    assert (domain.card["masks"], domain.card["problems"], domain.card["ignored_files"]) == (False, {}, len(FILES) - 9)
    for row in domain.evaluated().itertuples():
        with Image.open(io.BytesIO(jpeg(row.source_file))) as image:
            np.testing.assert_array_equal(domain.native(row.image_id), np.array(image))
        assert (row.native_h, row.native_w) == (24, 40)
    assert list(domain.table.subject_id[domain.table.split == "train"]) == ["1", "1", "10"]


def test_as_bmad_took_it(tmp_path: Path) -> None:
    domain = prepared(tree(tmp_path / "OCT2017"), tmp_path, variant="bmad")
    assert domain.card["counts"] == {
        "train": {"normal": 6, "abnormal": 0},
        "valid": {"normal": 2, "abnormal": 1},
        "test": {"normal": 2, "abnormal": 2},
    }
    assert domain.card["problems"] == {"duplicate_across_splits": 1, "subject_in_two_splits": 3}  # patients 2, 3, 8
    assert domain.card["ignored_files"] == 2


def test_the_default_refuses_what_the_variant_accepts(tmp_path: Path) -> None:
    assert source(tmp_path).accepts == frozenset()
    assert source(tmp_path, variant="bmad").accepts == {"subject_in_two_splits", "duplicate_across_splits"}


def test_without_val_patients_of_train_make_valid(tmp_path: Path) -> None:
    cases = source(without_val(tmp_path / "OCT2017"), valid=0.5).cases()
    splits = collections.defaultdict(set)
    for case in cases:
        splits[case.subject_id].add(case.split)
    assert all(len(where) == 1 for where in splits.values())
    assert sum(case.split == "valid" and not case.label for case in cases) >= 4  # of 9 healthy patients
    assert sum(case.split == "valid" and case.label for case in cases) >= 2  # of 6 ill ones
    assert {case.label for case in cases if case.split == "train"} == {0}
    assert stems(cases, "test") == {"NORMAL-2-2", "NORMAL-8-1", "DRUSEN-9-1", "CNV-2-3"}
    other = source(tmp_path / "OCT2017", valid=0.5, seed=1).cases()
    assert stems(other, "valid") != stems(cases, "valid")


def test_every_place_of_the_release_is_found(tmp_path: Path) -> None:
    root = tree(tmp_path / "a" / "OCT2017 ")  # Kaggle's folder ends with a space
    wanted = sorted(case.image_id for case in source(root).cases())
    chest = tmp_path / "b" / "CellData" / "chest_xray" / "train" / "NORMAL" / "NORMAL-1-0001.jpeg"
    chest.parent.mkdir(parents=True)
    chest.write_bytes(jpeg("chest"))
    tree(tmp_path / "b" / "CellData" / "OCT")
    with zipfile.ZipFile(tmp_path / "c.zip", "w") as packed:
        for name in reversed(FILES):
            packed.writestr(f"x/OCT2017/{name}", jpeg(name))
    for place in ("a", "b", "c.zip"):
        found = source(tmp_path / place)
        cases = found.cases()
        assert sorted(case.image_id for case in cases) == wanted
        assert found.problems == []
        np.testing.assert_array_equal(
            next(case for case in cases if case.image_id == "test/Ungood/CNV-2-3").load().image,
            np.array(Image.open(io.BytesIO(jpeg("test/CNV/CNV-2-3.jpeg")))),
        )


def test_order_of_files_does_not_matter(tmp_path: Path) -> None:
    hashes = []
    for name, files in (("a", FILES), ("b", FILES[::-1])):
        domain = prepared(tree(tmp_path / name / "OCT2017", files), tmp_path / name)
        hashes.append(records.digest_file(domain.folder / "card.json") + domain.hash)
    assert hashes[0] == hashes[1]


def test_fingerprint_covers_the_files_used_and_no_others(tmp_path: Path) -> None:
    root = tree(tmp_path / "OCT2017")
    before = source(root).fingerprint()
    (root / "train/CNV/CNV-5-1.jpeg").write_bytes(jpeg("another"))
    (root / "train/CNV/CNV-5-2.jpeg").write_bytes(jpeg("more"))
    (root / "readme.txt").write_text("x")
    assert source(root).fingerprint() == before
    shutil.copytree(root, tmp_path / "copy" / "OCT2017")
    assert source(tmp_path / "copy").fingerprint() == before
    (root / "val/CNV").mkdir()
    (root / "val/CNV/CNV-1-7.jpeg").write_bytes(jpeg("new"))  # takes patient 1 out of train
    assert source(root).fingerprint() != before
    (root / "val/CNV/CNV-1-7.jpeg").unlink()
    (root / "train/NORMAL/NORMAL-1-1.jpeg").write_bytes(jpeg("another"))
    assert source(root).fingerprint() != before


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("train/CNV/DME-5-1.jpeg", "unrecognised_name"),
        ("train/NORMAL/NORMAL-x.jpeg", "unrecognised_name"),
        ("train/NORMAL/NORMAL-1-1.png", "unrecognised_name"),
        ("train/GLAUCOMA/GLAUCOMA-1-1.jpeg", "unrecognised_file"),
        ("NORMAL-1-1.jpeg", "unrecognised_file"),
    ],
)
def test_files_in_wrong_places_are_named(tmp_path: Path, name: str, code: str) -> None:
    oct2017 = source(tree(tmp_path / "OCT2017", [*FILES, name]))
    assert len(oct2017.cases()) == 9
    assert [(problem.row["case"], problem.row["code"]) for problem in oct2017.problems] == [(name, code)]


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    root = tree(tmp_path / "OCT2017")
    (root / "test/CNV/CNV-2-3.jpeg").write_bytes(jpeg("test/CNV/CNV-2-3.jpeg")[:-30])
    case = next(case for case in source(root).cases() if case.image_id == "test/Ungood/CNV-2-3")
    with pytest.raises(CaseProblem, match=r"^test/CNV/CNV-2-3\.jpeg: truncated_image: found \d+ bytes and no end"):
        case.load()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    tree(tmp_path / "a", [name for name in FILES if not name.startswith("val/DME")])
    with pytest.raises(AnomedError, match=r"found no abnormal image for valid, expected .*move val away"):
        source(tmp_path / "a").cases()
    without_val(tmp_path / "b")
    with pytest.raises(AnomedError, match=r"found no normal image for valid.*`variant: bmad`, which needs val"):
        source(tmp_path / "b", variant="bmad").cases()
    (tmp_path / "c").mkdir()
    with pytest.raises(AnomedError, match="found no OCT2017 release"):
        source(tmp_path / "c").cases()
    tree(tmp_path / "d" / "OCT2017")
    tree(tmp_path / "d" / "oct2017")
    with pytest.raises(AnomedError, match=r"found 2 copies of the release \(OCT2017, oct2017\)"):
        source(tmp_path / "d").cases()


def test_real_scans(real_data: Path, tmp_path: Path) -> None:
    """Released files of several sizes: classes and patients from their names, pixels as decoded."""
    root, pictures = tmp_path / "OCT2017", sorted((real_data / "retinal_oct" / "kermany_full").glob("*-*-*.jpeg"))
    normals = [path for path in pictures if path.name.startswith("NORMAL")]
    abnormal = [path for path in pictures if path not in normals]
    placed = {"train": normals[:1], "val": [*normals[1:2], *abnormal[:2]], "test": [*normals[2:], *abnormal[2:]]}
    for part, paths in placed.items():
        for path in paths:
            place = root / part / path.name.partition("-")[0] / path.name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    oct2017 = source(root, variant="bmad")  # the same patients are in train and val, in val and test
    cases = oct2017.cases()
    assert oct2017.problems == []
    assert len(cases) == len(pictures) > 8
    shapes = set()
    for case in cases:
        with Image.open(root / case.source_file) as image:
            pixels = case.load().image
            np.testing.assert_array_equal(pixels, np.array(image))
        assert [case.pathology or "NORMAL", case.subject_id] == case.image_id.rpartition("/")[2].split("-")[:2]
        shapes.add(pixels.shape)
    assert len(shapes) > 1
    domain = prepared(root, tmp_path, variant="bmad")
    assert sum(sum(kinds.values()) for kinds in domain.card["counts"].values()) == len(pictures)
    assert "subject_in_two_splits" in domain.card["problems"]
