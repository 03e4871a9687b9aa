"""`anomed doctor data`: what lies at each domain's root, against its card and against what was prepared from it."""

import collections
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from anomed import cards, manifest, params, records
from anomed.domains.source import Scan, Source
from anomed.errors import AnomedError
from anomed.manifest import Case
from anomed.plan import CARDS, PREPARED, Plan

SHOWN = 20  # names of files that are gone
MARKS = {"ok": "green", "note": "yellow", "missing": "red", "fault": "red"}
Counts = dict[str, dict[str, int]]  # split -> class -> images or volumes


class Finding(NamedTuple):
    """One line. state: a key of MARKS; `missing` and `fault` make the command fail."""

    state: str
    text: str


def doctor_data(*config: Path) -> int:
    """Print what each domain of `config`, a params file with overlays, has and lacks, without reading pixels; returns
    the number of faults.

    Raises AnomedError when `config` itself is at fault.
    """
    plan = Plan(params.combined(config))
    console = Console(soft_wrap=True)  # no line is broken: names can be searched and copied
    faults = 0
    for name in plan.domains:
        block = plan.params.domains[name]
        console.print(
            f"[bold]{escape(name)}[/]: {escape(block.source)}, {escape(block.root or 'made on this machine')}"
        )
        for state, text in examine(plan, name):
            console.print(f"  [{MARKS[state]}]{state}[/] {escape(text)}", highlight=False)
            faults += MARKS[state] == "red"
        console.print()
    return faults


def examine(plan: Plan, name: str) -> Iterator[Finding]:
    """Everything that can be said of one domain."""
    block = plan.params.domains[name]
    card = cards.load(plan.card_name(name), CARDS)
    entry = card.sources.get(block.source) if card else None
    root = plan.root(name)
    if root and not os.path.exists(root):  # noqa: PTH110  never raises
        yield Finding("missing", f"{block.root} does not exist: {plan.obtain(name)}")
        return
    source = plan.source(name)
    if not source.needs_root:
        yield Finding("ok", "nothing is read, so nothing can be missing")
        return
    known = entry.known_problems if entry and block.release == "official" else {}
    try:
        offered: Sequence[Case | Scan] = source.scans() if source.volumetric else source.cases()
    except (AnomedError, OSError) as error:
        yield from _problems(source, known)
        yield Finding("fault", str(error))
        return
    counts = _count(offered)
    yield from _compared(counts, source, entry)
    yield from _uneven(offered)
    yield from _problems(source, known)
    if source.ignored:
        yield Finding("note", f"{source.ignored} files are not used (stray, or not needed by this source)")
    yield from _gone(name, block.source, source, offered)
    for fault in entry.faults if entry else []:
        yield Finding("note", f"known of this release: {fault}")


def _count(offered: Sequence[Case | Scan]) -> Counts:
    """Images, or volumes; "unlabelled": those whose class only the lesion file tells."""
    classes = {True: "abnormal", False: "normal", None: "unlabelled"}
    counts: Counts = {split: collections.Counter() for split in manifest.SPLITS}
    for one in offered:
        abnormal = one.abnormal if isinstance(one, Scan) else bool(one.label)
        counts[one.split][classes[abnormal]] += 1
    return counts


def _compared(counts: Counts, source: Source, entry: cards.Entry | None) -> Iterator[Finding]:
    """What is there of each split, and what the card states beyond that or short of that."""
    unit = "volumes" if source.volumetric else "images"
    stated = entry.counts if entry and not source.volumetric else {}
    for split, found in counts.items():
        parts = " + ".join(f"{found[name]} {name}" for name in ("normal", "abnormal", "unlabelled") if found[name])
        if parts:
            yield Finding("ok", f"{split}: {parts} {unit}")
        elif split in stated or split == "test" or (split == "train" and source.trains):
            yield Finding("missing", f"{split}: no {unit[:-1]} at all")
        elif source.trains:
            yield Finding("note", f"{split}: no {unit[:-1]} at all, so no threshold can be chosen")
        if split in stated:
            for name, expected in stated[split].model_dump(exclude_none=True).items():
                have = sum(found.values()) if name == "total" else found[name]
                yield from _difference(f"{split} {name}", have, expected)
    if entry and entry.total is not None:
        yield from _difference(f"all {unit}", sum(sum(found.values()) for found in counts.values()), entry.total)


def _uneven(offered: Sequence[Case | Scan]) -> Iterator[Finding]:
    """A pathology that one of valid and test lacks: perhaps a folder of it was not copied."""
    kinds = {split: {one.pathology for one in offered if one.split == split} - {""} for split in ("valid", "test")}
    for split, other in (("valid", "test"), ("test", "valid")):
        if kinds[split] and (lacking := sorted(kinds[other] - kinds[split])):
            yield Finding("note", f"{split}: nothing of {', '.join(lacking)}, which {other} has")


def _difference(what: str, found: int, expected: int) -> Iterator[Finding]:
    if found < expected:
        text = f"{what}: found {found:,}, expected {expected:,} by the card: {expected - found:,} missing"
        yield Finding("missing", text)
    elif found > expected:
        yield Finding(
            "note", f"{what}: found {found:,}, expected {expected:,} by the card: {found - expected:,} too many"
        )


def _problems(source: Source, known: dict[str, int]) -> Iterator[Finding]:
    """Every problem by name; a note where the source has it by design, or the card lists it with its exact count."""
    unique = {str(problem): problem.row["code"] for problem in source.problems}
    counts = collections.Counter(unique.values())
    for text, code in sorted(unique.items()):
        yield Finding("note" if code in source.accepts or known.get(code) == counts[code] else "fault", text)


def _gone(name: str, kind: str, source: Source, offered: Sequence[Case | Scan]) -> Iterator[Finding]:
    """Files that the prepared manifest names and the source no longer offers, but for those already named."""
    folder = PREPARED / name
    if not (folder / "manifest.csv").exists():
        return
    try:
        made = records.read_card(folder / "card.json", "source")["source"]
        named = _source_files(folder / "manifest.csv")
    except AnomedError as error:
        yield Finding("fault", str(error))
        return
    if made != kind:
        yield Finding("note", f"what is prepared was made from source {made} and will be made again")
        return
    told = {problem.row["case"] for problem in source.problems}  # by file, by its base name or by that without suffix
    here = {one.source_file for one in offered}
    gone = sorted(file for file in named - here if not told & {file, PurePath(file).name, PurePath(file).stem})
    for file in gone[:SHOWN]:
        yield Finding("missing", f"{file}: was there when the domain was prepared")
    if gone[SHOWN:]:
        yield Finding("missing", f"{len(gone) - SHOWN} more files that were there when the domain was prepared")


def _source_files(path: Path) -> set[str]:
    import pandas as pd

    try:
        return set(pd.read_csv(path, usecols=["source_file"], dtype=str, keep_default_na=False).source_file)
    except ValueError as error:  # also of a damaged table
        raise AnomedError(f"{path}: not a manifest ({error}); delete its folder and run again") from None
