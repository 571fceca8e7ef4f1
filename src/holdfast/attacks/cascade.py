"""Our own ensemble: cheap attacks first, stronger ones only on what is left, the full ensemble where there is doubt."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from holdfast.attacks.apgd import auto_pgd
from holdfast.attacks.autoattack import autoattack, random_model
from holdfast.attacks.eot import is_stochastic
from holdfast.attacks.gradients import frozen, input_gradient, logits_of, look
from holdfast.attacks.losses import cross_entropy, likely_targets, margin, targeted_margin
from holdfast.attacks.patch import patch_pgd
from holdfast.attacks.pgd import BALLS
from holdfast.attacks.sparse import sparse_pgd, sparse_rs
from holdfast.attacks.square import square
from holdfast.attacks.stages import Stage, run_part, run_stages
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import register
from holdfast.results import AttackResult
from holdfast.threats import Box, Patch, Sparse, Threat

SHORT = 100
"""Queries of the random search that every survivor gets."""
CLOSE = 0.4
"""Share of the clean margin; where less is left of it, a long random search pays."""
FARTHER = 0.35
"""Share of the clean margin; where the short search has taken away so much more than the gradient, there is doubt."""


@register(
    "attack",
    "cascade",
    summary="Auto-PGD on three losses, then random search that hands over to it; the full ensemble if in doubt",
    guarantee="upper bound",
    threats=(*BALLS, "patch", "sparse"),
    reference="Holdfast; Auto-PGD and AutoAttack by Croce and Hein, 2020; Square Attack by Andriushchenko et al., 2020",
    stochastic=True,
)
@torch.no_grad()
def cascade(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    steps: int = 20,
    targets: int = 9,
    queries: int = 1000,
) -> AttackResult:
    """The strength of AutoAttack in a fraction of its time, where the gradients can be trusted.

    Stages, each on the survivors of those before: Auto-PGD on the cross-entropy; on the margin; on z_t - z_y towards
    the classes t that are likeliest at the best point so far; a short random search (Square) and then, where the margin
    has come down to less than 40 % of the clean one, a long one; from the end of both, Auto-PGD goes on: the search
    crosses flat ground that gradients do not, and the gradients finish what it began. Left out, compared with
    AutoAttack: FAB, long runs, and random search where the margin hardly moved.

    Where there is doubt, the full AutoAttack follows: on inputs whose gradient vanishes, whose margin does not come
    down, or on which a hundred random queries did clearly better than the gradient. A model that draws random numbers
    gets AutoAttack's version "rand", one without gradients Square alone; patches and sparse changes have attacks of
    their own.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: what the adversary may do.
        noise: source of all random choices; seed 0 for inputs 0 ... B-1 if none is given.
        steps: of each run of Auto-PGD.
        targets: classes to aim at.
        queries: of the long random search.
    """
    if steps < 1 or targets < 1 or queries < 1:
        raise InputError(f"steps, targets and queries must be at least 1, got {steps}, {targets} and {queries}")
    noise = noise or Noise.for_batch(0, len(x), x.device)
    if isinstance(threat, Patch | Sparse):
        return _of_pixels(model, x, y, threat, noise)
    if is_stochastic(model, x):
        return random_model(model, x, y, threat, noise)
    if not _differentiable(model, x[:1]):
        return square(model, x, y, threat, noise=noise.fork(4))
    return _of_balls(model, x, y, threat, noise, steps=steps, targets=targets, queries=queries)


def _of_balls(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    noise: Noise,
    *,
    steps: int,
    targets: int,
    queries: int,
) -> AttackResult:
    """The stages for Lp balls and boxes. They share the best points, what to aim at, and where there is doubt.

    Positions ride through `run_stages` as the index of a noise: they say which of these belong to the survivors.
    """
    run = partial(auto_pgd, model, threat=threat, steps=steps)
    aims = y[:, None].repeat(1, min(targets, model(x[:1]).shape[1] - 1))
    best, clean, left = x.clone(), torch.zeros_like(x.flatten(1)[:, 0]), x.new_full((len(x),), -torch.inf)
    doubtful = torch.zeros_like(y, dtype=torch.bool)

    def cross_entropies(x: Tensor, y: Tensor, at: Noise) -> AttackResult:
        start = threat.random_start(x, noise[at.index].fork(0))
        return run(x, y, x_start=start, loss=cross_entropy, name="apgd-ce")

    def margins(x: Tensor, y: Tensor, at: Noise) -> AttackResult:
        with frozen(model):
            gradient, before, _ = input_gradient(model, x, y, margin)
        start = threat.random_start(x, noise[at.index].fork(1))
        result = run(x, y, x_start=start, loss=margin, name="apgd-margin")
        clean[at.index], left[at.index] = before, result.loss
        doubtful[at.index] = (gradient.flatten(1).abs().amax(1) == 0) | ~(result.loss > before)
        aims[at.index] = likely_targets(model(result.x_adv), y, targets)
        return replace(result, gradients=result.gradients + 1, queries=result.queries + 2)

    def targeted(rank: int, x: Tensor, y: Tensor, at: Noise) -> AttackResult:
        start = threat.random_start(x, noise[at.index].fork(2).fork(rank))
        return run(x, y, x_start=start, loss=targeted_margin, target=aims[at.index, rank], name="apgd-targeted")

    def short_search(x: Tensor, y: Tensor, at: Noise) -> AttackResult:
        result = square(model, x, y, threat, noise=noise[at.index].fork(3), queries=SHORT)
        reached, _ = look(model, result.x_adv, y, margin)
        doubtful[at.index] |= reached - left[at.index] > FARTHER * clean[at.index].abs()
        best[at.index] = result.x_adv
        return replace(result, queries=result.queries + 1)

    def finish(x: Tensor, y: Tensor, at: Noise) -> AttackResult:
        result = run(x, y, x_start=best[at.index], loss=margin, name="square-apgd")
        left[at.index] = torch.maximum(left[at.index], result.loss)
        return result

    def long_search(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        return square(model, x, y, threat, noise=noise, queries=queries)

    def search_close(x: Tensor, y: Tensor, at: Noise) -> AttackResult:
        close = left[at.index] > CLOSE * clean[at.index]
        result = run_part(close, x, y, noise[at.index].fork(4), long_search)
        best[at.index] = result.x_adv
        return result

    def finish_close(x: Tensor, y: Tensor, at: Noise) -> AttackResult:
        return run_part(left[at.index] > CLOSE * clean[at.index], x, y, at, finish)

    def ensemble(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        return autoattack(model, x, y, threat, noise=noise)

    def if_in_doubt(x: Tensor, y: Tensor, at: Noise) -> AttackResult:
        return run_part(doubtful[at.index], x, y, noise[at.index].fork(5), ensemble)

    stages: list[Stage] = [cross_entropies, margins, *(partial(targeted, rank) for rank in range(aims.shape[1]))]
    if not isinstance(threat, Box):  # random search and AutoAttack need one budget for all values
        stages += [short_search, finish, search_close, finish_close]
        stages += [if_in_doubt] if threat.budget > 0 else []
    return run_stages(x, y, Noise.for_batch(0, len(x), x.device), stages)


def _of_pixels(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, noise: Noise) -> AttackResult:
    """Patches, or sparse changes: by gradient, and the latter by random search too."""
    if isinstance(threat, Patch):
        return patch_pgd(model, x, y, threat, noise=noise)

    def by_gradient(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        return sparse_pgd(model, x, y, threat, noise=noise.fork(0))

    def by_search(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        return sparse_rs(model, x, y, threat, noise=noise.fork(1))

    return run_stages(x, y, noise, [by_gradient, by_search])


def _differentiable(model: nn.Module, x: Tensor) -> bool:
    with torch.enable_grad(), frozen(model):
        return logits_of(model, x.detach().requires_grad_(True)).requires_grad
