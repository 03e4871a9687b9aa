"""Checked settings: the base of every block of keys, and one clear line for each fault in one."""

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from anomed.errors import AnomedError

LISTED = 20  # names that a message shows


class Settings(BaseModel):
    """Base of all parameters: unknown keys are refused, values are not coerced."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def nearest(name: str, known: Any) -> str:
    """What a message adds after a wrong name: the nearest of the known ones, or all of them, if they are few."""
    names = sorted(map(str, known))
    if near := difflib.get_close_matches(str(name), names, n=1):
        return f"; did you mean {near[0]!r}?"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"; known: {', '.join(names[:LISTED]) or 'none'}{more}"


def check(model: type[BaseModel], values: Any, where: str, also: Any = ()) -> Any:
    """`values` as an instance of `model`, or AnomedError with one line per fault. `also`: further keys to suggest."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = []
        for fault in error.errors():
            key = ".".join(str(part) for part in ((where,) if where else ()) + fault["loc"])
            if fault["type"] == "extra_forbidden":
                fields = _fields(model, fault["loc"][:-1])
                lines.append(f"{key}: unknown key{nearest(str(fault['loc'][-1]), [*fields, *also])}")
            elif fault["type"] == "missing":
                lines.append(f"{key}: missing")
            else:
                text, given = fault["msg"].removeprefix("Value error, "), fault["input"]
                whole = isinstance(given, dict) and fault["type"] == "value_error"  # a block: the text names its keys
                found = "" if whole else f", found {given!r}{_spelt(given)}"
                lines.append(f"{key}: {text[:1].lower()}{text[1:]}{found}")
        raise AnomedError("\n".join(lines)) from None


def _spelt(value: Any) -> str:
    """How YAML wants a number that it took for text: an exponent needs a point before it."""
    if isinstance(value, str) and "e" in value.lower() and "." not in value:
        try:
            return f"; write {float(value):.1e}, with a point, for YAML to take it as a number"
        except ValueError:
            pass
    return ""


def _fields(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Names of the fields of the model that `path` leads to."""
    for part in path:
        inner = model.model_fields[str(part)].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)
