"""How the files of volumes are named: what a pattern finds, and which files a path stands for."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

_LITTER = re.compile(r"(^|/)(\.[^/]*|__MACOSX|Thumbs\.db|desktop\.ini)(/|$)")  # left by systems; ._x.nii.gz is no scan
_DETACHED = (".mhd", ".nhdr")  # headers whose voxels lie in other files


class Layout:
    """The files below a root, by names with forward slashes, and the patterns that tell their meaning.

    matches: by kind of pattern (image, lesion, organ), the file or folder of every subject that is there. folders:
    those that fit a pattern of files.
    """

    def __init__(self, names: Iterable[str], patterns: Mapping[str, str]):
        files = [name for name in names if not _LITTER.search(name)]
        self._below: dict[str, list[str]] = defaultdict(list)
        for name in files:
            parts = name.split("/")
            for depth in range(len(parts) + 1):
                self._below["/".join(parts[:depth])].append(name)
        self.matches: dict[str, dict[str, str]] = {"image": {}, "lesion": {}, "organ": {}}
        self.folders: list[str] = []
        taken: set[str] = set()
        # `{subject}.nii.gz` fits s1_seg.nii.gz as well: a file is what the pattern with most letters of its own says
        for kind in sorted(patterns, key=lambda kind: -len(patterns[kind].replace("{subject}", ""))):
            expression = _expression(patterns[kind])
            found = [match for name in files if (match := expression.match(name)) and match[0] not in taken]
            self.matches[kind] = {match["subject"]: match[0].removesuffix("/") for match in found}
            taken |= {match[0] for match in found}
            if not patterns[kind].endswith("/"):
                self.folders += sorted(name for name in self._below.keys() - set(files) if expression.match(name))

    def belonging(self, path: str) -> list[str]:
        """The files that a file or a folder stands for; none when nothing is there.

        A header whose voxels lie in another file stands for its whole folder: only its text names the other file.
        """
        if path not in self._below:
            return []
        return self._below[path.rpartition("/")[0] if path.lower().endswith(_DETACHED) else path]


def path_fault(path: str) -> str:
    """What keeps `path` from naming a volume below root, to follow it in a message; "" where nothing does."""
    if re.match(r"/|~|[A-Za-z]:", path):
        return "is not relative to root"
    if "\\" in path:
        return "has a backslash"
    if not {"", ".", ".."}.isdisjoint(path.removesuffix("/").split("/")):
        return "has an empty part, '.' or '..'"
    return "is one DICOM file instead of the folder of its series" if path.lower().endswith(".dcm") else ""


def pattern_fault(pattern: str) -> str:
    """The same of a pattern."""
    if "{subject}" not in pattern:
        return "does not contain {subject}"
    if set("{}*") & set(pattern.replace("{subject}", "")):
        return "has '*' or a brace beside {subject}"
    return path_fault(pattern)


def _expression(pattern: str) -> re.Pattern[str]:
    """Matches a file's whole name, or the folder in it; the subject is the same wherever it stands."""
    first, *others = (re.escape(part) for part in pattern.split("{subject}"))
    text = first + "(?P<subject>[^/]+)" + "(?P=subject)".join(others)
    return re.compile(text if pattern.endswith("/") else text + r"\Z")
