"""Domain source `btcv_lits`: livers in CT, BTCV to learn from, LiTS with its lesions to test on."""

import functools
import math
import re
from pathlib import Path

from pydantic import Field, model_validator

from anomed import archive, plugins, records, volumes
from anomed.domains import named_files
from anomed.domains.division import spread
from anomed.domains.source import Files, Scan, Source
from anomed.errors import AnomedError, CaseProblem
from anomed.settings import Settings

_BTCV = re.compile(r"(img|label)(\d{4})\.nii(?:\.gz)?")
_LITS = re.compile(r"(volume|segmentation)-(\d{1,4})\.nii(?:\.gz)?")
_UNLABELLED = re.compile(r"(^|/)(test|testing|imagests)/", re.IGNORECASE)  # BTCV's test scans have no public labels
_LIVER, _LESION = 6, 2  # labels of the liver in BTCV and of a lesion in LiTS
_HIGHEST = {_LIVER: 13, _LESION: 2}  # of the labels of each set: BTCV has 13 organs, LiTS liver and lesion
_LAYOUT = {
    "BTCV": "RawData/Training/img/img0001.nii.gz and RawData/Training/label/label0001.nii.gz",
    "LiTS": "volume-0.nii and segmentation-0.nii",
}


class Shares(Settings):
    """Shares of LiTS's subjects in each split, together 1."""

    valid: float = Field(default=0.1, ge=0)
    test: float = Field(default=0.9, gt=0)

    @model_validator(mode="after")
    def _whole(self) -> "Shares":
        if not math.isclose(self.valid + self.test, 1, abs_tol=1e-6):
            raise ValueError("valid and test must add up to 1")
        return self


@plugins.register("domains", "btcv_lits")
class BtcvLits(Source):
    """Abdominal CT of two sets below one `root`, found by their file names at any depth.

    BTCV (subjects BTCV-0001, …) is train: its organ is label 6 alone, the liver. It marks no lesions; that its livers
    have none is BMAD's assumption, not a finding. LiTS (LiTS-0, …) is valid and test, by `split` and `seed`: its organ
    is every label above 0, its lesion label 2. Of its subjects some have no lesion; the voxels tell. The chain needs
    `organ_mask`, and `slices: {normal: slices}` where slices of patients without lesion shall be normal ones.

    BMAD (arXiv 2306.11876) divided LiTS slice by slice in the order in which its folders happened to list them, so a
    patient may stand in its valid and its test set: that split cannot be rebuilt, and here no patient does. Nor are its
    histogram equalisation, its flip and its two different windows repeated: both sets go through the same chain.
    """

    note = "cut from the raw volumes of BTCV and LiTS, not the released data"

    class Options(Source.Options):
        """split, seed: how to divide the subjects of LiTS. exclude: subjects to leave out, each with the reason."""

        split: Shares = Field(default_factory=Shares)
        seed: int = 0
        exclude: dict[str, str] = Field(default_factory=dict)

    @property
    def volumetric(self) -> bool:
        return True

    def fingerprint(self) -> str:
        """Digest of the names and contents of the subjects' files, others left out."""
        used = sorted(path for files in self._survey.found.values() for paths in files.values() for path in paths)
        entries = [self.entries[path] for path in used]
        return records.digest(archive.identity(self.tree, "", entries, self.hashes))

    def scans(self) -> list[Scan]:
        """Every subject without a problem, by name. Reads no voxels: masks are written when a scan is fetched.

        Raises AnomedError when one of the two sets is not there, for an unknown excluded subject, and when LiTS has too
        few subjects to divide.
        """
        found, faults, self.ignored = self._survey
        self.problems = [fault for name in sorted(faults) for fault in faults[name]]
        lits = [name for name in found if name.startswith("LiTS")]
        divided = spread(
            lits, self.options.split.model_dump(), self.options.seed, "subjects of LiTS", f"{self.where}.split",
            "give valid the share 0",
        )  # fmt: skip
        return [
            Scan(
                subject_id=name,
                split=divided.get(name, "train"),
                source_file=files["image"][0],
                fetch=functools.partial(self._fetch, name, files),
                abnormal=None if name in divided else False,
                pathology="liver lesion" if name in divided else "",
            )
            for name, files in sorted(found.items())
            if not faults[name]
        ]

    def _fetch(self, name: str, files: dict[str, list[str]]) -> Files:
        image, organ = self.tree.root / files["image"][0], self.tree.root / files["organ"][0]
        if name.startswith("BTCV"):
            return Files(image, organ=self._mask(name, organ, _LIVER))
        return Files(image, lesion=self._mask(name, organ, _LESION), organ=organ)

    def _mask(self, name: str, labels: Path, value: int) -> Path:
        """A file of one label's voxels, on the grid of the labels; made where there is none for these contents."""
        if not labels.is_file():
            raise CaseProblem(name, "missing_organ", f"nothing at {labels}", "the file that was there", "restore it")
        path = self.work / "masks" / f"{name}_{value}_{records.digest_file(labels)[:16]}.nii.gz"
        if not path.exists():
            volume = volumes.read_label(labels, f"{name}: {labels.name}")
            if (highest := int(volume.data.max())) > _HIGHEST[value]:
                hint = "these are labels of another set, or resampled ones: take the released file"
                expected = f"labels from 0 to {_HIGHEST[value]}"
                raise CaseProblem(volume.name, "unknown_label", f"label {highest}", expected, hint)
            volumes.write(path, volume.data == value, volume.affine)
        return path

    @functools.cached_property
    def _survey(self) -> named_files.Survey:
        found = named_files.find(self.entries, _named)
        for path in [path for path in self.entries if _UNLABELLED.search(path)]:
            name = _named(path)
            if name and name[0].startswith("BTCV") and "organ" not in found.get(name[0], {"organ": []}):
                found.pop(name[0])  # the same scan may lie in two such folders
        for prefix, layout in _LAYOUT.items():
            if not any(name.startswith(prefix) for name in found):
                raise AnomedError(
                    f"{self.root}: no volume of {prefix} among {len(self.entries)} files; expected below it {layout}"
                )
        return named_files.survey(found, self.options.exclude, self.where, _expected, len(self.entries))


def _named(path: str) -> tuple[str, str] | None:
    """Subject and kind (image, organ) of a file."""
    base = path.rpartition("/")[2]
    if match := _BTCV.fullmatch(base):
        return f"BTCV-{match[2]}", "image" if match[1] == "img" else "organ"
    if match := _LITS.fullmatch(base):
        return f"LiTS-{int(match[2])}", "image" if match[1] == "volume" else "organ"
    return None


def _expected(name: str) -> dict[str, str]:
    prefix, _, number = name.partition("-")
    if prefix == "BTCV":
        return {"image": f"img{number}", "organ": f"label{number}"}
    return {"image": f"volume-{number}", "organ": f"segmentation-{number}"}
