"""params.yaml: every fault is one line with the key, what was found and the nearest valid name."""

from pathlib import Path
from typing import Any

import pytest
import shipped
import yaml
from paths import ROOT

from anomed.errors import AnomedError
from anomed.params import Params, read


def config(**changes: Any) -> dict[str, Any]:
    """The shipped params.yaml with dotted keys replaced."""
    value = shipped.params()
    for dotted, new in changes.items():
        *path, last = dotted.split("__")
        inner = value
        for part in path:
            inner = inner[part]
        inner[last] = new
    return value


def test_the_file_in_this_folder_is_valid() -> None:
    Params(read(ROOT / "params.yaml"))


def test_blocks_carry_every_default() -> None:
    params = Params(config())
    assert params.run.systems[0] == "random"
    assert params.method_blocks["intensity"] == {"implementation": "intensity", "quantile": 0.99}
    assert params.domain_blocks["brain_mri"]["size"] == 224


def test_writing_a_default_out_changes_nothing() -> None:
    assert Params(config(domains__brain_mri__size=224)).domain_blocks == Params(config()).domain_blocks


def test_a_root_is_no_content() -> None:
    here = Params(config(domains__brain_mri={"source": "bmad", "root": "/a"}))
    there = Params(config(domains__brain_mri={"source": "bmad", "root": "/b"}))
    assert here.domain_blocks == there.domain_blocks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"methods__patchcore__coreset_ration": 0.1},
            r"^methods\.patchcore\.coreset_ration: unknown key; did you mean 'coreset_ratio'\?$",
        ),
        ({"methods__patchcore__coreset_ratio": "much"}, r"^methods\.patchcore\.coreset_ratio: .*number, found 'much'$"),
        ({"methods__patchcore__coreset_ratio": True}, r"^methods\.patchcore\.coreset_ratio: .*number, found True$"),
        (
            {"run__systems": ["patchcor"]},
            r"^run\.systems: 'patchcor' has no block under `methods:` or `imported:`; did you mean 'patchcore'\?$",
        ),
        (
            {"run__domains": ["brain"]},
            r"^run\.domains: 'brain' has no block under `domains:`; did you mean 'brain_mri'\?$",
        ),
        ({"run__seeds": []}, r"^run\.seeds: .*at least 1"),
        ({"run__seeds": [0, 0]}, r"^run\.seeds: 0 stands there more than once$"),
        ({"run__seeds": [0, -1]}, r"^run\.seeds\.1: .*greater than or equal to 0, found -1$"),
        ({"run__seed": [1]}, r"^run\.seed: unknown key; did you mean 'seeds'\?$"),
        ({"run__device": "gpu"}, r"^run\.device: .*'auto', 'cpu' or 'cuda', found 'gpu'$"),
        ({"domains__brain_mri__sise": 64}, r"^domains\.brain_mri\.sise: unknown key; did you mean 'size'\?$"),
        ({"domains__brain_mri__size": 8}, r"^domains\.brain_mri\.size: .*32, found 8$"),
        (
            {"domains__brain_mri__source": "embeded"},
            r"^domains\.brain_mri\.source: no plug-in 'embeded'.*did you mean 'embedded'\?$",
        ),
        (
            {"domains__brain_mri": {"source": "bmad"}},
            r"^domains\.brain_mri\.root: found nothing, but source 'bmad' reads files",
        ),
        ({"domains__brain_mri": {}}, r"^domains\.brain_mri\.source: missing$"),
        (
            {"methods__patchcore__implementation": "patchcoer"},
            r"^methods\.patchcore\.implementation: .*did you mean 'patchcore'\?$",
        ),
        ({"metrics__aupro_limit": 0.0}, r"^metrics\.aupro_limit: .*greater than 0, found 0\.0$"),
        ({"metrix": {}}, r"^metrix: unknown key; did you mean 'metrics'\?$"),
        ({"methods": {"Bad Name": {}}}, r"^methods\.Bad Name"),
        ({"domains": []}, r"^domains: .*dictionary, found \[\]$"),
    ],
)
def test_faults_are_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AnomedError, match=message) as caught:
        Params(config(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: [", r"params\.yaml: not valid YAML: .*line 1"),
        ("a: 1\nb:\n  c: 1\n  c: 2\n", r"params\.yaml: the key 'c' stands twice, in lines 3 and 4; keep one"),
        ("- a\n", r"params\.yaml: found list, expected keys and values"),
        ("", r"params\.yaml: found NoneType, expected keys and values"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "params.yaml"
    with pytest.raises(AnomedError, match=r"params\.yaml: not found"):
        read(path)
    path.write_text(text)
    with pytest.raises(AnomedError, match=message):
        read(path)


def test_a_block_whose_lines_are_all_commented_out_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(config(imported=None)))
    assert "imported: null" in path.read_text()
    assert Params(read(path)).imported == []
    with pytest.raises(AnomedError, match=r"^run\.domains: 'brain_mri' has no block under `domains:`; known: none$"):
        Params(config(domains=None))


def test_missing_top_level_key() -> None:
    with pytest.raises(AnomedError, match=r"^run: missing$"):
        Params({})


def test_numbers_that_are_none_and_numbers_as_text_are_explained() -> None:
    config = shipped.params()
    config["methods"]["patchcore"] = {"smoothing_sigma": float("inf")}
    with pytest.raises(AnomedError, match=r"smoothing_sigma: input should be a finite number, found inf"):
        Params(config)
    config["methods"]["patchcore"] = {"smoothing_sigma": "2e0", "backbone": "Resnet18"}
    with pytest.raises(AnomedError) as caught:
        Params(config)
    assert "found '2e0'; write 2.0e+00, with a point" in str(caught.value)
    assert "backbone: no backbone 'Resnet18'" in str(caught.value)
