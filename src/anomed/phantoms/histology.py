"""Synthetic H&E patches of lymph node, with or without metastasis: slides, their stain, the layout of tissues."""

from dataclasses import dataclass

import numpy as np

from anomed.phantoms.histology_tissue import SHAPE, TISSUES, Tissue
from anomed.phantoms.picture import Painted, Picture, field, generator

SUBJECTS = 25  # slides, four patches each
# Splits of consecutive slides, repeated. A slide of valid or test gives as many patches with tumour as without, in the
# same stain, so that no colour of a slide tells the classes apart. Four slides fill every split.
SPLITS = ("train", "test", "train", "valid", "train", "test", "train", "test", "train", "test")
PATCHES = 4


def cohort(subjects: int) -> list[Picture]:
    """The patches of `subjects` slides."""
    pictures = []
    for i in range(subjects):
        split, subject = SPLITS[i % len(SPLITS)], f"slide-{i + 1:03d}"
        for n in range(PATCHES):
            kind = "tumour" if split != "train" and n % 2 else "normal"
            name = f"{split}/{'good' if kind == 'normal' else 'Ungood'}/{subject}_{n + 1}"
            pictures.append(Picture(name, subject, split, kind))
    return pictures


@dataclass(frozen=True)
class Stain:
    """A laboratory and a scanner: what the patches of a slide have in common.

    vectors: 2 x 3, optical density of haematoxylin and eosin in red, green, blue. glass: colour of an empty slide.
    blur: pixels.
    """

    vectors: np.ndarray
    glass: np.ndarray
    nuclear: float
    pink: float
    blur: float
    noise: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "Stain":
        vectors = np.array([[0.62, 0.71, 0.33], [0.21, 0.85, 0.47]]) + rng.normal(0, 1, (2, 3)) * [0.05, 0.04, 0.06]
        vectors = np.clip(vectors, 0.03, None)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        glass = rng.uniform(0.86, 0.98) * (1 + rng.normal(0, 0.008, 3))
        return cls(
            vectors.astype(np.float32), np.clip(glass, 0, 0.99).astype(np.float32), rng.uniform(0.75, 1.2),
            rng.uniform(0.75, 1.3), rng.uniform(0.5, 1.0), rng.uniform(0.008, 0.02),
        )  # fmt: skip


def _regions(chance: np.random.Generator, layout: np.random.Generator, kind: str) -> dict[str, np.ndarray]:
    """Where each tissue is: lymphoid, up to two others, and a nest where there is tumour. bool, SHAPE."""
    ragged = 0.1 * field(layout, SHAPE, 9)
    first, second = layout.permutation(["stroma", "sinus", "fat"])[:2].tolist()
    share = float(layout.choice([0.0, 0.25, 0.5, 0.9], p=[0.35, 0.3, 0.2, 0.15]))
    level = field(layout, SHAPE, layout.uniform(70, 150)) + ragged
    other = level < np.quantile(level, share)
    part = field(layout, SHAPE, 90) + ragged > layout.uniform(-0.2, 1.5)
    where = {first: other & ~part, second: other & part, "lymphoid": ~other}
    if kind == "tumour":
        loose = np.any([where[name] for name in ("fat", "sinus") if name in where], axis=0)  # is replaced last
        level = field(chance, SHAPE, chance.uniform(60, 140)) + ragged - loose
        nest = level > np.quantile(level, 1 - chance.uniform(0.25, 0.85))
        where = {name: region & ~nest for name, region in where.items()} | {"tumour": nest}
    return where


def paint(seed: int, picture: Picture) -> Painted:
    """The patch of `picture`; no pixel truth. In valid and test a normal patch and the next one of its slide have the
    same layout and look of tissues and the same thickness; one of them has a nest of tumour on it."""
    from scipy import ndimage

    slide, number = picture.subject_id, int(picture.image_id.rsplit("_", 1)[1]) - 1
    shared = number if picture.split == "train" else f"pair {number // 2}"
    layout = generator(seed, f"histology {slide} layout {shared}")
    chance = generator(seed, f"histology {slide} {number} tumour")
    stain = Stain.draw(generator(seed, f"histology {slide}"))
    tissue = Tissue.empty(generator(seed, f"histology {slide} {number}"))
    where = _regions(chance, layout, picture.kind)
    steps = [
        draw(tissue, where[name], generator(seed, f"histology {slide} {name} {shared}"))
        for name, draw in TISSUES.items()
        if name in where and where[name].any()
    ]
    for _ in range(2):
        for step in steps:
            next(step, None)

    thickness = layout.uniform(0.7, 1.35) * (1 + 0.06 * field(tissue.rng, SHAPE, 110))
    amounts = np.stack([tissue.blue * stain.nuclear, tissue.pink * stain.pink], -1).clip(0) * thickness[..., None]
    amounts = ndimage.gaussian_filter(amounts, (*[stain.blur * layout.uniform(0.8, 1.6)] * 2, 0))
    light = stain.glass * np.exp(-1.25 * (amounts[..., :1] * stain.vectors[0] + amounts[..., 1:] * stain.vectors[1]))
    light += stain.noise * tissue.rng.standard_normal(light.shape, dtype=np.float32) * (0.4 + light)
    return Painted(np.round(255 * np.clip(light, 0, 1)).astype(np.uint8))
