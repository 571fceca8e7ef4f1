"""A classifier that answers only where it can prove its answer."""

import torch
from torch import Tensor, nn

from holdfast.bounding.graph.trace import trace_batch
from holdfast.bounding.lipschitz.constants import lipschitz_estimate
from holdfast.certificates.core.lipschitz_margins import certify_logits, lipschitz_constants, second_look
from holdfast.checks import check_precision
from holdfast.errors import InputError
from holdfast.threats import L2
from holdfast.utils.options import Count, check_options, options_of

WARM_UP = 100
"""Steps of the first power iteration, which starts from random vectors."""


class GloRo(nn.Module):
    """The logits of a model and one more, for "not certified"; with j the class that the model predicts,

    z_bottom = max over i != j of z_i + eps K_ji.

    Class K wins if and only if the prediction is not certified (Leino, Wang and Fredrikson, "Globally robust neural
    networks", 2021). In eval mode the constants are proven, rounding is accounted for, and a tie goes to class K. In
    training mode they are estimates with gradients, from a few steps of power iteration that go on where the last batch
    stopped. Two inputs that are certified with different classes are more than 2 eps apart.

    Args:
        model: from (B, ...) to logits (B, K).
        threat: an l2 ball.
        steps: steps of power iteration for each batch, in training mode.

    Example:
        >>> model = GloRo(nn.Linear(2, 2), L2(100.0)).eval()
        >>> model(torch.rand(3, 2)).argmax(1).tolist()
        [2, 2, 2]
    """

    def __init__(self, model: nn.Module, threat: L2, *, steps: Count = 5) -> None:
        super().__init__()
        if not isinstance(threat, L2):
            raise InputError(f"GloRo needs an l2 threat, such as hf.L2(0.5), got '{threat}'")
        check_options(options_of(GloRo.__init__), {"steps": steps}, "GloRo")
        self.model, self.threat, self.steps = model, threat, steps
        self._vectors: dict[str, Tensor] = {}

    def extra_repr(self) -> str:
        return f"threat='{self.threat}'"

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, K + 1)."""
        if not self.training:
            return self._proved(x)
        graph, logits = trace_batch(self.model, x)
        steps = self.steps if self._vectors else max(self.steps, WARM_UP)
        bound, self._vectors = lipschitz_estimate(graph, self._vectors, steps=steps)
        return torch.cat([logits, bottom(logits, bound.pairs, self.threat.eps)], 1)

    def _proved(self, x: Tensor) -> Tensor:
        check_precision(x)
        logits: Tensor = self.model(x)
        if logits.shape[0] == 0:
            return torch.cat([logits, logits[:, :1]], 1)
        top, predicted = logits.max(1)
        constants = lipschitz_constants(self.model, x, self.threat)
        result = certify_logits(logits, x, predicted, self.threat, constants, "gloro", sound=True)
        result = second_look(result, logits, x, predicted, self.threat, constants, "gloro")
        # z_j minus the margin is rounded: keep it on the side of z_j on which it is.
        below, above = (torch.nextafter(top, torch.full_like(top, end)) for end in (-torch.inf, torch.inf))
        level = top - result.margin
        level = torch.where(result.certified, torch.minimum(level, below), torch.maximum(level, above))
        return torch.cat([logits, level[:, None]], 1)


def bottom(logits: Tensor, pairs: Tensor, eps: float) -> Tensor:
    """max over i != j of z_i + eps K_ji with j the predicted class, (B, 1), from logits (B, K) and constants (K, K)."""
    predicted = logits.argmax(1, keepdim=True)
    raised = logits + eps * pairs[predicted[:, 0]]
    return raised.scatter(1, predicted, -torch.inf).amax(1, keepdim=True)
