"""Files that installed packages carry: templates and weights."""

import importlib.util
from pathlib import Path

from anomed.errors import AnomedError


def inside(package: str, name: str) -> Path:
    """The file `name`, relative to the folder of an installed package, which is not imported.

    Raises AnomedError when the package or the file is missing.
    """
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise AnomedError(f"{package} is not installed, expected it in the environment; run `make setup`")
    path = Path(found.submodule_search_locations[0]) / name
    if not path.is_file():
        raise AnomedError(f"{path.name}: not found in {package}; install the locked {package} again")
    return path
