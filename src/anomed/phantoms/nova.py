"""The embedded NOVA: single slices of synthetic heads with boxes, captions, histories and rare diagnoses."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from anomed.phantoms import brain, nova_texts
from anomed.phantoms.atlas import shared
from anomed.phantoms.picture import Box, Painted, Picture, field, generator

SUBJECTS = 30  # cases; 100 images
SIZE = 480  # pixels a side, as NOVA's images have

_IMAGES = tuple(map(int, "315241823612372415231428326315"))  # of each case in turn, repeated; skewed as in NOVA
_UNBOXED = "case0001_001"  # the one image whose boxes are unknown, as some of NOVA's are
_PLANES = ("sagittal", "coronal", "axial")  # by the axis of a head that is cut
_FIELD = {"sagittal": (216, 240), "coronal": (200, 236), "axial": (206, 236)}  # mm shown along each side

# Grey levels by FLAIR level (white matter near 0.6), of the brain and of what surrounds it. Grey and white matter
# change places in T1, fluid turns bright in T2.
_FLAIR = [0.0, 0.05, 0.16, 0.30, 0.45, 0.55, 0.60, 0.66, 0.72, 0.80, 0.95, 1.1, 1.6]
_BRAIN = {
    "FLAIR": [0.0, 0.03, 0.08, 0.22, 0.40, 0.50, 0.55, 0.61, 0.67, 0.75, 0.90, 1.0, 1.05],
    "T1-weighted": [0.05, 0.09, 0.15, 0.24, 0.46, 0.66, 0.69, 0.58, 0.48, 0.44, 0.37, 0.33, 0.3],
    "T2-weighted": [0.98, 0.96, 0.92, 0.76, 0.48, 0.36, 0.36, 0.43, 0.52, 0.64, 0.85, 0.95, 1.0],
}
_AROUND_LEVELS = [0.0, 0.04, 0.2, 0.4, 0.8, 1.2]
_AROUND = {
    "FLAIR": [0.0, 0.01, 0.16, 0.34, 0.66, 0.95],
    "T1-weighted": [0.0, 0.02, 0.2, 0.4, 0.95, 1.1],
    "T2-weighted": [0.0, 0.02, 0.12, 0.25, 0.65, 0.8],
}
_CORTEX = {"T1-weighted": 0.5, "T2-weighted": 0.52}  # no brighter, no darker than this beside fluid


class _Head(NamedTuple):
    """One case: FLAIR level, brain and lesion (float32, RAS order), and plane and sequence of its images in turn."""

    level: np.ndarray
    brain: np.ndarray
    lesion: np.ndarray
    views: list[tuple[int, str]]
    history: str


def cohort(subjects: int) -> list[Picture]:
    """Every image of that many cases: all test, none normal, each case with 1 to 8 images and one diagnosis."""
    pictures = []
    for number in range(subjects):
        names = nova_texts.DIAGNOSES[brain.KINDS[number % len(brain.KINDS)]]
        diagnosis = names[number // len(brain.KINDS) % len(names)]
        case = f"case{number:04d}"
        images = range(1, _IMAGES[number % len(_IMAGES)] + 1)
        pictures += [Picture(f"{case}_{image:03d}", case, "test", diagnosis) for image in images]
    return pictures


def paint(seed: int, picture: Picture) -> Painted:
    """One image, SIZE x SIZE, with the gold boxes of its lesion and the texts that NOVA has beside an image.

    Paint the images of a case in a row: only the last heads are kept.
    """
    kind, number = nova_texts.KIND[picture.kind], int(picture.image_id.rpartition("_")[2])
    head = _head(seed, picture.subject_id, kind)
    rng = generator(seed, picture.image_id)
    axis, sequence = head.views[(number - 1) % len(head.views)]
    areas = head.lesion.sum(tuple(other for other in range(3) if other != axis))
    at = int(rng.choice(np.flatnonzero(areas >= 0.5 * areas.max())))
    place = _framing(head, axis, rng)
    level, brain = place(head.level.take(at, axis), 3), place(head.brain.take(at, axis), 1)
    lesion = place(head.lesion.take(at, axis), 1)
    image = _expose(_contrast(level, brain, lesion, sequence, kind, rng), rng)
    boxes = _boxes(lesion) if picture.image_id != _UNBOXED else ()
    clinical = {
        "caption": nova_texts.caption(kind, _PLANES[axis], sequence, _place(head, kind), rng),
        "history": head.history,
        "diagnosis": picture.kind,
        "scan_id": f"{picture.subject_id}_s{number}",
        "boxes_known": picture.image_id != _UNBOXED,
        "rater_boxes": {name: _redrawn(boxes, rng) for name in ("rater1", "rater2")} if boxes else {},
    }
    return Painted(image, None, boxes, clinical)


@functools.lru_cache(maxsize=4)
def _head(seed: int, subject: str, kind: str) -> _Head:
    """The head of a case, its receiver's shading evened out so that a tissue has one level all over."""
    from scipy import ndimage

    rng = generator(seed, f"{subject} case")
    made = brain.synthesise(shared(), seed, subject, f"scanner of {subject}", kind)
    inside, lesion = made.brain.astype(np.float32), made.lesion.astype(np.float32)
    level = made.flair / np.float32(np.median(made.flair[made.brain > 0]) / 0.64)
    sound = inside * (1 - lesion) * (level > 0.4)
    shading = ndimage.gaussian_filter(level * sound, 12, truncate=2) + np.float32(0.64e-2)
    shading /= ndimage.gaussian_filter(sound, 12, truncate=2) + np.float32(1e-2)
    level = level * (np.float32(0.64) / shading)
    level[..., :6] *= np.linspace(0.1, 0.9, 6, dtype=np.float32)  # the coil ends at the neck
    pairs = [(axis, sequence) for axis in range(3) for sequence in nova_texts.SEQUENCES]
    weights = np.array([3.0 if _PLANES[axis] == "axial" else 1.0 for axis, _ in pairs])
    order = rng.choice(len(pairs), len(pairs), replace=False, p=weights / weights.sum())
    return _Head(level, inside, lesion, [pairs[i] for i in order], nova_texts.history(kind, rng))


