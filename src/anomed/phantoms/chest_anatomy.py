"""The anatomy of the synthetic chest film: attenuations of chest wall, heart, bones and vessels on the film's grid."""

from dataclasses import dataclass

import numpy as np

from anomed.phantoms.picture import field

SIZE = 256  # pixels of a film, both axes

Field = np.ndarray  # float32, SIZE x SIZE


@dataclass(frozen=True)
class Film:
    """How a film was taken, and of whom: what the two subjects of a matched pair have in common.

    Lengths in half film widths, attenuations relative to the abdomen. ap: taken from the front, lying or sitting: a
    larger heart, a higher diaphragm, shoulder blades over the lungs. letter: of the marker.
    """

    ap: bool
    scale: float
    wall: float
    breast: float
    low: float
    high: float
    gamma: float
    scatter: float
    noise: float
    arms: float
    letter: str
    edge: int

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "Film":
        ap, low = bool(rng.random() < 0.45), rng.uniform(0.02, 0.30)
        return cls(
            ap, rng.uniform(0.92, 1.15), rng.uniform(0.1, 0.32), max(0.0, rng.uniform(-0.2, 0.2)),
            low, low + rng.uniform(0.7, 1.05), rng.uniform(0.75, 1.35), rng.uniform(0.05, 0.2),
            rng.uniform(0.003, 0.009), rng.uniform(0.0, 0.35), "LR"[rng.integers(2)], int(rng.integers(0, 7)),
        )  # fmt: skip


