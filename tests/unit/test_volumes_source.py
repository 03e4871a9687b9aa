"""The volumes source on folders of dummy files: subjects, splits, every fault it names, and what its identity covers."""

import shutil
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import raw_tree
from raw_tree import put

from anomed import plugins
from anomed.domains.source import Files
from anomed.domains.volumes import Volumes
from anomed.errors import AnomedError
from anomed.settings import check

BRATS = {"image": "{subject}/{subject}_flair.nii.gz", "lesion": "{subject}/{subject}_seg.nii.gz"}
DICOM = {"image": "{subject}/T2_FLAIR/", "lesion": "{subject}/lesion.nii.gz"}
SEG = {"lesion": "{subject}_seg.nii.gz"}
TABLE = {"subjects": "subjects.csv"}
NORMAL = [f"n{i:02d}" for i in range(11)]
SICK = [f"a{i:02d}" for i in range(7)]


def table(root: Path, *lines: str, encoding: str = "utf-8") -> None:
    (root / "subjects.csv").write_text("".join(f"{line}\n" for line in lines), encoding=encoding)


def source(root: Path, **options: Any) -> Volumes:
    made = plugins.load("domains", "volumes")(
        "heads", check(Volumes.Options, options, "domains.heads"), root, root.parent / "work"
    )
    assert isinstance(made, Volumes)
    return made


def faults(root: Path, **options: Any) -> list[tuple[str, str]]:
    return raw_tree.faults(source(root, **options))


