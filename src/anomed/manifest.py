"""Contract 1, a prepared domain: the row of an image; write, read and verify the files around it."""

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from anomed import images, records
from anomed.errors import AnomedError

SPLITS = ("train", "valid", "test")
COLUMNS = [
    "image_id",
    "subject_id",
    "split",
    "label",
    "row",
    "mask_row",
    "native_h",
    "native_w",
    "boxes",
    "pathology",
    "source_file",
    "sha256",
]
CARD = (
    "domain", "title", "source", "official", "note", "problems", "counts", "masks", "foreground", "boxes", "parameters",
)  # fmt: skip
TEXTS = ("image_id", "subject_id", "split", "boxes", "pathology", "source_file", "sha256")
FILES = ("manifest.csv", "images.npy", "masks.npz", "native.zip", "clinical.jsonl")
SHOTS = 8  # train normals whose native pixels are kept, for few-shot prompts


def image_id(split: str, label: int, stem: str) -> str:
    """The id of an image of a 2-D set: `<split>/<good or Ungood>/<stem>`."""
    return f"{split}/{'Ungood' if label else 'good'}/{stem}"


@dataclass(frozen=True)
class Pixels:
    """What `Case.load` returns.

    image: uint8, H x W or H x W x 3, native size. mask: bool, H x W, or None where the pixel truth is unknown (a
    normal image of a domain with masks needs none: its mask is all zero). sha256: of the source file's bytes.
    foreground: bool, H x W, the pixels that belong to the organ; a source that declares one (`has_foreground`) must
    give it for every image whose pixel truth is known.
    """

    image: np.ndarray
    mask: np.ndarray | None
    sha256: str
    foreground: np.ndarray | None = None