def _framing(head: _Head, axis: int, rng: np.random.Generator) -> Callable[[np.ndarray, int], np.ndarray]:
    """How slices across `axis` are laid on the image: seen from the patient's feet, front or left, magnified at random.

    Anterior or superior is up; the patient's right is on the left, and in sagittal slices anterior is.
    """
    from scipy import ndimage

    outline = head.brain.max(axis).T[::-1, ::-1]
    middle = [float(np.flatnonzero(outline.any(1 - side))[[0, -1]].mean()) for side in range(2)]
    step = rng.uniform(*_FIELD[_PLANES[axis]]) / brain.SPACING / SIZE  # voxels a pixel
    angle = np.deg2rad(rng.normal(0, 2))
    matrix = step * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    shown = np.array(middle) + rng.normal(0, 1.5, 2) + np.array([0 if _PLANES[axis] == "axial" else 3, 0])
    offset = shown - matrix @ np.full(2, (SIZE - 1) / 2)

    def place(plane: np.ndarray, order: int) -> np.ndarray:
        upright = np.ascontiguousarray(plane.T[::-1, ::-1])
        return ndimage.affine_transform(upright, matrix, offset, (SIZE, SIZE), order=order, prefilter=False)

    return place


def _contrast(
    level: np.ndarray, brain: np.ndarray, lesion: np.ndarray, sequence: str, kind: str, rng: np.random.Generator
) -> np.ndarray:
    """The FLAIR level as another sequence shows it, about 0 to 1."""
    from scipy import ndimage

    base = sequence.removeprefix("contrast-enhanced ")
    level = ndimage.gaussian_filter(level, 1.0) if base != "FLAIR" else level
    level = level + 0.7 * (level - ndimage.gaussian_filter(level, 3))  # the spline that magnifies blurs
    inside = np.interp(level, _FLAIR, _BRAIN[base])
    if base in _CORTEX:  # on its way from fluid to cortex the curve passes white matter: no line may be drawn there
        fluid = np.clip(5 * ndimage.gaussian_filter((level < 0.46).astype(np.float32), 3), 0, 1)
        limit = np.minimum if base == "T1-weighted" else np.maximum
        inside += fluid * (limit(inside, _CORTEX[base]) - inside)
    reach = 2.6 if base == "T2-weighted" else 2  # in T2 the fluid around the brain is seen as well
    share = np.clip(reach * ndimage.gaussian_filter(brain, 5 if base == "T2-weighted" else 2.5), 0, 1)
    around = np.interp(level, _AROUND_LEVELS, _AROUND[base])
    shown = around + share * (inside - around)
    return shown if sequence == base else shown + _enhancement(level, lesion, kind, rng)