def splits(root: Path, **options: Any) -> dict[str, str]:
    return {scan.subject_id: scan.split for scan in source(root, **options).scans()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def cohort(root: Path) -> Path:
    """11 subjects without and 7 with a lesion file, and no table."""
    put(root, *(f"{name}.nii.gz" for name in NORMAL + SICK), *(f"{name}_seg.nii.gz" for name in SICK))
    return root


@pytest.fixture
def listed(root: Path) -> Path:
    """Four subjects and their table."""
    put(root, "s1.nii.gz", "s2.nii.gz", "s3.nii.gz", "s3_seg.nii.gz", "s4.nii.gz", "s4_seg.nii.gz")
    table(
        root,
        "subject,age,split,label,pathology",
        "s1,50,train,0,",
        "s2,61,val,Normal,",
        "s3,72,valid,1,tumour",
        "s4,38,test,ABNORMAL,infarct",
    )
    return root


def test_a_table_gives_split_label_pathology_and_patterns_give_files(listed: Path) -> None:
    found = source(listed, **TABLE, **SEG)
    scans = {scan.subject_id: scan for scan in found.scans()}
    assert not found.problems
    assert {name: (s.split, s.abnormal, s.pathology) for name, s in scans.items()} == {
        "s1": ("train", False, ""),
        "s2": ("valid", False, ""),
        "s3": ("valid", True, "tumour"),
        "s4": ("test", True, "infarct"),
    }
    assert scans["s1"].fetch() == Files(listed / "s1.nii.gz")
    assert scans["s3"].fetch() == Files(listed / "s3.nii.gz", listed / "s3_seg.nii.gz")
    assert scans["s3"].source_file == "s3.nii.gz"


def test_a_table_with_a_byte_order_mark_quotes_and_empty_last_lines_is_read(listed: Path) -> None:
    table(
        listed,
        "subject,split,label,note",
        "s1,train,0,",
        's2,valid,0,"two\nlines, one comma"',
        "s3,test,1,",
        "s4,test,1,",
        ",,,",
        encoding="utf-8-sig",
    )
    assert splits(listed, **TABLE, **SEG) == {"s1": "train", "s2": "valid", "s3": "test", "s4": "test"}


def test_paths_in_the_table_win_over_patterns_where_they_are_not_empty(root: Path) -> None:
    put(
        root,
        "s1.nii.gz",
        "old/scan 7.nrrd",
        "old/mask.nii.gz",
        "s1_seg.nii.gz",
        "s2.nii.gz",
        "s2_seg.nii.gz",
        "masks/b.nii.gz",
    )
    table(
        root,
        "subject,split,label,image,lesion,organ",
        "s1,test,1,,,masks/b.nii.gz",
        "s2,test,1,old/scan 7.nrrd,old/mask.nii.gz,",
    )
    first, second = source(root, **TABLE, **SEG).scans()
    assert first.fetch() == Files(root / "s1.nii.gz", root / "s1_seg.nii.gz", root / "masks/b.nii.gz")
    assert second.fetch() == Files(root / "old/scan 7.nrrd", root / "old/mask.nii.gz")
    assert second.source_file == "old/scan 7.nrrd"


def test_an_image_that_the_table_gives_to_a_subject_of_another_name_is_not_left_over(root: Path) -> None:
    put(root, "scan1.nii.gz", "scan1_seg.nii.gz")
    table(root, "subject,split,label,image,lesion", "p1,test,1,scan1.nii.gz,scan1_seg.nii.gz")
    assert faults(root, **TABLE, **SEG) == []


def test_without_a_table_the_lesion_file_tells_normal_from_abnormal(cohort: Path) -> None:
    scans = source(cohort, **SEG).scans()
    assert {scan.subject_id: scan.abnormal for scan in scans} == {
        **dict.fromkeys(NORMAL, False),
        **dict.fromkeys(SICK, True),
    }
    assert [scan.subject_id for scan in scans] == sorted(NORMAL + SICK)


def test_a_table_without_labels_leaves_a_subject_with_a_lesion_file_to_the_voxels(cohort: Path) -> None:
    table(cohort, "subject", *reversed(NORMAL + SICK))
    scans = source(cohort, **TABLE, **SEG).scans()
    assert {scan.subject_id: scan.abnormal for scan in scans} == {
        **dict.fromkeys(NORMAL, False),
        **dict.fromkeys(SICK, None),
    }
    assert not [scan for scan in scans if scan.abnormal is None and scan.split == "train"], "it may have a lesion"


def test_a_normal_subject_keeps_its_lesion_file_for_the_chain_to_look_at(listed: Path) -> None:
    put(listed, "s1_seg.nii.gz")
    scan = source(listed, **TABLE, **SEG).scans()[0]
    assert scan.abnormal is False
    assert scan.fetch().lesion == listed / "s1_seg.nii.gz"


def test_subject_stands_several_times_in_a_pattern_and_must_be_the_same(cohort: Path, root: Path) -> None:
    put(
        root,
        *(f"x/{name}/{name}_flair.nii.gz" for name in NORMAL + SICK),
        *(f"x/{name}/{name}_seg.nii.gz" for name in SICK),
    )
    put(root, "x/n00/n01_flair.nii.gz", "x/n00/deeper/n00_flair.nii.gz")
    found = source(root / "x", **BRATS)
    scans = found.scans()
    assert [scan.subject_id for scan in scans] == sorted(NORMAL + SICK)
    assert scans[0].fetch() == Files(root / "x/a00/a00_flair.nii.gz", root / "x/a00/a00_seg.nii.gz")
    assert all(scan.source_file == f"{scan.subject_id}/{scan.subject_id}_flair.nii.gz" for scan in scans)
    assert found.ignored == 2


def test_a_pattern_with_a_slash_at_its_end_names_the_folder_of_a_series(root: Path) -> None:
    names = ["n1", "n2", "n3", "a1", "a2"]
    put(root, *(f"{name}/T2_FLAIR/{i}" for name in names for i in range(3)), "a1/lesion.nii.gz", "a2/lesion.nii.gz")
    put(root, "n1/T1/0", "n1/T2_FLAIR/.DS_Store", "n2/T2_FLAIR/more/3", "README")
    found = source(root, **DICOM)
    scans = {scan.subject_id: scan for scan in found.scans()}
    assert scans.keys() == set(names)
    assert scans["a1"].fetch() == Files(root / "a1/T2_FLAIR", root / "a1/lesion.nii.gz")
    assert scans["a1"].source_file == "a1/T2_FLAIR"
    assert found.ignored == 3, "T1, .DS_Store and README"
    before = found.fingerprint()
    put(root, "n1/T2_FLAIR/.DS_Store", content="another")
    assert source(root, **DICOM).fingerprint() == before
    put(root, "n2/T2_FLAIR/more/3", content="another")
    assert source(root, **DICOM).fingerprint() != before


def test_a_folder_of_a_series_is_named_in_the_table_with_or_without_a_slash(root: Path) -> None:
    put(root, "a/one/0.dcm", "a/two/0.dcm")
    table(root, "subject,split,label,image", "s1,train,0,a/one", "s2,test,0,a/two/")
    assert [scan.fetch().image for scan in source(root, **TABLE).scans()] == [root / "a/one", root / "a/two"]


def test_masks_and_organs_are_no_images_although_the_pattern_of_images_fits(cohort: Path) -> None:
    put(cohort, *(f"{name}_brain_seg.nii.gz" for name in NORMAL + SICK))
    found = source(cohort, **SEG, organ="{subject}_brain_seg.nii.gz")
    assert [scan.subject_id for scan in found.scans()] == sorted(NORMAL + SICK)
    assert not found.problems
    assert found.scans()[0].fetch().organ == cohort / "a00_brain_seg.nii.gz"


def test_an_image_keeps_its_name_although_the_pattern_of_labels_fits(root: Path) -> None:
    put(root, *(f"{name}_t1.nii.gz" for name in NORMAL + SICK), *(f"{name}.nii.gz" for name in SICK))
    scans = source(root, image="{subject}_t1.nii.gz", lesion="{subject}.nii.gz").scans()
    assert {scan.subject_id for scan in scans if scan.abnormal} == set(SICK)


def test_letters_of_a_pattern_are_taken_as_they_are(root: Path) -> None:
    put(root, "s1.nii.gz", "s2xniixgz")
    with pytest.raises(AnomedError, match=r"normal subjects: found 1,"):
        source(root, **SEG).scans()


def test_hidden_files_of_systems_and_longer_names_are_no_subjects(cohort: Path) -> None:
    put(cohort, "._n00.nii.gz", "__MACOSX/x.nii.gz", ".DS_Store", "n99.nii.gz.part")
    found = source(cohort, **SEG)
    assert len(found.scans()) == len(NORMAL + SICK)
    assert found.ignored == 4
    assert not found.problems


def counts(found: dict[str, str], names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(found[name] for name in names))


def test_subjects_are_divided_by_shares_with_lesions_outside_train(cohort: Path) -> None:
    found = splits(cohort, **SEG)
    assert counts(found, NORMAL) == {"train": 7, "valid": 1, "test": 3}  # 6.6, 1.1, 3.3
    assert counts(found, SICK) == {"valid": 2, "test": 5}  # 1.75, 5.25
    found = splits(cohort, **SEG, split={"train": 0.2, "valid": 0.5, "test": 0.3})
    assert counts(found, NORMAL) == {"train": 2, "valid": 6, "test": 3}  # 2.2, 5.5, 3.3
    assert counts(found, SICK) == {"valid": 4, "test": 3}  # 4.375, 2.625


def test_a_split_without_a_share_stays_empty_and_one_with_a_small_share_does_not(cohort: Path) -> None:
    found = splits(cohort, **SEG, split={"train": 0.5, "valid": 0.0, "test": 0.5})
    assert set(found.values()) == {"train", "test"}
    found = splits(cohort, **SEG, split={"train": 0.98, "valid": 0.01, "test": 0.01})
    assert counts(found, NORMAL) == {"train": 9, "valid": 1, "test": 1}


def test_the_division_does_not_depend_on_the_order_of_the_table_but_on_the_seed(cohort: Path) -> None:
    table(cohort, "subject", *(NORMAL + SICK))
    first = splits(cohort, **TABLE, **SEG)
    table(cohort, "subject", *reversed(NORMAL + SICK))
    assert splits(cohort, **TABLE, **SEG) == first == splits(cohort, **SEG)
    assert splits(cohort, **TABLE, **SEG, seed=1) != first
    stable = "published results stand on the division: it must not change"
    assert sorted(name for name in NORMAL if first[name] == "test") == ["n00", "n05", "n06"], stable


def test_too_few_subjects_to_divide_are_counted(root: Path) -> None:
    put(root, "n1.nii.gz", "n2.nii.gz", "n3.nii.gz", "a1.nii.gz", "a1_seg.nii.gz")
    with pytest.raises(
        AnomedError,
        match=r"domains\.heads\.split: abnormal subjects: found 1, expected at least 2, one for each of valid, test",
    ):
        source(root, **SEG).scans()
    (root / "n1.nii.gz").unlink()
    with pytest.raises(AnomedError, match=r"normal subjects: found 2, expected at least 3"):
        source(root, **SEG).scans()


def test_excluded_subjects_are_left_out_and_an_unknown_one_is_an_error(cohort: Path) -> None:
    found = source(cohort, **SEG, exclude={"a03": "moved"})
    assert "a03" not in {scan.subject_id for scan in found.scans()}
    assert not found.problems
    assert found.ignored == 2, "its image and its mask"
    with pytest.raises(AnomedError, match=r"domains\.heads\.exclude: no subject 'a3'; did you mean 'a03'\?"):
        source(cohort, **SEG, exclude={"a3": "moved"}).scans()


def test_missing_files_are_problems_of_their_subject(listed: Path) -> None:
    (listed / "s1.nii.gz").unlink()
    (listed / "s4_seg.nii.gz").unlink()
    assert faults(listed, **TABLE, **SEG) == [("s1", "missing_image"), ("s4", "missing_lesion")]
    (listed / "s3_seg.nii.gz").unlink()
    assert faults(listed, **TABLE) == [("s1", "missing_image")], "no pixel truth, no mask needed"
    put(listed, "brains/s1.nii.gz", "brains/s2.nii.gz", "brains/s4.nii.gz")
    assert ("s3", "missing_organ") in faults(listed, **TABLE, organ="brains/{subject}.nii.gz")


def test_a_path_in_the_table_that_leads_nowhere_is_not_replaced_by_the_pattern(root: Path) -> None:
    put(root, "s1.nii.gz", "s2.nii.gz", "s2_seg.nii.gz")
    table(root, "subject,split,label,image,lesion", "s1,train,0,elsewhere.nii.gz,", "s2,test,1,,no.nii.gz")
    assert faults(root, **TABLE, **SEG) == [("s1", "missing_image"), ("s2", "missing_lesion")]


def test_files_of_subjects_that_the_table_does_not_list_are_problems(listed: Path) -> None:
    before = source(listed, **TABLE, **SEG).fingerprint()
    put(listed, "s5.nii.gz", "s5_seg.nii.gz", "s6_seg.nii.gz")
    assert faults(listed, **TABLE, **SEG) == [
        ("s5.nii.gz", "subject_not_in_table"),
        ("s6_seg.nii.gz", "mask_without_image"),
    ]
    assert source(listed, **TABLE, **SEG).fingerprint() != before, "prepare must run again to refuse them"
    excluded = {"s5": "too young"}
    assert faults(listed, **TABLE, **SEG, exclude=excluded) == [("s6_seg.nii.gz", "mask_without_image")]


def test_a_subject_that_stands_twice_is_a_problem_also_in_another_case(listed: Path) -> None:
    put(listed, "S2.nii.gz")
    table(listed, "subject,split,label", "s1,train,0", "s1,test,0", "s2,train,0", "S2,test,0", "s3,test,1", "s4,test,1")
    assert faults(listed, **TABLE, **SEG) == [("s1", "duplicate_subject"), ("s2", "duplicate_subject")]
    found = source(listed, **TABLE, **SEG)
    assert [scan.subject_id for scan in found.scans()] == ["s3", "s4"]
    assert "s1 (subjects.csv, line 2) and s1 (subjects.csv, line 3)" in str(found.problems[0])


def test_one_image_of_two_subjects_is_a_problem(listed: Path) -> None:
    table(listed, "subject,split,label,image", "s1,train,0,", "s2,test,0,s1.nii.gz", "s3,test,1,", "s4,test,1,")
    assert faults(listed, **TABLE, **SEG) == [("s2", "shared_image")]


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("head.nii.gz", "does not contain"),
        ("/data/{subject}.nii.gz", "not relative"),
        ("C:/{subject}.nii.gz", "not relative"),
        ("~/{subject}.nii.gz", "not relative"),
        ("../{subject}.nii.gz", "empty part, '.' or '..'"),
        ("{subject}//x.nii.gz", "empty part"),
        ("{subject}/*.nii.gz", r"'\*' or a brace"),
        ("{subject}_{session}.nii.gz", "brace"),
        (r"{subject}\x.nii.gz", "backslash"),
        ("{subject}.dcm", "one DICOM file"),
    ],
)
@pytest.mark.parametrize("key", ["image", "lesion", "organ"])
def test_a_pattern_that_cannot_be_one_is_named_with_its_key(root: Path, key: str, pattern: str, fault: str) -> None:
    with pytest.raises(AnomedError, match=rf"^domains\.heads\.{key}: .*{fault}.*expected a path relative to root"):
        source(root, **{key: pattern})


