"""Answers of vision-language systems (contract 3): boxes, captions and diagnoses of images, one JSON object a line."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anomed import records
from anomed.errors import AnomedError
from anomed.manifest import Prepared

FILE = "answers.jsonl"
TASKS = {"localisation": "boxes", "captioning": "caption", "diagnosis": "diagnoses"}  # task -> key of its answer


def read(path: Path, prepared: Prepared) -> list[dict[str, Any]]:
    """The answers of a file, in the order of the manifest and of TASKS.

    Each line is an object with image_id, task, and the answer under the task's key: `boxes`, a list of [x0, y0, x1, y1]
    in pixels of the native image, empty where nothing was found; `caption`, text; `diagnoses`, a list of texts, the
    most likely first. Every task that occurs needs one answer for every valid and test image. Raises AnomedError naming
    the line, or the first image without an answer.
    """
    table = prepared.evaluated()
    sizes = {row.image_id: (row.native_h, row.native_w) for row in table.itertuples()}
    known = set(prepared.table.image_id)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise AnomedError(f"{path}: not found; expected one JSON object a line") from None
    except UnicodeDecodeError as error:
        raise AnomedError(f"{path}: not text in UTF-8 ({error})") from None
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        where = f"{path}, line {number}"
        answer = _object(text, where)
        name, task = answer["image_id"], answer["task"]
        if name not in sizes:
            hint = "a train image" if name in known else "no image of the domain"
            raise AnomedError(f"{where}: {name!r} is {hint}; expected valid and test images of the manifest")
        if (name, task) in found:
            raise AnomedError(f"{where}: a second answer to {task} of {name!r}; expected one for each image")
        if task == "localisation":
            _check_boxes(answer["boxes"], sizes[name], f"{where} ({name})")
        found[name, task] = answer
    tasks = [task for task in TASKS if any(task == other for _, other in found)]
    if not tasks:
        raise AnomedError(f"{path}: found no answer, expected one JSON object a line")
    for task in tasks:
        if missing := [name for name in table.image_id if (name, task) not in found]:
            raise AnomedError(
                f"{path}: {len(missing)} of {len(table)} images have no answer to {task}, the first is {missing[0]!r}; "
                "expected one for each, `boxes: []` where nothing was found"
            )
    return [found[name, task] for name in table.image_id for task in tasks]


def _object(text: str, where: str) -> dict[str, Any]:
    """A line as an object with the keys of its task and no others. Raises AnomedError."""
    try:
        answer = json.loads(text, object_pairs_hook=_once)
    except ValueError as error:
        raise AnomedError(f"{where}: not a JSON object ({error})") from None
    task = answer.get("task") if isinstance(answer, dict) else None
    if not isinstance(task, str) or task not in TASKS:
        raise AnomedError(f"{where}: found the task {task!r}, expected one of {', '.join(TASKS)}")
    expected = ["image_id", "task", TASKS[task]]
    if sorted(answer) != sorted(expected):
        raise AnomedError(f"{where}: found the keys {', '.join(answer)}, expected {', '.join(expected)}")
    value = answer[TASKS[task]]
    if task == "captioning" and not isinstance(value, str):
        raise AnomedError(f"{where}: found {value!r} as caption, expected text")
    if task == "diagnosis" and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        raise AnomedError(f"{where}: found {value!r} as diagnoses, expected a list of texts, the most likely first")
    return answer


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"a key stands twice: {', '.join(keys)}")
    return dict(pairs)


def _check_boxes(boxes: Any, size: tuple[int, int], where: str) -> None:
    """Boxes are never clipped, swapped or scaled: a wrong convention must be seen."""
    for box in boxes if isinstance(boxes, list) else [boxes]:
        numbers = box if isinstance(box, list) else []
        if len(numbers) != 4 or not all(type(value) in (int, float) and math.isfinite(value) for value in numbers):
            raise AnomedError(f"{where}: found the box {box!r}, expected [x0, y0, x1, y1] in pixels")
        (x0, y0, x1, y1), (height, width) = numbers, size
        if not (0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height):
            raise AnomedError(
                f"{where}: found the box {box}, expected 0 <= x0 < x1 <= {width} and 0 <= y0 < y1 <= {height}: pixels "
                "of the native image, left and top first"
            )


def write(path: Path, answers: Iterable[dict[str, Any]]) -> None:
    """One canonical JSON object a line."""
    path.write_text("".join(records.canonical(one) + "\n" for one in answers), encoding="utf-8", newline="\n")
