"""The liver source: both sets found by name, which labels are liver and lesion, and the way to prepared images."""

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

from anomed import plugins, records, volumes
from anomed.domains.btcv_lits import BtcvLits
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Prepared
from anomed.settings import check

BTCV = [f"BTCV-{number:04d}" for number in (1, 2, 21)]
LITS = [f"LiTS-{number}" for number in (0, 1, 5, 10, 28, 99, 100, 130)]
SHAPE = (22, 18, 10)
AFFINE = np.array([[9.0, 0, 0, -90], [0, 8, 0, -70], [0, 0, 10, -40], [0, 0, 0, 1]])  # no two edges alike
LIVER = np.zeros(SHAPE, bool)
LIVER[10:20, 4:16, 1:9] = True
LESION = np.zeros(SHAPE, bool)
LESION[16:19, 13:15, 4:6] = True  # to the patient's right and front


def btcv(root: Path, at: str = "RawData/Training/img/{}", labels: str = "RawData/Training/label/{}") -> None:
    put(root, *(at.format(f"img{name[5:]}.nii.gz") for name in BTCV))
    put(root, *(labels.format(f"label{name[5:]}.nii.gz") for name in BTCV))


def lits(root: Path, at: str = "{}", labels: str = "{}", ending: str = ".nii") -> None:
    put(root, *(at.format(f"volume-{name[5:]}{ending}") for name in LITS))
    put(root, *(labels.format(f"segmentation-{name[5:]}{ending}") for name in LITS))


def source(root: Path, **options: Any) -> BtcvLits:
    made = plugins.load("domains", "btcv_lits")(
        "liver", check(BtcvLits.Options, options, "domains.liver"), root, root.parent / "work"
    )
    assert isinstance(made, BtcvLits)
    return made


def faults(root: Path, **options: Any) -> list[tuple[str, str]]:
    return raw_tree.faults(source(root, **options))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def both(root: Path) -> Path:
    btcv(root)
    lits(root)
    return root


@pytest.mark.parametrize(
    "layout",
    [
        ("RawData/Training/img/{}", "RawData/Training/label/{}", "{}", "{}", ".nii"),
        (
            "BTCV/Training/img/{}",
            "BTCV/Training/label/{}",
            "LiTS/Training Batch 1/{}",
            "LiTS/Training Batch 1/{}",
            ".nii",
        ),
        ("a/{}", "a/{}", "volume_pt1/{}", "segmentations/{}", ".nii"),
        ("imagesTr/{}", "labelsTr/{}", "lits/{}", "lits/{}", ".nii.gz"),
    ],
)
def test_both_sets_are_found_by_their_names(root: Path, layout: tuple[str, str, str, str, str]) -> None:
    btcv(root, *layout[:2])
    lits(root, *layout[2:])
    put(root, "RawData/Testing/img/img0061.nii.gz", "imagesTs/img0062.nii.gz", "test-volume-0.nii", "._volume-0.nii")
    put(root, "copy/Testing/img0061.nii.gz")
    found = source(root)
    scans = found.scans()
    assert [scan.subject_id for scan in scans] == sorted(BTCV + LITS)
    assert not found.problems
    assert found.ignored == 5, "BTCV's test scans have no labels"
    assert {scan.subject_id: scan.abnormal for scan in scans} == {**dict.fromkeys(BTCV, False), **dict.fromkeys(LITS)}
    assert {scan.split for scan in scans if scan.subject_id in BTCV} == {"train"}
    assert scans[0].source_file == layout[0].format("img0001.nii.gz")
    assert not (root.parent / "work").exists(), "nothing is read or written before a scan is fetched"


def splits(root: Path, **options: Any) -> dict[str, str]:
    return {scan.subject_id: scan.split for scan in source(root, **options).scans()}


def test_subjects_of_lits_are_divided_by_shares_and_seed(both: Path) -> None:
    found = splits(both, split={"valid": 0.25, "test": 0.75})
    assert Counter(found[name] for name in LITS) == {"valid": 2, "test": 6}
    assert Counter(splits(both).values()) == {"train": 3, "valid": 1, "test": 7}
    assert len({repr(splits(both, seed=seed)) for seed in range(5)}) > 1
    assert set(splits(both, split={"valid": 0, "test": 1}).values()) == {"train", "test"}
    with pytest.raises(AnomedError, match="valid and test must add up to 1"):
        source(both, split={"valid": 0.5, "test": 0.6})


def test_missing_and_doubled_files_are_problems_of_their_subject(both: Path) -> None:
    (both / "RawData/Training/label/label0002.nii.gz").unlink()
    (both / "RawData/Training/img/img0021.nii.gz").unlink()
    (both / "segmentation-5.nii").unlink()
    (both / "volume-99.nii").unlink()
    put(both, "part 2/volume-100.nii", "segmentation-130.nii.gz")
    assert faults(both) == [
        ("BTCV-0002", "missing_organ"),
        ("BTCV-0021", "missing_image"),
        ("LiTS-100", "duplicate_image"),
        ("LiTS-130", "duplicate_organ"),
        ("LiTS-5", "missing_organ"),
        ("LiTS-99", "missing_image"),
    ]
    out = {name: "incomplete" for name, _ in faults(both)}
    assert faults(both, exclude=out) == []


