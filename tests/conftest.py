"""Options and paths shared by all tests."""

import os
from pathlib import Path

import pytest
from paths import ROOT


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
