"""Scenes made of MNIST digits on a cluttered background, drawn on the fly: labels and boxes without any download.

The clutter is what digits are made of: pieces of other digits, straight strokes, and noise. It tells nothing about the
label, so a model that attends to it is wrong to. Scene i depends on the seed and on i, not on how many are drawn.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from holdfast.data.builtin import mnist_mini
from holdfast.data.dataset import Dataset, Split
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.utils.show import Shown

SIDE = 28  # of an MNIST image
PIECE = 9  # side of a piece of clutter, about half of a digit
PIECES, STROKES = 6, 2
INK = 0.1  # a pixel below this is not counted as part of a digit
_CHUNK = 100  # scenes drawn at once; memory grows with it, the scenes do not change


@dataclass(frozen=True, eq=False, repr=False)
class DetectionScenes(Shown):
    """Images with several objects each.

    Attributes:
        x: images in [0, 1], float32, shape (N, 1, size, size).
        boxes: x0, y0, x1, y1 in pixels (x1 and y1 excluded), float32, shape (N, M, 4); zeros where there is no object.
        labels: class indices, int64, shape (N, M); -1 where there is no object. Objects come first.
        classes: one name per class index.
    """

    x: Tensor
    boxes: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return int(self.x.shape[0])

    def __getitem__(self, selection: Tensor | slice) -> "DetectionScenes":
        """Some of the scenes, by slice, mask (N,) or indices."""
        return DetectionScenes(self.x[selection], self.boxes[selection], self.labels[selection], self.classes)

    def objects(self) -> list[tuple[Tensor, Tensor]]:
        """Boxes (K, 4) and labels (K,) of the objects that each scene has."""
        return [(b[y >= 0], y[y >= 0]) for b, y in zip(self.boxes, self.labels, strict=True)]


def digit_scenes(
    n: int = 4000,
    *,
    size: int = 48,
    scale: tuple[float, float] = (0.8, 1.3),
    seed: int = 0,
    digits: Dataset | None = None,
) -> Dataset:
    """Scenes of one digit at a random place: `n` to train on, made of training digits, and `n` to test on.

    Args:
        n: scenes in each split.
        size: height and width of a scene in pixels.
        scale: smallest and largest scale of a digit; (1, 1) keeps the original pixels.
        seed: decides everything.
        digits: images 1 x 28 x 28 to draw from; mnist-mini unless given, `load_data("mnist")` for all of MNIST.

    Returns:
        Dataset whose splits have x (n, 1, size, size), y (n,), and boxes (n, 4) around the pixels of the digit.

    >>> digit_scenes(3).test.boxes.shape
    torch.Size([3, 4])
    """
    digits = _check(n, size, scale, digits)
    splits = []
    for fork, part in enumerate((digits.train, digits.test)):
        drawn = _draw(part, n, 1, size, scale, seed, fork)
        splits.append(Split(drawn.x, drawn.labels[:, 0].clone(), drawn.boxes[:, 0].clone()))
    return Dataset("digit-scenes", splits[0], splits[1], digits.classes)


def detection_scenes(
    n: int = 1000,
    *,
    split: Literal["train", "test"] = "train",
    most: int = 4,
    size: int = 48,
    scale: tuple[float, float] = (0.8, 1.1),
    seed: int = 0,
    digits: Dataset | None = None,
) -> DetectionScenes:
    """Scenes of one to `most` digits whose boxes do not overlap; a digit that finds no room is left out.

    Args:
        n: number of scenes.
        split: take the digits of the training or of the test split.
        most: largest number of digits in a scene.
        size: height and width of a scene in pixels.
        scale: smallest and largest scale of a digit.
        seed: decides everything; the two splits differ for the same seed.
        digits: images 1 x 28 x 28 to draw from; mnist-mini unless given.

    >>> detection_scenes(2, most=3).labels.shape
    torch.Size([2, 3])
    """
    digits = _check(n, size, scale, digits)
    if split not in ("train", "test"):
        raise InputError(f"the split must be 'train' or 'test', got {split!r}")
    if most < 1:
        raise InputError(f"a scene needs at least one digit, got most={most}")
    drawn = _draw(getattr(digits, split), n, most, size, scale, seed, 2 + (split == "test"))
    return DetectionScenes(drawn.x, drawn.boxes, drawn.labels, digits.classes)


def _check(n: int, size: int, scale: tuple[float, float], digits: Dataset | None) -> Dataset:
    digits = mnist_mini() if digits is None else digits
    if n < 1:
        raise InputError(f"digit scenes need n >= 1 scenes, got {n}")
    if not 0.25 <= scale[0] <= scale[1] <= 4:  # NaN is refused as well
        raise InputError(f"the scale must be (smallest, largest) within 0.25 to 4, got {scale}")
    if size < SIDE * max(1.0, scale[1]):
        raise InputError(
            f"scenes of size {size} are too small for digits of up to {SIDE * max(1.0, scale[1]):g} pixels"
        )
    for part in (digits.train, digits.test):
        if part.x.shape[1:] != (1, SIDE, SIDE):
            raise InputError(f"digits must have shape (N, 1, {SIDE}, {SIDE}), got {tuple(part.x.shape)}")
    return digits


def _draw(
    part: Split, n: int, most: int, size: int, scale: tuple[float, float], seed: int, fork: int
) -> DetectionScenes:
    """Scenes 0 ... n-1, some at a time."""
    noise = Noise.for_batch(seed, n).fork(fork)
    chunks = [_draw_chunk(part, noise[start : start + _CHUNK], most, size, scale) for start in range(0, n, _CHUNK)]
    x, boxes, labels = (torch.cat(tensors) for tensors in zip(*chunks, strict=True))
    return DetectionScenes(x, boxes, labels, ())


def _draw_chunk(
    part: Split, noise: Noise, most: int, size: int, scale: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Images (B, 1, size, size), boxes (B, most, 4), labels (B, most)."""
    count = 1 + noise.fork(0).integers(most)
    image = _clutter(part.x, noise.fork(1), size)
    taken = torch.zeros(len(noise), most, 4)
    labels = torch.full((len(noise), most), -1)
    rows = torch.arange(len(noise))
    filled = torch.zeros_like(count)
    for j in range(most):
        this = noise.fork(2 + j)
        index = this.fork(0).integers(len(part))
        factor = scale[0] + (scale[1] - scale[0]) * this.fork(1).uniform(())
        layer, box, fits = _place(part.x[index, 0], factor, taken, this.fork(2), size)
        shown = fits & (j < count)
        image = torch.where(shown[:, None, None], torch.maximum(image, layer), image)
        at = rows[shown], filled[shown]
        taken[at], labels[at] = box[shown], part.y[index[shown]]
        filled += shown
    return image[:, None].clamp(0, 1), taken, labels


