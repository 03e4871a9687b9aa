"""Scores to the benchmark table: collect every record, check it against the plan, write each format."""

import csv
import html
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from anomed import records
from anomed.errors import AnomedError
from anomed.manifest import Prepared
from anomed.report import summary
from anomed.report.summary import Block
from anomed.settings import Settings, check

JOB = ("domain", "system", "seed")
PERFORMANCE = (*JOB, "device", "fit_seconds", "fit_peak_mb", "predict_seconds", "predict_peak_mb")


class Record(Settings):
    """One metric of one run, as the score command wrote it: a finite value, or none and the reason."""

    model_config = ConfigDict(allow_inf_nan=False)

    metric: str
    label: str
    level: str
    value: float | None
    reason: str | None
    n: int
    counts: dict[str, int]
    unit: str
    direction: Literal["higher", "lower"]
    definition: str
    source: str
    version: int

    @model_validator(mode="after")
    def _value_or_reason(self) -> "Record":
        if (self.value is None) != bool(self.reason):
            raise ValueError(f"{self.metric} needs a value, or null and a reason")
        return self


class ScoreFile(Settings):
    """scores/<domain>/<system>/<seed>.json (contract 4)."""

    domain: str
    system: str
    seed: int
    manifest_hash: str
    parameter_hash: str
    records: list[Record] = Field(min_length=1)

    @field_validator("records")
    @classmethod
    def _once(cls, records: list[Record]) -> list[Record]:
        names = [record.metric for record in records]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"{twice} stands there more than once")
        return records


def build(plan: dict[str, Any], prepared: Path, scores: Path, runs: Path, models: Path, out: Path) -> None:
    """Write scores.csv, table.csv, table.md, table.tex and performance.csv into `out`, each atomically.

    plan: {"domains": [..], "systems": {name: {"seeds": [..], "hash": parameter hash}}}.
    Raises AnomedError naming the file when a score is missing, damaged or not of the current parameters and data;
    then nothing is written.
    """
    check(summary.Planned, plan, "--plan")
    cards = {domain: Prepared(prepared / domain).card for domain in plan["domains"]}
    rows = list(collect(plan, cards, scores))
    blocks = summary.summarise(plan, rows)
    files = {
        "scores.csv": csv_text(summary.COLUMNS, rows),
        "table.csv": csv_text(*wide(plan, blocks)),
        "table.md": markdown(blocks, cards),
        "table.tex": latex(blocks, cards),
        "performance.csv": csv_text(PERFORMANCE, [timing(*run, runs, models) for run in summary.planned(plan)]),
    }
    for name, text in files.items():
        records.write_text(out / name, text)


def collect(plan: dict[str, Any], cards: dict[str, Any], scores: Path) -> Iterator[dict[str, Any]]:
    """The rows of scores.csv: every metric of a domain for every run; one that a run does not list does not apply."""
    first: dict[str, tuple[Path, dict[str, Any]]] = {}
    for domain in plan["domains"]:
        files = {}
        for run in summary.planned({**plan, "domains": [domain]}):
            path = scores / domain / run[1] / f"{run[2]}.json"
            file = files[run] = _read(path, *run)
            hashes = cards[domain]["hash"], plan["systems"][run[1]]["hash"]
            summary.current(str(path), "manifest_hash", file.manifest_hash, hashes[0], f"the prepared domain {domain}")
            summary.current(str(path), "parameter_hash", file.parameter_hash, hashes[1], f"the parameters of {run[1]}")
            for record in file.records:
                _same(path, record, first)
        metrics = dict.fromkeys(record.metric for file in files.values() for record in file.records)
        for run, file in files.items():
            found = {record.metric: record.model_dump() for record in file.records}
            for metric in metrics:
                row = dict(zip(("domain", "system", "seed"), run, strict=True)) | first[metric][1]
                row |= found.get(metric, {"metric": metric, "value": None, "reason": "not applicable", "counts": {}})
                row["data"] = summary.provenance(cards[domain])
                yield row | {"manifest_hash": file.manifest_hash, "parameter_hash": file.parameter_hash}


