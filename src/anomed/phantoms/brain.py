"""One synthetic FLAIR head, with or without a lesion, out of the MNI152 tissue maps that nilearn ships."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from anomed.phantoms.atlas import ORIGIN, Atlas, shared
from anomed.phantoms.picture import field3, generator

SHAPE = (120, 120, 88)  # voxels of a head, RAS order: right, anterior, superior
SPACING = 2.0  # mm, all axes
KINDS = ("tumour", "infarct", "mass", "small")
SUBJECTS = 18
LESION_Z = (-12.0, 36.0)  # mm above the isocentre: where lesions are centred, well inside the sliced range

# Split, condition and scanner of each head in turn, repeated. Any ten heads fill every split. Every scanner gives
# normal heads to train and test and lesions to test, so that no brightness of a scanner tells the classes apart.
ROLES = (
    "train normal A", "test normal A", "train normal B", "test tumour A", "valid normal C", "train normal C",
    "test infarct B", "valid mass C", "train normal D", "test normal B", "test mass C", "train normal A",
    "test small D", "test normal C", "train normal B", "test normal D", "valid tumour D", "test infarct A",
    "train normal C", "test mass D", "test small C", "test tumour B", "train normal D",
)  # fmt: skip

_ISOCENTRE = (0.0, -18.0, 12.0)  # mm, MNI point that an unmoved head has at the scanner's isocentre
_VENTRICLES = (0.0, -14.0, 15.0)  # mm, MNI: centre of the lateral ventricles

Field = np.ndarray  # float32, SHAPE unless said otherwise


class Member(NamedTuple):
    """One head of the cohort. kind: "normal" or one of KINDS."""

    subject: str
    split: str
    kind: str
    scanner: str


def cohort(subjects: int) -> list[Member]:
    """`subjects` heads."""
    return [Member(f"sub-{i + 1:02d}", *ROLES[i % len(ROLES)].split()) for i in range(subjects)]


def affine() -> np.ndarray:
    """Voxel to scanner millimetres, RAS+, 4 x 4: the isocentre is the middle of the volume."""
    matrix = np.diag([SPACING, SPACING, SPACING, 1.0])
    matrix[:3, 3] = [-SPACING * (n - 1) / 2 for n in SHAPE]
    return matrix


def _field(rng: np.random.Generator, shape: tuple[int, ...], wavelength: float) -> Field:
    return field3(rng, shape, (SPACING,) * 3, wavelength)


def _swell(points: list[Field], centre: tuple[float, ...], width: float, strength: float) -> None:
    """Magnify the surroundings of `centre` in place: 0 < strength < 1 pushes tissue outwards, negative shrinks."""
    offsets = [axis - at for axis, at in zip(points, centre, strict=True)]
    pull = strength * np.exp(-(offsets[0] ** 2 + offsets[1] ** 2 + offsets[2] ** 2) / np.float32(width**2))
    for axis, offset in zip(points, offsets, strict=True):
        axis -= pull * offset


@dataclass
class Head:
    """A head being built. points: scanner mm of each voxel. intensity: relative, white matter near 0.6.
    grey, white, csf, depth: the atlas as this head has it. lesion: bool.
    """

    rng: np.random.Generator
    points: list[Field]
    intensity: Field
    grey: Field
    white: Field
    csf: Field
    depth: Field
    lesion: np.ndarray

    def blend(self, window: tuple[slice, ...], alpha: np.ndarray, target: Any) -> None:
        """Replace the intensity inside `window` by `target` to the fraction `alpha`."""
        self.intensity[window] += alpha * (target - self.intensity[window])

    def blob(
        self, centre: tuple[float, ...], radius: float, rough: float, soft: float
    ) -> tuple[tuple[slice, ...], np.ndarray]:
        """An irregular ellipsoid inside the brain: its window and the fraction (0 to 1) of each voxel it fills."""
        margin = 1.8 * radius + 2 * SPACING
        window = tuple(
            slice(
                max(0, int((at - margin) / SPACING + (n - 1) / 2)),
                max(1, int((at + margin) / SPACING + (n - 1) / 2) + 2),
            )
            for at, n in zip(centre, SHAPE, strict=True)
        )
        axes = np.exp(self.rng.normal(0, 0.15, 3)) * radius
        parts = [((axis[window] - at) / size) ** 2 for axis, at, size in zip(self.points, centre, axes, strict=True)]
        reach = np.sqrt(parts[0] + parts[1] + parts[2])
        reach += rough * _field(self.rng, reach.shape, max(3 * SPACING, 0.9 * radius))
        inside = np.clip(-self.depth[window] / SPACING, 0, 1)
        return window, (np.clip((1 - reach) * radius / soft + 0.5, 0, 1) * inside).astype(np.float32)

    def pick(self, allowed: np.ndarray) -> tuple[float, ...]:
        """The scanner position of a random voxel of `allowed` between the heights LESION_Z."""
        z = self.points[2]
        choices = np.flatnonzero(allowed & (z > LESION_Z[0]) & (z < LESION_Z[1]))
        at = choices[self.rng.integers(len(choices))]
        return tuple(float(axis.flat[at]) for axis in self.points)

    def mark(self, window: tuple[slice, ...], alpha: np.ndarray) -> None:
        """Add the voxels that a lesion fills by half or more to the truth."""
        self.lesion[window] |= alpha >= 0.5


def _tumour(head: Head, centre: tuple[float, ...], radius: float) -> None:
    """A heterogeneous core, often with a dark necrosis, and bright oedema that follows the white matter."""
    rng = head.rng
    window, oedema = head.blob(centre, radius * rng.uniform(1.3, 1.6), 0.35, 5.0)
    oedema = oedema * np.clip(1.6 * head.white[window], 0, 1)
    head.blend(window, oedema, rng.uniform(0.85, 0.98))
    head.mark(window, oedema)
    window, core = head.blob(centre, radius, 0.25, 3.0)
    head.blend(window, core, rng.uniform(0.75, 0.95) + 0.10 * _field(rng, core.shape, 8.0))
    head.mark(window, core)
    if rng.random() < 0.6:
        head.blend(*head.blob(centre, 0.5 * radius, 0.3, 3.0), rng.uniform(0.25, 0.5))


def _infarct(head: Head, centre: tuple[float, ...], radius: float) -> None:
    """An old infarct or cyst: a hole as dark as CSF with a thin rim of gliosis."""
    window, rim = head.blob(centre, radius, 0.2, 4.0)
    head.blend(window, 0.7 * rim, head.rng.uniform(0.7, 0.85))
    head.blend(window, np.clip(3 * rim - 1.6, 0, 1), head.rng.uniform(0.12, 0.28))
    head.mark(window, rim)


def _mass(head: Head, centre: tuple[float, ...], radius: float) -> None:
    """A nearly isointense mass without gyri, parted from the brain by a thin cleft of fluid as an extra-axial tumour
    is; the displacement around it is made in `synthesise`."""
    window, alpha = head.blob(centre, radius, 0.15, 6.0)
    head.blend(window, np.clip(4 * alpha, 0, 1), head.rng.uniform(0.4, 0.52))
    head.blend(
        window, np.clip(3 * alpha - 1, 0, 1), head.rng.uniform(0.62, 0.76) + 0.04 * _field(head.rng, alpha.shape, 7.0)
    )
    head.mark(window, alpha)


def _small(head: Head) -> None:
    """Spots of a few millimetres: bright in white matter and cortex, some of them dark."""
    tissue = (head.white + head.grey > 0.8) & (head.depth < -3)
    for _ in range(int(head.rng.integers(12, 17))):
        window, alpha = head.blob(head.pick(tissue), head.rng.uniform(3.5, 6.5), 0.2, 2.0)
        bright = head.rng.random() < 0.7
        head.blend(window, alpha, head.rng.uniform(0.95, 1.1) if bright else head.rng.uniform(0.08, 0.2))
        head.mark(window, alpha)


def _scan(rng: np.random.Generator) -> tuple[list[Field], list[Field]]:
    """Scanner mm of every voxel, and the same points carried by a random pose and size into MNI mm."""
    scanner = [np.arange(n, dtype=np.float32) * SPACING - SPACING * (n - 1) / 2 for n in SHAPE]
    points = [
        np.ascontiguousarray(np.broadcast_to(axis, SHAPE)) for axis in np.meshgrid(*scanner, indexing="ij", sparse=True)
    ]
    moved = [axis - np.float32(shift) for axis, shift in zip(points, rng.uniform(-5, 5, 3), strict=True)]
    for first, second, degrees in ((1, 2, 8), (0, 2, 5), (0, 1, 7)):
        angle = np.deg2rad(rng.uniform(-degrees, degrees))
        cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
        moved[first], moved[second] = cos * moved[first] - sin * moved[second], sin * moved[first] + cos * moved[second]
    sizes = rng.uniform(0.95, 1.07, 3)
    return points, [
        axis * np.float32(size) + np.float32(at) for axis, size, at in zip(moved, sizes, _ISOCENTRE, strict=True)
    ]


@dataclass(frozen=True)
class Scanner:
    """A protocol: what heads measured on one machine have in common, relative to white matter near 0.6."""

    grey: float
    white: float
    water: float
    fat: float  # at least as bright as lesions: brightness alone must not find them
    noise: float
    bias: float

    @classmethod
    def draw(cls, seed: int, name: str) -> "Scanner":
        """The scanner `name` of the cohort `seed`."""
        rng = generator(seed, f"scanner {name}")
        ranges = {"grey": (0.67, 0.75), "white": (0.56, 0.61), "water": (0.08, 0.16)}
        ranges |= {"fat": (0.65, 1.15), "noise": (0.012, 0.026), "bias": (0.05, 0.09)}
        return cls(**{key: float(rng.uniform(*span)) for key, span in ranges.items()})


def _shell(rng: np.random.Generator, scanner: Scanner, depth: Field, below: Field) -> Field:
    """Everything around the brain by depth: CSF, dura, skull with marrow, scalp, air; and soft tissue of face and neck.

    depth: mm outside the hull. below: below 1 inside the ellipsoid of face and neck.
    """
    csf, skull, scalp = rng.uniform(3.2, 4.8), rng.uniform(5.2, 6.8), rng.uniform(6.2, 7.8)
    fat, marrow, water = scanner.fat * rng.uniform(0.95, 1.05), rng.uniform(0.2, 0.4), scanner.water
    table = csf + skull
    steps = [
        (0, water), (csf - 0.6, water), (csf, 0.3), (csf + 1, 0.05),
        (csf + 0.3 * skull, 0.06), (csf + 0.5 * skull, marrow), (csf + 0.7 * skull, 0.06), (table - 0.5, 0.05),
        (table + 1, fat), (table + 0.6 * scalp, 0.75 * fat), (table + 0.8 * scalp, 0.5), (table + scalp, 0.55),
        (table + scalp + 1, 0.0),
    ]  # fmt: skip
    shell = np.interp(depth, *np.array(steps).T).astype(np.float32)
    soft = (depth > table) & (below < 1)
    texture = np.clip(0.35 + 0.15 * _field(rng, SHAPE, 16.0), 0.02, 1)
    return np.where(soft & (below < 0.93), np.maximum(texture, shell), np.where(soft, np.maximum(shell, 0.5), shell))


def make(seed: int, member: Member) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The volumes of a head by what they are, `flair`, `lesion`, `brain`, and their affine (about half a second)."""
    return synthesise(shared(), seed, member.subject, member.scanner, member.kind)._asdict(), affine()


