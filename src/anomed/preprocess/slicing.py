"""The intensity command: processed volumes to grey levels, cut into slices: a prepared domain (contract 1)."""

import collections
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anomed import console, prepare, problems, records, volumes
from anomed.domains.source import Scan, Source
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Case, Pixels
from anomed.preprocess import qc, shard, spatial_steps, steps
from anomed.preprocess.chain import Chain
from anomed.preprocess.slices import Slices
from anomed.preprocess.steps import Step
from anomed.settings import check


class Block(prepare.Block):
    """The keys of `--params` beside the source's options."""

    preprocess: dict[str, Any]
    files: dict[str, str]


def intensity(
    domain: str, parameters: dict[str, Any], root: Path | None, work: Path, folders: Path, out: Path, listing: Path
) -> None:
    """Normalise the volumes that `anomed prepare spatial` left in `folders`, cut them, write `out` whole or not at all.

    parameters: the domain's whole block with `fingerprint` and `files` (see plan.py). What is fitted is fitted on the
    train volumes alone. Beside the prepared domain lies qc.html. Raises AnomedError as `prepare` does.
    """
    from anomed.preprocess import intensity as transforms

    block = check(Block, {key: parameters[key] for key in Block.model_fields if key in parameters}, "--params")
    made = Chain(block.preprocess, "preprocess")
    chain, rule, identity = made.intensity, made.slices, shard.identity(made.spatial, block.files)
    source = shard.source_of(domain, parameters, root, work)
    scans, folders = sorted(source.scans(), key=lambda scan: scan.subject_id), folders.resolve()
    _check_places(scans, made, domain)
    try:
        fitted = transforms.fit(chain, (load(folders / scan.subject_id) for scan in scans if scan.split == "train"))
    except CaseProblem as problem:
        problems.judge([*source.problems, problem], {}, listing)
    each = bool(chain) and chain[-1][0] == "slice_min_max"
    grey = functools.lru_cache(maxsize=1)(functools.partial(_grey, chain, fitted))
    cutter = Cutter(rule, each, source.has_masks, grey)
    cases: list[Case] = []
    rows = []
    for scan in console.track(scans, f"slice {domain}"):
        folder = folders / scan.subject_id
        rows.append(shard.row(scan, folder, _card(folder, identity)))
        try:
            cases += cutter.cases(scan, folder)
        except CaseProblem as problem:
            source.problems.append(problem)
    organ = spatial_steps.finds_organ(made.spatial)
    left_out = dict(sorted(cutter.left_out.items()))
    _check_splits(cases, source, left_out, cutter.without)
    with records.atomic_dir(out, prepare.OURS) as partial:
        facts = {"fitted": fitted, "left_out": left_out, "volumes": len(scans), "without_lesion_slice": cutter.without}
        prepare.build(partial, block, source, cases, organ, parameters, listing, facts)
        counts = {f"slices left out: {name.replace('_', ' ')}": str(n) for name, n in left_out.items()}
        if cutter.without:
            counts["patients without a slice of their lesion"] = ", ".join(cutter.without)
        qc.page(domain, rows, [], partial / "qc.html", counts)


def _card(folder: Path, identity: str) -> dict[str, Any]:
    """The card of a processed volume. Raises AnomedError when another chain made it, or it lies in another's folder."""
    card = records.read_card(folder / shard.CARD, "files", "facts", "inputs", "subject", "chain")
    if card["chain"] != identity or card["subject"] != folder.name:
        raise AnomedError(f"{folder}: made of another subject or by other spatial steps; run `anomed prepare spatial`")
    return card


def _check_places(scans: list[Scan], chain: Chain, domain: str) -> None:
    """Raise AnomedError where a source names slices by their index and the chain gives an index another meaning."""
    moved = [f"`{name}`" for name, _ in chain.spatial if name in ("register", "resample")]
    other = moved + [f"`plane: {chain.slices.plane}`"] * (chain.slices.plane != "axial")
    named = [scan.subject_id for scan in scans if scan.slices is not None]
    if other and named:
        raise AnomedError(
            f"domains.{domain}: the source names axial slices of the scans by index (first of {named[0]}), which are "
            f"others after {' and '.join(other)}; take it out of the chain, or the variant out of the domain's block"
        )


