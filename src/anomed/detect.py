"""What a detection method is, and the fit command."""

import contextlib
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from pydantic import Field

from anomed import plugins, records
from anomed.errors import AnomedError
from anomed.manifest import Prepared
from anomed.progress import EVERY, Progress
from anomed.settings import Settings, check

STATE = "state.safetensors"
HISTORY = "history.csv"
LIBRARIES = ("monai", "numpy", "pillow", "timm", "torch", "torchvision")  # that the bytes of a training depend on
SMOKE = "smoke: random weights"
ORACLE = "epoch chosen on test labels: no result, it shows what such a choice gains"
SELECTION = {"fixed": "last", "valid": "best on valid", "test_oracle": "best on test"}


@dataclass(frozen=True)
class Labelled:
    """Images of a domain with their truth, for a row whose `Detector.labels` names their split.

    images: uint8, N x S x S (x 3). labels: int, (N,), 1 abnormal. mask: of the image at an index, bool, native H x W,
    or None where the pixel truth is unknown.
    """

    images: np.ndarray
    labels: np.ndarray
    mask: Callable[[int], np.ndarray | None]


class Detector:
    """Base of every method: subclass it once, register it, and fill `fit` and `score`.

    A detector sees prepared pixels only: uint8, N x S x S (grey) or N x S x S x 3, never a label, mask or file name.
    Class attributes state what it needs: `deterministic` (one seed is enough), `localises` (it gives maps), `gpu`
    (it can use one), `memory_mb` (what its jobs ask of a scheduler). A baseline that asks how far knowledge beside
    the pixels goes says so: `reads` names facts that it finds in `self.facts` when it fits and when it scores, aligned
    with the images ("slice": float64, NaN where unknown; "view": str, "" where unknown). A row whose `labels` names a
    split finds its labelled images in `self.labelled` when it fits. A method that trains by epochs (see training.py)
    keeps its history and checkpoints in `self.progress`.
    """

    deterministic: ClassVar[bool] = False
    localises: ClassVar[bool] = True
    gpu: ClassVar[bool] = False
    memory_mb: ClassVar[int] = 1000
    reads: ClassVar[tuple[str, ...]] = ()

    facts: dict[str, np.ndarray]
    labelled: Labelled
    progress: Progress | None = None

    class Params(Settings):
        """The keys of the method's block in params.yaml."""

    def __init__(self, params: Any, seed: int, device: str = "cpu"):
        self.params, self.seed, self.device = params, seed, device

    @classmethod
    def files(cls, params: Any) -> dict[str, Path]:
        """Files outside the project that decide the result (weights), by name; their hashes join the parameters."""
        return {}

    @classmethod
    def mark(cls, params: Any) -> str:
        """What readers of the table must know of such a row; empty for a detector trained as it should be."""
        smoke = SMOKE if getattr(params, "weights", "") == "random" else ""
        oracle = ORACLE if getattr(params, "selection", "") == "test_oracle" else ""
        return "; ".join(filter(None, [smoke, oracle]))

    @classmethod
    def labels(cls, params: Any) -> str:
        """The split whose labels `fit` may see: "valid", "test", or "" for none, as it should be."""
        return {"valid": "valid", "test_oracle": "test"}.get(getattr(params, "selection", ""), "")

    @classmethod
    def selection(cls, params: Any) -> str:
        """Which epoch of a training is kept, in words for the report; empty where nothing is trained by epochs."""
        return SELECTION.get(getattr(params, "selection", ""), "")

    @classmethod
    def needs_mb(cls, params: Any, size: int) -> int:
        """Memory that a job of such a row asks of a scheduler, for images of side `size`."""
        return cls.memory_mb

    def fit(self, images: np.ndarray) -> None:
        """Learn from the normal train images: uint8, N x S x S (x 3), memory-mapped, N >= 1."""

    def state(self) -> dict[str, np.ndarray]:
        """What `fit` learned, as arrays by name (stored as safetensors)."""
        return {}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""

    def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Yield for consecutive batches of `images` (uint8, N x S x S (x 3)) a pair: scores, float (B,), higher is
        more anomalous, raw; and maps, float32 (B, h, w), or None when the method does not localise. An image must
        score alone as in a batch, up to rounding."""
        raise TypeError(f"{type(self).__name__} does not define score()")


def fit(
    system: str,
    parameters: dict[str, Any],
    seed: int,
    data: Path,
    out: Path,
    device: str,
    checkpoint: Path | None = None,
    every: float = EVERY,
) -> None:
    """Train one method on the normal train images of a prepared domain and write its model folder whole, or nothing.

    parameters: {"method": its block with `implementation`, "files": hashes of weights}, and "train_limit" where only
    the images of so many subjects are used. out: `state.safetensors`, `history.csv` of a training by epochs, and the
    run card. checkpoint: file that such a training goes on from, if it was killed; written `every` so many seconds,
    removed at the end. Raises AnomedError when the domain has no train image, or fewer train subjects than that.
    """
    from safetensors.numpy import save_file

    prepared = Prepared(data)
    rows = _train_rows(prepared, system, parameters, seed)
    detector = create(parameters, seed, device)
    if checkpoint and checkpoint.resolve().is_relative_to(out.resolve()):
        raise AnomedError(f"{checkpoint}: a checkpoint inside the model's folder would end with it; name another file")
    detector.progress = Progress(checkpoint, _key(prepared, parameters, seed, detector.device), every)
    with records.atomic_dir(out, r"run\.json|state\.safetensors|history\.csv") as partial:
        with card_of(prepared, system, parameters, seed, detector) as card:
            every = len(rows) == rows[-1] + 1  # train comes first: one view, no copy
            detector.facts = facts(prepared, prepared.table.iloc[rows], detector.reads)
            if split := detector.labels(detector.params):
                detector.labelled = _labelled(prepared, split)
            with memory_advice():
                detector.fit(prepared.images[: len(rows)] if every else prepared.images[rows])
            card.facts.update(train_images=len(rows), image_shape=list(prepared.images.shape[1:]))
        save_file({key: np.ascontiguousarray(array) for key, array in detector.state().items()}, partial / STATE)
        (partial / STATE).chmod(0o644)  # the library makes it readable by its owner alone
        if detector.progress.rows:
            pd.DataFrame(detector.progress.rows).to_csv(partial / HISTORY, index=False, lineterminator="\n")
            card.facts["training"] = detector.progress.facts
            card.facts["seconds"] = round(card.facts["seconds"] + detector.progress.earlier, 3)
        card.write(partial)
    detector.progress.done()


def _key(prepared: Prepared, parameters: dict[str, Any], seed: int, device: str) -> str:
    """What a checkpoint depends on."""
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return records.digest([prepared.hash, parameters, seed, device, records.code_files(), versions])


def _train_rows(prepared: Prepared, system: str, parameters: dict[str, Any], seed: int) -> np.ndarray:
    """Rows of the train images, ascending: all, or with a train_limit k those of the first k subjects in an order that
    the seed gives; the subjects of a smaller k are among those of a larger one."""
    train = prepared.table[prepared.table.split == "train"]
    if train.empty:
        raise AnomedError(
            f"{prepared.folder}: no train image, so nothing to fit {system!r} on; a detector needs normal train images"
        )
    limit = check(_Fitted, parameters, "--params").train_limit
    if limit is not None:
        subjects = sorted(train.subject_id.unique(), key=lambda name: records.digest([seed, name]))
        if len(subjects) < limit:
            domain = prepared.card["domain"]
            raise AnomedError(
                f"domains.{domain}.train_limit: found {limit}, but there are {len(subjects)} train subjects; lower it, "
                "or leave it out to use all"
            )
        train = train[train.subject_id.isin(subjects[:limit])]
    return train.row.to_numpy()


def facts(prepared: Prepared, table: pd.DataFrame, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """What the manifest's `clinical.jsonl` tells of the images of `table`, by name; see Detector.reads.

    Raises AnomedError when it tells nothing of any of them: every score would rest on nothing.
    """
    found = {}
    for name in names:
        values = [prepared.clinical.get(image_id, {}).get(name) for image_id in table.image_id]
        if len(values) and all(value is None for value in values):
            raise AnomedError(
                f"{prepared.folder}: {name!r} is known of none of {len(values)} images, so nothing can be learned from "
                "it; run another method on this domain"
            )
        unknown: float | str = np.nan if name == "slice" else ""
        found[name] = np.array([unknown if value is None else value for value in values])
    return found


def _labelled(prepared: Prepared, split: str) -> Labelled:
    table = prepared.table[prepared.table.split == split]
    if table.empty:
        raise AnomedError(
            f"{prepared.folder}: no {split} image, but this row learns from their labels; leave "
            "its `selection` fixed, or the row out of run.systems"
        )

    def mask(index: int) -> np.ndarray | None:
        row = table.mask_row.iloc[index]
        return None if pd.isna(row) else prepared.mask(int(row))

    images = prepared.images[table.row.iloc[0] : table.row.iloc[-1] + 1]  # a split's images lie together
    return Labelled(images, table.label.to_numpy(), mask)


class _Fitted(Settings):
    """What a model depends on: the method's block, the hashes of its weights by name, how many subjects it may see."""

    method: dict[str, Any]
    files: dict[str, str]
    train_limit: int | None = Field(default=None, ge=1)


