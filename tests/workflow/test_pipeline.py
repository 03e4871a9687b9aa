"""Snakemake and DVC for real: what runs, what re-runs, what survives a kill, what is refused."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from project import BINARIES, Project, jobs, table

from anomed.plan import Plan

PATCHCORE = {f"{rule}/brain_mri/patchcore/{seed}" for rule in ("fit", "predict", "score") for seed in (0, 1)}
INTENSITY = {f"{rule}/brain_mri/intensity/0" for rule in ("fit", "predict", "score")}
END = {"table", "report", "all"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose table was made by an undisturbed run; tests copy it before they change it."""
    project = Project(tmp_path_factory.mktemp("built"))
    project.snakemake()
    return project


@pytest.fixture
def copy(built: Project, tmp_path: Path) -> Iterator[Project]:
    """The built project, to be changed."""
    shutil.copytree(built.folder, tmp_path / "copy", symlinks=True)
    project = Project.__new__(Project)
    project.folder = tmp_path / "copy"
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


def test_a_second_call_has_nothing_to_do(built: Project) -> None:
    assert "Nothing to be done" in built.snakemake()


def test_one_parameter_re_runs_its_method_alone(copy: Project) -> None:
    copy.edit(lambda params: params["methods"]["patchcore"].update(coreset_ratio=0.03))
    assert jobs(copy.snakemake("-n")) == PATCHCORE | END
    before = table(copy)
    assert jobs(copy.snakemake()) == PATCHCORE | END
    after = table(copy)
    assert after["patchcore"] != before["patchcore"]
    assert {k: v for k, v in after.items() if k != "patchcore"} == {k: v for k, v in before.items() if k != "patchcore"}
    assert "Nothing to be done" in copy.snakemake()


def test_an_edit_of_a_method_re_runs_that_method_alone(copy: Project) -> None:
    path = copy.folder / "src/anomed/methods/intensity.py"
    path.write_text(path.read_text() + "\nEDITED = True\n")
    assert jobs(copy.snakemake("-n")) == INTENSITY | END
    assert jobs(copy.snakemake()) == INTENSITY | END


def test_touching_files_re_runs_nothing(copy: Project) -> None:
    for path in [copy.folder / "params.yaml", *copy.folder.glob("src/**/*.py"), *copy.folder.glob("data/prepared/*/*")]:
        path.touch()
    assert "Nothing to be done" in copy.snakemake("-n")


def test_dvc_re_runs_the_same_jobs_and_records_them(copy: Project) -> None:
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "start"],
    ):
        subprocess.run(["git", *command], cwd=copy.folder, check=True)
    assert not jobs(copy.run("dvc", "repro"))
    assert "up to date" in copy.run("dvc", "status")
    copy.edit(lambda params: params["methods"]["patchcore"].update(coreset_ratio=0.03))
    assert jobs(copy.run("dvc", "repro")) == PATCHCORE | END
    assert "up to date" in copy.run("dvc", "status")
    assert "?? dvc.lock" in subprocess.check_output(["git", "status", "--porcelain"], cwd=copy.folder, text=True)


