"""The BraTS source: both namings, the division of patients, BMAD's choice of slices, and the way to prepared images."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import raw_tree
from paths import ROOT
from raw_tree import put

from anomed import plugins
from anomed.domains import brats2021_bmad
from anomed.domains.brats2021 import Brats2021
from anomed.domains.source import Files
from anomed.errors import AnomedError
from anomed.manifest import Prepared
from anomed.preprocess.chain import Chain
from anomed.settings import check

OLD = [f"BraTS2021_{number:05d}" for number in (0, 2, 3, 5, 6, 8, 9, 11, 12, 14)]
NEW = [f"BraTS-GLI-{number:05d}-{time:03d}" for number, time in ((0, 0), (2, 0), (2, 1), (3, 0), (5, 0), (5, 1))]
# Patients whose lesions lie at slices 40-123, 31-106, 93-132 and 61-112
REAL = ["AURORA-example", "BraTS-GLI-00001-000", "TCGA-DU-7294", "TCGA-FG-6692"]
CHAIN = {
    "spatial": [{"skull_strip": {"backend": "none", "limits_ml": [700, 2300]}}],
    "intensity": ["slice_min_max"],
    "slices": {"unit": "index", "start": 25, "stop": 140, "step": 15, "normal": "slices"},
}


def subjects(root: Path, names: list[str], kinds: str = "flair t1 t1ce t2 seg", joint: str = "_") -> None:
    put(root, *(f"{name}/{name}{joint}{kind}.nii.gz" for name in names for kind in kinds.split()))


def source(root: Path, **options: Any) -> Brats2021:
    made = plugins.load("domains", "brats2021")(
        "gliomas", check(Brats2021.Options, options, "domains.gliomas"), root, root.parent / "work"
    )
    assert isinstance(made, Brats2021)
    return made


def faults(root: Path, **options: Any) -> list[tuple[str, str]]:
    return raw_tree.faults(source(root, **options))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize("above", ["", "archive/BraTS2021_Training_Data/"])
def test_subjects_are_found_at_any_depth_and_other_files_are_counted(root: Path, above: str) -> None:
    subjects(root / above, OLD)
    put(root, "README.md", f"{above}._{OLD[0]}_flair.nii.gz", f"{above}{OLD[0]}/.DS_Store", "BraTS2021_00495.tar")
    found = source(root)
    scans = found.scans()
    assert [scan.subject_id for scan in scans] == OLD
    assert not found.problems
    assert found.ignored == 4
    name = f"{above}{OLD[1]}/{OLD[1]}"
    assert scans[1].source_file == f"{name}_flair.nii.gz"
    assert scans[1].fetch() == Files(root / f"{name}_flair.nii.gz", root / f"{name}_seg.nii.gz")
    assert {(scan.abnormal, scan.slices, scan.keep) for scan in scans} == {(True, None, None)}


@pytest.mark.parametrize(
    ("modality", "old", "new"),
    [("flair", "flair", "t2f"), ("t1", "t1", "t1n"), ("t1ce", "t1ce", "t1c"), ("t2", "t2", "t2w")],
)
def test_the_contrast_is_read_under_both_names(root: Path, modality: str, old: str, new: str) -> None:
    subjects(root / "a", OLD)
    subjects(root / "b", NEW, "t2f t1n t1c t2w seg", "-")
    for folder, ending in (("a", f"_{old}"), ("b", f"-{new}")):
        for scan in source(root / folder, modality=modality).scans():
            assert scan.source_file == f"{scan.subject_id}/{scan.subject_id}{ending}.nii.gz"


def test_unpacked_files_are_read_and_a_file_twice_is_a_problem(root: Path) -> None:
    subjects(root, OLD[1:])
    put(root, f"{OLD[0]}/{OLD[0]}_flair.nii", f"{OLD[0]}/{OLD[0]}_seg.nii")
    assert faults(root) == []
    put(root, f"{OLD[1]}/{OLD[1]}_flair.nii", f"copy/{OLD[2]}/{OLD[2]}_seg.nii.gz")
    assert faults(root) == [(OLD[1], "duplicate_image"), (OLD[2], "duplicate_lesion")]


def test_a_missing_file_is_named_with_what_was_expected(root: Path) -> None:
    subjects(root, OLD)
    (root / OLD[3] / f"{OLD[3]}_flair.nii.gz").unlink()
    (root / OLD[4] / f"{OLD[4]}_seg.nii.gz").unlink()
    assert faults(root) == [(OLD[3], "missing_image"), (OLD[4], "missing_lesion")]
    found = source(root)
    found.scans()
    assert "BraTS2021_00005_flair.nii or .nii.gz" in str(found.problems[0])
    assert faults(root, exclude={OLD[3]: "lost", OLD[4]: "lost"}) == []


def test_what_lies_there_and_is_no_brats_is_refused_with_the_layout(root: Path) -> None:
    put(root, "s1_flair.nii.gz", "BraTS20_Training_001/BraTS20_Training_001_flair.nii.gz")
    with pytest.raises(AnomedError, match=r"data: no volume of BraTS among 2 files; expected BraTS2021_00000/"):
        source(root).scans()
    subjects(root, OLD)
    subjects(root, NEW, "t2f seg", "-")
    with pytest.raises(AnomedError, match=r"found 10 subjects named as in 2021 and 6 named as in 2023"):
        source(root).fingerprint()
    with pytest.raises(AnomedError, match=r"nowhere: not found"):
        source(root / "nowhere").scans()


def test_an_unknown_excluded_subject_and_an_unknown_option_are_errors(root: Path) -> None:
    subjects(root, OLD)
    with pytest.raises(AnomedError, match=r"domains\.gliomas\.exclude: no subject 'BraTS2021_00001'; did you mean"):
        source(root, exclude={"BraTS2021_00001": "x"}).scans()
    with pytest.raises(AnomedError, match=r"modality: .*'flair'"):
        source(root, modality="pd")


def splits(root: Path, **options: Any) -> dict[str, str]:
    return {scan.subject_id: scan.split for scan in source(root, **options).scans()}


def test_patients_are_divided_over_three_splits_by_shares_and_seed(root: Path) -> None:
    subjects(root, OLD, "flair seg")
    found = splits(root)
    assert Counter(found.values()) == {"train": 6, "valid": 1, "test": 3}
    assert splits(root, seed=1) != found
    assert Counter(splits(root, split={"train": 0.5, "valid": 0, "test": 0.5}).values()) == {"train": 5, "test": 5}
    stable = "published results stand on the division: it must not change"
    assert sorted(name[-2:] for name, split in found.items() if split != "train") == ["02", "05", "06", "11"], stable


def test_too_few_patients_are_counted(root: Path) -> None:
    subjects(root, OLD[:2], "flair seg")
    message = (
        r"gliomas\.split: patients: found 2, expected at least 3, one for each of train, valid, test; add some, or"
    )
    with pytest.raises(AnomedError, match=message):
        source(root).scans()
    assert len(splits(root, split={"train": 0.5, "valid": 0, "test": 0.5})) == 2


@pytest.mark.parametrize("seed", range(5))
def test_scans_of_one_patient_stay_in_one_split(root: Path, seed: int) -> None:
    subjects(root, NEW, "t2f seg", "-")
    found = splits(root, seed=seed)
    assert set(found.values()) == {"train", "valid", "test"}
    assert found[NEW[1]] == found[NEW[2]]
    assert found[NEW[4]] == found[NEW[5]]


def test_the_fingerprint_covers_the_files_that_are_read(root: Path) -> None:
    subjects(root, OLD)
    first = source(root).fingerprint()
    put(root, "README.md")
    (root / OLD[0] / f"{OLD[0]}_t2.nii.gz").write_text("other")
    assert source(root).fingerprint() == first
    assert source(root, modality="t2").fingerprint() != first
    (root / OLD[0] / f"{OLD[0]}_seg.nii.gz").write_text("other")
    second = source(root).fingerprint()
    assert second != first
    subjects(root, ["BraTS2021_01666"])
    assert source(root).fingerprint() != second


# BMAD's choice -----------------------------------------------------------------------------------------------------


@pytest.fixture
def bmad(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As many subjects as the release has: those of the list, and 626 others."""
    monkeypatch.chdir(ROOT)
    listed = brats2021_bmad.read(brats2021_bmad.LIST)
    others = [name for number in range(1700) if (name := f"BraTS2021_{number:05d}") not in listed]
    subjects(root, [*listed, *others[:626]], "flair seg")
    return root


