"""Expectation over transformation: attacks on models that draw random numbers.

A random model is judged by its mean softmax over several draws. It draws from torch's global generator, and one draw is
often shared by a whole batch (weight noise), so the answer for an input depends on the batch that it comes in: batch
independence, which all other attacks have, cannot hold here. The answer is reproducible by its seed, and the caller's
generator is left as it was.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from holdfast.attacks.core.gradients import frozen, input_gradient, logits_of
from holdfast.attacks.core.losses import cross_entropy
from holdfast.attacks.core.stages import run_stages
from holdfast.attacks.pgd import BALLS, steepest
from holdfast.checks import modules_in
from holdfast.errors import InputError, did_you_mean
from holdfast.random import Noise
from holdfast.registry import Attack, register
from holdfast.results import AttackResult
from holdfast.threats import Threat, norm_2

Average = Literal["gradients", "outputs"]


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, torch's global generators start from `seed`; afterwards they are as they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed % 2**63)
        yield


@torch.no_grad()
def mean_prediction(model: nn.Module, x: Tensor, samples: int = 20, seed: int = 0) -> Tensor:
    """Log of the mean softmax over `samples` passes, (B, K): what a model that draws random numbers predicts."""
    with seeded(seed, x.device):
        return _log_mean_softmax(model, x, samples)


class Steady(nn.Module):
    """A random model made a function: the log of its mean softmax over a few draws that are always the same.

    An attack on it may fit those draws, so that what it finds must be confirmed by others (`mean_prediction`). A batch
    of another size or order gets other draws where the model draws for each input.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        draws: passes in each call.  seed: fixes their random numbers.
    """

    def __init__(self, model: nn.Module, draws: int, seed: int = 0) -> None:
        super().__init__()
        self.model, self.draws, self.seed = model, draws, seed
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K)."""
        with seeded(self.seed, x.device):
            return _log_mean_softmax(self.model, x, self.draws)


def _log_mean_softmax(model: nn.Module, x: Tensor, samples: int) -> Tensor:
    total: Tensor | None = None
    for _ in range(samples):
        log_p = logits_of(model, x).log_softmax(1)
        total = log_p if total is None else torch.logaddexp(total, log_p)
    if total is None:
        raise InputError(f"a mean prediction needs at least one sample, got {samples}")
    return total - math.log(samples)


