"""One synthetic B-scan of optical coherence tomography: a layered retina, what changes it, and how it is recorded."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

Line = np.ndarray  # float32, one value for each column (A-scan)
Plane = np.ndarray  # float32, H x W

# From the vitreous down: thickness in micrometres at 1 mm from the fovea, grey level on a display (0 to 1). Thicknesses
# are round numbers of the anatomy, levels were read off averaged scans of a spectral-domain device.
LAYERS = {
    "rnfl": (20.0, 0.44), "gcipl": (74.0, 0.36), "inl": (36.0, 0.27), "opl": (30.0, 0.36), "onl": (66.0, 0.215),
    "elm": (7.0, 0.30), "myoid": (17.0, 0.225), "ellipsoid": (18.0, 0.64), "segments": (24.0, 0.46),
}  # fmt: skip
RPE = (24.0, 0.75)
VITREOUS = 0.085
PIT = {"rnfl": 0.97, "gcipl": 1.0, "inl": 0.93, "opl": 0.85}  # share of a layer that the deepest pit pushes aside
SWELL = {"inl": 1.0, "opl": 0.6, "onl": 1.3}  # how much of a swelling each layer takes


class Optics(NamedTuple):
    """A device. shape: H x W in pixels. axial, lateral: micrometres a pixel. noise: least and most of it.
    padded: whether scans are turned after recording, which leaves white corners."""

    shape: tuple[int, int]
    axial: float
    lateral: float
    noise: tuple[float, float]
    padded: bool


class Setting(NamedTuple):
    """How a scan is recorded, each 0 to 1: dark to bright, low to high black level, no to wide white corners."""

    exposure: float
    black: float
    padding: float


def wave(rng: np.random.Generator, width: int, wavelength: float) -> Line:
    """A smooth random line of about unit variance."""
    from scipy import ndimage

    sigma = wavelength / 4
    noise = rng.standard_normal(width, dtype=np.float32)
    return ndimage.gaussian_filter1d(noise, sigma, mode="wrap") * np.float32(1.9 * np.sqrt(sigma))


def grain(rng: np.random.Generator, shape: tuple[int, int], down: float, across: float) -> Plane:
    """White noise blurred by `down` and `across` pixels, of unit variance."""
    from scipy import ndimage

    noise = ndimage.gaussian_filter(rng.standard_normal(shape, dtype=np.float32), (down, across), truncate=2.5)
    return noise / noise.std()


def ramp(rows: np.ndarray, line: Line) -> Plane:
    """How much of each pixel lies below `line`, 0 to 1."""
    return np.clip(rows - line + np.float32(0.5), 0, 1)


@dataclass(frozen=True)
class Eye:
    """What the scans of one person have in common. levels: factor of each layer's brightness, the RPE's last."""

    thickness: float
    levels: np.ndarray
    pit: tuple[float, float]  # depth, 0 to 1; half width in micrometres
    nasal: int  # side of the optic disc, -1 or 1
    sag: float  # how far the ends of the scan curve up, share of the height
    choroid: float  # thickness, micrometres
    stroma: float  # brightness of the choroid
    lumen: float  # size of its vessels, micrometres
    noise: float  # 0 to 1, between the device's least and most
    hyaloid: bool  # whether a detached vitreous membrane is seen

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "Eye":
        return cls(
            thickness=rng.uniform(0.9, 1.12),
            levels=np.exp(rng.normal(0, 0.06, len(LAYERS) + 1)).astype(np.float32),
            pit=(rng.uniform(0.78, 0.96), rng.uniform(280, 480)),
            nasal=-1 if rng.random() < 0.5 else 1,
            sag=rng.uniform(-0.02, 0.15),
            choroid=rng.uniform(150, 380),
            stroma=rng.uniform(0.26, 0.34),
            lumen=rng.uniform(75, 150),
            noise=rng.random(),
            hyaloid=rng.random() < 0.35,
        )


class Spot(NamedTuple):
    """An ellipse in the retina. row, column, height, width: centre and half axes in pixels. level: its grey level.
    truth: whether it belongs to the mask. shadow: share of the light that it takes from what lies below."""

    row: float
    column: float
    height: float
    width: float
    level: float
    truth: bool
    shadow: float = 0.0


@dataclass
class Change:
    """What a disease does to a scan, per column and in pixels; all zero: nothing.

    lift: height of the RPE above Bruch's membrane, filled with `filling` (grey level). material: bright tissue on the
    RPE. fluid: height of fluid under the photoreceptors. swell: relative gain of thickness from INL to ONL, and how
    much of the pit is filled. loss: share of the ellipsoid zone's brightness that is gone. spots: ellipses.
    """

    lift: Line
    material: Line
    fluid: Line
    swell: Line
    loss: Line
    filling: float = 0.1
    spots: list[Spot] = field(default_factory=list)

    @classmethod
    def none(cls, width: int) -> "Change":
        return cls(*np.zeros((5, width), np.float32))


class Lines(NamedTuple):
    """Rows at which layers begin. tops: of LAYERS in order; fluid, material, rpe, filling, bruch follow below."""

    tops: dict[str, Line]
    fluid: Line
    material: Line
    rpe: Line
    filling: Line
    bruch: Line


@dataclass(frozen=True)
class Section:
    """Where one B-scan lies in an eye. across: micrometres from the fovea. depth: of the pit here. bruch: rows."""

    eye: Eye
    optics: Optics
    across: Line
    depth: float
    bruch: Line
    rough: np.ndarray  # pixels by which each boundary wavers, layers x W

    @classmethod
    def draw(cls, rng: np.random.Generator, eye: Eye, optics: Optics) -> "Section":
        """A scan through the fovea or beside it, tilted, higher or lower in the frame."""
        height, width = optics.shape
        u = np.linspace(-1, 1, width, dtype=np.float32)
        across = (np.arange(width, dtype=np.float32) - width * rng.uniform(0.33, 0.67)) * optics.lateral
        depth = eye.pit[0] * (rng.uniform(0.9, 1.0) if rng.random() < 0.6 else rng.uniform(0.0, 0.75))
        bend = rng.uniform(-0.13, 0.13) * u - (eye.sag + rng.uniform(-0.015, 0.015)) * u * u
        bruch = height * (rng.uniform(0.5, 0.66) + bend) + 0.8 * wave(rng, width, width / 3)
        rough = np.stack([0.45 * wave(rng, width, 14.0 + 6 * i) for i in range(len(LAYERS))])
        section = cls(eye, optics, across, depth, bruch.astype(np.float32), rough.astype(np.float32))
        # a swollen retina must find room above, and the choroid below, in every scan alike
        top, bottom = section.lines(Change.none(width)).tops["rnfl"].min(), bruch.max()
        shift = max(0.0, 34 - top) - max(0.0, bottom - 0.8 * height)
        return replace(section, bruch=section.bruch + np.float32(shift))

    def thickness(self, change: Change) -> dict[str, Line]:
        """Of each layer in pixels, with what a change does to it."""
        from scipy import ndimage

        far, side = np.abs(self.across), self.eye.nasal * self.across
        raised = change.lift + change.material + change.fluid
        spread = ndimage.gaussian_filter1d(raised, 170 / self.optics.lateral, mode="nearest")
        pit = self.depth * np.exp(-((self.across / self.eye.pit[1]) ** 2)) * (1 - np.clip(1.3 * change.swell, 0, 0.85))
        rim = 0.16 * np.exp(-(((far - 900) / 550) ** 2)) - 0.25 * np.clip((far - 1200) / 1800, 0, 1)
        gain = dict.fromkeys(("gcipl", "inl"), 1 + rim) | {"rnfl": 1 + 2.6 * np.clip(side / 3000, -0.25, 1)}
        gain |= {"onl": 1 + 0.35 * pit + 0.3 * rim, "segments": 1 + 0.3 * pit}
        made = {}
        for (name, (micrometres, _)), rough in zip(LAYERS.items(), self.rough, strict=True):
            size = self.eye.thickness * micrometres / self.optics.axial * gain.get(name, 1.0)
            size = size * (1 - pit * PIT.get(name, 0.0)) * (1 + change.swell * SWELL.get(name, 0.0))
            if name == "onl":  # gives way to what lifts it, so that the inner surface bulges widely and less
                size = size + np.maximum(spread - raised, -0.65 * size)
            made[name] = np.maximum(size + (rough if name in PIT else 0), 0.15).astype(np.float32)
        return made

    def lines(self, change: Change) -> Lines:
        """Every boundary, built upwards from Bruch's membrane."""
        filling = self.bruch - change.lift
        rpe = filling - np.float32(RPE[0] / self.optics.axial)
        material = rpe - change.material
        at = fluid = material - change.fluid
        tops = {}
        for name, size in reversed(self.thickness(change).items()):
            at = at - size
            tops[name] = at
        return Lines(dict(reversed(tops.items())), fluid, material, rpe, filling, self.bruch)


