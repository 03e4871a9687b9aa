"""The fit and predict commands, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_domain

from anomed import detect, plugins, predict, records
from anomed.errors import AnomedError
from anomed.predictions import Predictions

COUNTS = {("train", 0): 4, ("valid", 0): 2, ("test", 0): 3, ("test", 1): 3}
RANDOM: dict[str, Any] = {"method": {"implementation": "controls.random"}, "files": {}}


def test_a_fitted_model_predicts_valid_then_test_with_a_card(tmp_path: Path) -> None:
    prepared = tiny_domain.domain(tmp_path / "data", COUNTS)
    detect.fit("chance", RANDOM, 7, tmp_path / "data", tmp_path / "model", "auto")
    predict.predict(tmp_path / "model", tmp_path / "data", tmp_path / "run", "auto")
    run = Predictions(tmp_path / "run")
    assert run.scores.image_id.tolist() == prepared.evaluated().image_id.tolist()
    assert run.scores.map_row.notna().all()
    card = json.loads((tmp_path / "run/run.json").read_text())
    facts = {key: card[key] for key in ("domain", "system", "seed", "parameters", "data_hash", "device")}
    assert facts == {
        "domain": "tiny", "system": "chance", "seed": 7, "parameters": RANDOM, "data_hash": prepared.hash, "device": "cpu",
    }  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "model", "run"]


def test_no_train_image_is_refused(tmp_path: Path) -> None:
    tiny_domain.domain(tmp_path / "data", {("test", 0): 2, ("test", 1): 2})
    with pytest.raises(AnomedError, match="no train image, so nothing to fit 'chance' on"):
        detect.fit("chance", RANDOM, 0, tmp_path / "data", tmp_path / "model", "auto")
    assert not (tmp_path / "model").exists()


def test_a_model_of_other_data_is_refused(tmp_path: Path) -> None:
    tiny_domain.domain(tmp_path / "data", COUNTS)
    tiny_domain.domain(tmp_path / "other", {**COUNTS, ("test", 1): 4})
    detect.fit("chance", RANDOM, 0, tmp_path / "data", tmp_path / "model", "auto")
    with pytest.raises(AnomedError, match="model: fitted on other data"):
        predict.predict(tmp_path / "model", tmp_path / "other", tmp_path / "run", "auto")
    assert not (tmp_path / "run").exists()


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    tiny_domain.domain(tmp_path / "data", COUNTS)
    detect.fit("chance", RANDOM, 0, tmp_path / "data", tmp_path / "model", "auto")
    (tmp_path / "model" / detect.STATE).write_bytes(b"\x80\x04cposix\nsystem\n.")
    with pytest.raises(AnomedError, match=r"state\.safetensors: not the file that the card beside it describes"):
        predict.predict(tmp_path / "model", tmp_path / "data", tmp_path / "run", "auto")
    tiny_domain.seal(tmp_path / "model")
    with pytest.raises(AnomedError, match=r"state\.safetensors: unreadable .*; fit again"):
        predict.predict(tmp_path / "model", tmp_path / "data", tmp_path / "run", "auto")


def test_weights_that_changed_since_the_plan_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is swapped between planning, fit and predict would be another system under the same hash."""
    tiny_domain.domain(tmp_path / "data", COUNTS)
    file = tmp_path / "weights.bin"
    file.write_bytes(b"first")
    method = plugins.load("methods", "controls.random")
    monkeypatch.setattr(method, "files", classmethod(lambda cls, params: {"net": file}))
    parameters = {**RANDOM, "files": {"net": records.digest_file(file)}}
    detect.fit("chance", parameters, 0, tmp_path / "data", tmp_path / "model", "auto")
    file.write_bytes(b"second")
    for call in (
        lambda: detect.fit("chance", parameters, 0, tmp_path / "data", tmp_path / "again", "auto"),
        lambda: predict.predict(tmp_path / "model", tmp_path / "data", tmp_path / "run", "auto"),
    ):
        with pytest.raises(AnomedError, match=rf"{file}: found sha256 .* other weights 'net' are another system"):
            call()


