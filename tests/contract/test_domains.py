"""What every domain source must keep, over all that are registered: a new one is tested without a new test."""

from pathlib import Path

import pytest

from anomed import plugins
from anomed.domains.source import Source
from anomed.errors import AnomedError
from anomed.settings import check

SOURCES = plugins.discover("domains")
each_source = pytest.mark.parametrize("name", SOURCES)


@each_source
def test_class_is_documented_and_declared(name: str) -> None:
    cls = SOURCES[name]
    assert cls.__bases__ == (Source,), "no class deeper than one level"
    assert len((cls.__dict__.get("__doc__") or "").strip()) > 20, "say in the docstring what the source reads"
    assert type(cls.needs_root) is bool
    assert "not the released data" in cls.note
    assert {"cases", "scans"} & set(cls.__dict__)


@each_source
def test_a_foreground_is_declared_with_pixel_truth_only(name: str, tmp_path: Path) -> None:
    source = SOURCES[name]("brain_mri", SOURCES[name].Options(), None, tmp_path)
    assert type(source.has_foreground) is bool
    assert source.has_masks or not source.has_foreground, "it is stored beside the masks"


@each_source
def test_options_have_defaults_and_refuse_unknown_keys(name: str) -> None:
    assert check(SOURCES[name].Options, {}, "domains.x") is not None
    with pytest.raises(AnomedError, match=r"^domains\.x\.no_such_key: unknown key"):
        check(SOURCES[name].Options, {"no_such_key": 1}, "domains.x")


@each_source
def test_a_root_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    cls = SOURCES[name]
    if not cls.needs_root:
        pytest.skip("reads no files")
    source = cls("brain_mri", cls.Options(), tmp_path / "nowhere", tmp_path / "work")
    for ask in (source.fingerprint, source.scans if source.volumetric else source.cases):
        with pytest.raises(AnomedError, match=r"nowhere: not found"):
            ask()
