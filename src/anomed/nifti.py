"""NIfTI files to voxels in the file's order, and back; which affine of a header holds, and when none does."""

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np

from anomed import grids, records
from anomed.errors import CaseProblem

_GEOMETRY = (
    "pixdim", "xyzt_units", "descrip", "qform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y",
    "qoffset_z", "sform_code", "srow_x", "srow_y", "srow_z",
)  # fmt: skip


def decode(path: Path, name: str) -> tuple[np.ndarray, np.ndarray, str, Any]:
    """Voxels in the file's order (scaled integers become floats), affine, hash and header of a NIfTI-1 or -2 file.

    Raises CaseProblem, and whatever nibabel and gzip raise on damaged bytes.
    """
    import nibabel

    packed = path.read_bytes()
    raw = gzip.decompress(packed) if path.name.lower().endswith(".gz") else packed  # whole, so that its sum is checked
    second = nibabel.Nifti2Header.may_contain_header(raw[: nibabel.Nifti2Header.sizeof_hdr])
    kind = nibabel.Nifti2Image if second else nibabel.Nifti1Image
    size = kind.header_class.sizeof_hdr
    if len(raw) < size:
        raise ValueError(f"{len(raw)} bytes, fewer than a header")
    image = kind.from_bytes(raw)
    header = image.header
    grids.check_shape(name, header.get_data_shape())
    dtype = header.get_data_dtype()
    if dtype.kind not in "iuf":
        raise grids.not_scalar(name, "colours" if dtype.fields else f"{dtype} numbers")
    unit = header.get_xyzt_units()[0]
    if unit not in ("mm", "unknown"):
        hint = "give millimetres (nibabel: scale the affine, then header.set_xyzt_units('mm'))"
        raise CaseProblem(name, "units", f"a header in the unit {unit}", "mm", hint)
    affine = _affine(name, header, kind.header_class(raw[:size], check=False)["pixdim"][1:4])
    if len(raw) < (end := int(header.get_data_offset()) + math.prod(header.get_data_shape()) * dtype.itemsize):
        raise ValueError(f"{len(raw):,} bytes where the header promises {end:,}")
    return np.asarray(image.dataobj), affine, records.digest(packed), header


def _affine(name: str, header: Any, edges: np.ndarray) -> np.ndarray:
    """sform, else qform, once they agree. edges: as the file has them, before nibabel replaces what is not positive."""
    sform, qform = (int(header[f"{form}_code"]) > 0 for form in ("sform", "qform"))
    if sform:
        grids.check_affine(name, header.get_sform(), "sform")
    if qform:
        if not (edges > 0).all():
            raise grids.singular(name, f"voxel edges {grids.times(edges)} mm in the header (pixdim)")
        grids.check_affine(name, header.get_qform(), "qform")
    if not (sform or qform):
        hint = "left and right are unknown: convert the scanner's files again (dcm2niix), which sets both"
        raise CaseProblem(name, "no_orientation", "sform_code 0 and qform_code 0", "one of them above 0", hint)
    if sform and qform:
        limit = grids.TOLERANCE * min(grids.edges(header.get_sform()).min(), grids.edges(header.get_qform()).min())
        distance = grids.apart(header.get_data_shape()[:3], header.get_sform(), header.get_qform())
        if distance > limit:
            found = f"sform and qform {distance:.2f} mm apart at the farthest corner"
            hint = (
                "keep the sform, which most viewers follow (nibabel: image.set_qform(image.get_sform(), 1)), unless "
                "only the qform puts the image onto its mask (image.set_sform(image.get_qform(), 1))"
            )
            raise CaseProblem(name, "qform_sform", found, f"at most {limit:.2f} mm", hint)
    return header.get_sform() if sform else header.get_qform()


def header(shape: tuple[int, ...], affine: np.ndarray, original: Any = None) -> Any:
    """A NIfTI-1 header with the geometry of `original`, another header; without one with that of an affine in mm.

    sform and qform are then the affine, with code 1 (scanner). A sheared affine, which no qform can hold, leaves that
    out (code 0): else the two would contradict each other.
    """
    import nibabel

    made = nibabel.Nifti1Header()
    if original is not None:
        for key in _GEOMETRY:  # and nothing else: display range, intent and extensions are the image's
            made[key] = original[key]
        return made
    made.set_xyzt_units("mm")
    made.set_sform(affine, 1)
    made.set_qform(affine, 1)
    if grids.apart(shape[:3], made.get_qform(), affine) > grids.TOLERANCE * grids.edges(affine).min():
        made["qform_code"] = 0
    return made


def save(path: Path, data: np.ndarray, header: Any) -> None:
    """Write voxels in the file's order (bool as uint8) with the geometry of a header. Equal voxels give equal bytes."""
    import nibabel

    kind = np.uint8 if data.dtype == bool else data.dtype
    header.set_data_dtype(kind)
    image = nibabel.Nifti1Image(data.astype(kind, copy=False), None, header, dtype=kind)
    with records.atomic_file(path) as partial:
        partial.write_bytes(gzip.compress(image.to_bytes(), 1, mtime=0))
