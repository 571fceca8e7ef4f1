"""Expectation over transformation: attacks on models that draw random numbers.

One draw is often shared by a whole batch (weight noise), so the answer for an input depends on the batch that it comes
in: batch independence, which all other attacks have, cannot hold here. The answer is reproducible by its seed, and the
caller's generator is left as it was.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from holdfast.attacks.core.ascent import BALLS, steepest
from holdfast.attacks.core.chance import log_mean_softmax, seeded
from holdfast.attacks.core.forms import Task, on_task
from holdfast.attacks.core.gradients import frozen, input_gradient
from holdfast.attacks.core.losses import Loss, cross_entropy, margin
from holdfast.attacks.core.stages import run_restarts
from holdfast.attacks.core.survivors import Survivors
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.threats import Threat, norm_2
from holdfast.utils import clock
from holdfast.utils.options import Count, NotNegative, Unit

Average = Literal["gradients", "outputs"]


@dataclass(frozen=True)
class Sampling:
    """How to average over the draws of a model.

    Attributes:
        samples: draws for each gradient.
        average: "gradients" of the draws' losses, or gradient of the loss of the draws' mean "outputs".
        one_pass: repeat the batch `samples` times in one pass. Right only if the model draws afresh for each input.
        votes: draws that decide whether an example counts.
        loss: what is averaged; "outputs" knows only the cross-entropy.
    """

    samples: int
    average: Average = "gradients"
    one_pass: bool = False
    votes: int = 20
    loss: Loss = cross_entropy


def expected_gradient(model: nn.Module, x: Tensor, y: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Average over draws: the gradient (shape of x), the loss (B,) and the log of the mean softmax (B, K).

    "gradients": mean of the gradients of the losses l_i. "outputs": gradient of -log mean_i exp(-l_i), the
    cross-entropy of the mean softmax, which is the mean of the same gradients weighted by exp(-l_i).
    """
    samples, average = sampling.samples, sampling.average
    if average == "outputs" and sampling.loss is not cross_entropy:
        raise InputError(
            "average='outputs' is for the cross-entropy of the mean softmax; other losses take 'gradients'"
        )
    passes, repeat = (1, samples) if sampling.one_pass else (samples, 1)
    mean, loss = torch.zeros_like(x), x.new_zeros(len(x))
    # Running means with weights w_i in the log domain: the mean moves to the new value by w_i / sum_{j <= i} w_j.
    log_weights = x.new_full((len(x),), -torch.inf)
    log_p: Tensor | None = None
    for _ in range(passes):
        repeated = x.repeat(repeat, *[1] * (x.ndim - 1))
        gradients, losses, logits = input_gradient(model, repeated, y.repeat(repeat), sampling.loss)
        log_q = logits.log_softmax(1).view(repeat, len(x), -1).logsumexp(0)
        log_p = log_q if log_p is None else torch.logaddexp(log_p, log_q)
        for gradient, value in zip(gradients.view(repeat, *x.shape), losses.view(repeat, -1), strict=True):
            log_weight = -value if average == "outputs" else torch.zeros_like(value)
            log_weights = torch.logaddexp(log_weights, log_weight)
            mean += (gradient - mean) * (log_weight - log_weights).exp().view(-1, *[1] * (x.ndim - 1))
            loss = loss + value / samples
    assert log_p is not None
    return mean, -(log_weights - math.log(samples)) if average == "outputs" else loss, log_p - math.log(samples)


def _ascend(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    x_start: Tensor,
    sampling: Sampling,
    *,
    steps: int,
    step_size: float,
    momentum: float,
    sparsity: float,
    name: str,
) -> AttackResult:
    """Take all steps of one run; fresh draws vote on its end.

    One vote, not one at each step: of many votes by few draws some go wrong by chance, and would count as examples.
    """
    s, x_adv, velocity = Survivors(x, y), x_start, torch.zeros_like(x)
    for _ in range(steps):
        if clock.over():
            break
        gradient, _, _ = expected_gradient(model, x_adv, y, sampling)
        size = gradient.abs().flatten(1).mean(1).clamp(min=torch.finfo(x.dtype).tiny)
        velocity = momentum * velocity + gradient / size.view(-1, *[1] * (x.ndim - 1))
        x_adv = threat.project(x_adv + step_size * steepest(threat, velocity, x_adv, sparsity), x)
    votes = log_mean_softmax(model, x_adv, sampling.votes)
    s.count(gradients=sampling.samples * steps, queries=sampling.samples * steps + sampling.votes)
    s.keep(x_adv, margin(votes, y), votes.argmax(1) != y)
    return s.result(name)


def draw_seed(noise: Noise, restart: int) -> int:
    """One seed of torch's generator for each seed and stream of the noise, and each restart."""
    noise = noise.fork(restart)
    return (noise.seed * 1_000_003 + noise.stream) * 1_000_003


