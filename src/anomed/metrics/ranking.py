"""Metrics of ranking: AUROC, AP, F1, sensitivity of images and pixels, AUPRO and Dice; usable alone on numpy arrays.

>>> import numpy as np
>>> image_auroc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
0.75
>>> image_f1([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1], threshold=0.3)
0.8
>>> lesion = np.zeros((8, 8), bool)
>>> lesion[2:4, 2:5] = True
>>> normal = np.zeros((8, 8), bool)
>>> pixel_metrics([lesion.astype(np.float32), np.zeros((8, 8), np.float32)], [lesion, normal])["pixel_aupro"]
1.0
"""

import math
from collections.abc import Sequence

import numpy as np

from anomed.errors import AnomedError
from anomed.mapcodes import TOP, Codec, stride
from anomed.metrics import curves
from anomed.metrics.counts import Counts, NotComputable, finite, of_images
from anomed.metrics.declare import Level, metric, metrics
from anomed.metrics.histogram import PixelHistogram, paired

__all__ = ["Counts", "NotComputable", "PixelHistogram", "metrics", "pixel_metrics"]
MANN_WHITNEY = "Hanley and McNeil 1982, Radiology 143:29-36"
STEPWISE = "scikit-learn, average_precision_score"
VAN_RIJSBERGEN = "van Rijsbergen 1979, Information Retrieval, chapter 7"
OVERLAP = "Dice 1945, Ecology 26:297-302"
FAWCETT = "Fawcett 2006, Pattern Recognition Letters 27:861-874"
PIXELS = "all pixels of all test images with pixel truth, on the native grid of the masks"


@metric(
    name="image_auroc",
    label="Image AUROC",
    level="image",
    definition="Area under the ROC curve of the raw image scores over all test images; ties count one half.",
    source=MANN_WHITNEY,
)
def image_auroc(counts: Counts) -> np.ndarray:
    """In [0, 1]; 0.5 is chance."""
    return curves.auroc(counts)


@metric(
    name="image_ap",
    label="Image AP",
    level="image",
    definition="Average precision of the abnormal class over all test images, step-wise without interpolation; equal "
    "scores cross the threshold together.",
    source=STEPWISE,
)
def image_ap(counts: Counts) -> np.ndarray:
    """In [0, 1]; chance is the share of abnormal images."""
    return curves.average_precision(counts)


@metric(
    name="image_ap_normal",
    label="Image AP (normal)",
    level="image",
    definition="Average precision of the normal class over all test images, looked for from the lowest score on, "
    "step-wise: where nearly all test images are abnormal, the abnormal class cannot tell systems apart.",
    source=STEPWISE,
)
def image_ap_normal(counts: Counts) -> np.ndarray:
    """In [0, 1]; chance is the share of normal images."""
    return curves.average_precision(curves.mirrored(counts))


@metric(
    name="image_sensitivity",
    label="Image sensitivity",
    level="image",
    definition="Share of the abnormal test images found when a share of {sensitivity_fpr} of the normal ones is called "
    "abnormal, linear between the points of the ROC curve.",
    source=FAWCETT,
)
def image_sensitivity(counts: Counts, *, sensitivity_fpr: float = 0.05) -> np.ndarray:
    """In [0, 1]; chance is sensitivity_fpr. Raises AnomedError unless 0 < sensitivity_fpr < 1."""
    return curves.sensitivity(counts, _rate("sensitivity_fpr", sensitivity_fpr, below=1))


@metric(
    name="image_f1",
    label="Image F1",
    level="image",
    definition="F1 of the abnormal class over all test images at the threshold with the best F1 on valid, the highest "
    "of equal ones.",
    source=VAN_RIJSBERGEN,
)
def image_f1(counts: Counts) -> np.ndarray:
    """In [0, 1], at the threshold in the counts. Raises NotComputable when there is none."""
    return curves.dice_at_cut(counts, _cut(counts))


