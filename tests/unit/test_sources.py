"""The computed list of project files that a job depends on."""

import subprocess
import sys

import pytest
from paths import ROOT

from anomed import plugins, sources


@pytest.mark.parametrize("command", ["images", "spatial", "intensity", "fit", "predict", "score", "table", "report"])
def test_importing_the_entry_module_loads_what_was_computed(command: str) -> None:
    code = (
        f"import anomed.cli, {sources.ENTRY[command]}, sys;"
        "print(*sorted(m for m in sys.modules if m.partition('.')[0] == 'anomed'))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    expected = sorted(f"src/{sources._file(name).relative_to(ROOT / 'src').as_posix()}" for name in run.stdout.split())
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
