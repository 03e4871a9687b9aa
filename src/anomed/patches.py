"""Patches: feature maps of several layers on one grid, and the way back from patch scores to an anomaly map."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    import torch

Upsampling = Literal["bilinear", "nearest"]


def joined(levels: "Sequence[torch.Tensor]", upsampling: Upsampling) -> "torch.Tensor":
    """Feature maps (B, C_i, h_i, w_i), resized to the grid of the first and concatenated: (B, h, w, sum of C_i)."""
    import torch
    import torch.nn.functional as F

    grid = levels[0].shape[-2:]
    resized = [F.interpolate(level, size=grid, mode=upsampling) for level in levels[1:]]
    return torch.cat([levels[0], *resized], dim=1).permute(0, 2, 3, 1).contiguous()


def paint(scores: "torch.Tensor", height: int, width: int, sigma: float, upsampling: Upsampling) -> np.ndarray:
    """The anomaly map of one image: patch scores, float32 (h, w), upsampled to height x width and smoothed."""
    import torch

    rows, columns = (
        torch.from_numpy(spread(cells, size, sigma, upsampling))
        for cells, size in zip(scores.shape, (height, width), strict=True)
    )
    painted: np.ndarray = (rows @ scores.cpu() @ columns.T).numpy()
    return painted


@functools.cache
def spread(cells: int, size: int, sigma: float, upsampling: Upsampling = "bilinear") -> np.ndarray:
    """The linear map from a row of `cells` patch scores to `size` pixels: float32 (size, cells).

    Upsampling, bilinear with half-pixel centres or by the nearest patch, then a Gaussian cut at 4 sigma with mirrored
    edges (the kernel of anomalib: 2 x int(4 sigma + 0.5) + 1 taps, normalised). A map is rows @ scores @ columns.T:
    plain products, the same on every device.
    """
    upsample = np.zeros((size, cells))
    if upsampling == "nearest":
        upsample[np.arange(size), np.arange(size) * cells // size] = 1
    else:
        centres = np.clip((np.arange(size) + 0.5) * cells / size - 0.5, 0, cells - 1)
        lower = np.minimum(centres.astype(int), max(cells - 2, 0))
        upsample[np.arange(size), lower] += 1 - (centres - lower)
        upsample[np.arange(size), np.minimum(lower + 1, cells - 1)] += centres - lower
    radius = int(4 * sigma + 0.5)
    if radius == 0:
        return upsample.astype(np.float32)
    offsets = np.arange(-radius, radius + 1)
    kernel = np.exp(-0.5 * (offsets / sigma) ** 2)
    kernel /= kernel.sum()
    period = max(2 * size - 2, 1)
    pixels = (np.arange(size)[:, None] + offsets) % period
    pixels = np.where(pixels < size, pixels, period - pixels)
    blur = np.zeros((size, size))
    np.add.at(blur, (np.arange(size)[:, None], pixels), np.broadcast_to(kernel, pixels.shape))
    return (blur @ upsample).astype(np.float32)
