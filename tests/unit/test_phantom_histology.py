"""The synthetic H&E patches: repeatable, split by slide, tumour of large nuclei, not told apart by colour."""

import numpy as np
import pytest
from scipy import ndimage
from sklearn.metrics import roc_auc_score

from anomed.phantoms import histology

COHORT = histology.cohort(histology.SUBJECTS)
TUMOURS = [picture for picture in COHORT if picture.kind == "tumour"]


@pytest.fixture(scope="module")
def patches():
    return {picture: histology.paint(0, picture).image for picture in COHORT if picture.split == "test"}


def test_cohort_fills_every_split_with_slides_of_its_own():
    assert 90 <= len(COHORT) <= 110
    assert len({picture.image_id for picture in COHORT}) == len(COHORT)
    slides = {split: {p.subject_id for p in COHORT if p.split == split} for split in ("train", "valid", "test")}
    assert sum(map(len, slides.values())) == len(set().union(*slides.values())) == histology.SUBJECTS
    for picture in COHORT:
        folder = "good" if picture.kind == "normal" else "Ungood"
        assert picture.image_id.rsplit("_", 1)[0] == f"{picture.split}/{folder}/{picture.subject_id}"
        assert picture.split != "train" or picture.kind == "normal"
    for slide in slides["valid"] | slides["test"]:
        assert sorted(p.kind for p in COHORT if p.subject_id == slide) == ["normal"] * 2 + ["tumour"] * 2


def test_four_slides_fill_every_split_and_more_change_none_of_them():
    small = histology.cohort(4)
    assert small == COHORT[: len(small)]
    assert {picture.split for picture in small} == {"train", "valid", "test"}


@pytest.mark.parametrize("picture", [COHORT[0], TUMOURS[0]], ids=lambda p: p.kind)
def test_a_patch_repeats_itself_and_another_seed_gives_another(picture):
    first = histology.paint(0, picture)
    histology.paint(0, COHORT[7])
    again, other = histology.paint(0, picture), histology.paint(1, picture)
    assert first.image.tobytes() == again.image.tobytes()
    assert first.image.shape == (192, 192, 3)
    assert first.image.dtype == np.uint8
    assert first.mask is None
    assert first.boxes == ()
    assert np.abs(first.image.astype(int) - other.image).mean() > 3


def test_patches_of_a_slide_share_its_stain_and_differ_in_their_cells():
    first, second = (histology.paint(0, picture).image.astype(int) for picture in COHORT[:2])
    assert np.abs(first - second).mean() > 3
    tints: dict[str, list[float]] = {}
    for picture in COHORT[:24]:
        image = histology.paint(0, picture).image.astype(float)
        tints.setdefault(picture.subject_id, []).append(image[..., 0].mean() - image[..., 2].mean())
    within = np.mean([np.var(values, ddof=1) for values in tints.values()])
    assert np.var([np.mean(values) for values in tints.values()], ddof=1) > within


def test_every_patch_is_purple_tissue(patches):
    for picture, image in patches.items():
        red, green, blue = image.reshape(-1, 3).mean(0)
        assert green < min(red, blue), picture.image_id
        assert image.min() < 130 < 200 < image.max(), picture.image_id


@pytest.mark.parametrize("picture", TUMOURS[:4], ids=lambda p: p.image_id)
def test_a_nest_takes_a_part_of_the_patch(picture):
    image = histology.paint(0, picture).image.astype(float)
    without = histology.paint(0, picture._replace(kind="normal")).image
    changed = ndimage.uniform_filter(np.abs(image - without).mean(-1), 9) > 20
    assert changed.mean() > 0.15


def test_nuclei_of_tumour_are_larger(patches):
    """Share of the dark area that survives an opening wider than a lymphocyte."""
    disc = np.hypot(*np.mgrid[-10:11, -10:11]) <= 10.5
    large = []
    for image in patches.values():
        red = ndimage.gaussian_filter(image[..., 0].astype(float), 2)
        dark = red < (np.percentile(red, 2) + np.percentile(red, 80)) / 2
        large.append(ndimage.binary_opening(dark, disc).sum() / dark.sum())
    assert roc_auc_score([picture.kind != "normal" for picture in patches], large) > 0.65


@pytest.mark.parametrize("statistic", [np.mean, np.median, lambda image: np.percentile(image, 99)])
def test_brightness_does_not_tell_the_classes_apart(patches, statistic):
    abnormal = [picture.kind != "normal" for picture in patches]
    assert 0.3 < roc_auc_score(abnormal, [statistic(image) for image in patches.values()]) < 0.7