def _generators(device: torch.device) -> list[Tensor]:
    """States of the generators that a model on this device draws from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@torch.no_grad()
def is_stochastic(model: nn.Module, x: Tensor) -> bool:
    """Whether two passes of the same inputs (32 at most) differ by more than float rounding.

    If the passes draw from torch's generators and the answers still agree, as decisions often do that noise seldom
    changes, the values inside the model are compared as well.
    """
    x = x[:32]
    with seeded(0, x.device):
        before = _generators(x.device)
        first, second = model(x), model(x)
        drawn = any(not torch.equal(a, b) for a, b in zip(before, _generators(x.device), strict=True))
        if _differ(first, second) or not drawn:
            return _differ(first, second)
        pairs = zip(*(_values_inside(model, x) for _ in range(2)), strict=False)
        return any(a.shape == b.shape and _differ(a, b) for a, b in pairs)


def _differ(first: Tensor, second: Tensor) -> bool:
    rounding = 1e3 * torch.finfo(first.dtype).eps * float(first.abs().amax())
    return bool(((first - second).abs() > rounding).any())


def _values_inside(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What the modules of the model return, call by call, where it is one tensor of floats."""
    values: list[Tensor] = []

    def note(module: nn.Module, given: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.numel():
            values.append(output.clone())

    handles = [module.register_forward_hook(note) for module in modules_in(model)]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return values


def expected_gradient(
    model: nn.Module, x: Tensor, y: Tensor, *, samples: int, average: Average = "gradients", one_pass: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient over `samples` draws (shape of x), the loss (B,) and the log of the mean softmax (B, K).

    "gradients": mean of the gradients of the cross-entropies l_i. "outputs": gradient of -log mean_i exp(-l_i), the
    cross-entropy of the mean softmax, which is the mean of the same gradients weighted by exp(-l_i).

    Args:
        one_pass: repeats the batch `samples` times in one pass. Right only if the model draws afresh for each input.
    """
    passes, repeat = (1, samples) if one_pass else (samples, 1)
    mean, loss = torch.zeros_like(x), x.new_zeros(len(x))
    # Running means with weights w_i in the log domain: the mean moves to the new value by w_i / sum_{j <= i} w_j.
    log_weights = x.new_full((len(x),), -torch.inf)
    log_p: Tensor | None = None
    for _ in range(passes):
        repeated = x.repeat(repeat, *[1] * (x.ndim - 1))
        gradients, losses, logits = input_gradient(model, repeated, y.repeat(repeat), cross_entropy)
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
    *,
    samples: int,
    steps: int,
    step_size: float,
    momentum: float,
    average: Average,
    votes: int,
    sparsity: float,
    one_pass: bool,
    name: str,
) -> AttackResult:
    """One run of all steps; fresh draws vote on its end.

    One vote, not one at each step: of many votes by few draws some go wrong by chance, and would count as examples.
    """
    x_adv, velocity = x_start, torch.zeros_like(x)
    for _ in range(steps):
        gradient, _, _ = expected_gradient(model, x_adv, y, samples=samples, average=average, one_pass=one_pass)
        size = gradient.abs().flatten(1).mean(1).clamp(min=torch.finfo(x.dtype).tiny)
        velocity = momentum * velocity + gradient / size.view(-1, *[1] * (x.ndim - 1))
        x_adv = threat.project(x_adv + step_size * steepest(threat, velocity, x_adv, sparsity), x)
    success = _log_mean_softmax(model, x_adv, votes).argmax(1) != y
    by = tuple(name if broken else "" for broken in success.tolist())
    gradients = torch.full((len(x),), samples * steps, device=x.device)
    return AttackResult(x_adv, success, by, gradients, gradients + votes)


def _check(average: str, **counts: int) -> None:
    for option, value in counts.items():
        if value < 1:
            raise InputError(f"{option} must be at least 1, got {value}")
    if average not in get_args(Average):
        raise InputError(f"unknown average '{average}'. " + did_you_mean(str(average), get_args(Average)))


def _seed(noise: Noise, restart: int) -> int:
    """One seed of torch's generator for each seed and stream of the noise, and each restart."""
    noise = noise.fork(restart)
    return (noise.seed * 1_000_003 + noise.stream) * 1_000_003


@register(
    Attack(
        "eot-pgd",
        summary="PGD on the gradient averaged over draws of a random model",
        threats=BALLS,
        reference="Athalye et al., Synthesizing robust adversarial examples, 2018; Lee et al., GradDiv, 2023",
        stochastic=True,
    )
)
@torch.no_grad()
def eot_pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    samples: int = 20,
    steps: int = 20,
    step_size: float | None = None,
    restarts: int = 1,
    momentum: float = 0.0,
    average: Average = "gradients",
    votes: int = 20,
    sparsity: float = 0.01,
    one_pass: bool = False,
) -> AttackResult:
    """PGD on the mean gradient over `samples` draws of the model, fresh ones at each step.

    All steps are taken. The end of a run is an example if the mean softmax over `votes` draws, other ones than those of
    the gradient, is not highest at `y`. Batch independence cannot hold: a batch may share the draws of the model.
    Without random numbers in the model it is `pgd` without early stops, at `samples` times the cost.

    The vote has an error of its own, of order 1 / sqrt(votes): near the boundary it goes either way, and each restart
    is one more chance to pass it by luck. Judge a close result by `mean_prediction` with many more draws.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode; draws from torch's global generator.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: an Lp ball.
        noise: its seed fixes the draws of the model; source of the random starts. Seed 0 if none is given.
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
    _check(average, samples=samples, steps=steps, restarts=restarts, votes=votes)
    noise = noise or Noise.for_batch(0, len(x), x.device)
    step_size = threat.budget / 4 if step_size is None else step_size

    def run(restart: int, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        x_start = threat.random_start(x, noise.fork(restart)) if restart else x
        with seeded(_seed(noise, restart), x.device):
            return _ascend(
                model,
                x,
                y,
                threat,
                x_start,
                samples=samples,
                steps=steps,
                step_size=step_size,
                momentum=momentum,
                average=average,
                votes=votes,
                sparsity=sparsity,
                one_pass=one_pass,
                name="eot-pgd",
            )

    with frozen(model):
        return run_stages(x, y, noise, [lambda *task, r=r: run(r, *task) for r in range(restarts)])


@register(
    Attack(
        "eot-fgsm",
        summary="one step of the full budget along the gradient averaged over draws of a random model",
        threats=BALLS,
        reference="Athalye et al., Synthesizing robust adversarial examples, 2018; Lee et al., GradDiv, 2023",
        stochastic=True,
    )
)
@torch.no_grad()
def eot_fgsm(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    samples: int = 20,
    average: Average = "gradients",
    votes: int = 20,
    one_pass: bool = False,
) -> AttackResult:
    """x + budget * steepest(mean gradient), projected; weak, prefer `eot-pgd`. Options as there."""
    _check(average, samples=samples, votes=votes)
    noise = noise or Noise.for_batch(0, len(x), x.device)
    with frozen(model), seeded(_seed(noise, 0), x.device):
        return _ascend(
            model,
            x,
            y,
            threat,
            x,
            samples=samples,
            steps=1,
            step_size=threat.budget,
            momentum=0.0,
            average=average,
            votes=votes,
            sparsity=0.0,
            one_pass=one_pass,
            name="eot-fgsm",
        )


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