@metric(
    name="image_f1_oracle",
    label="Image F1 (oracle)",
    level="image",
    definition="Best F1 of the abnormal class over all thresholds, chosen on the test images themselves: what no user "
    "can reach on purpose.",
    source=VAN_RIJSBERGEN,
)
def image_f1_oracle(counts: Counts) -> np.ndarray:
    """In [0, 1]; all called abnormal already gives 2 p / (1 + p), p the share of abnormal images."""
    return curves.dice(counts).max(axis=-1)


@metric(
    name="pixel_auroc",
    label="Pixel AUROC",
    level="pixel",
    definition=f"Area under the ROC curve over {PIXELS}; ties count one half.",
    source=MANN_WHITNEY,
)
def pixel_auroc(counts: Counts) -> np.ndarray:
    """In [0, 1]; 0.5 is chance."""
    return curves.auroc(counts)


@metric(
    name="pixel_ap",
    label="Pixel AP",
    level="pixel",
    definition=f"Average precision of the lesion pixels over {PIXELS}, step-wise without interpolation.",
    source=STEPWISE,
)
def pixel_ap(counts: Counts) -> np.ndarray:
    """In [0, 1]; chance is the share of lesion pixels."""
    return curves.average_precision(counts)


@metric(
    name="pixel_aupro",
    label="AUPRO",
    level="pixel",
    definition="Area under the mean overlap of the lesion regions (8-connected, native grid) as a function of the "
    "false positive rate over all normal pixels of all test images with pixel truth, for a rate of 0 to {aupro_limit}, "
    "linear at the limit, divided by the limit.",
    source="Bergmann et al. 2021, IJCV 129:1038-1059 (PRO), pooled over normal and abnormal images",
)
def pixel_aupro(counts: Counts, *, aupro_limit: float = 0.3) -> np.ndarray:
    """In [0, 1]: 1 for a perfect map, aupro_limit / 2 for a constant one.

    Raises AnomedError unless 0 < aupro_limit <= 1.
    """
    return curves.aupro(counts, _rate("aupro_limit", aupro_limit))


@metric(
    name="pixel_sensitivity",
    label="Pixel sensitivity",
    level="pixel",
    definition="Share of the lesion pixels found when a share of {sensitivity_fpr} of the normal ones is called "
    f"abnormal, over {PIXELS}, linear between the points of the ROC curve.",
    source=FAWCETT,
)
def pixel_sensitivity(counts: Counts, *, sensitivity_fpr: float = 0.05) -> np.ndarray:
    """In [0, 1]; chance is sensitivity_fpr. Raises AnomedError unless 0 < sensitivity_fpr < 1."""
    return curves.sensitivity(counts, _rate("sensitivity_fpr", sensitivity_fpr, below=1))


@metric(
    name="pixel_dice",
    label="Dice",
    level="pixel",
    definition=f"Dice of the lesion pixels over {PIXELS}, all pixels as one set, at the threshold with the best such "
    "Dice on valid, the highest of equal ones.",
    source=OVERLAP,
)
def pixel_dice(counts: Counts) -> np.ndarray:
    """In [0, 1], at the threshold in the counts. Raises NotComputable when there is none."""
    return curves.dice_at_cut(counts, _cut(counts))


@metric(
    name="pixel_dice_oracle",
    label="Dice (oracle)",
    level="pixel",
    definition=f"Best Dice of the lesion pixels over {PIXELS}, all pixels as one set, over all thresholds, chosen on "
    "the test images themselves: what no user can reach on purpose.",
    source=OVERLAP,
)
def pixel_dice_oracle(counts: Counts) -> np.ndarray:
    """In [0, 1]; all called abnormal already gives 2 p / (1 + p), p the share of lesion pixels."""
    return curves.dice(counts).max(axis=-1)


