"""Random crops and flips of a batch of images, each fixed by the seed, the step and the image's place in the data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.random import Noise


@dataclass(frozen=True, eq=False)
class Transform:
    """What one batch went through: apply it to all that lies in the frame of the images, such as a perturbation."""

    padding: int = 0  # zeros added on every side before the crop
    offset: Tensor | None = None  # (B, 2) top-left corner (row, column) of the crop in the padded image
    flipped: Tensor | None = None  # (B,) bool, mirrored left to right

    def __call__(self, x: Tensor) -> Tensor:
        """Crop, then flip; (B, C, H, W) to the same shape."""
        return self.read(x if self.offset is None else torch.nn.functional.pad(x, [self.padding] * 4))

    def _flip(self, x: Tensor) -> Tensor:
        return x if self.flipped is None else torch.where(self.flipped[:, None, None, None], x.flip(-1), x)

    @property
    def margin(self) -> int:
        """Pixels that the frame of the images is wider than an image, on every side."""
        return 0 if self.offset is None else self.padding

    def read(self, frame: Tensor) -> Tensor:
        """What the batch sees of something kept in the frame of the padded images, (B, C, H + 2 margin, ...)."""
        if self.offset is not None:
            frame = frame[_places(frame, self.padding, self.offset)]
        return self._flip(frame)

    def write(self, values: Tensor, frame: Tensor) -> Tensor:
        """`frame` with what the batch saw of it replaced by `values` (B, C, H, W): the inverse of `read`."""
        values = self._flip(values)
        if self.offset is None:
            return values
        return frame.index_put(_places(frame, self.padding, self.offset), values)


def _places(padded: Tensor, padding: int, offset: Tensor) -> tuple[Tensor, ...]:
    """Indices of the crops in the padded images, for reading and writing."""
    batch, channels, height, width = padded.shape
    rows = offset[:, :1] + torch.arange(height - 2 * padding, device=padded.device)
    columns = offset[:, 1:] + torch.arange(width - 2 * padding, device=padded.device)
    image = torch.arange(batch, device=padded.device)[:, None, None, None]
    channel = torch.arange(channels, device=padded.device)[None, :, None, None]
    return image, channel, rows[:, None, :, None], columns[:, None, None, :]


def draw_transform(noise: Noise, *, crop: int, flip: bool) -> Transform:
    """A transform for the inputs of `noise`: crops of the padded image if `crop` > 0, flips with probability 1/2."""
    offset = noise.fork(0).integers(2 * crop + 1, (2,)) if crop else None
    flipped = noise.fork(1).integers(2).bool() if flip else None
    return Transform(crop, offset, flipped)


def check_images(shape: tuple[int, ...], *, needed: bool) -> None:
    """Refuse to augment what is not an image; `shape` is the shape of one input."""
    if needed and len(shape) != 3:
        raise InputError(f"augment: needs images of shape (C, H, W), the inputs have shape {shape}")
