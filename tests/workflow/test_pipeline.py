"""Snakemake and DVC for real: what runs, what re-runs, what survives a kill, what is refused."""

import csv
import json
import re
import shutil
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT
from PIL import Image
from project import Project, jobs, table

from anomed import cli
from anomed.plan import Plan

PATCHCORE = {f"{rule}/brain_mri/patchcore/{seed}" for rule in ("fit", "predict", "score") for seed in (0, 1)}
INTENSITY = {f"{rule}/brain_mri/intensity/0" for rule in ("fit", "predict", "score")}
END = {"table", "report", "all"}


@pytest.fixture
def copy(built: Project, tmp_path: Path) -> Iterator[Project]:
    """The built project, to be changed."""
    project = built.copy(tmp_path / "copy")
    yield project
    shutil.rmtree(project.folder)


def test_the_table_has_every_row_and_the_page_stands(built: Project) -> None:
    rows = table(built)
    assert list(rows) == ["random", "constant", "intensity", "patchcore"]
    assert float(rows["constant"]["brain_mri.image_auroc"]) == 0.5
    assert float(rows["constant"]["brain_mri.pixel_auroc"]) == 0.5
    assert float(rows["constant"]["brain_mri.pixel_aupro"]) == 0.15
    assert rows["constant"]["brain_mri.image_auroc.std"] == ""
    assert float(rows["random"]["brain_mri.image_auroc.std"]) > 0
    assert "reproduces no published number" in (built.folder / "results/table.md").read_text()
    assert (built.folder / "results/report.html").stat().st_size > 10_000
    assert not list(built.folder.glob("**/*.partial"))


def test_a_second_call_has_nothing_to_do_though_every_file_was_touched(copy: Project) -> None:
    for path in [copy.folder / "params.yaml", *copy.folder.glob("src/**/*.py"), *copy.folder.glob("data/prepared/*/*")]:
        path.touch()
    assert "Nothing to be done" in copy.snakemake()


def test_an_edit_of_a_method_re_runs_that_method_alone(copy: Project) -> None:
    path = copy.folder / "src/anomed/methods/intensity.py"
    path.write_text(path.read_text() + "\nEDITED = True\n")
    assert jobs(copy.snakemake("-n")) == INTENSITY | END


def git(project: Project, *command: str) -> None:
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *command], cwd=project.folder, check=True)


def thin_out(params: dict[str, Any], ratio: float = 0.03) -> None:
    """One parameter of one method."""
    params["methods"]["patchcore"]["coreset_ratio"] = ratio


