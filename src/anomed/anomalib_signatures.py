"""The image models of the installed anomalib and their arguments, read from its source without importing it.

Importing anomalib takes seconds and torch; the planner needs names, types and defaults alone.
"""

import ast
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import Field

from anomed.errors import AnomedError

PARTS = ("pre_processor", "post_processor", "evaluator", "visualizer")  # of the library's own pipeline, not ours
PLAIN: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "Path": str, "None": None}


@dataclass(frozen=True)
class Argument:
    """An argument of a model: the type that pydantic checks, its default in YAML's terms (a list for a tuple, an
    enumeration's value), and whether the library wants a list as a tuple."""

    type: Any
    default: Any
    as_tuple: bool


@functools.cache
def models() -> tuple[str, ...]:
    """The names of all image models that the library offers; () where it is missing."""
    package = _package()
    if package is None:
        return ()
    return tuple(ast.literal_eval(_definition("__all__", package / "models" / "image" / "__init__.py")))


@functools.cache
def arguments(model: str) -> dict[str, Argument]:
    """The arguments of a model by name, less those of PARTS. Raises AnomedError when the library or the model is
    missing."""
    package = _package()
    if package is None:
        raise AnomedError(f"anomalib.{model}: anomalib is not installed, expected it in the environment; `make setup`")
    for path in sorted((package / "models" / "image").glob("*/lightning_model.py")):
        if f"class {model}(" in path.read_text(encoding="utf-8"):
            node = _definition(model, path)
            assert isinstance(node, ast.ClassDef)
            return _arguments(node, path)
    raise AnomedError(f"the installed anomalib has no image model {model!r}; install the locked version again")


@functools.cache
def _package() -> Path | None:
    """The folder of the installed library; finding a top-level package runs none of its code."""
    found = importlib.util.find_spec("anomalib")
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _arguments(model: ast.ClassDef, path: Path) -> dict[str, Argument]:
    for node in model.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            named = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            pairs = zip(named, node.args.defaults, strict=True)
            return {arg.arg: _argument(arg, default, path) for arg, default in pairs if arg.arg not in PARTS}
    return {}


def _argument(arg: ast.arg, default: ast.expr, path: Path) -> Argument:
    assert arg.annotation is not None
    value = _value(default, path)
    as_tuple = isinstance(value, tuple) or "tuple" in ast.unparse(arg.annotation)
    kinds = _kinds(arg.annotation, path)
    if any(getattr(kind, "__origin__", None) is Literal for kind in kinds):
        kinds = [kind for kind in kinds if kind is not str]  # an enumeration's value, which the library takes as str
    return Argument(Union[tuple(kinds)], list(value) if isinstance(value, tuple) else value, as_tuple)  # noqa: UP007


def _value(node: ast.expr, path: Path) -> Any:
    """A default: a literal, a member of an enumeration, or an entry of a table of the module."""
    if isinstance(node, ast.Attribute):
        return _choices(_name(node.value), path)[node.attr]
    if isinstance(node, ast.Subscript):
        return _value(_table(_name(node.value), path)[ast.literal_eval(node.slice)], path)
    return ast.literal_eval(node)


def _table(name: str, path: Path) -> dict[Any, ast.expr]:
    value = _definition(name, path)
    assert isinstance(value, ast.Dict)
    return {ast.literal_eval(key): item for key, item in zip(value.keys, value.values, strict=True) if key}


def _kinds(node: ast.expr, path: Path) -> list[Any]:
    """The alternatives of an annotation; tensors' types, for which YAML has no word, are left out."""
    if isinstance(node, ast.BinOp):
        return _kinds(node.left, path) + _kinds(node.right, path)
    if isinstance(node, ast.Subscript):
        return [_several(_name(node.value), node.slice, path)]
    if isinstance(node, ast.Attribute):
        return []
    name = ast.unparse(node)
    if name == "tuple":
        return [list[int]]
    if name in PLAIN:
        return [PLAIN[name]]
    return [Literal[tuple(_choices(name, path).values())]]


def _several(name: str, inner: ast.expr, path: Path) -> Any:
    """A list, Sequence or tuple of one type; a tuple of n items is a list of that length."""
    items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    kind: Any = list[Union[tuple(_kinds(items[0], path))]]  # type: ignore[misc]  # noqa: UP007
    if name == "tuple":
        return Annotated[kind, Field(min_length=len(items), max_length=len(items))]
    return Annotated[kind, Field(min_length=1)]


def _choices(name: str, path: Path) -> dict[str, Any]:
    """The values of an enumeration by member, or of an alias of Literal by themselves."""
    node = _definition(name, path)
    if isinstance(node, ast.ClassDef):
        members = (item for item in node.body if isinstance(item, ast.Assign))
        return {_name(item.targets[0]): ast.literal_eval(item.value) for item in members}
    assert isinstance(node, ast.Subscript)
    return {value: value for value in ast.literal_eval(node.slice)}


def _definition(name: str, path: Path) -> ast.AST:
    """The class or value that `name` stands for in the module at `path`, or in the module it imports it from."""
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.Assign) and any(_name(target) == name for target in node.targets):
            return node.value
        if isinstance(node, ast.AnnAssign) and node.value and _name(node.target) == name:
            return node.value
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return _definition(name, _imported(node, path))
    raise LookupError(f"{path}: no definition of {name}")


def _imported(node: ast.ImportFrom, path: Path) -> Path:
    package = _package()
    assert package is not None
    root = path.parents[node.level - 1] if node.level else package.parent
    target = root.joinpath(*(node.module or "").split("."))
    return target / "__init__.py" if target.is_dir() else target.with_suffix(".py")
