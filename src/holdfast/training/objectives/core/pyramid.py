"""Pyramid perturbations: a sum of coarse and fine patterns, each with a radius of its own.

delta = sum over s of m_s up(delta_s),   max |delta_s| <= r

A level delta_s has one value for each tile of s x s pixels and each channel; `up` repeats it over its tile. The radius
bounds a level before its multiplier m_s, so that a pixel may change by up to r times the sum of the multipliers. Levels
are projected after each update: a clamp inside the formula would have no gradient beyond the radius, and a level that
left it would never come back.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.training.context import Context, Metrics
from holdfast.training.outputs import Output
from holdfast.training.step import Family, Terms, Views, fit, robust_step
from holdfast.training.top_curvature import trace_ce

MULTIPLIERS = (20.0, 10.0, 1.0)
"""Of tiles of a seventh and of a fourteenth of the image, and of single pixels."""


@dataclass(frozen=True)
class Pyramid:
    """Sides of the tiles, in pixels, and the multiplier of each level."""

    tiles: tuple[int, ...]
    multipliers: tuple[float, ...]


def make_pyramid(
    shape: tuple[int, ...], levels: tuple[int, ...] | None, multipliers: tuple[float, ...] | None
) -> Pyramid:
    """The pyramid for inputs of `shape` (C, H, W), checked.

    Without `levels`, the published tiles at 224 x 224 (32, 16 and 1 pixels) in proportion to the shorter side, each
    rounded down to a size that divides the image; levels that coincide count once.

    >>> make_pyramid((3, 224, 224), None, None).tiles, make_pyramid((1, 28, 28), None, None).tiles
    ((32, 16, 1), (4, 2, 1))
    """
    if len(shape) != 3:
        raise InputError(f"objective: a pyramid needs images of shape (C, H, W), the inputs have shape {shape}")
    if levels is None:
        if multipliers is not None:
            raise InputError("objective.multipliers: needs objective.levels, one multiplier for each level")
        found = dict(zip(_default_tiles(shape[1], shape[2]), MULTIPLIERS, strict=True))
        return Pyramid(tuple(found), tuple(found.values()))
    if not levels:
        raise InputError("objective.levels: expected at least one level, got none")
    for tile in levels:
        if shape[1] % tile or shape[2] % tile:
            raise InputError(
                f"objective.levels: tiles of {tile} x {tile} do not divide an image of {shape[1]} x {shape[2]}; "
                f"choose divisors of {math.gcd(shape[1], shape[2])}"
            )
    if len(set(levels)) != len(levels):
        raise InputError(f"objective.levels: expected different tiles, got {list(levels)}")
    if multipliers is None or len(multipliers) != len(levels):
        raise InputError(
            f"objective.multipliers: expected one for each of the {len(levels)} levels, "
            f"got {0 if multipliers is None else len(multipliers)}"
        )
    return Pyramid(levels, multipliers)


def _default_tiles(height: int, width: int) -> tuple[int, int, int]:
    divisors = [n for n in range(1, min(height, width) + 1) if height % n == 0 and width % n == 0]
    coarse, middle = (max(n for n in divisors if n <= max(1, min(height, width) // part)) for part in (7, 14))
    return coarse, middle, 1


def zero_levels(pyramid: Pyramid, count: int, x: Tensor) -> list[Tensor]:
    """`count` patterns at each level, (count, C, H / tile, W / tile), for inputs x (B, C, H, W)."""
    channels, height, width = x.shape[1:]
    return [x.new_zeros(count, channels, height // tile, width // tile) for tile in pyramid.tiles]


def spread(level: Tensor, tile: int) -> Tensor:
    """Each value repeated over its tile, (P, C, h, w) -> (P, C, h tile, w tile)."""
    return level.repeat_interleave(tile, -2).repeat_interleave(tile, -1)


def perturbation(pyramid: Pyramid, levels: list[Tensor]) -> Tensor:
    """delta = sum of m_s up(delta_s), (P, C, H, W)."""
    count, channels, height, width = levels[0].shape
    tile = pyramid.tiles[0]
    delta = levels[0].new_zeros(count, channels, height * tile, width * tile)
    for level, tile, m in zip(levels, pyramid.tiles, pyramid.multipliers, strict=True):
        # Whole rows at once: a row of the level, spread over its columns, is added to `tile` rows of the image.
        delta.unflatten(2, (-1, tile)).add_((m * level).repeat_interleave(tile, -1).unsqueeze(3))
    return delta


def level_gradients(pyramid: Pyramid, gradient: Tensor) -> list[Tensor]:
    """Gradients for the levels, from the gradient for delta (P, C, H, W): m_s times its sum over each tile."""

    def over_tiles(tile: int) -> Tensor:
        # Slice by slice, rows first: on small tiles several times as fast as a sum over dimensions.
        rows = sum((gradient[..., i::tile, :] for i in range(1, tile)), gradient[..., ::tile, :])
        return sum((rows[..., j::tile] for j in range(1, tile)), rows[..., ::tile])

    return [m * over_tiles(s) for s, m in zip(pyramid.tiles, pyramid.multipliers, strict=True)]


def ascend(levels: list[Tensor], gradients: list[Tensor], step: float, radius: float) -> list[Tensor]:
    """project(delta_s + step sign(gradient)) at every level; the projection is to max |delta_s| <= radius."""
    return [
        (level + step * gradient.sign()).clamp(-radius, radius)
        for level, gradient in zip(levels, gradients, strict=True)
    ]


def radius_at(epoch: int, radius: float, *, start: int, end: int | None, final: float) -> float:
    """The radius in an epoch: from `radius` before `start` linearly to `final` times it at `end`, and there it stays.

    >>> [round(radius_at(e, 1.0, start=30, end=300, final=0.1), 3) for e in (0, 30, 165, 300, 310)]
    [1.0, 1.0, 0.55, 0.1, 0.1]
    """
    if end is None:
        return radius
    if end <= start:
        raise InputError(f"objective.decay_end: expected an epoch after decay_start = {start}, got {end}")
    return radius * (1 + (final - 1) * min(1.0, max(epoch - start, 0) / (end - start)))


def check_pyramid(
    model: nn.Module,
    x: Tensor,
    *,
    levels: tuple[int, ...] | None,
    multipliers: tuple[float, ...] | None,
    weight: float,
    clean_weight: float,
    decay_start: int,
    decay_end: int | None,
    **_: object,
) -> None:
    """Refuse, before a run leaves a trace, what its first step would refuse; x holds some inputs (B, C, H, W)."""
    make_pyramid(tuple(x.shape[1:]), levels, multipliers)
    radius_at(0, 1.0, start=decay_start, end=decay_end, final=1.0)
    _check_weights(clean_weight, weight)


def _check_weights(clean_weight: float, weight: float) -> None:
    if clean_weight == weight == 0:
        raise InputError("objective.weight: expected a number > 0 where objective.clean_weight is 0; no loss is left")


def pair_step(
    model: nn.Module, x: Tensor, x_adv: Tensor, y: Tensor, context: Context, *, clean_weight: float, weight: float
) -> tuple[Tensor, Metrics]:
    """Mean of clean_weight l(x) + weight l(x_adv), one pass for each term that has a weight.

    The accuracy in the metrics is the accuracy at x_adv; `clean_accuracy` minus it says how strong the adversary is.
    """
    _check_weights(clean_weight, weight)
    if weight == 0:
        x_adv, clean_weight, weight = x, 0.0, clean_weight

    def combined(views: Views, of: Callable[[Output], Tensor]) -> Terms:
        perturbed = weight * of(views.adv)
        return Terms(perturbed if views.clean is None else clean_weight * of(views.clean) + perturbed)

    def terms(views: Views) -> Terms:
        if views.clean is not None:
            context.notes["clean_accuracy"] = views.clean.logits.argmax(1) == views.y
        return combined(views, lambda out: fit(out.logits, views.target))

    def trace(views: Views, bias: bool) -> Terms:
        return combined(views, lambda out: trace_ce(out, bias=bias))

    return robust_step(model, x, y, context, Family("none", clean_weight > 0, terms, trace), x_adv)
