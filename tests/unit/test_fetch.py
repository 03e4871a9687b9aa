"""The fetch command and its downloads, against a server on this machine that misbehaves as asked."""

import dataclasses
import errno
import hashlib
import http.server
import json
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import shipped
import yaml

from anomed import download, fetch, weights
from anomed.download import Item
from anomed.errors import AnomedError

DATA = np.random.default_rng(0).integers(0, 256, 3_000_000, dtype=np.uint8).tobytes()
SHA = hashlib.sha256(DATA).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `server.data`, with parts (`ranges`) and with tags that it heeds, unless it is `blind`. server.faults: what goes wrong with each request in turn, a reply's
    number or the number of bytes after which the connection ends."""

    server: Any
    timeout = 5.0

    def do_GET(self) -> None:
        server = self.server
        server.seen.append((self.headers.get("Range"), self.headers.get("If-Range")))
        fault = server.faults.pop(0) if server.faults else None
        if fault is not None and 100 < fault < 600:
            self.send_error(fault)
            return
        body, status = server.data, 200
        tag = f'"{hashlib.md5(body).hexdigest()}"'
        if server.ranges and self.headers.get("Range") and (server.blind or self.headers.get("If-Range", tag) == tag):
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            if start >= len(body):
                self.send_error(416)
                return
            status, body = 206, body[start:]
        self.send_response(status)
        if server.says:
            self.send_header("Content-Length", server.says.format(len(body)))
        if server.tags:
            self.send_header("ETag", tag)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(server.data) - 1}/{len(server.data)}")
        self.end_headers()
        self.wfile.write(body if fault is None else body[:fault])
        self.wfile.flush()
        if server.stalls and fault is not None:
            self.rfile.read(1)  # until the client hangs up
        self.close_connection = True

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    made: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.data, made.faults, made.seen, made.ranges, made.tags, made.blind = DATA, [], [], True, True, False
    made.says, made.stalls = "{}", False  # the length that a reply states; a fault holds the connection open
    made.url = f"http://127.0.0.1:{made.server_port}/big.bin"
    made.handle_error = lambda *request: None  # the client hung up: nothing to print
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture
def item(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Item:
    monkeypatch.setattr(download, "PAUSE", 0.0)
    return Item(server.url, tmp_path / "raw" / "big.bin", SHA, len(DATA))


def names(item: Item) -> list[str]:
    return sorted(path.name for path in item.target.parent.iterdir())


def test_a_complete_download_is_checked_named_and_not_asked_for_again(
    item: Item, server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    download.download(item)
    assert item.target.read_bytes() == DATA
    assert names(item) == ["big.bin"]
    assert server.seen == [(None, None)]
    download.download(item)
    assert len(server.seen) == 1
    assert "complete and right, nothing to do" in capsys.readouterr().out


def test_a_second_call_asks_for_the_rest_alone(item: Item, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    server.faults = [1_200_000]
    with pytest.raises(AnomedError, match=r"ended after 1\.2 MB of 3\.0 MB; 1\.2 MB are kept in big.bin.part"):
        download.download(item)
    assert names(item) == ["big.bin.part", "big.bin.part.json"]
    assert item.target.with_name("big.bin.part").read_bytes() == DATA[:1_200_000]
    download.download(item)
    tag = f'"{hashlib.md5(DATA).hexdigest()}"'
    assert server.seen == [(None, None), ("bytes=1200000-", tag)]
    assert item.target.read_bytes() == DATA
    assert names(item) == ["big.bin"]


def test_cuts_and_busy_servers_are_tried_again(item: Item, server: Any) -> None:
    server.faults = [503, 1_000_000, 502, 700, 429]
    download.download(item)
    assert [asked for asked, _ in server.seen] == [None, None, *["bytes=1000000-"] * 2, *["bytes=1000700-"] * 2]
    assert item.target.read_bytes() == DATA


def test_a_server_that_stays_busy_is_named(item: Item, server: Any) -> None:
    server.faults = [503] * 50
    with pytest.raises(AnomedError, match=rf"{server.url}: the server replied 503 .*; 0 bytes are kept"):
        download.download(item)
    assert len(server.seen) == download.ATTEMPTS


@pytest.mark.parametrize(("tags", "blind"), [(True, False), (True, True), (False, False)])
def test_a_file_that_changed_on_the_server_starts_again(
    tags: bool, blind: bool, server: Any, item: Item, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a tag, only another size shows it."""
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    server.faults, server.data, server.tags = [5_000], b"old" * 20_000, tags
    server.blind = blind
    old = Item(item.url, item.target, item.sha256)
    with pytest.raises(AnomedError, match="the connection ended"):
        download.download(old)
    server.data = DATA
    monkeypatch.setattr(download, "ATTEMPTS", 2)
    download.download(old)
    assert item.target.read_bytes() == DATA
    assert names(item) == ["big.bin"]


