"""What the adapter has to know of each of anomalib's models beside its arguments."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from anomed import weights
from anomed.weights import OTHERS, TORCHVISION, Weights

Reads = Callable[[Any], list[Weights]]  # parameters -> the weight files that the model reads

PATCH = re.compile(r"patch(\d+)|_vit_\w+_(\d+)$")  # the patch that a transformer's name states, in pixels

FOUNDAD = {
    f"dinov{version}_vit_{size}_{patch}": f"vit_{size}_patch{patch}_dinov{version}"
    for version, patch in ((2, 14), (3, 16))
    for size in ("small", "base", "large")
}


def nothing(params: Any) -> list[Weights]:
    """The model is trained from scratch."""
    return []


def timm(key: str) -> Reads:
    """The network of timm that the argument `key` names."""
    return lambda params: [weights.timm(getattr(params, key))]


def torchvision(name: str) -> Weights:
    """What torchvision calls the DEFAULT weights of a network."""
    return weights.torchvision(f"{name}.v2" if f"{name}.v2" in TORCHVISION else name)


def named(*names: str) -> Reads:
    """Files of the table `weights.OTHERS`."""
    return lambda params: [OTHERS[name] for name in names]


def uflow(params: Any) -> list[Weights]:
    """U-Flow's own pair of CaiT networks, or the one named."""
    names = ("cait_m48_448", "cait_s24_224") if params.backbone == "mcait" else (params.backbone,)
    return [weights.timm(name) for name in names]


def efficient_ad(params: Any) -> list[Weights]:
    """The teacher, and Imagenette unless the block names other images."""
    return [OTHERS["efficientad"], *([] if params.imagenet_dir else [OTHERS["imagenette2"]])]


@dataclass(frozen=True)
class Model:
    """One model, as the adapter runs it.

    epochs, steps: how long it trains by default: passes over the train images, or optimiser steps where those come
    first; epochs 0: it is fitted in one pass (`passes` of them where it says so) or not at all. own_size: the input
    that the library gives it without its centre crop, where it is no network of convolutions alone. fixed: it takes no
    other. multiple, minimum: of the input's side. set_here: arguments that the adapter fills or refuses. memory_mb: of
    a job, with a margin, for 224 pixels and batches of 8; a memory bank of many images needs more.
    """

    reads: Reads
    epochs: int = 0
    steps: int | None = None
    passes: int = 1
    own_size: int | None = None
    fixed: bool = False
    multiple: int = 1
    minimum: int = 32
    localises: bool = True
    set_here: tuple[str, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)
    memory_mb: int = 4000


# Epochs are BMAD's (facts of its configuration files) for Cfa, Cflow, Draem, Ganomaly, ReverseDistillation and Stfpm;
# stated in the library's source for Dinomaly (steps), GeneralAD and InpFormer, in its example configurations for Glass
# and Patchflow; the papers' or their code's for Csflow, EfficientAd (steps), Fastflow and Supersimplenet; ours for Dsr,
# FoundAD, Fre, L2BT, Uflow and UniNet.
MODELS = {
    "AnomalyDINO": Model(timm("encoder_name"), own_size=252),
    "AnomalyVFM": Model(named("anomalyvfm"), own_size=768, multiple=16, minimum=64, memory_mb=8000),
    "Cfa": Model(lambda params: [torchvision(params.backbone)], epochs=30, memory_mb=6000),
    "Cflow": Model(timm("backbone"), epochs=50, minimum=192, memory_mb=6000),
    "Csflow": Model(
        lambda params: [weights.torchvision("efficientnet_b5")], epochs=240, multiple=128, minimum=128, memory_mb=8000
    ),
    "Dfkde": Model(timm("backbone"), localises=False),
    "Dfm": Model(timm("backbone"), set_here=("score_type",)),
    "Dinomaly": Model(
        timm("encoder_name"),
        epochs=1000,
        steps=5000,
        own_size=392,
        set_here=("fuse_layer_encoder", "fuse_layer_decoder"),
        memory_mb=8000,
    ),
    "Draem": Model(nothing, epochs=700, multiple=32, defaults={"dtd_dir": None}, memory_mb=16000),
    "Dsr": Model(named("dsr"), epochs=700, multiple=32, minimum=64, memory_mb=8000),
    "EfficientAd": Model(
        efficient_ad, epochs=1000, steps=70_000, minimum=256, defaults={"imagenet_dir": None}, memory_mb=6000
    ),
    "Fastflow": Model(timm("backbone"), epochs=500, multiple=16),
    "FoundAD": Model(
        lambda params: [weights.timm(FOUNDAD.get(params.encoder_name, params.encoder_name))],
        epochs=100,
        own_size=518,
        set_here=("image_size",),
        memory_mb=8000,
    ),
    "Fre": Model(timm("backbone"), epochs=220, defaults={"input_dim": None}),
    "Ganomaly": Model(nothing, epochs=100, localises=False, multiple=32),
    "GeneralAD": Model(timm("backbone"), epochs=160, own_size=518, memory_mb=12000),
    "Glass": Model(timm("backbone"), epochs=100, set_here=("input_shape",), memory_mb=12000),
    "InpFormer": Model(timm("encoder_name"), epochs=200, own_size=392, memory_mb=8000),
    "L2BT": Model(lambda params: [weights.timm("vit_base_patch14_reg4_dinov2")], epochs=50, own_size=224, multiple=14),
    "MHPatchcore": Model(timm("backbone"), passes=3, memory_mb=8000),
    "Padim": Model(timm("backbone"), memory_mb=12000),
    "Patchcore": Model(timm("backbone"), memory_mb=16000),
    "Patchflow": Model(timm("backbone"), epochs=200, multiple=32, minimum=128, memory_mb=8000),
    "Rad": Model(timm("backbone"), own_size=448, memory_mb=12000),
    "ReverseDistillation": Model(timm("backbone"), epochs=200, multiple=32, memory_mb=8000),
    "Stfpm": Model(timm("backbone"), epochs=100),
    "SuperADD": Model(timm("backbone"), own_size=448, memory_mb=16000),
    "Supersimplenet": Model(timm("backbone"), epochs=300, minimum=128, memory_mb=8000),
    "Uflow": Model(uflow, epochs=200, own_size=448, multiple=16, memory_mb=12000),
    "UniNet": Model(
        lambda params: [torchvision(params.teacher_backbone)], epochs=100, multiple=32, minimum=64, memory_mb=8000
    ),
    "WinClip": Model(
        named("clip_vit_b16_plus_240"),
        own_size=240,
        fixed=True,
        set_here=("few_shot_source",),
        defaults={"class_name": "object"},
        memory_mb=6000,
    ),
}

LEFT_OUT = {
    "CFM": "it compares colour with depth: every image needs a point cloud, which no domain has",
    "VlmAd": "it asks a vision-language model for a word and gives no score; such systems have their own pipeline",
}


def multiple(model: Model, params: Any) -> int:
    """What the side of the input must be a multiple of: the patch of the transformer that the block names, or the
    model's own number."""
    names = [str(getattr(params, key)) for key in ("backbone", "encoder_name") if hasattr(params, key)]
    found = [match for name in names if (match := PATCH.search(name))]
    return int(found[0][1] or found[0][2]) if found else model.multiple
