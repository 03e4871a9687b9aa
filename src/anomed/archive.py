"""A read-only view of what a user's `root` points to: a folder or a zip, by relative names."""

import lzma
import os
import re
import stat
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anomed import console, records
from anomed.errors import AnomedError, CaseProblem

_DAMAGE = (OSError, EOFError, NotImplementedError, RuntimeError, struct.error)  # what reading a cut or odd zip raises
MAX_MEMBER = 2**30  # bytes; no single image of a benchmark comes near it
MAX_RATIO, RATIO_FROM = 200, 2**26  # a member above 64 MiB that was packed more than 200-fold is a decompression bomb


@dataclass(frozen=True)
class Entry:
    """One file: name with forward slashes relative to the folder asked for, size in bytes, CRC-32 (zips only)."""

    name: str
    size: int
    crc: int | None = None


class View:
    """What the two kinds share: `folders`, `files` and `read` by names relative to `root`; nothing is ever written."""

    def __init__(self, root: Path):
        self.root = root

    def folders(self, at: str = "") -> list[str]:
        """Names of the folders directly inside `at`, sorted."""
        raise TypeError(f"{type(self).__name__} does not define folders()")

    def files(self, at: str = "") -> list[Entry]:
        """Every file below `at`, sorted by name; names are relative to `at`."""
        raise TypeError(f"{type(self).__name__} does not define files()")

    def read(self, name: str) -> bytes:
        """The bytes of one file, by its name relative to `root`. Raises AnomedError when it is damaged or missing."""
        raise TypeError(f"{type(self).__name__} does not define read()")

    def take(self, name: str, expected: str, at: str = "", hint: str = "copy or download it again") -> bytes:
        """The bytes of the file of one case, `name` below the folder `at`. Raises CaseProblem when it cannot be read:
        other cases still can."""
        try:
            return self.read(f"{at}/{name}" if at else name)
        except AnomedError as error:
            raise CaseProblem(
                name, "unreadable_file", f"a file that cannot be read ({error})", expected, hint
            ) from None


def identity(tree: View, at: str, entries: list[Entry], cache: Path) -> list[list[Any]]:
    """[name, size, hash of the content] of `entries` below `at`: CRC-32 in a zip, sha256 in a folder.

    A file of a folder is read again only when its size, dates or inode are other than `cache` (JSON, ours to write)
    says; dates and inode themselves are no part of the identity, so a copy of the data has the same one.
    """
    if not isinstance(tree, Folder):
        return [[entry.name, entry.size, entry.crc] for entry in entries]
    known = _remembered(cache)
    hashes: dict[str, list[Any]] = {}
    for entry in console.track(entries, f"read {tree.root / at}"):
        path = tree.root / at / entry.name
        facts = path.stat()
        key = [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]
        old = known.get(entry.name)
        if isinstance(old, list) and len(old) == 5 and old[:4] == key:
            hashes[entry.name] = old
        else:
            hashes[entry.name] = [*key, records.digest_file(path)]
    if hashes != known:
        records.write_json(cache, hashes)
    return [[entry.name, entry.size, hashes[entry.name][4]] for entry in entries]


def _remembered(cache: Path) -> dict[str, Any]:
    """What `identity` wrote; nothing where the file is missing or damaged: it only saves time."""
    try:
        known = records.read_json(cache)
    except AnomedError:
        return {}
    return known if isinstance(known, dict) else {}


def view(root: Path) -> View:
    """The folder or zip at `root`. Raises AnomedError when nothing is there or it is neither."""
    if root.is_dir():
        return Folder(root)
    if not root.exists():
        raise AnomedError(f"{root}: not found; `root` must name the folder or the zip file that holds the images")
    if root.is_file() and root.suffix.lower() == ".zip":
        return Zip(root)
    raise AnomedError(f"{root}: neither a folder nor a .zip file; unpack it and set `root` to the folder")


