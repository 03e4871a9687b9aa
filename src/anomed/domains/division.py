"""Divide subjects over train, valid and test: always in the same way, never a subject into two."""

import math
from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field, model_validator

from anomed import records
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import SPLITS
from anomed.settings import Settings


class Shares(Settings):
    """Shares of the subjects in each split, together 1."""

    train: float = Field(default=0.6, ge=0)
    valid: float = Field(default=0.1, ge=0)
    test: float = Field(default=0.3, gt=0)

    @model_validator(mode="after")
    def _whole(self) -> "Shares":
        if not math.isclose(self.train + self.valid + self.test, 1, abs_tol=1e-6):
            raise ValueError("train, valid and test must add up to 1")
        return self


def divide(
    normal: Iterable[str], abnormal: Iterable[str], shares: Shares, seed: int, where: str, advice: str,
    problems: Sequence[CaseProblem] = (),
) -> dict[str, str]:  # fmt: skip
    """Subject -> split. Normal subjects go to all splits, abnormal ones to valid and test in the ratio of those two.

    where: the key in params.yaml, for messages; advice: what else a user can do; problems: what keeps other subjects
    out. Raises AnomedError when a split with a share would stay without a kind it may hold.
    """
    kinds = {"normal": (set(normal), SPLITS), "abnormal": (set(abnormal), SPLITS[1:])}
    divided: dict[str, str] = {}
    for kind, (names, splits) in kinds.items() if any(names for names, _ in kinds.values()) else ():
        held = {split: getattr(shares, split) for split in splits}
        divided |= spread(names, held, seed, f"{kind} subjects", where, advice, problems)
    return divided


def spread(
    names: Iterable[str], shares: Mapping[str, float], seed: int, kind: str, where: str, advice: str,
    problems: Sequence[CaseProblem] = (),
) -> dict[str, str]:  # fmt: skip
    """Subject -> split, in the ratio of `shares` (by split; 0: none), at least one in each split that has a share.

    The order is that of a hash of (seed, name), so it depends neither on the file system nor on Python's hash seed.
    kind, where and advice: what the subjects are, the key in params.yaml and what else a user can do, for messages;
    problems: what keeps other subjects out, as too few are often the fault of the data and not of the shares.
    Raises AnomedError when there are fewer subjects than splits with a share.
    """
    wanted = {split: share for split, share in shares.items() if share > 0}
    order = sorted(set(names), key=lambda name: records.digest([seed, name]))
    if len(order) < len(wanted):
        first = f"; first of {len(problems)} problems: {problems[0]}" if problems else ""
        raise AnomedError(
            f"{where}: {kind}: found {len(order)}, expected at least {len(wanted)}, one for each of "
            f"{', '.join(wanted)}; add some, or {advice}{first}"
        )
    following = iter(order)
    counts = _apportion(len(order), wanted)
    return {next(following): split for split, number in counts.items() for _ in range(number)}


def _apportion(number: int, shares: dict[str, float]) -> dict[str, int]:
    """`number` subjects, at least one for each split, by shares: the largest remainders are rounded up."""
    quotas = {split: number * share / sum(shares.values()) for split, share in shares.items()}
    counts = {split: math.floor(quota) for split, quota in quotas.items()}
    by_remainder = sorted(shares, key=lambda split: counts[split] - quotas[split])
    for split in by_remainder[: number - sum(counts.values())]:
        counts[split] += 1
    for split in shares:
        if counts[split] == 0:
            counts[max(counts, key=lambda other: counts[other])] -= 1
            counts[split] = 1
    return counts