@dataclass(frozen=True)
class Case:
    """One image that a domain source offers; `load` reads its pixels and may raise CaseProblem."""

    image_id: str
    subject_id: str
    split: str
    label: int
    source_file: str
    load: Callable[[], Pixels]
    boxes: tuple[tuple[float, float, float, float], ...] = ()
    pathology: str = ""
    clinical: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Writer:
    """Streams cases into the files of a prepared domain; memory does not grow with the number of images.

    folder: empty folder to fill. size: side S of images.npy. colour: 3 channels instead of 1. has_masks: the domain
    has pixel truth. total: number of cases that may be added. has_foreground: the organ is stored beside every mask.
    """

    folder: Path
    size: int
    colour: bool
    has_masks: bool
    total: int
    has_foreground: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)
    clinical: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = (self.total, self.size, self.size) + ((3,) if self.colour else ())
        self._images = np.lib.format.open_memmap(self.folder / "images.npy", "w+", np.uint8, shape)
        self._native = zipfile.ZipFile(self.folder / "native.zip", "w")
        self._masks: list[np.ndarray] = []
        self._foregrounds: list[np.ndarray] = []
        self._mask_shapes: list[tuple[int, int]] = []
        self._shots = 0

    def add(self, case: Case, pixels: Pixels) -> None:
        """Append one case. Cases must come in manifest order: train, valid, test.

        Raises ValueError naming an image whose declared foreground is missing or not on the image's grid.
        """
        row = len(self.rows)
        self._images[row] = images.resize(pixels.image, self.size)
        height, width = pixels.image.shape[:2]
        mask_row: int | str = ""
        if self.has_masks and case.split != "train":
            mask = np.zeros((height, width), bool) if case.label == 0 else pixels.mask
            if mask is not None:
                mask_row = len(self._masks)
                self._masks.append(np.packbits(mask, axis=1))
                self._mask_shapes.append((height, width))
                if self.has_foreground:
                    self._foregrounds.append(np.packbits(_organ(case, pixels), axis=1))
        shot = case.split == "train" and self._shots < SHOTS
        self._shots += shot
        if case.split != "train" or shot:
            info = zipfile.ZipInfo(f"{case.image_id}.png")  # fixed date: equal pixels give equal bytes
            self._native.writestr(info, images.encode_png(pixels.image))
        if case.clinical:
            self.clinical.append({"image_id": case.image_id, **case.clinical})
        self.rows.append(
            {
                "image_id": case.image_id,
                "subject_id": case.subject_id,
                "split": case.split,
                "label": case.label,
                "row": row,
                "mask_row": mask_row,
                "native_h": height,
                "native_w": width,
                "boxes": json.dumps([list(box) for box in case.boxes]),
                "pathology": case.pathology,
                "source_file": case.source_file,
                "sha256": pixels.sha256,
            }
        )

    def close(self, card: dict[str, Any]) -> dict[str, dict[str, int]]:
        """Finish the files and write `card.json`: `card` plus counts, shapes and the hash of the prepared domain.

        Returns the counts, see `count`.
        """
        self._images.flush()
        if len(self.rows) < self.total:  # known problems of an official release were left out
            np.save(self.folder / "fewer.npy", self._images[: len(self.rows)])
            (self.folder / "fewer.npy").replace(self.folder / "images.npy")
        self._native.close()
        offsets = np.cumsum([0, *(packed.size for packed in self._masks)], dtype=np.int64)
        shapes = np.array(self._mask_shapes, np.int32).reshape(-1, 2)
        arrays: dict[str, Any] = {"bits": _joined(self._masks), "offsets": offsets, "shapes": shapes}
        if self.has_foreground:
            arrays["foreground"] = _joined(self._foregrounds)
        np.savez_compressed(self.folder / "masks.npz", **arrays)
        lines = [records.canonical(entry) + "\n" for entry in self.clinical]
        (self.folder / "clinical.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")
        table = pd.DataFrame(self.rows, columns=COLUMNS)
        table.to_csv(self.folder / "manifest.csv", index=False, lineterminator="\n")
        hashes = {name: records.digest_file(self.folder / name) for name in FILES}
        counts = count(table)
        facts = {"files": hashes, "hash": records.digest(hashes), "counts": counts, "size": self.size}
        kinds = {"colour": self.colour, "masks": self.has_masks, "foreground": self.has_foreground}
        kinds["boxes"] = bool((table.boxes != "[]").any())
        records.write_card(self.folder / "card.json", {**card, **facts, **kinds})
        return counts


def _organ(case: Case, pixels: Pixels) -> np.ndarray:
    """The foreground that the source declared. Raises ValueError: its absence or another grid is the source's fault."""
    organ, size = pixels.foreground, pixels.image.shape[:2]
    if organ is None:
        raise ValueError(f"{case.image_id}: source declares a foreground and gave none")
    if organ.shape != size:
        raise ValueError(f"{case.image_id}: source gave a foreground of shape {organ.shape}, expected {size}")
    return organ


