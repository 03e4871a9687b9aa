"""Scores of one run (contract 4): hold predictions against the truth of the test split.

Every metric declared in `metrics/` gives one record: metric, definition_id (name, version and options: values with
equal ids compare), label, level, value (or null), reason (of a null), low and high (95 % interval over resampled
subjects, or null and interval_reason), n, counts, unit, direction, definition, source, version. `n` is the number of
test images that went in. `counts` says what they hold, for image metrics {"normal", "abnormal"} images, for pixel
metrics {"normal", "abnormal"} pixels, "regions", and "excluded", the test images left out because their pixel truth
is unknown. Level "foreground" counts the pixels of the organ alone and is there where the domain has one.

`bootstrap` says how intervals were made. `breakdowns` holds parts of the abnormal images, each against all normal
ones: by pathology, by lesion size and, where subjects have several, by subject. Curves and the replicates of every
metric stand in the .npz beside the records.
"""

from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from anomed import records, stats
from anomed.counting import Counter
from anomed.errors import AnomedError
from anomed.evaluation import Evaluation, evaluate
from anomed.manifest import Prepared
from anomed.metrics import ranking
from anomed.metrics.declare import LEVELS, Metric, metrics
from anomed.predictions import Predictions


def score(run: Path, data: Path, parameters: dict[str, Any], out: Path, device: str = "cpu") -> None:
    """Score the test images of one run and write `out` (JSON) and, beside it, `<stem>.npz` with curves and replicates.

    run: folder of predictions. data: the prepared domain that they were made on. parameters: {"method": the method's
    block, "files": hashes of its weights, "metrics": the block of params.yaml}, whose hash the table compares with the
    current one. device: where pixels are counted (auto, cpu or cuda); the numbers are the same. Memory grows with the
    number of subjects, by some 75 KB each for all pixels and as much for those of the organ, not with that of images.
    Raises AnomedError when predictions, parameters and data do not belong together, or a file is damaged.
    """
    prepared, predictions = Prepared(data), Predictions(run)
    made_with = {key: value for key, value in parameters.items() if key != "metrics"}
    options, replicates = _options(parameters.get("metrics"))
    table = _joined(prepared, predictions, made_with)
    test = table[table.split == "test"]
    obstacle = _obstacle(prepared, predictions, test[test.mask_row.notna()])
    counter = None if obstacle else Counter(prepared, predictions, device)
    found = evaluate(table, counter, options, replicates)

    arrays: dict[str, np.ndarray] = {}
    for level, counts in found.exact.items():
        arrays |= ranking.points(counts, level)
    arrays |= {f"replicates_{name}": values.astype(np.float32) for name, values in found.replicates.items()}
    with records.atomic_file(out.with_suffix(".npz")) as partial:
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)  # its members carry a fixed date: equal arrays, equal bytes
        curves = records.digest_file(partial)
    card = predictions.card
    facts = {"domain": card["domain"], "system": card["system"], "seed": card["seed"], "manifest_hash": prepared.hash}
    facts |= {"parameter_hash": records.digest(parameters), "curves": curves}
    sampled = {"replicates": replicates, "confidence": stats.CONFIDENCE, "unit": found.unit, "units": found.units}
    facts["bootstrap"] = {**sampled, "binning": found.binning}
    levels = LEVELS if prepared.card["foreground"] else LEVELS[:2]
    here = [metric for level in levels for metric in metrics(level)]
    for part in found.parts.values():
        for metric in here:
            if part.values.setdefault(metric.name, None) is None:
                part.reasons.setdefault(metric.name, str(obstacle))
    facts["records"] = [_record(metric, found, test, obstacle, options) for metric in here]
    facts["breakdowns"] = [
        {"by": by, "group": group, **asdict(part)} for (by, group), part in found.parts.items() if by
    ]
    records.write_card(out, facts)


