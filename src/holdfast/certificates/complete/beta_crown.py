"""beta-CROWN: branch and bound on the signs of hidden neurons, which decides what linear bounds leave open."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS, ascend
from holdfast.attacks.core.losses import get_loss
from holdfast.attacks.pgd import pgd
from holdfast.bounding.core.evaluation import doubled
from holdfast.bounding.core.region import REGIONS, region
from holdfast.bounding.core.rounding import below
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import alpha
from holdfast.certificates.complete.branch_and_bound import Effort
from holdfast.certificates.complete.pieces import in_pieces
from holdfast.certificates.complete.root import Network, begin, tighten_and_split
from holdfast.certificates.core.exact_radius import decided_radius
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import Box, Threat
from holdfast.utils import clock
from holdfast.utils.options import Count, Positive

Status = Literal["certified", "broken", "unknown"]
GROUP = 8
"""Inputs that are searched together: enough to fill a batch while each has few sub-problems."""


@dataclass(frozen=True, eq=False)
class Decision:
    """What the search found out about each input.

    Attributes:
        status: "certified" (the margin stays positive), "broken" (`x_adv` is misclassified) or "unknown".
        margin: (B,) float64, proved lower bound of the smallest margin of the model as it is run.
        x_adv: a misclassified input of the threat set where "broken", else x; shape of x.
        parts: (B,) int64, sub-problems that were bounded.
        seconds: (B,) float64, time spent.
    """

    status: tuple[Status, ...]
    margin: Tensor
    x_adv: Tensor
    parts: Tensor
    seconds: Tensor


@Certificate(
    "beta-crown",
    summary="branch and bound on hidden neurons with optimised slopes and multipliers: decides what CROWN leaves open",
    threats=tuple(name for name in REGIONS if name != "patch"),
    reference="Wang et al., Beta-CROWN: efficient bound propagation with per-neuron split constraints for neural "
    "network robustness verification, 2021",
    radius=decided_radius,
    complete=True,
)
def beta_crown(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, time_limit: Positive = 60.0, width: Count = 32
) -> CertifyResult:
    """Certified if branch and bound proves that the smallest margin over the threat set is positive.

    Prefer it where CROWN and an attack leave an input open. CROWN and a short attack come first. ReLU and leaky ReLU
    are split by their sign, S-shaped activations by their range, max pooling, MinMax and clippings as the ReLUs that
    they consist of; max pooling with padding is bounded but not split, so that the search may end without a verdict. An
    input that is not decided in time is not certified; its margin is the best lower bound so far.

    Args:
        model: from (B, ...) to logits (B, K).  x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: any but patches.
        time_limit: seconds for each input, over all of its classes.
        width: sub-problems of each class that are split at a time.
    """
    found = decide(model, x, y, threat, time_limit=time_limit, width=width)
    margin = below(found.margin, x.dtype).to(x)
    certified = torch.tensor([s == "certified" for s in found.status], device=x.device) & (margin > 0)
    by = tuple("" if status == "unknown" else "beta-crown" for status in found.status)
    return CertifyResult(certified, margin, by=by, x_adv=found.x_adv)


@torch.no_grad()
def decide(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, time_limit: float = 60.0, width: int = 32
) -> Decision:
    """The verdict on each input, with counter-examples; arguments as for `beta_crown`."""
    graph = in_pieces(trace(model, x, threat), maxima=False)
    double = doubled(graph)
    classes = torch.arange(double.nodes[-1].shape[0], device=x.device)[:, None]
    network = Network(graph, double, classes)
    groups = torch.arange(len(x), device=x.device).split(GROUP)
    parts = []
    for i in groups:  # a deadline that is set around the call holds for all inputs together
        if clock.over():
            parts.append(_nothing(x[i]))
        else:
            limit = min(time_limit, clock.left() / len(i))
            parts.append(_group(network, model, x[i], y[i], threat.select(i), limit, width))
    return Decision(
        tuple(status for one in parts for status in one.status),
        *(torch.cat([getattr(one, name) for one in parts]) for name in ("margin", "x_adv", "parts", "seconds")),
    )


class _Attack:
    """Tests points for counter-examples, and follows the gradient from the worst of each input."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat) -> None:
        self.model, self.x, self.y, self.threat = model, x, y, threat
        self.x_adv = x.clone()
        self.climbs = threat.name in BALLS and not (isinstance(threat, Box) and threat.batched)

    def first(self, index: Tensor) -> Tensor:
        """A short attack on the inputs `index`: (len(index),) bool, which are broken."""
        if not self.climbs or len(index) == 0:
            return torch.zeros(len(index), dtype=torch.bool, device=index.device)
        found = pgd(self.model, self.x[index], self.y[index], self.threat, steps=20, loss="margin")
        self.x_adv[index[found.success]] = found.x_adv[found.success]
        return found.success

    def visit(self, inputs: Tensor, points: Tensor) -> Tensor:
        """(inputs (N,), points (N, *shape)) -> (N,) bool: is one of the points of the input a counter-example?"""
        x, y, threat = self.x[inputs], self.y[inputs], self.threat.select(inputs)
        points = threat.project(points.to(x), x)
        logits = self.model(points)
        margin = logits.gather(1, y[:, None])[:, 0] - logits.scatter(1, y[:, None], -torch.inf).amax(1)
        order = margin.argsort(descending=True)
        worst = inputs.new_full((len(self.x),), -1)
        worst[inputs[order]] = order  # the last one written is the smallest
        worst = worst[worst >= 0]
        self._note(inputs[worst], points[worst], threat.select(worst))
        if self.climbs:
            at = inputs[worst]
            task = (self.model, self.x[at], self.y[at], self.threat, points[worst])
            size, loss = 0.5 * self.threat.budget, get_loss("margin")
            found = ascend(*task, steps=5, step_size=size, loss=loss, sparsity=0.01, name="pgd")
            self._note(at, found.x_adv, self.threat)
        return self.broken()[inputs]

    def _note(self, index: Tensor, points: Tensor, threat: Threat) -> None:
        wrong = (self.model(points).argmax(1) != self.y[index]) & threat.contains(points, self.x[index])
        self.x_adv[index[wrong]] = points[wrong]

    def broken(self) -> Tensor:
        """(B,) bool: inputs with a counter-example, as the model itself says."""
        wrong: Tensor = self.model(self.x_adv).argmax(1) != self.y
        return wrong


