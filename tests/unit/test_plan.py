"""params → runs, and what each job depends on."""

import json
from pathlib import Path
from typing import Any

import pytest
import shipped
from paths import ROOT

from anomed import records
from anomed.errors import AnomedError
from anomed.params import combined, merge, read
from anomed.plan import Plan


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return shipped.params()


def test_systems_without_randomness_run_once(config: dict[str, Any]) -> None:
    config["run"]["seeds"] = [3, 1]
    runs = [(run.system, run.seed) for run in Plan(config).runs]
    assert runs == [("random", 3), ("random", 1), ("constant", 3), ("intensity", 3), ("patchcore", 3), ("patchcore", 1)]


def test_the_table_gets_the_order_of_run_and_the_hash_that_score_writes(config: dict[str, Any]) -> None:
    config["run"]["systems"] = ["patchcore", "constant"]
    plan = Plan(config)
    given = json.loads(plan.table_params())
    assert given["systems"] == list(given["runs"]["brain_mri"]) == ["patchcore", "constant"]
    expected = records.digest(json.loads(plan.score_params("brain_mri", "patchcore")))
    assert given["runs"]["brain_mri"]["patchcore"] == {"seeds": [0, 1, 2], "hash": expected, "absent": ""}


def test_a_parameter_moves_the_hashes_of_its_system_alone(config: dict[str, Any]) -> None:
    before = Plan(config)
    config["methods"]["patchcore"]["n_neighbors"] = 4
    after = Plan(config)
    assert before.fit_params("brain_mri", "patchcore") != after.fit_params("brain_mri", "patchcore")
    for same in ("intensity", "random"):
        assert before.score_params("brain_mri", same) == after.score_params("brain_mri", same)
    assert before.prepare_params("brain_mri") == after.prepare_params("brain_mri")


def test_the_metric_block_moves_scores_and_not_models(config: dict[str, Any]) -> None:
    before = Plan(config)
    config["metrics"] = {"aupro_limit": 0.1}
    after = Plan(config)
    assert before.fit_params("brain_mri", "patchcore") == after.fit_params("brain_mri", "patchcore")
    assert before.score_params("brain_mri", "patchcore") != after.score_params("brain_mri", "patchcore")


def test_raw_data_that_change_move_the_hash_and_their_place_does_not(config: dict[str, Any], tmp_path: Path) -> None:
    def hash_at(root: str) -> str:
        config["domains"]["brain_mri"] = {"source": "bmad", "root": root}
        return Plan(config).prepare_params("brain_mri")

    for name in ("here", "there"):
        folder = tmp_path / name / "Brain/test/good/img"
        folder.mkdir(parents=True)
        (folder / "a_1.png").write_bytes(b"12345")
    assert hash_at("here") == hash_at("there")
    (folder / "a_1.png").write_bytes(b"12346")
    assert hash_at("here") != hash_at("there"), "a change that keeps the size is seen"


