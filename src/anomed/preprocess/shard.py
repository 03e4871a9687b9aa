"""The spatial command: one shard of a domain's volumes through the chain's spatial steps, one folder a volume."""

import contextlib
import importlib.metadata
import re
import shutil
from pathlib import Path
from typing import Any

from anomed import console, grids, plugins, problems, records, sources, volumes
from anomed.domains.source import Files, Scan, Source
from anomed.errors import AnomedError, CaseProblem
from anomed.preprocess import qc, spatial_steps, steps
from anomed.preprocess.steps import Entry, Step
from anomed.settings import Settings, check

CARD = "volume.json"
OURS = r"(image|lesion|organ|organ_native)\.nii\.gz|transform\.tfm|qc\.png|volume\.json"
PACKAGES = ("monai", "SimpleITK", "deepbet", "nibabel", "numpy", "scipy", "torch")


class Block(Settings):
    """The keys of `--params` beside the source's options."""

    source: str
    spatial: list[Entry]
    files: dict[str, str]


def source_of(domain: str, parameters: dict[str, Any], root: Path | None, work: Path) -> Source:
    """The source of a volumetric domain; parameters: its block, other keys than those of the source left aside."""
    cls = plugins.load("domains", parameters["source"])
    options = {key: value for key, value in parameters.items() if key in cls.Options.model_fields}
    source: Source = cls(domain, check(cls.Options, options, "--params"), root, work)
    return source


def spatial(
    domain: str, parameters: dict[str, Any], files: dict[str, Path], root: Path | None, work: Path, out: Path,
    shard: tuple[int, int], listing: Path,
) -> None:  # fmt: skip
    """Process every n-th scan from the i-th, shard = (i, n), into `out/<subject>/`; then write `out/<i>-of-<n>.json`.

    parameters: source, its options, `spatial` and `files` (hashes), see plan.py. files: the chain's files by name.
    listing: where faulty cases are listed; the others are finished first, then AnomedError. A volume that is done stays
    as long as its inputs, the steps, their files and code are the same, so that a killed job goes on where it stopped
    and another number of shards does nothing twice.
    """
    block = check(Block, {key: parameters[key] for key in Block.model_fields if key in parameters}, "--params")
    chain = steps.parse(block.spatial, spatial_steps.STEPS, "spatial")
    spatial_steps.check_order(chain, "spatial")
    _check_files(block.files, files, chain)
    index, number = shard
    source = source_of(domain, parameters, root, work)
    scans = sorted(source.scans(), key=lambda scan: scan.subject_id)
    if not scans and not source.problems:
        raise AnomedError(f"{root}: source {parameters['source']!r} found no volume there for domain {domain!r}")
    found = list(source.problems) if index == 0 else []
    state: dict[str, Any] = {"chain": identity(chain, block.files)}
    state["code"] = {
        name: records.digest_file(sources.PROJECT / name) for name in sources.modules("anomed.preprocess.shard")
    }
    state["versions"] = {name: importlib.metadata.version(name) for name in PACKAGES}
    out.mkdir(parents=True, exist_ok=True)
    if index == 0 and not found:
        _forget(out, {scan.subject_id for scan in scans})
    rows, cards = [], {}
    for scan in console.track(scans[index::number], f"spatial {domain} {index + 1}/{number}"):
        folder = out / scan.subject_id
        try:
            card = _volume(scan, chain, files, state, folder)
        except CaseProblem as problem:
            if (folder / CARD).exists():
                shutil.rmtree(folder)
            found.append(problem)
            print(problem, flush=True)
            continue
        print(f"{scan.subject_id}: done", flush=True)
        cards[scan.subject_id] = records.digest(card)
        rows.append(row(scan, folder, card))
    page = listing.with_suffix(".html")
    page.unlink(missing_ok=True)
    if found:
        qc.page(f"{domain}, shard {index}-of-{number}", rows, [problem.row for problem in found], page, {})
    problems.judge(found, {}, listing)
    for old in out.iterdir():
        if re.fullmatch(rf"\d+-of-(?!{number}\.)\d+\.json", old.name):
            old.unlink(missing_ok=True)
    records.write_json(out / f"{index}-of-{number}.json", cards)


def identity(chain: list[Step], files: dict[str, str]) -> str:
    """Hash of the steps and of the contents of their files, whatever their paths."""
    return records.digest([steps.dump(spatial_steps.anonymous(chain)), files])


def _check_files(hashes: dict[str, str], files: dict[str, Path], chain: list[Step]) -> None:
    """Raise AnomedError unless `files` are those that the chain needs, with the contents that the parameters state."""
    for name in spatial_steps.needed(chain):
        if name not in files or name not in hashes:
            raise AnomedError(f"{'--params: files' if name in files else '--files'}: {name!r} is missing")
        if not files[name].is_file() or records.digest_file(files[name]) != hashes[name]:
            raise AnomedError(f"{files[name]}: not the file whose hash the parameters state; run Snakemake again")


