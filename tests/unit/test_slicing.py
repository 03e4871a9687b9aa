"""Volumes to images: which slices, with which label, and that every voxel lands where a radiologist expects it."""

import csv
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import nibabel
import numpy as np
import pytest
from nibabel.orientations import axcodes2ornt, ornt_transform

from anomed import images, records, volumes
from anomed.domains.source import Files, Scan
from anomed.domains.volumes import Volumes
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Case, Prepared
from anomed.preprocess import shard, slicing
from anomed.preprocess.chain import Chain
from anomed.preprocess.slices import Slices
from anomed.preprocess.slicing import Cutter, Grey
from anomed.settings import check

SHAPE = (24, 20, 16)
AFFINE = np.array([[2.0, 0, 0, -20], [0, 1, 0, -9], [0, 0, 1.5, -12], [0, 0, 0, 1]])  # no two edges alike
AREAS = {"axial": 2.0, "coronal": 3.0, "sagittal": 1.5}  # mm2 of a pixel
AXES = {"axial": 2, "coronal": 1, "sagittal": 0}
ORGAN = np.zeros(SHAPE, np.uint8)  # no symmetry: a corner is missing
ORGAN[3:20, 2:17, 1:14] = 1
ORGAN[3:8, 2:6, 1:9] = 0
LESION = np.zeros(SHAPE, np.uint8)  # three classes as BraTS numbers them, no symmetry, inside the organ
LESION[9:13, 8:11, 4:8] = 1
LESION[13:15, 8:14, 5:7] = 2
LESION[9:10, 11:15, 5:10] = 4
OTHER = np.roll(LESION, (2, -1, 3), (0, 1, 2))
# subject: split, label, pathology, lesion, order of the axes in its files
COHORT: dict[str, tuple[str, int, str, np.ndarray | None, str]] = {
    "t1": ("train", 0, "", None, "RAS"),
    "t2": ("train", 0, "", None, "LPS"),
    "v1": ("valid", 0, "", None, "PIL"),
    "v2": ("valid", 1, "tumour", LESION, "ASR"),
    "s1": ("test", 0, "", None, "LAS"),
    "s2": ("test", 1, "infarct", OTHER, "SLA"),
}
CT = [{"window": {"range": [-100, 155]}}]  # grey level = value + 100, exactly


def values(subject: str) -> np.ndarray:
    """HU of a subject in RAS order: whole numbers on both sides of the window, brighter in its lesion."""
    noise = np.random.default_rng(list(subject.encode())).integers(-140, 180, SHAPE)
    lesion = COHORT[subject][3]
    inside = noise if lesion is None else noise + 60 * (lesion > 0)
    return np.where(ORGAN > 0, inside, -1000).astype(np.int16)


def put(path: Path, data: np.ndarray, codes: str = "RAS") -> None:
    """Write a RAS array as NIfTI with its axes in another order, as scanners do."""
    way = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(codes))
    nibabel.save(nibabel.Nifti1Image(data, AFFINE).as_reoriented(way), path)


def block(intensity: list[Any] | None = None, spatial: list[Any] | None = None, **slices: Any) -> dict[str, Any]:
    """A domain's block as plan.py hands it to both commands; every slice of the volume unless `slices` says otherwise."""
    cut = {"unit": "index", "start": 0, "stop": 15, "step": 1, **slices}
    steps = [{"organ_mask": {"limits_ml": [1, 20]}}] if spatial is None else spatial
    chain = Chain({"spatial": steps, "intensity": intensity or CT, "slices": cut}, "preprocess.test").canonical()
    patterns = {"lesion": "{subject}_lesion.nii.gz", "organ": "{subject}_organ.nii.gz", "subjects": "subjects.csv"}
    options = check(Volumes.Options, patterns, "domains.heads").model_dump()
    common = {"source": "volumes", "size": 32, "release": None, "fingerprint": "0", "files": {}}
    return {**common, **options, "preprocess": chain}


def spatial(root: Path, parameters: dict[str, Any]) -> Path:
    """Process the volumes of a root; returns the folder that holds them."""
    out = root.parent / "_spatial"
    steps = {**parameters, "spatial": parameters["preprocess"]["spatial"]}
    shard.spatial("heads", steps, {}, root, root.parent / "work", out, (0, 1), root.parent / "spatial.csv")
    return out


def intensity(root: Path, parameters: dict[str, Any], name: str = "heads") -> Path:
    """Cut the processed volumes of a root; returns the prepared domain."""
    out = root.parent / name
    places = root, root.parent / "work", root.parent / "_spatial", out, root.parent / "problems.csv"
    slicing.intensity("heads", parameters, *places)
    return out


