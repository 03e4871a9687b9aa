"""Volumes: a value at a place in the scanner stays there through every format, and what cannot be trusted is refused."""

import gzip
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import SimpleITK
from nibabel.orientations import axcodes2ornt, inv_ornt_aff, ornt_transform

from anomed import records, volumes
from anomed.errors import CaseProblem

SHAPE = (7, 5, 6)
AFFINE = np.array([[2.0, 0, 0, -11], [0, 1.5, 0, 23], [0, 0, 3.0, -7], [0, 0, 0, 1]])
TURN = 0.2  # radians about the patient's axis
OBLIQUE = np.array([[np.cos(TURN), -np.sin(TURN), 0], [np.sin(TURN), np.cos(TURN), 0], [0, 0, 1]])


@pytest.fixture
def image() -> np.ndarray:
    """int16, all values different: a flip or a swap of axes moves every one."""
    return (np.random.default_rng(4).permutation(np.prod(SHAPE)) - 40).astype(np.int16).reshape(SHAPE)


@pytest.fixture
def oblique() -> np.ndarray:
    affine = AFFINE.copy()
    affine[:3, :3] = OBLIQUE @ AFFINE[:3, :3]
    return affine


def turned(data: np.ndarray, affine: np.ndarray, codes: str) -> tuple[np.ndarray, np.ndarray]:
    """The same volume with its axes in another order."""
    way = ornt_transform([[0, 1], [1, 1], [2, 1]], axcodes2ornt(codes))
    return nibabel.orientations.apply_orientation(data, way), affine @ inv_ornt_aff(way, data.shape)


def nifti(path: Path, data: np.ndarray, affine: np.ndarray, sform: int = 1, qform: int = 1, **fields: Any) -> Path:
    """Written by nibabel; `fields` overwrite the header's, in bytes that nibabel cannot correct."""
    image = nibabel.Nifti1Image(data, affine, dtype=data.dtype)
    image.set_sform(affine, sform)
    image.set_qform(affine, qform)
    raw = image.to_bytes()
    header = nibabel.Nifti1Header(raw[:348], check=False)
    for key, value in fields.items():
        header[key] = value
    raw = header.binaryblock + raw[348:]
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def slices(folder: Path, data: np.ndarray, affine: np.ndarray, **tags: Any) -> list[Path]:
    """A DICOM series of a RAS array; file names run against the positions. A callable tag gets the number of the slice."""
    folder.mkdir(exist_ok=True)
    lps = np.diag([-1, -1, 1, 1]) @ affine
    edges = np.linalg.norm(affine[:3, :3], axis=0)
    cosines = (lps[:3, :2] / edges[:2]).T.ravel()
    paths = []
    for z in range(data.shape[2]):
        image = SimpleITK.GetImageFromArray(np.ascontiguousarray(data[:, :, z].T))
        image.SetSpacing(edges[:2].tolist())
        own = {
            "modality": "CT",
            "series": "1.2.3",
            "instance": f"1.2.3.4.{z}",
            "position": (lps @ [0, 0, z, 1])[:3],
            "orientation": cosines,
            "slope": "1",
            "intercept": "-1024",
        }
        names = {
            "modality": "0008|0060", "series": "0020|000e", "instance": "0008|0018", "position": "0020|0032",
            "orientation": "0020|0037", "slope": "0028|1053", "intercept": "0028|1052",
        }  # fmt: skip
        own |= {key: value(z) if callable(value) else value for key, value in tags.items()}
        for key, value in own.items():
            image.SetMetaData(names[key], value if isinstance(value, str) else "\\".join(f"{v:.10g}" for v in value))
        if data.dtype.kind == "f":
            for key, text in {"0100": "16", "0101": "16", "0102": "15", "0103": "1"}.items():
                image.SetMetaData(f"0028|{key}", text)
        writer = SimpleITK.ImageFileWriter()
        writer.KeepOriginalImageUIDOn()
        paths.append(folder / f"{90 - z}.dcm")
        writer.SetFileName(str(paths[-1]))
        writer.Execute(image)
    return paths


def refused(code: str, path: Path, message: str, read: Any = volumes.read) -> None:
    with pytest.raises(CaseProblem, match=message) as caught:
        read(path, "scan 7")
    assert caught.value.row["code"] == code
    assert caught.value.row["case"] == "scan 7"
    assert caught.value.row["hint"]


