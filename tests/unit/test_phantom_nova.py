"""The embedded NOVA: the same image alone as in the cohort, boxes on what the lesion changed, texts that fit the image."""

import collections
import json

import numpy as np
import pytest

from anomed.phantoms import brain, nova, nova_texts
from anomed.phantoms.atlas import shared
from anomed.phantoms.picture import Painted, Picture

PICTURES = nova.cohort(nova.SUBJECTS)
CASES = ("case0000", "case0001", "case0002", "case0003")  # one of each kind of lesion
SHOWN = [picture for picture in PICTURES if picture.subject_id in CASES and picture.image_id[-1] in "12"]


def kind(picture: Picture) -> str:
    return nova_texts.KIND[picture.kind]


@pytest.fixture(scope="module")
def painted() -> dict[str, Painted]:
    return {picture.image_id: nova.paint(0, picture) for picture in SHOWN}


def test_the_cohort_is_a_hundred_test_images_in_cases_of_one_to_eight_with_a_diagnosis_each() -> None:
    assert 95 <= len(PICTURES) <= 105
    assert len({picture.image_id for picture in PICTURES}) == len(PICTURES)
    assert {picture.split for picture in PICTURES} == {"test"}
    assert all(picture.image_id.startswith(f"{picture.subject_id}_") for picture in PICTURES)
    sizes = collections.Counter(picture.subject_id for picture in PICTURES)
    assert len(sizes) == nova.SUBJECTS
    assert set(sizes.values()) >= {1, 2, 3, 8}
    assert max(sizes.values()) == 8
    assert np.median(list(sizes.values())) < np.mean(list(sizes.values())), "few cases have many images"
    diagnoses = {picture.subject_id: picture.kind for picture in PICTURES}
    assert {(picture.subject_id, picture.kind) for picture in PICTURES} == set(diagnoses.items())
    assert len(set(diagnoses.values())) == nova.SUBJECTS, "rare: once each"
    assert {kind(picture) for picture in SHOWN} == set(brain.KINDS)


def test_more_subjects_leave_the_others_as_they_are() -> None:
    assert nova.cohort(40)[: len(PICTURES)] == PICTURES


def test_an_image_does_not_depend_on_seed_order_or_neighbours(painted: dict[str, Painted]) -> None:
    picture = SHOWN[-1]
    nova._head.cache_clear()
    again, first = nova.paint(0, picture), painted[picture.image_id]
    assert again.image.tobytes() == first.image.tobytes()
    assert (again.boxes, again.clinical) == (first.boxes, first.clinical)
    assert (nova.paint(1, picture).image != first.image).mean() > 0.3


def test_images_are_grey_and_differ_within_a_case(painted: dict[str, Painted]) -> None:
    for result in painted.values():
        assert result.image.shape == (480, 480)
        assert result.image.dtype == np.uint8
        assert result.mask is None
        assert result.image.max() > 200
        assert np.median(result.image[:10, :60]) < 30 < 90 < np.median(result.image[200:280, 200:280]), (
            "a head on black"
        )
    assert len({result.image.tobytes() for result in painted.values()}) == len(SHOWN)


def test_one_image_alone_has_unknown_boxes(painted: dict[str, Painted]) -> None:
    assert nova._UNBOXED in {picture.image_id for picture in PICTURES}
    unknown = [name for name, result in painted.items() if not result.clinical["boxes_known"]]
    assert unknown == [nova._UNBOXED]
    for name, result in painted.items():
        assert bool(result.boxes) == bool(result.clinical["rater_boxes"]) == (name != nova._UNBOXED)


