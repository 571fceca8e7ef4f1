"""HopSkipJump: walks along the decision boundary towards the input, and needs nothing but the model's decisions."""

import math

import torch
from torch import Tensor, nn

from holdfast.attacks.core.minimum_norm import Search, by_search, check_handled, in_threat, norm_of, per_input
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.threats import norm_2
from holdfast.utils import clock
from holdfast.utils.options import Count, Positive

NAME = "hopskipjump"
NORMS = ("linf", "l2")

_DIRECTIONS = 10  # directions per draw: fixed, so that the order of the sums does not depend on the batch
_MOST_HALVINGS = 25  # of the step along the boundary's normal; it is then below the resolution of float32


@by_search
def hop_skip_jump(
    model: nn.Module,
    search: Search,
    *,
    steps: Count = 50,
    initial_evaluations: Count = 100,
    max_evaluations: Count = 10_000,
    gamma: Positive = 1.0,
    starts: Count = 100,
    queries: Count | None = None,
    chunk: Count = 2048,
) -> None:
    """Look for the closest misclassified point; only the model's decisions are used.

    Each step estimates the boundary's normal at a point on it from decisions around it, leaps along the normal by
    distance / sqrt(step), halved until misclassified, and goes back to the boundary by bisection. An input whose noise
    images are all classified as y has no place to start from, and counts as held.

    Args:
        steps: steps along the boundary.
        initial_evaluations: decisions for the first normal; step t takes sqrt(t) times as many.
        max_evaluations: most decisions for one normal.
        gamma: precision of the boundary and distance of the probes, relative to the paper's.
        starts: most images of noise to start from.
        queries: most forward passes on one input; steps that might exceed it are left out.
        chunk: probes in one forward pass, about; memory grows with it, the answer does not change.

    Departs from the paper: an image of noise after the first lies between two random levels of brightness, which finds
    more classes than noise over the whole range.
    """
    check_handled(search.norm, NAME, NORMS)
    halvings = _halvings(search.x, search.norm, gamma)
    if queries is not None and queries < halvings + 2:
        raise InputError(
            f"queries={queries} do not reach the boundary once: give at least {halvings + 2} for inputs of this size"
        )
    most = torch.iinfo(torch.int64).max if queries is None else queries
    search.note(search.x, model(search.x))
    _start(model, search, search.noise.fork(0), min(starts, most - 1 - halvings))
    if not search.start(NAME, torch.isfinite(search.distance)):
        return
    # For the whole batch: inputs drop out when they are done or have spent their queries.
    boundary = search.x_adv.clone()
    boundary[search.row] = _to_boundary(model, search, boundary[search.row], halvings)
    for step in range(1, steps + 1):
        evaluations = int(min(initial_evaluations * math.sqrt(step), max_evaluations))
        cost = evaluations + _MOST_HALVINGS + halvings
        going = torch.isfinite(search.distance) & (search.queries <= most - cost)
        if not search.start(NAME, going):
            break
        row, at = search.row, boundary[search.row]
        distance = norm_of(at - search.x, search.norm)
        delta = _probe_size(search.x, distance, search.high - search.low, gamma, step)
        normal = _normal(model, search, at, delta, search.noise[row].fork(step), evaluations, chunk)
        search.count(0, evaluations)
        outside = _leap(model, search, at, normal, distance / math.sqrt(step))
        if search.start(NAME, going):
            row = search.row
            boundary[row] = _to_boundary(model, search, outside[row], halvings)


def _halvings(x: Tensor, norm: str, gamma: float) -> int:
    """Bisections that reach theta, the paper's relative precision of the boundary, or the precision of the dtype."""
    d = x[0].numel()
    theta = gamma / (d * math.sqrt(d) if norm == "l2" else d**2)
    return max(1, math.ceil(-math.log2(max(theta, torch.finfo(x.dtype).eps))))


def _probe_size(x: Tensor, distance: Tensor, span: float, gamma: float, step: int) -> Tensor:
    """Euclidean distance of the probes from the boundary, (B,): a tenth of the range first, then gamma distance / d.

    Not below sixteen units of rounding in each value, or the probes would be rounded away.
    """
    if step == 1:
        return torch.full_like(distance, 0.1 * span)
    d = x[0].numel()
    return (gamma * distance / d).clamp(min=16 * torch.finfo(x.dtype).eps * span * math.sqrt(d))


def _start(model: nn.Module, search: Search, noise: Noise, tries: int) -> None:
    """A misclassified image of random noise for each input: uniform over the range, then between two random levels."""
    span = search.high - search.low
    for i in range(tries):
        if not search.start(NAME, torch.isinf(search.distance)):
            return
        draw = noise[search.row].fork(i)
        u = draw.uniform(search.x.shape[1:], search.x.dtype)
        if i > 0:
            a, b = draw.fork(0).uniform((2,), search.x.dtype).unbind(1)
            u = per_input(a, u) + per_input(b - a, u) * u
        image = search.clip(search.low + span * u)
        search.note(image, model(image))


