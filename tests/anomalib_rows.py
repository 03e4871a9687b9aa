"""Small rows of anomalib's models on painted images, and a place without any weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anomed import plugins

SIDE = 64
SMALL: dict[str, dict[str, Any]] = {
    "AnomalyDINO": {"image_size": 56},
    "AnomalyVFM": {"image_size": 64},
    "Cfa": {"backbone": "resnet18"},
    "Cflow": {"backbone": "resnet18", "coupling_blocks": 2},
    "Csflow": {"cross_conv_hidden_channels": 32, "n_coupling_blocks": 2},
    "Dfkde": {"n_pca_components": 4},
    "Dfm": {"backbone": "resnet18"},
    "Dinomaly": {"encoder_name": "vit_small_patch14_dinov2", "image_size": 56},
    "EfficientAd": {"max_steps": 2},
    "FoundAD": {"encoder_name": "dinov2_vit_small_14", "image_size": 56},
    "Fre": {"backbone": "resnet18"},
    "GeneralAD": {"backbone": "vit_small_patch14_dinov2.lvd142m", "layers": [12], "image_size": 56},
    "Glass": {"backbone": "resnet18", "pretrain_embed_dim": 64, "target_embed_dim": 64, "discriminator_hidden": 64},
    "InpFormer": {"encoder_name": "vit_small_patch14_dinov2", "image_size": 56},
    "L2BT": {"image_size": 56},
    "MHPatchcore": {"backbone": "resnet18"},
    "Patchcore": {"backbone": "resnet18"},
    "Patchflow": {"backbone": "resnet18"},
    "Rad": {"backbone": "vit_small_patch16_dinov3", "image_size": 64},
    "ReverseDistillation": {"backbone": "resnet18"},
    "SuperADD": {"backbone": "vit_small_patch16_dinov3", "patch_size": 64, "image_size": 64},
    "Supersimplenet": {"backbone": "resnet18.a1_in1k"},
    "Uflow": {"backbone": "resnet18", "image_size": 64},
    "WinClip": {"scales": [14], "batch_size": 2},
}


def discs(count: int, seed: int, side: int = SIDE) -> np.ndarray:
    """Bright discs with noise: uint8 (count, side, side)."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:side, :side] - side / 2
    radii, bright = (rng.uniform(low, high, count)[:, None, None] for low, high in ((12, 28), (80, 200)))
    return ((np.hypot(x, y) < radii) * bright + rng.uniform(0, 40, (count, side, side))).astype(np.uint8)


TRAIN, TEST = discs(10, 1), discs(5, 2)


def fitted(name: str, seed: int = 0, **options: Any) -> Any:
    """A method trained briefly from random weights on TRAIN."""
    method = plugins.load("methods", f"anomalib.{name}")
    given = {"weights": "random", "epochs": 1, "batch_size": 4, **SMALL.get(name, {}), **options}
    detector = method(method.Params(**given), seed)
    detector.fit(TRAIN)
    return detector


def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder and home: no weights anywhere."""
    monkeypatch.chdir(tmp_path)
    for variable in ("HOME", "XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path
