"""Domain source `nova`: the released NOVA (arXiv 2505.14064), brain MRI slices with boxes, captions and histories."""

import collections
import functools
import hashlib
import math
from pathlib import PurePosixPath
from typing import NamedTuple

from anomed import archive, images, plugins, records
from anomed.archive import Entry
from anomed.domains import nova_table
from anomed.domains.nova_table import Row
from anomed.domains.source import Source
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Case, Pixels

Box = tuple[float, float, float, float]
_ROUNDING = 1e-6  # pixels that a box may leave the image by, for x + width is not exact
_STRAY = ("thumbs.db", "desktop.ini", "__macosx")


class Found(NamedTuple):
    """What lies at root: its annotation files, its PNGs by name, and the number of all other files."""

    tables: list[str]
    pictures: dict[str, Entry]
    others: int


@plugins.register("domains", "nova")
class Nova(Source):
    """NOVA as released: a folder (or zip) with `data/nova-v1.parquet` and the PNGs that its `image_path` names.

    The parquet may lie anywhere below root. Where there is none, the older form is read: `captions.csv`,
    `case_metadata.csv`, `bboxes_gold.csv` and, optional, `bboxes_raters.csv` (filename, rater, x, y, width, height).
    Rows and images are joined by file name, never by order: the image is the one at `image_path` below root or else
    the only one of that name. PNGs in folders without any image of the table (a logo) count as ignored.

    The set is evaluation only: every image is in test and belongs to a patient with a diagnosis, so label is 1
    throughout; there are no normal images, though a few show no finding. A subject is a case, its pathology the final
    diagnosis. Gold boxes ([x, y, width, height] in the files) become [x0, y0, x1, y1] in native pixels. `clinical` has
    caption, history, diagnosis, scan_id, boxes_known (False: the row has no boxes at all, which does not mean that
    nothing is there; an empty list of boxes does) and rater_boxes by rater, kept as drawn even where one leaves the
    image. The CSV form cannot tell the two kinds of row without boxes apart: there boxes_known is False.
    """

    @property
    def trains(self) -> bool:
        return False

    @property
    def has_masks(self) -> bool:
        return False

    def fingerprint(self) -> str:
        """Digest of the names and contents of the annotation files and of all PNGs."""
        names = {*self._found.tables, *self._found.pictures}
        entries = [entry for name, entry in self.entries.items() if name in names]
        return records.digest(archive.identity(self.tree, "", entries, self.hashes))

    def cases(self) -> list[Case]:
        """Every image whose row is whole, by file name. Reads no pixels. Raises AnomedError when there is none."""
        rows, problems = nova_table.read(self.tree, self._found.tables)
        self.problems = [*problems, *_contradictions(rows)]
        disputed = {problem.row["case"] for problem in self.problems}
        cases, images_found = [], set()
        for row in sorted(rows, key=lambda row: row.filename):
            try:
                name = self._image(row)
                images_found.add(name)
                if not disputed & {row.filename, row.case_id}:
                    cases.append(self._case(row, name))
            except CaseProblem as problem:
                self.problems.append(problem)
        if not images_found:
            first = f", the first: {self.problems[0]}" if self.problems else ""
            raise AnomedError(
                f"{self.root}: no image of the {len(rows)} rows of {self._found.tables[0]} among "
                f"{len(self._found.pictures)} PNGs; put the images where image_path says{first}"
            )
        folders = {_folder(name) for name in images_found}
        alone = sorted(self._found.pictures.keys() - images_found)
        named = {PurePosixPath(row.filename).name for row in rows}
        unlisted = [name for name in alone if _folder(name) in folders and PurePosixPath(name).name not in named]
        for name in unlisted:
            hint = "add its row, or move the image away"
            self.problems.append(CaseProblem(name, "image_without_row", "an image alone", "a row of this name", hint))
        self.ignored = self._found.others + len(alone) - len(unlisted)
        return cases

    def _image(self, row: Row) -> str:
        """The name of a row's image, relative to root. Raises CaseProblem when it cannot be told."""
        wanted = PurePosixPath(row.filename).name
        if not wanted:
            raise CaseProblem(row.path or "a row", "missing_value", "no filename", "a file name", "complete the row")
        path = str(PurePosixPath(row.path))
        if path in self._found.pictures:
            if PurePosixPath(path).name != wanted:
                hint = "correct the row: images are joined by file name"
                raise CaseProblem(row.filename, "other_image_path", path, f"a path that ends in {wanted}", hint)
            return path
        same = self._by_name.get(wanted, [])
        if len(same) > 1:
            hint = "keep one, or put it where image_path says"
            raise CaseProblem(row.filename, "two_images", " and ".join(same), "one image of this name", hint)
        if not same:
            hint = "add the PNG, or remove the row"
            raise CaseProblem(row.filename, "row_without_image", "no such PNG", row.path or wanted, hint)
        return same[0]

    def _case(self, row: Row, name: str) -> Case:
        for key in ("case_id", "caption", "history", "diagnosis"):
            if not getattr(row, key):
                raise CaseProblem(
                    row.filename, "missing_value", f"no {key}", f"a {key} in every row", "complete the row"
                )
        boxes = _boxes(row)
        gold = boxes.pop("gold", [])
        return Case(
            image_id=PurePosixPath(row.filename).stem,
            subject_id=row.case_id,
            split="test",
            label=1,
            source_file=name,
            load=functools.partial(self._load, name, gold),
            boxes=tuple(gold),
            pathology=row.diagnosis,
            clinical={
                "caption": row.caption,
                "history": row.history,
                "diagnosis": row.diagnosis,
                "scan_id": row.scan_id,
                "boxes_known": row.boxes is not None,
                "rater_boxes": {rater: [list(box) for box in drawn] for rater, drawn in sorted(boxes.items())},
            },
        )

    def _load(self, name: str, gold: list[Box]) -> Pixels:
        data = self.tree.take(name, "a whole PNG")
        image = images.read_png(data, name, self.colour)
        height, width = image.shape
        for box in gold:
            if min(box[:2]) < -_ROUNDING or box[2] > width + _ROUNDING or box[3] > height + _ROUNDING:
                found, expected = f"[x0, y0, x1, y1] = {list(box)}", f"a box inside {width} x {height} pixels (x, y)"
                raise CaseProblem(name, "box_outside_image", found, expected, "correct the box or the image's size")
        return Pixels(image, None, hashlib.sha256(data).hexdigest())

    @functools.cached_property
    def _found(self) -> Found:
        visible = {name: entry for name, entry in self.entries.items() if not _is_stray(name)}
        try:
            tables = nova_table.locate(visible)
        except AnomedError as error:
            raise AnomedError(f"{self.root}: {error}") from None
        pictures = {name: entry for name, entry in visible.items() if name.lower().endswith(".png")}
        return Found(tables, pictures, len(self.entries) - len(tables) - len(pictures))

    @functools.cached_property
    def _by_name(self) -> dict[str, list[str]]:
        names = collections.defaultdict(list)
        for name in sorted(self._found.pictures):
            names[PurePosixPath(name).name].append(name)
        return names


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _is_stray(name: str) -> bool:
    """Hidden files, files in hidden folders, and what Windows and macOS leave behind."""
    return any(part.startswith(".") or part.lower() in _STRAY for part in name.split("/"))


