"""The doctor command: what is installed, which device is used, which data and weights are present or missing."""

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anomed import manifest, params, records, weights
from anomed.errors import AnomedError
from anomed.plan import PREPARED, Plan

PACKAGES = (
    "anomed",
    "snakemake",
    "dvc",
    "torch",
    "torchvision",
    "timm",
    "monai",
    "SimpleITK",
    "deepbet",
    "nibabel",
    "nilearn",
    "numpy",
    "pandas",
    "scipy",
)


def doctor(*config: Path) -> int:
    """Print the state of the installation and of everything that `config`, a params file with overlays, asks for;
    returns the number of faults."""
    console = Console(soft_wrap=True)
    faults = 0

    def section(title: str, rows: list[tuple[str, str, str]]) -> None:
        nonlocal faults
        table = Table("", title, "", box=None, title_justify="left", pad_edge=False)
        for state, name, detail in rows:
            faults += state == "missing"
            mark = {"ok": "[green]ok[/]", "missing": "[red]missing[/]", "note": "[yellow]note[/]"}[state]
            table.add_row(mark, escape(name), escape(detail))
        for column in table.columns:
            column.overflow = "fold"  # a path must be whole
        console.print(table)
        console.print()

    section("installation", _installation())
    section("device", [_device()])
    try:
        plan = Plan(params.combined(config))
    except AnomedError as error:
        section(" + ".join(map(str, config)), [("missing", "parameters", line) for line in str(error).splitlines()])
        return faults
    section("data", [_domain(plan, name) for name in plan.domains])
    section("weights", _weights(plan) or [("ok", "none", "nothing listed needs any")])
    if rows := [_imported(plan, name) for name in plan.systems if name in plan.params.imported]:
        section("imported", rows)
    return faults


def _installation() -> list[tuple[str, str, str]]:
    rows = [("ok", "python", platform.python_version())]
    for name in PACKAGES:
        try:
            rows.append(("ok", name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            rows.append(("missing", name, "run `make setup`"))
    free = shutil.disk_usage(".").free / 1e9
    rows.append(("ok" if free > 5 else "note", "disk", f"{free:.0f} GB free in this folder"))
    return rows


def _device() -> tuple[str, str, str]:
    try:
        import torch
    except ImportError:
        return "missing", "torch", "run `make setup`"
    if torch.cuda.is_available():
        return "ok", "cuda", torch.cuda.get_device_name(0)
    return "ok", "cpu", f"{os.cpu_count()} cores; torch sees no CUDA device"


def _domain(plan: Plan, name: str) -> tuple[str, str, str]:
    block = plan.params.domains[name]
    card = PREPARED / name / "card.json"
    prepared = "not prepared yet"
    if card.exists():
        try:
            facts = records.read_card(card, "counts", "parameters")
        except AnomedError as error:
            return "missing", name, str(error)
        counts = (f"{s} {facts['counts'][s]['normal']} + {facts['counts'][s]['abnormal']}" for s in manifest.SPLITS)
        prepared = f"prepared (normal + abnormal): {', '.join(counts)}"
        if records.canonical(facts["parameters"]) != _wanted(plan, name):
            prepared = "what is prepared is of other data or parameters and will be made again"
    if block.root is None:
        return "ok", name, f"{block.source}: made on this machine; {prepared}"
    if plan.is_empty(name):
        return "missing", name, f"{block.root} is an empty folder: {plan.obtain(name)}"
    if os.path.exists(plan.root(name)):  # noqa: PTH110
        return "ok", name, f"{block.source} at {block.root}; {prepared}"
    if card.exists():
        return "note", name, f"{block.root} does not exist; {prepared}, so it is not needed"
    return "missing", name, f"{block.root} does not exist: {plan.obtain(name)}"


def _wanted(plan: Plan, name: str) -> str:
    try:
        return plan.prepare_params(name)
    except AnomedError as error:
        return str(error)


def _imported(plan: Plan, system: str) -> tuple[str, str, str]:
    """Of which domains and seeds predictions of a system were brought."""
    try:
        seeds = {domain: plan.seeds(domain, system) for domain in plan.domains}
    except AnomedError as error:
        return "missing", system, str(error)
    parts = (f"{name}: seed {', '.join(map(str, found)) or 'none'}" for name, found in seeds.items())
    hint = "" if any(seeds.values()) else "; bring some with `anomed import`"
    return "missing" if hint else "ok", system, "; ".join(parts) + hint


def _weights(plan: Plan) -> list[tuple[str, str, str]]:
    rows = []
    for domain in plan.volumetric:
        try:
            files = plan.chain_files(domain)
        except AnomedError as error:
            rows.append(("missing", domain, str(error)))
            continue
        rows += [("ok", f"{domain}: {name}", f"sha256 {records.digest_file(files[name])[:16]}") for name in files]
    for system in plan.systems:
        try:
            files = plan.weights(system)
        except AnomedError as error:
            rows.append(("missing", system, str(error)))
            continue
        for name, path in files.items():
            state, detail = _weight(name, path)
            rows.append((state, f"{system}: {name}", detail))
    return rows


def _weight(name: str, path: Path) -> tuple[str, str]:
    """State and detail of one file of weights."""
    item = weights.find(name)
    try:
        if item:
            item.check(path)
    except AnomedError as error:
        return "missing", str(error)
    if not path.exists():
        return "missing", f"{path} not found; put the file there"
    return "ok", f"sha256 {records.digest_file(path)[:16]}"
