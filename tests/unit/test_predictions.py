"""Predictions: what is kept, what is refused, the loss of the coding, bounded memory, damaged files."""

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tiny_domain import domain, noise, run, seal

from anomed import predictions
from anomed.errors import AnomedError
from anomed.manifest import Prepared
from anomed.mapcodes import Codec

COUNTS = {("train", 0): 2, ("valid", 0): 2, ("valid", 1): 3, ("test", 0): 4, ("test", 1): 5}


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    return domain(tmp_path / "data", COUNTS)


def test_written_predictions_are_read_back(prepared: Prepared, tmp_path: Path) -> None:
    read = predictions.Predictions(run(tmp_path / "run", prepared, noise(prepared)))
    batches = list(noise(prepared))
    scores, maps = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    assert read.scores.image_id.tolist() == prepared.evaluated().image_id.tolist()
    assert read.scores.score.tolist() == scores.tolist()  # every bit of float64
    assert read.scores.map_row.tolist() == list(range(14))
    assert read.codec is not None
    assert read.codec == Codec.fit(maps, maps.min(), maps.max())  # few pixels: the sample is all of them
    np.testing.assert_array_equal(read.maps, read.codec.encode(maps))
    inner = (maps > np.quantile(maps, 0.001)) & (maps < maps.max())
    decoded = np.stack([read.map(row) for row in range(14)])
    np.testing.assert_allclose(decoded[inner], maps[inner], atol=1e-3)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["maps.npy", "run.json", "scores.csv"]
    facts = read.card["maps"]
    assert (facts["count"], facts["height"], facts["width"]) == (14, 12, 20)
    assert (facts["valid"]["images"], facts["valid"]["reason"]) == (5, None)
    assert facts["valid"]["auroc_loss"] < 1e-4


def test_bytes_do_not_depend_on_the_batch(prepared: Prepared, tmp_path: Path) -> None:
    files = []
    for batch in (1, 4, 14):
        folder = run(tmp_path / str(batch), prepared, noise(prepared, batch=batch))
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert files[0] == files[1] == files[2]


def test_float32_scores_keep_their_value(prepared: Prepared, tmp_path: Path) -> None:
    scores = np.random.default_rng(0).normal(size=14).astype(np.float32)
    read = predictions.Predictions(run(tmp_path / "run", prepared, [(scores, None)], expect_maps=False))
    assert read.scores.score.tolist() == scores.astype(float).tolist()
    assert read.scores.map_row.isna().all()
    assert (read.maps, read.codec) == (None, None)
    assert read.card["maps"] == {"count": 0, "reason": "the method does not localise"}
    with pytest.raises(AnomedError, match="run: the run has no maps"):
        read.map(0)


def test_without_masks_a_gallery_is_kept(tmp_path: Path) -> None:
    prepared = domain(tmp_path / "data", {("valid", 1): 5, ("test", 0): 10, ("test", 1): 100}, masks=False)
    read = predictions.Predictions(run(tmp_path / "run", prepared, noise(prepared)))
    kept = read.scores[read.scores.map_row.notna()]
    assert len(kept) == 64
    assert kept.image_id.str.startswith("test/0/").sum() == 10
    maps = np.concatenate([maps for _, maps in noise(prepared)])
    assert read.codec is not None
    np.testing.assert_array_equal(read.maps, read.codec.encode(maps[kept.index]))
    assert read.card["maps"]["valid"]["reason"] == "no valid image with pixel truth, or pixels of one class only"


@pytest.mark.parametrize(("normal", "abnormal", "kept"), [(100, 1000, (32, 32)), (10, 1000, (10, 54)), (40, 3, (40, 3)), (90, 0, (64, 0)), (0, 0, (0, 0))])  # fmt: skip
def test_gallery_is_balanced_and_even(normal: int, abnormal: int, kept: tuple[int, int]) -> None:
    table = pd.DataFrame(
        {"split": ["valid"] * 7 + ["test"] * (normal + abnormal), "label": [1] * 7 + [0] * normal + [1] * abnormal}
    )
    places = predictions.gallery(table)
    labels = table.label[places]
    assert (table.split[places] == "test").all()
    assert ((labels == 0).sum(), (labels == 1).sum()) == kept
    assert (np.diff(places) > 0).all()
    for label, total in ((0, normal), (1, abnormal)):
        gaps = np.diff(places[labels == label])
        assert not len(gaps) or gaps.max() - gaps.min() <= 1, total


