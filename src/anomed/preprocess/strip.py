"""Skull stripping: the brain of a head, by one of several backends."""

import shlex
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from anomed import volumes
from anomed.errors import CaseProblem
from anomed.preprocess.spatial_steps import SkullStrip
from anomed.volumes import Volume

_HINT = (
    "look at the image (backend none: is it stripped?); correct it, change backend or limits, or exclude the subject"
)


def brain(
    subject: str,
    volume: Volume,
    given: np.ndarray | None,
    options: SkullStrip,
    files: dict[str, Path],
    scratch: Path | None = None,
) -> np.ndarray:
    """The brain of a head as bool, X x Y x Z, RAS. given: the source's organ file on the same grid, if it has one.
    scratch: where a program's files lie for a while.

    Raises CaseProblem when the backend finds nothing or cannot run.
    """
    if options.backend == "deepbet":
        return _deepbet(subject, volume, files["deepbet_model"], files["deepbet_bbox_model"])
    if options.backend == "command":
        return _command(subject, volume, files["program"], options.arguments, scratch)
    if options.backend == "none":
        from scipy import ndimage

        return np.asarray(ndimage.binary_fill_holes(volume.data != 0))
    return organ(subject, given)


def organ(subject: str, given: np.ndarray | None) -> np.ndarray:
    """The organ as the source's file marks it."""
    if given is None:
        hint = "give the source's `organ` pattern (prepare volume: --organ), or choose another backend"
        raise CaseProblem(subject, "missing_organ", "no organ file", "a mask of the organ for every subject", hint)
    return given


def check_volume(subject: str, mask: np.ndarray, affine: np.ndarray, limits: list[float]) -> float:
    """Volume of a mask in ml. Raises CaseProblem when it lies beyond `limits`."""
    found = float(mask.sum(dtype=np.int64) * abs(np.linalg.det(affine[:3, :3])) / 1000)
    if not mask.any() or not limits[0] <= found <= limits[1]:
        expected = f"{limits[0]:g} to {limits[1]:g} ml (limits_ml)"
        raise CaseProblem(subject, "implausible_mask", f"a brain or organ of {found:.0f} ml", expected, _HINT)
    return found


@cache
def _networks(model: Path, box: Path) -> Any:
    """deepbet's two networks, on the CPU: the mask is the same everywhere. Loaded once a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it loads them by a deprecated function
        from deepbet.bet import BrainExtraction

        return BrainExtraction(no_gpu=True, model_path=str(model), bbox_model_path=str(box))


def _deepbet(subject: str, volume: Volume, model: Path, box: Path) -> np.ndarray:
    networks = _networks(model, box)
    try:
        found = networks.run_model(volume.data.astype(np.float32)) > 0.5
        if found.any():
            return np.asarray(networks.postprocess(found) > 0)
    except (AssertionError, ValueError):  # of a head without anything that it takes for a brain
        pass
    expected = "a head with its skull, or stripped"
    raise CaseProblem(subject, "implausible_mask", "no brain in the image", expected, _HINT)


def _command(subject: str, volume: Volume, program: Path, arguments: str, scratch: Path | None) -> np.ndarray:
    """Run a program on the image as NIfTI and read the mask that it writes."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        image, mask = Path(folder) / "image.nii.gz", Path(folder) / "mask.nii.gz"
        volumes.write(image, volume.data, volume.affine)
        words = [word.replace("{image}", str(image)).replace("{mask}", str(mask)) for word in shlex.split(arguments)]
        try:
            done = subprocess.run([program, *words], cwd=folder, capture_output=True, text=True, errors="replace")
        except OSError as error:
            hint = "check `program`: it must be executable"
            raise CaseProblem(subject, "strip_failed", f"{program}: {error.strerror}", "a mask", hint) from None
        suffixed = mask.with_name("mask_bet.nii.gz")  # as HD-BET names it
        found = next((path for path in (mask, suffixed) if path.exists()), None)
        if done.returncode or found is None:
            last = " ".join((done.stderr or done.stdout).split())[-300:]
            text = f"{program.name} ended with code {done.returncode} and {'a' if found else 'no'} mask: {last}"
            hint = f"run {program} by hand on this image"
            raise CaseProblem(subject, "strip_failed", text, "code 0 and a mask at {mask}", hint)
        result = volumes.read_label(found, f"{subject}: mask of {program.name}")
        volumes.check_grid(volume, result)
        return np.asarray(result.data > 0)
