"""The tables: exact cells, reasons of empty ones, refusal of stale scores, the same bytes every time."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm, t

from anomed import records, stats
from anomed.errors import AnomedError
from anomed.report import html, table

REASON = "no anomaly maps: the method does not localise"
NO_TRUTH = "the domain has no pixel truth"
CLAUSE = "embedded synthetic data, not the released data; reproduces no published number"
FILES = (
    "scores.csv", "table.csv", "table.md", "table.tex", "breakdowns.csv", "statistics.json", "performance.csv",
)  # fmt: skip
VALUES = {"image_auroc": 0.5, "pixel_ap": 0.125, "miss": 0.5}


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_table_csv_has_exactly_these_cells(finished: Any) -> None:
    assert (finished.results / "table.csv").read_text() == (
        "system,brain_mri.image_auroc,brain_mri.image_auroc.std,brain_mri.image_auroc.low,brain_mri.image_auroc.high,"
        "brain_mri.miss,brain_mri.miss.std,brain_mri.miss.low,brain_mri.miss.high,"
        "brain_mri.pixel_ap,brain_mri.pixel_ap.std,brain_mri.pixel_ap.low,brain_mri.pixel_ap.high\n"
        "random,0.500000,0.250000,0.402151,0.597849,0.500000,0.000000,0.402151,0.597849,"
        "0.125000,0.000000,0.027151,0.222849\n"
        "deep_svdd,0.250000,,0.152151,0.347849,0.500000,,0.402151,0.597849,0.125000,,0.027151,0.222849\n"
        "label,0.375000,0.176777,0.277151,0.472849,0.500000,0.000000,0.402151,0.597849,,,,\n"
    )


def test_the_interval_is_that_of_the_mean_over_seeds(copied: Any) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, (3, 1000))
    for seed in range(3):
        copied.score("brain_mri", "random", seed, VALUES | {"image_auroc": 0.2 * seed}, {"image_auroc": noise[seed]})
    copied.table()
    mean = np.mean([0.2 * seed + noise[seed] for seed in range(3)], axis=0)
    tail = norm.cdf(np.sqrt(12 / 11) * t.ppf(0.025, 11))
    expected = np.quantile(mean, [tail, 1 - tail])
    row = rows(copied.results / "table.csv")[0]
    found = [float(row[f"brain_mri.image_auroc.{end}"]) for end in ("low", "high")]
    assert found == pytest.approx(expected, abs=1e-6)
    single = [float(row["low"]) for row in rows(copied.results / "scores.csv")[:9:3]]
    assert single == pytest.approx([np.quantile(0.2 * k + noise[k], tail) for k in range(3)], abs=1e-6)


def test_the_interval_of_a_fraction_is_symmetric_in_log_odds(copied: Any) -> None:
    copied.unit = "fraction"
    noise = np.random.default_rng(0).normal(0, 0.03, (3, 1000))
    for system, seeds in copied.seeds.items():
        for seed in seeds:
            copied.score("brain_mri", system, seed, VALUES | {"image_auroc": 0.9}, {"image_auroc": noise[seed]})
    copied.table()
    row = rows(copied.results / "table.csv")[0]
    low, high = (float(row[f"brain_mri.image_auroc.{end}"]) for end in ("low", "high"))
    found = stats.interval(0.9 + noise.mean(0), 12, 0.9)
    assert (low, high) == pytest.approx((found.low, found.high), abs=1e-6)
    assert 0.9 - low > 1.2 * (high - 0.9)


def test_a_seed_without_an_interval_leaves_that_of_the_mean_empty(copied: Any) -> None:
    few = np.where(np.arange(1000) < 51, np.nan, 0.0)
    copied.score("brain_mri", "random", 1, VALUES, {"image_auroc": few})
    copied.table()
    row = rows(copied.results / "table.csv")[0]
    assert [row[f"brain_mri.image_auroc{end}"] for end in ("", ".low", ".high")] == ["0.500000", "", ""]
    reason = "too few subjects: 51 of 1000 replicates have no value"
    assert rows(copied.results / "scores.csv")[3]["interval_reason"] == reason
    text, tex = ((copied.results / name).read_text() for name in ("table.md", "table.tex"))
    assert "| random | 3 | **0.5000 ± 0.2500** [1] | 0.5000 ± 0.0000 [0.402, 0.598] |\n" in text
    assert f"- [1] no interval: seed 1: {reason}\n" in text
    assert "random & \\textbf{0.5000 $\\pm$ 0.2500} [1] & 0.5000 $\\pm$ 0.0000 [0.402, 0.598] \\\\\n" in tex


def test_mean_and_deviation_are_those_of_numpy(copied: Any) -> None:
    values = [0.1234567, 0.7, 0.91]
    for seed, value in enumerate(values):
        copied.score("brain_mri", "random", seed, {"image_auroc": value})
    copied.table()
    first = rows(copied.results / "table.csv")[0]
    assert first["brain_mri.image_auroc"] == f"{np.mean(values):.6f}"
    assert first["brain_mri.image_auroc.std"] == f"{np.std(values, ddof=1):.6f}"
    assert [float(row["value"]) for row in rows(copied.results / "scores.csv")[:9:3]] == values


def test_scores_csv_has_a_row_for_every_run_and_metric(finished: Any) -> None:
    found = rows(finished.results / "scores.csv")
    names = ["image_auroc", "pixel_ap", "miss"]
    runs = [("random", "0"), ("random", "1"), ("random", "2"), ("deep_svdd", "0"), ("label", "0"), ("label", "1")]
    assert [(row["system"], row["seed"], row["metric"]) for row in found] == [(*run, m) for run in runs for m in names]
    assert {row["manifest_hash"] for row in found} == {
        records.read_json(finished.prepared / "brain_mri/card.json")["hash"]
    }
    assert {row["parameter_hash"] for row in found if row["system"] == "label"} == {records.digest("label")}
    assert json.loads(found[0]["counts"]) == {"normal": 5, "abnormal": 9}
    assert json.loads(found[0]["bootstrap"]) == {**finished.bootstrap, "binning": 1e-6}
    assert {(row["metric"], row["definition_id"]) for row in found} == {(name, f"{name}.v1") for name in names}
    assert (float(found[0]["low"]), float(found[0]["high"])) == pytest.approx((0.152151, 0.347849), abs=1e-6)
    assert {row["data"] for row in found} == {CLAUSE}
    assert [row["source"] for row in found] == ["A 1982", "B & C <2010>, 3:4-5", "this test"] * len(runs)


def test_an_empty_cell_has_its_reason_in_every_format(finished: Any) -> None:
    empty = [
        row for row in rows(finished.results / "scores.csv") if row["metric"] == "pixel_ap" and row["system"] == "label"
    ]
    assert [(row["value"], row["reason"]) for row in empty] == [("", REASON)] * 2
    text = (finished.results / "table.md").read_text()
    assert "| label | 2 | 0.3750 ± 0.1768 [0.277, 0.473] | 0.5000 ± 0.0000 [0.402, 0.598] |\n" in text
    assert "| label | 2 | – [1] |\n" in text
    assert f"- [1] no value: {REASON}\n" in text
    tex = (finished.results / "table.tex").read_text()
    assert "label & 0.3750 $\\pm$ 0.1768 [0.277, 0.473] & 0.5000 $\\pm$ 0.0000 [0.402, 0.598] \\\\\n" in tex
    assert "label & -- [1] \\\\\n" in tex
    assert f"[1] no value: {REASON}." in tex


def test_one_seed_without_a_value_leaves_the_mean_empty_and_is_named(copied: Any) -> None:
    copied.score("brain_mri", "random", 1, {"image_auroc": "only one class", "pixel_ap": 0.1, "miss": 0.1})
    copied.table()
    assert rows(copied.results / "table.csv")[0]["brain_mri.image_auroc"] == ""
    assert "- [1] no value: seed 1: only one class\n" in (copied.results / "table.md").read_text()


def test_a_metric_that_a_system_does_not_record_is_not_applicable(copied: Any) -> None:
    copied.score("brain_mri", "deep_svdd", 0, {"image_auroc": 0.5})
    copied.table()
    found = [row for row in rows(copied.results / "scores.csv") if row["system"] == "deep_svdd"]
    assert [(row["metric"], row["value"], row["reason"]) for row in found] == [
        ("image_auroc", "0.5", ""), ("pixel_ap", "", "not applicable"), ("miss", "", "not applicable"),
    ]  # fmt: skip
    assert [row["interval_reason"] for row in found] == ["", "not applicable", "not applicable"]


def test_the_best_of_a_column_is_bold_whichever_way_is_better(copied: Any) -> None:
    copied.score("brain_mri", "deep_svdd", 0, {"image_auroc": 0.8, "pixel_ap": 0.125, "miss": 0.4})
    copied.table()
    lines = (copied.results / "table.md").read_text().splitlines()
    assert "| deep_svdd | 1 | **0.8000** [0.702, 0.898] | **0.4000** [0.302, 0.498] |" in lines
    assert "| deep_svdd | 1 | 0.1250 [0.027, 0.223] |" in lines  # equal values in a column: none is bold
    tex = (copied.results / "table.tex").read_text()
    assert "deep\\_svdd & \\textbf{0.8000} [0.702, 0.898] & \\textbf{0.4000} [0.302, 0.498] \\\\\n" in tex


def test_values_that_the_bootstrap_does_not_separate_from_the_best_are_marked(copied: Any) -> None:
    random = np.random.default_rng(1)
    wide = {"image_auroc": random.normal(0, 0.2, 1000), "miss": random.normal(0, 0.2, 1000)}
    copied.score("brain_mri", "deep_svdd", 0, VALUES | {"image_auroc": 0.49, "miss": 0.4}, wide)
    copied.table()
    text, tex = ((copied.results / name).read_text() for name in ("table.md", "table.tex"))
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("|")]
    marked = {row[0][2:]: ["≈" in cell for cell in row[2:]] for row in lines[2:5]}
    assert marked == {"random": [False, True], "deep_svdd": [True, False], "label": [False, True]}
    assert lines[2][2].startswith("**0.5000")  # the best has no mark
    assert re.search(r"\ndeep\\_svdd & 0\.4900 \[[-.\d]+, [.\d]+\] \$\\approx\$ & \\textbf\{0\.4000\} \[", tex)
    assert "; ≈ marks values that the paired bootstrap does not separate from it (p ≥ 0.05, " in text
    assert "$\\approx$ marks values" in tex


def test_values_printed_as_equally_good_are_all_best(copied: Any) -> None:
    wide = {"image_auroc": np.random.default_rng(1).normal(0, 0.2, 1000)}
    copied.score("brain_mri", "deep_svdd", 0, VALUES | {"image_auroc": 0.50001}, wide)
    copied.table()
    lines = (copied.results / "table.md").read_text().splitlines()
    for start in ("| random | 3 | **0.5000 ± 0.2500** [", "| deep_svdd | 1 | **0.5000** ["):
        assert ["≈" in line for line in lines if line.startswith(start)] == [False]


def test_what_could_not_be_tested_is_not_separated(copied: Any) -> None:
    copied.bootstrap["units"] = 1
    for system, seeds in copied.seeds.items():
        for seed in seeds:
            copied.score("brain_mri", system, seed, VALUES | {"image_auroc": 0.9 if system == "label" else 0.1})
    copied.table()
    text = (copied.results / "table.md").read_text()
    assert "| random | 3 | 0.1000 ± 0.0000 ≈ [1] | 0.5000 ± 0.0000 [1] |\n" in text
    assert "| label | 2 | **0.9000 ± 0.0000** [1] | 0.5000 ± 0.0000 [1] |\n" in text
    assert "- [1] no interval: 1 of the 8 subjects that an interval needs\n" in text
    assert "\n\nIntervals: none, 1 subject of the 8 that they need.\n" in text


def test_there_is_one_table_per_domain_and_level(copied: Any) -> None:
    for system, seeds in copied.seeds.items():
        for seed in seeds:
            organ = "the system does not localise" if system == "label" else 0.3
            copied.score("brain_mri", system, seed, {"pixel_ap_foreground": organ, **VALUES})
    copied.table()
    text, tex = ((copied.results / name).read_text() for name in ("table.md", "table.tex"))
    heads = [line for line in text.splitlines() if line.startswith("#")]
    levels = ["### Pixels of the organ", "### Images", "### Pixels"]
    assert heads == ["# Benchmark table", "## brain_mri", *levels, "## Definitions"]
    assert text.count("\n| system | seeds | Pixel AP ↑ |\n") == 2
    assert "Counted: 12,000 normal pixels, 540 abnormal pixels, 9 regions.\n\n- [1] no value: the system does" in text
    first = [line.partition(" & ")[0] for line in tex.splitlines() if line.startswith("brain\\_mri, ") and "&" in line]
    assert first == [f"brain\\_mri, {level[4:].lower()}" for level in levels]


def test_each_table_says_how_its_intervals_were_made(finished: Any, copied: Any) -> None:
    text, tex = ((finished.results / name).read_text() for name in ("table.md", "table.tex"))
    assert (
        text.count(
            "\n\nIntervals: 95 % bootstrap over 12 subjects, 1,000 replicates; of so few subjects they hold the truth less often than they say (docs/intervals.md).\n"
        )
        == 2
    )
    assert (
        tex.count(
            "\nIntervals: 95 \\% bootstrap over 12 subjects, 1,000 replicates; of so few subjects they hold the truth less often than they say (docs/intervals.md).\n"
        )
        == 2
    )
    copied.bootstrap = {"replicates": 1000, "confidence": 0.95, "unit": "image", "units": 1400}
    for system, seeds in copied.seeds.items():
        for seed in seeds:
            copied.score("brain_mri", system, seed, VALUES)
    copied.table()
    assert (
        "Intervals: 95 % bootstrap over 1,400 images, 1,000 replicates; over images: subjects unknown, so intervals are "
        "too narrow if a subject has several images.\n"
    ) in (copied.results / "table.md").read_text()


def test_tables_say_which_data_they_come_from(finished: Any) -> None:
    assert f"## brain_mri\n\nData: {CLAUSE}." in (finished.results / "table.md").read_text()
    assert f"Data: {CLAUSE}." in (finished.results / "table.tex").read_text()


def test_definitions_name_their_source(finished: Any) -> None:
    text = (finished.results / "table.md").read_text()
    assert "(`pixel_ap.v1`): Average precision over all pixels. Source: B &amp; C &lt;2010&gt;, 3:4-5.\n" in text
    assert text.count(" Source: ") == 3


def test_metrics_that_are_empty_for_one_reason_are_a_line_instead_of_columns(benchmark: Any) -> None:
    benchmark.masks = False
    benchmark.make()
    for system, seed in (("random", 0), ("random", 1), ("random", 2), ("deep_svdd", 0), ("label", 0), ("label", 1)):
        benchmark.score("brain_mri", system, seed, {"image_auroc": 0.5, "pixel_ap": None, "miss": NO_TRUTH})
    benchmark.table()
    text, tex = ((benchmark.results / name).read_text() for name in ("table.md", "table.tex"))
    cell = "0.5000 ± 0.0000 [0.402, 0.598]"
    assert f"| system | seeds | Image AUROC ↑ |\n| :-- | --: | --: |\n| random | 3 | {cell} |\n" in text
    assert f"| label | 2 | {cell} |\n\nMissed: no value, {NO_TRUTH}.\n\nIntervals: " in text
    assert f"\n\n### Pixels\n\nPixel AP: no value, {NO_TRUTH}.\n\n## Definitions\n" in text  # nothing was counted
    assert "\\begin{tabular}{lr}\n\\toprule\nbrain\\_mri, images & Image AUROC $\\uparrow$ \\\\\n" in tex
    assert tex.count("\\begin{tabular}") == 1
    assert f"\nPixel AP: no value, {NO_TRUTH}.\n\\par}}" in tex
    for found in (text, tex):
        assert "[1]" not in found
    assert "**Pixel AP**" in text  # still defined
    assert "brain_mri.pixel_ap,brain_mri.pixel_ap.std," in (benchmark.results / "table.csv").read_text()
    assert [row["reason"] for row in rows(benchmark.results / "scores.csv")[1::3]] == [NO_TRUTH] * 6


def test_a_column_that_is_empty_for_two_reasons_stays(copied: Any) -> None:
    for seed in (0, 1, 2):
        copied.score("brain_mri", "random", seed, {"image_auroc": 0.5, "pixel_ap": "another", "miss": 0.5})
    copied.score("brain_mri", "deep_svdd", 0, {"image_auroc": 0.5, "pixel_ap": "another", "miss": 0.5})
    copied.table()
    text = (copied.results / "table.md").read_text()
    assert "| random | 3 | – [1] |\n" in text
    assert "| label | 2 | – [2] |\n" in text
    assert f"- [1] no value: another\n- [2] no value: {REASON}\n" in text
    assert "Pixel AP: no value" not in text


def test_what_was_counted_is_said_in_words(finished: Any, copied: Any) -> None:
    text = (finished.results / "table.md").read_text()
    assert "\n\nCounted: 5 normal images, 9 abnormal images.\n" in text
    assert "\n\nCounted: 30,820 normal pixels, 540 abnormal pixels, 9 regions.\n" in text
    values = {"image_auroc": 0.5, "pixel_ap": 0.5, "miss": 0.5}
    copied.score("brain_mri", "random", 0, values, abnormal=1, regions=1, excluded=1)
    copied.score("brain_mri", "random", 1, values, excluded=1200)
    copied.table()
    expected = (
        "30,820 normal pixels, 1 abnormal pixel, 1 region, 1 image without pixel truth left out; or "
        "30,820 normal pixels, 540 abnormal pixels, 9 regions, 1,200 images without pixel truth left out; or "
        "30,820 normal pixels, 540 abnormal pixels, 9 regions."
    )
    assert f"\n\nCounted: {expected}\n" in (copied.results / "table.md").read_text()


def test_known_problems_of_released_data_are_warnings(benchmark: Any) -> None:
    benchmark.official = True
    benchmark.make().table()
    text = (benchmark.results / "table.md").read_text()
    assert "Data: the released data.\n" in text
    assert "Warning: known problem of these data: duplicate across splits (2).\n" in text


@pytest.mark.parametrize(
    ("key", "what"),
    [("manifest_hash", "the prepared domain brain_mri"), ("parameter_hash", "the parameters of random")],
)
def test_a_score_of_another_state_is_refused(copied: Any, key: str, what: str) -> None:
    path = copied.scores / "brain_mri/random/1.json"
    score = records.read_card(path)
    expected = score[key]
    records.write_card(path, {**score, key: "0" * 64})
    with pytest.raises(AnomedError) as error:
        copied.table()
    assert str(error.value) == (
        f"{path}: {key} is {'0' * 64}, expected {expected}: it was made with another state of {what}; "
        "run snakemake, or delete the file and repeat the command that makes it"
    )
    assert not copied.results.exists()


def test_a_missing_score_is_named(copied: Any) -> None:
    path = copied.scores / "brain_mri/deep_svdd/0.json"
    path.unlink()
    with pytest.raises(AnomedError, match=f"^{path}: not found; the step that makes it has not run$"):
        copied.table()


def test_the_same_bytes_whatever_the_order_of_files_and_keys(copied: Any) -> None:
    copied.table()
    before = {name: (copied.results / name).read_bytes() for name in FILES}
    for path in sorted(copied.scores.rglob("*.json"), reverse=True):
        score = records.read_json(path)
        path.unlink()
        path.write_text(json.dumps(dict(reversed(score.items()))))
    copied.table()
    assert {name: (copied.results / name).read_bytes() for name in FILES} == before


def test_performance_comes_from_the_run_cards(copied: Any) -> None:
    (copied.models / "brain_mri/label/1/run.json").unlink()
    copied.table()
    found = rows(copied.results / "performance.csv")
    assert len(found) == 6
    card = records.read_json(copied.runs / "brain_mri/label/1/run.json")
    assert found[-1] == {
        "domain": "brain_mri", "system": "label", "seed": "1", "device": "cpu", "fit_seconds": "", "fit_peak_mb": "",
        "predict_seconds": str(card["seconds"]), "predict_peak_mb": str(card["peak_memory_mb"]),
    }  # fmt: skip


def test_text_from_data_is_no_markup(copied: Any) -> None:
    reason = "a|b_c _d_ <script> 5% & $x$ #{y}~^\\\nnext"
    copied.score("brain_mri", "deep_svdd", 0, {"image_auroc": reason, "pixel_ap": 0.1, "miss": 0.1})
    copied.table()
    markdown, tex = ((copied.results / name).read_text() for name in ("table.md", "table.tex"))
    assert r"- [1] no value: a\|b_c \_d\_ &lt;script&gt; 5% &amp; $x$ #{y}~^\\ next" + "\n" in markdown
    assert (
        r"[1] no value: a|b\_c \_d\_ \textless{}script\textgreater{} 5\% \& \$x\$ \#\{y\}\textasciitilde{}"
        r"\textasciicircum{}\textbackslash{} next." in tex
    )
    assert "brain\\_mri, images & Image AUROC $\\uparrow$" in tex


def test_making_tables_loads_no_heavy_library() -> None:
    code = (
        "import sys, anomed.report.table\n"
        "print([name for name in ('torch', 'monai', 'timm', 'matplotlib', 'scipy') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_a_run_card_of_another_run_is_refused(copied: Any) -> None:
    (copied.runs / "brain_mri/random/1/run.json").write_bytes(
        (copied.runs / "brain_mri/random/0/run.json").read_bytes()
    )
    with pytest.raises(AnomedError, match=r"random/1/run\.json: is of .*'seed': 0.*not of this run"):
        copied.table()


def test_breakdowns_csv_has_exactly_these_rows(copied: Any) -> None:
    sizes = {
        "by": "lesion_size", "group": "small, round", "n": 2, "counts": {"image": {"abnormal": 2, "normal": 5}},
        "values": {"image_auroc": 0.125, "pixel_ap": None}, "reasons": {"pixel_ap": "no lesion pixel"},
    }  # fmt: skip
    kinds = {"by": "pathology", "group": "tumour", "n": 3, "counts": {}, "values": {"miss": 1 / 3}, "reasons": {}}
    copied.score("brain_mri", "random", 1, VALUES, breakdowns=[sizes, kinds])
    copied.score("brain_mri", "label", 0, VALUES, breakdowns=[kinds])
    copied.table()
    assert (copied.results / "breakdowns.csv").read_text() == (
        "domain,system,seed,by,group,n,counts,image_auroc,pixel_ap,miss,reasons\n"
        'brain_mri,random,1,lesion_size,"small, round",2,"{""image"":{""abnormal"":2,""normal"":5}}",0.125,,,'
        '"{""pixel_ap"":""no lesion pixel""}"\n'
        "brain_mri,random,1,pathology,tumour,3,{},,,0.3333333333333333,{}\n"
        "brain_mri,label,0,pathology,tumour,3,{},,,0.3333333333333333,{}\n"
    )


def test_a_system_that_does_not_run_on_a_domain_has_empty_cells_with_the_reason(copied: Any) -> None:
    plan = copied.plan
    plan["systems"].append("theirs")
    plan["runs"]["brain_mri"]["theirs"] = {"seeds": [], "hash": "0", "absent": "not imported"}
    table.build(plan, copied.prepared, copied.scores, copied.runs, copied.models, copied.results)
    found = {row["system"]: row for row in rows(copied.results / "table.csv")}
    assert set(found["theirs"].values()) == {"theirs", ""}
    listed = [row for row in rows(copied.results / "scores.csv") if row["system"] == "theirs"]
    assert {(row["seed"], row["value"], row["reason"]) for row in listed} == {("", "", "not imported")}
    assert {row["metric"] for row in listed} == {"image_auroc", "pixel_ap", "miss"}
    text = (copied.results / "table.md").read_text()
    assert "| theirs | 0 | – [" in text
    assert "no value: not imported" in text
    html.build(plan, copied.prepared, copied.runs, copied.models, copied.results, copied.results / "r.html")
    assert "not imported" in (copied.results / "r.html").read_text()


def test_metrics_that_no_running_system_has_need_no_column_for_the_others(copied: Any) -> None:
    plan = copied.plan
    plan["systems"].append("theirs")
    plan["runs"]["brain_mri"]["theirs"] = {"seeds": [], "hash": "0", "absent": "not imported"}
    for system, pair in plan["runs"]["brain_mri"].items():
        for seed in pair["seeds"]:
            copied.score("brain_mri", system, seed, VALUES | {"pixel_ap": REASON})
    table.build(plan, copied.prepared, copied.scores, copied.runs, copied.models, copied.results)
    text = (copied.results / "table.md").read_text()
    assert f": no value, {REASON}." in text
    assert "not imported" in text, "of the other metrics"


def test_a_mark_of_a_system_is_printed_beside_and_below_every_table(copied: Any) -> None:
    plan = copied.plan
    plan["marks"] = {"random": "imported, not run here: by <hand>"}
    table.build(plan, copied.prepared, copied.scores, copied.runs, copied.models, copied.results)
    found = rows(copied.results / "scores.csv")
    assert {row["mark"] for row in found if row["system"] == "random"} == {plan["marks"]["random"]}
    assert {row["mark"] for row in found if row["system"] != "random"} == {""}
    assert "random" in {row["system"] for row in rows(copied.results / "table.csv")}
    text = (copied.results / "table.md").read_text()
    assert text.count("| random † |") == text.count("† random: imported, not run here: by &lt;hand&gt;.") == 2
    assert "random \\dag{}" in (copied.results / "table.tex").read_text()


def test_a_row_that_is_no_comparison_wins_nothing_and_is_ranked_with_nobody(copied: Any) -> None:
    """`random` is the best here; apart, it keeps its value and interval, and `label` is bold in its place."""
    plan = copied.plan
    for apart, best in ([], "random"), (["random"], "label"):
        plan["marks"], plan["apart"] = dict.fromkeys(apart, "smoke: random weights"), apart
        table.build(plan, copied.prepared, copied.scores, copied.runs, copied.models, copied.results)
        text = (copied.results / "table.md").read_text()
        line = next(line for line in text.splitlines() if line.startswith("| label"))
        assert ("**0.3750" in line) == (best == "label")
        found = json.loads((copied.results / "statistics.json").read_text())
        column = found["domains"]["brain_mri"]["metrics"]["image_auroc"]
        assert column["best"] == best
        assert ("random" in column["ranks"]) == (best == "random")
        assert column["intervals"]["random"]["low"] == 0.402151
        reasons = found["ranks"]["image_auroc"]["left_out"]["systems"]
        assert reasons == dict.fromkeys(apart, "smoke: random weights")


def test_the_epoch_that_is_kept_is_a_column_where_a_system_has_one(copied: Any) -> None:
    """Without any such system there is no column: the tables of the other tests have none."""
    plan = copied.plan
    plan["selection"] = {"random": "best on valid"}
    table.build(plan, copied.prepared, copied.scores, copied.runs, copied.models, copied.results)
    found = rows(copied.results / "scores.csv")
    assert {(row["system"], row["selection"]) for row in found} >= {("random", "best on valid"), ("label", "")}
    text = (copied.results / "table.md").read_text()
    assert text.count("| system | epoch kept | seeds |") == text.count("| random | best on valid | ") == 2
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) <= 2, "rows as long as their heads"
    tex = (copied.results / "table.tex").read_text()
    assert "random & best on valid & " in tex
    assert "label &  & " in tex


def test_a_row_that_does_not_apply_everywhere_takes_no_domain_from_the_ranks_of_the_others(copied: Any) -> None:
    plan = copied.plan
    plan["systems"].append("view")
    plan["runs"]["brain_mri"]["view"] = {"seeds": [], "hash": "0", "absent": "not applicable: no view is known"}
    table.build(plan, copied.prepared, copied.scores, copied.runs, copied.models, copied.results)
    found = json.loads((copied.results / "statistics.json").read_text())["ranks"]["image_auroc"]["left_out"]
    assert found == {"systems": {"view": "brain_mri: not applicable: no view is known"}, "domains": {}}


def test_a_plan_that_says_both_or_neither_is_refused(copied: Any) -> None:
    for seeds, absent in (([], ""), ([0], "not imported")):
        plan = copied.plan
        plan["runs"]["brain_mri"]["label"] |= {"seeds": seeds, "absent": absent}
        with pytest.raises(AnomedError, match="expected seeds, or the reason why there are none"):
            table.build(plan, copied.prepared, copied.scores, copied.runs, copied.models, copied.results)
