"""Spatial steps: their options, and that each keeps every voxel of image, lesion and organ at its place in the scanner."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK
from nibabel.orientations import apply_orientation, axcodes2ornt, inv_ornt_aff, ornt_transform
from scipy import ndimage
from scipy.spatial.transform import Rotation

from anomed import records, volumes
from anomed.domains.source import Files
from anomed.errors import AnomedError, CaseProblem
from anomed.preprocess import registration, shard, spatial, spatial_steps, steps
from anomed.preprocess.chain import Chain
from anomed.preprocess.spatial_steps import STEPS

SHAPE = (26, 20, 17)
OBLIQUE = np.eye(4)
OBLIQUE[:3, :3] = Rotation.from_euler("xyz", [5, -7, 11], degrees=True).as_matrix() @ np.diag([3.0, 4.0, 5.0])
OBLIQUE[:3, 3] = -41, 17, -29
VOXEL_ML = 0.06
ANYTHING = [0.0, 5000.0]


def chain(*entries: Any) -> list[steps.Step]:
    return steps.parse(entries, STEPS, "spatial")


def blob() -> np.ndarray:
    """An organ without any symmetry: bool, 1230 voxels."""
    organ = np.zeros(SHAPE, bool)
    organ[3:15, 5:15, 4:14] = True
    organ[15:18, 5:9, 4:14] = True
    organ[5:9, 15:16, 4:6] = organ[3, 5, 4:6] = True
    organ[3, 5, 4] = organ[14, 14, 13] = organ[17, 8, 13] = organ[3, 5, 13] = False
    return organ


def head() -> np.ndarray:
    """The organ of values above 60 in a skull of values below 40, air of 0; float32."""
    rng = np.random.default_rng(5)
    organ = blob()
    skull = ndimage.binary_dilation(organ, iterations=2) & ~organ
    return (rng.uniform(60, 120, SHAPE) * organ + rng.uniform(20, 40, SHAPE) * skull).astype(np.float32)


def classes() -> np.ndarray:
    """Three lesions of the labels 1, 2 and 4, each elsewhere."""
    label = np.zeros(SHAPE, np.uint8)
    label[4:8, 6:9, 5:8] = 1
    label[10:14, 6:9, 9:12] = 2
    label[5:8, 11:14, 10:13] = 4
    return label


def nifti(path: Path, data: np.ndarray, affine: np.ndarray, codes: str = "RAS", **fields: Any) -> Path:
    """A file of a RAS array with its axes in another order."""
    way = ornt_transform([[0, 1], [1, 1], [2, 1]], axcodes2ornt(codes))
    data = data.astype(np.uint8) if data.dtype == bool else data
    image = nibabel.Nifti1Image(apply_orientation(data, way), affine @ inv_ornt_aff(way, data.shape))
    image.set_sform(image.affine, 4)
    image.set_qform(image.affine, 2)
    for key, value in fields.items():
        image.header[key] = value
    nibabel.save(image, path)
    return path


def scan(folder: Path, **masks: np.ndarray) -> Files:
    """The head, stored in another axis order than its masks."""
    image = nifti(folder / "image.nii.gz", head(), OBLIQUE, "PSR")
    return Files(image, **{name: nifti(folder / f"{name}.nii.gz", mask, OBLIQUE) for name, mask in masks.items()})


def load(files: Files) -> dict[str, Any]:
    return spatial.LoadVolumed()({"subject": "s1", "files": files})


def step(name: str, data: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The data after one step."""
    made = chain({name: options})
    transform: Any = spatial.compose(made, spatial_steps.files(made, "spatial")).transforms[1]
    found: dict[str, Any] = transform(data)
    return found


def refused(code: str, found: str, do: Any) -> None:
    with pytest.raises(CaseProblem, match=found) as caught:
        do()
    assert caught.value.row["code"] == code
    assert caught.value.row["case"].startswith("s1")
    assert caught.value.row["hint"]


def centre(where: np.ndarray, affine: np.ndarray) -> np.ndarray:
    """Centre of gravity of a mask in mm."""
    place: np.ndarray = (affine @ [*np.argwhere(where).mean(axis=0), 1])[:3]
    return place


