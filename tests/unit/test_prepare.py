"""The prepare command: what is checked for every source, and what it leaves when something is wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from anomed import manifest, plugins, prepare, records
from anomed.domains.source import Source
from anomed.errors import AnomedError, CaseProblem
from anomed.manifest import Case, Pixels, Prepared


def pixels(seed: int, marked: bool | None = None, shape: tuple[int, int] = (40, 60)) -> Pixels:
    image = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    mask = None
    if marked is not None:
        mask = np.zeros(shape, bool)
        mask[3:9, 50:57] = marked
    return Pixels(image, mask, records.digest(image.tobytes()))


def with_organ(what: Pixels, organ: np.ndarray | None) -> Pixels:
    return Pixels(what.image, what.mask, what.sha256, organ)


def organ(seed: int, shape: tuple[int, int] = (40, 60)) -> np.ndarray:
    """A region that is not its own flip or transpose, another for every seed, around the mask of `pixels`."""
    found = np.zeros(shape, bool)
    found[1 : 12 + seed, 30:58] = found[2:5, 5:31] = True
    return found


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

    def run(cases: list[Case], foreground: bool = False, **extra: Any) -> Path:
        class Listed(Source):
            needs_root = False
            has_foreground = foreground

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


ORGANS = [
    case("c", "train", 0, pixels(3)),
    case("a", "test", 0, with_organ(pixels(2, shape=(33, 61)), organ(2, (33, 61)))),
    case("b", "test", 1, with_organ(pixels(1, True), organ(1))),
    case("d", "test", 1, pixels(4)),
    case("e", "valid", 1, with_organ(pixels(5, True, (20, 64)), organ(5, (20, 64)))),
]


def test_the_foreground_reads_back_beside_the_masks(build: Any) -> None:
    prepared = Prepared(build(ORGANS, foreground=True))
    table = prepared.table.set_index("image_id")
    assert prepared.card["foreground"] is True
    assert table.mask_row[["c", "d"]].isna().all(), "where no truth is stored, no foreground is asked for"
    for name, seed, shape in (("a", 2, (33, 61)), ("b", 1, (40, 60)), ("e", 5, (20, 64))):
        found = prepared.foreground(table.mask_row[name])
        assert found is not None
        assert found.dtype == bool
        assert np.array_equal(found, organ(seed, shape)), "neither flipped nor transposed"
    expected = pixels(5, True, (20, 64)).mask
    assert expected is not None
    assert np.array_equal(prepared.mask(table.mask_row["e"]), expected)


def test_a_domain_without_foreground_has_none_and_stores_none(build: Any) -> None:
    without = build(ORGANS)
    prepared = Prepared(without)
    assert prepared.card["foreground"] is False
    assert prepared.foreground(0) is None
    with np.load(without / "masks.npz") as archive:
        assert archive.files == ["bits", "offsets", "shapes"]
        masks = {name: archive[name] for name in archive.files}
    with np.load(build(ORGANS, foreground=True) / "masks.npz") as archive:
        assert archive.files == ["bits", "offsets", "shapes", "foreground"]
        for name, values in masks.items():
            assert np.array_equal(archive[name], values), "a foreground changes nothing else"


@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        (pixels(9, True), "^f: source declares a foreground and gave none"),
        (
            with_organ(pixels(9, True), np.ones((60, 40), bool)),
            r"^f: source gave a foreground of shape \(60, 40\), expected \(40, 60\)",
        ),
    ],
)
def test_a_source_that_breaks_its_word_on_the_foreground_is_at_fault(build: Any, faulty: Pixels, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build([*ORGANS, case("f", "test", 1, faulty)], foreground=True)


def test_an_image_that_shows_nothing_of_the_organ_is_a_problem(build: Any, tmp_path: Path) -> None:
    empty = with_organ(pixels(9), np.zeros((40, 60), bool))
    with pytest.raises(
        AnomedError, match=r"1 empty_foreground; all are listed in .*\n.*f\.png: empty_foreground: found"
    ):
        build([*ORGANS, case("f", "test", 0, empty)], foreground=True)
    assert list(pd.read_csv(tmp_path / "problems.csv").code) == ["empty_foreground"]


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
