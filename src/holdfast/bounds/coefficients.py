"""Linear functionals of a node's value, many at once: the A of a backward bound.

There are M rows for each of the B inputs. Their coefficients are either dense, (B, M, *shape), or, for rows that start
at one place of a feature map, a window (B, M, C, kh, kw): all that the place can see. The window of place (i, j) starts
at row i * stride - padding and column j * stride - padding of the map; what lies outside the map is zero. A window
costs its own size instead of the map's.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.bounds.ops import Shape

Pair = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Places:
    """Where rows start on a feature map: `index` (B, P) counts the places of `grid` row by row.

    There may be several rows for each place, in `copies` blocks of P rows: a lower and an upper bound, for instance.
    """

    index: Tensor
    grid: Pair
    copies: int = 1


@dataclass(frozen=True)
class Window:
    """Where the windows lie on the map."""

    stride: Pair
    padding: Pair


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Coefficients of all rows for one node: dense if `window` is None.

    `clean` says that entries of a window outside the map are known to be zero.
    """

    values: Tensor
    window: Window | None = None
    places: Places | None = None
    clean: bool = True

    def with_values(self, values: Tensor) -> "Coefficients":
        """The same layout with other values."""
        return replace(self, values=values)


def seen(v: Tensor, c: Coefficients) -> Tensor:
    """The part of v (B, *shape) that each row sees; broadcasts against `aligned(values, c)`."""
    if c.window is None or c.places is None:
        return v[:, None]
    size = (c.values.shape[3], c.values.shape[4])
    windows = unfold(v, c.window, size, c.places.grid)
    count = windows.shape[1]
    inputs = torch.arange(len(v), device=v.device)[:, None] * count
    return windows.flatten(0, 1)[c.places.index + inputs][:, None]


def aligned(values: Tensor, c: Coefficients) -> Tensor:
    """Values in the layout of c, viewed so that they broadcast against `seen`: windows as (B, copies, P, C, kh, kw)."""
    return values if c.places is None or c.window is None else values.unflatten(1, (c.places.copies, -1))


def dot(values: Tensor, c: Coefficients, v: Tensor) -> Tensor:
    """<values, v> for every row, (B, M); `values` in the layout of c, v of shape (B, *shape)."""
    if c.window is None:
        return torch.bmm(values.flatten(2), v.flatten(1)[:, :, None])[:, :, 0]
    return (aligned(values, c) * seen(v, c)).flatten(3).sum(3).flatten(1)


def unfold(v: Tensor, window: Window, size: Pair, grid: Pair) -> Tensor:
    """All windows of v (B, C, H, W): shape (B, places, C, kh, kw)."""
    pads, _ = _canvas(tuple(v.shape[1:]), window, size, grid)
    padded = F.pad(v, pads)
    s = padded.stride()
    sh, sw = window.stride
    shape = (v.shape[0], grid[0], grid[1], v.shape[1], *size)
    windows = padded.as_strided(shape, (s[0], s[2] * sh, s[3] * sw, s[1], s[2], s[3]))
    return windows.reshape(v.shape[0], grid[0] * grid[1], v.shape[1], *size)


def _canvas(shape: Shape, window: Window, size: Pair, grid: Pair) -> tuple[list[int], Pair]:
    """Padding (left, right, top, bottom) that makes room for all windows, and the size of the padded map."""
    pads, full = [], []
    for axis in (1, 0):
        before = window.padding[axis]
        reach = (grid[axis] - 1) * window.stride[axis] + size[axis]
        after = max(0, reach - before - shape[1 + axis])
        pads += [before, after]
        full.append(shape[1 + axis] + before + after)
    return pads, (full[1], full[0])


def clean(c: Coefficients, shape: Shape) -> Coefficients:
    """The same with zeros outside the map."""
    if c.window is None or c.places is None or c.clean:
        return c
    inside = torch.ones(1, 1, *shape[1:], dtype=c.values.dtype, device=c.values.device)
    size = (c.values.shape[3], c.values.shape[4])
    mask = unfold(inside, c.window, size, c.places.grid)[0]
    if bool(mask.all()):
        return replace(c, clean=True)
    values = (aligned(c.values, c) * mask[c.places.index][:, None]).view_as(c.values)
    return replace(c, values=values, clean=True)


def dense(c: Coefficients, shape: Shape) -> Tensor:
    """Dense coefficients (B, M, *shape)."""
    if c.window is None or c.places is None:
        return c.values
    b, m, channels, *size = c.values.shape
    pads, full = _canvas(shape, c.window, (size[0], size[1]), c.places.grid)
    place, width = c.places.index.repeat(1, c.places.copies).flatten(), c.places.grid[1]
    top, left = (place // width) * c.window.stride[0], (place % width) * c.window.stride[1]
    offsets = torch.arange(size[0], device=top.device)[:, None] * full[1] + torch.arange(size[1], device=top.device)
    index = (top * full[1] + left)[:, None] + offsets.flatten()
    canvas = c.values.new_zeros(b * m, channels, full[0] * full[1])
    canvas = canvas.scatter(2, index[:, None].expand(-1, channels, -1), c.values.flatten(0, 1).flatten(2))
    canvas = canvas.view(b, m, channels, *full)
    return canvas[..., pads[2] : pads[2] + shape[1], pads[0] : pads[0] + shape[2]]


def add(a: Coefficients, b: Coefficients, shape: Shape) -> Coefficients:
    """Sum of two sets of coefficients for the same node."""
    if a.window is not None and b.window is not None and a.window.stride == b.window.stride:
        return _add_windows(a, b, a.window, b.window)
    return Coefficients(dense(a, shape) + dense(b, shape))


def _add_windows(a: Coefficients, b: Coefficients, window_a: Window, window_b: Window) -> Coefficients:
    """Pads both windows to their common hull: more padding means an earlier start."""
    pads_a, pads_b, start = [], [], []
    for axis in (1, 0):
        pa, pb = window_a.padding[axis], window_b.padding[axis]
        size_a, size_b = a.values.shape[3 + axis], b.values.shape[3 + axis]
        first, last = max(pa, pb), max(size_a - pa, size_b - pb)
        pads_a += [first - pa, last - (size_a - pa)]
        pads_b += [first - pb, last - (size_b - pb)]
        start.append(first)
    values = F.pad(a.values, pads_a) + F.pad(b.values, pads_b)
    return Coefficients(values, Window(window_a.stride, (start[1], start[0])), a.places, a.clean and b.clean)
