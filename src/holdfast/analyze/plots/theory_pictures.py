"""Pictures of the theory of adversarial training: the kink of the loss, and version spaces that shrink."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from holdfast.analyze.plots.charts import path_svg
from holdfast.analyze.theory.scattered_gradients import sketch
from holdfast.analyze.theory.version_space import in_version_space, zero_is_best
from holdfast.errors import InputError
from holdfast.utils.svg import figure, text

Array = npt.NDArray[np.float64]
Holds = Callable[[Array, Array, int, float], bool]
SIDE, CELLS = 240, 60
SHADES = ("#ffffff", "#cfe3f2", "#8fbfe0", "#3f8fc8", "#0b5c94")


def sketch_svg(budgets: Sequence[float] = (0.0, 0.6, 1.2)) -> str:
    """The adversarial loss log(1 + exp(theta + eps |theta|)) over theta in [-2, 2], one line for each budget."""
    theta = np.linspace(-2, 2, 201)
    lines = {f"eps = {eps:g}": sketch(theta, eps).tolist() for eps in budgets}
    return path_svg(lines, theta.tolist(), title="The loss of one weight under attack", y_label="loss")


def version_space_svg(x: Array, budgets: Sequence[float] = (0.0, 0.2, 0.4, 0.6)) -> str:
    """Weights w_1 - w_0 in [-1, 1]^2 of a two-class model: right under which budgets, and stuck at 0 under which.

    Args:
        x: an input of class 0, shape (2,).
        budgets: at most four, increasing; a darker shade holds for more of them.
    """
    if x.shape != (2,) or not 0 < len(budgets) < len(SHADES):
        raise InputError(f"the picture needs an input with two values and at most four budgets, got {x.shape}")
    parts = []
    for panel, (name, holds) in enumerate(
        (("classify x under attack", in_version_space), ("stuck at 0", zero_is_best))
    ):
        left = 20 + panel * (SIDE + 40)
        parts.append(text(left + SIDE / 2, 22, name, anchor="middle"))
        parts += [
            cell
            for i in range(CELLS)
            for cell in _column(left, i, [_count(holds, x, i, j, budgets) for j in range(CELLS)])
        ]
    shown = ", ".join(f"{eps:g}" for eps in budgets)
    parts.append(text(20, 50 + SIDE, f"darker: for more of the budgets {shown}"))
    return figure(parts, 2 * SIDE + 80, SIDE + 65, title="Version spaces shrink, and more weights are stuck at zero")


def _count(holds: Holds, x: Array, i: int, j: int, budgets: Sequence[float]) -> int:
    """For how many budgets the weights in the middle of a cell are in the set."""
    w = np.array([2 * (i + 0.5) / CELLS - 1, 1 - 2 * (j + 0.5) / CELLS])
    return sum(holds(np.stack([0 * w, w]), x, 0, eps) for eps in budgets)


def _column(left: float, i: int, counts: Sequence[int]) -> list[str]:
    """One rectangle for each run of cells with the same shade, white ones left out."""
    side, start, found = SIDE / CELLS, 0, []
    for j in range(1, CELLS + 1):
        if j == CELLS or counts[j] != counts[start]:
            place = f'x="{left + i * side:g}" y="{30 + start * side:g}" width="{side:g}"'
            if counts[start]:
                found.append(f'<rect {place} height="{(j - start) * side:g}" fill="{SHADES[counts[start]]}"/>')
            start = j
    return found