def row(scan: Scan, folder: Path, card: dict[str, Any]) -> dict[str, Any]:
    """A finished volume as quality control lists it."""
    kind = {True: "abnormal", False: "normal", None: "by its voxels"}[scan.abnormal]
    return {
        "subject": scan.subject_id,
        "split": scan.split,
        "kind": kind,
        "picture": folder / "qc.png",
        "facts": card["facts"],
    }


def _forget(out: Path, subjects: set[str]) -> None:
    """Remove the volumes of subjects that the source no longer has."""
    for folder in out.iterdir():
        if folder.name not in subjects and not folder.name.startswith(".") and (folder / CARD).exists():
            shutil.rmtree(folder)


def _volume(
    scan: Scan, chain: list[Step], files: dict[str, Path], state: dict[str, Any], folder: Path
) -> dict[str, Any]:
    """The card of a finished volume, after making it unless it is there."""
    raw = scan.fetch()
    key = records.digest([state, {name: _identity(path) for name, path in vars(raw).items() if path}])
    if (folder / CARD).exists():
        with contextlib.suppress(AnomedError):  # damaged or of another state: made again
            return _read(folder, key)
    elif folder.exists():
        found, hint = f"{folder} without {CARD}, so not ours to replace", "remove it, or name another folder"
        raise CaseProblem(scan.subject_id, "foreign_folder", found, "no such folder, or one of ours", hint)
    with records.atomic_dir(folder, OURS) as partial:
        facts, inputs = process(scan.subject_id, raw, chain, files, partial)
        card = {"subject": scan.subject_id, "key": key, "chain": state["chain"], "facts": facts, "inputs": inputs}
        card["files"] = {path.name: records.digest_file(path) for path in sorted(partial.iterdir())}
        card["versions"] = state["versions"]
        records.write_card(partial / CARD, card)
    return card


def _read(folder: Path, key: str) -> dict[str, Any]:
    card = records.read_card(folder / CARD, "key", "files", "facts")
    if card["key"] != key:
        raise AnomedError(f"{folder}: of another state")
    for name in card["files"]:
        records.verified(folder / name, card)
    return card


def _identity(path: Path) -> Any:
    """Hash of a file, or of the files of a folder by name; of a header without voxels, those of its folder."""
    if path.suffix.lower() in (".nhdr", ".mhd"):
        path = path.parent
    if path.is_dir():
        return [[part.name, records.digest_file(part)] for part in sorted(path.iterdir()) if part.is_file()]
    return records.digest_file(path) if path.exists() else ""


def process(
    subject: str, raw: Files, chain: list[Step], files: dict[str, Path], out: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """One scan through the chain into the empty folder `out`: image (float32), lesion and organ (uint8) as .nii.gz, the
    organ on the scan's own grid with its header, the transform (ITK, template mm to scan mm) and a picture.

    Returns what the steps measured, and the hashes of the scan's files. Raises CaseProblem.
    """
    from anomed.preprocess import spatial

    data = steps.run(spatial.compose(chain, files), {"subject": subject, "files": raw, "scratch": out})
    facts = {name: round(value, 6) for name, value in data["facts"].items()}
    after, lesion = spatial.array(data["image"]), spatial.array(data["lesion"]) > 0 if "lesion" in data else None
    if min(after.shape) < grids.MIN_VOXELS:
        found, hint = f"{after.shape} voxels after resampling", "choose a finer spacing"
        raise CaseProblem(subject, "too_thin", found, f"at least {grids.MIN_VOXELS} along every axis", hint)
    if after.min() == after.max():
        hint = "look at the image and the mask of its organ"
        raise CaseProblem(subject, "constant_organ", f"{after.flat[0]:g} in every voxel", "an image", hint)
    if lesion is not None and facts["lesion_ml"] and not lesion.any():
        hint = "choose a finer spacing"
        raise CaseProblem(
            subject, "lesion_lost", "no marked voxel after resampling", "some of the lesion's voxels", hint
        )
    if lesion is not None and "organ" in data and lesion.any():
        outside = float(100 * (lesion & (spatial.array(data["organ"]) == 0)).sum() / lesion.sum())
        facts["lesion_outside_percent"] = round(outside, 3)
        if outside == 100:
            hint = "look at the picture of the masks; correct one of them, or exclude the subject"
            raise CaseProblem(subject, "lesion_outside", "no voxel of the lesion in the organ", "some of them", hint)
    affine, native = spatial.affine_of(data["image"]), data["native"]
    volumes.write(out / "image.nii.gz", after, affine)
    spatial.save(data, out.joinpath)
    edges = [grids.edges(each).tolist() for each in (native.volume.affine, affine)]
    shown = native.volume.data, native.organ, edges[0], after, data.get("outline"), edges[1], lesion
    (out / "qc.png").write_bytes(qc.picture(*shown))
    return facts, data["inputs"]
