"""The spatial command on a folder of small volumes: what is kept, what is made again, and how faulty volumes are named."""

import gzip
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pandas as pd
import pytest
import SimpleITK

from anomed import records, sources, volumes
from anomed.errors import AnomedError
from anomed.preprocess import shard

SHAPE = (24, 20, 16)
AFFINE = np.array([[3.0, 0, 0, -31], [0, 3.5, 0, -40], [0, 0, 4.0, 12], [0, 0, 0, 1]])
CHAIN: list[Any] = ["organ_mask", {"resample": {"spacing": 5.0}}]
PATTERNS = {"image": "{subject}.nii.gz", "organ": "{subject}_organ.nii.gz", "lesion": "{subject}_seg.nii.gz"}
NORMAL, SICK = ("n1", "n2", "n3"), ("a1", "a2")
OURS = {"image.nii.gz", "organ.nii.gz", "organ_native.nii.gz", "qc.png", "volume.json"}


def values(seed: int) -> np.ndarray:
    """Multiples of one half, so that scaled integers hold them exactly; float32."""
    found: np.ndarray = np.random.default_rng(seed).integers(100, 900, SHAPE).astype(np.float32) / 2
    return found


def blob() -> np.ndarray:
    """An organ of 1 300 voxels without symmetry; uint8."""
    organ = np.zeros(SHAPE, np.uint8)
    organ[4:16, 3:13, 2:12] = 1
    organ[16:20, 3:8, 2:7] = 1
    return organ


def lesion(seed: int) -> np.ndarray:
    label = np.zeros(SHAPE, np.uint8)
    label[6 + seed : 10 + seed, 5:9, 3:7] = 1
    return label


def nifti(path: Path, data: np.ndarray, affine: np.ndarray = AFFINE, endianness: str = "<", **fields: Any) -> Path:
    """A NIfTI file in mm; `fields` overwrite the header's, in bytes that nibabel cannot correct."""
    image = nibabel.Nifti1Image(data, affine, nibabel.Nifti1Header(endianness=endianness), dtype=data.dtype)
    image.set_sform(affine, 1)
    image.set_qform(affine, 1)
    raw = image.to_bytes()
    header = nibabel.Nifti1Header(raw[:348], check=False)
    for key, value in fields.items():
        header[key] = value
    path.write_bytes(gzip.compress(header.binaryblock + raw[348:], 1, mtime=0))
    return path


def put(root: Path, subject: str, seed: int, sick: bool = False) -> None:
    """The files of one subject."""
    root.mkdir(parents=True, exist_ok=True)
    nifti(root / f"{subject}.nii.gz", values(seed))
    nifti(root / f"{subject}_organ.nii.gz", blob())
    if sick:
        nifti(root / f"{subject}_seg.nii.gz", lesion(seed % 5))


def spatial(root: Path, out: Path, number: int = 1, chain: Iterable[Any] = CHAIN, **options: Any) -> None:
    """All shards of a domain, one after the other."""
    parameters = {"source": "volumes", **PATTERNS, **options, "spatial": list(chain), "files": {}, "preprocess": "x"}
    work, listings = out.parent / "work", out.parent / "logs"
    for index in range(number):
        shard.spatial("heads", parameters, {}, root, work, out, (index, number), listings / f"{index}.csv")


def state(out: Path) -> dict[str, int]:
    """When each subject's image was written, in ns."""
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("*/image.nii.gz")}


def made_again(before: dict[str, int], out: Path) -> set[str]:
    after = state(out)
    assert after.keys() == before.keys()
    return {subject for subject, time in after.items() if time != before[subject]}


def contents(out: Path) -> dict[str, bytes]:
    """Every file of every subject."""
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.glob("*/*")}


def cards(out: Path) -> dict[str, str]:
    """What the lists of all shards say."""
    return {subject: digest for path in out.glob("*.json") for subject, digest in records.read_json(path).items()}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `raw` and, by one shard, `out`; tests only read it."""
    folder = tmp_path_factory.mktemp("cohort")
    for seed, subject in enumerate(NORMAL + SICK):
        put(folder / "raw", subject, seed, subject in SICK)
    spatial(folder / "raw", folder / "out")
    return folder


@pytest.fixture
def cohort(prepared: Path, tmp_path: Path) -> Path:
    """A copy of it, with the times of its files, for tests that change it."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    return tmp_path


