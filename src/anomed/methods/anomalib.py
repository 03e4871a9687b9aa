"""anomalib: every image model of that library as a method, by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, create_model, model_validator

from anomed import (
    anomalib_models,
    anomalib_scores,
    anomalib_signatures,
    anomalib_state,
    anomalib_training,
    anomalib_weights,
    backbones,
    plugins,
)
from anomed.anomalib_models import MODELS, Model
from anomed.detect import SELECTION, Detector
from anomed.settings import Settings

LEFT_OUT = {f"anomalib.{name}": reason for name, reason in anomalib_models.LEFT_OUT.items()}
FOLDERS = ("dtd_dir", "imagenet_dir", "anomaly_source_path")  # arguments that name images which decide the result
SIZE = "input_size"  # the entry of a state that is not the network's

DOC = """anomalib's {name}, trained and scored by the library's own code; see docs/anomalib.md.

    Its arguments are keys of the block. Scores and maps are raw: where the library exponentiates, squashes or
    normalises, they are taken before.
    """
PARAMS_DOC = """Arguments of anomalib's {name}, and the adapter's own keys.

    epochs: passes over the train images; a model that is fitted in one pass takes 1. max_steps, where the model has it:
    optimiser steps, if they come first. batch_size: images in one step, of training as of scoring. image_size: side of
    the network's input; by default the domain's, made larger to the next that the network takes, or for a transformer
    the library's own. weights: "pretrained", or "random": untrained backbones. torch_threads: CPU threads.
    """


class _Params:
    """The parameters of a model, made when they are first asked for: that reads the library's source."""

    def __init__(self, name: str):
        self.name = name
        self.made: type[Settings] | None = None

    def __get__(self, instance: object, owner: type) -> type[Settings]:
        if self.made is None:
            self.made = _parameters(self.name, MODELS[self.name])
        return self.made


def _parameters(name: str, known: Model) -> type[Settings]:
    """The strict settings of a model: its arguments with the library's defaults, and the adapter's."""
    arguments = anomalib_signatures.arguments(name)
    fields: dict[str, Any] = {}
    for key, argument in arguments.items():
        if key not in ("pre_trained", *known.set_here):  # `weights` says it
            default = known.defaults.get(key, argument.default)
            kind = argument.type if default is not None else argument.type | None
            fields[key] = (kind, Field(default=default))
    count = arguments["epochs"].default if "epochs" in arguments else known.epochs
    fields["epochs"] = (int, Field(default=count, ge=1)) if count else (Literal[1], 1)
    if known.steps:
        fields["max_steps"] = (int, Field(default=known.steps, ge=1))
    fields |= {
        "batch_size": (int, Field(default=8, ge=1, le=1024)),
        "image_size": (int | None, Field(default=None, ge=known.minimum)),
        "weights": (Literal["pretrained", "random"], "pretrained"),
        "torch_threads": (int, Field(default=1, ge=1, le=1024)),
    }

    def check(params: Any) -> Any:
        _check_size(known, params)
        return params

    made: type[Settings] = create_model(
        f"{name}Params",
        __base__=Settings,
        __doc__=PARAMS_DOC.format(name=name),
        __validators__={"size": model_validator(mode="after")(check)},  # type: ignore[dict-item]
        **fields,
    )
    return made


def _check_size(known: Model, params: Any) -> None:
    """Raise ValueError (for pydantic) for an image_size that the network cannot take."""
    size, step = params.image_size, anomalib_models.multiple(known, params)
    if known.fixed and size not in (None, known.own_size):
        raise ValueError(f"image_size: found {size}, this model takes {known.own_size} alone")
    if size and size % step:
        raise ValueError(f"image_size: found {size}, expected a multiple of {step}, such as {-(-size // step) * step}")