def test_the_variant_takes_the_patients_and_slices_that_the_script_names(bmad: Path) -> None:
    found = source(bmad, variant="bmad")
    scans = found.scans()
    assert not found.problems
    assert len({scan.subject_id for scan in scans}) == 1251
    kinds = Counter((scan.split, scan.keep, scan.slices) for scan in scans)
    every = tuple(range(60, 100))
    assert kinds == {
        ("train", "normal", every): 424,
        ("valid", "normal", every): 39,
        ("test", "normal", every): 162,
        ("valid", "abnormal", (60, 70, 80, 90)): 11,
        ("test", "abnormal", (60, 68, 76, 84, 92)): 615,
    }
    abnormal = [scan for scan in scans if scan.keep == "abnormal"]
    assert {scan.split for scan in abnormal[:11]} == {"valid"}
    by_name = {scan.subject_id[-5:]: scan.split for scan in scans}
    assert [by_name[number] for number in ("00753", "00327", "01505", "01427", "01328", "00028")] == [
        "train", "train", "valid", "valid", "test", "test",
    ]  # fmt: skip


def test_an_incomplete_copy_is_named_and_leaving_a_subject_out_moves_no_other(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects(root / "old", OLD, "flair seg")
    (root / "list.csv").write_text(f"subject,split,keep,slices\n{OLD[0]},train,normal,60-99\n")
    for name, value in {"LIST": root / "list.csv", "ABNORMAL": 9, "VALID": 2}.items():
        monkeypatch.setattr(brats2021_bmad, name, value)
    before = splits(root / "old", variant="bmad")
    assert list(before.values()) == ["train", "valid", "valid", *["test"] * 7]
    out = {OLD[0]: "blurred", OLD[1]: "blurred"}
    assert faults(root / "old", variant="bmad", exclude=out) == []
    left = {name: split for name, split in before.items() if name not in out}
    assert splits(root / "old", variant="bmad", exclude=out) == left
    for name in out:
        for kind in ("flair", "seg"):
            (root / "old" / name / f"{name}_{kind}.nii.gz").unlink()
    found = source(root / "old", variant="bmad")
    found.scans()
    assert [(problem.row["case"], problem.row["code"], problem.row["found"]) for problem in found.problems] == [
        (OLD[0], "missing_image", "no such subject"),
        ("BraTS2021", "incomplete_copy", "8 subjects beside the list"),
    ]


def test_the_variant_needs_the_names_of_2021_and_its_list_counts_in_the_fingerprint(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects(root / "new", NEW, "t2f seg", "-")
    with pytest.raises(AnomedError, match=r"gliomas\.variant: .*found BraTS-GLI-00000-000"):
        source(root / "new", variant="bmad").scans()
    subjects(root / "old", OLD, "flair seg")
    table = root / "list.csv"
    monkeypatch.setattr(brats2021_bmad, "LIST", table)
    table.write_text("# why\nsubject,split,keep,slices\nBraTS2021_00000,train,normal,60-99\n")
    first, plain = source(root / "old", variant="bmad").fingerprint(), source(root / "old").fingerprint()
    table.write_text("# why\nsubject,split,keep,slices\nBraTS2021_00000,test,normal,60-99\n")
    assert source(root / "old", variant="bmad").fingerprint() != first
    assert source(root / "old").fingerprint() == plain


@pytest.mark.parametrize(
    "line", ["a,train,normal,60", "a,training,normal,60-99", "a,train,all,60-99", "a,train", "b,test,normal,60-99"]
)
def test_a_damaged_list_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "list.csv").write_text(f"subject,split,keep,slices\nb,train,normal,60-99\n{line}\n")
    with pytest.raises(AnomedError, match=r"list\.csv: found .*expected a new subject"):
        brats2021_bmad.read(tmp_path / "list.csv")
    with pytest.raises(AnomedError, match=r"none\.csv: cannot be read"):
        brats2021_bmad.read(tmp_path / "none.csv")


# Independence of what a file system or Python orders ------------------------------------------------------------------


def listing(root: Path) -> str:
    found = source(root, seed=3)
    return repr([(s.subject_id, s.split, s.source_file) for s in found.scans()]) + found.fingerprint()


def run(call: str, seed: int) -> str:
    """What a line of Python prints in a process of its own, with another order of sets."""
    path = os.pathsep.join(str(ROOT / part) for part in ("src", "tests", "tests/unit"))
    env = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": path}
    code = f"import sys; from pathlib import Path; import test_brats2021 as t; {call}"
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_scans_do_not_depend_on_the_order_of_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subjects(root, OLD)
    expected = listing(root)
    raw_tree.shuffle_folders(monkeypatch)
    assert {listing(root) for _ in range(3)} == {expected}


# To prepared images ------------------------------------------------------------------------------------------------


def release(root: Path, real: Path, reverse: bool = False) -> None:
    """Real patients under BraTS's names, every fourth voxel of a row and of a column, labels as BraTS numbers them."""
    for number, patient in sorted(enumerate(REAL, 1), reverse=reverse):
        name = f"BraTS2021_{number:05d}"
        (root / name).mkdir(parents=True)
        for given, kind in (("flair_u8", "flair"), ("lesion", "seg")):
            image = nibabel.load(real / "brain_mri" / f"{patient}_{given}.nii.gz").slicer[::4, ::4]
            data = np.asarray(image.dataobj)
            if kind == "seg":
                data = data * np.array([1, 2, 4], np.uint8)[np.arange(data.shape[0]) % 3][:, None, None]
            nibabel.save(nibabel.Nifti1Image(data, image.affine), root / name / f"{name}_{kind}.nii.gz")


def parameters(slices: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    common = {"source": "brats2021", "size": 64, "release": None, "fingerprint": "0", "files": {}}
    given = check(Brats2021.Options, options, "domains.gliomas").model_dump()
    chain = {**CHAIN, "slices": slices or CHAIN["slices"]}
    return {**common, **given, "preprocess": Chain(chain, "preprocess.brats").canonical()}


def spatial(root: Path) -> None:
    from anomed.preprocess import shard

    block = parameters(None)
    places = root, root.parent / "work", root.parent / "_spatial", (0, 1), root.parent / "spatial.csv"
    shard.spatial("gliomas", block | {"spatial": block["preprocess"]["spatial"]}, {}, *places)


def intensity(root: Path, name: str, slices: dict[str, Any] | None = None, **options: Any) -> Path:
    from anomed.preprocess import slicing

    out = root.parent / name
    places = root, root.parent / "work", root.parent / "_spatial", out, root.parent / "problems.csv"
    slicing.intensity("gliomas", parameters(slices, **options), *places)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def finished(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("brats") / "raw"
    release(root, real_data)
    spatial(root)
    return root


def lesions(root: Path, name: str) -> np.ndarray:
    """Whether each axial slice of a subject shows tumour."""
    seg: Any = nibabel.load(root / name / f"{name}_seg.nii.gz")
    return np.asarray((np.asarray(seg.dataobj) > 0).any((0, 1)))


def test_prepared_images_are_disjoint_by_patient_with_tumour_free_slices_in_train(finished: Path) -> None:
    made = Prepared(intensity(finished, "plain"))
    table = made.table
    assert set(table.split) == {"train", "valid", "test"}
    assert table.groupby("subject_id").split.nunique().max() == 1
    assert len(set(table.subject_id)) == 4
    for row in table.itertuples():
        assert row.label == lesions(finished, row.subject_id)[int(row.image_id[-3:])]
        assert (row.native_h, row.native_w) == (60, 60)
    assert set(table[table.split == "train"].label) == {0}
    assert made.card["left_out"]["lesion_in_train"] > 0
    assert made.card["masks"]
    assert made.card["foreground"]
    assert "not the released data" in made.card["note"]


def test_another_order_of_sets_finds_the_same_scans(finished: Path) -> None:
    """What follows from the scans knows no source: tests of the workflow make it again in other processes."""
    assert run(f"print(t.listing(Path({str(finished)!r})), end='')", 7) == listing(finished)


def test_another_order_of_files_gives_the_same_bytes(finished: Path, real_data: Path, tmp_path: Path) -> None:
    first = contents(intensity(finished, "first"))
    release(tmp_path / "raw", real_data, True)
    spatial(tmp_path / "raw")
    second = contents(intensity(tmp_path / "raw", "second"))
    assert first.keys() == second.keys() >= {"manifest.csv", "images.npy", "masks.npz", "native.zip", "card.json"}
    for name, content in first.items():
        assert second[name] == content, name


def test_the_variant_cuts_the_slices_it_names(finished: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "list.csv"
    table.write_text(
        "subject,split,keep,slices\nBraTS2021_00003,train,normal,60-99\nBraTS2021_00004,test,normal,60-99\n"
    )
    for name, value in {"LIST": table, "ABNORMAL": 2, "VALID": 1}.items():
        monkeypatch.setattr(brats2021_bmad, name, value)
    made = Prepared(intensity(finished, "bmad", variant="bmad"))
    rows = made.table.groupby(["split", "label", "subject_id"]).image_id.agg(lambda ids: [int(i[-3:]) for i in ids])
    free = {number: np.flatnonzero(~lesions(finished, f"BraTS2021_{number:05d}")[60:100]) + 60 for number in (3, 4)}
    assert rows.to_dict() == {
        ("train", 0, "BraTS2021_00003"): free[3].tolist(),
        ("valid", 1, "BraTS2021_00001"): [60, 70, 80, 90],
        ("test", 0, "BraTS2021_00004"): free[4].tolist(),
        ("test", 1, "BraTS2021_00002"): [60, 68, 76, 84, 92],
    }
    assert made.card["left_out"] == {"abnormal_not_kept": 40 - len(free[4]), "lesion_in_train": 40 - len(free[3])}
    assert 0 < len(free[4]) < len(free[3]) < 40
    assert made.card["without_lesion_slice"] == []


def test_every_axis_keeps_its_place(tmp_path: Path) -> None:
    """Unequal axes, files turned as BraTS turns them (left, posterior, superior), a lesion in a known corner."""
    root, shape = tmp_path / "raw", (20, 14, 9)
    lesion = np.zeros(shape, np.uint8)
    lesion[15:19, 10:12, 5:8] = 4  # to the patient's right, to the front, upwards
    for number in range(3):
        name = f"BraTS2021_{number:05d}"
        (root / name).mkdir(parents=True)
        flair = np.random.default_rng(number).integers(50, 200, shape).astype(np.int16)
        for kind, data in (("flair", flair), ("seg", lesion)):
            turned = np.ascontiguousarray(data[::-1, ::-1])
            affine = np.array([[-8.0, 0, 0, 152], [0, -9, 0, 117], [0, 0, 10, 0], [0, 0, 0, 1]])
            nibabel.save(nibabel.Nifti1Image(turned, affine), root / name / f"{name}_{kind}.nii.gz")
    spatial(root)
    slices = {"start": 1, "stop": 7, "step": 1, "unit": "index", "normal": "slices"}
    made = Prepared(intensity(root, "made", slices))
    row: Any
    for row in made.evaluated().itertuples():
        z = int(row.image_id[-3:])
        assert row.label == (5 <= z < 8)
        assert (row.native_h, row.native_w) == (14, 20)
        if row.label:
            down, across = np.nonzero(made.mask(row.mask_row))
            assert set(down) == {2, 3}, "the front is up"
            assert set(across) == {1, 2, 3, 4}, "the patient's right is left"
