"""Predictions from outside: what is kept, what is refused with the row named, and that they score like a run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_domain

from anomed import importing, records
from anomed.errors import AnomedError
from anomed.manifest import Prepared
from anomed.predictions import Predictions

COUNTS = {("train", 0): 3, ("valid", 0): 2, ("valid", 1): 1, ("test", 0): 3, ("test", 1): 3}
FIRST, LAST = "valid/0/0", "test/1/2"
GRID = (12, 20)


class Given:
    """What a user has: `scores.csv` and a folder of maps, and where things lie."""

    def __init__(self, root: Path, masks: bool = True):
        self.root = root
        self.prepared = tiny_domain.domain(root / "data", COUNTS, masks=masks)
        noise = np.random.default_rng(5)
        self.ids = self.prepared.evaluated().image_id.tolist()
        self.scores = dict(zip(self.ids, noise.normal(size=len(self.ids)).tolist(), strict=True))
        self.maps = {name: noise.normal(size=GRID).astype(np.float32) for name in self.ids}
        self.lines = ["image_id,score", *(f"{name},{score!r}" for name, score in self.scores.items())]
        for name, array in self.maps.items():
            self.map(name).parent.mkdir(parents=True, exist_ok=True)
            np.save(self.map(name), array)

    def map(self, name: str) -> Path:
        return self.root / "maps" / f"{name}.npy"

    def bring(self, seed: int = 0, maps: bool = True, origin: str = "their code, v2", domain: str = "tiny") -> Path:
        path = self.root / "scores.csv"
        path.write_text("".join(f"{line}\n" for line in self.lines), encoding="utf-8")
        folder = self.root / "maps" if maps else None
        given = importing.Given(path, folder)
        return importing.bring("theirs", domain, seed, given, origin, self.root / "data", self.root / "data/imported")


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    monkeypatch.chdir(tmp_path)
    return Given(tmp_path)


def parameters(domain: str = "tiny") -> dict[str, Any]:
    found = {str(seed): origin.digest for seed, origin in importing.brought(domain, "theirs").items()}
    return {"method": {"implementation": "imported", "predictions": found}, "files": {}}


def adopt(given: Given, seed: int = 0, made_with: dict[str, Any] | None = None) -> Predictions:
    out = given.root / "runs/tiny/theirs" / str(seed)
    importing.adopt("theirs", seed, made_with or parameters(), given.root / "data", out, importing.IMPORTED)
    return Predictions(out)


def test_what_was_imported_becomes_a_run_in_manifest_order(given: Given) -> None:
    given.lines[1:] = given.lines[:0:-1]
    given.bring()
    run = adopt(given)
    assert run.scores.image_id.tolist() == given.ids
    assert run.scores.score.tolist() == [given.scores[name] for name in given.ids], "every bit"
    for row, name in enumerate(given.ids):
        assert np.corrcoef(run.map(row).ravel(), given.maps[name].ravel())[0, 1] > 0.999, (
            "clipped below the 0.1 % quantile"
        )
    assert (run.card["origin"], run.card["device"], run.card["seed"]) == ("their code, v2", "elsewhere", 0)


def test_a_run_of_the_project_scores_the_same_when_it_comes_back(given: Given) -> None:
    ours = [(np.array([given.scores[name]]), given.maps[name][None]) for name in given.ids]
    tiny_domain.run(given.root / "ours", given.prepared, ours)
    given.bring()
    theirs = adopt(given)
    assert (given.root / "ours/scores.csv").read_bytes() == (theirs.folder / "scores.csv").read_bytes()
    assert (given.root / "ours/maps.npy").read_bytes() == (theirs.folder / "maps.npy").read_bytes()


def test_without_maps_the_system_does_not_localise(given: Given) -> None:
    given.bring(maps=False)
    assert adopt(given).maps is None


def test_a_domain_without_truth_keeps_maps_for_the_gallery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = Given(tmp_path, masks=False)
    given.bring()
    kept = adopt(given).scores
    assert kept.image_id[kept.map_row.notna()].str.startswith("test/").all()
    assert kept.map_row.notna().sum() == 6


def test_every_seed_is_found_with_its_origin_and_the_runs_tell_where_the_import_is_gone(given: Given) -> None:
    given.bring(seed=0)
    given.lines[1] = f"{FIRST},9.0"
    given.bring(seed=3, origin="another day")
    found = importing.brought("tiny", "theirs")
    assert {seed: origin.origin for seed, origin in found.items()} == {0: "their code, v2", 3: "another day"}
    assert found[0].digest != found[3].digest
    assert importing.brought("other", "theirs") == importing.brought("tiny", "nobody") == {}
    for seed in found:
        adopt(given, seed)
    (given.root / "data/imported/theirs").rename(given.root / "elsewhere")
    assert importing.brought("tiny", "theirs") == found


def test_runs_of_a_seed_that_was_removed_since_are_not_taken_for_imports(given: Given) -> None:
    for seed in (0, 1, 3):
        given.bring(seed=seed)
    for seed in (0, 1, 3):
        adopt(given, seed)
    shutil.rmtree(given.root / "data/imported/theirs/tiny/3")
    kept = importing.brought("tiny", "theirs")
    for seed in (0, 1):
        adopt(given, seed)
    shutil.rmtree(given.root / "data/imported")
    assert importing.brought("tiny", "theirs") == kept
    assert set(kept) == {0, 1}


def test_maps_may_lie_behind_links(given: Given) -> None:
    (given.root / "maps/test").rename(given.root / "elsewhere")
    (given.root / "maps/test").symlink_to(given.root / "elsewhere")
    given.bring()
    assert adopt(given).maps is not None


def test_an_import_that_was_damaged_or_moved_must_come_again(given: Given) -> None:
    folder = given.bring()
    shutil.copytree(folder, folder.with_name("4"))
    with pytest.raises(AnomedError, match=r"tiny/4/import\.json: is of .*'seed': 0}, expected .*'seed': 4}\. .*import"):
        importing.brought("tiny", "theirs")
    shutil.rmtree(folder.with_name("4"))
    known = parameters()
    (folder / "scores.csv").write_text("image_id,score\n")
    with pytest.raises(AnomedError, match=r"scores\.csv: not the file .* run `anomed import` for this seed"):
        adopt(given, made_with=known)
    (folder / "import.json").write_text("{")
    with pytest.raises(AnomedError, match=r"import\.json: not valid JSON .* run `anomed import` for this seed"):
        importing.brought("tiny", "theirs")
    shutil.rmtree(folder)
    with pytest.raises(AnomedError, match=r"import\.json: not found.* run `anomed import` for this seed"):
        adopt(given, made_with=known)


def test_the_same_predictions_have_the_same_digest_whenever_they_came(given: Given) -> None:
    given.bring()
    first = importing.brought("tiny", "theirs")
    given.lines[1:] = given.lines[:0:-1]
    given.bring()
    assert importing.brought("tiny", "theirs") == first


def line(number: int, text: str) -> Callable[[Given], object]:
    return lambda given: given.lines.__setitem__(number, text)


def store(name: str, array: np.ndarray) -> Callable[[Given], object]:
    return lambda given: np.save(given.map(name), array)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def header(shape: str) -> bytes:
    """The first bytes of an array of that shape."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (line(0, "id,score"), r"scores\.csv: found columns \['id', 'score'\], expected \['image_id', 'score'\]"),
        (line(0, ""), r"scores\.csv: found columns none"),
        (line(3, "valid/1/0"), r"scores\.csv, line 4: found 1 fields"),
        (line(3, "valid/1/0,0.1,7"), r"line 4: found 3 fields, expected image_id and score"),
        (line(2, "valid/0/9,0.1"), r"line 3: 'valid/0/9' is no image of the domain"),
        (line(2, "train/0/1,0.1"), r"line 3: 'train/0/1' is a train image; expected valid and test images"),
        (line(2, f"{FIRST},0.1"), rf"line 3: '{FIRST}' stands there a second time"),
        (line(2, "valid/0/1,high"), r"line 3: 'valid/0/1' has the score 'high', expected a finite number"),
        (line(2, "valid/0/1,nan"), r"line 3: 'valid/0/1' has the score 'nan'"),
        (line(2, "valid/0/1,-inf"), r"line 3: .*'-inf'"),
        (line(2, 'valid/0/1,"0.1'), r"scores\.csv: not a CSV in UTF-8"),
        (lambda given: given.lines.pop(), rf"1 of 9 valid and test images have no score, the first is '{LAST}'"),
        (lambda given: given.map(LAST).unlink(), rf"maps/{LAST}\.npy: not found; 1 of 9"),
        (store("test/1/7", np.zeros(GRID, np.float32)), r"maps/test/1/7\.npy: belongs to no valid or test image"),
        (store(LAST, np.zeros(GRID)), rf"{LAST}\.npy: found float64 \(12, 20\), expected float32 \(h, w\)"),
        (store(LAST, np.zeros((1, *GRID), np.float32)), rf"{LAST}\.npy: found float32 \(1, 12, 20\)"),
        (store(LAST, np.zeros((20, 12), np.float32)), rf"{LAST}\.npy: found shape \(20, 12\), expected \(12, 20\)"),
        (store(LAST, np.full(GRID, np.nan, np.float32)), rf"{LAST}\.npy: found nan at row 0, column 0"),
        (lambda given: given.map(LAST).write_bytes(b"\x93NUMPY"), rf"{LAST}\.npy: not readable as an array"),
        (lambda given: given.map(LAST).write_bytes(b"PK\x03\x04"), rf"{LAST}\.npy: not readable as an array"),
        (lambda given: given.map(LAST).write_bytes(header("(1000000, 10000000)")), rf"{LAST}\.npy: not readable"),
        (lambda given: given.map(LAST).write_bytes(header("(1")), rf"{LAST}\.npy: not readable as an array"),
        (lambda given: pipe(given.map(LAST)), rf"maps/{LAST}\.npy: not found; 1 of 9"),
        (store(LAST, np.tile(np.array([3e38, -3e38], np.float32), (12, 10))), rf"{LAST}\.npy: with it the maps span -3e\+38 to"),
        (line(2, "valid/0/1,1_0"), r"line 3: .*'1_0'"),
        (lambda given: given.map(LAST).write_bytes(b"cos\nsystem\n."), rf"{LAST}\.npy: not readable as an array"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused_with_the_row_named_and_nothing_is_kept(
    given: Given, change: Callable[[Given], object], message: str
) -> None:
    change(given)
    with pytest.raises(AnomedError, match=message):
        given.bring()
    assert not list(given.root.rglob("import.json"))


def test_other_wrong_calls_are_refused(given: Given) -> None:
    with pytest.raises(AnomedError, match="holds the domain 'tiny', expected 'liver_ct'"):
        given.bring(domain="liver_ct")
    for origin in (" ", "two\nlines"):
        with pytest.raises(AnomedError, match=r"--origin: found .*, expected one line"):
            given.bring(origin=origin)


def test_a_refused_import_leaves_the_one_before(given: Given) -> None:
    given.bring()
    before = importing.brought("tiny", "theirs")
    given.lines.pop()
    with pytest.raises(AnomedError):
        given.bring()
    assert importing.brought("tiny", "theirs") == before


def test_predictions_of_another_state_of_the_domain_are_refused(given: Given) -> None:
    given.bring()
    known = parameters()
    stale: dict[str, Any] = {"method": {"implementation": "imported", "predictions": {"0": "abc"}}}
    with pytest.raises(AnomedError, match="not the predictions that --params names"):
        adopt(given, made_with=stale)
    records.sweep(given.root)
    path = given.root / "data/manifest.csv"
    path.write_text(path.read_text().replace("0" * 64, "1" * 64))
    card = {key: value for key, value in records.read_json(given.root / "data/card.json").items() if key != "digest"}
    card["files"]["manifest.csv"] = records.digest_file(path)
    records.write_card(given.root / "data/card.json", {**card, "hash": records.digest(card["files"])})
    assert Prepared(given.root / "data").hash != given.prepared.hash
    with pytest.raises(AnomedError, match="imported for other valid and test images than"):
        adopt(given, made_with=known)


def test_a_refused_import_hides_no_pulled_run(given: Given) -> None:
    given.bring()
    adopt(given)
    known = importing.brought("tiny", "theirs")
    (given.root / "data/imported/theirs").rename(given.root / "elsewhere")
    given.map(LAST).unlink()
    with pytest.raises(AnomedError):
        given.bring()
    assert importing.brought("tiny", "theirs") == known


def test_answers_are_kept_with_a_run_that_has_no_scores(given: Given) -> None:
    lines = [f'{{"task": "captioning", "image_id": "{name}", "caption": "x"}}' for name in given.ids[::-1]]
    (given.root / "a.jsonl").write_text("\n".join(lines))
    store, data = given.root / "data/imported", given.root / "data"
    importing.bring("theirs", "tiny", 0, importing.Given(answers=given.root / "a.jsonl"), "a model", data, store)
    run = adopt(given)
    assert run.scores.score.isna().all()
    assert run.maps is None
    kept = (run.folder / "answers.jsonl").read_text().splitlines()
    assert [name in line for name, line in zip(given.ids, kept, strict=True)] == [True] * len(given.ids)


def test_scores_or_answers_and_maps_with_scores_alone(given: Given) -> None:
    given.bring()
    scores, maps, other = given.root / "scores.csv", given.root / "maps", given.root / "a.jsonl"
    for wrong in (
        importing.Given(), importing.Given(scores, maps, other), importing.Given(None, maps), importing.Given(None, maps, other),
    ):  # fmt: skip
        with pytest.raises(AnomedError, match="expected --scores, with --maps where"):
            importing.bring("theirs", "tiny", 0, wrong, "x", given.root / "data", given.root / "data/imported")
