"""Synthetic frontal chest films, normal or with a finding: the cohort, the findings, the development of a film."""

import numpy as np

from anomed.phantoms import chest_anatomy as anatomy
from anomed.phantoms.chest_anatomy import SIZE, Chest, Field, Film
from anomed.phantoms.picture import Box, Painted, Picture, generator

SUBJECTS = 100  # one film each
OTHER_KIND = "No-Not-Normal"
OTHER = ("heart", "effusion", "device", "scoliosis")  # what a film of kind No-Not-Normal shows, one or two of them

# What pairs of consecutive subjects are, repeated: two normals for training, or a normal and a finding that are matched
# for build, projection and exposure, so that the brightness of a film does not tell the classes apart. Ten subjects
# fill every split.
PAIRS = (
    "train", "test Lung_Opacity", "valid No-Not-Normal", "train", "test No-Not-Normal",
    "train", "train", "test Lung_Opacity", "train", "test No-Not-Normal",
    "train", "test No-Not-Normal", "valid Lung_Opacity", "train", "test Lung_Opacity",
    "train", "train", "test Lung_Opacity", "train", "test No-Not-Normal",
)  # fmt: skip

_LETTERS = {  # 5 x 7 dots
    "L": ("1....", "1....", "1....", "1....", "1....", "1....", "11111"),
    "R": ("1111.", "1...1", "1...1", "1111.", "1.1..", "1..1.", "1...1"),
}