def _input_size(known: Model, params: Any, side: int) -> int:
    """The side of the network's input for images of `side` pixels."""
    step = anomalib_models.multiple(known, params)
    if params.image_size or known.own_size:
        return int(params.image_size or (known.own_size or 0) // step * step)
    return -(-max(side, known.minimum) // step) * step


def _method(name: str, known: Model) -> type[Detector]:
    """The method that runs one model of the library."""

    class Adapted(Detector):
        gpu = True
        localises = known.localises
        memory_mb = known.memory_mb

        @classmethod
        def files(cls, params: Any) -> dict[str, Path]:
            """Weight files by the names that `anomed fetch weights` knows, and the images that the block names."""
            folders = {key: str(getattr(params, key)) for key in FOLDERS if getattr(params, key, None)}
            found = {key: path for at in folders.items() for key, path in anomalib_weights.pictures(*at).items()}
            needed = known.reads(params) if params.weights == "pretrained" else []
            return {item.name: item.path() for item in needed} | found

        @classmethod
        def mark(cls, params: Any) -> str:
            """Random weights are no result, except for a model that is trained from scratch anyway."""
            return "" if known.reads is anomalib_models.nothing else super().mark(params)

        @classmethod
        def selection(cls, params: Any) -> str:
            """The adapter keeps the last epoch of what trains by epochs."""
            return SELECTION["fixed"] if known.epochs else ""

        def fit(self, images: np.ndarray) -> None:
            """Train on the normal images. Raises AnomedError with the library's reason where it cannot."""
            size = _input_size(known, self.params, images.shape[1])
            pretrained = self.params.weights == "pretrained"
            backbones.configure(self.params.torch_threads)
            with (
                anomalib_training.alone(name, self.seed, self.device) as scratch,
                anomalib_weights.declared(name, pretrained),
            ):
                model = anomalib_training.build(name, self.params, size, scratch)
                anomalib_training.train(name, self.params, model, images, self.seed, self.device, scratch)
            anomalib_state.settle(model.model)
            anomalib_state.check(name, model.model)
            self._keep(model, size)

        def state(self) -> dict[str, np.ndarray]:
            """All tensors of the network, backbone included, by the library's names, and the input's side."""
            return anomalib_state.arrays(self.network) | {SIZE: np.array([self.size])}

        def restore(self, state: dict[str, np.ndarray]) -> None:
            """Build the network without any weight file, then fill every tensor of it."""
            size = int(state[SIZE].item())
            backbones.configure(self.params.torch_threads)
            with anomalib_training.alone(name, 0, "cpu") as scratch:
                with anomalib_weights.declared(name, pretrained=False):
                    model = anomalib_training.build(name, self.params, size, scratch)
                anomalib_state.fill(name, model.model, {key: state[key] for key in state if key != SIZE})
            self._keep(model, size)

        def _keep(self, model: Any, size: int) -> None:
            self.network, self.size = model.model.to(self.device).eval(), size
            self.steps = model.pre_processor.transform

        def score(self, images: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
            """See Detector.score. Maps at the size of the network's input, where the library does not say otherwise.

            A batch is filled up with black images: the shape that the network sees never changes.
            """
            count = self.params.batch_size
            for start in range(0, len(images), count):
                batch = images[start : start + count]
                full = np.zeros((count, *images.shape[1:]), np.uint8)
                full[: len(batch)] = batch
                values = self.steps(anomalib_training.tensors(full, self.steps.transforms[0]).to(self.device))
                scores, maps = anomalib_scores.score(name, self.network, values)
                here = None if maps is None else maps[: len(batch)].float().cpu().numpy()
                yield scores[: len(batch)].double().cpu().numpy(), here

    Adapted.__name__ = Adapted.__qualname__ = name
    Adapted.__doc__ = DOC.format(name=name)
    Adapted.Params = _Params(name)  # type: ignore[assignment, misc]
    return Adapted


for _name, _known in MODELS.items():
    plugins.register("methods", f"anomalib.{_name}")(_method(_name, _known))
