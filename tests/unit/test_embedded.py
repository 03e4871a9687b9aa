"""The embedded brain: deterministic, labelled by its masks, cut as stated, and shaped like a head."""

import collections

import nibabel
import numpy as np
import pandas as pd
import pytest

from anomed import manifest, plugins, records
from anomed.domains import embedded, embedded_atlas, embedded_brain
from anomed.errors import AnomedError

HEADS = 10


def source(work, **options):
    cls = plugins.load("domains", "embedded")
    return cls("brain_mri", cls.Options(subjects=HEADS, **options), None, work)


@pytest.fixture(scope="module")
def atlas():
    return embedded_atlas.Atlas.load()


@pytest.fixture(scope="module")
def built(atlas, tmp_path_factory):
    """A cohort of ten heads on disk: the source, its cases in manifest order and their pixels."""
    made = source(tmp_path_factory.mktemp("embedded"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded_atlas.Atlas, "load", lambda: atlas)  # two seconds less
        cases = manifest.ordered(made.cases())
    return made, cases, [case.load() for case in cases]


@pytest.fixture(scope="module")
def heads(atlas):
    """One head of each condition, all of the same person on the same scanner, by kind."""
    kinds = ("normal", *embedded_brain.KINDS)
    return {kind: embedded_brain.synthesise(atlas, 0, "sub-01", "A", kind) for kind in kinds}


def test_a_head_is_the_same_alone_as_in_the_cohort(built, atlas):
    folder = built[0].folder
    for row in pd.read_csv(folder / "subjects.csv").iloc[[3, 9]].itertuples():
        volumes = embedded_brain.synthesise(atlas, 0, row.subject, row.scanner, row.kind)
        for name, expected in volumes._asdict().items():
            stored = nibabel.load(folder / f"{row.subject}_{name}.nii.gz")
            assert np.array_equal(np.asanyarray(stored.dataobj), expected)
            assert stored.get_data_dtype() == expected.dtype


def test_equal_volumes_are_equal_files_and_reload_as_written(heads, tmp_path):
    for name in ("a.nii.gz", "b.nii.gz"):
        embedded._write(tmp_path / name, heads["tumour"].flair)
    data = (tmp_path / "a.nii.gz").read_bytes()
    assert data == (tmp_path / "b.nii.gz").read_bytes()
    assert data[4:8] == bytes(4), "a time in the gzip header would change the sha256 of equal volumes"
    stored = nibabel.load(tmp_path / "a.nii.gz")
    assert nibabel.aff2axcodes(stored.affine) == ("R", "A", "S")
    assert stored.header.get_zooms() == (2.0, 2.0, 2.0)
    assert np.array_equal(stored.affine, embedded_brain.affine())


def test_another_seed_or_subject_is_another_head(atlas, heads):
    flair = heads["normal"].flair
    for seed, subject in ((1, "sub-01"), (0, "sub-02")):
        other = embedded_brain.synthesise(atlas, seed, subject, "A", "normal")
        assert (other.flair != flair).mean() > 0.5


def test_splits_share_no_subject_and_train_is_normal(built):
    _, cases, _ = built
    splits = collections.defaultdict(set)
    for case in cases:
        splits[case.split].add(case.subject_id)
        assert case.image_id.startswith(f"{case.subject_id}_")
    assert len(set().union(*splits.values())) == sum(len(subjects) for subjects in splits.values()) == HEADS
    found = {(case.split, case.label) for case in cases}
    assert found == {("train", 0), ("valid", 0), ("valid", 1), ("test", 0), ("test", 1)}
    assert len({case.image_id for case in cases}) == len(cases)


def test_default_cohort_shows_every_lesion_in_test_and_no_scanner_only_on_one_side():
    cohort = embedded.subjects(embedded.Embedded.Options().subjects)
    test = cohort[cohort.split == "test"]
    assert set(test.kind) == {"normal", *embedded_brain.KINDS}
    scanners = set(cohort.scanner)
    assert set(test.scanner[test.kind == "normal"]) == scanners
    assert set(test.scanner[test.kind != "normal"]) == scanners
    assert set(cohort.scanner[cohort.split == "train"]) == scanners
    assert (cohort.kind[cohort.split == "train"] == "normal").all()


def test_masks_match_labels_and_lesion_heads_give_no_normal_slice(built):
    _, cases, pixels = built
    kinds = {f"sub-{i + 1:02d}": role.split()[1] for i, role in enumerate(embedded.ROLES[:HEADS])}
    for case, pixel in zip(cases, pixels, strict=True):
        area = pixel.mask.sum() * embedded_brain.SPACING**2
        if case.label:
            assert area >= embedded.MIN_AREA
            assert case.pathology == kinds[case.subject_id] != "normal"
        else:
            assert area == 0
            assert case.pathology == ""
            assert kinds[case.subject_id] == "normal"


def test_pixels_are_contract_shaped(built):
    made, cases, pixels = built
    assert (made.colour, made.has_masks, made.has_foreground, made.problems) == (False, True, True, [])
    for case, pixel in zip(cases, pixels, strict=True):
        assert (pixel.image.dtype, pixel.mask.dtype, pixel.foreground.dtype) == (np.uint8, bool, bool)
        assert pixel.image.shape == pixel.mask.shape == pixel.foreground.shape == (120, 120)
        assert pixel.image.flags.c_contiguous
        assert 20 < pixel.image.mean() < 120, "air and head both in the picture"
        assert pixel.image[:2, :2].max() < 60, "corners are air"
        assert pixel.sha256 == records.digest_file(made.folder / case.source_file)


def test_the_foreground_is_the_brain_of_the_same_slice_and_holds_every_lesion(built):
    made, cases, pixels = built
    for case, pixel in zip(cases, pixels, strict=True):
        brain = np.asanyarray(nibabel.load(made.folder / f"{case.subject_id}_brain.nii.gz").dataobj)
        assert np.array_equal(pixel.foreground, embedded.axial(brain, int(case.image_id[-3:])) == 1)
        assert pixel.foreground[pixel.mask].all()
        assert 0.15 < pixel.foreground.mean() < 0.45


def test_slices_lie_at_the_stated_heights(built):
    made, cases, _ = built
    affine = nibabel.load(made.folder / "sub-01_flair.nii.gz").affine
    heights = [affine[2, 2] * int(case.image_id[-3:]) + affine[2, 3] for case in cases if case.subject_id == "sub-01"]
    assert heights == list(embedded.LEVELS)


def test_axial_shows_anterior_on_top_and_the_patients_right_on_the_left(tmp_path):
    volume = np.zeros(embedded_brain.SHAPE, np.int16)
    volume[100, 110, 40] = 7  # far right, far anterior
    embedded._write(tmp_path / "ras.nii.gz", volume)
    flipped = nibabel.load(tmp_path / "ras.nii.gz").as_reoriented([[1, -1], [0, 1], [2, -1]])
    assert nibabel.aff2axcodes(flipped.affine) == ("A", "L", "I")
    nibabel.save(flipped, tmp_path / "other.nii.gz")
    for name in ("ras.nii.gz", "other.nii.gz"):
        image = embedded.axial(embedded._read(tmp_path / name), 40)
        assert np.argwhere(image).tolist() == [[9, 19]], "row counts from anterior, column from the patient's right"


def test_window_is_linear_and_ignores_the_unit_and_the_brightest():
    volume = np.zeros((10, 10, 10))
    volume[:, :5] = 100
    volume[0, 0, :3] = (200, 90, 1000)
    seen = embedded.window(volume)
    assert seen.dtype == np.uint8
    assert seen[5, 9, 5] == 0
    assert seen[5, 2, 5] == round(255 / 1.8)
    assert seen[0, 0, :3].tolist() == [255, round(255 * 0.9 / 1.8), 255]
    assert np.array_equal(embedded.window(volume * 7), seen)


def test_heads_have_the_contrast_of_flair_and_a_skull(heads, atlas, monkeypatch):
    seen = {}
    shell = embedded_brain._shell

    def spy(rng, scanner, depth, below):
        seen["depth"] = depth
        return shell(rng, scanner, depth, below)

    monkeypatch.setattr(embedded_brain, "_shell", spy)
    flair, lesion, _ = embedded_brain.synthesise(atlas, 0, "sub-01", "A", "normal")
    assert not lesion.any()
    depth, top = seen["depth"], np.s_[..., 45:]

    def median(low, high):
        return np.median(flair[top][(depth[top] > low) & (depth[top] < high)])

    brain, fluid, bone = median(-60, -15), median(0.5, 2.5), median(5.5, 6.5)
    scalp, air = median(11.5, 13.5), median(25, 60)
    assert fluid < 0.4 * brain
    assert bone < 0.4 * brain < scalp
    assert air < 0.1 * brain
    litres = (depth < 0).sum() * embedded_brain.SPACING**3 / 1e6
    assert 1.4 < litres < 2.3, "brain and sulci of an adult (MNI152 is large: 1.9 litres)"
    edge = np.concatenate([flair[[0, -1]].ravel(), flair[:, [0, -1]].ravel(), flair[..., -1].ravel()])
    assert np.median(edge) < 0.1 * brain, "the head lies inside the volume"


@pytest.mark.parametrize("kind", ["normal", *embedded_brain.KINDS])
def test_the_brain_is_one_solid_region_inside_the_skull(heads, kind):
    from scipy import ndimage

    flair, lesion, volume = heads[kind]
    assert volume.dtype == np.uint8
    assert set(np.unique(volume)) == {0, 1}
    brain = volume == 1
    assert ndimage.label(brain)[1] == 1
    assert not (ndimage.binary_fill_holes(brain) & ~brain).any(), "ventricles belong to it"
    assert 1.2 < brain.sum() * embedded_brain.SPACING**3 / 1e6 < 2.3, "litres"
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
    assert set(ratio) == set(embedded_brain.KINDS)
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
    for kind in embedded_brain.KINDS:
        flair, lesion, _ = heads[kind]
        changed = np.abs(flair - plain) / plain.mean()
        distance = ndimage.distance_transform_edt(lesion == 0) * embedded_brain.SPACING
        around = changed[(distance > 4) & (distance < 12) & (plain > plain.mean())].mean()
        assert changed[distance > 60].max(initial=0) < 0.1, kind
        if kind in ("tumour", "mass"):
            assert around > 0.1, f"a {kind} displaces the brain around it"
        else:
            assert around < 0.02, f"{kind} leaves the tissue beside it as it is"


def test_options_and_unknown_domain_are_refused(tmp_path):
    cls = plugins.load("domains", "embedded")
    with pytest.raises(
        AnomedError, match=r"domains\.liver_ct: source embedded has no domain 'liver_ct', it has brain_mri"
    ):
        cls("liver_ct", cls.Options(), None, tmp_path)
    with pytest.raises(ValueError, match="greater than or equal to 10"):
        cls.Options(subjects=4)
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        cls.Options(heads=12)


def test_fingerprint_is_the_content_of_the_template(tmp_path, monkeypatch):
    made = source(tmp_path)
    before = made.fingerprint()
    assert before == source(tmp_path, seed=3).fingerprint(), "the seed is a parameter, not content"
    copies = {}
    for name, path in embedded_atlas.template_files().items():
        copies[name] = tmp_path / path.name
        copies[name].write_bytes(path.read_bytes())
    monkeypatch.setattr(embedded_atlas, "template_files", lambda: copies)
    assert made.fingerprint() == before, "no path in it"
    copies["gm"].write_bytes(b"another map")
    assert made.fingerprint() != before


def test_a_missing_template_is_named(monkeypatch, tmp_path):
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(embedded_atlas, "find_spec", lambda name: spec)
    with pytest.raises(AnomedError, match=r"mni_icbm152_t1_tal_nlin_sym_09a_converted\.nii\.gz: not found in nilearn"):
        embedded_atlas.template_files()
    monkeypatch.setattr(embedded_atlas, "find_spec", lambda name: None)
    with pytest.raises(AnomedError, match="nilearn is not installed"):
        embedded_atlas.template_files()
