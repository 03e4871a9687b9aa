"""How a metric says what it is: one decorator, one registry."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from anomed.errors import AnomedError
from anomed.metrics.counts import Counts, NotComputable, of_images
from anomed.metrics.histogram import PixelHistogram

Level = Literal["image", "pixel", "foreground"]
LEVELS: tuple[Level, ...] = ("image", "pixel", "foreground")
TITLES = {"image": "Images", "pixel": "Pixels", "foreground": "Pixels of the organ"}
CALLS = {
    "image": "Call it with scores and labels, both (N,), or with Counts; `threshold=` is the score from which on an "
    "image is called abnormal.",
    "pixel": "Call it with a PixelHistogram or with Counts; `threshold=` is the code from which on a pixel is called "
    "abnormal.",
}
METRICS: dict[str, "Metric"] = {}


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
    function: Callable[..., Any]

    def evaluate(self, counts: Counts, options: Mapping[str, Any]) -> tuple[float | None, str | None]:
        """(value, None), or (None, reason), of one set of counts. Of `options` it takes what it knows."""
        try:
            return float(self.function(counts, **self._known(options))), None
        except NotComputable as reason:
            return None, str(reason)

    def replicates(self, counts: Counts, options: Mapping[str, Any]) -> np.ndarray:
        """Values of counts with one leading axis, float64 (R,); NaN where there is none."""
        return np.asarray(self.function(counts, **self._known(options)))

    def described(self, options: Mapping[str, Any]) -> str:
        """The definition, with the options that hold filled in."""
        return self.definition.format(**{**self.options, **self._known(options)})

    def identifier(self, options: Mapping[str, Any]) -> str:
        """Name, version and options: two values compare only when these are equal."""
        held = {**self.options, **self._known(options)}
        return f"{self.name}.v{self.version}" + "".join(f"[{key}={held[key]}]" for key in sorted(held))

    def _known(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {key: options[key] for key in self.options if key in options}


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
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that makes a function a metric; nothing else is needed to have it computed, with its interval, and in
    the table.

    The function takes `counts.Counts` with any leading axes and returns an array of those axes; `curves` has the usual
    parts. What it returns where a class is absent is not looked at: one set of counts has no value then, of several it
    is NaN. It raises NotComputable with the reason when there is no value for another cause. Its keyword-only arguments
    are filled from the block `metrics:` of params.yaml.

    name: column name. label: for readers. level: what is counted, "image" or "pixel"; a pixel metric is also computed
    on the pixels of the organ alone, under `<name>_foreground`. low, high: range; a value outside is a fault of the
    function (ValueError), rounding up to 1e-9 beyond is cut off. direction: which values are better, "higher" or
    "lower". unit: "fraction" for 0 to 1, which has its own interval, else another word. definition: one sentence, in
    which {option} is filled in. source: paper or definition followed. version: counted up when values change.

    What it returns can be called with Counts, and also with plain data: scores and labels, both (N,), of an image
    metric, a `PixelHistogram` of a pixel metric, either with `threshold=` where the metric needs one. One set of data
    gives a float.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def checked(*data: Any, threshold: Any = None, **options: Any) -> Any:
            counts = _counts(name, level, data, threshold)
            counts.require()
            values = np.asarray(function(counts, **options), np.float64)
            if values.ndim:  # a replicate of one class has no value, whatever the function says
                values = np.where((counts.true[..., -1] > 0) & (counts.false[..., -1] > 0), values, np.nan)
            outside = values[(values < low - 1e-9) | (values > high + 1e-9)]
            if outside.size:
                raise ValueError(f"{name} is {outside.flat[0]}, outside [{low}, {high}]")
            values = np.clip(values, low, high)
            return values if values.ndim else float(values)

        if name in METRICS and _place(METRICS[name].function) != _place(function):
            raise ValueError(f"two metrics are called {name!r}: {_place(METRICS[name].function)}, {_place(function)}")
        if unit == "fraction" and (low, high) != (0, 1):
            raise ValueError(f"{name}: a fraction goes from 0 to 1, found {low} to {high}; name another unit")
        checked.__doc__ = f"{inspect.getdoc(function) or definition}\n\n{CALLS[level]}"
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        arguments = inspect.signature(function).parameters.values()
        options = {a.name: a.default for a in arguments if a.kind is keyword_only}
        METRICS[name] = found = Metric(
            name, label, level, low, high, direction, unit, definition, source, version, options, checked
        )
        if level == "pixel":
            inside = f"{definition} Only the pixels of the organ count, and only what lies in it of a lesion."
            facts = {"name": f"{name}_foreground", "label": f"{label}, organ", "level": "foreground"}
            twin = replace(found, **facts, definition=inside)  # type: ignore[arg-type]
            METRICS[twin.name] = twin
        return checked

    return declare


def metrics(level: Level) -> list[Metric]:
    """The declared metrics of one level, in the order of their declaration."""
    return [found for found in METRICS.values() if found.level == level]


def _place(function: Callable[..., Any]) -> str:
    """Where a function is written; equal when a module is loaded again."""
    plain = inspect.unwrap(function)
    return f"{plain.__module__}, line {plain.__code__.co_firstlineno}"


def _counts(name: str, level: Level, data: tuple[Any, ...], threshold: Any) -> Counts:
    first = data[0] if data else None
    if isinstance(first, Counts):
        return first
    if level == "pixel" and isinstance(first, PixelHistogram):
        return first.counts(threshold)
    if level == "image" and len(data) == 2:
        return of_images(*data, threshold)
    found = ", ".join(type(one).__name__ for one in data) or "nothing"
    wanted = (
        "scores and labels" if level == "image" else "a PixelHistogram (`ranking.pixel_metrics` takes maps and masks)"
    )
    raise AnomedError(f"{name}: found {found}, expected {wanted}")
