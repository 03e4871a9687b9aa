"""The table of images that a user gives with a folder: read, and every fault named by its line."""

import json
from dataclasses import dataclass
from typing import Any

from anomed.domains import folder_layout, tables, volumes_layout
from anomed.errors import AnomedError

COLUMNS = ("image", "split", "label", "subject", "mask", "boxes", "pathology")
Box = tuple[float, float, float, float]
_FAR = 1e9  # pixels: no corner is as far; a whole number of JSON may be too large for a float


@dataclass(frozen=True)
class Row:
    """One line. split, label: None where the table has no such column. faulty_boxes: what is wrong with them, or ""."""

    place: str
    image: str
    split: str | None
    label: int | None
    subject: str
    mask: str
    boxes: tuple[Box, ...]
    faulty_boxes: str
    pathology: str


@dataclass(frozen=True)
class Table:
    """The rows in their order, and the columns that there are."""

    rows: list[Row]
    columns: frozenset[str]


def read(data: bytes, name: str) -> Table:
    """A CSV with the column `image` and any other of `COLUMNS`. Raises AnomedError as `tables.read`."""
    return Table(*tables.read(data, name, COLUMNS, "image", lambda row, line: _row(row, f"{name}, line {line}")))


def _row(row: dict[str, str], place: str) -> Row:
    split, label = row.get("split"), row.get("label")
    if split is not None and split.lower() not in folder_layout.SPLITS:
        raise AnomedError(f"found split {split!r}, expected one of {', '.join(folder_layout.SPLITS)}")
    if label is not None and label.lower() not in folder_layout.LABELS:
        raise AnomedError(f"found label {label!r}, expected one of {', '.join(folder_layout.LABELS)}")
    for column in ("image", "mask"):
        path = row.get(column, "")
        if (path or column == "image") and (fault := volumes_layout.path_fault(path)):
            raise AnomedError(f"{column} {path!r} {fault}; expected a path relative to `root`, with slashes")
    if (subject := row.get("subject", "")) != subject.strip():  # would make one patient two, in two splits
        raise AnomedError(f"found subject {subject!r}, expected one without spaces around it")
    boxes, fault = _boxes(row.get("boxes", ""))
    return Row(
        place=place,
        image=row["image"],
        split=None if split is None else folder_layout.SPLITS[split.lower()],
        label=None if label is None else folder_layout.LABELS[label.lower()],
        subject=subject,
        mask=row.get("mask", ""),
        boxes=boxes,
        faulty_boxes=fault,
        pathology=row.get("pathology", ""),
    )


def _boxes(text: str) -> tuple[tuple[Box, ...], str]:
    """Boxes of a cell, and what is wrong with it. Whether they lie in the image is seen when that is read."""
    if not text.strip():
        return (), ""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return (), f"{_shown(text)}, which is no JSON"
    if not isinstance(found, list):
        return (), f"{_shown(text)}, which is no list"
    for box in found:
        numbers = isinstance(box, list) and len(box) == 4 and all(type(part) in (int, float) for part in box)
        if not numbers or not all(abs(part) < _FAR for part in box):  # also False for NaN
            return (), f"{_shown(json.dumps(box))}, which is not four finite numbers"
        if box[0] >= box[2] or box[1] >= box[3]:
            return (), f"{json.dumps(box)}, which is empty or inverted"
    return tuple((box[0], box[1], box[2], box[3]) for box in found), ""


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
