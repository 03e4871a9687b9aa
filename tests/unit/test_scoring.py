"""Scoring: records and curves of a run, native grids, what is excluded, what is refused."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_domain
from paths import ROOT
from sklearn.metrics import average_precision_score, roc_auc_score
from tiny_domain import domain, noise, run, seal

from anomed import records
from anomed.errors import AnomedError
from anomed.images import upsample
from anomed.manifest import Prepared
from anomed.metrics import curves
from anomed.metrics.counts import Counts
from anomed.metrics.declare import LEVELS, METRICS, metric, metrics
from anomed.predictions import Predictions
from anomed.scoring import score

COUNTS = {("train", 0): 2, ("valid", 0): 2, ("valid", 1): 3, ("test", 0): 4, ("test", 1): 5}
PARAMETERS: dict[str, Any] = {**tiny_domain.PARAMETERS, "metrics": {"aupro_limit": 0.3, "replicates": 200}}
IMAGE, PIXEL, FOREGROUND = ([found.name for found in metrics(level)] for level in LEVELS)
SHIPPED = [name for name in (*IMAGE, *PIXEL) if "_f1" not in name and "dice" not in name]
CUT = ("image_f1", "pixel_dice")  # their threshold comes from valid
BEST = {name: found.high if found.direction == "higher" else found.low for name, found in METRICS.items()}


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    return domain(tmp_path / "data", COUNTS)


def scored(folder: Path, prepared: Prepared, parameters: dict[str, Any] = PARAMETERS) -> dict[str, Any]:
    """The score file of a run, its records by metric."""
    out = folder.parent / "scores" / f"{folder.name}.json"
    score(folder, prepared.folder, parameters, out)
    found = json.loads(out.read_text())
    return {**found, "records": {record["metric"]: record for record in found["records"]}}


def oracle(prepared: Prepared) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Scores = labels; maps = masks on one grid of 40 x 40, into whose corner every native grid fits."""
    for row in prepared.evaluated().itertuples():
        whole = np.zeros((1, 40, 40), np.float32)
        mask = prepared.mask(int(row.mask_row))
        whole[0, : mask.shape[0], : mask.shape[1]] = mask
        yield np.array([float(row.label)]), whole


def test_an_oracle_reaches_the_better_end_of_every_metric(tmp_path: Path) -> None:
    prepared = domain(tmp_path / "data", COUNTS, native=[(40, 40)], foreground=True)
    found = scored(run(tmp_path / "oracle", prepared, oracle(prepared)), prepared)
    values = {name: record["value"] for name, record in found["records"].items()}
    assert values == BEST
    assert {name: values[name] for name in SHIPPED} == dict.fromkeys(SHIPPED, 1.0)
    for name, record in found["records"].items():
        assert (record["low"], record["high"], record["interval_reason"]) == (BEST[name], BEST[name], None)


def test_a_constant_is_at_chance(prepared: Prepared, tmp_path: Path) -> None:
    batches = [(np.zeros(14), np.full((14, 9, 9), 0.1, np.float32))]
    found = scored(run(tmp_path / "constant", prepared, batches), prepared)["records"]
    assert (found["image_auroc"]["value"], found["pixel_auroc"]["value"]) == (0.5, 0.5)
    assert found["image_ap"]["value"] == pytest.approx(5 / 9)
    assert found["pixel_aupro"]["value"] == pytest.approx(0.15)


