"""Linear functionals of a node's value, many at once: the A of a backward bound.

There are M rows for each of the B inputs. Their coefficients are either dense, (B, M, *shape), or, for rows that start
at places of a feature map, windows (B, P, N, C, kh, kw): for each of P places N rows, with all that the place can see.
The window of place (i, j) starts at row i * stride - padding and column j * stride - padding of the map; what lies
outside the map is zero. A window costs its own size instead of the map's. Rows that are the same for all inputs, or for
all places, are held once: B or P is then 1.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.bounding.graph.ops import Shape

Pair = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Window:
    """Where the windows lie on the map: place `index` (B or 1, P) of `grid`, counted row by row."""

    index: Tensor
    grid: Pair
    stride: Pair
    padding: Pair


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Coefficients of all rows for one node: dense if `window` is None.

    `clean` says that entries of a window outside the map are known to be zero, `scratch` that nobody else holds the
    values, so that they may be overwritten.
    """

    values: Tensor
    window: Window | None = None
    clean: bool = True
    scratch: bool = False

    @property
    def rows(self) -> torch.Size:
        """Shape of one number for each row: (B, M), on windows (B, P, N)."""
        return self.values.shape[: 2 if self.window is None else 3]

    def with_values(self, values: Tensor) -> "Coefficients":
        """The same layout with other values, fresh ones."""
        return replace(self, values=values, scratch=True)


def seen(v: Tensor, c: Coefficients) -> Tensor:
    """The part of v (B, *shape) that each row sees; broadcasts against the values of c."""
    if c.window is None:
        return v[:, None]
    windows = unfold(v, c.window, (c.values.shape[4], c.values.shape[5]))
    index, count = c.window.index, windows.shape[1]
    if len(index) == 1:
        return windows[:, index[0], None]
    inputs = torch.arange(len(v), device=v.device)[:, None] * count
    return windows.flatten(0, 1)[index + inputs][:, :, None]


def dot(values: Tensor, c: Coefficients, v: Tensor) -> Tensor:
    """<values, v> for every row; `values` in the layout of c, v of shape (B, *shape)."""
    return inner(values, c, seen(v, c))


def inner(values: Tensor, c: Coefficients, v: Tensor) -> Tensor:
    """The same for a v that `seen` has given already."""
    if c.window is None:
        flat = v.flatten(2)
        # The vector comes first: the other order falls back to a slow kernel.
        return flat[:, 0] @ values[0].flatten(1).T if len(values) == 1 else torch.bmm(flat, values.flatten(2).mT)[:, 0]
    flat, rows = v[:, :, 0].flatten(2), values.flatten(3)
    if rows.shape[:2] == (1, 1):
        return flat @ rows[0, 0].T
    if len(rows) == 1:
        return torch.bmm(flat.transpose(0, 1), rows[0].mT).transpose(0, 1)
    b, p, n = rows.shape[:3]
    return torch.bmm(flat.flatten(0, 1)[:, None], rows.flatten(0, 1).mT).view(b, p, n)


def unfold(v: Tensor, window: Window, size: Pair) -> Tensor:
    """The windows of v (B, C, H, W) at all places of the grid: shape (B, places, C, kh, kw)."""
    grid = window.grid
    pads, _ = _canvas(tuple(v.shape[1:]), window, size)
    padded = F.pad(v, pads)
    s = padded.stride()
    sh, sw = window.stride
    shape = (v.shape[0], grid[0], grid[1], v.shape[1], *size)
    windows = padded.as_strided(shape, (s[0], s[2] * sh, s[3] * sw, s[1], s[2], s[3]))
    return windows.reshape(v.shape[0], grid[0] * grid[1], v.shape[1], *size)


