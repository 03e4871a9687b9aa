"""The scripts in benchmarks/: intervals cover only when subjects are drawn, and the peers compute what we say."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
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


def script(name: str) -> ModuleType:
    """A script as a module, so that its parts can be called."""
    spec = importlib.util.spec_from_file_location(f"benchmarked_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def performance() -> ModuleType:
    return script("metrics")


@pytest.fixture(scope="module")
def preprocess() -> ModuleType:
    return script("preprocess")


def test_intervals_cover_when_subjects_are_drawn_and_not_when_images_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On half the sets of its quick run, and in this process."""
    coverage = script("coverage")
    monkeypatch.setattr(coverage, "QUICK", [one._replace(sets=100) for one in coverage.QUICK])
    monkeypatch.setattr(coverage, "ProcessPoolExecutor", partial(ThreadPoolExecutor, 1))
    monkeypatch.setattr(sys, "argv", ["coverage.py", "--quick", "--json"])
    coverage.main()
    one, other = json.loads(capsys.readouterr().out)["rows"]
    assert (one["metric"], one["sets"], one["subject"]["none"]) == ("image_auroc", 100, 0)
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


def test_both_training_loops_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On few small images; `epochs` leaves the first, in which caches fill, out."""
    training = script("training")
    for key, value in {"SIZE": 56, "INPUT": 32, "IMAGES": 40, "EPOCHS": 8, "BATCH": 8}.items():
        monkeypatch.setattr(training, key, value)
    ours, plain = training.ours(), training.plain()
    assert ours["loss"] == pytest.approx(plain["loss"], rel=0.1)
    assert ours["epoch"] > 0
    assert plain["epoch"] > 0
    assert training.epochs([0, 50, 51, 53, 54, 57]) == 1.5
    assert training.flat(16)["extra"] >= 0


def test_memory_counts_what_a_call_frees_again() -> None:
    """In a process of its own, as the scripts measure: in this one whatever else lives here moves as well."""
    code = """
import numpy as np
from measured import once
run = once(lambda: int(np.ones(50_000_000, np.uint8).sum()) + int(np.ones(20_000_000, np.uint8).sum()))
print(run.value, run.extra)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, check=True)
    value, extra = done.stdout.split()
    assert int(value) == 70_000_000
    assert 49 < float(extra) < 60  # the kernel counts pages in lots


def test_the_global_pass_takes_little_memory() -> None:
    found = answer("metrics.py", "--part", "alone-300")
    assert 0 < found["extra_memory_mb"] < 50  # the maps alone are 39 MB, as float32 79 MB
    assert [row["on"] for row in found["rows"]] == ["300 maps"]


def jobs(preprocess: ModuleType, *, mm: float = 0.1, voxels: float = 0, content: str = "{head}") -> Callable[..., Any]:
    """A stand-in for `run`: what each part of the script would have answered, and the files that its shards leave."""

    def run(part: str, **options: Any) -> Any:
        answer: dict[str, Any] = {"heads": {"folder": options.get("root")}, "apart": {"mm": mm, "voxels": voxels}}
        answer["monai"] = {"processor": 3.0, "mb": 400.0}
        answer["shard"] = {"start": 1.0, "strip": 10.0, "register": 20.0}
        if part == "shard":
            for head in range(4)[options["index"] :: options["number"]]:
                folder = Path(options["out"], f"sub-{head:02d}")
                folder.mkdir()
                (folder / "image.nii.gz").write_text(content.format(**options, head=head))
        processor = {"shard": 40.0 / options.get("number", 1), "loop": 50.0}.get(part, 0)
        return preprocess.Job(answer.get(part, {}), 60.0, processor, 1500.0 + options.get("index", 0))

    return run


def test_rates_of_preprocessing_follow_from_processor_time(
    preprocess: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess, "run", jobs(preprocess))
    found = preprocess.measure(8, tmp_path)
    assert found["heads_per_minute_and_core"] == 60 * 8 / 40
    assert found["loop_to_ours"] == 50 / 40
    assert found["shares"] == {
        "start": 10 / 40,
        "strip": 10 / 40,
        "register": 20 / 40,
    }  # what no step takes is the start
    assert found["peak_memory_mb"] == {2: 1503, 8: 1500, 16: 1500}  # of four shards, the largest
    assert found["monai"]["share"] == 3 / 40
    assert "| anomed, one shard | 8 heads | 60.00 | 40.00 | 12.0 heads per minute and core |" in preprocess.table(found)


@pytest.mark.parametrize(
    ("fault", "told"),
    [({"mm": 1.5}, "loop differs"), ({"voxels": 1e-6}, "loop differs"), ({"content": "{number}"}, "other bytes")],
)
def test_preprocessing_is_not_timed_when_results_differ(
    preprocess: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any], told: str
) -> None:
    monkeypatch.setattr(preprocess, "run", jobs(preprocess, **fault))
    with pytest.raises(SystemExit, match=told):
        preprocess.measure(8, tmp_path)


def test_a_step_inside_another_counts_once(preprocess: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr(preprocess, "time", SimpleNamespace(process_time=lambda: now[0]))

    class Steps:
        @classmethod
        def inner(cls, seconds: int) -> int:
            now[0] += seconds
            return seconds

        def outer(self) -> int:
            now[0] += 1
            return self.inner(3) + self.inner(4)

    clock = preprocess.Clock()
    clock.watch(Steps, "inner", "inner")
    clock.watch(Steps, "outer", "outer")
    with clock.time("rest"):
        now[0] += 10
        assert Steps().outer() == 7
    assert clock.seconds == {"inner": 7, "outer": 1, "rest": 10}


@pytest.mark.full
def test_preprocessing_gives_the_results_of_a_plain_loop_and_of_more_shards() -> None:
    found = answer("preprocess.py", "--heads", "2", "--json")
    assert found["same_bytes"]
    assert set(found["shares"]) == {
        "start", "load", "strip", "bias field", "register", "write", "picture", "checks and hashes",
    }  # fmt: skip
    assert all(share > 0 for share in found["shares"].values())
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert min(found["heads_per_minute_and_core"], found["heads_per_minute_in_shards"], found["loop_to_ours"]) > 0
    assert set(found["peak_memory_mb"]) == {"1", "2", "4"}
    assert max(found["peak_memory_mb"].values()) < 3000  # MB that the rule asks for
    assert 0 < found["monai"]["share"] < 1