# What is made -----------------------------------------------------------------------------------------------------


def test_every_volume_gets_a_folder_and_the_shard_lists_their_digests(prepared: Path) -> None:
    out = prepared / "out"
    assert {path.name for path in out.iterdir()} == {*NORMAL, *SICK, "0-of-1.json"}
    assert list((prepared / "logs").glob("*")) == []
    assert {name: len(digest) for name, digest in cards(out).items()} == dict.fromkeys(NORMAL + SICK, 64)
    for subject in NORMAL + SICK:
        expected = OURS | {"lesion.nii.gz"} if subject in SICK else OURS
        assert {path.name for path in (out / subject).iterdir()} == expected
        assert cards(out)[subject] == records.digest(records.read_card(out / subject / "volume.json"))
    image, label = (volumes.read_label(out / "a2" / f"{name}.nii.gz", name) for name in ("organ", "lesion"))
    volumes.check_grid(image, label)
    np.testing.assert_allclose(image.affine[:3, :3], 5 * np.eye(3), atol=1e-6)


def test_the_card_of_a_volume_says_what_was_measured_and_from_what(prepared: Path) -> None:
    card = records.read_card(prepared / "out" / "a1" / "volume.json")
    voxel = 42 / 1000
    assert card["facts"]["organ_ml"] == pytest.approx(blob().sum() * voxel)
    assert card["facts"]["lesion_ml"] == pytest.approx(64 * voxel)
    raw = {
        key: records.digest_file(prepared / "raw" / f"a1{name}.nii.gz")
        for key, name in (("image", ""), ("lesion", "_seg"), ("organ", "_organ"))
    }
    assert card["inputs"] == raw
    assert str(prepared) not in (prepared / "out" / "a1" / "volume.json").read_text()


def test_four_shards_make_what_one_makes_byte_for_byte(prepared: Path, tmp_path: Path) -> None:
    spatial(prepared / "raw", tmp_path / "out", 4)
    assert contents(tmp_path / "out") == contents(prepared / "out")
    assert cards(tmp_path / "out") == cards(prepared / "out")
    assert len(list((tmp_path / "out").glob("*-of-4.json"))) == 4
    assert [len(records.read_json(tmp_path / "out" / f"{index}-of-4.json")) for index in range(4)] == [2, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "scale", "endianness", "kind"),
    [
        ("big-endian floats", (1, 0), ">", ">f4"),
        ("scaled integers", (0.5, -10), "<", "<i2"),
        ("big-endian scaled integers", (0.5, -10), ">", ">i2"),
        ("scaled bytes above 127", (2, 50), "<", "u1"),
    ],
)
def test_big_endian_and_scaled_files_give_what_plain_floats_give(
    tmp_path: Path, name: str, scale: tuple[float, float], endianness: str, kind: str
) -> None:
    plain = np.round(values(1) / 2) * 2  # even numbers from 50 to 450: every one of the types holds them
    root = tmp_path / "raw"
    for subject in NORMAL:
        put(root, subject, 1)
    nifti(root / "n1.nii.gz", plain)
    stored = ((plain - scale[1]) / scale[0]).astype(kind)
    nifti(root / "n2.nii.gz", stored, endianness=endianness, scl_slope=scale[0], scl_inter=scale[1])
    (root / "subjects.csv").write_text("subject,split,label\nn1,train,0\nn2,train,0\nn3,test,0\n")
    spatial(root, tmp_path / "out", chain=["organ_mask"], subjects="subjects.csv")
    for file in OURS - {"volume.json"}:
        first, second = ((tmp_path / "out" / subject / file).read_bytes() for subject in ("n1", "n2"))
        assert first == second, file
    image = volumes.read(tmp_path / "out" / "n2" / "image.nii.gz", name)
    np.testing.assert_array_equal(image.data, plain * blob())


