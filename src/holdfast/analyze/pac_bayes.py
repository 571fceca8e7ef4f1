"""How far may robust accuracy fall from training data to new data? PAC-Bayes objectives, and the gap itself.

Weights theta of a network are blurred into a Gaussian Q = N(theta, diag(sigma^2)); the prior is P = N(0, sigma_0^2 I).
`sqrt_bound` and `linear_bound` are theorems for a loss in [0, 1], given E_Q of the risk. `pac_bayes` is not a bound: it
replaces E_Q of the risk by its second-order Taylor expansion at theta, and takes the constant C of the linear bound,
which does not depend on Q, as 0. It ranks weights and networks (Wang, Ding, Levinboim, Chen and Soricut, "Improving
robust generalization by direct PAC-Bayesian bound minimization", 2023).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from holdfast.attacks.core.ascent import perturb
from holdfast.checks import check_inputs, check_labels, check_task
from holdfast.errors import InputError, UnsupportedError
from holdfast.random import Noise
from holdfast.threats import Threat
from holdfast.training.accuracy import evaluate
from holdfast.training.curvature import relu_layers, trace_hutchinson
from holdfast.training.outputs import forward, top_layer
from holdfast.training.workers import Workers
from holdfast.utils.show import Shown

Mode = Literal["first-order", "log", "spherical"]


@dataclass(frozen=True, eq=False, repr=False)
class PacBayes(Shown):
    """The objective at the best variances, term by term.

    Attributes:
        risk: risk of the weights theta, as given.
        norm_term: |theta|^2 / (2 beta sigma_0^2).
        curvature_term: what the mode makes of the Hessian.
        sigma2: best variances of Q, (N,) float64 where the diagonal is known, else the shared one, ().
        mode, beta, sigma0_sq: as used.
    """

    risk: float
    norm_term: float
    curvature_term: float
    sigma2: Tensor
    mode: Mode
    beta: float
    sigma0_sq: float

    @property
    def value(self) -> float:
        """The sum of the three terms."""
        return self.risk + self.norm_term + self.curvature_term


def pac_bayes(
    risk: float,
    norm_sq: float,
    *,
    beta: float,
    sigma0_sq: float,
    diagonal: Tensor | None = None,
    trace: float | None = None,
    weights: int | None = None,
    mode: Mode = "log",
) -> PacBayes:
    """E_Q R + KL(Q | P) / beta, minimised over the variances of Q, with E_Q R to second order at theta.

    The minimum is at sigma_n^2 = 1 / (1 / sigma_0^2 + beta H_nn), and is risk + |theta|^2 / (2 beta sigma_0^2) +
    log: sum_n log(1 + sigma_0^2 beta H_nn) / (2 beta);
    spherical, one variance for all weights: N log(1 + sigma_0^2 beta Tr(H) / N) / (2 beta), never below log;
    first-order in sigma_0^2: sigma_0^2 Tr(H) / 2, the largest; close to log only where sigma_0^2 beta H_nn is small.

    Exact for a quadratic risk; otherwise, and for want of C, an objective and not a bound.

    Args:
        risk: at the weights.
        norm_sq: |theta|^2.
        beta: factor of the linear bound; usually in proportion to the number of examples.
        sigma0_sq: variance of the prior.
        diagonal: diagonal of the Hessian of the risk, any shape with N entries.
        trace: trace of the Hessian, if the diagonal is not known, with the number N of `weights`; not for mode "log".
        mode: see above.
    """
    if not (beta > 0 and sigma0_sq > 0):
        raise InputError(f"beta and sigma0_sq must be > 0, got {beta} and {sigma0_sq}")
    if mode not in ("first-order", "log", "spherical"):
        raise InputError(f"mode must be 'first-order', 'log' or 'spherical', got '{mode}'")
    if diagonal is not None:
        h = diagonal.detach().flatten().double()
        trace, weights = float(h.sum()), len(h)
    if trace is None or not weights:
        raise InputError("give the diagonal of the Hessian, or its trace and the number of weights")
    if diagonal is None or mode == "spherical":
        if mode == "log":
            raise InputError("mode 'log' needs the diagonal of the Hessian; with only the trace use 'spherical'")
        h = torch.tensor(trace / weights, dtype=torch.float64)
    bend = 1 + sigma0_sq * beta * h
    if bool((bend <= 0).any()):
        raise InputError(
            f"the Hessian has the entry {float(h.min()):.4g}; at or below -1 / (beta sigma0_sq) = "
            f"{-1 / (beta * sigma0_sq):.4g} no variance is best. Use a smaller beta or sigma0_sq."
        )
    logs = float(bend.log().sum()) * (weights if mode == "spherical" else 1) / (2 * beta)
    curvature = sigma0_sq * trace / 2 if mode == "first-order" else logs
    return PacBayes(risk, norm_sq / (2 * beta * sigma0_sq), curvature, sigma0_sq / bend, mode, beta, sigma0_sq)


def kl_gaussians(mean: Tensor, variance: Tensor, *, sigma0_sq: float) -> Tensor:
    """KL(N(mean, diag(variance)) | N(0, sigma_0^2 I)), a scalar; `variance` has the shape of `mean`, or () for all."""
    ratio = variance.expand_as(mean) / sigma0_sq
    return ((ratio - 1 - ratio.log()).sum() + mean.square().sum() / sigma0_sq) / 2


def sqrt_bound(risk: float, kl: float, *, n: int, tau: float) -> float:
    """With probability 1 - tau over n examples, E_Q R <= risk + 4 sqrt((KL + log(2 n / tau)) / n); `risk` is E_Q's.

    A theorem for a loss in [0, 1] and a prior chosen without the data. The whole bracket is divided by n: with the KL
    alone divided, as sometimes printed, it would say nothing for any n.
    """
    return risk + 4 * math.sqrt((kl + math.log(2 * n / tau)) / n)


def linear_bound(risk: float, kl: float, *, n: int, tau: float, beta: float) -> float:
    """With probability 1 - tau, E_Q R <= risk + KL / beta + C, C = log(1 / tau) / beta + beta / (8 n); `risk` is E_Q's.

    A theorem for a loss in [0, 1] and a prior and beta chosen without the data (Alquier, Ridgway and Chopin, "On the
    properties of variational approximations of Gibbs posteriors", 2016).
    """
    return risk + (kl + math.log(1 / tau)) / beta + beta / (8 * n)


def gibbs(risks: Tensor, prior: Tensor, *, beta: float) -> tuple[Tensor, float]:
    """The Q over finitely many hypotheses that minimises E_Q R + KL(Q | P) / beta, (M,), and the minimum.

    Q ~ P exp(-beta R), and the minimum is -log(E_P exp(-beta R)) / beta.

    Args:
        risks: risk of each hypothesis, (M,).
        prior: probabilities, (M,).
        beta: weight of the risk.
    """
    score = prior.log() - beta * risks
    return score.softmax(0), -float(score.logsumexp(0)) / beta


def pac_bayes_of(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    network: Literal["top", "full"] = "top",
    mode: Mode = "first-order",
    beta: float | None = None,
    sigma0_sq: float | None = None,
    steps: int = 10,
    samples: int = 100,
    seed: int = 0,
    batch_size: int = 256,
) -> PacBayes:
    """`pac_bayes` of a real model: the cross-entropy at the inputs that PGD finds, and the Hessian there.

    "top" makes the weights of the linear top layer random and takes the layers below as given: exact diagonal, for any
    model that ends in nn.Linear. "full" makes all parameters random: exact diagonal for nn.Sequential of Flatten,
    Linear and ReLU; Hutchinson's estimate of the trace otherwise, where mode "log" is not to be had.

    Not a bound: see `pac_bayes`; moreover the loss is not in [0, 1], PGD finds no more than a lower bound of the worst
    case, the attacked inputs are held fixed while the weights are blurred, and "top" forgets that the layers below were
    trained on the same data. Compare values at equal beta, sigma0_sq and network.

    Args:
        x: inputs, shape (n, ...).  y: labels, shape (n,).
        threat: what the attack may do.
        beta: n if none is given.
        sigma0_sq: 1 / (number of inputs of the top layer) if none is given.
        steps: steps of PGD, each 2.5 budget / steps long.
        samples: sign vectors of Hutchinson's estimator for each batch.
        seed: fixes the attack and the estimator.
    """
    first = check_task(model, x[:batch_size], y[:batch_size], threat.select(slice(batch_size)))
    check_inputs(x, threat.low, threat.high)
    check_labels(y, len(x), first.shape[1])
    if network not in ("top", "full"):
        raise InputError(f"network must be 'top' or 'full', got '{network}'")
    top = top_layer(model, x[:1]) if network == "top" or sigma0_sq is None else ""
    head = cast(nn.Linear, model.get_submodule(top))
    random = dict((head if network == "top" else model).named_parameters())
    hessian = _top_hessian(model, top) if network == "top" else _full_hessian(model, x[:1], samples)
    noise, size = Noise.for_batch(seed, len(x), x.device), 2.5 * threat.budget / steps
    risk, bend = 0.0, torch.zeros((), dtype=torch.float64, device=x.device)
    for index in torch.arange(len(x), device=x.device).split(batch_size):
        part, labels = noise[index], y[index]
        x_adv = perturb(model, x[index], labels, threat.select(index), noise=part, steps=steps, step_size=size)
        with torch.no_grad():
            risk += float(cross_entropy(model(x_adv), labels, reduction="sum"))
            bend = bend + hessian(x_adv, labels, part)
    return pac_bayes(
        risk / len(x),
        sum(float(p.detach().double().square().sum()) for p in random.values()),
        beta=len(x) if beta is None else beta,
        sigma0_sq=1 / head.in_features if sigma0_sq is None else sigma0_sq,
        diagonal=bend / len(x) if bend.ndim else None,
        trace=None if bend.ndim else float(bend) / len(x),
        weights=sum(p.numel() for p in random.values()),
        mode=mode,
    )


@dataclass(frozen=True)
class RobustGap:
    """Accuracy under PGD on training data and on new data; an upper bound of the true robust accuracy of each.

    Attributes:
        train, test: fractions of the inputs.
    """

    train: float
    test: float

    @property
    def gap(self) -> float:
        """train - test: large where robust accuracy is overfitted."""
        return self.train - self.test


def robust_gap(
    model: nn.Module,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    threat: Threat,
    *,
    steps: int = 10,
    seed: int = 0,
    batch_size: int = 256,
) -> RobustGap:
    """Robust accuracy on training data less that on test data, both under the same PGD.

    Args:
        train: inputs (n, ...) and labels (n,) of the training split, or of a part of it.
        test: the same of the test split.
        threat: what the attack may do; at budget 0 the gap is the usual one.
        steps: steps of PGD.
        seed: fixes its random starts.
    """
    if steps < 1:
        raise InputError(f"steps must be at least 1, got {steps}")
    found = []
    for x, y in (train, test):
        check_task(model, x[:batch_size], y[:batch_size], threat)
        scores = evaluate(model, x, y, threat, attack_steps=steps, batch_size=batch_size, seed=seed, team=Workers())
        found.append(scores["robust"])
    return RobustGap(*found)


Hessian = Callable[[Tensor, Tensor, Noise], Tensor]
"""(x, y, noise) -> sum over the inputs of the diagonal (N,) of the Hessian of the cross-entropy, or of its trace ()."""


def _top_hessian(model: nn.Module, top: str) -> Hessian:
    def diagonal(x: Tensor, y: Tensor, noise: Noise) -> Tensor:
        output = forward(model, x, top=top)
        s = output.logits.double().softmax(1)
        return _diagonal(output.z, s * (1 - s), cast(nn.Linear, model.get_submodule(top)).bias is not None)

    return diagonal


def _full_hessian(model: nn.Module, x: Tensor, samples: int) -> Hessian:
    parameters = dict(model.named_parameters())

    def diagonal(x: Tensor, y: Tensor, noise: Noise) -> Tensor:
        return torch.cat([_diagonal(at.inputs, at.variance, at.bias) for at in relu_layers(model, x)])

    def trace(x: Tensor, y: Tensor, noise: Noise) -> Tensor:
        def loss(at: dict[str, Tensor]) -> Tensor:
            return cross_entropy(functional_call(model, at, (x,)), y, reduction="sum")

        return trace_hutchinson(loss, parameters, noise=noise.fork(0), samples=samples).double()

    try:
        relu_layers(model, x)
    except UnsupportedError:
        return trace
    return diagonal


def _diagonal(inputs: Tensor, variance: Tensor, bias: bool) -> Tensor:
    """variance_d inputs_j^2 for the weight (d, j) of a layer, variance_d for its bias; summed over the inputs."""
    weight = variance.double().T @ inputs.double().square()
    return torch.cat([weight.flatten(), variance.double().sum(0)[: None if bias else 0]])