def _group(
    network: Network, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, time_limit: float, width: int
) -> Decision:
    """The pipeline for a few inputs: CROWN, an attack, alpha-CROWN, and the search."""
    start = clock.now()
    attack = _Attack(model, x, y, threat)
    box = region(threat, x, sound=True)
    state, exact = begin(network, box, y)
    attack.first(state.open())
    state.broken = attack.broken()
    state.seconds += (clock.now() - start) / len(x)
    left = state.open()
    if len(left):

        def visit(which: Tensor, points: Tensor) -> Tensor:
            return attack.visit(left[which], points)

        task = (network, alpha.select(exact, left), box.select(left), y[left], left, state, visit)
        tighten_and_split(*task, Effort(width=width), time_limit)
    proved = state.excess.amin(1)
    return Decision(_statuses(proved, attack.broken()), proved, attack.x_adv, state.parts, state.seconds)


def _nothing(x: Tensor) -> Decision:
    """Nothing is known of inputs that were not looked at."""
    none = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    status: Status = "unknown"
    return Decision((status,) * len(x), none - torch.inf, x, none.long(), none)


def _statuses(proved: Tensor, broken: Tensor) -> tuple[Status, ...]:
    pairs = zip(proved.tolist(), broken.tolist(), strict=True)
    return tuple("broken" if lost else "certified" if margin > 0 else "unknown" for margin, lost in pairs)
