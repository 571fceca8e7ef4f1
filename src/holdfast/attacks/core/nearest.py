"""How near is a misclassified point? The upper end of the bracket around the robust radius of each input."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks.core.batches import concatenate, noise_for
from holdfast.attacks.core.chance import watched
from holdfast.attacks.core.losses import likely_targets
from holdfast.attacks.core.minimum_norm import (
    BALLS,
    Nearest,
    NearestForm,
    Search,
    by_search,
    check_norm,
    line_search,
    norm_of,
    per_input,
)
from holdfast.attacks.fab import Walk, run_fab
from holdfast.attacks.fmn import run_fmn
from holdfast.checks import check_task
from holdfast.errors import InputError, did_you_mean
from holdfast.registry import get, methods
from holdfast.utils.options import Count, Option, check_options, options_of

__all__ = ["Nearest", "nearest"]

# alpha, in units of the distance, and gamma of the second run of FMN: the best of those tried on small networks.
_POLISH = {
    "linf": ((3.0, 0.03), (0.05, 0.001)),
    "l2": ((0.3, 0.003), (0.02, 0.0005)),
    "l1": ((0.3, 0.003), (0.02, 0.0005)),
}


@by_search
def auto_nearest(
    model: nn.Module, search: Search, *, steps: Count = 40, targets: Count = 4, polish: Count = 60
) -> None:
    """Find the closest misclassified point by a portfolio: FMN, targeted FAB, and FMN again from the best of them.

    FMN finds the right region; FAB, towards the likeliest classes in turn, finds other ones. A second run of FMN starts
    at the closest point of all, with steps in units of its distance, and the segment to x is searched last.

    Args:
        steps: steps of FMN, and half as many of FAB for each target.
        targets: classes that FAB tries.
        polish: steps of the second run.
    """
    if steps < 2:
        raise InputError(f"'auto' needs at least 2 steps, half of them for FAB, got {steps}")
    logits, span = model(search.x), search.high - search.low
    search.note(search.x, logits)
    ranked = likely_targets(logits, search.y, targets)
    if search.start("fmn"):
        run_fmn(model, search, steps=steps, alpha=(span, span / 100), gamma=(0.05, 0.001))
    for rank in range(ranked.shape[1]):
        if search.start("fab-t"):
            classes = ranked[search.row, rank, None]
            run_fab(model, search, search.x, classes, Walk(steps // 2))
    if search.start("fmn", torch.isfinite(search.distance)):
        alpha, gamma = _POLISH[search.norm]
        run_fmn(model, search, steps=polish, alpha=alpha, gamma=gamma, from_closest=True)
    line_search(model, search, steps=6, name="fmn")


def nearest_methods() -> dict[str, NearestForm]:
    """The methods of `nearest` by name: the portfolio "auto", and every registered attack with a nearest form."""
    forms = {entry.name: entry.nearest for entry in methods("attack")}
    return {"auto": auto_nearest} | {name: form for name, form in forms.items() if form is not None}


def get_nearest(method: str) -> NearestForm:
    """The nearest form of that name, or an error that suggests the nearest name."""
    if method == "auto":
        return auto_nearest
    try:
        form = get("attack", method).nearest
    except InputError:
        form = None
    if form is None:
        raise InputError(
            f"unknown method '{method}' for the nearest example. " + did_you_mean(str(method), nearest_methods())
        )
    return form


def nearest_options(method: str) -> dict[str, Option]:
    """The options of a nearest form that a user can give."""
    known = options_of(get_nearest(method))
    return {name: option for name, option in known.items() if name not in ("noise", "goal")}


def nearest(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    norm: str,
    method: str = "auto",
    *,
    low: float = 0.0,
    high: float = 1.0,
    seed: int = 0,
    index: Tensor | None = None,
    chunk: int = 256,
    **options: Any,
) -> Nearest:
    """Find the closest input that the model does not classify as `y`.

    Its distance is an upper bound of the robust radius. Every point is checked before it is returned: it lies in the
    range, the model misclassifies it, and the distance is its own.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs in [low, high], shape (B, ...).  y: labels, shape (B,), int64.
        norm: "linf", "l2" or "l1".
        method: "auto", a portfolio, or an attack with a nearest form, such as "fmn", "fab-t" or "cw".
        low, high: the valid range.
        seed: fixes every random choice.
        index: identity of each input, shape (B,); positions in the batch if none is given.
        chunk: inputs worked on at a time; memory grows with it, the answer does not change.
        **options: options of the method, such as steps=.

    Example:
        >>> model = torch.nn.Linear(3, 2).eval()
        >>> x = torch.rand(4, 3)
        >>> nearest(model, x, model(x).argmax(1), "l2").distance.shape
        torch.Size([4])
    """
    function = get_nearest(method)
    options = check_options(nearest_options(method), options, f"method '{method}'")
    if chunk < 1:
        raise InputError(f"chunk must be at least 1, got {chunk}")
    ball = BALLS[check_norm(norm)](0.0, low=low, high=high)
    if watched(model, x, seed, lambda: check_task(model, x, y, ball))[1]:
        raise InputError(
            "the model draws random numbers: it has no fixed boundary, and no nearest point beyond it. hf.attack with "
            "'cascade' or 'eot-pgd' averages over draws within a budget; model.sample() is one draw of a RandomNetwork"
        )
    noise, x = noise_for(x, seed, index), x.detach()
    parts = []
    for start in range(0, len(x), chunk):
        rows = slice(start, start + chunk)
        part = function(model, x[rows], y[rows], norm, low, high, noise=noise[rows], **options)
        parts.append(_verified(model, x[rows], y[rows], norm, low, high, part))
    return concatenate(parts)


@torch.no_grad()
def _verified(model: nn.Module, x: Tensor, y: Tensor, norm: str, low: float, high: float, found: Nearest) -> Nearest:
    """Keep what is misclassified when evaluated again, and take the distance from the point itself.

    A point within float rounding of the boundary may tip over in another batch: it is moved outwards a little, and
    counts as not found if that does not help.
    """
    x_adv, wrong = x.clone(), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for outwards in (0.0, 1e-4, 1e-3, 1e-2):
        open_ = torch.isfinite(found.distance) & ~wrong
        if not bool(open_.any()):
            break
        moved = (found.x_adv + outwards * (found.x_adv - x)).clamp(low, high)
        wrong_now = open_ & (model(moved).argmax(1) != y)
        x_adv = torch.where(per_input(wrong_now, x), moved, x_adv)
        wrong = wrong | wrong_now
    distance = torch.where(wrong, norm_of(x_adv - x, norm), torch.inf)
    by = tuple(name if kept else "" for name, kept in zip(found.by, wrong.tolist(), strict=True))
    return replace(found, x_adv=x_adv, distance=distance, by=by)
