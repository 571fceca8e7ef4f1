"""Square Attack: random search that changes one window of the image at a time, and needs no gradient.

Everything but the forward pass must be cheap, for there are thousands of them: the random numbers of a block of steps
come from one draw, and under Linf only the window is computed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.attacks.core.forms import Task, on_task
from holdfast.attacks.core.losses import margin
from holdfast.attacks.core.stages import run_restarts
from holdfast.attacks.core.survivors import Survivors
from holdfast.attacks.fast.windows import Windows, windowed
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.threats import L2, Linf, Threat
from holdfast.utils.options import Count, Share

# Steps, of 10,000 in all, after which the share of the image in one window is halved.
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
_BLOCK = 64  # steps whose random numbers are drawn at once; part of what a seed means


def window_size(step: int, queries: int, p_init: float, threat: Threat, height: int, width: int) -> tuple[int, int]:
    """Height and width of the window that step `step` of `queries` changes: a share p of the image, square if it fits.

    p halves after steps 10, 50, 200, ... of 10,000, rescaled to `queries`. L2 and L1 windows have an odd side of at
    least 3, since they hold a bump with a centre. In an image too thin for the square the window is as long as its
    area asks.
    """
    progress = step * 10_000 // queries
    p = p_init / 2 ** sum(progress > halving for halving in _HALVINGS)
    side = max(round(math.sqrt(p * height * width)), 1)
    if not isinstance(threat, Linf):
        side = max(side, 3) | 1
    return min(height, max(side, round(p * height))), min(width, max(side, round(p * width)))


def _rectangle(height: int, width: int, power: int) -> Tensor:
    """Bump sum_{k >= r} 1 / (k + 1)^power at Chebyshev distance r from the centre, shape (height, width)."""
    rows = (torch.arange(height) - height // 2).abs()
    columns = (torch.arange(width) - width // 2).abs()
    terms = (torch.arange(max(height, width) // 2 + 1, dtype=torch.float64) + 1) ** -power
    return terms.flip(0).cumsum(0).flip(0)[torch.maximum(rows[:, None], columns)]


def _order(threat: Threat) -> int:
    return 2 if isinstance(threat, L2) else 1


@lru_cache(maxsize=32)
def _bumps(height: int, width: int, order: int) -> Tensor:
    """Two bumps of opposite sign, above each other or side by side, norm one: shape (2, height, width).

    The eta of the paper for L2, with squared decay; for L1 the decay is to the fourth power.
    """

    def halves(height: int, width: int) -> Tensor:
        upper, lower = (_rectangle(rows, width, {2: 2, 1: 4}[order]) for rows in (height // 2, height - height // 2))
        if len(upper):
            upper = upper / torch.linalg.vector_norm(upper, order)
        joined: Tensor = torch.cat([upper, -lower / torch.linalg.vector_norm(lower, order)])
        return joined.div(torch.linalg.vector_norm(joined, order))

    return torch.stack([halves(height, width), halves(width, height).T])


def _window(corner: Tensor, size: tuple[int, int], x: Tensor) -> Tensor:
    """Flat positions of the windows with these upper left corners (B, 2), shape (B, C, rows * columns)."""
    rows, columns = (torch.arange(n, device=x.device) for n in size)
    inside = (rows[:, None] * x.shape[3] + columns).flatten()
    positions = corner[:, :1] * x.shape[3] + corner[:, 1:] + inside
    return positions[:, None].expand(-1, x.shape[1], -1)


def _signs(bits: Tensor, like: Tensor) -> Tensor:
    return bits.to(like.dtype) * 2 - 1


def _draw(noise: Noise, sizes: list[tuple[int, int]], shape: torch.Size) -> Tensor:
    """Random choices of some steps, int64 (B, steps, 5 + C): two corners, direction of the bumps, sign per channel."""
    channels, height, width = shape
    corners = [[height - rows + 1, width - columns + 1] for rows, columns in sizes]
    high = torch.tensor([2 * corner + [2] * (1 + channels) for corner in corners], device=noise.index.device)
    return noise.integers(high, high.shape)


def _stripes(x: Tensor, threat: Threat, noise: Noise) -> Tensor:
    """Start of Linf: vertical stripes of x + eps and x - eps."""
    signs = _signs(noise.bits((x.shape[1], 1, x.shape[3])) & 1, x)
    return threat.clip(x + threat.budget * signs)


def _tiles(x: Tensor, threat: Threat, noise: Noise) -> Tensor:
    """Start of L2 and L1: about five by five bumps of random sign and direction, scaled to the budget."""
    _, channels, height, width = x.shape
    rows, columns = max(1, height // 5), max(1, width // 5)
    down, across = height // rows, width // columns
    bits = noise.bits((1 + channels, down, 1, across, 1)) & 1
    upright, sideways = (bump[:, None] for bump in _bumps(rows, columns, _order(threat)).to(x))
    tiles = torch.where(bits[:, :1].bool(), upright, sideways) * _signs(bits[:, 1:], x)
    delta = tiles.reshape(len(x), channels, down * rows, across * columns)
    top, left = (height - down * rows) // 2, (width - across * columns) // 2
    delta = F.pad(delta, (left, width - across * columns - left, top, height - down * rows - top))
    return _spend(x, delta.flatten(2), threat)


def _spend(x: Tensor, delta: Tensor, threat: Threat) -> Tensor:
    """x plus delta (B, C, H * W) scaled to the budget, in the valid range: what the range cuts off, the next step has.

    No projection is needed: clipping only shortens the change, since x itself is in range.
    """
    delta = delta.view_as(x)
    norm = threat.distance(delta, torch.zeros_like(x)).clamp(min=torch.finfo(x.dtype).tiny)
    return threat.clip(x + delta * (threat.budget / norm).view(-1, 1, 1, 1))


@dataclass(frozen=True, eq=False)
class _Proposal:
    """New values for the windows of `best`, or for all of it. Most are turned down, so that few rows are ever made."""

    best: Tensor
    pixels: Tensor | None  # flat positions of the windows, (B, C, rows * columns); None for the whole image
    values: Tensor

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        """The proposed images of some inputs."""
        if self.pixels is None:
            return self.values[rows]
        best = self.best[rows]
        return best.flatten(2).scatter(2, self.pixels[rows], self.values[rows]).view_as(best)


def _propose_linf(threat: Threat, x: Tensor, best: Tensor, draw: Tensor, size: tuple[int, int]) -> _Proposal:
    """`best` with x + eps or x - eps, one sign per channel, in a random window; the other signs if nothing changes."""
    pixels = _window(draw[:, :2], size, x)
    centre = x.flatten(2).gather(2, pixels)
    change = threat.budget * _signs(draw[:, 5:, None], x)
    idle = (threat.clip(centre + change) == best.flatten(2).gather(2, pixels)).flatten(1).all(1)
    change = change * (1 - 2 * idle.to(x.dtype)).view(-1, 1, 1)
    return _Proposal(best, pixels, threat.clip(centre + change))


def _propose_bump(threat: Threat, x: Tensor, best: Tensor, draw: Tensor, size: tuple[int, int]) -> _Proposal:
    """`best` with the change of one window removed, and its norm spent on new bumps in another one."""
    order, tiny = _order(threat), torch.finfo(x.dtype).tiny
    delta = (best - x).flatten(2)
    first, second = _window(draw[:, :2], size, x), _window(draw[:, 2:4], size, x)
    unspent = (threat.budget**order - delta.abs().pow(order).sum((1, 2))).clamp(min=0)
    window = delta.gather(2, first)
    power = window.abs().pow(order).sum(2, keepdim=True)
    old = window / power.pow(1 / order).clamp(min=tiny)
    delta = delta.scatter(2, first, 0.0)  # what the windows share is counted once
    freed = power + delta.gather(2, second).abs().pow(order).sum(2, keepdim=True)
    bumps = _bumps(*size, order).to(x).flatten(1)[draw[:, 4]]
    new = old + bumps[:, None] * _signs(draw[:, 5:, None], x)
    norm = torch.linalg.vector_norm(new, order, dim=2, keepdim=True).clamp(min=tiny)
    new = new / norm * (unspent[:, None, None] / x.shape[1] + freed).pow(1 / order)
    delta = delta.scatter(2, second, 0.0).scatter(2, first, new)
    return _Proposal(best, None, _spend(x, delta, threat))


def _search(
    model: Callable[[Tensor], Tensor],
    windows: Windows | None,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    noise: Noise,
    *,
    queries: int,
    p_init: float,
) -> AttackResult:
    """One run on images (B, C, H, W): a proposal is kept where it raises the margin, at most `queries` passes.

    With `windows` the first layers are evaluated only where a proposal changed them.
    """
    linf = isinstance(threat, Linf)
    propose = _propose_linf if linf else _propose_bump
    sizes = [window_size(i, queries, p_init, threat, *x.shape[2:]) for i in range(queries - 1)]
    best = (_stripes if linf else _tiles)(x, threat, noise)
    s, logits = Survivors(x, y, best), model(best)
    s.count()
    s.better(margin(logits, y), logits.argmax(1) != y)
    if windows is not None and sizes:
        windows.start(best, sizes[0])  # also drops the maps of an earlier run, whose inputs were others
    for step, size in enumerate(sizes):
        if s.over:
            break
        before, stay = s.row, s.drop()
        if stay is not None:
            s.x_adv[before], best = best, best[stay]
            if windows is not None:
                windows.select(stay)
        if step % _BLOCK == 0 or stay is not None:
            block = step - step % _BLOCK
            draws = _draw(noise[s.row].fork(block), sizes[block : block + _BLOCK], x.shape[1:])
        proposal = propose(threat, s.x, best, draws[:, step % _BLOCK], size)
        if windows is not None and step > 0 and size != sizes[step - 1]:
            windows.start(best, size)
        local = windows if windows is not None and windows.depth > 0 else None
        s.count()
        if local is not None:
            logits = local.propose(proposal.values.unflatten(2, size), draws[:, step % _BLOCK, :2])
            found_now = (logits.argmax(1) != s.y).nonzero()[:, 0]
            if len(found_now):  # rounding must not decide whether an input is broken
                logits[found_now] = model(proposal[found_now])
        else:
            logits = model(proposal[:])
        kept = s.better(margin(logits, s.y), logits.argmax(1) != s.y)
        best[kept] = proposal[kept]
        if local is not None:
            local.settle(_others(kept, len(best)))
    s.x_adv[s.row] = best
    return s.result("square")


def _others(rows: Tensor, count: int) -> Tensor:
    """The rows of 0 ... count - 1 that are not among `rows`."""
    return torch.ones(count, dtype=torch.bool, device=rows.device).index_fill(0, rows, False).nonzero()[:, 0]


@Attack(
    "square",
    summary="random search with square windows: needs no gradient",
    threats=("linf", "l2", "l1"),
    reference="Andriushchenko et al., Square Attack: a query-efficient black-box adversarial attack via "
    "random search, "
    "2020",
    gradients="none",
)
@on_task
def square(task: Task, *, queries: Count = 5000, p_init: Share = 0.8, restarts: Count = 1) -> AttackResult:
    """Search at random for a larger margin; only the model's outputs are used, so that masked gradients do not stop it.

    Starts from stripes (Linf) or tiles (L2, L1), then changes one window at a time and keeps what raises the margin.
    Every input has windows of its own, and every window can lie anywhere in the image, the last row and column
    included. In inputs of another shape than (B, C, H, W) the last two axes are the image, and a flat input (B, D) is
    one row. Weaker than gradient attacks where gradients can be trusted; prefer `pgd` there.

    Args:
        queries: most forward passes on one input in each run, the one of the start included.
        p_init: share of the image in the first windows; it shrinks on the published schedule, rescaled to `queries`.
        restarts: runs in all; the first one included.
    """
    model, x, y, threat, noise = task
    shape = x.shape[1:]
    images = x if x.ndim == 4 else x.reshape(len(x), -1, *(x.shape[-2:] if x.ndim > 2 else (1, x.shape[1])))
    windows = windowed(model, x) if isinstance(threat, Linf) else None

    def run(restart: int, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        task = (lambda images: model(images.view(-1, *shape)), windows, x, y, threat, noise.fork(restart))
        return _search(*task, queries=queries, p_init=p_init)

    result = run_restarts(images, y, noise, restarts, run)
    return replace(result, x_adv=result.x_adv.view_as(x))