@pytest.mark.parametrize("codes", ["RAS", "LPI", "ASR", "PIL", "SLA"])
def test_every_axis_order_gives_the_same_ras_array_and_affine(
    tmp_path: Path, image: np.ndarray, oblique: np.ndarray, codes: str
) -> None:
    data, affine = turned(image, oblique, codes)
    volume = volumes.read(nifti(tmp_path / "a.nii.gz", data, affine), "a")
    assert volume.data.dtype == np.int16
    np.testing.assert_array_equal(volume.data, image)
    np.testing.assert_allclose(volume.affine, oblique, atol=1e-5)
    assert volume.original.shape == data.shape


def test_it_is_what_nibabel_calls_the_closest_canonical_order(tmp_path: Path, image: np.ndarray) -> None:
    affine = AFFINE.copy()
    affine[:3, :3] = np.roll(OBLIQUE, 1, axis=1) @ np.diag([-2.0, 1.5, -3])
    path = nifti(tmp_path / "a.nii", image, affine)
    canonical = nibabel.as_closest_canonical(nibabel.load(path))
    volume = volumes.read(path, "a")
    np.testing.assert_array_equal(volume.data, canonical.get_fdata())
    np.testing.assert_allclose(volume.affine, canonical.affine)


@pytest.mark.parametrize(("codes", "forms"), [("RAS", (1, 1)), ("LPI", (4, 1)), ("ASR", (0, 2)), ("PIL", (3, 0))])
def test_a_mask_goes_back_onto_the_grid_and_header_of_its_file(
    tmp_path: Path, image: np.ndarray, oblique: np.ndarray, codes: str, forms: tuple[int, int]
) -> None:
    data, affine = turned(image, oblique, codes)
    fields: dict[str, Any] = {"descrip": b"scanner of ward 3", "xyzt_units": 10, "scl_slope": 2.0, "cal_max": 900}
    path = nifti(tmp_path / "a.nii.gz", data, affine, *forms, **fields)
    volume = volumes.read(path, "a")
    volumes.write_on_original(tmp_path / "mask.nii.gz", volume.data > 150, volume)
    old, new = nibabel.load(path), nibabel.load(tmp_path / "mask.nii.gz")
    np.testing.assert_array_equal(np.asarray(new.dataobj), old.get_fdata() > 150)
    np.testing.assert_array_equal(new.affine, old.affine)
    assert new.get_data_dtype() == np.uint8
    assert float(new.header["cal_max"]) == 0
    for key in ("sform_code", "qform_code", "quatern_c", "srow_x", "pixdim", "xyzt_units", "descrip"):
        np.testing.assert_array_equal(new.header[key], old.header[key])


def test_a_trailing_axis_of_one_is_no_axis_but_comes_back_in_the_mask(tmp_path: Path, image: np.ndarray) -> None:
    volume = volumes.read(nifti(tmp_path / "a.nii", image[..., None], AFFINE), "a")
    np.testing.assert_array_equal(volume.data, image)
    volumes.write_on_original(tmp_path / "mask.nii.gz", volume.data > 0, volume)
    assert nibabel.load(tmp_path / "mask.nii.gz").shape == (*SHAPE, 1)


def test_a_mask_of_another_format_goes_back_as_nifti(tmp_path: Path, image: np.ndarray, oblique: np.ndarray) -> None:
    SimpleITK.WriteImage(volumes.to_sitk(*turned(image, oblique, "LPI")), tmp_path / "a.nrrd")
    volume = volumes.read(tmp_path / "a.nrrd", "a")
    volumes.write_on_original(tmp_path / "mask.nii.gz", volume.data > 90, volume)
    mask = volumes.read_label(tmp_path / "mask.nii.gz", "mask")
    volumes.check_grid(volume, mask)
    np.testing.assert_array_equal(mask.data, image > 90)
    assert nibabel.aff2axcodes(nibabel.load(tmp_path / "mask.nii.gz").affine) == ("L", "P", "I")


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int32, np.float32, bool])
def test_what_is_written_is_read_again(tmp_path: Path, image: np.ndarray, oblique: np.ndarray, kind: Any) -> None:
    data = (image > 50) if kind is bool else np.abs(image).astype(kind)
    volumes.write(tmp_path / "a.nii.gz", data, oblique)
    volume = volumes.read(tmp_path / "a.nii.gz", "a")
    assert volume.data.dtype == (np.uint8 if kind is bool else kind)
    np.testing.assert_array_equal(volume.data, data)
    np.testing.assert_allclose(volume.affine, oblique, atol=1e-5)
    header = nibabel.load(tmp_path / "a.nii.gz").header
    assert (int(header["sform_code"]), int(header["qform_code"])) == (1, 1)
    assert header.get_xyzt_units()[0] == "mm"


