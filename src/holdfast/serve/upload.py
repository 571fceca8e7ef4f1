"""From an uploaded picture to an input: bounded in bytes and pixels, of two formats only, and nothing is kept."""

import io

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from holdfast.errors import InputError

FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG"}
BYTES = 2**20  # of an upload
PIXELS = 4_000_000  # of a picture; a megabyte of PNG can hold a thousand times as many


class TooLarge(InputError):
    """A picture of more than `PIXELS` pixels."""


def read_picture(content: bytes, kind: str, shape: tuple[int, ...]) -> Tensor:
    """The picture as an input in [0, 1] of the shape (C, H, W), C = 1 or 3.

    It is turned as its camera says, cut to the model's proportions around its middle, and resized. What is transparent
    becomes black, the background of the digits.

    Args:
        content: the file.
        kind: its type, one of `FORMATS`.
        shape: of the input.
    """
    channels, height, width = shape
    try:
        # Twice, because checking a file uses it up.
        with Image.open(io.BytesIO(content), formats=(FORMATS[kind],)) as picture:
            _check_size(*picture.size)
            picture.verify()
        with Image.open(io.BytesIO(content), formats=(FORMATS[kind],)) as picture:
            seen = ImageOps.exif_transpose(picture).convert("RGBA")
    except InputError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise TooLarge(f"the picture has more than {PIXELS:,} pixels; make it smaller") from error
    except Exception as error:  # a damaged file makes its reader fail in any way
        raise InputError(f"this is no {FORMATS[kind]} picture that can be read; save it again") from error
    plain = Image.alpha_composite(Image.new("RGBA", seen.size, (0, 0, 0, 255)), seen)
    fitted = ImageOps.fit(plain.convert("L" if channels == 1 else "RGB"), (width, height), Image.Resampling.LANCZOS)
    values = torch.from_numpy(np.asarray(fitted, np.float32) / 255)
    return values[None] if channels == 1 else values.permute(2, 0, 1).contiguous()


def _check_size(width: int, height: int) -> None:
    if width * height > PIXELS:
        raise TooLarge(f"the picture has {width} x {height} pixels, at most {PIXELS:,} are read; make it smaller")
