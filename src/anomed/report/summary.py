"""The table in memory: the rows of scores.csv, averaged over seeds, with what table and report print beside them."""

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from anomed import stats
from anomed.errors import AnomedError
from anomed.manifest import SPLITS
from anomed.metrics.declare import TITLES
from anomed.ranks import ALPHA
from anomed.settings import Settings

# Of a metric; the same in every run.
FACTS = ("definition_id", "label", "level", "unit", "direction", "definition", "source", "version")
COLUMNS = (
    "domain", "system", "seed", "metric", "value", "reason", "low", "high", "interval_reason", "n", "counts", *FACTS,
    "bootstrap", "data", "mark", "selection", "manifest_hash", "parameter_hash",
)  # fmt: skip
LABELS = ("normal", "abnormal")
FEW = 20  # subjects below which tables warn that intervals cover too seldom
ARROWS = {"higher": "↑", "lower": "↓"}
SIGN = "≈"
DAGGER = "†"
DISCLAIMER = "reproduces no published number"
LEGEND = (
    "Values are fractions from 0 to 1, not percent, unless a definition says otherwise: mean over seeds ± standard "
    "deviation (ddof 1; none with one seed), and in brackets the bootstrap interval of that mean, seeds held fixed. ↑ "
    "higher is better, ↓ lower is better. "
    f"Bold is the best value of its column as printed, controls included, rows that are no comparison ({DAGGER} smoke, "
    f"{DAGGER} not comparable, {DAGGER} chosen on test labels) left out; {SIGN} marks values that the paired "
    f"bootstrap does not separate from it (p ≥ {ALPHA}, Holm-corrected over the systems of the column, or no test "
    "possible)."
)


@dataclass(frozen=True)
class Cell:
    """Mean and standard deviation over seeds and the interval of the mean, or the reasons why there are none."""

    mean: float | None
    std: float | None
    reason: str
    low: float | None = None
    high: float | None = None
    interval_reason: str = ""

    def value(self) -> str:
        """`0.1234`, or a dash."""
        return "–" if self.mean is None else f"{self.mean:.4f}"

    def spread(self) -> str:
        """`± 0.0567`; empty with one seed."""
        return "" if self.std is None else f"± {self.std:.4f}"

    def interval(self) -> str:
        """`[0.100, 0.150]`; empty when there is none."""
        return "" if self.low is None else f"[{self.low:.3f}, {self.high:.3f}]"

    def note(self) -> str:
        """What is missing, and why; empty when nothing is."""
        if self.reason:
            return f"no value: {self.reason}"
        return f"no interval: {self.interval_reason}" if self.interval_reason else ""


