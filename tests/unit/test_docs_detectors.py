"""docs/detectors.md names every method of the project with its keys and their defaults."""

import re

import pytest
import yaml
from paths import ROOT

from anomed import plugins, training

OWN = {name: cls for name, cls in plugins.discover("methods").items() if not name.startswith("anomalib.")}
ROWS = {
    match[1]: match[2]
    for line in (ROOT / "docs/detectors.md").read_text().splitlines()
    if (match := re.match(r"\| `([\w.]+)` \|.*\|([^|]*)\|$", line))
}
ROWS.pop("implementation")  # the heading


def test_every_method_has_a_row_and_every_row_a_method() -> None:
    assert ROWS.keys() == OWN.keys()


@pytest.mark.parametrize("name", OWN)
def test_keys_and_defaults_are_those_of_the_class(name: str) -> None:
    written = dict(re.findall(r"`(\w+)(?:: ([^`]*))?`", ROWS[name]))
    defaults = OWN[name].Params().model_dump()
    if issubclass(OWN[name].Params, training.Params):  # docs/training.md lists these; a row names other defaults
        shared = training.Params().model_dump()
        defaults = {key: value for key, value in defaults.items() if shared.get(key, "") != value or key in written}
    assert written.keys() == defaults.keys()
    for key, text in written.items():
        if text:
            assert yaml.safe_load(text) == defaults[key]
    assert {key for key, text in written.items() if not text} <= {"backbone"}


def test_common_keys_of_trained_rows_and_their_defaults_are_told() -> None:
    text = (ROOT / "docs/detectors.md").read_text()
    paragraph = next(part for part in text.split("\n\n") if "further keys in common" in part)
    written = {key: yaml.safe_load(value) for key, value in re.findall(r"`(\w+): ([^`]*)`", paragraph)}
    assert written == training.Params().model_dump()
    table = (ROOT / "docs/training.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", table.split("## The same")[0], re.MULTILINE) == [*written]