# What is kept and what is made again ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 3])
def test_what_is_done_is_kept_whatever_the_number_of_shards(cohort: Path, number: int) -> None:
    before, listed = state(cohort / "out"), cards(cohort / "out")
    records.sweep(cohort / "out", "*.json")
    spatial(cohort / "raw", cohort / "out", number)
    assert made_again(before, cohort / "out") == set()
    assert cards(cohort / "out") == listed


def test_a_killed_shard_goes_on_where_it_was(cohort: Path) -> None:
    before = contents(cohort / "out")
    shutil.rmtree(cohort / "out" / "n2")
    stale = cohort / "out" / ".n2.1.partial"
    stale.mkdir()
    (stale / "image.nii.gz").write_bytes(b"half")
    times = state(cohort / "out")
    spatial(cohort / "raw", cohort / "out")
    assert contents(cohort / "out") == before
    assert {subject for subject, time in state(cohort / "out").items() if times.get(subject) != time} == {"n2"}
    assert not stale.exists()


@pytest.mark.parametrize("name", ["a1.nii.gz", "a1_organ.nii.gz", "a1_seg.nii.gz"])
def test_a_changed_file_makes_exactly_its_volume_again(cohort: Path, name: str) -> None:
    before, listed = state(cohort / "out"), cards(cohort / "out")
    data = np.asarray(nibabel.load(cohort / "raw" / name).dataobj)
    data[10, 7, 5] = 0
    nifti(cohort / "raw" / name, data)
    spatial(cohort / "raw", cohort / "out")
    assert made_again(before, cohort / "out") == {"a1"}
    assert {subject for subject, digest in cards(cohort / "out").items() if digest != listed[subject]} == {"a1"}


def test_a_file_written_anew_with_the_same_bytes_makes_nothing_again(cohort: Path) -> None:
    before = state(cohort / "out")
    for path in (cohort / "raw").iterdir():
        os.utime(path, (1e9, 1e9))
    spatial(cohort / "raw", cohort / "out")
    assert made_again(before, cohort / "out") == set()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _edit(path: Path) -> None:
    path.write_text(path.read_text().replace("organ_ml", "organ_mL"))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("image.nii.gz", _cut),
        ("lesion.nii.gz", Path.unlink),
        ("qc.png", Path.unlink),
        ("volume.json", _edit),
        ("volume.json", _cut),
    ],
)
def test_a_damaged_volume_is_made_again_and_no_other(cohort: Path, name: str, damage: Any) -> None:
    before, sound = state(cohort / "out"), contents(cohort / "out")
    damage(cohort / "out" / "a2" / name)
    spatial(cohort / "raw", cohort / "out")
    assert made_again(before, cohort / "out") == {"a2"}
    assert contents(cohort / "out") == sound


