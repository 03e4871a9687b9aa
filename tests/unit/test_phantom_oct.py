"""The embedded OCT domains: deterministic, split by eye, labelled by their masks, and not told apart by brightness."""

import dataclasses

import numpy as np
import pytest

from anomed.phantoms import retina
from anomed.phantoms.oct import DISEASES, OPTICS, SCANS, SUBJECTS, anatomy, cohort, paint
from anomed.phantoms.picture import generator

DOMAINS = sorted(SUBJECTS)
KINDS = [(domain, kind) for domain in DOMAINS for kind in DISEASES[domain]]


def of_kind(domain, kind):
    return [picture for picture in cohort(domain, SUBJECTS[domain]) if picture.kind == kind]


def healthy(picture):
    """The same scan of the same eye without its disease: the name of the image alone decides everything else."""
    return picture._replace(kind="normal")


def auroc(scores, labels):
    scores, labels = np.asarray(scores), np.asarray(labels, bool)
    pairs = scores[labels][:, None] - scores[~labels]
    return float(((pairs > 0) + 0.5 * (pairs == 0)).mean())


@pytest.fixture(scope="module")
def test_images():
    """Every test image of seed 0, by domain."""
    found = {}
    for domain in DOMAINS:
        pictures = [picture for picture in cohort(domain, SUBJECTS[domain]) if picture.split == "test"]
        found[domain] = [(picture, paint(domain, 0, picture)) for picture in pictures]
    return found


@pytest.mark.parametrize("domain", DOMAINS)
def test_default_cohort_has_what_every_split_needs(domain):
    pictures = cohort(domain, SUBJECTS[domain])
    assert 90 <= len(pictures) <= 110
    assert len({picture.image_id for picture in pictures}) == len(pictures)
    splits: dict[str, set[str]] = {}
    for picture in pictures:
        splits.setdefault(picture.subject_id, set()).add(picture.split)
        folder = "good" if picture.kind == "normal" else "Ungood"
        assert picture.image_id.startswith(f"{picture.split}/{folder}/{picture.subject_id}_")
    assert all(len(found) == 1 for found in splits.values())
    kinds = {split: [p.kind for p in pictures if p.split == split] for split in ("train", "valid", "test")}
    assert set(kinds["train"]) == {"normal"}
    assert set(kinds["test"]) == {"normal", *DISEASES[domain]}
    assert "normal" in kinds["valid"]
    assert len(set(kinds["valid"])) > 1
    assert 0.45 <= len(kinds["train"]) / len(pictures) <= 0.55
    assert 0.1 <= len(kinds["valid"]) / len(pictures) <= 0.125
    assert 0.4 <= kinds["test"].count("normal") / len(kinds["test"]) <= 0.6


@pytest.mark.parametrize("domain", DOMAINS)
def test_ten_eyes_fill_every_split_and_more_eyes_change_none(domain):
    small = cohort(domain, 10)
    assert small == cohort(domain, 60)[: len(small)]
    assert {(p.split, p.kind == "normal") for p in small} == {
        ("train", True), ("valid", True), ("valid", False), ("test", True), ("test", False)
    }  # fmt: skip
    assert {p.kind for p in small if p.split == "test"} == {"normal", *DISEASES[domain]}


@pytest.mark.parametrize("domain", DOMAINS)
def test_an_image_is_the_same_in_any_order_and_another_with_another_seed_eye_or_scan(domain):
    pictures = cohort(domain, 10)[SCANS[domain] :][: SCANS[domain] + 1]
    forward = [paint(domain, 0, picture) for picture in pictures]
    backward = [paint(domain, 0, picture) for picture in reversed(pictures)][::-1]
    for one, two in zip(forward, backward, strict=True):
        assert one.image.tobytes() == two.image.tobytes()
        assert np.array_equal(np.array(one.mask), np.array(two.mask))
    others = [forward[1].image, forward[-1].image, paint(domain, 1, pictures[0]).image]
    assert all((other != forward[0].image).mean() > 0.5 for other in others)


@pytest.mark.parametrize("domain", DOMAINS)
def test_images_are_grey_of_the_stated_size_and_masks_tell_the_label(domain, test_images):
    for picture, painted in test_images[domain]:
        assert painted.image.dtype == np.uint8
        assert painted.image.shape == OPTICS[domain].shape
        assert np.ptp(painted.image) > 100
        if domain == "retina_oct2017":
            assert painted.mask is None
        else:
            assert painted.mask.dtype == bool
            assert painted.mask.shape == painted.image.shape
            assert painted.mask.any() == (picture.kind != "normal")


def test_masks_lie_within_the_retina_and_hold_what_is_dark_there(test_images):
    rows = np.arange(OPTICS["retina_resc"].shape[0])[:, None]
    for picture, painted in test_images["retina_resc"]:
        if picture.kind == "normal":
            continue
        section, change = anatomy("retina_resc", 0, picture)
        lines = section.lines(change)
        assert not (painted.mask & ((rows < lines.tops["rnfl"]) | (rows > lines.bruch))).any()
        around = (rows >= lines.tops["rnfl"]) & (rows < lines.bruch) & painted.mask.any(0) & ~painted.mask
        assert painted.image[painted.mask].mean() < 0.75 * painted.image[around].mean()


