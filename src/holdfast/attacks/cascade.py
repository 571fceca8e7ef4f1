"""Our own ensemble: cheap attacks first, stronger ones only on what is left, the full ensemble where there is doubt."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from holdfast.attacks.autoattack import VOTES, autoattack, random_model
from holdfast.attacks.core.ascent import BALLS
from holdfast.attacks.core.auto_pgd import auto_pgd
from holdfast.attacks.core.chance import Steady, is_stochastic, mean_prediction, seeded
from holdfast.attacks.core.forms import Task, on_task
from holdfast.attacks.core.gradients import answer, frozen, input_gradient, look
from holdfast.attacks.core.losses import cross_entropy, likely_targets, margin, targeted_margin
from holdfast.attacks.core.stages import Stage, run_part, run_stages
from holdfast.attacks.patch_pgd import patch_pgd
from holdfast.attacks.sparse_pgd import sparse_pgd
from holdfast.attacks.sparse_rs import sparse_rs
from holdfast.attacks.square import square
from holdfast.attacks.substitute import substitute
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.threats import Box, Placed, Sparse, Threat
from holdfast.utils.options import Count

SHORT = 100
"""Queries of the random search that every survivor gets."""
CLOSE = 0.4
"""Share of the clean margin; where less is left of it, a long random search pays."""
FARTHER = 0.35
"""Share of the clean margin; where the short search has taken away so much more than the gradient, there is doubt."""
DRAWS = 8
"""Fixed draws that stand for a random model where an attack cannot average over fresh ones."""


@Attack(
    "cascade",
    summary="Auto-PGD on three losses, then random search that hands over to it; the full ensemble if in doubt",
    threats=(*BALLS, "patch", "patch-shape", "sparse"),
    reference="Holdfast; Auto-PGD and AutoAttack by Croce and Hein, 2020; Square Attack by Andriushchenko et al., 2020",
    stochastic=True,
    gradients="used",
)
@on_task
def cascade(
    task: Task, *, steps: Count = 20, targets: Count = 9, queries: Count = 1000, data: Tensor | None = None
) -> AttackResult:
    """Reach the strength of AutoAttack in a fraction of its time, if the gradients can be trusted.

    Stages, each on the survivors so far: Auto-PGD on the cross-entropy; on the margin; on z_t - z_y towards
    the classes t that are likeliest at the best point so far; a short random search (Square) and then, where the margin
    has come down to less than 40 % of the clean one, a long one; from the end of both, Auto-PGD goes on: the search
    crosses flat ground that gradients do not, and the gradients finish what it began. Left out, compared with
    AutoAttack: FAB, long runs, and random search where the margin hardly moved.

    Where there is doubt, the full AutoAttack follows: on inputs whose gradient vanishes, whose margin does not come
    down, or on which a hundred random queries did clearly better than the gradient. Before that, inputs whose gradient
    vanishes get `substitute`. A model that draws random numbers gets AutoAttack's version "rand", one without gradients
    `substitute` and random search; patches and sparse changes have attacks of their own.

    Args:
        steps: gradient steps of each run of Auto-PGD.
        targets: classes to aim at.
        queries: most queries of the long random search.
        data: inputs that `substitute` may learn from; x if none are given.
    """
    model, x, y, threat, noise = task
    by_chance = is_stochastic(model, x)
    run: Callable[..., AttackResult]
    if not _differentiable(model, x[:1]):
        run = partial(_by_queries, data=data)
    elif isinstance(threat, Placed | Sparse):
        run = partial(_of_pixels, data=data)
    elif by_chance:
        return _of_chance(model, x, y, threat, noise, data=data)
    else:
        run = partial(_of_balls, steps=steps, targets=targets, queries=queries, data=data)
    return _steadied(run, model, x, y, threat, noise) if by_chance else run(model, x, y, threat, noise)


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
    data: Tensor | None,
) -> AttackResult:
    """The stages for Lp balls and boxes. They share the best points, what to aim at, and where there is doubt.

    Positions ride through `run_stages` as the index of a noise: they say which of these belong to the survivors.
    """
    run = partial(auto_pgd, model, threat=threat, steps=steps)
    aims = y[:, None].repeat(1, min(targets, model(x[:1]).shape[1] - 1))
    best, clean, left = x.clone(), torch.zeros_like(x.flatten(1)[:, 0]), x.new_full((len(x),), -torch.inf)
    doubtful, flat = torch.zeros_like(y, dtype=torch.bool), torch.zeros_like(y, dtype=torch.bool)

    def cross_entropies(x: Tensor, y: Tensor, at: Noise) -> AttackResult:
        start = threat.random_start(x, noise[at.index].fork(0))
        return run(x, y, x_start=start, loss=cross_entropy, name="apgd-ce")

    def margins(x: Tensor, y: Tensor, at: Noise) -> AttackResult:
        with frozen(model):
            gradient, before, _ = input_gradient(model, x, y, margin)
        start = threat.random_start(x, noise[at.index].fork(1))
        result = run(x, y, x_start=start, loss=margin, name="apgd-margin")
        clean[at.index], left[at.index] = before, result.loss
        flat[at.index] = gradient.flatten(1).abs().amax(1) == 0
        doubtful[at.index] = flat[at.index] | ~(result.loss > before)
        aims[at.index] = likely_targets(model(result.x_adv), y, targets)
        return replace(result, gradients=result.gradients + 1, queries=result.queries + 2)

    def targeted(rank: int, x: Tensor, y: Tensor, at: Noise) -> AttackResult:
        start = threat.random_start(x, noise[at.index].fork(2).fork(rank))
        return run(x, y, x_start=start, loss=targeted_margin, target=aims[at.index, rank], name="apgd-targeted")

    def learned(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        return substitute(model, x, y, threat, noise=noise, data=data)

    def if_flat(x: Tensor, y: Tensor, at: Noise) -> AttackResult:
        return run_part(flat[at.index], x, y, noise[at.index].fork(6), learned)

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
    stages += [if_flat]
    if not isinstance(threat, Box):  # random search and AutoAttack need one budget for all values
        stages += [short_search, finish, search_close, finish_close]
        stages += [if_in_doubt] if threat.budget > 0 else []
    return run_stages(x, y, Noise.for_batch(0, len(x), x.device), stages)


def _of_pixels(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, noise: Noise, *, data: Tensor | None
) -> AttackResult:
    """Attack by patches, or by sparse changes, also with random search; by a stand-in if gradients vanish."""

    def patched(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        return patch_pgd(model, x, y, threat, noise=noise)

    def by_gradient(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        return sparse_pgd(model, x, y, threat, noise=noise.fork(0))

    def by_search(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        return sparse_rs(model, x, y, threat, noise=noise.fork(1))

    def learned(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        return substitute(model, x, y, threat, noise=noise.fork(6), data=data)

    def if_flat(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        with frozen(model):
            gradient, _, _ = input_gradient(model, x, y, margin)
        result = run_part(gradient.flatten(1).abs().amax(1) == 0, x, y, noise, learned)
        return replace(result, gradients=result.gradients + 1, queries=result.queries + 1)

    stages: list[Stage] = [patched] if isinstance(threat, Placed) else [by_gradient, by_search]
    return run_stages(x, y, noise, [*stages, if_flat])


def _by_queries(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, noise: Noise, *, data: Tensor | None
) -> AttackResult:
    """Attack a model without gradients: by a stand-in, then by random search if the threat has one."""

    def learned(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        return substitute(model, x, y, threat, noise=noise.fork(6), data=data)

    def search(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        run = sparse_rs if isinstance(threat, Sparse) else square
        return run(model, x, y, threat, noise=noise.fork(4))

    return run_stages(x, y, noise, [learned] if isinstance(threat, Box | Placed) else [learned, search])


def _of_chance(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, noise: Noise, *, data: Tensor | None
) -> AttackResult:
    """Attack a random model in Lp balls and boxes by AutoAttack's version "rand", or by a stand-in."""
    steady, by_queries = Steady(model, DRAWS, noise.seed), partial(_by_queries, data=data)

    def averaged(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        return random_model(model, x, y, threat, noise)

    def queried(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        return _steadied(by_queries, model, x, y, threat, noise)

    def if_flat(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        with frozen(model):
            gradient, _, _ = input_gradient(steady, x, y, margin)
        result = run_part(gradient.flatten(1).abs().amax(1) == 0, x, y, noise, queried)
        return replace(result, gradients=result.gradients + DRAWS, queries=result.queries + DRAWS)

    return run_stages(x, y, noise, [averaged, if_flat])


def _steadied(
    run: Callable[..., AttackResult], model: nn.Module, x: Tensor, y: Tensor, threat: Threat, noise: Noise
) -> AttackResult:
    """Call `run` on the mean of a few fixed draws of a random model; fresh draws confirm what it finds."""
    found = run(Steady(model, DRAWS, noise.seed), x, y, threat, noise)
    fooled = found.success & (mean_prediction(model, found.x_adv, VOTES, noise.seed + 1).argmax(1) != y)
    by = tuple(name if f else "" for name, f in zip(found.by, fooled.tolist(), strict=True))
    gradients, queries = DRAWS * found.gradients, DRAWS * found.queries + VOTES
    return replace(found, success=fooled, by=by, gradients=gradients, queries=queries)


def _differentiable(model: nn.Module, x: Tensor) -> bool:
    with torch.enable_grad(), frozen(model), seeded(0, x.device):
        return answer(model, x.detach().requires_grad_(True)).requires_grad
