"""Training for smoothed classifiers: the loss is taken where a smoothed classifier looks, at x + N(0, sigma^2 I).

With g_1 ... g_m standard normal, z_i = z(x + sigma g_i), s_i = softmax(z_i) and s the mean of the s_i, the losses are

    gaussian      mean over i of CE(z_i, y)
    smoothadv     the same at x', which maximises -log s_y over the ball with the same g_i
    consistency   the same at x, plus weight * mean over i of KL(s || s_i), plus entropy_weight * H(s)
    macer         -log s_y + weight * sigma / 2 * max(0, gamma - Phi^-1(t_y) + Phi^-1(max over j != y of t_j))

where t is the mean of softmax(beta z_i), and the last term counts where t_y is the largest. The m copies of a batch are
one batch. The noise follows from seed, step and example.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from holdfast.attacks.core.losses import cross_entropy as attack_loss
from holdfast.random import Noise
from holdfast.registry import Objective, register
from holdfast.training.context import Context, Metrics
from holdfast.training.step import attacked
from holdfast.utils.options import Count, NotNegative, Positive

_DRAW = 7
"""Keeps the noise of the loss apart from that of the attack's random start."""


class SoftVote(nn.Module):
    """log s(x), (B, ...) -> (B, K), for fixed noise `shift` (B, m, ...): its cross-entropy is -log s_y."""

    def __init__(self, model: nn.Module, shift: Tensor) -> None:
        super().__init__()
        self.model, self.shift = model, shift
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        """log of the mean probability of each class."""
        return log_mean(outputs(self.model, x, self.shift))


def draw(x: Tensor, noise: Noise, sigma: float, samples: int) -> Tensor:
    """sigma g_i for each input, (B, m, ...)."""
    return sigma * noise.fork(_DRAW).normal((samples, *x.shape[1:]), x.dtype)


def outputs(model: nn.Module, x: Tensor, shift: Tensor) -> Tensor:
    """Logits at x + shift, (B, m, K), in one pass; x (B, ...), shift (B, m, ...)."""
    logits: Tensor = model((x[:, None] + shift).flatten(0, 1))
    return logits.view(*shift.shape[:2], logits.shape[1])


def log_mean(logits: Tensor) -> Tensor:
    """log of the mean over m of softmax, (B, m, K) -> (B, K)."""
    return logits.log_softmax(2).logsumexp(1) - math.log(logits.shape[1])


def noisy_view(x: Tensor, noise: Noise, *, sigma: float, **_: Any) -> Tensor:
    """x with one draw of the noise, shape of x; of an objective's options `sigma` alone matters here."""
    return x + draw(x, noise, sigma, 1)[:, 0]


@register(
    Objective(
        "gaussian",
        summary="smoothed classifiers: cross-entropy at inputs with Gaussian noise",
        reference="Cohen, Rosenfeld and Kolter, Certified adversarial robustness via randomized smoothing, 2019",
        view=noisy_view,
    )
)
def gaussian(
    model: nn.Module, x: Tensor, y: Tensor, context: Context, *, sigma: Positive = 0.25, samples: Count = 1
) -> tuple[Tensor, Metrics]:
    """Mean of CE(z(x + sigma g), y); see the top of this file.

    Args:
        model: from (B, ...) to logits (B, K); it meets values outside the valid range.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        context: of this step.
        sigma: standard deviation of the noise, that of the certificate.
        samples: m, draws for each input.
    """
    logits = outputs(model, x, draw(x, context.noise, sigma, samples))
    return _fit(logits, y), _metrics(logits, y)


@register(
    Objective(
        "smoothadv",
        summary="smoothed classifiers: cross-entropy with noise at inputs that are adversarial for the smoothed one",
        reference="Salman et al., Provably robust deep learning via adversarially trained smoothed classifiers, 2019",
        threats=("l2",),
        takes=("attack",),
        view=noisy_view,
    )
)
def smoothadv(
    model: nn.Module, x: Tensor, y: Tensor, context: Context, *, sigma: Positive = 0.25, samples: Count = 2
) -> tuple[Tensor, Metrics]:
    """Mean of CE(z(x' + sigma g), y), x' found by the attack of the recipe; see the top of this file.

    Args:
        model: from (B, ...) to logits (B, K); it meets values outside the valid range.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        context: of this step, with an l2 threat.
        sigma: standard deviation of the noise, that of the certificate.
        samples: m, draws for each input, the same for all steps of the attack and for the loss.
    """
    shift = draw(x, context.noise, sigma, samples)
    x_adv = attacked(SoftVote(model, shift), x, y, context, attack_loss)
    logits = outputs(model, x_adv, shift)
    return _fit(logits, y), _metrics(logits, y)


