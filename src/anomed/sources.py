"""Which project files a job imports: the closure of import statements, so that an edit re-runs just what it affects."""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).parents[2]
# The module behind each command. cli.py imports it inside the command, so it is named here.
ENTRY = {
    "images": "anomed.prepare",
    "spatial": "anomed.preprocess.shard",
    "intensity": "anomed.preprocess.slicing",
    "fit": "anomed.detect",
    "predict": "anomed.predict",
    "adopt": "anomed.importing",
    "score": "anomed.scoring",
    "table": "anomed.report.table",
    "report": "anomed.report.html",
}


def of(command: str, *plugins: str) -> list[str]:
    """Sorted module files, as `src/anomed/...`, that `anomed <command>` loads, with the named plug-in modules.

    plugins: dotted modules such as "anomed.methods.patchcore", which the command loads by name.
    """
    modules = {"anomed", *_imports("anomed.cli", top_level_only=True), "anomed.cli"}
    for name in (ENTRY[command], *plugins):
        modules |= _closure(name)
    return _named(modules)


def modules(name: str) -> list[str]:
    """Sorted module files, as `src/anomed/...`, that importing the module `name` loads."""
    return _named(_closure(name))


def _named(modules: Iterable[str]) -> list[str]:
    return sorted(_file(name).relative_to(PROJECT).as_posix() for name in modules)


def _file(module: str) -> Path:
    path = PROJECT.joinpath("src", *module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _closure(module: str) -> frozenset[str]:
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += [parent for parent in (name.rpartition(".")[0],) if parent]
            todo += _imports(name)
    return frozenset(seen)


@cache
def _imports(module: str, top_level_only: bool = False) -> frozenset[str]:
    """Project modules that the file of `module` names in import statements."""
    tree = ast.parse(_file(module).read_bytes())
    found: set[str] = set()
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "anomed"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "anomed":
            base = node.module or ""
            found |= {f"{base}.{a.name}" if _file(f"{base}.{a.name}").exists() else base for a in node.names} | {base}
    return frozenset(found)