def pixel_metrics(
    maps: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    *,
    threshold: float | None = None,
    aupro_limit: float = 0.3,
    sensitivity_fpr: float = 0.05,
) -> dict[str, float | None]:
    """Every pixel metric of one method's maps, by name; None where it cannot be computed.

    maps: per image floats H x W, higher is more anomalous, normal images among them; taken as float32 and coded in 16
    bits as contract 3 says (`anomed.mapcodes`), or uint16 codes, taken as they are. masks: per image bool, or integers
    0 and 1, H x W, on the same grid (`anomed.images.upsample` brings a map there). threshold: score from which on a
    pixel is called abnormal, chosen on other images; without it "pixel_dice" is None. For the reason of a None, call
    that metric on a PixelHistogram.

    Raises AnomedError on any other type, on shapes that differ, on NaN or infinity, and when the coding would lose more
    than 2e-4 of AUROC or AP (on some million pixels): scores that lie so close together need other units.
    """
    maps, masks = [np.asarray(one) for one in maps], [np.asarray(one) for one in masks]
    paired(maps, masks)
    cut = None if threshold is None else min(max(math.ceil(finite("threshold", threshold)), 0), TOP + 1)
    for one in masks:
        if one.dtype.kind not in "biu" or (one.size and (one.max() > 1 or one.min() < 0)):
            raise AnomedError(f"masks: found {one.dtype} up to {one.max()}, expected bool or 0 and 1; give mask > 0")
    masks = [one.astype(bool) for one in masks]
    if all(one.dtype.kind == "f" and one.size for one in maps):
        maps = [one.astype(np.float32, copy=False) for one in maps]
        codes, codec = _coded(maps)
        if threshold is not None:
            cut = TOP + 1 if threshold > codec.maximum else int(codec.encode(np.float32(threshold)))
    else:
        codes = maps
    histogram = PixelHistogram()
    for one, mask in zip(codes, masks, strict=True):
        histogram.update(one, mask)
    if codes is not maps:
        _check(maps, codes, masks)
    options = {"aupro_limit": aupro_limit, "sensitivity_fpr": sensitivity_fpr}
    counts = histogram.counts(cut)
    return {found.name: found.evaluate(counts, options)[0] for found in metrics("pixel")}


def points(counts: Counts, level: Level) -> dict[str, np.ndarray]:
    """Curves of one set of counts, float32 2 x K with K <= 513: `<level>_roc`, `<level>_pr` and, where regions are
    known, `<level>_pro`, which runs on beyond the limit of AUPRO; {} for one class."""
    try:
        counts.require()
    except NotComputable:
        return {}
    full = {"roc": curves.roc(counts), "pr": curves.precision_recall(counts)}
    if counts.overlap is not None:
        full["pro"] = curves.pro(counts)
    return {f"{level}_{name}": curves.thin(curve) for name, curve in full.items()}


def _rate(name: str, value: float, below: float = math.inf) -> float:
    if not 0 < value <= 1 or value >= below:
        end = "below 1" if below == 1 else "at most 1"
        raise AnomedError(f"metrics.{name}: found {value}, expected a number above 0 and {end}")
    return value


def _cut(counts: Counts) -> int:
    if counts.cut is None:
        raise NotComputable(counts.uncut)
    return counts.cut


def _sample(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Some million pixels at most, the same ones of arrays of equal shapes."""
    step = stride(sum(one.size for one in arrays), math.prod({one.size for one in arrays}))
    return np.concatenate([one.ravel()[::step] for one in arrays])


def _coded(maps: Sequence[np.ndarray]) -> tuple[list[np.ndarray], Codec]:
    codec = Codec.fit(_sample(maps), min(float(one.min()) for one in maps), max(float(one.max()) for one in maps))
    return [codec.encode(one) for one in maps], codec


def _check(maps: Sequence[np.ndarray], codes: Sequence[np.ndarray], masks: Sequence[np.ndarray]) -> None:
    """Raises AnomedError when the codes lose too much of the order of the scores."""
    before, after, labels = map(_sample, (maps, codes, masks))
    if labels.all() or not labels.any():
        return
    lost = curves.loss(of_images(before, labels), of_images(after, labels))
    if max(lost) > curves.LOSS:
        raise AnomedError(
            f"coded in 16 bits the maps lose {lost[0]:.1e} of pixel AUROC and {lost[1]:.1e} of AP, expected at most "
            f"{curves.LOSS}: too many scores lie too close together; give logits, log-likelihoods or distances"
        )
