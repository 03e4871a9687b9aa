"""The spatial steps of `head` in params.yaml as one would write them down with the libraries: a loop over heads."""

import warnings
from pathlib import Path
from typing import Any


def loop(root: str, out: str, template: str) -> dict[str, Any]:
    """`<root>/<head>_flair.nii.gz`, and the lesion where there is one, into files in `out`: brain and mask on the
    head's own grid, image, organ and label on the template's at 2 mm, the transform.

    The settings are those of anomed, written out. Files lie between the steps, and everything is loaded for each head;
    nothing is checked, hashed or drawn. One thread.
    """
    import SimpleITK as sitk
    from deepbet import run_bet

    sitk.ProcessObject.SetGlobalDefaultNumberOfThreads(1)
    for flair in sorted(Path(root).glob("*_flair.nii.gz")):
        head = flair.name.removesuffix("_flair.nii.gz")
        paths = {name: f"{out}/{head}_{name}.nii.gz" for name in ("brain", "mask", "image", "organ", "label")}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it loads its networks by a deprecated function
            run_bet([str(flair)], [paths["brain"]], [paths["mask"]], no_gpu=True)
        image = sitk.ReadImage(paths["brain"], sitk.sitkFloat32)
        organ = sitk.ReadImage(paths["mask"], sitk.sitkUInt8)

        n4 = sitk.N4BiasFieldCorrectionImageFilter()
        n4.SetMaximumNumberOfIterations([40, 30, 20])
        n4.Execute(sitk.Shrink(image, [3, 3, 3]), sitk.Shrink(organ, [3, 3, 3]))
        image = sitk.Cast(image / sitk.Exp(n4.GetLogBiasFieldAsImage(image)), sitk.sitkFloat32)

        full = sitk.ReadImage(template, sitk.sitkFloat32)  # 1 mm
        fixed = sitk.Resample(
            sitk.SmoothingRecursiveGaussian(full, 0.5), [(count + 1) // 2 for count in full.GetSize()],
            sitk.Transform(), sitk.sitkLinear, full.GetOrigin(), [2, 2, 2], full.GetDirection(),
        )  # fmt: skip
        around = sitk.BinaryDilate(fixed > 0.02 * float(sitk.GetArrayViewFromImage(fixed).max()), [3, 3, 3])
        rigid = sitk.Euler3DTransform(
            sitk.CenteredTransformInitializer(
                fixed, image, sitk.Euler3DTransform(), sitk.CenteredTransformInitializerFilter.MOMENTS
            )
        )
        _register(fixed, around, image, rigid)
        affine = sitk.AffineTransform(3)
        affine.SetCenter(rigid.GetCenter())
        affine.SetMatrix(rigid.GetMatrix())
        affine.SetTranslation(rigid.GetTranslation())
        _register(fixed, around, image, affine)

        sitk.WriteImage(sitk.Resample(image, fixed, affine, sitk.sitkLinear), paths["image"])
        sitk.WriteImage(sitk.Resample(organ, fixed, affine, sitk.sitkNearestNeighbor), paths["organ"])
        lesion = flair.with_name(f"{head}_lesion.nii.gz")
        if lesion.exists():
            label = sitk.ReadImage(str(lesion), sitk.sitkUInt8)
            sitk.WriteImage(sitk.Resample(label, fixed, affine, sitk.sitkNearestNeighbor), paths["label"])
        sitk.WriteTransform(affine, f"{out}/{head}.tfm")
    return {}


def _register(fixed: Any, mask: Any, moving: Any, transform: Any) -> None:
    """Move `transform` to where the images share most information."""
    import SimpleITK as sitk

    method = sitk.ImageRegistrationMethod()
    method.SetMetricAsMattesMutualInformation(32)
    method.SetMetricFixedMask(mask)
    method.SetMetricSamplingStrategy(method.REGULAR)
    method.SetMetricSamplingPercentagePerLevel([1.0, 1.0, 0.2], 1)
    method.SetInterpolator(sitk.sitkLinear)
    method.SetShrinkFactorsPerLevel([4, 2, 1])
    method.SetSmoothingSigmasPerLevel([3.0, 1.0, 0.0])
    method.SmoothingSigmasAreSpecifiedInPhysicalUnitsOn()
    method.SetOptimizerAsRegularStepGradientDescent(1.0, 1e-3, 100, 0.6, 1e-6)
    method.SetOptimizerScalesFromPhysicalShift()
    method.SetInitialTransform(transform, True)
    method.Execute(fixed, moving)
