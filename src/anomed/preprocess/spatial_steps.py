"""The steps that move or mask voxels (`spatial:` of a chain in params.yaml): their options and the files they read."""

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, FiniteFloat, model_validator

from anomed import packages
from anomed.errors import AnomedError
from anomed.preprocess.steps import Step
from anomed.settings import Settings

MNI152 = "mni152"


def _ordered(limits: list[float]) -> list[float]:
    if len(limits) != 2 or not 0 <= limits[0] < limits[1]:
        raise ValueError("expected two numbers, the lower one first")
    return limits


Limits = Annotated[list[FiniteFloat], AfterValidator(_ordered)]


class SkullStrip(Settings):
    """Find the brain; voxels outside it become 0.

    backend: deepbet (doi 10.1016/j.compbiomed.2024.108845; weights in its package), command (any executable), mask (the
    source's organ file), none (the image is stripped already: the brain is what differs from 0 and what that encloses).
    program and arguments: of `command`; `{image}` and `{mask}` stand for the files it reads and must write, on the same
    grid. limits_ml: brains beyond them fail the case.
    """

    backend: Literal["deepbet", "command", "mask", "none"] = "deepbet"
    program: str | None = None
    arguments: str = "-i {image} -o {mask}"
    limits_ml: Limits = Field(default=[700.0, 2300.0])

    @model_validator(mode="after")
    def _complete(self) -> "SkullStrip":
        if (self.backend == "command") != (self.program is not None):
            raise ValueError("`program` belongs to `backend: command`, which needs it")
        words = shlex.split(self.arguments)
        if not all(any(name in word for word in words) for name in ("{image}", "{mask}")):
            raise ValueError("arguments must name {image} and {mask}")
        return self


class OrganMask(Settings):
    """Keep the organ that the source's organ file marks; voxels outside it become 0. limits_ml: as for skull_strip."""

    limits_ml: Limits = Field(default=[1.0, 20000.0])


class BiasField(Settings):
    """N4 bias field correction (Tustison et al., IEEE TMI 2010, doi 10.1109/TMI.2010.2046908), inside the organ where
    it is known, else inside Otsu's foreground. shrink: the field is fitted on a grid so many times coarser (less along
    axes of few voxels). iterations: at most so many at each of the levels of the fit.
    """

    shrink: int = Field(default=3, ge=1, le=8)
    iterations: list[Annotated[int, Field(ge=1, le=500)]] = Field(default=[40, 30, 20], min_length=1, max_length=6)


class Register(Settings):
    """Rigid, then affine registration to a template, by Mattes mutual information on three levels.

    template: mni152 (inside nilearn; a stripped T1 at 1 mm) or the path of a stripped head. transform: affine, or
    rigid, which keeps the size. spacing: mm, edge of the cubic voxels of the result, on the template's field of view.
    sampling: share of the template's voxels, at the finest level of 2 mm, that the metric looks at. iterations: at most
    so many at each level. min_dice: least overlap with the template's brain, against masks that are no brain. It cannot
    judge a registration (a head that was not moved at all reaches 0.94); look at the pictures and at `metric`.
    """

    template: str = MNI152
    transform: Literal["rigid", "affine"] = "affine"
    spacing: float = Field(default=1.0, ge=0.5, le=8)
    sampling: float = Field(default=0.2, gt=0, le=1)
    iterations: int = Field(default=100, ge=1, le=1000)
    min_dice: float = Field(default=0.75, ge=0, le=1)


class Resample(Settings):
    """Resample to cubic voxels without registration. spacing: mm."""

    spacing: float = Field(default=1.0, ge=0.2, le=10)


STEPS: dict[str, type[Settings]] = {
    "skull_strip": SkullStrip,
    "organ_mask": OrganMask,
    "bias_field": BiasField,
    "register": Register,
    "resample": Resample,
}
_EXCLUSIVE = (("skull_strip", "organ_mask"), ("register", "resample"))


def check_order(steps: Sequence[Step], where: str) -> None:
    """Raises AnomedError when two steps exclude each other, one follows a change of the grid, or a mask is missing."""
    names = [name for name, _ in steps]
    for pair in _EXCLUSIVE:
        if all(name in names for name in pair):
            raise AnomedError(f"{where}: {pair[0]} and {pair[1]} exclude each other; keep one")
    moved = [at for at, name in enumerate(names) if name in _EXCLUSIVE[1]]
    if moved and moved[0] != len(names) - 1:
        raise AnomedError(f"{where}: {names[moved[0]]} changes the grid, so it comes last; move {names[-1]} before it")
    if "register" in names and not finds_organ(steps):
        hint = "put skull_strip before it (backend: none where heads are stripped)"
        raise AnomedError(f"{where}: register compares with a stripped template; {hint}")


def finds_organ(steps: Sequence[Step]) -> bool:
    """Whether the chain tells the organ from the rest."""
    return any(name in ("skull_strip", "organ_mask") for name, _ in steps)


def needed(steps: Sequence[Step]) -> list[str]:
    """Names of the files outside the project that the steps read."""
    backend = next((options.backend for name, options in steps if name == "skull_strip"), "")
    own = {"deepbet": ["deepbet_model", "deepbet_bbox_model"], "command": ["program"]}.get(backend, [])
    return own + ["template"] * ("register" in [name for name, _ in steps])


def files(steps: Sequence[Step], where: str) -> dict[str, Path]:
    """The files of `needed`, by name; their contents belong to the parameters.

    Raises AnomedError naming the key whose file is missing.
    """
    options = dict(steps)
    return {name: _file(name, options, where) for name in needed(steps)}


def _file(name: str, options: dict[str, Any], where: str) -> Path:
    if name.startswith("deepbet_"):
        return packages.inside("deepbet", f"../data/models/{name.removeprefix('deepbet_')}.pt")
    if name == "program":
        asked = options["skull_strip"].program
        program = shutil.which(asked)
        if program is None:
            raise AnomedError(
                f"{where}.skull_strip.program: found {asked!r}, which is no executable here; give its path"
            )
        return Path(program).absolute()  # the job runs it from another folder
    asked = options["register"].template
    if asked == MNI152:
        return packages.inside("nilearn", "datasets/data/mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz")
    if not Path(asked).is_file():
        raise AnomedError(f"{where}.register.template: found {asked!r}, expected {MNI152} or the path of a NIfTI file")
    return Path(asked)


def anonymous(steps: Sequence[Step]) -> list[Step]:
    """The steps without the paths of their files: a path is no content, and enters no hash."""
    paths = {"template", "program"}
    hidden = []
    for name, options in steps:
        given = {key for key in paths & options.model_fields_set if getattr(options, key) not in (None, MNI152)}
        hidden.append((name, options.model_copy(update=dict.fromkeys(given, "file"))))
    return hidden
