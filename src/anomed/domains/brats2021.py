"""Domain source `brats2021`: the training volumes of BraTS 2021 (task 1), also under their names of 2023."""

import functools
import re
from typing import Literal

from pydantic import Field

from anomed import archive, plugins, records
from anomed.domains import brats2021_bmad, named_files
from anomed.domains.brats2021_bmad import Choice
from anomed.domains.division import Shares, spread
from anomed.domains.source import Files, Scan, Source
from anomed.errors import AnomedError, CaseProblem

_OLD = re.compile(r"(BraTS2021_\d{5})_(flair|t1|t1ce|t2|seg)\.nii(?:\.gz)?")
_NEW = re.compile(r"(BraTS-GLI-\d{5}-\d{3})-(t2f|t1n|t1c|t2w|seg)\.nii(?:\.gz)?")
_OF_2023 = {"flair": "t2f", "t1": "t1n", "t1ce": "t1c", "t2": "t2w", "seg": "seg"}
_LAYOUT = (
    "BraTS2021_00000/BraTS2021_00000_flair.nii.gz with …_t1, …_t1ce, …_t2 and …_seg beside it, or "
    "BraTS-GLI-00000-000/BraTS-GLI-00000-000-t2f.nii.gz with -t1n, -t1c, -t2w and -seg"
)


@plugins.register("domains", "brats2021")
class Brats2021(Source):
    """Glioma patients in four MRI contrasts, one of which is read, with the lesion: any label of `seg` above 0.

    Every subject is a patient: normal images are slices without tumour, so the chain needs `slices: {normal: slices}`.
    Train, valid and test share the patients by `split` and `seed`; of the train patients only slices without tumour
    are taken. In the naming of 2023, scans of one patient (the number before the last hyphen) stay in one split.

    `variant: bmad` takes the patients and slices of BMAD's script (see brats2021_bmad); the chain that cuts them as
    BMAD did is `skull_strip: {backend: none}`, then `slice_min_max`. Of BMAD are not rebuilt: which eleven abnormal
    patients are valid ones (that depended on the order of a Python set: here the first by id); slices as the array
    lies in the file (here as a radiologist sees them); the blue tint of its colour map; and masks scaled slice by
    slice, which have made readers lose labels.
    """

    note = "cut from the raw volumes of BraTS 2021, not the released data"

    class Options(Source.Options):
        """modality: the contrast to read. split, seed: how to divide the patients. variant: bmad takes its choice of
        patients and slices instead. exclude: subjects to leave out, each with the reason.
        """

        modality: Literal["flair", "t1", "t1ce", "t2"] = "flair"
        split: Shares = Field(default_factory=Shares)
        seed: int = 0
        variant: Literal["bmad"] | None = None
        exclude: dict[str, str] = Field(default_factory=dict)

    @property
    def volumetric(self) -> bool:
        return True

    def fingerprint(self) -> str:
        """Digest of the names and contents of the files that are read, and of BMAD's list where it is."""
        found = self._survey.found
        used = [path for files in found.values() for kind in ("image", "lesion") for path in files.get(kind, [])]
        entries = [self.entries[path] for path in sorted(used)]
        listed = records.digest_file(brats2021_bmad.LIST) if self.options.variant else ""
        return records.digest([archive.identity(self.tree, "", entries, self.hashes), listed])

    def scans(self) -> list[Scan]:
        """Every subject without a problem, by name. Reads no voxels.

        Raises AnomedError for a folder without BraTS or with both namings, an unknown excluded subject, and when there
        are too few patients to divide.
        """
        found, faults, self.ignored = self._survey
        chosen, absent = self._chosen(list(found))
        self.problems = [fault for name in sorted(faults) for fault in faults[name]] + absent
        return [
            Scan(
                subject_id=name,
                split=choice.split,
                source_file=found[name]["image"][0],
                fetch=functools.partial(
                    Files, self.tree.root / found[name]["image"][0], self.tree.root / found[name]["lesion"][0]
                ),
                abnormal=True,
                pathology="glioma",
                slices=choice.slices,
                keep=choice.keep,
            )
            for name, choice in sorted(chosen.items())
            if name in found and not faults[name]
        ]

    def _chosen(self, names: list[str]) -> tuple[dict[str, Choice], list[CaseProblem]]:
        """Where every subject stands, and problems that concern none on disk."""
        if self.options.variant == "bmad":
            return brats2021_bmad.choose([*names, *self.options.exclude])
        patients = {name: name.rpartition("-")[0] or name for name in names}
        advice = "give a split the share 0"
        divided = spread(
            patients.values(), self.options.split.model_dump(), self.options.seed, "patients", f"{self.where}.split",
            advice,
        )  # fmt: skip
        return {name: Choice(divided[patient], None, None) for name, patient in patients.items()}, []

    @functools.cached_property
    def _survey(self) -> named_files.Survey:
        found = named_files.find(self.entries, self._named)
        old = [name for name in found if name.startswith("BraTS2021")]
        if not found:
            raise AnomedError(f"{self.root}: no volume of BraTS among {len(self.entries)} files; expected {_LAYOUT}")
        if old and len(old) < len(found):
            raise AnomedError(
                f"{self.root}: found {len(old)} subjects named as in 2021 and {len(found) - len(old)} named as in "
                "2023, which may be the same patients; expected one of the two: set `root` to its folder"
            )
        if self.options.variant == "bmad" and not old:
            raise AnomedError(
                f"{self.where}.variant: BMAD's list names subjects as BraTS2021_00000, found {next(iter(found))}; set "
                f"{self.where}.root to the release of 2021"
            )
        return named_files.survey(found, self.options.exclude, self.where, self._expected, len(self.entries))

    def _named(self, path: str) -> tuple[str, str] | None:
        """Subject and kind of a file: image, lesion, or the name of a contrast that is not read."""
        match = _OLD.fullmatch(base := path.rpartition("/")[2]) or _NEW.fullmatch(base)
        if match is None:
            return None
        subject, kind = match.groups()
        kinds = {"seg": "lesion", self.options.modality: "image", _OF_2023[self.options.modality]: "image"}
        return subject, kinds.get(kind, kind)

    def _expected(self, name: str) -> dict[str, str]:
        contrast = self.options.modality
        if name.startswith("BraTS2021"):
            return {"image": f"{name}_{contrast}", "lesion": f"{name}_seg"}
        return {"image": f"{name}-{_OF_2023[contrast]}", "lesion": f"{name}-seg"}