def test_one_pattern_for_two_kinds_is_refused(root: Path) -> None:
    with pytest.raises(AnomedError, match=r"^domains\.heads\.lesion: .* is the pattern of `image` as well"):
        source(root, lesion="{subject}.nii.gz")


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([], r"line \d: found columns \[\]"),
        (["name,label", "s1,0"], r"line 1: found columns \['name', 'label'\], expected `subject`"),
        (["subject;label", "s1;0"], r"line 1: .*separated by commas"),
        (["subject,Split", "s1,train"], r"line 1: .*expected 'split' once, without capitals"),
        (["subject,split,split", "s1,train,test"], r"line 1: .*expected 'split' once"),
        (["subject,label"], r"line 2: found no subject"),
        (
            ["subject,label,split", "s1,0,train", "s2,0,training"],
            r"line 3: found split 'training', expected one of train, valid, val, test",
        ),
        (["subject,label,split", "s1,0,train", "s2,0,"], r"line 3: found split ''"),
        (["subject,label,split", "s1,2,train"], r"line 2: found label '2', expected one of 0, normal, 1, abnormal"),
        (["subject,label", "s1,0", "s2,0,1"], r"line 3: found 3 cells, expected 2"),
        (["subject,label", 's1,"0"0'], r"line 2: not CSV"),
        (["subject,label,image", "s1,0,../s1.nii.gz"], r"line 2: image '\.\./s1\.nii\.gz' has an empty part"),
        (["subject,label,image", r"s1,0,a\s1.nii.gz"], r"line 2: image .* backslash"),
        (["subject,label", "s 1,0"], r"subject 's 1' \(subjects\.csv, line 2\): expected letters"),
        (["subject,label", ".s1,0"], r"subject '\.s1'"),
        (["subject,label", "é,0"], r"subject 'é'"),
        (["subject,label", ",0"], r"subject ''"),
    ],
)
def test_a_faulty_table_is_named_with_its_line(root: Path, lines: list[str], fault: str) -> None:
    put(root, "s1.nii.gz")
    table(root, *lines)
    with pytest.raises(AnomedError, match=rf"data.*{fault}") as caught:
        source(root, **TABLE, **SEG).scans()
    assert "subjects.csv" in str(caught.value)


