"""Explanations as pictures: heat map, signed map, overlay, and side by side; PNG, or SVG with titles.

Colours stay apart under the common forms of colour blindness: blue against, vermilion for (Okabe and Ito's), and a
scale from dark blue to yellow whose lightness rises evenly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from holdfast.errors import InputError, StorageError, did_you_mean
from holdfast.explanations import explain
from holdfast.utils.png import data_uri, encode_png
from holdfast.utils.svg import figure, text

Style = Literal["overlay", "signed", "heat"]
STYLES: tuple[Style, ...] = get_args(Style)
Image = npt.NDArray[np.float64]

AGAINST, NEUTRAL, FOR = (0.0, 0.447, 0.698), (1.0, 1.0, 1.0), (0.835, 0.369, 0.0)
HEAT = ((0.0, 0.13, 0.30), (0.25, 0.30, 0.42), (0.49, 0.48, 0.47), (0.73, 0.69, 0.44), (1.0, 0.91, 0.27))
GAP, HEAD = 8, 20  # pixels between panels, and above each for its title
SMALLEST = 160  # side of a panel, which small images are enlarged to


@dataclass(frozen=True, eq=False)
class Panel:
    """One picture with its title: an image (3, H, W) in [0, 1]."""

    title: str
    image: Image


def scaled(attribution: Tensor, *, clip: float = 0.995) -> Image:
    """One attribution (C, H, W) as numbers in [-1, 1], (H, W): channels added up, over the quantile `clip` of |A|.

    A few extreme values would leave the rest without colour; they are cut off.
    """
    if attribution.ndim != 3:
        raise InputError(f"a picture needs one attribution (C, H, W), got shape {tuple(attribution.shape)}")
    total = attribution.detach().sum(0).double().cpu().numpy()
    size = float(np.quantile(np.abs(total), clip)) or float(np.abs(total).max()) or 1.0
    clipped: Image = np.clip(np.nan_to_num(total / size), -1, 1)
    return clipped


def _between(share: Image, colours: Sequence[tuple[float, float, float]]) -> Image:
    """Colours (3, H, W) along evenly spaced anchors, for shares (H, W) in [0, 1]."""
    places = np.linspace(0, 1, len(colours))
    return np.stack([np.interp(share, places, [colour[k] for colour in colours]) for k in range(3)])


def signed_map(attribution: Tensor) -> Image:
    """Vermilion where a pixel speaks for the class, blue where it speaks against it, white where it does not count."""
    return _between((scaled(attribution) + 1) / 2, (AGAINST, NEUTRAL, FOR))


def heat_map(attribution: Tensor) -> Image:
    """How much each pixel counts, whichever way: dark blue for nothing, yellow for most."""
    return _between(np.abs(scaled(attribution)), HEAT)


def grey(x: Tensor) -> Image:
    """One image (C, H, W) in [0, 1] as a picture (3, H, W): RGB as it is, else the mean of the channels."""
    pixels = x.detach().double().cpu().numpy()
    shown: Image = np.clip(pixels if len(pixels) == 3 else np.repeat(pixels.mean(0, keepdims=True), 3, 0), 0, 1)
    return shown


def overlay(x: Tensor, attribution: Tensor) -> Image:
    """The signed map on the image in pale grey: the more a pixel counts, the more its colour covers the image."""
    values = scaled(attribution)
    base = np.repeat(0.35 + 0.55 * grey(x).mean(0, keepdims=True), 3, 0)
    cover = np.sqrt(np.abs(values))
    colour = np.where(values > 0, np.array(FOR)[:, None, None], np.array(AGAINST)[:, None, None])
    covered: Image = base * (1 - cover) + colour * cover
    return covered


def draw(x: Tensor, attribution: Tensor, style: Style = "overlay") -> Image:
    """One explanation in the style asked for, (3, H, W)."""
    if style not in STYLES:
        raise InputError(f"unknown style '{style}'. " + did_you_mean(str(style), STYLES))
    if style == "overlay":
        return overlay(x, attribution)
    return signed_map(attribution) if style == "signed" else heat_map(attribution)


def enlarge(image: Image, smallest: int = SMALLEST) -> Image:
    """Every pixel as a square, so that the shorter side has at least `smallest` pixels."""
    factor = max(1, -(-smallest // min(image.shape[1:])))
    return image.repeat(factor, 1).repeat(factor, 2)


def methods_figure(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    methods: Sequence[str],
    *,
    style: Style = "overlay",
    names: Sequence[str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[list[Panel]]:
    """A row for each input: the image, then one panel for each method.

    Args:
        x: images, (B, C, H, W).  y: classes, (B,).
        names: titles of the inputs.
        options: options for each method, by its name.
    """
    found = {name: explain(model, x, y, name, **(options or {}).get(name, {})) for name in methods}
    return _rows(x, {name: result.attribution for name, result in found.items()}, style, names)


def models_figure(
    models: Mapping[str, nn.Module],
    x: Tensor,
    y: Tensor,
    method: str = "big",
    *,
    style: Style = "overlay",
    names: Sequence[str] | None = None,
    **options: Any,
) -> list[list[Panel]]:
    """A row for each input: the image, then one panel for each model."""
    found = {name: explain(model, x, y, method, **options).attribution for name, model in models.items()}
    return _rows(x, found, style, names)


def _rows(x: Tensor, found: Mapping[str, Tensor], style: Style, names: Sequence[str] | None) -> list[list[Panel]]:
    titles = names or [f"input {i}" for i in range(len(x))]
    if x.ndim != 4 or len(titles) != len(x):
        raise InputError(
            f"expected images (B, C, H, W) and a name for each, got {tuple(x.shape)} and {len(titles)} names"
        )
    return [
        [Panel(title, grey(x[i])), *(Panel(name, draw(x[i], a[i], style)) for name, a in found.items())]
        for i, title in enumerate(titles)
    ]


def figure_png(rows: Sequence[Sequence[Panel]]) -> bytes:
    """The panels in a grid on white, without titles."""
    pictures = [[enlarge(panel.image) for panel in row] for row in rows]
    height, width = _cell(pictures)
    columns = max(map(len, pictures))
    page = np.ones((3, len(rows) * (height + GAP) - GAP, columns * (width + GAP) - GAP))
    for i, row in enumerate(pictures):
        for j, picture in enumerate(row):
            top, left = i * (height + GAP), j * (width + GAP)
            page[:, top : top + picture.shape[1], left : left + picture.shape[2]] = picture
    return encode_png(page)


def figure_svg(rows: Sequence[Sequence[Panel]], *, title: str = "Explanations") -> str:
    """The panels in a grid, each under its title, as SVG that holds its pictures."""
    height, width = _cell([[enlarge(panel.image) for panel in row] for row in rows])
    columns, line = max(map(len, rows)), height + HEAD + GAP
    size = columns * (width + GAP) + GAP, len(rows) * line + GAP
    parts = []
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            left, top = GAP + j * (width + GAP), GAP + i * line
            shown = f'x="{left}" y="{top + HEAD}" width="{width}" height="{height}" style="image-rendering: pixelated"'
            parts.append(text(left, top + 14, panel.title))
            parts.append(f'<image {shown} href="{data_uri(panel.image)}"><title>{escape(panel.title)}</title></image>')
    return figure(parts, *size, title=title, fixed=True)


def _cell(pictures: Sequence[Sequence[Image]]) -> tuple[int, int]:
    """Height and width of the largest panel."""
    if not pictures or not all(pictures):
        raise InputError("a figure needs at least one row, none of them empty")
    shapes = [picture.shape for row in pictures for picture in row]
    return max(s[1] for s in shapes), max(s[2] for s in shapes)


def save_figure(rows: Sequence[Sequence[Panel]], path: Path, *, title: str = "Explanations") -> None:
    """Write the panels as .png or .svg, by the ending of the path; make the folder if it is missing."""
    if path.suffix not in (".png", ".svg"):
        raise InputError(f"a picture must end in .png or .svg, got '{path}'")
    content = figure_png(rows) if path.suffix == ".png" else figure_svg(rows, title=title).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise StorageError(f"cannot write '{path}': {error.strerror}") from error
