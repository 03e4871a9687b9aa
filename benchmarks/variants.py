"""How far each AUPRO definition and mask rule in circulation moves the number, on the same maps and masks.

Synthetic: 120 images of 240 x 240 with a fixed seed, two thirds with one to three lesions of nested edema, enhancing
rim and core (grey levels 122, 255, 59 of a colour-mapped mask); anomaly maps of 224 x 224 with smooth noise, false
alarms and heavy-tailed lesions, upsampled as the pipeline does. Needs no data. About 20 s on one core.

    .venv/bin/python benchmarks/variants.py [--json] [--real DIR]
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from anomed import images
from anomed.errors import AnomedError
from anomed.metrics import variants
from anomed.metrics.declare import NotComputable
from anomed.metrics.ranking import pixel_metrics

Arrays = list[np.ndarray]
IMAGES, SIZE, GRID, SEED = 120, 240, 224, 7
LEVELS = {122: 0.3, 255: 1.0, 59: 0.6}  # grey level of edema, rim and core: strength in the map
RADII = {122: 1.0, 255: 0.8, 59: 0.4}  # of nested ellipses, as a share of the lesion's


def ours(maps: Arrays, masks: Arrays) -> float | None:
    return pixel_metrics(maps, masks, aupro_limit=0.3)["pixel_aupro"]


DEFINITIONS: dict[str, Callable[[Arrays, Arrays], float | None]] = {
    "ours": ours,
    "pro_200": variants.pro_200,
    "pro_200, from_smallest": lambda maps, masks: variants.pro_200(maps, masks, from_smallest=True),
    "pro_per_image": variants.pro_per_image,
    "pro_bmad": variants.pro_bmad,
    "pro_anomalib_fork": variants.pro_anomalib_fork,
}


def noise(rng: np.random.Generator, sigma: float, size: int) -> np.ndarray:
    """Smooth noise of standard deviation 1, size x size."""
    from scipy.ndimage import gaussian_filter

    field = gaussian_filter(rng.standard_normal((size, size)), sigma, mode="wrap")
    return field / field.std()


def blob(rng: np.random.Generator, smallest: float, largest: float) -> np.ndarray:
    """Distance from the centre of an irregular ellipse near the middle, in units of its radius."""
    y, x = np.mgrid[:SIZE, :SIZE]
    centre, radius = rng.uniform(55, SIZE - 55, 2), rng.uniform(smallest, largest)
    long = radius * rng.uniform(1, 1.5)
    return np.hypot((y - centre[0]) / radius, (x - centre[1]) / long) + 0.12 * noise(rng, 6, SIZE)


def scenes() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Mask of grey levels uint8 240 x 240, lesion signal and background of the anomaly map, both 224 x 224."""
    from scipy.ndimage import gaussian_filter

    rng = np.random.default_rng(SEED)
    for number in range(IMAGES):
        grey, signal, alarms = np.zeros((SIZE, SIZE), np.uint8), np.zeros((SIZE, SIZE)), np.zeros((SIZE, SIZE))
        for _ in range(rng.integers(1, 4) if number % 3 else 0):
            distance, strength = blob(rng, 8, 28), rng.lognormal(-2.2, 0.6)
            for level, radius in RADII.items():
                inside = distance < radius
                grey[inside], signal[inside] = level, strength * LEVELS[level]
        for _ in range(rng.integers(0, 3)):
            alarms[blob(rng, 4, 12) < 1] = rng.lognormal(-3.0, 0.5)
        signal = gaussian_filter(signal, 5) * np.exp(0.5 * noise(rng, 4, SIZE))  # heavy-tailed
        lesion, alarm = (images.upsample(part, GRID, GRID) for part in (signal, gaussian_filter(alarms, 4)))
        yield grey, lesion, 0.055 + 0.0125 * noise(rng, 5, GRID) + 0.0055 * noise(rng, 1.5, GRID) + alarm


