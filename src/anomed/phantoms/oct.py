"""The embedded retinal OCT domains: who is in their cohorts, and B-scans with fluid, neovascular tissue or drusen."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from anomed.phantoms.picture import Painted, Picture, generator
from anomed.phantoms.retina import Change, Eye, Optics, Section, Setting, Spot, record, render, wave

SUBJECTS = {"retina_resc": 25, "retina_oct2017": 33}
OPTICS = {
    "retina_resc": Optics(shape=(256, 512), axial=6.2, lateral=11.7, noise=(0.07, 0.14), padded=False),
    "retina_oct2017": Optics(shape=(248, 256), axial=7.7, lateral=23.0, noise=(0.018, 0.055), padded=True),
}
# Split and condition of each eye in turn, repeated; any ten eyes fill every split with both classes, and test with
# every disease. In retina_resc an eye with oedema also gives scans beside it, as the volumes of RESC do.
ROLES = {
    "retina_resc": (
        "train normal", "test cystoid", "valid subretinal", "train normal", "test detachment", "train normal",
        "test subretinal", "train normal", "valid cystoid", "test normal", "train normal", "test detachment",
        "train normal", "test cystoid", "train normal", "train normal", "test subretinal", "train normal",
        "valid detachment", "train normal", "test cystoid", "train normal", "test detachment", "train normal",
        "test subretinal",
    ),
    "retina_oct2017": (
        "train normal", "test CNV", "valid normal", "train normal", "test normal", "test DME", "train normal",
        "valid DRUSEN", "test DRUSEN", "test normal", "train normal", "train normal", "train normal", "test normal",
        "train normal", "test CNV", "train normal", "train normal", "test normal", "train normal", "test DME",
        "train normal", "valid normal", "train normal", "valid CNV", "test normal", "train normal", "test DRUSEN",
        "train normal", "train normal", "test normal", "train normal", "train normal",
    ),
}  # fmt: skip
# Which part of the range of a setting each scan of an eye takes: one of these orders. In retina_resc the scans beside
# an oedema, first and last, are always as bright together as those through it.
ORDERS = {
    "retina_resc": ((0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0)),
    "retina_oct2017": tuple(itertools.permutations(range(3))),
}
SCANS = {domain: len(orders[0]) for domain, orders in ORDERS.items()}  # of each eye


def cohort(domain: str, subjects: int) -> list[Picture]:
    """Every image of `subjects` eyes, about 100 for SUBJECTS[domain]: an eye in one split only, train all normal."""
    pictures, roles = [], ROLES[domain]
    for i in range(subjects):
        split, condition = roles[i % len(roles)].split()
        for scan in range(SCANS[domain]):
            beside = domain == "retina_resc" and scan in (0, SCANS[domain] - 1)
            kind = "normal" if beside else condition
            folder, subject = "good" if kind == "normal" else "Ungood", f"eye-{i + 1:03d}"
            pictures.append(Picture(f"{split}/{folder}/{subject}_{scan}", subject, split, kind))
    return pictures


@dataclass
class Place:
    """Where a disease is being painted: the scan, its column of interest and what has changed so far."""

    rng: np.random.Generator
    section: Section
    column: float
    change: Change

    @property
    def columns(self) -> np.ndarray:
        return np.arange(self.section.optics.shape[1], dtype=np.float32)

    def wide(self, low: float, high: float) -> float:
        """A random distance between two in micrometres, in columns."""
        return float(self.rng.uniform(low, high)) / self.section.optics.lateral

    def tall(self, low: float, high: float) -> float:
        """A random distance between two in micrometres, in rows."""
        return float(self.rng.uniform(low, high)) / self.section.optics.axial

    def near(self, spread: float) -> float:
        """A column about `spread` micrometres off the column of interest, inside the scan."""
        at = self.column + self.rng.normal(0, spread) / self.section.optics.lateral
        return float(np.clip(at, 0.06 * len(self.columns), 0.94 * len(self.columns)))

    def dome(self, at: float, half: float, height: float, rough: float = 0.0) -> np.ndarray:
        """A hill over the columns `at` ± `half`, `height` pixels high, its profile disturbed by the share `rough`."""
        u = (self.columns - np.float32(at)) / np.float32(half)
        shape = np.maximum(1 - u * u, 0) ** np.float32(self.rng.uniform(0.7, 1.4))
        shape = shape * np.clip(1 + rough * wave(self.rng, len(u), max(4.0, 0.7 * half)), 0.3, 1.7)
        return (height * shape).astype(np.float32)


def _subretinal(place: Place, height: tuple[float, float] = (15, 85)) -> None:
    """Clear fluid between photoreceptors and RPE, a low lens or a few."""
    for _ in range(int(place.rng.integers(1, 3))):
        dome = place.dome(place.near(350), place.wide(350, 1100), place.tall(*height), 0.1)
        place.change.fluid = np.maximum(place.change.fluid, dome)
    place.change.loss = np.maximum(place.change.loss, 0.5 * (place.change.fluid > 0.5))


def _cystoid(place: Place, count: tuple[int, int] = (2, 18)) -> None:
    """Dark cysts in the inner nuclear and Henle's layer of a swollen retina."""
    half = place.wide(450, 1200)
    swell = float(place.rng.uniform(0.25, 1.5))
    place.change.swell = np.maximum(place.change.swell, place.dome(place.column, 1.3 * half, swell))
    size = place.rng.uniform(0.6, 1.1) * (0.75 + 0.6 * swell)
    for _ in range(int(place.rng.integers(*count, endpoint=True))):
        column = place.column + place.rng.uniform(-0.9, 0.9) * half
        _cyst(place, float(np.clip(column, 4, len(place.columns) - 5)), size)


