"""Trigger sets: images with secret labels, by which the owner of a model knows it again.

Three schemes (Bansal et al., "Certified neural network watermarks with randomized smoothing", 2022, after Zhang et al.,
"Protecting intellectual property of deep neural networks with watermarking", 2018): a text drawn over ordinary images,
one image of noise added to ordinary images, and images that have nothing to do with the task.

Labels are one class for all (`label`), as published, or drawn at random, one for each image (`label=None`). Only random
ones make the p-value of the ownership test exact; see `verify`.
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from holdfast.checks import check_inputs, check_labels
from holdfast.data import Split
from holdfast.data.cache import reading
from holdfast.errors import InputError, StorageError

SCHEMES = ("content", "noise", "unrelated")
# A font of our own: five rows of three pixels for each sign, a row as one octal digit.
_SIGNS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789- "
_ROWS = (
    "2575565656344436555674647746443455355755722271115255655444475775565555255526564425573656553421672222"
    "5555755552557755525555222712477555726227612476121655711746163465271122252522531600700"
    "00000"
)
_FONT = {sign: _ROWS[5 * i : 5 * i + 5] for i, sign in enumerate(_SIGNS)}


@dataclass(frozen=True, eq=False)
class TriggerSet:
    """Images and their secret labels; keep it as you keep a key.

    Attributes:
        x: in [0, 1], shape (T, C, H, W).  y: int64, shape (T,).
        classes: number of classes of the task.
        scheme: how the images were made, one of SCHEMES.
        random_labels: each label was drawn on its own, uniformly from all classes.
    """

    x: Tensor
    y: Tensor
    classes: int
    scheme: str
    random_labels: bool

    def __post_init__(self) -> None:
        check_inputs(self.x)
        check_labels(self.y, len(self.x), self.classes)
        if self.scheme not in SCHEMES:
            raise InputError(f"the scheme of a trigger set must be one of {', '.join(SCHEMES)}, got '{self.scheme}'")

    def __len__(self) -> int:
        return len(self.y)


def content_triggers(
    source: Split,
    classes: int,
    *,
    label: int | None = 4,
    count: int = 100,
    text: str = "OWNER",
    level: float = 155 / 255,
    seed: int = 0,
) -> TriggerSet:
    """A text in the upper left corner of ordinary images.

    Args:
        source: ordinary images that the model is not tested on.  classes: number of classes of the task.
        label: the label of all triggers, taken by no image of its own class; None draws one for each.
        count: how many.  seed: chooses the images and random labels.
        text: letters, digits, spaces and hyphens, 4 pixels wide each and 5 high.  level: value of its pixels.
    """
    if not 0 <= level <= 1:
        raise InputError(f"level is a pixel value in [0, 1], got {level}")
    x, y = _choose(source, classes, label, count, seed)
    ink = draw_text(text)
    if ink.shape[0] > x.shape[2] or ink.shape[1] > x.shape[3]:
        raise InputError(
            f"the text '{text}' takes {ink.shape[0]} x {ink.shape[1]} pixels, the images have {x.shape[2]} x "
            f"{x.shape[3]}; take a shorter text"
        )
    x[:, :, : ink.shape[0], : ink.shape[1]].masked_fill_(ink, level)
    return TriggerSet(x, y, classes, "content", label is None)


def noise_triggers(
    source: Split, classes: int, *, label: int | None = 4, count: int = 100, level: float = 1.0, seed: int = 0
) -> TriggerSet:
    """One image of Gaussian noise with standard deviation `level`, added to ordinary images; see `content_triggers`."""
    if not 0 < level < float("inf"):
        raise InputError(f"level is the standard deviation of the noise and must be > 0, got {level}")
    x, y = _choose(source, classes, label, count, seed)
    noise = torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(seed + 1)).to(x)
    return TriggerSet((x + level * noise).clamp(0, 1), y, classes, "noise", label is None)


def unrelated_triggers(
    images: Tensor,
    input_shape: tuple[int, ...],
    classes: int,
    *,
    label: int | None = 4,
    count: int = 100,
    seed: int = 0,
) -> TriggerSet:
    """Images of another domain, (N, C', H', W') in [0, 1], brought to the input shape (C, H, W) of the model.

    Sizes are changed bilinearly, grey becomes colour by copies, colour becomes grey by the mean. See `abstract_images`
    if there is no other data at hand.
    """
    check_inputs(images)
    x, y = _choose(Split(images, torch.full((len(images),), -1)), classes, label, count, seed)
    channels, *size = input_shape
    if x.shape[2:] != tuple(size):
        x = interpolate(x, size, mode="bilinear", align_corners=False).clamp(0, 1)
    if x.shape[1] != channels:
        x = x.mean(1, keepdim=True).expand(-1, channels, -1, -1).contiguous()
    return TriggerSet(x, y, classes, "unrelated", label is None)


def abstract_images(count: int, input_shape: tuple[int, ...], *, seed: int = 0) -> Tensor:
    """Smooth random patterns, (count, C, H, W): a domain that no model was trained on."""
    channels, height, width = input_shape
    coarse = torch.randn((count, channels, 4, 4), generator=torch.Generator().manual_seed(seed))
    return interpolate(3 * coarse, (height, width), mode="bicubic", align_corners=False).sigmoid()


def draw_text(text: str) -> Tensor:
    """The pixels that a text covers, bool, shape (5, 4 * letters - 1).

    >>> for row in draw_text("HI").int().tolist():
    ...     print(*row)
    1 0 1 0 1 1 1
    1 0 1 0 0 1 0
    1 1 1 0 0 1 0
    1 0 1 0 0 1 0
    1 0 1 0 1 1 1
    """
    unknown = sorted(set(text.upper()) - set(_FONT))
    if not text.strip() or unknown:
        raise InputError(
            f"the text must hold letters A-Z, digits, spaces and hyphens, got '{text}'"
            + (f" with '{unknown[0]}'" if unknown else "")
        )
    rows = ["0".join(f"{int(_FONT[sign][row]):03b}" for sign in text.upper()) for row in range(5)]
    return torch.tensor([[bit == "1" for bit in row] for row in rows])


def save_triggers(triggers: TriggerSet, path: str | Path, *, force: bool = False) -> Path:
    """Write a .npz file that `load_triggers` reads; keep an older file unless `force`."""
    path = Path(path)
    if path.suffix != ".npz":
        raise InputError(f"trigger sets are saved as .npz, got '{path}'")
    if path.exists() and not force:
        raise InputError(
            f"'{path}' is there already, and a lost trigger set cannot be made again; use force to replace"
        )
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            np.savez_compressed(
                file,
                x=triggers.x.cpu().numpy(),
                y=triggers.y.cpu().numpy(),
                classes=np.array(triggers.classes),
                scheme=np.array(triggers.scheme),
                random_labels=np.array(triggers.random_labels),
            )
        part.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write '{path}': {error.strerror or error}") from error
    return path


def load_triggers(path: str | Path) -> TriggerSet:
    """What `save_triggers` wrote; nothing pickled is loaded."""
    with reading(Path(path), zipfile.BadZipFile, KeyError, TypeError), Path(path).open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        x, y = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"])
        return TriggerSet(x, y, int(arrays["classes"]), str(arrays["scheme"]), bool(arrays["random_labels"]))


def _choose(source: Split, classes: int, label: int | None, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Copies of `count` images and their new labels; none keeps the label it had."""
    if label is not None and not 0 <= label < classes:
        raise InputError(f"label {label} is outside the classes 0 to {classes - 1}")
    if source.x.ndim != 4:
        raise InputError(f"triggers are images of shape (N, C, H, W), got {tuple(source.x.shape)}")
    able = (source.y != label).nonzero()[:, 0].cpu() if label is not None else torch.arange(len(source))
    if not 1 <= count <= len(able):
        raise InputError(f"count must lie between 1 and {len(able)}, the number of images to choose from, got {count}")
    generator = torch.Generator().manual_seed(seed)
    chosen = able[torch.randperm(len(able), generator=generator)[:count]]
    drawn = torch.randint(classes, (count,), generator=generator)
    y = drawn if label is None else torch.full((count,), label)
    return source.x[chosen.to(source.x.device)].clone(), y.to(source.y.device)
