"""Shapley values, exactly: every subset of the features is tried. For a few features, and as a measure for the rest."""

import itertools
import math

import torch
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.explanations.core.answers import describe, finite
from holdfast.explanations.core.baselines import Baseline, make_baseline, name_of
from holdfast.explanations.core.cells import cells
from holdfast.explanations.core.paths import completeness_error
from holdfast.explanations.core.quantity import Setting, pieces, values_at
from holdfast.registry import Explainer
from holdfast.results import Explanation
from holdfast.utils.options import Count


@Explainer(
    "shapley",
    summary="mean effect of each feature over all orders, exactly, for a dozen features; without gradients",
    reference="Shapley, A value for n-person games, 1953",
)
def shapley(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    setting: Setting,
    *,
    cell: Count | None = None,
    most: Count = 12,
    baseline: Baseline | Tensor = "black",
) -> Explanation:
    """A(x)_j = sum over subsets S without j of |S|! (d - |S| - 1)! / d! (v(S + j) - v(S)), shape of x.

    v(S) is f_y where the features of S are as in x and the others as in the baseline. The values add up to f_y(x) -
    f_y(b). 2^d passes for each input; `shapley-sampling` has no limit on d.

    Args:
        cell: images: pixels of a square of this side, over all channels, are one feature and share its value equally.
            The smallest with no more than `most` features if none is given.
        most: largest number d of features.
        baseline: as for `integrated-gradients`.
    """
    b, mask = make_baseline(baseline, x, setting), _features(x, cell, most)
    d = int(mask.max()) + 1
    subsets = torch.tensor(list(itertools.product((False, True), repeat=d)), device=x.device)  # (2^d, d)
    values = x.new_zeros(len(x), len(subsets))
    for part, rows in pieces(len(x), len(subsets), setting.chunk):
        kept = subsets[rows][:, mask[0]]  # (some, ...)
        points = torch.where(kept, x[part, None], b[part, None])
        found = values_at(model, points.flatten(0, 1), y[part].repeat_interleave(len(kept)), setting)
        values[part, rows] = found.view(-1, len(kept))
    size = torch.bincount(mask.flatten())
    share = (values.double() @ _weights(subsets)).to(x.dtype) / size
    attribution = share[:, mask[0]]
    error = completeness_error(attribution.flatten(1).sum(1), values[:, -1], values[:, 0])
    by = describe(y, setting, f"all subsets of {d} features from {name_of(baseline)}")
    return Explanation(attribution, finite(attribution), error, torch.full_like(y, len(subsets)), by)


def _weights(subsets: Tensor) -> Tensor:
    """How much v(S) counts for feature j, (2^d, d): as S with j in it, and minus as S without."""
    d = subsets.shape[1]
    orders = [math.factorial(k) * math.factorial(d - k - 1) / math.factorial(d) for k in range(d)]
    table = torch.tensor([0.0, *orders, 0.0], dtype=torch.float64, device=subsets.device)
    size = subsets.sum(1)
    return torch.where(subsets, table[size][:, None], -table[size + 1][:, None])


def _features(x: Tensor, cell: int | None, most: int) -> Tensor:
    """Number of the feature of each value, shape of x[:1]."""
    sides = range(1, max(x.shape[2:]) + 1) if cell is None and x.ndim == 4 else (cell or 1,)
    for side in sides:
        mask = cells(x, side)
        if int(mask.max()) < most:
            return mask
    raise InputError(
        f"{int(mask.max()) + 1} features have too many subsets (most = {most}); use 'shapley-sampling', or a larger "
        "cell= for images"
    )
