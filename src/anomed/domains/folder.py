"""Domain source `folder`: a user's own 2-D images, laid out in folders, named by patterns or listed in a table."""

import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from anomed import archive, images, plugins, records
from anomed.domains import folder_layout, folder_table, volumes_layout
from anomed.domains.division import Shares, divide
from anomed.domains.folder_layout import Layout
from anomed.domains.folder_survey import Picture, Survey
from anomed.domains.folder_table import Table
from anomed.domains.source import Source
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Case, Pixels, image_id


@plugins.register("domains", "folder")
class FolderSource(Source):
    """Any folder or zip of PNG, JPEG, BMP or TIFF images of 8 bit.

    Without options, <split>/<label>/ with any folders and names below: splits train, valid or val, test; labels normal
    or good or 0, abnormal or Ungood or 1. Other layouts are patterns of paths relative to root: `{split}`, `{label}`
    and `{subject}` stand for a part of a name, `{name}` for all the rest, folders too; without an ending, a pattern
    fits every format. A file that fits both patterns belongs to the one with more letters of its own.

    A table is a CSV in UTF-8 with the column `image` (path) and, where wanted, `split`, `label`, `subject`, `mask`
    (path), `boxes` (JSON list of [x0, y0, x1, y1] in pixels of the image) and `pathology`; it says which images there
    are, and its columns win over what patterns find in names. Cells of `subject` and `mask` may be empty: the pattern
    then counts. Without any subject, each image is one of its own.

    Where neither the names nor the table give splits, subjects are divided by `split` and `seed`: those with normal
    images alone over train, valid and test, the others over valid and test.

    The domain has pixel truth if there is a pattern or a column of masks. A mask marks what is above 0; it is no JPEG.
    Normal images need none. An abnormal one must have the mask that the pattern names; with the column alone, an empty
    cell says that its truth is unknown. Every image that is not used is a problem, and no problem is passed over.
    """

    class Options(Source.Options):
        """image: pattern of the images, "{split}/{label}/{name}" or, with a table, "{name}". mask: pattern of their
        masks. table: the CSV, relative to root. colour: keep three channels; else images must be grey. split, seed: how
        to divide subjects where nothing else does.
        """

        image: str | None = None
        mask: str | None = None
        table: str | None = None
        colour: bool = False
        split: Shares = Field(default_factory=Shares)
        seed: int = 0

    def __init__(self, domain: str, options: Any, root: Path | None, work: Path):
        super().__init__(domain, options, root, work)
        default = "{split}/{label}/{name}" if options.table is None else "{name}"
        self._patterns = {"image": default if options.image is None else options.image}
        if options.mask is not None:
            self._patterns["mask"] = options.mask
        for kind, pattern in self._patterns.items():
            known = folder_layout.FIELDS if kind == "image" else folder_layout.fields(self._patterns["image"])
            if fault := folder_layout.pattern_fault(pattern, known):
                raise AnomedError(
                    f"{self.where}.{kind}: {pattern!r} {fault}; expected for example '{kind}s/{{name}}.png'"
                )
        if options.table is not None and (fault := volumes_layout.path_fault(options.table)):
            raise AnomedError(f"{self.where}.table: {options.table!r} {fault}; expected for example images.csv")

    @property
    def colour(self) -> bool:
        return bool(self.options.colour)

    @property
    def has_masks(self) -> bool:
        return "mask" in self._patterns or (self._table is not None and "mask" in self._table.columns)

    def fingerprint(self) -> str:
        """Digest of the names and contents of the table, the images, the masks, and of files that problems name."""
        self._usable()  # tells a wrong root before all that lies there is read
        pictures, problems = self._survey.pictures, self._survey.problems
        used = {self.options.table} | {problem.row["case"] for problem in problems}
        used |= {picture.path for picture in pictures} | {picture.mask for picture in pictures}
        entries = [entry for entry in self.entries.values() if entry.name in used]
        return records.digest(archive.identity(self.tree, "", entries, self.hashes))

    def cases(self) -> list[Case]:
        """Every image without a problem. Reads no pixels.

        Raises AnomedError for a faulty table, labels that nothing gives, and too few subjects to divide.
        """
        self.problems, self.ignored = list(self._survey.problems), len(self._layout.stray)
        usable = self._usable()
        divided = self._divide([picture for picture in usable if picture.split is None])
        return [self._case(picture, picture.split or divided[picture.subject or picture.path]) for picture in usable]

    def _usable(self) -> list[Picture]:
        """The images without a problem. Raises AnomedError when there is none."""
        problems = self._survey.problems
        faulty = {problem.row["case"] for problem in problems}
        usable = [picture for picture in self._survey.pictures if picture.path not in faulty]
        if not usable:
            first = f", first problem: {problems[0]}" if problems else ""
            raise AnomedError(
                f"{self.root}: no image among {len(self.entries)} files; expected images named "
                f"{self._patterns['image']!r} ({self.where}.image){first}"
            )
        return usable

    def _divide(self, pictures: list[Picture]) -> dict[str, str]:
        abnormal = {picture.subject or picture.path for picture in pictures if picture.label}
        normal = {picture.subject or picture.path for picture in pictures} - abnormal
        advice = "give the table a column `split`, or `image` a folder {split}"
        return divide(
            normal, abnormal, self.options.split, self.options.seed, f"{self.where}.split", advice, self.problems
        )

    def _case(self, picture: Picture, split: str) -> Case:
        name = image_id(split, picture.label, picture.stem)
        return Case(
            image_id=name,
            subject_id=picture.subject or name,
            split=split,
            label=picture.label,
            source_file=picture.path,
            load=functools.partial(self._load, picture),
            boxes=picture.boxes,
            pathology=picture.pathology,
        )

    def _load(self, picture: Picture) -> Pixels:
        data = self._read(picture.path)
        image = images.read_image(data, picture.path, self.colour)
        mask = None if picture.mask is None else _mask(self._read(picture.mask), picture.mask)
        height, width = image.shape[:2]
        for x0, y0, x1, y1 in picture.boxes:
            if x0 < 0 or y0 < 0 or x1 > width or y1 > height:
                expected = f"inside the image of {width} x {height} pixels (width x height)"
                hint = "correct the table: boxes are [x0, y0, x1, y1] in pixels of this image"
                raise CaseProblem(picture.path, "box_outside", f"box [{x0}, {y0}, {x1}, {y1}]", expected, hint)
        return Pixels(image, mask, hashlib.sha256(data).hexdigest())

    def _read(self, name: str) -> bytes:
        return self.tree.take(name, "a whole image", hint="copy or export it again")

    @functools.cached_property
    def _survey(self) -> Survey:
        return Survey(self._layout, self._patterns, self._table, set(self.entries), self.where)

    @functools.cached_property
    def _layout(self) -> Layout:
        rows = self._table.rows if self._table else []
        listed = {self.options.table} | {row.image for row in rows} | {row.mask for row in rows}
        return Layout(self.entries, self._patterns, listed)

    @functools.cached_property
    def _table(self) -> Table | None:
        name = self.options.table
        if name is None:
            return None
        if name not in self.entries:
            raise AnomedError(f"{self.root}: {name} not found; {self.where}.table names the table of images")
        return folder_table.read(self.tree.read(name), f"{self.root}: {name}")


def _mask(data: bytes, name: str) -> np.ndarray:
    """bool, H x W. Raises CaseProblem for a JPEG: it has levels above 0 around what was drawn."""
    kind = images.format_of(data, name)
    if kind == "JPEG":
        hint = "export the masks again as PNG: a JPEG blurs their edges"
        raise CaseProblem(name, "mask_with_loss", "a JPEG", "a PNG, BMP or TIFF", hint)
    if kind == "PNG":
        return images.read_mask(data, name)
    return np.asarray(images.read_image(data, name, colour=True).any(axis=2))
