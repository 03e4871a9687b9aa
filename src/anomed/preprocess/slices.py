"""Which slices of a volume become images: the block `slices:` of a chain in params.yaml."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, FiniteFloat, model_validator

from anomed import volumes
from anomed.settings import Settings

Place = Annotated[FiniteFloat, Field(ge=-1e5, le=1e5)]


class Slices(Settings):
    """Which slices of a volume become images, and which of them are normal.

    Taken at start, start + step, … up to stop, in mm of the volume's space (after registration that of the template) or
    as indices. A slice with more than 0 and at least min_lesion_mm2 of lesion is abnormal; one with less lesion is
    neither, and left out. normal: `subjects` takes normal slices from subjects without any lesion alone; `slices` from
    all (BMAD: tumour-free slices of patients). Slices with less than min_organ_mm2 of organ or nothing but one value
    are left out.
    """

    plane: Literal["axial", "coronal", "sagittal"] = "axial"
    unit: Literal["mm", "index"] = "mm"
    start: Place
    stop: Place
    step: FiniteFloat = Field(ge=0.1)
    min_lesion_mm2: FiniteFloat = Field(default=0, ge=0)
    min_organ_mm2: FiniteFloat = Field(default=0, ge=0)
    normal: Literal["subjects", "slices"] = "subjects"

    @model_validator(mode="after")
    def _ordered(self) -> "Slices":
        if self.stop < self.start:
            raise ValueError("stop lies before start")
        if self.unit == "index" and not all(value == int(value) >= 0 for value in (self.start, self.stop, self.step)):
            raise ValueError("indices are whole numbers from 0")
        return self

    def indices(self, affine: np.ndarray, shape: tuple[int, ...]) -> list[int]:
        """The slices of a volume, ascending; positions outside it give none."""
        axis = volumes.PLANES[self.plane]
        places = self.start + self.step * np.arange(int((self.stop - self.start) / self.step + 1e-9) + 1)
        if self.unit == "mm":
            middle = affine @ [*((np.array(shape) - 1) / 2), 1]  # if oblique: along the line through the centre
            places = (places - middle[axis]) / affine[axis, axis] + (shape[axis] - 1) / 2
        return sorted({int(at) for at in np.floor(places + 0.5) if 0 <= at < shape[axis]})
