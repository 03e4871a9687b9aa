"""The uint16 coding of anomaly maps (contract 3): it keeps the order of float32 scores whatever their scale."""

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from anomed.errors import AnomedError

COORDINATES = ("asinh", "bits", "below")
TOP = 65535  # the highest code
SAMPLE = 1_000_000  # scores that the choice of the coordinate looks at, at most
_LARGEST = np.finfo(np.float32).max
LOW = 0.001  # quantile of the coordinate that becomes code 0
COMMON = 0.01  # share of the sample from which on its commonest value is a background
SHARES = (1.0, 0.05, 0.005)  # parts of the sample, from the top, whose excess ties are compared


@dataclass(frozen=True)
class Codec:
    """code = round(65535 * (t - lo) / (hi - lo)), held to 0...65535, with t one of three coordinates of the score x:

    asinh: asinh((x - median) / iqr). bits: the bits of float32 x as an integer of the same order. below: those bits
    of x - maximum. Constants are float64, found by `fit`. `lo == hi` means that all scores are equal: code 0.
    background: one value that very many scores have, or None. It has a code to itself, for which the formula gives
    up one code on either side: a lesion pixel that shared it would tie with the whole background.
    excess_ties: what the choice was made by, see `fit`.
    """

    coordinate: str
    lo: float
    hi: float
    median: float
    iqr: float
    maximum: float
    background: float | None
    excess_ties: float

    @classmethod
    def fit(cls, sample: np.ndarray, minimum: float, maximum: float) -> "Codec":
        """Choose coordinate and constants without labels.

        sample: float32 scores, any shape, at least one (see `stride`). minimum, maximum: of all scores of the run.
        lo is the 0.1 % quantile of t in the sample (the minimum where that quantile is the maximum), hi the maximum's
        t. Chosen is what has the fewest excess ties: sum p^2 over codes minus sum p^2 over float32 values (p the share
        of one value), the worst of all scores, the top 5 % and the top 0.5 %; the first on equality. asinh is tried
        with the median and inter-quartile range (above 0) of all scores and of those off the commonest value: a
        constant background widens the range or brings it to 0. Raises AnomedError on a NaN or an infinity, and on a
        range beyond float32.
        """
        x = np.sort(np.asarray(sample, np.float32), axis=None)
        if not (np.isfinite(x).all() and np.isfinite(minimum) and np.isfinite(maximum)):
            raise AnomedError("anomaly maps hold NaN or infinity; every score must be finite")
        if float(maximum) - float(minimum) > float(np.finfo(np.float32).max):
            raise AnomedError(f"anomaly maps span {minimum:g} to {maximum:g}, a range that float32 cannot hold")
        ends = np.array([minimum, maximum], np.float32)
        counts = np.searchsorted(x, x, "right") - np.searchsorted(x, x)
        commonest = x[np.argmax(counts)]
        background = float(commonest) if counts.max() >= COMMON * x.size else None
        spreads = dict.fromkeys(_spread(part) for part in (x, x[x != commonest]))
        kinds = [("asinh", *spread) for spread in spreads if spread[1] > 0] + [("bits", 0.0, 0.0), ("below", 0.0, 0.0)]
        blanks = [cls(kind, 0.0, 0.0, median, iqr, float(maximum), background, 0.0) for kind, median, iqr in kinds]
        heads = [x.size - max(1, round(share * x.size)) for share in SHARES]
        ties = [_ties(x[head:]) for head in heads]
        candidates = []
        for blank in blanks:
            least, hi = (float(t) for t in blank._coordinate(ends))
            lo = float(blank._coordinate(x[[int(LOW * (x.size - 1))]])[0])
            codec = replace(blank, lo=least if lo >= hi else lo, hi=hi)
            codes = codec.encode(x)
            excess = max(_ties(codes[head:]) - known for head, known in zip(heads, ties, strict=True))
            candidates.append(replace(codec, excess_ties=excess))
        return min(candidates, key=lambda codec: codec.excess_ties)

    def encode(self, scores: npt.ArrayLike) -> np.ndarray:
        """Finite float32 scores of any shape to uint16 codes of that shape; monotone."""
        x = np.asarray(scores, np.float32)
        if self.hi <= self.lo:
            return np.zeros(x.shape, np.uint16)
        steps = self._steps(x)
        if self.background is not None:
            below, above = self._gaps
            steps += below * (x >= self.background) + above * (x > self.background)
        return steps.astype(np.uint16)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """uint16 codes of any shape to float32 scores of that shape; `encode` gives every code that occurs back."""
        return self._values[codes]

    def to_dict(self) -> dict[str, Any]:
        """The constants for the run card."""
        return asdict(self)

    @classmethod
    def from_dict(cls, constants: dict[str, Any]) -> "Codec":
        """What `to_dict` gave. Raises AnomedError when keys are missing, unknown or of the wrong kind."""
        try:
            codec = cls(**constants)
            if codec.coordinate in COORDINATES and np.isfinite([codec.lo, codec.hi, codec.median, codec.maximum]).all():
                return codec
        except TypeError:
            pass
        raise AnomedError(f"found the map coding {constants!r}, expected {list(cls.__dataclass_fields__)} as written")

    @cached_property
    def _values(self) -> np.ndarray:
        """The float32 score of each of the 65,536 codes."""
        codes = steps = np.arange(TOP + 1)
        if self.background is not None and self.lo < self.hi:
            own = int(self.encode(self.background))
            below, above = self._gaps
            steps = codes - below * (codes >= own) - above * (codes > own)
        x = self._score(self.lo + steps * (self.hi - self.lo) / (TOP - sum(self._gaps)))
        if self.background is not None and self.lo < self.hi:
            x = np.where(codes < own, np.minimum(x, np.nextafter(np.float32(self.background), np.float32(-np.inf))), x)
            x = np.where(codes > own, np.maximum(x, np.nextafter(np.float32(self.background), np.float32(np.inf))), x)
            x[own] = self.background
        # Where float32 is coarser than the codes, rounding may leave the code's interval: one step leads back.
        aside = np.nextafter(x, np.where(self.encode(x) > codes, -_LARGEST, _LARGEST))
        return np.where((self.encode(x) != codes) & (self.encode(aside) == codes), aside, x)

    @cached_property
    def bounds(self) -> np.ndarray:
        """The lowest float32 score of each code 1 to 65,535, infinity where no score has it or a higher one: ascending,
        so that the code of a score is the number of bounds at or below it."""
        wanted = np.arange(1, TOP + 1)
        first, last = _key(np.array([-_LARGEST, _LARGEST], np.float32)).astype(np.int64)
        low, high = np.full(TOP, first), np.full(TOP, last + 1)  # last + 1: no score has it
        while (low < high).any():
            middle = (low + high) // 2
            reached = self.encode(_unkey(middle)) >= wanted
            low, high = np.where(reached, low, middle + 1), np.where(reached, middle, high)
        return np.where(low > last, np.float32(np.inf), _unkey(np.minimum(low, last)))

    @property
    def _gaps(self) -> tuple[int, int]:
        """Codes given up below and above the background; none where no score lies on that side."""
        if self.background is None:
            return 0, 0
        t = float(self._coordinate(np.asarray(self.background, np.float32)))
        return int(t > self.lo), int(t < self.hi)

    def _steps(self, x: np.ndarray) -> np.ndarray:
        """The formula, rounded and held to its range, before room is made for the background: float64."""
        t, top = self._coordinate(x), TOP - sum(self._gaps)
        t -= self.lo
        t *= top
        t /= self.hi - self.lo
        return np.clip(np.rint(t, out=t), 0, top, out=t)

    def _coordinate(self, x: np.ndarray) -> np.ndarray:
        if self.coordinate == "asinh":
            t = x.astype(np.float64)
            t -= self.median
            t /= self.iqr
            return np.arcsinh(t, out=t)
        if self.coordinate == "below":
            return _key((x.astype(np.float64) - self.maximum).astype(np.float32))
        return _key(x)

    def _score(self, t: np.ndarray) -> np.ndarray:
        if self.coordinate == "asinh":
            return (self.median + self.iqr * np.sinh(t)).astype(np.float32)
        x = _unkey(np.rint(t))
        if self.coordinate == "below":
            return (self.maximum + x.astype(np.float64)).astype(np.float32)
        return x + np.float32(0)