def _check_splits(cases: list[Case], source: Source, left_out: dict[str, int], without: list[str]) -> None:
    """Raise AnomedError when nothing can be learned or told: no train image, or one class alone in test."""
    if source.problems:
        return  # told first
    found = {(case.split, case.label) for case in cases}
    for split, label in (("train", 0), ("test", 0), ("test", 1)):
        if (split, label) not in found:
            slices = ", ".join(f"{number} {reason}" for reason, number in left_out.items()) or "none"
            kind = "abnormal" if label else "normal"
            raise AnomedError(
                f"domains.{source.domain}: no {kind} slice in {split}; slices left out: {slices}; patients without a "
                f"slice of their lesion: {', '.join(without) or 'none'}; change `slices:` or the splits"
            )


def load(folder: Path, keys: Sequence[str] = ("image", "lesion", "organ")) -> dict[str, Any]:
    """What the spatial chain left of a subject, as MONAI's transforms take it: those of `keys` that there are, and the
    hash of its scan."""
    from anomed.preprocess import spatial

    card = records.read_card(folder / shard.CARD, "files", "subject", "inputs")
    data: dict[str, Any] = {"subject": card["subject"], "sha256": card["inputs"]["image"]}
    for key in keys:
        path = folder / f"{key}.nii.gz"
        if path.name in card["files"]:
            reader = volumes.read if key == "image" else volumes.read_label
            volume = reader(records.verified(path, card), str(path))
            data[key] = spatial.tensor(volume.data, volume.affine)
    return data


class Grey(NamedTuple):
    """A normalised volume, X x Y x Z: image float32, 0 to 255 (not yet when slices are stretched one by one), organ and
    lesion bool where they are known."""

    image: np.ndarray
    organ: np.ndarray | None
    lesion: np.ndarray | None


def _grey(chain: list[Step], fitted: dict[str, Any], folder: Path) -> Grey:
    from anomed.preprocess import intensity as transforms

    data = steps.run(transforms.compose(chain, fitted), load(folder))
    organ, lesion = (data[key][0].numpy() > 0 if key in data else None for key in ("organ", "lesion"))
    return Grey(data["image"][0].numpy(), organ, lesion)


