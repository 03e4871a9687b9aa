"""The fit and predict commands, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_domain

from anomed import detect, plugins, predict
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
