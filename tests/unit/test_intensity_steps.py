"""Grey levels from volumes: options, order of the steps, and what each transform does to organ, lesion and background."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from anomed.errors import AnomedError, CaseProblem
from anomed.preprocess import intensity, intensity_steps
from anomed.preprocess.intensity_steps import STEPS
from anomed.settings import check

SHAPE = (7, 11, 5)


def step(name: str, **options: Any) -> tuple[str, Any]:
    return name, check(STEPS[name], options, name)


def head(seed: int, scale: float = 1.0, shift: float = 0.0) -> dict[str, Any]:
    """An asymmetric organ of skewed values in air that is brighter than any of them: statistics must not see it."""
    rng = np.random.default_rng(seed)
    organ = np.zeros(SHAPE, bool)
    organ[1:6, 2:11, :4] = True
    organ[1, 2, 0] = False
    image = np.where(organ, scale * (rng.gamma(4 + seed, 20, SHAPE) + shift), 1e5)
    return {
        "subject": f"sub-{seed}",
        "image": torch.from_numpy(image[None].astype(np.float32)),
        "organ": torch.from_numpy(organ[None].astype(np.uint8)),
    }


def organ_of(volume: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Mask and float64 values of the organ."""
    mask = volume["organ"].numpy()[0] > 0
    return mask, volume["image"].numpy()[0][mask].astype(np.float64)


def run(steps: list[tuple[str, Any]], volume: dict[str, Any], fitted: dict[str, Any] | None = None) -> np.ndarray:
    image = intensity.compose(steps, fitted or {})(volume)["image"]
    assert image.dtype == torch.float32
    assert tuple(image.shape) == (1, *SHAPE)
    return image.numpy()[0]


def placed(mask: np.ndarray, levels: np.ndarray) -> np.ndarray:
    image = np.zeros(SHAPE)
    image[mask] = np.clip(levels, 0, 255)
    return image


# Options and order ------------------------------------------------------------------------------------------------


def test_options_come_from_yaml_lists() -> None:
    assert step("window", range=[-200, 250])[1].range == (-200, 250)
    assert step("nyul", landmarks=[0, 50, 100])[1].landmarks == (0, 50, 100)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("window", {}, "window.range: missing"),
        ("window", {"range": [250, -200]}, "window.range: .*each above the one before"),
        ("window", {"range": [0, 0]}, "window.range: .*each above the one before"),
        ("window", {"range": [0, float("inf")]}, "window.range.1: .*finite"),
        ("window", {"range": ["0", 1]}, "window.range.0: .*number"),
        ("z_score", {"window": [3, -3]}, "z_score.window: "),
        ("percentile", {"low": 99, "high": 1}, "percentile: .*low below high"),
        ("percentile", {"high": 101}, "percentile.high: .*less than or equal to 100"),
        ("percentile", {"low": -1}, "percentile.low: .*greater than or equal to 0"),
        ("nyul", {"landmarks": [1, 50, 50, 99]}, "nyul.landmarks: .*each above"),
        ("nyul", {"landmarks": [50]}, "nyul.landmarks: .*at least two"),
        ("nyul", {"landmarks": [1, 101]}, "nyul.landmarks.1: "),
        ("nyul", {"scale": [10, 300]}, "nyul.scale.1: "),
        ("slice_min_max", {"low": 1}, "slice_min_max.low: unknown key"),
    ],
)
def test_bad_options_are_refused_by_name(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AnomedError, match=message):
        step(name, **options)


@pytest.mark.parametrize(
    "names", [["window"], ["z_score"], ["slice_min_max"], ["window", "slice_min_max"], ["window", "nyul"]]
)
def test_sensible_orders_pass(names: list[str]) -> None:
    intensity_steps.check_order(names, "preprocess.brain.intensity")


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["window", "window"],
        ["z_score", "window"],
        ["z_score", "percentile"],
        ["slice_min_max", "nyul"],
        ["nyul", "slice_min_max"],
        ["window", "z_score", "slice_min_max"],
    ],
)
def test_senseless_orders_are_refused(names: list[str]) -> None:
    found = ", ".join(names) or "no step"
    with pytest.raises(
        AnomedError, match=f"^preprocess.brain.intensity: found {found}, expected window, one of z_score"
    ):
        intensity_steps.check_order(names, "preprocess.brain.intensity")


# Steps without memory ---------------------------------------------------------------------------------------------


def test_z_score_is_that_of_the_organ() -> None:
    volume = head(0)
    mask, values = organ_of(volume)
    z = (values - values.mean()) / values.std()
    assert z.max() > 2.5
    expected = placed(mask, (z + 2) / 4.5 * 255)
    np.testing.assert_allclose(run([step("z_score", window=[-2, 2.5])], volume), expected, atol=1e-3)


def test_percentiles_are_those_of_the_organ() -> None:
    volume = head(1)
    mask, values = organ_of(volume)
    low, high = np.percentile(values, [5, 90])
    expected = placed(mask, (values - low) / (high - low) * 255)
    np.testing.assert_allclose(run([step("percentile", low=5, high=90)], volume), expected, atol=1e-3)


