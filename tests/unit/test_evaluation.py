"""Evaluation of a run: parts against subsets computed from scratch, replicates against resampled images."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from tiny_domain import domain, noise, run

from anomed import bootstrap, counting, stats
from anomed.counting import Counter
from anomed.counting_gpu import Regrid
from anomed.errors import AnomedError
from anomed.evaluation import Evaluation, evaluate
from anomed.manifest import Prepared
from anomed.mapcodes import Codec
from anomed.metrics.declare import LEVELS, METRICS, metrics
from anomed.metrics.histogram import PixelHistogram
from anomed.predictions import Predictions

COUNTS = {("valid", 0): 2, ("valid", 1): 3, ("test", 0): 9, ("test", 1): 12}
OPTIONS = {"aupro_limit": 0.3, "sensitivity_fpr": 0.1}


def table_of(prepared: Prepared, predictions: Predictions) -> pd.DataFrame:
    """Seven subjects of three images each; the last has normal and abnormal ones. Three pathologies, one unknown."""
    table = prepared.evaluated().assign(score=predictions.scores.score, map_row=predictions.scores.map_row)
    test = (table.split == "test").to_numpy()
    table.loc[test, "subject_id"] = [f"s{i // 3}" for i in range(9)] + [f"s{i // 3}" for i in range(8, 20)]
    kinds = ["tumour", "tumour", "small", ""] * 3
    table.loc[test, "pathology"] = ["irrelevant"] * 9 + kinds
    area = {row: int(prepared.mask(int(mask)).sum()) for row, mask in table.mask_row.dropna().items()}
    return table.assign(area=pd.Series(area, table.index, "Int64"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Prepared, Predictions, pd.DataFrame]:
    folder = tmp_path_factory.mktemp("run")
    prepared = domain(folder / "data", COUNTS, foreground=True, unknown=["test/1/4"])
    predictions = Predictions(run(folder / "run", prepared, noise(prepared)))
    return prepared, predictions, table_of(prepared, predictions)


@pytest.fixture(scope="module")
def found(made: tuple[Prepared, Predictions, pd.DataFrame]) -> Evaluation:
    return evaluate(made[2], Counter(*made[:2], "cpu"), OPTIONS, 130)


def alone(made: tuple[Prepared, Predictions, pd.DataFrame], test: pd.DataFrame) -> dict[str, float | None]:
    """Values of the images in `test` (repeats allowed) as if there were no others, by the plain way."""
    prepared, predictions, table = made
    valid = table[table.split == "valid"]
    counter = Counter(prepared, predictions, "cpu")
    values: dict[str, float | None] = {}
    for level in LEVELS:
        for metric in metrics(level):
            if level == "image":
                scores = np.unique(valid.score)
                f1 = [METRICS["image_f1"].function(valid.score, valid.label, threshold=score) for score in scores]
                threshold: Any = scores[len(f1) - 1 - int(np.argmax(f1[::-1]))]
                data: tuple[Any, ...] = (test.score, test.label)
            else:
                on_valid = counter.count(valid[valid.area.notna()])[level]
                found, called = (np.cumsum(one[::-1])[::-1] for one in (on_valid.lesion, on_valid.total))
                dice = 2 * found / (found[0] + called)
                threshold = int(np.flatnonzero(dice == dice.max())[-1])
                data = (counter.count(test[test.area.notna()])[level],)
            known = {key: OPTIONS[key] for key in metric.options}
            try:
                values[metric.name] = metric.function(*data, threshold=threshold, **known)
            except Exception:
                values[metric.name] = None
    return values


def test_parts_are_what_a_subset_gives_alone(
    made: tuple[Prepared, Predictions, pd.DataFrame], found: Evaluation
) -> None:
    test = made[2][made[2].split == "test"]
    normal, bad = test[test.label == 0], test[test.label == 1]
    subsets = {("", ""): bad} | {("pathology", kind): bad[bad.pathology == kind] for kind in ("small", "tumour")}
    kinds = [key for key in found.parts if key[0] in ("", "pathology")]
    assert kinds == list(subsets)
    sizes = [key for key in found.parts if key[0] == "lesion_size"]
    areas = bad.area.dropna().astype(int)
    assert [name.split(":")[0] for _, name in sizes] == ["small", "medium", "large"][: len(sizes)]
    for key in sizes:
        low, high = (int(word) for word in key[1].split() if word.isdigit())
        subsets[key] = bad[bad.area.notna() & (bad.area >= low).fillna(False) & (bad.area <= high).fillna(False)]
        assert low in set(areas)
        assert high in set(areas)
    assert sum(len(subsets[key]) for key in sizes) == 11
    for key, rows in subsets.items():
        part, plain = found.parts[key], alone(made, pd.concat([normal, rows]))
        assert part.n == len(rows)
        assert part.counts["image"] == {"normal": 9, "abnormal": len(rows)}
        assert set(part.values) == set(plain) == set(METRICS)
        for name, value in plain.items():
            assert part.values[name] == pytest.approx(value, abs=1e-12), (key, name)
    assert found.parts["", ""].counts["pixel"]["regions"] == 22  # of the twelfth abnormal image the truth is unknown


def test_parts_by_subject(made: tuple[Prepared, Predictions, pd.DataFrame], found: Evaluation) -> None:
    test = made[2][made[2].split == "test"]
    normal, bad = test[test.label == 0], test[test.label == 1]
    subjects = [key for key in found.parts if key[0] == "subject"]
    assert subjects == [("subject", name) for name in sorted(set(bad.subject_id))]
    for key in subjects:
        rows = bad[bad.subject_id == key[1]]
        plain = alone(made, pd.concat([normal, rows]))
        assert found.parts[key].n == len(rows)
        for name, value in plain.items():
            assert found.parts[key].values[name] == pytest.approx(value, abs=1e-6), (key, name)


def test_replicates_are_values_of_resampled_subjects(
    made: tuple[Prepared, Predictions, pd.DataFrame], found: Evaluation
) -> None:
    """Every image as often as its subject was drawn, put together and evaluated anew."""
    test = made[2][made[2].split == "test"]
    assert (found.unit, found.units) == ("subject", 7)
    names = sorted(set(test.subject_id))
    drawn = np.concatenate(list(stats.draws(7, 130)))
    assert set(found.replicates) == set(METRICS)
    assert {values.shape for values in found.replicates.values()} == {(130,)}
    for replicate in (0, 63, 64, 129):
        rows = [
            test[test.subject_id == name]
            for name, n in zip(names, drawn[replicate], strict=True)
            for _ in range(int(n))
        ]
        for name, value in alone(made, pd.concat(rows)).items():
            here = found.replicates[name][replicate]
            assert here == pytest.approx(np.nan if value is None else value, abs=1e-6, nan_ok=True), name
    assert found.binning is not None
    assert found.binning < 1e-6


def test_without_pixels_only_images_are_evaluated(made: tuple[Prepared, Predictions, pd.DataFrame]) -> None:
    found = evaluate(made[2], None, OPTIONS, 100)
    names = [metric.name for metric in metrics("image")]
    assert list(found.parts["", ""].values) == list(found.replicates) == names
    assert found.binning is None
    assert list(found.exact) == ["image"]


def test_unknown_subjects_are_images(made: tuple[Prepared, Predictions, pd.DataFrame]) -> None:
    table = made[2].assign(subject_id=made[2].image_id)
    found = evaluate(table, None, OPTIONS, 100)
    assert (found.unit, found.units) == ("image", 21)
    assert not [key for key in found.parts if key[0] == "subject"]


def test_a_valid_split_of_one_class_chooses_no_threshold(made: tuple[Prepared, Predictions, pd.DataFrame]) -> None:
    table = made[2][(made[2].split == "test") | (made[2].label == 0)]
    whole = evaluate(table, Counter(*made[:2], "cpu"), OPTIONS, 100).parts["", ""]
    assert whole.reasons["image_f1"] == "valid chooses no threshold: one class only: no abnormal image among 2"
    assert whole.reasons["pixel_dice_foreground"].startswith(
        "valid chooses no threshold: one class only: no abnormal pixel"
    )
    assert {name for name, value in whole.values.items() if value is None} == {
        "image_f1", "pixel_dice", "pixel_dice_foreground",
    }  # fmt: skip


# --- bins ------------------------------------------------------------------------------------------------------------


def smooth(kind: str, subjects: int = 40) -> list[PixelHistogram]:
    """Histograms of subjects that fill all codes, far more than there are bins."""
    random = np.random.default_rng(3)
    found = []
    for number in range(subjects):
        mask = np.zeros((160, 160), bool)
        if number % 2:
            mask[30:60, 40:90] = mask[100:103, 5:9] = True
        scores = random.normal(size=mask.shape) + random.normal(0, 0.4) + 2.2 * mask * random.random(mask.shape)
        if kind == "background":
            scores[:, :70] = -1
        if kind == "rare":
            scores = np.exp(2 * scores)
        codes = np.clip(scores, -4, 6) if kind != "rare" else np.clip(scores / 8, 0, 10) - 4
        histogram = PixelHistogram()
        histogram.update(np.rint((codes + 4) * 6553).astype(np.uint16), mask)
        found.append(histogram)
    return found


@pytest.mark.parametrize("kind", ["plain", "background", "rare"])
def test_binned_and_exact_values_agree(kind: str) -> None:
    parts = smooth(kind, 200)
    whole = PixelHistogram()
    for part in parts:
        whole.merge(part)
    assert np.count_nonzero(whole.total) > 2 * bootstrap.BINS
    cut = 47_111
    groups = bootstrap.PixelGroups(whole, cut, len(parts))
    assert bootstrap.BINS / 4 < len(groups.starts) < 1.5 * bootstrap.BINS
    for number, part in enumerate(parts):
        groups.add(number, part)
    counts = groups.counts(np.ones((1, len(parts))))
    assert {name: int(n[0]) for name, n in counts.sizes().items()} == whole.counts().sizes()
    for metric in metrics("pixel"):
        exact = metric.function(whole, threshold=cut)
        binned = float(metric.replicates(counts, {})[0])
        assert binned == pytest.approx(exact, abs=1e-12 if metric.name == "pixel_dice" else 1e-4), metric.name


def test_sums_do_not_depend_on_the_order_of_groups() -> None:
    parts = smooth("plain", 12)
    whole = PixelHistogram()
    for part in parts:
        whole.merge(part)
    weights = next(iter(stats.draws(12, 5)))
    order = np.random.default_rng(0).permutation(12)
    found = []
    for places, drawn in ((np.arange(12), weights), (order, weights[:, order])):
        groups = bootstrap.PixelGroups(whole, None, 12)
        for place, number in enumerate(places):
            groups.add(place, parts[number])
        found.append(groups.counts(drawn))
    np.testing.assert_array_equal(found[0].normal, found[1].normal)
    np.testing.assert_array_equal(found[0].overlap, found[1].overlap)


# --- the same numbers from torch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(12, 20), (31, 17), (5, 40), (24, 40)])
@pytest.mark.parametrize("kind", ["normal", "exp", "background", "constant"])
def test_torch_regrids_to_the_same_codes(kind: str, shape: tuple[int, int]) -> None:
    import torch

    random = np.random.default_rng(0)
    scores = random.normal(size=(3, 12, 20)).astype(np.float32)
    scores = {
        "normal": scores,
        "exp": np.exp(5 * scores),
        "background": np.where(random.random(scores.shape) < 0.6, np.float32(0), scores),
        "constant": np.full_like(scores, 0.3),
    }[kind]
    codec = Codec.fit(scores, float(scores.min()), float(scores.max()))
    codes = codec.encode(scores)[0]
    there = Regrid(codec, "cpu")(codes, *shape)
    here = counting.on_grid(codec, codes, *shape)
    np.testing.assert_array_equal(there.numpy(), here)
    mask = np.zeros(shape, bool)
    mask[1:3, 2:6] = True
    within = random.random(shape) < 0.8
    counted = [PixelHistogram(), PixelHistogram()]
    for histogram, grid in zip(counted, (here, there), strict=True):
        histogram.update(grid, mask)
        histogram.update(grid, mask, within)
    np.testing.assert_array_equal(counted[0].total, counted[1].total)
    np.testing.assert_array_equal(counted[0].overlap, counted[1].overlap)
    assert there.dtype == torch.int32
    with pytest.raises(AnomedError, match="found the code 65536, expected codes from 0 to 65535"):
        PixelHistogram().update(there * 0 + 65_536, mask)


def test_cuda_on_demand_only(made: tuple[Prepared, Predictions, pd.DataFrame], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AnomedError, match="device cuda: torch sees no CUDA device"):
        Counter(*made[:2], "cuda")
    assert Counter(*made[:2], "auto").count(made[2].iloc[:1])["pixel"].images == 1