def listed(root: Path) -> list[tuple[str, str]]:
    """Case and code of the problems, as the CSV lists them."""
    with (root.parent / "problems.csv").open() as file:
        return [(row["case"], row["code"]) for row in csv.DictReader(file)]


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def contents(folder: Path) -> dict[str, bytes]:
    return {name: content for name, (content, _) in tree(folder).items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of the cohort, its volumes processed; not to be changed."""
    root = tmp_path_factory.mktemp("finished") / "raw"
    root.mkdir()
    lines = ["subject,split,label,pathology"]
    for name, (split, label, pathology, lesion, codes) in COHORT.items():
        lines.append(f"{name},{split},{label},{pathology}")
        put(root / f"{name}.nii.gz", values(name), codes)
        put(root / f"{name}_organ.nii.gz", ORGAN, codes)
        if lesion is not None:
            put(root / f"{name}_lesion.nii.gz", lesion, codes)
    (root / "subjects.csv").write_text("\n".join(lines) + "\n")
    spatial(root, block())
    return root


@pytest.fixture
def cohort(finished: Path, tmp_path: Path) -> Path:
    """A copy of the root with its processed volumes, free to be changed."""
    for name in ("raw", "_spatial"):
        shutil.copytree(finished.parent / name, tmp_path / name)
    return tmp_path / "raw"


# Which slices ------------------------------------------------------------------------------------------------------


def indices(affine: np.ndarray = AFFINE, shape: tuple[int, ...] = SHAPE, **rule: Any) -> list[int]:
    found: list[int] = check(Slices, rule, "slices").indices(affine, shape)
    return found


@pytest.mark.parametrize(
    ("plane", "expected"), [("axial", [1, 6, 11]), ("coronal", [1, 6, 11, 16]), ("sagittal", [1, 6, 11, 16, 21])]
)
def test_indices_run_along_the_axis_of_the_plane_and_stop_at_its_end(plane: str, expected: list[int]) -> None:
    assert indices(plane=plane, unit="index", start=1, stop=90, step=5) == expected


def test_start_and_stop_are_slices_themselves_when_the_step_meets_them() -> None:
    assert indices(unit="index", start=2, stop=8, step=3) == [2, 5, 8]
    assert indices(unit="index", start=2, stop=7, step=3) == [2, 5]
    assert indices(unit="index", start=4, stop=4, step=9) == [4]


@pytest.mark.parametrize(
    ("plane", "expected"), [("axial", [6, 8, 10]), ("coronal", [6, 9, 12]), ("sagittal", [9, 10, 12])]
)
def test_millimetres_are_places_in_the_space_of_the_volume(plane: str, expected: list[int]) -> None:
    # x = 2 i - 20, where -3 and 3 lie half-way between two voxels; y = i - 9; z = 1.5 i - 12
    assert indices(plane=plane, start=-3, stop=3, step=3) == expected


def test_a_place_half_way_takes_the_upper_slice_and_two_places_in_one_slice_take_it_once() -> None:
    assert indices(start=-11.25, stop=-11.25, step=1) == [1]
    assert indices(start=-12, stop=-9, step=0.5) == [0, 1, 2]


def test_a_stop_that_rounding_just_misses_is_taken() -> None:
    affine = np.diag([1, 1, 0.1, 1])
    assert indices(affine, start=0, stop=0.3, step=0.1) == [0, 1, 2, 3]  # 0.3 / 0.1 is 2.9999999999999996


def test_places_outside_the_volume_give_no_slice() -> None:
    assert indices(start=-100, stop=-10, step=1.5) == [0, 1]
    assert indices(start=10.5, stop=100, step=1.5) == [15]
    assert indices(start=500, stop=600, step=1) == []
    assert indices(unit="index", start=16, stop=20, step=1) == []


@pytest.mark.parametrize("plane", ["axial", "coronal", "sagittal"])
def test_an_oblique_volume_is_cut_where_the_line_through_its_centre_has_the_place(plane: str) -> None:
    turn = np.deg2rad(25)
    affine = AFFINE.copy()
    affine[:3, :3] = [[np.cos(turn), 0, np.sin(turn)], [0, 1, 0], [-np.sin(turn), 0, np.cos(turn)]] @ AFFINE[:3, :3]
    axis = AXES[plane]
    line = [(np.array(SHAPE) - 1) / 2 for _ in range(SHAPE[axis])]
    places = []
    for at, voxel in enumerate(line):
        voxel[axis] = at
        places.append((affine @ [*voxel, 1])[axis])
    for at in (0, 4, SHAPE[axis] - 1):
        assert indices(affine, plane=plane, start=places[at], stop=places[at], step=1) == [at]
    assert indices(affine, plane=plane, start=places[2], stop=places[5], step=places[1] - places[0]) == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 0, "stop": 1}, "slices.step: missing"),
        ({"start": 0, "stop": 1, "step": 0}, "slices.step: .*greater than or equal to 0.1"),
        ({"start": 5, "stop": 1, "step": 1}, "slices: .*stop lies before start"),
        ({"start": 0.5, "stop": 3, "step": 1, "unit": "index"}, "slices: .*indices are whole numbers from 0"),
        ({"start": -1, "stop": 3, "step": 1, "unit": "index"}, "slices: .*indices are whole numbers from 0"),
        ({"start": 0, "stop": 3, "step": 0.5, "unit": "index"}, "slices: .*indices are whole numbers from 0"),
        ({"start": 0, "stop": 1, "step": 1, "plane": "frontal"}, "slices.plane: .*'axial', 'coronal' or 'sagittal'"),
        ({"start": 0, "stop": 1, "step": 1, "min_organ_mm2": -1}, "slices.min_organ_mm2: .*greater than or equal to 0"),
        ({"start": 0, "stop": 1, "step": 1, "min_lesion": 40}, "slices.min_lesion: unknown key; .*'min_lesion_mm2'"),
        ({"start": "0", "stop": 1, "step": 1}, "slices.start: .*valid number, found '0'"),
    ],
)
def test_a_faulty_block_of_slices_is_refused_by_its_key(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AnomedError, match=message):
        check(Slices, options, "slices")


@pytest.mark.parametrize("stop", [float("inf"), float("nan")])
def test_a_stop_that_is_no_finite_number_is_refused(stop: float) -> None:
    with pytest.raises(AnomedError, match=r"slices.stop: .*finite"):
        check(Slices, {"start": 0, "stop": stop, "step": 1}, "slices").indices(AFFINE, SHAPE)


# Rules for one subject ---------------------------------------------------------------------------------------------


def processed(
    folder: Path, label: np.ndarray | None = None, organ: np.ndarray | None = None, affine: np.ndarray = AFFINE
) -> Path:
    """What the spatial chain leaves of a subject."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {"image": np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE), "lesion": label, "organ": organ}
    for key, data in arrays.items():
        if data is not None:
            volumes.write(folder / f"{key}.nii.gz", data, affine)
    files = {path.name: records.digest_file(path) for path in folder.iterdir()}
    card = {"subject": folder.name, "files": files, "facts": {}, "inputs": {"image": "sha of the image"}}
    records.write_card(folder / shard.CARD, card)
    return folder


def scan(split: str, abnormal: bool | None, pathology: str = "") -> Scan:
    return Scan("sub", split, "sub.nii.gz", lambda: Files(Path("sub.nii.gz")), abnormal, pathology)


def cutter(has_masks: bool = True, **rule: Any) -> Cutter:
    def grey(folder: Path) -> Grey:
        raise AssertionError("pixels are read when an image is loaded, not before")

    options = {"unit": "index", "start": 0, "stop": 23, "step": 1, **rule}
    return Cutter(check(Slices, options, "slices"), False, has_masks, grey)


def labels(cases: list[Case]) -> dict[int, int]:
    """Slice to label."""
    return {int(case.image_id.removeprefix("sub_")): case.label for case in cases}


def lesion_of(**voxels: int) -> np.ndarray:
    """A lesion with so many voxels in slices z<n>."""
    lesion = np.zeros(SHAPE, np.uint8)
    for name, number in voxels.items():
        lesion[:number, 7, int(name[1:])] = 2
    return lesion


def test_every_slice_of_a_normal_subject_is_normal(tmp_path: Path) -> None:
    cases = cutter(start=3, stop=9, step=3).cases(scan("train", False, "none"), processed(tmp_path / "sub"))
    assert [case.image_id for case in cases] == ["sub_003", "sub_006", "sub_009"]
    assert {(c.subject_id, c.split, c.label, c.source_file, c.pathology) for c in cases} == {
        ("sub", "train", 0, "sub.nii.gz", "")
    }


def test_lesion_slices_of_a_patient_are_abnormal_and_the_rule_decides_about_the_others(tmp_path: Path) -> None:
    folder = processed(tmp_path / "sub", lesion_of(z4=1, z5=3))
    rule = cutter(stop=7)
    cases = rule.cases(scan("test", True, "tumour"), folder)
    assert labels(cases) == {4: 1, 5: 1}
    assert {case.pathology for case in cases} == {"tumour"}
    assert rule.left_out == {"normal_slice_of_a_patient": 6}
    rule = cutter(stop=7, normal="slices")
    cases = rule.cases(scan("test", True, "tumour"), folder)
    assert labels(cases) == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 0, 7: 0}
    assert [case.pathology for case in cases] == ["", "", "", "", "tumour", "tumour", "", ""]
    assert not rule.left_out


