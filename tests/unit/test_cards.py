"""Cards: what every shipped one must state, terms, and refusals."""

from pathlib import Path

import pytest
import yaml
from paths import ROOT

from anomed import cards
from anomed.errors import AnomedError

FOLDER = ROOT / "data/cards"
RAW = {
    "brain_mri": ["bmad", "brats2021", "embedded"],
    "liver_ct": ["bmad", "btcv_lits", "embedded"],
    "retina_resc": ["bmad", "resc", "embedded"],
    "retina_oct2017": ["bmad", "oct2017", "embedded"],
    "chest_xray": ["bmad", "rsna", "embedded"],
    "histopathology": ["bmad", "camelyon16", "embedded"],
    "nova": ["nova", "embedded"],
}


def test_seven_cards_ship() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(RAW)


@pytest.mark.parametrize("domain", RAW)
def test_a_card_describes_every_source_of_its_domain(domain: str) -> None:
    card = cards.load(domain, FOLDER)
    assert card is not None
    assert list(card.sources) == RAW[domain]
    for name, entry in card.sources.items():
        for text in (entry.licence, entry.citation, entry.obtain):
            assert text.strip(), name
        if name == "embedded":
            assert "made on this machine" in entry.obtain
            assert (entry.restricted, entry.downloads, entry.counts) == (False, [], {})
        else:
            assert entry.faults
    assert cards.terms(domain, "embedded", FOLDER) == ""


@pytest.mark.parametrize("domain", [name for name in RAW if name != "nova"])
def test_the_bundle_is_restricted_and_has_one_download(domain: str) -> None:
    card = cards.load(domain, FOLDER)
    assert card is not None
    [file] = card.sources["bmad"].downloads
    assert (file.name, file.sha256[:8]) == ("bmad.zip", "df655def")
    assert f"anomed fetch {domain}" in " ".join(card.sources["bmad"].obtain.split())
    text = cards.terms(domain, "bmad", FOLDER)
    assert text.startswith(f"{domain}: {card.title} (source bmad) is restricted")
    for part in (card.sources["bmad"].terms, card.sources["bmad"].licence, "arXiv 2306.11876"):
        assert part in text
    assert text.endswith("\n")


def test_nova_counts() -> None:
    card = cards.load("nova", FOLDER)
    assert card is not None
    assert card.sources["nova"].counts == {"test": cards.Counts(normal=0, abnormal=906)}
    assert "never train on it" in cards.terms("nova", "nova", FOLDER)


def test_open_sources_and_unknown_ones_have_no_terms(tmp_path: Path) -> None:
    assert cards.terms("histopathology", "camelyon16", FOLDER) == ""
    assert cards.terms("brain_mri", "volumes", FOLDER) == ""
    assert cards.terms("mine", "bmad", tmp_path) == ""


ENTRY = {"licence": "L", "citation": "C", "obtain": "O"}
FILE = {"name": "a.zip", "url": "https://example.org/a.zip", "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"restricted": True}, "a restricted source states its terms"),
        ({"terms": "T"}, "an unrestricted one has none"),
        ({"downloads": [{**FILE, "sha256": "0" * 8}]}, r"sources\.x\.downloads\.0\.sha256"),
        ({"downloads": [{**FILE, "url": "file:///etc/passwd"}]}, r"downloads\.0\.url"),
        ({"downloads": [{**FILE, "name": "../a.zip"}]}, r"downloads\.0\.name"),
        ({"faults": "one"}, r"sources\.x\.faults"),
    ],
)
def test_faulty_entries_are_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    card = {"title": "T", "description": "D", "sources": {"x": {**ENTRY, **change}}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(card))
    with pytest.raises(AnomedError, match=rf"mine\.yaml: .*{message}"):
        cards.load("mine", tmp_path)
