"""How a folder of 2-D images is named: what a pattern finds in a path, and which words stand for splits and labels."""

import re
from collections.abc import Iterable, Mapping

from anomed.domains import bmad_layout, volumes_layout

SPLITS = {"train": "train", "valid": "valid", "val": "valid", "test": "test"}
LABELS = {"normal": 0, "good": 0, "0": 0, "abnormal": 1, "ungood": 1, "1": 1}
ENDINGS = ("png", "jpg", "jpeg", "bmp", "tif", "tiff")
_ENDING = re.compile(rf"\.(?i:{'|'.join(ENDINGS)})$")
_FIELD = re.compile(r"\{(\w*)\}")
FIELDS = ("split", "label", "subject", "name")


class Layout:
    """The image files below a root and the patterns `image` and `mask` that tell their meaning.

    images: path -> what its name says (split, label, subject, name). ambiguous: path -> the subjects that its name may
    mean. masks: the paths that fit `mask`. strange: files that look like images and fit neither. stray: no images.
    """

    def __init__(self, names: Iterable[str], patterns: Mapping[str, str], listed: Iterable[str]):
        """listed: files that a table names; they are not strange, whatever their names."""
        names, given = sorted(names), set(listed)
        self.stray = [name for name in names if bmad_layout.is_stray(name) and name not in given]
        left = [name for name in names if not bmad_layout.is_stray(name)]
        found: dict[str, dict[str, dict[str, str]]] = {"image": {}, "mask": {}}
        # `{name}.png` fits a_mask.png as well: a file is what the pattern with most letters of its own says
        for kind in sorted(patterns, key=lambda kind: -len(_FIELD.sub("", patterns[kind]))):
            expression = _expression(patterns[kind])
            found[kind] = {name: match.groupdict() for name in left if (match := expression.fullmatch(name))}
            left = [name for name in left if name not in found[kind]]
        self.images, self.masks = found["image"], sorted(found["mask"])
        self.strange = [name for name in left if name not in given]
        shortest = _expression(patterns["image"], lazy=True)
        self.ambiguous: dict[str, list[str]] = {}
        for name, read in self.images.items():
            other = shortest.fullmatch(name)
            if other and "subject" in read and other["subject"] != read["subject"]:
                self.ambiguous[name] = [other["subject"], read["subject"]]


def fields(pattern: str) -> tuple[str, ...]:
    """The fields of a pattern, in the order of `FIELDS`."""
    return tuple(field for field in FIELDS if f"{{{field}}}" in pattern)


def pattern_fault(pattern: str, known: tuple[str, ...]) -> str:
    """What keeps `pattern` from naming files by the fields `known`, to follow it in a message; "" if nothing does."""
    if unknown := sorted(set(_FIELD.findall(pattern)) - set(known)):
        return f"has {{{unknown[0]}}}, expected no other than {', '.join(f'{{{field}}}' for field in known)}"
    if not {"subject", "name"} & set(fields(pattern)):
        return "contains neither {name} nor {subject}"
    if set("{}*") & set(_FIELD.sub("", pattern)):
        return "has '*' or a lone brace"
    return volumes_layout.path_fault(pattern) or ("ends with '/'" if pattern.endswith("/") else "")


def stem(path: str) -> str:
    """A path without its ending."""
    return _ENDING.sub("", path)


def is_picture(path: str) -> bool:
    """Whether a path ends like a PNG, JPEG, BMP or TIFF."""
    return bool(_ENDING.search(path))


def filled(pattern: str, meant: Mapping[str, str]) -> str:
    """The path that a pattern names for one image, by the fields of the image's own path."""
    return _FIELD.sub(lambda match: meant[match[1]], pattern)


def _expression(pattern: str, lazy: bool = False) -> re.Pattern[str]:
    """Matches a file's whole path. `{name}` may hold folders, other fields not; a field is the same wherever it stands.

    A pattern without an ending fits every format. lazy: fields take as little as they can.
    """
    text, seen = "", set()
    for at, part in enumerate(_FIELD.split(pattern)):  # texts and fields take turns
        if at % 2 == 0:
            text += re.escape(part)
        elif part in seen:
            text += f"(?P={part})"
        else:
            text += f"(?P<{part}>{'.' if part == 'name' else '[^/]'}+{'?' * lazy})"
            seen.add(part)
    return re.compile(text if is_picture(pattern) else text + rf"\.(?i:{'|'.join(ENDINGS)})")