def test_a_server_without_parts_starts_again(item: Item, server: Any) -> None:
    server.faults, server.ranges = [1_200_000], False
    download.download(item)
    assert [asked for asked, _ in server.seen] == [None, "bytes=1200000-"]
    assert item.target.read_bytes() == DATA


def test_a_server_without_parts_that_always_cuts_is_given_up(item: Item, server: Any) -> None:
    server.faults, server.ranges = [5_000] * 50, False
    with pytest.raises(AnomedError, match="the connection ended"):
        download.download(item)
    assert len(server.seen) == download.ATTEMPTS


@pytest.mark.parametrize("says", ["", "many", "9" * 5000])
def test_a_length_that_the_server_does_not_state_is_the_published_one(says: str, item: Item, server: Any) -> None:
    server.says, server.faults = says, [1_200_000]
    download.download(item)
    assert item.target.read_bytes() == DATA
    assert server.seen[1][0] == "bytes=1200000-"


def test_a_reply_without_end_is_cut_off(item: Item, server: Any) -> None:
    server.says, server.data = "", DATA + bytes(50_000_000)
    with pytest.raises(AnomedError, match=r"found more than 3,000,000 bytes; not the published file"):
        download.download(item)
    assert item.target.with_name("big.bin.part").stat().st_size == 0


def test_what_came_before_a_connection_stalled_is_kept(
    item: Item, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    server.stalls, server.faults = True, [1_200_000, 700]
    download.download(item)
    assert [asked for asked, _ in server.seen] == [None, "bytes=1200000-", "bytes=1200700-"]
    assert item.target.read_bytes() == DATA


def test_a_wrong_hash_is_set_aside(item: Item, server: Any) -> None:
    server.data = b"x" + DATA[1:]
    with pytest.raises(AnomedError, match=rf"big\.bin\.wrong: found sha256 [0-9a-f]{{64}}, expected {SHA}"):
        download.download(item)
    assert names(item) == ["big.bin.wrong"]


def test_another_size_than_the_published_one_is_refused_before_the_download(item: Item, server: Any) -> None:
    server.data = DATA[:-1]
    with pytest.raises(AnomedError, match="found 2,999,999 bytes, expected 3,000,000; not the published file"):
        download.download(item)
    assert names(item) == ["big.bin.part"]
    assert item.target.with_name("big.bin.part").stat().st_size == 0


def test_a_hash_may_be_known_by_its_first_digits(item: Item) -> None:
    download.download(Item(item.url, item.target, SHA[:8]))
    with pytest.raises(AnomedError, match="expected 00000000"):
        download.download(Item(item.url, item.target, "00000000"))
    assert item.target.exists()  # a user's own file is never removed


@pytest.mark.parametrize(
    ("code", "said"), [(404, "it has no such file"), (403, "it refuses"), (401, "asks for a login")]
)
def test_replies_that_stay_are_final(code: int, said: str, item: Item, server: Any) -> None:
    server.faults = [code]
    with pytest.raises(AnomedError, match=f"the server replied {code} .*{said}.*put it at .*big.bin"):
        download.download(item)
    assert len(server.seen) == 1


def test_a_server_that_is_not_there_is_named(item: Item) -> None:
    with pytest.raises(AnomedError, match=r"http://127\.0\.0\.1:9/x: the server cannot be reached .*refused"):
        download.download(Item("http://127.0.0.1:9/x", item.target, SHA))


def test_too_small_a_disk_is_seen_before(item: Item, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: usage(9, 0, 2_000_000))
    with pytest.raises(AnomedError, match=r"raw: 2\.0 MB free, 3\.0 MB needed; make room or name another folder"):
        download.download(item)


def test_a_disk_that_fills_up_keeps_what_has_come(item: Item, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    append = download._append

    def full(file: IO[bytes], block: bytes) -> None:
        append(file, block[:700_000])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "_append", full)
    with pytest.raises(AnomedError, match=r"the disk is full; make room and call again: the 700\.0 kB in big.bin.part"):
        download.download(item)
    monkeypatch.setattr(download, "_append", append)
    download.download(item)
    assert server.seen[-1][0] == "bytes=700000-"
    assert item.target.read_bytes() == DATA


def test_a_part_of_unknown_origin_is_not_continued(item: Item, server: Any) -> None:
    item.target.parent.mkdir()
    item.target.with_name("big.bin.part").write_bytes(b"?" * 1000)
    download.download(item)
    assert server.seen == [(None, None)]
    assert item.target.read_bytes() == DATA


def test_a_complete_part_needs_no_request(item: Item, server: Any) -> None:
    """A call that ended between the last byte and the check."""
    item.target.parent.mkdir()
    item.target.with_name("big.bin.part").write_bytes(DATA)
    notes = {"url": item.url, "tag": None, "total": len(DATA)}
    item.target.with_name("big.bin.part.json").write_text(json.dumps(notes))
    download.download(item)
    assert server.seen == []
    assert names(item) == ["big.bin"]


def test_two_calls_do_not_write_one_file(item: Item) -> None:
    item.target.parent.mkdir()
    with download.Part.locked(item), pytest.raises(AnomedError, match="another `anomed fetch` is writing it"):
        download.download(item)


def test_a_proxy_does_not_stand_before_this_machine(item: Item, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    download.download(item)
    assert item.target.read_bytes() == DATA


# The command.

CARD = {
    "title": "Brain",
    "description": "d",
    "sources": {
        "raw": {"licence": "L", "citation": "C", "obtain": "ask the hospital"},
        "bmad": {
            "licence": "L", "citation": "C", "obtain": "o", "restricted": True, "terms": "be good",
            "counts": {"train": {"normal": 1}},
            "downloads": [{"name": "bmad.zip", "url": "", "sha256": SHA}],
        },
    },
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, Any]], None]:
    monkeypatch.chdir(tmp_path)
    Path("data/cards").mkdir(parents=True)

    def write(domain: str, card: dict[str, Any]) -> None:
        Path(f"data/cards/{domain}.yaml").write_text(yaml.safe_dump(card))

    return write


