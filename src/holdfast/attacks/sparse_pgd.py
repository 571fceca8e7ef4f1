"""A few pixels, changed at will: projected gradient ascent on them, and random search without gradients."""

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import frozen, input_gradient
from holdfast.attacks.core.losses import Loss, get_loss, margin
from holdfast.attacks.core.stages import group_size, run_stages, survivors
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import Attack, register
from holdfast.results import AttackResult
from holdfast.threats import Sparse, Threat


def project_sparse(threat: Sparse, x_new: Tensor, x: Tensor) -> Tensor:
    """Euclidean projection on the inputs in range that differ from x in k pixels, for `x_new` far out of range.

    With d = x_new - x and c its part in range, pixel i is worth |d_i|^2 - |d_i - c_i|^2: keep the best k.
    """
    inside = threat.clip(x_new)
    worth = (x_new - x).square() - (x_new - inside).square()
    return threat.keep(inside, x, threat.per_pixel(worth))


def _ascend(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Sparse,
    x_start: Tensor,
    *,
    steps: int,
    step_size: float,
    loss: Loss,
) -> AttackResult:
    """One run; an input is done at its first misclassified iterate, keeps that one, and leaves with its group."""
    group = group_size(len(x))
    found = x_start.clone()
    success = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    queries = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    row = torch.arange(len(x), device=x.device)
    x_adv, best, best_loss, done = x_start, x_start, x.new_full((len(x),), -torch.inf), success
    for step in range(steps + 1):
        queries[row] += ~done
        if step < steps:
            gradient, values, logits = input_gradient(model, x_adv, y, loss)
        else:
            logits = model(x_adv)
            values = loss(logits, y)
        wrong = logits.argmax(1) != y
        better = ~done & (wrong | (values > best_loss))
        best = torch.where(better.view(-1, *[1] * (x.ndim - 1)), x_adv, best)
        best_loss = torch.where(better, values, best_loss)
        done = done | wrong
        if step == steps or bool(done.all()):
            break
        stay = survivors(done, group)
        if stay is not None:
            found[row], success[row] = best, done
            row, done, x, y, x_adv = row[stay], done[stay], x[stay], y[stay], x_adv[stay]
            gradient, best, best_loss = gradient[stay], best[stay], best_loss[stay]
        size = gradient.abs().flatten(1).mean(1).clamp(min=torch.finfo(x.dtype).tiny)
        x_adv = project_sparse(threat, x_adv + step_size * gradient / size.view(-1, *[1] * (x.ndim - 1)), x)
    found[row], success[row] = best, done
    by = tuple("sparse-pgd" if broken else "" for broken in success.tolist())
    return AttackResult(found, success, by, queries.clamp(max=steps), queries)


