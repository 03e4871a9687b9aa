"""What a domain source is: the base class of every plug-in in this folder."""

from pathlib import Path
from typing import Any, ClassVar

from anomed.manifest import Case, CaseProblem
from anomed.plugins import Settings


class Source:
    """Base of every domain source: subclass it once, register it, and fill `cases`.

    domain: the key in params.yaml. options: the validated `Options` of the block. root: the folder or zip that the
    block's `root` names (None: the source needs none). work: a scratch folder that may be deleted at any time.

    After `cases`, `problems` lists what the scan found wrong and `ignored` counts stray files that were passed over.
    """

    needs_root: ClassVar[bool] = True
    note: ClassVar[str] = "user data, not the released data"

    class Options(Settings):
        """The keys of a domain's block beside the common ones (source, size, root, release)."""

    def __init__(self, domain: str, options: Any, root: Path | None, work: Path):
        self.domain, self.options, self.root, self.work = domain, options, root, work
        self.problems: list[CaseProblem] = []
        self.ignored = 0

    @property
    def colour(self) -> bool:
        """Whether images have three channels."""
        return False

    @property
    def has_masks(self) -> bool:
        """Whether the domain has pixel truth."""
        return True

    def fingerprint(self) -> str:
        """A cheap identity of what lies at `root`: changes when files there do, contains no path of the machine."""
        return ""

    def cases(self) -> list[Case]:
        """Every image of the domain, in any order; pixels are read later, one by one, through `Case.load`."""
        raise TypeError(f"{type(self).__name__} does not define cases()")
