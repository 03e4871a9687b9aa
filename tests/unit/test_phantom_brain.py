"""The embedded brain: deterministic, labelled by its masks, cut as stated, and shaped like a head."""

import nibabel
import numpy as np
import pandas as pd
import pytest

from anomed import plugins
from anomed.errors import AnomedError
from anomed.phantoms import atlas as maps
from anomed.phantoms import brain as phantom

HEADS = 10


def source(work, **options):
    cls = plugins.load("domains", "embedded")
    return cls("brain_mri", cls.Options(subjects=HEADS, **options), None, work)


@pytest.fixture(scope="module")
def atlas():
    return maps.shared()


ON_DISK = (3, 9)  # places in the cohort of two heads, of which one has a lesion


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A cohort of ten heads: its scans, and the files of two of them (a second each) by place."""
    scans = source(tmp_path_factory.mktemp("embedded")).scans()
    return scans, {place: scans[place].fetch() for place in ON_DISK}


@pytest.fixture(scope="module")
def heads(atlas):
    """One head of each condition, all of the same person on the same scanner, by kind."""
    kinds = ("normal", *phantom.KINDS)
    return {kind: phantom.synthesise(atlas, 0, "sub-01", "A", kind) for kind in kinds}


def test_a_head_is_the_same_alone_as_in_the_cohort(built, atlas):
    for place, paths in built[1].items():
        row = phantom.cohort(HEADS)[place]
        head = phantom.synthesise(atlas, 0, row.subject, row.scanner, row.kind)
        assert row.kind != "normal" or paths.lesion is None
        for path, expected in ((paths.image, head.flair), (paths.organ, head.brain), (paths.lesion, head.lesion)):
            if path is not None:
                stored = nibabel.load(path)
                assert np.array_equal(np.asanyarray(stored.dataobj), expected)
                assert stored.get_data_dtype() == expected.dtype
                assert nibabel.aff2axcodes(stored.affine) == ("R", "A", "S")
                assert stored.header.get_zooms() == (2.0, 2.0, 2.0)


def test_another_seed_or_subject_is_another_head(atlas, heads):
    flair = heads["normal"].flair
    for seed, subject in ((1, "sub-01"), (0, "sub-02")):
        other = phantom.synthesise(atlas, seed, subject, "A", "normal")
        assert (other.flair != flair).mean() > 0.5


def test_splits_share_no_subject_train_is_normal_and_lesions_have_files(built):
    scans, files = built
    assert len({scan.subject_id for scan in scans}) == len(scans) == HEADS
    found = {(scan.split, scan.abnormal) for scan in scans}
    assert found == {("train", False), ("valid", False), ("valid", True), ("test", False), ("test", True)}
    assert all(scan.abnormal == (scan.pathology in phantom.KINDS) for scan in scans)
    assert {scans[place].abnormal for place in files} == {False, True}
    for place, paths in files.items():
        assert paths.image.name == scans[place].source_file
        assert (paths.lesion is not None) == scans[place].abnormal
        if scans[place].abnormal:
            assert np.asanyarray(nibabel.load(paths.lesion).dataobj).any()


def test_default_cohort_shows_every_lesion_in_test_and_no_scanner_only_on_one_side():
    cohort = pd.DataFrame(phantom.cohort(phantom.SUBJECTS))
    test = cohort[cohort.split == "test"]
    assert set(test.kind) == {"normal", *phantom.KINDS}
    scanners = set(cohort.scanner)
    assert set(test.scanner[test.kind == "normal"]) == scanners
    assert set(test.scanner[test.kind != "normal"]) == scanners
    assert set(cohort.scanner[cohort.split == "train"]) == scanners
    assert (cohort.kind[cohort.split == "train"] == "normal").all()


def test_heads_have_the_contrast_of_flair_and_a_skull(heads, atlas, monkeypatch):
    seen = {}
    shell = phantom._shell

    def spy(rng, scanner, depth, below):
        seen["depth"] = depth
        return shell(rng, scanner, depth, below)

    monkeypatch.setattr(phantom, "_shell", spy)
    flair, lesion, _ = phantom.synthesise(atlas, 0, "sub-01", "A", "normal")
    assert not lesion.any()
    depth, top = seen["depth"], np.s_[..., 45:]

    def median(low, high):
        return np.median(flair[top][(depth[top] > low) & (depth[top] < high)])

    brain, fluid, bone = median(-60, -15), median(0.5, 2.5), median(5.5, 6.5)
    scalp, air = median(11.5, 13.5), median(25, 60)
    assert fluid < 0.4 * brain
    assert bone < 0.4 * brain < scalp
    assert air < 0.1 * brain
    litres = (depth < 0).sum() * phantom.SPACING**3 / 1e6
    assert 1.4 < litres < 2.3, "brain and sulci of an adult (MNI152 is large: 1.9 litres)"
    edge = np.concatenate([flair[[0, -1]].ravel(), flair[:, [0, -1]].ravel(), flair[..., -1].ravel()])
    assert np.median(edge) < 0.1 * brain, "the head lies inside the volume"


@pytest.mark.parametrize("kind", ["normal", *phantom.KINDS])
def test_the_brain_is_one_solid_region_inside_the_skull(heads, kind):
    from scipy import ndimage

    flair, lesion, volume = heads[kind]
    assert volume.dtype == np.uint8
    assert set(np.unique(volume)) == {0, 1}
    brain = volume == 1
    assert ndimage.label(brain)[1] == 1
    assert not (ndimage.binary_fill_holes(brain) & ~brain).any(), "ventricles belong to it"
    assert 1.2 < brain.sum() * phantom.SPACING**3 / 1e6 < 2.3, "litres"
    assert brain[lesion == 1].all()
    depth = ndimage.distance_transform_edt(~brain) - ndimage.distance_transform_edt(brain)  # voxels, outside above 0
    level = flair / np.median(flair[depth < -4])

    def shell(low, high):
        return level[..., 45:][(depth[..., 45:] > low) & (depth[..., 45:] <= high)]  # above face and neck

    assert np.median(shell(-1.5, 0)) > 0.4, "tissue at its surface"
    assert np.median(shell(0, 1)) < 0.3, "fluid just outside"
    assert (shell(0, 2) > 0.7).mean() < 0.02 < 0.9 < (shell(6, 7) > 0.7).mean(), "the scalp lies beyond the skull"


def test_lesions_have_the_brightness_of_their_kind(heads):
    plain = heads["normal"].flair
    brain = np.median(plain[plain > plain.mean()])
    ratio = {kind: np.median(flair[lesion == 1]) / brain for kind, (flair, lesion, _) in heads.items() if lesion.any()}
    assert set(ratio) == set(phantom.KINDS)
    assert ratio["tumour"] > 1.2
    assert ratio["infarct"] < 0.6
    assert 0.8 < ratio["mass"] < 1.3
    sizes = {kind: int(head.lesion.sum()) for kind, head in heads.items()}
    assert sizes["normal"] == 0 < sizes["small"] < sizes["mass"]
    assert min(sizes["tumour"], sizes["mass"]) > 500
    assert all(head.lesion.dtype == np.uint8 for head in heads.values())
    assert all(head.lesion.max() <= 1 for head in heads.values())


def test_small_lesions_are_many_and_both_bright_and_dark(heads):
    from scipy import ndimage

    flair, lesion, _ = heads["small"]
    brain = np.median(flair[flair > flair.mean()])
    parts, number = ndimage.label(lesion)
    levels = ndimage.median(flair, parts, range(1, number + 1)) / brain
    assert number >= 6
    assert levels.max() > 1.2
    assert levels.min() < 0.6
    assert ndimage.sum_labels(lesion, parts, range(1, number + 1)).max() * 8 < 4000, "mm3: spots, not tumours"


def test_a_lesion_changes_its_surroundings_only(heads):
    from scipy import ndimage

    plain = heads["normal"].flair.astype(float)
    for kind in phantom.KINDS:
        flair, lesion, _ = heads[kind]
        changed = np.abs(flair - plain) / plain.mean()
        distance = ndimage.distance_transform_edt(lesion == 0) * phantom.SPACING
        around = changed[(distance > 4) & (distance < 12) & (plain > plain.mean())].mean()
        assert changed[distance > 60].max(initial=0) < 0.1, kind
        if kind in ("tumour", "mass"):
            assert around > 0.1, f"a {kind} displaces the brain around it"
        else:
            assert around < 0.02, f"{kind} leaves the tissue beside it as it is"


def test_a_missing_template_is_named(monkeypatch, tmp_path):
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    with pytest.raises(AnomedError, match=r"mni_icbm152_t1_tal_nlin_sym_09a_converted\.nii\.gz: not found in nilearn"):
        maps.template_files()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AnomedError, match="nilearn is not installed"):
        maps.template_files()
