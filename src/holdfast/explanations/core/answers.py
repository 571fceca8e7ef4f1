"""How a method puts its answer together: what was explained, in words, and which inputs have a usable answer."""

import math

import torch
from torch import Tensor, nn

from holdfast.attacks.core.minimum_norm import Nearest
from holdfast.explanations.core.quantity import Setting
from holdfast.results import Explanation
from holdfast.utils.reference import is_reference


def describe(y: Tensor, setting: Setting, how: str) -> tuple[str, ...]:
    """Say for each input what was explained, and how."""
    labels = y.tolist()
    texts = {label: f"{setting.quantity} of class {label}: {how}" for label in set(labels)}
    return tuple(texts[label] for label in labels)


def finite(attribution: Tensor) -> Tensor:
    """(B,) bool: the inputs for which every value of the attribution (B, ...) is finite."""
    return torch.isfinite(attribution).flatten(1).all(1)


def without_error(
    attribution: Tensor, values: Tensor, slope: Tensor | None, by: tuple[str, ...], gradients: int
) -> Explanation:
    """The answer of a method that promises no completeness; `ok` where the model's `values` (B,) are finite."""
    # Quick: NaN and infinity stay in a sum. A gradient holds none of them, see `input_gradient`.
    total = values.sum() if attribution is slope else values.sum() + attribution.sum()
    if math.isfinite(total.item()) and not is_reference():
        ok = torch.ones_like(values, dtype=torch.bool)
    else:
        ok = finite(attribution) & torch.isfinite(values)
    error = torch.full_like(values, torch.nan, dtype=attribution.dtype)
    return Explanation(attribution, ok, error, torch.full_like(ok, gradients, dtype=torch.int64), by, slope)


@torch.no_grad()
def rivals_at(model: nn.Module, points: Tensor, own: Tensor, chunk: int) -> Tensor:
    """The best class at each point besides `own` (B,). On a boundary two classes tie, and rounding decides who wins."""
    logits = torch.cat([model(part) for part in points.split(chunk)])
    return logits.scatter(1, own[:, None], -torch.inf).argmax(1)


def describe_boundary(
    model: nn.Module, y: Tensor, label: Tensor, found: Nearest, setting: Setting, otherwise: str
) -> tuple[str, ...]:
    """What is explained, and against which class; the way out where no boundary was found."""
    rivals = rivals_at(model, found.x_adv, label, setting.chunk).tolist()
    lines = []
    for asked, own, rival, name in zip(y.tolist(), label.tolist(), rivals, found.by, strict=True):
        what = f"{setting.quantity} of class {own}"
        if own != asked:
            what += f", which the model predicts, not of {asked}"
        lines.append(f"{what}: boundary to class {rival}, found by {name}" if name else f"{what}: {otherwise}")
    return tuple(lines)