class Folder(View):
    """A folder. Links are followed, to files and to folders, also out of `root`: users link their data sets together.

    A link that leads nowhere or back to a folder above it is an AnomedError.
    """

    def folders(self, at: str = "") -> list[str]:
        return sorted(entry.name for entry in self._list(self.root / at) if entry.is_dir())

    def files(self, at: str = "") -> list[Entry]:
        found: list[Entry] = []
        self._walk(self.root / at, "", (), found)
        return sorted(found, key=lambda entry: entry.name)

    @staticmethod
    def _list(folder: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as content:
                return list(content)
        except OSError as error:
            raise AnomedError(f"{folder}: cannot be listed ({error.strerror}); check its permissions") from None

    def _walk(self, folder: Path, prefix: str, above: tuple[tuple[int, int], ...], found: list[Entry]) -> None:
        here = folder.stat()
        above = (*above, (here.st_dev, here.st_ino))
        for entry in self._list(folder):
            try:
                entry.name.encode()
                if not entry.name.isprintable():
                    raise AnomedError(f"{folder}: file name {entry.name!r} has a control character; rename the file")
                facts = entry.stat()
            except UnicodeEncodeError:
                raise AnomedError(f"{folder}: file name {entry.name!r} is not valid UTF-8; rename the file") from None
            except OSError as error:
                raise AnomedError(
                    f"{entry.path}: a link that leads nowhere ({error.strerror}); mend or remove it"
                ) from None
            if stat.S_ISDIR(facts.st_mode):
                if (facts.st_dev, facts.st_ino) in above:
                    raise AnomedError(f"{entry.path}: a link back to a folder above it; remove it")
                self._walk(Path(entry.path), f"{prefix}{entry.name}/", above, found)
            elif stat.S_ISREG(facts.st_mode):
                found.append(Entry(prefix + entry.name, facts.st_size))

    def read(self, name: str) -> bytes:
        try:
            return (self.root / name).read_bytes()
        except OSError as error:
            raise AnomedError(f"{self.root / name}: cannot be read ({error.strerror}); check the file") from None


class Zip(View):
    """A zip file, read in place and never unpacked.

    Every member is checked first: names that leave the archive, links, encrypted or absurdly large members and
    duplicate names are an AnomedError naming the archive and the member.
    """

    def __init__(self, root: Path):
        super().__init__(root)
        try:
            self._zip = zipfile.ZipFile(root)
        except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
            raise AnomedError(
                f"{root}: not a complete zip file ({error}); it may be cut off: copy or download it again"
            ) from None
        self._members: dict[str, zipfile.ZipInfo] = {}
        for info in self._zip.infolist():
            name = "/".join(part for part in info.filename.split("/") if part not in ("", "."))
            fault = self._fault(info) or ("occurs twice" if name in self._members and not info.is_dir() else "")
            if fault:
                raise AnomedError(
                    f"{root}: member {info.orig_filename!r} {fault}; an archive with such a member is not read: "
                    "check where it comes from, unpack it yourself and set `root` to the folder"
                )
            if not info.is_dir():
                self._members[name] = info

    @staticmethod
    def _fault(info: zipfile.ZipInfo) -> str:
        name = info.orig_filename
        if name.startswith("/") or re.match(r"[A-Za-z]:", name):
            return "has an absolute name"
        if "\\" in name or not name.isprintable():
            return "has a backslash or a control character in its name"
        if ".." in name.split("/"):
            return "leads out of the archive with '..'"
        if stat.S_ISLNK(info.external_attr >> 16):
            return "is a symbolic link"
        if info.flag_bits & 0x1:
            return "is encrypted"
        if info.file_size > MAX_MEMBER:
            return f"unpacks to {info.file_size:,} bytes (at most {MAX_MEMBER:,} are read)"
        if info.file_size > RATIO_FROM and info.file_size > MAX_RATIO * max(1, info.compress_size):
            return f"unpacks from {info.compress_size:,} to {info.file_size:,} bytes, as a decompression bomb does"
        return ""

    def folders(self, at: str = "") -> list[str]:
        prefix = f"{at}/" if at else ""
        inside = (name[len(prefix) :].split("/") for name in self._members if name.startswith(prefix))
        return sorted({parts[0] for parts in inside if len(parts) > 1})

    def files(self, at: str = "") -> list[Entry]:
        prefix = f"{at}/" if at else ""
        return sorted(
            (
                Entry(name[len(prefix) :], info.file_size, info.CRC)
                for name, info in self._members.items()
                if name.startswith(prefix)
            ),
            key=lambda entry: entry.name,
        )

    def read(self, name: str) -> bytes:
        try:
            return self._zip.read(self._members[name])
        except KeyError:
            raise AnomedError(f"{self.root}: has no member {name!r}") from None
        except (*_DAMAGE, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
            raise AnomedError(f"{self.root}: member {name!r} is damaged ({error}); copy or download it again") from None