def test_a_sheared_affine_survives_writing(tmp_path: Path, image: np.ndarray) -> None:
    sheared = AFFINE.copy()
    sheared[0, 2] = 0.8
    volumes.write(tmp_path / "a.nii.gz", image, sheared)
    np.testing.assert_allclose(volumes.read(tmp_path / "a.nii.gz", "a").affine, sheared, atol=1e-5)


def test_equal_arrays_give_equal_bytes_whatever_the_name_and_the_memory_order(
    tmp_path: Path, image: np.ndarray
) -> None:
    volumes.write(tmp_path / "first.nii.gz", image, AFFINE)
    volumes.write(tmp_path / "second.nii.gz", np.asfortranarray(image), AFFINE)
    written = (tmp_path / "first.nii.gz").read_bytes()
    assert written == (tmp_path / "second.nii.gz").read_bytes()
    assert written[3:8] == bytes(5)  # no name, no time
    assert volumes.read(tmp_path / "first.nii.gz", "a").sha256 == records.digest(written)


def test_big_endian_and_scaled_files_are_read_as_their_values(tmp_path: Path, image: np.ndarray) -> None:
    big = nibabel.Nifti1Image(image, AFFINE, nibabel.Nifti1Header(endianness=">"))
    big.set_data_dtype(image.dtype)
    big.set_qform(AFFINE, 1)
    nibabel.save(big, tmp_path / "big.nii")
    data = volumes.read(tmp_path / "big.nii", "a").data
    assert data.dtype == np.dtype("=i2")
    np.testing.assert_array_equal(data, image)
    volume = volumes.read(nifti(tmp_path / "b.nii", image, AFFINE, scl_slope=0.5, scl_inter=-3), "b")
    assert volume.data.dtype == np.float32
    np.testing.assert_array_equal(volume.data, image * 0.5 - 3)


def test_nifti_2_is_read(tmp_path: Path, image: np.ndarray) -> None:
    nibabel.save(nibabel.Nifti2Image(image, AFFINE), tmp_path / "a.nii.gz")
    volume = volumes.read(tmp_path / "a.nii.gz", "a")
    np.testing.assert_array_equal(volume.data, image)
    volumes.write_on_original(tmp_path / "mask.nii.gz", image > 0, volume)
    np.testing.assert_array_equal(nibabel.load(tmp_path / "mask.nii.gz").affine, AFFINE)


@pytest.mark.parametrize("forms", [(1, 0), (0, 1)])
def test_one_of_sform_and_qform_is_enough(tmp_path: Path, image: np.ndarray, forms: tuple[int, int]) -> None:
    path = nifti(tmp_path / "a.nii", image, AFFINE, *forms)
    np.testing.assert_allclose(volumes.read(path, "a").affine, AFFINE)


@pytest.mark.parametrize("name", ["a.nrrd", "a.nhdr", "a.mha", "a.mhd"])
def test_nrrd_and_metaimage_give_what_nifti_gives(
    tmp_path: Path, image: np.ndarray, oblique: np.ndarray, name: str
) -> None:
    written = volumes.to_sitk(*turned(image, oblique, "PIL"))
    SimpleITK.WriteImage(written, tmp_path / name)
    volume = volumes.read(tmp_path / name, "a")
    assert volume.data.dtype == np.int16
    np.testing.assert_array_equal(volume.data, image)
    np.testing.assert_allclose(volume.affine, oblique, atol=1e-6)
    SimpleITK.WriteImage(written + 1, tmp_path / name)
    assert volumes.read(tmp_path / name, "a").sha256 != volume.sha256  # also where the voxels lie in a second file


def test_simpleitk_has_the_same_voxel_at_the_same_place_and_gives_it_back(
    image: np.ndarray, oblique: np.ndarray
) -> None:
    itk = volumes.to_sitk(image, oblique)
    right, anterior, superior = (oblique @ [5, 1, 4, 1])[:3]
    index = itk.TransformPhysicalPointToIndex((-right, -anterior, superior))
    assert itk[index] == image[5, 1, 4]
    data, affine = volumes.from_sitk(itk)
    np.testing.assert_array_equal(data, image)
    np.testing.assert_allclose(affine, oblique, atol=1e-9)