def _scores(count: int) -> np.ndarray:
    return np.zeros(count)


def _maps(count: int, shape: tuple[int, int] = (4, 4)) -> np.ndarray:
    return np.zeros((count, *shape), np.float32)


def _with(array: np.ndarray, place: tuple[int, ...], value: float) -> np.ndarray:
    array[place] = value
    return array


FAULTS: dict[str, tuple[Any, str]] = {
    "too few": ([(_scores(13), _maps(13))], "found 13 scores for 14 images, the first without one is test/1/4"),
    "too many": ([(_scores(15), _maps(15))], "found more than 14 scores"),
    "score NaN": ([(_with(_scores(14), (3,), np.nan), _maps(14))], "valid/1/1: found the score nan, expected a finite"),
    "score integers": ([(np.zeros(14, int), _maps(14))], r"valid/0/0: found scores of type int64 and shape \(14,\)"),
    "score shape": ([(np.zeros((14, 1)), _maps(14))], r"found scores of type float64 and shape \(14, 1\), expected floats"),
    "map inf": ([(_scores(14), _with(_maps(14), (5, 1, 1), np.inf))], "test/0/0: its map holds 1 NaN or infinite values"),
    "map float64": ([(_scores(14), np.zeros((14, 4, 4)))], r"valid/0/0: found maps of type float64.* expected float32 \(14, h, w\)"),
    "map count": ([(_scores(14), _maps(13))], r"shape \(13, 4, 4\), expected float32 \(14, h, w\)"),
    "map shape": ([(_scores(9), _maps(9)), (_scores(5), _maps(5, (4, 5)))], r"test/1/0: found a map of \(4, 5\), expected \(4, 4\)"),
    "no maps": ([(_scores(14), None)], "valid/0/0: found no maps, but the method declares `localises = True`"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_output_of_a_method_is_named(prepared: Prepared, tmp_path: Path, fault: str) -> None:
    batches, message = FAULTS[fault]
    with pytest.raises(AnomedError, match=message):
        predictions.write(tmp_path, prepared, batches, True)
    assert not (tmp_path / "maps.npy").exists()
    assert not list(tmp_path.glob(".*"))


def test_maps_of_a_method_that_does_not_localise_are_refused(prepared: Prepared, tmp_path: Path) -> None:
    with pytest.raises(AnomedError, match=r"valid/0/0: found maps, but the method declares `localises = False`"):
        predictions.write(tmp_path, prepared, noise(prepared), False)


def test_saturated_maps_are_refused_with_advice(tmp_path: Path) -> None:
    """Lesions lie a hair above 0.5, where 16 bits cannot tell them from normal pixels, in a map that also spans 80 decades."""
    prepared = domain(tmp_path / "data", COUNTS, native=[(64, 64)])
    steps = np.random.default_rng(0)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for row in prepared.evaluated().mask_row:
            mask = prepared.mask(int(row))
            scores = (
                0.5 + 6e-8 * np.where(mask, 12, steps.integers(0, 9, mask.shape) * steps.integers(0, 2, mask.shape))
            ).astype(np.float32)
            wide = steps.random(mask.shape) < 0.6
            signs = np.where(steps.random(mask.shape) < 0.5, -1, 1)
            scores[wide & ~mask] = (signs * np.exp(steps.uniform(-80, 80, mask.shape)))[wide & ~mask]
            yield np.zeros(1), scores[None]

    with pytest.raises(AnomedError, match=r"on the 5 valid images, expected at most 0.0002.*output logits"):
        predictions.write(tmp_path, prepared, batches(), True)


def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path) -> None:
    peaks = []
    for count in (40, 160):  # 2.9 and 10.7 million pixels: both above the cap of the sample
        prepared = domain(tmp_path / f"data{count}", {("valid", 1): 4, ("test", 0): count}, native=[(16, 16)])
        (tmp_path / str(count)).mkdir()
        batches = noise(prepared, (256, 256), 4)
        tracemalloc.start()
        predictions.write(tmp_path / str(count), prepared, batches, True)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2e6, peaks  # all float32 maps would add 31 MB


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


DAMAGE = {
    "no card": (lambda run: (run / "run.json").unlink(), r"run\.json: not found"),
    "no codec": (lambda run: _edit(run / "run.json", '"codec"', '"other"'), r"run\.json: no coding of the maps"),
    "codec key": (lambda run: _edit(run / "run.json", '"iqr"', '"range"'), r"run\.json: found the map coding"),
    "no scores": (lambda run: (run / "scores.csv").unlink(), r"scores\.csv: not found; the step that makes it has not run"),
    "empty scores": (lambda run: (run / "scores.csv").write_text(""), r"scores\.csv: unreadable"),
    "columns": (lambda run: _edit(run / "scores.csv", "score", "anomaly"), r"scores\.csv: found columns \['image_id', 'anomaly'"),
    "text": (lambda run: _edit(run / "scores.csv", "valid/0/0,", "valid/0/0,x"), r"scores\.csv: unreadable"),
    "empty score": (lambda run: (run / "scores.csv").write_text("image_id,score,map_row\na,,0\n"), r"scores\.csv: unreadable|score of a is not"),
    "infinite": (lambda run: (run / "scores.csv").write_text("image_id,score,map_row\na,inf,0\n"), r"scores\.csv: the score of a is not a finite"),
    "map_row": (lambda run: (run / "scores.csv").write_text("image_id,score,map_row\na,1,1\n"), r"scores\.csv: map_row does not count up"),
    "no maps": (lambda run: (run / "maps.npy").unlink(), r"maps\.npy: not found"),
    "truncated": (lambda run: (run / "maps.npy").write_bytes((run / "maps.npy").read_bytes()[:-9]), r"maps\.npy: unreadable"),
    "no header": (lambda run: (run / "maps.npy").write_bytes(b"\x93NUM"), r"maps\.npy: unreadable"),
    "empty maps": (lambda run: (run / "maps.npy").write_bytes(b""), r"maps\.npy: unreadable"),
    "other maps": (lambda run: np.save(run / "maps.npy", np.zeros((14, 4, 4))), r"maps\.npy: found of type float64 and shape"),
    "fewer maps": (lambda run: np.save(run / "maps.npy", np.zeros((13, 4, 4), np.uint16)), r"maps\.npy: .*expected uint16 \(14, h, w\)"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_named(prepared: Prepared, tmp_path: Path, damage: str) -> None:
    folder = run(tmp_path / "run", prepared, noise(prepared))
    spoil, message = DAMAGE[damage]
    spoil(folder)
    seal(folder)
    with pytest.raises(AnomedError, match=message):
        _ = predictions.Predictions(folder).maps


@pytest.mark.parametrize("name", ["scores.csv", "maps.npy"])
def test_a_file_that_was_changed_is_noticed(prepared: Prepared, tmp_path: Path, name: str) -> None:
    folder = run(tmp_path / "run", prepared, noise(prepared))
    data = bytearray((folder / name).read_bytes())
    data[-3] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(AnomedError, match=rf"{name}: not the file that the card beside it describes"):
        _ = predictions.Predictions(folder).maps


def test_an_id_that_looks_like_a_missing_value_stays_text(tmp_path: Path) -> None:
    keys = ("domain", "system", "seed", "parameters", "data_hash", "maps")
    (tmp_path / "run.json").write_text(json.dumps(dict.fromkeys(keys)))
    (tmp_path / "scores.csv").write_text('image_id,score,map_row\nNA,0.1,\n007,-1e-300,\n"a,b",3,\n')
    seal(tmp_path)
    read = predictions.Predictions(tmp_path)
    assert read.scores.image_id.tolist() == ["NA", "007", "a,b"]
    assert read.scores.score.tolist() == [0.1, -1e-300, 3.0]
