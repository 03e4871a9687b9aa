"""The tables: exact cells, reasons of empty ones, refusal of stale scores, the same bytes every time."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anomed import records
from anomed.errors import AnomedError

REASON = "no anomaly maps: the method does not localise"
NO_TRUTH = "the domain has no pixel truth"
CLAUSE = "embedded synthetic data, not the released data; reproduces no published number"
FILES = ("scores.csv", "table.csv", "table.md", "table.tex", "performance.csv")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_table_csv_has_exactly_these_cells(finished: Any) -> None:
    assert (finished.results / "table.csv").read_text() == (
        "system,brain_mri.image_auroc,brain_mri.image_auroc.std,brain_mri.pixel_ap,brain_mri.pixel_ap.std,"
        "brain_mri.miss,brain_mri.miss.std\n"
        "random,0.500000,0.250000,0.125000,0.000000,0.500000,0.000000\n"
        "deep_svdd,0.250000,,0.125000,,0.500000,\n"
        "label,0.375000,0.176777,,,0.500000,0.000000\n"
    )


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
    assert {row["data"] for row in found} == {CLAUSE}
    assert [row["source"] for row in found] == ["A 1982", "B & C <2010>, 3:4-5", "this test"] * len(runs)


def test_an_empty_cell_has_its_reason_in_every_format(finished: Any) -> None:
    empty = [
        row for row in rows(finished.results / "scores.csv") if row["metric"] == "pixel_ap" and row["system"] == "label"
    ]
    assert [(row["value"], row["reason"]) for row in empty] == [("", REASON)] * 2
    text = (finished.results / "table.md").read_text()
    assert "| label | 2 | 0.3750 ± 0.1768 | – [1] | 0.5000 ± 0.0000 |" in text
    assert f"- [1] no value: {REASON}\n" in text
    tex = (finished.results / "table.tex").read_text()
    assert "label & 0.3750 $\\pm$ 0.1768 & -- [1] & 0.5000 $\\pm$ 0.0000 \\\\" in tex
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


def test_the_best_of_a_column_is_bold_whichever_way_is_better(copied: Any) -> None:
    copied.score("brain_mri", "deep_svdd", 0, {"image_auroc": 0.8, "pixel_ap": 0.125, "miss": 0.4})
    copied.table()
    lines = (copied.results / "table.md").read_text().splitlines()
    assert "| deep_svdd | 1 | **0.8000** | 0.1250 | **0.4000** |" in lines  # equal values in a column: none is bold
    assert (
        "deep\\_svdd & \\textbf{0.8000} & 0.1250 & \\textbf{0.4000} \\\\" in (copied.results / "table.tex").read_text()
    )


def test_tables_say_which_data_they_come_from(finished: Any) -> None:
    assert f"## brain_mri\n\nData: {CLAUSE}." in (finished.results / "table.md").read_text()
    assert f"Data: {CLAUSE}." in (finished.results / "table.tex").read_text()


def test_definitions_name_their_source(finished: Any) -> None:
    text = (finished.results / "table.md").read_text()
    assert (
        "(`pixel_ap`, version 1): Average precision over all pixels. Source: B &amp; C &lt;2010&gt;, 3:4-5.\n" in text
    )
    assert text.count(" Source: ") == 3


def test_metrics_that_are_empty_for_one_reason_are_a_line_instead_of_columns(benchmark: Any) -> None:
    benchmark.masks = False
    benchmark.make()
    for system, seed in (("random", 0), ("random", 1), ("random", 2), ("deep_svdd", 0), ("label", 0), ("label", 1)):
        benchmark.score("brain_mri", system, seed, {"image_auroc": 0.5, "pixel_ap": None, "miss": NO_TRUTH})
    benchmark.table()
    text, tex = ((benchmark.results / name).read_text() for name in ("table.md", "table.tex"))
    line = f"Pixel AP, Missed: no value, {NO_TRUTH}."
    assert "| system | seeds | Image AUROC ↑ |\n| :-- | --: | --: |\n| random | 3 | 0.5000 ± 0.0000 |\n" in text
    assert f"| label | 2 | 0.5000 ± 0.0000 |\n\n{line}\n\nCounted for image metrics: " in text
    assert "\\begin{tabular}{lr}\n\\toprule\nbrain\\_mri & Image AUROC $\\uparrow$ \\\\\n" in tex
    assert f"\n{line}\n\\par}}" in tex
    for found in (text, tex):
        assert "[1]" not in found
    assert "pixel metrics" not in text  # nothing was counted
    assert "**Pixel AP**" in text  # still defined
    assert "brain_mri.pixel_ap,brain_mri.pixel_ap.std," in (benchmark.results / "table.csv").read_text()
    assert [row["reason"] for row in rows(benchmark.results / "scores.csv")[1::3]] == [NO_TRUTH] * 6


def test_a_column_that_is_empty_for_two_reasons_stays(copied: Any) -> None:
    for seed in (0, 1, 2):
        copied.score("brain_mri", "random", seed, {"image_auroc": 0.5, "pixel_ap": "another", "miss": 0.5})
    copied.score("brain_mri", "deep_svdd", 0, {"image_auroc": 0.5, "pixel_ap": "another", "miss": 0.5})
    copied.table()
    text = (copied.results / "table.md").read_text()
    assert "| random | 3 | **0.5000 ± 0.0000** | – [1] | 0.5000 ± 0.0000 |" in text
    assert "| label | 2 | 0.3750 ± 0.1768 | – [2] | 0.5000 ± 0.0000 |" in text
    assert f"- [1] no value: another\n- [2] no value: {REASON}\n" in text
    assert "Pixel AP: no value" not in text


def test_what_was_counted_is_said_in_words(finished: Any, copied: Any) -> None:
    text = (finished.results / "table.md").read_text()
    assert "\n\nCounted for image metrics: 5 normal images, 9 abnormal images.\n" in text
    assert "\n\nCounted for pixel metrics: 30,820 normal pixels, 540 abnormal pixels, 9 regions.\n" in text
    values = {"image_auroc": 0.5, "pixel_ap": 0.5, "miss": 0.5}
    copied.score("brain_mri", "random", 0, values, abnormal=1, regions=1, excluded=1)
    copied.score("brain_mri", "random", 1, values, excluded=1200)
    copied.table()
    expected = (
        "30,820 normal pixels, 1 abnormal pixel, 1 region, 1 image without pixel truth left out; or "
        "30,820 normal pixels, 540 abnormal pixels, 9 regions, 1,200 images without pixel truth left out; or "
        "30,820 normal pixels, 540 abnormal pixels, 9 regions."
    )
    assert f"\n\nCounted for pixel metrics: {expected}\n" in (copied.results / "table.md").read_text()


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"value": 0.5, "reason": "both"},
            r"damaged at records.0 \(.*image_auroc needs a value, or null and a reason\)",
        ),
        ({"value": None, "reason": None}, r"damaged at records.0 \(.*needs a value, or null and a reason\)"),
        ({"value": "high"}, r"damaged at records.0.value \(Input should be a valid number"),
        ({"direction": "up"}, r"damaged at records.0.direction \(Input should be 'higher' or 'lower'\)"),
        ({"version": 2}, r"and .*random/0.json: image_auroc has version 2 and 1; delete both and score again"),
    ],
)
def test_a_damaged_score_is_named(copied: Any, change: dict[str, Any], message: str) -> None:
    path = copied.scores / "brain_mri/deep_svdd/0.json"
    score = records.read_card(path)
    score["records"][0] |= change
    records.write_card(path, score)
    with pytest.raises(AnomedError, match=f"^{path}:? {message}"):
        copied.table()


def test_not_a_number_is_damage(copied: Any) -> None:
    path = copied.scores / "brain_mri/deep_svdd/0.json"
    path.write_text(path.read_text().replace('"value": 0.25', '"value": NaN'))
    with pytest.raises(AnomedError, match=r"0.json: not valid JSON \(NaN is no number\)"):
        copied.table()


def test_scores_of_another_run_are_refused(copied: Any) -> None:
    path = copied.scores / "brain_mri/random/1.json"
    path.write_bytes((copied.scores / "brain_mri/random/0.json").read_bytes())
    with pytest.raises(AnomedError, match=r"found the scores of brain_mri/random/0, expected brain_mri/random/1"):
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
    assert "brain\\_mri & Image AUROC $\\uparrow$" in tex


def test_making_tables_loads_no_heavy_library() -> None:
    code = (
        "import sys, anomed.report.table\n"
        "print([name for name in ('torch', 'monai', 'timm', 'matplotlib', 'scipy') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file["records"][0].update(value="0.5"), "records.0.value"),
        (lambda file: file["records"][0].update(extra=1), "records.0.extra"),
        (lambda file: file["records"].append(file["records"][0]), "image_auroc stands there more than once"),
        (lambda file: file["records"].clear(), "records .*at least 1"),
        (lambda file: file.update(seed="0"), "seed"),
    ],
)
def test_a_score_file_that_was_edited_is_refused(copied: Any, change: Any, message: str) -> None:
    path = copied.scores / "brain_mri/deep_svdd/0.json"
    score = records.read_card(path)
    change(score)
    records.write_card(path, score)
    with pytest.raises(AnomedError, match=rf"deep_svdd/0\.json: damaged at .*{message}"):
        copied.table()


def test_a_run_card_of_another_run_is_refused(copied: Any) -> None:
    (copied.runs / "brain_mri/random/1/run.json").write_bytes(
        (copied.runs / "brain_mri/random/0/run.json").read_bytes()
    )
    with pytest.raises(AnomedError, match=r"random/1/run\.json: is of .*'seed': 0.*not of this run"):
        copied.table()
