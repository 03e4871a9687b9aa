"""Comparing two systems: paired differences, what counts as a regression, and what does not compare."""

import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anomed import records
from anomed.compare import compare
from anomed.errors import AnomedError

REASON = "no anomaly maps: the method does not localise"
VALUES = {"image_auroc": 0.5, "pixel_ap": 0.125, "miss": 0.5}


def run(made: Any, first: str, second: str, tolerance: float = 0.0, baseline: Path | None = None) -> int:
    return compare(first, second, made.scores, baseline or made.scores, tolerance)


def test_every_cell_has_a_line(copied: Any, capsys: pytest.CaptureFixture[str]) -> None:
    copied.score("brain_mri", "deep_svdd", 0, {"image_auroc": 0.75, "pixel_ap": 0.125, "miss": 0.75})
    assert run(copied, "random", "deep_svdd") == 1
    assert capsys.readouterr().out == (
        f"A: random in {copied.scores}\n"
        f"B: deep_svdd in {copied.scores}\n"
        "\n"
        "cell                     seeds  A       B       B - A    95 % interval       p        B is\n"
        "brain_mri.image_auroc ↑  3, 1   0.5000  0.7500  +0.2500  [+0.2500, +0.2500]  <0.0001  better\n"
        "brain_mri.pixel_ap ↑     3, 1   0.1250  0.1250  +0.0000  [+0.0000, +0.0000]  1.0000   not told apart\n"
        "brain_mri.miss ↓         3, 1   0.5000  0.7500  +0.2500  [+0.2500, +0.2500]  <0.0001  worse: REGRESSION\n"
        "\n"
        "3 compared, p not corrected for their number: 1 better, 1 not told apart, 1 worse (1 by more than the tolerance of 0); 0 only one has (0 lost by B)\n"
    )


