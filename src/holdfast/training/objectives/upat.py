"""UPAT: one pyramid perturbation for all images, moved by the gradients that training computes anyway."""

from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.fast.free_gradients import FreeGradients
from holdfast.training.objectives.core.pyramid import (
    Pyramid,
    ascend,
    check_pyramid,
    level_gradients,
    make_pyramid,
    pair_step,
    perturbation,
    radius_at,
    zero_levels,
)
from holdfast.training.workers import Workers, current_workers
from holdfast.utils.options import Count, Epochs, NotNegative, Positive, Unit

Patterns = Count | Literal["per-slot"]


@Objective(
    "upat",
    summary="clean and shifted accuracy: loss at x and at x plus a universal pyramid perturbation, at twice the cost",
    reference="Chiang et al., Universal pyramid adversarial training for improved ViT performance, 2023",
    takes=("targets", "regularizers", "perturb_weights"),
    pairs=lambda clean_weight, weight, **_: clean_weight > 0 and weight > 0,
    check_model=check_pyramid,
)
def upat(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    levels: tuple[Count, ...] | None = None,  # sides of the tiles; by default a 7th and a 14th of the image, and 1
    multipliers: tuple[Positive, ...] | None = None,  # of the levels; 20, 10 and 1 by default
    radius: Positive = 8 / 255,  # of each level, before its multiplier
    step: Positive = 0.2,  # tau, in units of the radius
    weight: NotNegative = 1.0,  # lambda, of the loss at x + delta
    clean_weight: NotNegative = 1.0,  # of the loss at x
    patterns: Patterns = 1,
    clip_input: bool = False,  # keep x + delta in the pixel range
    decay_start: Epochs = 30,
    decay_end: Count | None = None,  # None for a constant radius
    decay_to: Unit = 0.1,
) -> tuple[Tensor, Metrics]:
    """Mean of clean_weight l(x) + weight l(x + delta); its backward pass also moves delta.

    min over theta max over delta of E[l(x) + weight l(x + delta)], delta = sum of m_s up(delta_s) (core/pyramid.py):
    the gradient of one backward pass, at the weights before the optimiser's step, serves theta and all levels,
    delta_s <- project(delta_s + step radius sign(gradient)). `levels = [1]`, `multipliers = [1]` is plain universal
    training. Image number i of a batch uses pattern i modulo `patterns`; "per-slot" gives each place in the batch its
    own. From `decay_start` to `decay_end` (epochs) the radius falls linearly to `decay_to` times its value.
    """
    pyramid = make_pyramid(tuple(x.shape[1:]), levels, multipliers)
    size = radius_at(context.epoch, radius, start=decay_start, end=decay_end, final=decay_to)
    if weight == 0:
        return pair_step(model, x, x, y, context, clean_weight=clean_weight, weight=weight)
    # Every process holds all patterns, so that the checkpoint of one is the state of all.
    team = current_workers()
    kept = [level.clamp(-size, size) for level in _read(context.state, pyramid, x, patterns, team)]
    delta = perturbation(pyramid, kept).requires_grad_(True)

    def move(gradient: Tensor) -> None:
        with torch.no_grad():
            gradients = level_gradients(pyramid, team.sum(gradient))
            _write(context.state, pyramid, ascend(kept, gradients, step * size, size))

    delta.register_hook(move)
    slot = team.rank + team.count * torch.arange(len(x), device=x.device)  # places in the batch of all processes
    x_adv = x + (delta if len(delta) == 1 else delta[slot % len(delta)])
    with FreeGradients(x_adv if len(delta) == 1 else None):
        return pair_step(
            *(model, x, x_adv.clamp(0, 1) if clip_input else x_adv, y, context),
            clean_weight=clean_weight,
            weight=weight,
        )


def _read(state: dict[str, Tensor], pyramid: Pyramid, x: Tensor, patterns: Patterns, team: Workers) -> list[Tensor]:
    """The levels as the last step left them; zero at first. A larger batch than ever adds patterns per slot."""
    kept = [state[_key(tile)] for tile in pyramid.tiles if _key(tile) in state]
    if patterns != "per-slot":
        return kept or zero_levels(pyramid, patterns, x)
    # The first batch is the largest of a run, so that all processes meet here once.
    if kept and len(kept[0]) > team.rank + team.count * (len(x) - 1):
        return kept
    largest = int(torch.stack(team.gather(torch.tensor(len(x)))).max()) * team.count
    fresh = zero_levels(pyramid, largest - (len(kept[0]) if kept else 0), x)
    return [torch.cat(pair) for pair in zip(kept, fresh, strict=True)] if kept else fresh


def _write(state: dict[str, Tensor], pyramid: Pyramid, levels: list[Tensor]) -> None:
    state |= {_key(tile): level for tile, level in zip(pyramid.tiles, levels, strict=True)}


def _key(tile: int) -> str:
    return f"pyramid_{tile}"
