"""One step of robust training, composed of the parts of a recipe.

x'   = attack(x)            maximises the cross-entropy, or the divergence from the clean output
t, w = targets(y)           one-hot, smooth or learned targets, and a weight for each example
loss = mean of w (fit + rest) as the objective says, at the weights theta + xi if these are perturbed
       + the regularisers
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from holdfast.attacks.core.losses import Loss
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace_batch
from holdfast.bounding.linear.relaxation import Relaxation, relaxation
from holdfast.registry import get
from holdfast.training.attack.pgd import pgd
from holdfast.training.context import Context, Metrics, Precision, in_mode
from holdfast.training.outputs import Output, Weights, forward
from holdfast.training.top_curvature import trace_ce

Inner = Literal["none", "ce", "kl"]


@dataclass(frozen=True, eq=False)
class Target:
    """What the outputs are compared with."""

    value: Tensor  # labels (B,) or distributions (B, K)
    weight: Tensor | None = None  # weight of each example, (B,), or None for equal weights
    weigh_all: bool = False  # the weights apply to the whole loss, not only to the part that fits the targets


@dataclass(frozen=True, eq=False)
class Views:
    """The outputs that a loss compares: at x (None if the loss does not look there) and at x'; labels and targets."""

    clean: Output | None
    adv: Output
    y: Tensor
    target: Tensor

    @property
    def pair(self) -> tuple[Output, Output]:
        """Both outputs, for a loss that needs both."""
        assert self.clean is not None
        return self.clean, self.adv


@dataclass(frozen=True, eq=False)
class Terms:
    """A loss per example, (B,) each: the part that fits the targets, and the rest."""

    fit: Tensor
    rest: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Family:
    """What makes an objective.

    `trace` gives the traces of the Hessians of `terms` with respect to the weights of the top layer; its flag says
    whether that layer has a bias.
    """

    inner: Inner  # the loss that the attack maximises; "none" for no attack
    clean: bool  # whether the loss looks at the clean input too
    terms: Callable[[Views], Terms]  # the loss per example
    trace: Callable[[Views, bool], Terms]


@dataclass(frozen=True, eq=False)
class Taken:
    """A step as a regulariser sees it."""

    model: nn.Module
    weights: Weights | None  # at which the loss is taken, None for the model's own
    x: Tensor
    x_adv: Tensor
    views: Views
    terms: Terms
    family: Family
    context: Context
    relaxed: Relaxation | None = None  # the network over the threat set around x, where the objective has bounded it
    target: Target | None = None  # has the weight of each example; None for equal weights

    def at(self, x: Tensor) -> Output:
        """The outputs at x, at the weights of this step."""
        return forward(self.model, x, weights=self.weights, top=self.context.parts.top)

    def relaxation(self) -> Relaxation | None:
        """The relaxed network of the objective, by intervals if it has bounded none; None without a budget."""
        threat = self.context.threat
        if self.relaxed is not None or threat.budget == 0:
            return self.relaxed
        graph, _ = trace_batch(self.model, self.x)
        return relaxation(graph, region(threat, self.x, sound=False), slopes=None, hidden=False, sound=False)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(softmax(p) || softmax(q)) of each example, (B,), from logits (B, K)."""
    return kl_div(q.log_softmax(1), p.log_softmax(1), reduction="none", log_target=True).sum(1)


def fit(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each example, (B,), against labels (B,) or distributions (B, K)."""
    return cross_entropy(logits, target, reduction="none")


def cross_entropy_family(inner: Inner) -> Family:
    """The cross-entropy at x', which is x where there is no attack."""
    return Family(
        inner,
        False,
        terms=lambda views: Terms(fit(views.adv.logits, views.target)),
        trace=lambda views, bias: Terms(trace_ce(views.adv, bias=bias)),
    )


def stops_gradient(stop_gradient: bool | None, context: Context) -> bool:
    """Whether a loss that pairs two outputs holds the clean one fixed; by default only beside a curvature penalty."""
    if stop_gradient is not None:
        return stop_gradient
    parts = context.parts.regularizers.items()  # weight 0 is the base method
    return any(get("train", name).curvature and part.keywords.get("weight") != 0 for name, part in parts)


def inner_loss(kind: Inner, model: nn.Module, x: Tensor) -> Loss:
    """The loss per example that the attack maximises."""
    if kind == "ce":
        return fit
    # Eval mode: the divergence is from the output of the network as it will be used.
    with torch.no_grad(), in_mode(model, False):
        clean = model(x)
    return lambda logits, y: divergence(clean, logits)


