"""The synthetic chest films: repeatable, split by subject, boxed where opaque, not told apart by their brightness."""

import numpy as np
import pytest
from scipy import ndimage
from sklearn.metrics import roc_auc_score

from anomed.phantoms import chest
from anomed.phantoms.picture import Picture

COHORT = chest.cohort(chest.SUBJECTS)
OPAQUE = [picture for picture in COHORT if picture.kind == "Lung_Opacity"]
OTHER = [picture for picture in COHORT if picture.kind == "No-Not-Normal"]


@pytest.fixture(scope="module")
def films():
    return {picture: chest.paint(0, picture).image for picture in COHORT if picture.split == "test"}


def healthy(picture: Picture) -> Picture:
    """The same subject without the finding."""
    return picture._replace(kind="normal")


def test_cohort_fills_every_split_with_subjects_of_its_own():
    assert 90 <= len(COHORT) <= 110
    assert (
        len({picture.image_id for picture in COHORT}) == len({picture.subject_id for picture in COHORT}) == len(COHORT)
    )
    kinds = {split: [p.kind for p in COHORT if p.split == split] for split in ("train", "valid", "test")}
    assert set(kinds["train"]) == {"normal"}
    assert 0.4 <= len(kinds["train"]) / len(COHORT) <= 0.6
    for split in ("valid", "test"):
        assert set(kinds[split]) == {"normal", "Lung_Opacity", "No-Not-Normal"}
        assert kinds[split].count("normal") == len(kinds[split]) / 2
    for picture in COHORT:
        folder = "good" if picture.kind == "normal" else "Ungood"
        assert picture.image_id == f"{picture.split}/{folder}/{picture.subject_id}_1"


def test_ten_subjects_fill_every_split_and_more_change_none_of_them():
    small = chest.cohort(10)
    assert small == COHORT[:10]
    assert {(p.split, p.kind != "normal") for p in small} == {
        ("train", False), ("valid", False), ("valid", True), ("test", False), ("test", True)
    }  # fmt: skip


@pytest.mark.parametrize("picture", [COHORT[0], OPAQUE[0], OTHER[0]], ids=lambda p: p.kind)
def test_a_film_repeats_itself_and_another_seed_gives_another(picture):
    first = chest.paint(0, picture)
    chest.paint(0, COHORT[5])
    again, other = chest.paint(0, picture), chest.paint(1, picture)
    assert first.image.tobytes() == again.image.tobytes()
    assert first.boxes == again.boxes
    assert first.image.shape == (256, 256)
    assert first.image.dtype == np.uint8
    assert first.mask is None
    assert np.abs(first.image.astype(int) - other.image).mean() > 3


def test_a_film_shows_lungs_darker_than_the_mediastinum_between_them(films):
    for picture, image in films.items():
        if picture.kind == "normal":
            profile = ndimage.uniform_filter(np.median(image[70:110], axis=0), 9)
            assert max(profile[40:110].min(), profile[150:220].min()) + 15 < profile[105:155].max(), picture.image_id


@pytest.mark.parametrize("picture", OPAQUE[:6], ids=lambda p: p.subject_id)
def test_an_opacity_is_brighter_than_the_same_lung_without_it_and_only_inside_its_boxes(picture):
    film = chest.paint(0, picture)
    change = film.image.astype(float) - chest.paint(0, healthy(picture)).image
    inside = np.zeros(change.shape, bool)
    for x0, y0, x1, y1 in film.boxes:
        assert 0 <= x0 < x1 <= 256
        assert 0 <= y0 < y1 <= 256
        box = np.s_[int(y0) : int(y1), int(x0) : int(x1)]
        assert change[box].mean() > 4
        inside[box] = True
    assert change[~inside].mean() < 0.25 * change[inside].mean()


def test_a_film_says_how_it_was_taken_and_a_pair_of_subjects_has_one_view():
    views = {picture: chest.paint(0, picture).clinical for picture in COHORT[:20]}
    assert {view["view"] for view in views.values()} == {"AP", "PA"}
    assert all(set(view) == {"view"} for view in views.values())
    for one, other in zip(COHORT[:20:2], COHORT[1:20:2], strict=True):
        if one.split != "train":
            assert views[one] == views[other], "a finding and its normal twin: the view must not tell the classes apart"


def test_boxes_mark_opacities_and_nothing_else():
    assert chest.paint(0, healthy(OPAQUE[0])).boxes == ()
    for picture in OTHER[:6]:
        assert chest.paint(0, picture).boxes == ()
    assert {len(chest.paint(0, picture).boxes) for picture in OPAQUE[:8]} >= {1, 2}


@pytest.mark.parametrize("picture", OTHER[:6], ids=lambda p: p.subject_id)
def test_a_film_that_is_not_normal_shows_something(picture):
    change = np.abs(chest.paint(0, picture).image.astype(int) - chest.paint(0, healthy(picture)).image)
    assert (change > 12).sum() > 100


@pytest.mark.parametrize("statistic", [np.mean, np.median, lambda image: np.percentile(image, 99)])
def test_brightness_does_not_tell_the_classes_apart(films, statistic):
    abnormal = [picture.kind != "normal" for picture in films]
    assert 0.3 < roc_auc_score(abnormal, [statistic(image) for image in films.values()]) < 0.7


def test_matched_pairs_share_the_marker_so_that_its_letter_says_nothing(films):
    images = list(films.values())
    bright = [
        [(image[:45, :45] >= 245).sum() > (image[:45, -45:] >= 245).sum() for image in images[at::2]] for at in (0, 1)
    ]
    assert np.mean(np.array(bright[0]) == bright[1]) > 0.8
