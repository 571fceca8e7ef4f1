"""A small PNG writer, so that pictures need no imaging library."""

import base64
import struct
import zlib

import numpy as np
import numpy.typing as npt

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPE = {1: 0, 3: 2}  # of the PNG standard, by number of channels: grey, RGB


def _block(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def encode_png(image: npt.NDArray[np.floating]) -> bytes:
    r"""8-bit PNG of an image (C, H, W) in [0, 1], C = 1 or 3; values outside are clipped.

    >>> encode_png(np.zeros((3, 2, 4)))[:4]
    b'\x89PNG'
    """
    channels, height, width = image.shape
    levels = np.rint(np.clip(image.astype(np.float64), 0.0, 1.0) * 255).astype(np.uint8)
    lines = levels.transpose(1, 2, 0).reshape(height, width * channels)
    # Each line starts with the number of its filter; 0 means none.
    body = np.concatenate([np.zeros((height, 1), np.uint8), lines], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPE[channels], 0, 0, 0)
    blocks = _block(b"IHDR", header) + _block(b"IDAT", zlib.compress(body, 9)) + _block(b"IEND", b"")
    return _SIGNATURE + blocks


def png_uri(image: npt.NDArray[np.floating]) -> str:
    """The PNG as a `data:` address for an SVG or HTML image."""
    return "data:image/png;base64," + base64.b64encode(encode_png(image)).decode("ascii")
