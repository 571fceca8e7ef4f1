"""Sparse-RS: random search over a few pixels, which may be changed at will; it needs no gradient."""

import torch
from torch import Tensor

from holdfast.attacks.core.forms import Task, on_task
from holdfast.attacks.core.losses import Loss, get_loss, margin
from holdfast.attacks.core.survivors import Survivors
from holdfast.errors import InputError, either
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.threats import Sparse
from holdfast.utils.options import Count, Share

# From which of 10000 queries on the share of pixels that move is divided by what (Sparse-RS, piecewise constant).
_SCHEDULE = ((0, 1), (1, 2), (51, 4), (201, 5), (501, 6), (1001, 8), (2001, 10), (4001, 12), (6001, 15), (8001, 20))


def share_of_pixels(query: int, queries: int, share: float) -> float:
    """Share of the k pixels that Sparse-RS moves at a query, for a schedule stretched to `queries`."""
    at = query * 10_000 // queries
    return share / max(divisor for start, divisor in _SCHEDULE if at >= start)


def _pixels(x: Tensor) -> Tensor:
    """(B, ...) -> (B, channels, pixels); what is not an image has one channel."""
    return x.flatten(2) if x.ndim == 4 else x.flatten(1)[:, None]


def _colours(threat: Sparse, x: Tensor, pixels: Tensor, noise: Noise) -> Tensor:
    """Random corners of the colour cube for the pixels (B, n), shape (B, C, n), never the colour that x has there."""
    old = _pixels(x)
    old = old.gather(2, pixels[:, None].expand(-1, old.shape[1], -1))
    high = noise.bits(old.shape[1:]) < 0
    high ^= (torch.where(high, threat.high, threat.low) == old).all(1, keepdim=True)
    return torch.where(high, threat.high, threat.low).to(x.dtype)


def _paint(x: Tensor, pixels: Tensor, colours: Tensor) -> Tensor:
    """`x` with the colours (B, C, n) at the pixels (B, n)."""
    return _pixels(x).scatter(2, pixels[:, None].expand_as(colours), colours).view_as(x)


def _move(threat: Sparse, x: Tensor, order: Tensor, colours: Tensor, count: int, noise: Noise) -> tuple[Tensor, Tensor]:
    """`count` of the pixels order[:, :k] leave; as many come from the rest, or come back, with new colours.

    One new pixel comes from each of `count` parts of the rest of the order, which is random itself: as good as a random
    choice among all, at the cost of `count` random numbers. With no rest, the pixels get new colours only.
    """
    k = colours.shape[2]
    rest = order.shape[1] - k
    out = noise.fork(0).uniform((k,)).topk(count, dim=1).indices
    swaps = min(count, rest)
    if swaps > 0:
        edges = torch.arange(swaps + 1, device=x.device) * rest // swaps
        into = k + edges[:-1] + noise.fork(1).integers(edges[1:] - edges[:-1], (swaps,))
        left, come = order.gather(1, out[:, :swaps]), order.gather(1, into)
        back = noise.fork(3).uniform((swaps,)) < swaps / (rest + swaps)
        order = order.scatter(1, out[:, :swaps], torch.where(back, left, come))
        order = order.scatter(1, into, torch.where(back, come, left))
    painted = _colours(threat, x, order.gather(1, out), noise.fork(2))
    return order, colours.scatter(2, out[:, None].expand_as(painted), painted)


@Attack(
    "sparse-rs",
    summary="random search over k pixels and extreme colours; needs no gradient",
    threats=("sparse",),
    reference="Croce et al., Sparse-RS: a versatile framework for query-efficient sparse black-box attacks, 2022",
    gradients="none",
)
@on_task
def sparse_rs(task: Task, *, queries: Count = 5000, share: Share = 0.3, loss: str | Loss = margin) -> AttackResult:
    """Move some of the k pixels elsewhere with new extreme colours, and keep what raises the loss.

    A pixel of an image counts once, whatever its number of channels. Sees through every mask of the gradient, since it
    uses none. Prefer `sparse-pgd` first where gradients are honest.

    Args:
        queries: forward passes for each input at most.
        share: share of the k pixels that moves at the first query; it falls to a twentieth by a fixed schedule.
        loss: "ce", "margin", "dlr" or a function (logits, y) -> (B,) to maximise.

    Departs from the paper: a pixel that leaves may come back at once with another colour, without which the search gets
    stuck at the right pixel in the wrong colour; and no pixel ever gets the colour that it has in x.
    """
    model, x, y, threat, noise = task
    if not isinstance(threat, Sparse):
        raise InputError(
            f"'sparse-rs' changes a number of pixels, got the threat '{threat}'; use "
            f"{either('hf.Sparse(k)', '--threat sparse:10')}"
        )
    loss, s, total = get_loss(loss), Survivors(x, y), _pixels(x).shape[2]
    k = min(threat.k, total)
    # The first k pixels of the order are the changed ones; the others may come in for them.
    order = noise.fork(0).uniform((total,), torch.float64).argsort(1)
    colours = _colours(threat, x, order[:, :k], noise.fork(1))
    for query in range(queries if k > 0 else 1):
        new_order, new_colours = order, colours
        if query > 0:
            count = max(1, int(share_of_pixels(query, queries, share) * k))
            new_order, new_colours = _move(threat, s.x, order, colours, count, noise[s.row].fork(query + 1))
        s.count()
        x_adv = _paint(s.x, new_order[:, :k], new_colours)
        logits = model(x_adv)
        rows = s.keep(x_adv, loss(logits, s.y), logits.argmax(1) != s.y)
        order[rows], colours[rows] = new_order[rows], new_colours[rows]
        order, colours = s.leave(order, colours)
        if s.over:
            break
    return s.result("sparse-rs")
