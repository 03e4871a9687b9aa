"""A list of steps as it stands in params.yaml → names and checked options."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anomed.errors import AnomedError
from anomed.settings import Settings, check, nearest

Entry = str | dict[str, dict[str, Any] | None]  # `bias_field`, or `register: {spacing: 2}`
Step = tuple[str, Any]  # its name and its options, an instance of the class that `STEPS` gives


def parse(entries: Sequence[Entry], steps: Mapping[str, type[Settings]], where: str) -> list[Step]:
    """The steps of a list in order, every option filled in. `where` is the list's key, for messages.

    Raises AnomedError for an unknown step or option, with the nearest name, and for a step that stands twice.
    """
    found: list[Step] = []
    for entry in entries:
        if not isinstance(entry, str | dict) or (isinstance(entry, dict) and len(entry) != 1):
            raise AnomedError(f"{where}: found {entry!r}, expected a step's name or one name with its options")
        name, options = (entry, None) if isinstance(entry, str) else next(iter(entry.items()))
        if name not in steps:
            raise AnomedError(f"{where}: unknown step {name!r}{nearest(name, steps)}")
        if name in [other for other, _ in found]:
            raise AnomedError(f"{where}: the step {name!r} stands there twice; keep one")
        found.append((name, check(steps[name], {} if options is None else options, f"{where}.{name}")))
    return found


def dump(steps: Sequence[Step]) -> list[Entry]:
    """The list that `parse` reads, with every option written out."""
    return [{name: options.model_dump()} for name, options in steps]


def run(chain: Callable[[dict[str, Any]], dict[str, Any]], data: dict[str, Any]) -> dict[str, Any]:
    """A MONAI chain's result. MONAI wraps what a transform raises: an AnomedError comes out as itself."""
    try:
        return chain(data)
    except RuntimeError as error:
        if isinstance(error.__cause__, AnomedError):
            raise error.__cause__ from None
        raise
