"""A hospital's folder through the shipped chain: shards, a kill, what a change repeats, what a broken volume stops."""

import csv
import json
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import shipped
from project import BINARIES, Project, jobs

from anomed import volumes
from anomed.manifest import Prepared
from anomed.phantoms import brain
from anomed.plan import Plan

HEADS = {"sub-01": "train", "sub-03": "train", "sub-02": "test", "sub-04": "test"}
VOLUMES = "data/prepared/_spatial/hospital"
CARD = "data/prepared/hospital/card.json"


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four of the embedded heads as a hospital has them: files and a table."""
    folder = tmp_path_factory.mktemp("hospital")
    cohort = {member.subject: member for member in brain.cohort(brain.SUBJECTS)}
    rows = []
    for subject, split in HEADS.items():
        kind = cohort[subject].kind
        made, affine = brain.make(0, cohort[subject])
        for name, data in made.items():
            if name != "brain" and (name, kind) != ("lesion", "normal"):
                volumes.write(folder / f"{subject}_{name}.nii.gz", data, affine)
        rows.append({"subject": subject, "split": split, "label": "normal" if kind == "normal" else "abnormal"})
    pd.DataFrame(rows).to_csv(folder / "subjects.csv", index=False)
    return folder


@pytest.fixture(scope="module")
def prepared(hospital: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project that was killed in the middle of the volumes, and run again."""
    project = Project(tmp_path_factory.mktemp("project"))
    block = {"source": "volumes", "root": str(hospital), "image": "{subject}_flair.nii.gz", "size": 64}
    block |= {"lesion": "{subject}_lesion.nii.gz", "subjects": "subjects.csv", "preprocess": "head", "shards": 2}
    project.edit(lambda params: params.update(domains={"hospital": block}, preprocess=shipped.params()["preprocess"]))
    project.edit(lambda params: params["run"].update(domains=["hospital"], systems=["constant"]))
    project.kill(project.start("snakemake", "--cores", "2", CARD), lambda: len(dates(project)) > 1)
    finished = dates(project)
    assert 1 < len(finished) < len(HEADS)
    project.snakemake(CARD)
    assert finished.items() <= dates(project).items(), "a finished volume was made again"
    return project


def dates(project: Project) -> dict[str, int]:
    """When each finished volume was made; what a killed job had not renamed yet begins with a dot."""
    cards = (project.folder / VOLUMES).glob("[!.]*/volume.json")
    return {path.parent.name: path.stat().st_mtime_ns for path in cards}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of the volumes."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.glob("*/*"))}


def test_the_domain_holds_every_head_and_its_page_shows_them(prepared: Project) -> None:
    data = Prepared(prepared.folder / "data/prepared/hospital")
    assert dict(data.table.groupby("subject_id").split.first()) == HEADS
    assert set(data.table.subject_id[data.table.label == 1]) == {"sub-04"}
    assert data.card["foreground"]
    for row in data.evaluated().itertuples():
        brain = data.foreground(row.mask_row)
        assert brain is not None
        assert brain.mean() > 0.2
        assert not data.native(row.image_id)[~brain].any(), "black outside the brain"
        assert not row.label or (data.mask(row.mask_row) & brain).sum() >= 0.9 * data.mask(row.mask_row).sum()
    page = prepared.folder / "data/prepared/hospital/qc.html"
    for subject in HEADS:
        assert f"../_spatial/hospital/{subject}/qc.png" in page.read_text()
        facts = json.loads((prepared.folder / VOLUMES / subject / "volume.json").read_text())["facts"]
        assert facts["template_dice"] > 0.9


def test_made_again_in_other_shards_every_file_has_the_same_bytes(prepared: Project) -> None:
    import yaml

    plan = Plan(yaml.safe_load((prepared.folder / "params.yaml").read_text()))
    again = prepared.folder / "again"
    arguments = ["--params", plan.spatial_params("hospital"), "--files", plan.chain_paths("hospital")]
    arguments += ["--root", plan.root("hospital"), "--out", str(again), "--problems", "p.csv"]
    command = [str(BINARIES / "python"), "-m", "anomed.cli", "prepare", "spatial", "hospital", "0-of-1", *arguments]
    subprocess.run(command, cwd=prepared.folder, env={"PYTHONPATH": "src", "PATH": "/usr/bin:/bin"}, check=True)
    assert len(contents(again)) > 6 * len(HEADS)
    assert contents(again) == contents(prepared.folder / VOLUMES)


def test_a_window_moves_no_voxel_and_a_number_of_shards_repeats_nothing(prepared: Project) -> None:
    before, card = dates(prepared), (prepared.folder / CARD).read_bytes()
    prepared.edit(lambda params: params["domains"]["hospital"].update(shards=1))
    assert jobs(prepared.snakemake(CARD)) == {"spatial/hospital/0-of-1", "intensity/hospital"}
    assert (prepared.folder / CARD).read_bytes() == card
    prepared.edit(lambda params: params["preprocess"]["head"].update(intensity=["nyul"]))
    assert jobs(prepared.snakemake(CARD)) == {"intensity/hospital"}
    assert len(json.loads((prepared.folder / CARD).read_text())["fitted"]["nyul"]["levels"]) == 11
    assert dates(prepared) == before


def test_a_broken_volume_is_named_and_the_others_stay(prepared: Project, hospital: Path) -> None:
    before = dates(prepared)
    path = hospital / "sub-03_flair.nii.gz"
    sound = path.read_bytes()
    path.write_bytes(sound[: len(sound) // 2])
    output = prepared.snakemake(CARD, fails=True)
    assert "sub-03: sub-03_flair.nii.gz: unreadable_volume" in output
    assert "Traceback" not in output
    (listing,) = (prepared.folder / "logs/spatial/hospital").glob("*.problems.csv")
    with listing.open(newline="") as file:
        assert [row["code"] for row in csv.DictReader(file)] == ["unreadable_volume"]
    assert "unreadable_volume" in listing.with_suffix("").with_suffix(".problems.html").read_text()
    assert dates(prepared) == {subject: date for subject, date in before.items() if subject != "sub-03"}
    assert not list(prepared.folder.glob("data/**/*.partial"))
    prepared.edit(lambda params: params["domains"]["hospital"].update(exclude={"sub-03": "cut off"}))
    prepared.snakemake(CARD)
    path.write_bytes(sound)
    assert "sub-03" not in set(Prepared(prepared.folder / "data/prepared/hospital").table.subject_id)