def _enhancement(level: np.ndarray, lesion: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """What contrast medium adds: all of a mass, an uneven ring in a tumour, the bright ones of small lesions."""
    from scipy import ndimage

    uptake = 0.42 + 0.12 * field(rng, level.shape, 30.0)
    if kind == "tumour":
        ring = (ndimage.gaussian_filter(lesion, 8) - 0.8 + 0.05 * field(rng, level.shape, 12.0)) / 0.08
        return uptake * np.exp(-(ring**2)) * (lesion > 0.5)
    share = {"mass": 1.0, "small": np.clip(5 * level - 4, 0, 1)}.get(kind, 0.0)  # an infarct takes up none
    return uptake * lesion * share


def _expose(shown: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Noise of a magnitude image at the scanner's resolution, then a reader's window: uint8."""
    from scipy import ndimage

    noise = rng.standard_normal((2, SIZE, SIZE), np.float32) * rng.uniform(0.025, 0.06)
    real, imaginary = (ndimage.uniform_filter(part, 2) for part in noise)
    magnitude = np.hypot(shown + real, imaginary)
    top = np.percentile(magnitude, 99.5) * rng.uniform(0.85, 1.1)
    window = np.clip(magnitude / top - rng.uniform(0, 0.03), 0, 1) ** rng.uniform(0.8, 1.2)
    return np.round(255 * window).astype(np.uint8)


def _boxes(lesion: np.ndarray) -> tuple[Box, ...]:
    """Boxes around the parts of a lesion; parts a few millimetres apart share one, specks have none beside others."""
    from scipy import ndimage

    groups, _ = ndimage.label(ndimage.uniform_filter(lesion, 13) > 0.02)
    parts = groups * (lesion >= 0.5)
    sizes = np.bincount(parts.ravel())[1:]
    least = min(40, sizes.max())  # pixels: 10 mm2
    spots = [spot for spot, size in zip(ndimage.find_objects(parts), sizes, strict=True) if size >= least]
    return tuple((float(x.start), float(y.start), float(x.stop), float(y.stop)) for y, x in spots)


def _redrawn(boxes: tuple[Box, ...], rng: np.random.Generator) -> list[list[float]]:
    """The boxes as another reader would draw them, inside the image."""
    drawn = []
    for box in np.asarray(boxes):
        spread = 1 + 0.06 * np.tile(box[2:] - box[:2], 2)
        moved = box + np.clip(rng.normal(0, spread), -1.5 * spread, 1.5 * spread)
        drawn.append([round(float(edge), 1) for edge in np.clip(moved, 0, SIZE)])
    return drawn


def _place(head: _Head, kind: str) -> str:
    """Side and lobe by the centre of the lesion in the brain's bounding box, in MNI152 millimetres."""
    if kind == "small":
        return "cerebral white matter and cortex"
    lesion, brain = np.argwhere(head.lesion > 0).mean(0), np.argwhere(head.brain > 0)
    low, high = brain.min(0), brain.max(0)
    x, y, z = np.array([-72, -106, -72]) + (lesion - low) / (high - low) * np.array([144, 178, 152])
    lobes = (
        ("occipital lobe", y < -62 and z < 32),
        ("parietal lobe", y < -62 or (z > 30 and y < -15)),
        ("frontal lobe", z > 30),
        ("deep white matter and basal ganglia", abs(x) < 22),
        ("frontal lobe", y > 15),
        ("temporal lobe", z < 10),
        ("frontotemporal region", y > -15),
        ("temporoparietal region", True),
    )
    return f"{'right' if x > 0 else 'left'} {next(lobe for lobe, here in lobes if here)}"