def real(folder: Path) -> tuple[Arrays, Arrays]:
    """Smoothed brightness of the axial slices 60 to 99 of every volume: an untrained map on real anatomy."""
    import nibabel
    from scipy.ndimage import gaussian_filter

    maps, masks = [], []
    for flair in sorted(folder.glob("*_flair_u8.nii.gz")):
        lesion = flair.with_name(flair.name.replace("_flair_u8", "_lesion"))
        volume, truth = (np.asarray(nibabel.load(path).dataobj) for path in (flair, lesion))
        maps += [gaussian_filter(volume[..., z] / np.float32(255), 2) for z in range(60, 100)]
        masks += [truth[..., z] > 0 for z in range(60, 100)]
    if not maps:
        raise AnomedError(f"{folder}: no file *_flair_u8.nii.gz, expected such volumes, each with its *_lesion.nii.gz")
    return maps, masks


def native(maps: Arrays) -> Arrays:
    return [images.upsample(one.astype(np.float32), SIZE, SIZE) for one in maps]


def value(function: Callable[[Arrays, Arrays], float | None], maps: Arrays, masks: Arrays) -> float | None:
    try:
        return function(maps, masks)
    except NotComputable:
        return None


def measure(folder: Path | None) -> dict:
    """{"definitions": {definition: {kind of map: value}}, "mask_rules": {rule: {number: value}}}, fractions or None."""
    greys, lesions, backgrounds = (list(part) for part in zip(*scenes(), strict=True))
    masks = [variants.MASK_RULES["any"](grey, GRID) for grey in greys]
    small = [lesion + back for lesion, back in zip(lesions, backgrounds, strict=True)]
    weak = [0.4 * lesion + 1.5 * back for lesion, back in zip(lesions, backgrounds, strict=True)]
    maps = native(small)
    floor = np.quantile(np.concatenate([one.ravel() for one in maps]), 0.9)
    kinds = {
        "as they are": (maps, masks),
        "exp(6 s)": ([np.exp(6 * one.astype(float)) for one in maps], masks),
        "weaker detector": (native(weak), masks),
        "lowest 90 % tied": ([np.maximum(one, floor) for one in maps], masks),
    }
    if folder:
        kinds["real slices, brightness"] = real(folder)
    return {
        "definitions": {
            name: {kind: value(function, *data) for kind, data in kinds.items()}
            for name, function in DEFINITIONS.items()
        },
        "mask_rules": {rule: judged(rule, greys, small, maps) for rule in variants.MASK_RULES},
    }


def judged(rule: str, greys: Arrays, small: Arrays, maps: Arrays) -> dict[str, float | None]:
    """Share of the lesion area that a rule calls abnormal, and our metrics under it."""
    found = [variants.MASK_RULES[rule](grey, GRID) for grey in greys]
    shares = [sum(float(mask.mean()) for mask in part) for part in (found, [grey > 0 for grey in greys])]
    numbers = pixel_metrics(maps if found[0].shape == maps[0].shape else small, found, aupro_limit=0.3)
    return {"kept": shares[0] / shares[1]} | {name: numbers[f"pixel_{name}"] for name in ("auroc", "ap", "aupro")}


def points(number: float | None, base: float | None = None) -> str:
    if number is None:
        return "none"
    return f"{100 * number:.2f}" + ("" if base is None else f" ({round(100 * (number - base), 2) + 0:+.2f})")


def table(result: dict) -> str:
    """Two tables in Markdown, in points of 100; in brackets the difference to ours."""
    definitions, rules = result["definitions"], result["mask_rules"]
    base = definitions["ours"]
    lines = ["| AUPRO, limit 0.3 | " + " | ".join(base) + " |", "|---|" + "---:|" * len(base)]
    for name, row in definitions.items():
        cells = [points(row[kind], None if name == "ours" else base[kind]) for kind in base]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| mask rule | lesion area kept, % | pixel AUROC | pixel AP | AUPRO (ours) |", "|---|" + "---:|" * 4]
    for rule, row in rules.items():
        cells = [
            points(number, None if rule == "any" or key == "kept" else rules["any"][key]) for key, number in row.items()
        ]
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the tables")
    parser.add_argument("--real", type=Path, metavar="DIR", help="folder of *_flair_u8.nii.gz with *_lesion.nii.gz")
    arguments = parser.parse_args()
    result = measure(arguments.real)
    print(json.dumps(result) if arguments.json else table(result))


if __name__ == "__main__":
    main()
