"""Tissues of a synthetic H&E patch: lymphoid, stroma, sinus, fat and tumour, drawn as amounts of two stains.

Each is a generator of two steps: the ground of its region, then its cells, which may reach across the border. Its
density, tone and the like come from `look`, so that patches may have them in common; all places from the tissue's rng.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from anomed.phantoms.picture import field

SIZE = 192  # pixels, both axes; a lymphocyte is about 17 across
SHAPE = (SIZE, SIZE)

Field = np.ndarray  # float32, SHAPE
Place = tuple[float, float]  # row, column
Cell = tuple[float, float, float]
Window = tuple[slice, slice]


@dataclass
class Tissue:
    """A patch being built. blue, pink: amounts of haematoxylin and eosin. rows, columns: of each pixel. grain, coarse:
    texture that all cells share, since a field for each is slow. taken: row, column, radius of the cells placed."""

    rng: np.random.Generator
    blue: Field
    pink: Field
    rows: Field
    columns: Field
    grain: Field
    coarse: Field
    taken: list[Cell]

    @classmethod
    def empty(cls, rng: np.random.Generator) -> "Tissue":
        """Glass with nothing on it."""
        from scipy import ndimage

        rows, columns = np.mgrid[:SIZE, :SIZE].astype(np.float32)
        grain = ndimage.gaussian_filter(rng.standard_normal(SHAPE, dtype=np.float32), 1.3) * np.float32(4.6)
        return cls(
            rng,
            np.zeros(SHAPE, np.float32),
            np.zeros(SHAPE, np.float32),
            rows,
            columns,
            grain,
            field(rng, SHAPE, 11),
            [],
        )

    def scatter(self, where: np.ndarray, spacing: float, tries: int) -> list[Place]:
        """Random places of `where`, at least about `spacing` apart and clear of the cells that are there."""
        if not where.any():
            return []
        choices, count = np.flatnonzero(where), len(self.taken)
        kept = np.full((count + tries, 3), 1e6)
        kept[:count] = np.reshape(self.taken, (-1, 3))
        radii = spacing / 2 * self.rng.uniform(0.85, 1.1, tries)
        picked = choices[self.rng.integers(len(choices), size=tries)]
        places = np.stack([picked // SIZE, picked % SIZE], 1) + self.rng.uniform(0, 1, (tries, 2))
        for (row, column), radius in zip(places.tolist(), radii.tolist(), strict=True):
            others = kept[:count]
            if ((others[:, 0] - row) ** 2 + (others[:, 1] - column) ** 2 >= (radius + others[:, 2]) ** 2).all():
                kept[count] = row, column, radius
                count += 1
        found = [(row, column, radius) for row, column, radius in kept[len(self.taken) : count].tolist()]
        self.taken += found
        return [(row, column) for row, column, _ in found]

    def ellipse(self, place: Place, axes: tuple[float, float], turn: float, rough: float) -> tuple[Window, np.ndarray]:
        """An irregular ellipse: its window, and the distance of each pixel from its middle in radii."""
        first = [max(0, int(at - 1.5 * max(axes))) for at in place]
        last = [max(0, int(at + 1.5 * max(axes)) + 2) for at in place]
        window = slice(first[0], last[0]), slice(first[1], last[1])
        down, right = self.rows[window] - place[0], self.columns[window] - place[1]
        cos, sin = float(np.cos(turn)), float(np.sin(turn))
        along, across = (cos * right + sin * down) / axes[0], (cos * down - sin * right) / axes[1]
        angle, phases = np.arctan2(across, along), self.rng.uniform(0, 2 * np.pi, 2).tolist()
        lobes = np.cos(2 * angle + phases[0]) + 0.6 * np.cos(3 * angle + phases[1])
        return window, np.hypot(along, across) * (1 + rough * lobes)

    def nucleus(
        self, place: Place, axes: tuple[float, float], dark: float, clear: float,
        rough: float = 0.08, nucleoli: int = 0, turn: float | None = None,
    ) -> None:  # fmt: skip
        """One nucleus. dark: its haematoxylin. clear: 0 for dense chromatin, 1 for a vesicle with a dark rim. turn:
        radians, at random if None."""
        rng, size = self.rng, min(axes)
        window, reach = self.ellipse(place, axes, rng.uniform(0, np.pi) if turn is None else turn, rough)
        inside = np.clip((1 - reach) * size / 1.6 + 0.5, 0, 1)
        rim = np.exp(-(((reach - 0.88) * size / 1.6) ** 2))
        texture = 1 + (0.16 + 0.18 * clear) * self.grain[window] + 0.12 * self.coarse[window]
        amount = dark * np.clip(texture, 0.3, 2) * (1 - 0.5 * clear + 0.6 * clear * rim)
        for right, down in (rng.uniform(-0.45, 0.45, (nucleoli, 2)) * size).tolist():
            away = np.hypot(self.rows[window] - place[0] - down, self.columns[window] - place[1] - right)
            amount += 0.5 * dark * np.exp(-((away / (0.17 * size + 0.7)) ** 2))
        self.blue[window] += inside * (amount - self.blue[window])
        self.pink[window] += inside * (0.28 - self.pink[window])


def _borders(centres: np.ndarray, shift: Field) -> Field:
    """Distance in pixels from the border between the two nearest centres. shift: bends the borders, in pixels."""
    from scipy import ndimage, spatial

    axis = np.arange(0.5, SIZE, 2)  # every second pixel
    points = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1) + shift[::2, ::2, None]
    distance, _ = spatial.cKDTree(centres).query(points.reshape(-1, 2), k=2)
    border = (distance[:, 1] - distance[:, 0]).reshape(len(axis), len(axis)) / 2
    return ndimage.zoom(border.astype(np.float32), 2, order=1)


def lymphoid(tissue: Tissue, where: np.ndarray, look: np.random.Generator) -> Iterator[None]:
    """Densely packed round dark nuclei of one size, hardly any cytoplasm, slits between; larger pale cells of a
    follicle's centre among them."""
    rng = tissue.rng
    radius, gap, dark = look.uniform(8.0, 9.2), look.uniform(0.95, 1.3), look.uniform(0.95, 1.45)
    slit = np.clip(look.uniform(0.9, 1.9) + 1.1 * tissue.coarse + 0.3 * tissue.grain, 0.08, 1)
    tissue.pink[where] = (look.uniform(0.22, 0.42) * slit * (1 + 0.15 * tissue.grain))[where]
    tissue.blue[where] = (look.uniform(0.05, 0.14) * slit)[where]
    follicle = look.uniform(0, 0.5) if look.random() < 0.5 else look.uniform(0, 0.08)
    yield
    for place in tissue.scatter(where, 2 * radius * gap, 900):
        central = rng.random() < follicle
        size = radius * (rng.uniform(1.1, 1.4) if central else rng.uniform(0.88, 1.08))
        axes = (size * rng.uniform(1, 1.2), size)
        if central:
            tissue.nucleus(place, axes, rng.uniform(0.6, 0.85), rng.uniform(0.4, 0.8), nucleoli=int(rng.integers(3)))
        else:
            tissue.nucleus(place, axes, dark * rng.uniform(0.85, 1.1), rng.uniform(0, 0.25))


