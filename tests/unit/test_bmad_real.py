"""The bmad source on real images in BMAD's layout, as released and with the faults of the real releases."""

import collections
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from anomed.domains import bmad_layout
from anomed.domains.bmad import Bmad
from anomed.manifest import Case

SETS = sorted(bmad_layout.SETS)
FOLDERS = {
    "brain_mri": "Brain",
    "liver_ct": "Liver",
    "retina_resc": "Retina_RESC",
    "retina_oct2017": "Retina_OCT2017",
    "chest_xray": "Chest",
    "histopathology": "Histopathology",
}


@pytest.fixture(scope="module")
def laid_out(lay_out: Callable[..., Path]) -> dict[str, Path]:
    """Both bundles: {"plain": root, "quirks": root}."""
    sets = ("brain", "liver", "resc", "oct2017", "chest", "histology")
    return {name: lay_out(*sets, quirks=name == "quirks") / "bmad" for name in ("plain", "quirks")}


def read(root: Path, domain: str) -> tuple[Bmad, dict[str, Case]]:
    bmad = Bmad(domain, Bmad.Options(), root, root)
    cases = bmad.cases()
    assert [str(problem) for problem in bmad.problems] == []
    return bmad, {case.image_id: case for case in cases}


@pytest.mark.parametrize("domain", SETS)
def test_both_variants_give_the_same_images_labels_and_masks(laid_out: dict[str, Path], domain: str) -> None:
    bmad, plain = read(laid_out["plain"], domain)
    _, quirks = read(laid_out["quirks"], domain)
    assert sorted(plain) == sorted(quirks)
    for image_id, case in plain.items():
        twin = quirks[image_id]
        facts = [(c.split, c.label, c.subject_id, c.pathology) for c in (case, twin)]
        assert facts[0] == facts[1]
        one, two = case.load(), twin.load()
        assert one.image.dtype == two.image.dtype == np.uint8
        assert one.image.ndim == (3 if bmad.colour else 2)
        assert np.abs(one.image.astype(int) - two.image).max() <= 1, image_id
        assert (one.mask is None) == (two.mask is None)
        if bmad.has_masks and case.label:
            assert one.mask is not None
            assert two.mask is not None
            assert one.mask.any()
            assert one.mask.shape == one.image.shape[:2]
            np.testing.assert_array_equal(one.mask, two.mask)
        assert (one.foreground is not None) == (two.foreground is not None) == bmad.has_foreground
        if one.foreground is not None:
            np.testing.assert_array_equal(one.foreground, two.foreground)


@pytest.mark.parametrize("variant", ["plain", "quirks"])
@pytest.mark.parametrize("domain", SETS)
def test_counts_equal_the_files_on_disk(laid_out: dict[str, Path], variant: str, domain: str) -> None:
    root = laid_out[variant] / FOLDERS[domain]
    bmad, cases = read(laid_out[variant], domain)
    on_disk: collections.Counter[tuple[str, int]] = collections.Counter()
    for path in root.rglob("*.png"):
        if path.parent.name not in ("label", "anomaly_mask"):
            split, label = path.relative_to(root).parts[:2]
            on_disk["valid" if split == "val" else split, int(label == "Ungood")] += 1
    assert collections.Counter((case.split, case.label) for case in cases.values()) == on_disk
    assert sum(on_disk.values()) > 20
    assert bmad.ignored == len(list(root.rglob("Thumbs.db")))
    assert (bmad.ignored > 0) == (variant == "quirks")


@pytest.mark.parametrize("domain", SETS)
def test_no_subject_is_in_two_splits(laid_out: dict[str, Path], domain: str) -> None:
    _, cases = read(laid_out["plain"], domain)
    splits = collections.defaultdict(set)
    for case in cases.values():
        splits[case.subject_id].add(case.split)
    assert [subject for subject, where in splits.items() if len(where) > 1] == []
    known = sum(case.subject_id != case.image_id for case in cases.values())
    if domain in ("brain_mri", "chest_xray"):
        assert known == len(cases)


def test_quirks_really_differ_on_disk(laid_out: dict[str, Path]) -> None:
    _, plain = read(laid_out["plain"], "brain_mri")
    _, quirks = read(laid_out["quirks"], "brain_mri")
    assert all(case.load().sha256 != quirks[image_id].load().sha256 for image_id, case in plain.items())


def test_the_foreground_of_brain_slices_is_the_brain(laid_out: dict[str, Path]) -> None:
    _, cases = read(laid_out["plain"], "brain_mri")
    lesions = 0
    for image_id, case in cases.items():
        pixels = case.load()
        assert pixels.foreground is not None
        assert 0.1 < pixels.foreground.mean() < 0.4, image_id
        assert not pixels.image[~pixels.foreground].any(), "all that is left out is black"
        if pixels.mask is not None:
            assert pixels.foreground[pixels.mask].all(), f"{image_id}: a lesion outside the brain"
            lesions += int(pixels.mask.any())
    assert lesions > 20


def test_the_foreground_of_liver_slices_is_the_liver(real_data: Path, laid_out: dict[str, Path]) -> None:
    _, cases = read(laid_out["plain"], "liver_ct")
    overlaps = []
    for case in cases.values():
        truth = real_data / f"liver_ct/btcv/{Path(case.source_file).stem}_liver.png"
        if truth.exists():
            organ, found = np.asarray(Image.open(truth).convert("L")) > 0, case.load().foreground
            assert found is not None
            assert found[organ].all(), f"{case.image_id}: a part of the liver is missing"
            overlaps.append(organ.sum() / found.sum())
    assert len(overlaps) > 50
    assert min(overlaps) > 0.9, "what else is in it are pockets that the liver encloses"
    assert np.mean(overlaps) > 0.99