# Options and order ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["skull_stripp"], "^spatial: unknown step 'skull_stripp'; did you mean 'skull_strip'\\?$"),
        (["bias_field", {"bias_field": {"shrink": 2}}], "^spatial: the step 'bias_field' stands there twice"),
        ([{"register": {}, "bias_field": {}}], "^spatial: found {.*expected a step's name or one name with its"),
        ([["register"]], "^spatial: found \\['register'\\], expected a step's name"),
        ([{"register": {"spacig": 2}}], "^spatial.register.spacig: unknown key; did you mean 'spacing'\\?$"),
        ([{"register": {"spacing": "2"}}], "^spatial.register.spacing: .*number, found '2'$"),
        ([{"register": {"transform": "elastic"}}], "^spatial.register.transform: .*'rigid' or 'affine'"),
        ([{"skull_strip": {"limits_ml": [700.0]}}], "^spatial.skull_strip.limits_ml: .*the lower one first"),
        ([{"skull_strip": {"backend": "command"}}], "^spatial.skull_strip: .*`program` belongs to `backend: command`"),
        ([{"skull_strip": {"program": "hd-bet"}}], "^spatial.skull_strip: .*`program` belongs to `backend: command`"),
        (
            [{"skull_strip": {"backend": "command", "program": "bet", "arguments": "{image} -m"}}],
            "^spatial.skull_strip: .*arguments must name {image} and {mask}",
        ),
    ],
)
def test_a_faulty_list_of_steps_is_refused_with_its_key(entries: list[Any], message: str) -> None:
    with pytest.raises(AnomedError, match=message):
        chain(*entries)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["skull_strip", "organ_mask"], "^chain: skull_strip and organ_mask exclude each other; keep one$"),
        (["register", "resample"], "^chain: register and resample exclude each other; keep one$"),
        (["register", "bias_field"], "^chain: register changes the grid, so it comes last; move bias_field before it$"),
        (["register"], r"^chain: register compares with a stripped template; put skull_strip before it"),
        (["resample", "skull_strip"], "^chain: resample changes the grid, so it comes last; move skull_strip before"),
    ],
)
def test_steps_that_exclude_each_other_or_stand_after_a_change_of_grid_are_refused(
    entries: list[str], message: str
) -> None:
    with pytest.raises(AnomedError, match=message):
        spatial_steps.check_order(chain(*entries), "chain")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"register": {"template": "none.nii"}}, "template: found 'none.nii', expected mni152 or the path of a NIfTI"),
        (
            {"skull_strip": {"backend": "command", "program": "no-such-bet"}},
            "program: found 'no-such-bet', which is no executable here; give its path",
        ),
    ],
)
def test_a_missing_template_or_program_is_named_with_its_key(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(AnomedError, match=f"^spatial.{next(iter(entry))}.{message}"):
        spatial_steps.files(chain(entry), "spatial")


def test_a_chain_names_its_key_and_hides_paths_but_no_option() -> None:
    block = {"intensity": ["z_score"], "slices": {"start": 0, "stop": 9, "step": 3}}
    with pytest.raises(AnomedError, match=r"^preprocess.head.spatial: register changes the grid"):
        Chain({**block, "spatial": ["register", "bias_field"]}, "preprocess.head")
    with pytest.raises(AnomedError, match=r"^preprocess.head.spatial.register.template: found '/none.nii'"):
        Chain({**block, "spatial": ["skull_strip", {"register": {"template": "/none.nii"}}]}, "preprocess.head").files()
    made = [
        Chain({**block, "spatial": ["skull_strip", {"register": options}]}, "x").canonical()
        for options in ({"template": "/a.nii"}, {"template": "/b.nii"}, {"template": "/a.nii", "spacing": 2.0}, {})
    ]
    assert made[0] == made[1]
    assert len({records.digest(chain) for chain in made}) == 3
    assert made[3]["spatial"][1]["register"]["template"] == "mni152"


# Loading and masking ----------------------------------------------------------------------------------------------


def test_image_and_masks_are_loaded_onto_one_grid_and_labels_keep_their_classes(tmp_path: Path) -> None:
    found = load(scan(tmp_path, lesion=classes(), organ=blob()))
    np.testing.assert_array_equal(spatial.array(found["image"]), head())
    np.testing.assert_array_equal(spatial.array(found["lesion"]), classes())
    np.testing.assert_array_equal(spatial.array(found["given"]), blob())
    for key in ("image", "lesion", "given"):
        np.testing.assert_allclose(spatial.affine_of(found[key]), OBLIQUE, atol=1e-4)
    assert found["facts"]["lesion_ml"] == pytest.approx((classes() > 0).sum() * VOXEL_ML, rel=1e-5)
    assert set(found["inputs"]) == {"image", "lesion", "organ"}


def test_a_mask_on_another_grid_or_of_huge_labels_is_refused(tmp_path: Path) -> None:
    files = scan(tmp_path)
    moved, large = tmp_path / "moved.nii.gz", tmp_path / "large.nii.gz"
    nifti(moved, classes(), OBLIQUE + np.array([[0, 0, 0, 2.0], *[[0] * 4] * 3]))
    nifti(large, classes().astype(np.int16) * 300, OBLIQUE)
    refused("geometry", "moved.nii.gz.*2.00 mm apart", lambda: load(Files(files.image, lesion=moved)))
    refused("geometry", "moved.nii.gz", lambda: load(Files(files.image, organ=moved)))
    refused("label_values", "large.nii.gz.*1200.*at most 255", lambda: load(Files(files.image, lesion=large)))


@pytest.mark.parametrize(
    ("name", "options"), [("organ_mask", {}), ("skull_strip", {"backend": "mask", "limits_ml": [10.0, 100.0]})]
)
def test_the_organ_file_masks_the_image_and_its_absence_is_refused(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    found = step(name, load(scan(tmp_path, organ=2 * blob().astype(np.uint8))), **options)
    np.testing.assert_array_equal(spatial.array(found["image"]), head() * blob())
    np.testing.assert_array_equal(spatial.array(found["organ"]), blob())
    assert found["facts"]["organ_ml"] == pytest.approx(blob().sum() * VOXEL_ML, rel=1e-5)
    assert "given" not in found
    refused("missing_organ", "no organ file", lambda: step(name, load(scan(tmp_path)), **options))


def test_the_backend_none_takes_what_is_not_zero(tmp_path: Path) -> None:
    found = step("skull_strip", load(scan(tmp_path, organ=blob())), backend="none", limits_ml=ANYTHING)
    np.testing.assert_array_equal(spatial.array(found["organ"]), head() != 0)
    np.testing.assert_array_equal(spatial.array(found["image"]), head())
    overlap = 2 * blob().sum() / (blob().sum() + (head() != 0).sum())
    assert found["facts"]["dice_to_given_organ"] == pytest.approx(overlap)


@pytest.mark.parametrize("limits", [[80.0, 100.0], [1.0, 70.0]])
def test_an_organ_beyond_the_limits_is_refused(tmp_path: Path, limits: list[float]) -> None:
    data = load(scan(tmp_path, organ=blob()))
    expected = f"organ of 7[0-9] ml, expected {limits[0]:g} to {limits[1]:g} ml"
    refused("implausible_mask", expected, lambda: step("organ_mask", data, limits_ml=limits))


def test_an_empty_organ_file_is_refused(tmp_path: Path) -> None:
    data = load(scan(tmp_path, organ=np.zeros(SHAPE, bool)))
    refused("implausible_mask", "organ of 0 ml", lambda: step("organ_mask", data))


def program(folder: Path, *lines: str) -> str:
    """An executable that is called as `-i IMAGE -o MASK`; returns its path."""
    path = folder / "bet"
    first = ["import sys, nibabel, numpy as np", "image, out = nibabel.load(sys.argv[2]), sys.argv[4]"]
    body = [*first, "mask = (image.get_fdata() > 50).astype(np.uint8)", *lines]
    path.write_text("\n".join([f"#!{sys.executable}", *body]) + "\n")
    path.chmod(0o755)
    return str(path)


FLIPPED = "image.affine @ np.array([[-1, 0, 0, 25], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])"


@pytest.mark.parametrize(
    "line",
    [
        "nibabel.save(nibabel.Nifti1Image(mask, image.affine), out)",
        f"nibabel.save(nibabel.Nifti1Image(mask[::-1], {FLIPPED}), out)",
        "nibabel.save(nibabel.Nifti1Image(mask, image.affine), out.replace('.nii', '_bet.nii'))",
    ],
    ids=["plain", "other axis order", "named as HD-BET does"],
)
def test_a_program_finds_the_brain(tmp_path: Path, line: str) -> None:
    options = {"backend": "command", "program": program(tmp_path, line), "limits_ml": ANYTHING}
    found = step("skull_strip", load(scan(tmp_path)), **options)
    np.testing.assert_array_equal(spatial.array(found["organ"]), blob())
    np.testing.assert_array_equal(spatial.array(found["image"]), head() * blob())


@pytest.mark.parametrize(
    ("lines", "code", "message"),
    [
        (["sys.exit('no GPU\\nhere')"], "strip_failed", "bet ended with code 1 and no mask: no GPU here"),
        (["print('half way', file=sys.stderr)", "sys.exit(3)"], "strip_failed", "code 3 and no mask: half way, "),
        (["nibabel.save(nibabel.Nifti1Image(mask, image.affine), out)", "sys.exit(3)"], "strip_failed", "3 and a mask"),
        ([], "strip_failed", "code 0 and no mask"),
        (["nibabel.save(nibabel.Nifti1Image(mask[1:], image.affine), out)"], "geometry", "25 x 20 x 17"),
        (["open(out, 'w').close()"], "unreadable_volume", "mask of bet"),
    ],
)
def test_a_program_that_fails_fails_the_case_with_its_last_words(
    tmp_path: Path, lines: list[str], code: str, message: str
) -> None:
    options = {"backend": "command", "program": program(tmp_path, *lines), "limits_ml": ANYTHING}
    data = load(scan(tmp_path))
    refused(code, message, lambda: step("skull_strip", data, **options))


def test_other_braces_of_the_arguments_reach_the_program(tmp_path: Path) -> None:
    save = "nibabel.save(nibabel.Nifti1Image(mask, image.affine), out)"
    options = {"backend": "command", "program": program(tmp_path, "assert sys.argv[6] == '{gpu}'", save)}
    arguments = "-i {image} -o {mask} -d '{gpu}'"
    found = step("skull_strip", load(scan(tmp_path)), **options, arguments=arguments, limits_ml=ANYTHING)
    np.testing.assert_array_equal(spatial.array(found["organ"]), blob())


def test_a_program_of_no_known_format_fails_the_case(tmp_path: Path) -> None:
    path = tmp_path / "bet"
    path.write_bytes(b"\x00\x01\x02")
    path.chmod(0o755)
    options = {"backend": "command", "program": str(path), "limits_ml": ANYTHING}
    refused("strip_failed", "bet: ", lambda: step("skull_strip", load(scan(tmp_path)), **options))


def test_the_organ_is_written_on_the_scans_own_grid_with_its_header(tmp_path: Path) -> None:
    image = nifti(tmp_path / "a.nii.gz", head(), OBLIQUE, "LAS", descrip=b"ward 3", xyzt_units=10)
    (tmp_path / "out").mkdir()
    made = chain({"skull_strip": {"backend": "none", "limits_ml": ANYTHING}}, {"resample": {"spacing": 6.0}})
    shard.process("s1", Files(image), made, {}, tmp_path / "out")
    old, new = nibabel.load(image), nibabel.load(tmp_path / "out" / "organ_native.nii.gz")
    np.testing.assert_array_equal(np.asarray(new.dataobj), old.get_fdata() != 0)
    assert new.get_data_dtype() == np.uint8
    for key in ("qform_code", "sform_code", "srow_x", "srow_z", "quatern_c", "pixdim", "xyzt_units", "descrip"):
        np.testing.assert_array_equal(new.header[key], old.header[key])


# Bias field and resampling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("organ", [True, False])
def test_bias_field_flattens_a_smooth_field_and_keeps_the_level(organ: bool) -> None:
    shape, affine = (40, 52, 36), np.diag([4.0, 3.5, 4.5, 1])
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, size) for size in shape), indexing="ij")
    inside = (x / 0.8) ** 2 + (y / 0.85) ** 2 + ((z + 0.1) / 0.75) ** 2 < 1
    core = ((x - 0.2) / 0.4) ** 2 + (y / 0.5) ** 2 + (z / 0.4) ** 2 < 1
    noise = np.random.default_rng(2).normal(1, 0.01, shape)
    image = np.where(inside, np.where(core, 160, 100), 0) * np.exp(0.35 * x - 0.25 * y * z + 0.2 * z) * noise
    data = {"subject": "s1", "image": spatial.tensor(image.astype(np.float32), affine), "facts": {}}
    if organ:
        data["organ"] = spatial.tensor(inside.astype(np.uint8), affine)
    found, again = step("bias_field", data), step("bias_field", data)
    flat, tissue = spatial.array(found["image"]), inside & ~core
    before, after = (values[tissue].std() / values[tissue].mean() for values in (image, flat))
    assert after < before / 2, (before, after)
    assert np.median(flat[tissue]) == pytest.approx(np.median(image[tissue]), rel=0.1)
    assert not flat[~inside].any()
    assert 10 < found["facts"]["bias_percent"] < 40
    np.testing.assert_array_equal(flat, spatial.array(again["image"]))


