"""Domain source `volumes`: a hospital's own volumes, one a subject, found by name patterns and an optional table."""

import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from anomed import archive, plugins, records
from anomed.domains import volumes_layout, volumes_table
from anomed.domains.division import Shares, divide
from anomed.domains.source import Files, Scan, Source
from anomed.domains.volumes_layout import Layout
from anomed.domains.volumes_table import Subject
from anomed.errors import AnomedError, CaseProblem
from anomed.settings import nearest

_ID = re.compile(r"(?!.*\.json$)[A-Za-z0-9_-][A-Za-z0-9._-]*")  # become names of folders, beside lists in JSON


class Survey(NamedTuple):
    """What lies at root: subjects by name, the names of those to leave out, all problems, the files that matter."""

    subjects: list[Subject]
    faulty: set[str]
    problems: list[CaseProblem]
    used: set[str]


@plugins.register("domains", "volumes")
class Volumes(Source):
    """Any folder of volumes (heads or other organs), with lesion masks and a table of the subjects where there are.

    A pattern names one file (NIfTI, NRRD, MetaImage) or, ending in "/", the folder of one DICOM series; `{subject}`
    stands for the subject's id: letters, digits, dot, underscore, hyphen. A file that fits two patterns belongs to the
    one with more letters of its own: with `{subject}.nii.gz` and `{subject}_seg.nii.gz`, s1_seg.nii.gz is no image.

    The table is a CSV in UTF-8 with the column `subject` and, where wanted, `split` (train, valid, test), `label` (0
    or normal, 1 or abnormal), `pathology`, and paths in `image`, `lesion`, `organ`, which win over the patterns where
    they are not empty. Other columns are passed over. Without a table, every match of `image` is a subject.

    A subject is abnormal if the table's `label` says so. In a table without that column, a subject without a lesion
    file is normal, and one with it is left to the voxels (an empty mask means normal). Without a table, a subject is
    abnormal if its lesion file is there, and normal if it is not.

    Without a column `split`, subjects are divided by `split` and `seed`: normal ones over train, valid and test,
    those that have or may have a lesion over valid and test, in an order that a hash of their names gives. Adding or
    removing a subject may move others to another split; a column `split` freezes it.
    """

    class Options(Source.Options):
        """image, lesion, organ: patterns of the volume, the lesion mask (without it the domain has no pixel truth) and
        the brain or organ mask, relative to root. subjects: the table, relative to root. split, seed: how to divide
        subjects that the table does not. exclude: subjects to leave out, each with the reason.
        """

        image: str = "{subject}.nii.gz"
        lesion: str | None = None
        organ: str | None = None
        subjects: str | None = None
        split: Shares = Field(default_factory=Shares)
        seed: int = 0
        exclude: dict[str, str] = Field(default_factory=dict)

    def __init__(self, domain: str, options: Any, root: Path | None, work: Path):
        super().__init__(domain, options, root, work)
        patterns = {"image": options.image, "lesion": options.lesion, "organ": options.organ}
        self._patterns: dict[str, str] = {kind: pattern for kind, pattern in patterns.items() if pattern is not None}
        seen: dict[str, str] = {}
        for kind, pattern in self._patterns.items():
            fault = volumes_layout.pattern_fault(pattern)
            if not fault and seen.setdefault(pattern, kind) != kind:
                fault = f"is the pattern of `{seen[pattern]}` as well"
            if fault:
                raise AnomedError(
                    f"{self.where}.{kind}: {pattern!r} {fault}; expected a path relative to root such as "
                    "'{subject}.nii.gz' or, for a DICOM series, a folder such as '{subject}/T2/'"
                )
        if options.subjects is not None and (fault := volumes_layout.path_fault(options.subjects)):
            raise AnomedError(f"{self.where}.subjects: {options.subjects!r} {fault}; expected for example subjects.csv")

    @property
    def volumetric(self) -> bool:
        return True

    @property
    def has_masks(self) -> bool:
        return self.options.lesion is not None

    def fingerprint(self) -> str:
        """Digest of the names and contents of the table and of the subjects' files, others left out.

        With a header whose voxels lie in another file (.mhd, .nhdr), all files of its folder count.
        """
        entries = [self.entries[name] for name in sorted(self._survey.used)]
        return records.digest(archive.identity(self.tree, "", entries, self.hashes))

    def scans(self) -> list[Scan]:
        """Every subject without a problem, by name. Reads no voxels.

        Raises AnomedError for a faulty table, an id that cannot name a folder, an unknown excluded subject, and when
        there are too few subjects to divide.
        """
        subjects, faulty, problems, used = self._survey
        self.problems, self.ignored = list(problems), len(self.entries) - len(used)
        divided = self._divide([subject for subject in subjects if subject.split is None])
        return [
            Scan(
                subject_id=subject.name,
                split=subject.split or divided[subject.name],
                source_file=subject.paths["image"],
                fetch=functools.partial(Files, **{kind: self.tree.root / path for kind, path in subject.paths.items()}),
                abnormal=subject.abnormal,
                pathology=subject.pathology,
            )
            for subject in subjects
            if subject.name not in faulty
        ]

    def _divide(self, subjects: list[Subject]) -> dict[str, str]:
        normal = [subject.name for subject in subjects if subject.abnormal is False]
        others = [subject.name for subject in subjects if subject.abnormal is not False]
        advice = "give the table a column `split`"
        return divide(normal, others, self.options.split, self.options.seed, f"{self.where}.split", advice)

    @functools.cached_property
    def _survey(self) -> Survey:
        everyone = self._subjects()
        twins = defaultdict(list)
        used = {self.options.subjects} & self.entries.keys()
        for subject in everyone:
            twins[subject.name.lower()].append(subject)  # one folder where a file system ignores case
            used.update(*(self._layout.belonging(path) for path in subject.paths.values()))
        problems = [_not_a_file(path) for path in self._layout.folders]
        problems += [_duplicate(group) for group in twins.values() if len(group) > 1]
        unique = sorted((group[0] for group in twins.values() if len(group) == 1), key=lambda subject: subject.name)
        owners: dict[str, str] = {}
        faults = {subject.name: list(self._faults(subject, owners)) for subject in unique}
        problems += [fault for found in faults.values() for fault in found]
        for kind, name, path in self._left_over(everyone):
            if kind == "image":
                found, expected = f"subject {name!r}", f"a line of {self.options.subjects} for every image"
                hint = f"add the subject to the table, or name it under {self.where}.exclude"
                problems.append(CaseProblem(path, "subject_not_in_table", found, expected, hint))
            else:
                hint = "add the image, or move the mask away"
                problems.append(CaseProblem(path, "mask_without_image", "a mask alone", f"an image of {name!r}", hint))
            used.update(self._layout.belonging(path))  # its coming or going must be noticed
        return Survey(unique, {name for name, found in faults.items() if found}, problems, used)

    def _left_over(self, everyone: list[Subject]) -> Iterator[tuple[str, str, str]]:
        """Images, and masks without one, that fit a pattern and belong to no subject: kind, subject, path."""
        images, masks = self._layout.matches["image"], self._layout.matches["lesion"]
        known = {subject.name for subject in everyone} | self.options.exclude.keys()
        named = {path for subject in everyone for path in subject.paths.values()}  # perhaps for another subject
        alone = {name: path for name, path in masks.items() if name not in images}
        for kind, paths in (("image", images), ("lesion", alone)):
            yield from ((kind, name, path) for name, path in paths.items() if name not in known and path not in named)

    def _faults(self, subject: Subject, owners: dict[str, str]) -> Iterator[CaseProblem]:
        """What keeps a subject from being used. owners: whose each image is, filled in here."""
        name, paths = subject.name, subject.paths
        needed = {"image", "organ"} if subject.abnormal is not True else {"image", "organ", "lesion"}
        for kind in ("image", "lesion", "organ"):
            if kind not in paths and not (kind in needed and kind in self._patterns):
                continue
            if kind not in paths or not self._layout.belonging(paths[kind]):
                expected = paths.get(kind) or self._patterns[kind].replace("{subject}", name)
                hint = f"add it, or correct the table or {self.where}.{kind}"
                yield CaseProblem(name, f"missing_{kind}", "no such file", expected, hint)
        for kind in ("image", "lesion"):
            if kind in paths and (owner := owners.setdefault(paths[kind], name)) != name:
                found, hint = f"{paths[kind]}, a file of {owner} as well", f"correct the table's column `{kind}`"
                yield CaseProblem(name, f"shared_{kind}", found, f"{kind} files of its own", hint)

    def _subjects(self) -> list[Subject]:
        """Every subject that is not excluded, with its files, as the table or the names of the files list them."""
        images = self._layout.matches["image"]
        table = self._table()
        if table is None:
            table = [Subject(name, path, None, None, "", {}) for name, path in images.items()]
        known = {*images, *(row.name for row in table)}
        for name in self.options.exclude if known else ():
            if name not in known:
                raise AnomedError(f"{self.where}.exclude: no subject {name!r}{nearest(name, known)}")
        kept = [row for row in table if row.name not in self.options.exclude]
        if not kept:
            raise AnomedError(
                f"{self.root}: no subject among {len(self.entries)} files, {len(self.options.exclude)} excluded; "
                f"expected images named {self.options.image!r} ({self.where}.image)"
            )
        if not self.has_masks and any(row.abnormal is None for row in kept):
            raise AnomedError(
                f"{self.where}: nothing says which subjects have a lesion; set {self.where}.lesion to the pattern of "
                f"the lesion masks, or {self.where}.subjects to a table with a column `label`"
            )
        for row in kept:
            if not _ID.fullmatch(row.name):
                raise AnomedError(
                    f"{self.root}: subject {row.name!r} ({row.place}): expected letters, digits, dots, underscores and "
                    f"hyphens, no dot in front and no .json behind; rename it, or name it under {self.where}.exclude"
                )
        return [self._with_files(row) for row in kept]

    def _with_files(self, row: Subject) -> Subject:
        """The subject with the files that patterns find where its row names none, and what they say about it."""
        found = {kind: files[row.name] for kind, files in self._layout.matches.items() if row.name in files}
        paths = {**found, **row.paths}
        abnormal = row.abnormal
        if abnormal is None:
            abnormal = (True if self.options.subjects is None else None) if "lesion" in paths else False
        return replace(row, paths=paths, abnormal=abnormal)

    def _table(self) -> list[Subject] | None:
        name = self.options.subjects
        if name is None:
            return None
        if name not in self.entries:
            raise AnomedError(f"{self.tree.root / name}: not found; {self.where}.subjects names the table of subjects")
        rows = volumes_table.read(self.tree.root / name)
        masks = [row.place for row in rows if "lesion" in row.paths]
        if masks and not self.has_masks:
            raise AnomedError(
                f"{self.root}: {masks[0]}: found a path in `lesion`, but the domain has no pixel truth; set "
                f"{self.where}.lesion to the pattern of the lesion masks, or rename the column"
            )
        return rows

    @functools.cached_property
    def _layout(self) -> Layout:
        return Layout(self.entries, self._patterns)


def _duplicate(group: list[Subject]) -> CaseProblem:
    found = " and ".join(f"{subject.name} ({subject.place})" for subject in group)
    hint = "keep one, or rename the other: upper and lower case count as the same"
    return CaseProblem(group[0].name, "duplicate_subject", found, "every subject once", hint)


def _not_a_file(path: str) -> CaseProblem:
    hint = "of a DICOM series, end the pattern with '/'; else move the folder away"
    return CaseProblem(path, "not_a_file", "a folder that fits the pattern of a file", "a file", hint)
