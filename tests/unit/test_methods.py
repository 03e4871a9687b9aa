"""What the light methods promise beyond the contract: controls and the intensity baseline."""

import subprocess
import sys

import numpy as np
import pytest
from pydantic import ValidationError

from anomed.methods.controls import Constant, Random
from anomed.methods.intensity import Intensity, grey


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (200, 16, 16), dtype=np.uint8)


def test_random_is_uniform_and_ignores_what_surrounds_an_image(images: np.ndarray) -> None:
    batches = list(Random(Random.Params(), seed=3).score(images))
    scores = np.concatenate([scores for scores, _ in batches])
    maps = np.concatenate([maps for _, maps in batches])
    assert maps.shape == (200, 56, 56)
    assert len(np.unique(scores)) == 200
    assert abs(scores.mean() - 0.5) < 0.06  # three standard errors of 200 uniform draws
    assert abs(maps.mean() - 0.5) < 0.002
    [(alone, alone_map)] = Random(Random.Params(), seed=3).score(images[150:151])
    assert alone[0] == scores[150]
    assert np.array_equal(alone_map[0], maps[150])


def test_random_seeds_do_not_correlate(images: np.ndarray) -> None:
    one, two = (
        np.concatenate([scores for scores, _ in Random(Random.Params(), seed).score(images)]) for seed in (0, 1)
    )
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.25


def test_constant_is_zero(images: np.ndarray) -> None:
    batches = list(Constant(Constant.Params(), seed=0).score(images))
    assert sum(len(scores) for scores, _ in batches) == 200
    assert not any(scores.any() or maps.any() for scores, maps in batches)


def test_intensity_score_is_the_quantile_and_map_the_image() -> None:
    image = np.arange(100, dtype=np.uint8).reshape(1, 10, 10)
    [(scores, maps)] = Intensity(Intensity.Params(), seed=0).score(image)
    assert scores[0] == pytest.approx(98.01)  # 0.99 of the way along 0 … 99
    assert np.array_equal(maps[0], image[0])
    [(median, _)] = Intensity(Intensity.Params(quantile=0.5), seed=0).score(image)
    assert median[0] == 49.5


def test_luminance_of_colour() -> None:
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [10, 20, 30]], np.uint8).reshape(1, 2, 2, 3)
    expected = [0.299 * 255, 0.587 * 255, 0.114 * 255, 18.15]
    assert grey(colours).ravel() == pytest.approx(expected, rel=1e-6)
    levels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    assert np.array_equal(grey(np.stack([levels] * 3, axis=-1)), grey(levels))


def test_quantile_must_be_a_fraction() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        Intensity.Params(quantile=99.0)


def test_planning_and_controls_import_no_network_library() -> None:
    """Discovering every method, hashing weights and running the random control must stay light."""
    code = """
import sys
import numpy as np
from anomed import plugins
for method in plugins.discover("methods").values():
    method.files(method.Params())
random = plugins.load("methods", "controls.random")
detector = random(random.Params(), 0)
images = np.zeros((2, 8, 8), np.uint8)
detector.fit(images)
detector.restore(detector.state())
list(detector.score(images))
print(sorted({"torch", "torchvision", "timm", "monai", "anomalib", "scipy"} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