@pytest.mark.parametrize("kind", DISEASES["retina_resc"])
def test_fluid_is_darker_than_the_same_place_of_the_healthy_scan(kind):
    for picture in of_kind("retina_resc", kind)[:2]:
        ill, well = (paint("retina_resc", 0, one) for one in (picture, healthy(picture)))
        assert ill.mask is not None
        assert well.mask is not None
        assert not well.mask.any()
        assert ill.image[ill.mask].mean() < 0.8 * well.image[ill.mask].mean()


@pytest.mark.parametrize(("domain", "kind"), KINDS)
def test_a_disease_changes_its_surroundings_alone(domain, kind):
    """Far from the columns that it touches the healthy scan remains, to the grey level."""
    for picture in of_kind(domain, kind)[:1]:
        ill, well = (paint(domain, 0, one).image.astype(int) for one in (picture, healthy(picture)))
        _, change = anatomy(domain, 0, picture)
        touched = change.lift + change.material + change.fluid + change.swell + change.loss > 0
        for spot in change.spots:
            touched[max(0, int(spot.column - 6 * spot.width)) : int(spot.column + 6 * spot.width) + 2] = True
        reach = round(800 / OPTICS[domain].lateral)
        far = ~np.convolve(touched, np.ones(2 * reach + 1), "same").astype(bool)
        change_of_level = np.abs(ill - well)
        assert touched.any()
        assert (change_of_level[:, touched] > 25).sum() > 40
        assert not far.any() or change_of_level[:, far].mean() < 0.05


def test_drusen_and_neovascular_tissue_fill_the_space_below_the_rpe_with_grey():
    for kind in ("DRUSEN", "CNV"):
        for picture in of_kind("retina_oct2017", kind)[:2]:
            section, change = anatomy("retina_oct2017", 0, picture)
            tissue, mask = retina.render(generator(0, "any"), section, change)
            rows = np.arange(len(tissue))[:, None]
            lines = section.lines(change)
            inside = mask & (rows >= lines.filling + 1) & (rows < lines.bruch - 1)
            assert inside.any()
            assert abs(np.median(tissue[inside]) - change.filling) < 0.12


@pytest.mark.parametrize(("domain", "kind"), [("retina_resc", "cystoid"), ("retina_oct2017", "DME")])
def test_cysts_are_dark_and_exudates_bright_in_the_swollen_retina(domain, kind):
    shown = set()
    for picture in of_kind(domain, kind):
        section, change = anatomy(domain, 0, picture)
        bare = dataclasses.replace(change, spots=[])
        (tissue, mask), (swollen, fluid) = (retina.render(generator(0, "any"), section, one) for one in (change, bare))
        cysts, exudates = mask & ~fluid, tissue > swollen + 0.1
        assert tissue[cysts].mean() < 0.7 * swollen[cysts].mean()
        shown |= {"cysts"} if cysts.any() else set()
        shown |= {"exudates"} if exudates.any() else set()
    assert shown == ({"cysts", "exudates"} if kind == "DME" else {"cysts"})


def test_layers_keep_their_order_whatever_the_disease():
    for domain, kind in KINDS:
        for picture in of_kind(domain, kind)[:3]:
            section, change = anatomy(domain, 0, picture)
            lines = section.lines(change)
            stack = np.stack([*lines.tops.values(), *lines[1:]])
            assert (np.diff(stack, axis=0) >= 0).all(), (domain, kind)
            assert stack.min() >= 0
            assert stack.max() < OPTICS[domain].shape[0]


def test_white_corners_are_as_wide_in_both_classes_and_only_where_scans_are_turned(test_images):
    share: dict[bool, list[float]] = {True: [], False: []}
    for picture, painted in test_images["retina_oct2017"]:
        share[picture.kind == "normal"].append((painted.image == 255).mean())
    assert min(len(found) for found in share.values()) >= 9
    wide = [np.mean(np.array(found) > 0.01) for found in share.values()]
    assert all(0.2 < found < 0.9 for found in wide)
    assert abs(wide[0] - wide[1]) < 0.35
    assert all((painted.image == 255).mean() < 0.02 for _, painted in test_images["retina_resc"])


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("statistic", [np.mean, np.min, *(lambda x, q=q: np.percentile(x, q) for q in (50, 95, 99))])
def test_no_simple_statistic_of_grey_levels_tells_the_classes_apart(domain, statistic, test_images):
    labels = [picture.kind != "normal" for picture, _ in test_images[domain]]
    assert 0.35 <= auroc([statistic(painted.image) for _, painted in test_images[domain]], labels) <= 0.65


def test_a_swollen_retina_is_thicker():
    section, change = anatomy("retina_resc", 0, of_kind("retina_resc", "cystoid")[0])
    ill, well = (section.lines(one) for one in (change, retina.Change.none(len(change.swell))))
    at = int(change.swell.argmax())
    assert (ill.bruch - ill.tops["rnfl"])[at] > 1.05 * (well.bruch - well.tops["rnfl"])[at]
