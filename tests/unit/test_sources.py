"""The computed list of project files that a job depends on."""

import json
import subprocess
import sys

import pytest
from paths import ROOT

from anomed import plugins, sources

COMMANDS = ("images", "spatial", "intensity", "fit", "predict", "score", "table", "report")
LOADED = """
import importlib, json, sys
found = {}
for command, entry in json.loads(sys.argv[1]).items():
    for name in [name for name in sys.modules if name.partition(".")[0] == "anomed"]:
        del sys.modules[name]  # so that each entry module starts from none of ours
    importlib.import_module("anomed.cli")
    importlib.import_module(entry)
    found[command] = [name for name in sys.modules if name.partition(".")[0] == "anomed"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """The project's modules that a process has after importing a command's entry module."""
    entries = json.dumps({command: sources.ENTRY[command] for command in COMMANDS})
    command = [sys.executable, "-c", LOADED, entries]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT / "src")
    found: dict[str, list[str]] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_importing_the_entry_module_loads_what_was_computed(command: str, loaded: dict[str, list[str]]) -> None:
    expected = sorted(f"src/{sources._file(name).relative_to(ROOT / 'src').as_posix()}" for name in loaded[command])
    late = {"spatial": "anomed.preprocess.spatial", "intensity": "anomed.preprocess.intensity"}.get(command)
    if late is None:
        assert sources.of(command) == expected
    else:  # MONAI is imported when a volume has to be made, not before
        assert set(expected) < set(sources.of(command))
        assert set(sources.modules(late)) <= set(sources.of(command))
        assert not set(expected) & {"src/anomed/preprocess/spatial.py", "src/anomed/preprocess/intensity.py"}


def test_a_plug_in_brings_its_own_module_and_no_neighbour() -> None:
    files = sources.of("fit", "anomed.methods.intensity")
    assert "src/anomed/methods/intensity.py" in files
    assert "src/anomed/methods/controls.py" not in files
    assert "src/anomed/report/table.py" not in files
    assert set(files) <= {path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py")}


def test_every_plug_in_file_is_found() -> None:
    for kind in ("domains", "methods"):
        for name in plugins.discover(kind):
            assert (ROOT / "src" / "anomed" / kind / f"{name.partition('.')[0]}.py").exists()
