"""Polyhedral envelope regularisation: push the faces of the certified region away from the input, as far as needed.

Linear bounds over the ball of radius eps say z_y - z_j >= <U_j, x'> + p_j there. With d_j the signed distance from the
input to the face <U_j, x'> + p_j = 0 (negative where the input lies beyond it), the penalty of one example is

PER = sum over the C smallest d_j of max(0, 1 - d_j / alpha)

and the loss is CE + beta PER. A class that is far enough away, d_j >= alpha, costs nothing: that is what sets PER apart
from losses which push every margin for ever.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.bounding.core.region import BALLS, region
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace_batch
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.coefficients import dense
from holdfast.bounding.linear.forward import forward_planes
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.certificates.core.distance import Norm, norm_of, split
from holdfast.registry import Objective
from holdfast.threats import Threat
from holdfast.training.context import Context, Metrics
from holdfast.training.step import attacked
from holdfast.utils.options import Count, Epochs, NotNegative, Positive, Unit, options_from

DUAL: dict[Norm, float] = {"linf": 1, "l2": 2, "l1": torch.inf}
"""The q of |U_j|_q, the largest change of <U_j, x'> per unit of the norm."""
Bounds = Literal["linear", "interval", "forward"]
_SAMPLE = 1  # the stream of random numbers that picks a part of the batch; the attack draws from 0
_PAPER = "Liu, Salzmann and Süsstrunk, Training provably robust models by polyhedral envelope regularization, 2020"


def signed_distances(x: Tensor, slope: Tensor, shift: Tensor, norm: Norm, valid: tuple[float, float]) -> Tensor:
    """Distance from x to each face <slope, x'> + shift = 0 within the valid range, (B, M); negative beyond the face.

    With a = |slope| and room_j how far value j can move towards the face, it is (|b| - <a2, room>) / |a1|_q for the
    best split a = a1 + a2, times the sign of b = <slope, x> + shift (see `certificates.core.distance`). The split
    counts as fixed for gradients: at the best one the formula is stationary in it.

    A face that no valid input reaches is infinitely far from the right side. From the wrong side its distance is then
    taken without the range, so that the gradient still shows the way back; it is 0 where the slope is 0.
    """
    slope, values = slope.flatten(2), x.flatten(1)
    b = torch.bmm(slope, values[:, :, None])[:, :, 0] + shift
    size = slope.abs()
    with torch.no_grad():
        wrong = b < 0
        side = torch.where(wrong, -1.0, 1.0).to(b)
        down, up = (values - valid[0])[:, None], (valid[1] - values)[:, None]
        room = torch.where(slope * side[:, :, None] > 0, down, up).clamp(min=0)
        free = split(size.double(), b.abs().double(), room.double(), norm).to(size)
        unreached = free.sum(2) == 0
        free = torch.where((unreached & wrong)[:, :, None], size, free)
    free = _with_gradient(size, free, norm)
    top = b - side * ((size - free) * room).sum(2)
    bottom = torch.linalg.vector_norm(free, DUAL[norm], dim=2)
    reached = bottom > 0
    beyond = torch.where(wrong, 0.0, torch.inf).to(b)
    return torch.where(reached, top / torch.where(reached, bottom, torch.ones_like(bottom)), beyond)


def _with_gradient(size: Tensor, free: Tensor, norm: Norm) -> Tensor:
    """The split as a function of a: what is not cut off moves with a, and for p = 1 so does the height of the cut."""
    whole = free >= size
    if norm == "l1":
        height = torch.where(whole, size, torch.zeros_like(size)).amax(2, keepdim=True)
        return torch.minimum(size, height)
    return torch.where(whole, size, free)


def hinge(distances: Tensor, alpha: float, count: int) -> Tensor:
    """Sum of max(0, 1 - d / alpha) over the `count` smallest of the distances (B, M), shape (B,); all if M is less."""
    nearest = distances.topk(min(count, distances.shape[1]), dim=1, largest=False).values
    return (1 - nearest / alpha).clamp(min=0).sum(1)


def full_budget(context: Context) -> float:
    """The budget at the end of its rise; 0 while it has not begun."""
    return context.threat.budget / context.ramp if context.ramp > 0 else 0.0


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """Share of the batch that is classified right."""
    return (logits.argmax(1) == y).to(logits.dtype).mean()


def others(values: Tensor, y: Tensor) -> Tensor:
    """The rows (B, K, ...) without the row of the label, (B, K - 1, ...)."""
    return values[torch.arange(len(y), device=y.device)[:, None], linear.other_classes(y, values.shape[1])]


