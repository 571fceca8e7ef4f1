"""Adversarial patches: sign ascent on what lies under a window, over the windows that promise the most."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from holdfast.attacks.core.gradients import frozen, input_gradient
from holdfast.attacks.core.losses import Loss, get_loss
from holdfast.attacks.core.stages import group_size, survivors
from holdfast.errors import InputError, did_you_mean
from holdfast.random import Noise
from holdfast.registry import Attack, register
from holdfast.results import AttackResult
from holdfast.threats import Patch, Threat

Locations = Literal["ranked", "random", "corners", "all"]


def apply_patch(x: Tensor, p: Tensor, mask: Tensor) -> Tensor:
    """A(x, p, l) = (1 - M_l) x + M_l p: `p` under the mask, the pixels of `x` bit for bit elsewhere."""
    return torch.where(mask, p, x)


def first_order_gain(threat: Patch, gradient: Tensor, x: Tensor) -> Tensor:
    """Largest <gradient, A(x, p, l) - x> over the patches p, for every location l, shape (B, L); exact if linear."""
    gain = torch.where(gradient > 0, gradient * (threat.high - x), gradient * (threat.low - x)).sum(1, keepdim=True)
    return avg_pool2d(gain, (threat.height, threat.width), stride=1, divisor_override=1).flatten(1)


class _Best:
    """The strongest point found for each input so far, and what it cost."""

    def __init__(self, x: Tensor) -> None:
        self.x_adv, self.loss = x.clone(), x.new_full((len(x),), -torch.inf)
        self.success = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        self.gradients = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        self.queries = self.gradients.clone()

    def offer(self, row: Tensor, x_adv: Tensor, values: Tensor, wrong: Tensor) -> None:
        """Candidates (A, P, ...) for the inputs `row` (A,): misclassified ones first, then the largest loss."""
        values = values.to(self.loss.dtype)
        pick = torch.where(wrong | ~wrong.any(1, keepdim=True), values, -torch.inf).argmax(1)
        every = torch.arange(len(row), device=row.device)
        value, broken = values[every, pick], wrong[every, pick]
        better = ~self.success[row] & (broken | (value > self.loss[row]))
        rows = row[better]
        self.x_adv[rows] = x_adv[every, pick][better]
        self.loss[rows], self.success[rows] = value[better], broken[better]

    def result(self) -> AttackResult:
        by = tuple("patch-pgd" if broken else "" for broken in self.success.tolist())
        return AttackResult(self.x_adv, self.success, by, self.gradients, self.queries)


def _rank(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Patch,
    places: Tensor,
    best: _Best,
    *,
    loss: Loss,
    probes: int,
    together: int,
) -> Tensor:
    """Score of each of the places (L, 2), shape (B, L): first those of the largest first-order gain, by probes.

    A probe puts three patches there: all low, all high, and the corner that the gradient at x points to.
    """
    gradient, losses, logits = input_gradient(model, x, y, loss)
    best.gradients += 1
    best.queries += 1
    columns = x.shape[-1] - threat.width + 1
    score = first_order_gain(threat, gradient, x)[:, places[:, 0] * columns + places[:, 1]]
    low, high = torch.full_like(x, threat.low), torch.full_like(x, threat.high)
    fills = torch.stack([torch.where(gradient > 0, high, low), low, high], 1)[:, :, None]
    order = score.topk(min(probes, len(places)), dim=1).indices
    values = torch.zeros_like(order, dtype=score.dtype)
    group, row = group_size(len(x)), torch.arange(len(x), device=x.device)
    best.offer(row, x[:, None], losses[:, None], (logits.argmax(1) != y)[:, None])
    for block in torch.arange(order.shape[1], device=x.device).split(together):
        best.queries[row] += 3 * len(block) * ~best.success[row]
        mask = threat.masks(places[order[row][:, block]], x.shape[1:])
        x_adv = apply_patch(x[row][:, None, None], fills[row], mask[:, None]).flatten(1, 2)
        losses, wrong = _evaluate(model, x_adv, y[row], loss)
        best.offer(row, x_adv, losses, wrong)
        values[row[:, None], block] = losses.view(len(row), 3, -1).amax(1).to(values.dtype)
        stay = survivors(best.success[row], group)
        row = row if stay is None else row[stay]
        if len(row) == 0:
            break
    return score.scatter(1, order, score.amax(1, keepdim=True) + 1 + values - values.amin(1, keepdim=True))


def _evaluate(model: nn.Module, x_adv: Tensor, y: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Loss and whether misclassified, (B, P) each, of the points (B, P, ...)."""
    labels = y.repeat_interleave(x_adv.shape[1])
    logits = model(x_adv.flatten(0, 1))
    shape = x_adv.shape[:2]
    return loss(logits, labels).view(shape), (logits.argmax(1) != labels).view(shape)


