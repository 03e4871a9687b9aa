"""How a metric says what it is: one decorator, one registry."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from anomed.errors import AnomedError

Level = Literal["image", "pixel"]
METRICS: dict[str, "Metric"] = {}


class NotComputable(AnomedError):
    """The value does not exist for these data. The message is the reason that the records carry."""


@dataclass(frozen=True)
class Metric:
    """What a metric is. Keys as in `metric`; `options` are the keyword-only arguments of its function and defaults."""

    name: str
    label: str
    level: Level
    low: float
    high: float
    direction: Literal["higher", "lower"]
    unit: str
    definition: str
    source: str
    version: int
    options: dict[str, Any]
    function: Callable[..., float]

    def evaluate(self, *data: Any, options: Mapping[str, Any]) -> tuple[float | None, str | None]:
        """(value, None), or (None, reason). Of `options` it takes what it knows."""
        known = {key: options[key] for key in self.options if key in options}
        try:
            return self.function(*data, **known), None
        except NotComputable as reason:
            return None, str(reason)

    def described(self, options: Mapping[str, Any]) -> str:
        """The definition, with the options that hold filled in."""
        return self.definition.format(**{**self.options, **{k: options[k] for k in self.options if k in options}})


def metric(
    *,
    name: str,
    label: str,
    level: Level,
    definition: str,
    source: str,
    version: int = 1,
    low: float = 0.0,
    high: float = 1.0,
    direction: Literal["higher", "lower"] = "higher",
    unit: str = "fraction",
) -> Callable[[Callable[..., float]], Callable[..., float]]:
    """Decorator that makes a function a metric; nothing else is needed to have it computed and in the table.

    name: column name. label: for readers. level: what the function takes, "image": scores and labels, both (N,);
    "pixel": a `ranking.PixelHistogram`. Its keyword-only arguments are filled from the block `metrics:` of params.yaml.
    low, high: range; a value outside is a fault of the function (ValueError), rounding up to 1e-9 beyond is cut off.
    direction: which values are better, "higher" or "lower". definition: one sentence, in which {option} is filled in.
    source: paper or definition followed. version: counted up when values change. The function returns a float or
    raises NotComputable with the reason.
    """

    def declare(function: Callable[..., float]) -> Callable[..., float]:
        @functools.wraps(function)
        def checked(*data: Any, **options: Any) -> float:
            value = float(function(*data, **options))
            if not low - 1e-9 <= value <= high + 1e-9:
                raise ValueError(f"{name} is {value}, outside [{low}, {high}]")
            return min(max(value, low), high)

        if name in METRICS and inspect.getmodule(METRICS[name].function) is not inspect.getmodule(function):
            raise ValueError(f"two metrics are called {name!r}")
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        arguments = inspect.signature(function).parameters.values()
        options = {a.name: a.default for a in arguments if a.kind is keyword_only}
        METRICS[name] = Metric(
            name, label, level, low, high, direction, unit, definition, source, version, options, checked
        )
        return checked

    return declare


def metrics(level: Level) -> list[Metric]:
    """The declared metrics of one level, in the order of their declaration."""
    return [found for found in METRICS.values() if found.level == level]
