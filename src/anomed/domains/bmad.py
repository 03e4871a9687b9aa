"""Domain source `bmad`: the six released sets of BMAD (arXiv 2306.11876) as users have them on disk."""

import functools
import hashlib
from collections import defaultdict
from pathlib import Path
from typing import Any

from anomed import archive, images, plugins, records
from anomed.archive import Entry, View
from anomed.domains import bmad_layout
from anomed.domains.source import Source
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Case, Pixels
from anomed.settings import Settings


@plugins.register("domains", "bmad")
class Bmad(Source):
    """One released set. `root` holds the set or the bundle of all six: a folder, a folder of the six zips, or a zip.

    Splits `train`, `valid` or `val`, `test`; classes `good`, `Ungood` in any case; images directly there or in `img`;
    masks in `label` or `anomaly_mask` (also beside `good`, as the brain and liver sets have them: they must be empty);
    the order of these folders is free, so that Liver's `valid/img/Ungood` and RESC's `Val/val_label/Ungood` are read
    as well. Masks belong to the image of the same name. In sets without pixel truth, files in mask folders count as
    ignored, like Thumbs.db, hidden files and files that are no images.
    """

    class Options(Settings):
        """set: which of the six sets to read; needed when the domain's key is not one of their names."""

        set: str | None = None

    def __init__(self, domain: str, options: Any, root: Path | None, work: Path):
        super().__init__(domain, options, root, work)
        name = options.set or domain
        if name not in bmad_layout.SETS:
            key = f"domains.{domain}.set"
            raise AnomedError(
                f"{key}: found {options.set!r}, expected the BMAD set to read: one of {', '.join(bmad_layout.SETS)}"
            )
        self.set, self.released = name, bmad_layout.SETS[name]

    @property
    def colour(self) -> bool:
        return self.released.colour

    @property
    def has_masks(self) -> bool:
        return self.released.masks

    @property
    def has_foreground(self) -> bool:
        return self.released.foreground

    @property
    def offers(self) -> frozenset[str]:
        """Slice numbers, in the sets whose file names hold them."""
        return frozenset({"slice"} if bmad_layout.numbers_slices(self.set) else ())

    def fingerprint(self) -> str:
        """Digest of the names and contents of the set's files, stray ones left out."""
        tree, base = self._located
        files = [entry for entry in self._files if not bmad_layout.is_stray(entry.name)]
        return records.digest([self.set, archive.identity(tree, base, files, self.hashes)])

    def cases(self) -> list[Case]:
        """Every image whose place is understood. Reads no pixels. Raises AnomedError when there is none."""
        self.problems, self.ignored = [], 0
        found: list[tuple[str, Entry]] = []
        masks: dict[str, list[Entry]] = defaultdict(list)
        for entry in self._files:
            if bmad_layout.is_stray(entry.name):
                self.ignored += 1
                continue
            folder, _, file = entry.name.rpartition("/")
            place = bmad_layout.place(folder)
            if place is None:
                hint = f"move or remove the file; the layout of this set is {bmad_layout.LAYOUT}"
                self._problem(entry.name, "unrecognised_file", f"folder {folder!r}", "a split and a class folder", hint)
            elif place.mask and not self.has_masks:
                self.ignored += 1
            elif not file.lower().endswith(".png"):
                hint = "convert it: renaming a file does not change its format"
                self._problem(entry.name, "not_a_png", f"a {file.rpartition('.')[2]} file", "a PNG", hint)
            elif place.mask:
                masks[f"{place.split}/{place.label}/{file[:-4]}"].append(entry)
            else:
                found.append((f"{place.split}/{place.label}/{file[:-4]}", entry))
        if not found:
            first = f", first problem: {self.problems[0]}" if self.problems else ""
            count = f"{len(self._files)} files, {len(self.problems)} of them not understood"
            raise AnomedError(
                f"{self.root}: no image of {self.set} among {count}; expected {bmad_layout.LAYOUT}{first}"
            )
        cases = [self._case(image_id, entry, masks.get(image_id, [])) for image_id, entry in found]
        alone = masks.keys() - {image_id for image_id, _ in found}
        for entry in (entry for image_id in sorted(alone) for entry in masks[image_id]):
            hint = "masks belong to the image of the same name: add the image, or remove the mask"
            self._problem(entry.name, "mask_without_image", "a mask alone", "an image of the same name", hint)
        return cases

    def _case(self, image_id: str, entry: Entry, masks: list[Entry]) -> Case:
        split, label, stem = image_id.split("/", 2)
        if len(masks) > 1:
            names = " and ".join(mask.name for mask in masks)
            self._problem(entry.name, "two_masks", names, "one mask", "keep the right one")
        if self.has_masks and label == "Ungood" and split != "train" and not masks:
            hint = f"add {split}/Ungood/label/{stem}.png"
            self._problem(
                entry.name, "abnormal_without_mask", "no mask of this name", "a mask for every abnormal image", hint
            )
        subject, pathology = bmad_layout.naming(self.set, split, stem)
        number = bmad_layout.slice_number(self.set, stem)
        return Case(
            image_id=image_id,
            subject_id=subject or image_id,
            split=split,
            label=int(label == "Ungood"),
            source_file=entry.name,
            load=functools.partial(self._load, entry.name, masks[0].name if masks else None),
            pathology=pathology if label == "Ungood" else "",
            clinical={} if number is None else {"slice": number},
        )

    def _load(self, name: str, mask_name: str | None) -> Pixels:
        data = self._read(name)
        image = images.read_png(data, name, self.colour)
        mask = None if mask_name is None else images.read_mask(self._read(mask_name), mask_name)
        organ = images.foreground(image) if self.has_foreground else None
        return Pixels(image, mask, hashlib.sha256(data).hexdigest(), organ)

    def _read(self, name: str) -> bytes:
        tree, base = self._located
        return tree.take(name, "a whole PNG", base)

    def _problem(self, *parts: str) -> None:
        self.problems.append(CaseProblem(*parts))

    @functools.cached_property
    def _located(self) -> tuple[View, str]:
        if self.root is None:
            raise AnomedError(
                f"domains.{self.domain}.root: missing; expected the folder or zip of the BMAD set or bundle"
            )
        if not self.root.exists():
            raise AnomedError(
                f"{self.root}: not found; domains.{self.domain}.root must point to BMAD's {self.set} set, as a folder "
                "or a zip, or to the bundle that holds it"
            )
        return bmad_layout.locate(archive.view(self.root), self.set)

    @functools.cached_property
    def _files(self) -> list[Entry]:
        tree, base = self._located
        return tree.files(base)