@register(
    Objective(
        "consistency",
        summary="smoothed classifiers: noisy cross-entropy, and predictions that agree under the noise",
        reference="Jeong and Shin, Consistency regularization for certified robustness of smoothed classifiers, 2020",
        view=noisy_view,
    )
)
def consistency(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    sigma: Positive = 0.25,
    samples: Count = 2,
    weight: NotNegative = 10.0,
    entropy_weight: NotNegative = 0.5,
) -> tuple[Tensor, Metrics]:
    """Mean of CE(z(x + sigma g), y) + weight KL(s || s_i) + entropy_weight H(s); see the top of this file.

    Args:
        model: from (B, ...) to logits (B, K); it meets values outside the valid range.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        context: of this step.
        sigma: standard deviation of the noise, that of the certificate.
        samples: m, draws for each input; with one alone there is nothing to agree with.
        weight: lambda of the paper.
        entropy_weight: eta of the paper, of the entropy of the mean prediction.
    """
    logits = outputs(model, x, draw(x, context.noise, sigma, samples))
    log_s = log_mean(logits)
    s = log_s.exp()
    entropy = -(s * log_s).sum(1)
    divergence = -(s[:, None] * logits.log_softmax(2)).sum(2).mean(1) - entropy
    loss = _fit(logits, y) + weight * divergence.mean() + entropy_weight * entropy.mean()
    shown = {"divergence": divergence.detach().mean(), "entropy": entropy.detach().mean()}
    return loss, {**_metrics(logits, y), **shown}


@register(
    Objective(
        "macer",
        summary="smoothed classifiers: cross-entropy of the mean prediction, and its certified radius",
        reference="Zhai et al., MACER: attack-free and scalable robust training via maximizing certified radius, 2020",
        view=noisy_view,
    )
)
def macer(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    sigma: Positive = 0.25,
    samples: Count = 16,
    weight: NotNegative = 12.0,
    gamma: Positive = 8.0,
    beta: Positive = 16.0,
) -> tuple[Tensor, Metrics]:
    """-log s_y, and a hinge that pulls the radius of what is right up to sigma gamma / 2; see the top of this file.

    Args:
        model: from (B, ...) to logits (B, K); it meets values outside the valid range.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        context: of this step.
        sigma: standard deviation of the noise, that of the certificate.
        samples: m, draws for each input.
        weight: lambda of the paper, of the hinge.
        gamma: at twice the radius in units of sigma the hinge ends.
        beta: inverse temperature of the probabilities that the radius is made of.
    """
    logits = outputs(model, x, draw(x, context.noise, sigma, samples))
    t = (beta * logits).softmax(2).mean(1)
    right = t.argmax(1) == y
    t_y = t.gather(1, y[:, None])[:, 0]
    t_other = t.scatter(1, y[:, None], 0.0).amax(1)
    # Where a quantile is infinite, or nearly so, the hinge has ended, and its gradient is left out before it is NaN.
    least = 4 * torch.finfo(t.dtype).eps
    inside = right & (t_y < 1 - least) & (t_other > least)
    room = torch.special.ndtri(t_y.where(inside, t_y.new_tensor(0.5)))
    room = room - torch.special.ndtri(t_other.where(inside, t_other.new_tensor(0.5)))
    hinge = torch.where(inside, (gamma - room).clamp(min=0), torch.zeros_like(room))
    loss = nll_loss(log_mean(logits), y) + weight * sigma / 2 * hinge.mean()
    return loss, {**_metrics(logits, y), "hinge": hinge.detach().mean()}


def _fit(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy over inputs and draws, from logits (B, m, K)."""
    return cross_entropy(logits.flatten(0, 1), y.repeat_interleave(logits.shape[1]))


@torch.no_grad()
def _metrics(logits: Tensor, y: Tensor) -> Metrics:
    """Share of the draws that are classified right, under the noise."""
    return {"accuracy": (logits.argmax(2) == y[:, None]).to(logits.dtype).mean()}