def test_boxes_hold_what_the_lesion_changed(painted: dict[str, Painted], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same slices without a lesion: made by handing the painter the sound head's levels."""
    whole, compared = (
        nova._head,
        [picture for picture in SHOWN if picture.subject_id in ("case0000", "case0003")],
    )
    sound = {
        name: brain.synthesise(shared(), 0, name, f"scanner of {name}", "normal")
        for name in {picture.subject_id for picture in compared}
    }

    def head(seed: int, subject: str, lesion: str) -> nova._Head:
        made, flair = whole(seed, subject, lesion), sound[subject].flair
        return made._replace(level=flair / np.float32(np.median(flair[sound[subject].brain > 0]) / 0.64))

    monkeypatch.setattr(nova, "_head", head)
    for picture in compared:
        result = painted[picture.image_id]
        if "contrast-enhanced" in result.clinical["caption"]:
            continue  # enhancement follows the lesion's outline, not its level
        plain = nova.paint(0, picture).image.astype(float)
        change = np.abs(result.image - plain * result.image.mean() / plain.mean())
        inside = np.zeros((480, 480), bool)
        for x0, y0, x1, y1 in result.boxes:
            assert 0 <= x0 < x1 <= 480
            assert 0 <= y0 < y1 <= 480
            inside[int(y0) : int(y1), int(x0) : int(x1)] = True
        assert inside.mean() < 0.25
        assert change[inside].mean() > 1.5 * change[~inside & (plain > 40)].mean(), picture.image_id


def test_boxes_are_those_of_the_parts_of_a_lesion() -> None:
    lesion = np.zeros((480, 480), np.float32)
    lesion[100:140, 200:300] = 1
    lesion[100:120, 304:320] = 1  # 4 pixels away: the same finding
    lesion[300:310, 50:60] = 0.6
    lesion[400:403, 400:403] = 1  # a speck
    assert nova._boxes(lesion) == ((200.0, 100.0, 320.0, 140.0), (50.0, 300.0, 60.0, 310.0))
    lesion[:390] = 0
    assert nova._boxes(lesion) == ((400.0, 400.0, 403.0, 403.0),), "unless nothing else is there"


def test_raters_draw_nearly_the_same_boxes_inside_the_image(painted: dict[str, Painted]) -> None:
    for result in painted.values():
        for drawn in result.clinical["rater_boxes"].values():
            assert len(drawn) == len(result.boxes)
            for other, gold in zip(np.array(drawn), np.array(result.boxes), strict=True):
                low, high = np.maximum(other[:2], gold[:2]), np.minimum(other[2:], gold[2:])
                shared = np.prod(np.clip(high - low, 0, None))
                union = np.prod(other[2:] - other[:2]) + np.prod(gold[2:] - gold[:2]) - shared
                assert 0.3 < shared / union < 1
                assert other.min() >= 0
                assert other.max() <= 480


def test_texts_fit_the_case_and_do_not_tell_the_diagnosis(painted: dict[str, Painted]) -> None:
    histories = collections.defaultdict(set)
    for picture in SHOWN:
        clinical = painted[picture.image_id].clinical
        json.dumps(clinical)
        assert set(clinical) == {"caption", "history", "diagnosis", "scan_id", "boxes_known", "rater_boxes"}
        assert clinical["diagnosis"] == picture.kind
        assert picture.kind.lower() not in (clinical["caption"] + clinical["history"]).lower()
        assert clinical["caption"].split()[0] in ("Axial", "Coronal", "Sagittal")
        assert any(sequence in clinical["caption"] for sequence in nova_texts.SEQUENCES)
        assert "-year-old" in clinical["history"]
        histories[picture.subject_id].add(clinical["history"])
    assert {len(texts) for texts in histories.values()} == {1}
    assert len({painted[picture.image_id].clinical["scan_id"] for picture in SHOWN}) == len(SHOWN)


def test_the_caption_names_the_side_on_which_the_box_lies(painted: dict[str, Painted]) -> None:
    """Axial and coronal slices show the patient's right on the left of the image."""
    told = 0
    for result in painted.values():
        caption = result.clinical["caption"]
        if result.boxes and not caption.startswith("Sagittal") and (" left " in caption or " right " in caption):
            x0, _, x1, _ = result.boxes[0]
            assert (" left " in caption) == ((x0 + x1) / 2 > 240), caption
            told += 1
    assert told >= 2