def test_a_table_in_another_encoding_is_named_with_its_line(root: Path) -> None:
    put(root, "s1.nii.gz")
    table(root, "subject,pathology", "s1,", "s2,Ödem", encoding="latin-1")
    with pytest.raises(AnomedError, match=r"subjects\.csv, line 3: not UTF-8"):
        source(root, **TABLE, **SEG).scans()


def test_a_table_that_is_not_there_or_outside_root_is_named(root: Path) -> None:
    with pytest.raises(AnomedError, match=r"subjects\.csv: not found; domains\.heads\.subjects"):
        source(root, **TABLE).scans()
    with pytest.raises(AnomedError, match=r"^domains\.heads\.subjects: '\.\./x\.csv' has"):
        source(root, subjects="../x.csv")


def test_an_id_on_disk_that_cannot_name_a_folder_is_named_unless_it_is_excluded(cohort: Path) -> None:
    put(cohort, "copy of n00.nii.gz")
    with pytest.raises(AnomedError, match=r"subject 'copy of n00' \(copy of n00\.nii\.gz\): expected letters"):
        source(cohort, **SEG).scans()
    assert len(source(cohort, **SEG, exclude={"copy of n00": "a copy"}).scans()) == len(NORMAL + SICK)


def test_labels_must_come_from_somewhere(cohort: Path) -> None:
    with pytest.raises(
        AnomedError,
        match=r"nothing says which subjects have a lesion; .*domains\.heads\.subjects to a table with a column `label`",
    ):
        source(cohort).scans()
    table(cohort, "subject,age", "n00,50")
    with pytest.raises(AnomedError, match="nothing says which subjects have a lesion"):
        source(cohort, **TABLE).scans()