@dataclass
class Chest:
    """A chest on the film's grid. x, y: patient coordinates, the left side at positive x, feet at positive y.

    s: distance from the midline as a fraction of the rib cage's half width. lung: air along the beam. solid: all else.
    dome: height of the right diaphragm.
    """

    rng: np.random.Generator
    film: Film
    pose: tuple[float, float, float, float]
    x: Field
    y: Field
    s: Field
    lung: Field
    solid: Field
    dome: float

    def pixels(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Column and row of patient coordinates."""
        right, down, cos, sin = self.pose
        half = SIZE / 2
        return (
            (self.film.scale * (cos * x - sin * y) + right + 1) * half,
            (self.film.scale * (sin * x + cos * y) + down + 1) * half,
        )

    def trace(self, x: np.ndarray, y: np.ndarray, width: float) -> Field:
        """Points joined to a line of `width` pixels: about 1 on its middle where points lie a pixel apart."""
        from scipy import ndimage

        columns, rows = (np.floor(axis).astype(int) for axis in self.pixels(x, y))
        inside = (columns >= 0) & (columns < SIZE) & (rows >= 0) & (rows < SIZE)
        dots = np.bincount(rows[inside] * SIZE + columns[inside], minlength=SIZE * SIZE).reshape(SIZE, SIZE)
        return 2.5 * width * ndimage.gaussian_filter(np.minimum(dots, 2).astype(np.float32), width)


def haze(rng: np.random.Generator, wavelength: float) -> Field:
    """As `field`, for a film: splines on every fourth pixel, a fifth of the time."""
    from scipy import ndimage

    return ndimage.zoom(field(rng, (SIZE // 4, SIZE // 4), wavelength / 4), 4, order=1, mode="nearest")


def inside(distance: Field, width: float) -> Field:
    """1 where `distance` is negative, 0 where positive, a ramp of `width` between."""
    return np.clip(0.5 - distance / width, 0, 1)


def ellipsoid(x: Field, y: Field, centre: tuple[float, float], axes: tuple[float, float], tilt: float = 0.0) -> Field:
    """Thickness of an ellipsoid along the beam, 1 in its middle. tilt: radians, clockwise on the film."""
    cos, sin = np.cos(tilt), np.sin(tilt)
    x, y = x - np.float32(centre[0]), y - np.float32(centre[1])
    along, across = (cos * x + sin * y) / axes[0], (cos * y - sin * x) / axes[1]
    return np.sqrt(np.clip(1 - along**2 - across**2, 0, 1)).astype(np.float32)


def _tube(distance: Field) -> Field:
    """A bone seen from the side: distance from its axis in half widths; the cortex is brighter than the marrow."""
    return 0.6 * np.sqrt(np.clip(1 - distance**2, 0, 1)) + 0.55 * np.exp(-(((np.abs(distance) - 0.85) / 0.2) ** 2))


def stage(rng: np.random.Generator, film: Film) -> Chest:
    """An empty rib cage in its pose, with the air that it would hold."""
    angle = np.deg2rad(rng.normal(0, 1.5))
    pose = (rng.uniform(-0.06, 0.06), rng.uniform(-0.04, 0.08), float(np.cos(angle)), float(np.sin(angle)))
    axis = ((np.arange(SIZE, dtype=np.float32) + 0.5) / (SIZE / 2)) - 1
    right, down = (axis - np.float32(pose[0]))[None, :], (axis - np.float32(pose[1]))[:, None]
    x = (pose[2] * right + pose[3] * down) / np.float32(film.scale)
    y = (pose[2] * down - pose[3] * right) / np.float32(film.scale)
    x, y = x + 0.010 * haze(rng, 60), y + 0.010 * haze(rng, 60)
    width, top, widest = rng.uniform(0.64, 0.72), rng.uniform(-0.80, -0.70), rng.uniform(0.1, 0.35)
    rise = np.clip((widest - y) / (widest - top + 0.06), 0, 1)
    cage = np.maximum(width * (1 - rise**2.4) ** 0.5, 1e-3)
    cage *= np.where(x < 0, np.float32(rng.uniform(0.96, 1.04)), np.float32(rng.uniform(0.96, 1.04)))
    s = np.minimum(np.abs(x) / cage, 1)
    dome = rng.uniform(0.36, 0.50) - (0.10 if film.ap else 0.0)
    right, left = dome + 1.1 * (x + 0.32) ** 2, dome + rng.uniform(0.01, 0.08) + 1.1 * (x - 0.36) ** 2
    below = y - np.where(x < 0, right, left)
    apex = top + 2.2 * (np.abs(x) - 0.27) ** 2
    lung = 0.66 * np.sqrt(1 - s**2) * inside(below, 0.025) * inside(apex - y, 0.05)
    return Chest(rng, film, pose, x, y, s, lung, np.zeros_like(x), dome)


def body(chest: Chest) -> None:
    """Chest wall, abdomen with gas, shoulders, neck, arms, breasts."""
    rng, film, x, y = chest.rng, chest.film, chest.x, chest.y
    across = np.abs(x)
    torso = 0.68 + film.wall + 0.30 * np.clip((-0.25 - y) / 0.3, 0, 1) ** 1.5 + 0.03 * np.clip(y - 0.3, 0, 1)
    shoulder = -0.98 + rng.uniform(0.22, 0.36) * np.clip((across - 0.2) / 0.8, 0, 1) ** 1.2
    solid = np.sqrt(np.clip(1 - (across / torso) ** 2, 0, 1)) ** 0.8
    solid *= np.sqrt(np.clip((y - shoulder) / 0.3, 0, 1))
    neck = 0.62 * np.sqrt(np.clip(1 - (x / rng.uniform(0.2, 0.27)) ** 2, 0, 1)) * (y < -0.5)
    solid = np.maximum(solid, neck)
    for side in (-1, 1):
        arm = (side * x - 0.98 - film.arms * np.clip(y + 0.6, 0, 2) + 0.06) / 0.17
        part = 0.5 * np.sqrt(np.clip(1 - arm**2, 0, 1)) * np.sqrt(np.clip((y + 0.75) / 0.2, 0, 1))
        solid = np.maximum(solid, part)
        bone = 0.08 * _tube(np.clip((arm - 0.1) / 0.3, -2, 2)) * (y > -0.6)
        chest.solid += bone + 0.09 * ellipsoid(x, y, (side * 0.95, -0.60), (0.13, 0.12))
        if film.breast:
            centre = (side * rng.uniform(0.40, 0.46), rng.uniform(0.18, 0.3))
            chest.solid += film.breast * ellipsoid(x, y, centre, (0.32, rng.uniform(0.22, 0.32))) * inside(-y, 0.6)
    chest.solid += solid
    gas = np.clip(haze(rng, rng.uniform(16, 36)) - 0.6, 0, 1) * inside(chest.dome + 0.12 - y, 0.1)
    bubble = ellipsoid(x, y, (rng.uniform(0.3, 0.42), chest.dome + 0.16), (rng.uniform(0.08, 0.17), 0.06))
    chest.solid -= rng.uniform(0, 0.12) * gas + rng.uniform(0, 0.25) * bubble


def heart(chest: Chest, size: float, bend: Field) -> None:
    """Heart, great vessels and airway, which displace air. size: of the heart, 1 for a normal one."""
    rng, x, y = chest.rng, chest.x - 0.3 * bend, chest.y
    size *= rng.uniform(0.92, 1.06) * (1.1 if chest.film.ap else 1.0)
    low = chest.dome
    parts = [
        ellipsoid(x, y, (0.10 * size, low - 0.17), (0.34 * size, 0.23 * size), 0.7),
        ellipsoid(x, y, (-0.05 * size, low - 0.16), (0.16 * size, 0.24 * size)),
        ellipsoid(x, y, (0.14 * size, low - 0.02), (0.27 * size, 0.14)),
        0.75 * ellipsoid(x, y, (rng.uniform(0.06, 0.09), -0.30), (rng.uniform(0.07, 0.1), 0.1)),
        0.8 * ellipsoid(x, y, (0.08, -0.15), (0.1, 0.14)),
        0.8 * np.sqrt(np.clip(1 - (x / (rng.uniform(0.12, 0.16) + 0.12 * np.clip(-0.5 - y, 0, 1))) ** 2, 0, 1)),
    ]
    for side in (-1, 1):
        parts.append(0.35 * ellipsoid(x, y, (side * 0.17, -0.07 - 0.03 * side), (0.07, 0.13), 0.2 * side))
    chest.lung *= 1 - 0.93 * np.max(parts, axis=0) ** 0.7
    shift = 0.02 * rng.normal()
    chest.solid -= 0.09 * np.sqrt(np.clip(1 - ((x - shift) / 0.036) ** 2, 0, 1)) * inside(y + 0.27, 0.03)
    for side, slope in ((-1, 1.0), (1, 0.7)):
        away = (side * (x - shift) - (y + 0.27) / slope) / 0.04
        chest.solid -= 0.05 * np.sqrt(np.clip(1 - away**2, 0, 1)) * inside(np.abs(y + 0.2) - 0.06, 0.03)


def bones(chest: Chest, bend: Field) -> None:
    """Ribs as tilted hoops, spine, collar bones, shoulder blades."""
    rng, x, y, s = chest.rng, chest.x, chest.y, chest.s
    depth = np.sqrt(1 - s**2)  # cosine of the angle along a hoop: 1 at the spine and at the breastbone, 0 at the side
    first, pitch, tilt = rng.uniform(-0.76, -0.70), rng.uniform(0.118, 0.135), rng.uniform(0.12, 0.19)
    half, strength = rng.uniform(0.024, 0.032) * (1 + s**6), rng.uniform(0.09, 0.15) / (depth + 0.5)
    strength = strength * ((np.abs(x) > 0.07) & (s < 1)) * (1 - 0.7 * np.clip((y - chest.dome) / 0.2, 0, 1))
    fade = 0.75 * np.clip((s - 0.38) / 0.25, 0, 1) * strength

    def draw(line: Field, half: Field, weight: Field) -> None:
        rows = np.flatnonzero((np.abs(y - line) < 1.6 * half).any(1))  # few: the rest is not worth computing
        chest.solid[rows] += weight[rows] * _tube((y[rows] - line[rows]) / half[rows])

    for rib in range(11):
        start, hoop = first + pitch * rib, tilt * (0.7 + 0.05 * rib)
        draw(start + hoop * (1 - depth) - 0.09 * s * depth, half, strength)
        if rib < 7:
            draw(start + 1.1 * hoop * (1 + depth) + 0.06, 1.1 * half, fade)
    along = (y - first) / pitch
    column = x - bend
    disc = 0.5 + 0.5 * np.cos(2 * np.pi * along)
    spine = inside(np.abs(column) - 0.085 + 0.012 * disc, 0.02) * (0.55 + 0.45 * np.clip(2 * disc, 0, 1))
    pedicle = np.exp(-((((np.abs(column) - 0.052) / 0.014) ** 2) + (np.sin(np.pi * along) / 0.3) ** 2))
    chest.solid += rng.uniform(0.05, 0.11) * (spine + 0.35 * pedicle)
    high, blade = rng.uniform(-0.05, 0.04), rng.uniform(0.52, 0.6) if chest.film.ap else rng.uniform(0.62, 0.74)
    for side in (-1, 1):
        u = side * x
        t = np.clip((u - 0.07) / 0.68, 0, 1)
        line = -0.60 + high - rng.uniform(0.06, 0.16) * t + 0.035 * np.sin(2 * np.pi * t)
        chest.solid += 0.11 * _tube((y - line) / 0.03) * inside(np.abs(u - 0.41) - 0.34, 0.03)
        edges = [blade + 0.22 * (y + 0.6) - u, -0.68 - y, (u - 0.98) + 0.42 * (y + 0.6)]
        nearest = np.max(edges, axis=0)
        chest.solid += 0.045 * inside(nearest, 0.02) + 0.03 * np.exp(-((nearest / 0.014) ** 2)) * (y < 0.1)


def vessels(chest: Chest) -> Field:
    """Branches from the hila that thin out, as thickness along the beam."""
    rng, found = chest.rng, np.zeros_like(chest.x)
    side = np.repeat((-1.0, 1.0), 9)
    x, y = side * rng.uniform(0.13, 0.19, 18), rng.uniform(-0.16, 0.06, 18) + 0.02
    angle = np.tile(np.linspace(-1.25, 1.3, 9), 2) + rng.normal(0, 0.12, 18)
    length, width = 0.15, 2.1
    for _ in range(5):
        run = length * rng.uniform(0.6, 1.3, len(x))
        steps = np.linspace(0, 1, 28)[:, None]
        curve = angle + rng.normal(0, 0.25, len(x)) * steps
        px, py = x + side * run * steps * np.cos(curve), y + run * steps * np.sin(curve)
        found += 0.034 * width * chest.trace(px.ravel(), py.ravel(), width / 2)
        x, y, side = np.tile(px[-1], 2), np.tile(py[-1], 2), np.tile(side, 2)
        fork = rng.uniform(0.15, 0.5, len(angle))
        angle = np.concatenate([curve[-1] - fork, curve[-1] + fork])
        length, width = 0.82 * length, 0.76 * width
    return found
