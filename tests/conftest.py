"""Options and paths shared by all tests."""

import locale
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from paths import ROOT
from project import Project

LOCALE = locale.setlocale(locale.LC_ALL)
hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine is no fault of the code
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the long checks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        for item in items:
            if "full" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="long: run by `make test-full`"))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real images; tests that need it skip where it is absent."""
    path = Path(os.environ.get("ANOMED_REAL_DATA", ROOT.parent / "shared" / "data"))
    if not (path / "layout.py").exists():
        pytest.skip(f"no real images at {path}; set ANOMED_REAL_DATA")
    return path


@pytest.fixture(scope="session")
def lay_out(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """lay_out(*sets, quirks=False): the folder with `bmad/` and `nova/` in which the real images of these sets lie as in
    the releases. Each is made once a session, so tests only read it, or put back what they take."""
    from PIL import Image

    layout: dict[str, Any] = runpy.run_path(str(real_data / "layout.py"))

    def save(path: Path, array: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(path, compress_level=1)  # the same pixels, in a third of the time

    layout["Writer"]._save = staticmethod(save)
    roots = [tmp_path_factory.mktemp(name) for name in ("plain", "quirks")]
    made: set[tuple[str, bool]] = set()

    def lay(*sets: str, quirks: bool = False) -> Path:
        root = roots[quirks]
        for name in {*sets} - {name for name, kind in made if kind == quirks}:
            arguments = (root / "nova",) if name == "nova" else (root / "bmad", quirks)
            layout[name](*arguments)
            made.add((name, quirks))
        return root

    return lay


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose table was made by an undisturbed run, from a shell in which no environment is activated; tests copy
    it before they change it."""
    project = Project(tmp_path_factory.mktemp("built"))
    project.note()
    project.run("snakemake", "--cores", "2", path="/usr/bin:/bin")
    return project


@pytest.fixture(autouse=True)
def _locale() -> None:
    """SimpleITK's DICOM writer, with which fixtures make series, leaves the process in a locale of ASCII text files."""
    locale.setlocale(locale.LC_ALL, LOCALE)
