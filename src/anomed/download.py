"""A resumable download: one file fetched in as many attempts as it takes, then checked by what is published of it."""

import contextlib
import errno
import fcntl
import http.client
import math
import os
import shutil
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from anomed import console, records
from anomed.errors import AnomedError

ATTEMPTS = 5  # in a row that bring no byte
PAUSE = 2.0  # seconds before the second attempt, twice as many before each further one
TIMEOUT = 60.0  # seconds without a byte
BLOCK = 2**20
LOOPBACK = ("localhost", "127.0.0.1", "::1")
PASSING = (408, 425, 429, 500, 502, 503, 504)  # replies that another attempt may change


@dataclass(frozen=True)
class Item:
    """One file to have. sha256: the digits that its hash starts with: all 64, or as many as are published, or none."""

    url: str
    target: Path
    sha256: str
    bytes: int | None = None


class _Again(Exception):
    """An attempt failed in a way that another one may not."""


def download(item: Item) -> None:
    """Make `item.target` the published file. Until it is complete and its hash right it is named `<name>.part`, with
    what the server said of it in `<name>.part.json`; a file of another hash ends as `<name>.wrong`."""
    target = item.target
    if target.exists():
        found = records.digest_file(target)
        if not found.startswith(item.sha256):
            hint = "move it away and call again"
            raise AnomedError(f"{target}: found sha256 {found}, expected {_expected(item)}; {hint}")
        print(f"{target}: complete and right, nothing to do")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with Part.locked(item) as part:
        part.fill()
        part.finish()
    print(f"{target}: complete{', sha256 as published' if item.sha256 else ''}")


