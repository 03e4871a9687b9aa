"""Trees of files as raw data lie on a user's disk, and what a source says of them."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anomed.domains.source import Source


def put(root: Path, *names: str, content: str = "") -> None:
    """Write a dummy file under each name."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content or name)


def faults(found: Source) -> list[tuple[str, str]]:
    """Case and code of every problem of a source of volumes; the other subjects must be offered all the same."""
    offered = {scan.subject_id for scan in found.scans()}
    assert offered.isdisjoint(problem.row["case"] for problem in found.problems)
    assert found.fingerprint(), "problems are listed by prepare: planning must not fail"
    return [(problem.row["case"], problem.row["code"]) for problem in found.problems]


def shuffle_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every folder lists its files in another order each time."""
    scandir, order = os.scandir, random.Random(0)

    class Shuffled:
        def __init__(self, path: Any):
            with scandir(path) as content:
                self.content = list(content)
            order.shuffle(self.content)

        def __enter__(self) -> Iterator[Any]:
            return iter(self.content)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", Shuffled)