def _contradictions(rows: list[Row]) -> list[CaseProblem]:
    """File names that stand in two rows, and cases whose rows do not agree on the diagnosis or the history."""
    problems = []
    counts = collections.Counter(row.filename for row in rows if row.filename)
    for name in sorted(name for name, count in counts.items() if count > 1):
        hint = "keep the right one"
        problems.append(CaseProblem(name, "duplicate_row", f"{counts[name]} rows", "one row an image", hint))
    for key, code in (("diagnosis", "two_diagnoses"), ("history", "two_histories")):
        told = collections.defaultdict(set)
        for row in rows:
            if row.case_id and getattr(row, key):
                told[row.case_id].add(getattr(row, key))
        for case in sorted(case for case, texts in told.items() if len(texts) > 1):
            found = " and ".join(repr(text if len(text) < 60 else f"{text[:57]}...") for text in sorted(told[case]))
            problems.append(CaseProblem(case, code, found, f"one {key} a case", "correct the rows of this case"))
    return problems


def _boxes(row: Row) -> dict[str, list[Box]]:
    """A row's boxes as [x0, y0, x1, y1] by source, in the order of the row. Raises CaseProblem for a bad one."""
    boxes: dict[str, list[Box]] = {}
    if row.boxes is None:
        return boxes
    if not isinstance(row.boxes, list) or not all(isinstance(box, dict) for box in row.boxes):
        expected = "a list of boxes with source, x, y, width, height"
        raise CaseProblem(row.filename, "unreadable_boxes", f"{str(row.boxes)[:60]!r}", expected, "correct the row")
    for box in row.boxes:
        texts = [box.get(key) for key in ("x", "y", "width", "height")]
        found = f"{box.get('source')}: x, y, width, height = {str(texts)[:200]}"
        try:
            x, y, width, height = (float(text) for text in texts)
        except (TypeError, ValueError, OverflowError):
            x = y = width = height = math.nan
        source = str(box.get("source") or "")
        if not source or (source != "gold" and source.strip().lower() == "gold"):  # no rater: its box would be lost
            raise CaseProblem(row.filename, "box_without_source", found, "gold or a rater's name", "correct the row")
        if not all(map(math.isfinite, (x, y, width, height, x + width, y + height))):
            raise CaseProblem(row.filename, "box_not_a_number", found, "four finite numbers", "correct the row")
        if width <= 0 or height <= 0:
            hint = "correct the row: boxes are x, y, width, height, not two corners"
            raise CaseProblem(row.filename, "box_without_area", found, "width and height above 0", hint)
        boxes.setdefault(source, []).append((x, y, x + width, y + height))
    return boxes