def _place(
    digit: Tensor, factor: Tensor, taken: Tensor, noise: Noise, size: int, *, tries: int = 24
) -> tuple[Tensor, Tensor, Tensor]:
    """Digits (B, 28, 28) enlarged by `factor` (B,), each at the first random place that is free of the boxes `taken`.

    Returns:
        Layers (B, size, size), boxes (B, 4), and whether a free place was found (B,).
    """
    origin = torch.zeros(len(digit), 2)
    x0, y0, x1, y1 = _box(_move(digit, factor, origin, size)).unbind(1)  # as it lies at the origin
    room = torch.stack([size - (x1 - x0), size - (y1 - y0)], 1) + 1
    corner = (noise.uniform((tries, 2)) * room[:, None]).floor()  # of the box; whole pixels, so scale 1 stays exact
    extent = torch.stack([x1 - x0, y1 - y0], 1)[:, None]
    candidates = torch.cat([corner, corner + extent], 2)
    low = torch.maximum(candidates[:, :, None, :2], taken[:, None, :, :2])
    high = torch.minimum(candidates[:, :, None, 2:], taken[:, None, :, 2:])
    free = ~(low < high).all(3).any(2)
    box = candidates[torch.arange(len(digit)), free.float().argmax(1)]  # the first free one
    return _move(digit, factor, box[:, :2] - torch.stack([x0, y0], 1), size), box, free.any(1)


def _move(digit: Tensor, factor: Tensor, shift: Tensor, size: int) -> Tensor:
    """Layer (B, size, size) that shows the digit enlarged by `factor` and moved by `shift` (B, 2), bilinear."""
    seen = (torch.arange(size) + 0.5 - shift[..., None]) / factor[:, None, None] - 0.5  # in the digit, (B, 2, size)
    weight = (1 - (seen[..., None] - torch.arange(SIDE)).abs()).clamp(min=0)  # of its pixels: zero or one at scale 1
    return weight[:, 1] @ digit @ weight[:, 0].mT


def _box(layer: Tensor) -> Tensor:
    """Tight box (B, 4) around the pixels above INK, far edges excluded."""
    ink = layer > INK
    ends = []
    for along in (ink.any(1), ink.any(2)):  # columns, rows
        at = along.float()
        ends.append((at.argmax(1), along.shape[1] - at.flip(1).argmax(1)))
    (x0, x1), (y0, y1) = ends
    return torch.stack([x0, y0, x1, y1], 1).float()


def _clutter(pool: Tensor, noise: Noise, size: int) -> Tensor:
    """Background (B, size, size): pieces of digits of `pool` (N, 1, 28, 28), strokes and noise, each below full ink."""
    b = len(noise)
    pixel = torch.arange(PIECE)
    canvas = noise.fork(0).uniform((size, size)) * 0.15

    index = noise.fork(1).integers(len(pool), (PIECES,))[..., None, None]
    source = 4 + noise.fork(2).integers(SIDE - 8 - PIECE, (PIECES, 2))  # digits keep 4 pixels off the border
    target = noise.fork(3).integers(size - PIECE, (PIECES, 2))
    rows, columns = (source[..., k, None] + pixel for k in (1, 0))
    piece = pool[index, 0, rows[..., :, None], columns[..., None, :]]
    piece = piece * (0.3 + 0.5 * noise.fork(4).uniform((PIECES, 1, 1)))
    place = (target[..., 1, None] + pixel)[..., :, None] * size + (target[..., 0, None] + pixel)[..., None, :]
    canvas = canvas.view(b, -1).scatter_reduce(1, place.view(b, -1), piece.view(b, -1), "amax").view(b, size, size)

    start = noise.fork(5).uniform((2, STROKES)) * size
    step = (noise.fork(6).uniform((2, STROKES)) - 0.5) * size
    centres = torch.arange(size) + 0.5
    (away_x, away_y), (step_x, step_y) = (centres - start[..., None]).unbind(1), step.unbind(1)
    length = (step * step).sum(1)[..., None]
    along = (away_y * step_y[..., None] / length)[..., :, None] + (away_x * step_x[..., None] / length)[..., None, :]
    along = along.clamp_(0, 1)
    distance = torch.hypot(
        away_x[..., None, :] - along * step_x[..., None, None], away_y[..., :, None] - along * step_y[..., None, None]
    )
    ink = (1.5 - distance).clamp_(0, 1) * (0.3 + 0.4 * noise.fork(7).uniform((STROKES, 1, 1)))
    return torch.maximum(canvas, ink.amax(1))
