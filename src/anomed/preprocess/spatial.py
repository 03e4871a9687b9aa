"""MONAI dictionary transforms that load, mask and move volumes; `compose` makes a chain of them.

They pass on a dictionary: `subject`, `files` (a source's Files), then `image` (float32), `lesion` and `organ` (uint8),
each a MetaTensor of 1 x X x Y x Z in RAS order with its affine, absent where there is none; `given`, an organ file that
no step has used; `facts`, what each step measured; `native`, the scan as it came; `transform` and `outline` of a
registration.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK as sitk
import torch
from monai.data import MetaTensor
from monai.transforms import Compose, MapTransform, Spacing, Transform

from anomed import volumes
from anomed.domains.source import Files
from anomed.errors import CaseProblem
from anomed.preprocess import registration, strip
from anomed.preprocess.registration import COARSE, FINEST, Template
from anomed.preprocess.spatial_steps import BiasField, OrganMask, Register, Resample, SkullStrip
from anomed.preprocess.steps import Step
from anomed.volumes import Volume

KEYS = ("image", "lesion", "organ")


@dataclass(frozen=True)
class Native:
    """A scan before anything was done to it, and the organ found on its grid (bool), if any."""

    volume: Volume
    organ: np.ndarray | None = None


def array(value: Any) -> np.ndarray:
    """X x Y x Z of a MetaTensor."""
    return np.asarray(value[0].numpy())


def affine_of(value: Any) -> np.ndarray:
    """Its affine, float64."""
    return np.asarray(value.affine.numpy(), np.float64)


def tensor(data: np.ndarray, affine: np.ndarray) -> MetaTensor:
    """X x Y x Z as a MetaTensor of 1 x X x Y x Z."""
    return MetaTensor(torch.from_numpy(np.ascontiguousarray(data))[None], affine=torch.from_numpy(affine))


class LoadVolumed(Transform):
    """Reads the files of a scan; refuses what cannot be trusted (see volumes.read) and masks on another grid."""

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        files: Files = data["files"]
        subject = data["subject"]
        volume = volumes.read(files.image, f"{subject}: {files.image.name}")
        out = {**data, "facts": {}, "native": Native(volume), "inputs": {"image": volume.sha256}}
        out["image"] = tensor(volume.data.astype(np.float32), volume.affine)
        voxel = abs(np.linalg.det(volume.affine[:3, :3])) / 1000
        for key, path in (("lesion", files.lesion), ("organ", files.organ)):
            if path is not None:
                mask = volumes.read_label(path, f"{subject}: {path.name}")
                volumes.check_grid(volume, mask)
                if mask.data.max() > 255:
                    hint = "write classes as numbers below 256"
                    raise CaseProblem(mask.name, "label_values", f"a label of {mask.data.max()}", "at most 255", hint)
                out["inputs"][key] = mask.sha256
                out[key if key == "lesion" else "given"] = tensor(mask.data.astype(np.uint8), volume.affine)
                if key == "lesion":
                    out["facts"]["lesion_ml"] = float((mask.data > 0).sum() * voxel)
        return out


class SkullStripd(MapTransform):
    """Finds the organ (see strip), checks its volume and sets everything else to 0."""

    def __init__(self, options: SkullStrip | OrganMask, files: dict[str, Path]):
        super().__init__("image")
        self.options, self.files = options, files

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        out, subject, native = dict(data), data["subject"], data["native"]
        given = array(out.pop("given")) > 0 if "given" in out else None
        if isinstance(self.options, OrganMask):
            found = strip.organ(subject, given)
        else:
            found = strip.brain(subject, native.volume, given, self.options, self.files, data.get("scratch"))
        affine = affine_of(out["image"])
        facts = {"organ_ml": strip.check_volume(subject, found, affine, self.options.limits_ml)}
        if given is not None and given.any():
            facts["dice_to_given_organ"] = _dice(found, given)
        image = array(out["image"])
        out["image"] = tensor(np.where(found, image, np.float32(0)), affine)
        out["organ"] = tensor(found.astype(np.uint8), affine)
        out["native"] = Native(native.volume, found)
        return _with(out, facts)


class BiasFieldd(MapTransform):
    """N4 (see BiasField): divides the image by the smooth field that sharpens its histogram most."""

    def __init__(self, options: BiasField):
        super().__init__("image")
        self.options = options

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        image, affine, subject = array(data["image"]), affine_of(data["image"]), data["subject"]
        full = volumes.to_sitk(image, affine)
        where = (
            array(data["organ"]) > 0 if "organ" in data else volumes.from_sitk(sitk.OtsuThreshold(full, 0, 1))[0] > 0
        )
        if (image < 0).mean() > 0.01:
            found, hint = f"values down to {image.min():g}", "take bias_field out of the chain: CT has none"
            raise CaseProblem(subject, "negative_values", found, "a magnitude image, 0 and above", hint)
        mask = volumes.to_sitk((where & (image > 0)).astype(np.uint8), affine)
        shrink = [max(1, min(self.options.shrink, size // 12)) for size in image.shape]
        filter_ = sitk.N4BiasFieldCorrectionImageFilter()
        filter_.SetNumberOfThreads(1)
        filter_.SetMaximumNumberOfIterations(self.options.iterations)
        try:
            filter_.Execute(sitk.Shrink(full, shrink), sitk.Shrink(mask, shrink))
        except RuntimeError as error:
            hint = "look at the image: too little of it is organ, or above 0"
            raise CaseProblem(subject, "bias_field_failed", volumes.reason(error), "a fit", hint) from None
        field = volumes.from_sitk(filter_.GetLogBiasFieldAsImage(full))[0]
        inside = field[where]
        out = {**data, "image": tensor(image / np.exp(field - np.float32(np.median(inside))), affine)}
        return _with(out, {"bias_percent": float(100 * np.exp(inside).std() / np.exp(inside).mean())})


class Registerd(MapTransform):
    """Registers the image to a template and resamples image (linear), lesion and organ (nearest) onto its grid."""

    def __init__(self, options: Register, files: dict[str, Path]):
        super().__init__(KEYS, allow_missing_keys=True)
        self.options, self.path = options, files["template"]

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        out, subject = dict(data), data["subject"]
        coarse, grid = template(self.path, FINEST), template(self.path, self.options.spacing)
        affine = affine_of(out["image"])
        try:
            turn = registration.turned(template(self.path, COARSE), array(out["image"]), affine)
            transform, metric = registration.register(coarse, array(out["image"]), affine, self.options)
        except RuntimeError as error:
            hint = "look at the image: its position or contrast may be far from the template's"
            raise CaseProblem(
                subject, "registration_failed", volumes.reason(error), "overlapping images", hint
            ) from None
        if turn:
            found, expected = f"a head that fits the template better turned by {turn}", "axes as the header names them"
            hint = "look at the image: its header names other axes than its voxels have; convert the source again"
            raise CaseProblem(subject, "wrong_orientation", found, expected, hint)
        for key in filter(out.__contains__, KEYS):
            image = volumes.to_sitk(array(out[key]), affine)
            moved = registration.resample(image, transform, grid.affine, grid.data.shape, key != "image")
            out[key] = tensor(moved, grid.affine)
        scale = np.linalg.svd(registration.matrix(transform)[:3, :3], compute_uv=False)
        facts = {"metric": metric, "scale_min": float(scale.min()), "scale_max": float(scale.max())}
        if "organ" in out:
            facts["template_dice"] = _dice(array(out["organ"]) > 0, grid.brain)
        if facts.get("template_dice", 1) < self.options.min_dice or not 0.5 < scale.min() <= scale.max() < 2:
            found = ", ".join(f"{name} {value:.2f}" for name, value in facts.items())
            expected = f"template_dice of {self.options.min_dice:g} or more, scales between 0.5 and 2"
            hint = "look at the image: its mask may be wrong, or the template with its skull"
            raise CaseProblem(subject, "implausible_registration", found, expected, hint)
        return _with({**out, "transform": transform, "outline": grid.brain}, facts)


class Resampled(MapTransform):
    """Cubic voxels by MONAI's Spacing: image linear, lesion and organ nearest neighbour."""

    def __init__(self, options: Resample):
        super().__init__(KEYS, allow_missing_keys=True)
        self.modes = {key: Spacing(options.spacing, mode="bilinear" if key == "image" else "nearest") for key in KEYS}

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        out = dict(data)
        for key in filter(out.__contains__, KEYS):
            moved = self.modes[key](out[key])
            out[key] = tensor(array(moved).astype(array(data[key]).dtype), affine_of(moved))
        return out


