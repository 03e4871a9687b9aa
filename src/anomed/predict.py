"""The predict command: a fitted model's scores and maps of a domain's valid and test images."""

from pathlib import Path

from anomed import console, predictions, records
from anomed.detect import STATE, card_of, create, facts, memory_advice
from anomed.errors import AnomedError
from anomed.manifest import Prepared


def predict(model: Path, data: Path, out: Path, device: str, train: Path | None = None) -> None:
    """Score the valid and test images of a prepared domain with a fitted model and write contract 3 whole, or nothing.

    train: the prepared domain that the model was fitted on, where it is another one than `data`. Raises AnomedError
    when the model was fitted on other data or other images than `data` has, or a score or map is not finite.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    prepared, source = Prepared(data), train or data
    fitted = records.read_card(
        model / records.RUN_CARD, "files", "system", "seed", "parameters", "data_hash", "image_shape"
    )
    expected = prepared.hash if train is None else Prepared(train).hash
    if fitted["data_hash"] != expected:
        raise AnomedError(
            f"{model}: fitted on other data (hash {fitted['data_hash']}) than {source} ({expected}); fit again, or "
            "name the domain it was fitted on with --train"
        )
    shape = list(prepared.images.shape[1:])
    if fitted["image_shape"] != shape:
        raise AnomedError(
            f"{data}: images of shape {shape}, expected {fitted['image_shape']} as those that {model} was fitted on; "
            "set `size` of both domains to the same, and take no colour images for grey ones"
        )
    detector = create(fitted["parameters"], fitted["seed"], device)
    try:
        detector.restore(load_file(records.verified(model / STATE, fitted)))
    except (OSError, SafetensorError) as error:
        raise AnomedError(f"{model / STATE}: unreadable ({error}); fit again") from None
    evaluated = prepared.evaluated()
    rows, detector.facts = evaluated.row, facts(prepared, evaluated, detector.reads)
    with records.atomic_dir(out, r"run\.json|scores\.csv|maps\.npy|answers\.jsonl") as partial:
        with card_of(prepared, fitted["system"], fitted["parameters"], fitted["seed"], detector) as card:
            images = prepared.images[rows.iloc[0] : rows.iloc[-1] + 1] if len(rows) else prepared.images[:0]
            batches = console.track(detector.score(images), f"predict {fitted['system']}")
            with memory_advice():
                maps = predictions.write(partial, prepared, batches, detector.localises)
            card.facts.update(maps=maps, model=fitted["files"][STATE])
        card.write(partial)
