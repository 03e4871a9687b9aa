"""NOVA's annotations: the rows of its parquet, or of the CSV files of its older form, joined by names."""

import collections
import csv
import io
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from anomed.archive import View
from anomed.errors import AnomedError, CaseProblem

PARQUET = ("filename", "case_id", "scan_id", "caption_text", "image_path", "meta", "bboxes")
META = ("clinical_history", "final_diagnosis")
CSV = {
    "captions.csv": ("filename", "case_id", "scan_id", "caption"),
    "case_metadata.csv": ("case_id", *META),
    "bboxes_gold.csv": ("filename", "x", "y", "width", "height"),
    "bboxes_raters.csv": ("filename", "rater", "x", "y", "width", "height"),
}
_OPTIONAL = "bboxes_raters.csv"


class Row(NamedTuple):
    """What is said of one image. A text that is missing is empty; `path` is where the image should lie.

    boxes: mappings with source ("gold" or a rater's name), x, y, width, height, none of it checked; None: not known.
    """

    filename: str
    case_id: str
    scan_id: str
    caption: str
    history: str
    diagnosis: str
    path: str
    boxes: Any


def locate(names: Iterable[str]) -> list[str]:
    """The files among `names` that hold the annotations: one parquet or, where there is none, the CSV files.

    Raises AnomedError when there are none or two.
    """
    names = sorted(names)
    found = [name for name in names if name.lower().endswith(".parquet")]
    kind = "a parquet"
    if not found:
        found, kind = [name for name in names if name.rpartition("/")[2] == "captions.csv"], "captions.csv"
    if not found:
        raise AnomedError("no parquet and no captions.csv; expected data/nova-v1.parquet beside the images")
    if len(found) > 1:
        raise AnomedError(f"found {' and '.join(found)}, expected {kind} once; keep the one that belongs to the images")
    if kind == "a parquet":
        return found
    folder = found[0].removesuffix("captions.csv")
    wanted = [folder + name for name in CSV]
    for name in wanted:
        if name not in names and not name.endswith(_OPTIONAL):
            raise AnomedError(
                f"{name}: not found beside captions.csv; expected {', '.join(CSV)} (the last may be absent)"
            )
    return [name for name in wanted if name in names]


def read(tree: View, files: list[str]) -> tuple[list[Row], list[CaseProblem]]:
    """The rows in the order of their file, and what does not join, of the files that `locate` found.

    Raises AnomedError naming a file that cannot be read or lacks a column.
    """
    if files[0].lower().endswith(".parquet"):
        return _parquet(tree, files[0]), []
    return _joined({name.rpartition("/")[2]: _csv(tree, name) for name in files})


def _parquet(tree: View, name: str) -> list[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(io.BytesIO(tree.read(name)))
        _require(tree, name, PARQUET, file.schema_arrow.names)
        entries = file.read(columns=list(PARQUET)).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise AnomedError(f"{tree.root / name}: not a whole parquet file ({reason}); download it again") from None
    metas = [_decoded(entry["meta"]) for entry in entries]
    metas = [meta if isinstance(meta, dict) else {} for meta in metas]
    if entries:
        inner = {f"meta.{key}" for meta in metas for key in meta}
        _require(tree, name, tuple(f"meta.{key}" for key in META), sorted(inner))
    keys = ("filename", "case_id", "scan_id", "caption_text")
    return [
        Row._make(
            [
                *(_text(entry[key]) for key in keys),
                *(_text(meta.get(key)) for key in META),
                _text(entry["image_path"]),
                _decoded(entry["bboxes"]),
            ]
        )
        for entry, meta in zip(entries, metas, strict=True)
    ]


def _require(tree: View, name: str, columns: tuple[str, ...], found: Iterable[str]) -> None:
    missing = [column for column in columns if column not in found]
    if missing:
        raise AnomedError(
            f"{tree.root / name}: column {missing[0]!r} is missing, found {', '.join(found) or 'none'}; expected "
            f"{', '.join(columns)}: take the file of the release"
        )


def _decoded(value: Any) -> Any:
    """A column that may hold its structure as JSON text. What is no JSON stays a text, for the caller to refuse."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
        json.dumps(found, ensure_ascii=False).encode()  # JSON can spell halves of characters, which no file can hold
        return found
    except (ValueError, RecursionError):
        return value


def _text(value: Any) -> str:
    """A cell as text; empty where it is null, NaN or blank."""
    return "" if value is None or value != value or not str(value).strip() else str(value)


def _csv(tree: View, name: str) -> list[dict[str, str]]:
    try:
        text = tree.read(name).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise AnomedError(f"{tree.root / name}: not UTF-8 ({error}); save it again as CSV in UTF-8") from None
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows = []
    try:
        _require(tree, name, CSV[name.rpartition("/")[2]], reader.fieldnames or ())
        for row in reader:
            if None in row or None in row.values():
                expected = f"{len(reader.fieldnames or ())} fields, a comma inside one in quotes"
                raise AnomedError(
                    f"{tree.root / name}: line {reader.line_num}: wrong number of fields; expected {expected}"
                )
            rows.append(row)
    except csv.Error as error:
        place = f"{tree.root / name}: line {reader.line_num}"
        raise AnomedError(f"{place}: not CSV ({error}); save it again as CSV in UTF-8") from None
    return rows


def _joined(tables: dict[str, list[dict[str, str]]]) -> tuple[list[Row], list[CaseProblem]]:
    """Captions with what the other files say of their case and image, and the lines that belong to none of them."""
    captions = tables["captions.csv"]
    boxes: dict[str, list[dict[str, str]]] = collections.defaultdict(list)
    for line in tables["bboxes_gold.csv"]:
        boxes[line["filename"]].append({**line, "source": "gold"})
    for line in tables.get(_OPTIONAL, []):
        boxes[line["filename"]].append({**line, "source": line["rater"]})
    metas = {line["case_id"]: line for line in tables["case_metadata.csv"]}
    problems = [
        CaseProblem(name, "boxes_without_row", f"{len(boxes[name])} boxes", "a line of captions.csv", "add the line")
        for name in sorted(boxes.keys() - {line["filename"] for line in captions})
    ]
    for case in sorted(metas.keys() - {line["case_id"] for line in captions}):
        hint = "add its images to captions.csv, or remove the case"
        problems.append(CaseProblem(case, "case_without_image", "a line of case_metadata.csv", "an image of it", hint))
    counts = collections.Counter(line["case_id"] for line in tables["case_metadata.csv"])
    for case in sorted(case for case, count in counts.items() if count > 1):
        found = f"{counts[case]} lines of case_metadata.csv"
        problems.append(CaseProblem(case, "duplicate_case", found, "one line", "keep the right one"))
    rows = []
    for line in captions:
        meta = metas.get(line["case_id"], {})
        texts = [_text(line[key]) for key in CSV["captions.csv"]] + [_text(meta.get(key)) for key in META]
        rows.append(Row._make([*texts, line["filename"], boxes.get(line["filename"])]))
    return rows, problems