def test_a_dicom_series_gives_what_nifti_gives_in_hounsfield_units(
    tmp_path: Path, image: np.ndarray, oblique: np.ndarray
) -> None:
    paths = slices(tmp_path / "s", *turned(image, oblique, "LPS"))
    stored = np.frombuffer(paths[2].read_bytes()[-2 * 35 :], "<u2").reshape(5, 7)
    np.testing.assert_array_equal(stored[::-1, ::-1].T.astype(int) - 1024, image[:, :, 2])
    (tmp_path / "s" / "notes.txt").write_text("of the ward")
    for path in (tmp_path / "s", paths[3]):
        volume = volumes.read(path, "a")
        np.testing.assert_array_equal(volume.data, image)
        np.testing.assert_allclose(volume.affine, oblique, atol=1e-6)
    files = sorted([path.name, records.digest_file(path)] for path in paths)
    assert volume.sha256 == records.digest(files)


def test_a_rescale_slope_of_its_own_in_every_dicom_slice_loses_nothing(tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(1, 900, SHAPE) * 0.5
    data[:, :, 0] = np.rint(data[:, :, 0])
    slices(tmp_path / "s", data, AFFINE, slope=lambda z: "0.5" if z else "1", intercept="0")
    volume = volumes.read(tmp_path / "s", "a")
    np.testing.assert_array_equal(volume.data, data)


@pytest.mark.parametrize("kind", [np.int16, np.float64])
def test_labels_keep_their_numbers(tmp_path: Path, kind: Any) -> None:
    labels = np.zeros(SHAPE, kind)
    labels[1, 2, 3], labels[4, 0, 1], labels[6, 4, 5] = 1, 2, 4
    volume = volumes.read_label(nifti(tmp_path / "a.nii.gz", labels, AFFINE), "a")
    assert volume.data.dtype == np.uint8
    np.testing.assert_array_equal(volume.data, labels)
    volume = volumes.read_label(nifti(tmp_path / "b.nii.gz", labels * 100, AFFINE), "b")
    assert volume.data.dtype == np.int32
    np.testing.assert_array_equal(volume.data, labels * 100)


def test_scaled_labels_may_miss_whole_numbers_by_the_rounding_of_the_factor(tmp_path: Path) -> None:
    labels = np.zeros(SHAPE, np.uint8)
    labels[2:4] = 41
    path = nifti(tmp_path / "a.nii", labels, AFFINE, scl_slope=1 / 41, scl_inter=0)
    np.testing.assert_array_equal(volumes.read_label(path, "a").data, labels // 41)


@pytest.mark.parametrize("value", [0.5, -1, 2.0**31])
def test_labels_that_are_no_counting_numbers_are_refused(tmp_path: Path, value: float) -> None:
    labels = np.zeros(SHAPE)
    labels[1, 2, 3] = value
    path = nifti(tmp_path / "a.nii", labels, AFFINE)
    refused(
        "label_values", path, f"1 voxels with other values, such as {value:g}".replace("+", r"\+"), volumes.read_label
    )


def test_a_mask_on_the_grid_of_its_image_passes_in_any_axis_order(
    tmp_path: Path, image: np.ndarray, oblique: np.ndarray
) -> None:
    first = volumes.read(nifti(tmp_path / "a.nii", image, oblique), "a")
    near = oblique.copy()
    near[0, 3] += 0.1  # the smallest voxel edge is 1.5 mm
    volumes.check_grid(first, volumes.read(nifti(tmp_path / "b.nii", *turned(image, near, "PIL")), "b"))


def test_a_mask_on_another_grid_is_refused_with_both_grids(tmp_path: Path, image: np.ndarray) -> None:
    first = volumes.read(nifti(tmp_path / "a.nii", image, AFFINE), "image 7")
    moved, wider = AFFINE.copy(), AFFINE.copy()
    moved[1, 3] += 0.2
    wider[0, 0] += 0.1
    for affine, distance in ((moved, "0.20"), (wider, "0.60")):
        other = volumes.read(nifti(tmp_path / "b.nii", image, affine), "mask 7")
        with pytest.raises(CaseProblem, match=f"up to {distance} mm apart at the farthest corner") as caught:
            volumes.check_grid(first, other)
        assert caught.value.row["code"] == "geometry"
        assert caught.value.row["case"] == "mask 7"
        assert "7 x 5 x 6 voxels of 2 x 1.5 x 3 mm from (-11.00, 23.00, -7.00)" in caught.value.row["expected"]
    other = volumes.read(nifti(tmp_path / "b.nii", image[:, :-1], AFFINE), "mask 7")
    with pytest.raises(CaseProblem, match=r"7 x 4 x 6 voxels .* 7 x 5 x 6 voxels .* nearest neighbour"):
        volumes.check_grid(first, other)


def test_cuts_show_what_a_radiologist_sees() -> None:
    data = np.zeros(SHAPE, np.uint8)
    data[6, 4, 5] = 1  # right, anterior, superior
    data[0, 4, 5] = 2  # left, anterior, superior
    data[6, 0, 5] = 3  # right, posterior, superior
    data[6, 4, 0] = 4  # right, anterior, inferior
    axial, coronal, sagittal = (volumes.cut(data, p, data.shape[a] - 1) for p, a in volumes.PLANES.items())
    assert axial.shape == (5, 7)
    assert (axial[0, 0], axial[0, -1], axial[-1, 0]) == (1, 2, 3)
    assert coronal.shape == (6, 7)
    assert (coronal[0, 0], coronal[0, -1], coronal[-1, 0]) == (1, 2, 4)
    assert sagittal.shape == (6, 5)
    assert (sagittal[0, 0], sagittal[0, -1], sagittal[-1, 0]) == (1, 3, 4)
    np.testing.assert_array_equal(axial, data[::-1, ::-1, 5].T)


def test_missing_and_unknown_files_are_refused(tmp_path: Path) -> None:
    refused("missing_file", tmp_path / "none.nii", "nothing at .*none.nii")
    (tmp_path / "a.png").write_bytes(b"x")
    refused("unknown_format", tmp_path / "a.png", "a.png, expected .nii, .nii.gz")


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "a.nrrd", "a.mha"])
def test_damaged_files_are_refused(tmp_path: Path, image: np.ndarray, name: str) -> None:
    path = tmp_path / name
    if ".nii" in name:
        nifti(path, image, AFFINE)
    else:
        SimpleITK.WriteImage(volumes.to_sitk(image, AFFINE), path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-9], b"no volume " * 90, whole[:200]):
        path.write_bytes(damaged)
        refused("unreadable_volume", path, "does not decode")
    if name == "a.nii.gz":
        path.write_bytes(whole[:-8] + bytes(4) + whole[-4:])  # voxels complete, their checksum wrong
        refused("unreadable_volume", path, "CRC")
        path.write_bytes(gzip.decompress(whole))
        refused("unreadable_volume", path, "Not a gzipped file")