@pytest.mark.parametrize("normal", ["subjects", "slices"])
def test_a_slice_with_less_lesion_than_the_limit_is_neither_normal_nor_abnormal(tmp_path: Path, normal: str) -> None:
    folder = processed(tmp_path / "sub", lesion_of(z4=4, z5=5, z6=6))  # of 2 mm2 each
    rule = cutter(start=4, stop=6, min_lesion_mm2=9, normal=normal)
    assert labels(rule.cases(scan("valid", True), folder)) == {5: 1, 6: 1}
    assert rule.left_out == {"lesion_below_limit": 1}


@pytest.mark.parametrize("plane", ["axial", "coronal", "sagittal"])
def test_areas_are_those_of_the_pixels_of_the_plane(tmp_path: Path, plane: str) -> None:
    folder = processed(tmp_path / "sub", LESION)
    pixels = (LESION > 0).sum(tuple({0, 1, 2} - {AXES[plane]}))
    least = AREAS[plane] * (pixels.max() - 0.5)
    cases = cutter(plane=plane, min_lesion_mm2=float(least)).cases(scan("test", True), folder)
    assert list(labels(cases)) == np.flatnonzero(pixels * AREAS[plane] > least).tolist()
    assert len(cutter(plane=plane).cases(scan("test", True), folder)) > len(cases)