@register(
    Attack(
        "sparse-pgd",
        summary="gradient steps projected on the k pixels that matter most (PGD-L0)",
        threats=("sparse",),
        reference="Croce and Hein, Sparse and imperceivable adversarial attacks, 2019",
    )
)
@torch.no_grad()
def sparse_pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    steps: int = 20,
    step_size: float = 2.0,
    restarts: int = 10,
    loss: str | Loss = "ce",
) -> AttackResult:
    """PGD-L0: x_adv <- project(x_adv + step_size * gradient / mean|gradient|) on the inputs with k pixels changed.

    The step is dense; the projection keeps the k pixels with the most to gain. The first run starts at x, where the
    gradient ranks all pixels alike, the others at random points of the set.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: `Sparse(k)`; a pixel of an image counts once, whatever its number of channels.
        noise: source of the random starts; seed 0 for inputs 0 ... B-1 if none is given.
        steps: gradient steps of each run.
        step_size: mean step over all values, as a share of the valid range.
        restarts: runs in all; the first one included.
        loss: "ce", "margin", "dlr" or a function (logits, y) -> (B,) to maximise.

    Departs from the paper: its step (120000/255 over the sum of |gradient|, for the 3072 values of CIFAR-10) is 0.15
    here, and settles on the first pixels that it picks. Steps past the range let pixels be exchanged to the end.
    """
    threat = _check_threat(threat, "sparse-pgd")
    if steps < 1 or restarts < 1:
        raise InputError(f"steps and restarts must be at least 1, got {steps} and {restarts}")
    noise = noise or Noise.for_batch(0, len(x), x.device)
    loss = get_loss(loss)
    step_size = step_size * (threat.high - threat.low)

    def run(restart: int, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        x_start = x if restart == 0 else threat.random_start(x, noise.fork(restart))
        return _ascend(model, x, y, threat, x_start, steps=steps, step_size=step_size, loss=loss)

    with frozen(model):
        return run_stages(x, y, noise, [lambda *task, r=r: run(r, *task) for r in range(restarts)])


def _check_threat(threat: Threat, name: str) -> Sparse:
    if not isinstance(threat, Sparse):
        raise InputError(f"'{name}' changes a number of pixels, got the threat '{threat}'; use hf.Sparse(k)")
    return threat


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


@register(
    Attack(
        "sparse-rs",
        summary="random search over k pixels and extreme colours; needs no gradient",
        threats=("sparse",),
        reference="Croce et al., Sparse-RS: a versatile framework for query-efficient sparse black-box attacks, 2022",
        gradients="none",
    )
)
@torch.no_grad()
def sparse_rs(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    queries: int = 5000,
    share: float = 0.3,
    loss: str | Loss = margin,
) -> AttackResult:
    """Sparse-RS: moves some of the k pixels elsewhere with new extreme colours, and keeps what raises the loss.

    Sees through every mask of the gradient, since it uses none. Prefer `sparse-pgd` first where gradients are honest.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: `Sparse(k)`; a pixel of an image counts once, whatever its number of channels.
        noise: source of the random choices; seed 0 for inputs 0 ... B-1 if none is given.
        queries: forward passes for each input at most.
        share: of the k pixels that move at the first query; falls to a twentieth by a fixed schedule.
        loss: "ce", "margin", "dlr" or a function (logits, y) -> (B,) to maximise.

    Departs from the paper: a pixel that leaves may come back at once with another colour, without which the search gets
    stuck at the right pixel in the wrong colour; and no pixel ever gets the colour that it has in x.
    """
    threat = _check_threat(threat, "sparse-rs")
    if queries < 1 or not 0 < share <= 1:
        raise InputError(f"queries must be at least 1 and share in (0, 1], got {queries} and {share}")
    noise = noise or Noise.for_batch(0, len(x), x.device)
    loss = get_loss(loss)
    total = _pixels(x).shape[2]
    k = min(threat.k, total)
    group = group_size(len(x))
    found = x.clone()
    success = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    spent = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    row = torch.arange(len(x), device=x.device)
    # The first k pixels of the order are the changed ones; the others may come in for them.
    order = noise.fork(0).uniform((total,), torch.float64).argsort(1)
    colours = _colours(threat, x, order[:, :k], noise.fork(1))
    best_loss, done = x.new_full((len(x),), -torch.inf), success
    for query in range(queries if k > 0 else 1):
        new_order, new_colours = order, colours
        if query > 0:
            count = max(1, int(share_of_pixels(query, queries, share) * k))
            new_order, new_colours = _move(threat, x, order, colours, count, noise[row].fork(query + 1))
        spent[row] += ~done
        logits = model(_paint(x, new_order[:, :k], new_colours))
        values, wrong = loss(logits, y), logits.argmax(1) != y
        better = ~done & (wrong | (values > best_loss))
        order = torch.where(better[:, None], new_order, order)
        colours = torch.where(better[:, None, None], new_colours, colours)
        best_loss = torch.where(better, values, best_loss)
        done = done | wrong
        stay = survivors(done, group)
        if stay is not None:
            found[row], success[row] = _paint(x, order[:, :k], colours), done
            row, done, x, y = row[stay], done[stay], x[stay], y[stay]
            order, colours, best_loss = order[stay], colours[stay], best_loss[stay]
        if bool(done.all()):
            break
    found[row], success[row] = _paint(x, order[:, :k], colours), done
    by = tuple("sparse-rs" if broken else "" for broken in success.tolist())
    return AttackResult(found, success, by, torch.zeros_like(spent), spent)
