"""The body around a synthetic liver: trunk, bones, lungs and organs of an abdominal CT, painted as ellipsoids in HU."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from anomed.phantoms.picture import field3

SHAPE = (184, 184, 14)  # voxels of a CT, RAS order: right, anterior, superior
SPACING = (2.0, 2.0, 10.0)  # mm

Field = np.ndarray  # float32, SHAPE unless said otherwise
Place = tuple[float, float, float]  # mm: right, anterior, superior
Window = tuple[slice, ...]


def field(rng: np.random.Generator, shape: tuple[int, ...], wavelength: float) -> np.ndarray:
    """A smooth random field of about unit variance; `wavelength` in mm."""
    return field3(rng, shape, SPACING, wavelength)


def union(first: np.ndarray, second: np.ndarray, smooth: float) -> np.ndarray:
    """Distance to the union of two shapes, the crease between them filled over `smooth` mm."""
    share = np.clip(0.5 + 0.5 * (second - first) / smooth, 0, 1)
    return np.asarray(second + share * (first - second) - smooth * share * (1 - share))


@dataclass
class Body:
    """A body being built. points: standard mm of each voxel, pose, size and shape of the subject undone. inside: mm
    within the wall of the trunk (negative outside). dome: mm above the diaphragm. hu: float32."""

    rng: np.random.Generator
    points: list[Field]
    size: np.ndarray
    shift: np.ndarray
    inside: Field
    dome: Field
    hu: Field

    def near(self, centre: Place, reach: float) -> Window:
        """The voxels that may lie within `reach` mm of a standard place."""
        spans = zip(np.array(centre) * self.size + self.shift, SPACING, SHAPE, strict=True)
        return tuple(
            slice(
                int(np.clip((at - reach) / step + (n - 1) / 2, 0, n - 1)),
                int(np.clip((at + reach) / step + (n - 1) / 2 + 2, 1, n)),
            )
            for at, step, n in spans
        )

    def ellipsoid(self, window: Window, centre: Place, radii: Place) -> np.ndarray:
        """Distance to an ellipsoid's surface, mm, to first order; negative within."""
        offsets = [axis[window] - np.float32(at) for axis, at in zip(self.points, centre, strict=True)]
        parts = [offset / np.float32(radius) for offset, radius in zip(offsets, radii, strict=True)]
        ratio = np.sqrt(sum(part**2 for part in parts))
        slope = np.sqrt(sum((part / np.float32(radius)) ** 2 for part, radius in zip(parts, radii, strict=True)))
        return np.asarray((ratio - 1) * ratio / np.maximum(slope, np.float32(1e-4)))

    def fill(self, window: Window, distance: Any, hu: Any, soft: float = 2.0) -> None:
        """Replace what lies within a surface; the edge is a ramp of `soft` mm."""
        alpha = np.clip(0.5 - distance / np.float32(soft), 0, 1)
        self.hu[window] += alpha * (hu - self.hu[window])

    def organ(self, centre: Place, radii: Place, hu: Any, gap: float | None = 3.0) -> None:
        """Paint one ellipsoid, kept `gap` mm from wall and diaphragm (None: wherever it lies)."""
        window = self.near(centre, max(radii) * 1.15 + 14)
        distance = self.ellipsoid(window, centre, radii)
        if gap is not None:
            distance = np.maximum(distance, np.maximum(self.dome[window], -self.inside[window]) + gap)
        self.fill(window, distance, hu)

    def near_by(self, *centre: float, spread: float = 5.0) -> Place:
        """A place near a standard one."""
        x, y, z = (float(at + self.rng.uniform(-spread, spread)) for at in centre)
        return x, y, z

    def tube(self, start: Place, end: Place, radii: tuple[float, float], hu: float, within: Field) -> None:
        """Paint a tapering vessel where `within` is negative."""
        middle = [(a + b) / 2 for a, b in zip(start, end, strict=True)]
        axis = np.subtract(end, start)
        window = self.near((middle[0], middle[1], middle[2]), float(np.linalg.norm(axis)) / 2 * 1.15 + 20)
        offsets = [points[window] - np.float32(at) for points, at in zip(self.points, start, strict=True)]
        along = sum(offset * np.float32(step) for offset, step in zip(offsets, axis, strict=True)) / (axis @ axis)
        along = np.clip(along, 0, 1).astype(np.float32)
        off = np.sqrt(sum((offset - along * np.float32(step)) ** 2 for offset, step in zip(offsets, axis, strict=True)))
        distance = off - np.float32(radii[0]) - along * np.float32(radii[1] - radii[0])
        self.fill(window, np.maximum(distance, within[window]), hu, 3.0)