def test_slices_with_too_little_organ_are_left_out_of_every_subject(tmp_path: Path) -> None:
    organ = np.zeros(SHAPE, np.uint8)
    organ[:6, 3, 2], organ[:5, 3, 3], organ[0, 3, 4] = 1, 1, 1
    normal = processed(tmp_path / "a/sub", None, organ)
    sick = processed(tmp_path / "b/sub", lesion_of(z2=1, z3=1, z4=1, z5=1), organ)
    for split, abnormal, folder in (("train", False, normal), ("test", True, sick)):
        rule = cutter(start=1, stop=5, min_organ_mm2=9)
        assert list(labels(rule.cases(scan(split, abnormal), folder))) == [2, 3]
        assert rule.left_out == {"too_little_organ": 3}
        rule = cutter(start=1, stop=5)
        assert list(labels(rule.cases(scan(split, abnormal), folder))) == [2, 3, 4], "a slice without organ is no image"


@pytest.mark.parametrize(
    "edges",
    [
        (1, 1, 1),
        (0.5, 0.5, 2),
        (2, 2, 2),
        (2, 1, 1.5),
    ],
)
def test_a_slice_with_exactly_the_limit_of_lesion_and_organ_is_taken(tmp_path: Path, edges: tuple[float, ...]) -> None:
    folder = processed(tmp_path / "sub", lesion_of(z4=10), lesion_of(z4=20), np.diag([*edges, 1]))
    area = edges[0] * edges[1]
    rule = cutter(start=4, stop=4, min_lesion_mm2=10 * area, min_organ_mm2=20 * area)
    assert labels(rule.cases(scan("test", True), folder)) == {4: 1}


def test_train_takes_tumour_free_slices_of_patients_and_never_a_lesion(tmp_path: Path) -> None:
    folder = processed(tmp_path / "sub", lesion_of(z4=1, z5=9))
    rule = cutter(start=3, stop=6, min_lesion_mm2=4, normal="slices")
    assert labels(rule.cases(scan("train", None, "tumour"), folder)) == {3: 0, 6: 0}
    assert rule.left_out == {"lesion_below_limit": 1, "lesion_in_train": 1}


def test_the_voxels_decide_where_no_label_is_given(tmp_path: Path) -> None:
    empty = processed(tmp_path / "a/sub", lesion_of())
    marked = processed(tmp_path / "b/sub", lesion_of(z4=1))
    missing = processed(tmp_path / "c/sub")
    found = [labels(cutter(start=3, stop=4).cases(scan("test", None), path)) for path in (empty, marked, missing)]
    assert found == [{3: 0, 4: 0}, {4: 1}, {3: 0, 4: 0}]


def test_without_pixel_truth_every_slice_has_the_label_of_its_subject(tmp_path: Path) -> None:
    folder = processed(tmp_path / "sub")
    cases = cutter(has_masks=False, start=3, stop=5).cases(scan("test", True, "tumour"), folder)
    assert labels(cases) == {3: 1, 4: 1, 5: 1}
    assert {case.pathology for case in cases} == {"tumour"}
    assert labels(cutter(has_masks=False, start=3, stop=5).cases(scan("test", False), folder)) == {3: 0, 4: 0, 5: 0}


