"""A tiny PNG writer, so that a report can carry its pictures without an imaging library."""

import base64
import struct
import zlib

import numpy as np
import numpy.typing as npt

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _RGB = 0, 2  # colour types of the PNG standard


def is_picture(shape: tuple[int, ...]) -> bool:
    """Return whether an input of this shape can be shown: (C, H, W) with one or three channels."""
    return len(shape) == 3 and shape[0] in (1, 3) and min(shape) > 0


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def encode_png(image: npt.NDArray[np.floating], *, low: float = 0.0, high: float = 1.0) -> bytes:
    r"""8-bit PNG of an image (C, H, W), C = 1 or 3; `low` becomes black and `high` white, values outside are clipped.

    >>> encode_png(np.zeros((1, 2, 3), np.float32))[:4]
    b'\x89PNG'
    """
    channels, height, width = image.shape
    scaled = np.clip((image.astype(np.float64) - low) / (high - low), 0.0, 1.0)
    pixels = np.rint(scaled * 255).astype(np.uint8).transpose(1, 2, 0).reshape(height, width * channels)
    # Each row starts with the number of its filter; 0 means none.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, _GREY if channels == 1 else _RGB, 0, 0, 0)
    body = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")
    return _SIGNATURE + body


def data_uri(image: npt.NDArray[np.floating], *, low: float = 0.0, high: float = 1.0) -> str:
    """Encode the PNG as a `data:` address for the `src` of an HTML image."""
    return "data:image/png;base64," + base64.b64encode(encode_png(image, low=low, high=high)).decode("ascii")