def cohort(subjects: int) -> list[Picture]:
    """The films of `subjects` subjects, one each."""
    pictures = []
    for i in range(subjects):
        split, *finding = PAIRS[i // 2 % len(PAIRS)].split()
        kind = finding[0] if finding and i % 2 else "normal"
        subject = f"sub-{i + 1:03d}"
        pictures.append(
            Picture(f"{split}/{'good' if kind == 'normal' else 'Ungood'}/{subject}_1", subject, split, kind)
        )
    return pictures


def _opacities(chest: Chest, rng: np.random.Generator) -> tuple[Box, ...]:
    """Fill air spaces of one or both lungs with fluid, patchily; the box of each place."""
    side = int(rng.choice([-1, 1]))
    boxes = []
    for _ in range(int(rng.choice([1, 2, 3], p=[0.5, 0.4, 0.1]))):
        room = (chest.lung > 0.25) & (side * chest.x > 0.16) & (chest.y > -0.55)
        at = int(rng.choice(np.flatnonzero(room)))
        size, strength = rng.uniform(0.10, 0.26), rng.uniform(0.4, 0.9)
        x, y = chest.x - chest.x.flat[at], chest.y - chest.y.flat[at]
        reach = np.hypot(x / (size * rng.uniform(0.75, 1)), y / (size * rng.uniform(0.9, 1.4)))
        reach += 0.3 * anatomy.haze(rng, 100 * size)
        filled = np.clip((1.2 - reach + reach[room].min()) / rng.uniform(0.4, 0.8), 0, 1) * (side * chest.x > 0)
        patchy = np.clip(0.8 + 0.2 * anatomy.haze(rng, 12), 0.1, 1)
        rows, columns = np.nonzero((filled > 0.3) & (chest.lung > 0.12))
        boxes.append((float(columns.min()), float(rows.min()), float(columns.max() + 1), float(rows.max() + 1)))
        chest.lung *= 1 - strength * filled * patchy
        side = -side
    return tuple(boxes)


def _effusion(chest: Chest, rng: np.random.Generator) -> None:
    """Fluid that blunts the angle between rib cage and diaphragm of one side, up along the wall."""
    side, level, rise = int(rng.choice([-1, 1])), chest.dome - rng.uniform(0, 0.2), rng.uniform(0.2, 0.5)
    surface = level - rise * np.clip(chest.s - 0.3, 0, 1) ** 2 + 0.01 * anatomy.haze(rng, 30)
    chest.lung *= 1 - 0.9 * anatomy.inside(surface - chest.y, 0.09) * (side * chest.x > 0)


def _wire(chest: Chest, knots: list[tuple[float, float]], width: float) -> Field:
    """A smooth line through points of the patient."""
    from scipy import interpolate

    x, y = interpolate.make_interp_spline(np.linspace(0, 1, len(knots)), knots, k=2)(np.linspace(0, 1, 420)).T
    return chest.trace(x, y, width)


def _leads(chest: Chest, rng: np.random.Generator) -> None:
    """Electrodes on the skin with their wires, as monitored patients have them, whether healthy or not."""
    for _ in range(int(rng.integers(1, 4))):
        x, y = rng.uniform(-0.55, 0.55), rng.uniform(-0.45, 0.35)
        chest.solid += 0.12 * anatomy.inside(np.hypot(chest.x - x, chest.y - y) - 0.02, 0.01)
        knots = [(x, y), (x + rng.uniform(-0.2, 0.2), y + rng.uniform(-0.1, 0.3)), (float(rng.choice([-1, 1])), 0.7)]
        chest.solid += 0.06 * _wire(chest, knots, 0.7)


def _device(chest: Chest, rng: np.random.Generator) -> None:
    """A pacemaker with its lead, a tube in the airway, or a central venous line."""
    which, side = int(rng.integers(3)), float(rng.choice([-1, 1]))
    if which == 0:
        x, y = side * rng.uniform(0.42, 0.55), rng.uniform(-0.5, -0.36)
        corner = np.maximum(np.abs(chest.x - x) - 0.045, 0) ** 2 + np.maximum(np.abs(chest.y - y) - 0.05, 0) ** 2
        chest.solid += rng.uniform(0.35, 0.6) * anatomy.inside(np.sqrt(corner) - 0.035, 0.015)
        way = [(x, y), (side * 0.3, -0.6), (-0.08, -0.35), (-0.09, 0.05), (0.12, rng.uniform(0.25, 0.33))]
        chest.solid += 0.2 * _wire(chest, way, 0.8)
    elif which == 1:
        tip = rng.uniform(-0.42, -0.3)
        chest.solid += 0.16 * _wire(chest, [(0.02, -1.1), (0.0, -0.75), (0.012, tip)], 0.8)
        chest.solid += 0.13 * _wire(chest, [(0.0, -1.1), (0.03, -0.3), (0.02, 0.2), (0.2, 0.55)], 0.8)
    else:
        way = [(side * 0.34, -0.95), (side * 0.22, -0.62), (-0.07, -0.4), (-0.1, rng.uniform(-0.05, 0.1))]
        chest.solid += rng.uniform(0.12, 0.2) * _wire(chest, way, 0.9)


def _marker(image: Field, film: Film, rng: np.random.Generator) -> None:
    """The letter of a side in its upper corner, in lead."""
    dots = np.array([[mark == "1" for mark in line] for line in _LETTERS[film.letter]])
    glyph = np.kron(dots, np.ones((2, 2), bool))
    row, column = int(rng.integers(6, 26)), int(rng.integers(8, 26))
    left = column if film.letter == "R" else SIZE - column - glyph.shape[1]
    image[row : row + glyph.shape[0], left : left + glyph.shape[1]][glyph] = 1.0


def _develop(chest: Chest, rng: np.random.Generator) -> np.ndarray:
    """What the beam leaves: scatter, the film's curve, grain, marker and edge. uint8."""
    from scipy import ndimage

    film = chest.film
    dense = np.clip(chest.solid - chest.lung, 0, None)
    far = ndimage.uniform_filter(ndimage.uniform_filter(dense, 31), 31)
    dense = (1 - film.scatter) * dense + film.scatter * far
    grain = ndimage.gaussian_filter(rng.standard_normal(dense.shape, dtype=np.float32), 0.6)
    image = np.clip((dense - film.low) / (film.high - film.low), 0, 1) ** film.gamma
    image = ndimage.gaussian_filter(image, 0.6) + film.noise * 2 * (0.4 + dense) * grain
    image *= 0.97
    _marker(image, film, rng)
    if film.edge > 3:
        image[:, : film.edge] = 0
    return np.round(255 * np.clip(image, 0, 1)).astype(np.uint8)


def paint(seed: int, picture: Picture) -> Painted:
    """The film of `picture`, AP or PA. The same subject painted as "normal" is the same chest without its finding."""
    name, number = picture.subject_id, int(picture.subject_id[4:]) - 1
    shared = number if picture.split == "train" else f"pair {number // 2}"
    rng, chance = generator(seed, f"chest {name}"), generator(seed, f"chest {name} finding")
    film = Film.draw(generator(seed, f"chest film {shared}"))
    several = int(chance.integers(1, 3)) if picture.kind == OTHER_KIND else 0
    found = chance.choice(OTHER, several, replace=False).tolist()
    chest = anatomy.stage(rng, film)
    bend = rng.normal(0, 0.006) * np.sin(3.5 * chest.y + rng.uniform(0, 6))
    if "scoliosis" in found:
        bend += int(chance.choice([-1, 1])) * chance.uniform(0.05, 0.1) * np.sin(3.5 * chest.y + chance.uniform(0, 1))
    anatomy.body(chest)
    anatomy.heart(chest, chance.uniform(1.3, 1.6) if "heart" in found else 1.0, bend)
    vessels = anatomy.vessels(chest)
    anatomy.bones(chest, bend)
    boxes = _opacities(chest, chance) if picture.kind == "Lung_Opacity" else ()
    if "effusion" in found:
        _effusion(chest, chance)
    chest.lung *= 1 + 0.04 * anatomy.haze(rng, 9) + 0.04 * anatomy.haze(rng, 16)
    chest.solid += vessels * np.clip(2 * chest.lung, 0, 1)
    if film.ap and rng.random() < 0.5:
        _leads(chest, rng)
    if "device" in found:
        _device(chest, chance)
    return Painted(_develop(chest, rng), boxes=boxes, clinical={"view": "AP" if film.ap else "PA"})
