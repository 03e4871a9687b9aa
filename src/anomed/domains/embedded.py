"""The embedded domain: heads synthesised on the user's machine, so that the benchmark runs without any download."""

import functools
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import Field

from anomed import plugins, records, volumes
from anomed.domains import embedded_atlas, embedded_brain
from anomed.domains.source import Files, Scan, Source
from anomed.errors import AnomedError

DOMAINS = ("brain_mri",)
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


@functools.cache
def _atlas() -> embedded_atlas.Atlas:
    return embedded_atlas.Atlas.load()


@plugins.register("domains", "embedded")
class Embedded(Source):
    """Synthetic FLAIR heads at 2 mm out of nilearn's MNI152 maps (see `embedded_brain`), written to
    `<work>/embedded/<domain>/` as a hospital's folder: `sub-XX_flair.nii.gz`, `sub-XX_brain.nii.gz` and, where there is
    a lesion, `sub-XX_lesion.nii.gz`. They go through the chain that the domain's block names, as a scanner's do.

    A third of the heads are for training, all normal; valid and test hold other heads, normal and with lesions.
    `pathology` is the kind of lesion, one of `embedded_brain.KINDS`.
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
    def volumetric(self) -> bool:
        return True

    def fingerprint(self) -> str:
        """Hash of the template maps in the environment; seed and number of heads are parameters of the block."""
        return records.digest(
            {name: records.digest_file(path) for name, path in embedded_atlas.template_files().items()}
        )

    def scans(self) -> list[Scan]:
        """The cohort; a head is synthesised when it is fetched (about half a second)."""
        return [
            Scan(
                subject_id=head.subject,
                split=head.split,
                source_file=f"{head.subject}_flair.nii.gz",
                fetch=functools.partial(self._fetch, head.subject, head.scanner, head.kind),
                abnormal=head.kind != "normal",
                pathology=head.kind if head.kind != "normal" else "",
            )
            for head in subjects(self.options.subjects).itertuples()
        ]

    def _fetch(self, subject: str, scanner: str, kind: str) -> Files:
        head = embedded_brain.synthesise(_atlas(), self.options.seed, subject, scanner, kind)
        paths = {}
        for name, data in head._asdict().items():
            paths[name] = self.work / "embedded" / self.domain / f"{subject}_{name}.nii.gz"
            if name == "lesion" and kind == "normal":
                paths[name].unlink(missing_ok=True)
                continue
            volumes.write(paths[name], data, embedded_brain.affine())
        return Files(paths["flair"], paths["lesion"] if kind != "normal" else None, paths["brain"])
