"""The scripts in benchmarks/: intervals cover only when subjects are drawn, and the peers compute what we say."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from anomed.metrics import variants

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def answer(script: str, *arguments: str) -> dict[str, Any]:
    """The one JSON object that a script prints."""
    command = [sys.executable, str(FOLDER / script), *arguments]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


@pytest.fixture(scope="module")
def performance() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarked_metrics", FOLDER / "metrics.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        spec.loader.exec_module(module)
    return module


def test_intervals_cover_when_subjects_are_drawn_and_not_when_images_are() -> None:
    one, other = answer("coverage.py", "--quick", "--json")["rows"]
    assert (one["metric"], one["sets"], one["subject"]["none"]) == ("image_auroc", 200, 0)
    for row in (one, other):
        assert 0.91 <= row["subject"]["coverage"] <= 0.99
        assert row["image"]["coverage"] < 0.88
        assert row["image"]["width"] < 0.75 * row["subject"]["width"]


@pytest.mark.parametrize(("steepness", "least", "most"), [(1, 0.75, 0.78), (12, 0.0, 0.3)])
def test_the_threshold_loop_is_the_definition_that_others_publish(
    performance: ModuleType, steepness: int, least: float, most: float
) -> None:
    codes, masks = performance.Scenes(6, 3, 48, 48, 48).loaded()
    maps = np.exp(steepness * codes / 65535)  # steep: hardly any pixel lies between most of the steps
    looped = performance.threshold_loop(maps, masks)
    assert looped == pytest.approx(variants.pro_200(maps, masks), abs=1e-9)
    assert least < looped < most
    assert performance.ours(codes, masks)["AUPRO"] == pytest.approx(0.7665, abs=1e-3)


def test_memory_counts_what_a_call_frees_again(performance: ModuleType) -> None:
    def work() -> int:
        return int(np.ones(50_000_000, np.uint8).sum()) + int(np.ones(20_000_000, np.uint8).sum())

    run = performance.once(work)
    assert run.value == 70_000_000
    assert 49 < run.extra < 60  # the kernel counts pages in lots


def test_the_global_pass_takes_little_memory() -> None:
    found = answer("metrics.py", "--part", "alone-300")
    assert 0 < found["extra_memory_mb"] < 50  # the maps alone are 39 MB, as float32 79 MB
    assert [row["on"] for row in found["rows"]] == ["300 maps"]