def _to_boundary(model: nn.Module, search: Search, outside: Tensor, halvings: int) -> Tensor:
    """The point next to the boundary on the way from the misclassified `outside` to x, by bisection.

    The way is the segment for L2; for Linf the change is cut off at a share of its largest value.
    """
    change = outside - search.x
    size = norm_of(change, search.norm)
    inner, outer = torch.zeros_like(size), torch.ones_like(size)

    def point(share: Tensor) -> Tensor:
        if search.norm == "l2":
            return search.clip(search.x + per_input(share, change) * change)
        most = per_input(share * size, change)
        return search.clip(search.x + torch.minimum(torch.maximum(change, -most), most))

    for _ in range(halvings):
        if search.over:
            break
        middle = (inner + outer) / 2
        x_adv = point(middle)
        wrong = search.note(x_adv, model(x_adv))
        inner, outer = torch.where(wrong, inner, middle), torch.where(wrong, middle, outer)
    return torch.where(per_input(outer == 1, change), outside, point(outer))


def _normal(
    model: nn.Module, search: Search, at: Tensor, delta: Tensor, noise: Noise, evaluations: int, chunk: int
) -> Tensor:
    """Direction of the boundary's normal at the points `at`, towards the wrong side, as an ascent step of the norm.

    Mean over directions v of (phi(at + delta v) - mean phi) v, with phi = 1 where misclassified and -1 elsewhere, and v
    as the valid range leaves it. Without the baseline where all decisions agree.
    """
    rows = max(1, chunk // _DIRECTIONS)
    parts = []
    for i in range(0, len(at), rows):
        part = slice(i, i + rows)
        parts.append(_estimate(model, search, at[part], search.y[part], delta[part], noise[part], evaluations))
    gradient = torch.cat(parts)
    if search.norm == "linf":
        return gradient.sign()
    return gradient / per_input(norm_2(gradient).clamp(min=torch.finfo(at.dtype).tiny), at)


def _estimate(
    model: nn.Module, search: Search, at: Tensor, y: Tensor, delta: Tensor, noise: Noise, evaluations: int
) -> Tensor:
    weighted, plain, phi_sum = torch.zeros_like(at), torch.zeros_like(at), torch.zeros_like(delta)
    for first in range(0, evaluations, _DIRECTIONS):
        if clock.over():
            break
        count, draw = min(_DIRECTIONS, evaluations - first), noise.fork(first)
        shape = (count, *at.shape[1:])
        v = draw.normal(shape, at.dtype) if search.norm == "l2" else 2 * draw.uniform(shape, at.dtype) - 1
        v = v / torch.linalg.vector_norm(v.flatten(2), dim=2).view(len(at), count, *[1] * (at.ndim - 1))
        reach = delta.view(-1, *[1] * at.ndim)
        probes = search.clip(at[:, None] + reach * v)
        v = (probes - at[:, None]) / reach
        wrong = model(probes.flatten(0, 1)).argmax(1).view(len(at), count) != y[:, None]
        phi = 2 * wrong.to(at.dtype) - 1
        for k in range(count):
            weighted += per_input(phi[:, k], at) * v[:, k]
            plain += v[:, k]
        phi_sum += phi.sum(1)
    mean = phi_sum / evaluations
    baseline = torch.where(mean.abs() == 1, torch.zeros_like(mean), mean)
    return (weighted - per_input(baseline, at) * plain) / evaluations


def _leap(model: nn.Module, search: Search, at: Tensor, normal: Tensor, size: Tensor) -> Tensor:
    """Step from the boundary along the normal, halved until misclassified; `at` if that never comes.

    Return points of the whole batch, of which the rows of this run are set.
    """
    row = search.row
    outside, leaping = search.all_x.clone(), torch.zeros_like(search.distance, dtype=torch.bool)
    outside[row], leaping[row] = at, True
    place = torch.zeros_like(search.queries)
    place[row] = torch.arange(len(row), device=row.device)
    for halving in range(_MOST_HALVINGS):
        if not search.start(NAME, leaping):
            break
        mine = place[search.row]
        x_adv = search.clip(at[mine] + per_input(size[mine] / 2**halving, at) * normal[mine])
        arrived = search.note(x_adv, model(x_adv))
        outside[search.row[arrived]] = x_adv[arrived]
        leaping[search.row[arrived]] = False
    return outside


hopskipjump = Attack(
    NAME,
    summary="walks along the decision boundary: needs decisions only",
    threats=NORMS,
    reference="Chen, Jordan and Wainwright, HopSkipJumpAttack: a query-efficient decision-based attack, 2020",
    gradients="none",
)(in_threat(NAME, hop_skip_jump))
