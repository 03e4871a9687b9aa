"""Plug-ins: a decorator that names a class, and folder discovery."""

import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

from anomed.errors import AnomedError

T = TypeVar("T", bound=type)
_REGISTRY: dict[str, dict[str, type]] = {}


def register(kind: str, name: str) -> Callable[[T], T]:
    """Class decorator: the plug-in `name` of `kind` ("domains" or "methods").

    The module that holds it is `anomed.<kind>.<part of name before the first dot>`, so that one plug-in can be
    loaded without importing its neighbours: editing one then concerns the jobs of that one alone.
    """

    def add(cls: T) -> T:
        _REGISTRY.setdefault(kind, {})[name] = cls
        return cls

    return add


def load(kind: str, name: str) -> Any:
    """The plug-in class `name`; imports its module only. Raises AnomedError with the nearest names."""
    module = name.partition(".")[0]
    if module.isidentifier() and importlib.util.find_spec(f"anomed.{kind}.{module}"):
        content = importlib.import_module(f"anomed.{kind}.{module}")
        if reason := getattr(content, "LEFT_OUT", {}).get(name):
            raise AnomedError(f"{name} is left out: {reason}")
    found = _REGISTRY.get(kind, {})
    if name not in found:
        names = {known.lower(): known for known in discover(kind)}
        near = difflib.get_close_matches(name.lower(), names, n=1)
        hint = f"; did you mean {names[near[0]]!r}?" if near else ""
        raise AnomedError(f"no plug-in {name!r} in src/anomed/{kind}{hint}")
    return found[name]


def discover(kind: str) -> dict[str, Any]:
    """Every plug-in of `kind`, by name; imports all modules of the folder."""
    package = importlib.import_module(f"anomed.{kind}")
    for info in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"anomed.{kind}.{info.name}")
    return dict(sorted(_REGISTRY.get(kind, {}).items()))