def test_lesion_files_without_the_pattern_that_declares_pixel_truth_are_refused(listed: Path) -> None:
    table(listed, "subject,split,label,lesion", "s1,train,0,", "s3,test,1,s3_seg.nii.gz")
    with pytest.raises(AnomedError, match=r"line 3: found a path in `lesion`, but the domain has no pixel truth"):
        source(listed, **TABLE).scans()


def test_a_root_without_subjects_a_zip_and_no_root_are_named(root: Path) -> None:
    with pytest.raises(
        AnomedError, match=r"data: no subject among 0 files, 0 excluded; expected images named '\{subject\}\.nii\.gz'"
    ):
        source(root, **SEG).scans()
    with zipfile.ZipFile(root / "heads.zip", "w") as file:
        file.writestr("s1.nii.gz", "")
    for ask in (source(root / "heads.zip", **SEG).scans, source(root / "heads.zip", **SEG).fingerprint):
        with pytest.raises(AnomedError, match=r"heads\.zip: a zip; .*unpack it"):
            ask()
    for ask in (source(root / "nowhere", **SEG).scans, source(root / "nowhere").fingerprint):
        with pytest.raises(AnomedError, match=r"nowhere: not found"):
            ask()
    with pytest.raises(AnomedError, match=r"domains\.heads\.root: missing"):
        Volumes("heads", Volumes.Options(), None, root).scans()