def test_records_say_what_they_are(prepared: Prepared, tmp_path: Path) -> None:
    found = scored(
        run(tmp_path / "random", prepared, noise(prepared), domain="tiny", system="random", seed=3), prepared
    )
    assert {key: found[key] for key in ("domain", "system", "seed")} == {
        "domain": "tiny",
        "system": "random",
        "seed": 3,
    }
    assert found["manifest_hash"] == prepared.hash
    assert found["parameter_hash"] == records.digest(PARAMETERS)
    assert list(found["records"]) == [*IMAGE, *PIXEL]
    assert [name for name in found["records"] if name in SHIPPED] == SHIPPED
    declared = ("label", "level", "unit", "direction", "source", "version")
    for name, record in found["records"].items():
        interval = ("low", "high", "interval_reason")
        assert set(record) == {
            "metric",
            "definition_id",
            "value",
            "reason",
            *interval,
            "n",
            "counts",
            "definition",
            *declared,
        }
        assert record["definition_id"] == METRICS[name].identifier({"aupro_limit": 0.3})
        assert METRICS[name].low <= record["low"] <= record["high"] <= METRICS[name].high
        assert record["interval_reason"] is None
        assert METRICS[name].low <= record["value"] <= METRICS[name].high, name
        assert (record["metric"], record["reason"], record["n"]) == (name, None, 9)
        assert {key: record[key] for key in declared} == {key: getattr(METRICS[name], key) for key in declared}
        assert record["definition"] == METRICS[name].described({"aupro_limit": 0.3})
    assert found["bootstrap"]["unit"] == "image"  # every image is its own subject
    assert (found["bootstrap"]["units"], found["bootstrap"]["replicates"], found["bootstrap"]["confidence"]) == (
        9,
        200,
        0.95,
    )
    assert 0 <= found["bootstrap"]["binning"] < 1e-6  # fewer codes than bins
    for name in SHIPPED:
        assert 0 <= found["records"][name]["value"] < 1, name
        assert (found["records"][name]["direction"], found["records"][name]["unit"]) == ("higher", "fraction")
    assert found["records"]["image_auroc"]["source"] == "Hanley and McNeil 1982, Radiology 143:29-36"
    assert found["records"]["image_ap"]["counts"] == {"normal": 4, "abnormal": 5}
    test = prepared.table[prepared.table.split == "test"]
    masks = [prepared.mask(int(row)) for row in test.mask_row]
    lesion = sum(int(mask.sum()) for mask in masks)
    counts = {"normal": sum(mask.size for mask in masks) - lesion, "abnormal": lesion, "regions": 10, "excluded": 0}
    assert found["records"]["pixel_aupro"]["counts"] == counts


def test_pixels_are_judged_on_their_native_grids(prepared: Prepared, tmp_path: Path) -> None:
    """Against scikit-learn on the float32 maps, upsampled: four native sizes, none that of the maps."""
    folder = run(tmp_path / "random", prepared, noise(prepared))
    found = scored(folder, prepared)["records"]
    table, maps = prepared.evaluated(), np.concatenate([maps for _, maps in noise(prepared)])
    test = table.index[table.split == "test"]
    masks = [prepared.mask(int(table.mask_row[place])) for place in test]
    assert {mask.shape for mask in masks} == {(24, 40), (33, 17), (16, 16), (40, 24)}
    truth = np.concatenate([mask.ravel() for mask in masks])
    exact = np.concatenate([upsample(maps[i], *mask.shape).ravel() for i, mask in zip(test, masks, strict=True)])
    assert found["pixel_auroc"]["value"] == pytest.approx(roc_auc_score(truth, exact), abs=1e-4)
    assert found["pixel_ap"]["value"] == pytest.approx(average_precision_score(truth, exact), abs=1e-3)
    scores = Predictions(folder).scores.score[test]
    assert found["image_auroc"]["value"] == pytest.approx(roc_auc_score(table.label[test], scores), abs=1e-12)
    assert found["image_ap"]["value"] == pytest.approx(average_precision_score(table.label[test], scores), abs=1e-12)


def test_maps_on_the_native_grid_are_taken_as_coded(tmp_path: Path) -> None:
    prepared = domain(tmp_path / "data", COUNTS, native=[(12, 20)])
    folder = run(tmp_path / "random", prepared, noise(prepared))
    found = scored(folder, prepared)["records"]
    read, table = Predictions(folder), prepared.evaluated()
    test = table.index[table.split == "test"]
    assert read.maps is not None
    truth = np.stack([prepared.mask(int(table.mask_row[place])) for place in test])
    assert found["pixel_auroc"]["value"] == pytest.approx(
        roc_auc_score(truth.ravel(), read.maps[test].ravel()), abs=1e-12
    )


def test_the_test_split_alone_counts(prepared: Prepared, tmp_path: Path) -> None:
    scores, maps = (np.concatenate(part) for part in zip(*noise(prepared), strict=True))
    before = scored(run(tmp_path / "a", prepared, [(scores, maps)]), prepared)["records"]
    valid = np.arange(14) < 5
    swapped = np.where(valid, scores[::-1], scores)
    moved = maps.copy()
    moved[:5] = maps[4::-1]
    after = scored(run(tmp_path / "b", prepared, [(swapped, moved)]), prepared)["records"]
    for name in {*before} - {*CUT}:  # a bin begins at the threshold, so sums may differ in their last bit
        for key in ("value", "low", "high"):
            assert before[name][key] == pytest.approx(after[name][key], abs=1e-12), name
    assert before["pixel_dice"]["value"] != after["pixel_dice"]["value"]