def _joined(packed: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([part.ravel() for part in packed] or [np.zeros(0, np.uint8)])


def count(table: pd.DataFrame) -> dict[str, dict[str, int]]:
    """Images per split and label of a manifest: {split: {"normal": n, "abnormal": n}}."""
    return {
        split: {
            name: int(((table.split == split) & (table.label == label)).sum())
            for label, name in enumerate(("normal", "abnormal"))
        }
        for split in SPLITS
    }


class Prepared:
    """Read view of a prepared domain folder. Raises AnomedError naming the file that is missing or damaged."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.card = records.read_card(folder / "card.json", "files", "hash", *CARD)
        self.hash: str = self.card["hash"]
        if records.digest(self.card["files"]) != self.hash:
            raise AnomedError(
                f"{folder / 'card.json'}: its hashes do not add up; delete the folder and run prepare again"
            )
        self.table = read(self._file("manifest.csv"))

    def _file(self, name: str) -> Path:
        return records.verified(self.folder / name, self.card)

    @cached_property
    def images(self) -> np.ndarray:
        """uint8, N x S x S or N x S x S x 3, memory-mapped; row i belongs to the manifest's `row` i."""
        try:
            return np.load(self._file("images.npy"), mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise AnomedError(f"{self.folder / 'images.npy'}: unreadable ({error}); run prepare again") from None

    @cached_property
    def _masks(self) -> dict[str, np.ndarray]:
        try:
            names = ["bits", "offsets", "shapes"] + ["foreground"] * self.card["foreground"]
            with np.load(self._file("masks.npz")) as archive:
                return {name: archive[name] for name in names}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise AnomedError(f"{self.folder / 'masks.npz'}: unreadable ({error}); run prepare again") from None

    def mask(self, mask_row: int) -> np.ndarray:
        """The truth of one image: bool, native H x W."""
        return self._unpacked("bits", mask_row)

    def foreground(self, mask_row: int) -> np.ndarray | None:
        """The pixels of one image that belong to the organ: bool, native H x W; None when the domain has none."""
        return self._unpacked("foreground", mask_row) if self.card["foreground"] else None

    def _unpacked(self, name: str, mask_row: int) -> np.ndarray:
        masks = self._masks
        height, width = masks["shapes"][mask_row]
        packed = masks[name][masks["offsets"][mask_row] : masks["offsets"][mask_row + 1]]
        return np.unpackbits(packed.reshape(height, -1), axis=1, count=width).astype(bool)

    def native(self, image_id: str) -> np.ndarray:
        """Native pixels of a valid or test image: uint8, H x W or H x W x 3."""
        return images.decode_png(self._native.read(f"{image_id}.png"), image_id)

    @cached_property
    def _native(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self._file("native.zip"))

    @cached_property
    def clinical(self) -> dict[str, dict[str, Any]]:
        """What `Case.clinical` gave, by image_id: texts, and facts of images such as "slice" and "view"; empty where
        there is neither."""
        lines = self._file("clinical.jsonl").read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines]
        return {entry.pop("image_id"): entry for entry in entries}

    def evaluated(self) -> pd.DataFrame:
        """The rows that detectors predict: valid, then test, in manifest order."""
        return self.table[self.table.split != "train"].reset_index(drop=True)


def read(path: Path) -> pd.DataFrame:
    """A manifest with typed columns: label and row int, mask_row nullable Int64, ids and paths str.

    Raises AnomedError naming the file and the first offence against contract 1.
    """
    try:
        kinds = {**dict.fromkeys(TEXTS, "str"), "mask_row": "Int64"}
        table = pd.read_csv(path, dtype=kinds, keep_default_na=False, na_values={"mask_row": [""]})
    except FileNotFoundError:
        raise AnomedError(f"{path}: not found; run `anomed prepare` first") from None
    except (ValueError, pd.errors.ParserError, io.UnsupportedOperation) as error:
        raise AnomedError(f"{path}: unreadable ({error}); run prepare again") from None
    if list(table.columns) != COLUMNS:
        raise AnomedError(f"{path}: found columns {list(table.columns)}, expected {COLUMNS}")
    checks = {
        "image_id is not unique": table.image_id.duplicated(),
        f"split is not one of {SPLITS}": ~table.split.isin(SPLITS),
        "label is not 0 or 1": ~table.label.isin([0, 1]),
        "an abnormal image in train": (table.split == "train") & (table.label == 1),
        "row does not count up from 0": table.row != np.arange(len(table)),
    }
    for fault, rows in checks.items():
        if rows.any():
            raise AnomedError(f"{path}: {fault}, first at {table.image_id[rows].iloc[0]!r}; run prepare again")
    return table


def ordered(cases: Iterable[Case]) -> list[Case]:
    """Cases in manifest order: train, valid, test; normal before abnormal; then by image_id."""
    return sorted(cases, key=lambda case: (SPLITS.index(case.split), case.label, case.image_id))
