"""The page: its numbers are the records', its pictures share one scale, and nothing from data becomes markup."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from PIL import Image

from anomed import records
from anomed.errors import AnomedError
from anomed.manifest import Prepared
from anomed.predictions import Predictions
from anomed.report import figures

REASON = "no anomaly maps: the method does not localise"
VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """Tables as lists of rows of cell texts, every tag with its attributes; checks that tags are balanced."""

    def __init__(self, text: str):
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += " ".join(data.split())


def page_of(made: Any) -> str:
    return str((made.results / "report.html").read_text("utf-8"))


def pixels(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))).convert("RGB"))


def test_numbers_are_those_of_the_records(finished: Any) -> None:
    page = Page(page_of(finished))
    assert page.tables[0] == [
        ["system", "seeds", "Image AUROC ↑", "Missed ↓"],
        ["random", "3", "0.5000± 0.2500[0.402, 0.598]", "0.5000± 0.0000[0.402, 0.598]"],
        ["deep_svdd", "1", "0.2500[0.152, 0.348]", "0.5000[0.402, 0.598]"],
        ["label", "2", "0.3750± 0.1768[0.277, 0.473]", "0.5000± 0.0000[0.402, 0.598]"],
    ]
    assert page.tables[1] == [
        ["system", "seeds", "Pixel AP ↑"],
        ["random", "3", "0.1250± 0.0000[0.027, 0.223]"],
        ["deep_svdd", "1", "0.1250[0.027, 0.223]"],
        ["label", "2", "–[1]"],
    ]


def test_levels_intervals_and_counts_are_those_of_the_table(finished: Any) -> None:
    text = " ".join(page_of(finished).split())
    below = "Intervals: 95 % bootstrap over 12 subjects, 1,000 replicates; of so few subjects they hold the truth less often than they say (docs/intervals.md). Counted: "
    for title, counted in (
        ("Images", "5 normal images, 9 abnormal images"),
        ("Pixels", "30,820 normal pixels, 540 abnormal pixels, 9 regions"),
    ):
        start = text.index(f"<h3>{title}</h3>")
        assert f'<p class="small soft">{below}{counted}. </p>' in text[start : text.index("<h3>", start + 1)]


def test_what_the_bootstrap_does_not_separate_is_marked_and_explained(copied: Any) -> None:
    wide = {"image_auroc": np.random.default_rng(1).normal(0, 0.2, 1000)}
    few = {"image_auroc": np.where(np.arange(1000) < 51, np.nan, 0.0)}
    values = {"image_auroc": 0.49, "pixel_ap": 0.125, "miss": 0.5}
    copied.score("brain_mri", "deep_svdd", 0, values, wide)
    copied.score("brain_mri", "label", 0, values, few)
    page = Page(copied.report())
    reason = "no interval: seed 0: too few subjects: 51 of 1000 replicates have no value"
    assert page.tables[0][1][2] == "0.5000± 0.2500[0.402, 0.598]"
    assert re.fullmatch(r"0\.4900≈\[-?0\.\d{3}, 0\.\d{3}\]", page.tables[0][2][2])
    assert page.tables[0][3][2] == "0.4950± 0.0071≈ [1]"
    assert ("td", {"class": "cell", "title": reason}) in page.tags
    assert f"[1] {reason}." in " ".join(page_of(copied).split())
    assert sum(attributes.get("class") == "best" for _, attributes in page.tags) == 1
    assert "≈ marks values that the paired bootstrap does not separate from it (p ≥ 0.05, " in page_of(copied)


def test_scores_under_the_pictures_are_those_of_the_run(finished: Any) -> None:
    page = Page(page_of(finished))
    run = Predictions(finished.runs / "brain_mri/random/0")
    scores = run.scores.set_index("image_id").score
    prepared = Prepared(finished.prepared / "brain_mri")
    normal = scores[prepared.table.image_id[(prepared.table.split == "test") & (prepared.table.label == 0)]]
    strip = page.tables[2]
    assert [head.partition("seed")[0] for head in strip[0]] == ["image", "truth", "random", "deep_svdd"]
    assert len(strip) == 1 + 6 + 3
    for row in strip[1:]:
        image_id = re.search(r"test/\S+", row[0])
        assert image_id is not None
        score = scores[image_id[0]]
        assert row[2] == f"score {score:.4g}above {100 * (normal < score).mean():.0f} % of test normals"


def test_an_empty_cell_has_its_reason_and_a_silent_system_is_named(finished: Any) -> None:
    text = page_of(finished)
    assert ("td", {"class": "cell", "title": f"no value: {REASON}"}) in Page(text).tags
    assert f"[1] no value: {REASON}." in " ".join(text.split())
    assert "No maps from label: image scores only." in text


def test_the_page_says_that_embedded_data_reproduce_nothing(finished: Any) -> None:
    clause = "embedded synthetic data, not the released data; reproduces no published number."
    assert f'<p class="note"><strong class="name">brain_mri</strong>: {clause}</p>' in page_of(finished)


def test_the_page_of_released_data_prints_their_known_problems(benchmark: Any) -> None:
    benchmark.official, benchmark.seeds = True, {"random": [0]}
    text = benchmark.make().report()
    assert "not the released data" not in text
    assert "Warning: known problem of these data: duplicate across splits (2)." in text


def test_definitions_name_their_source(finished: Any) -> None:
    plain = " ".join(page_of(finished).split())
    assert (
        'Average precision over all pixels. <span class="soft">Source: B &amp; C &lt;2010&gt;, 3:4-5. Unit: ' in plain
    )


def test_the_pictures_are_explained_once(benchmark: Any) -> None:
    benchmark.domains, benchmark.seeds = ["brain_mri", "liver_ct"], {"random": [0], "label": [0]}
    text = " ".join(benchmark.make().report().split())
    assert text.count("<h3>What each method saw</h3>") == 2
    assert text.count("The cyan line is the outline of the truth.") == 1
    assert text.count("Each method has one colour scale") == 1
    assert text.index("Each method has one colour scale") < text.index('aria-label="Images of brain_mri"')
    assert text.count("No maps from label: image scores only.") == 2


@pytest.mark.parametrize("shape", [(40, 400), (400, 40), (217, 181), (1, 1)])
def test_every_picture_fits_the_common_cell(shape: tuple[int, int]) -> None:
    height, width, _ = pixels(figures.photo(np.zeros(shape, np.uint8))).shape
    assert width == figures.WIDTH or height == figures.HEIGHT
    assert width <= figures.WIDTH
    assert height <= figures.HEIGHT
    assert 6 * (figures.WIDTH + 16) < 1100  # image, truth and four methods, with the space between them


def test_costs_have_one_decimal_and_whole_megabytes(copied: Any) -> None:
    for folder, seconds, memory in ((copied.models, 123.811, 1095.8), (copied.runs, 0.04, 99.4)):
        path = folder / "brain_mri/random/0/run.json"
        records.write_card(path, {**records.read_card(path), "seconds": seconds, "peak_memory_mb": memory})
    (copied.models / "brain_mri/deep_svdd/0/run.json").unlink()
    copied.report()
    costs = next(found for found in Page(page_of(copied)).tables if found[0][-1] == "predict, MB")
    assert costs[1] == ["brain_mri", "random", "0", "cpu", "123.8", "1,096", "0.0", "99"]
    assert costs[4][:6] == ["brain_mri", "deep_svdd", "0", "cpu", "–", "–"]


@pytest.mark.parametrize(("old", "new"), [("fit_seconds", "seconds"), (",cpu,", ",cpu,soon")])
def test_a_damaged_performance_table_is_refused(copied: Any, old: str, new: str) -> None:
    copied.table()
    path = copied.results / "performance.csv"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(AnomedError, match=rf"^{path}: damaged \(.*(fit_seconds|soon).*\); run `anomed table` again$"):
        copied.page()


def test_text_from_data_is_no_markup(benchmark: Any) -> None:
    hostile = '<script>alert("1")</script>'
    benchmark.pathologies, benchmark.prefix = [hostile], "test/Ungood/<img src=x onerror=alert(2)>"
    benchmark.seeds = {"random": [0], "a<b>&c": [0]}
    text = benchmark.make().report()
    page = Page(text)
    assert "<script" not in text
    assert {tag for tag, _ in page.tags} & {"script", "b", "iframe"} == set()
    assert any(hostile in row[0] for row in page.tables[2])
    assert any("<img src=x onerror=alert(2)>" in row[0] for row in page.tables[2])
    assert page.tables[0][2][0] == "a<b>&c"
    assert "&lt;b&gt;random&lt;/b&gt; warns" in text  # a warning of the run card


def test_the_page_needs_nothing_from_outside(finished: Any) -> None:
    page = Page(page_of(finished))
    for tag, attributes in page.tags:
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("data:", "#")), (tag, attributes[name])
        assert not any(name.startswith("on") for name in attributes)
        assert tag != "img" or attributes["alt"]
    assert "url(" not in page_of(finished)


def test_provenance_names_parameters_data_code_and_command(finished: Any) -> None:
    text = page_of(finished)
    card = records.read_json(finished.runs / "brain_mri/deep_svdd/0/run.json")
    expected = [card["data_hash"], card["code"]["sha256"][:12], f"numpy {np.__version__}", "snakemake --cores all"]
    for word in expected:
        assert word in text
    assert ["deep_svdd", json.dumps(card["parameters"], sort_keys=True)] in [row[:2] for row in Page(text).tables[-1]]


def test_the_same_page_every_time(finished: Any) -> None:
    before = page_of(finished)
    assert finished.report() == before


def test_a_table_of_other_parameters_is_refused(copied: Any) -> None:
    copied.table()
    path, hash_ = copied.results / "scores.csv", records.digest("label")
    path.write_text(path.read_text().replace(hash_, "0" * 64))
    with pytest.raises(AnomedError, match=f"label, seed 0.: parameter_hash is {'0' * 64}, expected {hash_}: "):
        copied.page()


def test_a_table_of_another_plan_is_refused(copied: Any) -> None:
    copied.table()
    copied.seeds = {"random": [0, 1]}
    with pytest.raises(AnomedError, match=r"its runs are not those of the plan, first at .*; run `anomed table` again"):
        copied.page()


def test_runs_on_other_data_are_refused(copied: Any) -> None:
    path = copied.runs / "brain_mri/deep_svdd/0/run.json"
    records.write_card(path, {**records.read_card(path), "data_hash": "0" * 64})
    with pytest.raises(AnomedError, match=f"deep_svdd/0: data_hash is {'0' * 64}, expected .* the prepared data"):
        copied.report()


def test_an_image_of_unknown_truth_is_shown_without_outline(benchmark: Any) -> None:
    benchmark.unknown, benchmark.seeds = (0, 3), {"random": [0]}
    page = Page(benchmark.make().report())
    truth = {row[0]: row[1] for row in page.tables[2][1:]}
    assert truth["tumourtest/Ungood/100"] == "pixel truth unknown"
    assert truth["tumourtest/Ungood/106"] == "2.68 % anomalous"


def test_a_domain_without_masks_shows_maps_and_no_truth(benchmark: Any) -> None:
    benchmark.masks = False
    text = benchmark.make().report()
    page = Page(text)
    assert [head.partition("seed")[0] for head in page.tables[1][0]] == ["image", "random", "deep_svdd"]
    assert page.tables[0][0] == ["system", "seeds", "Image AUROC ↑", "Missed ↓"]  # nor empty columns
    assert page.tables[0][3] == ["label", "2", "0.3750± 0.1768[0.277, 0.473]", "0.5000± 0.0000[0.402, 0.598]"]
    plain = " ".join(text.split())
    assert '<h3>Pixels</h3> <p class="small soft">Pixel AP: no value, the domain has no pixel truth. </p>' in plain
    assert "No pixel truth in this domain. No maps from label: image scores only. </p>" in plain
    for word in ("[1]", "Counted: <", "normal pixels", "cyan line"):
        assert word not in plain
    assert len(page.tables[1]) == 1 + 6 + 3


def test_images_are_spread_over_pathologies(finished: Any) -> None:
    prepared = Prepared(finished.prepared / "brain_mri")
    shown = figures.pick(prepared, prepared.table.image_id)
    assert shown.pathology.tolist() == ["", "", "infarct", "infarct", "tumour", "tumour", "", "", ""]
    assert shown.label.tolist() == [1] * 6 + [0] * 3
    assert set(shown.split) == {"test"}
    assert shown.image_id.is_unique
    few = figures.pick(prepared, ["test/Ungood/104", "test/good/001", "train/000"])
    assert few.image_id.tolist() == ["test/Ungood/104", "test/good/001"]


def test_the_scale_is_that_of_all_maps_of_the_run(finished: Any) -> None:
    run = Predictions(finished.runs / "brain_mri/deep_svdd/0")
    values = np.sort(np.stack([run.map(row) for row in range(18)]), axis=None)
    scale = figures.scale(run)
    low, high = np.quantile(values, figures.QUANTILES, method="inverted_cdf")
    assert (scale.low, scale.high, scale.smallest, scale.largest) == (low, high, values[0], values[-1])


def test_equal_values_have_equal_colours_in_every_map_of_a_run() -> None:
    scale = figures.Scale(-2.0, 6.0, -3.0, 9.0)
    side = figures.HEIGHT
    rising = np.linspace(-3, 9, side, dtype=np.float32).repeat(side).reshape(side, side)
    flat = np.full((side, side), rising[50, 0], np.float32)
    one, other = (pixels(figures.heat(values, (side, side), scale)) for values in (rising, flat))
    assert (other == one[50]).all()
    assert (one[49] != one[50]).any()
    low, high = pixels(figures.colour_bar())[0, [0, -1]]
    assert (one[: side // 12] == low).all()  # below and above the scale: its ends
    assert (one[-side // 4 :] == high).all()
    assert high.sum() > low.sum()  # a higher score is brighter


def test_a_constant_map_has_the_lowest_colour() -> None:
    picture = pixels(figures.heat(np.ones((8, 8), np.float32), (40, 40), figures.Scale(1.0, 1.0, 1.0, 1.0)))
    assert (picture == pixels(figures.colour_bar())[0, 0]).all()


def test_the_outline_of_the_smallest_lesion_is_visible_and_leaves_it_free() -> None:
    mask = np.zeros((600, 800), bool)
    mask[300, 400] = True
    picture = pixels(figures.photo(np.full((600, 800), 77, np.uint8), mask))
    assert picture.shape == (108, 144, 3)
    drawn = (picture == figures.OUTLINE).all(axis=2)
    assert drawn.sum() == 4
    assert not drawn[54, 72]
    assert (picture[~drawn] == 77).all()
