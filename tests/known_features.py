"""A backbone whose features are known, for oracles that work them out from the pixels."""

import numpy as np
import torch

SIZE = 48  # first level 6 x 6 patches of 3 channels, second level 3 x 3 of 5


def levels_of(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stand-in for a network: two small feature maps computed from the pixels, (3, 6, 6) and (5, 3, 3)."""
    image = image.astype(np.float64) / 255
    first = np.stack([image[k::8, k::8] ** (k + 1) for k in range(3)])
    second = np.stack([np.sin(4 * image[k::16, 2 * k :: 16]) + k for k in range(5)])
    return first * 10, second


class StandIn:
    """The backbone. expected: the layers that it must be asked for, where a test says which."""

    def __init__(self, expected: list[str] | None = None):
        self.expected = expected

    def features(self, images: np.ndarray, layers: list[str], batch_size: int) -> list[torch.Tensor]:
        assert self.expected in (None, layers)
        assert len(images) <= batch_size
        pairs = [levels_of(image) for image in images]
        return [torch.from_numpy(np.stack(level).astype(np.float32)) for level in zip(*pairs, strict=True)]


def pixels(count: int, seed: int) -> np.ndarray:
    """Noise: uint8 (count, 48, 48)."""
    return np.random.default_rng(seed).integers(0, 256, (count, SIZE, SIZE), dtype=np.uint8)
