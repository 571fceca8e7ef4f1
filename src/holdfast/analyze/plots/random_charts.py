"""Pictures of random networks as SVG text: matrices, gradients in a plane, densities, and curves of accuracy."""

import math
from collections.abc import Mapping, Sequence
from html import escape

import torch
from torch import Tensor

from holdfast.analyze.concentration import plane_of
from holdfast.analyze.draws import DrawsCurve
from holdfast.analyze.proxy_gradient import ProxyStudy
from holdfast.errors import InputError
from holdfast.utils.directions import mean_resultant_length, unit
from holdfast.utils.panels import line_keys, panel_at, panel_axes, panels_figure
from holdfast.utils.svg import STYLES, figure, inner_rounds, text

_SIDE, _HEAD, _GAP = 320, 60, 30
"""Pixels: of a matrix, above it, beside it."""
_CELLS = 200
"""Most rows of a matrix that a picture can show."""


def matrices_svg(matrices: Mapping[str, Tensor], *, title: str, low: float = 0.0, high: float = 1.0) -> str:
    """Square matrices side by side, each value a grey: `low` is white, `high` is black.

    Args:
        matrices: (n, n) by name, such as the transfer between draws, or cosines (low = -1).
        low, high: ends of the scale; values beyond are drawn as the nearest end.
    """
    if not matrices or any(m.ndim != 2 or m.shape[0] != m.shape[1] or len(m) > _CELLS for m in matrices.values()):
        raise InputError(f"expected at least one square matrix of at most {_CELLS} rows")
    if not all(bool(m.isfinite().all()) for m in matrices.values()) or not low < high:
        raise InputError("a picture of a matrix needs finite values and low < high")
    parts = [text(_GAP, 22, title, size=16)]
    for column, (name, matrix) in enumerate(matrices.items()):
        left, side = _GAP + column * (_SIDE + _GAP), _SIDE / len(matrix)
        words = f"{name}: mean {float(matrix.mean()):.2f}"
        parts.append(text(left, _HEAD - 10, words, size=14))
        parts.append(f'<rect x="{left}" y="{_HEAD}" width="{_SIDE}" height="{_SIDE}" fill="#ffffff" stroke="#888888"/>')
        dark = ((matrix.double() - low) / (high - low)).clamp(0, 1)
        for i, row in enumerate(dark.tolist()):
            for j, value in enumerate(row):
                grey = round(255 * (1 - value))
                parts.append(
                    f'<rect x="{left + j * side:.1f}" y="{_HEAD + i * side:.1f}" width="{side + 0.2:.1f}" '
                    f'height="{side + 0.2:.1f}" fill="rgb({grey},{grey},{grey})"/>'
                )
    return figure(parts, _GAP + len(matrices) * (_SIDE + _GAP), _HEAD + _SIDE + _GAP, title=title)


def gradient_plane_svg(gradients: Mapping[str, Tensor], *, title: str = "Gradients over draws") -> str:
    """Directions of the gradients of one input for two models, in the plane of the two mean gradients.

    Each arrow is a mean direction; its length is the mean resultant length.

    Args:
        gradients: (n, p) by name, of exactly two models.
    """
    if len(gradients) != 2:
        raise InputError(f"the plane is the one of two mean gradients; expected two models, got {list(gradients)}")
    given = {name: g.double() for name, g in gradients.items()}
    basis = plane_of(*(g.mean(0) for g in given.values()))
    middle, radius = _GAP + _SIDE / 2, _SIDE / 2
    parts = [text(_GAP, 22, title, size=16)]
    parts.append(
        f'<circle cx="{middle}" cy="{_HEAD + radius}" r="{radius}" fill="none" stroke="#bbbbbb"/>'  # unit circle
    )
    for row, ((name, g), (colour, dash)) in enumerate(zip(given.items(), STYLES, strict=False)):
        v = unit(g)
        places = (v @ basis.T).tolist()
        arrow = (v.mean(0) @ basis.T).tolist()
        rho = float(mean_resultant_length(v))
        for a, b in places:
            parts.append(
                f'<circle cx="{middle + radius * a:.1f}" cy="{_HEAD + radius * (1 - b):.1f}" r="2.5" fill="{colour}" '
                'fill-opacity="0.45"/>'
            )
        end = f'x2="{middle + radius * arrow[0]:.1f}" y2="{_HEAD + radius * (1 - arrow[1]):.1f}"'
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        start = f'x1="{middle}" y1="{_HEAD + radius}"'
        parts.append(
            f'<line {start} {end} stroke="{colour}" stroke-width="3"{dashes}><title>{escape(name)}</title></line>'
        )
        words = f"{name}: resultant length {rho:.3f}"
        parts.append(f'<text x="{_GAP}" y="{_HEAD + _SIDE + 24 + 18 * row}" fill="{colour}">{escape(words)}</text>')
    return figure(parts, _SIDE + 2 * _GAP, _HEAD + _SIDE + 60, title=title)