def test_intervals_are_of_the_paired_difference(copied: Any, capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(2)
    shared, own = random.normal(0, 0.1, 1000), random.normal(0, 0.01, (3, 1000))
    for seed in range(3):
        copied.score("brain_mri", "random", seed, VALUES, {"image_auroc": shared + own[seed]})
    copied.score("brain_mri", "deep_svdd", 0, VALUES | {"image_auroc": 0.52}, {"image_auroc": shared})
    run(copied, "random", "deep_svdd")
    low, high = re.findall(r"image_auroc .*\[(\S+), (\S+)\]", capsys.readouterr().out)[0]
    differences = 0.02 - own.mean(0)  # what both share cancels
    assert [float(low), float(high)] == pytest.approx(np.quantile(differences, (0.010756, 1 - 0.010756)), abs=6e-5)


@pytest.mark.parametrize(
    ("metric", "change", "tolerance", "code", "said"),
    [
        ("image_auroc", -0.1, 0.0, 1, "worse: REGRESSION"),
        ("image_auroc", -0.1, 0.0999, 1, "worse: REGRESSION"),
        ("image_auroc", -0.1, 0.1, 0, "worse"),  # by the tolerance, but not by more
        ("image_auroc", +0.1, 0.0, 0, "better"),
        ("image_auroc", 0.0, 0.0, 0, "not told apart"),
        ("miss", +0.1, 0.0, 1, "worse: REGRESSION"),
        ("miss", +0.1, 0.2, 0, "worse"),
        ("miss", -0.1, 0.0, 0, "better"),
    ],
)
def test_a_regression_is_worse_by_more_than_the_tolerance(
    copied: Any, capsys: pytest.CaptureFixture[str], metric: str, change: float, tolerance: float, code: int, said: str
) -> None:
    baseline = shutil.copytree(copied.scores, copied.root / "yesterday")
    value = {"image_auroc": 0.25, "miss": 0.5}[metric]
    copied.score("brain_mri", "deep_svdd", 0, VALUES | {"image_auroc": 0.25, metric: value + change})
    assert run(copied, "deep_svdd", "deep_svdd", tolerance, baseline) == code
    out = capsys.readouterr().out
    assert f"A: deep_svdd in {baseline}\nB: deep_svdd in {copied.scores}\n" in out
    line = next(line for line in out.splitlines() if line.startswith(f"brain_mri.{metric} "))
    assert line.rpartition("  ")[2] == said
    assert f"{change:+.4f}" in line


def test_the_whole_interval_must_lie_beyond_the_tolerance(copied: Any) -> None:
    copied.score("brain_mri", "random", 0, VALUES)
    copied.seeds = {"random": [0]}
    for seed in (1, 2):
        (copied.scores / f"brain_mri/random/{seed}.json").unlink()
    wide = {"image_auroc": np.linspace(-0.2, 0.2, 1000)}  # RISING of the other cancels the half
    copied.score("brain_mri", "deep_svdd", 0, VALUES | {"image_auroc": 0.3}, wide)  # -0.2 from -0.298 to -0.102
    assert run(copied, "random", "deep_svdd", 0.1) == 1
    assert run(copied, "random", "deep_svdd", 0.15) == 0


def test_float32_replicates_are_not_worse_by_their_rounding(copied: Any) -> None:
    constant = {"image_auroc": np.zeros(1000)}
    copied.score("brain_mri", "deep_svdd", 0, {"image_auroc": 0.2}, constant)
    for seed in (0, 1):
        copied.score("brain_mri", "label", seed, {"image_auroc": 0.1}, constant)
    for tolerance, code in ((0.1, 0), (0.09999, 1)):
        assert run(copied, "deep_svdd", "label", tolerance) == code


def test_an_interval_that_reaches_the_tolerance_is_no_regression(
    copied: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = {"image_auroc": np.linspace(-0.3, 0.3, 1000)}
    copied.score("brain_mri", "deep_svdd", 0, VALUES | {"image_auroc": 0.4}, wide)
    assert run(copied, "random", "deep_svdd") == 0  # -0.1 from -0.296 to +0.096
    assert re.search(r"-0\.1000  \[-0\.2957, \+0\.0957\] .* not told apart\n", capsys.readouterr().out)


def test_without_an_interval_the_difference_decides(copied: Any, capsys: pytest.CaptureFixture[str]) -> None:
    few = {"image_auroc": np.where(np.arange(1000) < 250, np.nan, 0.0)}
    copied.score("brain_mri", "deep_svdd", 0, VALUES | {"image_auroc": 0.45}, few)
    assert run(copied, "random", "deep_svdd", 0.04) == 1
    assert run(copied, "random", "deep_svdd", 0.05) == 0
    reason = "(no interval: too few subjects: 250 of 1000 replicates have no value)"
    said = re.findall(r"image_auroc ↑ .*-0\.0500 +(worse.*)\n", capsys.readouterr().out)
    assert said == [f"worse: REGRESSION {reason}", f"worse {reason}"]


def test_rounding_of_sums_is_no_regression(copied: Any) -> None:
    third = {"image_auroc": np.full(1000, np.nan)}
    for seed, value in enumerate((0.1, 0.2, 0.3)):
        copied.score("brain_mri", "random", seed, {"image_auroc": value}, third)
    less = float(np.nextafter(math.fsum((0.1, 0.2, 0.3)) / 3, 0))
    copied.score("brain_mri", "deep_svdd", 0, {"image_auroc": less}, third)
    assert run(copied, "random", "deep_svdd") == 0


def test_cells_that_only_one_has_are_listed(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.domains = ["brain_mri", "liver_ct"]
    benchmark.make()
    shutil.rmtree(benchmark.scores / "liver_ct/deep_svdd")
    benchmark.score("brain_mri", "deep_svdd", 0, {"image_auroc": 0.5, "pixel_ap": "no lesion"})
    benchmark.score("liver_ct", "random", 0, VALUES | {"miss": "no lesion"})
    assert run(benchmark, "random", "deep_svdd") == 1  # a value that B should have had
    lines = capsys.readouterr().out.splitlines()
    found = [re.split(r"  +", line) for line in lines if " only " in line and not line.startswith("1 ")]
    absent = "only A: B has no value, not scored on this domain"
    assert found == [
        ["brain_mri.pixel_ap ↑", "3, 1", "0.1250", "–", "only A: B has no value, no lesion: REGRESSION"],
        ["brain_mri.miss ↓", "3, 1", "0.5000", "–", "only A: B has no value, not applicable: REGRESSION"],
        ["liver_ct.image_auroc ↑", "3, 0", "0.5833", "–", absent],
        ["liver_ct.pixel_ap ↑", "3, 0", "0.1250", "–", absent],
    ]  # liver_ct.miss: neither has a value
    assert lines[-1].endswith("0 worse (0 by more than the tolerance of 0); 4 only one has (2 lost by B)")
    assert run(benchmark, "deep_svdd", "random") == 0
    assert "  only B: A has no value, no lesion\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("randon", "label", r"found no scores of 'randon'; did you mean 'random'\?$"),
        ("random", "xyz", r"found no scores of 'xyz'; known: deep_svdd, label, random$"),
    ],
)
def test_a_system_without_scores_is_named(copied: Any, first: str, second: str, message: str) -> None:
    with pytest.raises(AnomedError, match=rf"^{copied.scores}: {message}"):
        run(copied, first, second)


def test_a_baseline_without_scores_is_named(copied: Any, tmp_path: Path) -> None:
    with pytest.raises(
        AnomedError, match=rf"^{tmp_path}/none: no such folder; run this in the project, or give the folder of scores$"
    ):
        run(copied, "random", "random", baseline=tmp_path / "none")


def changed(copied: Any, system: str, seed: int, **change: Any) -> Path:
    path: Path = copied.scores / f"brain_mri/{system}/{seed}.json"
    records.write_card(path, {**records.read_card(path), **change})
    return path


def test_other_images_do_not_compare(copied: Any) -> None:
    path = changed(copied, "deep_svdd", 0, manifest_hash="0" * 64)
    message = (
        f"^{path} and .*/random/0.json: manifest_hash is {'0' * 64} and [0-9a-f]*; numbers of the two do not compare"
    )
    with pytest.raises(AnomedError, match=message):
        run(copied, "random", "deep_svdd")


def test_another_bootstrap_does_not_compare(copied: Any) -> None:
    copied.bootstrap["units"] = 13
    path = copied.score("brain_mri", "deep_svdd", 0, VALUES)
    with pytest.raises(
        AnomedError, match=rf"^{path} and .*: bootstrap is .* 'units': 13. and .* 'units': 12.; numbers of the two"
    ):
        run(copied, "random", "deep_svdd")


def test_another_definition_does_not_compare(copied: Any) -> None:
    record = records.read_card(copied.scores / "brain_mri/deep_svdd/0.json")["records"]
    record[1] |= {"definition_id": "pixel_ap.v1[limit=0.1]"}
    changed(copied, "deep_svdd", 0, records=record)
    message = (
        r"definition_id of pixel_ap is pixel_ap.v1\[limit=0.1\] and pixel_ap.v1; numbers of the two do not compare"
    )
    with pytest.raises(AnomedError, match=message):
        run(copied, "random", "deep_svdd")


def test_seeds_of_two_states_are_not_averaged(copied: Any) -> None:
    path = changed(copied, "random", 2, parameter_hash="0" * 64)
    with pytest.raises(AnomedError, match=rf"^{path} and .*/random/0.json: parameter_hash is 0+ and "):
        run(copied, "random", "deep_svdd")


def test_other_parameters_of_one_system_are_what_is_compared(copied: Any) -> None:
    baseline = shutil.copytree(copied.scores, copied.root / "yesterday")
    changed(copied, "deep_svdd", 0, parameter_hash="0" * 64)
    assert run(copied, "deep_svdd", "deep_svdd", baseline=baseline) == 0


def test_nothing_in_common_is_refused(copied: Any) -> None:
    copied.score("brain_mri", "deep_svdd", 0, {"image_auroc": "why"})
    copied.score("brain_mri", "label", 0, VALUES)
    with pytest.raises(
        AnomedError, match=r"random in .* and deep_svdd in .*: nothing to compare, there is no domain and"
    ):
        run(copied, "random", "deep_svdd")


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf")])
def test_a_tolerance_is_a_number_from_0_on(copied: Any, tolerance: float) -> None:
    with pytest.raises(AnomedError, match=rf"^--tolerance: found {tolerance}, expected a number from 0 on$"):
        run(copied, "random", "label", tolerance)


def test_a_damaged_file_is_named(copied: Any) -> None:
    path = copied.scores / "brain_mri/random/1.npz"
    path.write_bytes(b"")
    with pytest.raises(AnomedError, match=rf"^{path}: not the file that 1\.json beside it describes"):
        run(copied, "random", "label")