@Attack(
    "eot-pgd",
    summary="PGD on the gradient averaged over draws of a random model",
    threats=BALLS,
    reference="Athalye et al., Synthesizing robust adversarial examples, 2018; Lee et al., GradDiv, 2023",
    stochastic=True,
)
@on_task
def eot_pgd(
    task: Task,
    *,
    samples: Count = 20,
    steps: Count = 20,
    step_size: NotNegative | None = None,
    restarts: Count = 1,
    momentum: NotNegative = 0.0,
    average: Average = "gradients",
    votes: Count = 20,
    sparsity: Unit = 0.01,
    one_pass: bool = False,
) -> AttackResult:
    """Run PGD on the mean gradient over `samples` draws of the model, fresh ones at each step.

    All steps are taken. The end of a run is an example if the mean softmax over `votes` fresh draws is not highest at
    `y`. Batch independence cannot hold: a batch may share the draws of the model, which come from torch's global
    generator; the seed of the noise fixes them.
    Without random numbers in the model it is `pgd` without early stops, at `samples` times the cost.

    The vote has an error of its own, of order 1 / sqrt(votes): near the boundary it goes either way, and each restart
    is one more chance to pass it by luck. Judge a close result by `mean_prediction` with many more draws.

    Args:
        samples: draws for each gradient. Where more of them help, give more: 100 and above for high randomness.
        steps: gradient steps of each run.
        step_size: in the threat's own unit; a quarter of the budget if none is given.
        restarts: runs in all. The first starts at x, the others at random points of the set.
        momentum: share of the last direction that is kept, of gradients normalised to mean size one.
        average: "gradients" of the draws' losses, or gradient of the loss of the draws' mean "outputs".
        votes: draws that decide whether an example counts.
        sparsity: share of the values that one L1 step moves.
        one_pass: all draws of a gradient in one pass over a repeated batch. Faster for few inputs, and right only if
            the model draws afresh for each input of a batch (noise on activations, not on weights).
    """
    model, x, y, threat, noise = task
    size = threat.budget / 4 if step_size is None else step_size
    sampling = Sampling(samples, average, one_pass, votes)

    def run(restart: int, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        x_start = threat.random_start(x, noise.fork(restart)) if restart else x
        part = (model, x, y, threat, x_start, sampling)
        with seeded(draw_seed(noise, restart), x.device):
            return _ascend(*part, steps=steps, step_size=size, momentum=momentum, sparsity=sparsity, name="eot-pgd")

    with frozen(model):
        return run_restarts(x, y, noise, restarts, run)


@Attack(
    "eot-fgsm",
    summary="one step of the full budget along the gradient averaged over draws of a random model",
    threats=BALLS,
    reference="Athalye et al., Synthesizing robust adversarial examples, 2018; Lee et al., GradDiv, 2023",
    stochastic=True,
)
@on_task
def eot_fgsm(
    task: Task, *, samples: Count = 20, average: Average = "gradients", votes: Count = 20, one_pass: bool = False
) -> AttackResult:
    """Return x + budget * steepest(mean gradient), projected; weak, prefer `eot-pgd`. Options as there."""
    sampling, budget = Sampling(samples, average, one_pass, votes), task.threat.budget
    run = partial(_ascend, *task[:4], task.x, sampling, steps=1, step_size=budget, momentum=0.0, sparsity=0.0)
    with frozen(task.model), seeded(draw_seed(task.noise, 0), task.x.device):
        return run(name="eot-fgsm")


def proxy_gradient(gradient: Tensor, theta: float, noise: Noise) -> Tensor:
    """A unit vector at the angle `theta` to each gradient: cos(theta) g / |g| + sin(theta) u, shape of the gradient.

    u is uniform on the unit sphere orthogonal to g. Shows how good a stand-in for the gradient must be: to first order
    a step along the proxy raises the loss by cos(theta) of what the gradient itself would. Fork the noise at each step.

    Args:
        gradient: (B, ...) with at least two values for each input, none of them all zero.
        theta: radians.
        noise: one source for each input.
    """
    shape = (-1, *[1] * (gradient.ndim - 1))
    norm = norm_2(gradient)
    if gradient[0].numel() < 2 or bool((norm == 0).any()):
        raise InputError("a proxy gradient needs gradients of two values or more that are not all zero")
    g = gradient / norm.view(shape)
    u = noise.normal(gradient.shape[1:], gradient.dtype)
    for _ in range(2):  # the second pass removes what rounding left of g in u
        u = u - (u * g).flatten(1).sum(1).view(shape) * g
    return math.cos(theta) * g + math.sin(theta) * u / norm_2(u).view(shape)
