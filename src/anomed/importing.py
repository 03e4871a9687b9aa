"""Predictions made outside: check them against a prepared domain, keep them in data/imported, turn them into runs."""

import csv
import math
import tokenize
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anomed import answers, console, predictions, records
from anomed.errors import AnomedError
from anomed.manifest import Prepared

IMPORTED = Path("data/imported")
CARD = "import.json"
OURS = r"import\.json|scores\.csv|maps\.npy|answers\.jsonl"
COLUMNS = ["image_id", "score"]
BATCH = 64  # maps read at a time, or fewer of so many pixels
PIXELS = 1 << 24


class Origin(NamedTuple):
    """One seed of an imported system: hash of its predictions, and where they come from."""

    digest: str
    origin: str


class Given(NamedTuple):
    """The files of one seed: scores and, where the system localises, maps; or answers."""

    scores: Path | None = None
    maps: Path | None = None
    answers: Path | None = None


def bring(system: str, domain: str, seed: int, given: Given, origin: str, data: Path, store: Path) -> Path:
    """Check the predictions of one seed and keep them in `<store>/<system>/<domain>/<seed>/`; returns that folder.

    scores: CSV with the columns image_id and score, a finite number for every valid and test image of the domain, in
    any order; higher is more anomalous. maps: folder with `<image_id>.npy` for each of them, float32 (h, w), all of one
    shape, finite, of any scale; None for a system that does not localise. answers: see `answers.read`; a system that
    gives them has no scores. origin: where they come from, in words. data: the prepared domain. Raises AnomedError
    naming the row or file; then nothing is kept.
    """
    prepared = Prepared(data)
    if prepared.card["domain"] != domain:
        raise AnomedError(f"{data}: holds the domain {prepared.card['domain']!r}, expected {domain!r}")
    if not origin.strip() or not origin.isprintable():
        raise AnomedError(f"--origin: found {origin!r}, expected one line that says where the predictions come from")
    if (given.scores is None) == (given.answers is None) or (given.maps is not None and given.scores is None):
        raise AnomedError("expected --scores, with --maps where the method localises, or --answers alone")
    out = store / system / domain / str(seed)
    with records.atomic_dir(out, OURS) as partial:
        if given.answers is not None:
            answers.write(partial / answers.FILE, answers.read(given.answers, prepared))
        else:
            _keep(partial, given, prepared)
        card = {
            "domain": domain,
            "system": system,
            "seed": seed,
            "origin": origin,
            "given": {path.name: records.digest_file(path) for path in given if path is not None and path.is_file()},
            "images": _identity(prepared),
            "files": {path.name: records.digest_file(path) for path in sorted(partial.iterdir())},
            "imported": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        records.write_card(partial / CARD, card)
    return out


def _keep(folder: Path, given: Given, prepared: Prepared) -> None:
    """Scores and maps, checked and in the order of the manifest."""
    wanted = prepared.evaluated().image_id.tolist()
    known = _read_scores(Path(given.scores or ""), wanted, set(prepared.table.image_id))
    with (folder / "scores.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([name, repr(known[name])] for name in wanted)
    if given.maps is not None:
        _gather(given.maps, wanted, folder / "maps.npy")


def _identity(prepared: Prepared) -> str:
    """Hash of what predictions belong to: ids, splits, source files and native sizes of the valid and test images."""
    columns = ["image_id", "split", "sha256", "native_h", "native_w"]
    return records.digest(prepared.evaluated()[columns].values.tolist())


def _read_scores(path: Path, wanted: list[str], every: set[str]) -> dict[str, float]:
    """Score of every wanted image. Raises AnomedError naming the first row that is wrong, or what is missing."""
    found: dict[str, float] = {}
    expected = set(wanted)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, None)
            if header != COLUMNS:
                raise AnomedError(f"{path}: found columns {header or 'none'}, expected {COLUMNS}")
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if not row:
                    continue
                if len(row) != 2:
                    raise AnomedError(f"{where}: found {len(row)} fields, expected image_id and score")
                name, text = row
                if name not in expected:
                    hint = "a train image" if name in every else "no image of the domain"
                    raise AnomedError(f"{where}: {name!r} is {hint}; expected valid and test images of the manifest")
                if name in found:
                    raise AnomedError(f"{where}: {name!r} stands there a second time; expected every image once")
                found[name] = _number(text, where, name)
    except (FileNotFoundError, IsADirectoryError):
        raise AnomedError(f"{path}: no such file; expected a CSV with the columns {', '.join(COLUMNS)}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise AnomedError(f"{path}: not a CSV in UTF-8 ({error})") from None
    if missing := [name for name in wanted if name not in found]:
        raise AnomedError(
            f"{path}: {len(missing)} of {len(wanted)} valid and test images have no score, the first is "
            f"{missing[0]!r}; expected one for each"
        )
    return found


def _number(text: str, where: str, name: str) -> float:
    try:
        value = float(text) if text.isascii() and "_" not in text else math.nan  # what only Python takes for a number
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise AnomedError(f"{where}: {name!r} has the score {text!r}, expected a finite number")
    return value


def _gather(folder: Path, wanted: list[str], out: Path) -> None:
    """Stack the maps of `wanted` into one float32 (M, h, w) file, one map in memory at a time."""
    if not folder.is_dir():
        raise AnomedError(f"{folder}: no such folder; expected one with <image_id>.npy for every valid and test image")
    if missing := [name for name in wanted if not (folder / f"{name}.npy").is_file()]:
        first = folder / f"{missing[0]}.npy"
        raise AnomedError(f"{first}: not found; {len(missing)} of {len(wanted)} valid and test images have no map")
    found = {path.relative_to(folder).as_posix().removesuffix(".npy") for path in folder.rglob("*.npy")}
    if foreign := sorted(found - set(wanted)):
        raise AnomedError(
            f"{folder / foreign[0]}.npy: belongs to no valid or test image; {len(foreign)} such files, remove them"
        )
    stack: np.memmap | None = None
    low, high = math.inf, -math.inf
    for row, name in enumerate(console.track(wanted, f"read {folder}")):
        one = _map(folder / f"{name}.npy")
        if stack is None:
            stack = np.lib.format.open_memmap(out, "w+", np.float32, (len(wanted), *one.shape))
        elif one.shape != stack.shape[1:]:
            raise AnomedError(
                f"{folder / name}.npy: found shape {one.shape}, expected {stack.shape[1:]} as the first map has; write "
                "all maps on one grid: they are brought to each image's native size here"
            )
        stack[row] = one
        low, high = min(low, float(one.min())), max(high, float(one.max()))
        if high - low > float(np.finfo(np.float32).max):
            raise AnomedError(
                f"{folder / name}.npy: with it the maps span {low:g} to {high:g}, a range that float32 cannot hold; "
                "divide all of them by one number"
            )
    if stack is not None:
        stack.flush()


def _map(path: Path) -> np.ndarray:
    try:
        # Mapped, not read: a damaged header may announce more than there is memory.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, OverflowError, tokenize.TokenError, zipfile.BadZipFile) as error:
        raise AnomedError(f"{path}: not readable as an array ({error}); write it with numpy.save") from None
    if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.ndim != 2 or not array.size:
        found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else "an archive"
        raise AnomedError(f"{path}: found {found}, expected float32 (h, w)")
    if not np.isfinite(array).all():
        row, column = np.argwhere(~np.isfinite(array))[0]
        raise AnomedError(f"{path}: found {array[row, column]} at row {row}, column {column}, expected finite numbers")
    return array


def brought(domain: str, system: str) -> dict[int, Origin]:
    """What was imported of a system for a domain, by seed.

    Where data/imported holds nothing of the system at all (a clone with pulled results), its runs say what it was.
    Raises AnomedError when a card is damaged.
    """
    if any((IMPORTED / system).glob(f"*/*/{CARD}")):
        cards = {
            int(path.parent.name): _card(IMPORTED, system, domain, int(path.parent.name))
            for path in (IMPORTED / system / domain).glob(f"*/{CARD}")
            if path.parent.name.isdecimal()
        }
        return {seed: Origin(_digest(card), card["origin"]) for seed, card in cards.items()}
    made: dict[int, tuple[dict[str, str], Origin]] = {}
    for path in Path("runs", domain, system).glob(f"*/{records.RUN_CARD}"):
        card = records.read_card(path, "parameters", "seed")
        if "origin" in card:
            together = card["parameters"]["method"]["predictions"]
            made[card["seed"]] = together, Origin(together[str(card["seed"])], card["origin"])
    # Runs lie there of seeds that were removed since: those that belong together name each other.
    return {
        seed: origin
        for seed, (together, origin) in made.items()
        if all(made.get(int(other), ({}, None))[0] == together for other in together)
    }


def _card(store: Path, system: str, domain: str, seed: int) -> dict[str, Any]:
    """The card of one imported seed. Raises AnomedError when it is missing, damaged or of another seed."""
    folder, facts = store / system / domain / str(seed), {"domain": domain, "system": system, "seed": seed}
    try:
        card = records.read_card(folder / CARD, *facts, "origin", "files", "images")
    except AnomedError as error:
        raise AnomedError(f"{error}. {_again(folder)}") from None
    if (found := {key: card[key] for key in facts}) != facts:
        raise AnomedError(f"{folder / CARD}: is of {found}, expected {facts}. {_again(folder)}")
    return card


def _again(folder: Path) -> str:
    return f"What was imported cannot be made again here: delete {folder}, and run `anomed import` for this seed"


def _verified(path: Path, card: dict[str, Any]) -> Path:
    try:
        return records.verified(path, card)
    except AnomedError as error:
        raise AnomedError(f"{error}. {_again(path.parent)}") from None


def _digest(card: dict[str, Any]) -> str:
    return records.digest([card["origin"], card["files"], card["images"]])


def adopt(system: str, seed: int, parameters: dict[str, Any], data: Path, out: Path, store: Path) -> None:
    """Turn imported predictions into a run (contract 3).

    parameters: {"method": {"implementation": "imported", "predictions": hashes by seed}, "files": {}} (see plan.py).
    Raises AnomedError when they are not what was imported, or belong to another state of the prepared domain.
    """
    prepared = Prepared(data)
    domain = prepared.card["domain"]
    folder = store / system / domain / str(seed)
    card = _card(store, system, domain, seed)
    if _digest(card) != parameters.get("method", {}).get("predictions", {}).get(str(seed)):
        raise AnomedError(f"{folder}: not the predictions that --params names; run snakemake again")
    if card["images"] != _identity(prepared):
        raise AnomedError(
            f"{folder}: imported for other valid and test images than {data} holds now; make the predictions for "
            "these, and run `anomed import` again"
        )
    facts = {"domain": domain, "system": system, "seed": seed, "parameters": parameters, "data_hash": prepared.hash}
    localises, answered = "maps.npy" in card["files"], answers.FILE in card["files"]
    with records.atomic_dir(out, r"run\.json|scores\.csv|maps\.npy|answers\.jsonl") as partial:
        with records.RunCard(**facts, device="elsewhere", origin=card["origin"]) as run:
            if answered:
                (partial / answers.FILE).write_bytes(_verified(folder / answers.FILE, card).read_bytes())
                run.facts["maps"] = predictions.write_scoreless(partial, prepared)
            else:
                run.facts["maps"] = predictions.write(partial, prepared, _batches(folder, card, localises), localises)
        run.write(partial)


def _batches(folder: Path, card: dict[str, Any], localises: bool) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    with _verified(folder / "scores.csv", card).open(encoding="utf-8", newline="") as file:
        scores = np.array([float(row["score"]) for row in csv.DictReader(file)], np.float64)
    maps = np.load(_verified(folder / "maps.npy", card), mmap_mode="r") if localises else None
    step = BATCH if maps is None else max(1, min(BATCH, PIXELS // maps[0].size))
    for start in range(0, len(scores), step):
        part = slice(start, start + step)
        yield scores[part], None if maps is None else np.array(maps[part])
