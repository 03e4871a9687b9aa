"""Volumes whose file names alone say whose they are and what they show: found at any depth below `root`, each once."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from anomed.errors import AnomedError, CaseProblem
from anomed.settings import nearest

Found = dict[str, dict[str, list[str]]]  # subject -> kind of file -> paths relative to root, sorted


class Survey(NamedTuple):
    """Files of the subjects that are kept, the faults of each, and the number of stray files."""

    found: Found
    faults: dict[str, list[CaseProblem]]
    ignored: int


def survey(
    found: Found, exclude: Mapping[str, str], where: str, expected: Callable[[str], Mapping[str, str]], files: int
) -> Survey:
    """What a source works with. expected: as of `faults`, by subject. files: number of all that lie at root."""
    known = sum(len(paths) for kinds in found.values() for paths in kinds.values())
    kept = without(found, exclude, where)
    return Survey(
        kept, {name: list(faults(name, kinds, expected(name))) for name, kinds in kept.items()}, files - known
    )


def find(paths: Iterable[str], named: Callable[[str], tuple[str, str] | None]) -> Found:
    """The files that have a subject and a kind. named: gives them for a path, None for a file that is passed over."""
    found: Found = {}
    for path in sorted(paths):
        if (name := named(path)) is not None:
            subject, kind = name
            found.setdefault(subject, {}).setdefault(kind, []).append(path)
    return dict(sorted(found.items()))


def without(found: Found, exclude: Mapping[str, str], where: str) -> Found:
    """All but the excluded subjects. Raises AnomedError when an excluded one is not there."""
    for name in exclude:
        if name not in found:
            raise AnomedError(f"{where}.exclude: no subject {name!r}{nearest(name, found)}")
    return {name: files for name, files in found.items() if name not in exclude}


def faults(subject: str, files: Mapping[str, list[str]], expected: Mapping[str, str]) -> Iterator[CaseProblem]:
    """What keeps a subject from being used: a file that is not there, or there twice.

    expected: the name of the file by kind (image, lesion, organ), without ending.
    """
    for kind, name in expected.items():
        paths = files.get(kind, [])
        if not paths:
            hint = "add it, or exclude the subject with the reason"
            yield CaseProblem(subject, f"missing_{kind}", "no such file", f"{name}.nii or .nii.gz", hint)
        elif len(paths) > 1:
            hint = "keep one of them below `root`"
            yield CaseProblem(subject, f"duplicate_{kind}", " and ".join(paths), f"one file {name}", hint)
