"""Domain source `resc`: the retinal oedema volumes of AI Challenger 2018 (RESC) as released, divided by patient."""

import functools
import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from anomed import archive, console, images, plugins, records
from anomed.domains import bmad_layout
from anomed.domains.division import Shares, divide
from anomed.domains.source import Source
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Case, Pixels, image_id

LAYOUT = (
    "Edema_{trainingset,validationset}/original_images/<cube>.img/<number>.bmp and "
    "label_images/<cube>_labelMark/<number>.bmp"
)
LESIONS = {255: "REA", 191: "SRF", 128: "PED"}  # retinal oedema area, subretinal fluid, pigment epithelial detachment
_PLACE = re.compile(
    r"(?:.*/)?(?:edema|ai_challenger_fl2018)_(training|validation)set/(original|label)_images/"
    r"([^/]+?)(?:\.img|_labelmark)?/([0-9]+)\.(?:bmp|png)",
    re.IGNORECASE,
)
_UNLABELLED = re.compile(r"(?:.*/)?(?:edema|ai_challenger_fl2018)_testset/.*", re.IGNORECASE)
_CUBE = re.compile(r"(?P<patient>[^_/]+)_MacularCube.*", re.IGNORECASE)


@dataclass(frozen=True)
class BScan:
    """One B-scan with its label image. part: training or validation; cube: the volume it is from."""

    part: str
    cube: str
    number: int
    image: str
    label: str

    @property
    def patient(self) -> str:
        """What the cube's name begins with: several cubes of one patient, also of both eyes, are in the release."""
        match = _CUBE.fullmatch(self.cube)
        return match["patient"] if match else self.cube


