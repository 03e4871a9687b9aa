"""Domain source `oct2017`: the retinal OCT release of Kermany et al. 2018, divided by patient or as BMAD took it."""

import functools
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from anomed import archive, images, plugins, records
from anomed.archive import Entry, View
from anomed.domains import bmad_layout
from anomed.domains.division import Shares, divide
from anomed.domains.source import Source
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import SPLITS, Case, Pixels, image_id

LAYOUT = "{train,val,test}/{CNV,DME,DRUSEN,NORMAL}/<class>-<patient>-<number>.jpeg, val optional"
ADVICE = (
    "complete the folder; where all patients of val are in test as well, move val away: valid is then made from train "
    "(not with `variant: bmad`, which needs val)"
)
_PLACE = re.compile(r"(?:(?P<base>.*)/)?(?P<part>train|val|test)/(?P<kind>CNV|DME|DRUSEN|NORMAL)/(?P<file>[^/]+)")
_NAME = re.compile(r"(CNV|DME|DRUSEN|NORMAL)-([0-9]+)-[0-9]+\.(?i:jpe?g)")


@dataclass(frozen=True)
class Picture:
    """One B-scan of the release. part: the folder train, val or test; kind: the class. Its name tells the patient."""

    entry: Entry
    part: str
    kind: str
    patient: str

    @property
    def label(self) -> int:
        return int(self.kind != "NORMAL")


