"""Arrays in and out: the only place that touches axes, spacing and resizing."""

import io

import numpy as np
from PIL import Image


def encode_png(image: np.ndarray) -> bytes:
    """uint8 H x W or H x W x 3 to the bytes of a PNG."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def resize(image: np.ndarray, size: int) -> np.ndarray:
    """uint8 H x W or H x W x 3 to S x S (x 3): bilinear, antialiased when shrinking, aspect ratio not kept (as BMAD)."""
    if image.shape[:2] == (size, size):
        return image
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR))