def test_a_header_whose_data_file_is_gone_is_refused(tmp_path: Path, image: np.ndarray) -> None:
    SimpleITK.WriteImage(volumes.to_sitk(image, AFFINE), tmp_path / "a.mhd")
    (tmp_path / "a.raw").unlink()
    refused("missing_file", tmp_path / "a.mhd", "no data file a.raw")


def test_other_than_one_volume_is_refused(tmp_path: Path, image: np.ndarray) -> None:
    series = np.stack([image, image, image], axis=3)
    refused("dimensions", nifti(tmp_path / "a.nii", series, AFFINE), "4 axes .7 x 5 x 6 x 3., that is 3 volumes.*split")
    refused("dimensions", nifti(tmp_path / "a.nii", image[..., 0], AFFINE), "2 axes .7 x 5.")
    refused("too_thin", nifti(tmp_path / "a.nii", image[:, :3], AFFINE), "7 x 3 x 6 voxels, expected at least 4")
    SimpleITK.WriteImage(SimpleITK.JoinSeries([volumes.to_sitk(image, AFFINE)] * 2), tmp_path / "a.mha")
    refused("dimensions", tmp_path / "a.mha", "2 volumes")


def test_voxels_that_are_no_number_are_refused(tmp_path: Path, image: np.ndarray) -> None:
    rgb = np.zeros(SHAPE, np.dtype([(channel, "u1") for channel in "RGB"]))
    nibabel.save(nibabel.Nifti1Image(rgb, AFFINE), tmp_path / "a.nii")
    refused("not_scalar", tmp_path / "a.nii", "colours")
    refused("not_scalar", nifti(tmp_path / "a.nii", image.astype(np.complex64), AFFINE), "complex64")
    itk = volumes.to_sitk(image, AFFINE)
    SimpleITK.WriteImage(SimpleITK.Compose(itk, itk, itk), tmp_path / "a.mha")
    refused("not_scalar", tmp_path / "a.mha", "vector")


