"""Several domains in one table: models of another domain, few train subjects, predictions brought from outside."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT
from project import Project, jobs, table

from anomed import detect, records
from anomed.manifest import Prepared

DOMAINS = ("brain_mri", "nova", "retina_oct2017")
SEVEN = {"brain_mri", "liver_ct", "retina_resc", "retina_oct2017", "chest_xray", "histopathology", "nova"}
ORIGIN = "the benchmark's own patchcore, taken out and brought back"


def widen(params: dict) -> None:
    """Two domains beside the one of volumes with masks: an evaluation-only set with boxes, images without pixel truth."""
    params["run"] = {"domains": list(DOMAINS), "systems": ["intensity", "patchcore"], "seeds": [0, 1]}
    params["domains"] |= {
        "nova": {"source": "embedded", "subjects": 10, "size": 96, "train_domain": "brain_mri"},
        "retina_oct2017": {"source": "embedded", "subjects": 14, "size": 96, "train_limit": 3},
    }


@pytest.fixture(scope="module")
def made(built: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = built.copy(tmp_path_factory.mktemp("domains") / "project")
    project.edit(widen)
    done = jobs(project.snakemake())
    assert not [job for job in done if "/brain_mri" in job], "a further domain repeats nothing of the first"
    return project


def rows(project: Project) -> list[dict[str, str]]:
    with (project.folder / "results/scores.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_cell_is_a_number_or_has_its_reason(made: Project) -> None:
    found = rows(made)
    assert {row["domain"] for row in found} == set(DOMAINS)
    for row in found:
        assert bool(row["value"]) != bool(row["reason"]), row
    columns = {name for name in table(made)["patchcore"] if name.endswith(".image_auroc")}
    assert columns == {f"{domain}.image_auroc" for domain in DOMAINS}
    assert 0 < float(table(made)["patchcore"]["retina_oct2017.image_auroc"]) <= 1
    nova = {(row["metric"], row["reason"]) for row in found if row["domain"] == "nova"}
    assert ("pixel_auroc", "the domain has no pixel truth") in nova
    (reason,) = {reason for metric, reason in nova if metric == "image_auroc"}
    assert reason.startswith("one class only: no normal image among")
    text = (made.folder / "results/table.md").read_text()
    assert "Models: those of brain_mri." in text
    assert "Models: fitted on 3 train subjects, drawn anew by each seed." in text


def test_nova_is_scored_by_the_models_of_brain_mri(made: Project) -> None:
    assert not (made.folder / "models/nova").exists()
    model = records.read_card(made.folder / "models/brain_mri/patchcore/1/run.json")
    run = records.read_card(made.folder / "runs/nova/patchcore/1/run.json")
    assert run["model"] == model["files"]["state.safetensors"]
    prepared = Prepared(made.folder / "data/prepared/nova")
    assert len(np.load(made.folder / "runs/nova/patchcore/1/maps.npy", mmap_mode="r")) == len(prepared.table)
    assert set(prepared.clinical) == set(prepared.table.image_id)


def test_a_limit_of_train_subjects_draws_others_with_every_seed(made: Project) -> None:
    prepared = Prepared(made.folder / "data/prepared/retina_oct2017")
    for seed in (0, 1):
        card = records.read_card(made.folder / f"models/retina_oct2017/patchcore/{seed}/run.json")
        assert 3 <= card["train_images"] < (prepared.table.split == "train").sum()
    states = [(made.folder / f"models/retina_oct2017/patchcore/{seed}/state.safetensors") for seed in (0, 1)]
    assert states[0].read_bytes() != states[1].read_bytes()
    assert (made.folder / "scores/retina_oct2017/intensity/1.json").exists()
    assert not (made.folder / "scores/brain_mri/intensity/1.json").exists()


def take_out(project: Project, domain: str, seed: int, to: Path) -> None:
    """The raw scores and maps of patchcore, as another program would leave them."""
    from safetensors.numpy import load_file

    prepared = Prepared(project.folder / "data/prepared" / domain)
    model = project.folder / "models" / domain / "patchcore" / str(seed)
    detector = detect.create(records.read_card(model / "run.json")["parameters"], seed, "cpu")
    detector.restore(load_file(model / detect.STATE))
    table = prepared.evaluated()
    lines, place = ["image_id,score"], 0
    for scores, maps in detector.score(prepared.images[table.row.iloc[0] :]):
        assert maps is not None
        for score, one in zip(scores, maps, strict=True):
            name = table.image_id[place]
            lines.append(f"{name},{float(score)!r}")
            path = to / "maps" / f"{name}.npy"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, one)
            place += 1
    (to / "scores.csv").write_text("\n".join(lines) + "\n")


def test_own_predictions_brought_back_give_the_same_row(made: Project, tmp_path: Path) -> None:
    project = made.copy(tmp_path / "copy")
    for seed in (0, 1):
        take_out(project, "brain_mri", seed, tmp_path / str(seed))
        given = ("--scores", str(tmp_path / f"{seed}/scores.csv"), "--maps", str(tmp_path / f"{seed}/maps"))
        command = ("anomed", "import", "theirs", "--domain", "brain_mri", "--seed", str(seed), "--origin", ORIGIN)
        said = project.run(*command, *given)
        assert "run.systems" in said
    project.edit(lambda p: (p.update(imported={"theirs": None}), p["run"]["systems"].append("theirs")))
    output = project.snakemake()
    assert jobs(output) == {
        "adopt/brain_mri/theirs/0", "adopt/brain_mri/theirs/1", "score/brain_mri/theirs/0", "score/brain_mri/theirs/1",
        "table", "report", "all",
    }  # fmt: skip
    found = table(project)
    for column, value in found["theirs"].items():
        if column.startswith("brain_mri."):
            assert value == found["patchcore"][column], column
            assert value or column.endswith((".low", ".high")), column  # so few subjects have no intervals
        elif column != "system":
            assert value == "", column
    mine = {row["metric"]: row for row in rows(project) if row["system"] == "theirs" and row["domain"] == "nova"}
    assert {row["reason"] for row in mine.values()} == {"not imported"}
    text = (project.folder / "results/table.md").read_text()
    assert "| theirs † | 2 |" in text
    assert f"† theirs: imported, not run here: {ORIGIN}." in text
    statistics = json.loads((project.folder / "results/statistics.json").read_text())
    pairs = statistics["domains"]["brain_mri"]["metrics"]["pixel_auroc"]["pairs"]
    assert next(p["difference"] for p in pairs if {p["first"], p["second"]} == {"theirs", "patchcore"}) == 0

    shutil.rmtree(project.folder / "data/imported")  # a clone with pulled results
    assert "Nothing to be done" in project.snakemake("-n")


@pytest.mark.full
def test_the_shipped_parameters_fill_seven_domains(tmp_path: Path) -> None:
    project = Project(tmp_path / "shipped")
    shutil.copy(ROOT / "params.yaml", project.folder)
    process = project.start("snakemake", "--cores", "2")
    output, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, output[-4000:]
    found = rows(project)
    assert {row["domain"] for row in found} == SEVEN
    assert all(bool(row["value"]) != bool(row["reason"]) for row in found)
    for domain in SEVEN - {"nova"}:
        assert float(table(project)["patchcore"][f"{domain}.image_auroc"]) > 0.6, domain
        assert 0.2 < float(table(project)["intensity"][f"{domain}.image_auroc"]) < 0.8, domain
