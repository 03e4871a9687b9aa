"""The contract of detectors, checked for every method that discovery finds: a new one needs no new test."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anomalib_rows import SMALL
from learnable import BRIEF
from pydantic import ValidationError
from safetensors.numpy import load, save

from anomed import plugins, training
from anomed.detect import Detector, Labelled
from anomed.errors import AnomedError
from anomed.progress import Progress
from anomed.weights import FETCHED

METHODS: dict[str, Any] = plugins.discover("methods")  # classes of Detector
SIZE = 64
# Every model of anomalib is a method; these stand for them in `make test`, the others are long.
ADAPTED = {"anomalib.Stfpm", "anomalib.Ganomaly", "anomalib.Fastflow"}
LONG = [name for name in METHODS if name.startswith("anomalib.") and name not in ADAPTED]
each_method = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in METHODS]
)
TRAINED = [
    name for name in METHODS if not name.startswith("anomalib.") and issubclass(METHODS[name].Params, training.Params)
]
each_kind = pytest.mark.parametrize("channels", [1, 3])


def pictures(count: int, channels: int, seed: int) -> np.ndarray:
    """Discs of different size and brightness with noise: uint8 (count, 64, 64) or (count, 64, 64, 3)."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:SIZE, :SIZE] - SIZE / 2
    radii = rng.uniform(12, 28, count)[:, None, None]
    bright = rng.uniform(80, 200, count)[:, None, None]
    grey = (np.hypot(x, y) < radii) * bright + rng.uniform(0, 40, (count, SIZE, SIZE))
    if channels == 1:
        return grey.astype(np.uint8)
    return (grey[..., None] * np.array([1.0, 0.7, 0.9])).astype(np.uint8)


TRAIN, TEST = 10, 7


@dataclass(frozen=True)
class Fitted:
    """A detector after fit, its state as bytes, and what it says about the test images."""

    detector: Detector
    state: bytes
    scores: np.ndarray
    maps: np.ndarray | None


def created(name: str, seed: int = 0) -> Detector:
    """The method with its default parameters; those that learn a network start from random weights and learn briefly."""
    short: dict[str, Any] = BRIEF.get(name, {})
    if name.startswith("anomalib."):
        short = {"weights": "random", "epochs": 1, "batch_size": 4, **SMALL.get(name.removeprefix("anomalib."), {})}
    detector: Detector = METHODS[name](METHODS[name].Params(**short), seed)
    return detector


def told(images: np.ndarray) -> dict[str, np.ndarray]:
    """Facts of images, such that one has the same alone as in a batch."""
    means = images.reshape(len(images), -1).mean(axis=1)
    return {"slice": np.round(means), "view": np.where(means > np.float64(60), "AP", "PA")}


def trained(name: str, images: np.ndarray, seed: int = 0, progress: Progress | None = None) -> Detector:
    """The method fitted on `images`, with all that it may ask for."""
    detector = created(name, seed)
    detector.progress = progress
    detector.facts = told(images)
    kind = 1 if images.ndim == 3 else 3
    labels = np.arange(8) % 2
    masks = [np.pad(np.ones((20, 20), bool), 22) if label else None for label in labels]
    detector.labelled = Labelled(pictures(8, kind, seed=9), labels, masks.__getitem__)
    detector.fit(images)
    return detector


def stored(detector: Detector) -> bytes:
    """The state as `fit` stores it."""
    return save({key: np.ascontiguousarray(array) for key, array in detector.state().items()})