def test_cuda_that_is_demanded_and_absent_is_an_error(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is present")
    tiny_domain.domain(tmp_path / "data", COUNTS)
    parameters = {"method": {"implementation": "patchcore"}, "files": {}}
    with pytest.raises(AnomedError, match=r"run\.device is cuda, but torch sees no CUDA device"):
        detect.fit("patchcore", parameters, 0, tmp_path / "data", tmp_path / "model", "cuda")


def test_an_interrupted_fit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: detect.Detector) -> dict[str, Any]:
        raise KeyboardInterrupt

    tiny_domain.domain(tmp_path / "data", COUNTS)
    monkeypatch.setattr(plugins.load("methods", "controls.random"), "state", interrupted)
    with pytest.raises(KeyboardInterrupt):
        detect.fit("chance", RANDOM, 0, tmp_path / "data", tmp_path / "model", "auto")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def seen(prepared: Path, seed: int, limit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Rows of images.npy that a fit with a train_limit is given."""
    given: list[Any] = []
    monkeypatch.setattr(plugins.load("methods", "controls.random"), "fit", lambda self, images: given.append(images))
    parameters = {**RANDOM, "train_limit": limit}
    detect.fit("chance", parameters, seed, prepared, tmp_path / f"model-{seed}-{limit}", "auto")
    every = tiny_domain.Prepared(prepared).images
    return [next(row for row in range(len(every)) if (every[row] == image).all()) for image in given[0]]


def test_train_limit_takes_the_first_subjects_of_an_order_that_the_seed_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_domain.domain(tmp_path / "data", {("train", 0): 9, ("test", 0): 1, ("test", 1): 1})
    rows = {(seed, k): seen(tmp_path / "data", seed, k, monkeypatch, tmp_path) for seed in (0, 1) for k in (1, 4, 9)}
    for (seed, k), found in rows.items():
        assert len(found) == k
        assert found == sorted(found), "manifest order"
        assert set(found) <= set(rows[seed, 9]) == set(range(9))
        assert set(rows[seed, 1]) <= set(rows[seed, 4])
    assert rows[0, 4] != rows[1, 4]
    card = json.loads((tmp_path / "model-0-4/run.json").read_text())
    assert (card["train_images"], card["parameters"]["train_limit"]) == (4, 4)
    with pytest.raises(AnomedError, match=r"domains\.tiny\.train_limit: found 10, but there are 9 train subjects"):
        seen(tmp_path / "data", 0, 10, monkeypatch, tmp_path)


def test_the_images_of_a_subject_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = tiny_domain.domain(tmp_path / "data", {("train", 0): 9, ("test", 0): 1, ("test", 1): 1})
    table = prepared.table
    table.loc[table.split == "train", "subject_id"] = list("aaabbbbcc")
    monkeypatch.setattr(prepared, "table", table)
    sizes = {tuple(detect._train_rows(prepared, "x", {**RANDOM, "train_limit": 1}, seed)) for seed in range(20)}
    assert sizes == {(0, 1, 2), (3, 4, 5, 6), (7, 8)}


def test_a_model_of_another_domain_predicts_where_that_domain_is_named(tmp_path: Path) -> None:
    fitted = tiny_domain.domain(tmp_path / "brain", COUNTS)
    nova = tiny_domain.domain(tmp_path / "nova", {("test", 1): 4}, masks=False)
    detect.fit("chance", RANDOM, 0, tmp_path / "brain", tmp_path / "model", "auto")
    with pytest.raises(AnomedError, match=r"fitted on other data .* with --train"):
        predict.predict(tmp_path / "model", tmp_path / "nova", tmp_path / "run", "auto")
    predict.predict(tmp_path / "model", tmp_path / "nova", tmp_path / "run", "auto", tmp_path / "brain")
    assert Predictions(tmp_path / "run").card["data_hash"] == nova.hash != fitted.hash


def test_images_of_another_shape_than_the_models_are_refused(tmp_path: Path) -> None:
    tiny_domain.domain(tmp_path / "brain", COUNTS)
    detect.fit("chance", RANDOM, 0, tmp_path / "brain", tmp_path / "model", "auto")
    (tmp_path / "colour").mkdir()
    writer = tiny_domain.Writer(tmp_path / "colour", 16, True, False, 1)
    pixels = tiny_domain.Pixels(np.zeros((16, 16, 3), np.uint8), None, "0" * 64)
    writer.add(tiny_domain.Case("a", "a", "test", 1, "a.png", lambda: pixels), pixels)
    facts = {"domain": "colour", "title": "", "source": "", "official": False, "note": "", "problems": {}}
    writer.close({**facts, "parameters": {}})
    with pytest.raises(AnomedError, match=r"images of shape \[16, 16, 3\], expected \[16, 16\]"):
        predict.predict(tmp_path / "model", tmp_path / "colour", tmp_path / "run", "auto", tmp_path / "brain")
