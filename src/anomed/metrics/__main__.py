"""`python -m anomed.metrics` prints what every metric is, as Markdown; docs/metrics.md is its output."""

from anomed.metrics.declare import LEVELS, TITLES
from anomed.metrics.ranking import metrics


def page() -> str:
    """The declared metrics with their default options, one paragraph each."""
    lines = ["# Metrics", "", "Made by `python -m anomed.metrics` from the declarations; do not edit."]
    for level in LEVELS:
        lines += ["", f"## {TITLES[level]}"]
        for metric in metrics(level):
            facts = f"{metric.low:g} to {metric.high:g}, {metric.direction} is better, {metric.unit}"
            lines += ["", f"**{metric.label}** (`{metric.identifier({})}`): {facts}."]
            lines += [metric.described({}), f"Source: {metric.source}.", str(metric.function.__doc__).split("\n\n")[0]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
