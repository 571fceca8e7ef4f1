"""Adversarial patches: sign ascent on what lies under a window, over the windows that promise the most."""

from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.attacks.core.forms import Task, on_task
from holdfast.attacks.core.gradients import frozen, input_gradient
from holdfast.attacks.core.losses import Loss, get_loss
from holdfast.attacks.core.survivors import Survivors
from holdfast.errors import InputError
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.threats import Placed
from holdfast.utils.options import Count, NotNegative

Locations = Literal["ranked", "random", "corners", "all"]


def apply_patch(x: Tensor, p: Tensor, mask: Tensor) -> Tensor:
    """A(x, p, l) = (1 - M_l) x + M_l p: `p` under the mask, the pixels of `x` bit for bit elsewhere."""
    return torch.where(mask, p, x)


def first_order_gain(threat: Placed, gradient: Tensor, x: Tensor) -> Tensor:
    """Largest <gradient, A(x, p, l) - x> over the patches p, for every location l, shape (B, L); exact if linear."""
    gain = torch.where(gradient > 0, gradient * (threat.high - x), gradient * (threat.low - x)).sum(1, keepdim=True)
    return threat.under(gain)


def _in_corners(places: Tensor) -> Tensor:
    """Which of all the places (L, P) touch two sides of the image; of a family of shapes those of every member."""
    spot, member = places[:, -2:], places[:, 0] if places.shape[1] > 2 else torch.zeros_like(places[:, 0])
    last = torch.stack([spot[member == one].amax(0) for one in range(int(member.max()) + 1)])[member]
    return ((spot == 0) | (spot == last)).all(1).nonzero()[:, 0]


def _offer(s: Survivors, x_adv: Tensor, values: Tensor, wrong: Tensor) -> None:
    """Keep the strongest of the candidates (R, P, ...) of each input: a misclassified one, else the largest loss."""
    pick = torch.where(wrong | ~wrong.any(1, keepdim=True), values, -torch.inf).argmax(1)
    every = torch.arange(len(pick), device=pick.device)
    rows = s.better(values[every, pick], wrong[every, pick])
    s.x_adv[s.row[rows]] = x_adv[rows, pick[rows]]


def _rank(
    model: nn.Module,
    threat: Placed,
    places: Tensor,
    number: Tensor,
    s: Survivors,
    *,
    loss: Loss,
    probes: int,
    together: int,
) -> Tensor:
    """Score each of the places (L, P), shape (B, L): first the ones of the largest first-order gain, by probes.

    `number` (L,) says which of the threat's locations they are.

    A probe puts three patches there: all low, all high, and the corner that the gradient at x points to.
    """
    x = s.x
    gradient, losses, logits = input_gradient(model, x, s.y, loss)
    s.count(gradients=1)
    score = first_order_gain(threat, gradient, x)[:, number]
    low, high = torch.full_like(x, threat.low), torch.full_like(x, threat.high)
    fills = torch.stack([torch.where(gradient > 0, high, low), low, high], 1)[:, :, None]
    order = score.topk(min(probes, len(places)), dim=1).indices
    values = torch.zeros_like(order, dtype=score.dtype)
    _offer(s, x[:, None], losses[:, None], (logits.argmax(1) != s.y)[:, None])
    for block in torch.arange(order.shape[1], device=x.device).split(together):
        s.count(queries=3 * len(block))
        mask = threat.masks(places[order[s.row][:, block]], x.shape[1:])
        x_adv = apply_patch(s.x[:, None, None], fills[s.row], mask[:, None]).flatten(1, 2)
        losses, wrong = _evaluate(model, x_adv, s.y, loss)
        _offer(s, x_adv, losses, wrong)
        values[s.row[:, None], block] = losses.view(len(s.row), 3, -1).amax(1).to(values.dtype)
        s.drop()
        if s.over:
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
    threat: Placed,
    places: Tensor,
    p: Tensor,
    s: Survivors,
    *,
    steps: int,
    step_size: float,
    loss: Loss,
) -> None:
    """Sign ascent at the places (R, P, 2) of each input of the run at once; an input is done once one place broke it.

    p <- clip(p + step_size * sign(gradient)) under the mask. The patches start from `p`, shape (R, P, C, H, W).
    """
    count, mask = places.shape[1], threat.masks(places, s.x.shape[1:])
    x_adv = apply_patch(s.x[:, None], p, mask)
    for step in range(steps + 1):
        s.count(gradients=count * (step < steps), queries=count)
        if step < steps:
            labels = s.y.repeat_interleave(count)
            gradient, values, logits = input_gradient(model, x_adv.flatten(0, 1), labels, loss)
            gradient, values = gradient.view_as(x_adv), values.view(len(s.y), count)
            wrong = logits.argmax(1).view_as(values) != s.y[:, None]
        else:
            values, wrong = _evaluate(model, x_adv, s.y, loss)
        _offer(s, x_adv, values, wrong)
        if step == steps or s.over:
            return
        x_adv, mask, gradient = s.leave(x_adv, mask, gradient)
        x_adv = apply_patch(s.x[:, None], threat.clip(x_adv + step_size * gradient.sign()), mask)


