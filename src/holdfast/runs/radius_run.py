"""The largest radius that can be proved, for many inputs: rows for a file, and what they say as a whole."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.audits.inputs import to_model
from holdfast.certificates import radius
from holdfast.certificates.core.distance import Norm
from holdfast.certificates.core.radius import radius_method, search_radius
from holdfast.certificates.core.radius_search import RadiusSearch
from holdfast.runs.certify_run import Row
from holdfast.utils.options import options_of
from holdfast.utils.progress import heard_by, progress_bars, told

QUANTILES = {"smallest": 0.0, "lower quarter": 0.25, "median": 0.5, "upper quarter": 0.75, "largest": 1.0}


def radius_run(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    norm: Norm,
    method: str,
    *,
    index: Tensor,
    options: Mapping[str, Any] | None = None,
    batch_size: int = 50,
) -> list[Row]:
    """A row for each input: input, label, radius; of a method that decides both ways also `broken` and `exact`.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode. Batches are moved to its device and dtype.
        index: position of each input in its data, shape (B,).
        options: of `hf.radius` and of the method, such as {"tolerance": 1e-3}.
        batch_size: inputs worked on at a time, for a method that does not sample.
    """
    samples = radius_method(method).guarantee == "probabilistic proof"
    rows: list[Row] = []
    with progress_bars() as bars:
        text = f"radius {norm}"
        bar = bars.add_task(text, total=len(x))
        for part in torch.arange(len(x)).split(len(x) if samples else batch_size):
            task = to_model(model, x[part], y[part])
            with heard_by(told(bars, bar, text)):
                found = search_radius(model, *task, norm, method, **dict(options or {}))
            names = index[part].tolist(), y[part].tolist()
            rows += [
                {"input": at, "label": label, "radius": r} | more
                for at, label, r, more in zip(*names, found.radius.tolist(), _broken(found, options), strict=True)
            ]
            bars.advance(bar, len(part))
    return rows


def _broken(found: RadiusSearch, options: Mapping[str, Any] | None) -> list[Row]:
    """What each row says of counter-examples: nothing for a method that looks for none."""
    if found.broken is None:
        return [{}] * len(found.radius)
    tolerance = float((options or {}).get("tolerance", options_of(radius)["tolerance"].default))
    exact, sizes = found.exact(tolerance).tolist(), found.broken.tolist()
    return [{"broken": size if math.isfinite(size) else None, "exact": e} for size, e in zip(sizes, exact, strict=True)]


def radius_summary(radii: Sequence[float]) -> dict[str, float]:
    """The quantiles of the radii; an input that is not proved, or misclassified, has the radius 0.

    A quantile is the radius of an input, never a value between two of them: of an even number the smaller one.

    >>> radius_summary([0.3, 0.0, 0.1, 0.2])["median"]
    0.1
    """
    ordered = sorted(radii)
    return {name: ordered[int(share * (len(ordered) - 1))] for name, share in QUANTILES.items()}
