"""The volume command: one volume through any steps, in one call."""

from pathlib import Path
from typing import Any

import yaml

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
    strips = any(name in ("skull_strip", "organ_mask") for name, _ in spatial)
    made = {"lesion": bool(lesion), "organ": strips, "organ_native": strips}
    written = [out, *(_beside(out, part) for part in made), _beside(out, "transform", ".tfm")]
    wanted = [True, *made.values(), any(name == "register" for name, _ in spatial)]
    for target, known in zip(written, wanted, strict=True):
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


def _beside(out: Path, part: str, suffix: str = SUFFIX) -> Path:
    return out.with_name(f"{out.name.removesuffix(SUFFIX)}_{part}{suffix}")


def _run(raw: Files, out: Path, spatial: list[Any], intensity: list[Any]) -> None:
    import numpy as np
    import SimpleITK as sitk

    from anomed import volumes
    from anomed.preprocess import intensity as levels
    from anomed.preprocess import spatial as space

    each = bool(intensity) and intensity[-1][0] == "slice_min_max"
    files = spatial_steps.files(spatial, "--steps")
    data = steps.run(space.compose(spatial, files), {"subject": raw.image.resolve().name, "files": raw})
    data = steps.run(levels.compose(intensity[:-1] if each else intensity, {}), data)
    image, affine = space.array(data["image"]), space.affine_of(data["image"])
    if each:
        image = np.stack([levels.slice_min_max(image[..., z]) for z in range(image.shape[2])], axis=2)
    if intensity:
        image = levels.to_uint8(image)
    out.parent.mkdir(parents=True, exist_ok=True)
    volumes.write(out, image, affine)
    for key in ("lesion", "organ"):
        if key in data:
            volumes.write(_beside(out, key), space.array(data[key]), affine)
    if data["native"].organ is not None:
        volumes.write_on_original(_beside(out, "organ_native"), data["native"].organ, data["native"].volume)
    if "transform" in data:
        sitk.WriteTransform(data["transform"], str(_beside(out, "transform", ".tfm")))
    for name, value in data["facts"].items():
        print(f"{name}: {value:.4g}")
