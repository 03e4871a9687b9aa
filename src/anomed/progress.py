"""How far a training has come: its history, and a checkpoint from which a killed one goes on."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anomed import records
from anomed.errors import AnomedError

EVERY = 60.0  # seconds between checkpoints
VERSION = 1  # of a checkpoint's form


@dataclass
class Progress:
    """What a method that trains a network keeps beside the network.

    path: the checkpoint's file; None keeps none. key: what the result depends on; a checkpoint of another key is not
    used. every: seconds between checkpoints, which change no result. rows: one per epoch, by column. facts: what the
    run card says of the training. earlier: seconds that killed attempts had spent at the checkpoint.
    """

    path: Path | None = None
    key: str = ""
    every: float = EVERY
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    earlier: float = 0.0
    started: float = field(default_factory=time.monotonic)
    saved: float = field(default_factory=time.monotonic)
    ours: bool = False  # whether the file is a checkpoint

    def load(self) -> dict[str, Any] | None:
        """The state that `save` was given last, tensors on the CPU; None without a checkpoint of this key.

        Of a file nothing but tensors and plain values is read. One of other parameters, data, code or libraries is
        named on standard error and not used. Raises AnomedError for a file that is damaged or no checkpoint at all:
        nobody's file is replaced.
        """
        if self.path is None:
            return None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return None
        content = _read(self.path)
        self.ours = True
        if content["key"] != self.key:
            what = "a checkpoint of other parameters, data, code or libraries; training starts anew"
            print(f"{self.path}: {what}", file=sys.stderr)
            return None
        self.rows, self.earlier = list(content["rows"]), content["seconds"]
        self.facts["resumed"] = content["resumed"] + 1
        state: dict[str, Any] = content["state"]
        return state

    def due(self) -> bool:
        """Whether it is time to save."""
        return self.path is not None and time.monotonic() - self.saved >= self.every

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint, whole or not at all. state: tensors and plain values."""
        import torch

        assert self.path is not None
        content = {
            "anomed": VERSION,
            "key": self.key,
            "rows": self.rows,
            "seconds": self.seconds,
            "resumed": self.facts.get("resumed", 0),
            "state": dict(state),
        }
        try:
            with records.atomic_file(self.path) as partial:
                torch.save(content, partial)
        except RuntimeError as error:  # what torch makes of a full disk
            reason = " ".join(str(error).split())[:160]
            raise AnomedError(
                f"{self.path}: the checkpoint could not be written ({reason}); make room for it"
            ) from None
        self.saved, self.ours = time.monotonic(), True

    @property
    def seconds(self) -> float:
        """Time spent, with that of the attempts before."""
        return self.earlier + time.monotonic() - self.started

    def done(self) -> None:
        """Remove the checkpoint: the model is written."""
        if self.path is not None and self.ours:
            self.path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    """What `save` wrote, every byte of it checked. Raises AnomedError for anything else."""
    import pickle
    import zipfile

    import torch

    try:
        if not path.is_file():
            raise ValueError("no file")
        with zipfile.ZipFile(path) as archive:  # torch itself checks no checksum
            if broken := archive.testzip():
                raise ValueError(f"{broken} is damaged")
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(content, dict) or content.get("anomed") != VERSION:
            raise ValueError("another file")
    except (zipfile.BadZipFile, RuntimeError, OSError, EOFError, LookupError, ValueError, pickle.UnpicklingError):
        raise AnomedError(
            f"{path}: no checkpoint of a training, or a damaged one; delete it, or name another file with --checkpoint"
        ) from None
    return content
