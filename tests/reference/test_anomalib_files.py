"""Methods anomalib.*: declared weights and images, nothing from the network, clear words for what is wrong."""

import random
import tarfile
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from anomalib_rows import discs, fitted, nowhere
from pydantic import ValidationError

from anomed import anomalib_state, anomalib_weights, plugins, weights
from anomed.anomalib_models import MODELS
from anomed.errors import AnomedError
from anomed.settings import check


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return nowhere(tmp_path, monkeypatch)


def _drawn() -> np.ndarray:
    state = np.random.get_state(legacy=False)  # noqa: NPY002
    return np.append(state["state"]["key"], state["state"]["pos"])


def test_training_leaves_the_callers_random_numbers_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    import torch

    before = random.getstate(), _drawn(), torch.get_rng_state()
    fitted("Stfpm")
    assert random.getstate() == before[0]
    assert np.array_equal(_drawn(), before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    assert capfd.readouterr() == ("", "")


def test_declared_weights_are_loaded_from_their_file(elsewhere: Path) -> None:
    import timm
    from safetensors.torch import save_file

    source = timm.create_model("resnet18", pretrained=False)
    item = weights.timm("resnet18")
    (elsewhere / weights.FETCHED).mkdir(parents=True)
    save_file(source.state_dict(), weights.FETCHED / item.file)
    detector = fitted("Padim", weights="pretrained")
    assert type(detector).files(detector.params) == {"resnet18.a1_in1k": weights.FETCHED / item.file}
    found = detector.state()["feature_extractor.feature_extractor.conv1.weight"]
    assert np.array_equal(found, source.conv1.weight.detach())


@pytest.mark.parametrize("kind", ["another network", "other names", "damaged"])
def test_a_file_of_other_weights_is_refused(elsewhere: Path, kind: str) -> None:
    """timm demands no tensor of a network without its classifier, and would leave it random."""
    import timm
    from safetensors.torch import save_file

    path = elsewhere / weights.FETCHED / weights.timm("resnet18").file
    path.parent.mkdir(parents=True)
    state = timm.create_model("resnet34" if kind == "another network" else "resnet18", pretrained=False).state_dict()
    save_file({f"{'backbone.' * (kind == 'other names')}{key}": value for key, value in state.items()}, path)
    if kind == "damaged":
        path.write_bytes(b"<html>" + path.read_bytes()[:1000])
    with pytest.raises(AnomedError, match=rf"{path.name}: not the weights of resnet18\.a1_in1k"):
        fitted("Stfpm", weights="pretrained")


@pytest.mark.parametrize("layers", [["layer1", "layer9"], ["layer9"]])
def test_a_layer_that_the_network_does_not_have_is_refused(layers: list[str]) -> None:
    with pytest.raises(AnomedError, match=r"^anomalib\.Stfpm: layers: found \['layer9'\], expected some of .*'layer4'"):
        fitted("Stfpm", layers=layers)


def test_bundled_lite0_is_loaded_from_its_package() -> None:
    options = {"backbone": "tf_efficientnet_lite0", "layers": ["blocks.2", "blocks.4"], "n_features": 20}
    first, second = (fitted("Padim", seed=seed, weights="pretrained", **options) for seed in (0, 1))
    key = "feature_extractor.feature_extractor.conv_stem.weight"
    assert np.array_equal(first.state()[key], second.state()[key])


def test_weights_of_torchvision_come_from_their_file_and_are_checked(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import torchvision

    source = torchvision.models.resnet18(weights=None)
    path = weights.FETCHED / weights.TORCHVISION["resnet18"]
    path.parent.mkdir(parents=True)
    torch.save(source.state_dict(), path)
    with pytest.raises(AnomedError, match="not the published weights of resnet18"):
        fitted("Cfa", weights="pretrained")
    monkeypatch.setattr(weights.Weights, "check", weights.Weights.path)
    found = fitted("Cfa", weights="pretrained").state()["feature_extractor.conv1.weight"]
    assert np.array_equal(found, source.conv1.weight.detach())


def test_missing_weights_give_the_command(elsewhere: Path) -> None:
    with pytest.raises(AnomedError, match=r"resnet18\.a1_in1k.*not found; run `anomed fetch weights`"):
        fitted("Stfpm", weights="pretrained")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("swallowed", [False, True])
def test_the_network_is_refused_by_name(swallowed: bool) -> None:
    def ask() -> None:
        try:
            urllib.request.urlopen("http://weights.example/file")
        except Exception:
            if not swallowed:
                raise

    refused = pytest.raises(AnomedError, match=r"anomalib\.Padim asked for weights\.example")
    with refused, anomalib_weights.declared("Padim", pretrained=True):
        ask()


def test_wrong_keys_are_explained() -> None:
    method = plugins.load("methods", "anomalib.Padim")
    with pytest.raises(AnomedError, match="unknown key; did you mean 'backbone'"):
        check(method.Params, {"backbon": "resnet18"}, "methods.padim")
    with pytest.raises(AnomedError, match=r"did you mean 'anomalib\.Padim'"):
        plugins.load("methods", "anomalib.padim")
    with pytest.raises(ValidationError, match="expected a multiple of 14, such as 70"):
        plugins.load("methods", "anomalib.Dinomaly").Params(image_size=64)
    with pytest.raises(ValidationError, match="takes 240 alone"):
        plugins.load("methods", "anomalib.WinClip").Params(image_size=256)
    with pytest.raises(AnomedError, match=r"anomalib\.Padim: n_features must be specified for backbone resnet34"):
        fitted("Padim", backbone="resnet34")
    with pytest.raises(AnomedError, match="fewer train images than n_pca_components"):
        fitted("Dfkde", n_pca_components=16)


def test_a_state_of_other_arguments_is_refused() -> None:
    detector = fitted("Padim")
    other = type(detector)(type(detector).Params(weights="random", layers=["layer1"], n_features=10), 0)
    state = detector.state()
    state.pop("idx")
    with pytest.raises(AnomedError, match=r"the state has (no|an unknown) tensor.*fit again"):
        other.restore(state)


def test_what_a_row_reads_and_how_it_is_marked() -> None:
    methods = {name: plugins.load("methods", f"anomalib.{name}") for name in MODELS}
    for name, method in methods.items():
        assert method.files(method.Params(weights="random")) == {}
        scratch = name in ("Draem", "Ganomaly")
        assert method.mark(method.Params(weights="random")) == ("" if scratch else "smoke: random weights")
        assert method.mark(method.Params()) == ""
        assert bool(method.files(method.Params())) is not scratch
    assert set(methods["EfficientAd"].files(methods["EfficientAd"].Params())) == {"efficientad", "imagenette2"}
    assert set(methods["Uflow"].files(methods["Uflow"].Params())) == {
        "cait_m48_448.fb_dist_in1k",
        "cait_s24_224.fb_dist_in1k",
    }
    assert set(methods["Cfa"].files(methods["Cfa"].Params())) == {"wide_resnet50_2.v2"}


def test_named_images_decide_the_result(tmp_path: Path) -> None:
    from PIL import Image

    method = plugins.load("methods", "anomalib.Draem")
    folder = tmp_path / "textures"
    (folder / "knitted").mkdir(parents=True)
    with pytest.raises(AnomedError, match=r"dtd_dir: .*holds no image"):
        method.files(method.Params(dtd_dir=str(folder)))
    Image.fromarray(discs(1, 3)[0]).save(folder / "knitted" / "a.png")
    found = method.files(method.Params(dtd_dir=str(folder)))
    assert found == {"dtd_dir/knitted/a.png": folder / "knitted" / "a.png"}
    archive = tmp_path / "dtd.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "dtd")
    assert method.files(method.Params(dtd_dir=str(archive))) == {"dtd_dir": archive}
    unpacked = anomalib_weights.unpacked(archive, tmp_path / "scratch")
    assert [path.name for path in unpacked.rglob("*.png")] == ["a.png"]
    with pytest.raises(AnomedError, match="expected a folder of images or an archive"):
        method.files(method.Params(dtd_dir=str(tmp_path / "none")))


def test_numbers_that_are_none_stop_the_fit() -> None:
    import torch

    broken = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(broken.bias, float("nan"))
    with pytest.raises(AnomedError, match=r"anomalib\.Stfpm: bias is not a number after training"):
        anomalib_state.check("Stfpm", broken)
