"""Volumes in and out: NIfTI, NRRD, MetaImage and DICOM series to arrays in RAS order, and back; only here axes turn.

World coordinates are NIfTI's: millimetres, x to the patient's right, y anterior, z superior (RAS+).
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anomed import dicom, grids, nifti, records
from anomed.errors import CaseProblem

PLANES = {"axial": 2, "coronal": 1, "sagittal": 0}  # the axis of a RAS array that a plane cuts across
WHOLE = 1e-4  # labels may miss a whole number by the rounding of a float32 scaling factor
_AGAIN = "copy or export it again; giving a file another name does not change its format"
_LPS = np.diag([-1.0, -1.0, 1.0, 1.0])  # DICOM's and ITK's world to RAS, and back


@dataclass(frozen=True)
class Original:
    """The grid of a file: its shape, its affine (4 x 4, voxel to mm RAS+), nibabel's orientation, its NIfTI header."""

    shape: tuple[int, ...]
    affine: np.ndarray
    orientation: np.ndarray
    header: Any = None


@dataclass(frozen=True)
class Volume:
    """A volume in RAS order (nibabel's as_closest_canonical: axes are permuted and flipped, nothing is resampled).

    data: X x Y x Z, axis 0 to the patient's right, 1 anterior, 2 superior; the file's integer type, or float32 where
    the file holds floats or scales its integers. affine: 4 x 4 float64, voxel of `data` to scanner mm, RAS+. sha256: of
    the file's bytes; where several files make the volume, of their names and hashes. name: what messages call it.
    """

    data: np.ndarray
    affine: np.ndarray
    sha256: str
    name: str
    original: Original


def read(path: Path, name: str) -> Volume:
    """An image from a .nii, .nii.gz, .nrrd, .nhdr, .mha or .mhd file, a folder with one DICOM series, or a file of it.

    Raises CaseProblem: missing_file, unknown_format, unreadable_volume, unreadable_folder, dimensions, too_thin,
    not_scalar, no_orientation, singular_affine, qform_sform, non_finite, constant_image, several_series,
    dicom_orientation, dicom_gap or dicom_duplicate.
    """
    volume = _read(path, name)
    if volume.data.min() == volume.data.max():
        found = f"the value {volume.data.flat[0]} in all {volume.data.size:,} voxels"
        raise CaseProblem(name, "constant_image", found, "an image", "export it again from its source")
    return volume


def read_label(path: Path, name: str) -> Volume:
    """A segmentation, from the same files as `read`; data uint8, or int32 where a label is above 255. May be all zero.

    Raises CaseProblem: as `read`, and label_values where a value is no whole number from 0 to 2,147,483,647.
    """
    volume = _read(path, name)
    data = volume.data
    whole = np.rint(data) if data.dtype.kind == "f" else data
    wrong = (np.abs(data - whole) > WHOLE) | (whole < 0) | (whole >= 2**31)
    if wrong.any():
        found = f"{int(wrong.sum()):,} voxels with other values, such as {data[wrong].flat[0]:g}"
        hint = "give the labels, not an image or probabilities; resample labels with nearest neighbour"
        raise CaseProblem(name, "label_values", found, "whole numbers from 0 to 2,147,483,647", hint)
    kind = np.uint8 if whole.max() <= 255 else np.int32
    return Volume(whole.astype(kind), volume.affine, volume.sha256, name, volume.original)


def check_grid(image: Volume, other: Volume) -> None:
    """Raise CaseProblem `geometry` on `other` unless its RAS voxels are those of `image`: shape, and place of corners.

    Corners may be a tenth of the smallest voxel edge apart. Axis order and flips of the files do not matter.
    """
    limit = grids.TOLERANCE * grids.edges(image.affine).min()
    distance = grids.apart(image.data.shape, image.affine, other.affine)
    if image.data.shape == other.data.shape and distance <= limit:
        return
    found = f"{_grid(other)}, up to {distance:.2f} mm apart at the farthest corner"
    hint = (
        "resample the mask onto the image's grid with nearest neighbour; where its voxels are the image's and only the "
        "header is wrong, copy the image's header"
    )
    raise CaseProblem(
        other.name, "geometry", found, f"the grid of {image.name}, {_grid(image)}, within {limit:.2f} mm", hint
    )