def stride(total: int, factor: int, cap: int = SAMPLE) -> int:
    """The step that takes at most `cap` of `total` pixels and, sharing no divisor with `factor` (pixels of a map, or a
    product of widths), does not walk down a few columns only."""
    step = max(1, -(-total // cap))
    while math.gcd(step, factor) != 1:
        step += 1
    return step


def _key(x: np.ndarray) -> np.ndarray:
    """float32 to the integers 0...2^32 - 1 of the same order, as float64; -0 counts as 0."""
    bits = (x + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.float64)


def _unkey(keys: np.ndarray) -> np.ndarray:
    """The float32 of each key, which `_key` gave."""
    key = keys.astype(np.uint32)
    return np.where(key >> 31, key ^ np.uint32(1 << 31), ~key).view(np.float32)


def _spread(ordered: np.ndarray) -> tuple[float, float]:
    """Median and inter-quartile range; (0, 0) of nothing."""
    low, median, high = np.quantile(ordered.astype(np.float64), (0.25, 0.5, 0.75)) if ordered.size else (0.0, 0.0, 0.0)
    return float(median), float(high - low)


def _ties(ordered: np.ndarray) -> float:
    """Sum of squared shares of the distinct values of a sorted array: the chance that two draws tie."""
    ends = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]), ordered.size - 1)
    shares = np.diff(ends, prepend=-1) / ordered.size
    return float(np.sum(shares * shares))