def trunk(rng: np.random.Generator) -> Body:
    """Pose, size and shape of a subject, with the wall, skin and table; inside nothing but fat and lung."""
    size = rng.uniform(0.93, 1.07) * rng.uniform(0.96, 1.04, 3)
    shift = rng.uniform((-8, -6, -9), (8, 10, 9))
    axes = [(np.arange(n) - (n - 1) / 2) * step for n, step in zip(SHAPE, SPACING, strict=True)]
    scanner = [np.broadcast_to(axis, SHAPE) for axis in np.meshgrid(*axes, indexing="ij", sparse=True)]
    moved = [((axis - at) / by).astype(np.float32) for axis, at, by in zip(scanner, shift, size, strict=True)]
    angle = np.float32(np.deg2rad(rng.uniform(-6, 6)))
    cos, sin = np.cos(angle), np.sin(angle)
    moved[:2] = cos * moved[0] - sin * moved[1], sin * moved[0] + cos * moved[1]
    x, y, _ = moved
    power = np.float32(rng.uniform(2.1, 2.6))
    back = np.where(y < 0, np.float32(rng.uniform(86, 94)), np.float32(rng.uniform(84, 108)))
    rho = np.maximum((np.abs(x / 126) ** power + np.abs(y / back) ** power) ** (1 / power), np.float32(1e-3))
    outside = np.sqrt(x * x + y * y) * (1 - 1 / rho)  # mm along the ray from the centre

    muscle, fat = rng.uniform(11, 14), rng.uniform(6, 26)
    steps = [
        (-4, -105), (-1, 20), (1, 50), (muscle - 1, 55), (muscle + 1, -105), (muscle + fat, -105),
        (muscle + fat + 0.7, 10), (muscle + fat + 2, 10), (muscle + fat + 3, -1000),
    ]  # fmt: skip
    hu = np.interp(outside, *np.array(steps).T).astype(np.float32)
    body = Body(rng, moved, size, shift, -outside, np.empty(0), hu)
    _ribs(body, outside, 0.5 * muscle)
    for axis, wave in zip(moved, (4.0, 4.0, 3.0), strict=True):
        axis += np.float32(wave) * field(rng, SHAPE, 75.0)
    everywhere = (slice(None),) * 3
    right = body.ellipsoid(everywhere, (68, -6, -42), (92, 106, rng.uniform(100, 112)))
    left = body.ellipsoid(everywhere, (-70, -4, -48), (86, 100, rng.uniform(88, 98)))
    middle = body.ellipsoid(everywhere, (0, 20, -40), (50, 100, 92))
    body.dome = union(union(right, middle, 20.0), left, 20.0)
    lung = np.maximum(-body.dome, outside + 2)
    body.fill(everywhere, lung, -860 + 90 * np.maximum(field(rng, SHAPE, 9.0) - 0.8, 0), 3.0)
    table = np.abs(scanner[1] + np.float32(128 + rng.uniform(0, 10)) - (scanner[0] / 46) ** 2) - 2.5
    table = np.maximum(table, np.maximum(np.abs(scanner[0]) - 170, muscle + fat + 4 - outside))
    body.fill(everywhere, table, rng.uniform(-200, 150), 2.0)
    return body


def _ribs(body: Body, outside: Field, depth: float) -> None:
    """Flat bones in the lateral wall, running downwards to the front, the same on both sides."""
    x, y, z = body.points
    angle = np.arctan2(np.abs(x) * np.float32(0.75), -y)  # 0 at the spine, pi in front
    wave = np.cos(9 * angle + z * np.float32(2 * np.pi / 30) + np.float32(body.rng.uniform(0, 6.28)))
    width = 105 * (1 - wave) / 9 - np.float32(4.0)  # half the length of a section, roughly mm
    shape = np.maximum(np.maximum(np.abs(outside - depth) - 3.5, width), 60 * np.maximum(0.5 - angle, angle - 2.35))
    body.fill((slice(None),) * 3, shape, np.clip(700 + 160 * shape, 180, 620))


