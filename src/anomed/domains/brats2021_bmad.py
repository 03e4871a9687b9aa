"""Which patients and slices of BraTS 2021 BMAD (arXiv 2306.11876) uses, as far as its script says it."""

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import SPLITS

LIST = Path("data/splits/brats2021_bmad.csv")  # relative to the project, as data/cards
ABNORMAL = 626  # patients that the list leaves, of the 1,251 that are labelled
VALID = 11  # of these
_HINT = "complete the copy of the training data, or leave `variant` out"
_VALID_SLICES, _TEST_SLICES = tuple(range(60, 100, 10)), tuple(range(60, 100, 8))


class Choice(NamedTuple):
    """Where a patient stands, and which of its axial slices are taken (None: those that the chain takes)."""

    split: str
    slices: tuple[int, ...] | None
    keep: Literal["normal", "abnormal"] | None


def choose(names: Iterable[str]) -> tuple[dict[str, Choice], list[CaseProblem]]:
    """What becomes of every patient on disk, and a problem for each that BMAD has and the disk has not.

    Listed patients give all their slices 60 to 99 without tumour: that is the script's rule, and its counts (7,500
    train, 39 valid and 640 test images) follow from the volumes alone. The others are abnormal: the first 11 by id give
    slices 60, 70, 80 and 90 to valid, 615 give 60, 68, 76, 84 and 92 to test. BMAD's own eleven followed the order of
    a Python set and cannot be known; and it takes these slices whether or not they show tumour, where here one without
    is left out and counted (in patients without a tumour-free slice from 60 to 99 there is none).
    names: all patients on disk, also those that will be left out, so that the choice stays.
    """
    there = set(names)
    listed = read(LIST)
    chosen = {name: choice for name, choice in listed.items() if name in there}
    absent = [
        CaseProblem(name, "missing_image", "no such subject", f"each of the {len(listed)} in {LIST}", _HINT)
        for name in sorted(listed.keys() - there)
    ]
    rest = sorted(there - listed.keys())
    for number, name in enumerate(rest):
        valid = number < VALID
        chosen[name] = Choice("valid", _VALID_SLICES, "abnormal") if valid else Choice("test", _TEST_SLICES, "abnormal")
    if len(rest) != ABNORMAL:
        expected = f"{ABNORMAL}, so that the first {VALID} by id are always the same"
        absent.append(
            CaseProblem("BraTS2021", "incomplete_copy", f"{len(rest)} subjects beside the list", expected, _HINT)
        )
    return chosen, absent


def read(path: Path) -> dict[str, Choice]:
    """The listed patients. Raises AnomedError when the file is missing or a line is not as the others."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise AnomedError(f"{path}: cannot be read ({error.strerror}); it belongs to the project: restore it") from None
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    listed: dict[str, Choice] = {}
    for row in rows:
        try:
            first, last = row["slices"].split("-")
            choice = Choice(row["split"], tuple(range(int(first), int(last) + 1)), "normal")
            fits = choice.split in SPLITS and row["keep"] == "normal" and row["subject"] not in listed
        except (KeyError, ValueError, AttributeError):
            fits = False
        if not fits:
            expected = "a new subject, its split, normal, and slices such as 60-99"
            raise AnomedError(f"{path}: found {list(row.values())}, expected {expected}; restore the file")
        listed[row["subject"]] = choice
    return listed