def _options(block: Any) -> tuple[dict[str, Any], int]:
    """Options of metrics, and the number of replicates."""
    known = {key for level in LEVELS for metric in metrics(level) for key in metric.options} | {"replicates"}
    if not isinstance(block, dict) or not all(k in known and type(v) in (int, float) for k, v in block.items()):
        raise AnomedError(f"--params.metrics: found {block!r}, expected numbers under the keys {sorted(known)}")
    replicates = block.get("replicates", 1000)
    if not isinstance(replicates, int) or replicates < 1:
        raise AnomedError(f"--params.metrics.replicates: found {replicates!r}, expected a whole number from 1 on")
    return {key: value for key, value in block.items() if key != "replicates"}, replicates


def _joined(prepared: Prepared, predictions: Predictions, made_with: dict[str, Any]) -> pd.DataFrame:
    """Manifest and scores of the valid and test images side by side, once both are sure to be of the same images, with
    the column area: lesion pixels of each image, missing where the pixel truth is unknown."""
    card = predictions.folder / records.RUN_CARD
    table, scores = prepared.evaluated(), predictions.scores
    wanted, found = table.image_id.tolist(), scores.image_id.tolist()
    for place, (one, other) in enumerate(zip_longest(wanted, found), 1):
        if one != other:
            raise AnomedError(
                f"{predictions.folder / 'scores.csv'}: found {other or 'the end'} in row {place}, expected "
                f"{one or 'the end'} as in {prepared.folder / 'manifest.csv'}; run predict again"
            )
    if predictions.card["data_hash"] != prepared.hash:
        raise AnomedError(
            f"{card}: found data_hash {str(predictions.card['data_hash'])[:12]}, expected {prepared.hash[:12]} of "
            f"{prepared.folder}: the domain was prepared anew; run predict again"
        )
    if predictions.card["parameters"] != made_with:
        raise AnomedError(
            f"{card}: made with the parameters {records.canonical(predictions.card['parameters'])}, expected "
            f"{records.canonical(made_with)}; delete {predictions.folder} and the model it came from, and run again"
        )
    masked = table.mask_row if prepared.card["masks"] else table.mask_row.iloc[:0]
    area = {row: int(prepared.mask(int(mask)).sum()) for row, mask in masked.dropna().items()}
    return table.assign(score=scores.score, map_row=scores.map_row, area=pd.Series(area, table.index, "Int64"))


def _obstacle(prepared: Prepared, predictions: Predictions, known: pd.DataFrame) -> str | None:
    """Why no pixel metric can be computed, or None."""
    if not prepared.card["masks"]:
        return "the domain has no pixel truth"
    if not len(known):
        return "no test image has pixel truth"
    if predictions.maps is None:
        return "the system does not localise"
    without = known.image_id[known.map_row.isna()]
    if len(without):
        return f"no map for {len(without)} of {len(known)} test images with pixel truth, the first is {without.iloc[0]}"
    return None


def _record(
    metric: Metric, found: Evaluation, test: pd.DataFrame, obstacle: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    whole, known = found.parts["", ""], int(test.mask_row.notna().sum())
    counts: dict[str, int] = dict(whole.counts.get(metric.level, {"normal": 0, "abnormal": 0, "regions": 0}))
    if metric.level != "image":
        counts["excluded"] = len(test) - known
    value = whole.values[metric.name]
    reason = whole.reasons.get(metric.name)
    interval = stats.Interval(None, None, reason)
    if value is not None:
        within = value if metric.unit == "fraction" else None
        interval = stats.interval(found.replicates[metric.name], found.units, within)
    return {
        "metric": metric.name,
        "definition_id": metric.identifier(options),
        "label": metric.label,
        "level": metric.level,
        "value": value,
        "reason": reason,
        "low": interval.low,
        "high": interval.high,
        "interval_reason": interval.reason,
        "n": len(test) if metric.level == "image" else 0 if obstacle else known,
        "counts": counts,
        "unit": metric.unit,
        "direction": metric.direction,
        "definition": metric.described(options),
        "source": metric.source,
        "version": metric.version,
    }