def choroid(rng: np.random.Generator, section: Section, rows: np.ndarray, bruch: Line) -> Plane:
    """The grey level below Bruch's membrane: dark vessel lumina, larger with depth, in a stroma that fades."""
    eye, axial = section.eye, section.optics.axial
    shape = len(rows), len(bruch)
    down = np.maximum(rows - bruch, 0)
    size = eye.lumen / axial, eye.lumen / section.optics.lateral * 1.5
    small, large = (grain(rng, shape, 0.3 * k * size[0], 0.3 * k * size[1]) for k in (0.55, 1.0))
    share = np.clip(down * axial / (0.6 * eye.choroid), 0, 1)
    vessels = np.clip(0.9 * ((1 - share) * small + share * large) + 0.35, 0, 1)
    extent = eye.choroid * (1 + 0.12 * wave(rng, len(bruch), len(bruch) / 2)) / axial
    inside = np.clip((extent - down) / 6 + 0.5, 0, 1) * np.clip(down / 3, 0, 1)
    fade = np.exp(-down * axial / np.float32(110 + 0.4 * eye.choroid))
    return (0.025 + (eye.stroma + 0.05) * fade) * (1 - 0.42 * vessels * inside) + 0.05 * np.exp(-((down - 2) ** 2) / 8)


def render(rng: np.random.Generator, section: Section, change: Change) -> tuple[Plane, np.ndarray]:
    """The tissue's grey level before recording, and the mask of lifted RPE, fluid and spots of truth (bool)."""
    height, width = section.optics.shape
    rows = np.arange(height, dtype=np.float32)[:, None]
    lines, levels = section.lines(change), section.eye.levels
    bright = {name: level * levels[i] for i, (name, (_, level)) in enumerate(LAYERS.items())}
    nasal = np.clip(section.eye.nasal * section.across / 3000, -0.3, 1)
    bright["rnfl"] = np.clip(bright["rnfl"] + 0.15 * nasal + 0.07 * wave(rng, width, 90), 0.3, 0.85)
    bright["ellipsoid"] = bright["ellipsoid"] - change.loss * (bright["ellipsoid"] - 0.3)
    steps = [(lines.tops[name], level) for name, level in bright.items()]
    steps += [(lines.fluid, 0.075), (lines.material, 0.5), (lines.rpe, RPE[1] * levels[-1] * (1 - 0.25 * change.loss))]
    tissue, before = np.full((height, width), VITREOUS, np.float32), np.float32(VITREOUS)
    for line, level in [*steps, (lines.filling, change.filling)]:
        tissue += (level - before) * ramp(rows, line)
        before = level
    deep = slice(int(lines.bruch.min()), height)  # the rows that reach below the retina
    tissue[deep] += ramp(rows[deep], lines.bruch) * (choroid(rng, section, rows[deep], lines.bruch) - before)
    tissue *= 1 + 0.07 * grain(rng, (height, width), 0.8, 2.5)
    mask = (rows >= lines.fluid) & (rows < lines.material) | (rows >= lines.filling) & (rows < lines.bruch)
    _vessels(rng, section, rows, lines, tissue)
    if section.eye.hyaloid:
        _hyaloid(rng, section, rows, tissue)
    for spot in change.spots:
        mask |= _spot(rows, tissue, spot)
    return tissue, mask