def _ascend(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Patch,
    row: Tensor,
    places: Tensor,
    p: Tensor,
    best: _Best,
    *,
    steps: int,
    step_size: float,
    loss: Loss,
) -> None:
    """Sign ascent at the places (A, P, 2) of the inputs `row` (A,) at once; an input is done once one place broke it.

    p <- clip(p + step_size * sign(gradient)) under the mask. The patches start from `p`, shape (A, P, C, H, W).
    """
    group, count = group_size(len(row)), places.shape[1]
    mask, x = threat.masks(places, x.shape[1:]), x[row][:, None]
    x_adv = apply_patch(x, p, mask)
    for step in range(steps + 1):
        labels, alive = y[row], ~best.success[row]
        best.queries[row] += count * alive
        if step < steps:
            best.gradients[row] += count * alive
            gradient, values, logits = input_gradient(model, x_adv.flatten(0, 1), labels.repeat_interleave(count), loss)
            gradient, values = gradient.view_as(x_adv), values.view(len(row), count)
            wrong = logits.argmax(1).view_as(values) != labels[:, None]
        else:
            values, wrong = _evaluate(model, x_adv, labels, loss)
        best.offer(row, x_adv, values, wrong)
        done = best.success[row]
        if step == steps or bool(done.all()):
            return
        stay = survivors(done, group)
        if stay is not None:
            row, x, x_adv, mask, gradient = row[stay], x[stay], x_adv[stay], mask[stay], gradient[stay]
        x_adv = apply_patch(x, threat.clip(x_adv + step_size * gradient.sign()), mask)


@register(
    Attack(
        "patch-pgd",
        summary="sign ascent under a patch, at the locations where quick probes raise the loss most",
        threats=("patch",),
        reference="Chiang et al., Certified defenses for adversarial patches, 2020",
    )
)
@torch.no_grad()
def patch_pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    steps: int = 150,
    step_size: float = 0.05,
    restarts: int = 80,
    locations: Locations = "ranked",
    loss: str | Loss = "ce",
    probes: int = 1024,
    together: int = 8,
) -> AttackResult:
    """Iterated FGSM on the content of a patch, location after location, on the inputs that are left.

    Of all iterates at all locations the point kept is a misclassified one, else the one of largest loss.

    Args:
        model: from (B, C, H, W) to logits (B, K), in eval mode.
        x: images, shape (B, C, H, W).  y: labels, shape (B,).
        threat: a `Patch`.
        noise: source of the random locations and patches; seed 0 for inputs 0 ... B-1 if none is given.
        steps: gradient steps at each location.
        step_size: per step and value, as a share of the valid range.
        restarts: locations tried for each input ("ranked" and "random").
        locations: "ranked" attacks the most promising ones first; "random" draws them among all of those that lie in
            the image, last row and column included; "corners" (weak) and "all" are ranked too.
        loss: "ce", "margin", "dlr" or a function (logits, y) -> (B,) to maximise.
        probes: locations that are ranked by three forward passes each, the rest by the gradient at x alone.
        together: locations worked on at the same time; memory grows with it (times three while they are ranked).

    Departs from the paper: it draws locations at random. Ranking costs less than the ascent at a few locations, and
    breaks most inputs at the first ones.
    """
    if not isinstance(threat, Patch):
        raise InputError(f"'patch-pgd' attacks with patches, got the threat '{threat}'")
    if x.ndim != 4:
        raise InputError(f"'patch-pgd' needs images of shape (B, C, H, W), got {tuple(x.shape)}")
    if min(steps, restarts, probes, together) < 1:
        raise InputError(
            f"steps, restarts, probes and together must be at least 1, got {steps}, {restarts}, {probes} and {together}"
        )
    if locations not in get_args(Locations):
        raise InputError(f"unknown locations '{locations}'. " + did_you_mean(str(locations), get_args(Locations)))
    noise = noise or Noise.for_batch(0, len(x), x.device)
    loss, best = get_loss(loss), _Best(x)
    places = threat.locations(x.shape[1:]).to(x.device)
    if locations == "corners":
        edge = (places == 0) | (places == places.amax(0))
        places = places[edge.all(1)]
    count = min(restarts, len(places)) if locations in ("ranked", "random") else len(places)
    with frozen(model):
        if locations == "random":
            score = noise.uniform((len(places),))
        else:
            score = _rank(model, x, y, threat, places, best, loss=loss, probes=probes, together=together)
        order = score.topk(count, dim=1).indices
        for start in range(0, count, together):
            row = (~best.success).nonzero()[:, 0]
            if len(row) == 0:
                break
            chosen = order[row, start : start + together]
            # A fork for each rank: the patches at a location do not depend on how many are attacked together.
            ranks = range(start, start + chosen.shape[1])
            u = torch.stack([noise[row].fork(rank).uniform(x.shape[1:], x.dtype) for rank in ranks], 1)
            p = threat.clip(threat.low + (threat.high - threat.low) * u)
            step = step_size * (threat.high - threat.low)
            _ascend(model, x, y, threat, row, places[chosen], p, best, steps=steps, step_size=step, loss=loss)
    return best.result()
