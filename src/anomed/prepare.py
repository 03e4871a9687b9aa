"""The prepare command: a domain source's cases, checked one by one, become a prepared domain (contract 1)."""

import collections
import io
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from anomed import cards, console, manifest, plugins, records
from anomed.domains.source import Source
from anomed.errors import AnomedError
from anomed.manifest import Case, CaseProblem, Pixels, Writer
from anomed.settings import Settings, check


class Block(Settings):
    """The keys of `--params` common to every source; the others are the source's options."""

    source: str
    size: int = Field(ge=32, le=2048)
    release: Literal["official"] | None
    fingerprint: str


def prepare(domain: str, parameters: dict[str, Any], root: Path | None, work: Path, out: Path, problems: Path) -> None:
    """Read every case of a domain and write `out` whole, or nothing.

    parameters: the domain's block with `fingerprint` (see plan.py). root: the raw data. work: scratch folder.
    problems: where the list of problems goes. Raises AnomedError when a problem is not one that the domain's card
    lists with its exact count for an official release.
    """
    common = {key: value for key, value in parameters.items() if key in Block.model_fields}
    block = check(Block, common, "--params")
    cls = plugins.load("domains", block.source)
    rest = {key: value for key, value in parameters.items() if key not in common}
    options = check(cls.Options, rest, "--params", also=Block.model_fields)
    source: Source = cls(domain, options, root, work)
    official = block.release == "official"
    card = cards.load(domain, Path("data/cards"))
    entry = card.sources.get(block.source) if card else None
    if official and entry is None:
        raise AnomedError(f"domains.{domain}: release is official, but data/cards/{domain}.yaml does not describe it")
    with records.atomic_dir(out, "|".join(map(re.escape, (*manifest.FILES, "card.json")))) as partial:
        cases = manifest.ordered(source.cases())
        if not cases:
            raise AnomedError(f"{root}: source {block.source!r} found no image there for domain {domain!r}")
        found = [*source.problems, *_clashes(cases)]
        writer = Writer(partial, block.size, source.colour, source.has_masks, len(cases), source.has_foreground)
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
        tolerated = _judge(found, entry.known_problems if entry and official else {}, problems)
        facts = {
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
        counts = writer.close(facts)
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


def _judge(found: list[CaseProblem], known: dict[str, int], path: Path) -> dict[str, int]:
    """Problems by code when the card lists each with its exact count; else write them to `path` and raise."""
    counts = dict(sorted(collections.Counter(problem.row["code"] for problem in found).items()))
    path.unlink(missing_ok=True)
    if found:
        table = pd.DataFrame([problem.row for problem in found]).sort_values(["code", "case", "found"])
        buffer = io.StringIO()
        table.to_csv(buffer, index=False, lineterminator="\n")
        records.write_text(path, buffer.getvalue())
    unknown = {code: n for code, n in counts.items() if known.get(code) != n}
    if unknown:
        first = [str(problem) for problem in found if problem.row["code"] in unknown]
        shown = "\n".join(f"  {line}" for line in first[:10]) + (
            f"\n  ... {len(first) - 10} more" if len(first) > 10 else ""
        )
        total = ", ".join(f"{n} {code}" for code, n in unknown.items())
        raise AnomedError(f"{total}; all are listed in {path}\n{shown}")
    return counts