@plugins.register("domains", "resc")
class Resc(Source):
    """B-scans of the AI Challenger 2018 oedema set (RESC), 1,024 x 512 pixels, 128 to a cube, each with a label image.

    `root` holds the parts, in folders Edema_trainingset and Edema_validationset or in those of the archives
    (ai_challenger_fl2018_trainingset, ...): a folder or a zip. The part testset has no labels and counts as ignored.

    train are the B-scans of the training part without a lesion; those with one are left out and counted. The patients
    of the validation part go to valid and test, in an order that a hash of (seed, patient) gives, with all their
    B-scans; training B-scans of a patient who is in the validation part as well are left out and counted. A mask is
    what the label image has above 0: 255 REA, 191 SRF, 128 PED; the pathology of a B-scan is all it has, joined by "+".

    Known from public code of participants, not from the data: folders, names, sizes and label levels, on which three
    independent programs agree; 70 cubes for training and 15 of 10 patients for validation. Not known: whether patients
    of the validation part are in the training part, and how P-Net's authors, from whom BMAD took the set, laid it out
    again. BMAD cut the 1,920 validation B-scans into 115 and 1,805 without a published list: it cannot be rebuilt.
    """

    class Options(Source.Options):
        """valid: share of the validation part's patients that make valid, the others make test. seed: their choice."""

        valid: float = Field(default=0.25, gt=0, lt=1)
        seed: int = 0

    def fingerprint(self) -> str:
        """Digest of the names and contents of images and labels of both parts, and of files in wrong places."""
        self._scans()  # tells a wrong root before all that lies there is read
        places, problems = self._survey
        names = {name for pair in places.values() for name in pair.values()} | {p.row["case"] for p in problems}
        entries = [entry for name, entry in self.entries.items() if name in names]
        return records.digest(archive.identity(self.tree, "", entries, self.hashes))

    def cases(self) -> list[Case]:
        """Every B-scan of a split. Reads the label images: only they tell which B-scans are normal.

        Raises AnomedError when a part is missing or has too few patients to divide.
        """
        scans = self._scans()
        held_out = {scan.patient for scan in scans if scan.part == "validation"}
        shares = Shares(train=0, valid=self.options.valid, test=1 - self.options.valid)
        advice = "change the share"
        # Nearly every patient has normal and abnormal B-scans: one group, given as both, goes the same way twice.
        splits = divide(held_out, held_out, shares, self.options.seed, f"{self.where}.valid", advice, self.problems)
        cases = []
        for scan in console.track(scans, f"read labels of {self.domain}"):
            if scan.part == "training" and scan.patient in held_out:
                continue
            try:
                levels = self._levels(scan.label)
            except CaseProblem as problem:
                self.problems.append(problem)
                continue
            if scan.part == "validation" or not levels.any():
                cases.append(self._case(scan, splits.get(scan.patient, "train"), levels))
        faulty = {problem.row["case"] for problem in self.problems}
        used = {case.source_file for case in cases} | {scan.label for scan in scans} | faulty
        self.ignored = len(self.entries.keys() - used)
        return cases

    def _scans(self) -> list[BScan]:
        """B-scans that have an image and a label, by place; fills `problems`. Raises AnomedError for a missing part."""
        places, problems = self._survey
        self.problems = list(problems)
        scans = []
        for (part, cube, number), pair in sorted(places.items()):
            if len(pair) == 2:
                scans.append(BScan(part, cube, number, pair["original"], pair["label"]))
            elif "original" in pair:
                hint = "copy or download the label image again, or move the B-scan away"
                found = ("no label image", f"{cube}_labelMark/{number}.bmp in label_images", hint)
                self.problems.append(CaseProblem(pair["original"], "missing_label", *found))
            else:
                found = ("a label image alone", f"{cube}.img/{number}.bmp in original_images", "add the B-scan")
                self.problems.append(CaseProblem(pair["label"], "mask_without_image", *found))
        for part in ("training", "validation"):
            if all(scan.part != part for scan in scans):
                first = f"; first problem: {self.problems[0]}" if self.problems else ""
                raise AnomedError(f"{self.root}: no labelled B-scan of the {part} part; expected {LAYOUT}{first}")
        return scans

    def _case(self, scan: BScan, split: str, levels: np.ndarray) -> Case:
        present = {int(level) for level in levels}
        return Case(
            image_id=image_id(split, bool(present), f"{scan.cube}_{scan.number:03d}"),
            subject_id=scan.patient,
            split=split,
            label=int(bool(present)),
            source_file=scan.image,
            load=functools.partial(self._load, scan),
            pathology="+".join(name for level, name in LESIONS.items() if level in present),
        )

    def _levels(self, name: str) -> np.ndarray:
        """Levels above 0 of a label image. Raises CaseProblem for one that is no lesion's."""
        levels = np.unique(self._read(name)[0])
        levels = levels[levels > 0]
        if unknown := sorted({int(level) for level in levels} - LESIONS.keys()):
            expected = f"0 and {', '.join(f'{level} ({lesion})' for level, lesion in LESIONS.items())}"
            hint = "the label was resized, or saved with loss: take the released file"
            raise CaseProblem(name, "unknown_label", f"levels {unknown[:5]}", expected, hint)
        return levels

    def _load(self, scan: BScan) -> Pixels:
        image, sha256 = self._read(scan.image)
        height, width = image.shape
        if height != 2 * width:
            hint = "the image was resized or turned: take the released file"
            expected = "twice as high as wide (released: 1024 x 512)"
            raise CaseProblem(scan.image, "unexpected_size", f"{height} x {width} pixels", expected, hint)
        return Pixels(image, self._read(scan.label)[0] > 0, sha256)

    def _read(self, name: str) -> tuple[np.ndarray, str]:
        """Grey levels of a file, uint8 H x W, and the sha256 of its bytes."""
        data = self.tree.take(name, "a whole BMP")
        return images.read_image(data, name, colour=False), hashlib.sha256(data).hexdigest()

    @functools.cached_property
    def _survey(self) -> tuple[dict[tuple[str, str, int], dict[str, str]], list[CaseProblem]]:
        """(part, cube, number) -> image and label, and what is in a wrong place or there twice."""
        places: dict[tuple[str, str, int], dict[str, str]] = defaultdict(dict)
        problems = []
        for name in self.entries:
            if bmad_layout.is_stray(name) or _UNLABELLED.fullmatch(name):
                continue
            place = _PLACE.fullmatch(name)
            if not place:
                hint = f"move or remove the file; the layout is {LAYOUT}"
                problems.append(CaseProblem(name, "unrecognised_file", "another place", LAYOUT, hint))
                continue
            pair = places[place[1].lower(), place[3], int(place[4])]
            if (first := pair.setdefault(place[2].lower(), name)) != name:
                hint = "keep one of the two, or set `root` to one copy of the release"
                problems.append(CaseProblem(name, "duplicate_file", f"{first} as well", "one file", hint))
        return dict(places), problems
