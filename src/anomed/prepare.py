"""The prepare command: a domain source's cases, checked one by one, become a prepared domain (contract 1)."""

import collections
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from anomed import cards, console, manifest, plugins, problems, records
from anomed.domains.source import Source
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Case, Pixels, Writer
from anomed.settings import Settings, check

OURS = "|".join(map(re.escape, (*manifest.FILES, "card.json", "qc.html")))  # what may stand in a prepared domain


class Block(Settings):
    """The keys of `--params` common to every source; the others are the source's options."""

    source: str
    size: int = Field(ge=32, le=2048)
    release: Literal["official"] | None
    fingerprint: str


def prepare(domain: str, parameters: dict[str, Any], root: Path | None, work: Path, out: Path, listing: Path) -> None:
    """Read every image of a domain and write `out` whole, or nothing.

    parameters: the domain's block with `fingerprint` (see plan.py). root: the raw data. work: scratch folder.
    listing: where problems are listed. Raises AnomedError when a problem is not one that the domain's card
    lists with its exact count for an official release.
    """
    common = {key: value for key, value in parameters.items() if key in Block.model_fields}
    block = check(Block, common, "--params")
    cls = plugins.load("domains", block.source)
    rest = {key: value for key, value in parameters.items() if key not in common}
    source: Source = cls(domain, check(cls.Options, rest, "--params", also=Block.model_fields), root, work)
    with records.atomic_dir(out, OURS) as partial:
        build(partial, block, source, source.cases(), source.has_foreground, parameters, listing, {})


def build(
    folder: Path, block: Block, source: Source, cases: list[Case], has_foreground: bool, parameters: dict[str, Any],
    listing: Path, facts: dict[str, Any],
) -> None:  # fmt: skip
    """Check the cases of a domain one by one and write them into the empty `folder`, with its card.

    parameters: what all was made from, for the card; facts: what else the card says. listing: where problems are
    listed. Raises AnomedError as `prepare` does.
    """
    domain, official = source.domain, block.release == "official"
    card, entry = cards.described(parameters.get("set") or domain, block.source, official, Path("data/cards"))
    cases = manifest.ordered(cases)
    if not cases:
        problems.judge(source.problems, {}, listing)
        raise AnomedError(f"{source.root}: source {block.source!r} found no image there for domain {domain!r}")
    found = [*source.problems, *_clashes(cases)]
    writer = Writer(folder, block.size, source.colour, source.has_masks, len(cases), has_foreground)
    seen: dict[str, Case] = {}
    written: set[str] = set()
    for case in console.track(cases, f"prepare {domain}"):
        if case.image_id in written:
            continue  # already among the clashes
        try:
            pixels = case.load()
            _check_shapes(case, pixels, source)
        except CaseProblem as problem:
            found.append(problem)
            continue
        twin = seen.setdefault(records.digest(f"{pixels.image.shape}".encode() + pixels.image.tobytes()), case)
        found += [*_check_mask(case, pixels.mask), *_check_foreground(case, pixels.foreground)]
        found += _check_twin(case, twin)
        writer.add(case, pixels)
        written.add(case.image_id)
    known = entry.known_problems if entry and official else {}
    tolerated = problems.judge(found, known, listing, source.accepts)
    about = {
        "domain": domain,
        "title": card.title if card else domain,
        "source": block.source,
        "official": official,
        "note": "the released data" if official else source.note,
        "licence": entry.licence if entry else "",
        "problems": tolerated,
        "ignored_files": source.ignored,
        "parameters": parameters,
    }
    counts = writer.close({**about, **facts})
    if entry and official:
        cards.check_counts(entry, counts, domain)


def _check_shapes(case: Case, pixels: Pixels, source: Source) -> None:
    """Raises CaseProblem when the mask is not on the image's grid."""
    image, mask = pixels.image, pixels.mask
    if image.ndim != (3 if source.colour else 2):
        raise ValueError(f"{case.image_id}: source gave an image of shape {image.shape}")
    if mask is not None and mask.shape != image.shape[:2]:
        found = f"mask {mask.shape[0]} x {mask.shape[1]}, image {image.shape[0]} x {image.shape[1]}"
        hint = "export the mask on the image's grid"
        raise CaseProblem(case.source_file, "mask_size", found, "equal heights and widths", hint)


def _check_mask(case: Case, mask: np.ndarray | None) -> list[CaseProblem]:
    """A mask must mark something in an abnormal image and nothing in a normal one."""
    if mask is None or mask.any() == bool(case.label):
        return []
    hint = "correct the mask or the label"
    if case.label:
        return [
            CaseProblem(case.source_file, "empty_mask", "an empty mask", "a marked pixel in an abnormal image", hint)
        ]
    found = f"{int(mask.sum())} marked pixels"
    return [CaseProblem(case.source_file, "mask_in_normal", found, "none in a normal image", hint)]


def _check_foreground(case: Case, foreground: np.ndarray | None) -> list[CaseProblem]:
    """An image must show something of the organ."""
    if foreground is None or foreground.any():
        return []
    hint = "correct the organ's mask or leave the image out"
    return [CaseProblem(case.source_file, "empty_foreground", "an empty foreground", "a pixel of the organ", hint)]


def _check_twin(case: Case, twin: Case) -> list[CaseProblem]:
    """The same pixels must not stand in two splits."""
    if twin.split == case.split:
        return []
    found, hint = f"the same pixels as {twin.source_file} in {twin.split}", "remove one of the two"
    return [
        CaseProblem(case.source_file, "duplicate_across_splits", found, "different images in different splits", hint)
    ]


def _clashes(cases: list[Case]) -> list[CaseProblem]:
    """Ids that stand twice, abnormal train images, and subjects in more than one split."""
    problems = []
    ids = collections.Counter(case.image_id for case in cases)
    splits: dict[str, set[str]] = collections.defaultdict(set)
    for case in cases:
        splits[case.subject_id].add(case.split)
        if ids[case.image_id] > 1:
            hint = "rename one of the files"
            problems.append(CaseProblem(case.source_file, "duplicate_id", case.image_id, "a unique image id", hint))
        if case.split == "train" and case.label:
            hint = "move the image out of train: detectors learn from normal images only"
            problems.append(
                CaseProblem(case.source_file, "abnormal_in_train", "an abnormal image", "normals only", hint)
            )
    for subject, where in sorted(splits.items()):
        if len(where) > 1:
            hint = "keep all images of a subject in one split"
            problems.append(CaseProblem(subject, "subject_in_two_splits", ", ".join(sorted(where)), "one split", hint))
    return problems
