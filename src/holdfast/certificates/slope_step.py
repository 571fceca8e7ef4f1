"""Linear bounds whose lower slopes are chosen for each input by gradient steps on its certified loss."""

import torch
from torch import Tensor, nn

from holdfast.bounding.core.region import REGIONS, Region
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.slopes import optimised_slopes
from holdfast.certificates.core.margins import certify_margins
from holdfast.random import Noise
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import Threat
from holdfast.utils.options import Count, Positive


def one_step_margins(
    graph: Graph, r: Region, y: Tensor, *, noise: Noise, steps: int, step_size: float, sound: bool
) -> Tensor:
    """Lower bounds of z_y - z_j, (B, K): interval bounds inside, optimised lower slopes for the margins."""
    relaxed = linear.relaxation(graph, r, slopes="adaptive", hidden=False, sound=sound)
    slopes = optimised_slopes(relaxed, y, noise=noise, steps=steps, step_size=step_size)
    return linear.margin_bounds(relaxed, y, slopes)


@Certificate(
    "slope-step",
    summary="intervals for the hidden layers, linear bounds with lower slopes found by a gradient step for each input",
    threats=REGIONS,
    reference="Lee et al., Towards better understanding of training certifiably robust models against adversarial "
    "examples, 2021",
)
def slope_step(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    steps: Count = 1,  # the paper's variant with several takes 7
    step_size: Positive = 2.0,  # at least 1 makes one step decide, the paper's variant with several takes 0.1
    seed: int = 0,  # fixes the starting slopes
    sound: bool = True,
    chunk_boxes: Count = 256,  # boxes in memory at a time, for patches
) -> CertifyResult:
    """The bound that belongs to training with optimised slopes; on networks trained otherwise `crown` is tighter.

    The starting slopes are random, yet belong to the input: they are drawn from its values, so the answer does not
    depend on the batch. Whatever slopes come out, the bound is a proof.
    """

    def margins(graph: Graph, r: Region, y: Tensor, *, sound: bool) -> Tensor:
        noise = Noise(seed, fingerprint(r.x))
        return one_step_margins(graph, r, y, noise=noise, steps=steps, step_size=step_size, sound=sound)

    return certify_margins(model, x, y, threat, "slope-step", margins, sound=sound, chunk=chunk_boxes)


def fingerprint(x: Tensor) -> Tensor:
    """A number for each input that depends only on its values, (B, ...) -> (B,) int64."""
    bits = x.detach().flatten(1).double().contiguous().view(torch.int64)
    weights = Noise(0, torch.zeros(1, dtype=torch.int64, device=x.device)).bits((bits.shape[1],)) | 1
    return (bits * weights).sum(1)
