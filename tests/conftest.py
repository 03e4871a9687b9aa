"""Options and paths shared by all tests."""

import locale
import os
from pathlib import Path

import pytest
from paths import ROOT

LOCALE = locale.setlocale(locale.LC_ALL)


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


@pytest.fixture(autouse=True)
def _locale() -> None:
    """SimpleITK's DICOM writer, with which fixtures make series, leaves the process in a locale of ASCII text files."""
    locale.setlocale(locale.LC_ALL, LOCALE)
