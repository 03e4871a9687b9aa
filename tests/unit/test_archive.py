"""Folders and zips as one read-only view, and the zips that are refused."""

import stat
import zipfile
from pathlib import Path

import pytest

from anomed import archive
from anomed.archive import Entry
from anomed.errors import AnomedError

FILES = {"b/y.png": b"yy", "b/c/z.png": b"zzz", "a.txt": b"", "b/x.png": b"x"}


def folder(at: Path) -> Path:
    for name, data in FILES.items():
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_bytes(data)
    return at


def packed(at: Path, *members: tuple[zipfile.ZipInfo | str, bytes]) -> Path:
    with zipfile.ZipFile(at, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in (*FILES.items(), *members):
            file.writestr(name, data)
    return at


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_both_kinds_look_alike(tmp_path: Path, kind: str) -> None:
    tree = archive.view(folder(tmp_path / "d") if kind == "folder" else packed(tmp_path / "d.zip"))
    assert [(entry.name, entry.size) for entry in tree.files()] == [(n, len(FILES[n])) for n in sorted(FILES)]
    assert [entry.name for entry in tree.files("b")] == ["c/z.png", "x.png", "y.png"]
    assert tree.folders() == ["b"]
    assert tree.folders("b") == ["c"]
    assert {name: tree.read(name) for name in FILES} == FILES
    assert all((entry.crc is None) == (kind == "folder") for entry in tree.files())


def test_a_zip_is_not_unpacked(tmp_path: Path) -> None:
    tree = archive.view(packed(tmp_path / "d.zip"))
    tree.read("b/y.png")
    assert [path.name for path in tmp_path.iterdir()] == ["d.zip"]


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("../x.png", "leads out of the archive with '..'"),
        ("b/../../x.png", "leads out of the archive with '..'"),
        ("/etc/x.png", "has an absolute name"),
        ("C:/x.png", "has an absolute name"),
        ("b\\x.png", "has a backslash"),
        (link("l.png"), "is a symbolic link"),
        ("b/./x.png", "occurs twice"),
    ],
)
def test_unsafe_members_are_refused(tmp_path: Path, name: zipfile.ZipInfo | str, fault: str) -> None:
    path = packed(tmp_path / "d.zip", (name, b"data"))
    with pytest.raises(AnomedError) as error:
        archive.view(path)
    shown = name if isinstance(name, str) else name.filename
    assert str(error.value).startswith(f"{path}: member {shown!r} {fault}")
    assert "unpack it yourself and set `root` to the folder" in str(error.value)


def test_encrypted_members_are_refused(tmp_path: Path) -> None:
    path = packed(tmp_path / "d.zip")
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(AnomedError, match=r"member 'b/y\.png' is encrypted"):
        archive.view(path)


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed(tmp_path / "d.zip", ("big.png", bytes(100_000)))
    monkeypatch.setattr(archive, "RATIO_FROM", 50_000)
    with pytest.raises(
        AnomedError, match=r"member 'big\.png' unpacks from \d+ to 100,000 bytes, as a decompression bomb"
    ):
        archive.view(path)
    monkeypatch.setattr(archive, "MAX_MEMBER", 99_999)
    with pytest.raises(AnomedError, match=r"unpacks to 100,000 bytes \(at most 99,999 are read\)"):
        archive.view(path)


def test_cut_off_and_damaged_zips(tmp_path: Path) -> None:
    path = packed(tmp_path / "d.zip", ("x", b"0123456789" * 9))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AnomedError, match=r"d\.zip: not a complete zip file .*it may be cut off"):
        archive.view(path)
    damaged = bytearray(whole)
    damaged[whole.index(b"b/c/z.png") + len("b/c/z.png") + 1] ^= 0xFF
    path.write_bytes(damaged)
    tree = archive.view(path)
    with pytest.raises(AnomedError, match=r"d\.zip: member 'b/c/z\.png' is damaged \(.*copy or download it again"):
        tree.read("b/c/z.png")
    assert tree.read("b/x.png") == b"x"


def test_links_in_a_folder(tmp_path: Path) -> None:
    root = folder(tmp_path / "d")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/o.png").write_bytes(b"o")
    (root / "linked").symlink_to(tmp_path / "outside")
    (root / "f.png").symlink_to(tmp_path / "outside/o.png")
    tree = archive.view(root)
    assert {Entry("linked/o.png", 1), Entry("f.png", 1)} <= set(tree.files())
    assert tree.read("linked/o.png") == b"o"
    assert tree.folders() == ["b", "linked"]
    (root / "b/up").symlink_to(root)
    with pytest.raises(AnomedError, match="b/up: a link back to a folder above it; remove it"):
        tree.files()
    (root / "b/up").unlink()
    (root / "b/gone.png").symlink_to(root / "nowhere")
    with pytest.raises(AnomedError, match=r"b/gone\.png: a link that leads nowhere"):
        tree.files()


def test_what_is_no_root(tmp_path: Path) -> None:
    with pytest.raises(AnomedError, match="none: not found; `root` must name the folder or the zip file"):
        archive.view(tmp_path / "none")
    (tmp_path / "x.tar").write_bytes(b"x")
    with pytest.raises(AnomedError, match=r"x\.tar: neither a folder nor a \.zip file; unpack it"):
        archive.view(tmp_path / "x.tar")


def test_a_file_that_vanishes(tmp_path: Path) -> None:
    tree = archive.view(folder(tmp_path / "d"))
    (tmp_path / "d/b/x.png").unlink()
    with pytest.raises(AnomedError, match=r"b/x\.png: cannot be read \(No such file"):
        tree.read("b/x.png")
    with pytest.raises(AnomedError, match=r"d\.zip: has no member 'q'"):
        archive.view(packed(tmp_path / "d.zip")).read("q")