def _cyst(place: Place, column: float, size: float) -> None:
    """One cyst that stays within its layer: round in the inner nuclear layer, upright in Henle's."""
    tops = place.section.lines(place.change).tops
    inner = place.rng.random() < 0.4
    upper, lower = ("inl", "opl") if inner else ("opl", "elm")
    first, last = (float(tops[name][round(column)]) for name in (upper, lower))
    tall = min(size * place.tall(*(14, 32) if inner else (18, 75)), 0.5 * (last - first) + (1.5 if inner else -0.5))
    tall = max(1.6, tall)
    row = (first + last) / 2 + place.rng.uniform(-1, 1) * max(0.0, (last - first) / 2 - tall)
    wide = max(1.3, size * place.wide(22, 60))
    spot = Spot(row, column, tall, wide, place.rng.uniform(0.07, 0.18), True)
    place.change.spots.append(spot)


def _detachment(place: Place) -> None:
    """The RPE lifted as a dome over clear or cloudy fluid, sometimes two."""
    place.change.filling = float(place.rng.uniform(0.09, 0.32))
    for _ in range(int(place.rng.integers(1, 3))):
        half = place.wide(160, 700)
        height = min(place.tall(18, 110), 0.5 * half * place.section.optics.lateral / place.section.optics.axial)
        place.change.lift = np.maximum(place.change.lift, place.dome(place.near(500), half, height, 0.1))
    if place.rng.random() < 0.2:
        _subretinal(place, (20, 60))


def _neovascular(place: Place) -> None:
    """An uneven mound under and over a broken RPE, with some fluid beside it."""
    place.change.filling = float(place.rng.uniform(0.3, 0.46))
    for _ in range(int(place.rng.integers(1, 4))):
        dome = place.dome(place.near(350), place.wide(250, 800), place.tall(15, 95), 0.35)
        place.change.lift = np.maximum(place.change.lift, dome)
    mound = place.dome(place.near(250), place.wide(250, 700), place.tall(8, 80), 0.3)
    place.change.material = mound
    place.change.loss = np.clip(0.25 * (place.change.lift + mound), 0, 1).astype(np.float32)
    fluid, cysts = place.rng.random(2)
    if fluid < 0.5:
        _subretinal(place, (20, 90))
    if cysts < 0.35:
        _cystoid(place, (2, 7))


