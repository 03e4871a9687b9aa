"""Images as networks take them: batches, pixels, and no more of a file in memory than is looked at."""

import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def batches_of(count: int, batch_size: int) -> int:
    """Batches in one pass over `count` images; one that is left over joins the last."""
    return max(1, -(-(count - (count % batch_size == 1)) // batch_size))


def span(count: int, batch_size: int, number: int) -> slice:
    """The places of a batch, by its number, in the order of a pass."""
    last = number == batches_of(count, batch_size) - 1
    return slice(number * batch_size, count if last else (number + 1) * batch_size)


def batches(images: np.ndarray, batch_size: int) -> "Iterator[tuple[np.ndarray, int]]":
    """Consecutive batches, uint8 (batch_size, …), and how many images are in each: the last is filled up with black
    ones. The shape that a network sees never changes, and with it, but for rounding, what it says of an image."""
    for start in range(0, len(images), batch_size):
        batch = images[start : start + batch_size]
        full = np.zeros((batch_size, *images.shape[1:]), images.dtype)
        full[: len(batch)] = batch
        forget(images)
        yield full, len(batch)


def pixels(images: np.ndarray, channels: int, size: int, device: str) -> "torch.Tensor":
    """Images, uint8 (B, S, S) or (B, S, S, 3), as a network's input: float32 (B, channels, size, size) in [0, 1].

    Grey ones are repeated to `channels`. Resized bilinearly, antialiased when made smaller, before any other step.
    """
    import torch
    import torch.nn.functional as F

    values = torch.from_numpy((images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)).copy())
    values = values.to(device).float() / 255
    if values.shape[-1] != size:
        values = F.interpolate(values, size=(size, size), mode="bilinear", antialias=True).clamp(0, 1)
    return values if values.shape[1] == channels else values.expand(-1, channels, -1, -1).contiguous()


def channels_of(images: np.ndarray) -> int:
    """1 for grey images, 3 for colour."""
    return 1 if images.ndim == 3 else 3


def taken(images: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Copies of some images. Of a file no more than one is resident: the system maps megabytes around what is read."""
    batch = np.empty((len(rows), *images.shape[1:]), images.dtype)
    for place, row in enumerate(rows):
        batch[place] = images[row]
        forget(images)
    return batch


def forget(images: np.ndarray) -> None:
    """Give back the memory of a file's pages that were read: the process stays as small as one batch."""
    mapping = getattr(images, "_mmap", None)
    if mapping is not None and getattr(images, "mode", "") == "r":
        mapping.madvise(mmap.MADV_DONTNEED)