def stroma(tissue: Tissue, where: np.ndarray, look: np.random.Generator) -> Iterator[None]:
    """Wavy bundles of collagen with slits, spindle nuclei along them."""
    rng = tissue.rng
    turn = look.uniform(0, 3.14)
    cos, sin = float(np.cos(turn)), float(np.sin(turn))
    wave = field(rng, SHAPE, 60)
    across = cos * tissue.rows - sin * tissue.columns + 11 * wave
    fibre = np.sin(across / look.uniform(1.6, 2.6) + tissue.coarse) * 0.10 + np.sin(across / 7) * 0.08
    amount = look.uniform(0.5, 0.8) + fibre + 0.08 * tissue.coarse + 0.04 * tissue.grain
    slit = np.clip(np.sin(across / 9 + 0.5 * tissue.coarse) + 0.25 * tissue.coarse - look.uniform(0.7, 1.1), 0, 1) * 4
    tissue.pink[where] = (np.clip(amount, 0.05, 2) * np.clip(1 - slit, 0.05, 1))[where]
    tissue.blue[where] = 0.04
    yield
    slope = np.gradient(wave)
    for place in tissue.scatter(where, rng.uniform(26, 40), 120):
        at = int(place[0]), int(place[1])
        along = np.arctan2(sin - 11 * slope[1][at], cos + 11 * slope[0][at])
        axes = (rng.uniform(8, 14), rng.uniform(2.4, 4.2))
        tissue.nucleus(place, axes, rng.uniform(0.8, 1.2), 0.2, turn=float(along))