@pytest.mark.parametrize(
    ("forms", "fields", "message"),
    [
        ((1, 0), {"srow_x": [0, 0, 0, 5]}, "sform with voxel edges of 0 x 1.5 x 3 mm"),
        ((1, 0), {"srow_x": [0, 0, 0, 5], "srow_y": [2, 2, 0, 0]}, "sform with parallel axes"),
        ((1, 0), {"srow_z": [0, np.nan, 3, 0]}, "sform with NaN"),
        ((1, 0), {"srow_z": [0, 0, 0.003, 0]}, "2 x 1.5 x 0.003 mm, expected .* 0.05 to 20 mm"),
        ((1, 0), {"srow_z": [0, 0, 3000, 0]}, "2 x 1.5 x 3000 mm"),
        ((0, 1), {"pixdim": [1, 2, 0, 3, 0, 0, 0, 0]}, "voxel edges 2 x 0 x 3 mm in the header"),
        ((0, 1), {"pixdim": [1, 2, 1.5, np.nan, 0, 0, 0, 0]}, "voxel edges 2 x 1.5 x nan mm in the header"),
        ((0, 1), {"qoffset_x": np.inf}, "qform with NaN or infinity"),
    ],
)
def test_affines_without_three_sensible_axes_are_refused(
    tmp_path: Path, image: np.ndarray, forms: tuple[int, int], fields: dict[str, Any], message: str
) -> None:
    refused("singular_affine", nifti(tmp_path / "a.nii", image, AFFINE, *forms, **fields), message)


def test_sform_and_qform_must_agree_and_one_must_be_there(tmp_path: Path, image: np.ndarray) -> None:
    path = nifti(tmp_path / "a.nii", image, AFFINE, srow_x=[-2, 0, 0, -11])
    refused(
        "qform_sform", path, "sform and qform 24.00 mm apart at the farthest corner, expected at most 0.15 mm; keep"
    )
    path = nifti(tmp_path / "a.nii", image, AFFINE, srow_x=[2, 0, 0, -10.9])
    np.testing.assert_allclose(volumes.read(path, "a").affine[0, 3], -10.9, atol=1e-6)
    refused("no_orientation", nifti(tmp_path / "a.nii", image, AFFINE, 0, 0), "sform_code 0 and qform_code 0")


def test_nrrd_without_a_space_is_refused(tmp_path: Path, image: np.ndarray) -> None:
    lines = ["NRRD0004", "type: short", "dimension: 3", "sizes: 7 5 6", "encoding: raw", "endian: little", "", ""]
    (tmp_path / "a.nrrd").write_bytes("\n".join(lines).encode() + image.T.tobytes())
    refused("no_orientation", tmp_path / "a.nrrd", "`space` naming the patient's sides")


def test_values_that_are_no_image_are_refused(tmp_path: Path, image: np.ndarray) -> None:
    holes = image.astype(np.float64)
    holes[1, 2, 3], holes[0, 0, 0], holes[2, 0, 0] = np.nan, -np.inf, 1e300
    path = nifti(tmp_path / "a.nii", holes, AFFINE)
    refused("non_finite", path, "3 of 210 voxels that are NaN or infinite")
    refused("non_finite", path, "3 of 210 voxels", volumes.read_label)
    path = nifti(tmp_path / "a.nii", np.zeros(SHAPE, np.uint8), AFFINE)
    refused("constant_image", path, "the value 0 in all 210 voxels")
    assert not volumes.read_label(path, "a healthy subject").data.any()


def test_folders_without_one_series_are_refused(tmp_path: Path, image: np.ndarray) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    (folder / "notes.txt").write_text("of the ward")
    refused("unreadable_folder", folder, "no DICOM image in .*s, expected one DICOM series")
    paths = slices(folder, image, AFFINE, series=lambda z: f"1.2.{z % 3}")
    refused("several_series", folder, "3 series among 6 files.*folder of its own")
    paths[1].write_bytes(paths[1].read_bytes()[:-30])
    refused("unreadable_volume", folder, "no image in 89.dcm")


