"""The table in memory: the rows of scores.csv, averaged over seeds, with what table and report print beside them."""

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from anomed.errors import AnomedError
from anomed.manifest import SPLITS
from anomed.settings import Settings

FACTS = ("label", "level", "unit", "direction", "definition", "source", "version")  # of a metric; the same in every run
COLUMNS = (
    "domain", "system", "seed", "metric", "value", "reason", "n", "counts", *FACTS,
    "data", "manifest_hash", "parameter_hash",
)  # fmt: skip
LABELS = ("normal", "abnormal")
ARROWS = {"higher": "↑", "lower": "↓"}
DISCLAIMER = "reproduces no published number"
LEGEND = (
    "Values are fractions from 0 to 1, not percent: mean over seeds ± standard deviation (ddof 1; none with one seed). "
    "↑ higher is better, ↓ lower is better. Bold is the best value of its column as printed, controls included."
)


@dataclass(frozen=True)
class Cell:
    """Mean and standard deviation over seeds, or the reason why there is none."""

    mean: float | None
    std: float | None
    reason: str

    def text(self) -> str:
        """`0.1234 ± 0.0567`, `0.1234` with one seed, or a dash."""
        if self.mean is None:
            return "–"
        return f"{self.mean:.4f}" + (f" ± {self.std:.4f}" if self.std is not None else "")


@dataclass(frozen=True)
class Block:
    """The table of one domain.

    seeds: of each system, in plan order. metrics: facts of each metric. counted: per level ("image", "pixel") what the
    values were counted on, one text unless systems differ; a level without values is left out. cells: by
    (system, metric).
    """

    domain: str
    seeds: dict[str, list[int]]
    metrics: dict[str, dict[str, Any]]
    counted: dict[str, list[str]]
    cells: dict[tuple[str, str], Cell]

    def header(self, metric: str) -> str:
        """The metric's label and an arrow to its better end."""
        return f"{self.metrics[metric]['label']} {ARROWS[self.metrics[metric]['direction']]}"

    def best(self, metric: str) -> set[str]:
        """Systems whose printed mean is the best of the column; empty when there is none worse."""
        means = {s: round(c.mean, 4) for s in self.seeds if (c := self.cells[s, metric]).mean is not None}
        if len(set(means.values())) < 2:
            return set()
        top = (max if self.metrics[metric]["direction"] == "higher" else min)(means.values())
        return {system for system, mean in means.items() if mean == top}

    def columns(self) -> list[str]:
        """The metrics to print a column of: all but those that no system has a value of, for one reason."""
        return [metric for metric in self.metrics if not self._missing(metric)]

    def omitted(self) -> list[str]:
        """One sentence for each reason why metrics have no column: `Pixel AP, AUPRO: no value, ...`, without a stop."""
        found: dict[str, list[str]] = {}
        for metric, facts in self.metrics.items():
            if reason := self._missing(metric):
                found.setdefault(reason, []).append(facts["label"])
        return [f"{', '.join(labels)}: no value, {reason}" for reason, labels in found.items()]

    def _missing(self, metric: str) -> str:
        """The one reason why no system has a value; empty when a system has one, or when reasons differ."""
        reasons = {self.cells[system, metric].reason for system in self.seeds}
        return reasons.pop() if len(reasons) == 1 else ""

    def notes(self) -> dict[str, int]:
        """The distinct reasons of the empty cells that are printed, numbered from 1 in reading order."""
        found: dict[str, int] = {}
        for system in self.seeds:
            for metric in self.columns():
                if reason := self.cells[system, metric].reason:
                    found.setdefault(reason, len(found) + 1)
        return found


class PlannedSystem(Settings):
    """A row of the table: the seeds that ran, and the hash of its parameters."""

    seeds: list[int] = Field(min_length=1)
    hash: str


class Planned(Settings):
    """What `--plan` holds (plan.py makes it): domains and systems in the order of `run:`."""

    domains: list[str] = Field(min_length=1)
    systems: dict[str, PlannedSystem] = Field(min_length=1)


