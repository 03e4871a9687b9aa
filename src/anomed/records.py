"""Run cards, hashes and atomic writes: what makes a file on disk trustworthy."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from anomed.errors import AnomedError

RUN_CARD = "run.json"
PARENT = "ANOMED_PARENT"  # process id of the Snakemake that started this job, if one did


def canonical(value: Any) -> str:
    """JSON with sorted keys and no white space: equal values give equal text, whatever the key order."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def digest(value: Any) -> str:
    """sha256 of bytes, or of the canonical JSON of any other value; 64 hex digits."""
    data = value if isinstance(value, bytes) else canonical(value).encode()
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """sha256 of a file's bytes, read in blocks; 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _foreign(target: Path, ours: str) -> str | None:
    """Name of an entry of `target` that is not one of `ours`, if there is one; what file managers leave is nobody's."""
    if not target.exists():
        return None
    if not target.is_dir():
        return target.name
    known = re.compile(rf"{ours}|\.DS_Store|Thumbs\.db")
    names = sorted(path.name for path in target.iterdir() if path.is_dir() or not known.fullmatch(path.name))
    return names[0] if names else None


def _still_wanted() -> None:
    """Raise AnomedError when the Snakemake that started this job is gone.

    A `kill -9` of Snakemake alone leaves its jobs running. Its successor runs them again, perhaps with other
    parameters: what they were to write must not land over that.
    """
    parent = os.environ.get(PARENT)
    try:
        if parent:
            os.kill(int(parent), 0)
    except ProcessLookupError:
        raise AnomedError("the Snakemake that started this job was killed; its result is discarded") from None
    except PermissionError:
        pass  # alive, under another user


def sweep(folder: Path, pattern: str = "**/.*.partial") -> None:
    """Remove what killed jobs left half-written below `folder`."""
    for stale in folder.glob(pattern):
        _remove(stale)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _partial(target: Path) -> Path:
    """A fresh temporary name beside `target`; what a killed predecessor left there is removed."""
    _still_wanted()  # an orphan must not take away what its successor is writing
    target.parent.mkdir(parents=True, exist_ok=True)
    ours = re.compile(rf"\.{re.escape(target.name)}\.\d+\.partial")  # not those of a neighbour named `<name>.<more>`
    for stale in [path for path in target.parent.iterdir() if ours.fullmatch(path.name)]:
        _remove(stale)
    return target.with_name(f".{target.name}.{os.getpid()}.partial")


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Yields a temporary path beside `target`; on success it is synced and renamed to `target`, else removed."""
    if target.is_dir():
        raise AnomedError(f"{target}: is a folder, expected the name of a file to write")
    partial = _partial(target)
    try:
        yield partial
        _sync(partial)
        _still_wanted()
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_dir(target: Path, ours: str) -> Iterator[Path]:
    """Yields an empty temporary folder beside `target`; on success it replaces `target` whole, else it is removed.

    ours: pattern of the file names that may be replaced. Raises AnomedError, before anything is done, when `target`
    holds anything else: the data of somebody, or another step's result.
    """
    target = target.resolve()
    foreign = _foreign(target, ours)
    if foreign:
        raise AnomedError(f"{target}: holds {foreign!r}, which is not ours to replace; name another folder or empty it")
    partial = _partial(target)
    partial.mkdir()
    try:
        yield partial
        for path in partial.rglob("*"):
            if path.is_file():
                _sync(path)
        _still_wanted()
        if target.exists():
            shutil.rmtree(target)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON with sorted keys, atomically. NaN and infinity raise ValueError."""
    write_text(path, json.dumps(value, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def read_json(path: Path) -> Any:
    """The JSON value of a file. Raises AnomedError naming the file when it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except FileNotFoundError:
        raise AnomedError(f"{path}: not found; the step that makes it has not run") from None
    except ValueError as error:  # also of the decoder of the text
        raise AnomedError(f"{path}: not valid JSON ({error}); delete it and run again") from None


def write_card(path: Path, value: dict[str, Any]) -> None:
    """Write a card or score file as JSON that carries the hash of its own content, key "digest"."""
    write_json(path, {**value, "digest": digest(value)})


def read_card(path: Path, *keys: str) -> dict[str, Any]:
    """What `write_card` wrote, with at least `keys`. Raises AnomedError naming a file that is damaged or was edited."""
    card = read_json(path)
    seal = card.pop("digest", None) if isinstance(card, dict) else None
    missing = [key for key in keys if key not in card] if seal else list(keys) or ["digest"]
    if missing or seal != digest(card):
        what = f"the key {missing[0]!r} is missing" if missing else "its content is not what was written"
        raise AnomedError(f"{path}: damaged or edited: {what}; delete it and run again")
    return card


def verified(path: Path, card: dict[str, Any]) -> Path:
    """`path`, once its bytes have the hash that its card gives. Raises AnomedError naming a file that is other."""
    if not path.exists():
        raise AnomedError(f"{path}: not found; the step that makes it has not run")
    if not path.is_file() or digest_file(path) != card["files"].get(path.name):
        raise AnomedError(f"{path}: not the file that the card beside it describes; delete its folder and run again")
    return path


def code_files() -> dict[str, str]:
    """sha256 of every project module this process has imported, keyed by its path below src/, sorted."""
    root = Path(__file__).parent
    ours = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == root.name]
    files = {Path(module.__file__) for module in ours if module.__file__}
    return {path.relative_to(root.parent).as_posix(): digest_file(path) for path in sorted(files)}


class RunCard:
    """Collects what a fit or predict job was: parameters, hashes, versions, seconds, memory, warnings.

    Use as a context manager around the work, then `write(folder)`. Python warnings raised inside are kept, once each.
    """

    def __init__(self, **facts: Any):
        self.facts = facts
        self.warnings: list[str] = []

    def __enter__(self) -> "RunCard":
        self._caught = warnings.catch_warnings(record=True)
        self._log = self._caught.__enter__()
        warnings.simplefilter("default")
        self._started, self._clock = datetime.now(UTC), time.perf_counter()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._caught.__exit__(*exception)
        self.warnings += [f"{w.category.__name__}: {w.message}" for w in self._log or []]
        self.facts["seconds"] = round(time.perf_counter() - self._clock, 3)
        self.facts["started"] = self._started.isoformat(timespec="seconds")
        self.facts["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.facts["peak_memory_mb"] = round(peak / (1024 if sys.platform != "darwin" else 1024**2), 1)

    def write(self, folder: Path) -> None:
        """Write `run.json` with the hashes of all files in `folder`, and print the warnings to standard error."""
        unique = list(dict.fromkeys(self.warnings))
        for text in unique:
            print(f"warning: {text}", file=sys.stderr)
        files = code_files()
        loaded = {name.partition(".")[0] for name in sys.modules}
        packages = ("numpy", "pandas", "scipy", "torch", "torchvision", "timm", "monai", "anomalib", "safetensors")
        hashes = {path.name: digest_file(path) for path in sorted(folder.iterdir()) if path.name != RUN_CARD}
        card = {
            **self.facts,
            "files": hashes,
            "warnings": unique,
            "code": {"sha256": digest(files), "files": files},
            "versions": {
                "python": platform.python_version(),
                "anomed": importlib.metadata.version("anomed"),
                **{name: importlib.metadata.version(name) for name in packages if name in loaded},
            },
            "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
        }
        write_card(folder / RUN_CARD, card)