def _spot(rows: np.ndarray, tissue: Plane, spot: Spot) -> np.ndarray:
    """Paint an ellipse with a soft edge; its part of the mask."""
    columns = np.arange(tissue.shape[1], dtype=np.float32)
    across = (columns - np.float32(spot.column)) / np.float32(spot.width)
    reach = np.sqrt(((rows - np.float32(spot.row)) / np.float32(spot.height)) ** 2 + across**2)
    alpha = np.clip((1 - reach) * np.float32(min(spot.height, spot.width)) + 0.5, 0, 1)
    tissue += alpha * (np.float32(spot.level) - tissue)
    if spot.shadow:
        tissue *= 1 - np.float32(spot.shadow) * np.exp(-(across**2)) * (rows > spot.row + spot.height)
    return (alpha >= 0.5) & spot.truth


def _vessels(rng: np.random.Generator, section: Section, rows: np.ndarray, lines: Lines, tissue: Plane) -> None:
    """Retinal vessels cut across: a bright wall in the ganglion cell layer and a shadow down to the choroid."""
    choices = np.flatnonzero(np.abs(section.across) > 500)
    for _ in range(int(rng.integers(1, 7))):
        column = int(choices[rng.integers(len(choices))])
        radius = rng.uniform(25, 75) / section.optics.lateral
        tall = max(1.2, 0.75 * radius * section.optics.lateral / section.optics.axial)
        row = float(lines.tops["rnfl"][column]) + tall * rng.uniform(0.6, 1.5)
        _spot(rows, tissue, Spot(row, column, tall, max(1.2, radius), rng.uniform(0.42, 0.62), False))
        _spot(rows, tissue, Spot(row + 0.4 * tall, column, 0.5 * tall, 0.5 * radius, rng.uniform(0.28, 0.42), False))
        across = (np.arange(tissue.shape[1], dtype=np.float32) - column) / np.float32(1.2 * radius)
        tissue *= 1 - np.float32(rng.uniform(0.15, 0.5)) * np.exp(-(across**2)) * np.clip((rows - row) / 6, 0, 1)


