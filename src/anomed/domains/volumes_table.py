"""The table of subjects that a user gives with volumes: read, and every fault named by its line."""

from dataclasses import dataclass
from pathlib import Path

from anomed.domains import tables, volumes_layout
from anomed.errors import AnomedError

PATHS = ("image", "lesion", "organ")  # columns of paths
KNOWN = {"subject", "split", "label", "pathology", *PATHS}
SPLITS = {"train": "train", "valid": "valid", "val": "valid", "test": "test"}
LABELS = {"0": False, "normal": False, "1": True, "abnormal": True}


@dataclass(frozen=True)
class Subject:
    """One subject by name. place: its line or file, for messages. split, abnormal: None where nothing says so yet.

    paths: by column (image, lesion, organ), relative to root; they may lead nowhere.
    """

    name: str
    place: str
    split: str | None
    abnormal: bool | None
    pathology: str
    paths: dict[str, str]


def read(path: Path) -> list[Subject]:
    """The rows of a CSV (columns: see the source), in their order. Raises AnomedError as `tables.read`."""
    rows, _ = tables.read(
        path.read_bytes(), str(path), KNOWN, "subject", lambda row, line: _row(row, f"{path.name}, line {line}")
    )
    return rows


def _row(row: dict[str, str], place: str) -> Subject:
    split, label = row.get("split"), row.get("label")
    if split is not None and split not in SPLITS:
        raise AnomedError(f"found split {split!r}, expected one of {', '.join(SPLITS)}")
    if label is not None and label.lower() not in LABELS:
        raise AnomedError(f"found label {label!r}, expected one of {', '.join(LABELS)}")
    for column in PATHS:
        if row.get(column) and (fault := volumes_layout.path_fault(row[column])):
            raise AnomedError(f"{column} {row[column]!r} {fault}; expected a path relative to `root`, with slashes")
    return Subject(
        name=row["subject"],
        place=place,
        split=None if split is None else SPLITS[split],
        abnormal=None if label is None else LABELS[label.lower()],
        pathology=row.get("pathology", ""),
        paths={column: row[column].removesuffix("/") for column in PATHS if row.get(column)},
    )
