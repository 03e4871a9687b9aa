"""statistics.json: intervals, pairs and ranks are those of independent formulas, and belong to one scores.csv."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm, rankdata, t

from anomed import ranks, records
from anomed.errors import AnomedError
from anomed.report import statistics

VALUES = {"image_auroc": 0.5, "pixel_ap": 0.125, "miss": 0.5}


def content(made: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((made.results / "statistics.json").read_text())
    return found


def test_a_column_has_intervals_ranks_and_pairs(copied: Any) -> None:
    copied.table()
    assert content(copied)["domains"]["brain_mri"]["metrics"]["image_auroc"] == {
        "intervals": {
            "random": {"low": 0.402151, "high": 0.597849, "reason": None},
            "deep_svdd": {"low": 0.152151, "high": 0.347849, "reason": None},
            "label": {"low": 0.277151, "high": 0.472849, "reason": None},
        },
        "ranks": {"random": 1.0, "deep_svdd": 3.0, "label": 2.0},
        # replicates differ by a constant: the quantile of 0 is as low as it gets, 1e-12
        "pairs": [
            {"first": "random", "second": "deep_svdd", "difference": -0.25, "low": -0.25, "high": -0.25}
            | {"p": 3.22135e-05, "holm": 9.66406e-05, "reason": None},
            {"first": "random", "second": "label", "difference": -0.125, "low": -0.125, "high": -0.125}
            | {"p": 3.22135e-05, "holm": 9.66406e-05, "reason": None},
            {"first": "deep_svdd", "second": "label", "difference": 0.125, "low": 0.125, "high": 0.125}
            | {"p": 3.22135e-05, "holm": 9.66406e-05, "reason": None},
        ],
        "best": "random",
        "against_best": {"deep_svdd": 6.44271e-05, "label": 6.44271e-05},
    }
    assert content(copied)["domains"]["brain_mri"]["bootstrap"] == copied.bootstrap


def test_equal_means_share_a_rank_and_differ_by_nothing(copied: Any) -> None:
    copied.score("brain_mri", "random", 2, VALUES | {"miss": 0.5 + 3e-12})  # rounding of a sum
    copied.table()
    column = content(copied)["domains"]["brain_mri"]["metrics"]["miss"]
    assert column["ranks"] == {"random": 2.0, "deep_svdd": 2.0, "label": 2.0}
    assert [(pair["difference"], pair["p"], pair["holm"]) for pair in column["pairs"]] == [(0.0, 1.0, 1.0)] * 3


def test_zero_has_no_sign(copied: Any) -> None:
    copied.score("brain_mri", "deep_svdd", 0, VALUES | {"miss": 0.5 - 2e-7})
    copied.table()
    assert content(copied)["domains"]["brain_mri"]["metrics"]["miss"]["ranks"]["deep_svdd"] == 1.0
    assert "-0.0," not in (copied.results / "statistics.json").read_text()


def test_a_system_without_a_value_is_in_no_pair(copied: Any) -> None:
    copied.table()
    column = content(copied)["domains"]["brain_mri"]["metrics"]["pixel_ap"]
    assert column["intervals"]["label"] == {
        "low": None, "high": None, "reason": "no anomaly maps: the method does not localise",
    }  # fmt: skip
    assert [(pair["first"], pair["second"]) for pair in column["pairs"]] == [("random", "deep_svdd")]
    assert column["ranks"] == {"random": 1.5, "deep_svdd": 1.5}
    assert column["against_best"] == {"deep_svdd": 1.0}


def test_lower_is_better_where_the_metric_says_so(copied: Any) -> None:
    copied.score("brain_mri", "label", 0, VALUES | {"miss": 0.25})
    copied.table()
    column = content(copied)["domains"]["brain_mri"]["metrics"]["miss"]
    assert column["best"] == "label"
    assert column["ranks"] == {"random": 2.5, "deep_svdd": 2.5, "label": 1.0}


def test_p_values_are_corrected_over_the_pairs_and_over_the_rivals_of_the_best(copied: Any) -> None:
    copied.seeds = {name: [0] for name in "abcd"}
    random = np.random.default_rng(4)
    drawn = {
        name: mean + random.normal(0, 0.05, 1000) for name, mean in zip("abcd", (0.5, 0.52, 0.6, 0.4), strict=True)
    }
    for name, replicates in drawn.items():
        value = float(np.round(replicates.mean(), 4))
        copied.score("brain_mri", name, 0, {"image_auroc": value}, {"image_auroc": replicates - value})
        for folder in (copied.runs, copied.models):
            _copy_card(folder / "brain_mri", name)
    copied.table()
    column = content(copied)["domains"]["brain_mri"]["metrics"]["image_auroc"]
    p = {}
    for pair in column["pairs"]:
        beyond = drawn[pair["second"]].astype(np.float32).astype(float) - drawn[pair["first"]].astype(np.float32)
        places = np.interp(0, np.sort(beyond), np.arange(1000) / 999)  # the quantile that is 0
        tail = max(min(places, 1 - places), 1 / 1001)
        p[pair["first"], pair["second"]] = float(2 * t.cdf(norm.ppf(tail) * (11 / 12) ** 0.5, 11))
    assert [pair["p"] for pair in column["pairs"]] == pytest.approx(list(p.values()), rel=1e-5)
    assert len(set(p.values())) > 3
    assert [pair["holm"] for pair in column["pairs"]] == pytest.approx(holm(list(p.values())), rel=1e-5)
    rivals = {name: value for names, value in p.items() for name in {*names} - {"c"} if "c" in names}
    assert column["best"] == "c"
    assert column["against_best"] == pytest.approx(
        dict(zip(rivals, holm(list(rivals.values())), strict=True)), rel=1e-5
    )


def holm(p: list[float]) -> list[float]:
    """Step-down by its definition: the largest of all (m - rank) p up to the own rank, at most 1."""
    order = sorted(range(len(p)), key=lambda index: p[index])
    steps = [min(1.0, (len(p) - place) * p[index]) for place, index in enumerate(order)]
    return [max(steps[: order.index(index) + 1]) for index in range(len(p))]


def _copy_card(folder: Path, name: str) -> None:
    target = folder / name / "0" / "run.json"
    target.parent.mkdir(parents=True)
    records.write_card(target, {**records.read_card(folder / "random/0/run.json"), "system": name})


def test_ranks_over_the_domains_take_means_over_seeds(benchmark: Any) -> None:
    benchmark.domains = ["brain_mri", "liver_ct", "retina"]
    benchmark.make()
    rising = [("brain_mri", (0.3, 0.2, 0.1)), ("liver_ct", (0.3, 0.1, 0.2)), ("retina", (0.6, 0.5, 0.5))]
    for domain, values in rising:
        for (system, seeds), value in zip(benchmark.seeds.items(), values, strict=True):
            for seed in seeds:
                benchmark.score(domain, system, seed, VALUES | {"image_auroc": value})
    benchmark.table()
    found = content(benchmark)["ranks"]
    expected = ranks.summary(
        {system: [values[place] for _, values in rising] for place, system in enumerate(benchmark.seeds)},
        benchmark.domains,
        True,
    )
    table = np.array([rankdata([-value for value in values]) for _, values in rising])
    assert dict(zip(found["image_auroc"]["systems"], found["image_auroc"]["mean_ranks"], strict=True)) == pytest.approx(
        dict(zip(benchmark.seeds, table.mean(0), strict=True)), abs=1e-6
    )
    assert found["image_auroc"]["pairs"] == [
        pair | {key: pytest.approx(pair[key], rel=1e-5) for key in ("p", "holm")} for pair in expected["pairs"]
    ]
    assert found["pixel_ap"]["left_out"]["systems"] == {"label": "no value in any domain"}
    assert "reason" in found["pixel_ap"]


def test_values_have_six_decimals_and_p_values_six_digits(copied: Any) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, 1000)
    copied.score("brain_mri", "random", 0, VALUES | {"image_auroc": 1 / 3}, {"image_auroc": noise})
    copied.table()
    text = (copied.results / "statistics.json").read_text()
    assert text == records.canonical(json.loads(text)) + "\n"
    column = content(copied)["domains"]["brain_mri"]["metrics"]["image_auroc"]
    numbers = [end[key] for end in column["intervals"].values() for key in ("low", "high")]
    numbers += [pair[key] for pair in column["pairs"] for key in ("difference", "low", "high")]
    assert all(number == round(number, 6) for number in numbers)


def test_statistics_of_other_scores_are_refused(copied: Any) -> None:
    copied.table()
    path, scores = copied.results / "statistics.json", copied.results / "scores.csv"
    assert statistics.read(path, scores)["ranks"].keys() == VALUES.keys()
    scores.write_text(scores.read_text() + "\n")
    with pytest.raises(
        AnomedError, match=rf"^{path}: is of another scores.csv than the one beside it; run `anomed table"
    ):
        statistics.read(path, scores)
    path.write_text(path.read_text().replace("0.402151", "0.302151"))
    with pytest.raises(AnomedError, match=rf"^{path}: damaged or edited"):
        statistics.read(path, scores)
    path.unlink()
    with pytest.raises(AnomedError, match=rf"^{path}: not found; run `anomed table` first$"):
        copied.page()