def sinus(tissue: Tissue, where: np.ndarray, look: np.random.Generator) -> Iterator[None]:
    """A loose space: glass between strands, lymphocytes, pale histiocytes, red cells."""
    rng = tissue.rng
    strands = np.exp(-((field(rng, SHAPE, 22) / 0.22) ** 2))
    tissue.pink[where] = (0.05 + look.uniform(0.2, 0.4) * strands)[where]
    tissue.blue[where] = (0.02 + 0.06 * strands)[where]
    red = look.uniform(0, 0.4) if look.random() < 0.4 else 0.0
    spacing = look.uniform(19, 27)
    yield
    for place in tissue.scatter(where, spacing, 260):
        chance = rng.random()
        if chance < red:
            window, reach = tissue.ellipse(place, (6.5, 6.5), 0.0, 0.08)
            tissue.pink[window] += np.clip((1 - reach) * 5, 0, 1) * (1.15 - tissue.pink[window])
        elif chance < red + 0.3 * (1 - red):
            window, reach = tissue.ellipse(place, (15, 15), 0.0, 0.15)
            tissue.pink[window] += np.clip((1 - reach) * 3, 0, 1) * (0.34 - tissue.pink[window])
            axes = (rng.uniform(9, 12), rng.uniform(6.5, 8.5))
            tissue.nucleus(place, axes, rng.uniform(0.5, 0.7), 0.6)
        else:
            size = rng.uniform(7.5, 9.2)
            tissue.nucleus(place, (size, size), rng.uniform(1.05, 1.45), 0.15)


def fat(tissue: Tissue, where: np.ndarray, look: np.random.Generator) -> Iterator[None]:
    """Large empty vacuoles in thin membranes; a flat nucleus here and there."""
    rng = tissue.rng
    centres = look.uniform(-60, SIZE + 60, (int(look.integers(10, 20)), 2))
    border = _borders(centres, 5 * field(rng, SHAPE, 40))
    wall = np.exp(-((border / look.uniform(1.0, 1.8)) ** 2))
    tissue.pink[where] = (0.02 + 0.5 * wall * np.clip(1 + 0.4 * tissue.coarse, 0.3, 2))[where]
    tissue.blue[where] = (0.12 * wall)[where]
    yield
    for place in tissue.scatter(where & (border < 1.5), 60, 12):
        tissue.nucleus(place, (rng.uniform(6, 9), 2.6), 1.0, 0.1)


def tumour(tissue: Tissue, where: np.ndarray, look: np.random.Generator) -> Iterator[None]:
    """Crowded cells with wide cytoplasm in a nest: large pale nuclei of uneven size and shape with nucleoli, drawn
    together around a lumen where the nest forms a gland."""
    rng = tissue.rng
    size, spread = look.uniform(11.5, 15.5), look.uniform(0.08, 0.24)
    gap, dark, clear = look.uniform(2.1, 2.7), look.uniform(0.68, 1.1), look.uniform(0.3, 0.9)
    places = tissue.scatter(where, gap * size, 400)
    if len(places) < 3:  # a nest of narrow parts
        places += tissue.scatter(where, size, 400)
    centres = np.array(places)
    border = _borders(centres, 2 * field(rng, SHAPE, 25))
    cleft = np.exp(-((border / look.uniform(0.8, 2.2)) ** 2)) * look.uniform(0.1, 1)
    foam = np.clip(1.3 + look.uniform(0.2, 0.9) * tissue.coarse + 0.1 * tissue.grain, 0.05, 1)
    body = look.uniform(0.26, 0.54) * foam * (1 + 0.08 * tissue.grain) * (1 - cleft)
    tissue.pink[where] = np.clip(body, 0.05, 2)[where]
    tissue.blue[where] = (look.uniform(0.04, 0.15) * foam * (1 - cleft))[where]
    lumina = centres[: int(look.integers(0, 4))]
    for lumen in lumina.tolist():
        window, reach = tissue.ellipse(lumen, (look.uniform(8, 20), look.uniform(7, 14)), look.uniform(0, 3.14), 0.15)
        left = 1 - 0.95 * np.clip((1 - reach) * 8, 0, 1)
        tissue.pink[window] *= left
        tissue.blue[window] *= left
    yield
    for place in places:
        if (np.hypot(*(lumina - place).T) < 18).any():
            continue
        radius = size * np.exp(rng.normal(0, spread))
        axes = (radius * rng.uniform(1.0, 1.4), radius)
        tissue.nucleus(place, axes, dark * rng.uniform(0.75, 1.25), clear, 0.11, int(rng.integers(4)))


TISSUES = {"fat": fat, "sinus": sinus, "stroma": stroma, "tumour": tumour, "lymphoid": lymphoid}
