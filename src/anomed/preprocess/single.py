"""The volume command: one volume through any steps, in one call."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from anomed import volumes
from anomed.domains.source import Files
from anomed.errors import AnomedError
from anomed.preprocess import intensity_steps, spatial_steps, steps

SUFFIX = ".nii.gz"


def volume(image: Path, out: Path, text: str, lesion: Path | None, organ: Path | None) -> None:
    """Write `image` after the steps of `text` (as in params.yaml, spatial ones first) to `out`: float32, or uint8 where
    the last step gives grey levels. Beside it, where there are any: `<out>_lesion.nii.gz`, `<out>_organ.nii.gz`,
    `<out>_organ_native.nii.gz` (on the image's own grid, with its header) and `<out>_transform.tfm`. Prints what the
    steps measured. Raises AnomedError.
    """
    if not out.name.endswith(SUFFIX):
        raise AnomedError(f"{out}: found another ending, expected a name ending in {SUFFIX}")
    try:
        listed = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError:
        raise AnomedError(
            f"--steps: found {text!r}, expected for example 'skull_strip, register: {{spacing: 2}}'"
        ) from None
    both = steps.parse(listed, {**spatial_steps.STEPS, **intensity_steps.STEPS}, "--steps")
    spatial = [step for step in both if step[0] in spatial_steps.STEPS]
    intensity = [step for step in both if step[0] in intensity_steps.STEPS]
    if both != spatial + intensity:
        raise AnomedError(f"--steps: {intensity[0][0]} changes grey levels, so it comes after {spatial[-1][0]}")
    spatial_steps.check_order(spatial, "--steps")
    names = [name for name, _ in intensity]
    if intensity:
        intensity_steps.check_order(names, "--steps")
    if "nyul" in names:
        raise AnomedError("--steps: nyul is fitted on the train volumes of a domain; run it through params.yaml")
    if not both:
        raise AnomedError(
            f"--steps: found no step; name some of {', '.join([*spatial_steps.STEPS, *intensity_steps.STEPS])}"
        )
    strips = spatial_steps.finds_organ(spatial)
    made = {"lesion.nii.gz": bool(lesion), "organ.nii.gz": strips, "organ_native.nii.gz": strips}
    made["transform.tfm"] = any(name == "register" for name, _ in spatial)
    written = {out: True, **{_beside(out, name): known for name, known in made.items()}}
    for target, known in written.items():
        if target.is_dir() or (target.exists() and not known):
            raise AnomedError(f"{target}: is there and would not be of this result; move it, or name another result")
    for path in (image, lesion, organ):
        if path is not None and not path.exists():
            raise AnomedError(f"{path}: not found; give the path of a volume")
        if path is not None and path.resolve() in [target.resolve() for target in written]:
            raise AnomedError(f"{path}: would be overwritten; give the result another name")
    if organ and not strips:
        raise AnomedError("--organ: no step uses it; add organ_mask, or skull_strip: {backend: mask}")
    _run(Files(image, lesion, organ), out, spatial, intensity)


def _beside(out: Path, name: str) -> Path:
    return out.with_name(f"{out.name.removesuffix(SUFFIX)}_{name}")


def _run(raw: Files, out: Path, spatial: list[Any], intensity: list[Any]) -> None:
    from anomed.preprocess import intensity as levels
    from anomed.preprocess import spatial as space

    files = spatial_steps.files(spatial, "--steps")
    data = steps.run(space.compose(spatial, files), {"subject": raw.image.resolve().name, "files": raw})
    data = steps.run(levels.compose(intensity, {}), data)
    image = space.array(data["image"])
    if intensity and intensity[-1][0] == "slice_min_max":
        image = np.stack([levels.slice_min_max(image[..., z]) for z in range(image.shape[2])], axis=2)
    if intensity:
        image = levels.to_uint8(image)
    out.parent.mkdir(parents=True, exist_ok=True)
    volumes.write(out, image, space.affine_of(data["image"]))
    space.save(data, functools.partial(_beside, out))
    for name, value in data["facts"].items():
        print(f"{name}: {value:.4g}")
