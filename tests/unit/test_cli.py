"""The command line: messages, exit codes, and the doctor."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import shipped
import tiny_domain
import yaml
from paths import ROOT

from anomed import cli
from anomed.doctor import doctor


def anomed(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "anomed.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)


def test_a_fault_is_one_message_on_standard_error(tmp_path: Path) -> None:
    done = anomed("predict", "--model", "m", "--data", "d", "--out", "o", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "anomed: error: d/card.json: not found; the step that makes it has not run\n"


def test_a_job_whose_snakemake_was_killed_discards_its_result(tmp_path: Path) -> None:
    tiny_domain.domain(tmp_path / "data", {("train", 0): 2, ("test", 0): 2})
    gone = subprocess.Popen(["true"])
    gone.wait()
    parameters = '{"method": {"implementation": "controls.random"}, "files": {}}'
    command = ["fit", "random", "--params", parameters, "--seed", "0", "--data", "data", "--out", "model"]
    done = anomed(*command, cwd=tmp_path, ANOMED_PARENT=str(gone.pid))
    assert done.returncode == 1
    assert "the Snakemake that started this job was killed; its result is discarded" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert anomed(*command, cwd=tmp_path, ANOMED_PARENT=str(os.getpid())).returncode == 0
    assert (tmp_path / "model/run.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["forecast"], "invalid choice: 'forecast'"),
        (
            ["fit", "x", "--params", "{", "--seed", "0", "--data", "d", "--out", "o"],
            "argument --params: not valid JSON",
        ),
        (["fit", "x", "--params", "[]", "--seed", "0", "--data", "d", "--out", "o"], "argument --params: found list"),
        (
            ["fit", "x", "--params", "{}", "--seed", "one", "--data", "d", "--out", "o"],
            "argument --seed: found 'one', expected an integer",
        ),
        (["predict", "--mode", "m"], "the following arguments are required: --model"),
        (["prepare", "spatial", "d", "3-of-2"], "argument shard: found '3-of-2', expected <i>-of-<n>"),
        (["prepare", "spatial", "d", "0-of-2", "--files", '{"a": 3}'], "argument --files: a: found 3, expected a path"),
    ],
)
def test_wrong_words_are_named(arguments: list[str], message: str) -> None:
    done = anomed(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_help_of_every_command_needs_no_heavy_library() -> None:
    code = "import sys\nfrom anomed.cli import parser\nparser()\nprint({'torch', 'pandas', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT / "src") == "set()\n"


def test_doctor_says_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(yaml.safe_dump(shipped.params()))
    assert doctor(Path("params.yaml")) == 0
    text = capsys.readouterr().out
    for word in ("torch", "snakemake", "brain_mri", "tf_efficientnet_lite0", "sha256", "GB free"):
        assert word in text


def test_doctor_names_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    params = shipped.params()
    params["domains"]["brain_mri"] = {"source": "bmad", "root": "raw/[bmad]"}
    Path("params.yaml").write_text(yaml.safe_dump(params))
    assert doctor(Path("params.yaml")) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "missing brain_mri raw/[bmad] does not exist: put the data there or change domains.brain_mri.root" in text
    params = shipped.params()
    params["imported"], params["run"]["systems"] = {"theirs": None}, ["random", "theirs"]
    Path("params.yaml").write_text(yaml.safe_dump(params))
    assert doctor(Path("params.yaml")) == 1
    assert "missing theirs brain_mri: seed none; bring some with" in " ".join(capsys.readouterr().out.split())
    Path("params.yaml").write_text("run: [")
    assert doctor(Path("params.yaml")) == 1
    assert "not valid YAML" in capsys.readouterr().out


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_is_stopped_cleans_up(sent: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C, or by a cluster whose time limit is near: no traceback, and what it had half-written is removed."""
    cleaned = []

    def work(args: Any) -> None:
        try:
            os.kill(os.getpid(), sent)
            time.sleep(5)
        finally:
            cleaned.append(True)

    work.__name__ = "_doctor"  # the command is called by it
    monkeypatch.setattr(cli, "_doctor", work)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["doctor"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.value.code == code
    assert cleaned == [True]


@pytest.mark.parametrize("text", ["nan", "-1", "abc", "inf"])
def test_seconds_between_checkpoints_are_a_number(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["fit", "x", "--params", "{}", "--seed", "0", "--checkpoint-seconds", text])
    assert f"found {text!r}, expected seconds" in capsys.readouterr().err