def kernel_density(values: Tensor, xs: Tensor, width: float) -> Tensor:
    """Density of the values (n,) at the points xs (m,), smoothed by a Gaussian of this width, (m,)."""
    z = (xs[:, None] - values) / width
    return torch.exp(-z.square() / 2).mean(1) / (width * math.sqrt(2 * math.pi))


def density_svg(values: Mapping[str, Tensor], *, title: str, x_label: str, points: int = 100) -> str:
    """Smoothed densities of some values, such as kappa over the test images or the rise of the loss under EOT.

    A Gaussian kernel with Silverman's width.

    Args:
        values: (n,) by name, at most five, each with at least two finite values that are not all the same.
    """
    given = {name: v.double().flatten() for name, v in values.items()}
    if not 1 <= len(given) <= len(STYLES):
        raise InputError(f"expected 1 to {len(STYLES)} sets of values, got {list(given)}")
    for name, v in given.items():
        if len(v) < 2 or not bool(v.isfinite().all()) or float(v.std()) == 0:
            raise InputError(f"a density needs two or more finite values that differ; look at '{name}'")
    widths = {name: 1.06 * float(v.std()) * len(v) ** -0.2 for name, v in given.items()}
    low = min(float(v.min()) - 3 * widths[name] for name, v in given.items())
    high = max(float(v.max()) + 3 * widths[name] for name, v in given.items())
    xs = torch.linspace(low, high, points, dtype=torch.float64)
    lines = {name: kernel_density(v, xs, widths[name]).tolist() for name, v in given.items()}
    panel = panel_at(0, 0, (low, high), [0.0, *(y for line in lines.values() for y in line)])
    parts = panel_axes(panel, "density", x_label, inner_rounds(low, high))
    for (name, line), style in zip(lines.items(), STYLES, strict=False):
        parts.append(panel.line(xs.tolist(), line, style, name))
    return panels_figure(title, 1, 1, parts, line_keys(lines))


def draws_svg(
    curves: Mapping[str, DrawsCurve], *, title: str = "Accuracy under EOT", x_label: str = "draws for each gradient"
) -> str:
    """Accuracy against the number of draws or queries, on a logarithmic axis, one line for each model or attack."""
    if not 1 <= len(curves) <= len(STYLES) or any(min(c.numbers, default=0) < 1 for c in curves.values()):
        raise InputError(f"expected 1 to {len(STYLES)} curves with numbers >= 1, got {list(curves)}")
    ticks = {math.log10(n): str(n) for curve in curves.values() for n in curve.numbers}
    panel = panel_at(0, 0, list(ticks), [0.0, 1.0])
    parts = panel_axes(panel, "accuracy", x_label, ticks)
    for (name, curve), style in zip(curves.items(), STYLES, strict=False):
        parts.append(panel.line([math.log10(n) for n in curve.numbers], curve.accuracy, style, name))
    return panels_figure(title, 1, 1, parts, line_keys(curves))


def proxy_svg(studies: Mapping[str, ProxyStudy], *, title: str = "PGD along a proxy of the gradient") -> str:
    """Rise of the loss relative to the true gradient, beside cos(theta), and accuracy, both against the angle."""
    if not 1 <= len(studies) < len(STYLES):
        raise InputError(f"expected 1 to {len(STYLES) - 1} studies, got {list(studies)}")
    cosine = [math.cos(math.radians(angle)) for angle in range(91)]
    rises: dict[str, Sequence[float]] = {name: study.relative for name, study in studies.items()}
    ticks = {float(t): str(t) for t in (0, 30, 60, 90)}
    left = panel_at(0, 0, (0, 90), [*cosine, *(r for line in rises.values() for r in line)])
    right = panel_at(1, 0, (0, 90), [0.0, 1.0])
    parts = panel_axes(left, "rise of the loss, relative", "angle in degrees", ticks)
    parts += panel_axes(right, "accuracy", "angle in degrees", ticks)
    for (name, study), style in zip(studies.items(), STYLES, strict=False):
        parts.append(left.line(study.degrees, rises[name], style, name))
        parts.append(right.line(study.degrees, study.accuracy, style, name))
    parts.append(left.line(range(91), cosine, STYLES[len(studies)], "cos(angle)"))
    return panels_figure(title, 2, 1, parts, line_keys([*studies, "cos(angle)"]))