@pytest.mark.parametrize(
    ("split", "keep", "expected", "left_out"),
    [
        ("test", None, {2: 0, 5: 1, 9: 0, 12: 1}, {}),
        ("test", "normal", {2: 0, 9: 0}, {"abnormal_not_kept": 2}),
        ("test", "abnormal", {5: 1, 12: 1}, {"normal_not_kept": 2}),
        ("train", "normal", {2: 0, 9: 0}, {"lesion_in_train": 2}),
    ],
)
def test_a_scan_may_name_its_slices_and_keep_one_kind_of_them(
    tmp_path: Path, split: str, keep: Any, expected: dict[int, int], left_out: dict[str, int]
) -> None:
    folder = processed(tmp_path / "sub", lesion_of(z4=1, z5=2, z12=1))
    rule = cutter(start=0, stop=3, normal="slices")  # of which only the place is overruled
    chosen = replace(scan(split, True), slices=(12, 2, 5, 9, 5), keep=keep)
    assert labels(rule.cases(chosen, folder)) == expected
    assert rule.left_out == left_out
    assert not rule.without


def test_a_patient_of_whom_normal_slices_are_wanted_does_not_miss_its_lesion(tmp_path: Path) -> None:
    folder = processed(tmp_path / "sub", lesion_of(z4=1))
    rule = cutter(normal="slices")
    rule.cases(replace(scan("test", True), slices=(2, 3), keep="normal"), folder)
    assert rule.without == []
    rule.cases(replace(scan("test", True), slices=(2, 3), keep="abnormal"), folder)
    assert rule.without == ["sub"]


def test_limits_of_area_hold_for_named_slices_too(tmp_path: Path) -> None:
    folder = processed(tmp_path / "sub", lesion_of(z4=4, z5=5, z6=6), lesion_of(z4=9, z5=9, z6=7))
    rule = cutter(min_lesion_mm2=9, min_organ_mm2=15)
    assert labels(rule.cases(replace(scan("valid", True), slices=(4, 5, 6)), folder)) == {5: 1}
    assert rule.left_out == {"lesion_below_limit": 1, "too_little_organ": 1}


@pytest.mark.parametrize("slices", [(3, 16), (-1, 3), ()])
def test_a_named_slice_that_the_volume_has_not_is_a_problem(tmp_path: Path, slices: tuple[int, ...]) -> None:
    with pytest.raises(
        CaseProblem, match=r"no_slice: found a volume of \(24, 20, 16\) voxels, expected slices"
    ) as caught:
        cutter().cases(replace(scan("test", False), slices=slices), processed(tmp_path / "sub"))
    assert caught.value.row["case"] == "sub"


@pytest.mark.parametrize(
    ("spatial_steps", "plane", "named"),
    [(["resample"], "axial", "after `resample`"), ([], "sagittal", "after `plane: sagittal`")],
)
def test_slices_named_by_index_need_a_chain_that_leaves_the_index_its_meaning(
    cohort: Path, monkeypatch: pytest.MonkeyPatch, spatial_steps: list[Any], plane: str, named: str
) -> None:
    scans = Volumes.scans
    monkeypatch.setattr(Volumes, "scans", lambda self: [replace(each, slices=(7, 8)) for each in scans(self)])
    steps = [{"organ_mask": {"limits_ml": [1, 20]}}, *spatial_steps]
    with pytest.raises(AnomedError, match=f"domains.heads: the source names axial slices .*s1.*{named}"):
        intensity(cohort, block(spatial=steps, plane=plane))
    made = Prepared(intensity(cohort, block(normal="slices")))
    assert set(made.table.image_id.str[-3:]) == {"007", "008"}
    assert made.clinical == {name: {"slice": int(name[-3:])} for name in made.table.image_id}


@pytest.mark.parametrize(
    ("code", "split", "abnormal", "lesion", "rule", "found"),
    [
        ("missing_lesion", "test", True, None, {}, "no lesion mask"),
        ("empty_mask", "test", True, lesion_of(), {}, "an empty lesion mask"),
        ("mask_in_normal", "test", False, lesion_of(z4=1, z5=2), {}, "6 mm2 of lesion"),
        ("mask_in_normal", "test", False, lesion_of(z9=1), {"stop": 3}, "2 mm2 of lesion"),  # also where none is cut
        ("abnormal_in_train", "train", None, lesion_of(z4=1), {}, "a subject with a lesion"),
        ("abnormal_in_train", "train", True, None, {"has_masks": False}, "a subject with a lesion"),
        ("no_slice", "test", False, None, {"start": 16}, r"\(24, 20, 16\) voxels"),
    ],
)
def test_a_subject_that_contradicts_itself_is_named_with_what_to_do(
    tmp_path: Path, code: str, split: str, abnormal: bool, lesion: Any, rule: dict[str, Any], found: str
) -> None:
    with pytest.raises(CaseProblem, match=found) as caught:
        cutter(**rule).cases(scan(split, abnormal), processed(tmp_path / "sub", lesion))
    assert caught.value.row["case"] == "sub"
    assert caught.value.row["code"] == code
    assert caught.value.row["hint"]