def create(parameters: dict[str, Any], seed: int, device: str) -> Detector:
    """The detector that `parameters["method"]` describes, not yet fitted, on the device that it can use."""
    fitted = check(_Fitted, parameters, "--params")
    block = dict(fitted.method)
    method = plugins.load("methods", str(block.pop("implementation", "")))
    settings = check(method.Params, block, "--params.method", also=["implementation"])
    for name, path in method.files(settings).items():
        expected = fitted.files.get(name)
        if expected and path.is_file() and (found := records.digest_file(path)) != expected:
            raise AnomedError(
                f"{path}: found sha256 {found[:16]}..., expected {expected[:16]}... as when the run was planned; other "
                f"weights {name!r} are another system: run snakemake, or fit again with the hash of this file"
            )
    detector: Detector = method(settings, seed, _choose_device(device) if method.gpu else "cpu")
    return detector


@contextlib.contextmanager
def memory_advice() -> Iterator[None]:
    """Raise AnomedError with advice where memory does not suffice, that of a GPU or of the machine."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = " ".join(str(error).split())
        allocator = "not enough memory" in text or "can't allocate memory" in text  # torch's, of the machine
        if not (allocator or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"):
            raise
        what = text.partition(". ")[0] if "CUDA" in text else "the machine has not enough memory"
        raise AnomedError(
            f"{what}: lower batch_size or image_size, or make the networks smaller, which all give "
            "other results, or take another device"
        ) from None


def _choose_device(wanted: str) -> str:
    """ "cpu" or "cuda" for a method that can use a GPU. Raises AnomedError when CUDA is demanded and absent."""
    if wanted == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise AnomedError("run.device is cuda, but torch sees no CUDA device; set it to auto or cpu")
    return "cpu"


def card_of(
    prepared: Prepared, system: str, parameters: dict[str, Any], seed: int, detector: Detector
) -> records.RunCard:
    """A run card that says which system it was, on which data."""
    return records.RunCard(
        domain=prepared.card["domain"],
        system=system,
        seed=seed,
        parameters=parameters,
        data_hash=prepared.hash,
        device=detector.device,
    )
