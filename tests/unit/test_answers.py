"""Answers of vision-language systems: what is kept, and what is refused with its line."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_domain

from anomed import answers, predictions, records, scoring
from anomed.errors import AnomedError
from anomed.manifest import Prepared
from anomed.predictions import Predictions

COUNTS = {("valid", 1): 1, ("test", 1): 3}  # native sizes (height, width) as tiny_domain.NATIVE


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    return tiny_domain.domain(tmp_path / "data", COUNTS, masks=False)


def lines(prepared: Prepared) -> list[dict[str, Any]]:
    """Captions of all images, then boxes, the last image first."""
    names = prepared.evaluated().image_id.tolist()[::-1]
    found: list[dict[str, Any]] = [{"image_id": n, "task": "captioning", "caption": f"Bild {n}: Ödem"} for n in names]
    return found + [{"image_id": n, "task": "localisation", "boxes": [[1, 2.5, 9, 16]]} for n in names]


def given(path: Path, content: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in content) + "\n", encoding="utf-8")
    return path


def test_answers_are_sorted_and_written_as_canonical_lines(prepared: Prepared, tmp_path: Path) -> None:
    content = lines(prepared)
    found = answers.read(given(tmp_path / "a.jsonl", content), prepared)
    names = prepared.evaluated().image_id.tolist()
    assert [(one["image_id"], one["task"]) for one in found] == [
        (name, task) for name in names for task in ("localisation", "captioning")
    ]
    assert sorted(found, key=str) == sorted(content, key=str)
    answers.write(tmp_path / "b.jsonl", found)
    assert answers.read(tmp_path / "b.jsonl", prepared) == found
    answers.write(tmp_path / "c.jsonl", answers.read(given(tmp_path / "d.jsonl", content[::-1]), prepared))
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "c.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_id": "test/1/9"}, r"line 5: 'test/1/9' is no image of the domain"),
        ({"image_id": "test/1/1"}, r"line 6: a second answer to localisation of 'test/1/1'"),
        ({"task": "detection"}, r"line 5: found the task 'detection', expected one of localisation, captioning"),
        ({"task": None}, r"line 5: found the task None"),
        ({"task": "diagnosis"}, r"line 5: found the keys image_id, task, boxes, expected image_id, task, diagnoses"),
        ({"confidence": 1}, r"line 5: found the keys image_id, task, boxes, confidence"),
        ({"boxes": [[1, 2, 3]]}, r"line 5 \(test/1/2\): found the box \[1, 2, 3\], expected \[x0, y0, x1, y1\]"),
        ({"boxes": "none"}, r"line 5 \(test/1/2\): found the box 'none'"),
        ({"boxes": [[1, 2, True, 4]]}, r"found the box \[1, 2, True, 4\], expected"),
        ({"boxes": [[9, 2, 1, 16]]}, r"found the box \[9, 2, 1, 16\], expected 0 <= x0 < x1 <= 16 and 0 <= y0 < y1 <= 16"),
        ({"boxes": [[1, 2, 17, 4]]}, r"found the box \[1, 2, 17, 4\]"),
        ({"boxes": [[1, 2, 4, float("nan")]]}, r"found the box \[1, 2, 4, nan\]"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(prepared: Prepared, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    content = lines(prepared)
    content[4] |= change
    with pytest.raises(AnomedError, match=message):
        answers.read(given(tmp_path / "a.jsonl", content), prepared)


def test_a_task_needs_every_image(prepared: Prepared, tmp_path: Path) -> None:
    message = r"1 of 4 images have no answer to localisation, the first is 'valid/1/0'"
    with pytest.raises(AnomedError, match=message):
        answers.read(given(tmp_path / "a.jsonl", lines(prepared)[:-1]), prepared)
    assert len(answers.read(given(tmp_path / "a.jsonl", lines(prepared)[:4]), prepared)) == 4


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "found no answer"),
        (b"[]\n", "line 1: found the task None"),
        (b'{"image_id": "a"', "line 1: not a JSON object"),
        (b'{"image_id": "a", "image_id": "b", "task": "captioning", "caption": ""}', "a key stands twice"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b'{"image_id": "test/1/0", "task": "captioning", "caption": null}', "found None as caption, expected text"),
        (b'{"image_id": "test/1/0", "task": "diagnosis", "diagnoses": "glioma"}', "found 'glioma' as diagnoses"),
    ],
)
def test_a_wrong_file_is_refused(prepared: Prepared, tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(AnomedError, match=message):
        answers.read(tmp_path / "a.jsonl", prepared)
    with pytest.raises(AnomedError, match=r"nowhere\.jsonl: not found"):
        answers.read(tmp_path / "nowhere.jsonl", prepared)


def test_a_run_without_scores_scores_nothing_and_says_so(prepared: Prepared, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    maps = predictions.write_scoreless(run, prepared)
    facts = {"domain": "tiny", "system": "test", "seed": 0, "data_hash": prepared.hash, "maps": maps}
    records.write_json(run / records.RUN_CARD, {**facts, "parameters": tiny_domain.PARAMETERS})
    tiny_domain.seal(run)
    assert Predictions(run).scores.score.isna().all()
    scoring.score(run, tmp_path / "data", {**tiny_domain.PARAMETERS, "metrics": {}}, tmp_path / "s.json")
    found = records.read_json(tmp_path / "s.json")["records"]
    assert {(record["level"], record["reason"]) for record in found} == {
        ("image", "the system gives no image scores"), ("pixel", "the domain has no pixel truth"),
    }  # fmt: skip
    assert {record["value"] for record in found} == {None}
    text = (run / "scores.csv").read_text().replace("test/1/0,,", "test/1/0,nan,")
    (run / "scores.csv").write_text(text)
    tiny_domain.seal(run)
    with pytest.raises(AnomedError, match=r"unreadable|is not a finite number"):
        Predictions(run)