# The whole command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plane", ["axial", "coronal", "sagittal"])
def test_every_pixel_lands_where_the_plane_shows_the_original_voxel(finished: Path, plane: str) -> None:
    axis = AXES[plane]
    made = Prepared(intensity(finished, block(plane=plane, stop=SHAPE[axis] - 1), plane))
    rows = {row.image_id: row for row in made.table.itertuples()}
    left_out = {"too_little_organ": 0, "normal_slice_of_a_patient": 0}
    wanted = set()
    for name, (split, _, pathology, lesion, _) in COHORT.items():
        grey = np.where(ORGAN > 0, (values(name) + 100).clip(0, 255), 0)
        for z in range(SHAPE[axis]):
            organ, picture = (volumes.cut(array, plane, z) for array in (ORGAN > 0, grey))
            truth = np.zeros_like(organ) if lesion is None else volumes.cut(lesion > 0, plane, z)
            if not organ.any() or (lesion is not None and not truth.any()):
                left_out["normal_slice_of_a_patient" if organ.any() else "too_little_organ"] += 1
                continue
            wanted.add(f"{name}_{z:03d}")
            row: Any = rows[f"{name}_{z:03d}"]
            assert (row.subject_id, row.split, row.source_file) == (name, split, f"{name}.nii.gz")
            assert (row.label, row.pathology) == (truth.any(), pathology)
            assert (row.native_h, row.native_w) == organ.shape
            assert row.sha256 == records.digest_file(finished / f"{name}.nii.gz")
            np.testing.assert_array_equal(made.images[row.row], images.resize(picture.astype(np.uint8), 32))
            if split != "train":
                np.testing.assert_array_equal(made.native(row.image_id), picture)
                np.testing.assert_array_equal(made.mask(row.mask_row), truth)
                np.testing.assert_array_equal(made.foreground(row.mask_row), organ)
    assert rows.keys() == wanted
    assert made.card["left_out"] == left_out
    assert made.card["volumes"] == len(COHORT)
    assert made.card["fitted"] == {}
    assert made.card["masks"]
    assert made.card["foreground"]


def test_an_axial_lesion_lies_as_a_radiologist_sees_it(finished: Path) -> None:
    """Without `cut`: rows from front to back, the patient's right on the left."""
    made = Prepared(intensity(finished, block(start=6, stop=9), "one"))
    (row,) = made.table[made.table.image_id == "v2_006"].itertuples()
    rows, columns = np.nonzero(made.mask(row.mask_row))
    x, y = np.nonzero(LESION[:, :, 6])  # to the right, to the front
    assert sorted(zip(rows, columns, strict=True)) == sorted(zip(19 - y, 23 - x, strict=True))


def test_millimetres_cut_the_same_slices_as_their_indices(finished: Path) -> None:
    first = Prepared(intensity(finished, block(unit="mm", start=-6, stop=0, step=3), "mm"))  # z = 1.5 i - 12
    second = Prepared(intensity(finished, block(start=4, stop=8, step=2), "index"))
    assert first.hash == second.hash
    assert set(first.table.image_id.str[-3:]) == {"004", "006", "008"}


def test_a_domain_without_masks_or_organ_has_labels_alone(finished: Path, tmp_path: Path) -> None:
    masks = shutil.ignore_patterns("*_lesion.nii.gz", "*_organ.nii.gz")
    root = shutil.copytree(finished, tmp_path / "raw", ignore=masks)
    parameters = block(spatial=[], start=6, stop=7) | {"lesion": None, "organ": None}
    spatial(root, parameters)
    made = Prepared(intensity(root, parameters))
    assert not made.card["masks"]
    assert not made.card["foreground"]
    assert made.table.mask_row.isna().all()
    assert dict(zip(made.table.image_id.str[:2], made.table.label, strict=True)) == {
        name: entry[1] for name, entry in COHORT.items()
    }
    picture = volumes.cut((values("s2") + 100).clip(0, 255), "axial", 6)
    np.testing.assert_array_equal(made.native("s2_006"), picture)


