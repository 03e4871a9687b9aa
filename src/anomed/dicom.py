"""The files of a DICOM series in the order of their slices, once they are known to make a regular grid."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anomed.errors import CaseProblem

STEP = 0.01  # of the median step, and in mm: how much the distance between slices may vary
TILT = 1.0  # degrees between the line of the slice positions and the normal of the slices
TURN = 1e-4  # how much direction cosines may vary; writers round them to six digits or so
_EXPORT = "export the whole series again"
_SERIES, _POSITION, _ORIENTATION, _RESCALE = "0020|000e", "0020|0032", "0020|0037", ("0028|1053", "0028|1052")


@dataclass(frozen=True)
class Slice:
    """One file: its series, ImagePositionPatient (3, mm, LPS), direction cosines (6), grid, rescale tags."""

    path: Path
    series: str
    position: tuple[float, ...]
    orientation: tuple[float, ...]
    grid: tuple[Any, ...]
    rescale: tuple[str, ...]


def series(folder: Path, name: str) -> list[Slice]:
    """The slices of the only series in a folder, sorted along their normal; files other than DICOM are passed over.

    name: what messages call the folder. Raises CaseProblem: unreadable_folder, unreadable_volume (a DICOM file without
    an image), several_series, dicom_orientation, dimensions, dicom_duplicate or dicom_gap.
    """
    slices = _slices(folder, name)
    if not slices:
        hint = "give the folder that holds the files itself"
        raise CaseProblem(name, "unreadable_folder", f"no DICOM image in {folder}", "one DICOM series", hint)
    first = slices[0]
    if count := len({each.series for each in slices}) - 1:
        hint = "move each series into a folder of its own, and give the folder of the right one"
        raise CaseProblem(name, "several_series", f"{count + 1} series among {len(slices)} files", "one", hint)
    for each in slices:
        if len(each.position) != 3 or len(each.orientation) != 6:
            found = f"{each.path.name} without ImagePositionPatient and ImageOrientationPatient"
            hint = "convert it to NIfTI (dcm2niix), as enhanced multi-frame files must be"
            raise CaseProblem(name, "dicom_orientation", found, "both in every file", hint)
        if np.abs(np.subtract(each.orientation, first.orientation)).max() > TURN:
            found = f"{each.path.name} with another ImageOrientationPatient than {first.path.name}"
            hint = "move the slices of another orientation (localisers) out of the folder"
            raise CaseProblem(name, "dicom_orientation", found, "parallel slices", hint)
        if each.grid != first.grid:
            found = f"{each.path.name} with another number or size of pixels than {first.path.name}"
            raise CaseProblem(name, "dimensions", found, "slices of one grid", _EXPORT)
    return _regular(slices, name)


def _regular(slices: list[Slice], name: str) -> list[Slice]:
    """Slices in order of position. Raises CaseProblem unless they lie in equal steps on a line along their normal."""
    normal = np.cross(slices[0].orientation[:3], slices[0].orientation[3:])
    slices = sorted(slices, key=lambda each: float(np.dot(each.position, normal)))
    offset = np.subtract([each.position for each in slices], slices[0].position)
    along = offset @ normal
    steps = np.diff(along)
    if (steps < STEP).any():
        at = int(steps.argmin())
        found = f"{slices[at].path.name} and {slices[at + 1].path.name} at one position, {_place(slices[at])}"
        hint = "split the series: it repeats slices (time points, echoes, a second export)"
        raise CaseProblem(name, "dicom_duplicate", found, "one slice a position", hint)
    aside = np.linalg.norm(offset - np.outer(along, normal), axis=1)
    if (tilted := aside > np.maximum(np.tan(np.radians(TILT)) * along, STEP)).any():
        at = int(tilted.argmax())
        angle = np.degrees(np.arctan2(aside[at], along[at]))
        found = f"{slices[at].path.name} {aside[at]:.2f} mm beside the normal of the slices ({angle:.1f} degrees)"
        hint = (
            "a tilted gantry shears the volume: resample it to straight slices (dcm2niix does) and give the NIfTI file"
        )
        raise CaseProblem(name, "dicom_orientation", found, f"at most {TILT:g} degree", hint)
    if len(steps):
        usual = float(np.median(steps))
        uneven = np.abs(steps - usual)
        if uneven.max() > max(STEP * usual, STEP):
            at = int(uneven.argmax())
            found = (
                f"{steps[at]:.2f} mm between {slices[at].path.name} at {_place(slices[at])} and "
                f"{slices[at + 1].path.name} at {_place(slices[at + 1])}, in {len(slices)} slices"
            )
            raise CaseProblem(
                name, "dicom_gap", found, f"{usual:.2f} mm, as between most", f"{_EXPORT}: slices are missing"
            )
    return slices


def _place(each: Slice) -> str:
    return "(" + ", ".join(f"{value:g}" for value in each.position) + ")"


def _slices(folder: Path, name: str) -> list[Slice]:
    """Every DICOM image in a folder, sorted by name; a directory file (DICOMDIR) and other formats are passed over."""
    import SimpleITK

    try:
        paths = sorted(path for path in folder.iterdir() if path.is_file() and _wanted(path.name))
    except OSError as error:
        raise CaseProblem(name, "unreadable_folder", str(error), "a folder to list", "check its permissions") from None
    slices = []
    for path in paths:
        reader = SimpleITK.ImageFileReader()
        reader.SetImageIO("GDCMImageIO")
        reader.SetFileName(str(path))
        try:
            reader.ReadImageInformation()
        except RuntimeError:
            with path.open("rb") as file:
                marked = file.read(132)[128:] == b"DICM"
            if marked or path.suffix.lower() == ".dcm":
                hint = "copy the series again, or move what is no image (a report) out of the folder"
                raise CaseProblem(name, "unreadable_volume", f"no image in {path.name}", "DICOM images", hint) from None
            continue
        tags = {key: reader.GetMetaData(key).strip() for key in reader.GetMetaDataKeys()}
        position, orientation = (_numbers(tags.get(key, "")) for key in (_POSITION, _ORIENTATION))
        grid = (*reader.GetSize(), *reader.GetSpacing()[:2])
        rescale = tuple(tags.get(key, "") for key in _RESCALE)
        slices.append(Slice(path, tags.get(_SERIES, ""), position, orientation, grid, rescale))
    return slices


def _wanted(name: str) -> bool:
    """Not the directory of a medium, nor what macOS leaves beside every file."""
    return name != "DICOMDIR" and not name.startswith("._")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split("\\"))
    except ValueError:
        return ()
