"""The report: one self-contained page with the table, pictures of what each method saw, cost and provenance."""

import csv
import json
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from anomed import records
from anomed.errors import AnomedError
from anomed.manifest import Prepared
from anomed.predictions import Predictions
from anomed.report import figures, formats, statistics, summary
from anomed.settings import check

Job = tuple[str, str, str, int, dict[str, Any]]  # step, domain, system, seed, run card
COSTS = {"fit_seconds": 1, "fit_peak_mb": 0, "predict_seconds": 1, "predict_peak_mb": 0}  # decimals printed
COMMAND = "snakemake --cores all results/report.html"


def build(plan: dict[str, Any], prepared: Path, runs: Path, models: Path, results: Path, out: Path) -> None:
    """Write the page `out`. It needs no network and no JavaScript; every string from data is escaped.

    plan: as for the table. results: the folder with scores.csv and performance.csv. Raises AnomedError when those are
    missing or of another plan or other data.
    """
    import jinja2

    check(summary.Planned, plan, "--plan")
    domains = {name: Prepared(prepared / name) for name in plan["domains"]}
    rows = summary.read(results / "scores.csv")
    _check(plan, domains, rows, results / "scores.csv")
    source = resources.files("anomed.report").joinpath("template.html").read_text("utf-8")
    engine = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = engine.from_string(source)
    found = statistics.read(results / "statistics.json", results / "scores.csv")
    blocks = summary.summarise(plan, rows, found)
    cards = list(_cards(plan, runs, models))
    page = template.render(
        sections=[
            _section([block for block in blocks if block.domain == name], name, domain, plan["runs"][name], runs / name)
            for name, domain in domains.items()
        ],
        unreleased=_unreleased(domains),
        legend=summary.LEGEND,
        sign=summary.SIGN,
        definitions=formats.definitions(blocks),
        performance=_performance(results / "performance.csv"),
        bar=figures.colour_bar(),
        width=figures.WIDTH,
        quantiles=[f"{100 * share:g} %" for share in figures.QUANTILES],
        command=COMMAND,
        commit=_commit(),
        **_provenance(cards),
    )
    records.write_text(out, page)


def _unreleased(domains: dict[str, Prepared]) -> dict[str, list[str]]:
    """What data were used instead of the released ones, with the domains that this holds for."""
    found: dict[str, list[str]] = {}
    for name, domain in domains.items():
        if not domain.card["official"]:
            found.setdefault(summary.provenance(domain.card), []).append(name)
    return found


def _check(plan: dict[str, Any], domains: dict[str, Prepared], rows: list[dict[str, Any]], path: Path) -> None:
    """scores.csv holds exactly the plan's runs, on the current data and parameters."""
    rows = [row for row in rows if row["seed"] is not None]
    found = {(row["domain"], row["system"], row["seed"]) for row in rows}
    if differ := sorted(found ^ set(summary.planned(plan))):
        raise AnomedError(f"{path}: its runs are not those of the plan, first at {differ[0]}; run `anomed table` again")
    for row in rows:
        system, domain = row["system"], row["domain"]
        expected = domains[domain].hash, plan["runs"][domain][system]["hash"]
        where = f"{path} ({domain}, {system}, seed {row['seed']})"
        summary.current(where, "manifest_hash", row["manifest_hash"], expected[0], f"the prepared domain {domain}")
        summary.current(where, "parameter_hash", row["parameter_hash"], expected[1], f"the parameters of {system}")


def _section(
    blocks: list[summary.Block], domain: str, prepared: Prepared, pairs: dict[str, Any], runs: Path
) -> dict[str, Any]:
    """What the template prints of one domain."""
    shown = {}
    for system, pair in pairs.items():
        for seed in pair["seeds"][:1]:
            path = runs / system / str(seed)
            run = Predictions(path)
            summary.current(str(path), "data_hash", run.card["data_hash"], prepared.hash, "the prepared data")
            shown[system] = (seed, run)
    localising = {system: pair for system, pair in shown.items() if pair[1].maps is not None}
    return {
        "domain": domain,
        "blocks": blocks,
        "title": prepared.card["title"],
        "data": summary.provenance(prepared.card),
        "counts": summary.counts(prepared.card),
        "problems": summary.problems(prepared.card),
        "truth": prepared.card["masks"] or prepared.card["boxes"],
        "silent": [system for system in shown if system not in localising],
        **_strip(prepared, localising),
    }


