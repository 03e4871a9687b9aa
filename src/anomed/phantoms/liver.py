"""One synthetic abdominal CT in the portal venous phase, with or without liver lesions, in a synthetic body."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from anomed.phantoms import abdomen
from anomed.phantoms.abdomen import SHAPE, SPACING, Body, Place, Window, field, union
from anomed.phantoms.picture import generator

SUBJECTS = 25
KINDS = ("metastases", "hcc", "cyst", "haemangioma")
# Split, condition and group of each subject in turn, repeated. The first ten fill every split. Test holds normal
# subjects and patients of every group, so that no group's attenuation or noise tells the classes apart.
ROLES = (
    "train normal A", "test metastases A", "train normal B", "test normal B", "valid normal A", "train normal C",
    "test cyst C", "valid metastases B", "test hcc B", "train normal A", "test normal A", "train normal B",
    "test haemangioma A", "train normal C", "test normal C", "train normal A", "test metastases C", "train normal B",
    "valid haemangioma C", "train normal C", "test hcc A", "train normal A", "test cyst B", "train normal B",
    "train normal C",
)  # fmt: skip


class Member(NamedTuple):
    """One subject of the cohort. kind: "normal" or one of KINDS. group: see `Group`."""

    subject: str
    split: str
    kind: str
    group: str


class Volumes(NamedTuple):
    """A finished CT, SHAPE in RAS order on the grid of `affine`. ct: int16, HU. lesion, liver: uint8, 0 or 1; the liver
    includes its lesions."""

    ct: np.ndarray
    lesion: np.ndarray
    liver: np.ndarray


def cohort(subjects: int) -> list[Member]:
    """The first `subjects` of an endless cohort: a subject is the same however many there are."""
    return [Member(f"ct-{i + 1:02d}", *ROLES[i % len(ROLES)].split()) for i in range(subjects)]


def affine() -> np.ndarray:
    """Voxel to scanner millimetres, RAS+, 4 x 4: the isocentre is the middle of the volume."""
    matrix = np.diag([*SPACING, 1.0])
    matrix[:3, 3] = [-step * (n - 1) / 2 for step, n in zip(SPACING, SHAPE, strict=True)]
    return matrix


@dataclass(frozen=True)
class Group:
    """What subjects of one group have in common, HU: attenuation of the liver and what tells of the contrast phase, and
    the scanner's noise. The livers of group C are fatty."""

    liver: float
    vessels: float
    spleen: float
    aorta: float
    noise: float

    @classmethod
    def draw(cls, seed: int, name: str) -> "Group":
        """The group `name` of the cohort `seed`."""
        rng = generator(seed, f"group {name}")
        ranges = {"liver": (70, 82) if name == "C" else (98, 122), "vessels": (150, 175), "spleen": (112, 130)}
        ranges |= {"aorta": (145, 175), "noise": (6, 9)}
        return cls(**{key: float(rng.uniform(*span)) for key, span in ranges.items()})


@dataclass
class Liver:
    """The liver of a body. rng: of the lesions alone, so that the same body exists with and without them. depth: mm
    to its surface, negative within. level, vessels: HU. truth: bool, the lesions painted so far."""

    rng: np.random.Generator
    body: Body
    depth: np.ndarray
    level: float
    vessels: float
    truth: np.ndarray

    def places(self, number: int, radius: float) -> list[Place]:
        """Standard places of lesions, spread over the slices that show enough liver. Small sections are as likely to be
        hit as large ones, else the area of the organ would tell the classes apart."""
        area = (self.depth < 0).sum((0, 1)) * SPACING[0] * SPACING[1]
        slices = np.flatnonzero(area >= 3000)
        chances = area[slices] ** -0.5
        found: list[Place] = []
        while len(found) < number:
            for z in self.rng.choice(slices, min(len(slices), number - len(found)), False, chances / chances.sum()):
                deep = self.depth[..., z] < max(-0.8 * radius, np.quantile(self.depth[..., z], 0.03))
                choices = np.flatnonzero(deep)
                at = np.unravel_index(choices[self.rng.integers(len(choices))], deep.shape)
                x, y, height = (float(axis[(*at, z)]) for axis in self.body.points)
                found.append((x, y, height))
        return found

    def blob(self, centre: Place, radius: float, rough: float) -> tuple[Window, np.ndarray]:
        """An irregular ellipsoid: its window and the distance to its surface, mm."""
        window = self.body.near(centre, 1.7 * radius + 8)
        axes = np.exp(self.rng.normal(0, 0.14, 3)) * radius
        distance = self.body.ellipsoid(window, centre, (axes[0], axes[1], max(axes[2], 4.0)))
        return window, distance + rough * radius * field(self.rng, distance.shape, max(6.0, 0.9 * radius))

    def paint(self, window: Window, distance: np.ndarray, hu: Any, soft: float, mark: bool = False) -> None:
        """Replace what lies within a surface and in the liver; `mark` adds it to the truth."""
        self.body.fill(window, np.maximum(distance, self.depth[window]), hu, soft)
        if mark:
            self.truth[window] |= (distance < 0) & (self.depth[window] < 0)


