"""How anomalib's models get weights and images here: from declared files, never from the network."""

import contextlib
import io
import socket
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from anomed import backbones, weights
from anomed.errors import AnomedError
from anomed.weights import BUNDLED, OTHERS, TORCHVISION

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm")
ARCHIVES = (".tgz", ".tar.gz", ".tar", ".zip")
LOCAL = ("127.", "::1", "localhost", "0.0.0.0")  # addresses that a job may talk to


@contextlib.contextmanager
def declared(model: str, pretrained: bool) -> Iterator[None]:
    """While it lasts, networks that ask their library for weights get the declared file, or with `pretrained` False
    keep their initial weights and no file is read; whatever else asks for the network is refused.

    Raises AnomedError for a weight file that is missing or not the published one, and for a request, which it names.
    """
    import timm
    from anomalib.models.components.feature_extractors import TimmFeatureExtractor
    from torchvision.models._api import WeightsEnum

    refused: list[str] = []
    create = timm.create_model

    def refuse(host: Any) -> None:
        refused.append(
            f"anomalib.{model} asked for {host} on the network; a job reads declared files alone (`anomed fetch "
            "weights`): leave out the argument that asks for it"
        )
        raise AnomedError(refused[-1])

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(timm, "create_model", _creator(create, pretrained)))
        stack.enter_context(patch.object(TimmFeatureExtractor, "_map_layer_to_idx", _layers(model)))
        stack.enter_context(patch.object(WeightsEnum, "get_state_dict", _torchvision_state))
        if not pretrained:
            stack.enter_context(patch.object(WeightsEnum, "verify", classmethod(lambda cls, given: None)))
        for owner, name, replacement in [*_others(model, pretrained), *_sockets(refuse)]:
            stack.enter_context(patch.object(owner, name, replacement))
        try:
            yield
        except Exception as error:
            if refused and not isinstance(error, AnomedError):
                raise AnomedError(refused[0]) from error
            raise
    if refused:  # the library swallowed it and went on with something else
        raise AnomedError(refused[0])


def _creator(create: Callable[..., Any], pretrained: bool) -> Callable[..., Any]:
    """timm.create_model with weights from the file that `weights.timm` names."""
    import timm

    def creator(name: str, *args: Any, **options: Any) -> Any:
        if not options.get("pretrained"):
            return create(name, *args, **options)
        if not pretrained:
            return create(name, *args, **{**options, "pretrained": False})
        item = weights.timm(name)
        with patch.object(timm, "create_model", create):
            overlay = _overlay(item)
        return create(name, *args, **options, pretrained_cfg_overlay=overlay)

    return creator


def _layers(model: str) -> Callable[[Any], list[int]]:
    """The library's look-up of layers, which drops those that the network does not have; here they are refused."""
    from anomalib.models.components.feature_extractors import TimmFeatureExtractor

    look_up = TimmFeatureExtractor._map_layer_to_idx

    def strict(extractor: Any) -> list[int]:
        import timm

        asked = list(extractor.layers)
        found = look_up(extractor)
        if not asked or extractor.layers != asked:
            network = timm.create_model(extractor.backbone, pretrained=False, features_only=True)
            known = [info["module"] for info in network.feature_info.info]
            wrong = [layer for layer in asked if layer not in known]
            raise AnomedError(f"anomalib.{model}: layers: found {wrong or asked}, expected some of {known}")
        return found

    return strict


def _overlay(item: weights.Weights) -> dict[str, Any]:
    """What timm fills a network from. Without the classifier timm demands no tensor at all, so the whole is tried."""
    if item is BUNDLED:  # another library named its tensors
        return {"state_dict": backbones.load(item.name).network.state_dict()}
    path = item.check()
    backbones.timm_network(item, path)
    return {"file": str(path)}


def _torchvision_state(asked: Any, *args: Any, **options: Any) -> Any:
    """WeightsEnum.get_state_dict, from the file of the same name."""
    import torch

    file = asked.url.rpartition("/")[2]
    name = next((name for name, known in TORCHVISION.items() if known == file), file)
    return torch.load(weights.torchvision(name).check(), map_location="cpu", weights_only=True)


def _others(model: str, pretrained: bool) -> Iterator[tuple[Any, str, Any]]:
    """What else models load when they are built: owner, name and replacement."""
    if model == "WinClip":
        from anomalib.models.image.winclip import torch_model as winclip

        path = str(OTHERS["clip_vit_b16_plus_240"].check()) if pretrained else None
        yield winclip, "PRETRAINED", path
    if model == "AnomalyVFM":
        from anomalib.models.image.anomalyvfm import torch_model as anomalyvfm

        path = str(OTHERS["anomalyvfm"].check()) if pretrained else ""
        yield anomalyvfm, "hf_hub_download", lambda **asked: path
        if not pretrained:
            yield anomalyvfm, "load_file", lambda asked: {}
            yield anomalyvfm.AnomalyVFMModel, "load_state_dict", lambda network, state: None


def _sockets(refuse: Callable[[Any], None]) -> Iterator[tuple[Any, str, Any]]:
    """What every request goes through in the end, in the same form."""
    connect, lookup = socket.socket.connect, socket.getaddrinfo

    def guarded(own: socket.socket, address: Any) -> Any:
        if isinstance(address, tuple) and not str(address[0]).startswith(LOCAL):
            refuse(address[0])
        return connect(own, address)

    def looked_up(host: Any, *args: Any, **options: Any) -> Any:
        if host and not str(host).startswith(LOCAL):
            refuse(host)
        return lookup(host, *args, **options)

    yield socket.socket, "connect", guarded
    yield socket, "getaddrinfo", looked_up


def member(name: str, ending: str) -> io.BytesIO:
    """The one member of a declared zip file whose name ends so. Raises AnomedError when there is none."""
    path = OTHERS[name].check()
    try:
        with zipfile.ZipFile(path) as archive:
            found = next((entry for entry in archive.namelist() if entry.endswith(ending)), None)
            if found is not None:
                return io.BytesIO(archive.read(found))
    except (OSError, zipfile.BadZipFile) as error:
        raise AnomedError(f"{path}: unreadable ({error}); delete it and run `anomed fetch weights`") from None
    raise AnomedError(f"{path}: no member {ending}, expected in the weights of {name}; fetch the file again")


def pictures(key: str, place: str) -> dict[str, Path]:
    """The files of a block's folder or archive of images, by name: they decide the result. A place that is missing is
    one file that is missing. Raises AnomedError for a folder without an image and for a file that is no archive."""
    path = Path(place)
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGES)
        if not found:
            raise AnomedError(f"{key}: {path} holds no image; expected a folder or an archive of images")
        return {f"{key}/{file.relative_to(path).as_posix()}": file for file in found}
    if not path.name.endswith(ARCHIVES):
        raise AnomedError(f"{key}: found {place}, expected a folder of images or an archive ({', '.join(ARCHIVES)})")
    return {key: path}


def unpacked(path: Path, into: Path) -> Path:
    """A folder of images as it is, or what an archive holds, unpacked into the folder `into`."""
    if path.is_dir():
        return path
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                archive.extractall(into)
        else:
            with tarfile.open(path) as tar:
                tar.extractall(into, filter="data")
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise AnomedError(f"{path}: unreadable ({error}); put the archive there again") from None
    return into