def _canvas(shape: Shape, window: Window, size: Pair) -> tuple[list[int], Pair]:
    """Padding (left, right, top, bottom) that makes room for all windows, and the size of the padded map."""
    pads, full = [], []
    for axis in (1, 0):
        before = window.padding[axis]
        reach = (window.grid[axis] - 1) * window.stride[axis] + size[axis]
        after = max(0, reach - before - shape[1 + axis])
        pads += [before, after]
        full.append(shape[1 + axis] + before + after)
    return pads, (full[1], full[0])


def clean(c: Coefficients, shape: Shape) -> Coefficients:
    """The same with zeros outside the map."""
    if c.window is None or c.clean:
        return c
    inside = torch.ones(1, 1, *shape[1:], dtype=c.values.dtype, device=c.values.device)
    mask = unfold(inside, c.window, (c.values.shape[4], c.values.shape[5]))[0]
    if bool(mask.all()):
        return replace(c, clean=True)
    return replace(c, values=c.values * mask[c.window.index][:, :, None], clean=True, scratch=True)


def dense(c: Coefficients, shape: Shape) -> Coefficients:
    """The same as dense coefficients (B, M, *shape)."""
    if c.window is None:
        return c
    _, _, n, channels, *size = c.values.shape
    index = c.window.index
    b, p = max(len(index), len(c.values)), index.shape[1]
    pads, full = _canvas(shape, c.window, (size[0], size[1]))
    place, width = index.expand(b, p)[:, :, None].expand(b, p, n).flatten(), c.window.grid[1]
    top, left = (place // width) * c.window.stride[0], (place % width) * c.window.stride[1]
    offsets = torch.arange(size[0], device=top.device)[:, None] * full[1] + torch.arange(size[1], device=top.device)
    index = (top * full[1] + left)[:, None] + offsets.flatten()
    values = c.values.expand(b, p, *c.values.shape[2:]).reshape(b * p * n, channels, -1)
    canvas = values.new_zeros(b * p * n, channels, full[0] * full[1])
    canvas = canvas.scatter(2, index[:, None].expand(-1, channels, -1), values)
    canvas = canvas.view(b, p * n, channels, *full)
    return Coefficients(canvas[..., pads[2] : pads[2] + shape[1], pads[0] : pads[0] + shape[2]], scratch=True)


def add(a: Coefficients, b: Coefficients, shape: Shape) -> Coefficients:
    """Sum of two sets of coefficients for the same node and rows."""
    if a.window is not None and b.window is not None and a.window.stride == b.window.stride:
        return _add_windows(a, b, a.window, b.window)
    return Coefficients(dense(a, shape).values + dense(b, shape).values, scratch=True)


def _add_windows(a: Coefficients, b: Coefficients, window_a: Window, window_b: Window) -> Coefficients:
    """Add the smaller window into the larger one, or both into their common hull: more padding is an earlier start."""
    pads_a, pads_b, start = [], [], []
    for axis in (1, 0):
        pa, pb = window_a.padding[axis], window_b.padding[axis]
        size_a, size_b = a.values.shape[4 + axis], b.values.shape[4 + axis]
        first, last = max(pa, pb), max(size_a - pa, size_b - pb)
        pads_a += [first - pa, last - (size_a - pa)]
        pads_b += [first - pb, last - (size_b - pb)]
        start.append(first)
    values = _padded_sum(a, pads_a, b.values, pads_b) if not any(pads_a) else _padded_sum(b, pads_b, a.values, pads_a)
    window = replace(window_a, padding=(start[1], start[0]))
    return Coefficients(values, window, a.clean and b.clean, scratch=True)


def _padded_sum(a: Coefficients, pads_a: list[int], b: Tensor, pads_b: list[int]) -> Tensor:
    if any(pads_a) or not a.scratch or torch.is_grad_enabled() or b.shape[:2] != a.values.shape[:2]:
        return F.pad(a.values, pads_a) + F.pad(b, pads_b)
    left, right, top, bottom = pads_b
    height, width = a.values.shape[4:]
    a.values[..., top : height - bottom, left : width - right] += b
    return a.values