def _spine(body: Body) -> None:
    """Vertebra, canal, processes, and the muscles on both sides."""
    rng, marrow = body.rng, body.rng.uniform(140, 230)
    window = body.near((0, -85, 0), 85)
    window = (*window[:2], slice(None))
    for side in (-1, 1):
        muscle = body.ellipsoid(window, (side * 30, -94, 0), (27, 19, 400))
        streaks = 55 - 60 * np.maximum(field(rng, muscle.shape, 10.0) - 1, 0)
        body.fill(window, np.maximum(muscle, -body.inside[window] - 14), streaks)
        psoas = body.ellipsoid(window, (side * 26, -66, -90), (14, 14, 70))
        body.fill(window, psoas, 58)
    process = union(
        body.ellipsoid(window, (0, -102, 0), (4, 14, 400)), body.ellipsoid(window, (0, -90, 0), (38, 4, 400)), 8.0
    )
    vertebra = body.ellipsoid(window, (0, -66, 0), (21, 16, 400))
    bone = union(union(process, vertebra, 6.0), body.ellipsoid(window, (0, -90, 0), (15, 13, 400)), 4.0)
    bone = np.maximum(bone, -body.inside[window] - 12)
    body.fill(window, bone, np.clip(700 + 130 * bone, marrow, 620) + 15 * field(rng, bone.shape, 8.0))
    body.fill(window, body.ellipsoid(window, (0, -88, 0), (10, 8, 400)), 35)


def _vessels(body: Body, vessels: float, aorta: float) -> None:
    """Aorta and inferior vena cava."""
    window = (*body.near((4, -40, 0), 70)[:2], slice(None))
    body.fill(window, body.ellipsoid(window, (-15, -44, 0), (11, 11, 400)), aorta)
    cava = body.rng.uniform(9, 14)
    body.fill(window, body.ellipsoid(window, (23, -36, 0), (cava, 10, 400)), vessels - 10)


def _bowel(body: Body, centre: Place, radii: Place) -> None:
    """A hollow organ: wall, content, and often gas that rises to the front."""
    rng = body.rng
    body.organ(centre, radii, rng.uniform(70, 105))
    inner = tuple(max(radius - rng.uniform(2.5, 4), 2.0) for radius in radii)
    window = body.near(centre, max(radii) * 1.15 + 14)
    distance = body.ellipsoid(window, centre, (inner[0], inner[1], inner[2]))
    distance = np.maximum(distance, np.maximum(body.dome[window], -body.inside[window]) + 5)
    food = rng.uniform(0, 60) + rng.uniform(2, 25) * field(rng, distance.shape, 12.0)
    body.fill(window, distance, food)
    if rng.random() < 0.6:
        level = centre[1] + rng.uniform(-0.2, 0.8) * radii[1]
        body.fill(window, np.maximum(distance, level - body.points[1][window]), -960.0)


def organs(body: Body, vessels: float, spleen: float, aorta: float) -> None:
    """Everything in the trunk but the liver, from the back to the front."""
    rng = body.rng
    _spine(body)
    body.organ(body.near_by(-22, 34, 84), (62, 46, 46), rng.uniform(110, 150), gap=None)  # heart
    _vessels(body, vessels, aorta)
    for side in (-1, 1):
        kidney = body.near_by(side * 60, -58, -70 + 12 * (side < 0))
        body.organ(kidney, (27, 25, 50), rng.uniform(165, 195))
        body.organ((kidney[0] - side * 9, kidney[1] + 4, kidney[2]), (13, 10, 26), rng.uniform(-80, 90))  # sinus
    for place in ((-20, 44), (-52, 60), (-94, 26), (-58, 14), (8, 30), (-30, 6), (30, 64), (-88, -12), (-2, 66)):
        x, y, z = body.near_by(*place, -66, spread=9.0)
        wide, high, long = rng.uniform((15, 13, 22), (34, 24, 46))
        _bowel(body, (x, y, z), (wide, high, long))
    for place in rng.uniform((-80, -20, -70), (30, 60, 10), (50, 3)):  # mesenteric vessels and nodes
        (x, y, z), (wide, high) = place, rng.uniform(2, 5, 2)
        body.organ((x, y, z), (wide, high, 12.0), rng.uniform(60, 150))
    body.organ(body.near_by(-20, -2, -22), (55, 11, 13), rng.uniform(85, 110))  # pancreas
    body.organ(body.near_by(-103, -34, 12), (33, 48, 50), spleen)
    _bowel(body, body.near_by(-52, 34, 14, spread=8.0), (rng.uniform(36, 54), rng.uniform(34, 48), 52))  # stomach