class Part:
    """The beginning of a file, beside its target, and what the server said of the file that it is the beginning of."""

    def __init__(self, item: Item, file: IO[bytes]):
        self.item, self.file = item, file
        self.path, self.notes = self.places(item.target)

    @staticmethod
    def places(target: Path) -> tuple[Path, Path]:
        return target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.part.json")

    @classmethod
    @contextlib.contextmanager
    def locked(cls, item: Item) -> Iterator["Part"]:
        """The part of an item, which no second process may write at the same time."""
        path, _ = cls.places(item.target)
        with path.open("ab", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AnomedError(f"{path}: another `anomed fetch` is writing it; wait for it or end it") from None
            yield cls(item, file)

    @property
    def size(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def known(self) -> dict[str, Any]:
        """{"tag", "total"} of the file that the part belongs to; empty where that cannot be told."""
        try:
            notes = records.read_json(self.notes)
        except AnomedError:
            return {}
        if not isinstance(notes, dict) or set(notes) != {"url", "tag", "total"} or notes.pop("url") != self.item.url:
            return {}
        return notes

    def clear(self) -> None:
        self.file.truncate(0)
        self.notes.unlink(missing_ok=True)

    def fill(self) -> None:
        """Attempt after attempt until all is there. Raises AnomedError when several in a row bring nothing."""
        failures, furthest = 0, self.size
        while True:
            try:
                return self._attempt()
            except KeyboardInterrupt:
                raise AnomedError(f"{self.path}: stopped with {_amount(self.size)}; call again to go on") from None
            except _Again as error:
                if self.size > furthest:
                    failures, furthest = 0, self.size
                failures += 1
                kept = f"{_amount(self.size)} are kept in {self.path.name}"
                if failures >= ATTEMPTS:
                    hint = f"{kept}: call again later, or put the file at {self.item.target} yourself"
                    raise AnomedError(f"{self.item.url}: {error}; {hint}") from None
                pause = PAUSE * 2 ** (failures - 1)
                print(f"{self.item.target.name}: {error}; {kept}; next attempt in {pause:g} s")
                time.sleep(pause)

    def _attempt(self) -> None:
        """One request for what is missing."""
        known, headers = self.known(), {"User-Agent": "anomed", "Accept-Encoding": "identity"}
        if not known:
            if self.size:
                print(f"{self.path}: not known to be of {self.item.url}: from the beginning")
            self.clear()
        have = self.size
        if have and have == self._whole(known["total"]):
            return
        if have:
            headers["Range"] = f"bytes={have}-"
            if known["tag"] and not known["tag"].startswith("W/"):  # a weak one may not stand in If-Range
                headers["If-Range"] = known["tag"]
        with self._reply(headers) as reply:
            about = _about(reply)
            if not have and reply.status == 206 and _start(reply) != 0:
                raise _Again("the server gave a part that was not asked for")
            if have and (reply.status != 206 or _start(reply) != have or about != known):
                print(
                    f"{self.item.target.name}: the server has another file or gives no parts of it: from the beginning"
                )
                self.clear()
                if reply.status == 206:
                    raise _Again("the file on the server changed")
            self._check_size(about["total"])
            records.write_json(self.notes, {"url": self.item.url, **about})
            whole = self._whole(about["total"])
            self._copy(reply, whole)
        if whole is not None and self.size != whole:
            raise _Again(f"the connection ended after {_amount(self.size)} of {_amount(whole)}")

    def _whole(self, total: int | None) -> int | None:
        """Bytes of the whole file: what the server says, or where it does not, what was published."""
        return self.item.bytes if total is None else total

    def _reply(self, headers: dict[str, str]) -> Any:
        """The server's reply. Raises AnomedError where another attempt is no use, else _Again."""
        url = self.item.url
        host = urllib.parse.urlsplit(url).hostname
        own = [urllib.request.ProxyHandler({})] if host in LOOPBACK else []  # no proxy leads to this machine itself
        try:
            return urllib.request.build_opener(*own).open(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the part is longer than the file
                self.clear()
            if error.code in (*PASSING, 416):
                raise _Again(f"the server replied {error.code} {error.reason}") from None
            reason = {
                401: "it asks for a login",
                403: "it refuses",
                404: "it has no such file",
                410: "the file is gone",
            }
            hint = f"get the file another way and put it at {self.item.target}"
            said = reason.get(error.code, "it cannot give the file")
            raise AnomedError(f"{url}: the server replied {error.code} {error.reason}: {said}; {hint}") from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                hint = "check the clock and the proxy of this machine"
                raise AnomedError(f"{url}: the server's certificate is not trusted ({error.reason}); {hint}") from None
            raise _Again(f"the server cannot be reached ({error.reason})") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Again(f"the connection failed ({_named(error)})") from None

    def _check_size(self, total: int | None) -> None:
        """Raise AnomedError when the server's file is not of the published size, or the rest does not fit the disk."""
        stated = self.item.bytes
        if total is not None and stated is not None and total != stated:
            self.clear()
            raise AnomedError(f"{self.item.url}: found {total:,} bytes, expected {stated:,}; not the published file")
        folder = self.path.parent
        need, free = (total or stated or 0) - self.size, shutil.disk_usage(folder).free
        if need > free:
            hint = "make room or name another folder with --to"
            raise AnomedError(f"{folder}: {_amount(free)} free, {_amount(need)} needed; {hint}")
        whole = "of unknown size" if total is None else _amount(total)
        print(f"{self.item.target}: {whole}, {_amount(self.size)} of it here, from {self.item.url}")

    def _copy(self, reply: Any, total: int | None) -> None:
        steps = None if total is None else math.ceil((total - self.size) / BLOCK)
        for block in console.track(_blocks(reply), self.item.target.name, total=steps):
            if total is not None and self.size + len(block) > total:
                self.clear()
                raise AnomedError(f"{self.item.url}: found more than {total:,} bytes; not the published file")
            try:
                _append(self.file, block)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                hint = f"make room and call again: the {_amount(self.size)} in {self.path.name} are kept"
                raise AnomedError(f"{self.path.parent}: the disk is full; {hint}") from None

    def finish(self) -> None:
        """Give the complete part its name. Raises AnomedError when it is not the published file."""
        os.fsync(self.file.fileno())
        found = records.digest_file(self.path)
        self.notes.unlink(missing_ok=True)
        if not found.startswith(self.item.sha256):
            wrong = self.item.target.with_name(f"{self.item.target.name}.wrong")
            self.path.replace(wrong)
            hint = "the server has another file: do not use it, delete it"
            raise AnomedError(f"{wrong}: found sha256 {found}, expected {_expected(self.item)}; {hint}")
        self.path.replace(self.item.target)


def _about(reply: Any) -> dict[str, Any]:
    """{"tag": what changes with the file, "total": its bytes}, None where the reply does not say."""
    whole = reply.headers.get("Content-Range", "").rpartition("/")[2] or reply.headers.get("Content-Length", "")
    tag = reply.headers.get("ETag") or reply.headers.get("Last-Modified")
    return {"tag": tag, "total": int(whole) if whole.isdecimal() and len(whole) < 19 else None}


def _start(reply: Any) -> int | None:
    """The position of the first byte that a reply of status 206 gives."""
    first = reply.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    return int(first) if first.isdecimal() else None


def _blocks(reply: Any) -> Iterator[bytes]:
    """What comes, in blocks; also what came before the connection failed, so that every attempt leaves a gain."""
    while True:
        block, failure = b"", None
        while len(block) < BLOCK and failure is None:
            try:
                part = reply.read1(BLOCK - len(block))
            except (OSError, http.client.HTTPException) as error:
                part, failure = b"", error
            if not part:
                break
            block += part
        if block:
            yield block
        if failure is not None:
            raise _Again(f"the connection failed ({_named(failure)})")
        if len(block) < BLOCK:
            return


def _append(file: IO[bytes], block: bytes) -> None:
    rest = memoryview(block)
    while rest:
        rest = rest[file.write(rest) :]


def _expected(item: Item) -> str:
    return item.sha256 if len(item.sha256) == 64 else f"{item.sha256}..."


def _named(error: Exception) -> str:
    return str(error) or type(error).__name__


def _amount(number: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
