"""Every detector of params.yaml on real images, through Snakemake into the table and the page."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from project import Project, table

from anomed import plugins
from anomed.params import read

RANDOM = {"weights": "random"}
SHORT: dict[str, Any] = {**RANDOM, "epochs": 1, "batch_size": 4}
# What needs no download stays as it is; rows on other networks start from random weights, smaller ones where they may.
ROWS: dict[str, dict[str, Any]] = {
    "cfa": {"backbone": "resnet18", **SHORT},
    "cflow": {"backbone": "resnet18", "coupling_blocks": 2, "image_size": 192, **SHORT},
    "cs_flow": {"cross_conv_hidden_channels": 64, "n_coupling_blocks": 2, **SHORT},
    "draem": SHORT,
    "ganomaly": {**SHORT, "n_features": 16},
    "rd4ad": {"backbone": "resnet18", **SHORT},
    "stfpm": SHORT,
    "fastflow": {"backbone": "resnet18", **SHORT},
    "supersimplenet": {"backbone": "resnet18", **SHORT},
    "dinomaly": {"encoder_name": "vit_small_patch14_dinov2", "image_size": 112, **SHORT, "max_steps": 2},
    "anomalydino": {"image_size": 112, **RANDOM},
    "f_anogan": {"width": 4, "image_size": 32, "epochs": 1, "encoder_epochs": 1, "batch_size": 4},
    "utrad": {"patches": [4, 2], "width": 32, "depth": 1, "epochs": 1, "batch_size": 4},
    "deep_svdd": {"pretrain_epochs": 1, "epochs": 2, "batch_size": 4},
    "cutpaste": {"image_size": 64, "frozen_steps": 1, "max_steps": 2, "batch_size": 4},
    "simplenet": {"epochs": 1, "batch_size": 4},
    "mkd": {"epochs": 1, "batch_size": 4},
    "autoencoder": {"epochs": 1, "batch_size": 4},
    "vae": {"epochs": 1, "batch_size": 4},
    "ddpm": {"image_size": 32, "channels": [8, 16], "timesteps": 25, "start": 2, "epochs": 1, "batch_size": 4},
    "deep_svdd-valid": {"implementation": "deep_svdd", "selection": "valid"},
    "deep_svdd-oracle": {"implementation": "deep_svdd", "selection": "test_oracle"},
}
for name in ("deep_svdd-valid", "deep_svdd-oracle"):
    ROWS[name] |= ROWS["deep_svdd"]
QUICK = ["slice", "gradient", "knn", "supervised", "padim", "stfpm", "deep_svdd", "deep_svdd-valid", "deep_svdd-oracle"]
PAPER = [
    "f_anogan", "ganomaly", "draem", "utrad", "deep_svdd", "cutpaste", "simplenet", "mkd", "rd4ad", "stfpm", "padim",
    "patchcore", "cfa", "cflow", "cs_flow",
]  # fmt: skip


def run(folder: Path, lay_out: Callable[..., Path], sets: dict[str, str], systems: list[str]) -> Project:
    """A project on laid-out real images, its table made. sets: name in the layout by domain."""
    raw = folder / "raw"
    shutil.copytree(lay_out(*sets.values()) / "bmad", raw)
    made = Project(folder / "project")
    blocks = read(ROOT / "params.yaml")["methods"]
    methods = {name: {**(blocks.get(name) or {}), **ROWS.get(name, {})} for name in systems}
    domains = {name: {"source": "bmad", "root": str(raw), "size": 64} for name in sets}
    listed = {"domains": list(sets), "systems": systems, "seeds": [0]}
    made.edit(lambda params: params.update(run=listed, domains=domains, methods=methods))
    made.snakemake(seconds=3600)
    return made


def check(made: Project, systems: list[str]) -> None:
    """Each row stands in the table; what localises has pixel values where there is truth; marks are where they must be."""
    rows = table(made)
    assert list(rows) == systems
    with (made.folder / "results/scores.csv").open(newline="") as file:
        records = list(csv.DictReader(file))
    marks = {record["system"]: record["mark"] for record in records}
    kept = {record["system"]: record["selection"] for record in records}
    params = read(made.folder / "params.yaml")
    for system in systems:
        block = params["methods"][system]
        method = plugins.load("methods", block.get("implementation", system))
        values = {record["metric"] for record in records if record["system"] == system and record["value"]}
        assert "image_auroc" in values
        assert ("pixel_aupro" in values) == method.localises, system
        smoke = block.get("weights") == "random" and system not in ("draem", "ganomaly")
        assert ("smoke: random weights" in marks[system]) == smoke, system
        assert kept[system] == method.selection(
            method.Params(**{k: v for k, v in block.items() if k != "implementation"})
        )
    assert marks["supervised"].startswith("not comparable")
    statistics = json.loads((made.folder / "results/statistics.json").read_text())
    apart = {system for system in systems if marks[system]}
    for domain in statistics["domains"].values():
        assert not apart & domain["metrics"]["image_auroc"]["ranks"].keys()
    page = (made.folder / "results/report.html").read_text()
    assert all(f">{system}" in page for system in systems)


def test_rows_of_every_kind_reach_the_table(tmp_path: Path, lay_out: Callable[..., Path]) -> None:
    made = run(tmp_path, lay_out, {"liver_ct": "liver"}, QUICK)
    check(made, QUICK)
    text = (made.folder / "results/table.md").read_text()
    for row in ("| deep_svdd | last |", "| deep_svdd-valid | best on valid |", "| deep_svdd-oracle † | best on test |"):
        assert row in text
    history = {name: made.folder / f"models/liver_ct/{name}/0/history.csv" for name in QUICK}
    assert [name for name in QUICK if history[name].exists()] == ["deep_svdd", "deep_svdd-valid", "deep_svdd-oracle"]
    assert "selection_auroc" in history["deep_svdd-valid"].read_text()
    assert "selection_auroc" not in history["deep_svdd"].read_text()
    assert not list((made.folder / "work/fit").glob("**/*.pt"))
    assert not {path.name for path in made.folder.iterdir()} & {
        "lightning_logs",
        "datasets",
        "checkpoints",
        "pre_trained",
    }
    again = made.snakemake("-n")
    assert "Nothing to be done" in again


@pytest.mark.full
def test_every_row_of_the_shipped_blocks_reaches_the_table(tmp_path: Path, lay_out: Callable[..., Path]) -> None:
    shipped = read(ROOT / "params.yaml")["methods"]
    systems = [name for name in shipped if name != "view"]  # these films have none
    assert set(PAPER) <= set(systems)
    check(run(tmp_path, lay_out, {"brain_mri": "brain", "liver_ct": "liver"}, systems), systems)


def test_the_paper_is_planned_and_stops_before_its_first_job(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    shutil.copy(ROOT / "params.yaml", project.folder)
    shutil.copytree(ROOT / "params", project.folder / "params")
    paper = ("--configfile", "params/paper.yaml")
    text = project.snakemake("-n", *paper, fails=True)
    assert "domains.brain_mri.root: data/raw/bmad not found" in text
    assert "`anomed fetch brain_mri`" in text
    (project.folder / "data/raw/bmad").mkdir(parents=True)
    planned = project.snakemake("-n", "--quiet", "rules", *paper)
    assert read(ROOT / "params/paper.yaml")["run"]["systems"] == PAPER
    counts = {line.split()[0]: line.split()[1] for line in planned.splitlines() if len(line.split()) == 2}
    assert {counts[rule] for rule in ("fit", "predict", "score")} == {str(15 * 6 * 5)}
    assert "`anomed fetch weights`" in planned
    stopped = project.snakemake(*paper, fails=True)
    assert "Nothing was started: the warnings above say what is missing." in stopped
    assert not list(project.folder.glob("logs/**/*.log"))