def test_window_is_fixed_and_clips() -> None:
    volume = head(2)
    mask, values = organ_of(volume)
    assert values.min() < 60
    assert values.max() > 150
    expected = placed(mask, (values - 60) / 90 * 255)
    np.testing.assert_allclose(run([step("window", range=[60, 150])], volume), expected, atol=1e-3)


def test_z_score_after_a_window_is_that_of_the_clipped_values() -> None:
    volume = head(2)
    mask, values = organ_of(volume)
    clipped = values.clip(60, 150)
    expected = placed(mask, ((clipped - clipped.mean()) / clipped.std() + 3) / 6 * 255)
    steps = [step("window", range=[60, 150]), step("z_score")]
    np.testing.assert_allclose(run(steps, volume), expected, atol=1e-3)


def test_without_an_organ_every_voxel_counts() -> None:
    volume = head(3)
    whole = {**volume, "organ": torch.ones(1, *SHAPE, dtype=torch.uint8)}
    del volume["organ"]
    steps = [step("percentile", low=10, high=60)]
    np.testing.assert_array_equal(run(steps, volume), run(steps, whole))


def test_slice_min_max_leaves_volumes_as_they_are_but_for_the_background() -> None:
    volume = head(0, shift=-100)
    mask, values = organ_of(volume)
    image = run([step("slice_min_max")], volume)
    np.testing.assert_array_equal(image[mask], values)
    np.testing.assert_array_equal(image[~mask], 0)


def test_the_volume_given_stays_as_it_was_and_the_affine_is_kept() -> None:
    volume = head(0)
    affine = torch.diag(torch.tensor([0.9, 1.0, 5.5, 1.0], dtype=torch.float64))
    volume["image"] = MetaTensor(volume["image"], affine=affine)
    before = volume["image"].numpy().copy()
    for steps in ([step("z_score")], [step("nyul")]):
        done = intensity.compose(steps, intensity.fit(steps, [head(1)]))(volume)
        assert torch.equal(done["image"].affine, affine)
        assert done["subject"] == "sub-0"
    np.testing.assert_array_equal(volume["image"].numpy(), before)


# Nyul -------------------------------------------------------------------------------------------------------------

TRAIN = [(0, 1.0, 0.0), (1, 3.0, 10.0), (2, 0.5, 200.0)]


def trained(**options: Any) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    steps = [step("nyul", **options)]
    return steps, intensity.fit(steps, (head(*given) for given in TRAIN))


def test_standard_levels_are_the_mean_of_the_moved_landmarks() -> None:
    _, fitted = trained(landmarks=[2, 25, 60, 98], scale=[20, 180])
    moved = []
    for given in TRAIN:
        found = np.percentile(organ_of(head(*given))[1], [2, 25, 60, 98])
        moved.append(20 + 160 * (found - found[0]) / (found[-1] - found[0]))
    assert fitted["nyul"]["percentiles"] == [2, 25, 60, 98]
    np.testing.assert_allclose(fitted["nyul"]["levels"], np.mean(moved, axis=0), rtol=1e-12)


def test_nyul_maps_by_straight_lines_that_go_on_beyond_the_outer_landmarks() -> None:
    steps, fitted = trained(landmarks=[10, 50, 90], scale=[30, 230])
    volume = head(5, 2.0)
    mask, values = organ_of(volume)
    x, y = np.percentile(values, [10, 50, 90]), fitted["nyul"]["levels"]
    expected = np.interp(values, x, y)
    below, above = values < x[0], values > x[2]
    expected[below] = y[0] - (x[0] - values[below]) * (y[1] - y[0]) / (x[1] - x[0])
    expected[above] = y[2] + (values[above] - x[2]) * (y[2] - y[1]) / (x[2] - x[1])
    assert (expected > 255).any()
    np.testing.assert_allclose(run(steps, volume, fitted), placed(mask, expected), atol=1e-3)


@pytest.mark.parametrize(("scale", "shift"), [(7.0, 0.0), (0.01, 30.0), (1.0, -500.0)])
def test_gain_and_offset_of_the_scanner_leave_no_trace(scale: float, shift: float) -> None:
    steps, fitted = trained()
    np.testing.assert_allclose(run(steps, head(1, scale, shift), fitted), run(steps, head(1), fitted), atol=1e-3)


def test_nyul_keeps_the_order_and_a_lesion_stays_above_normal_tissue() -> None:
    steps, fitted = trained()
    volume = head(4)
    mask, values = organ_of(volume)
    normal = np.percentile(values, 99)
    volume["image"][0, 3, 7, 2] = lesion = float(values.max() + 5)
    image, order = run(steps, volume, fitted), np.argsort(volume["image"].numpy()[0][mask])
    assert (np.diff(image[mask][order]) >= 0).all()
    assert lesion > normal
    assert 200 < image[3, 7, 2] < 255  # the scale of normal tissue ends at 200
    others = np.delete(image[mask], order[-1])
    assert image[3, 7, 2] > others.max()