def test_a_set_that_is_not_there_is_named_with_its_layout(root: Path) -> None:
    lits(root)
    with pytest.raises(AnomedError, match=r"no volume of BTCV among 16 files; expected below it RawData/Training/img/"):
        source(root).scans()
    for path in root.iterdir():
        path.unlink()
    btcv(root)
    with pytest.raises(AnomedError, match=r"no volume of LiTS among 6 files; expected below it volume-0\.nii and"):
        source(root).fingerprint()
    with pytest.raises(AnomedError, match="nowhere: not found"):
        source(root / "nowhere").scans()


def test_an_unknown_excluded_subject_and_too_few_to_divide_are_errors(both: Path) -> None:
    with pytest.raises(AnomedError, match=r"domains\.liver\.exclude: no subject 'LiTS-2'"):
        source(both, exclude={"LiTS-2": "x"}).scans()
    with pytest.raises(
        AnomedError, match=r"liver\.split: subjects of LiTS: found 1, expected at least 2, one for each of"
    ):
        source(both, exclude=dict.fromkeys(LITS[1:], "x")).scans()


def test_the_fingerprint_covers_the_files_of_subjects(both: Path) -> None:
    first = source(both).fingerprint()
    put(both, "README", "RawData/Testing/img/img0061.nii.gz")
    assert source(both).fingerprint() == first
    (both / "segmentation-5.nii").write_text("other")
    second = source(both).fingerprint()
    assert second != first
    assert source(both, exclude={"LiTS-5": "x"}).fingerprint() != second


# Independence of what a file system or Python orders ------------------------------------------------------------------


def listing(root: Path) -> str:
    found = source(root, seed=3)
    return repr([(s.subject_id, s.split, s.source_file) for s in found.scans()]) + found.fingerprint()


def test_scans_do_not_depend_on_the_order_of_files(both: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(both, "RawData/Testing/img/img0061.nii.gz", "part 2/volume-100.nii")
    expected = listing(both)
    raw_tree.shuffle_folders(monkeypatch)
    assert {listing(both) for _ in range(3)} == {expected}


def test_scans_do_not_depend_on_the_order_of_sets(both: Path) -> None:
    code = f"from pathlib import Path; import test_btcv_lits as t; print(t.listing(Path({str(both)!r})))"
    path = os.pathsep.join(str(ROOT / part) for part in ("src", "tests", "tests/unit"))
    found = set()
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True
        )
        found.add(done.stdout.strip())
    assert found == {listing(both)}


# Voxels ------------------------------------------------------------------------------------------------------------


