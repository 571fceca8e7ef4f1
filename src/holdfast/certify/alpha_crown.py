"""CROWN with optimised slopes as a certificate."""

import math

import torch
from torch import Tensor, nn

from holdfast.bounds import alpha, linear
from holdfast.bounds.alpha import ASCENT, Ascent
from holdfast.bounds.graph import trace
from holdfast.bounds.ops import Graph
from holdfast.bounds.region import REGIONS, Region
from holdfast.certify.margins import from_margins, worst_margins
from holdfast.registry import register
from holdfast.results import CertifyResult
from holdfast.threats import Threat


@register(
    "certify",
    "alpha-crown",
    summary="CROWN with lower slopes optimised by gradient ascent, per neuron and per margin",
    guarantee="proof",
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
    sound: bool = True,
    chunk_boxes: int = 64,
) -> CertifyResult:
    """CROWN first; the slopes are then optimised for the inputs that it leaves open.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: any.
        ascent: how to optimise the slopes; `Ascent(joint=True)` also those of the hidden layers.
        sound: account for floating-point rounding.
        chunk_boxes: boxes in memory at a time, for patches.
    """

    def margins(graph: Graph, r: Region, y: Tensor) -> Tensor:
        least = r.x.new_full((len(y),), -torch.inf)
        if ascent.hope < math.inf:
            logits = model(r.x)
            own = logits.gather(1, y[:, None])[:, 0] - logits.scatter(1, y[:, None], -torch.inf).amax(1)
            least = -ascent.hope * own
        return _climb(graph, r, y, ascent, least, sound=sound)

    found = worst_margins(trace(model, x), x, y, threat, margins, sound=sound, chunk=chunk_boxes)
    return from_margins(found, y, "alpha-crown")


@torch.no_grad()
def _climb(graph: Graph, r: Region, y: Tensor, ascent: Ascent, least: Tensor, *, sound: bool) -> Tensor:
    """CROWN's margins (B, K), made better where the smallest of an input is not positive and at least `least` (B,)."""
    relaxed = linear.relaxation(graph, r, slopes="adaptive", hidden=True, sound=sound)
    margins = linear.margin_bounds(relaxed, y)
    smallest = margins.scatter(1, y[:, None], torch.inf).amin(1)
    open_ = ((smallest <= 0) & (smallest >= least)).nonzero()[:, 0]
    if len(open_) == 0:
        return margins
    if ascent.joint:
        better = alpha.margin_bounds(graph, r.select(open_), y[open_], ascent, sound=sound)
    else:
        left = alpha.select(relaxed, open_)
        better = alpha.optimise(left, linear.margin_rows(left, y[open_]), ascent)
        better = better.scatter(1, y[open_][:, None], 0.0)
    margins[open_] = torch.maximum(margins[open_], better)
    return margins