def test_images_of_unknown_truth_are_excluded_and_counted(tmp_path: Path) -> None:
    prepared = domain(tmp_path / "data", COUNTS, unknown=["test/1/0", "test/1/3"])
    found = scored(run(tmp_path / "random", prepared, noise(prepared)), prepared)["records"]
    assert found["image_auroc"]["n"] == 9
    assert found["pixel_auroc"]["n"] == 7
    assert found["pixel_auroc"]["counts"]["excluded"] == 2
    assert found["pixel_auroc"]["value"] is not None


@pytest.mark.parametrize(
    ("masks", "maps", "unknown", "counts", "reason"),
    [
        (False, True, (), COUNTS, "the domain has no pixel truth"),
        (True, False, (), COUNTS, "the system does not localise"),
        (True, True, ("test/1/0",), {("valid", 1): 2, ("test", 1): 1}, "no test image has pixel truth"),
        (True, True, (), {("valid", 1): 2, ("test", 0): 2}, "one class only: no abnormal pixel among 1521"),
    ],
)
def test_what_cannot_be_computed_is_null_with_the_reason(
    tmp_path: Path, masks: bool, maps: bool, unknown: tuple[str, ...], counts: dict[tuple[str, int], int], reason: str
) -> None:
    prepared = domain(tmp_path / "data", counts, masks, unknown)
    batches = noise(prepared) if maps else ((scores, None) for scores, _ in noise(prepared))
    found = scored(run(tmp_path / "run", prepared, batches, maps), prepared)["records"]
    for name in (
        PIXEL if "one class" not in reason else [name for name in SHIPPED if name in PIXEL]
    ):  # another metric words that in its own way
        assert (found[name]["value"], found[name]["reason"]) == (None, reason)
    if not any(split == "test" and label for split, label in counts):
        assert found["image_ap"]["reason"] == "one class only: no abnormal image among 2"
    with np.load(tmp_path / "scores" / "run.npz") as curves:
        assert not [name for name in curves if "pixel" in name and "one class" not in reason]
    for record in found.values():
        assert record["value"] is not None or (record["low"], record["interval_reason"]) == (None, record["reason"])


