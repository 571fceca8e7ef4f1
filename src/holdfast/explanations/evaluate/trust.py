"""Can an explanation be trusted? Measures that need the model and the attribution, and nothing that a person says."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import frozen
from holdfast.attacks.core.minimum_norm import per_input
from holdfast.errors import InputError, did_you_mean
from holdfast.explanations import explain
from holdfast.explanations.core.baselines import Baseline, make_baseline
from holdfast.explanations.core.paths import completeness_error
from holdfast.explanations.core.quantity import Quantity, Setting, check_quantity, values_at
from holdfast.random import Noise
from holdfast.threats import norm_2
from holdfast.utils.show import Shown

Moves = Literal["noise", "path", "end"]
MOVES: tuple[Moves, ...] = get_args(Moves)


def setting_for(x: Tensor, quantity: Quantity = "logit", *, seed: int = 0, chunk: int = 256) -> Setting:
    """What the front door would tell a method, for the range [0, 1]."""
    check_quantity(quantity)
    return Setting(quantity, 0.0, 1.0, Noise.for_batch(seed, len(x), x.device), chunk)


def completeness(
    model: nn.Module, x: Tensor, b: Tensor, y: Tensor, attribution: Tensor, *, quantity: Quantity = "logit"
) -> Tensor:
    """|sum A - (f_y(x) - f_y(b))| / |f_y(x) - f_y(b)|, (B,): what of the change of the answer is not accounted for.

    Args:
        x, b: inputs and baselines, (B, ...) each.  y: classes, (B,).
        attribution: shape of x.
    """
    setting = setting_for(x, quantity)
    total = attribution.flatten(1).sum(1)
    return completeness_error(total, values_at(model, x, y, setting), values_at(model, b, y, setting))


def infd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    slope: Tensor,
    *,
    moves: Moves = "noise",
    towards: Tensor | None = None,
    sigma: float = 0.1,
    samples: int = 50,
    quantity: Quantity = "logit",
    seed: int = 0,
    chunk: int = 256,
) -> Tensor:
    """E over moves e of (slope . e - (f_y(x + e) - f_y(x)))^2, (B,): does the slope foretell the answer?

    Lower is better. Yeh et al., "On the (in)fidelity and sensitivity of explanations", 2019. For path
    methods the slope is the average gradient, `Explanation.slope`, not the attribution.

    Args:
        slope: shape of x.
        moves: "noise": N(0, sigma^2 I). "path": uniform on the segment from x to `towards`. "end": the one move from x
            to `towards`, such as the boundary; the average gradient between the two then scores zero.
        towards: shape of x; for "path" and "end".
        sigma: standard deviation of the noise.
        samples: moves for each input.
    """
    if moves not in MOVES:
        raise InputError(f"unknown moves '{moves}'. " + did_you_mean(str(moves), MOVES))
    if (towards is None) != (moves == "noise"):
        raise InputError("towards= goes with moves='path' and moves='end', which need it")
    setting = setting_for(x, quantity, seed=seed, chunk=chunk)
    with frozen(model):
        at_x, total, count = values_at(model, x, y, setting), x.new_zeros(len(x)), 1 if moves == "end" else samples
        for k in range(count):
            noise = setting.noise.fork(k)
            if towards is None:
                e = sigma * noise.normal(x.shape[1:], x.dtype)
            else:
                e = (towards - x) * (1 if moves == "end" else per_input(noise.uniform((), x.dtype), x))
            change = values_at(model, x + e, y, setting) - at_x
            total += ((slope * e).flatten(1).sum(1) - change).square()
    return total / count


def sensitivity(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    method: str = "saliency",
    *,
    radius: float = 0.02,
    samples: int = 10,
    seed: int = 0,
    **options: Any,
) -> Tensor:
    """max over draws x' of |A(x') - A(x)|_2 / |A(x)|_2, (B,); x' uniform in the cube of half-width `radius` around x.

    Yeh et al., "On the (in)fidelity and sensitivity of explanations", 2019. A lower bound of the true maximum; for the
    worst case that an attack finds see `stability.explanation_attack`.

    Args:
        method: a method of `hf.explain`; `options` go to it.
    """
    first = explain(model, x, y, method, seed=seed, **options).attribution
    worst, noise = x.new_zeros(len(x)), Noise.for_batch(seed, len(x), x.device)
    for k in range(samples):
        near = (x + radius * (2 * noise.fork(k).uniform(x.shape[1:], x.dtype) - 1)).clamp(0, 1)
        second = explain(model, near, y, method, seed=seed, **options).attribution
        worst = torch.maximum(worst, norm_2(second - first))
    return worst / norm_2(first).clamp(min=torch.finfo(x.dtype).tiny)


@dataclass(frozen=True, eq=False, repr=False)
class Curve(Shown):
    """How the answer goes as features are taken away, or put in, the most important ones first.

    Attributes:
        share: (S + 1,) share of the features that were replaced.
        values: (S + 1, B) the answer.
        area: (B,) under the curve. Deletion: low is good. Insertion: high is good.
    """

    share: Tensor
    values: Tensor
    area: Tensor


def deletion(model: nn.Module, x: Tensor, y: Tensor, attribution: Tensor, **options: Any) -> Curve:
    """Take features away, the highest attribution first; see `_curve` for the options `steps`, `baseline`, `quantity`.

    Petsiuk, Das and Saenko, "RISE: randomized input sampling for explanation of black-box models", 2018. Pixels are
    ranked by the sum of their channels.
    """
    return _curve(model, x, y, attribution, insert=False, **{"baseline": "black", **options})


def insertion(model: nn.Module, x: Tensor, y: Tensor, attribution: Tensor, **options: Any) -> Curve:
    """Put features in, the highest attribution first; options as for `deletion`, but the baseline is "blurred"."""
    return _curve(
        model, x, y, attribution, insert=True, **{"baseline": "blurred" if x.ndim == 4 else "black", **options}
    )


def _curve(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attribution: Tensor,
    *,
    insert: bool,
    baseline: Baseline | Tensor,
    steps: int = 20,
    quantity: Quantity = "probability",
    seed: int = 0,
) -> Curve:
    if steps < 1:
        raise InputError(f"a curve needs steps >= 1, got {steps}")
    setting = setting_for(x, quantity, seed=seed)
    b, scores = make_baseline(baseline, x, setting), score_per_pixel(attribution).flatten(1)
    rank = scores.argsort(dim=1, descending=True, stable=True).argsort(1)
    with frozen(model):
        points = _replaced(x, b, rank, steps, insert=insert)
        values = torch.stack([values_at(model, point, y, setting) for point in points])
    share = torch.linspace(0, 1, steps + 1, device=x.device, dtype=x.dtype)
    return Curve(share, values, torch.trapezoid(values, share, dim=0))


def _replaced(x: Tensor, b: Tensor, rank: Tensor, steps: int, *, insert: bool) -> Iterator[Tensor]:
    """x with ever more of its features at the baseline, or the baseline with ever more of the features of x."""
    shape = (len(x), 1, *x.shape[2:]) if x.ndim == 4 else x.shape
    for k in range(steps + 1):
        first = (rank < math.ceil(k * rank.shape[1] / steps)).view(shape)
        yield torch.where(first, x, b) if insert else torch.where(first, b, x)


def score_per_pixel(attribution: Tensor) -> Tensor:
    """Sum over the channels of images, (B, C, H, W) -> (B, H, W); other attributions as they are."""
    return attribution.sum(1) if attribution.ndim == 4 else attribution


TRUST = ("completeness", "infidelity", "sensitivity", "deletion", "insertion")


def trust_scores(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    method: str = "saliency",
    *,
    sigma: float = 0.1,
    radius: float = 0.02,
    samples: int = 10,
    seed: int = 0,
    index: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """All measures of one method by name (`TRUST`), (B,) each; NaN where the method has no baseline or no slope.

    Lower is better, but for insertion. Scores of one measure can be compared between methods, not between measures.

    Args:
        method: a method of `hf.explain`; `options` go to it.
        sigma: noise of `infd`.  radius: of `sensitivity`.  samples: draws of both.
        seed: fixes every random choice.
        index: identity of each input, shape (B,); see `hf.explain`.
    """
    found = explain(model, x, y, method, seed=seed, index=index, **options)
    nothing = torch.full_like(found.error, math.nan)
    slope, how = found.slope, dict[str, Any](samples=samples, seed=seed)
    return {
        "completeness": found.error,
        "infidelity": nothing if slope is None else infd(model, x, y, slope, sigma=sigma, **how),
        "sensitivity": sensitivity(model, x, y, method, radius=radius, **how, **options),
        "deletion": deletion(model, x, y, found.attribution, seed=seed).area,
        "insertion": insertion(model, x, y, found.attribution, seed=seed).area,
    }
