"""Rigid and affine registration of a head to a template, repeatable bit for bit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anomed import grids, volumes
from anomed.preprocess.spatial_steps import Register

FINEST = 2.0  # mm: grid on which the metric is computed; the transform is found to about a tenth of a millimetre on it
LEVELS = (4, 2, 1)  # times FINEST
SMOOTHING = (3.0, 1.0, 0.0)  # mm, sigma at each level
BINS = 32  # of the joint histogram
MARGIN = 10  # voxels around the brain that the registration looks at
COARSE, MARGIN_OF_TURN = 8.0, 0.05  # mm; mutual information by which another orientation must fit better
_AXES = ("left-right", "front-back", "head-foot")
SEED = 1  # of the metric's sampling: any fixed number


@dataclass(frozen=True)
class Template:
    """A stripped head on cubic voxels. data: float32, X x Y x Z, RAS. affine: voxel to mm. brain: bool, same grid."""

    data: np.ndarray
    affine: np.ndarray
    brain: np.ndarray

    @classmethod
    def load(cls, path: Path, spacing: float) -> "Template":
        """The template at `path` on voxels of `spacing` mm, around the centre of its field of view.

        Raises CaseProblem when the file is no usable volume.
        """
        volume = volumes.read(path, path.name)
        edges = grids.edges(volume.affine)
        size = np.ceil(np.array(volume.data.shape) * edges / spacing - 1e-6).astype(int)
        middle = volume.affine @ [*((np.array(volume.data.shape) - 1) / 2), 1]
        affine = np.eye(4)
        affine[:3, :3] = volume.affine[:3, :3] / edges * spacing
        affine[:3, 3] = middle[:3] - affine[:3, :3] @ ((size - 1) / 2)
        image = _smooth(volumes.to_sitk(volume.data.astype(np.float32), volume.affine), spacing)
        data = resample(image, None, affine, tuple(size), nearest=False)
        return cls(data, affine, data > 0.02 * data.max())


def register(template: Template, data: np.ndarray, affine: np.ndarray, options: Register) -> tuple[Any, float]:
    """The transform that carries a point of the template (mm) to the same place of the head, and the final metric.

    template: at FINEST. data: a head, X x Y x Z RAS, 0 outside the brain. Returns a SimpleITK affine transform (LPS mm)
    and the Mattes mutual information, negative, the lower the better. Mattes et al., IEEE TMI 2003, doi
    10.1109/TMI.2003.809072. One ITK thread: with two, parameters move in the third digit from run to run.

    Raises RuntimeError (of SimpleITK) when the images stop overlapping.
    """
    import SimpleITK as sitk

    fixed = volumes.to_sitk(template.data, template.affine)
    data, affine = _cropped(data.astype(np.float32), affine)
    moving = _smooth(volumes.to_sitk(data, affine), FINEST)

    def run(transform: Any) -> float:
        method = _method(template, 3, transform)
        method.SetMetricSamplingStrategy(method.REGULAR)
        shares = [min(1.0, options.sampling * level**3) for level in LEVELS]
        method.SetMetricSamplingPercentagePerLevel(shares, SEED)
        method.SetShrinkFactorsPerLevel(LEVELS)
        method.SetSmoothingSigmasPerLevel(SMOOTHING)
        method.SmoothingSigmasAreSpecifiedInPhysicalUnitsOn()
        method.SetOptimizerAsRegularStepGradientDescent(1.0, 1e-3, options.iterations, 0.6, 1e-6)
        method.Execute(fixed, moving)
        return float(method.GetMetricValue())

    rigid = _centred(fixed, moving)
    metric = run(rigid)
    full = sitk.AffineTransform(3)
    full.SetCenter(rigid.GetCenter())
    full.SetMatrix(rigid.GetMatrix())
    full.SetTranslation(rigid.GetTranslation())
    return full, metric if options.transform == "rigid" else run(full)


def turned(template: Template, data: np.ndarray, affine: np.ndarray) -> str:
    """How a head must be turned to fit the template clearly better than as its header places it; empty if it need not.

    template: at COARSE. Rigid registrations on a coarse grid start from the header's orientation and from nine others,
    by quarter turns about each axis. A head whose header names other axes than its voxels have is told by this, on any
    contrast (14 heads, T1, T1 with contrast and FLAIR: the right start leads by 0.11 to 0.6, against MARGIN_OF_TURN);
    overlap is blind to it.
    """
    import SimpleITK as sitk

    fixed = volumes.to_sitk(template.data, template.affine)
    data, affine = _cropped(data.astype(np.float32), affine)
    edges = grids.edges(affine)
    coarse = affine.copy()
    coarse[:3, :3] *= COARSE / edges
    shape = tuple(int(size) for size in np.ceil(np.array(data.shape) * edges / COARSE) + 1)
    moving = volumes.to_sitk(
        resample(_smooth(volumes.to_sitk(data, affine), COARSE), None, coarse, shape, nearest=False), coarse
    )
    start = _centred(fixed, moving)
    found = {}
    for axis, degrees in (("", 0), *((axis, degrees) for axis in _AXES for degrees in (90, 180, 270))):
        transform = sitk.Euler3DTransform(start)
        transform.SetRotation(*(np.radians(degrees) * (axis == other) for other in _AXES))
        method = _method(template, 1, transform)
        method.SetOptimizerAsRegularStepGradientDescent(2.0, 0.05, 30, 0.6, 1e-6)
        try:
            method.Execute(fixed, moving)
        except RuntimeError:  # of a start from which the images stop overlapping
            continue
        found[axis, degrees] = float(method.GetMetricValue())
    best = min(found, key=lambda key: found[key], default=("", 0))
    if best[1] == 0 or found[best] > found.get(("", 0), 0) - MARGIN_OF_TURN:
        return ""
    return f"{best[1]} degrees about the {best[0]} axis"


def _method(template: Template, margin: int, transform: Any) -> Any:
    """What all registrations share: mutual information within `margin` voxels of the template's brain, one thread;
    `transform` is the start, and is moved."""
    import SimpleITK as sitk

    method = sitk.ImageRegistrationMethod()
    method.SetNumberOfThreads(1)
    method.SetMetricAsMattesMutualInformation(BINS)
    brain = volumes.to_sitk(template.brain.astype(np.uint8), template.affine)
    method.SetMetricFixedMask(sitk.BinaryDilate(brain, [margin] * 3))
    method.SetInterpolator(sitk.sitkLinear)
    method.SetOptimizerScalesFromPhysicalShift()
    method.SetInitialTransform(transform, True)
    return method


def matrix(transform: Any) -> np.ndarray:
    """An affine transform as 4 x 4 in RAS mm: point of the template to point of the head."""
    linear = np.reshape(transform.GetMatrix(), (3, 3))
    centre = np.array(transform.GetCenter())
    lps = np.eye(4)
    lps[:3, :3] = linear
    lps[:3, 3] = np.array(transform.GetTranslation()) + centre - linear @ centre
    flip = np.diag([-1.0, -1.0, 1.0, 1.0])
    return flip @ lps @ flip


def resample(image: Any, transform: Any, affine: np.ndarray, shape: tuple[int, ...], nearest: bool) -> np.ndarray:
    """A SimpleITK image on another RAS grid: X x Y x Z of its own type, linear or nearest neighbour, 0 outside."""
    import SimpleITK as sitk

    grid = volumes.to_sitk(np.zeros(shape, np.uint8), affine)
    filter_ = sitk.ResampleImageFilter()
    filter_.SetNumberOfThreads(1)
    filter_.SetReferenceImage(grid)
    filter_.SetInterpolator(sitk.sitkNearestNeighbor if nearest else sitk.sitkLinear)
    filter_.SetOutputPixelType(image.GetPixelID())
    if transform is not None:
        filter_.SetTransform(transform)
    return volumes.from_sitk(filter_.Execute(image))[0]


def _centred(fixed: Any, moving: Any) -> Any:
    """The rigid transform that lays one centre of gravity onto the other."""
    import SimpleITK as sitk

    moments = sitk.CenteredTransformInitializerFilter.MOMENTS
    return sitk.Euler3DTransform(sitk.CenteredTransformInitializer(fixed, moving, sitk.Euler3DTransform(), moments))


def _cropped(data: np.ndarray, affine: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The box of what differs from 0, with a margin that the blurring fades into, and its affine: a third of the time
    is saved, and the result stays the same to some hundredths of a millimetre."""
    inside = data != 0
    box = []
    for axis in range(3):
        found = np.flatnonzero(inside.any(tuple(other for other in range(3) if other != axis)))
        box.append(slice(max(0, found[0] - MARGIN), found[-1] + 1 + MARGIN) if len(found) else slice(None))
    moved = affine.copy()
    moved[:3, 3] = (affine @ [*(part.start or 0 for part in box), 1])[:3]
    return data[tuple(box)], moved


def _smooth(image: Any, spacing: float) -> Any:
    """Blur along the axes that are finer than `spacing`, so that sampling at that step sees every voxel."""
    import SimpleITK as sitk

    variances = [max(0.0, (spacing**2 - edge**2) / 12) for edge in image.GetSpacing()]  # of a box of that width
    if not any(variances):
        return image
    return sitk.DiscreteGaussian(image, variances, 32, 0.01, True)