def envelope(graph: Graph, x: Tensor, y: Tensor, threat: Threat, bounds: Bounds) -> tuple[Tensor, Tensor, Tensor]:
    """Slopes (B, K - 1, ...) and shifts (B, K - 1) of the faces, and whether they prove the whole ball, bool (B,)."""
    ball = region(threat, x, sound=False)
    if bounds == "forward":
        r = Relaxation(graph, ball, sound=False)
        planes = forward_planes(graph, ball, y)
    else:
        r = linear.relaxation(graph, ball, slopes="parallel", hidden=bounds == "linear", sound=False)
        planes = linear.margin_planes(r, y)
    proved = (others(linear.concretise(r, planes), y) > 0).all(1)
    slope = dense(planes.coefficients, tuple(x.shape[1:])).values
    return others(slope, y), others(planes.shift, y), proved


def sample(context: Context, share: float) -> Tensor:
    """A random part of the batch, drawn without repeats: indices, at least one."""
    drawn = context.noise.fork(_SAMPLE).uniform((1,), torch.float64)[:, 0]
    return drawn.argsort()[: max(1, round(share * len(drawn)))]


def penalised(
    loss: Tensor,
    metrics: dict[str, Tensor],
    graph: Graph,
    x: Tensor,
    x_adv: Tensor,
    y: Tensor,
    context: Context,
    *,
    alpha: Positive = 1.5,  # distance that is far enough, in units of the full budget
    beta: NotNegative = 0.1,
    count: Count = 4,  # C, how many classes are penalised at most, the nearest ones
    # Of hidden layers: by backward passes (L-PER), by intervals with one backward pass for the margins (I-PER), or one
    # affine form for each neuron carried forward (I-PER as its authors count its cost).
    bounds: Bounds = "linear",
    share: Unit = 1.0,  # part of each batch that the penalty is taken of, drawn at random
    start_epoch: Epochs = 0,  # no penalty before it; a network without any training has no useful envelope
) -> tuple[Tensor, Metrics]:
    """The loss plus beta times the mean PER of a part of the batch: envelopes around x, distances from x_adv."""
    full, right = full_budget(context), metrics["accuracy"]
    if context.epoch < start_epoch or full == 0:  # without a budget, what is classified right is verified
        zero = torch.zeros_like(right)
        return loss, {**metrics, "per": zero, "verified": right if full == 0 else zero}
    threat, part = context.threat, slice(None) if share == 1 else sample(context, share)
    slope, shift, proved = envelope(graph, x[part], y[part], threat, bounds)
    distances = signed_distances(x_adv[part], slope, shift, norm_of(threat), (threat.low, threat.high))
    value = hinge(distances, alpha * full_budget(context), count).mean()
    return loss + beta * value, {**metrics, "per": value.detach(), "verified": proved.to(value.dtype).mean()}


@Objective(
    "per",
    summary="certified training by the distance to the linear bounds of the margins; no push once it is large enough",
    reference=_PAPER,
    threats=BALLS,
    certificate="fastlin",
)
@options_from(penalised)
def per(model: nn.Module, x: Tensor, y: Tensor, context: Context, **options: Any) -> tuple[Tensor, Metrics]:
    """CE(z(x), y) + beta PER(x); see the top of this file, and `penalised` for the options."""
    graph, logits = trace_batch(model, x)
    metrics = {"accuracy": accuracy(logits, y)}
    return penalised(cross_entropy(logits, y), metrics, graph, x, x, y, context, **options)


@Objective(
    "per-at",
    summary="per with adversarial examples: their loss, and their distances to the envelope of the clean input",
    reference=_PAPER,
    threats=BALLS,
    takes=("attack",),
    certificate="fastlin",
)
@options_from(penalised)
def per_at(model: nn.Module, x: Tensor, y: Tensor, context: Context, **options: Any) -> tuple[Tensor, Metrics]:
    """(CE(z(x), y) + CE(z(x'), y)) / 2 + beta PER(x'): envelopes around x, distances from what the attack finds, x'."""
    x_adv = attacked(model, x, y, context)
    graph, logits = trace_batch(model, x)
    logits_adv = model(x_adv)
    loss = (cross_entropy(logits, y) + cross_entropy(logits_adv, y)) / 2
    metrics = {"accuracy": accuracy(logits, y), "robust_accuracy": accuracy(logits_adv, y)}
    return penalised(loss, metrics, graph, x, x_adv, y, context, **options)
