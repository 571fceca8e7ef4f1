"""How tight is a relaxation? One fixed model, one set of hidden bounds, several rules for the lines below the ReLUs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.bounding.core.region import region
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import affine
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.relaxation import Relaxation
from holdfast.bounding.linear.slopes import chord_slopes, optimised_slopes, random_slopes
from holdfast.checks import check_task
from holdfast.errors import InputError, UnsupportedError
from holdfast.random import Noise
from holdfast.threats import Patch, Threat
from holdfast.utils.show import Shown

Rule = Callable[[Relaxation, Tensor, Noise], Tensor]
"""From a relaxed network, labels (B,) and noise to lower bounds of z_y - z_j, (B, K)."""


def _intervals(r: Relaxation, y: Tensor, noise: Noise) -> Tensor:
    return affine.interval_margins(r.graph, r, y)


RELAXATIONS: dict[str, Rule] = {
    "ibp": _intervals,
    "crown-ibp": lambda r, y, noise: linear.margin_bounds(r, y),
    "cap-ibp": lambda r, y, noise: linear.margin_bounds(r, y, chord_slopes(r)),
    "random": lambda r, y, noise: linear.margin_bounds(r, y, random_slopes(r, noise=noise)),
    "slope-step": lambda r, y, noise: linear.margin_bounds(r, y, optimised_slopes(r, y, noise=noise)),
}
"""The rules that are compared by default; the hidden bounds are intervals for all of them."""

QUANTILES = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "max": 1.0}


@dataclass(frozen=True, eq=False, repr=False)
class Tightness(Shown):
    """How tight one relaxation is, per input; lower is tighter.

    Attributes:
        total: (B,) sum over the classes of the upper bounds of z_j - z_y.
        loss: (B,) cross-entropy of these bounds, an upper bound of the loss at every input of the threat set.
    """

    total: Tensor
    loss: Tensor


@torch.no_grad()
def tightness(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    relaxations: Mapping[str, Rule] = RELAXATIONS,
    seed: int = 0,
    chunk: int = 256,
) -> dict[str, Tightness]:
    """The bounds of several relaxations on the same model, inputs and hidden bounds.

    (Lee et al., "Towards better understanding of training certifiably robust models against adversarial examples",
    2021.) That one rule is tighter than another is a finding about averages; no rule wins on every input.

    Args:
        threat: any but patches, which are many regions for each input.
        relaxations: rules by name; give your own beside or instead of `RELAXATIONS`.
        seed: fixes the random slopes.
    """
    if isinstance(threat, Patch):
        raise UnsupportedError(f"tightness compares bounds over one region for each input; '{threat}' has many")
    if chunk < 1 or not relaxations:
        raise InputError(f"give at least one relaxation and chunk >= 1, got {len(relaxations)} and chunk={chunk}")
    check_task(model, x, y, threat)
    graph, noise = trace(model, x, threat), Noise.for_batch(seed, len(x), x.device)
    parts = [
        _compare(graph, x[i : i + chunk], y[i : i + chunk], threat, relaxations, noise[i : i + chunk])
        for i in range(0, len(x), chunk)
    ]
    return {
        name: Tightness(torch.cat([p[name].total for p in parts]), torch.cat([p[name].loss for p in parts]))
        for name in relaxations
    }


def _compare(
    graph: Graph, x: Tensor, y: Tensor, threat: Threat, relaxations: Mapping[str, Rule], noise: Noise
) -> dict[str, Tightness]:
    r = linear.relaxation(graph, region(threat, x, sound=False), slopes="adaptive", hidden=False, sound=False)
    found = {}
    for name, rule in relaxations.items():
        upper = -rule(r, y, noise)
        found[name] = Tightness(upper.sum(1), cross_entropy(upper, y, reduction="none"))
    return found


def tightness_table(results: Mapping[str, Tightness]) -> list[dict[str, str | float]]:
    """One row for each relaxation and measure ("total", "loss"): mean, standard deviation and quantiles over inputs."""
    rows: list[dict[str, str | float]] = []
    for name, result in results.items():
        for measure, values in (("total", result.total), ("loss", result.loss)):
            v = values.double()
            row: dict[str, str | float] = {"relaxation": name, "measure": measure, "mean": float(v.mean())}
            row["std"] = float(v.std(correction=0))
            row |= {key: float(v.quantile(q)) for key, q in QUANTILES.items()}
            rows.append(row)
    return rows
