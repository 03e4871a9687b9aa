"""Building and training a model of anomalib outside its Engine: no folder, log, checkpoint or progress bar."""

import contextlib
import io
import os
import random
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np

from anomed import anomalib_weights
from anomed.anomalib_models import MODELS
from anomed.anomalib_signatures import arguments
from anomed.errors import AnomedError
from anomed.weights import OTHERS

if TYPE_CHECKING:
    import torch

TRAINER = ("gradient_clip_val",)  # what a model's trainer_arguments may change; lengths and validation are set here
# What a library raises at a wrong argument, a size that it cannot take, or numbers that give no solution.
FAULTS = (ValueError, RuntimeError, LookupError, TypeError, NotImplementedError, AssertionError, ZeroDivisionError)


@contextlib.contextmanager
def alone(name: str, seed: int, device: str) -> Iterator[Path]:
    """Seeded, silent and with a scratch folder, which it gives; random numbers, warnings and loggers are the caller's
    again afterwards. What the library raises for bad input becomes an AnomedError that names the model."""
    import logging

    import torch

    said, saved = io.StringIO(), (random.getstate(), np.random.get_state())  # noqa: NPY002  the library draws from it
    loggers = [logging.getLogger(key) for key in ("anomalib", "lightning", "lightning.pytorch", "timm", "root")]
    levels = [logger.level for logger in loggers]
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[torch.cuda.current_device()] if device == "cuda" else []))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(said))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="anomed-"))
        # anomalib imports matplotlib, which on its first import writes a cache into the home folder.
        place = {"MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR", folder)}
        stack.enter_context(patch.dict(os.environ, {} if "matplotlib" in sys.modules else place))
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.manual_seed(seed)
        try:
            yield Path(folder)
        except FAULTS as error:
            reason = " ".join(str(error).split())[:400] or type(error).__name__
            raise AnomedError(f"anomalib.{name}: {reason}") from error
        finally:
            random.setstate(saved[0])
            np.random.set_state(saved[1])  # noqa: NPY002
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def transform(name: str, size: int) -> Any:
    """The model's own pre-processing at another size: its Resize and its Normalize, if any, no crop and no padding."""
    import anomalib.models.image as library
    from torchvision.transforms.v2 import Compose, Normalize, Resize

    steps = getattr(library, name).configure_pre_processor().transform.transforms
    resize = next(step for step in steps if isinstance(step, Resize))
    normalize = [step for step in steps if isinstance(step, Normalize)]
    return Compose([Resize((size, size), interpolation=resize.interpolation, antialias=True), *normalize])


def build(name: str, params: Any, size: int, folder: Path) -> Any:
    """The Lightning module of a model for square inputs of `size` pixels, without its post-processor, evaluator and
    visualiser. folder: scratch."""
    import anomalib.models.image as library
    from anomalib.pre_processing import PreProcessor

    given = {key: _converted(key, name, params) for key in arguments(name) if hasattr(params, key)}
    given |= _set_here(name, params, size, folder)
    unused = {"post_processor": False, "evaluator": False, "visualizer": False}
    model = getattr(library, name)(**given, pre_processor=PreProcessor(transform(name, size)), **unused)
    if name == "Fre" and params.input_dim is None:
        _fit_autoencoder(model.model, params, size)
    return model


def _converted(key: str, name: str, params: Any) -> Any:
    """An argument as the library's signature wants it: YAML knows neither tuples nor enumerations."""
    import enum
    import inspect

    import anomalib.models.image as library

    value, argument = getattr(params, key), arguments(name)[key]
    default = inspect.signature(getattr(library, name)).parameters[key].default
    if isinstance(default, enum.Enum):
        return type(default)(value)
    if isinstance(value, list):
        value = [list(item) if isinstance(item, list) else item for item in value]
        return tuple(value) if argument.as_tuple else value
    return value


def _set_here(name: str, params: Any, size: int, folder: Path) -> dict[str, Any]:
    """Arguments that the adapter fills: the input's size, and folders of images."""
    if name == "FoundAD":
        return {"image_size": size}
    if name == "Glass":
        source = params.anomaly_source_path
        unpacked = str(anomalib_weights.unpacked(Path(source), folder)) if source else None
        return {"input_shape": (size, size), "anomaly_source_path": unpacked}
    if name == "Draem":  # without textures its generator paints noise; None would make it look for a download
        return {"dtd_dir": anomalib_weights.unpacked(Path(params.dtd_dir), folder) if params.dtd_dir else folder}
    if name == "EfficientAd":
        return {"imagenet_dir": folder}
    if name == "Fre" and params.input_dim is None:
        return {"input_dim": 1}
    return {}