@pytest.mark.parametrize("shares", [{"train": 0.7}, {"train": 0.7, "test": 0.0}, {"train": -0.1, "valid": 0.8}])
def test_shares_that_cannot_divide_subjects_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(AnomedError, match=r"^domains\.heads\.split"):
        check(Volumes.Options, {"split": shares}, "domains.heads")


def test_options_survive_the_way_through_the_block_of_params() -> None:
    options = check(Volumes.Options, {"split": {"train": 0.5, "valid": 0.2, "test": 0.3}, **SEG}, "domains.heads")
    assert Volumes.Options(**options.model_dump()) == options


def test_pixel_truth_is_declared_by_the_pattern_of_labels(root: Path) -> None:
    assert source(root, **SEG).has_masks
    assert not source(root).has_masks
    assert source(root).volumetric


def test_the_identity_is_that_of_the_subjects_files_and_the_table(listed: Path, tmp_path: Path) -> None:
    before = source(listed, **TABLE, **SEG).fingerprint()
    put(listed, "README.md", "other/s1.nii.gz", "s1.json")
    shutil.copytree(listed, tmp_path / "copy")
    assert source(listed, **TABLE, **SEG).fingerprint() == before
    assert source(tmp_path / "copy", **TABLE, **SEG).fingerprint() == before
    seen = {before}
    for name in ("s1.nii.gz", "s3_seg.nii.gz"):
        put(listed, name, content="another")
        seen.add(source(listed, **TABLE, **SEG).fingerprint())
    put(listed, "s1_seg.nii.gz")
    seen.add(source(listed, **TABLE, **SEG).fingerprint())
    text = (listed / "subjects.csv").read_text()
    (listed / "subjects.csv").write_text(text.replace("s2,61,val", "s2,61,test"))
    seen.add(source(listed, **TABLE, **SEG).fingerprint())
    assert len(seen) == 5


@pytest.mark.parametrize("suffix", ["mhd", "nhdr"])
def test_voxels_beside_a_header_are_part_of_the_identity(root: Path, suffix: str) -> None:
    put(root, f"in/s1.{suffix}", "in/voxels of s1.raw", f"in/s2.{suffix}", "out/README")
    table(root, "subject,split,label", "s1,train,0")
    options = {**TABLE, "image": f"in/{{subject}}.{suffix}"}
    assert faults(root, **options) == [(f"in/s2.{suffix}", "subject_not_in_table")]
    before = source(root, **options).fingerprint()
    put(root, "in/voxels of s1.raw", content="another")
    assert source(root, **options).fingerprint() != before


def test_a_folder_that_fits_the_pattern_of_a_file_is_named(listed: Path) -> None:
    put(listed, "s9.nii.gz/slice.dcm")
    assert ("s9.nii.gz", "not_a_file") in faults(listed, **TABLE, **SEG)


def test_an_image_and_a_lesion_belong_to_one_subject(listed: Path) -> None:
    table(listed, "subject,split,label,lesion", "s1,train,0,", "s2,test,0,", "s3,test,1,s4_seg.nii.gz", "s4,test,1,")
    assert ("s4", "shared_lesion") in faults(listed, **TABLE, **SEG)


def test_a_subject_is_not_named_like_the_lists_beside_the_folders(root: Path) -> None:
    put(root, "0-of-1.json.nii.gz", "b.nii.gz", "b_seg.nii.gz")
    with pytest.raises(AnomedError, match=r"no \.json behind"):
        source(root, **SEG).scans()