def test_a_domain_prints_its_terms_first_and_the_block_last(
    project: Callable[..., None], server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    CARD["sources"]["bmad"]["downloads"][0]["url"] = server.url  # type: ignore[index]
    project("brain_mri", CARD)
    fetch.fetch("brain_mri", None, Path("params.yaml"))
    assert Path("data/raw/bmad/bmad.zip").read_bytes() == DATA
    out = capsys.readouterr().out
    assert out.index("terms: be good") < out.index(server.url)
    block = yaml.safe_load(out.partition("For params.yaml:")[2])
    root = "data/raw/bmad/bmad.zip"
    assert block == {"domains": {"brain_mri": {"source": "bmad", "root": root, "release": "official"}}}
    fetch.fetch("brain_mri", Path("elsewhere"), Path("params.yaml"))
    assert Path("elsewhere/bmad.zip").exists()


def test_what_cannot_be_fetched_says_how_to_get_it(project: Callable[..., None]) -> None:
    project("heart", {**CARD, "sources": {"raw": CARD["sources"]["raw"]}})  # type: ignore[index]
    with pytest.raises(
        AnomedError, match=r"no open download with a published hash is known.*\n  raw: ask the hospital"
    ):
        fetch.fetch("heart", None, Path("params.yaml"))
    with pytest.raises(AnomedError, match=r"hart: nothing is known to fetch; expected `weights` or .* card: heart"):
        fetch.fetch("hart", None, Path("params.yaml"))


Listing = Callable[..., Path]


@pytest.fixture
def listing(project: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Listing:
    """Writes params.yaml in which patchcore stands on the given backbones, and nothing else reads a file."""
    for name in ("HF_HUB_CACHE", "TORCH_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(download, "PAUSE", 0.0)

    def write(*backbones: str) -> Path:
        params = shipped.params()
        params["domains"] = {"brain_mri": {"source": "bmad", "root": "raw"}}
        params["run"]["domains"], params["run"]["systems"] = ["brain_mri"], []
        for number, name in enumerate(backbones):
            block = {"implementation": "patchcore", "backbone": name, "layers": ["layer2"]}
            params["methods"][f"patchcore_{number}"] = block
            params["run"]["systems"].append(f"patchcore_{number}")
        Path("params.yaml").write_text(yaml.safe_dump(params))
        return Path("params.yaml")

    return write


def publish(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server gives any file of torchvision and of the hub."""
    monkeypatch.setattr(weights, "TORCHVISION_URL", f"{server.url}/")
    monkeypatch.setitem(weights.TORCHVISION, "resnet18", f"resnet18-{SHA[:8]}.pth")
    own = weights.timm("resnet18")
    monkeypatch.setattr(weights, "timm", lambda name: dataclasses.replace(own, url=server.url) if "." in name else own)


def test_weights_that_the_systems_name(
    listing: Listing, server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch.fetch("weights", None, listing("tf_efficientnet_lite0"))
    assert "nothing to fetch: the systems of params.yaml read only tf_efficientnet_lite0" in capsys.readouterr().out
    assert not Path("data/weights").exists()
    publish(server, monkeypatch)
    config = listing("resnet18", "resnet18", "resnet18.a1_in1k", "tf_efficientnet_lite0")
    fetch.fetch("weights", None, config)
    out = capsys.readouterr().out
    files = [Path(f"data/weights/resnet18-{SHA[:8]}.pth"), Path("data/weights/resnet18.a1_in1k.safetensors")]
    assert sorted(Path("data/weights").iterdir()) == files
    assert [path.read_bytes() for path in files] == [DATA, DATA]
    assert len(server.seen) == 2
    assert out.count("terms: ") == 2
    assert out.index("terms: timm's weights") < out.index(server.url)
    assert f"{files[1]}: no hash of it is published; found sha256 {SHA}" in out
    assert f"{files[0]}: no hash" not in out
    fetch.fetch("weights", None, config)
    out = capsys.readouterr().out
    assert f"{files[0]}: resnet18, sha256 {SHA}" in out
    assert f"{files[1]}: resnet18.a1_in1k, sha256 {SHA}" in out
    assert "terms: " not in out
    assert len(server.seen) == 2


def test_weights_that_a_hub_s_library_fetched_are_left_there(
    listing: Listing, server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(server, monkeypatch)
    kept = tmp_path / f"TORCH_HOME/hub/checkpoints/resnet18-{SHA[:8]}.pth"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(DATA)
    monkeypatch.setattr(weights, "_kept", lambda url: [kept])
    fetch.fetch("weights", None, listing("resnet18"))
    assert f"{kept}: resnet18, sha256 {SHA}" in capsys.readouterr().out
    assert server.seen == []
    fetch.fetch("weights", Path("carried"), listing("resnet18"))  # to take along: all of them
    assert (Path("carried") / kept.name).read_bytes() == DATA


def test_one_file_that_cannot_be_had_does_not_hold_up_the_others(
    listing: Listing, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(server, monkeypatch)
    server.faults = [404]
    with pytest.raises(AnomedError, match=rf"replied 404 .* put it at data/weights/resnet18-{SHA[:8]}\.pth$"):
        fetch.fetch("weights", None, listing("resnet18", "resnet18.a1_in1k"))
    assert Path("data/weights/resnet18.a1_in1k.safetensors").read_bytes() == DATA


def test_a_user_who_stops_stops_all_of_it(listing: Listing, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(server, monkeypatch)

    def interrupted(reply: Any) -> Iterator[bytes]:
        yield reply.read(1000)
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "_blocks", interrupted)
    with pytest.raises(AnomedError, match=r"^data/weights/resnet18-.*stopped with .*; call again to go on$"):
        fetch.fetch("weights", None, listing("resnet18", "resnet18.a1_in1k"))
    assert len(server.seen) == 1


def test_wrong_weights_are_not_passed_over(listing: Listing, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(server, monkeypatch)
    path = Path(f"data/weights/resnet18-{SHA[:8]}.pth")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"other")
    with pytest.raises(AnomedError, match="not the published weights of resnet18: delete the file"):
        fetch.fetch("weights", None, listing("resnet18"))
    assert path.read_bytes() == b"other"