def test_a_clone_that_pulls_has_nothing_to_do_and_re_runs_what_an_edit_affects(copy: Project, tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    remote = ["dvc", "remote", "add", "--local", "-d", "store", str(tmp_path / "store")]
    subprocess.run(["git", "init", "-q"], cwd=copy.folder, check=True)
    copy.run(*remote)
    copy.run("dvc", "repro")
    copy.run("dvc", "push")
    subprocess.run([*git, "add", "-A"], cwd=copy.folder, check=True)
    subprocess.run([*git, "commit", "-qm", "recorded"], cwd=copy.folder, check=True)
    subprocess.run(["git", "clone", "-q", str(copy.folder), str(tmp_path / "clone")], check=True)
    clone = Project.__new__(Project)
    clone.folder = tmp_path / "clone"
    clone.run(*remote)
    clone.run("dvc", "pull")
    for path in clone.folder.glob("models/*/*/*/*"):
        path.touch()  # a pull gives files any order of dates
    assert clone.stable() == copy.stable()
    assert "Nothing to be done" in clone.snakemake("-n")
    assert "up to date" in clone.run("dvc", "status")
    clone.edit(lambda params: params["methods"]["patchcore"].update(coreset_ratio=0.03))
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
    data, run = "data/prepared/brain_mri", "runs/brain_mri/patchcore/0"
    block, paths = plan.prepare_params("brain_mri"), plan.chain_paths("brain_mri")
    spatial = ["--params", plan.spatial_params("brain_mri"), "--files", paths, "--out", "again_volumes"]
    volumes = ["--volumes", "data/prepared/_spatial/brain_mri"]
    commands = {
        "prepare spatial": ["brain_mri", "9-of-10", *spatial, "--problems", "p.csv"],
        "prepare intensity": ["brain_mri", "--params", block, *volumes, "--out", "again", "--problems", "p.csv"],
        "score": [
            "--run",
            run,
            "--data",
            data,
            "--params",
            plan.score_params("brain_mri", "patchcore"),
            "--out",
            "again.json",
        ],
        "table": ["--plan", plan.table_params(), "--out", "again_results"],
        "report": ["--plan", plan.table_params(), "--out", "again.html"],
    }
    for command, arguments in commands.items():
        code = (
            "import sys; from anomed.cli import main; main(sys.argv[1:]);"
            "from anomed.records import code_files; print('FILES', *code_files());"
            "print('HEAVY', *sorted({'torch', 'timm', 'monai'} & set(sys.modules)))"
        )
        arguments = [sys.executable, "-c", code, *command.split(), *arguments]
        output = subprocess.run(
            arguments,
            cwd=built.folder,
            env={"PYTHONPATH": "src", "PATH": "/usr/bin:/bin"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        files, heavy = (line.split()[1:] for line in output.splitlines()[-2:])
        prepares, _, step = command.rpartition(" ")
        expected = plan.code(step, domain="brain_mri") if prepares else plan.code(command)
        assert [f"src/{name}" for name in files] == expected, command
        assert heavy == (["monai", "torch"] if prepares else []), command


def test_killed_in_the_middle_it_resumes_to_the_same_bytes(built: Project, tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.kill(project.start("snakemake", "--cores", "2"), lambda: len(list(tmp_path.glob("scores/*/*/*.json"))) >= 2)
    assert not (tmp_path / "results/table.csv").exists()
    output = project.snakemake("--cores", "1")
    assert "intensity/brain_mri" not in jobs(output), "finished work was done again"
    assert len(jobs(output)) < 22, "of 24 jobs; what was finished stays"
    assert project.stable() == built.stable()
    assert len(project.stable()) > 10


def test_a_second_snakemake_is_refused_with_a_sentence(tmp_path: Path) -> None:
    project = Project(tmp_path)
    first = project.start("snakemake", "--cores", "1")
    while not (tmp_path / "logs/spatial/brain_mri/0-of-2.log").exists():
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.05)
    output = project.snakemake(fails=True)
    assert "Another Snakemake is running in this folder" in output
    assert "Traceback" not in output
    assert "intensity/brain_mri" in jobs(project.snakemake("-n")), "a dry run takes no lock"
    assert first.poll() is None, "the first run goes on"
    project.kill(first, lambda: True)


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
            lambda p: p["run"]["systems"].append("patchcor"),
            "run.systems: 'patchcor' has no block under `methods:` or `imported:`; did you mean 'patchcore'?",
        ),
        (
            lambda p: p["domains"].update(brain_mri={"source": "bmad", "root": "nowhere/bmad"}),
            "domains.brain_mri: nowhere/bmad",
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
    for folder, job in (("scores", "score"), ("runs", "predict"), ("models", "fit")):
        shutil.rmtree(copy.folder / folder)
        assert f"{job}/brain_mri/intensity/0" in jobs(copy.snakemake("-n"))


def test_an_edited_result_is_noticed(copy: Project) -> None:
    path = copy.folder / "scores/brain_mri/intensity/0.json"
    path.write_text(path.read_text().replace('"value": 0.', '"value": 0.9', 1))
    assert "intensity/0.json: damaged or edited" in copy.snakemake(fails=True)
    path.unlink()
    copy.snakemake()
    assert "Nothing to be done" in copy.snakemake("-n")


def test_a_toy_method_is_one_file_and_one_block(copy: Project) -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    code = textwrap.dedent(text.split("```python\n")[1].split("```")[0])
    (copy.folder / "src/anomed/methods/brightness.py").write_text(code)
    copy.edit(lambda p: (p["methods"].update(brightness={"power": 2.0}), p["run"]["systems"].append("brightness")))
    expected = {f"{rule}/brain_mri/brightness/0" for rule in ("fit", "predict", "score")}
    assert jobs(copy.snakemake()) == expected | END
    row = table(copy)["brightness"]
    assert 0 <= float(row["brain_mri.image_auroc"]) <= 1
    assert row["brain_mri.pixel_auroc"] == ""
    assert "brightness" in (copy.folder / "results/table.md").read_text()


def test_a_toy_source_is_one_file_and_one_block(copy: Project) -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    code = textwrap.dedent(text.split("```python\n")[2].split("```")[0])
    (copy.folder / "src/anomed/domains/flat.py").write_text(code)
    raw = copy.folder / "raw"
    raw.mkdir()
    pixels = np.random.default_rng(0)
    for name in ("train_normal_a_1", "train_normal_b_1", "test_normal_c_1", "test_abnormal_d_1", "test_abnormal_d_2"):
        Image.fromarray(pixels.integers(0, 256, (40, 60), dtype=np.uint8)).save(raw / f"{name}.png")
    copy.edit(lambda p: p["domains"].update(my_set={"source": "flat", "root": "raw", "size": 32}))
    copy.edit(lambda p: p["run"].update(domains=["my_set"], systems=["random", "constant"]))
    copy.snakemake()
    assert table(copy)["constant"]["my_set.image_auroc"] == "0.500000"
    assert "test 1 normal, 2 abnormal" in (copy.folder / "results/table.md").read_text()
    (raw / "test_abnormal_d_2.png").unlink()
    assert "prepare/my_set" in jobs(copy.snakemake("-n")), "a change of the raw data is seen"


def test_a_toy_metric_is_one_function(copy: Project) -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    code = textwrap.dedent(text.split("```python\n")[3].split("```")[0])
    path = copy.folder / "src/anomed/metrics/ranking.py"
    path.write_text(path.read_text().replace("def pixel_metrics(", f"{code}\n\ndef pixel_metrics(", 1))
    done = jobs(copy.snakemake())
    assert {name.partition("/")[0] for name in done} == {"score", "table", "report", "all"}
    row = table(copy)["intensity"]
    assert 0 < float(row["brain_mri.pixel_informedness"]) < 1
    assert 0 < float(row["brain_mri.pixel_informedness_foreground"]) < 1
    with np.load(copy.folder / "scores/brain_mri/intensity/0.npz") as arrays:
        assert np.ptp(arrays["replicates_pixel_informedness"][np.isfinite(arrays["replicates_pixel_informedness"])]) > 0
    assert "Youden 1950" in (copy.folder / "results/table.md").read_text()


def test_compare_judges_one_system_by_another(built: Project) -> None:
    def compare(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [str(BINARIES / "python"), "-m", "anomed.cli", "compare", *arguments],
            cwd=built.folder, env={**os.environ, "PYTHONPATH": "src"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

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


def test_programs_of_the_environment_are_found_without_activating_it(built: Project) -> None:
    process = subprocess.run(
        [str(BINARIES / "snakemake"), "--cores", "1", "--forcerun", "table", "--", "results/table.csv"],
        cwd=built.folder, env={"PATH": "/usr/bin:/bin", "HOME": str(built.folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
