"""Pictures in files, which Pillow decodes where it is installed."""

from __future__ import annotations

import io
import struct

import numpy as np

from refgrad.backends.numpy.registry import kernel

_MODES = {"RGB": "RGB", "BGR": "RGB", "Grayscale": "L"}


@kernel("ImageDecoder", fresh=True)
def image_decoder(encoded_stream: np.ndarray, *, pixel_format: str) -> np.ndarray:
    """(height, width, channels), 0 by 0 where the bytes are not a picture"""
    if encoded_stream.ndim != 1:
        raise ValueError(f"the bytes have the shape {list(encoded_stream.shape)}; it must have one axis")
    if pixel_format not in _MODES:
        raise ValueError(f"pixel_format {pixel_format!r} is not one of {list(_MODES)}")
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError("Pillow reads the pictures and is not installed: pip install pillow") from error
    mode = _MODES[pixel_format]
    try:
        with Image.open(io.BytesIO(encoded_stream.tobytes())) as image:
            pixels = np.array(image if image.mode == mode else image.convert(mode))
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError):
        pixels = np.empty((0, 0, len(mode)), np.uint8)  # what Pillow raises on a damaged file, by its format
    if mode == "L":
        return pixels.reshape(*pixels.shape[:2], 1)
    return np.ascontiguousarray(pixels[:, :, ::-1]) if pixel_format == "BGR" else pixels
