"""Lipschitz constants of the model on a batch, by power iteration that goes on from batch to batch."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.bounding.graph import ops
from holdfast.bounding.graph.trace import trace_batch
from holdfast.bounding.lipschitz.constants import LipschitzBound, lipschitz_estimate
from holdfast.certificates.core.lipschitz_margins import single_constant
from holdfast.certificates.models.gloro import WARM_UP
from holdfast.errors import UnsupportedError
from holdfast.training.context import Context
from holdfast.training.objectives.core.certified import margin_metrics

Precision = Literal["float32", "bfloat16"]
VECTORS, RIVAL = "lipschitz ", "rival"
"""In the state of a run: prefix of the vectors of power iteration, and the runner-up class of each example."""


def estimated(
    model: nn.Module, x: Tensor, context: Context, steps: int, *, single: bool = False, precision: Precision = "float32"
) -> tuple[LipschitzBound, Tensor]:
    """Lipschitz constants of the model as it is on this batch, and its logits (B, K); vectors in `context.state`.

    `precision` is the type of the layers' products; norms, weights and the inputs of the loss keep their own.
    """
    with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        graph, logits = trace_batch(model, x)
    for node in graph.nodes:
        if isinstance(node.op, ops.Linear | ops.Conv) and node.op.weight.dtype != x.dtype:
            raise UnsupportedError(
                f"layer '{node.name}' computes its weights by products, which {node.op.weight.dtype} would blur: train "
                'it with precision = "float32"'
            )
    vectors = {key.removeprefix(VECTORS): v for key, v in context.state.items() if key.startswith(VECTORS)}
    graph = single_constant(graph) if single else graph
    bound, vectors = lipschitz_estimate(graph, vectors, steps=steps if vectors else max(steps, WARM_UP))
    context.state.update({VECTORS + key: v for key, v in vectors.items()})
    return bound, logits.to(x.dtype)


def margin_loss(logits: Tensor, y: Tensor, pairs: Tensor, eps: float) -> Tensor:
    """The full budget for every class; arguments as for `emma_loss`."""
    return cross_entropy(logits + eps * pairs[y], y, reduction="none")


@torch.no_grad()
def metrics(logits: Tensor, y: Tensor, bound: LipschitzBound, context: Context) -> dict[str, Tensor]:
    """Also "lipschitz", the largest K_yi, and "churn": how many examples have another runner-up than an epoch ago."""
    margins = logits.gather(1, y[:, None]) - logits - context.threat.budget * bound.pairs[y]
    if RIVAL not in context.state:
        context.state[RIVAL] = y.new_full((context.count,), -1)
    rivals = context.state[RIVAL]
    before, now = rivals[context.index], logits.topk(2).indices[:, 1]
    rivals[context.index] = now
    return {
        **margin_metrics(logits, margins, y),
        "lipschitz": bound.pairs.max(),
        "churn": ((before >= 0) & (before != now)).to(logits.dtype).mean(),
    }
