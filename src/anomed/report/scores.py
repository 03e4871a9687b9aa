"""Score files (contract 4) as their readers see them: checked records, breakdowns and bootstrap replicates."""

import io
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from anomed import records, stats
from anomed.errors import AnomedError
from anomed.metrics.declare import Level
from anomed.settings import Settings


class Bootstrap(Settings):
    """How the replicates of a run were made. unit "image": the subjects of the data are unknown. binning: by how much
    pixel metrics on the bins of the bootstrap are off, None without any."""

    model_config = ConfigDict(allow_inf_nan=False)

    replicates: int = Field(ge=1)
    confidence: float
    unit: Literal["subject", "image"]
    units: int = Field(ge=0)
    binning: float | None = None

    @field_validator("confidence")
    @classmethod
    def _ours(cls, confidence: float) -> float:
        if confidence != stats.CONFIDENCE:
            raise ValueError(f"found {confidence}, expected {stats.CONFIDENCE}")
        return confidence

    def drawn(self) -> dict[str, Any]:
        """What must be equal for two runs to be paired."""
        return self.model_dump(exclude={"binning"})


class Record(Settings):
    """One metric of one run: a finite value with its interval, or none, each time with the reason."""

    model_config = ConfigDict(allow_inf_nan=False)

    metric: str
    definition_id: str
    label: str
    level: Level
    value: float | None
    reason: str | None
    low: float | None
    high: float | None
    interval_reason: str | None
    n: int
    counts: dict[str, int]
    unit: str
    direction: Literal["higher", "lower"]
    definition: str
    source: str
    version: int

    @model_validator(mode="after")
    def _consistent(self) -> "Record":
        name = f"{self.metric}.v{self.version}"
        if (self.value is None) != bool(self.reason):
            raise ValueError(f"{self.metric} needs a value, or null and a reason")
        if (self.low is None) != bool(self.interval_reason) or (self.high is None) != bool(self.interval_reason):
            raise ValueError(f"{self.metric} needs low and high, or two nulls and an interval_reason")
        if self.value is None and self.interval_reason != self.reason:
            raise ValueError(f"{self.metric} has no value, so its interval_reason must be the reason")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"{self.metric} has its low {self.low} above its high {self.high}")
        if self.definition_id.partition("[")[0] != name:
            raise ValueError(f"{self.metric} has the definition_id {self.definition_id}, expected {name}")
        return self


class Breakdown(Settings):
    """The metrics of one group of the abnormal test images, held against all normal ones."""

    model_config = ConfigDict(allow_inf_nan=False)

    by: Literal["pathology", "lesion_size", "subject"]
    group: str
    n: int = Field(ge=0)
    counts: dict[Level, dict[str, int]]
    values: dict[str, float | None]
    reasons: dict[str, str]

    @model_validator(mode="after")
    def _reasons_of_nulls(self) -> "Breakdown":
        nulls = {metric for metric, value in self.values.items() if value is None}
        if nulls != {metric for metric, reason in self.reasons.items() if reason}:
            raise ValueError(f"{self.by} {self.group!r} needs a reason for each null and for nothing else")
        return self


class ScoreFile(Settings):
    """scores/<domain>/<system>/<seed>.json; `curves` is the sha256 of the .npz beside it."""

    domain: str
    system: str
    seed: int
    manifest_hash: str
    parameter_hash: str
    curves: str
    bootstrap: Bootstrap
    records: list[Record] = Field(min_length=1)
    breakdowns: list[Breakdown]

    @model_validator(mode="after")
    def _once(self) -> "ScoreFile":
        metrics = [record.metric for record in self.records]
        for names in (metrics, [f"{found.by} {found.group!r}" for found in self.breakdowns]):
            name, count = Counter(names).most_common(1)[0] if names else ("", 1)
            if count > 1:
                raise ValueError(f"{name} stands there more than once")
        for found in self.breakdowns:
            if unknown := sorted({*found.values} - {*metrics}):
                raise ValueError(f"{found.by} {found.group!r} has {unknown[0]}, which has no record")
        return self


def read(path: Path, domain: str, system: str, seed: int) -> ScoreFile:
    """The scores of one run. Raises AnomedError naming a file that is missing, damaged, edited or of another run."""
    try:
        file = ScoreFile.model_validate(records.read_card(path))
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "the top level"
        raise AnomedError(f"{path}: damaged at {where} ({fault['msg']}); delete it and score again") from None
    found, expected = f"{file.domain}/{file.system}/{file.seed}", f"{domain}/{system}/{seed}"
    if found != expected:
        raise AnomedError(f"{path}: found the scores of {found}, expected {expected}; delete it and score again")
    return file


def replicates(path: Path, file: ScoreFile) -> dict[str, np.ndarray]:
    """Bootstrap replicates of every metric of `file`, read from `path`, that has a value: float32 (R,), NaN where a
    replicate has none. They lie in the .npz beside `path`.

    Raises AnomedError naming that .npz when it is missing, not the one of `path`, or lacks R replicates of a metric.
    """
    beside, redo = path.with_suffix(".npz"), f"delete it and {path.name} beside it and score again"
    try:
        data = beside.read_bytes()
    except FileNotFoundError:
        raise AnomedError(f"{beside}: not found; delete {path.name} beside it and score again") from None
    if records.digest(data) != file.curves:
        raise AnomedError(f"{beside}: not the file that {path.name} beside it describes; {redo}")
    found = {}
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            for record in file.records:
                if record.value is not None:
                    found[record.metric] = arrays[f"replicates_{record.metric}"]
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise AnomedError(f"{beside}: unreadable ({str(error).strip(chr(39))}); {redo}") from None
    expected = np.dtype(np.float32), (file.bootstrap.replicates,)
    for metric, values in found.items():
        if (values.dtype, values.shape) != expected:
            raise AnomedError(
                f"{beside}: replicates_{metric} has shape {values.shape} of {values.dtype}, expected {expected[1]} of "
                f"{expected[0]}; {redo}"
            )
    return found


def mean_replicates(files: Mapping[Path, ScoreFile]) -> dict[str, np.ndarray]:
    """Replicates of the mean over seeds of one system, float64 (R,), of every metric that each seed has a value of.

    files: one per seed, keyed by where it lies. Replicate r drew the same subjects in every seed, so the mean of the
    seeds' replicates is a replicate of their mean; NaN where a seed has none.
    """
    seeds = [replicates(path, file) for path, file in files.items()]
    shared = [metric for metric in (seeds[0] if seeds else ()) if all(metric in arrays for arrays in seeds)]
    return {metric: np.stack([arrays[metric] for arrays in seeds]).mean(0, np.float64) for metric in shared}
