"""Contract 3, the predictions of one run: stream scores and maps to disk, and read them back."""

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from anomed import images, records
from anomed.errors import AnomedError
from anomed.manifest import Prepared
from anomed.mapcodes import Codec, stride
from anomed.metrics import counts, curves

COLUMNS = ["image_id", "score", "map_row"]
GALLERY = 64  # maps kept where a domain has neither masks nor boxes
BLOCK = 1 << 20  # pixels coded at a time
CHECKED = 2_000_000  # valid pixels that the loss of the coding is measured on, at most


def gallery(table: pd.DataFrame) -> np.ndarray:
    """Positions, ascending, of the images whose maps a domain without masks and boxes keeps for the report.

    At most 64 test images of a manifest table: 32 of each label, or more of one where the other has fewer, spread
    evenly over that label's images in table order (the middles of equal parts).
    """
    places = [np.flatnonzero((table.split == "test") & (table.label == label)) for label in (0, 1)]
    half = GALLERY // 2
    shares = [min(len(own), max(half, GALLERY - len(other))) for own, other in (places, places[::-1])]
    picked = [own[(2 * np.arange(n) + 1) * len(own) // (2 * n)] for own, n in zip(places, shares, strict=True) if n]
    return np.sort(np.concatenate([np.zeros(0, np.int64), *picked]))


def write(
    folder: Path,
    prepared: Prepared,
    batches: Iterable[tuple[np.ndarray, np.ndarray | None]],
    expect_maps: bool,
) -> dict[str, Any]:
    """Write `scores.csv` and, where the method localises, `maps.npy` into `folder`; returns the card's key "maps".

    batches: for consecutive images of `prepared.evaluated()` (valid, then test) scores, float (B,), and maps, float32
    (B, h, w), or None when `expect_maps` is false. Maps of all images are kept where the domain has masks or boxes,
    else those of `gallery`. Memory does not grow with the number of images: maps pass through a temporary file.

    Returned: count, height, width of the kept maps, codec (constants of the coding, its excess ties among them), valid
    (AUROC and AP that the coding loses against float32, on the native grid of the valid images with pixel truth; null
    with a reason). Raises AnomedError naming the image on a wrong count, shape or type and on NaN or infinity, and
    when the coding loses more than 2e-4.
    """
    table = prepared.evaluated()
    keep = np.zeros(len(table), bool)
    if expect_maps:
        keep[slice(None) if prepared.card["masks"] or prepared.card["boxes"] else gallery(table)] = True
    scores: list[float] = []
    with _Spool(folder / ".maps.float32", int(keep.sum())) as spool:
        for values, maps in _checked(batches, table.image_id.tolist(), expect_maps):
            if maps is not None:
                spool.add(maps[keep[len(scores) : len(scores) + len(values)]])
            scores += values.tolist()
        _write_scores(folder / "scores.csv", table, scores, keep)
        if not spool.count:
            reason = "no image to keep a map of" if expect_maps else "the method does not localise"
            return {"count": 0, "reason": reason}
        codec = Codec.fit(spool.sample, spool.minimum, spool.maximum)
        valid = _loss(prepared, table, spool, np.cumsum(keep) - 1, codec)
        spool.encode(codec, folder / "maps.npy")
        height, width = spool.shape
        return {"count": spool.count, "height": height, "width": width, "codec": codec.to_dict(), "valid": valid}


def write_scoreless(folder: Path, prepared: Prepared) -> dict[str, Any]:
    """Write the `scores.csv` of a system that gives neither scores nor maps; returns the card's key "maps"."""
    table = prepared.evaluated()
    _write_scores(folder / "scores.csv", table, [None] * len(table), np.zeros(len(table), bool))
    return {"count": 0, "reason": "the system gives answers and no maps"}


def _checked(
    batches: Iterable[tuple[np.ndarray, np.ndarray | None]], ids: list[str], expect_maps: bool
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """The batches, each held against what was announced; scores become float64."""
    done, grid = 0, None
    for scores, maps in batches:
        scores = np.asarray(scores)
        name = ids[done] if done < len(ids) else "after the last image"
        if scores.ndim != 1 or scores.dtype.kind != "f":
            raise AnomedError(f"{name}: found scores {_kind(scores)}, expected floats of shape (B,)")
        if done + len(scores) > len(ids):
            raise AnomedError(f"found more than {len(ids)} scores, expected one for each valid and test image")
        if not np.isfinite(scores).all():
            bad = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise AnomedError(f"{ids[done + bad]}: found the score {scores[bad]}, expected a finite number")
        if (maps is None) == expect_maps:
            found, declared = ("no maps", True) if expect_maps else ("maps", False)
            raise AnomedError(f"{name}: found {found}, but the method declares `localises = {declared}`")
        if maps is not None:
            maps = np.asarray(maps)
            if maps.dtype != np.float32 or maps.ndim != 3 or len(maps) != len(scores) or 0 in maps.shape[1:]:
                raise AnomedError(f"{name}: found maps {_kind(maps)}, expected float32 ({len(scores)}, h, w)")
            grid = grid or maps.shape[1:]
            if maps.shape[1:] != grid:
                raise AnomedError(f"{name}: found a map of {maps.shape[1:]}, expected {grid} as of the images before")
            finite = np.isfinite(maps).all(axis=(1, 2))
            if not finite.all():
                bad = int(np.flatnonzero(~finite)[0])
                raise AnomedError(
                    f"{ids[done + bad]}: its map holds {int((~np.isfinite(maps[bad])).sum())} NaN or infinite values, "
                    "expected finite scores; check the method for overflow, a division by 0 or log(0)"
                )
        done += len(scores)
        yield scores.astype(np.float64), maps
    if done < len(ids):
        raise AnomedError(f"found {done} scores for {len(ids)} images, the first without one is {ids[done]}")


def _kind(array: np.ndarray) -> str:
    return f"of type {array.dtype} and shape {array.shape}"


def _write_scores(path: Path, table: pd.DataFrame, scores: Sequence[float | None], keep: np.ndarray) -> None:
    rows = np.cumsum(keep) - 1
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for image_id, score, kept, row in zip(table.image_id, scores, keep, rows, strict=True):
            writer.writerow([image_id, "" if score is None else repr(score), row if kept else ""])


class _Spool:
    """Float32 maps in a temporary file, read and written in sequence, with their extremes and a strided sample."""

    def __init__(self, path: Path, count: int):
        self.path, self.count, self.shape = path, count, (0, 0)
        self.minimum, self.maximum = math.inf, -math.inf

    def __enter__(self) -> "_Spool":
        self._file = self.path.open("w+b")
        self._pixels = 0
        return self

    def __exit__(self, *exception: Any) -> None:
        self._file.close()
        self.path.unlink()

    def add(self, maps: np.ndarray) -> None:
        """Append finite maps, float32 (B, h, w)."""
        if not len(maps):
            return
        if not self._pixels:
            self.shape = (maps.shape[1], maps.shape[2])
            area = self.shape[0] * self.shape[1]
            self._step = stride(self.count * area, area)
            self.sample = np.empty(-(-self.count * area // self._step), np.float32)
        flat = np.ascontiguousarray(maps).reshape(-1)
        part = flat[-self._pixels % self._step :: self._step]
        first = -(-self._pixels // self._step)
        self.sample[first : first + len(part)] = part
        self.minimum, self.maximum = min(self.minimum, float(flat.min())), max(self.maximum, float(flat.max()))
        self._file.write(flat.data)
        self._pixels += len(flat)

    def read(self, row: int, count: int = 1) -> np.ndarray:
        """Maps row to row + count - 1: float32 (count, h, w)."""
        area = self.shape[0] * self.shape[1]
        self._file.flush()
        self._file.seek(row * area * 4)
        return np.fromfile(self._file, np.float32, count * area).reshape(count, *self.shape)

    def encode(self, codec: Codec, path: Path) -> None:
        """Write all maps as uint16 codes, M x h x w."""
        block = max(1, BLOCK // (self.shape[0] * self.shape[1]))
        header = {"descr": "<u2", "fortran_order": False, "shape": (self.count, *self.shape)}
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for row in range(0, self.count, block):
                codes = codec.encode(self.read(row, min(block, self.count - row)))
                file.write(codes.astype("<u2", copy=False).tobytes())


def _loss(prepared: Prepared, table: pd.DataFrame, spool: _Spool, rows: np.ndarray, codec: Codec) -> dict[str, Any]:
    """What the coding loses on the valid images with pixel truth, by the way that scoring goes."""
    judged = np.flatnonzero((table.split == "valid") & table.mask_row.notna())
    native = table.iloc[judged]
    step = stride(int((native.native_h * native.native_w).sum()), math.prod(set(native.native_w.tolist())), CHECKED)
    truth, exact, coded = [np.zeros(0, bool)], [np.zeros(0, np.float32)], [np.zeros(0, np.uint16)]
    passed = 0
    for place in judged:
        mask = prepared.mask(int(table.mask_row[place]))
        scores = spool.read(int(rows[place]))[0]
        codes = codec.encode(images.upsample(codec.decode(codec.encode(scores)), *mask.shape))
        part = slice(-passed % step, None, step)
        truth.append(mask.ravel()[part])
        exact.append(images.upsample(scores, *mask.shape).ravel()[part])
        coded.append(codes.ravel()[part])
        passed += mask.size
    labels, floats, integers = np.concatenate(truth), np.concatenate(exact), np.concatenate(coded)
    facts: dict[str, Any] = {"images": len(judged), "pixels": labels.size, "auroc_loss": None, "ap_loss": None}
    if labels.all() or not labels.any():
        return {**facts, "reason": "no valid image with pixel truth, or pixels of one class only"}
    auroc, ap = curves.loss(counts.of_images(floats, labels), counts.of_images(integers, labels))
    if max(auroc, ap) > curves.LOSS:
        raise AnomedError(
            f"anomaly maps: coded in 16 bits they lose {auroc:.1e} of pixel AUROC and {ap:.1e} of AP on the "
            f"{len(judged)} valid images, expected at most {curves.LOSS}: too many scores lie too close "
            "together; let the method output logits, log-likelihoods or distances rather than probabilities or other "
            "saturated values; where it shows grey levels, clip fewer of them (a wider window in `preprocess:`)"
        )
    return {**facts, "auroc_loss": auroc, "ap_loss": ap, "reason": None}


class Predictions:
    """Read view of a run's folder. Raises AnomedError naming the file that is missing or damaged.

    card: the run card. scores: image_id (str), score (float64; missing everywhere: the system gives none), map_row
    (Int64, missing = no map). codec: of the maps, or None when there are none.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.card = records.read_card(
            folder / records.RUN_CARD, "files", "domain", "system", "seed", "parameters", "data_hash", "maps"
        )
        self.scores = _read_scores(records.verified(folder / "scores.csv", self.card))
        self.codec: Codec | None = None
        if self.scores.map_row.notna().any():
            try:
                self.codec = Codec.from_dict(self.card["maps"]["codec"])
            except (KeyError, TypeError):
                raise AnomedError(f"{folder / records.RUN_CARD}: no coding of the maps; run predict again") from None
            except AnomedError as error:
                raise AnomedError(f"{folder / records.RUN_CARD}: {error}; run predict again") from None

    @cached_property
    def maps(self) -> np.ndarray | None:
        """uint16 codes, M x h x w, memory-mapped; None when the run has no maps."""
        if self.codec is None:
            return None
        path, count = self.folder / "maps.npy", int(self.scores.map_row.notna().sum())
        try:
            maps = np.load(records.verified(path, self.card), mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise AnomedError(f"{path}: unreadable ({error}); run predict again") from None
        if maps.dtype != np.uint16 or maps.ndim != 3 or len(maps) != count:
            raise AnomedError(f"{path}: found {_kind(maps)}, expected uint16 ({count}, h, w); run predict again")
        return maps

    def map(self, map_row: int) -> np.ndarray:
        """One anomaly map, decoded: float32, h x w. Raises AnomedError when the run has no maps."""
        if self.codec is None or self.maps is None:
            raise AnomedError(f"{self.folder}: the run has no maps")
        return self.codec.decode(self.maps[map_row])


def _read_scores(path: Path) -> pd.DataFrame:
    try:
        table = pd.read_csv(
            path,
            dtype={"image_id": str, "score": str, "map_row": "Int64"},
            keep_default_na=False,
            na_values={"map_row": [""]},
        )
        if "score" in table:
            given = (table.score != "").any()  # else the system answers questions and gives no scores
            table["score"] = np.array([float(text) if given else math.nan for text in table.score], np.float64)
    except ValueError as error:  # pandas' parser and decoding errors are among them
        raise AnomedError(f"{path}: unreadable ({error}); run predict again") from None
    if list(table.columns) != COLUMNS:
        raise AnomedError(f"{path}: found columns {list(table.columns)}, expected {COLUMNS}")
    if (given or table.map_row.notna().any()) and not np.isfinite(table.score).all():
        name = table.image_id[~np.isfinite(table.score)].iloc[0]
        raise AnomedError(f"{path}: the score of {name} is not a finite number; run predict again")
    rows = table.map_row.dropna().tolist()
    if rows != list(range(len(rows))):
        raise AnomedError(f"{path}: map_row does not count up from 0; run predict again")
    return table