def attacked(model: nn.Module, x: Tensor, y: Tensor, context: Context, loss: Loss = fit) -> Tensor:
    """What the attack of the recipe finds against `loss`, by default the cross-entropy; PGD if it names none."""
    x_adv: Tensor = (context.parts.attack or pgd)(model, x, y, loss, context)
    return x_adv


def robust_step(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    family: Family,
    x_adv: Tensor | None = None,
    precision: Precision = "full",
) -> tuple[Tensor, Metrics]:
    """Loss (a scalar) and metrics of one batch; see the top of this file.

    `x_adv` replaces what the attack finds; `precision` is that in which the outputs of the loss are computed.
    """
    parts = context.parts
    if x_adv is None:
        attacks = family.inner != "none"
        x_adv = attacked(model, x, y, context, inner_loss(family.inner, model, x)) if attacks else x
    target: Target | None = None  # learned targets change with every look: one look for each step

    def evaluate(weights: Weights | None) -> tuple[Tensor, Taken, dict[str, Tensor]]:
        nonlocal target
        top = parts.top or parts.watched
        clean = forward(model, x, weights=weights, top=top, precision=precision) if family.clean else None
        adv = forward(model, x_adv, weights=weights, top=top, precision=precision)
        if target is None:
            given = Target(_mixed_labels(y, adv.logits, context))
            target = given if parts.targets is None else parts.targets(clean, adv, y, context)
        views = Views(clean, adv, y, target.value)
        terms = family.terms(views)
        taken = Taken(model, weights, x, x_adv, views, terms, family, context, target=target)
        penalty, figures = penalties(taken)
        return mean_loss(terms, target) + penalty, taken, figures

    weights = None
    if parts.perturb_weights is not None:
        weights = parts.perturb_weights(model, lambda weights: evaluate(weights)[0], context)
    loss, taken, figures = evaluate(weights)
    context.examples.update(describe_examples(taken.views.adv, y))
    _record(context)
    notes = {key: value.detach().to(loss.dtype).mean() for key, value in context.notes.items()}
    accuracy = (taken.views.adv.logits.argmax(1) == y).to(loss.dtype).mean()
    return loss, {"accuracy": accuracy, **figures, **notes}


def _mixed_labels(y: Tensor, logits: Tensor, context: Context) -> Tensor:
    """The labels (B,), or distributions (B, K) with the labels of the images that were mixed into the inputs."""
    if context.mixed is None:
        return y
    others, weight = context.mixed
    own = torch.zeros_like(logits).scatter(1, y[:, None], weight[:, None].to(logits.dtype))
    return own.scatter_add(1, others[:, None], (1 - weight)[:, None].to(logits.dtype))


def penalties(taken: Taken) -> tuple[Tensor | float, dict[str, Tensor]]:
    """The sum of the regularisers of the recipe, and their figures for the history."""
    total: Tensor | float = 0.0
    figures: dict[str, Tensor] = {}
    for name, regularizer in taken.context.parts.regularizers.items():
        penalty, values = regularizer(taken)
        total = total + penalty
        figures |= {f"{name}_{key}": value.detach() for key, value in values.items()}
    return total, figures


def mean_loss(terms: Terms, target: Target | None) -> Tensor:
    """The mean over the batch with the weights of the examples, a scalar; also of traces, as a trace is linear."""
    if target is None or target.weight is None:
        return terms.fit.mean() if terms.rest is None else (terms.fit + terms.rest).mean()
    share = target.weight / target.weight.sum().clamp(min=torch.finfo(target.weight.dtype).tiny)
    if terms.rest is None:
        return (share * terms.fit).sum()
    if target.weigh_all:
        return (share * (terms.fit + terms.rest)).sum()
    return (share * terms.fit).sum() + terms.rest.mean()


@torch.no_grad()
def describe_examples(output: Output, y: Tensor) -> dict[str, Tensor]:
    """Loss, 0-1 error and, where the top layer is watched, norm of the features of each example, (B,) each.

    The loss is the cross-entropy of the label at x', whatever the objective adds to it or puts in its place.
    """
    loss = fit(output.logits, y).detach()
    found = {"loss": loss, "error": (output.logits.argmax(1) != y).to(loss.dtype)}
    return found if output.features is None else {**found, "norm": output.features.detach().flatten(1).norm(dim=1)}


@torch.no_grad()
def _record(context: Context) -> None:
    """Add the loss of each example to its total; `holdfast.analyze.difficulty` measures difficulty by it."""
    state, loss = context.state, context.examples["loss"]
    if "loss_sum" not in state:
        state["loss_sum"], state["loss_count"] = loss.new_zeros(context.count), loss.new_zeros(context.count)
    state["loss_sum"][context.index] += loss
    state["loss_count"][context.index] += 1