def test_the_page_of_quality_control_shows_every_volume(finished: Path) -> None:
    out = intensity(finished, block(min_organ_mm2=500), "page")
    text = (out / "qc.html").read_text(encoding="utf-8")
    links = [out / unquote(link) for link in re.findall(r'<img[^>]* src="([^"]+)"', text)]
    assert [link.resolve() for link in links] == [
        finished.parent / "_spatial" / name / "qc.png" for name in sorted(COHORT)
    ]
    assert all(link.is_file() for link in links)
    left_out = records.read_card(out / "card.json", "left_out")["left_out"]["too_little_organ"]
    assert re.search(rf"slices left out: too little organ</th><td>{left_out}</td>", text)


def test_the_same_call_gives_the_same_bytes(finished: Path) -> None:
    parameters = block(["nyul"], start=3, stop=9, step=3)
    first = contents(intensity(finished, parameters, "again"))
    assert sorted(first) == [
        "card.json",
        "clinical.jsonl",
        "images.npy",
        "manifest.csv",
        "masks.npz",
        "native.zip",
        "qc.html",
    ]
    assert contents(intensity(finished, parameters, "again")) == first


def test_other_grey_levels_and_slices_leave_the_volumes_untouched(cohort: Path) -> None:
    before = {name: tree(cohort.parent / "_spatial" / name) for name in COHORT}
    first = Prepared(intensity(cohort, block(["z_score"], start=5, stop=9)))
    second = Prepared(intensity(cohort, block(["percentile"], plane="coronal", start=8, stop=9)))
    assert first.hash != second.hash
    spatial(cohort, block(["nyul"]))
    assert {name: tree(cohort.parent / "_spatial" / name) for name in COHORT} == before


def test_slices_stretched_one_by_one_reach_both_ends(finished: Path) -> None:
    made = Prepared(intensity(finished, block(["slice_min_max"], start=4, stop=8), "stretched"))
    for name in made.evaluated().image_id:
        native = made.native(name)
        assert (native.min(), native.max()) == (0, 255)
    organ = volumes.cut(ORGAN > 0, "axial", 4)
    image = np.where(organ, volumes.cut(values("s1"), "axial", 4), 0.0)
    expected = (image - image.min()) / (image.max() - image.min()) * 255
    np.testing.assert_allclose(made.native("s1_004"), expected, atol=0.5 + 1e-4)


def test_a_window_before_the_stretch_clips_first(finished: Path) -> None:
    chain = [{"window": {"range": [-60, 40]}}, "slice_min_max"]
    made = Prepared(intensity(finished, block(chain, start=4, stop=9), "windowed"))
    organ, image = (volumes.cut(array, "axial", 4) for array in (ORGAN > 0, values("s1")))
    expected = np.where(organ, (image.clip(-60, 40) + 60) * 2.55, 0)
    np.testing.assert_allclose(made.native("s1_004"), expected, atol=0.5 + 1e-4)


