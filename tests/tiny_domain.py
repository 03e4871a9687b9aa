"""A tiny prepared domain, written by the real writer, and runs on it; for tests of predictions and scores."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anomed import predictions, records
from anomed.manifest import Case, Pixels, Prepared, Writer

NATIVE = [(24, 40), (33, 17), (16, 16), (40, 24)]  # cycled through: sizes differ within the domain
PARAMETERS: dict[str, Any] = {"method": {"implementation": "test"}, "files": {}}
Batches = Iterable[tuple[np.ndarray, np.ndarray | None]]


def lesions(number: int, height: int, width: int) -> np.ndarray:
    """Two regions, one of them held together by a corner only; bool H x W."""
    mask = np.zeros((height, width), bool)
    mask[2:5, 1 + number % 3 : 7] = True
    mask[8:10, 8:10] = mask[10:12, 10:13] = True
    return mask


def organ(number: int, height: int, width: int) -> np.ndarray:
    """A region around `lesions`, not symmetric and not of equal size in all images; bool H x W."""
    found = np.zeros((height, width), bool)
    found[1 : 13 + number % 3, :14] = True
    found[1, 9:] = False
    return found


def domain(
    folder: Path,
    counts: dict[tuple[str, int], int],
    masks: bool = True,
    unknown: Sequence[str] = (),
    native: Sequence[tuple[int, int]] = tuple(NATIVE),
    foreground: bool = False,
    pathology: str = "",
) -> Prepared:
    """Images `<split>/<label>/<number>`; those in `unknown` are abnormal without pixel truth. foreground: `organ`."""
    folder.mkdir(parents=True)
    writer = Writer(folder, 16, False, masks, sum(counts.values()), foreground)
    noise = np.random.default_rng(0)
    for (split, label), count in counts.items():
        for number in range(count):
            height, width = native[number % len(native)]
            name = f"{split}/{label}/{number}"
            mask = None if name in unknown or not label or not masks else lesions(number, height, width)
            image = noise.integers(0, 255, (height, width), np.uint8)
            pixels = Pixels(image, mask, "0" * 64, organ(number, height, width) if foreground else None)
            case = Case(name, name, split, label, f"{name}.png", lambda: pixels, pathology=pathology)  # noqa: B023
            writer.add(case, pixels)
    facts = {"domain": "tiny", "title": "Tiny", "source": "test", "official": False, "note": "made by a test"}
    writer.close({**facts, "problems": {}, "parameters": {}})
    return Prepared(folder)


def seal(folder: Path) -> None:
    """Bring the hashes of the run card up to date with its folder, so that a change there is not noticed by them."""
    card = folder / records.RUN_CARD
    if card.exists():
        files = {path.name: records.digest_file(path) for path in folder.iterdir() if path != card}
        facts = {key: value for key, value in records.read_json(card).items() if key != "digest"}
        records.write_card(card, {**facts, "files": files})


def run(folder: Path, prepared: Prepared, batches: Batches, expect_maps: bool = True, **card: Any) -> Path:
    """Write a run's folder, card and all."""
    folder.mkdir(parents=True)
    maps = predictions.write(folder, prepared, batches, expect_maps)
    facts = {"domain": "tiny", "system": "test", "seed": 0, "data_hash": prepared.hash, "maps": maps, **card}
    facts.setdefault("parameters", PARAMETERS)
    records.write_json(folder / records.RUN_CARD, facts)
    seal(folder)
    return folder


def noise(
    prepared: Prepared, size: tuple[int, int] = (12, 20), batch: int = 3
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random scores and maps, the same whatever the batch."""
    generator = np.random.default_rng(1)
    count = len(prepared.evaluated())
    scores = generator.normal(size=count)
    for start in range(0, count, batch):
        part = scores[start : start + batch]
        yield part, np.stack([generator.random(size, np.float32) for _ in part])