def _metastases(liver: Liver) -> None:
    """Several ill-defined hypodense lesions, some with a darker core or a faint rim."""
    rng = liver.rng
    contrast = rng.uniform(28, 62)
    for centre in liver.places(int(rng.integers(5, 10)), 10.0):
        radius = float(rng.uniform(4, 16))
        window, distance = liver.blob(centre, radius, 0.14)
        soft = rng.uniform(3, 6)
        if rng.random() < 0.3:
            liver.paint(window, distance - 2, liver.level + rng.uniform(8, 20), soft, mark=True)
        dark = liver.level - contrast * rng.uniform(0.75, 1.15)
        liver.paint(window, distance, dark + 3 * field(rng, distance.shape, 8.0), soft, mark=True)
        if rng.random() < 0.5 and radius > 7:
            liver.paint(window, distance + 0.45 * radius, dark - rng.uniform(10, 25), 4.0)


def _hcc(liver: Liver) -> None:
    """A few nodules, a mosaic of washed-out and still enhanced parts in a thin bright capsule."""
    rng = liver.rng
    for centre in liver.places(int(rng.integers(2, 5)), 18.0):
        radius = float(rng.uniform(11, 25))
        window, distance = liver.blob(centre, radius, 0.1)
        capsule = liver.level + rng.uniform(14, 36)
        liver.paint(window, distance, capsule, 2.5, mark=True)
        washout = liver.level - rng.uniform(12, 42)
        mosaic = washout + rng.uniform(9, 20) * field(rng, distance.shape, rng.uniform(8, 14))
        liver.paint(window, distance + rng.uniform(2.0, 3.5), mosaic, 2.5)


def _cyst(liver: Liver) -> None:
    """Sharp round holes near the density of water, from a few millimetres to some centimetres."""
    rng = liver.rng
    for centre in liver.places(int(rng.integers(5, 10)), 10.0):
        window, distance = liver.blob(centre, float(np.exp(rng.uniform(np.log(3.5), np.log(19)))), 0.05)
        liver.paint(window, distance, rng.uniform(-2, 14), 2.0, mark=True)


def _haemangioma(liver: Liver) -> None:
    """Hypodense with nodules as bright as the vessels along the rim, filling in from there."""
    rng = liver.rng
    for centre in liver.places(int(rng.integers(4, 8)), 12.0):
        radius = float(rng.uniform(6, 22))
        window, distance = liver.blob(centre, radius, 0.12)
        liver.paint(window, distance, liver.level - rng.uniform(30, 58), 3.0, mark=True)
        nodules = field(rng, distance.shape, max(7.0, 0.6 * radius)) - rng.uniform(0.0, 0.5)
        rim = np.maximum(np.abs(distance + 0.2 * radius) - 0.26 * radius, -4 * nodules)
        liver.paint(window, np.maximum(rim, distance), liver.vessels - rng.uniform(0, 15), 2.5)


def _shape(body: Body) -> np.ndarray:
    """Distance to the surface of the liver: two lobes under the diaphragm, pressed in by kidney, stomach and bowel."""
    rng, everywhere = body.rng, (slice(None),) * 3
    lobe = body.ellipsoid(everywhere, body.near_by(78, -8, -2), (74, 88, rng.uniform(76, 90)))
    left = (rng.uniform(62, 96), rng.uniform(34, 44), rng.uniform(30, 42))
    depth = union(lobe, body.ellipsoid(everywhere, body.near_by(8, 46, 14), left), 14.0)
    hollows = [
        ((-12, -28, -34), (rng.uniform(56, 68), 62, 80)), ((54, -74, -72), (44, 44, 62)),
        ((-62, 10, 10), (44, 60, 60)), ((24, -36, 0), (14, 12, 400)), ((30, 26, -62), (42, 46, 50)),
    ]  # fmt: skip
    for centre, radii in hollows:
        depth = -union(-depth, body.ellipsoid(everywhere, body.near_by(*centre, spread=4.0), radii), 8.0)
    x, y, _ = body.points
    cleft = np.maximum(np.abs(x - rng.uniform(14, 24) - 0.1 * y) - rng.uniform(-1, 2.5), rng.uniform(20, 45) - y)
    cleft = np.maximum(cleft, body.points[2] - rng.uniform(0, 20))  # of the round ligament, below
    depth = np.maximum(depth, -cleft)
    depth = np.maximum(depth, np.maximum(body.dome, -body.inside) + np.float32(3.0))
    return _largest(depth + np.float32(1.5) * field(rng, depth.shape, 22.0))