def _strip(prepared: Prepared, runs: dict[str, tuple[int, Predictions]]) -> dict[str, Any]:
    """The methods (one column per localising system, with its scale) and the lines (one per image) of the pictures."""
    tables = {system: run.scores.set_index("image_id") for system, (_, run) in runs.items()}
    available = set(prepared.table.image_id)
    for table in tables.values():
        available &= set(table.index[table.map_row.notna()])
    scales = {system: figures.scale(run) for system, (_, run) in runs.items()}
    normal = prepared.table.image_id[(prepared.table.split == "test") & (prepared.table.label == 0)]
    lines = []
    for image in figures.pick(prepared, available).itertuples():
        pixels = prepared.native(image.image_id)
        boxes = json.loads(image.boxes)
        if prepared.card["masks"]:
            mask = None if pd.isna(image.mask_row) else prepared.mask(int(image.mask_row))
        else:
            mask = figures.boxed(boxes, pixels.shape) if boxes else None
        maps = []
        for system, (_, run) in runs.items():
            score, map_row = tables[system].loc[image.image_id, ["score", "map_row"]]
            values = run.map(int(map_row))
            others = tables[system].score.loc[normal]
            maps.append(
                {
                    "system": system,
                    "uri": figures.heat(values, pixels.shape, scales[system], mask),
                    "score": float(score),
                    "above": float((others < score).mean()) if len(others) else None,
                    "least": float(values.min()),
                    "most": float(values.max()),
                }
            )
        lines.append(
            {
                "image": image,
                "uri": figures.photo(pixels),
                "truth": figures.photo(pixels, mask) if mask is not None else None,
                "marked": _marked(mask, boxes, prepared.card["masks"]),
                "maps": maps,
            }
        )
    methods = [{"system": system, "seed": seed, "scale": scales[system]} for system, (seed, _) in runs.items()]
    return {"methods": methods, "lines": lines}


def _marked(mask: np.ndarray | None, boxes: list[Any], masks: bool) -> str:
    """What the truth of an image marks, in words."""
    if boxes and not masks:
        return f"{len(boxes)} box{'es' if len(boxes) != 1 else ''}"
    if mask is None:
        return "pixel truth unknown" if masks else "no box"
    return f"{100 * mask.mean():.2f} % anomalous" if mask.any() else "nothing marked"


def _performance(path: Path) -> list[dict[str, str]]:
    """Rows of performance.csv as printed: seconds with one decimal, whole MB, a dash where there was no such job."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            row |= {key: f"{float(row[key]):,.{digits}f}" if row[key] else "–" for key, digits in COSTS.items()}
    except FileNotFoundError:
        raise AnomedError(f"{path}: not found; run `anomed table` first") from None
    except (KeyError, ValueError) as error:
        raise AnomedError(f"{path}: damaged ({error}); run `anomed table` again") from None
    return rows


def _cards(plan: dict[str, Any], runs: Path, models: Path) -> Iterator[Job]:
    """Every fit and predict job of the plan; a system that is not fitted has no model."""
    for run in summary.planned(plan):
        for step, folder in (("fit", models), ("predict", runs)):
            path = folder.joinpath(*map(str, run)) / records.RUN_CARD
            if step == "predict" or path.exists():
                yield (
                    step,
                    *run,
                    records.read_card(path, "parameters", "code", "versions", "machine", "warnings", "device"),
                )


def _provenance(cards: list[Job]) -> dict[str, Any]:
    """Parameters per system; data and code hashes; versions, machines and warnings with the jobs that they concern."""
    parameters: dict[str, dict[str, str]] = {}
    data: dict[str, str] = {}
    code: dict[tuple[str, str], set[str]] = {}
    versions: dict[str, set[str]] = {}
    machines: set[str] = set()
    warnings: dict[str, list[str]] = {}
    for step, domain, system, seed, card in cards:
        parameters.setdefault(system, {})[domain] = json.dumps(card["parameters"], sort_keys=True, ensure_ascii=False)
        data[domain] = card["data_hash"]
        code.setdefault((system, step), set()).add(card["code"]["sha256"])
        for name, version in card["versions"].items():
            versions.setdefault(name, set()).add(version)
        machine = card["machine"]
        machines.add(f"{card['device']}, {machine['cores']} cores, {machine['system']}")
        for text in card["warnings"]:
            warnings.setdefault(text, []).append(f"{step} {domain}/{system}/{seed}")
    return {
        "parameters": {system: _told(texts) for system, texts in parameters.items()},
        "data": data,
        "code": {key: sorted(hashes) for key, hashes in code.items()},
        "versions": {name: sorted(found) for name, found in sorted(versions.items())},
        "machines": sorted(machines),
        "warnings": warnings,
    }


def _told(texts: dict[str, str]) -> str:
    """Parameters by domain as one text: once where all are equal."""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{domain}: {text}" for domain, text in texts.items())


def _commit() -> str:
    """The git commit of this code, noting uncommitted changes; empty when it lies in no repository that tracks it."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # else it would be the commit of a repository around the install
        return git("rev-parse", "HEAD") + (" with uncommitted changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return ""