def test_missing_and_repeated_dicom_slices_are_refused(tmp_path: Path, image: np.ndarray) -> None:
    paths = slices(tmp_path / "s", image, AFFINE)
    paths[3].rename(tmp_path / "kept")
    message = r"6.00 mm between 88.dcm at \(11, -23, -1\) and 86.dcm at \(11, -23, 5\), in 5 slices, expected 3.00 mm"
    refused("dicom_gap", tmp_path / "s", message)
    (tmp_path / "kept").rename(paths[3])
    volumes.read(tmp_path / "s", "whole again")
    (tmp_path / "s" / "copy.dcm").write_bytes(paths[2].read_bytes())
    refused("dicom_duplicate", tmp_path / "s", r"88.dcm and copy.dcm at one position, \(11, -23, -1\)")


def test_dicom_slices_may_wobble_by_a_hundredth_of_their_step(tmp_path: Path, image: np.ndarray) -> None:
    slices(tmp_path / "s", image, AFFINE, position=lambda z: (11, -23, 3 * z + 0.02 * (z == 2)))
    volumes.read(tmp_path / "s", "a")
    slices(tmp_path / "s", image, AFFINE, position=lambda z: (11, -23, 3 * z + 0.04 * (z == 2)))
    refused("dicom_gap", tmp_path / "s", "3.04 mm between")


def test_tilted_and_unparallel_dicom_slices_are_refused(tmp_path: Path, image: np.ndarray) -> None:
    slices(tmp_path / "s", image, AFFINE, position=lambda z: (11, -23 + 3 * z * np.tan(np.radians(0.9)), 3 * z))
    volumes.read(tmp_path / "s", "a")
    slices(tmp_path / "s", image, AFFINE, position=lambda z: (11, -23 + 3 * z * np.tan(np.radians(12)), 3 * z))
    refused("dicom_orientation", tmp_path / "s", "beside the normal of the slices .12.0 degrees")
    slices(tmp_path / "s", image, AFFINE, orientation=lambda z: (1, 0, 0, 0, 1, 0) if z else (1, 0, 0, 0, 0, -1))
    refused("dicom_orientation", tmp_path / "s", "90.dcm with another ImageOrientationPatient")


def test_dicom_slices_of_another_size_or_without_position_are_refused(tmp_path: Path, image: np.ndarray) -> None:
    slices(tmp_path / "s", image, AFFINE)
    (tmp_path / "t").mkdir()
    wider = slices(tmp_path / "t", image[1:], AFFINE)[2]
    (tmp_path / "s" / wider.name).write_bytes(wider.read_bytes())
    refused("dimensions", tmp_path / "s", "88.dcm with another number or size of pixels than 85.dcm")
    for path in slices(tmp_path / "u", image, AFFINE):
        path.write_bytes(path.read_bytes().replace(b"\x20\0\x32\0", b"\x20\0\x31\0"))  # the tag's number
    refused("dicom_orientation", tmp_path / "u", "without ImagePositionPatient")


def test_the_real_volumes_are_read(real_data: Path) -> None:
    paths = [
        path for folder in ("brain_mri", "preprocess_demo") for path in sorted((real_data / folder).glob("*.nii*"))
    ]
    assert paths
    for path in paths:
        read = volumes.read_label if "lesion" in path.name else volumes.read
        volume = read(path, path.name)
        assert volume.data.dtype in (np.uint8, np.int16)
        assert nibabel.aff2axcodes(volume.affine) == ("R", "A", "S")


def test_a_unit_other_than_millimetres_is_refused(tmp_path: Path, image: np.ndarray) -> None:
    made = nibabel.Nifti1Image(image, AFFINE)
    made.header.set_xyzt_units("meter")
    nibabel.save(made, tmp_path / "a.nii.gz")
    refused("units", tmp_path / "a.nii.gz", "in the unit meter, expected mm")


def test_an_nrrd_whose_space_is_the_scanners_or_without_directions_is_refused(
    tmp_path: Path, image: np.ndarray
) -> None:
    path = tmp_path / "a.nrrd"
    SimpleITK.WriteImage(volumes.to_sitk(image, AFFINE), str(path))
    sound = path.read_bytes()
    volumes.read(path, "a")
    for old, new in ((b"left-posterior-superior", b"scanner-xyz"), (b"space directions:", b"#pace directions:")):
        assert old in sound
        path.write_bytes(sound.replace(old, new))
        refused("no_orientation", path, "naming the patient's sides")