def _largest(depth: np.ndarray) -> np.ndarray:
    """The shape without the crumbs that hollows cut off."""
    from scipy import ndimage

    parts, _ = ndimage.label(depth < 0)
    parts[parts == np.bincount(parts[parts > 0]).argmax()] = 0
    return np.where(parts > 0, np.float32(3.0), depth)


def _tree(body: Body, depth: np.ndarray, hu: float) -> None:
    """Hepatic veins, portal vein with its branches, and small vessels throughout, wider near the middle."""
    rng, within = body.rng, depth + np.float32(3.0)
    first, second = field(rng, depth.shape, 24.0), field(rng, depth.shape, 24.0)
    x, y, z = body.points
    core = np.exp(-((x - 45) ** 2 + y**2 + (z - 5) ** 2) / np.float32(60**2))
    off = np.sqrt(first**2 + second**2) * np.float32(9.0) - (np.float32(0.7) + np.float32(1.5) * core)
    body.fill((slice(None),) * 3, np.maximum(off, within), hu, 2.5)
    top = body.near_by(26, -30, 38)
    for place in ((104, -30, 8), (70, 38, 6), (10, 44, 24)):
        body.tube(top, body.near_by(*place, spread=12.0), (5.5, 1.5), hu, within)
    gate, right = body.near_by(26, 0, -10), body.near_by(68, -12, -2, spread=8.0)
    for start, end, radii in (
        (gate, right, (6.5, 5.0)), (right, (104, 14, 10), (4.0, 1.5)), (right, (106, -36, -28), (4.0, 1.5)),
        (right, (92, -4, -50), (3.5, 1.5)), (gate, (14, 36, 12), (4.5, 2.5)), ((14, 36, 12), (-20, 46, 20), (3.0, 1.2)),
    ):  # fmt: skip
        body.tube(start, end if end == right else body.near_by(*end, spread=10.0), radii, hu, within)


def _detector(rng: np.random.Generator, hu: np.ndarray, noise: float) -> np.ndarray:
    """The scanner's blur and its correlated noise, longer sideways, where the body is widest."""
    from scipy import ndimage

    blurred = ndimage.gaussian_filter(hu, (0.45, 0.45, 0))
    grain = ndimage.gaussian_filter(rng.standard_normal(hu.shape, dtype=np.float32), (rng.uniform(0.55, 0.95), 0.5, 0))
    grain -= ndimage.uniform_filter(grain, (7, 5, 1))
    return np.asarray(blurred + np.float32(noise) / grain.std() * grain)


def synthesise(seed: int, subject: str, kind: str, group: str) -> Volumes:
    """One CT.

    kind: "normal" or one of KINDS. group: A, B or C, see `Group`. Everything is drawn from generators seeded by (seed,
    subject) and (seed, group) alone, so that a CT does not depend on its neighbours, and no operation depends on a
    thread count. Lesions and noise have generators of their own: with another kind the same body is scanned.
    """
    rng, shared = generator(seed, subject), Group.draw(seed, group)
    level = shared.liver + float(rng.uniform(-3, 3))
    body = abdomen.trunk(rng)
    abdomen.organs(body, shared.vessels, shared.spleen, shared.aorta)
    depth, vessels = _shape(body), level + min(shared.vessels - level, 64.0) * rng.uniform(0.8, 1)
    everywhere = (slice(None),) * 3
    body.fill(everywhere, depth, level + 1.5 * field(rng, depth.shape, 14.0) + 2 * field(rng, depth.shape, 60.0))
    _tree(body, depth, vessels)
    bladder = generator(seed, f"{subject} gallbladder")
    if bladder.random() < 0.75:
        body.organ(body.near_by(44, 30, -46), (14, 19, 26), bladder.uniform(2, 20))
    liver = Liver(generator(seed, f"{subject} lesion"), body, depth, level, vessels, np.zeros(depth.shape, bool))
    if kind != "normal":
        {"metastases": _metastases, "hcc": _hcc, "cyst": _cyst, "haemangioma": _haemangioma}[kind](liver)
    ct = _detector(generator(seed, f"{subject} noise"), body.hu, shared.noise)
    truth = (liver.truth.astype(np.uint8), (depth < 0).astype(np.uint8))
    return Volumes(np.clip(np.round(ct), -1024, 3071).astype(np.int16), *truth)


def make(seed: int, member: Member) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The volumes of a body by what they are, `ct`, `lesion`, `liver`, and their affine (about half a second)."""
    return synthesise(seed, member.subject, member.kind, member.group)._asdict(), affine()