def save(path: Path, data: np.ndarray, flips: tuple[int, int]) -> None:
    """Write a RAS array with its first two axes turned, as the two sets have them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nibabel.Nifti1Image(data, AFFINE)
    nibabel.save(image.as_reoriented(np.array([[0, flips[0]], [1, flips[1]], [2, 1]])), path)


def write_set(root: Path, order: list[str]) -> None:
    """Small abdomens: BTCV with 13 organs, LiTS with and without lesions; made in the given order."""
    for name in order:
        prefix, _, number = name.partition("-")
        rng = np.random.default_rng(list(name.encode()))
        ct = (rng.integers(-900, 900, SHAPE) * 0.5 * ~LIVER + rng.integers(-150, 200, SHAPE) * LIVER).astype(np.int16)
        if prefix == "BTCV":
            labels = np.where(LIVER, 6, rng.integers(0, 2, SHAPE) * 13).astype(np.uint8)
            save(root / f"RawData/Training/img/img{number}.nii.gz", ct, (1, 1))
            save(root / f"RawData/Training/label/label{number}.nii.gz", labels, (1, 1))
        else:
            labels = LIVER.astype(np.uint8) + (LESION & (int(number) % 2 == 0))
            save(root / f"volume-{number}.nii", ct, (-1, -1))
            save(root / f"segmentation-{number}.nii", labels.astype(np.float32), (-1, 1))  # another order, same grid


def test_liver_and_lesion_are_the_labels_that_each_set_gives_them(root: Path) -> None:
    write_set(root, ["BTCV-0001", "LiTS-0", "LiTS-1"])
    fetched = {scan.subject_id: scan.fetch() for scan in source(root).scans()}
    files = fetched["BTCV-0001"]
    assert files.image == root / "RawData/Training/img/img0001.nii.gz"
    assert files.lesion is None
    assert files.organ is not None
    mask = volumes.read_label(files.organ, "organ")
    np.testing.assert_array_equal(mask.data, LIVER)
    volumes.check_grid(volumes.read(files.image, "image"), mask)
    for name, lesion in (("LiTS-0", LESION), ("LiTS-1", np.zeros(SHAPE))):
        files = fetched[name]
        assert files.organ == root / f"segmentation-{name[5:]}.nii"
        assert files.lesion is not None
        mask = volumes.read_label(files.lesion, "lesion")
        np.testing.assert_array_equal(mask.data, lesion)
        volumes.check_grid(volumes.read(files.image, "image"), mask)


@pytest.mark.parametrize(
    ("name", "file", "label"),
    [("LiTS-0", "segmentation-0.nii", 3), ("BTCV-0001", "RawData/Training/label/label0001.nii.gz", 14)],
)
def test_labels_of_another_set_are_refused(root: Path, name: str, file: str, label: int) -> None:
    write_set(root, ["BTCV-0001", "LiTS-0", "LiTS-1"])
    save(root / file, (LIVER * label).astype(np.uint8), (1, 1))
    scan = next(scan for scan in source(root).scans() if scan.subject_id == name)
    for _ in range(2):  # nothing is kept of the first
        with pytest.raises(CaseProblem, match=f"unknown_label: found label {label}, expected labels from 0 to"):
            scan.fetch()


def test_masks_are_made_again_for_other_labels_only_and_with_equal_bytes(root: Path) -> None:
    write_set(root, ["BTCV-0001", "LiTS-0", "LiTS-1"])

    def lesion() -> Path:
        path = next(scan for scan in source(root).scans() if scan.subject_id == "LiTS-0").fetch().lesion
        assert path is not None
        return path

    first = lesion()
    assert first.is_relative_to(root.parent / "work")
    before, time = records.digest_file(first), first.stat().st_mtime_ns
    assert (lesion(), first.stat().st_mtime_ns) == (first, time)
    first.unlink()
    assert records.digest_file(lesion()) == before
    save(root / "segmentation-0.nii", (LIVER.astype(np.uint8) + LIVER).astype(np.float32), (-1, 1))
    assert lesion() != first
    assert volumes.read_label(lesion(), "lesion").data.sum() == LIVER.sum()


def prepared(root: Path, name: str) -> Path:
    from anomed.preprocess import shard, slicing
    from anomed.preprocess.chain import Chain

    chain = {
        "spatial": [{"organ_mask": {"limits_ml": [500, 4000]}}],
        "intensity": [{"window": {"range": [-200, 250]}}],
        "slices": {"unit": "index", "start": 0, "stop": 999, "step": 1, "normal": "slices", "min_organ_mm2": 500},
    }
    block = {"source": "btcv_lits", "size": 32, "release": None, "fingerprint": "0", "files": {}}
    options = check(BtcvLits.Options, {"split": {"valid": 0.5, "test": 0.5}}, "domains.liver").model_dump()
    block |= options | {"preprocess": Chain(chain, "preprocess.liver").canonical()}
    work, out = root.parent / "work", root.parent / name
    spatial = block | {"spatial": block["preprocess"]["spatial"]}  # type: ignore[index]
    shard.spatial("liver", spatial, {}, root, work, root.parent / "_spatial", (0, 1), root.parent / "spatial.csv")
    slicing.intensity("liver", block, root, work, root.parent / "_spatial", out, root.parent / "problems.csv")
    return out


def test_prepared_images_show_the_liver_and_repeat_byte_by_byte(tmp_path: Path) -> None:
    everyone = ["BTCV-0001", "BTCV-0002", "LiTS-0", "LiTS-1", "LiTS-2", "LiTS-3", "LiTS-4"]
    contents = []
    for order, folder in ((everyone, "a"), (everyone[::-1], "b")):
        write_set(tmp_path / folder / "raw", order)
        out = prepared(tmp_path / folder / "raw", "made")
        contents.append({path.name: path.read_bytes() for path in sorted(out.iterdir())})
    assert contents[0] == contents[1]
    made = Prepared(tmp_path / "a/made")
    assert made.card["masks"]
    assert made.card["foreground"]
    table = made.table
    assert table.groupby("subject_id").split.nunique().max() == 1
    assert {name[:4] for name in table[table.split == "train"].subject_id} == {"BTCV"}
    assert {name[:4] for name in table[table.split != "train"].subject_id} == {"LiTS"}
    assert set(table.image_id.str[-3:]) == {f"{z:03d}" for z in range(1, 9)}, "slices without liver are left out"
    row: Any
    for row in made.evaluated().itertuples():
        assert (row.native_h, row.native_w) == (18, 22)
        z = int(row.image_id[-3:])
        assert row.label == (int(row.subject_id[5:]) % 2 == 0 and z in (4, 5))
        np.testing.assert_array_equal(made.foreground(row.mask_row), volumes.cut(LIVER, "axial", z))
        assert not made.native(row.image_id)[~volumes.cut(LIVER, "axial", z)].any()
        if row.label:
            down, across = np.nonzero(made.mask(row.mask_row))
            assert set(down) == {3, 4}, "the front is up"
            assert set(across) == {3, 4, 5}, "the patient's right is left"
            assert row.pathology == "liver lesion"
