"""statistics.json: intervals of means over seeds, paired comparisons within a domain, ranks over the domains.

    {"scores": sha256 of scores.csv,
     "ranks": {metric: what `anomed.ranks.summary` says of the means over seeds},
     "domains": {domain: {"bootstrap": ..., "metrics": {metric: {
         "intervals": {system: {"low", "high", "reason"}},
         "ranks": {system: 1 is best, equal means share their average},
         "pairs": [{"first", "second", "difference": second minus first, "low", "high", "p", "holm", "reason"}],
         "best": system or null, "against_best": {system: p}}}}},
     "digest": hash of all this}

Pairs are tested by the bootstrap over subjects; `holm` corrects p over all pairs of the domain and metric,
`against_best`, which the tables mark values by, only over the comparisons of the best system with each other one.
Systems without a value, and those whose values are no comparison, stand in `intervals` alone. Values have six decimals,
p values six significant digits.
"""

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from anomed import ranks, records, stats
from anomed.errors import AnomedError
from anomed.report.summary import average, grouped, together

Replicates = Mapping[tuple[str, str, str], np.ndarray]


def compute(plan: dict[str, Any], rows: list[dict[str, Any]], replicates: Replicates) -> dict[str, Any]:
    """`ranks` and `domains` of statistics.json.

    rows: of scores.csv. replicates: of the mean over seeds, float64 (R,), by (domain, system, metric), for each mean.
    """
    domains: dict[str, Any] = {}
    values: dict[str, dict[str, dict[str, float]]] = {}
    better: dict[str, bool] = {}
    for (domain, metric), systems in grouped(rows).items():
        first = next(row for group in systems.values() for row in group if row["seed"] is not None)
        means = {system: average(group).mean for system, group in systems.items()}
        known = {system: round(mean, 9) for system, mean in means.items() if mean is not None}  # noise breaks no tie
        better[metric] = first["direction"] == "higher"
        competing = {system: mean for system, mean in known.items() if system not in plan["apart"]}
        values.setdefault(metric, {})[domain] = competing
        own = {system: replicates[domain, system, metric] for system in known}
        units = first["bootstrap"]["units"]
        drawn = {key: value for key, value in first["bootstrap"].items() if key != "binning"}
        found = domains.setdefault(domain, {"bootstrap": drawn, "metrics": {}})
        found["metrics"][metric] = {
            "intervals": {system: _interval(group, own.get(system), units) for system, group in systems.items()},
            **_compared(competing, own, units, better[metric]),
        }
    over, aside = {}, _aside(plan)
    for metric, where in values.items():
        ranked = [system for system in plan["systems"] if system not in aside]
        lists = {system: [where.get(d, {}).get(system) for d in plan["domains"]] for system in ranked}
        over[metric] = ranks.summary(lists, plan["domains"], better[metric])
        over[metric]["left_out"]["systems"].update(aside)
    rounded: dict[str, Any] = _rounded({"ranks": over, "domains": domains})
    return rounded


def _aside(plan: dict[str, Any]) -> dict[str, str]:
    """Systems that are not ranked over the domains, and why: those whose values are no comparison, and those that do
    not apply where others run: each would take its domains from all others."""
    found = {system: plan["marks"][system] for system in plan["apart"]}
    for domain, pairs in plan["runs"].items():
        if any(pair["seeds"] for pair in pairs.values()):
            for system, pair in pairs.items():
                if pair["absent"].startswith("not applicable"):
                    found.setdefault(system, f"{domain}: {pair['absent']}")
    return found


def _interval(group: list[dict[str, Any]], replicates: np.ndarray | None, units: int) -> dict[str, Any]:
    """The interval of a mean over seeds; there is none where a seed has none."""
    if reason := together(group, "interval_reason"):
        return stats.Interval(None, None, reason)._asdict()
    assert replicates is not None, group
    within = average(group).mean if group[0]["unit"] == "fraction" else None
    return stats.interval(replicates, units, within)._asdict()


def _compared(means: dict[str, float], replicates: dict[str, np.ndarray], units: int, higher: bool) -> dict[str, Any]:
    """All pairs of the systems that have a mean, their ranks, and each against the best."""
    pairs = []
    for first, second in combinations(means, 2):
        tested = stats.difference(replicates[first], replicates[second], units)
        pairs.append(
            {
                "first": first,
                "second": second,
                "difference": means[second] - means[first],
                **tested.interval._asdict(),
                "p": tested.p,
            }
        )
    for pair, p in zip(pairs, _holm([pair["p"] for pair in pairs]), strict=True):
        pair["holm"] = p
    ranked = ranks.ranks(np.array([[*means.values()]]), higher)[0].tolist() if means else []
    best = (max if higher else min)(means, key=lambda system: means[system], default=None)
    mine = [pair for pair in pairs if best in (pair["first"], pair["second"])]
    others = [pair["second"] if pair["first"] == best else pair["first"] for pair in mine]
    return {
        "ranks": dict(zip(means, ranked, strict=True)),
        "pairs": pairs,
        "best": best,
        "against_best": dict(zip(others, _holm([pair["p"] for pair in mine]), strict=True)),
    }


def _holm(p: list[float | None]) -> list[float | None]:
    """Corrected p values; None where no test was possible, which also corrects no other."""
    adjusted = iter(ranks.holm([value for value in p if value is not None]).tolist())
    return [None if value is None else next(adjusted) for value in p]


def _rounded(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        probabilities = key == "against_best"
        return {name: _rounded(part, "p" if probabilities else name) for name, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part, key) for part in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if key in ("p", "p_chi2", "holm") else round(value, 6) + 0.0  # never -0.0


def text(found: dict[str, Any], scores: str) -> str:
    """statistics.json as canonical JSON. scores: the text of scores.csv beside it."""
    sealed = {**found, "scores": records.digest(scores.encode())}
    return records.canonical({**sealed, "digest": records.digest(sealed)}) + "\n"


def read(path: Path, scores: Path) -> dict[str, Any]:
    """The content of statistics.json. Raises AnomedError when it is missing, damaged or not of `scores`, the CSV."""
    if not path.exists():
        raise AnomedError(f"{path}: not found; run `anomed table` first")
    found = records.read_card(path, "scores", "domains", "ranks")
    if found["scores"] != records.digest_file(scores):
        raise AnomedError(f"{path}: is of another {scores.name} than the one beside it; run `anomed table` again")
    return found