def test_a_missing_root_stops_it_unless_the_domain_is_prepared(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config["domains"]["brain_mri"] = {"source": "bmad", "root": "gone"}
    with pytest.raises(
        AnomedError, match=r"^domains\.brain_mri\.root: gone not found; put the data there or change dom"
    ):
        Plan(config).check()
    card = tmp_path / "data/prepared/brain_mri/card.json"
    block = Plan(config).params.domain_blocks["brain_mri"]
    records.write_card(card, {"parameters": {**block, "fingerprint": "abc"}})
    assert json.loads(Plan(config).prepare_params("brain_mri"))["fingerprint"] == "abc"
    assert "warning: domains.brain_mri: gone not found" in capsys.readouterr().err
    records.write_card(card, {"parameters": {**block, "size": 99, "fingerprint": "abc"}})
    with pytest.raises(AnomedError, match="gone not found"):
        Plan(config).check()


def test_a_comment_in_a_card_changes_nothing(config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "data/cards/brain_mri.yaml"
    assert Plan(config).card("brain_mri") == ""
    path.parent.mkdir(parents=True)
    text = (ROOT / "data/cards/brain_mri.yaml").read_text()
    path.write_text(text)
    before = Plan(config).card("brain_mri")
    path.write_text(f"# a remark\n{text}")
    assert Plan(config).card("brain_mri") == before != ""


def test_gpus_are_asked_for_by_parameter_alone(config: dict[str, Any]) -> None:
    assert Plan(config).gpu("patchcore") == 0
    config["run"]["device"] = "cuda"
    assert Plan(config).gpu("patchcore") == 1
    assert Plan(config).gpu("random") == 0


def test_what_would_stop_a_domain_of_volumes_at_its_end_stops_it_at_once(
    config: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.nii.gz").write_bytes(b"")
    (tmp_path / "s.csv").write_text("subject,split,label\na,train,0\nb,train,1\nc,test,1\n")
    block = {"source": "volumes", "root": str(tmp_path), "subjects": "s.csv", "preprocess": "head"}
    config["domains"]["brain_mri"] = block
    with pytest.raises(AnomedError, match=r"1 abnormal subjects in train \(b\)"):
        Plan(config).check()
    config["preprocess"]["head"]["slices"]["normal"] = "slices"
    Plan(config).check()
    block["release"] = "official"
    with pytest.raises(AnomedError, match=r"release is official, but data/cards/brain_mri.yaml does not describe"):
        Plan(config).check()
    del block["release"]
    (tmp_path / "s.csv").write_text("subject,split,label\na,train,0\nb,valid,1\nc,valid,1\n")
    with pytest.raises(AnomedError, match="found no volume in test, of 3"):
        Plan(config).check()


def elsewhere(config: dict[str, Any], **nova: Any) -> dict[str, Any]:
    """With a second domain whose models come from the first."""
    config["domains"]["nova"] = {"source": "embedded", "train_domain": "brain_mri", **nova}
    config["run"]["domains"] = ["brain_mri", "nova"]
    return config


def test_a_domain_can_use_the_models_of_another(config: dict[str, Any]) -> None:
    plan = Plan(elsewhere(config))
    run = next(run for run in plan.runs if run.domain == "nova" and run.system == "patchcore" and run.seed == 2)
    assert plan.model(run) == "models/brain_mri/patchcore/2"
    assert not any("nova" in path for path in plan.models)
    assert plan.train_data("nova") == "data/prepared/brain_mri"
    assert plan.train_data("brain_mri") == ""
    without = Plan(elsewhere(shipped.params(), train_domain=None))
    assert without.prepare_params("nova") == plan.prepare_params("nova"), "it decides no image"


def test_where_models_come_from_is_checked(config: dict[str, Any]) -> None:
    for change, message in (
        ({"train_domain": "nova"}, r"domains\.nova\.train_domain: found 'nova', expected another domain"),
        ({"train_domain": "liver_ct"}, "found 'liver_ct', expected another domain that `run.domains` lists"),
        ({"size": 96}, r"a model needs images of one size: brain_mri has 224, nova 96; set `size`"),
        ({"train_limit": 3}, r"domains\.nova\.train_limit: the models are those of 'brain_mri'; set the key there"),
    ):
        with pytest.raises(AnomedError, match=message):
            Plan(elsewhere(shipped.params(), **change))
    coloured = elsewhere(config, train_domain="histopathology")
    coloured["domains"]["histopathology"] = {"source": "embedded"}
    coloured["run"]["domains"] = ["histopathology", "nova"]
    with pytest.raises(AnomedError, match="histopathology has colour images, nova has grey images; name another"):
        Plan(coloured).check()


def test_a_domain_whose_models_nothing_can_be_fitted_for_says_why(config: dict[str, Any]) -> None:
    config["domains"]["brain_mri"]["train_domain"] = "nova"
    plan = Plan(elsewhere(config, train_domain=None))
    assert plan.runs == []
    assert plan.absent("brain_mri", "random").endswith("train_domain is nova, which has no train images either")


def test_a_domain_without_train_images_and_models_has_no_runs_and_says_why(config: dict[str, Any]) -> None:
    plan = Plan(elsewhere(config, train_domain=None))
    assert {run.domain for run in plan.runs} == {"brain_mri"}
    absent = json.loads(plan.table_params())["runs"]["nova"]["random"]
    assert absent["seeds"] == []
    assert absent["absent"] == "not applicable: no train images, and domains.nova.train_domain is not set"
    with pytest.raises(AnomedError, match=r"run\.domains: nothing to run for 'nova': not applicable: no train images"):
        plan.check()


def test_a_limit_of_train_subjects_is_drawn_anew_with_every_seed(config: dict[str, Any]) -> None:
    before = Plan(config)
    config["domains"]["brain_mri"]["train_limit"] = 3
    after = Plan(config)
    assert before.seeds("brain_mri", "intensity") == [0]
    assert after.seeds("brain_mri", "intensity") == [0, 1, 2]
    assert json.loads(after.fit_params("brain_mri", "patchcore"))["train_limit"] == 3
    assert "train_limit" not in before.fit_params("brain_mri", "patchcore")
    assert before.prepare_params("brain_mri") == after.prepare_params("brain_mri")


def brought(tmp_path: Path, seed: int, origin: str = "their code") -> None:
    card = {"domain": "brain_mri", "system": "theirs", "seed": seed, "origin": origin, "images": "i"}
    card["files"] = {"scores.csv": str(seed)}
    records.write_card(tmp_path / f"data/imported/theirs/brain_mri/{seed}/import.json", card)


def test_imported_systems_run_with_the_seeds_that_came(config: dict[str, Any], tmp_path: Path) -> None:
    config["imported"] = {"theirs": None}
    config["run"]["systems"].append("theirs")
    with pytest.raises(AnomedError, match=r"run\.systems: nothing to run for 'theirs': not imported"):
        Plan(config).check()
    for seed in (10, 2):
        brought(tmp_path, seed)
    plan = Plan(config)
    plan.check()
    assert [run.seed for run in plan.runs if run.system == "theirs"] == [2, 10]
    assert not any("theirs" in path for path in plan.models)
    before = plan.score_params("brain_mri", "theirs"), plan.upstream()
    assert json.loads(plan.table_params())["marks"] == {"theirs": "imported, not run here: their code"}
    brought(tmp_path, 2, "another")
    assert Plan(config).score_params("brain_mri", "theirs") != before[0]
    assert Plan(config).upstream() != before[1]
    config["imported"] = {"random": None}
    with pytest.raises(AnomedError, match=r"imported\.random: `methods:` has a block of this name as well"):
        Plan(config)


def test_weights_that_are_missing_stop_no_plan_and_are_listed(config: dict[str, Any], tmp_path: Path) -> None:
    config["methods"]["patchcore"] = {"backbone": "resnet18", "layers": ["layer2"]}
    plan = Plan(config)
    plan.check()
    file = "data/weights/resnet18-f37072fd.pth"
    expected = f"methods.patchcore: weights 'resnet18' not found at {file}; run `anomed fetch weights`"
    assert [line.startswith(expected) for line in plan.lacking] == [True]
    assert json.loads(plan.fit_params("brain_mri", "patchcore"))["files"] == {"resnet18": ""}
    (tmp_path / "data/weights").mkdir(parents=True)
    (tmp_path / file).write_bytes(b"weights")
    plan = Plan(config)
    plan.check()
    fitted = json.loads(plan.fit_params("brain_mri", "patchcore"))
    assert (plan.lacking, fitted["files"]) == ([], {"resnet18": records.digest_file(tmp_path / file)})
    # In a clone with the models and without the weights, what the models say of them holds.
    records.write_card(tmp_path / "models/brain_mri/patchcore/0/run.json", {"parameters": fitted})
    (tmp_path / file).unlink()
    plan = Plan(config)
    plan.check()
    assert (plan.lacking, json.loads(plan.fit_params("brain_mri", "patchcore"))) == ([], fitted)


def test_random_weights_need_no_file_and_mark_the_row(config: dict[str, Any]) -> None:
    config["methods"]["patchcore"] = {"backbone": "resnet18", "layers": ["layer2"], "weights": "random"}
    plan = Plan(config)
    plan.check()
    given = json.loads(plan.table_params())
    assert plan.lacking == []
    assert given["marks"] == {"patchcore": "smoke: random weights"}
    assert given["apart"] == ["patchcore"]


def test_the_table_is_told_which_epoch_is_kept(config: dict[str, Any]) -> None:
    """A choice by test labels is no result: it wins no column and is ranked with no other."""
    blocks = {
        f"ae-{key}": {"implementation": "autoencoder", "selection": key} for key in ("fixed", "valid", "test_oracle")
    }
    config["methods"] |= blocks
    config["run"]["systems"] = ["random", *blocks]
    given = json.loads(Plan(config).table_params())
    assert given["selection"] == {"ae-fixed": "last", "ae-valid": "best on valid", "ae-test_oracle": "best on test"}
    assert given["apart"] == [*given["marks"]] == ["ae-test_oracle"]
    assert "no result" in given["marks"]["ae-test_oracle"]


def test_a_row_that_reads_facts_runs_where_they_are_known(config: dict[str, Any]) -> None:
    config["methods"] |= {"slice": {"implementation": "metadata.slice"}, "view": {"implementation": "metadata.view"}}
    config["domains"]["chest_xray"] = {"source": "embedded"}
    config["run"] = {"domains": ["brain_mri", "chest_xray"], "systems": ["slice", "view"], "seeds": [0, 1]}
    plan = Plan(config)
    plan.check()
    assert plan.runs == [("brain_mri", "slice", 0), ("chest_xray", "view", 0)]
    assert plan.absent("brain_mri", "view") == "not applicable: the view of the images of brain_mri is not known"


def test_memory_follows_from_what_a_row_may_use(config: dict[str, Any]) -> None:
    before = Plan(config).memory_mb("brain_mri", "patchcore")
    config["methods"]["patchcore"]["max_memory_mb"] = 50_000
    assert Plan(config).memory_mb("brain_mri", "patchcore") >= before + 40_000


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/cards").symlink_to(ROOT / "data/cards")
    return combined([ROOT / "params.yaml", ROOT / "params/paper.yaml"])


def test_the_paper_is_fifteen_rows_on_six_domains_with_five_seeds(paper: dict[str, Any], tmp_path: Path) -> None:
    for block in paper["domains"].values():
        if block["source"] != "embedded":
            (tmp_path / block["root"]).mkdir(parents=True, exist_ok=True)
    plan = Plan(paper)
    plan.check()
    assert len(plan.runs) == len(set(plan.runs)) == 15 * 6 * 5
    empty = [line for line in plan.lacking if "is an empty folder" in line]
    assert len(set(empty)) == 6
    assert all("anomed fetch" in line for line in empty)
    assert {*plan.lacking} - {*empty}, "the weights are not there either"


def test_the_paper_takes_no_setting_from_the_blocks_of_params_yaml(paper: dict[str, Any]) -> None:
    """Those are for a laptop: an edit of one must not move a published row."""
    base, overlay = (read(ROOT / name)["methods"] for name in ("params.yaml", "params/paper.yaml"))
    for system in paper["run"]["systems"]:
        assert {*(base[system] or {})} - {"implementation"} <= {*overlay[system]}, system


def test_the_paper_without_its_data_is_stopped(paper: dict[str, Any]) -> None:
    with pytest.raises(
        AnomedError, match=r"^domains\.brain_mri\.root: data/raw/bmad not found; .*`anomed fetch brain_mri`"
    ):
        Plan(paper).check()


def test_an_overlay_is_laid_as_snakemake_lays_it(tmp_path: Path) -> None:
    from snakemake.utils import update_config  # type: ignore[import-untyped]

    base, overlay = (read(ROOT / name) for name in ("params.yaml", "params/paper.yaml"))
    update_config(base, overlay)
    assert combined([ROOT / "params.yaml", ROOT / "params/paper.yaml"]) == base
    into = tmp_path / "params.yaml"
    into.write_text((ROOT / "params.yaml").read_text())
    merge(ROOT / "params/paper.yaml", into)
    assert read(into) == base
    assert "# The one file to edit." in into.read_text(), "comments stay"
    broken = tmp_path / "broken.yaml"
    broken.write_text("run: {systems: [nobody]}")
    before = into.read_bytes()
    with pytest.raises(AnomedError, match=r"run\.systems: 'nobody' has no block"):
        merge(broken, into)
    assert into.read_bytes() == before