@dataclass(frozen=True)
class Block:
    """One printed table: the metrics of one domain and level.

    seeds: of each system, in plan order. metrics: facts of each metric. bootstrap: how replicates were drawn. counted:
    what the values were counted on, one text unless systems differ. cells: by (system, metric). against_best: per
    metric the Holm-corrected p value of each system against the best one, None where no test was possible. marks: what
    readers must know of a system, where there is something; models: and of the domain's models. apart: systems whose
    values are no comparison. selection: which epoch of its training a system keeps, where one is kept.
    """

    domain: str
    level: str
    seeds: dict[str, list[int]]
    bootstrap: dict[str, Any]
    marks: dict[str, str]
    models: str
    apart: list[str]
    selection: dict[str, str]
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    counted: list[str] = field(default_factory=list)
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    against_best: dict[str, dict[str, float | None]] = field(default_factory=dict)

    def name(self, system: str) -> str:
        """The system as a row is headed: with a dagger where a sentence under the table tells more."""
        return f"{system} {DAGGER}" if system in self.marks else system

    def kept(self, system: str) -> list[str]:
        """The cell of the column that tells which epoch is kept; none where no system of the table keeps one."""
        return [self.selection.get(system, "")] if self.selection else []

    def title(self) -> str:
        """What is counted."""
        return TITLES[self.level]

    def header(self, metric: str) -> str:
        """The metric's label and an arrow to its better end."""
        return f"{self.metrics[metric]['label']} {ARROWS[self.metrics[metric]['direction']]}"

    def best(self, metric: str) -> set[str]:
        """Systems whose printed mean is the best of the column; empty when there is none worse."""
        competing = [system for system in self.seeds if system not in self.apart]
        means = {s: round(c.mean, 4) for s in competing if (c := self.cells[s, metric]).mean is not None}
        if len(set(means.values())) < 2:
            return set()
        top = (max if self.metrics[metric]["direction"] == "higher" else min)(means.values())
        return {system for system, mean in means.items() if mean == top}

    def alike(self, metric: str) -> set[str]:
        """Systems printed as worse than the best of the column that the paired bootstrap does not separate from it."""
        best = self.best(metric)
        tests = self.against_best[metric].items() if best else ()
        return {system for system, p in tests if system not in best and (p is None or p >= ALPHA)}

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
        """The one reason why no system that runs here has a value; empty when one has one, or when reasons differ."""
        reasons = {self.cells[system, metric].reason for system, seeds in self.seeds.items() if seeds}
        return reasons.pop() if len(reasons) == 1 else ""

    def notes(self) -> dict[str, int]:
        """The distinct notes of the cells that are printed, numbered from 1 in reading order."""
        found: dict[str, int] = {}
        for system in self.seeds:
            for metric in self.columns():
                if note := self.cells[system, metric].note():
                    found.setdefault(note, len(found) + 1)
        return found

    def below(self) -> list[str]:
        """The sentences under the table, without their stops: metrics left out, intervals, what was counted."""
        found = [*self.omitted(), *([f"Models: {self.models}"] if self.models else [])]
        if self.columns():
            found.append(f"Intervals: {resampling(self.bootstrap)}")
            marked: dict[str, list[str]] = {}
            for system, mark in self.marks.items():
                marked.setdefault(mark.rstrip("."), []).append(system)
            found += [f"{DAGGER} {', '.join(systems)}: {mark}" for mark, systems in marked.items()]
        return [*found, *([f"Counted: {'; or '.join(self.counted)}"] if self.counted else [])]


class Pair(Settings):
    """A system on a domain: the seeds that ran and the hash of its parameters, or why it does not run there."""

    seeds: list[int]
    hash: str
    absent: str

    @model_validator(mode="after")
    def _either(self) -> "Pair":
        if bool(self.seeds) == bool(self.absent):
            raise ValueError("expected seeds, or the reason why there are none")
        return self


class Planned(Settings):
    """What `--plan` holds (plan.py makes it): domains and systems in the order of `run:`; by domain and system what
    runs; what readers must know of a system (marks) or of the models of a domain (notes), where there is something; and
    the systems that are ranked with no other (apart); which epoch of a training a system keeps (selection).
    """

    domains: list[str] = Field(min_length=1)
    systems: list[str] = Field(min_length=1)
    marks: dict[str, str]
    notes: dict[str, str]
    apart: list[str]
    selection: dict[str, str]
    runs: dict[str, dict[str, Pair]]

    @model_validator(mode="after")
    def _complete(self) -> "Planned":
        if [*self.runs] != self.domains or any([*pairs] != self.systems for pairs in self.runs.values()):
            raise ValueError("`runs` needs every domain and system, in their order")
        return self


def planned(plan: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """(domain, system, seed) of every run, in plan order."""
    for domain, pairs in plan["runs"].items():
        for system, pair in pairs.items():
            for seed in pair["seeds"]:
                yield domain, system, seed


def current(where: str, key: str, found: str, expected: str, what: str) -> None:
    """Raise AnomedError unless `found`, the hash that a file carries under `key`, is the one of the present state."""
    if found != expected:
        raise AnomedError(
            f"{where}: {key} is {found}, expected {expected}: it was made with another state of {what}; "
            "run snakemake, or delete the file and repeat the command that makes it"
        )


def grouped(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, str], dict[str, list[dict[str, Any]]]]:
    """Rows of scores.csv by (domain, metric), then by system: one row per seed."""
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        groups.setdefault((row["domain"], row["metric"]), {}).setdefault(row["system"], []).append(row)
    return groups


