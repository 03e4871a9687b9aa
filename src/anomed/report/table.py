"""Scores to the benchmark table: collect every record, check it against the plan, write each format."""

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from anomed import records
from anomed.errors import AnomedError
from anomed.manifest import Prepared
from anomed.report import formats, statistics, summary
from anomed.report.scores import Record, ScoreFile, mean_replicates, read
from anomed.report.summary import Block
from anomed.settings import check

JOB = ("domain", "system", "seed")
PERFORMANCE = (*JOB, "device", "fit_seconds", "fit_peak_mb", "predict_seconds", "predict_peak_mb")
Files = dict[tuple[str, str, int], ScoreFile]  # by domain, system and seed, in plan order


def build(plan: dict[str, Any], prepared: Path, scores: Path, runs: Path, models: Path, out: Path) -> None:
    """Write scores.csv, table.csv, table.md, table.tex, breakdowns.csv, statistics.json and performance.csv into `out`,
    each atomically.

    plan: {"domains": [..], "systems": {name: {"seeds": [..], "hash": parameter hash}}}.
    Raises AnomedError naming the file when a score is missing, damaged or not of the current parameters and data;
    then nothing is written.
    """
    check(summary.Planned, plan, "--plan")
    cards = {domain: Prepared(prepared / domain).card for domain in plan["domains"]}
    files = collect(plan, cards, scores)
    rows = list(listed(plan, files, cards))
    found = statistics.compute(plan, rows, means(files, scores))
    blocks = summary.summarise(plan, rows, found)
    table = csv_text(summary.COLUMNS, rows)
    texts = {
        "scores.csv": table,
        "table.csv": csv_text(*wide(plan, blocks)),
        "table.md": formats.markdown(blocks, cards),
        "table.tex": formats.latex(blocks, cards),
        "breakdowns.csv": csv_text(*breakdowns(files)),
        "statistics.json": statistics.text(found, table),
        "performance.csv": csv_text(PERFORMANCE, [timing(*run, runs, models) for run in files]),
    }
    for name, text in texts.items():
        records.write_text(out / name, text)


def collect(plan: dict[str, Any], cards: dict[str, Any], scores: Path) -> Files:
    """Every score file of the plan, once all are of the current state and their numbers compare with each other."""
    files: Files = {}
    facts: dict[str, tuple[Path, dict[str, Any]]] = {}
    drawn: dict[str, tuple[Path, dict[str, Any]]] = {}
    for domain, system, seed in summary.planned(plan):
        path = _path(scores, domain, system, seed)
        file = files[domain, system, seed] = read(path, domain, system, seed)
        hashes = cards[domain]["hash"], plan["runs"][domain][system]["hash"]
        summary.current(str(path), "manifest_hash", file.manifest_hash, hashes[0], f"the prepared domain {domain}")
        summary.current(str(path), "parameter_hash", file.parameter_hash, hashes[1], f"the parameters of {system}")
        mine = file.bootstrap.drawn()
        _same(path, "the bootstrap", mine, drawn.setdefault(domain, (path, mine)))
        for record in file.records:
            mine = _facts(record)
            _same(path, record.metric, mine, facts.setdefault(record.metric, (path, mine)))
    return files


def _path(scores: Path, domain: str, system: str, seed: int) -> Path:
    return scores / domain / system / f"{seed}.json"


def _facts(record: Record) -> dict[str, Any]:
    return record.model_dump(include=set(summary.FACTS))


def _same(path: Path, what: str, mine: dict[str, Any], first: tuple[Path, dict[str, Any]]) -> None:
    """A metric has one definition in the whole table, a domain one bootstrap: else numbers do not compare."""
    where, other = first
    differ = ", ".join(f"{key} {mine[key]!r} and {other[key]!r}" for key in mine if mine[key] != other[key])
    if differ:
        raise AnomedError(f"{path} and {where}: {what} has {differ}; delete both and score again")