def _diabetic(place: Place) -> None:
    """Cysts and bright exudates that shade what lies below, now and then fluid under the retina."""
    _cystoid(place, (1, 16))
    for _ in range(int(place.rng.integers(0, 9))):
        column = place.near(800)
        tops = place.section.lines(place.change).tops
        row = place.rng.uniform(tops["inl"][round(column)], tops["onl"][round(column)] + 2)
        tall, wide = max(0.8, place.tall(5, 16)), max(0.8, place.wide(12, 45))
        place.change.spots.append(
            Spot(row, column, tall, wide, place.rng.uniform(0.55, 0.9), False, place.rng.uniform(0, 0.35))
        )
    if place.rng.random() < 0.2:
        _subretinal(place, (20, 90))


def _drusen(place: Place) -> None:
    """Small humps of the RPE over greyish deposits, some running together."""
    place.change.filling = float(place.rng.uniform(0.36, 0.56))
    spread = place.rng.uniform(300, 1300)
    for _ in range(int(place.rng.integers(2, 15))):
        dome = place.dome(place.near(spread), place.wide(60, 240), place.tall(18, 65), 0.15)
        place.change.lift = np.maximum(place.change.lift, dome)
    place.change.loss = np.clip(0.12 * place.change.lift, 0, 0.7)


DISEASES: dict[str, dict[str, Callable[[Place], None]]] = {
    "retina_resc": {"cystoid": _cystoid, "subretinal": _subretinal, "detachment": _detachment},
    "retina_oct2017": {"CNV": _neovascular, "DME": _diabetic, "DRUSEN": _drusen},
}


def _scan(domain: str, picture: Picture) -> tuple[int, str]:
    """The number of a scan among those of its eye, and the name under which its generators are drawn."""
    number = int(picture.image_id.rpartition("_")[2])
    return number, f"{domain} {picture.subject_id} {number}"


def anatomy(domain: str, seed: int, picture: Picture) -> tuple[Section, Change]:
    """Where a scan lies in its eye, and what the disease does to it, near the fovea more often than not."""
    _, name = _scan(domain, picture)
    eye = Eye.draw(generator(seed, f"{domain} {picture.subject_id}"))
    section = Section.draw(generator(seed, f"{name} section"), eye, OPTICS[domain])
    width = section.optics.shape[1]
    change = Change.none(width)
    if picture.kind != "normal":
        rng = generator(seed, f"{name} disease")
        column = float(np.abs(section.across).argmin() + rng.normal(0, 0.13) * width)
        column = float(np.clip(column, 0.15 * width, 0.85 * width))
        DISEASES[domain][picture.kind](Place(rng, section, column, change))
    return section, change


def paint(domain: str, seed: int, picture: Picture) -> Painted:
    """One B-scan, uint8 H x W, in about 0.05 s. `retina_resc` has pixel truth: fluid in cysts, under the retina and
    under the RPE; `retina_oct2017` has none.

    Eye, scan, disease and recording are each drawn from a generator of its own: with another kind the same scan of the
    same eye is painted, healthy or diseased. The scans of one eye share the range of exposures, black levels and
    white corners out evenly, so that none of them tells the classes apart.
    """
    number, name = _scan(domain, picture)
    section, change = anatomy(domain, seed, picture)
    tissue, mask = render(generator(seed, f"{name} tissue"), section, change)
    device = generator(seed, f"{name} recording")
    orders = generator(seed, f"{domain} {picture.subject_id} orders").choice(ORDERS[domain], 3)
    setting = Setting(*((orders[:, number] + device.random(3)) / SCANS[domain]).tolist())
    image = record(device, section, tissue, setting)
    return Painted(image, mask if domain == "retina_resc" else None)
