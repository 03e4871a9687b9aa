"""The prepare command: what is checked for every source, and what it leaves when something is wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from anomed import manifest, plugins, prepare, records
from anomed.domains.source import Source
from anomed.errors import AnomedError
from anomed.manifest import Case, CaseProblem, Pixels, Prepared


def pixels(seed: int, marked: bool | None = None, shape: tuple[int, int] = (40, 60)) -> Pixels:
    image = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    mask = None
    if marked is not None:
        mask = np.zeros(shape, bool)
        mask[3:9, 50:57] = marked
    return Pixels(image, mask, records.digest(image.tobytes()))


def case(name: str, split: str, label: int, what: Pixels | CaseProblem, subject: str = "") -> Case:
    def load() -> Pixels:
        if isinstance(what, CaseProblem):
            raise what
        return what

    return Case(name, subject or name, split, label, f"{name}.png", load)


GOOD = [
    case("b", "test", 1, pixels(1, True)),
    case("a", "test", 0, pixels(2)),
    case("c", "train", 0, pixels(3)),
    case("d", "valid", 1, pixels(4, True)),
    case("e", "train", 0, pixels(5)),
]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that prepares a list of cases and gives the folder."""

    def run(cases: list[Case], **extra: Any) -> Path:
        class Listed(Source):
            needs_root = False

            def cases(self) -> list[Case]:
                return cases

        monkeypatch.setitem(plugins._REGISTRY.setdefault("domains", {}), "listed", Listed)
        parameters = {"source": "listed", "size": 32, "release": None, "fingerprint": "", **extra}
        out = tmp_path / "prepared/toy"
        prepare.prepare("toy", parameters, None, tmp_path / "work", out, tmp_path / "problems.csv")
        return out

    return run


def test_a_prepared_domain_reads_back(build: Any) -> None:
    prepared = Prepared(build(GOOD))
    table = prepared.table
    assert list(table.image_id) == ["c", "e", "d", "a", "b"], "train, valid, test; normal first"
    assert list(table.row) == [0, 1, 2, 3, 4]
    assert table.mask_row.isna().tolist() == [True, True, False, False, False]
    assert prepared.images.shape == (5, 32, 32)
    assert prepared.images.dtype == np.uint8
    expected = pixels(1, True)
    assert expected.mask is not None
    assert np.array_equal(prepared.native("b"), expected.image), "native pixels, neither flipped nor transposed"
    assert np.array_equal(prepared.mask(table.mask_row[4]), expected.mask)
    assert not prepared.mask(table.mask_row[3]).any()
    assert prepared.card["counts"]["test"] == {"normal": 1, "abnormal": 1}
    assert prepared.card["masks"] is True
    assert prepared.card["official"] is False


def test_the_same_cases_give_the_same_bytes(build: Any) -> None:
    first = {path.name: path.read_bytes() for path in build(GOOD).iterdir()}
    second = {path.name: path.read_bytes() for path in build(GOOD[::-1]).iterdir()}
    assert first == second
    assert set(first) == {*manifest.FILES, "card.json"}


BROKEN = CaseProblem("x.png", "unreadable", "a cut file", "a PNG", "export it again")


@pytest.mark.parametrize(
    ("bad", "code", "message"),
    [
        (case("a", "valid", 0, pixels(9)), "duplicate_id", "a unique image id"),
        (case("f", "train", 0, pixels(2)), "duplicate_across_splits", "the same pixels as"),
        (case("f", "train", 1, pixels(9, True)), "abnormal_in_train", "learn from normal images only"),
        (case("f", "train", 0, pixels(9), "b"), "subject_in_two_splits", "one split"),
        (case("f", "test", 1, pixels(9, False)), "empty_mask", "an empty mask"),
        (case("f", "test", 0, pixels(9, True)), "mask_in_normal", "42 marked pixels"),
        (case("f", "test", 1, Pixels(pixels(9).image, np.ones((9, 9), bool), "")), "mask_size", "9 x 9"),
        (case("f", "test", 0, BROKEN), "unreadable", "export it again"),
    ],
)
def test_problems_stop_it_and_are_listed(build: Any, tmp_path: Path, bad: Case, code: str, message: str) -> None:
    with pytest.raises(AnomedError, match=code) as caught:
        build([*GOOD, bad])
    assert message in str(caught.value)
    assert "problems.csv" in str(caught.value)
    listed = pd.read_csv(tmp_path / "problems.csv")
    assert code in set(listed.code)
    assert list(listed.columns) == ["case", "code", "found", "expected", "hint"]
    assert not list((tmp_path / "prepared").iterdir()), "nothing half-written"


def test_all_problems_are_listed_at_once(build: Any, tmp_path: Path) -> None:
    with pytest.raises(AnomedError, match=r"1 abnormal_in_train, 1 empty_mask, 1 unreadable|1 .*; all are listed"):
        build(
            [
                *GOOD,
                case("f", "train", 1, pixels(9, True)),
                case("g", "test", 1, pixels(10, False)),
                case("h", "test", 0, BROKEN),
            ]
        )
    assert set(pd.read_csv(tmp_path / "problems.csv").code) == {"abnormal_in_train", "empty_mask", "unreadable"}


def test_nothing_at_all_is_an_error(build: Any) -> None:
    with pytest.raises(AnomedError, match="found no image there for domain 'toy'"):
        build([])


def test_a_damaged_manifest_is_named(build: Any) -> None:
    path = build(GOOD) / "manifest.csv"
    text = path.read_text()
    path.write_text(text.replace("\nb,", "\na,"))
    with pytest.raises(AnomedError, match=r"manifest\.csv: image_id is not unique, first at 'a'"):
        manifest.read(path)
    path.write_text(text.replace("subject_id", "patient"))
    with pytest.raises(AnomedError, match="found columns"):
        manifest.read(path)


@pytest.mark.parametrize("name", ["manifest.csv", "images.npy", "masks.npz", "native.zip"])
def test_a_prepared_file_that_was_changed_is_noticed(build: Any, name: str) -> None:
    folder = build(GOOD)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(AnomedError, match=rf"{name}: not the file that the card beside it describes"):
        prepared = Prepared(folder)
        _ = prepared.images
        prepared.mask(0)
        prepared.native("a")


def test_hashes_of_a_card_must_add_up(build: Any) -> None:
    folder = build(GOOD)
    card = records.read_card(folder / "card.json")
    card["files"]["manifest.csv"] = "0" * 64
    records.write_card(folder / "card.json", card)
    with pytest.raises(AnomedError, match=r"card\.json: its hashes do not add up"):
        Prepared(folder)


def test_a_card_that_was_edited_is_noticed(build: Any) -> None:
    path = build(GOOD) / "card.json"
    path.write_text(path.read_text().replace('"official": false', '"official": true'))
    with pytest.raises(AnomedError, match=r"card\.json: damaged or edited: its content is not what was written"):
        Prepared(path.parent)


def test_ids_of_digits_stay_text(build: Any) -> None:
    cases = [
        case("007", "train", 0, pixels(1)),
        case("1e5", "test", 0, pixels(2)),
        case("NA", "test", 1, pixels(3, True)),
    ]
    table = Prepared(build(cases)).table
    assert table.subject_id.tolist() == ["007", "1e5", "NA"]


def test_an_official_release_needs_a_card_that_describes_it(build: Any) -> None:
    with pytest.raises(AnomedError, match=r"domains\.toy: release is official, but data/cards/toy\.yaml does not"):
        build(GOOD, release="official")
