"""The embedded domain: heads synthesised on the user's machine, so that the benchmark runs without any download."""

import functools
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import Field

from anomed import console, plugins, records
from anomed.domains import embedded_atlas, embedded_brain
from anomed.domains.source import Source
from anomed.errors import AnomedError
from anomed.manifest import Case, Pixels

DOMAINS = ("brain_mri",)
LEVELS = tuple(range(-9, 38, 6))  # mm above the isocentre at which axial slices are taken
VOLUMES = r"subjects\.csv|sub-\d+_(flair|lesion|brain)\.nii\.gz"
MIN_AREA = 40.0  # mm2 of lesion that make a slice abnormal
# Split, condition and scanner of each head in turn, repeated. Any ten heads fill every split. Every scanner gives
# normal heads to train and test and lesions to test, so that no brightness of a scanner tells the classes apart.
ROLES = (
    "train normal A", "test normal A", "train normal B", "test tumour A", "valid normal C", "train normal C",
    "test infarct B", "valid mass C", "train normal D", "test normal B", "test mass C", "train normal A",
    "test small D", "test normal C", "train normal B", "test tumour B", "test infarct A", "valid tumour D",
    "train normal C", "test normal D", "test mass D", "test small C", "train normal D",
)  # fmt: skip


def subjects(number: int) -> pd.DataFrame:
    """The cohort: columns subject, split, kind ("normal" or a lesion), scanner; one row each of `number` heads."""
    rows = [(f"sub-{i + 1:02d}", *ROLES[i % len(ROLES)].split()) for i in range(number)]
    return pd.DataFrame(rows, columns=["subject", "split", "kind", "scanner"])


def axial(volume: np.ndarray, z: int) -> np.ndarray:
    """Axial slice z of a RAS volume as a radiologist sees it: rows from anterior to posterior, columns from the
    patient's right to the left."""
    return np.ascontiguousarray(volume[::-1, ::-1, z].T)


def window(volume: np.ndarray) -> np.ndarray:
    """A head in arbitrary units to uint8, linear and the same for all its slices: 0 stays 0, 255 is 1.8 times the
    median of the voxels above the volume's mean (the mean parts the head from the air; that median is brain tissue,
    so that neither a bright scalp nor a lesion moves the window), brighter is clipped."""
    head = volume[volume > volume.mean(dtype=np.float64)]
    grey = volume.astype(np.float32) * np.float32(255 / (1.8 * np.median(head)))
    return np.round(np.clip(grey, 0, 255)).astype(np.uint8)


@functools.lru_cache(maxsize=2)  # a head and its brain
def _read(path: Path) -> np.ndarray:
    """A NIfTI file as an array in RAS order."""
    import nibabel

    image = nibabel.as_closest_canonical(nibabel.load(path))
    return np.asanyarray(image.dataobj)


def _write(path: Path, volume: np.ndarray) -> None:
    """A RAS volume as .nii.gz on the grid of `embedded_brain.affine`; no time in the header: equal data, equal file."""
    import nibabel

    image = nibabel.Nifti1Image(volume, embedded_brain.affine())
    image.header.set_xyzt_units("mm")
    image.set_sform(image.affine, "scanner")
    image.set_qform(image.affine, "scanner")
    path.write_bytes(gzip.compress(image.to_bytes(), 1, mtime=0))


@plugins.register("domains", "embedded")
class Embedded(Source):
    """Synthetic FLAIR heads at 2 mm out of nilearn's MNI152 maps (see `embedded_brain`), written to
    `<work>/embedded/<domain>/` as a raw folder of a hospital (`sub-XX_flair.nii.gz`, `sub-XX_lesion.nii.gz`,
    `sub-XX_brain.nii.gz`, `subjects.csv`), read back and cut into axial slices at the heights LEVELS. The foreground is
    the brain.

    A third of the heads are for training, all normal; valid and test hold other heads, normal and with lesions. A
    slice with at least MIN_AREA of lesion is abnormal; the other slices of a head with lesions are left out, since
    they are neither. `pathology` is the kind of lesion, one of `embedded_brain.KINDS`.
    """

    needs_root = False
    note = "embedded data, not the released data; reproduces no published number"

    class Options(Source.Options):
        """seed: another seed gives another cohort. subjects: number of heads, at least 10 to fill every split."""

        seed: int = Field(default=0, ge=0)
        subjects: int = Field(default=23, ge=10, le=99)

    def __init__(self, domain: str, options: Any, root: Path | None, work: Path):
        super().__init__(domain, options, root, work)
        if domain not in DOMAINS:
            raise AnomedError(
                f"domains.{domain}: source embedded has no domain {domain!r}, it has {', '.join(DOMAINS)}; "
                "use one of them or another source"
            )

    @property
    def has_foreground(self) -> bool:
        return True

    def fingerprint(self) -> str:
        """Hash of the template maps in the environment; seed and number of heads are parameters of the block."""
        return records.digest(
            {name: records.digest_file(path) for name, path in embedded_atlas.template_files().items()}
        )

    @property
    def folder(self) -> Path:
        """Where the volumes lie."""
        return self.work / "embedded" / self.domain

    def cases(self) -> list[Case]:
        """Write the volumes anew (about half a second a head), then list their slices."""
        cohort = subjects(self.options.subjects)
        atlas = embedded_atlas.Atlas.load()
        with records.atomic_dir(self.folder, VOLUMES) as folder:
            for head in console.track(list(cohort.itertuples()), f"synthesise {self.domain}"):
                volumes = embedded_brain.synthesise(atlas, self.options.seed, head.subject, head.scanner, head.kind)
                for name, volume in volumes._asdict().items():
                    _write(folder / f"{head.subject}_{name}.nii.gz", volume)
            cohort.to_csv(folder / "subjects.csv", index=False, lineterminator="\n")
        _read.cache_clear()
        table = pd.read_csv(self.folder / "subjects.csv")
        return [case for head in table.itertuples() for case in self._slices(head.subject, head.split, head.kind)]

    def _slices(self, subject: str, split: str, kind: str) -> list[Case]:
        affine = embedded_brain.affine()
        path, brain = self.folder / f"{subject}_flair.nii.gz", self.folder / f"{subject}_brain.nii.gz"
        lesion = _read(self.folder / f"{subject}_lesion.nii.gz") > 0
        digest = records.digest_file(path)

        def load(z: int) -> Pixels:
            return Pixels(axial(window(_read(path)), z), axial(lesion, z), digest, axial(_read(brain) > 0, z))

        cases = []
        for level in LEVELS:
            z = round((level - affine[2, 3]) / affine[2, 2])
            abnormal = lesion[..., z].sum() * affine[0, 0] * affine[1, 1] >= MIN_AREA
            if abnormal or kind == "normal":
                cases.append(
                    Case(
                        image_id=f"{subject}_{z:03d}",
                        subject_id=subject,
                        split=split,
                        label=int(abnormal),
                        source_file=path.name,
                        load=functools.partial(load, z),
                        pathology=kind if abnormal else "",
                    )
                )
        return cases
