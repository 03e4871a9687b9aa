"""How far a training has come: its history, and a checkpoint from which a killed one goes on."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anomed import records

EVERY = 60.0  # seconds between checkpoints


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

    def load(self) -> dict[str, Any] | None:
        """The state that `save` was given last, tensors on the CPU; None without a checkpoint that fits.

        Of a file nothing but tensors and plain values is read. One that is damaged, or of other parameters, data or
        code, is named on standard error and not used.
        """
        if self.path is None or not self.path.exists():
            return None
        import pickle

        import torch

        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            if content["key"] == self.key:
                self.rows, self.earlier = list(content["rows"]), content["seconds"]
                state: dict[str, Any] = content["state"]
                self.facts["resumed"] = state["resumed"] = int(state.get("resumed", 0)) + 1
                return state
            reason = "of other parameters, data, code or libraries"
        except (RuntimeError, OSError, EOFError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
            reason = f"not readable ({' '.join(str(error).split())[:120]})"
        print(f"{self.path}: a checkpoint {reason}; training starts anew", file=sys.stderr)
        return None

    def due(self) -> bool:
        """Whether it is time to save."""
        return self.path is not None and time.monotonic() - self.saved >= self.every

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint, whole or not at all. state: tensors and plain values."""
        import torch

        assert self.path is not None
        resumed = {"resumed": self.facts["resumed"]} if "resumed" in self.facts else {}
        content = {
            "key": self.key,
            "rows": self.rows,
            "seconds": self.seconds,
            "state": {**state, **resumed},
        }
        with records.atomic_file(self.path) as partial:
            torch.save(content, partial)
        self.saved = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time spent, with that of the attempts before."""
        return self.earlier + time.monotonic() - self.started

    def done(self) -> None:
        """Remove the checkpoint: the model is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
