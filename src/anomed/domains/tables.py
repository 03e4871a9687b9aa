"""Tables that users give with their data: a CSV in UTF-8, every fault named by its line."""

import csv
import io
from collections.abc import Callable, Collection
from typing import TypeVar

from anomed.errors import AnomedError

T = TypeVar("T")


def read(
    data: bytes, name: str, known: Collection[str], key: str, parse: Callable[[dict[str, str], int], T]
) -> tuple[list[T], frozenset[str]]:
    """The rows of a table in their order, as `parse` makes them of a row's cells and line, and its columns.

    known: columns that are read; others are passed over. key: the one that must be there. By the csv module: unlike
    pandas it knows the line of a row, and a row of too few or too many cells is seen. Raises AnomedError naming the
    table (`name`), the line and the fault, also one that `parse` raises.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise AnomedError(f"{name}, line {line}: not UTF-8; save the table as CSV in UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows = []
    try:
        header = next(reader, [])
        _check_header(header, known, key)
        for cells in reader:
            if not any(cells):
                continue  # spreadsheets write empty lines below the last
            if len(cells) != len(header):
                raise AnomedError(f"found {len(cells)} cells, expected {len(header)} as in the first line")
            rows.append(parse(dict(zip(header, cells, strict=True)), reader.line_num))
    except csv.Error as error:
        raise AnomedError(f"{name}, line {reader.line_num}: not CSV ({error}); save the table again") from None
    except AnomedError as error:
        raise AnomedError(f"{name}, line {reader.line_num}: {error}") from None
    if not rows:
        raise AnomedError(f"{name}, line 2: found no {key}, expected one line for each")
    return rows, frozenset(header)


def _check_header(header: list[str], known: Collection[str], key: str) -> None:
    for column in header:
        plain = column.strip().lower()
        if plain in known and (column != plain or header.count(column) > 1):
            raise AnomedError(f"found columns {header}, expected {plain!r} once, without capitals and spaces")
    if key not in header:
        raise AnomedError(f"found columns {header}, expected `{key}` among them, separated by commas")