def save(data: dict[str, Any], place: Callable[[str], Path]) -> None:
    """Write what goes beside the image: lesion and organ on its grid, the organ on the scan's own grid with its header,
    and the transform (ITK, template mm to scan mm). place: from the name of a file to its path."""
    for key in ("lesion", "organ"):
        if key in data:
            volumes.write(place(f"{key}.nii.gz"), array(data[key]), affine_of(data[key]))
    native = data["native"]
    if native.organ is not None:
        volumes.write_on_original(place("organ_native.nii.gz"), native.organ, native.volume)
    if "transform" in data:
        sitk.WriteTransform(data["transform"], str(place("transform.tfm")))


@cache
def template(path: Path, spacing: float) -> Template:
    """A template, read once a process."""
    return Template.load(path, spacing)


def compose(steps: Sequence[Step], files: dict[str, Path]) -> Compose:
    """The chain: load, then the steps in order. Its input has `subject` and `files`."""
    made: list[Any] = [LoadVolumed()]
    for name, options in steps:
        if name in ("skull_strip", "organ_mask"):
            made.append(SkullStripd(options, files))
        elif name == "bias_field":
            made.append(BiasFieldd(options))
        elif name == "register":
            made.append(Registerd(options, files))
        elif name == "resample":
            made.append(Resampled(options))
    return Compose(made)


def _with(data: dict[str, Any], facts: dict[str, float]) -> dict[str, Any]:
    return {**data, "facts": {**data["facts"], **facts}}


def _dice(first: np.ndarray, second: np.ndarray) -> float:
    return float(2 * (first & second).sum() / max(1, first.sum() + second.sum()))