@pytest.fixture(scope="module")
def recorded(built: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The built project under git and DVC, taken through an edit of one parameter and one of a method."""
    project = built.copy(tmp_path_factory.mktemp("recorded") / "project")
    git(project, "init", "-q")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "start")
    assert not jobs(project.run("dvc", "repro"))
    project.edit(thin_out)
    assert jobs(project.snakemake("-n")) == PATCHCORE | END
    path = project.folder / "src/anomed/methods/intensity.py"
    path.write_text(path.read_text() + "\nEDITED = True\n")
    assert jobs(project.run("dvc", "repro")) == PATCHCORE | INTENSITY | END
    return project


def test_edits_move_the_rows_they_concern_and_dvc_records_them(built: Project, recorded: Project) -> None:
    before, after = table(built), table(recorded)
    assert after.pop("patchcore") != before.pop("patchcore")
    assert after == before
    assert "up to date" in recorded.run("dvc", "status")
    assert "?? dvc.lock" in subprocess.check_output(["git", "status", "--porcelain"], cwd=recorded.folder, text=True)


def test_a_clone_that_pulls_has_nothing_to_do_and_re_runs_what_an_edit_affects(
    recorded: Project, tmp_path: Path
) -> None:
    remote = ("dvc", "remote", "add", "--local", "-d", "store", str(tmp_path / "store"))
    recorded.run(*remote)
    recorded.run("dvc", "push")
    git(recorded, "add", "-A")
    git(recorded, "commit", "-qm", "recorded")
    git(recorded, "clone", "-q", ".", str(tmp_path / "clone"))
    clone = Project.at(tmp_path / "clone")
    clone.run(*remote)
    clone.run("dvc", "pull")
    for path in clone.folder.glob("models/*/*/*/*"):
        path.touch()  # a pull gives files any order of dates
    assert clone.stable() == recorded.stable()
    assert "Nothing to be done" in clone.snakemake("-n")
    assert "up to date" in clone.run("dvc", "status")
    clone.edit(lambda params: thin_out(params, ratio=0.05))
    assert jobs(clone.snakemake("-n")) == PATCHCORE | END


def test_jobs_import_exactly_the_files_they_depend_on(built: Project) -> None:
    import yaml

    plan = Plan(yaml.safe_load((built.folder / "params.yaml").read_text()))
    for system in plan.systems:
        for command, folder in (("fit", "models"), ("predict", "runs")):
            card = json.loads((built.folder / folder / "brain_mri" / system / "0" / "run.json").read_text())
            assert [f"src/{name}" for name in card["code"]["files"]] == plan.code(command, system=system)
            light = {"torch", "timm", "monai"} - card["versions"].keys()
            assert light == ({"monai"} if system == "patchcore" else {"torch", "timm", "monai"})
    steps: dict[str, Any] = {"prepare spatial": plan.code("spatial", domain="brain_mri")}
    steps |= {"prepare intensity": plan.code("intensity", domain="brain_mri")}
    steps |= {command: plan.code(command) for command in ("score", "table", "report")}
    for command, expected in steps.items():
        found = [noted for noted in built.noted() if f"{' '.join(noted['arguments'])} ".startswith(f"{command} ")]
        assert found, command
        for noted in found:
            assert noted["files"] == expected, command
            assert noted["heavy"] == (["monai", "torch"] if command.startswith("prepare") else []), command


def test_a_second_snakemake_is_refused_and_a_killed_one_resumes_to_the_same_bytes(
    built: Project, copy: Project
) -> None:
    for name in ("models", "runs", "scores", "results", "logs"):
        shutil.rmtree(copy.folder / name)
    first = copy.start("snakemake", "--cores", "1")  # the built one had two
    while not list(copy.folder.glob("logs/fit/*/*/*.log")):
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.05)
    output = copy.snakemake(fails=True)
    assert "Another Snakemake is running in this folder" in output
    assert "Traceback" not in output
    assert {"table", "all"} <= jobs(copy.snakemake("-n")), "a dry run takes no lock"
    copy.kill(first, lambda: len(list(copy.folder.glob("scores/*/*/*.json"))) >= 2)
    assert not (copy.folder / "results/table.csv").exists()
    output = copy.snakemake()
    assert len(jobs(output)) < 19, "of 21 jobs; what was finished stays"
    assert copy.stable() == built.stable()
    assert len(copy.stable()) > 10


def test_results_without_provenance_are_refused(copy: Project) -> None:
    shutil.rmtree(copy.folder / ".snakemake/metadata")
    output = copy.snakemake("-n", fails=True)
    assert "data/prepared, models, runs, scores, results exist, but .snakemake/metadata does not" in output
    assert "dvc checkout" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: p["methods"]["patchcore"].update(coreset_ration=1),
            "methods.patchcore.coreset_ration: unknown key; did you mean 'coreset_ratio'?",
        ),
        (
            lambda p: p["domains"].update(brain_mri={"source": "bmad", "root": "nowhere/bmad"}),
            "domains.brain_mri.root: nowhere/bmad not found",
        ),
    ],
)
def test_bad_parameters_stop_snakemake_with_one_sentence(
    tmp_path: Path, change: Callable[[dict], object], message: str
) -> None:
    project = Project(tmp_path)
    project.edit(change)
    output = project.snakemake(fails=True)
    assert message in output
    assert "Traceback" not in output
    assert not (tmp_path / "data/prepared").exists()


def test_a_failed_job_says_why_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    bundle = tmp_path / "raw/Brain"
    for split, label in (("train", "good"), ("test", "good"), ("test", "Ungood")):
        (bundle / split / label / "img").mkdir(parents=True)
    (bundle / "train/good/img/a_001.png").write_bytes(b"\x89PNG\r\n\x1a\n cut off")
    project = Project(tmp_path / "project")
    project.edit(lambda p: p["domains"].update(brain_mri={"source": "bmad", "root": str(tmp_path / "raw")}))
    output = project.snakemake(fails=True)
    assert "anomed: error:" in output
    assert "a_001.png" in output
    assert "logs/prepare/brain_mri.log" in output
    assert "Traceback" not in output
    assert not list((project.folder / "data/prepared").glob("**/*.*"))
    problems = list(csv.DictReader((project.folder / "logs/prepare/brain_mri.problems.csv").open()))
    assert any("a_001.png" in row["case"] for row in problems)


def test_a_failed_job_fails_again_until_it_is_mended(copy: Project) -> None:
    path = copy.folder / "src/anomed/domains/embedded.py"
    sound = path.read_text()
    path.write_text(sound.replace("def scans(self) -> list[Scan]:", "def scans(self) -> list[Scan]:\n        1 / 0"))
    for _ in range(2):
        assert "ZeroDivisionError" in copy.snakemake("results/table.csv", fails=True)
    path.write_text(sound)
    copy.snakemake()
    assert len(table(copy)) == 4


def test_an_edited_result_is_noticed_and_a_missing_one_made_again(copy: Project) -> None:
    path = copy.folder / "scores/brain_mri/intensity/0.json"
    path.write_text(path.read_text().replace('"value": 0.', '"value": 0.9', 1))
    assert "intensity/0.json: damaged or edited" in copy.snakemake(fails=True)
    path.unlink()
    copy.snakemake()
    (copy.folder / "scores/brain_mri/random/0.json").unlink()
    shutil.rmtree(copy.folder / "runs/brain_mri/random/1")
    shutil.rmtree(copy.folder / "models/brain_mri/constant")
    assert jobs(copy.snakemake("-n")) == {
        "score/brain_mri/random/0", "predict/brain_mri/random/1", "score/brain_mri/random/1",
        "fit/brain_mri/constant/0", "predict/brain_mri/constant/0", "score/brain_mri/constant/0",
    } | END  # fmt: skip


def example(number: int) -> str:
    """A piece of code of CONTRIBUTING.md."""
    return textwrap.dedent((ROOT / "CONTRIBUTING.md").read_text().split("```python\n")[number].split("```")[0])


def test_a_toy_method_is_one_file_and_one_block_and_a_toy_metric_one_function(copy: Project) -> None:
    (copy.folder / "src/anomed/methods/brightness.py").write_text(example(1))
    copy.edit(lambda p: (p["methods"].update(brightness={"power": 2.0}), p["run"]["systems"].append("brightness")))
    new = {f"{rule}/brain_mri/brightness/0" for rule in ("fit", "predict", "score")}
    assert jobs(copy.snakemake("-n")) == new | END
    path = copy.folder / "src/anomed/metrics/ranking.py"
    path.write_text(path.read_text().replace("def pixel_metrics(", f"{example(3)}\n\ndef pixel_metrics(", 1))
    copy.edit(lambda p: p["run"].update(systems=["constant", "intensity", "brightness"]))
    scored = {f"score/brain_mri/{system}/0" for system in ("constant", "intensity")}
    assert jobs(copy.snakemake()) == new | scored | END

    text = (copy.folder / "results/table.md").read_text()
    assert "brightness" in text
    assert "Youden 1950" in text
    row = table(copy)["brightness"]
    assert 0 <= float(row["brain_mri.image_auroc"]) <= 1
    assert row["brain_mri.pixel_auroc"] == ""
    row = table(copy)["intensity"]
    assert 0 < float(row["brain_mri.pixel_informedness"]) < 1
    assert 0 < float(row["brain_mri.pixel_informedness_foreground"]) < 1
    with np.load(copy.folder / "scores/brain_mri/intensity/0.npz") as arrays:
        assert np.ptp(arrays["replicates_pixel_informedness"][np.isfinite(arrays["replicates_pixel_informedness"])]) > 0


def test_a_toy_source_is_one_file_and_one_block(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (tmp_path / "src/anomed/domains/flat.py").write_text(example(2))
    raw = tmp_path / "raw"
    raw.mkdir()
    pixels = np.random.default_rng(0)
    for name in ("train_normal_a_1", "train_normal_b_1", "test_normal_c_1", "test_abnormal_d_1", "test_abnormal_d_2"):
        Image.fromarray(pixels.integers(0, 256, (40, 60), dtype=np.uint8)).save(raw / f"{name}.png")
    project.edit(lambda p: p["domains"].update(my_set={"source": "flat", "root": "raw", "size": 32}))
    project.edit(lambda p: p["run"].update(domains=["my_set"], systems=["constant"]))
    project.snakemake()
    assert table(project)["constant"]["my_set.image_auroc"] == "0.500000"
    assert "test 1 normal, 2 abnormal" in (tmp_path / "results/table.md").read_text()
    (raw / "test_abnormal_d_2.png").unlink()
    assert "prepare/my_set" in jobs(project.snakemake("-n")), "a change of the raw data is seen"


def test_compare_judges_one_system_by_another(
    built: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(built.folder)

    def compare(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["compare", *arguments])
        assert isinstance(ended.value.code, int)
        return ended.value.code, "".join(capsys.readouterr())

    code, text = compare("constant", "patchcore")
    assert code == 0, text
    assert re.search(r"brain_mri\.pixel_auroc ↑ .* better", text)
    code, text = compare("patchcore", "constant")
    assert code == 1, text
    assert "REGRESSION" in text
    assert compare("patchcore", "patchcore")[0] == 0
    assert compare("patchcore", "constant", "--tolerance", "0.99")[0] == 0
    code, text = compare("patchcor", "constant")
    assert code == 2
    assert "patchcore" in text