def test_bias_field_refuses_hounsfield_units(tmp_path: Path) -> None:
    image = nifti(tmp_path / "ct.nii.gz", head() - 100, OBLIQUE)
    organ = nifti(tmp_path / "organ.nii.gz", blob(), OBLIQUE)
    data = step("organ_mask", load(Files(image, organ=organ)))
    refused("negative_values", r"down to -39\.\d+.*take bias_field out", lambda: step("bias_field", data))


@pytest.mark.parametrize("spacing", [2.0, 5.5])
def test_resampling_keeps_every_value_at_its_place(tmp_path: Path, spacing: float) -> None:
    weights = np.array([1.0, -2.0, 0.5, 300])  # a value that is linear in mm tells where it was taken
    grid = np.stack([*np.meshgrid(*map(np.arange, SHAPE), indexing="ij"), np.ones(SHAPE)], axis=-1)
    ramp = nifti(tmp_path / "ramp.nii.gz", (grid @ OBLIQUE.T @ weights).astype(np.float32), OBLIQUE, "ASL")
    masks = scan(tmp_path, lesion=classes(), organ=blob())
    data = step("organ_mask", load(Files(ramp, masks.lesion, masks.organ)))
    data["image"] = load(Files(ramp))["image"]
    found = step("resample", data, spacing=spacing)
    image, affine = spatial.array(found["image"]), spatial.affine_of(found["image"])
    np.testing.assert_allclose(np.linalg.norm(affine[:3, :3], axis=0), spacing, rtol=1e-6)
    places = np.stack([*np.meshgrid(*map(np.arange, image.shape), indexing="ij"), np.ones(image.shape)], axis=-1)
    native = (places @ affine.T @ np.linalg.inv(OBLIQUE).T)[..., :3]
    known = ((native >= 0) & (native <= np.array(SHAPE) - 1)).all(axis=-1)
    assert known.mean() > 0.7
    np.testing.assert_allclose(image[known], (places @ affine.T @ weights)[known], atol=0.01)
    label = spatial.array(found["lesion"])
    assert label.dtype == np.uint8
    assert set(np.unique(label)) == {0, 1, 2, 4}
    for number in (1, 2, 4):
        apart = centre(label == number, affine) - centre(classes() == number, OBLIQUE)
        assert np.linalg.norm(apart) < max(spacing, 5) / 2, number
    assert spatial.array(found["organ"]).sum() * spacing**3 / 1000 == pytest.approx(blob().sum() * VOXEL_ML, rel=0.1)