def _same(path: Path, record: Record, first: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    """One metric has one definition and version in the whole table: numbers of two versions do not compare."""
    mine = record.model_dump(include=set(summary.FACTS))
    where, other = first.setdefault(record.metric, (path, mine))
    differ = ", ".join(f"{key} {mine[key]!r} and {other[key]!r}" for key in summary.FACTS if mine[key] != other[key])
    if differ:
        raise AnomedError(f"{path} and {where}: {record.metric} has {differ}; delete both and score again")


def _read(path: Path, domain: str, system: str, seed: int) -> ScoreFile:
    try:
        file = ScoreFile.model_validate(records.read_card(path))
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "the top level"
        raise AnomedError(f"{path}: damaged at {where} ({fault['msg']}); delete it and score again") from None
    found, expected = f"{file.domain}/{file.system}/{file.seed}", f"{domain}/{system}/{seed}"
    if found != expected:
        raise AnomedError(f"{path}: found the scores of {found}, expected {expected}; delete it and score again")
    return file


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
    """Columns and rows of table.csv: one row per system, `<domain>.<metric>` and its `.std`, six decimals."""
    columns, rows = ["system"], {system: {"system": system} for system in plan["systems"]}
    for block in blocks:
        for metric in block.metrics:
            name = f"{block.domain}.{metric}"
            columns += [name, f"{name}.std"]
            for system, row in rows.items():
                cell = block.cells[system, metric]
                row[name] = "" if cell.mean is None else f"{cell.mean:.6f}"
                row[f"{name}.std"] = "" if cell.std is None else f"{cell.std:.6f}"
    return columns, list(rows.values())


def markdown(blocks: list[Block], cards: dict[str, Any]) -> str:
    """table.md: one table per domain, the data behind it, the reasons of empty cells, the definitions."""
    lines = ["# Benchmark table", "", _md(summary.LEGEND)]
    for block in blocks:
        card, notes, columns = cards[block.domain], block.notes(), block.columns()
        lines += ["", f"## {_md(block.domain)}", "", f"Data: {_md(summary.provenance(card))}."]
        lines += ["", f"Images: {_md(summary.counts(card))}."]
        for text in summary.problems(card):
            lines += ["", f"Warning: {_md(text)}."]
        header = ["system", "seeds", *(_md(block.header(metric)) for metric in columns)]
        lines += ["", _md_row(header), _md_row([":--", "--:", *["--:"] * len(columns)])]
        for system, seeds in block.seeds.items():
            row = [_md(system), str(len(seeds))]
            for metric in columns:
                cell = block.cells[system, metric]
                text = f"**{cell.text()}**" if system in block.best(metric) else cell.text()
                row.append(f"{text} [{notes[cell.reason]}]" if cell.reason else text)
            lines.append(_md_row(row))
        for text in block.omitted():
            lines += ["", f"{_md(text)}."]
        for level, found in block.counted.items():
            lines += ["", f"Counted for {level} metrics: {_md('; or '.join(found))}."]
        if notes:
            lines += ["", *(f"- [{number}] no value: {_md(reason)}" for reason, number in notes.items())]
    lines += ["", "## Definitions", ""]
    for metric, facts in _metrics(blocks).items():
        name = f"**{_md(facts['label'])}** (`{metric}`, version {facts['version']})"
        lines.append(f"- {name}: {_md(facts['definition'])} Source: {_md(facts['source'])}.")
    return "\n".join(lines) + "\n"


def latex(blocks: list[Block], cards: dict[str, Any]) -> str:
    """table.tex: one booktabs tabular per domain, with the same notes; needs \\usepackage{booktabs} and UTF-8 input."""
    lines = ["% Written by `anomed table`. Needs \\usepackage{booktabs}.", f"% {summary.LEGEND}"]
    for block in blocks:
        card, notes, columns = cards[block.domain], block.notes(), block.columns()
        lines += ["", f"% {block.domain}: {' '.join(summary.provenance(card).split())}"]
        lines += [f"\\begin{{tabular}}{{l{'r' * len(columns)}}}", "\\toprule"]
        lines += [_tex_row([_tex(block.domain), *(_tex(block.header(metric)) for metric in columns)]), "\\midrule"]
        for system in block.seeds:
            row = [_tex(system)]
            for metric in columns:
                cell = block.cells[system, metric]
                text = f"\\textbf{{{_tex(cell.text())}}}" if system in block.best(metric) else _tex(cell.text())
                row.append(f"{text} [{notes[cell.reason]}]" if cell.reason else text)
            lines.append(_tex_row(row))
        lines += ["\\bottomrule", "\\end{tabular}", "", f"{{\\footnotesize Data: {_tex(summary.provenance(card))}."]
        lines += [f"{_tex(text)}." for text in summary.problems(card) + block.omitted()]
        lines += [f"[{number}] no value: {_tex(reason)}." for reason, number in notes.items()]
        lines += ["\\par}"]
    return "\n".join(lines) + "\n"


def _metrics(blocks: list[Block]) -> dict[str, dict[str, Any]]:
    return {metric: facts for block in blocks for metric, facts in block.metrics.items()}


def _md_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _md(text: str) -> str:
    """Plain text as Markdown: on one line, nothing in it is markup."""
    one_line = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"[\\`*|\[\]]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", one_line)


def _tex_row(cells: list[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


_TEX = {
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "↑": "$\\uparrow$",
    "↓": "$\\downarrow$",
    "±": "$\\pm$",
    "–": "--",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def _tex(text: str) -> str:
    """Plain text as LaTeX: on one line, every special character escaped."""
    return "".join(_TEX.get(character, character) for character in " ".join(text.split()))