def summarise(plan: dict[str, Any], rows: Iterable[dict[str, Any]], statistics: dict[str, Any]) -> list[Block]:
    """One block per domain and level, in the order of the plan and of the rows of scores.csv.

    statistics: content of statistics.json.
    """
    blocks: dict[tuple[str, str], Block] = {}
    for (domain, metric), systems in grouped(rows).items():
        found = statistics["domains"][domain]["metrics"][metric]
        first = next(row for group in systems.values() for row in group if row["seed"] is not None)
        seeds = {system: pair["seeds"] for system, pair in plan["runs"][domain].items()}
        models = plan["notes"].get(domain, "")
        told = plan["marks"], models, plan["apart"], plan["selection"]
        new = Block(domain, first["level"], seeds, first["bootstrap"], *told)
        block = blocks.setdefault((domain, first["level"]), new)
        block.metrics[metric] = {key: first[key] for key in FACTS}
        block.against_best[metric] = found["against_best"]
        for system, group in systems.items():
            low, high, reason = (found["intervals"][system][key] for key in ("low", "high", "reason"))
            block.cells[system, metric] = replace(average(group), low=low, high=high, interval_reason=reason or "")
            for row in group:
                if row["value"] is not None and (text := _counted(block.level, row["counts"])) not in block.counted:
                    block.counted.append(text)
    return sorted(blocks.values(), key=lambda block: plan["domains"].index(block.domain))


def average(rows: list[dict[str, Any]]) -> Cell:
    """The mean of one system over its seeds, one row each; it exists only when every seed has a value."""
    if reason := together(rows, "reason"):
        return Cell(None, None, reason)
    values, count = [row["value"] for row in rows], len(rows)
    mean = math.fsum(values) / count
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1)) if count > 1 else None
    return Cell(mean, std, "")


def together(rows: list[dict[str, Any]], key: str) -> str:
    """The reasons that the rows of the seeds give under `key` as one text; empty when there is none."""
    reasons = {row["seed"]: row[key] for row in rows if row[key]}
    if len(reasons) == len(rows) and len(set(reasons.values())) == 1:
        return str(rows[0][key])
    return "; ".join(f"seed {seed}: {reason}" for seed, reason in reasons.items())


def resampling(bootstrap: dict[str, Any]) -> str:
    """How intervals were made, in one clause."""
    units, unit = bootstrap["units"], bootstrap["unit"]
    if units < stats.FEWEST:
        return f"none, {_number(units, unit)} of the {stats.FEWEST} that they need"
    text = f"{100 * bootstrap['confidence']:g} % bootstrap over {_number(units, unit)}"
    text += f", {_number(bootstrap['replicates'], 'replicate')}"
    if units < FEW:
        text += f"; of so few {unit}s they hold the truth less often than they say (docs/intervals.md)"
    if unit == "image":
        text += "; over images: subjects unknown, so intervals are too narrow if a subject has several images"
    return text


def _counted(level: str, counts: dict[str, int]) -> str:
    """For example `1,070 normal pixels, 42 abnormal pixels, 1 region, 2 images without pixel truth left out`."""
    unit = "image" if level == "image" else "pixel"
    parts = [_number(counts[label], f"{label} {unit}") for label in LABELS if label in counts]
    parts += [_number(counts[key], key.removesuffix("s")) for key in sorted({*counts} - {*LABELS, "excluded"})]
    if excluded := counts.get("excluded"):
        parts.append(f"{_number(excluded, 'image')} without pixel truth left out")
    return ", ".join(parts)


def _number(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a scores.csv with typed seed (None where a system does not run), value, counts and bootstrap; all
    else is text.

    Raises AnomedError when it is missing or damaged.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows: list[dict[str, Any]] = list(reader)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"found columns {reader.fieldnames}, expected {list(COLUMNS)}")
        for row in rows:
            row |= {
                "seed": int(row["seed"]) if row["seed"] else None,
                "value": float(row["value"]) if row["value"] else None,
            }
            row |= {key: json.loads(row[key]) for key in ("counts", "bootstrap")}
    except FileNotFoundError:
        raise AnomedError(f"{path}: not found; run `anomed table` first") from None
    except (ValueError, TypeError, csv.Error) as error:  # a cut row lacks fields
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
