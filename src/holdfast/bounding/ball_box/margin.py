"""A ball and a box through a network together, and the smallest margins over both: the outer bound of BCP.

Lee, Lee and Park, "Lipschitz-certifiable training with a tight outer bound", 2020. The ball is centred at the value of
the input itself and grows by the norm of each layer; the box is the intersection of what intervals give and of what the
ball gives, row by row. The ball knows that few directions are stretched, the box that a ReLU is never negative.
How both go through the layers is in ball_box_sets.py.
"""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.bounding.ball_box.sets import UP, Norm, Propagation
from holdfast.bounding.core.region import Region
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Affine, Graph
from holdfast.bounding.lipschitz.spectral import norm_bound, norm_estimate

FIRST_STEPS = 20  # of power iteration where there is no vector to start from yet


def proven_norm(bound: Callable[[Affine], float] = norm_bound) -> Norm:
    """Upper bounds of the norms, float64: for certificates."""
    # 1e-15: in I + A the diagonal of A may cancel, and then its rounding error is relative to I.
    return lambda op, name: torch.tensor((bound(op) + 1e-15) * UP, dtype=torch.float64)


def estimated_norm(state: MutableMapping[str, Tensor], *, steps: int = 1) -> Norm:
    """Power iteration from the vectors in `state`, which it replaces; with gradients to the weights, for training."""

    def norm(op: Affine, name: str) -> Tensor:
        if isinstance(op, ops.Scale):
            return op.factor.abs().amax()
        key, like = f"norm {name}", op.weight if isinstance(op, ops.Linear | ops.Conv) else torch.zeros(())
        sigma, state[key] = norm_estimate(op, state.get(key), like, steps=steps, first=FIRST_STEPS)
        return sigma

    return norm


@dataclass(frozen=True, eq=False)
class Outer:
    """The set that the logits are proved to lie in: the image of a ball and a box under the last affine layer.

    Attributes:
        logits: (B, K), at x.
        rows: (K, n), the last affine layer (or run of them).
        centre, lower, upper: (B, n), of the features that enter it.  rho: (B,) radius of their ball.
        error: (B, K) rounding errors of the last layer, if sound.
    """

    logits: Tensor
    rows: Tensor
    centre: Tensor
    lower: Tensor
    upper: Tensor
    rho: Tensor
    error: Tensor | None


def outer_bound(graph: Graph, r: Region, norm: Norm, *, sound: bool) -> Outer:
    """The outer set of the logits over a region of inputs; float64 if sound.

    Args:
        graph: graph of the model as it is now.
        r: the inputs.
        norm: `proven_norm` for proofs, `estimated_norm` for training.
        sound: account for rounding.
    """
    values = Propagation(graph, r, norm, sound=sound).values
    last = values[-1]
    source, dtype = values[last.source], torch.float64 if sound else r.x.dtype
    rows = torch.eye(last.centre.shape[1], dtype=dtype, device=r.x.device)
    if last.op is not None:
        rows = last.op.transpose(rows.view(-1, *last.shape)).flatten(1)
    error = last.error if last.error is not None else torch.zeros_like(last.centre) if sound else None
    return Outer(
        logits=last.centre.to(dtype),
        rows=rows,
        centre=source.centre.flatten(1).to(dtype),
        lower=source.lower.flatten(1).to(dtype),
        upper=source.upper.flatten(1).to(dtype),
        rho=last.rho,
        error=None if error is None else error.to(dtype),
    )


def margins(o: Outer, y: Tensor, *, steps: int | None = None) -> Tensor:
    """Lower bounds of z_y - z_j over the outer set, (B, K); zero at j = y. The worst logits are their negatives.

    Args:
        o: the outer set.
        y: labels, shape (B,).
        steps: steps of the solver; until it is exact if None.
    """
    found = o.logits.gather(1, y[:, None]) - o.logits - translations(o, y, steps=steps)
    if o.error is not None:
        found = found - (o.error + o.error.gather(1, y[:, None])) * UP - 1e-15 * o.logits.abs().amax(1, keepdim=True)
    return found.scatter(1, y[:, None], 0.0)


def translations(o: Outer, y: Tensor, *, steps: int | None = None) -> Tensor:
    """By how much z_y - z_j can fall below its value at x, t_j >= 0, (B, K); zero at j = y."""
    c = o.rows[y][:, None] - o.rows
    drop = largest_drop(c, o.centre, o.lower, o.upper, o.rho, steps=steps)
    if o.error is None:
        return drop
    # The rows were merged from float64 products, and their difference may cancel.
    return drop * UP + o.rho[:, None] * (1e-12 * o.rows.square().sum(1).amax().sqrt() + 1e-15)


def largest_drop(
    c: Tensor, z: Tensor, lower: Tensor, upper: Tensor, rho: Tensor, *, steps: int | None = None
) -> Tensor:
    """Largest <c, z - p> over the p of a ball around z and a box, (B, M).

    The dual function at a multiplier m >= 0 of |p - z|^2 <= rho^2 is sum_i (|c_i| s_i - m s_i^2 / 2) + m rho^2 / 2 with
    s_i = min(|c_i| / m, room_i), where room_i is the way to the box along -c_i. It is an upper bound for every m, so
    neither early stopping nor rounding of m can make it wrong. The best m is found from above as in the paper: all
    coordinates that leave the box are stopped there, the others share what is left of the radius, until none leaves it
    (the paper scales about the origin; the ball is centred at z). At the best m the derivative by m vanishes, so it is
    held fixed for gradients.

    Args:
        c: coefficients, shape (B, M, n).
        z: centre of the ball, in the box.  lower, upper: the box. Shape (B, n).
        rho: radius, shape (B,).
        steps: how often coordinates may be stopped; until none leaves the box if None.
    """
    size = c.abs()
    room = torch.where(c > 0, (z - lower)[:, None], (upper - z)[:, None]).clamp(min=0)
    m = _multiplier(size.detach(), room.detach(), rho.detach(), steps)[..., None]
    s = torch.where(size > m * room, room, (size / m.clamp(min=torch.finfo(c.dtype).tiny)).detach())
    return (size * s - m / 2 * s.square()).sum(2) + m[..., 0] / 2 * rho.square()[:, None]


@torch.no_grad()
def _multiplier(size: Tensor, room: Tensor, rho: Tensor, steps: int | None) -> Tensor:
    """1 / (the way that a coordinate with |c_i| = 1 may go), (B, M); zero where only the box decides."""
    budget, squares, rooms = rho.square()[:, None], size.square(), room.square()
    # Not zero, and not so small that the division below overflows.
    smallest = torch.finfo(size.dtype).eps * budget + torch.finfo(size.dtype).tiny * (1 + squares.sum(2))

    def share(stopped: Tensor) -> Tensor:
        left = (budget - (rooms * stopped).sum(2)).maximum(smallest)
        return ((squares * ~stopped).sum(2) / left).sqrt()

    stopped = torch.zeros_like(size, dtype=torch.bool)
    m = share(stopped)
    for _ in range(size.shape[2] if steps is None else steps):
        more = stopped | (size > m[..., None] * room)
        if torch.equal(more, stopped):
            break
        stopped = more
        m = share(stopped)
    return m
