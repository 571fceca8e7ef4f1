"""What training an auction minimises: minus revenue, under multipliers for regret and rationality."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from holdfast.apps.auctions.auction_net import AuctionNet
from holdfast.apps.auctions.mechanism import Outcome, lying_utility, utility
from holdfast.apps.auctions.misreport import best_misreports, tile
from holdfast.attacks.core.gradients import frozen
from holdfast.bounding import interval
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.trace import trace_batch
from holdfast.utils.options import Count, NotNegative, Positive


@dataclass(frozen=True)
class Objective:
    """Settings of the augmented Lagrangian.

    Attributes:
        reduce: how bidders are put together in the terms of regret and rationality; the published formula has the sum.
        multiplier: lambda of the regret at the start.  rate: rho, its growth and the weight of the squares.
        growth: what rho gains at every renewal.
        rationality: mu of the violations at the start, for payments that may violate.  rationality_rate: its growth.
        rationality_growth: what that growth gains every `rationality_every` batches.
        every: batches between two renewals of the multipliers.
        steps: gradient steps of the search for lies.  step_size, starts: see `best_misreports`.
        stability: weight of the term that keeps ReLUs on one side over all lies.
        distill: weight of the distance to the teacher's outcomes.
    """

    reduce: Literal["mean", "sum"] = "mean"
    multiplier: NotNegative = 5.0
    rate: NotNegative = 1.0
    growth: NotNegative = 0.0
    rationality: NotNegative = 20.0
    rationality_rate: NotNegative = 5.0
    rationality_growth: NotNegative = 5.0
    rationality_every: Count = 5
    every: Count = 6
    steps: Count = 25
    step_size: Positive = 0.02
    starts: Count = 1
    stability: NotNegative = 1 / 400
    distill: NotNegative = 1.0


@dataclass(eq=False)
class Multipliers:
    """Multipliers of every bidder, (n,), and their rates; `renew` moves them."""

    regret: Tensor
    violation: Tensor
    rate: float
    violation_rate: float
    batches: int = 0

    @classmethod
    def start(cls, settings: Objective, bidders: int) -> "Multipliers":
        """As the settings say."""
        return cls(
            torch.full((bidders,), settings.multiplier),
            torch.full((bidders,), settings.rationality),
            settings.rate,
            settings.rationality_rate,
        )

    def renew(self, settings: Objective, regret: Tensor, violation: Tensor) -> None:
        """Count a batch with the mean regret and violation of every bidder, (n,); every few, raise the multipliers."""
        self.batches += 1
        if self.batches % settings.every == 0:
            self.regret = self.regret + self.rate * regret
            self.violation = self.violation + self.violation_rate * violation
            self.rate += settings.growth
        if self.batches % settings.rationality_every == 0:
            self.violation_rate += settings.rationality_growth


def auction_loss(
    model: AuctionNet,
    values: Tensor,
    multipliers: Multipliers,
    settings: Objective,
    *,
    teacher: AuctionNet | None = None,
    seed: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch of profiles (B, n, k), and revenue, regret (n,) and violation (n,).

    -sum_i p_i + lambda_i r_i + rho / 2 r_i^2 (+ mu_i irv_i^2), with r_i and irv_i the means over the batch of what a
    bidder gains by lying and of what it pays beyond its bids; plus the stability term and the distance to the teacher.
    """
    with frozen(model):
        lies, _ = best_misreports(
            model, values, steps=settings.steps, step_size=settings.step_size, starts=settings.starts, seed=seed
        )
    outcome = model(values)
    regret = _regret(model, values, outcome, lies)
    over = (-utility(outcome, values)).clamp(min=0).to(values.dtype).mean(0)
    revenue = outcome.payment.sum(1).mean()
    terms = multipliers.regret * regret + multipliers.rate / 2 * regret.square()
    if model.payment == "direct":
        terms = terms + multipliers.violation * over.square()
    loss = -revenue + (terms.mean() if settings.reduce == "mean" else terms.sum())
    if settings.stability:
        loss = loss + settings.stability * stability(model, values)
    if teacher is not None:
        with torch.no_grad():
            taught = teacher(values)
        distance = (outcome.allocation - taught.allocation).square().mean()
        loss = loss + settings.distill * (distance + (outcome.payment - taught.payment).square().mean())
    return loss, {"revenue": revenue.detach(), "regret": regret.detach(), "violation": over.detach()}


def _regret(model: AuctionNet, values: Tensor, outcome: Outcome, lies: Tensor) -> Tensor:
    """Mean gain of every bidder by its lies, (n,), differentiable in the weights."""
    tiled, bidder = tile(values)
    lied = lying_utility(model, tiled, bidder, lies.flatten(0, 1)).view(values.shape[:2])
    return (lied - utility(outcome, values)).clamp(min=0).to(values.dtype).mean(0)


def stability(model: AuctionNet, values: Tensor) -> Tensor:
    """Mean of -tanh(1 + u l) over all ReLUs, u and l their interval bounds over all lies of each bidder.

    It is least where every ReLU keeps one side; each one that does saves branching (Xiao et al., Training for faster
    adversarial robustness verification via inducing ReLU stability, 2019).
    """
    return torch.cat([-torch.tanh(1 + low * high).flatten() for low, high in relu_bounds(model, values)]).mean()


def unstable_share(model: AuctionNet, values: Tensor) -> float:
    """Share of the ReLUs that some lie can move to the other side, over profiles and bidders."""
    with torch.no_grad():
        crossing = [((low < 0) & (high > 0)).flatten() for low, high in relu_bounds(model, values)]
    return float(torch.cat(crossing).float().mean())


def relu_bounds(model: AuctionNet, values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Interval bounds of every ReLU's input over each bidder's own bids, others truthful, (B n, width) each."""
    tiled, bidder = tile(values)
    own = torch.zeros_like(tiled, dtype=torch.bool)
    own[torch.arange(len(tiled), device=values.device), bidder] = True
    lower = tiled.masked_fill(own, model.support.low).flatten(1)
    upper = tiled.masked_fill(own, model.support.high).flatten(1)
    graph, _ = trace_batch(model.scores, lower, use_logits=False)
    bounds = interval.propagate(graph, lower, upper, sound=False)
    return [bounds[node.inputs[0]] for node in graph.nodes if isinstance(node.op, ops.Activation)]