def test_a_missing_map_is_a_reason(prepared: Prepared, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", prepared, noise(prepared))
    text = (folder / "scores.csv").read_text().splitlines()
    text[-1] = text[-1].rpartition(",")[0] + ","  # the last image loses its map
    (folder / "scores.csv").write_text("\n".join(text) + "\n")
    np.save(folder / "maps.npy", np.load(folder / "maps.npy")[:-1])
    seal(folder)
    found = scored(folder, prepared)["records"]
    reason = "no map for 1 of 9 test images with pixel truth, the first is test/1/4"
    assert (found["pixel_ap"]["value"], found["pixel_ap"]["reason"]) == (None, reason)
    assert found["image_ap"]["value"] is not None


def test_curves_lie_beside_the_records(prepared: Prepared, tmp_path: Path) -> None:
    found = scored(run(tmp_path / "run", prepared, noise(prepared)), prepared)
    assert found["curves"] == records.digest_file(tmp_path / "scores" / "run.npz")
    with np.load(tmp_path / "scores" / "run.npz") as curves:
        names = [name for name in curves if not name.startswith("replicates_")]
        assert sorted(names) == ["image_pr", "image_roc", "pixel_pr", "pixel_pro", "pixel_roc"]
        for name in {*curves} - {*names}:
            assert (curves[name].dtype, curves[name].shape) == (np.float32, (200,))
        assert {name.removeprefix("replicates_") for name in {*curves} - {*names}} == {*IMAGE, *PIXEL}
        for name in names:
            assert curves[name].dtype == np.float32
            assert curves[name].shape[0] == 2
            assert curves[name].shape[1] <= 513


def test_equal_input_gives_equal_bytes(prepared: Prepared, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", prepared, noise(prepared))
    written = []
    for name in ("a", "b"):
        score(folder, prepared.folder, PARAMETERS, tmp_path / name / "0.json")
        written.append([(tmp_path / name / file).read_bytes() for file in ("0.json", "0.npz")])
    assert written[0] == written[1]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["0.json", "0.npz"]
    with zipfile.ZipFile(tmp_path / "a" / "0.npz") as archive:
        assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_the_limit_of_aupro_is_a_parameter(prepared: Prepared, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", prepared, noise(prepared))
    usual = scored(folder, prepared)
    other = scored(folder, prepared, {**PARAMETERS, "metrics": {"aupro_limit": 1.0}})
    assert usual["parameter_hash"] != other["parameter_hash"]
    values = [found["records"]["pixel_aupro"]["value"] for found in (usual, other)]
    assert values[0] < values[1]
    assert "rate of 0 to 1.0," in other["records"]["pixel_aupro"]["definition"]


def test_one_decorated_function_is_a_new_metric(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anomed.metrics.declare.METRICS", dict(METRICS))

    @metric(name="pixel_youden", label="Youden", level="pixel", definition="Best of the ROC curve.", source="test")
    def pixel_youden(counts: Counts, *, weight: float = 1.0) -> np.ndarray:
        false, true = curves.roc(counts)
        return np.asarray((true - weight * false).max(axis=-1))

    prepared = domain(tmp_path / "organ", COUNTS, foreground=True)
    parameters = {**PARAMETERS, "metrics": {"weight": 0.5}}
    found = scored(run(tmp_path / "run", prepared, noise(prepared)), prepared, parameters)["records"]
    assert list(found) == [*IMAGE, *PIXEL, "pixel_youden", *FOREGROUND, "pixel_youden_foreground"]
    assert found["pixel_youden"]["definition_id"] == "pixel_youden.v1[weight=0.5]"
    assert 0 < found["pixel_youden"]["low"] <= found["pixel_youden"]["value"] <= found["pixel_youden"]["high"] < 1


def test_the_organ_alone(tmp_path: Path) -> None:
    """Records of level foreground count the pixels inside the organ, whose lesions are those of the whole image."""
    prepared = domain(tmp_path / "data", COUNTS, foreground=True)
    folder = run(tmp_path / "random", prepared, noise(prepared))
    found = scored(folder, prepared)["records"]
    assert {*found} == {*IMAGE, *PIXEL, *FOREGROUND}
    table, maps = prepared.evaluated(), np.concatenate([maps for _, maps in noise(prepared)])
    truth, exact = [], []
    for place in table.index[table.split == "test"]:
        mask, organ = prepared.mask(int(table.mask_row[place])), prepared.foreground(int(table.mask_row[place]))
        assert organ is not None
        truth.append(mask[organ])
        exact.append(upsample(maps[place], *mask.shape)[organ])
    labels, scores = np.concatenate(truth), np.concatenate(exact)
    assert found["pixel_auroc_foreground"]["value"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-4)
    assert found["pixel_auroc_foreground"]["value"] != found["pixel_auroc"]["value"]
    counts = {"normal": int((~labels).sum()), "abnormal": int(labels.sum()), "regions": 10, "excluded": 0}
    assert found["pixel_dice_foreground"]["counts"] == counts
    assert found["pixel_dice"]["counts"]["abnormal"] == counts["abnormal"]
    assert found["pixel_dice"]["counts"]["normal"] > counts["normal"]


def test_breakdowns_have_a_value_or_a_reason_for_every_metric(tmp_path: Path) -> None:
    prepared = domain(tmp_path / "data", {("test", 0): 3, ("test", 1): 4}, pathology="tumour")  # valid is empty
    batches = ((scores, None) for scores, _ in noise(prepared))
    found = scored(run(tmp_path / "run", prepared, batches, False), prepared)
    parts = found["breakdowns"]
    assert {(part["by"], part["group"].partition(":")[0]) for part in parts} >= {
        ("pathology", "tumour"),
        ("lesion_size", "medium"),
    }
    for part in parts:
        assert {*part["values"]} == {*IMAGE, *PIXEL}
        assert (
            {name for name, value in part["values"].items() if value is None}
            == {"image_f1", *PIXEL}
            == {*part["reasons"]}
        )
        assert part["reasons"]["pixel_ap"] == "the system does not localise"
        assert part["reasons"]["image_f1"] == "valid chooses no threshold: no image to count"


def test_without_a_test_image_every_value_is_null_with_the_reason(tmp_path: Path) -> None:
    prepared = domain(tmp_path / "data", {("valid", 0): 2, ("valid", 1): 2})
    found = scored(run(tmp_path / "run", prepared, noise(prepared)), prepared)
    assert found["bootstrap"]["units"] == 0
    reasons = {record["reason"] for record in found["records"].values()}
    assert reasons == {"no image to count", "no test image has pixel truth"}


def test_wrong_metric_parameters_are_refused(prepared: Prepared, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", prepared, noise(prepared))
    for block, message in {
        '{"aupro": 0.3}': r"metrics: found \{'aupro': 0.3\}, expected numbers under the keys \['aupro_limit', 'replicates', 's",
        '{"aupro_limit": 2}': "aupro_limit: found 2, expected a number above 0 and at most 1",
        '{"replicates": 0}': "replicates: found 0, expected a whole number from 1 on",
        '{"replicates": 1.5}': "replicates: found 1.5, expected a whole number",
        '{"replicates": true}': "metrics: found .*True.*, expected numbers under the keys",
    }.items():
        with pytest.raises(AnomedError, match=message):
            scored(folder, prepared, {**PARAMETERS, "metrics": json.loads(block)})
    assert not (tmp_path / "scores").exists()


def test_other_images_are_refused_with_the_first_difference(prepared: Prepared, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", prepared, noise(prepared))
    lines = [line.rpartition(",")[0] + "," for line in (folder / "scores.csv").read_text().splitlines()]
    lines[0] = "image_id,score,map_row"
    cases = {
        "found test/0/1 in row 6, expected test/0/0 as in": [*lines[:6], lines[7], lines[6], *lines[8:]],
        "found the end in row 14, expected test/1/4 as in": lines[:-1],
        "found more in row 15, expected the end as in": [*lines, "more,0,"],
    }
    for message, changed in cases.items():
        (folder / "scores.csv").write_text("\n".join(changed) + "\n")
        seal(folder)
        with pytest.raises(AnomedError, match=message):
            scored(folder, prepared)
    assert not (tmp_path / "scores").exists()


def test_data_prepared_anew_are_refused(prepared: Prepared, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", prepared, noise(prepared), data_hash="f" * 64)
    with pytest.raises(AnomedError, match=r"run\.json: found data_hash ffffffffffff, expected .* run predict again"):
        scored(folder, prepared)
    card = json.loads((folder / "run.json").read_text())
    del card["data_hash"]
    records.write_json(folder / "run.json", card)
    with pytest.raises(AnomedError, match=r"run\.json: damaged or edited: the key 'data_hash' is missing"):
        scored(folder, prepared)


def test_scoring_imports_no_network_library() -> None:
    code = "import sys, anomed.scoring; print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'monai', 'timm', 'matplotlib', 'PIL'}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "['PIL']", "")


@pytest.mark.parametrize(("small", "big"), [((7, 9), (31, 20)), ((28, 28), (240, 240)), ((64, 64), (30, 17)), ((1, 1), (5, 4)), ((8, 5), (8, 5))])  # fmt: skip
def test_upsampling_equals_torch(small: tuple[int, int], big: tuple[int, int]) -> None:
    """In float64: torch's own float32 source positions are off by up to 4e-6."""
    import torch

    scores = np.random.default_rng(0).random(small, np.float32)
    found = upsample(scores, *big)
    tensor = torch.from_numpy(scores)[None, None].double()
    expected = torch.nn.functional.interpolate(tensor, size=big, mode="bilinear", align_corners=False)[0, 0].numpy()
    assert found.dtype == np.float32
    assert found.shape == big
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=0)
    assert (scores is found) == (small == big)


@pytest.mark.parametrize("value", [0.1, -1e-30, 3.3e38])
def test_a_constant_map_stays_constant(value: float) -> None:
    assert np.unique(upsample(np.full((9, 9), value, np.float32), 24, 40)).tolist() == [np.float32(value)]


def test_a_run_made_with_other_parameters_is_refused(prepared: Prepared, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", prepared, noise(prepared))
    other = {**PARAMETERS, "method": {"implementation": "test", "k": 1}}
    with pytest.raises(AnomedError, match=r'run\.json: made with the parameters .*"test".*expected .*"k":1.*delete'):
        scored(folder, prepared, other)
    assert not (tmp_path / "scores").exists()
