"""CROWN with optimised slopes as a certificate."""

import math
from contextlib import suppress

import torch
from torch import Tensor, nn

from holdfast.bounding.core.region import REGIONS, Region
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.linear import alpha
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.alpha import ASCENT, Ascent
from holdfast.bounding.linear.coefficients import Coefficients
from holdfast.certificates.core.margins import certify_margins, in_float64
from holdfast.errors import OutOfTime
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import Threat
from holdfast.utils.options import Count


@Certificate(
    "alpha-crown",
    summary="CROWN with lower slopes optimised by gradient ascent, per neuron and per margin",
    threats=REGIONS,
    reference="Xu et al., Fast and complete: enabling complete verification with massively parallel incomplete "
    "verifiers, 2021",
)
def alpha_crown(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    ascent: Ascent = ASCENT,
    verdict: bool = True,
    sound: bool = True,
    chunk_boxes: Count = 64,
) -> CertifyResult:
    """CROWN first; the slopes are then optimised for the inputs that it leaves open.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: any.
        ascent: how to optimise the slopes; `Ascent(joint=True)` includes the slopes of the hidden layers.
        verdict: False also climbs where CROWN proves the input already: for a larger margin.
        sound: account for floating-point rounding.
        chunk_boxes: boxes in memory at a time, for patches.
    """

    def margins(graph: Graph, r: Region, y: Tensor, *, sound: bool) -> Tensor:
        least = r.x.new_full((len(y),), -torch.inf)
        if ascent.hope < math.inf:
            logits = model(r.x)
            own = logits.gather(1, y[:, None])[:, 0] - logits.scatter(1, y[:, None], -torch.inf).amax(1)
            least = -ascent.hope * own
        enough = 0.0 if verdict else math.inf
        return _climb(graph, r, y, ascent, (least, enough), sound=sound)

    return certify_margins(model, x, y, threat, "alpha-crown", margins, sound=sound, chunk=chunk_boxes)


@torch.no_grad()
def _climb(graph: Graph, r: Region, y: Tensor, ascent: Ascent, between: tuple[Tensor, float], *, sound: bool) -> Tensor:
    """CROWN's margins (B, K), made better where the smallest of an input lies between `least` (B,) and `enough`."""
    least, enough = between
    relaxed = linear.relaxation(graph, r, slopes="adaptive", hidden=True, sound=sound)
    margins = linear.margin_bounds(relaxed, y)
    if sound and r.x.dtype != torch.float64:
        with suppress(OutOfTime):
            margins = torch.fmax(margins, in_float64(relaxed, y, slopes="adaptive", hidden=False))
    rivals = margins.scatter(1, y[:, None], torch.inf)
    smallest = rivals.amin(1)
    open_ = ((smallest <= enough) & (smallest >= least)).nonzero()[:, 0]
    if len(open_) == 0:
        return margins
    with suppress(OutOfTime):  # what CROWN proved stands
        _improve(graph, r, y, ascent, relaxed, margins, open_, enough, sound=sound)
    return margins


def _improve(
    graph: Graph,
    r: Region,
    y: Tensor,
    ascent: Ascent,
    relaxed: linear.Relaxation,
    margins: Tensor,
    open_: Tensor,
    enough: float,
    *,
    sound: bool,
) -> None:
    """Raise the margins (B, K) of the inputs `open_` by better slopes, where they are not above `enough`."""
    if ascent.joint:
        better = alpha.margin_bounds(graph, r.select(open_), y[open_], ascent, sound=sound)
        margins[open_] = torch.maximum(margins[open_], better)
        return
    # Every row has slopes of its own, so the rows of classes that are ruled out can be left out: each input has as
    # many rows as the input with the most open classes.
    left, whole = alpha.select(relaxed, open_), margins[open_]
    not_yet = whole.scatter(1, y[open_][:, None], torch.inf) <= enough
    rows = not_yet.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, : int(not_yet.sum(1).max())]
    start = linear.margin_rows(left, y[open_]).values
    start = start.gather(1, rows[..., None].expand(*rows.shape, start.shape[2]))
    better = alpha.optimise(left, Coefficients(start), ascent)
    whole = whole.scatter(1, rows, torch.maximum(whole.gather(1, rows), better))
    margins[open_] = whole.scatter(1, y[open_][:, None], 0.0)