def write(path: Path, data: np.ndarray, affine: np.ndarray) -> None:
    """Write a RAS array (X x Y x Z, bool becomes uint8) as NIfTI in mm; `path` ends in .nii.gz.

    sform and qform are the affine, both with code 1 (scanner); a sheared affine, which a qform cannot hold, leaves it
    out (code 0). Equal arrays give equal bytes.
    """
    nifti.save(path, data, nifti.header(data.shape, affine))


def write_on_original(path: Path, mask: np.ndarray, volume: Volume) -> None:
    """Write a mask (X x Y x Z in RAS order, as `volume.data`) as uint8 NIfTI on the grid of the file that it came from.

    Shape, axis order and affine are the file's; of a NIfTI file also the qform and sform with their codes, the units
    and the description, bit for bit. `path` ends in .nii.gz.
    """
    from nibabel.orientations import apply_orientation, ornt_transform

    original = volume.original
    back = ornt_transform([[0, 1], [1, 1], [2, 1]], original.orientation)
    data = apply_orientation(mask.astype(np.uint8), back).reshape(original.shape)
    nifti.save(path, data, nifti.header(original.shape, original.affine, original.header))


def to_sitk(data: np.ndarray, affine: np.ndarray) -> Any:
    """The SimpleITK image (LPS) of an array X x Y x Z with its affine (voxel to mm, RAS+); voxels are copied."""
    sitk = _sitk()
    image = sitk.GetImageFromArray(np.ascontiguousarray(data.T))
    edges, lps = grids.edges(affine), _LPS @ affine
    image.SetSpacing(edges.tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    image.SetDirection((lps[:3, :3] / edges).ravel().tolist())
    return image


def from_sitk(image: Any) -> tuple[np.ndarray, np.ndarray]:
    """Array X x Y x Z (axes as in `image`, not put in RAS order) and affine (4 x 4, voxel to mm, RAS+); voxels copied.

    Of an image of more dimensions the affine is that of the first three.
    """
    size = image.GetDimension()
    affine = np.eye(4)
    affine[:3, :3] = (np.reshape(image.GetDirection(), (size, size)) * image.GetSpacing())[:3, :3]
    affine[:3, 3] = image.GetOrigin()[:3]
    return np.ascontiguousarray(_sitk().GetArrayFromImage(image).T), _LPS @ affine


def cut(data: np.ndarray, plane: str, index: int) -> np.ndarray:
    """A slice of a RAS array as a radiologist sees it: 2-D, a copy.

    plane: axial (rows from anterior to posterior, columns from the patient's right to left), coronal (rows from
    superior to inferior, columns from right to left) or sagittal (rows from superior to inferior, columns from anterior
    to posterior). index: voxel along `PLANES[plane]`.
    """
    where: list[Any] = [slice(None, None, -1)] * 3
    where[PLANES[plane]] = index
    return np.ascontiguousarray(data[tuple(where)].T)


def _sitk() -> Any:
    """SimpleITK on one thread, so that results repeat, and without the warnings that its C++ code prints."""
    import SimpleITK

    SimpleITK.ProcessObject.SetGlobalDefaultNumberOfThreads(1)
    SimpleITK.ProcessObject.SetGlobalWarningDisplay(False)
    return SimpleITK


def reason(error: Exception) -> str:
    """What an exception says on one line, of ITK's without the address in memory that it names, and without the last
    error of the system, which it gives as a reason whatever that was."""
    text = re.sub(r"\w+ ?\(0x\w+\): ", "", str(error).rpartition("ERROR: ")[2])
    return " ".join(text.partition("Reason: ")[0].split())


@contextlib.contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turn whatever a reader trips over into CaseProblem: damaged bytes make them raise nearly every exception."""
    try:
        yield
    except CaseProblem:
        raise
    except Exception as error:
        found = f"a file that does not decode ({reason(error) or type(error).__name__})"
        raise CaseProblem(name, "unreadable_volume", found, "a complete volume", _AGAIN) from None


def _read(path: Path, name: str) -> Volume:
    """The volume in RAS order; its values are finite and nothing else is asked of them."""
    from nibabel.orientations import apply_orientation, inv_ornt_aff, io_orientation

    file = path.name.lower()
    header = None
    with _readable(name):
        if not path.exists():
            raise CaseProblem(name, "missing_file", f"nothing at {path}", "a volume", "check the path")
        if path.is_dir() or file.endswith(".dcm"):
            data, affine, sha256 = _series(path if path.is_dir() else path.parent, name)
        elif file.endswith((".nii", ".nii.gz")):
            data, affine, sha256, header = nifti.decode(path, name)
        elif file.endswith((".nrrd", ".nhdr", ".mha", ".mhd")):
            data, affine, sha256 = _itk(path, name)
        else:
            expected = ".nii, .nii.gz, .nrrd, .nhdr, .mha, .mhd, .dcm or the folder of a DICOM series"
            raise CaseProblem(name, "unknown_format", path.name, expected, "convert it, for example to .nii.gz")
    shape = data.shape
    data = data.reshape(shape[:3])
    if data.dtype.kind == "f":
        with np.errstate(over="ignore"):  # becomes infinite, which is counted
            data = data.astype(np.float32)
        if bad := data.size - int(np.isfinite(data).sum()):
            found = f"{bad:,} of {data.size:,} voxels that are NaN or infinite"
            raise CaseProblem(name, "non_finite", found, "numbers", "find the step that made them, and run it again")
    orientation = io_orientation(affine)
    turned = apply_orientation(data, orientation)
    turned = np.ascontiguousarray(turned, turned.dtype.newbyteorder("="))
    original = Original(shape, affine, orientation, header)
    return Volume(turned, affine @ inv_ornt_aff(orientation, shape[:3]), sha256, name, original)


def _itk(path: Path, name: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Voxels in the file's order, affine and hash of an NRRD or MetaImage file and the data file that it may name."""
    with path.open("rb") as file:
        head = file.read(2**16)
    data = re.search(rb"^(?:ElementDataFile\s*=|data ?file:)[ \t]*(.+?)\s*$", head, re.MULTILINE)
    sha256 = records.digest_file(path)
    if data and data[1] != b"LOCAL":
        part = path.parent / data[1].decode()
        if not part.is_file():
            hint = "put all voxels in one file, or keep it beside its header"
            raise CaseProblem(name, "missing_file", f"no data file {part.name}", "the file that the header names", hint)
        sha256 = records.digest([[path.name, sha256], [part.name, records.digest_file(part)]])
    image = _sitk().ReadImage(str(path))
    if path.suffix.lower() in (".nrrd", ".nhdr"):
        space = re.search(rb"^space: *(\w+-\w+-\w+|[LRAPIS]{3})\s*$", head, re.MULTILINE)
        oriented = space and b"scanner" not in space[1] and re.search(rb"^space directions:", head, re.MULTILINE)
        wanted = "`space` naming the patient's sides, and `space directions`"
    else:
        oriented = re.search(rb"^(TransformMatrix|Orientation|Rotation)", head, re.MULTILINE)
        wanted = "TransformMatrix"
    if not oriented:
        hint = "left and right are unknown: convert the scanner's files again"
        raise CaseProblem(name, "no_orientation", "a header without it", wanted, hint)
    return *_decoded(image, name), sha256


def _series(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray, str]:
    """Voxels (with DICOM's rescaling, so CT in HU), affine and hash of the only series in a folder."""
    sitk = _sitk()
    slices = dicom.series(folder, name)
    reader = sitk.ImageSeriesReader()
    reader.SetImageIO("GDCMImageIO")
    reader.SetFileNames([str(each.path) for each in slices])
    if len({each.rescale for each in slices}) > 1:
        reader.SetOutputPixelType(sitk.sitkFloat32)  # else the first slice decides, and the others lose their fractions
    files = sorted([each.path.name, records.digest_file(each.path)] for each in slices)
    return *_decoded(reader.Execute(), name), records.digest(files)


def _decoded(image: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    kind = image.GetPixelIDTypeAsString()
    if "vector" in kind or "complex" in kind:
        raise grids.not_scalar(name, f"voxels of the type {kind}")
    grids.check_shape(name, image.GetSize())
    data, affine = from_sitk(image)
    grids.check_affine(name, affine, "affine")
    return data, affine


def _grid(volume: Volume) -> str:
    origin = ", ".join(f"{value:.2f}" for value in volume.affine[:3, 3])
    return f"{grids.times(volume.data.shape)} voxels of {grids.times(grids.edges(volume.affine))} mm from ({origin})"