@dataclass
class Cutter:
    """Lists the slices of each subject and cuts them; one volume at a time is in memory.

    rule: which slices. each: slices are stretched one by one. has_masks: the domain has pixel truth. grey: reads a
    subject's folder. left_out: counts of slices that were passed over, by reason. without: patients of valid and test
    none of whose slices is abnormal.
    """

    rule: Slices
    each: bool
    has_masks: bool
    grey: Callable[[Path], Grey]
    left_out: collections.Counter[str] = field(default_factory=collections.Counter)
    without: list[str] = field(default_factory=list)

    def cases(self, scan: Scan, folder: Path) -> list[Case]:
        """Its slices that become images. Raises CaseProblem when truth and label contradict each other."""
        data = load(folder, ("lesion", "organ"))
        grid = data["organ"] if "organ" in data else load(folder, ("image",))["image"]
        shape, affine = grid.shape[1:], grid.affine.numpy()
        axis = volumes.PLANES[self.rule.plane]
        indices = self._indices(scan, affine, shape)
        area = float(np.linalg.norm(np.cross(*np.delete(affine[:3, :3], axis, axis=1).T)))
        lesion = self._areas(data.get("lesion"), axis, area)
        organ = self._areas(data.get("organ"), axis, area)
        values = np.moveaxis(grid[0].numpy(), axis, 0).reshape(shape[axis], -1)
        blank = np.ptp(values, axis=1) == 0 if organ is None else np.zeros(shape[axis], bool)
        patient = self._patient(scan, lesion)
        cases = []
        for z in indices:
            abnormal = patient if lesion is None else bool(lesion[z])
            reason = "blank" if blank[z] else self._passed_over(scan, patient, abnormal, z, lesion, organ)
            if reason:
                self.left_out[reason] += 1
                continue
            load_slice = functools.partial(self._load, folder, z, data["sha256"])
            cases.append(
                Case(
                    image_id=f"{scan.subject_id}_{z:03d}",
                    subject_id=scan.subject_id,
                    split=scan.split,
                    label=int(abnormal),
                    source_file=scan.source_file,
                    load=load_slice,
                    pathology=scan.pathology if abnormal else "",
                    clinical={"slice": z},
                )
            )
        wanted = scan.split != "train" and scan.keep != "normal"
        if patient and wanted and not any(case.label for case in cases):
            self.without.append(scan.subject_id)
        return cases

    def _indices(self, scan: Scan, affine: np.ndarray, shape: tuple[int, ...]) -> list[int]:
        """All slices that the scan names, else those of the rule. Raises CaseProblem when they are not there."""
        name, found = scan.subject_id, f"a volume of {tuple(shape)} voxels"
        if scan.slices is None:
            if indices := self.rule.indices(affine, shape):
                return indices
            found, hint = f"{found}, which none of the slices meets", "change `slices:`"
            expected = f"slices from {self.rule.start:g} to {self.rule.stop:g} {self.rule.unit}"
            raise CaseProblem(name, "no_slice", found, expected, hint)
        indices = sorted(set(scan.slices))
        if not indices or not 0 <= indices[0] <= indices[-1] < shape[volumes.PLANES[self.rule.plane]]:
            expected = f"slices {', '.join(map(str, indices)) or 'at least one'}, as the source names them"
            raise CaseProblem(name, "no_slice", found, expected, "copy the volume again, or exclude the subject")
        return indices

    @staticmethod
    def _areas(mask: Any, axis: int, area: float) -> np.ndarray | None:
        """mm2 of a mask in every slice; None without a mask."""
        if mask is None:
            return None
        others = tuple(other for other in range(3) if other != axis)
        return np.asarray((mask[0].numpy() > 0).sum(others) * area)

    def _patient(self, scan: Scan, lesion: np.ndarray | None) -> bool:
        """Whether the subject has a lesion, by its label and the truth of its voxels, which must agree."""
        marked = None if lesion is None else bool(lesion.any())
        name, said = scan.subject_id, scan.abnormal
        if marked is None and said and self.has_masks:
            hint = "add the file, or take the subject out"
            raise CaseProblem(name, "missing_lesion", "no lesion mask", "one for every abnormal subject", hint)
        if marked is False and said:
            hint = "correct the mask or the label"
            raise CaseProblem(name, "empty_mask", "an empty lesion mask", "a marked voxel in an abnormal subject", hint)
        if lesion is not None and marked and said is False:
            hint = "correct the mask or the label"
            raise CaseProblem(
                name, "mask_in_normal", f"{lesion.sum():.0f} mm2 of lesion", "none in a normal subject", hint
            )
        patient = bool(said if marked is None else marked)
        if patient and scan.split == "train" and self.rule.normal == "subjects":
            hint = "move the subject out of train, or take tumour-free slices of patients: `normal: slices`"
            raise CaseProblem(name, "abnormal_in_train", "a subject with a lesion", "normal subjects only", hint)
        return patient

    def _passed_over(
        self, scan: Scan, patient: bool, abnormal: bool, z: int, lesion: np.ndarray | None, organ: np.ndarray | None
    ) -> str:
        """Why a slice becomes no image; empty when it does."""
        if organ is not None and not organ[z] >= max(self.rule.min_organ_mm2, 1e-9):
            return "too_little_organ"
        if abnormal and lesion is not None and lesion[z] < self.rule.min_lesion_mm2:
            return "lesion_below_limit"
        if abnormal and scan.split == "train":
            return "lesion_in_train"
        if scan.keep == ("normal" if abnormal else "abnormal"):
            return "abnormal_not_kept" if abnormal else "normal_not_kept"
        if patient and not abnormal and self.rule.normal == "subjects":
            return "normal_slice_of_a_patient"
        return ""

    def _load(self, folder: Path, z: int, sha256: str) -> Pixels:
        from anomed.preprocess import intensity as transforms

        grey = self.grey(folder)
        image = volumes.cut(grey.image, self.rule.plane, z)
        if self.each:
            image = transforms.slice_min_max(image)
        organ, lesion = (None if mask is None else volumes.cut(mask, self.rule.plane, z) for mask in grey[1:])
        return Pixels(transforms.to_uint8(image), lesion, sha256, organ)