class Volumes(NamedTuple):
    """A finished head, SHAPE in RAS order on the grid of `affine`. flair: int16. lesion, brain: uint8, 0 or 1.

    The brain is all inside its hull, sulci and ventricles with it, and what tissue a lesion pushes beyond.
    """

    flair: np.ndarray
    lesion: np.ndarray
    brain: np.ndarray


def synthesise(atlas: Atlas, seed: int, subject: str, scanner: str, kind: str) -> Volumes:
    """One head.

    kind: "normal" or one of KINDS. Everything is drawn from generators seeded by (seed, subject) and (seed, scanner)
    alone, so that a head does not depend on its neighbours, and no operation depends on a thread count. Contrast as
    FLAIR: CSF dark, grey slightly brighter than white matter. The intensity unit is arbitrary, as a scanner's.
    """
    from scipy import ndimage

    rng, protocol = generator(seed, subject), Scanner.draw(seed, scanner)
    chance = generator(seed, f"{subject} lesion")  # of its own, so that the same head exists with and without lesion
    points, mni = _scan(rng)
    for axis in mni:
        axis += 3.0 * _field(rng, SHAPE, 70.0)
    skull = np.stack([axis - at for axis, at in zip(mni, ORIGIN, strict=True)]) / 2  # smoother than the brain
    for axis in mni:
        axis += 1.1 * _field(rng, SHAPE, 16.0)
    _swell(mni, _VENTRICLES, 32.0, rng.uniform(-0.15, 0.3))
    radius = chance.uniform(14, 19)
    side = -1 if chance.random() < 0.5 else 1
    centre = (side * chance.uniform(26, 42), chance.uniform(-38, 40), chance.uniform(*LESION_Z) * 0.8 + 2)
    if kind in ("mass", "tumour"):  # the pull is defined where the lesion will be, in scanner space, then carried over
        pulled = [axis.copy() for axis in points]
        _swell(pulled, centre, 1.5 * radius, 0.8 if kind == "mass" else 0.4)
        for axis, new, old in zip(mni, pulled, points, strict=True):
            axis += new - old

    depth = ndimage.map_coordinates(atlas.depth, skull, order=1, mode="nearest")
    near = depth < 8  # mm: beyond it no tissue is left, and most of the volume need not be looked up
    places = np.stack([axis[near] - at for axis, at in zip(mni, ORIGIN, strict=True)])
    grey, white, csf, caps = (np.zeros(SHAPE, np.float32) for _ in range(4))
    for values, map_ in ((grey, atlas.grey), (white, atlas.white), (csf, atlas.csf), (caps, atlas.caps)):
        values[near] = ndimage.map_coordinates(map_, places, order=1, mode="nearest")
    below = sum((axis - at) ** 2 / size**2 for axis, at, size in zip(mni, (0, 8, -80), (66, 86, 58), strict=True))

    texture = 1 + 0.02 * _field(rng, SHAPE, 7.0) + 0.03 * _field(rng, SHAPE, 25.0)
    tissue = grey * protocol.grey + white * (protocol.white + rng.uniform(0.05, 0.3) * caps)
    outside = np.clip(1 - grey - white - csf, 0, 1) * _shell(rng, protocol, depth, np.asarray(below))
    intensity = tissue * texture + csf * protocol.water + outside
    head = Head(chance, points, intensity, grey, white, csf, depth, np.zeros(SHAPE, bool))
    if kind == "tumour":
        _tumour(head, centre, 0.75 * radius)
    elif kind == "infarct":
        _infarct(head, head.pick((depth < -8) & (depth > -20) & (grey + white > 0.8)), 0.85 * radius)
    elif kind == "mass":
        _mass(head, centre, radius)
    elif kind == "small":
        _small(head)

    signal = head.intensity * np.exp(protocol.bias * _field(rng, SHAPE, 110.0))
    real, imaginary = protocol.noise * rng.standard_normal((2, *SHAPE), dtype=np.float32)
    magnitude = np.sqrt((signal + real) ** 2 + imaginary**2) * rng.uniform(400, 1600)
    brain = (depth < 0) | (grey + white + csf > 0.5)
    return Volumes(np.round(magnitude).astype(np.int16), head.lesion.astype(np.uint8), brain.astype(np.uint8))