# Registration -----------------------------------------------------------------------------------------------------

MOVED = np.eye(4)  # point of the template to point of the head, mm
MOVED[:3, :3] = Rotation.from_euler("xyz", [7, -5, 9], degrees=True).as_matrix() @ np.diag([1.07, 0.94, 1.03])
MOVED[:3, 3] = 9, -14, 6
LESIONS = {1: (32.0, -22.0, 30.0), 2: (-36.0, 20.0, 14.0), 4: (14.0, -62.0, 26.0)}  # mm in the template
HEAD_SHAPE = (46, 58, 44)
HEAD_AFFINE = np.eye(4)
HEAD_AFFINE[:3, :3] = 4 * Rotation.from_euler("xyz", [4, 6, -8], degrees=True).as_matrix()
HEAD_AFFINE[:3, 3] = [9, -32, 14] - HEAD_AFFINE[:3, :3] @ ((np.array(HEAD_SHAPE) - 1) / 2)
REGISTER: dict[str, Any] = {"spacing": 4.0, "sampling": 0.05}


def registration_chain(**options: Any) -> list[steps.Step]:
    strip = {"skull_strip": {"backend": "none", "limits_ml": ANYTHING}}
    return chain(strip, {"register": REGISTER | options})


def template() -> tuple[np.ndarray, np.ndarray]:
    image = nibabel.load(spatial_steps.files(registration_chain(), "")["template"])
    return np.asarray(image.dataobj, np.float32), image.affine


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The template at 4 mm, moved, of another contrast, with three lesions, in files of two axis orders."""
    data, affine = template()
    back = np.linalg.inv(MOVED) @ HEAD_AFFINE
    way = np.linalg.inv(affine) @ back
    image = ndimage.affine_transform(
        ndimage.gaussian_filter(data, 1.2), way[:3, :3], way[:3, 3], HEAD_SHAPE, order=1, prefilter=False
    )
    image[image < 0.05 * image.max()] = 0
    places = np.stack([*np.meshgrid(*map(np.arange, HEAD_SHAPE), indexing="ij"), np.ones(HEAD_SHAPE)], axis=-1)
    label = np.zeros(HEAD_SHAPE, np.uint8)
    for number, at in LESIONS.items():
        label[np.linalg.norm((places @ back.T)[..., :3] - at, axis=-1) < 10] = number
    folder = tmp_path_factory.mktemp("head")
    grey = (500 * (image / image.max()) ** 0.7).astype(np.int16)
    return Files(
        nifti(folder / "image.nii.gz", grey, HEAD_AFFINE, "PSR"),
        nifti(folder / "label.nii.gz", label, HEAD_AFFINE, "LAS"),
    )


def process(files: Files, out: Path, **options: Any) -> dict[str, Any]:
    made = registration_chain(**options)
    out.mkdir()
    return shard.process("s1", files, made, spatial_steps.files(made, "spatial"), out)[0]


@pytest.fixture(scope="module")
def registered(files: Files, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("registered") / "first"
    return out, process(files, out)


def test_registration_recovers_a_known_rotation_scale_and_shift(registered: tuple[Path, dict[str, Any]]) -> None:
    out, facts = registered
    transform = SimpleITK.ReadTransform(str(out / "transform.tfm"))
    data, affine = template()
    voxels = 9 * np.argwhere(data[::9, ::9, ::9] > 25)
    points = np.column_stack([voxels, np.ones(len(voxels))]) @ affine.T
    lps = np.array([-1, -1, 1])
    found = np.array([transform.TransformPoint((lps * point).tolist()) for point in points[:, :3]]) * lps
    matrix = registration.matrix(SimpleITK.AffineTransform(transform))
    np.testing.assert_allclose((points @ matrix.T)[:, :3], found, atol=1e-6)
    error = np.linalg.norm(found - (points @ MOVED.T)[:, :3], axis=1)
    assert error.mean() < 2
    assert error.max() < 4
    assert facts["template_dice"] > 0.95
    assert (facts["scale_min"], facts["scale_max"]) == pytest.approx((0.94, 1.07), abs=0.03)


def test_lesions_stay_where_they_are_in_the_anatomy_and_are_not_mirrored(
    registered: tuple[Path, dict[str, Any]],
) -> None:
    label = volumes.read_label(registered[0] / "lesion.nii.gz", "label")
    assert set(np.unique(label.data)) == {0, *LESIONS}
    for number, at in LESIONS.items():
        assert np.linalg.norm(centre(label.data == number, label.affine) - at) < 4, number


def test_the_registered_image_is_the_template_on_its_grid(registered: tuple[Path, dict[str, Any]]) -> None:
    image = volumes.read(registered[0] / "image.nii.gz", "image")
    grid = registration.Template.load(spatial_steps.files(registration_chain(), "")["template"], 4.0)
    np.testing.assert_allclose(image.affine, grid.affine, atol=1e-4)
    assert np.corrcoef(image.data[grid.brain], grid.data[grid.brain])[0, 1] > 0.9
    data, affine = template()
    np.testing.assert_allclose(np.linalg.norm(grid.affine[:3, :3], axis=0), 4)
    middles = [a @ [*((np.array(s) - 1) / 2), 1] for a, s in ((affine, data.shape), (grid.affine, grid.data.shape))]
    np.testing.assert_allclose(middles[0], middles[1], atol=1e-6)
    assert (4 * np.array(grid.data.shape) >= data.shape).all()


@pytest.mark.parametrize(
    ("turn", "plane", "said"),
    [
        (2, (1, 2), "180 degrees about the left-right"),
        (1, (0, 1), "about the head-foot"),
        (1, (0, 2), "about the front-"),
    ],
)
def test_a_header_that_names_other_axes_than_the_voxels_have_is_refused(
    files: Files, tmp_path: Path, turn: int, plane: tuple[int, int], said: str
) -> None:
    """Their overlap with the template stays above 0.8: it is no sign."""
    volume = volumes.read(files.image, "head")
    moved = nifti(tmp_path / "turned.nii.gz", np.rot90(volume.data, turn, plane).copy(), volume.affine)
    with pytest.raises(CaseProblem, match=said) as caught:
        process(Files(moved), tmp_path / "out", transform="rigid", iterations=1)  # the fit plays no part in it
    assert caught.value.row["code"] == "wrong_orientation"


def test_registration_repeats_bit_for_bit(
    files: Files, registered: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    assert process(files, tmp_path / "again") == registered[1]
    first, second = (
        {path.name: path.read_bytes() for path in out.iterdir()} for out in (registered[0], tmp_path / "again")
    )
    assert set(first) == {
        "image.nii.gz",
        "lesion.nii.gz",
        "organ.nii.gz",
        "organ_native.nii.gz",
        "transform.tfm",
        "qc.png",
    }
    assert first == second


def test_rigid_registration_keeps_the_size(files: Files, tmp_path: Path) -> None:
    facts = process(files, tmp_path / "out", transform="rigid")
    assert (facts["scale_min"], facts["scale_max"]) == pytest.approx((1, 1), abs=1e-5)
    assert facts["template_dice"] > 0.9


def test_noise_and_a_far_too_small_head_are_no_plausible_registration(files: Files, tmp_path: Path) -> None:
    noise = np.zeros(HEAD_SHAPE, np.float32)
    noise[10:20, 12:30, 8:14] = np.random.default_rng(0).uniform(50, 100, (10, 18, 6))
    nifti(tmp_path / "noise.nii.gz", noise, HEAD_AFFINE)
    head = volumes.read(files.image, "head")
    nifti(tmp_path / "small.nii.gz", head.data, HEAD_AFFINE @ np.diag([0.25, 0.25, 0.25, 1]))
    for name in ("noise", "small"):
        do = partial(process, Files(tmp_path / f"{name}.nii.gz"), tmp_path / name, iterations=20)
        refused("implausible_registration", r"template_dice 0\.[0-5]\d, expected template_dice of 0.75", do)


def test_an_image_without_mass_inside_its_mask_cannot_be_registered(tmp_path: Path) -> None:
    data = step("organ_mask", load(scan(tmp_path, organ=head() == 0)))
    with pytest.raises(CaseProblem, match=r"(?i)mass of the image was zero.*expected overlapping images") as caught:
        step("register", data, **REGISTER)
    assert caught.value.row["code"] == "registration_failed"
    assert "0x" not in str(caught.value), "an address in memory, other in every process"
