"""The embedded source: seven domains, each whole and mixed in every split, made of nothing but seeds and names."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anomed import plugins, prepare
from anomed.domains import embedded
from anomed.domains.embedded import DOMAINS
from anomed.domains.source import Source
from anomed.errors import AnomedError
from anomed.manifest import Prepared
from anomed.phantoms import atlas as maps
from anomed.phantoms import nova

PICTURES = [name for name, phantom in DOMAINS.items() if not phantom.image]
MIXED = {("train", 0), ("valid", 0), ("valid", 1), ("test", 0), ("test", 1)}


def source(work: Path, domain: str = "brain_mri", **options: Any) -> Source:
    cls = plugins.load("domains", "embedded")
    made: Source = cls(domain, cls.Options(**options), None, work)
    return made


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("subjects", [10, None])
def test_every_split_has_what_it_needs_and_subjects_of_its_own(
    domain: str, subjects: int | None, tmp_path: Path
) -> None:
    made = source(tmp_path, domain, subjects=subjects)
    cohort = made._cohort()  # type: ignore[attr-defined]
    places = {(who.split, int(who.kind != "normal")) for who in cohort}
    assert places == (MIXED if made.trains else {("test", 1)})
    splits: dict[str, set[str]] = {}
    for who in cohort:
        splits.setdefault(who.subject if made.volumetric else who.subject_id, set()).add(who.split)
    assert all(len(found) == 1 for found in splits.values())
    assert len(splits) == (subjects or DOMAINS[domain].subjects)
    if not made.volumetric and subjects is None:
        assert 90 <= len(cohort) <= 110


@pytest.fixture(scope="module")
def prepared_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Prepared]:
    """Makes a domain of pictures, once; of nova the first four cases, one of each kind of lesion: a head takes a second."""
    made: dict[str, Prepared] = {}
    few = dataclasses.replace(DOMAINS["nova"], cohort=lambda subjects: nova.cohort(4))

    def make(domain: str) -> Prepared:
        if domain not in made:
            folder = tmp_path_factory.mktemp(domain)
            block = {"source": "embedded", "size": 64, "release": None, "fingerprint": "", "subjects": 10}
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                patch.setitem(embedded.DOMAINS, "nova", few)
                prepare.prepare(domain, block, None, folder / "work", folder / "out", folder / "problems.csv")
            assert not (folder / "problems.csv").exists()
            made[domain] = Prepared(folder / "out")
        return made[domain]

    return make


@pytest.mark.parametrize("domain", PICTURES)
def test_pictures_become_a_prepared_domain(domain: str, tmp_path: Path, prepared_of: Callable[[str], Prepared]) -> None:
    prepared = prepared_of(domain)
    table, made = prepared.table, source(tmp_path, domain, subjects=10)
    assert prepared.card["masks"] == (domain == "retina_resc")
    assert prepared.card["boxes"] == (domain in ("nova", "chest_xray"))
    assert prepared.card["colour"] == (domain == "histopathology")
    assert (prepared.images.ndim == 4) == made.colour
    assert set(prepared.clinical) == (set(table.image_id) if domain in ("nova", "chest_xray") else set())
    assert (table.pathology[table.label == 1] != "").all()
    assert (table.pathology[table.label == 0] == "").all()
    assert table.sha256.nunique() == len(table)
    if prepared.card["masks"]:
        judged = table[table.split != "train"]
        assert [prepared.mask(int(row)).any() for row in judged.mask_row] == (judged.label == 1).tolist()


def test_films_tell_their_view_and_volumes_number_their_slices(
    tmp_path: Path, prepared_of: Callable[[str], Prepared]
) -> None:
    offered = {domain: source(tmp_path, domain).offers for domain in DOMAINS}
    told = {"chest_xray": {"view"}, "brain_mri": {"slice"}, "liver_ct": {"slice"}}
    assert offered == {domain: frozenset(told.get(domain, set())) for domain in DOMAINS}
    views = [entry["view"] for entry in prepared_of("chest_xray").clinical.values()]
    assert set(views) == {"AP", "PA"}


def test_the_texts_and_boxes_of_nova_are_kept(prepared_of: Callable[[str], Prepared]) -> None:
    prepared = prepared_of("nova")
    unboxed = unknown = 0
    row: Any
    for row in prepared.table.itertuples():
        clinical, boxes = prepared.clinical[row.image_id], json.loads(row.boxes)
        assert {"caption", "history", "diagnosis", "scan_id", "boxes_known", "rater_boxes"} == set(clinical)
        assert row.pathology == clinical["diagnosis"]
        height, width = prepared.native(row.image_id).shape
        assert (height, width) == (row.native_h, row.native_w)
        assert all(0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height for x0, y0, x1, y1 in boxes)
        unboxed, unknown = unboxed + (not boxes), unknown + (not clinical["boxes_known"])
    assert len(prepared.table) == len(nova.cohort(4))
    assert unboxed == unknown == 1


def test_another_key_can_name_its_set(tmp_path: Path) -> None:
    one, other = source(tmp_path, "chest_xray", subjects=10), source(tmp_path, "site_a", set="chest_xray", subjects=10)
    for mine, theirs in zip(one.cases(), other.cases(), strict=True):
        assert mine.image_id == theirs.image_id
        assert np.array_equal(mine.load().image, theirs.load().image)


def test_options_and_unknown_domain_are_refused(tmp_path: Path) -> None:
    cls = plugins.load("domains", "embedded")
    with pytest.raises(AnomedError, match=r"domains\.spleen\.set: found None, expected the embedded domain to make"):
        source(tmp_path, "spleen")
    with pytest.raises(ValueError, match="greater than or equal to 10"):
        cls.Options(subjects=4)
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        cls.Options(heads=12)


def test_fingerprint_is_the_content_of_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = source(tmp_path)
    before = made.fingerprint()
    assert before == source(tmp_path, seed=3).fingerprint(), "the seed is a parameter, not content"
    copies = {}
    for name, path in maps.template_files().items():
        copies[name] = tmp_path / path.name
        copies[name].write_bytes(path.read_bytes())
    monkeypatch.setattr(maps, "template_files", lambda: copies)
    assert made.fingerprint() == before, "no path in it"
    copies["gm"].write_bytes(b"another map")
    assert made.fingerprint() != before
