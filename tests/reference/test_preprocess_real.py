"""The spatial chain on real heads: the mask against a given brain, registration by recovery of a known motion, lesions."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform
from scipy import ndimage

from anomed.domains.source import Files
from anomed.preprocess import shard, spatial_steps, steps
from anomed.preprocess.registration import Template

# Colin27's brain has nearly 2 l in the space of these files, and one motion enlarges it.
DEEPBET = {"skull_strip": {"backend": "deepbet", "limits_ml": [700, 2600]}}
STRIPPED = {"skull_strip": {"backend": "none"}}
REGISTER: dict[str, Any] = {"register": {"template": "mni152", "spacing": 2}}
SPACING = 2.0  # mm
LPS = np.array([-1.0, -1.0, 1.0])  # RAS mm to ITK's world, and back


@dataclass(frozen=True)
class Done:
    """A processed scan: what its steps measured and the folder with its files."""

    facts: dict[str, Any]
    folder: Path

    def read(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        return load(self.folder / f"{name}.nii.gz")

    def to_head(self, points: np.ndarray) -> np.ndarray:
        """Points of the template (N x 3, RAS mm) in the head, by the saved transform as ITK applies it."""
        transform = sitk.ReadTransform(str(self.folder / "transform.tfm"))
        return np.array([transform.TransformPoint(point) for point in (points * LPS).tolist()]) * LPS


def load(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Voxels and affine as nibabel gives them."""
    image: Any = nib.load(path)
    return np.asarray(image.dataobj), image.affine


def process(folder: Path, image: Path, chain: list[Any], label: Path | None = None) -> Done:
    """One scan as `anomed prepare spatial` does it."""
    folder.mkdir()
    parsed = steps.parse(chain, spatial_steps.STEPS, "spatial")
    files = spatial_steps.files(parsed, "spatial")
    facts, _ = shard.process(folder.name, Files(image, label), parsed, files, folder)
    print(f"\n{folder}: " + ", ".join(f"{name} {value:.4g}" for name, value in facts.items()))
    return Done(facts, folder)


def dice(first: np.ndarray, second: np.ndarray) -> float:
    return float(2 * (first & second).sum() / (first.sum() + second.sum()))