@plugins.register("domains", "oct2017")
class Oct2017(Source):
    """B-scans of Kermany et al., Cell 2018 (Mendeley rscbjbr9sj, also on Kaggle): OCT2017/{train,val,test}/<class>.

    `root` is that folder, one above it or a zip; CellData/OCT is read as well, and versions without `val`. CNV, DME and
    DRUSEN are abnormal; there is no pixel truth. The number in a file's name is the patient, in whatever class it
    stands: patients recur in several folders of the release, and in several classes.

    By default no patient is in two splits. test is the folder test; valid the folder val without the patients of test;
    train are the normal images of the folder train without the patients of val and test. Copies of a file of test,
    byte for byte, are left out of valid and train, and those of valid out of train. Without a folder val, a share
    `valid` of the patients of the folder train, healthy and ill ones apart, goes to valid with all their images, in an
    order that a hash of (seed, patient) gives. What is left out, the abnormal images of the folder train above all,
    counts as ignored, like stray files.

    `variant: bmad` is BMAD's set: train/NORMAL, val and test as they are. Its patients and images in two splits are
    then counted and not refused.
    """

    has_masks = False

    class Options(Source.Options):
        """variant: `bmad` for BMAD's splits. valid, seed: share and choice of patients for valid where `val` is missing
        (one in fifty gives about twice as many images as test has).
        """

        variant: Literal["bmad"] | None = None
        valid: float = Field(default=0.02, gt=0, lt=1)
        seed: int = 0

    def __init__(self, domain: str, options: Any, root: Path | None, work: Path):
        super().__init__(domain, options, root, work)
        if options.variant == "bmad":
            self.accepts = frozenset({"subject_in_two_splits", "duplicate_across_splits"})

    def fingerprint(self) -> str:
        """Digest of the names and contents of the images that splits are made from, and of files in wrong places."""
        return records.digest(self._identity)

    def cases(self) -> list[Case]:
        """Every image of a split. Reads no pixels. Raises AnomedError when a split stays without a kind it needs."""
        self.problems = list(self._survey[1])
        chosen = self._unique() if self.options.variant is None else self._chosen
        self.ignored = len(self._files) - len(chosen) - len(self.problems)
        held = {(split, picture.label) for split, picture in chosen}
        for split in SPLITS:
            for label, kind in enumerate(("normal", "abnormal")[: 1 if split == "train" else 2]):
                if (split, label) not in held:
                    first = f"; first problem: {self.problems[0]}" if self.problems else ""
                    raise AnomedError(
                        f"{self.root}: found no {kind} image for {split}, expected {LAYOUT}; {ADVICE}{first}"
                    )
        return [self._case(split, picture) for split, picture in chosen]

    def _case(self, split: str, picture: Picture) -> Case:
        stem = picture.entry.name.rpartition("/")[2].rpartition(".")[0]
        return Case(
            image_id=image_id(split, picture.label, stem),
            subject_id=picture.patient,
            split=split,
            label=picture.label,
            source_file=picture.entry.name,
            load=functools.partial(self._load, picture.entry.name),
            pathology=picture.kind if picture.label else "",
        )

    def _load(self, name: str) -> Pixels:
        tree, base = self._located
        data = tree.take(name, "a whole JPEG", base)
        image = images.read_image(data, name, colour=False)
        return Pixels(image, None, hashlib.sha256(data).hexdigest())

    @functools.cached_property
    def _chosen(self) -> list[tuple[str, Picture]]:
        """The images with their splits, by name; in the default, copies across splits are still among them."""
        pictures, _ = self._survey
        patients = {part: {picture.patient for picture in pictures if picture.part == part} for part in ("val", "test")}
        bmad, held_out = self.options.variant == "bmad", patients["val"] | patients["test"]
        validating = set() if bmad or patients["val"] else self._validating(pictures, held_out)
        chosen = []
        for picture in pictures:
            if picture.part == "test":
                chosen.append(("test", picture))
            elif picture.part == "val":
                if bmad or picture.patient not in patients["test"]:
                    chosen.append(("valid", picture))
            elif picture.patient in validating:
                chosen.append(("valid", picture))
            elif not picture.label and (bmad or picture.patient not in held_out):
                chosen.append(("train", picture))
        return chosen

    def _validating(self, pictures: list[Picture], held_out: set[str]) -> set[str]:
        """Patients of the folder train that make valid where the release has no folder val."""
        free = [picture for picture in pictures if picture.part == "train" and picture.patient not in held_out]
        ill = {picture.patient for picture in free if picture.label}
        healthy = {picture.patient for picture in free} - ill
        shares = Shares(train=0, valid=self.options.valid, test=1 - self.options.valid)  # "test": what stays in train
        where, advice = f"{self.where}.valid", "use a release with a folder `val`"
        divided = divide(healthy, ill, shares, self.options.seed, where, advice, self._survey[1])
        return {patient for patient, split in divided.items() if split == "valid"}

    def _unique(self) -> list[tuple[str, Picture]]:
        """`_chosen` without the files whose content stands in a later split too: test goes first, train last."""
        contents = {name: (size, content) for name, size, content in self._identity}
        last: dict[tuple[int, Any], int] = {}
        for split, picture in self._chosen:
            content = contents[picture.entry.name]
            last[content] = max(last.get(content, 0), SPLITS.index(split))
        return [
            (split, picture)
            for split, picture in self._chosen
            if last[contents[picture.entry.name]] == SPLITS.index(split)
        ]

    @functools.cached_property
    def _identity(self) -> list[list[Any]]:
        """[name, size, hash of the content] of the chosen files, and of those that problems name."""
        tree, base = self._located
        faulty = {problem.row["case"] for problem in self._survey[1]}
        names = {picture.entry.name for _, picture in self._chosen} | faulty
        return archive.identity(tree, base, [entry for entry in self._files if entry.name in names], self.hashes)

    @functools.cached_property
    def _survey(self) -> tuple[list[Picture], list[CaseProblem]]:
        """Every B-scan of the release, by name, and what is in a wrong place."""
        pictures: list[Picture] = []
        problems: list[CaseProblem] = []
        for entry in self._files:
            if bmad_layout.is_stray(entry.name):
                continue
            place = _PLACE.fullmatch(entry.name)
            name = _NAME.fullmatch(place["file"]) if place else None
            if not place or place["base"]:
                hint = f"move or remove the file; the layout is {LAYOUT}"
                problems.append(CaseProblem(entry.name, "unrecognised_file", "another place", LAYOUT, hint))
            elif not name or name[1] != place["kind"]:
                expected = f"{place['kind']}-<patient>-<number>.jpeg"
                hint = "the name tells class and patient: restore it, or move the file away"
                problems.append(CaseProblem(entry.name, "unrecognised_name", repr(place["file"]), expected, hint))
            else:
                pictures.append(Picture(entry, place["part"], place["kind"], name[2]))
        return pictures, problems

    @functools.cached_property
    def _files(self) -> list[Entry]:
        """The files below the release's folder, by names relative to it."""
        at = f"{base}/" if (base := self._located[1]) else ""
        below = [entry for entry in self.entries.values() if entry.name.startswith(at)]
        return [Entry(entry.name[len(at) :], entry.size, entry.crc) for entry in below]

    @functools.cached_property
    def _located(self) -> tuple[View, str]:
        """The view and the folder in it that holds train, val and test."""
        found = sorted(set(_bases(self.entries.values())))
        if len(found) != 1:
            what = f"{len(found)} copies of the release ({', '.join(found)})" if found else "no OCT2017 release"
            raise AnomedError(
                f"{self.root}: found {what}, expected one folder with {LAYOUT}; set {self.where}.root to the "
                "right folder, unpacked where it is a zip"
            )
        return self.tree, found[0]


def _bases(entries: Iterable[Entry]) -> Iterator[str]:
    """Folders with images of train and of test and with an abnormal class: the release's chest films have none such."""
    held: dict[str, set[str]] = defaultdict(set)
    for entry in entries:
        place = _PLACE.fullmatch(entry.name)
        if place and not bmad_layout.is_stray(entry.name):
            held[place["base"] or ""].update((place["part"], place["kind"]))
    return (base for base, found in held.items() if {"train", "test"} <= found and found & {"CNV", "DME", "DRUSEN"})
