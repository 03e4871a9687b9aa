"""Scores of one run (contract 4): hold predictions against the truth of the test split.

Every metric declared in `metrics/` gives one record: metric, label, level, value (or null), reason (of a null), n,
counts, unit, direction, definition, source, version. `n` is the number of test images that went in. `counts` says
what they hold, for image metrics {"normal", "abnormal"} images, for pixel metrics {"normal", "abnormal"} pixels,
"regions", and "excluded", the test images left out because their pixel truth is unknown. Curves, where both classes
occur, stand in the .npz beside the records.
"""

from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from anomed import images, records
from anomed.errors import AnomedError
from anomed.manifest import Prepared
from anomed.metrics import ranking
from anomed.metrics.declare import Metric, metrics
from anomed.predictions import Predictions


def score(run: Path, data: Path, parameters: dict[str, Any], out: Path) -> None:
    """Score the test images of one run and write `out` (JSON) and, beside it, `<stem>.npz` with the curves.

    run: folder of predictions. data: the prepared domain that they were made on. parameters: {"method": the method's
    block, "files": hashes of its weights, "metrics": {"aupro_limit": 0.3}}, whose hash the table compares with the
    current one. Memory does not grow with the number of images. Raises AnomedError when predictions, parameters and
    data do not belong together, or a file is damaged.
    """
    prepared, predictions = Prepared(data), Predictions(run)
    made_with = {key: value for key, value in parameters.items() if key != "metrics"}
    options = parameters.get("metrics")
    known = {key for metric in (*metrics("image"), *metrics("pixel")) for key in metric.options}
    if not isinstance(options, dict) or not all(k in known and isinstance(v, float | int) for k, v in options.items()):
        raise AnomedError(f"--params.metrics: found {options!r}, expected numbers under the keys {sorted(known)}")
    test = _joined(prepared, predictions, made_with)

    scores, labels = test.score.to_numpy(), test.label.to_numpy()
    sizes = {"normal": int((labels == 0).sum()), "abnormal": int((labels == 1).sum())}
    rows = [
        _record(metric, metric.evaluate(scores, labels, options=options), len(test), sizes, options)
        for metric in metrics("image")
    ]
    curves = ranking.image_curves(scores, labels)

    known = test[test.mask_row.notna()]
    reason = _obstacle(prepared, predictions, known)
    histogram = ranking.PixelHistogram() if reason else _count(prepared, predictions, known)
    pixels = {**histogram.counts(), "excluded": len(test) - len(known)}
    for metric in metrics("pixel"):
        value = (None, reason) if reason else metric.evaluate(histogram, options=options)
        rows.append(_record(metric, value, histogram.images, pixels, options))
    curves.update(ranking.pixel_curves(histogram))

    with records.atomic_file(out.with_suffix(".npz")) as partial, partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **curves)  # its members carry a fixed date: equal curves give equal bytes
    card = predictions.card
    facts = {"domain": card["domain"], "system": card["system"], "seed": card["seed"], "manifest_hash": prepared.hash}
    records.write_card(out, {**facts, "parameter_hash": records.digest(parameters), "records": rows})


def _joined(prepared: Prepared, predictions: Predictions, made_with: dict[str, Any]) -> pd.DataFrame:
    """Manifest and scores of the test images side by side, once both are sure to be of the same images."""
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
    table = table.assign(score=scores.score, map_row=scores.map_row)
    return table[table.split == "test"]


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


def _count(prepared: Prepared, predictions: Predictions, known: pd.DataFrame) -> ranking.PixelHistogram:
    """The histogram over the native grids of the masks; a map of another grid is decoded, upsampled, coded again."""
    maps, codec, histogram = predictions.maps, predictions.codec, ranking.PixelHistogram()
    assert maps is not None
    assert codec is not None
    for mask_row, map_row in zip(known.mask_row, known.map_row, strict=True):
        mask, codes = prepared.mask(int(mask_row)), np.asarray(maps[int(map_row)])
        if codes.shape != mask.shape:
            codes = codec.encode(images.upsample(codec.decode(codes), *mask.shape))
        histogram.update(codes, mask)
    return histogram


def _record(
    metric: Metric, result: tuple[float | None, str | None], n: int, counts: dict[str, int], options: dict[str, Any]
) -> dict[str, Any]:
    value, reason = result
    return {
        "metric": metric.name,
        "label": metric.label,
        "level": metric.level,
        "value": value,
        "reason": reason,
        "n": n,
        "counts": counts,
        "unit": metric.unit,
        "direction": metric.direction,
        "definition": metric.described(options),
        "source": metric.source,
        "version": metric.version,
    }
