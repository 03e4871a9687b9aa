"""The steps of `preprocess.<chain>.intensity` in params.yaml: their options and the orders that make sense."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Self

from pydantic import AfterValidator, Field, FiniteFloat, model_validator

from anomed.errors import AnomedError
from anomed.settings import Settings


def _increasing(values: tuple[float, ...]) -> tuple[float, ...]:
    if len(values) < 2 or any(low >= high for low, high in itertools.pairwise(values)):
        raise ValueError("expected at least two numbers, each above the one before")
    return values


# YAML has lists and no tuples: only the container is taken leniently, its numbers are not.
Range = Annotated[tuple[FiniteFloat, FiniteFloat], Field(strict=False), AfterValidator(_increasing)]
Percent = Annotated[FiniteFloat, Field(ge=0, le=100)]
Grey = Annotated[FiniteFloat, Field(ge=0, le=255)]


class Window(Settings):
    """A fixed range of values to 0..255, clipped beyond it; for CT, whose values (HU) mean the same in every volume."""

    range: Range


class ZScore(Settings):
    """Mean and standard deviation of the organ's voxels; `window`, in standard deviations from the mean, to 0..255."""

    window: Range = (-3, 3)


class Percentile(Settings):
    """Two percentiles of the organ's voxels to 0 and 255; what lies beyond them is clipped."""

    low: Percent = 0.5
    high: Percent = 99.9

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError("expected low below high")
        return self


class Nyul(Settings):
    """Landmarks of the organ's histogram to those of a standard one, learned from the train volumes.

    Nyul & Udupa, Magn. Reson. Med. 42 (1999) and Nyul et al., IEEE TMI 19 (2000). landmarks: percentiles of the
    organ's voxels. scale: grey levels of the outermost two. It ends below 255 because lesions may be brighter than
    every normal voxel: the outer segments go on as straight lines, so lesions may lie above the scale's end, and only
    what leaves 0..255 is clipped. (Lesion voxels at 255 in four FLAIR volumes of gliomas: none; percentile 1 to 99: 13
    to 45 %; z_score at 3: 0 to 26 %.) A lesion larger than the share of voxels above a landmark moves that landmark.
    """

    landmarks: Annotated[tuple[Percent, ...], Field(strict=False), AfterValidator(_increasing)] = (
        1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 99,
    )  # fmt: skip
    scale: Annotated[tuple[Grey, Grey], Field(strict=False), AfterValidator(_increasing)] = (10, 200)


class SliceMinMax(Settings):
    """Minimum and maximum of each whole slice to 0 and 255, as BMAD's released sets were made.

    Brightness then depends on what else the slice shows: a bright lesion darkens the rest.
    """


STEPS: Mapping[str, type[Settings]] = {
    "window": Window,
    "z_score": ZScore,
    "percentile": Percentile,
    "nyul": Nyul,
    "slice_min_max": SliceMinMax,
}


def check_order(names: Sequence[str], where: str) -> None:
    """Raises AnomedError unless `names` (keys of STEPS) is `window`, one other step, or `window` and then one other.

    Each of the others scales to 0..255 by the volume or slice itself, so a second one would only undo the first.
    """
    others = [name for name in STEPS if name != "window"]
    rest = names[1:] if names[:1] == ["window"] else names
    if not names or len(rest) > 1 or "window" in rest:
        raise AnomedError(
            f"{where}: found {', '.join(names) or 'no step'}, expected window, one of {', '.join(others)}, "
            f"or window followed by one of them"
        )
