"""Domain source `rsna`: films of the RSNA Pneumonia Detection Challenge 2018 (DICOM and two tables, from Kaggle)."""

import csv
import functools
import hashlib
import io
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator

from pydantic import Field

from anomed import archive, plugins, records
from anomed.archive import Entry
from anomed.domains import rsna_film
from anomed.domains.division import Shares, divide
from anomed.domains.source import Source
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Case, Pixels
from anomed.settings import nearest

LABELS, CLASSES, FILMS = "stage_2_train_labels.csv", "stage_2_detailed_class_info.csv", "stage_2_train_images"
PATHOLOGY = {"Normal": "", "Lung Opacity": "Lung_Opacity", "No Lung Opacity / Not Normal": "No-Not-Normal"}  # as BMAD
LIKE_BMAD = Shares(train=0.9038, valid=0.0077, test=0.0885)
Box = tuple[float, float, float, float]


@plugins.register("domains", "rsna")
class Rsna(Source):
    """The labelled films of stage 2: a folder or Kaggle's zip with `stage_2_train_images/<patientId>.dcm`,
    `stage_2_train_labels.csv` and `stage_2_detailed_class_info.csv`. The unlabelled test films count as ignored.

    `Normal` is normal, `Lung Opacity` (with boxes) and `No Lung Opacity / Not Normal` are abnormal. Images are the
    stored 8-bit levels, as in BMAD: display windows are not applied; MONOCHROME1, where 0 is white, is inverted so
    that air is dark in every film. Films of any other depth or with a rescaling are refused.

    BMAD (arXiv 2306.11876) cut its chest set from these films, but published no list of who is in which split, so
    that its split cannot be rebuilt. The default shares come near its numbers on the complete data: 8,000 normal films
    in train, 68 and 1,427 abnormal in valid, 783 and 16,406 in test (BMAD: 8,000, 1,490 in all, 17,194 in all).

    A `patientId` names a film, not a person: RSNA's mapping to the films of NIH ChestX-ray14 gives several of them to
    one patient. With that file, subjects are the NIH patients and no patient is in two splits; all films of a patient
    with an abnormal one then stay out of train. Without it, subjects are unknown and every film is divided alone.
    """

    note = "challenge films divided by this pipeline, not the released data"

    class Options(Source.Options):
        """split, seed: how to divide the films. mapping: RSNA's file of NIH names, relative to root
        (pneumonia-challenge-dataset-mappings_2018.json). exclude: patientIds to leave out, each with the reason.
        """

        split: Shares = Field(default=LIKE_BMAD)
        seed: int = 0
        mapping: str | None = None
        exclude: dict[str, str] = Field(default_factory=dict)

    @property
    def has_masks(self) -> bool:
        return False

    @property
    def offers(self) -> frozenset[str]:
        """How a film was taken, where its file says it; known once the film was loaded."""
        return frozenset({"view"})

    def fingerprint(self) -> str:
        """Digest of the names and contents of the tables and the labelled films, others left out."""
        if self.options.mapping is not None:
            self._mapping(self._base + self.options.mapping)  # a wrong one is told when the run is planned
        return records.digest(archive.identity(self.tree, "", self._used, self.hashes))

    def cases(self) -> list[Case]:
        """Every film that both tables and the folder agree upon. Reads no pixels.

        Raises AnomedError for tables that cannot be read, an unknown excluded film, or too few films to divide.
        """
        self.problems, self.ignored = [], len(self.entries) - len(self._used)
        kinds, boxes = self._kinds(), self._boxes()
        everyone = kinds.keys() | boxes.keys() | self._films.keys()
        for name in self.options.exclude:
            if name not in everyone:
                raise AnomedError(f"{self.where}.exclude: no film {name!r}{nearest(name, everyone)}")
        names = []
        for name in sorted(everyone - self.options.exclude.keys()):
            if faults := list(self._faults(name, kinds.get(name), boxes.get(name))):
                self.problems += faults
            else:
                names.append(name)
        patients = self._patients(names)
        splits = self._divide(patients, kinds)
        return [
            self._case(name, patient, splits[patient], min(kinds[name]), tuple(boxes[name]))
            for name, patient in patients.items()
        ]

    def _faults(self, name: str, kinds: set[str] | None, boxes: list[Box] | None) -> Iterator[CaseProblem]:
        """What keeps a film from being used."""
        path = f"{FILMS}/{name}.dcm"
        if name not in self._films:
            hint = f"download the film again, or name it under domains.{self.domain}.exclude"
            yield CaseProblem(name, "missing_image", "no such file", path, hint)
        hint = f"get the table from Kaggle again, or name the film under domains.{self.domain}.exclude"
        for rows, table, code in ((boxes, LABELS, "image_without_row"), (kinds, CLASSES, "image_without_class")):
            if rows is None:
                yield CaseProblem(name, code, "no row", f"a row in {table}", hint)
        if kinds is None or boxes is None:
            return
        if len(kinds) > 1:
            yield CaseProblem(name, "contradictory_class", " and ".join(sorted(kinds)), "one class", hint)
        elif (kinds == {"Lung Opacity"}) != bool(boxes):
            found = f"class {min(kinds)} and {len(boxes)} boxes"
            yield CaseProblem(name, "contradictory_class", found, "boxes where, and only where, Lung Opacity is", hint)

    def _patients(self, names: list[str]) -> dict[str, str]:
        """The subject of every film: its NIH patient; without a mapping the film itself."""
        if self.options.mapping is None:
            return {name: name for name in names}
        mapping = self._mapping(self._base + self.options.mapping)
        for name in (name for name in names if name not in mapping):
            hint = f"get RSNA's mapping again, or name the film under domains.{self.domain}.exclude"
            found, expected = "no row", f"a row in {self.options.mapping}"
            self.problems.append(CaseProblem(name, "image_without_patient", found, expected, hint))
        return {name: mapping[name] for name in names if name in mapping}

    def _divide(self, patients: dict[str, str], kinds: dict[str, set[str]]) -> dict[str, str]:
        abnormal = {patient for name, patient in patients.items() if kinds[name] != {"Normal"}}
        where = f"{self.where}.split"
        normal = set(patients.values()) - abnormal
        return divide(normal, abnormal, self.options.split, self.options.seed, where, f"change {where}", self.problems)

    def _case(self, name: str, patient: str, split: str, kind: str, boxes: tuple[Box, ...]) -> Case:
        image_id = f"{split}/{'good' if kind == 'Normal' else 'Ungood'}/{name}"
        file = self._films[name].name
        clinical: dict[str, str] = {}  # filled by `load`: the view stands in the film, not in the tables
        return Case(
            image_id=image_id,
            subject_id=image_id if self.options.mapping is None else patient,
            split=split,
            label=int(kind != "Normal"),
            source_file=file,
            load=functools.partial(self._load, name, file, boxes, clinical),
            boxes=boxes,
            pathology=PATHOLOGY[kind],
            clinical=clinical,
        )

    def _load(self, name: str, file: str, boxes: tuple[Box, ...], clinical: dict[str, str]) -> Pixels:
        data = self.tree.take(file, "a film")
        image, view = rsna_film.read(data, file, name, self.work)
        if view:
            clinical["view"] = view
        height, width = image.shape
        for box in boxes:
            if box[2] > width or box[3] > height:
                expected = f"a box inside {height} x {width} pixels (height x width)"
                hint = f"correct {LABELS}, or get film and table again"
                raise CaseProblem(file, "box_outside", f"x0, y0, x1, y1 = {box}", expected, hint)
        return Pixels(image, None, hashlib.sha256(data).hexdigest())

    def _kinds(self) -> dict[str, set[str]]:
        """The classes of every film of the class table, which repeats a film for each of its boxes."""
        kinds: dict[str, set[str]] = defaultdict(set)
        for line, row in self._rows(CLASSES, ("patientId", "class")):
            if row["class"] in PATHOLOGY:
                kinds[row["patientId"]].add(row["class"])
            else:
                self._malformed(CLASSES, line, f"class {row['class']!r}", " | ".join(PATHOLOGY))
        return dict(kinds)

    def _boxes(self) -> dict[str, list[Box]]:
        """The boxes of every film of the label table, [] for Target 0: x0, y0, x1, y1 in pixels."""
        boxes: dict[str, list[Box]] = defaultdict(list)
        targets: dict[str, str] = {}
        keys = ("x", "y", "width", "height")
        for line, row in self._rows(LABELS, ("patientId", *keys, "Target")):
            name, target, texts = row["patientId"], row["Target"], [row[key] for key in keys]
            x, y, width, height = map(_number, texts)
            if target in ("0", "1") and (first := targets.setdefault(name, target)) != target:
                self._malformed(LABELS, line, f"Target {target}", f"Target {first}, as an earlier line of {name} has")
            elif target == "0" and not any(texts):
                boxes[name] += []
            elif target == "1" and min(x, y) >= 0 and min(width, height) > 0:
                boxes[name].append((x, y, x + width, y + height))
            else:
                expected = "Target 0 without numbers, or Target 1 with x, y >= 0 and width, height > 0"
                self._malformed(LABELS, line, f"Target {target!r}, box {', '.join(texts)!r}", expected)
        return dict(boxes)

    def _malformed(self, table: str, line: int, found: str, expected: str) -> None:
        hint = "correct the line, or get the table from Kaggle again"
        self.problems.append(CaseProblem(f"{table}, line {line}", "malformed_row", found, expected, hint))

    def _rows(self, table: str, columns: tuple[str, ...]) -> list[tuple[int, dict[str, str]]]:
        """Line number and cells of every row. Raises AnomedError when the table or a column is missing."""
        place = f"{self.root}: {self._base}{table}"
        if self._base + table not in self.entries:
            raise AnomedError(
                f"{place}: not found; expected it beside {LABELS}: it is part of the download from Kaggle"
            )
        try:
            reader = csv.DictReader(io.StringIO(self.tree.read(self._base + table).decode("utf-8-sig"), newline=""))
            rows = []
            for row in reader:
                if None in row:
                    found, expected = f"{len(row[None])} cells too many", f"{len(reader.fieldnames or ())} cells"
                    self._malformed(table, reader.line_num, found, expected)
                else:
                    rows.append((reader.line_num, {key: (row[key] or "").strip() for key in columns}))
        except (UnicodeDecodeError, csv.Error, KeyError) as error:
            fault = f"no column {error}" if isinstance(error, KeyError) else str(error)
            raise AnomedError(
                f"{place}: {fault}; expected a CSV table with the columns {', '.join(columns)}; get it again"
            ) from None
        return rows

    def _mapping(self, name: str) -> dict[str, str]:
        """RSNA's mapping: film -> NIH patient, the first eight digits of the NIH film's name."""
        place = f"{self.root}: {name}"
        if name not in self.entries:
            raise AnomedError(f"{place}: not found; domains.{self.domain}.mapping names RSNA's file of NIH names")
        found: dict[str, str] = {}
        try:
            for row in json.loads(self.tree.read(name)):
                patient = re.fullmatch(r"([0-9]{8})_[0-9]{3}(\.png)?", row["img_id"])
                if patient is None or found.setdefault(row["subset_img_id"], patient[1]) != patient[1]:
                    raise ValueError(f"unexpected entry {row['img_id']!r} for {row['subset_img_id']!r}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise AnomedError(
                f"{place}: {error}; expected a JSON list of objects with `subset_img_id` (the patientId, once) and "
                "`img_id` (such as 00000004_003.png)"
            ) from None
        return found

    @functools.cached_property
    def _used(self) -> list[Entry]:
        used = {self._base + table for table in (LABELS, CLASSES, self.options.mapping) if table is not None}
        used |= {entry.name for entry in self._films.values()}
        return [entry for name, entry in self.entries.items() if name in used]

    @functools.cached_property
    def _films(self) -> dict[str, Entry]:
        """The labelled films by patientId."""
        pattern = re.compile(re.escape(f"{self._base}{FILMS}/") + r"([^/.][^/]*)\.dcm")
        return {match[1]: entry for name, entry in self.entries.items() if (match := pattern.fullmatch(name))}

    @functools.cached_property
    def _base(self) -> str:
        """The folder of the tables within root, ending with a slash; empty for root itself."""
        found = [name.removesuffix(LABELS) for name in self.entries if f"/{name}".endswith(f"/{LABELS}")]
        if len(found) != 1:
            raise AnomedError(
                f"{self.root}: {LABELS} found {len(found)} times among {len(self.entries)} files, expected once; "
                f"{self.where}.root must name the folder or zip of the challenge's stage 2"
            )
        return found[0]


def _number(text: str) -> float:
    """The number that a cell holds; -1, which no box allows, for anything else."""
    try:
        return value if math.isfinite(value := float(text)) and "_" not in text else -1.0  # float() takes 1_0 for 10
    except ValueError:
        return -1.0