def run(detector: Detector, images: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """All scores and maps of `images`, with the form of every batch checked."""
    detector.facts = told(images)
    batches = list(detector.score(images))
    for scores, maps in batches:
        assert scores.ndim == 1
        assert np.issubdtype(scores.dtype, np.floating)
        if maps is not None:
            assert maps.dtype == np.float32
            assert maps.ndim == 3
            assert len(maps) == len(scores)
    scores = np.concatenate([scores for scores, _ in batches])
    assert len(scores) == len(images)
    parts = [maps for _, maps in batches if maps is not None]
    assert len(parts) in (0, len(batches)), "maps for some batches only"
    return scores, np.concatenate(parts) if parts else None


@functools.cache
def fitted(name: str, channels: int, seed: int = 0) -> Fitted:
    """The method with its default parameters, fitted once for all tests."""
    detector = trained(name, pictures(TRAIN, channels, seed=1), seed)
    return Fitted(detector, stored(detector), *run(detector, pictures(TEST, channels, seed=2)))


def same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one.tobytes() == other.tobytes() if one is not None and other is not None else one is other


@each_method
def test_class_is_documented_and_declared(name: str) -> None:
    cls = METHODS[name]
    assert issubclass(cls, Detector)
    assert cls.__bases__ == (Detector,), "no class deeper than one level"
    assert len(cls.__dict__.get("__doc__") or "") > 40
    assert type(cls.deterministic) is type(cls.localises) is type(cls.gpu) is bool
    assert cls.memory_mb >= (3000 if cls.gpu else 100)


@each_method
def test_parameters_have_defaults_and_refuse_unknown_keys(name: str) -> None:
    with pytest.raises(ValidationError, match="no_such_key"):
        METHODS[name].Params(no_such_key=1)


@each_method
def test_files_that_decide_the_result_are_named(name: str) -> None:
    for label, path in METHODS[name].files(METHODS[name].Params()).items():
        assert label
        assert Path(path).is_file() or Path(path).is_relative_to(FETCHED), "a package's file, or one to be fetched"


@each_method
@each_kind
def test_scores_and_maps(name: str, channels: int) -> None:
    result = fitted(name, channels)
    assert np.isfinite(result.scores).all()
    assert (result.maps is not None) == METHODS[name].localises
    if result.maps is not None:
        assert np.isfinite(result.maps).all()


@each_method
@each_kind
def test_restored_detector_gives_the_same_bytes(name: str, channels: int) -> None:
    result = fitted(name, channels)
    again = created(name)
    again.restore(load(result.state))
    scores, maps = run(again, pictures(TEST, channels, seed=2))
    assert same(scores, result.scores)
    assert same(maps, result.maps)
    assert stored(again) == result.state


@each_method
def test_seed_decides(name: str) -> None:
    result = fitted(name, 1)
    repeat = fitted.__wrapped__(name, 1)
    assert repeat.state == result.state
    assert same(repeat.scores, result.scores)
    assert same(repeat.maps, result.maps)
    other = fitted(name, 1, seed=1)
    equal = same(other.scores, result.scores) and same(other.maps, result.maps) and other.state == result.state
    assert equal == METHODS[name].deterministic


@each_method
@each_kind
def test_image_scores_alone_as_in_a_batch(name: str, channels: int) -> None:
    result = fitted(name, channels)
    images = pictures(TEST, channels, seed=2)
    alone = [run(result.detector, images[i : i + 1]) for i in range(TEST)]
    scores = np.concatenate([scores for scores, _ in alone])
    np.testing.assert_allclose(scores, result.scores, rtol=1e-5)
    assert np.array_equal(np.argsort(scores, kind="stable"), np.argsort(result.scores, kind="stable"))
    if result.maps is not None:
        maps = np.concatenate([maps for _, maps in alone if maps is not None])
        np.testing.assert_allclose(maps, result.maps, rtol=1e-5, atol=1e-5 * np.abs(result.maps).max())


@each_method
def test_order_does_not_matter(name: str) -> None:
    result = fitted(name, 1)
    scores, maps = run(result.detector, pictures(TEST, 1, seed=2)[::-1])
    np.testing.assert_allclose(scores[::-1], result.scores, rtol=1e-5)
    if result.maps is not None:
        assert maps is not None
        np.testing.assert_allclose(maps[::-1], result.maps, rtol=1e-5, atol=1e-5 * np.abs(result.maps).max())


@each_method
@pytest.mark.parametrize("level", [0, 128, 255])
def test_constant_images_give_finite_scores(name: str, level: int) -> None:
    scores, maps = run(fitted(name, 1).detector, np.full((2, SIZE, SIZE), level, np.uint8))
    assert np.isfinite(scores).all()
    assert maps is None or np.isfinite(maps).all()


@each_method
def test_fits_on_constant_images(name: str) -> None:
    if name in ("anomalib.Dfkde", "anomalib.EfficientAd"):  # these divide by the variation of train images
        with pytest.raises(AnomedError):
            trained(name, np.zeros((3, SIZE, SIZE), np.uint8))
        return
    detector = trained(name, np.zeros((3, SIZE, SIZE), np.uint8))
    scores, maps = run(detector, pictures(2, 1, seed=3))
    assert np.isfinite(scores).all()
    assert maps is None or np.isfinite(maps).all()


@each_method
def test_images_are_left_as_they_are_and_nothing_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("HOME", "XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    images = pictures(4, 1, seed=4)
    before = images.copy()
    images.flags.writeable = False  # as a memory-mapped file opened for reading
    run(trained(name, images), images)
    assert np.array_equal(images, before)
    assert list(tmp_path.iterdir()) == []


class Killed(BaseException):
    """Stands for a kill."""


class Watched(Progress):
    """Saves after every batch; is killed after so many."""

    left = -1

    def save(self, state: Any) -> None:
        super().save(state)
        self.left -= 1
        if self.left == 0:
            raise Killed


@pytest.mark.parametrize("name", TRAINED)
def test_a_killed_training_goes_on_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    """Killed after its first batch, and then before its last."""
    images, whole = pictures(TRAIN, 1, seed=1), Watched(tmp_path / "whole.pt", "key", every=0)
    state = stored(trained(name, images, progress=whole))
    assert state == fitted(name, 1).state, "saving changes nothing"
    steps = -whole.left - 1
    path = tmp_path / "killed.pt"
    for left in dict.fromkeys([1, steps - 2]):
        if left > 0:
            progress = Watched(path, "key", every=0)
            progress.left = left
            with pytest.raises(Killed):
                trained(name, images, progress=progress)
    last = Watched(path, "key", every=0)
    assert stored(trained(name, images, progress=last)) == state
    assert last.rows == whole.rows
    assert last.facts["resumed"] >= 1
