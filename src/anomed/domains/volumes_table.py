"""The table of subjects that a user gives with volumes: read, and every fault named by its line."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from anomed.domains import volumes_layout
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
    """The rows of a CSV in UTF-8 (columns: see the source), in their order.

    By the csv module: unlike pandas it knows the line of a row, and a row of too few or too many cells is seen. Raises
    AnomedError naming the file, the line and the fault.
    """
    data = path.read_bytes()
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise AnomedError(f"{path}, line {line}: not UTF-8; save the table as CSV in UTF-8") from None
    rows = []
    try:
        header = next(reader, [])
        _check_header(header)
        for cells in reader:
            if any(cells):  # spreadsheets write empty lines below the last
                rows.append(_row(header, cells, f"{path.name}, line {reader.line_num}"))
    except csv.Error as error:
        raise AnomedError(f"{path}, line {reader.line_num}: not CSV ({error}); save the table again") from None
    except AnomedError as error:
        raise AnomedError(f"{path}, line {reader.line_num}: {error}") from None
    if not rows:
        raise AnomedError(f"{path}, line 2: found no subject, expected one line for each")
    return rows


def _check_header(header: list[str]) -> None:
    for column in header:
        plain = column.strip().lower()
        if plain in KNOWN and (column != plain or header.count(column) > 1):
            raise AnomedError(f"found columns {header}, expected {plain!r} once, without capitals and spaces")
    if "subject" not in header:
        raise AnomedError(f"found columns {header}, expected `subject` among them, separated by commas")


def _row(header: list[str], cells: list[str], place: str) -> Subject:
    if len(cells) != len(header):
        raise AnomedError(f"found {len(cells)} cells, expected {len(header)} as in the first line")
    row = dict(zip(header, cells, strict=True))
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