@Attack(
    "patch-pgd",
    summary="sign ascent under a patch, at the locations where quick probes raise the loss most",
    threats=("patch", "patch-shape"),
    reference="Chiang et al., Certified defenses for adversarial patches, 2020",
)
@on_task
def patch_pgd(
    task: Task,
    *,
    steps: Count = 150,
    step_size: NotNegative = 0.05,
    restarts: Count = 80,
    locations: Locations = "ranked",
    loss: str | Loss = "ce",
    probes: Count = 1024,
    together: Count = 8,
) -> AttackResult:
    """Run iterated FGSM on the content of a patch, location after location, on the inputs that are left.

    Of all iterates at all locations the point kept is a misclassified one, else the one of largest loss.

    Args:
        steps: gradient steps at each location.
        step_size: per step and value, as a share of the valid range.
        restarts: ascents for each input, one at each location and around again from new random patches where there are
            more ("ranked" and "random"; the other two try each location once).
        locations: "ranked" attacks the most promising ones first; "random" draws them among all that lie in the
            image, last row and column included; "corners" (weak) and "all" are ranked too.
        loss: "ce", "margin", "dlr" or a function (logits, y) -> (B,) to maximise.
        probes: locations that are ranked by three forward passes each, the rest only by the gradient at x.
        together: locations worked on at the same time; memory grows with it (times three while they are ranked).

    Departs from the paper: it draws locations at random. Ranking costs less than the ascent at a few locations, and
    breaks most inputs at the first ones.
    """
    model, x, y, threat, noise = task
    if not isinstance(threat, Placed):
        raise InputError(f"'patch-pgd' attacks with patches, got the threat '{threat}'")
    if x.ndim != 4:
        raise InputError(f"'patch-pgd' needs images of shape (B, C, H, W), got {tuple(x.shape)}")
    loss, s = get_loss(loss), Survivors(x, y)
    places = threat.locations(x.shape[1:]).to(x.device)
    number = _in_corners(places) if locations == "corners" else torch.arange(len(places), device=x.device)
    places = places[number]
    count = restarts if locations in ("ranked", "random") else len(places)
    with frozen(model):
        if locations == "random":
            score = noise.uniform((len(places),))
        else:
            score = _rank(model, threat, places, number, s, loss=loss, probes=probes, together=together)
        order = score.topk(min(count, len(places)), dim=1).indices
        order = order.repeat(1, -(-count // order.shape[1]))[:, :count]  # around again, from new patches
        for start in range(0, count, together):
            if not s.resume():
                break
            chosen = order[s.row, start : start + together]
            # A fork for each rank: the patches at a location do not depend on how many are attacked together.
            ranks = range(start, start + chosen.shape[1])
            u = torch.stack([noise[s.row].fork(rank).uniform(x.shape[1:], x.dtype) for rank in ranks], 1)
            p = threat.clip(threat.low + (threat.high - threat.low) * u)
            step = step_size * (threat.high - threat.low)
            _ascend(model, threat, places[chosen], p, s, steps=steps, step_size=step, loss=loss)
    return s.result("patch-pgd")