def changed(root: Path, name: str) -> None:
    """Bend a volume's grey levels, so that landmarks move against each other, and process it again."""
    bent = np.where(ORGAN > 0, (values(name).astype(int) + 200) ** 2 // 10, -1000).astype(np.int16)
    put(root / f"{name}.nii.gz", bent, COHORT[name][4])
    spatial(root, block())


def test_what_is_fitted_comes_from_the_train_volumes_alone(cohort: Path) -> None:
    def fitted() -> Any:
        return Prepared(intensity(cohort, block(["nyul"], start=6, stop=7))).card["fitted"]

    first = fitted()
    levels = [
        np.interp(p := np.percentile(values(name)[ORGAN > 0], first["nyul"]["percentiles"]), p[[0, -1]], [10, 200])
        for name in ("t1", "t2")
    ]
    np.testing.assert_allclose(first["nyul"]["levels"], np.mean(levels, axis=0))
    for name in ("v1", "v2", "s1", "s2"):
        changed(cohort, name)
    assert fitted() == first
    changed(cohort, "t2")
    assert fitted() != first


# Faults ------------------------------------------------------------------------------------------------------------


def relabelled(root: Path, old: str, new: str) -> None:
    path = root / "subjects.csv"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_faulty_subjects_are_all_listed_and_what_was_prepared_stays(cohort: Path) -> None:
    out = intensity(cohort, block(start=6, stop=7))
    assert not (cohort.parent / "problems.csv").exists()
    before = contents(out)
    relabelled(cohort, "s2,test,1,infarct", "s2,test,0,")
    put(cohort / "v1_lesion.nii.gz", 0 * LESION)
    relabelled(cohort, "v1,valid,0,", "v1,valid,1,")
    spatial(cohort, block())
    with pytest.raises(AnomedError, match=r"(?s)1 empty_mask, 1 mask_in_normal; .*s2: mask_in_normal: found .* mm2"):
        intensity(cohort, block(start=6, stop=7))
    assert listed(cohort) == [("v1", "empty_mask"), ("s2", "mask_in_normal")]
    assert contents(out) == before
    assert {path.name for path in cohort.parent.iterdir() if path.name.startswith(".")} == set()


def test_a_patient_in_train_is_refused_unless_slices_may_be_normal(cohort: Path) -> None:
    relabelled(cohort, "v2,valid,1,tumour", "v2,train,,")
    relabelled(cohort, "subject,split,label,pathology", "subject,split,was,pathology")  # left to the voxels
    with pytest.raises(AnomedError, match=r"v2: abnormal_in_train: found a subject with a lesion"):
        intensity(cohort, block())
    made = Prepared(intensity(cohort, block(normal="slices")))
    names = made.table[made.table.subject_id == "v2"].image_id.str[-3:].astype(int)
    free = ORGAN.any((0, 1)) & ~LESION.any((0, 1))
    assert names.tolist() == np.flatnonzero(free).tolist()
    assert made.card["left_out"]["lesion_in_train"] == LESION.any((0, 1)).sum()
    (row,) = made.table[made.table.image_id == "s2_005"].itertuples()
    assert row.label == 0, "a slice of a test patient without lesion is normal now"
    assert not made.mask(row.mask_row).any()


def test_a_volume_that_cannot_be_normalised_is_listed_by_its_subject(cohort: Path) -> None:
    put(cohort / "s1.nii.gz", np.where(ORGAN > 0, 40, -1000).astype(np.int16))
    spatial(cohort, block())
    with pytest.raises(AnomedError, match=r"s1: constant_organ: found 40 at each of the \d+ voxels"):
        intensity(cohort, block(["z_score"], start=6, stop=7))
    assert set(listed(cohort)) == {("s1", "constant_organ")}
    assert not (cohort.parent / "heads").exists()


def test_when_no_volume_meets_the_slices_each_is_listed(cohort: Path) -> None:
    with pytest.raises(AnomedError, match=rf"(?s){len(COHORT)} no_slice; .*change `slices:`"):
        intensity(cohort, block(start=16, stop=20))
    assert listed(cohort) == [(name, "no_slice") for name in sorted(COHORT)]


def test_the_fault_of_a_volume_is_listed_once(cohort: Path) -> None:
    put(cohort / "s1.nii.gz", np.where(ORGAN > 0, 40, -1000).astype(np.int16))
    spatial(cohort, block())
    with pytest.raises(AnomedError, match="constant_organ"):
        intensity(cohort, block(["z_score"], start=6, stop=7))
    assert listed(cohort) == [("s1", "constant_organ")]


def test_a_train_volume_that_cannot_be_fitted_is_listed(cohort: Path) -> None:
    put(cohort / "t1.nii.gz", np.where(ORGAN > 0, 40, -1000).astype(np.int16))
    spatial(cohort, block())
    with pytest.raises(AnomedError, match="t1: constant_organ"):
        intensity(cohort, block(["nyul"], start=6, stop=7))
    assert listed(cohort) == [("t1", "constant_organ")]


def test_a_volume_that_was_damaged_or_never_made_is_named(cohort: Path) -> None:
    path = cohort.parent / "_spatial/s1/image.nii.gz"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AnomedError, match=r"s1/image.nii.gz: not the file that the card beside it describes"):
        intensity(cohort, block())
    shutil.rmtree(path.parent)
    with pytest.raises(AnomedError, match=r"s1/volume.json: not found; the step that makes it has not run"):
        intensity(cohort, block())
    assert not (cohort.parent / "heads").exists()


def test_volumes_of_another_chain_or_subject_are_refused(cohort: Path) -> None:
    with pytest.raises(AnomedError, match="s1: made of another subject or by other spatial steps"):
        intensity(cohort, block(spatial=[{"organ_mask": {"limits_ml": [1, 20]}}, "resample"]))
    out = cohort.parent / "_spatial"
    (out / "t1").rename(out / "kept")
    (out / "t2").rename(out / "t1")
    (out / "kept").rename(out / "t2")
    with pytest.raises(AnomedError, match="t1: made of another subject"):
        intensity(cohort, block())


def test_a_test_split_of_one_class_is_refused_with_what_was_left_out(cohort: Path) -> None:
    with pytest.raises(
        AnomedError, match=r"no abnormal slice in test; slices left out: .*normal_slice.*lesion: s2, v2;"
    ):
        intensity(cohort, block(start=2, stop=3))


def test_patients_without_a_slice_of_their_lesion_are_named(finished: Path) -> None:
    made = Prepared(intensity(finished, block(start=11, stop=12), "upper"))
    assert made.card["without_lesion_slice"] == ["v2"]
    assert "without a slice of their lesion" in (finished.parent / "upper/qc.html").read_text()