def points(mask: np.ndarray, affine: np.ndarray) -> np.ndarray:
    """Centres of a mask's voxels: N x 3, RAS mm."""
    return np.argwhere(mask) @ affine[:3, :3].T + affine[:3, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def head(real_data: Path) -> Path:
    """Colin27, T1, 1 mm, with its skull."""
    return real_data / "preprocess_demo/colin27_t1_head.nii.gz"


@pytest.fixture(scope="module")
def colin(folder: Path, head: Path) -> Done:
    return process(folder / "colin", head, [DEEPBET, REGISTER])


def test_the_mask_of_a_head_is_the_brain_that_others_cut_out(colin: Done, real_data: Path) -> None:
    found, grid = colin.read("organ_native")
    brain, affine = load(real_data / "preprocess_demo/colin27_t1_brain.nii.gz")
    np.testing.assert_array_equal(grid, affine)
    overlap, ratio = dice(found > 0, brain > 0), (found > 0).sum() / (brain > 0).sum()
    print(f"Dice {overlap:.4f}, volume ratio {ratio:.4f}")
    assert overlap >= 0.93
    assert 0.9 < ratio < 1.2


def motion(degrees: dict[str, float], scale: list[float], shift: list[float], centre: np.ndarray) -> np.ndarray:
    """4 x 4, RAS mm: scales, then turns about the axes through `centre`, then shifts."""
    linear = np.diag(scale)
    for axis, angle in degrees.items():
        first, second = [place for place in range(3) if place != "xyz".index(axis)]
        turn = np.eye(3)
        turn[[first, second], [first, second]] = np.cos(np.radians(angle))
        turn[first, second], turn[second, first] = -np.sin(np.radians(angle)), np.sin(np.radians(angle))
        linear = turn @ linear
    moved = np.eye(4)
    moved[:3, :3] = linear
    moved[:3, 3] = centre + shift - linear @ centre
    return moved


def resampled(path: Path, head: Path, known: np.ndarray, middle: np.ndarray) -> None:
    """The moved head on a grid of its own: other voxels, other shape, axes of the file in another order."""
    data, affine = load(head)
    shape, edges = np.array([162, 214, 158]), np.array([1.5, 1.3, 1.4])
    grid = np.diag([*edges, 1.0])
    grid[:3, 3] = (known @ [*middle, 1])[:3] - edges * (shape - 1) / 2
    back = np.linalg.inv(known @ affine) @ grid
    moved = ndimage.affine_transform(data.astype(np.float32), back, output_shape=tuple(shape), order=1)
    assert moved[[0, -1]].max() == moved[:, [0, -1]].max() == moved[:, :, -1].max() == 0, "the grid cuts the head"
    stored = nib.Nifti1Image(moved.round().astype(np.uint8), grid)
    nib.save(turned(stored, "PSL"), path)


def turned(image: Any, codes: str) -> Any:
    """The same image with its axes stored in another order: voxels and affine are both other."""
    return image.as_reoriented(ornt_transform(io_orientation(image.affine), axcodes2ornt(tuple(codes))))


def header_only(path: Path, head: Path, known: np.ndarray, middle: np.ndarray) -> None:
    """The same voxels; only where they lie is other."""
    data, affine = load(head)
    nib.save(nib.Nifti1Image(data, known @ affine), path)


@pytest.mark.parametrize(
    ("move", "degrees", "scale", "shift"),
    [
        (resampled, {"x": 12, "z": 8}, [1.08, 1.05, 1.06], [20.0, -6.0, 9.0]),
        (resampled, {"y": -12, "x": -8}, [0.92, 0.95, 0.94], [-7.0, 20.0, -11.0]),
        pytest.param(header_only, {"z": -12, "y": 8}, [1.06, 1.06, 1.06], [-20.0, 5.0, 20.0], marks=pytest.mark.full),
    ],
    ids=["larger", "smaller", "header"],
)
def test_registration_recovers_a_known_motion_of_the_head(
    colin: Done,
    folder: Path,
    head: Path,
    move: Callable[[Path, Path, np.ndarray, np.ndarray], None],
    degrees: dict[str, float],
    scale: list[float],
    shift: list[float],
    request: pytest.FixtureRequest,
) -> None:
    """With P the motion, T what carries the template to the head and T' to the moved head: T' = P T, so T = P^-1 T'."""
    name = request.node.callspec.id
    data, affine = load(head)
    middle = affine[:3, :3] @ ((np.array(data.shape) - 1) / 2) + affine[:3, 3]
    known = motion(degrees, scale, shift, middle)
    path = folder / f"{name}.nii.gz"
    move(path, head, known, middle)
    moved = process(folder / f"moved_{name}", path, [DEEPBET, REGISTER])
    files = spatial_steps.files(steps.parse([REGISTER], spatial_steps.STEPS, "spatial"), "spatial")
    template = Template.load(files["template"], SPACING)
    brain = points(template.brain, template.affine)[::7]
    still, there = colin.to_head(brain), moved.to_head(brain)
    back = np.linalg.inv(known)
    apart = np.linalg.norm(there @ back[:3, :3].T + back[:3, 3] - still, axis=1)
    untouched = np.linalg.norm(there - still, axis=1)
    print(f"{name}: moved by {untouched.mean():.1f} mm, recovered to {apart.mean():.2f} mm (max {apart.max():.2f})")
    assert untouched.mean() > 20, "the motion itself must be large against the limits"
    assert apart.mean() <= 2
    assert apart.max() <= 4


def test_a_flair_head_of_thick_slices_gives_a_plausible_brain(folder: Path, real_data: Path) -> None:
    image = real_data / "brain_mri/normal_flair_torchio-fernando_raw.nii.gz"
    done = process(folder / "flair", image, [DEEPBET, "bias_field", REGISTER])
    assert 1100 < done.facts["organ_ml"] < 1700
    assert done.facts["template_dice"] >= 0.85
    for name in ("scale_min", "scale_max"):
        assert 0.85 < done.facts[name] < 1.25


@pytest.mark.parametrize("case", [pytest.param("TCGA-FG-6692", marks=pytest.mark.full), "BraTS-GLI-00001-000"])
def test_lesions_keep_their_volume_place_and_labels(folder: Path, real_data: Path, case: str) -> None:
    """The patient's left half of the lesion is labelled 4, the right half 1, as BraTS labels tissues."""
    image = folder / f"{case}.nii.gz"
    around = np.s_[40:200, 20:230, 0:150]  # the brain without the air around it, which only costs time
    nib.save(nib.load(real_data / f"brain_mri/{case}_flair_u8.nii.gz").slicer[around], image)
    truth, full = load(real_data / f"brain_mri/{case}_lesion.nii.gz")
    lesion = truth[around] > 0
    assert lesion.sum() == (truth > 0).sum()
    affine = full.copy()
    affine[:3, 3] += full[:3, :3] @ [40, 20, 0]
    centre = points(lesion, affine).mean(axis=0)
    left = np.zeros_like(lesion)
    left[lesion] = points(lesion, affine)[:, 0] < centre[0]
    labels = lesion * np.uint8(1) + left * np.uint8(3)
    nib.save(nib.Nifti1Image(labels, affine), folder / f"{case}_label.nii.gz")
    # Few iterations: the question is whether the label moves with the transform, not how well that one fits.
    brief = {"register": {**REGISTER["register"], "iterations": 20}}
    done = process(folder / case, image, [STRIPPED, brief], folder / f"{case}_label.nii.gz")

    after, grid = done.read("lesion")
    assert np.unique(after).tolist() == [0, 1, 4]
    axes = np.vstack([np.zeros(3), np.eye(3)])
    linear = (done.to_head(axes)[1:] - done.to_head(axes)[0]).T
    voxel = np.linalg.det(linear) * np.linalg.det(grid[:3, :3]) / 1000  # ml of the head in a voxel of the template
    for mask, moved in ((lesion, after > 0), (labels == 1, after == 1), (labels == 4, after == 4)):
        before = mask.sum() / 1000  # ml: voxels of 1 mm
        print(f"{case}: lesion of {before:.2f} ml before, {moved.sum() * voxel:.2f} ml after")
        assert moved.sum() * voxel == pytest.approx(before, rel=0.05)
        landed = done.to_head(points(moved, grid).mean(axis=0)[None])[0]
        apart = np.linalg.norm(landed - points(mask, affine).mean(axis=0))
        print(f"{case}: centre of gravity {apart:.3f} mm off")
        assert apart <= 1  # mm, one voxel of the scan
    assert done.facts["lesion_ml"] == pytest.approx(lesion.sum() / 1000, abs=1e-5)
    assert points(after == 4, grid)[:, 0].mean() < points(after == 1, grid)[:, 0].mean(), "left is left"
    flair, _ = done.read("image")
    brain, _ = done.read("organ")
    assert flair[after > 0].mean() > 1.3 * flair[brain > 0].mean(), "the label lies on the bright lesion"


def test_the_order_of_axes_in_a_file_changes_no_voxel(folder: Path, head: Path) -> None:
    images = []
    for codes in ("RAS", "LPS", "PIR"):
        stored = turned(nib.load(head), codes)
        assert "".join(nib.aff2axcodes(stored.affine)) == codes
        nib.save(stored, folder / f"{codes}.nii.gz")
        chain = [{"skull_strip": {"backend": "none", "limits_ml": [700, 5000]}}, {"resample": {"spacing": 2}}]
        images.append(process(folder / f"stored_{codes}", folder / f"{codes}.nii.gz", chain).read("image"))
    first, affine = images[0]
    assert first.shape == (91, 109, 91)
    assert not np.array_equal(first, first[::-1])
    for voxels, grid in images[1:]:
        same = voxels.tobytes() == first.tobytes()
        assert same
        np.testing.assert_array_equal(grid, affine)
