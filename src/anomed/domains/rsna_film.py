"""A radiograph's DICOM file as the RSNA challenge has it: strictly 8-bit grey, or refused with the reason."""

import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from anomed.errors import CaseProblem
from anomed.images import MAX_PIXELS

_STORED = re.compile(
    rb"\xe0\x7f\x10\x00(?:O[BW]\0\0)?(.{4})", re.DOTALL
)  # the pixels' element, little endian: its length
_PACKED = 0xFFFFFFFF  # no length: frames of JPEG or the like, whose decoder tells their size
_WANTED = {  # name -> tag, the value it must have where it stands
    "BitsAllocated": ("0028|0100", 8),
    "BitsStored": ("0028|0101", 8),
    "PixelRepresentation": ("0028|0103", 0),
    "SamplesPerPixel": ("0028|0002", 1),
    "RescaleIntercept": ("0028|1052", 0),
    "RescaleSlope": ("0028|1053", 1),
}


class Film(NamedTuple):
    """image: uint8, H x W, black is 0 whatever the file's photometric interpretation. view: ViewPosition (AP, PA, ...),
    how the film was taken; empty where the file does not say."""

    image: np.ndarray
    view: str


def read(data: bytes, name: str, patient: str, work: Path) -> Film:
    """A radiograph's DICOM file.

    name: what messages call the file; patient: the PatientID that it must have; work: folder for a temporary copy,
    as SimpleITK reads files only. Raises CaseProblem: damaged_dicom, patient_id or pixel_format.
    """
    import SimpleITK

    reader = SimpleITK.ImageFileReader()
    reader.SetImageIO("GDCMImageIO")
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=work, suffix=".dcm") as file:
        file.write(data)
        file.flush()
        reader.SetFileName(file.name)
        try:
            reader.ReadImageInformation()
            tags = {key: reader.GetMetaData(key).strip("\0 ") for key in reader.GetMetaDataKeys()}
            _check_tags(tags, name, patient)
            _check_size(tags, data, name)
            image = SimpleITK.GetArrayFromImage(reader.Execute())  # GDCM inverts MONOCHROME1 and checks the length
        except RuntimeError as error:
            reason = " ".join(str(error).rpartition(": ")[2].split())  # before it stand addresses, other in every run
            found, hint = f"no image that decodes ({reason})", "copy or download it again"
            raise CaseProblem(name, "damaged_dicom", found, "a DICOM film", hint) from None
    rows, columns = int(tags["0028|0010"]), int(tags["0028|0011"])
    if image.dtype != np.uint8 or image.shape != (1, rows, columns):
        found, expected = f"{image.dtype} of shape {image.shape}", f"uint8 of shape {(1, rows, columns)}"
        raise CaseProblem(name, "damaged_dicom", found, expected, "copy or download it again")
    return Film(image[0], tags.get("0018|5101", ""))


def _check_tags(tags: dict[str, str], name: str, patient: str) -> None:
    """Raises CaseProblem unless a film is that of the patient, and 8-bit grey without a rescaling."""
    if (found := tags.get("0010|0020", "")) != patient:
        hint = "the file was renamed or exchanged: download it again"
        raise CaseProblem(name, "patient_id", f"PatientID {found!r}", f"{patient!r}, as the file's name says", hint)
    wrong = [f"{word} {tags[tag]}" for word, (tag, usual) in _WANTED.items() if not _is(tags.get(tag, usual), usual)]
    if (kind := tags.get("0028|0004", "none")) not in ("MONOCHROME1", "MONOCHROME2"):
        wrong.append(f"PhotometricInterpretation {kind}")
    if wrong:
        hint = "the challenge's films are 8-bit: download it again; films of your own belong to another source"
        raise CaseProblem(name, "pixel_format", ", ".join(wrong), "unsigned 8-bit grey levels, not rescaled", hint)


def _check_size(tags: dict[str, str], data: bytes, name: str) -> None:
    """Raises CaseProblem for a film too large, or with other than its rows and columns: GDCM fills in or cuts off."""
    rows, columns = int(tags["0028|0010"]), int(tags["0028|0011"])
    if rows * columns > MAX_PIXELS:
        hint = "check the file: no film is as large"
        raise CaseProblem(name, "too_large", f"{rows} x {columns} pixels", f"at most {MAX_PIXELS:,} pixels", hint)
    frames = int(float(tags.get("0028|0008") or 1))
    stored = int.from_bytes(match[1], "little") if (match := _STORED.search(data)) else _PACKED
    whole = rows * columns * frames
    if stored not in (_PACKED, whole, whole + whole % 2):
        found, expected = f"{stored:,} bytes of pixels", f"{rows} x {columns} pixels, as its header says"
        raise CaseProblem(name, "damaged_dicom", found, expected, "copy or download it again")


def _is(value: str | int, number: int) -> bool:
    try:
        return float(value) == number
    except ValueError:
        return False