def planned(plan: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """(domain, system, seed) of every run, in plan order."""
    for domain in plan["domains"]:
        for system in plan["systems"]:
            for seed in plan["systems"][system]["seeds"]:
                yield domain, system, seed


def current(where: str, key: str, found: str, expected: str, what: str) -> None:
    """Raise AnomedError unless `found`, the hash that a file carries under `key`, is the one of the present state."""
    if found != expected:
        raise AnomedError(
            f"{where}: {key} is {found}, expected {expected}: it was made with another state of {what}; "
            "run snakemake, or delete the file and repeat the command that makes it"
        )


def summarise(plan: dict[str, Any], rows: Iterable[dict[str, Any]]) -> list[Block]:
    """One block per domain from the rows of scores.csv. A mean exists only when every seed has a value."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["domain"], row["system"], row["metric"]), []).append(row)
    blocks = []
    for domain in plan["domains"]:
        metrics: dict[str, dict[str, Any]] = {}
        cells: dict[tuple[str, str], Cell] = {}
        counted: dict[str, dict[str, None]] = {}
        for (where, system, metric), group in groups.items():
            if where == domain:
                metrics.setdefault(metric, {key: group[0][key] for key in FACTS})
                cells[system, metric] = _mean(group)
                level = group[0]["level"]
                for row in group:
                    if row["value"] is not None:
                        counted.setdefault(level, {})[_counted(level, row["counts"])] = None
        seeds = {system: plan["systems"][system]["seeds"] for system in plan["systems"]}
        blocks.append(Block(domain, seeds, metrics, {level: list(found) for level, found in counted.items()}, cells))
    return blocks


def _counted(level: str, counts: dict[str, int]) -> str:
    """For example `1,070 normal pixels, 42 abnormal pixels, 1 region, 2 images without pixel truth left out`."""
    parts = [_number(counts[label], f"{label} {level}") for label in LABELS if label in counts]
    parts += [_number(counts[key], key.removesuffix("s")) for key in sorted({*counts} - {*LABELS, "excluded"})]
    if excluded := counts.get("excluded"):
        parts.append(f"{_number(excluded, 'image')} without pixel truth left out")
    return ", ".join(parts)


def _number(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def _mean(group: list[dict[str, Any]]) -> Cell:
    values = [row["value"] for row in group if row["value"] is not None]
    count = len(group)
    if len(values) < count:
        reasons = {row["seed"]: row["reason"] for row in group if row["value"] is None}
        if len(reasons) == count and len(set(reasons.values())) == 1:
            return Cell(None, None, next(iter(reasons.values())))
        return Cell(None, None, "; ".join(f"seed {seed}: {reason}" for seed, reason in reasons.items()))
    mean = math.fsum(values) / count
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1)) if count > 1 else None
    return Cell(mean, std, "")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a scores.csv with typed seed and value. Raises AnomedError when it is missing or damaged."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows: list[dict[str, Any]] = list(reader)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"found columns {reader.fieldnames}, expected {list(COLUMNS)}")
        for row in rows:
            row |= {"seed": int(row["seed"]), "value": float(row["value"]) if row["value"] else None}
            row["counts"] = json.loads(row["counts"])
    except FileNotFoundError:
        raise AnomedError(f"{path}: not found; run `anomed table` first") from None
    except ValueError as error:
        raise AnomedError(f"{path}: damaged ({error}); run `anomed table` again") from None
    return rows


def provenance(card: dict[str, Any]) -> str:
    """Which data a domain was computed on, in one clause; only the released data can reproduce a published number."""
    note = str(card["note"])
    return note if card["official"] or DISCLAIMER in note else f"{note}; {DISCLAIMER}"


def counts(card: dict[str, Any]) -> str:
    """Images per split and label, for example `train 40 normal; test 20 normal, 30 abnormal`."""
    parts = []
    for split in SPLITS:
        kinds = [f"{number} {label}" for label in LABELS if (number := card["counts"][split][label])]
        parts.append(f"{split} {', '.join(kinds) or 'none'}")
    return "; ".join(parts)


def problems(card: dict[str, Any]) -> list[str]:
    """The known problems of the released data that its card lists, one sentence each."""
    found = sorted(card["problems"].items())
    return [f"known problem of these data: {code.replace('_', ' ')} ({number})" for code, number in found]
