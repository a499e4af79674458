"""Findings about pictures."""

from __future__ import annotations

import struct
import zlib

import numpy as np

from refgrad.conformance.findings.finding import REFERENCE, Finding, model

_DECODE = model("""
    <ir_version: 10, opset_import: ["" : 21]>
    decode (uint8[N] stream) => (uint8[H, W, C] image) { image = ImageDecoder (stream) }
""")


def _palette() -> np.ndarray:
    """A PNG of one row, two pixels in a palette of two colours."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 2, 1, 8, 3, 0, 0, 0)
    parts = (
        (b"IHDR", header),
        (b"PLTE", bytes([10, 20, 30, 40, 50, 60])),
        (b"IDAT", zlib.compress(b"\0\0\1")),
        (b"IEND", b""),
    )
    return np.frombuffer(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts), np.uint8)


FINDINGS = (
    Finding(
        REFERENCE,
        "ImageDecoder",
        "gives the indices of a palette instead of colours",
        _DECODE,
        {"stream": _palette()},
        {"image": np.array([[[10, 20, 30], [40, 50, 60]]], np.uint8)},
        proof="a picture is (height, width, channels) in the pixel format RGB; the palette has the two colours",
    ),
    Finding(
        REFERENCE,
        "ImageDecoder",
        "fails on what is no picture",
        _DECODE,
        {"stream": np.arange(20, dtype=np.uint8)},
        {"image": np.empty((0, 0, 3), np.uint8)},
        proof="if it can't decode for any reason, it returns an empty matrix",
    ),
)