def listed(plan: dict[str, Any], files: Files, cards: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of scores.csv: every metric of a domain for every run; one that a run does not list does not apply. A
    system that does not run on a domain has one row a metric, without a seed and with the reason."""
    facts: dict[str, dict[str, dict[str, Any]]] = {}
    for (domain, _, _), file in files.items():
        for record in file.records:
            facts.setdefault(domain, {}).setdefault(record.metric, _facts(record))
    for domain, pairs in plan["runs"].items():
        data = summary.provenance(cards[domain])
        for system, pair in pairs.items():
            shared = {"domain": domain, "system": system, "data": data}
            shared |= {"mark": plan["marks"].get(system, ""), "selection": plan["selection"].get(system, "")}
            for seed in pair["seeds"]:
                file = files[domain, system, seed]
                found = {record.metric: record.model_dump() for record in file.records}
                own = shared | file.model_dump(include={"seed", "bootstrap", "manifest_hash", "parameter_hash"})
                for metric, known in facts[domain].items():
                    yield own | known | {"metric": metric} | found.get(metric, _absent("not applicable"))
            if pair["absent"]:
                for metric, known in facts[domain].items():
                    yield shared | known | {"metric": metric, "seed": None, "bootstrap": {}} | _absent(pair["absent"])


def _absent(reason: str) -> dict[str, Any]:
    empty = dict.fromkeys(("value", "low", "high"))
    return {**empty, "reason": reason, "interval_reason": reason, "counts": {}}


def means(files: Files, scores: Path) -> dict[tuple[str, str, str], Any]:
    """Replicates of every mean over seeds, float64 (R,), by (domain, system, metric)."""
    runs: dict[tuple[str, str], dict[Path, ScoreFile]] = {}
    for (domain, system, seed), file in files.items():
        runs.setdefault((domain, system), {})[_path(scores, domain, system, seed)] = file
    return {(*run, metric): array for run, seeds in runs.items() for metric, array in mean_replicates(seeds).items()}


def breakdowns(files: Files) -> tuple[list[str], list[dict[str, Any]]]:
    """Columns and rows of breakdowns.csv: one row for each group of abnormal images of a run, one column per metric."""
    metrics = dict.fromkeys(record.metric for file in files.values() for record in file.records)
    rows = []
    for run, file in files.items():
        for group in file.breakdowns:
            row = dict(zip(JOB, run, strict=True)) | group.model_dump(exclude={"values"})
            rows.append(row | group.values)
    return [*JOB, "by", "group", "n", "counts", *metrics, "reasons"], rows


def timing(domain: str, system: str, seed: int, runs: Path, models: Path) -> dict[str, Any]:
    """Seconds and peak resident memory (MB) of the fit and predict jobs of one run, from their run cards."""
    row: dict[str, Any] = {"domain": domain, "system": system, "seed": seed}
    for step, folder in (("fit", models), ("predict", runs)):
        path = folder / domain / system / str(seed) / records.RUN_CARD
        if step == "predict" or path.exists():  # a system that is not fitted has no model
            card = records.read_card(path, *JOB, "seconds", "peak_memory_mb", "device")
            found = {key: card[key] for key in JOB}
            if found != {key: row[key] for key in JOB}:
                raise AnomedError(f"{path}: is of {found}, not of this run; delete its folder and run again")
            if "origin" not in card:  # what was imported took its time elsewhere
                row |= {f"{step}_seconds": card["seconds"], f"{step}_peak_mb": card["peak_memory_mb"]}
            row["device"] = card["device"]
    return row


def csv_text(columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> str:
    """CSV with LF line ends; None is an empty field, a float its shortest exact form, a list or dict its JSON."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: records.canonical(v) if isinstance(v, dict | list) else v for key, v in row.items()})
    return buffer.getvalue()


def wide(plan: dict[str, Any], blocks: list[Block]) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of table.csv: one row per system, `<domain>.<metric>`, its `.std`, and `.low` and `.high` of the
    mean's interval, six decimals."""
    columns, rows = ["system"], {system: {"system": system} for system in plan["systems"]}
    for block in blocks:
        for metric in block.metrics:
            name = f"{block.domain}.{metric}"
            names = [name, f"{name}.std", f"{name}.low", f"{name}.high"]
            columns += names
            for system, row in rows.items():
                cell = block.cells[system, metric]
                values = (cell.mean, cell.std, cell.low, cell.high)
                row |= {key: "" if v is None else f"{v:.6f}" for key, v in zip(names, values, strict=True)}
    return columns, list(rows.values())
