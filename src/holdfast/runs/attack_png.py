"""Adversarial examples as 8-bit pictures, if they survive the rounding."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from holdfast.attacks.core.chance import is_stochastic, mean_prediction
from holdfast.audits.case import DRAWS
from holdfast.audits.inputs import to_model
from holdfast.runs.attack_files import Found
from holdfast.threats import Threat
from holdfast.utils.files import write_bytes
from holdfast.utils.png import encode_png


@dataclass(frozen=True)
class Pictures:
    """How many examples became pictures, and how many were lost: no longer misclassified, or outside the threat."""

    written: int
    right_again: int
    outside: int


def eight_bit(x: npt.NDArray[np.floating], low: float, high: float) -> npt.NDArray[np.float64]:
    """x rounded to the 256 levels of an 8-bit picture between `low` and `high`, shape of x."""
    levels = np.rint(np.clip((x.astype(np.float64) - low) / (high - low), 0.0, 1.0) * 255)
    return low + (high - low) * (levels / 255)


def contains_rounded(threat: Threat, x_adv: Tensor, x: Tensor) -> Tensor:
    """(B,) bool: is there a point of the set within half a level, (high - low) / 510, of every value of `x_adv`?

    All threats measure |x_adv - x| value by value, so the best such point takes half a level off each change.
    """
    half = (threat.high - threat.low) / 510 * (1 + 1e-6)
    change = x_adv - x
    # A change that rounding alone may explain must vanish exactly: `patch` and `sparse` count every changed pixel.
    nearest = torch.where(change.abs() <= half, x, x_adv - half * change.sign())
    return threat.contains(nearest, x)


@torch.no_grad()
def save_pngs(
    model: nn.Module, x: Tensor, y: Tensor, found: Found, threat: Threat | None, folder: Path, *, batch_size: int
) -> Pictures:
    """Write the examples as `folder`/INDEX.png, and count them. An input that is misclassified unchanged is none.

    A model that draws random numbers judges them by the mean softmax over 100 draws.

    The inputs (N, C, H, W) have C = 1 or 3. Without a threat, the set to lie in, the range is 0 to 1.
    """
    low, high = (0.0, 1.0) if threat is None else (threat.low, threat.high)
    chosen = np.flatnonzero(found.success & (found.by != "clean"))
    written = right_again = outside = 0
    for start in range(0, len(chosen), batch_size):
        rows = chosen[start : start + batch_size]
        pictures = eight_bit(found.x_adv[rows], low, high)
        part, labels = to_model(model, x[rows], y[rows])
        shown = torch.from_numpy(pictures).to(part)
        by_chance = is_stochastic(model, part)
        logits = mean_prediction(model, shown, DRAWS) if by_chance else model(shown)
        fooled = logits.argmax(1) != labels
        inside = torch.ones_like(fooled) if threat is None else contains_rounded(threat, shown, part)
        right_again += int((~fooled).sum())
        outside += int((fooled & ~inside).sum())
        for i in (fooled & inside).nonzero()[:, 0].tolist():
            write_bytes(folder / f"{found.index[rows[i]]:06d}.png", encode_png(pictures[i], low=low, high=high))
            written += 1
    return Pictures(written, right_again, outside)