def test_many_voxels_of_one_value_go_to_one_level_between_their_neighbours() -> None:
    steps, fitted = trained()
    volume = head(4)
    mask, values = organ_of(volume)
    flat = float(np.percentile(values, 35))
    volume["image"] = volume["image"].clamp(min=flat)
    image = run(steps, volume, fitted)
    at_flat = volume["image"].numpy()[0] == np.float32(flat)
    np.testing.assert_allclose(image[at_flat & mask], np.mean(fitted["nyul"]["levels"][:4]), atol=1e-3)
    assert image[mask & ~at_flat].min() >= image[at_flat].max()


def test_fit_after_a_window_learns_from_the_windowed_values() -> None:
    window = step("window", range=[40, 120])
    steps = [window, step("nyul", landmarks=[1, 50, 99], scale=[0, 200])]
    fitted = intensity.fit(steps, [head(1)])
    low, middle, high = np.percentile(organ_of(head(1))[1].clip(40, 120), [1, 50, 99])
    np.testing.assert_allclose(fitted["nyul"]["levels"], [0, 200 * (middle - low) / (high - low), 200], atol=1e-3)


def test_fit_holds_one_volume_at_a_time_and_its_result_survives_json() -> None:
    alive: list[int] = []

    class Counted(dict[str, Any]):
        def __del__(self) -> None:
            alive.pop()

    def stream() -> Iterator[dict[str, Any]]:
        for given in TRAIN:
            alive.append(1)
            most.append(len(alive))
            yield Counted(head(*given))

    most: list[int] = []
    steps = [step("nyul")]
    fitted = intensity.fit(steps, stream())
    assert len(most) == 3
    assert max(most) <= 2  # the one at hand while the next is made
    again = json.loads(json.dumps(fitted))
    np.testing.assert_array_equal(run(steps, head(7), again), run(steps, head(7), fitted))
    assert again == intensity.fit(steps, [head(*given) for given in TRAIN])


def test_nothing_to_learn_reads_no_volume() -> None:
    def untouched() -> Iterator[dict[str, Any]]:
        raise AssertionError("a volume was read")
        yield {}

    steps = [step("window", range=[0, 1]), step("z_score")]
    assert intensity.fit(steps, untouched()) == {}
    with pytest.raises(AnomedError, match="nyul: found no train volume"):
        intensity.fit([step("nyul")], [])


# Bad volumes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["z_score", "percentile", "nyul"])
@pytest.mark.parametrize("fault", ["constant_organ", "empty_organ"])
def test_a_volume_without_contrast_or_organ_is_named(name: str, fault: str) -> None:
    volume = head(6)
    if fault == "constant_organ":
        volume["image"][volume["organ"] > 0] = 0.1
    else:
        volume["organ"] = torch.zeros_like(volume["organ"])
    steps = [step(name)]
    with pytest.raises(RuntimeError) as caught:
        intensity.compose(steps, intensity.fit(steps, [head(0)]))(volume)
    assert isinstance(caught.value.__cause__, CaseProblem)
    assert caught.value.__cause__.row["case"] == "sub-6"
    assert caught.value.__cause__.row["code"] == fault


def test_an_organ_of_one_value_but_for_few_voxels_has_no_percentiles() -> None:
    volume = head(6)
    values = torch.full((1, *SHAPE), 3.0)
    values[0, 3, 7, 2] = 9
    volume["image"] = values
    with pytest.raises(CaseProblem, match="sub-6: constant_organ: found 3 at the percentiles 1 and 99 of the organ"):
        intensity.fit([step("nyul")], [volume])
    with pytest.raises(RuntimeError) as caught:
        intensity.compose([step("percentile", low=1, high=99)], {})(volume)
    assert "found 3 at the percentiles 1 and 99" in str(caught.value.__cause__)
    assert run([step("z_score")], volume)[3, 7, 2] == 255


# Slices -----------------------------------------------------------------------------------------------------------


def test_each_slice_spans_all_levels() -> None:
    image = np.array([[-200, -110, 250], [25, 250, -200]], np.float32)
    np.testing.assert_allclose(intensity.slice_min_max(image), np.array([[0, 51, 255], [127.5, 255, 0]]))


def test_a_slice_of_one_value_is_black() -> None:
    np.testing.assert_array_equal(intensity.slice_min_max(np.full((3, 5), 7.3)), np.zeros((3, 5)))


def test_slice_min_max_equals_matplotlib_to_two_levels() -> None:
    from matplotlib import cm
    from matplotlib.colors import Normalize

    image = np.random.default_rng(0).gamma(2, 100, (31, 57))
    theirs = cm.ScalarMappable(Normalize(), "gray").to_rgba(image, bytes=True)[..., 0].astype(int)
    ours = intensity.to_uint8(intensity.slice_min_max(image)).astype(int)
    assert abs(ours - theirs).max() <= 2
    assert (theirs.min(), theirs.max(), ours.min(), ours.max()) == (0, 255, 0, 255)


def test_levels_are_rounded_half_to_even_and_clipped() -> None:
    levels = intensity.to_uint8(np.array([[-3.0, 0.5, 1.5, 2.49], [254.5, 255.4, 300.0, 127.5]]))
    assert levels.dtype == np.uint8
    np.testing.assert_array_equal(levels, [[0, 0, 2, 2], [254, 255, 255, 128]])
