"""One volume through any steps: what is written beside it, and one clear line for everything that cannot be done."""

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK
from nibabel.orientations import axcodes2ornt, ornt_transform

from anomed import cli, volumes
from anomed.errors import CaseProblem
from anomed.preprocess import single

SHAPE = (24, 20, 16)
AFFINE = np.array([[2.0, 0, 0, -20], [0, 1, 0, -9], [0, 0, 4.0, -30], [0, 0, 0, 1]])
ORGAN = np.zeros(SHAPE, np.uint8)  # no symmetry: a corner is missing
ORGAN[3:20, 2:17, 1:14] = 1
ORGAN[3:8, 2:6, 1:9] = 0
LESION = np.zeros(SHAPE, np.uint8)
LESION[9:15, 8:11, 4:8] = 1
LESION[9:11, 11:15, 5:10] = 4
VALUES = np.where(ORGAN > 0, np.random.default_rng(5).integers(20, 400, SHAPE) + 100 * LESION, 0).astype(np.int16)


def put(path: Path, data: np.ndarray, codes: str = "PIL") -> Path:
    """Write a RAS array as NIfTI with its axes in another order, as scanners do."""
    way = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(codes))
    nibabel.save(nibabel.Nifti1Image(data, AFFINE).as_reoriented(way), path)
    return path


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Voxels as they lie in the file, and its affine."""
    image: Any = nibabel.load(path)
    return np.asarray(image.dataobj), image.affine


def anomed(*words: Any) -> None:
    cli.main(["prepare", "volume", *map(str, words)])


@pytest.fixture
def head(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return put(tmp_path / "in/head.nii.gz", VALUES)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """In a folder that is not there yet."""
    return tmp_path / "made/new/head.nii.gz"


def written(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir())


def refused(out: Path, *words: Any) -> str:
    """The one message of a call that exits with code 1 and leaves nothing behind."""
    with pytest.raises(SystemExit) as caught:
        anomed(*words)
    message = caught.value.code
    assert isinstance(message, str), "sys.exit prints a text on standard error and exits with 1"
    assert message.startswith("anomed: error: ")
    assert "\n" not in message
    assert not out.parent.exists()
    return message


# What is written ---------------------------------------------------------------------------------------------------


def test_z_score_alone_gives_grey_levels_of_the_whole_volume(head: Path, out: Path) -> None:
    anomed(head, out, "--steps", "z_score")
    data, affine = read(out)
    assert data.dtype == np.uint8
    np.testing.assert_allclose(affine, AFFINE)
    expected = ((VALUES - VALUES.mean()) / VALUES.std() + 3).clip(0, 6) * 255 / 6
    np.testing.assert_allclose(data, expected, atol=0.5 + 1e-3)
    assert written(out) == ["head.nii.gz"]


def test_options_are_written_as_in_params(head: Path, out: Path) -> None:
    steps = "skull_strip: {backend: none, limits_ml: [0, 100]}, window: {range: [100, 610]}"
    anomed(head, out, "--steps", steps)
    data, _ = read(out)
    np.testing.assert_allclose(data, (VALUES.astype(float) - 100).clip(0, 510) / 2, atol=0.5 + 1e-3)
    organ, affine = read(out.with_name("head_organ.nii.gz"))
    np.testing.assert_array_equal(organ, VALUES != 0)
    np.testing.assert_allclose(affine, AFFINE)


def test_the_organ_limits_statistics_and_lies_beside_on_both_grids(head: Path, out: Path, tmp_path: Path) -> None:
    half = ORGAN.copy()
    half[12:] = 0
    anomed(head, out, "--steps", "organ_mask, z_score", "--organ", put(tmp_path / "in/half.nii.gz", half, "LSA"))
    inside = VALUES[half > 0]
    expected = np.where(half > 0, ((VALUES - inside.mean()) / inside.std() + 3).clip(0, 6) * 255 / 6, 0)
    np.testing.assert_allclose(read(out)[0], expected, atol=0.5 + 1e-3)
    np.testing.assert_array_equal(read(out.with_name("head_organ.nii.gz"))[0], half)
    native, affine = read(out.with_name("head_organ_native.nii.gz"))
    expected, original = read(put(tmp_path / "in/half_as_head.nii.gz", half))
    np.testing.assert_array_equal(native, expected)
    np.testing.assert_array_equal(affine, original)
    assert written(out) == ["head.nii.gz", "head_organ.nii.gz", "head_organ_native.nii.gz"]


def test_spatial_steps_alone_keep_the_values(head: Path, out: Path) -> None:
    anomed(head, out, "--steps", "skull_strip: {backend: none, limits_ml: [0, 100]}")
    data, _ = read(out)
    assert data.dtype == np.float32
    np.testing.assert_array_equal(data, VALUES)


def test_the_label_moves_along_and_keeps_its_classes(
    head: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lesion = put(tmp_path / "in/lesion.nii.gz", LESION, "SRA")
    anomed(head, out, "--steps", "resample: {spacing: 2}", "--lesion", lesion)
    data, affine = read(out)
    label, label_affine = read(out.with_name("head_lesion.nii.gz"))
    assert label.dtype == np.uint8
    assert set(np.unique(label)) == {0, 1, 4}
    assert label.shape == data.shape
    np.testing.assert_array_equal(affine, label_affine)
    np.testing.assert_allclose(np.linalg.norm(affine[:3, :3], axis=0), 2)
    places = []
    for mask, grid in ((LESION == 4, AFFINE), (label == 4, label_affine)):
        places.append((grid @ [*np.argwhere(mask).mean(0), 1])[:3])
    np.testing.assert_allclose(places[1], places[0], atol=1)  # mm: half a voxel of the result
    assert data[label > 0].mean() > data[(label == 0) & (data > 0)].mean() + 50
    assert f"lesion_ml: {(LESION > 0).sum() * 0.008:.4g}\n" in capsys.readouterr().out


def test_registration_writes_the_transform_and_prints_what_it_measured(
    head: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = put(tmp_path / "in/template.nii.gz", VALUES, "RAS")
    steps = f"skull_strip: {{backend: none, limits_ml: [0, 100]}}, register: {{template: {template}, transform: rigid, spacing: 2}}"
    anomed(head, out, "--steps", f"{steps}, percentile")
    data, affine = read(out)
    assert data.dtype == np.uint8
    np.testing.assert_allclose(np.linalg.norm(affine[:3, :3], axis=0), 2)
    transform = SimpleITK.ReadTransform(str(out.with_name("head_transform.tfm")))
    for corner in ((-10.0, 5.0, 0.0), (8.0, -3.0, 12.0)):
        np.testing.assert_allclose(transform.TransformPoint(corner), corner, atol=1)  # mm: a head onto itself
    assert written(out) == ["head.nii.gz", "head_organ.nii.gz", "head_organ_native.nii.gz", "head_transform.tfm"]
    lines = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert lines.keys() == {"organ_ml", "metric", "scale_min", "scale_max", "template_dice"}
    assert (lines["scale_min"], lines["scale_max"]) == ("1", "1")


def test_slice_min_max_stretches_every_axial_slice_after_the_window(head: Path, out: Path) -> None:
    anomed(head, out, "--steps", "window: {range: [-100, 300]}, slice_min_max")
    data, _ = read(out)
    for z in range(SHAPE[2]):
        plane = VALUES[:, :, z].clip(0, 300).astype(float)
        np.testing.assert_allclose(data[:, :, z], plane * 255 / max(plane.max(), 1), atol=0.5 + 1e-3)


def test_a_nrrd_is_read_as_the_nifti_of_the_same_voxels(head: Path, out: Path, tmp_path: Path) -> None:
    steps = "--steps", "z_score: {window: [-2, 4]}"
    anomed(head, out, *steps)
    nrrd = tmp_path / "in/head.nrrd"
    raw: Any = nibabel.load(head)
    SimpleITK.WriteImage(volumes.to_sitk(np.asarray(raw.dataobj), raw.affine), str(nrrd))
    other = out.with_name("other.nii.gz")
    anomed(nrrd, other, *steps)
    np.testing.assert_array_equal(read(other)[0], read(out)[0])
    np.testing.assert_allclose(read(other)[1], AFFINE, atol=1e-6)


def test_the_same_call_gives_the_same_bytes_over_what_it_wrote_before(head: Path, out: Path, tmp_path: Path) -> None:
    words = "--steps", "organ_mask, percentile", "--organ", put(tmp_path / "in/organ.nii.gz", ORGAN)
    anomed(head, out, *words)
    first = {path.name: path.read_bytes() for path in out.parent.iterdir()}
    anomed(head, out, *words)
    assert {path.name: path.read_bytes() for path in out.parent.iterdir()} == first


# What is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("z_score: {window: [1", "--steps: found 'z_score: {window: [1', expected for example 'skull_strip, "),
        ("zscore", "--steps: unknown step 'zscore'; did you mean 'z_score'?"),
        ("bias_field, regster: {spacing: 2}", "--steps: unknown step 'regster'; did you mean 'register'?"),
        ("register: {spaceing: 2}", "--steps.register.spaceing: unknown key; did you mean 'spacing'?"),
        ("resample: {spacing: -1}", "--steps.resample.spacing: input should be greater than or equal to 0.2, found -1"),
        ("z_score: 5", "--steps.z_score: input should be a valid dictionary"),
        ("[z_score]", "--steps: found ['z_score'], expected a step's name or one name with its options"),
        ("z_score, z_score", "--steps: the step 'z_score' stands there twice; keep one"),
        ("z_score, resample", "--steps: z_score changes grey levels, so it comes after resample"),
        ("bias_field, percentile, register", "--steps: percentile changes grey levels, so it comes after register"),
        ("resample, bias_field", "--steps: resample changes the grid, so it comes last; move bias_field before it"),
        ("skull_strip, organ_mask", "--steps: skull_strip and organ_mask exclude each other; keep one"),
        ("z_score, percentile", "--steps: found z_score, percentile, expected window, one of "),
        ("nyul", "--steps: nyul is fitted on the train volumes of a domain; run it through params.yaml"),
        ("window: {range: [0, 9]}, nyul", "--steps: nyul is fitted on the train volumes of a domain; "),
        ("skull_strip: {backend: command, program: no_such_program}", "--steps.skull_strip.program: found 'no_such_"),
        (
            "skull_strip: {backend: none}, register: {template: none.nii.gz}",
            "--steps.register.template: found 'none.nii.gz', expected mni152 or the ",
        ),
    ],
)
def test_steps_that_cannot_be_run_are_refused_before_anything_is_read(
    head: Path, out: Path, steps: str, message: str
) -> None:
    assert refused(out, head, out, "--steps", steps).removeprefix("anomed: error: ").startswith(message)


@pytest.mark.parametrize("name", ["head.nii", "head.nrrd", "head"])
def test_another_ending_of_the_output_is_refused(head: Path, out: Path, name: str) -> None:
    path = out.with_name(name)
    expected = f"anomed: error: {path}: found another ending, expected a name ending in .nii.gz"
    assert refused(out, head, path, "--steps", "z_score") == expected


@pytest.mark.parametrize("flag", ["image", "--lesion", "--organ"])
def test_a_file_that_is_not_there_is_named(head: Path, out: Path, tmp_path: Path, flag: str) -> None:
    missing = tmp_path / "in/absent.nii.gz"
    words = [missing, out] if flag == "image" else [head, out, flag, missing]
    message = f"anomed: error: {missing}: not found; give the path of a volume"
    assert refused(out, *words, "--steps", "z_score") == message


def test_a_volume_that_cannot_be_used_is_one_line_and_leaves_nothing(head: Path, out: Path, tmp_path: Path) -> None:
    shifted = AFFINE.copy()
    shifted[0, 3] += 3
    nibabel.save(nibabel.Nifti1Image(LESION, shifted), tmp_path / "in/shifted.nii.gz")
    organ = put(tmp_path / "in/organ.nii.gz", ORGAN)
    (tmp_path / "in/text.nii.gz").write_text("no volume")
    flat = put(tmp_path / "in/flat.nii.gz", np.where(ORGAN > 0, 40, 0).astype(np.int16))
    cases: list[tuple[str, list[Any]]] = [
        ("head.nii.gz: missing_organ: found no organ file", [head, out, "--steps", "organ_mask"]),
        (
            "head.nii.gz: implausible_mask: found a brain or organ of 25 ml, expected 700 to 2300 ml",
            [head, out, "--steps", "skull_strip: {backend: none}, z_score"],
        ),
        (
            "shifted.nii.gz: geometry: found 24 x 20 x 16 voxels",
            [head, out, "--steps", "z_score", "--lesion", tmp_path / "in/shifted.nii.gz"],
        ),
        ("text.nii.gz: unreadable_volume", [tmp_path / "in/text.nii.gz", out, "--steps", "z_score"]),
        (
            "flat.nii.gz: constant_organ: found 40 at each of the",
            [flat, out, "--steps", "organ_mask, percentile", "--organ", organ],
        ),
    ]
    for message, words in cases:
        assert message in refused(out, *words)


def test_a_fault_of_a_volume_is_a_case_problem_with_a_hint(head: Path, out: Path) -> None:
    with pytest.raises(CaseProblem) as caught:
        single.volume(head, out, "organ_mask", None, None)
    assert caught.value.row["code"] == "missing_organ"
    assert caught.value.row["case"] == "head.nii.gz"
    assert caught.value.row["hint"]


def test_a_failed_call_leaves_what_stood_there(head: Path, out: Path) -> None:
    anomed(head, out, "--steps", "z_score")
    before = out.read_bytes()
    with pytest.raises(SystemExit):
        anomed(head, out, "--steps", "organ_mask, percentile")
    assert out.read_bytes() == before
    assert written(out) == ["head.nii.gz"]


@pytest.mark.parametrize("flag", ["image", "--lesion", "--organ"])
def test_no_input_is_ever_overwritten(tmp_path: Path, flag: str) -> None:
    names = {"image": "scan.nii.gz", "--lesion": "scan_lesion.nii.gz", "--organ": "scan_organ.nii.gz"}
    image = put(tmp_path / ("scan.nii.gz" if flag == "image" else "raw.nii.gz"), VALUES)
    mask = put(tmp_path / names[flag], ORGAN) if flag != "image" else image
    before = mask.read_bytes()
    words = [] if flag == "image" else [flag, mask]
    with pytest.raises(SystemExit):
        anomed(image, tmp_path / "scan.nii.gz", "--steps", "organ_mask" if flag == "--organ" else "resample", *words)
    assert mask.read_bytes() == before
