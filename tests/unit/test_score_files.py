"""Score files as the tables read them: what does not hold together is refused, with the name of the file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anomed import records
from anomed.errors import AnomedError
from anomed.report import scores

GROUP: dict[str, Any] = {
    "by": "pathology",
    "group": "tumour",
    "n": 3,
    "counts": {"image": {"normal": 5, "abnormal": 3}},
    "values": {"image_auroc": 0.75, "pixel_ap": None},
    "reasons": {"pixel_ap": "no lesion pixel"},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"value": 0.5, "reason": "both"},
            r"damaged at records.0 \(.*image_auroc needs a value, or null and a reason\)",
        ),
        ({"value": None, "reason": None}, r"damaged at records.0 \(.*needs a value, or null and a reason\)"),
        ({"value": "high"}, r"damaged at records.0.value \(Input should be a valid number"),
        ({"direction": "up"}, r"damaged at records.0.direction \(Input should be 'higher' or 'lower'\)"),
        (
            {"version": 2, "definition_id": "image_auroc.v2"},
            r"and .*random/0.json: image_auroc has definition_id 'image_auroc.v2' and 'image_auroc.v1', version 2 and "
            "1; delete both and score again",
        ),
        ({"definition_id": "image_auroc.v2"}, r"damaged at .* definition_id image_auroc.v2, expected image_auroc.v1\)"),
        (
            {"definition_id": "image_auroc.v1[a=1]"},
            r"and .*: image_auroc has definition_id 'image_auroc.v1\[a=1\]' and",
        ),
        ({"level": "voxel"}, r"damaged at records.0.level \(Input should be 'image', 'pixel' or 'foreground'\)"),
        ({"low": None}, r"damaged at records.0 \(.*needs low and high, or two nulls and an interval_reason\)"),
        ({"interval_reason": "both"}, r"damaged at records.0 \(.*needs low and high, or two nulls and an interval"),
        ({"low": 0.9}, r"damaged at records.0 \(.*image_auroc has its low 0.9 above its high 0.3"),
        (
            {"value": None, "reason": "a", "low": None, "high": None, "interval_reason": "b"},
            r"damaged at records.0 \(.*no value, so its interval_reason must be the reason\)",
        ),
    ],
)
def test_a_damaged_score_is_named(copied: Any, change: dict[str, Any], message: str) -> None:
    path = copied.scores / "brain_mri/deep_svdd/0.json"
    score = records.read_card(path)
    score["records"][0] |= change
    records.write_card(path, score)
    with pytest.raises(AnomedError, match=f"^{path}:? {message}"):
        copied.table()


def test_not_a_number_is_damage(copied: Any) -> None:
    path = copied.scores / "brain_mri/deep_svdd/0.json"
    path.write_text(path.read_text().replace('"value": 0.25', '"value": NaN'))
    with pytest.raises(AnomedError, match=r"0.json: not valid JSON \(NaN is no number\)"):
        copied.table()


def test_scores_of_another_run_are_refused(copied: Any) -> None:
    path = copied.scores / "brain_mri/random/1.json"
    path.write_bytes((copied.scores / "brain_mri/random/0.json").read_bytes())
    with pytest.raises(AnomedError, match=r"found the scores of brain_mri/random/0, expected brain_mri/random/1"):
        copied.table()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file["records"][0].update(value="0.5"), "records.0.value"),
        (lambda file: file["records"][0].update(extra=1), "records.0.extra"),
        (lambda file: file["records"].append(file["records"][0]), "image_auroc stands there more than once"),
        (lambda file: file["records"].clear(), "records .*at least 1"),
        (lambda file: file.update(seed="0"), "seed"),
    ],
)
def test_a_score_file_that_was_edited_is_refused(copied: Any, change: Any, message: str) -> None:
    path = copied.scores / "brain_mri/deep_svdd/0.json"
    score = records.read_card(path)
    change(score)
    records.write_card(path, score)
    with pytest.raises(AnomedError, match=rf"deep_svdd/0\.json: damaged at .*{message}"):
        copied.table()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.pop("bootstrap"), r"bootstrap \(Field required"),
        (lambda file: file["bootstrap"].update(unit="slice"), r"bootstrap.unit \(Input should be 'subject' or 'image'"),
        (
            lambda file: file["bootstrap"].update(units=-1),
            r"bootstrap.units \(Input should be greater than or equal to 0",
        ),
        (lambda file: file["bootstrap"].update(confidence=0.9), r"confidence \(.*found 0.9, expected 0.95"),
        (lambda file: file["breakdowns"].append(GROUP), r"pathology 'tumour' stands there more than once"),
        (lambda file: file["breakdowns"][0].update(by="size"), r"breakdowns.0.by"),
        (
            lambda file: file["breakdowns"][0].update(reasons={}),
            r"breakdowns.0 .*'tumour' needs a reason for each null",
        ),
        (
            lambda file: file["breakdowns"][0]["reasons"].update(image_auroc="why"),
            r"breakdowns.0 .*and for nothing else",
        ),
        (lambda file: file["breakdowns"][0]["values"].update(dice=0.5), r"'tumour' has dice, which has no record"),
        (lambda file: file["breakdowns"][0]["counts"].update(voxel={}), r"breakdowns.0.counts.voxel"),
    ],
)
def test_a_bootstrap_or_breakdown_of_another_form_is_refused(copied: Any, change: Any, message: str) -> None:
    values = {"image_auroc": 0.5, "pixel_ap": 0.5}
    path = copied.score("brain_mri", "deep_svdd", 0, values, breakdowns=[GROUP])
    assert scores.read(path, "brain_mri", "deep_svdd", 0).breakdowns[0].n == 3
    score = records.read_card(path)
    change(score)
    records.write_card(path, score)
    with pytest.raises(AnomedError, match=rf"deep_svdd/0\.json: damaged at .*{message}"):
        copied.table()


def test_two_bootstraps_in_a_domain_do_not_compare(copied: Any) -> None:
    copied.bootstrap["units"] = 13
    path = copied.score("brain_mri", "label", 1, {"image_auroc": 0.5})
    with pytest.raises(
        AnomedError, match=rf"^{path} and .*/random/0\.json: the bootstrap has units 13 and 12; delete "
    ):
        copied.table()


def sealed(path: Path, **arrays: np.ndarray) -> None:
    """Put other arrays beside a score file, as if they were its own."""
    np.savez(path.with_suffix(".npz"), **arrays)  # type: ignore[arg-type]
    digest = records.digest_file(path.with_suffix(".npz"))
    records.write_card(path, {**records.read_card(path), "curves": digest})


def test_missing_replicates_are_named(copied: Any) -> None:
    path = copied.scores / "brain_mri/random/1.npz"
    path.unlink()
    with pytest.raises(AnomedError, match=rf"^{path}: not found; delete 1\.json beside it and score again$"):
        copied.table()
    assert not copied.results.exists()


def test_replicates_of_another_file_are_refused(copied: Any) -> None:
    path = copied.scores / "brain_mri/random/1.npz"
    path.write_bytes((copied.scores / "brain_mri/random/0.npz").read_bytes())
    message = (
        rf"^{path}: not the file that 1\.json beside it describes; delete it and 1\.json beside it and score again$"
    )
    with pytest.raises(AnomedError, match=message):
        copied.table()


def test_unreadable_replicates_are_refused(copied: Any) -> None:
    path = copied.scores / "brain_mri/random/1.json"
    path.with_suffix(".npz").write_bytes(b"PK no archive")
    records.write_card(path, {**records.read_card(path), "curves": records.digest(b"PK no archive")})
    with pytest.raises(AnomedError, match=r"random/1\.npz: unreadable \(.*\); delete it and 1\.json beside it"):
        copied.table()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (
            np.zeros(199, np.float32),
            r"replicates_image_auroc has shape \(199,\) of float32, expected \(1000,\) of float32",
        ),
        (
            np.zeros(1000, np.float64),
            r"replicates_image_auroc has shape \(1000,\) of float64, expected \(1000,\) of float32",
        ),
        (None, r"unreadable \(replicates_image_auroc is not a file in the archive\)"),
    ],
)
def test_another_number_of_replicates_is_refused(copied: Any, array: np.ndarray | None, message: str) -> None:
    path = copied.score("brain_mri", "random", 1, {"image_auroc": 0.5})
    sealed(path, **({} if array is None else {"replicates_image_auroc": array}))
    with pytest.raises(
        AnomedError, match=rf"random/1\.npz: {message}; delete it and 1\.json beside it and score again$"
    ):
        copied.table()


def test_replicates_of_a_mean_need_every_seed(copied: Any) -> None:
    shifted = np.array([0.0, np.nan, *[0.0] * 998])
    paths = [
        copied.score("brain_mri", "random", 0, {"image_auroc": 0.25, "miss": 0.5}, {"image_auroc": np.arange(1000.0)}),
        copied.score("brain_mri", "random", 1, {"image_auroc": 0.75, "miss": "why"}, {"image_auroc": shifted}),
    ]
    files = {path: scores.read(path, "brain_mri", "random", seed) for seed, path in enumerate(paths)}
    found = scores.mean_replicates(files)
    assert found.keys() == {"image_auroc"}
    assert found["image_auroc"].dtype == np.float64
    np.testing.assert_array_equal(found["image_auroc"][:4], [0.5, np.nan, 1.5, 2.0])
