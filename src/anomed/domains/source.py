"""What a domain source is: the base class of every plug-in in this folder."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from anomed import archive, records
from anomed.archive import Entry, View
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Case
from anomed.settings import Settings


@dataclass(frozen=True)
class Files:
    """The files of one scan: volumes, or the folders of DICOM series.

    lesion: its lesions, any label above 0; organ: the brain or organ, likewise; on the grid of the image.
    """

    image: Path
    lesion: Path | None = None
    organ: Path | None = None


@dataclass(frozen=True)
class Scan:
    """One volume that a volumetric source offers; nothing is read before `fetch`, which may raise CaseProblem.

    abnormal: whether the subject has a lesion; None leaves it to the lesion file. source_file: name of the image
    relative to the source's root. slices: axial indices of the scan to take instead of those that the chain's `slices:`
    gives; refused where the chain registers, resamples or cuts another plane. keep: only the slices with a lesion
    ("abnormal") or without ("normal").
    """

    subject_id: str
    split: str
    source_file: str
    fetch: Callable[[], Files]
    abnormal: bool | None = None
    pathology: str = ""
    slices: tuple[int, ...] | None = None
    keep: Literal["normal", "abnormal"] | None = None


class Source:
    """Base of every domain source: subclass it once, register it, and fill `cases` or `scans`.

    domain: the key in params.yaml. options: the validated `Options` of the block. root: the folder or zip that the
    block's `root` names (None: the source needs none). work: a scratch folder that may be deleted at any time.

    A source offers images (`cases`) or, where `volumetric`, volumes (`scans`), which a chain of `preprocess:` turns
    into images. After either, `problems` lists what is wrong, and `ignored` counts stray files that were passed over.
    """

    needs_root: ClassVar[bool] = True
    accepts: frozenset[str] = frozenset()  # codes of problems that the data have by design: counted, not refused
    note: ClassVar[str] = "user data, not the released data"

    class Options(Settings):
        """The keys of a domain's block beside the common ones (source, size, root, release)."""

    def __init__(self, domain: str, options: Any, root: Path | None, work: Path):
        self.domain, self.options, self.root, self.work = domain, options, root, work
        self.problems: list[CaseProblem] = []
        self.ignored = 0

    @property
    def where(self) -> str:
        """The domain's key in params.yaml, for messages."""
        return f"domains.{self.domain}"

    @functools.cached_property
    def tree(self) -> View:
        """What lies at `root`. Raises AnomedError when it is no folder or zip; volumes are read in place, so no zip."""
        if self.root is None:
            raise AnomedError(f"{self.where}.root: missing; expected the folder or zip of the raw data")
        tree = archive.view(self.root)
        if self.volumetric and not isinstance(tree, archive.Folder):
            raise AnomedError(f"{self.root}: a zip; volumes are read in place: unpack it and set `root` to the folder")
        return tree

    @functools.cached_property
    def entries(self) -> dict[str, Entry]:
        """Every file at `root` by its name, listed once."""
        return {entry.name: entry for entry in self.tree.files()}

    @property
    def colour(self) -> bool:
        """Whether images have three channels."""
        return False

    @property
    def volumetric(self) -> bool:
        """Whether the source offers volumes (`scans`) and no images (`cases`)."""
        return False

    @property
    def trains(self) -> bool:
        """Whether there are train images; False for a set that is evaluation only."""
        return True

    @property
    def has_masks(self) -> bool:
        """Whether the domain has pixel truth."""
        return True

    @property
    def has_foreground(self) -> bool:
        """Whether images come with the pixels that belong to the organ (`Pixels.foreground`)."""
        return False

    @property
    def offers(self) -> frozenset[str]:
        """What `Case.clinical` tells of images beside their pixels, for methods that read it (`Detector.reads`).

        "slice": the number of the slice in its volume, counted from 0 or 1 as the data count; "view": how a film was
        taken, such as AP or PA. It may be unknown of some images, not of all. Slices cut from volumes are numbered.
        """
        return frozenset({"slice"} if self.volumetric else ())

    def fingerprint(self) -> str:
        """Identity of what lies at `root`: other when a file there is, the same for a copy elsewhere.

        Raises AnomedError when nothing is there. Without it a change of the raw data would re-run nothing: a source
        that overrides it must hash all that its cases are made from.
        """
        if self.root is None:
            return ""
        return records.digest(archive.identity(self.tree, "", list(self.entries.values()), self.hashes))

    @property
    def hashes(self) -> Path:
        """Where hashes of the files at `root` are remembered; may be deleted at any time.

        One file a domain: two that read other files of one root would forget each other's, and read all at every call.
        """
        place = records.digest([self.domain, str(self.root and self.root.absolute())])
        return self.work / "hashes" / f"{place[:16]}.json"

    def cases(self) -> list[Case]:
        """Every image of the domain, in any order; pixels are read later, one by one, through `Case.load`."""
        raise TypeError(f"{type(self).__name__} does not define cases()")

    def scans(self) -> list[Scan]:
        """Every volume of a volumetric domain, in any order."""
        raise TypeError(f"{type(self).__name__} does not define scans()")
