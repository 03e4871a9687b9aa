"""A copy of the project in a temporary folder, small parameters, and ways to run Snakemake and DVC there for real."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from paths import ROOT

COPIED = (
    "Snakefile",
    "dvc.yaml",
    ".dvcignore",
    ".gitignore",
    ".dvc",
    "workflow",
    "profiles",
    "src",
    "data/cards",
    "data/splits",
)
BINARIES = Path(sys.executable).parent
METHODS: dict[str, dict[str, Any]] = {
    "random": {"implementation": "controls.random"},
    "constant": {"implementation": "controls.constant"},
    "intensity": {},
    "patchcore": {"coreset_ratio": 0.1},
}
SMALL: dict[str, Any] = {
    "run": {"domains": ["brain_mri"], "systems": ["random", "constant", "intensity", "patchcore"], "seeds": [0, 1]},
    "domains": {"brain_mri": {"source": "embedded", "subjects": 10, "size": 96, "preprocess": "quick", "shards": 1}},
    # The whole chain is run by test_volumes.py; this one keeps every step of the workflow and takes a second a head.
    "preprocess": {
        "quick": {
            "spatial": [{"skull_strip": {"backend": "mask"}}, {"resample": {"spacing": 2}}],
            "intensity": ["z_score"],
            "slices": {"start": -9, "stop": 33, "step": 6, "min_lesion_mm2": 40},
        }
    },
    "methods": METHODS,
    "metrics": {"aupro_limit": 0.3, "replicates": 100},
}
# What must be byte-identical however the run went.
STABLE = ("scores/**/*", "results/table.*", "results/scores.csv")


# Runs when a process of Python starts, and at its end writes down what one of ours has imported.
NOTE = """
import atexit, json, os, sys
from pathlib import Path

def note():
    if Path(sys.argv[0]).name == "anomed":
        from anomed.records import code_files
        facts = {"arguments": sys.argv[1:], "files": [f"src/{name}" for name in code_files()]}
        facts["heavy"] = sorted({"torch", "timm", "monai"} & set(sys.modules))
        Path(__file__).with_name(f"{os.getpid()}.json").write_text(json.dumps(facts))

atexit.register(note)
"""


class Project:
    """A working copy under `folder`."""

    notes: Path | None = None

    def __init__(self, folder: Path):
        self.folder = folder
        for name in COPIED:
            source, target = ROOT / name, folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "cache", "tmp"))
            else:
                shutil.copy(source, target)
        (folder / "params.yaml").write_text(yaml.safe_dump(SMALL, sort_keys=False))

    def note(self) -> None:
        """From now on, programs started here write down what they imported."""
        self.notes = self.folder.with_name(f"{self.folder.name}-notes")
        self.notes.mkdir()
        (self.notes / "sitecustomize.py").write_text(NOTE)

    def noted(self) -> list[dict[str, Any]]:
        """Arguments, own files and heavy libraries of every call of `anomed` since `note`."""
        assert self.notes
        return [json.loads(path.read_text()) for path in sorted(self.notes.glob("*.json"))]

    def copy(self, folder: Path) -> "Project":
        """The same, with all that was made, under another folder."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Project.at(folder)

    @classmethod
    def at(cls, folder: Path) -> "Project":
        """A working copy that lies there already."""
        project = cls.__new__(cls)
        project.folder = folder
        return project

    def edit(self, change: Callable[[dict], object]) -> None:
        """Rewrite params.yaml."""
        path = self.folder / "params.yaml"
        params = yaml.safe_load(path.read_text())
        change(params)
        path.write_text(yaml.safe_dump(params, sort_keys=False))

    def start(self, *command: str, path: str = "") -> subprocess.Popen[str]:
        """Start a program of the environment in a process group of its own, as a terminal would. path: PATH, in place of
        this process's with the environment's programs in front."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment["PATH"] = path or os.pathsep.join([str(BINARIES), environment["PATH"]])
        environment["MLFLOW_DISABLE_TELEMETRY"] = "true"
        if self.notes:
            environment["PYTHONPATH"] = str(self.notes)
        return subprocess.Popen(
            [str(BINARIES / command[0]), *command[1:]],
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, *command: str, fails: bool = False, seconds: int = 420, path: str = "") -> str:
        """Run to the end and return everything printed; asserts the kind of exit status."""
        process = self.start(*command, path=path)
        output, _ = process.communicate(timeout=seconds)
        assert (process.returncode != 0) == fails, f"exit {process.returncode}\n{output[-6000:]}"
        return output

    def snakemake(self, *arguments: str, fails: bool = False, seconds: int = 420) -> str:
        return self.run("snakemake", "--cores", "2", *arguments, fails=fails, seconds=seconds)

    def kill(self, process: subprocess.Popen[str], when: Callable[[], bool]) -> None:
        """kill -9 a process and all its children as soon as `when` holds."""
        deadline = time.monotonic() + 300
        while not when():
            assert process.poll() is None, f"ended by itself: {process.communicate()[0][-4000:]}"
            assert time.monotonic() < deadline, "never came to the point where it should be killed"
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()

    def stable(self) -> dict[str, bytes]:
        """The bytes of everything that must not depend on how the run went."""
        return {
            path.relative_to(self.folder).as_posix(): path.read_bytes()
            for pattern in STABLE
            for path in sorted(self.folder.glob(pattern))
            if path.is_file()
        }


def jobs(output: str) -> set[str]:
    """The jobs that a run or dry run names, as "table", "prepare/domain", "spatial/domain/shard" or "rule/domain/system/seed"."""
    found = set(re.findall(r"^(?:local)?rule (\w+):$", output, flags=re.M))  # `all` has no message
    for text in re.findall(r"^Job \d+: (.*)$", output, flags=re.M):
        run = re.fullmatch(r"(\w+) (\S+) on (\S+), seed (\d+)", text)
        found.add(f"{run[1]}/{run[3]}/{run[2]}/{run[4]}" if run else text.replace(" ", "/"))
    return found


def table(project: Project) -> dict[str, dict[str, str]]:
    """The rows of table.csv by system."""
    with (project.folder / "results/table.csv").open(newline="") as file:
        return {row["system"]: row for row in csv.DictReader(file)}