def _hyaloid(rng: np.random.Generator, section: Section, rows: np.ndarray, tissue: Plane) -> None:
    """The detached membrane of the vitreous, a faint line above the retina that follows it loosely."""
    inner = section.lines(Change.none(tissue.shape[1])).tops["rnfl"]
    line = inner.mean() + 0.5 * (inner - inner.mean()) - rng.uniform(8, 26) + 2 * wave(rng, len(inner), len(inner) / 2)
    line = np.minimum(line, inner - 2)
    tissue += np.float32(rng.uniform(0.05, 0.2)) * np.exp(-((rows - line) ** 2) / np.float32(0.9))


def record(rng: np.random.Generator, section: Section, tissue: Plane, setting: Setting) -> np.ndarray:
    """What the device makes of the tissue, uint8: roll-off, vignetting, blur, speckle, noise, gain, white corners."""
    from scipy import ndimage

    height, width = tissue.shape
    rows = np.linspace(0, 1, height, dtype=np.float32)[:, None]
    light = 1 - rng.uniform(0.0, 0.25) * (rows if rng.random() < 0.7 else 1 - rows)
    ends = np.abs(np.linspace(-1, 1, width, dtype=np.float32))
    light = light * (1 - rng.uniform(0, 0.4) * np.clip((ends - 0.75) / 0.25, 0, 1) ** 2)
    light = light * (1 + 0.05 * wave(rng, width, width / 3) + 0.02 * wave(rng, width, 8))
    if rng.random() < 0.35:  # an opacity or a lid in the beam
        from_middle = (np.arange(width, dtype=np.float32) / width - rng.random()) / rng.uniform(0.02, 0.08)
        light = light * (1 - rng.uniform(0.2, 0.75) * np.exp(-(from_middle.astype(np.float32) ** 4)))
    least, most = section.optics.noise
    noise = least + (most - least) * np.clip(section.eye.noise + rng.normal(0, 0.25), 0, 1)
    signal = ndimage.gaussian_filter(tissue, (0.45, 0.6)) * light
    signal = signal * (1 + (0.05 + 1.2 * noise) * grain(rng, tissue.shape, 0.4, 0.6))
    signal = signal + np.float32(noise) * grain(rng, tissue.shape, 0.35, 0.35)
    gain, offset = 0.72 + 0.6 * setting.exposure, 0.04 * (setting.black - 0.5)
    image = np.clip(signal * np.float32(gain) + np.float32(offset), 0, 1)
    grey = np.round(255 * image ** np.float32(rng.uniform(0.9, 1.12))).astype(np.uint8)
    if section.optics.padded and setting.padding > 1 / 3:
        grey[_corners(rng, section, 1.5 * setting.padding - 0.5)] = 255
    return grey


def _corners(rng: np.random.Generator, section: Section, padding: float) -> np.ndarray:
    """The white above and below a turned scan, bool; placed by the healthy anatomy, so that no disease moves it."""
    height, width = section.optics.shape
    rows = np.arange(height, dtype=np.float32)[:, None]
    line = rng.uniform(-0.2, 0.2) * (np.arange(width, dtype=np.float32) - width / 2)
    inner = section.lines(Change.none(width)).tops["rnfl"]
    above, below = (inner - line).min() - 30, height - (section.bruch - line).max() - 20
    ends = float(line.max())  # from -ends to ends: how far the edge rises over the width
    share = rng.uniform(0, 1)
    top = -ends + padding * share * max(0.0, above + ends) * 0.8
    bottom = height + ends - padding * (1 - share) * max(0.0, below + ends) * 0.8
    return (rows < line + top) | (rows > line + bottom)
