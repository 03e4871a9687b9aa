"""The embedded liver: deterministic, labelled by its masks, shaped and attenuating as an abdominal CT is."""

import functools

import numpy as np
import pytest
from scipy import ndimage

from anomed.phantoms import abdomen
from anomed.phantoms import liver as phantom

Volumes = phantom.Volumes
MM3 = float(np.prod(abdomen.SPACING))


@functools.cache
def made(kind: str, seed: int = 0, subject: str = "ct-02", group: str = "A") -> Volumes:
    return phantom.synthesise(seed, subject, kind, group)


@pytest.fixture(params=phantom.KINDS)
def patient(request: pytest.FixtureRequest) -> tuple[Volumes, Volumes]:
    """A subject with a lesion of each kind, and the same one without."""
    return made(request.param), made("normal")


def auroc(scores: np.ndarray, labels: np.ndarray) -> float:
    above = scores[labels == 1][:, None] - scores[labels == 0]
    return float(((above > 0) + 0.5 * (above == 0)).mean())


def test_a_subject_is_the_same_again_whatever_was_made_between():
    first = made("hcc")
    made("normal", subject="ct-09", group="B")
    for one, other in zip(first, phantom.synthesise(0, "ct-02", "hcc", "A"), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("other", [{"seed": 1}, {"subject": "ct-09"}, {"group": "C"}])
def test_another_seed_subject_or_group_is_another_ct(other):
    assert (made("normal", **other).ct != made("normal").ct).mean() > 0.4


def test_volumes_are_those_that_the_chain_takes():
    for kind in ("normal", "cyst"):
        ct, lesion, liver = made(kind)
        assert ct.shape == lesion.shape == liver.shape == abdomen.SHAPE
        assert (ct.dtype, lesion.dtype, liver.dtype) == (np.int16, np.uint8, np.uint8)
        assert set(np.unique(liver)) == {0, 1}
        assert -1024 <= ct.min() < -900
        assert 400 < ct.max() <= 3071
    matrix = phantom.affine()
    assert np.allclose(np.diag(matrix), [*abdomen.SPACING, 1])
    middle = [(n - 1) / 2 for n in abdomen.SHAPE]
    assert np.allclose(matrix @ [*middle, 1], [0, 0, 0, 1])


@pytest.mark.parametrize("subjects", [10, phantom.SUBJECTS])
def test_cohort_fills_every_split_and_trains_on_normal_subjects(subjects):
    cohort = phantom.cohort(subjects)
    assert len({member.subject for member in cohort}) == len(cohort) == subjects
    found = {(member.split, member.kind == "normal") for member in cohort}
    assert found == {("train", True), ("valid", True), ("valid", False), ("test", True), ("test", False)}
    assert cohort == phantom.cohort(subjects + 40)[:subjects]


def test_default_cohort_tests_every_pathology_and_no_group_stands_for_a_class():
    test = [member for member in phantom.cohort(phantom.SUBJECTS) if member.split == "test"]
    assert {member.kind for member in test} == {"normal", *phantom.KINDS}
    for normal in (True, False):
        assert {member.group for member in test if (member.kind == "normal") == normal} == {"A", "B", "C"}


def test_lesions_are_marked_inside_the_liver_and_nowhere_in_a_normal_subject(patient):
    ill, well = patient
    assert not well.lesion.any()
    assert np.array_equal(ill.liver, well.liver), "the same body"
    assert ill.lesion.any()
    assert not (ill.lesion > ill.liver).any()
    assert 1 < ill.lesion.sum() * MM3 / 1000 < 0.35 * ill.liver.sum() * MM3 / 1000, "ml"


def test_what_is_marked_is_what_was_drawn(patient):
    ill, well = patient
    change = ill.ct.astype(int) - well.ct
    lesion = ill.lesion > 0
    assert (np.abs(change[lesion]) > 4).mean() > 0.7
    far = ~ndimage.binary_dilation(lesion, np.ones((11, 11, 3)))
    assert not change[far].any(), "noise and body are the same"
    inner = ndimage.binary_erosion(lesion, np.ones((3, 3, 1)))
    assert np.abs(change[inner]).mean() > 12


@pytest.mark.parametrize(("kind", "low", "high"), [("cyst", -10, 25), ("metastases", 40, 100)])
def test_lesions_have_the_attenuation_of_their_kind(kind, low, high):
    ill = made(kind)
    core = ndimage.binary_erosion(ill.lesion > 0, np.ones((3, 3, 1)))
    assert low < np.median(ill.ct[core]) < high
    assert np.median(ill.ct[core]) < np.median(ill.ct[(ill.liver > 0) & (ill.lesion == 0)]) - 10


def test_lesions_differ_in_size_and_a_patient_has_slices_without():
    sizes = []
    for member in phantom.cohort(phantom.SUBJECTS):  # those of the test on brightness, made once for both
        if member.split == "test" and member.kind != "normal":
            volume = made(member.kind, 0, member.subject, member.group)
            parts, number = ndimage.label(volume.lesion)
            sizes += list(ndimage.sum_labels(volume.lesion, parts, range(1, number + 1)) * MM3 / 1000)
    assert min(sizes) < 0.8
    assert max(sizes) > 8, "ml"


def test_the_body_looks_like_an_abdomen():
    """Densities by place: air around, fat under the skin, a liver on the right, lung on top, bone behind, spleen left."""
    for subject, group in (("ct-02", "A"), ("ct-06", "C")):
        ct, _, liver = made("normal", 0, subject, group)
        x, _, _ = np.nonzero(liver)
        half = abdomen.SHAPE[0] / 2
        assert (x > half).mean() > 0.75, "right is at high indices in RAS"
        assert 900 < liver.sum() * MM3 / 1000 < 2300, "ml of an adult"
        level = np.median(ct[liver > 0])
        assert (60 < level < 90) if group == "C" else (90 < level < 135), "fatty or not"
        solid = ndimage.binary_fill_holes((ct > -300).any(2))
        assert np.median(ct[~solid]) < -950
        body = ct > -300
        assert 0.02 < (body & (ct > 250)).sum() / body.sum() < 0.08, "bone"
        assert ((ct > -130) & (ct < -75)).sum() > 0.15 * body.sum(), "fat"
        lung = (ct < -700) & ndimage.binary_erosion(solid, iterations=12)[..., None]
        assert lung[..., -3:].sum() > 5 * lung[..., :3].sum(), "at the dome, not at the bottom (there gas of the bowel)"
        parts, number = ndimage.label(liver)
        assert np.bincount(parts[parts > 0])[1:].max() > 0.98 * liver.sum(), f"{number} parts"


def test_brightness_does_not_tell_the_classes_apart():
    """Mean grey level of test slices masked and windowed as the shipped chain does."""
    means, labels = [], []
    for member in phantom.cohort(phantom.SUBJECTS):
        if member.split == "test":
            ct, lesion, liver = made(member.kind, 0, member.subject, member.group)
            grey = np.where(liver > 0, np.clip((ct + 200) / 450, 0, 1), 0)
            for z in range(0, abdomen.SHAPE[2], 3):
                if liver[..., z].sum() * 4 >= 4000:
                    means.append(grey[..., z].mean())
                    labels.append(int(lesion[..., z].any()))
    truth = np.array(labels)
    assert min(truth.sum(), (1 - truth).sum()) >= 15
    assert 0.3 < auroc(np.array(means), truth) < 0.7
