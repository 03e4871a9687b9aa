"""What names and table together say about a folder of images: one record an image, and everything that is wrong."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from anomed.domains import folder_layout
from anomed.domains.folder_layout import LABELS, SPLITS, Layout
from anomed.domains.folder_table import Box, Row, Table
from anomed.errors import AnomedError, CaseProblem

T = TypeVar("T")
_MASK_FOLDERS = {"mask", "masks", "anomaly_mask", "label", "labels", "ground_truth", "seg", "segmentation"}


@dataclass(frozen=True)
class Picture:
    """One image by its path. stem: its place without split, label and ending. subject: "" where unknown.

    split: None where shares decide. mask: a path, which may lead nowhere, or None.
    """

    path: str
    stem: str
    split: str | None
    label: int
    subject: str
    mask: str | None
    boxes: tuple[Box, ...]
    pathology: str


class Survey:
    """pictures: by path, those without a fault of their own. problems: all that need no pixels to be seen.

    layout: what names say; patterns: by which; table: what it says; present: every path below root; where: the key in
    params.yaml, for messages. Raises AnomedError when nothing says which images are abnormal.
    """

    def __init__(
        self, layout: Layout, patterns: Mapping[str, str], table: Table | None, present: Collection[str], where: str
    ):
        self._layout, self._patterns, self._table, self._present, self._where = layout, patterns, table, present, where
        self._masks: dict[str, list[str]] = defaultdict(list)
        for path in layout.masks:
            self._masks[folder_layout.stem(path)].append(path)
        self.problems: list[CaseProblem] = list(self._unused())
        self.pictures: list[Picture] = []
        rows = {row.image: row for row in reversed(table.rows)} if table else {}
        for path in sorted(rows if table else layout.images):
            try:
                self.pictures.append(self._picture(path, rows.get(path)))
            except CaseProblem as problem:
                self.problems.append(problem)
        self.problems += self._mask_faults()

    def _unused(self) -> Iterator[CaseProblem]:
        """Lines that stand twice and images that no pattern or no line speaks of."""
        for path in self._layout.strange:
            expected = " or ".join(f"{self._where}.{kind} {pattern!r}" for kind, pattern in self._patterns.items())
            hint = "rename it, change the pattern, or move it away"
            found = "a name that fits no pattern" if folder_layout.is_picture(path) else "another format"
            yield CaseProblem(path, "unrecognised_file", found, expected, hint)
        if not self._table:
            return
        first: dict[str, Row] = {}
        for row in self._table.rows:
            if first.setdefault(row.image, row) is not row:
                found = f"{first[row.image].place} and {row.place}"
                yield CaseProblem(row.image, "duplicate_row", found, "one line for an image", "keep one of the lines")
        for path in sorted(self._layout.images.keys() - first.keys() - {row.mask for row in self._table.rows}):
            hint = "add it to the table, or move it away"
            yield CaseProblem(path, "image_not_in_table", "an image without a line", "a line of the table", hint)

    def _picture(self, path: str, row: Row | None) -> Picture:
        """What names and table say of one image. Raises CaseProblem where it cannot be used."""
        fields = self._layout.images.get(path, {})
        self._check_file(path, row, fields)
        split = row.split if row and row.split is not None else _meaning(path, "split", fields, SPLITS)
        label = row.label if row and row.label is not None else _meaning(path, "label", fields, LABELS)
        if label is None:
            raise AnomedError(
                f"{self._where}: nothing says which images are abnormal, first {path}; name the part of the path that "
                f"does {{label}} in {self._where}.image, or give {self._where}.table a column `label`"
            )
        if row and (row.faulty_boxes or (row.boxes and not label)):
            found = row.faulty_boxes or f"{len(row.boxes)} in a normal image"
            code = "bad_boxes" if row.faulty_boxes else "boxes_in_normal"
            expected = "a JSON list of [x0, y0, x1, y1], x0 < x1 and y0 < y1, in abnormal images"
            raise CaseProblem(path, code, found, expected, f"correct {row.place}")
        return Picture(
            path=path,
            stem=_short(path, fields),
            split=split,
            label=label,
            subject=(row.subject if row else "") or fields.get("subject", ""),
            mask=(row.mask if row else "") or self._named_mask(fields, label),
            boxes=row.boxes if row else (),
            pathology=row.pathology if row else "",
        )

    def _check_file(self, path: str, row: Row | None, fields: Mapping[str, str]) -> None:
        if row and path not in self._present:
            hint = "correct the path, which is relative to root, or remove the line"
            raise CaseProblem(path, "missing_image", "no such file", f"the image of {row.place}", hint)
        if not folder_layout.is_picture(path):
            endings = ", ".join(folder_layout.ENDINGS)
            raise CaseProblem(path, "not_an_image", "another ending", f"one of {endings}", "convert the image")
        if not (row and row.subject) and (others := self._layout.ambiguous.get(path)):
            hint = (
                f"give {self._where}.image more of the name, such as 'scan_{{subject}}_{{name}}', or a table `subject`"
            )
            raise CaseProblem(path, "ambiguous_name", " or ".join(map(repr, others)), "one subject", hint)
        folders = fields.get("name", "").lower().split("/")[:-1]
        if row is None and (words := _MASK_FOLDERS.intersection(folders)):
            hint = f"set {self._where}.mask to the pattern of the masks, or rename the folder"
            found = f"an image in a folder {sorted(words)[0]!r}"
            raise CaseProblem(path, "mask_as_image", found, "masks that `mask` names", hint)

    def _named_mask(self, fields: Mapping[str, str], label: int) -> str | None:
        """The mask that the pattern names: the file that is there or, of an abnormal image, the one that should be."""
        pattern = self._patterns.get("mask")
        if pattern is None:
            return None
        wanted = folder_layout.filled(pattern, fields) if fields else pattern
        there = self._masks.get(folder_layout.stem(wanted), [])
        return there[0] if there else (wanted if label else None)

    def _mask_faults(self) -> Iterator[CaseProblem]:
        """Masks that are missing, that two images claim, and that no image claims."""
        owners: dict[str, str] = {}
        for picture in self.pictures:
            if picture.mask is not None and picture.mask not in self._present:
                hint = f"add the mask, or correct the table or {self._where}.mask"
                yield CaseProblem(picture.path, "missing_mask", "no such file", f"the mask {picture.mask}", hint)
            elif picture.mask is not None and owners.setdefault(picture.mask, picture.path) != picture.path:
                found = f"{picture.mask}, the mask of {owners[picture.mask]} as well"
                yield CaseProblem(picture.path, "shared_mask", found, "a mask of its own", "correct one of the two")
        for path in self._layout.masks:
            if path not in owners:
                hint = "add the image, or move the mask away"
                yield CaseProblem(path, "mask_without_image", "a mask alone", "an image that it belongs to", hint)


def _meaning(path: str, field: str, fields: Mapping[str, str], words: Mapping[str, T]) -> T | None:
    """What the word of a path means; None where the path has none. Raises CaseProblem for an unknown word."""
    if field not in fields:
        return None
    if fields[field].lower() not in words:
        hint = "rename the folder or file, change the pattern, or move the file away"
        raise CaseProblem(path, f"unknown_{field}", repr(fields[field]), f"one of {', '.join(words)}", hint)
    return words[fields[field].lower()]


def _short(path: str, fields: Mapping[str, str]) -> str:
    """A path without its ending and without the folders that are its split and its label."""
    *folders, file = folder_layout.stem(path).split("/")
    for field in ("split", "label"):
        if fields.get(field) in folders:
            folders.remove(fields[field])
    return "/".join([*folders, file])
