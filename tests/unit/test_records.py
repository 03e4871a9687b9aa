"""Hashes, atomic writes and run cards."""

import json
import warnings
from pathlib import Path

import pytest

from anomed import records
from anomed.errors import AnomedError


def test_digest_ignores_key_order_and_sees_values() -> None:
    assert records.digest({"a": 1, "b": 2.5}) == records.digest({"b": 2.5, "a": 1})
    assert records.digest({"a": 1}) != records.digest({"a": 1.5})
    assert records.digest(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    records.write_json(target, {"x": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        records.write_json(target, {"x": float("nan")})
    with pytest.raises(KeyboardInterrupt), records.atomic_file(target) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert records.read_json(target) == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_folder_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with records.atomic_dir(target, r"scores\.csv") as partial:
        (partial / "scores.csv").write_text("1")
    with pytest.raises(RuntimeError), records.atomic_dir(target, r"scores\.csv") as partial:
        (partial / "scores.csv").write_text("2")
        raise RuntimeError
    assert (target / "scores.csv").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["thesis.txt", "test/good"])
def test_a_folder_of_others_is_never_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "out" / name).parent.mkdir(parents=True)
    (tmp_path / "out" / name).write_text("mine")
    with (
        pytest.raises(AnomedError, match=r"out: holds 'test|out: holds 'thesis\.txt', which is not ours to replace"),
        records.atomic_dir(tmp_path / "out", r"scores\.csv"),
    ):
        pytest.fail("must not come here")
    assert (tmp_path / "out" / name).read_text() == "mine"


def test_what_a_killed_job_left_is_removed(tmp_path: Path) -> None:
    stale = tmp_path / ".model.12345.partial"
    stale.mkdir()
    (stale / "half").write_text("x")
    with records.atomic_dir(tmp_path / "model", "whole") as partial:
        (partial / "whole").write_text("y")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_damaged_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(AnomedError, match=r"run\.json: not found"):
        records.read_json(path)
    path.write_text('{"a": ')
    with pytest.raises(AnomedError, match=r"run\.json: not valid JSON .*delete it and run again"):
        records.read_json(path)


def test_run_card_keeps_warnings_once_and_the_code_that_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with records.RunCard(system="toy") as card:
        for _ in range(2):
            warnings.warn("a doubtful thing", stacklevel=1)
    card.write(tmp_path)
    stored = json.loads((tmp_path / "run.json").read_text())
    assert stored["system"] == "toy"
    assert stored["warnings"] == ["UserWarning: a doubtful thing"]
    assert "a doubtful thing" in capsys.readouterr().err
    assert "anomed/records.py" in stored["code"]["files"]
    assert stored["code"]["sha256"] == records.digest(stored["code"]["files"])
    assert stored["seconds"] >= 0
    assert stored["peak_memory_mb"] > 1
    assert "numpy" in stored["versions"]