def test_a_changed_option_or_code_makes_all_again(cohort: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state(cohort / "out")
    chain = ["organ_mask", {"resample": {"spacing": 6.0}}]
    spatial(cohort / "raw", cohort / "out", chain=chain)
    assert made_again(before, cohort / "out") == {*NORMAL, *SICK}
    before = state(cohort / "out")
    monkeypatch.setattr(sources, "modules", lambda name: ["src/anomed/errors.py"])
    spatial(cohort / "raw", cohort / "out", chain=chain)
    assert made_again(before, cohort / "out") == {*NORMAL, *SICK}


def test_lists_of_another_number_of_shards_are_removed(cohort: Path) -> None:
    spatial(cohort / "raw", cohort / "out", 4)
    assert {path.name for path in (cohort / "out").glob("*.json")} == {f"{index}-of-4.json" for index in range(4)}
    spatial(cohort / "raw", cohort / "out", 2)
    assert {path.name for path in (cohort / "out").glob("*.json")} == {"0-of-2.json", "1-of-2.json"}


def test_a_subject_gone_from_the_source_is_forgotten_and_a_strangers_folder_is_not(cohort: Path) -> None:
    (cohort / "out" / "notes").mkdir()
    (cohort / "out" / "notes" / "mine.txt").write_text("keep")
    for path in (cohort / "raw").glob("n1*"):
        path.unlink()
    put(cohort / "raw", "n9", 9)
    spatial(cohort / "raw", cohort / "out")
    assert {path.name for path in (cohort / "out").iterdir()} == {"n2", "n3", "n9", *SICK, "notes", "0-of-1.json"}
    assert set(cards(cohort / "out")) == {"n2", "n3", "n9", *SICK}


def test_a_voxel_file_beside_its_header_makes_its_volume_again(tmp_path: Path) -> None:
    for subject in NORMAL:
        put(tmp_path / "raw", subject, 1)
    (tmp_path / "raw" / "subjects.csv").write_text(
        "subject,split,label,image\nn1,train,0,n1/n1.mhd\nn2,valid,0,\nn3,test,0,\n"
    )
    (tmp_path / "raw" / "n1.nii.gz").unlink()
    (tmp_path / "raw" / "n1").mkdir()
    for seed in (2, 3):
        image = volumes.to_sitk(values(seed), AFFINE)
        SimpleITK.WriteImage(image, str(tmp_path / "raw" / "n1" / "n1.mhd"), useCompression=False)
        assert (tmp_path / "raw" / "n1" / "n1.raw").exists()
        spatial(tmp_path / "raw", tmp_path / "out", chain=["organ_mask"], subjects="subjects.csv")
        found = volumes.read(tmp_path / "out" / "n1" / "image.nii.gz", "n1")
        np.testing.assert_array_equal(found.data, values(seed) * blob())


def test_another_shards_volume_in_the_making_is_left_alone(cohort: Path) -> None:
    partial = cohort / "out" / ".n2.1.partial"  # as the process 1 has it just before it renames it
    shutil.copytree(cohort / "out" / "n2", partial)
    spatial(cohort / "raw", cohort / "out")
    assert (partial / "volume.json").exists()


# Faulty volumes ---------------------------------------------------------------------------------------------------


def dicom(folder: Path, data: np.ndarray, without: int) -> None:
    """A series of axial slices of which one is missing."""
    folder.mkdir()
    for z in set(range(data.shape[2])) - {without}:
        image = SimpleITK.GetImageFromArray(np.ascontiguousarray(data[:, :, z].T.astype(np.int16)))
        image.SetSpacing((3.0, 3.5))
        tags = {"0008|0060": "MR", "0020|000e": "1.2.3", "0008|0018": f"1.2.3.4.{z}"}
        tags |= {"0020|0032": f"31\\40\\{12 + 4 * z}", "0020|0037": "-1\\0\\0\\0\\-1\\0"}
        for key, text in tags.items():
            image.SetMetaData(key, text)
        writer = SimpleITK.ImageFileWriter()
        writer.KeepOriginalImageUIDOn()
        writer.SetFileName(str(folder / f"{z:02d}.dcm"))
        writer.Execute(image)


FAULTS = {
    "b01": "singular_affine",
    "b02": "qform_sform",
    "b03": "non_finite",
    "b04": "geometry",
    "b05": "unreadable_volume",
    "b06": "dimensions",
    "b07": "implausible_mask",
    "b08": "constant_image",
    "b09": "dicom_gap",
    "b10": "duplicate_subject",
    "b11": "too_thin",
    "b12": "missing_lesion",
    "b13": "unreadable_folder",
}
GOOD = {"n1": "train", "n2": "valid", "a1": "test"}


def break_all(root: Path) -> None:
    """Every fault in one source, beside three sound subjects."""
    everyone = [*GOOD, *FAULTS]
    for seed, subject in enumerate(everyone):
        put(root, subject, seed, subject in ("a1", "b04"))
    image = {subject: root / f"{subject}.nii.gz" for subject in FAULTS}
    nifti(image["b01"], values(1), srow_y=[0, 0, 0, 5])
    nifti(image["b02"], values(1), qoffset_x=9)
    holed = values(1)
    holed[5, 6, 7] = np.nan
    nifti(image["b03"], holed)
    moved = AFFINE.copy()
    moved[2, 3] += 4
    nifti(root / "b04_seg.nii.gz", lesion(0), moved)
    image["b05"].write_bytes(image["b05"].read_bytes()[:-400])
    nifti(image["b06"], np.stack([values(1), values(2)], axis=-1))
    nifti(root / "b07_organ.nii.gz", 0 * blob())
    nifti(image["b08"], 0 * values(1))
    nifti(image["b11"], values(1)[:, :, :1])
    for subject in ("b09", "b13"):
        image[subject].unlink()
    dicom(root / "b09", values(1), without=6)
    (root / "b13").mkdir()
    (root / "b13" / "readme.txt").write_text("sent on a disc")
    lines = ["subject,split,label,image"]
    for subject in [*everyone, "b10"]:
        label = int(subject in ("a1", "b04", "b12"))
        path = subject if subject in ("b09", "b13") else ""
        lines.append(f"{subject},{GOOD.get(subject, 'test')},{label},{path}")
    (root / "subjects.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with `raw`, `out` and `logs` after a run, and its message; tests only read it."""
    folder = tmp_path_factory.mktemp("broken")
    break_all(folder / "raw")
    with pytest.raises(AnomedError) as caught:
        spatial(folder / "raw", folder / "out", subjects="subjects.csv")
    return folder, str(caught.value)


def test_every_fault_is_named_in_one_message(broken: tuple[Path, str]) -> None:
    folder, message = broken
    first = message.splitlines()[0]
    for code in FAULTS.values():
        assert f"1 {code}" in first, code
    assert str(folder / "logs" / "0.csv") in first
    assert message.splitlines()[-1].strip() == "... 3 more"


def test_all_problems_are_listed_with_what_to_do(broken: tuple[Path, str]) -> None:
    table = pd.read_csv(broken[0] / "logs" / "0.csv", keep_default_na=False)
    assert list(table.columns) == ["case", "code", "found", "expected", "hint"]
    assert {case.split(":")[0]: code for case, code in zip(table.case, table.code, strict=True)} == FAULTS
    assert (table[["found", "expected", "hint"]] != "").all(axis=None)
    found = dict(zip(table.code, table.found, strict=True))
    assert "1 of 7,680 voxels that are NaN" in found["non_finite"]
    assert "8.00 mm between 05.dcm" in found["dicom_gap"]
    assert "line 14) and b10 (subjects.csv, line 18)" in found["duplicate_subject"]
    assert str(broken[0]) not in table.drop(columns="found").to_csv()


def test_the_good_volumes_are_finished_and_of_the_faulty_nothing_is_left(broken: tuple[Path, str]) -> None:
    out = broken[0] / "out"
    assert {path.name for path in out.iterdir()} == set(GOOD)
    for subject in GOOD:
        assert {path.name for path in (out / subject).iterdir()} >= OURS
    assert list(broken[0].rglob("*.partial")) == []


def test_the_page_shows_the_problems_and_the_finished_volumes(broken: tuple[Path, str]) -> None:
    page = (broken[0] / "logs" / "0.html").read_text("utf-8")
    for subject, code in FAULTS.items():
        assert subject in page
        assert code in page
    for subject in GOOD:
        picture = Path("..") / "out" / subject / "qc.png"
        assert picture.as_posix() in page
        assert (broken[0] / "logs" / picture).exists()


def test_four_shards_name_what_one_names(broken: tuple[Path, str], tmp_path: Path) -> None:
    cases: list[str] = []
    parameters = {"source": "volumes", **PATTERNS, "subjects": "subjects.csv", "spatial": CHAIN, "files": {}}
    for index in range(4):
        listing = tmp_path / f"{index}.csv"
        with pytest.raises(AnomedError):
            shard.spatial(
                "heads", parameters, {}, broken[0] / "raw", tmp_path / "work", tmp_path / "out", (index, 4), listing
            )
        cases += list(pd.read_csv(listing).code)
    assert sorted(cases) == sorted(FAULTS.values())
    assert contents(tmp_path / "out") == contents(broken[0] / "out")


def test_a_volume_that_became_faulty_loses_its_result_and_comes_back_once_mended(cohort: Path) -> None:
    before, sound = state(cohort / "out"), contents(cohort / "out")
    image = (cohort / "raw" / "n2.nii.gz").read_bytes()
    (cohort / "raw" / "n2.nii.gz").write_bytes(image[:-100])
    with pytest.raises(AnomedError, match="1 unreadable_volume"):
        spatial(cohort / "raw", cohort / "out")
    assert set(state(cohort / "out")) == {*NORMAL, *SICK} - {"n2"}
    assert {path.name for path in (cohort / "logs").iterdir()} == {"0.csv", "0.html"}
    (cohort / "raw" / "n2.nii.gz").write_bytes(image)
    spatial(cohort / "raw", cohort / "out")
    assert made_again(before, cohort / "out") == {"n2"}
    assert contents(cohort / "out") == sound
    assert list((cohort / "logs").iterdir()) == []


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    with pytest.raises(AnomedError, match="no subject among 0 files"):
        spatial(tmp_path / "raw", tmp_path / "out")


def test_a_lesion_lost_between_the_voxels_is_refused(cohort: Path) -> None:
    label = np.zeros(SHAPE, np.uint8)
    label[9, 8, 6] = 1
    nifti(cohort / "raw" / "a1_seg.nii.gz", label)
    with pytest.raises(AnomedError, match=r"1 lesion_lost.*\n.*a1: lesion_lost.*finer spacing"):
        spatial(cohort / "raw", cohort / "out", chain=["organ_mask", {"resample": {"spacing": 9.0}}])
    assert not (cohort / "out" / "a1").exists()


# What is not ours, or asked for wrongly ---------------------------------------------------------------------------


def test_raw_data_that_lie_where_the_results_would_go_are_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "raw"
    for seed, subject in enumerate(("n1", "n2")):
        (root / subject).mkdir(parents=True)
        nifti(root / subject / "image.nii.gz", values(seed))
        nifti(root / subject / "organ.nii.gz", blob() * np.uint8(seed))  # that of n1 is empty
    (root / "subjects.csv").write_text("subject,split,label\nn1,train,0\nn2,test,0\n")
    before = contents(root)
    patterns = {"image": "{subject}/image.nii.gz", "organ": "{subject}/organ.nii.gz", "subjects": "subjects.csv"}
    with pytest.raises(AnomedError, match="2 foreign_folder"):
        spatial(root, root, 1, CHAIN, **patterns)
    assert {name: data for name, data in contents(root).items() if name in before} == before


def test_subjects_whose_names_begin_alike_do_not_clear_each_others_work(tmp_path: Path) -> None:
    live = tmp_path / ".p.1.12345.partial"
    live.mkdir()
    stale = tmp_path / ".p.999.partial"
    stale.mkdir()
    with records.atomic_dir(tmp_path / "p", "x") as partial:
        (partial / "x").write_text("")
    assert live.exists()
    assert not stale.exists()


def test_a_lesion_outside_the_organ_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "raw", "a1", 0, sick=True)
    nifti(tmp_path / "raw" / "a1_organ.nii.gz", blob() * (lesion(0) == 0))
    (tmp_path / "raw" / "subjects.csv").write_text("subject,split,label\na1,test,1\n")
    with pytest.raises(AnomedError, match="a1: lesion_outside"):
        spatial(tmp_path / "raw", tmp_path / "out", subjects="subjects.csv")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spatial": ["organ_mask"], "files": None}, r"--params\.files: input should be a valid dictionary"),
        ({"spatial": None, "files": {}}, r"--params\.spatial: input should be a valid list"),
        ({"spatial": ["register", "bias_field"], "files": {}}, "spatial: register changes the grid"),
        ({"spatial": ["skull_strip"], "files": {}}, r"--files: 'deepbet_model' is missing"),
    ],
)
def test_parameters_of_a_call_by_hand_are_checked(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    places = tmp_path, tmp_path / "work", tmp_path / "out", (0, 1), tmp_path / "p.csv"
    with pytest.raises(AnomedError, match=message):
        shard.spatial("heads", {"source": "volumes", **change}, {}, *places)
    assert not (tmp_path / "out").exists()
