"""What short trainings of tests share: painted images that a detector learns from in seconds (striped tissue in an oval,
with or without a blob), and the parameters that make a training short."""

from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

SIDE = 64
# Native methods that train by epochs, and what makes a training short.
BRIEF: dict[str, dict[str, Any]] = {
    "autoencoder": {"channels": [8, 4], "epochs": 1, "batch_size": 4},
    "cutpaste": {"max_steps": 3, "frozen_steps": 1, "batch_size": 4, "head": [16]},
    "deep_svdd": {"pretrain_epochs": 1, "epochs": 1, "batch_size": 4},
    "f_anogan": {
        "image_size": 32,
        "width": 4,
        "latent_size": 8,
        "n_critic": 2,
        "epochs": 2,
        "encoder_epochs": 1,
        "batch_size": 4,
    },
    "mkd": {"epochs": 1, "batch_size": 4, "layers": ["blocks.1", "blocks.2"], "width": 4},
    "simplenet": {"epochs": 1, "batch_size": 4, "hidden": 16},
    "ddpm": {
        "channels": [4, 8],
        "residual_blocks": 1,
        "attention": 1,
        "image_size": 32,
        "timesteps": 40,
        "start": 4,
        "epochs": 1,
        "batch_size": 4,
    },
    "vae": {"channels": [8, 8], "latent_size": 8, "epochs": 1, "batch_size": 4},
    "utrad": {
        "epochs": 1,
        "batch_size": 4,
        "patches": [2, 4],
        "width": 16,
        "heads": 2,
        "feedforward": 16,
        "depth": 1,
    },
}


def tissue(count: int, seed: int, blobs: bool = False, side: int = SIDE) -> np.ndarray:
    """uint8 (count, side, side): a grey oval with soft stripes and noise; blobs: each with a bright or dark spot."""
    rng = np.random.default_rng(seed)
    y, x = (np.mgrid[:side, :side] - side / 2) / side
    made = []
    for _ in range(count):
        wide, high, turn, phase = rng.uniform(0.32, 0.42), rng.uniform(0.36, 0.46), *rng.uniform(-0.2, 6, 2)
        stripes = np.sin(2 * np.pi * 6 * (x * np.cos(0.1 * turn) + y * np.sin(0.1 * turn)) + phase)
        picture = (np.hypot(x / wide, y / high) < 1) * (120 + 18 * stripes)
        if blobs:
            angle, away, radius = rng.uniform(0, 2 * np.pi), rng.uniform(0, 0.22), rng.uniform(0.07, 0.1)
            inside = np.hypot(x - away * np.cos(angle), y - away * np.sin(angle)) < radius
            picture = np.where(inside, rng.choice([20, 240]), picture)
        made.append(np.clip(picture + rng.normal(0, 4, picture.shape), 0, 255))
    return np.array(made).astype(np.uint8)


def scored(detector: Any, images: np.ndarray) -> tuple[np.ndarray, Any]:
    """All scores and maps of `images`."""
    batches = list(detector.score(images))
    maps = [maps for _, maps in batches if maps is not None]
    return np.concatenate([scores for scores, _ in batches]), np.concatenate(maps) if maps else None


def auroc(detector: Any, seed: int = 100, count: int = 20) -> float:
    """Image AUROC on `count` new images without and as many with a blob."""
    images = np.concatenate([tissue(count, seed), tissue(count, seed + 1, blobs=True)])
    return float(roc_auc_score(np.repeat([0, 1], count), scored(detector, images)[0]))