def _fit_autoencoder(network: Any, params: Any, size: int) -> None:
    """Give FRE's autoencoder as many inputs as the features have at this size."""
    import torch
    from anomalib.models.image.fre.torch_model import TiedAE

    with torch.no_grad():
        features = network.feature_extractor(torch.zeros(1, 3, size, size))[network.layer]
    side = [length // max(params.pooling_kernel_size, 1) for length in features.shape[-2:]]
    network.fre_model = TiedAE(features.shape[1] * side[0] * side[1], params.latent_dim)


def tensors(images: np.ndarray, resize: Any) -> "torch.Tensor":
    """Float32 (B, 3, s, s) in [0, 1] of uint8 (B, S, S) or (B, S, S, 3), resized as the model's first step does."""
    import torch

    values = torch.from_numpy(np.array(images, np.float32) / np.float32(255))
    values = values[:, None].expand(-1, 3, -1, -1) if values.ndim == 3 else values.permute(0, 3, 1, 2)
    resized: torch.Tensor = resize(values.contiguous())
    return resized


def train(name: str, params: Any, model: Any, images: np.ndarray, seed: int, device: str, folder: Path) -> None:
    """Fit a built model on normal images, as the library's Engine would, and leave it in evaluation mode."""
    if name == "WinClip":
        _prompt(params, model, images, seed, device)
    if name in ("WinClip", "AnomalyVFM"):
        return
    data = _normals(name, params, images, model.pre_processor.transform.transforms[0], seed)
    if name == "EfficientAd":
        _lend_teacher(params, model, data, folder)
    if name == "Dsr":
        _lend_codebook(params, model)
    _trainer(name, params, model, device, folder).fit(model, datamodule=data)
    model.to(device).eval()
    if name == "EfficientAd":
        import torch

        with torch.no_grad():
            model.model.quantiles.update(model.map_norm_quantiles(data.val_dataloader()))
    model._trainer = None


def _trainer(name: str, params: Any, model: Any, device: str, folder: Path) -> Any:
    from lightning.pytorch import Trainer

    known = MODELS[name]
    lengths: dict[str, Any] = {"max_epochs": params.epochs if known.epochs else known.passes, "max_steps": -1}
    if known.steps:
        lengths["max_steps"] = params.max_steps
    own = {key: value for key, value in model.trainer_arguments.items() if key in TRAINER}
    return Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        # On a GPU some operations of the library have no deterministic form.
        deterministic="warn" if device == "cuda" else True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,  # memory banks are fitted at the end of an epoch as well
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **lengths,
        **own,
    )


def _normals(name: str, params: Any, images: np.ndarray, resize: Any, seed: int) -> Any:
    """A data module of normal images: batches of the library's ImageBatch, shuffled by the seed for training."""
    import torch
    from anomalib.data import ImageBatch
    from lightning.pytorch import LightningDataModule
    from torch.utils.data import DataLoader

    rows: Any = range(len(images))
    trained, size = bool(MODELS[name].epochs), 1 if name == "EfficientAd" else params.batch_size

    def collate(chosen: list[int]) -> Any:
        labels = torch.zeros(len(chosen), dtype=torch.bool)
        return ImageBatch(image=tensors(images[chosen], resize), gt_label=labels)

    class Normals(LightningDataModule):
        train_batch_size = size  # EfficientAd looks

        def train_dataloader(self) -> Any:
            order = torch.Generator().manual_seed(seed)
            # Batch normalisation learns nothing from one image; a memory bank needs them all.
            short = trained and len(images) > 1 and len(images) % size == 1
            return DataLoader(rows, size, shuffle=True, generator=order, collate_fn=collate, drop_last=short)

        def val_dataloader(self) -> Any:
            return DataLoader(rows, size, collate_fn=collate)

    return Normals()


def _lend_teacher(params: Any, model: Any, data: Any, folder: Path) -> None:
    """EfficientAD's teacher and its penalty images, which it would download: from declared files, or with random
    weights none and the train images."""
    import torch

    if params.weights == "random":
        model.prepare_pretrained_model = types.MethodType(lambda own: None, model)
        model.prepare_imagenette_data = types.MethodType(lambda own, size: _lend_images(own, data), model)
        return
    ending = f"pretrained_teacher_{params.model_size}.pth"

    def load(own: Any) -> None:
        state = torch.load(anomalib_weights.member("efficientad", ending), map_location=own.device, weights_only=True)
        own.model.teacher.load_state_dict(state)

    model.prepare_pretrained_model = types.MethodType(load, model)
    place = Path(params.imagenet_dir) if params.imagenet_dir else OTHERS["imagenette2"].check()
    model.imagenet_dir = _classes(anomalib_weights.unpacked(place, folder))


def _classes(folder: Path) -> Path:
    """The folder whose folders hold images: Imagenette's archive has its classes under imagenette2/train."""
    inner = sorted(path for path in folder.rglob("*") if path.suffix.lower() in anomalib_weights.IMAGES)
    if not inner:
        raise AnomedError(f"imagenet_dir: {folder} holds no image; expected a folder of folders of images")
    return inner[0].parent.parent


def _lend_images(model: Any, data: Any) -> None:
    model.imagenet_loader = [(batch.image,) for batch in data.val_dataloader()]
    model.imagenet_iterator = iter(model.imagenet_loader)


def _lend_codebook(params: Any, model: Any) -> None:
    """DSR's pre-trained codebook, which it would download."""
    if params.weights == "random":
        model.prepare_pretrained_model = lambda: None
        model.model.load_pretrained_discrete_model_weights = lambda checkpoint, device: None
    else:
        model.prepare_pretrained_model = lambda: anomalib_weights.member("dsr", "vq_model_pretrained_128_4096.pckl")


def _prompt(params: Any, model: Any, images: np.ndarray, seed: int, device: str) -> None:
    """WinCLIP's prompts and, of k_shot train images that the seed chooses, its references, pre-processed like the
    images to score; the library takes its references from the loader, which has not normalised them."""
    model.to(device)
    references = None
    if params.k_shot:
        if params.k_shot > len(images):
            raise AnomedError(f"anomalib.WinClip: k_shot is {params.k_shot}, found {len(images)} train images")
        rows = np.sort(np.random.default_rng(seed).choice(len(images), params.k_shot, replace=False))
        steps = model.pre_processor.transform
        references = steps(tensors(images[rows], steps.transforms[0])).to(device)
    model.model.setup(params.class_name, references)
