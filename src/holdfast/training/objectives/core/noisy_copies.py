"""What a smoothed classifier sees: the outputs at x + N(0, sigma^2 I).

With g_1 ... g_m standard normal: z_i = z(x + sigma g_i), s_i = softmax(z_i), and s is the mean of the s_i. The m copies
of a batch are one batch. Seed, step and example decide the noise. The model meets values outside the valid range. As
options, `sigma` is the standard deviation of the noise, the same as in the certificate, and `samples` is m.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.random import Noise
from holdfast.training.context import Metrics

_DRAW = 7
"""Keeps the noise of the loss apart from the noise of the attack's random start."""


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
    """x with one draw of the noise, shape of x; only the option `sigma` of an objective matters here."""
    return x + draw(x, noise, sigma, 1)[:, 0]


def fit(logits: Tensor, y: Tensor) -> Tensor:
    """Mean cross-entropy over inputs and draws, from logits (B, m, K)."""
    return cross_entropy(logits.flatten(0, 1), y.repeat_interleave(logits.shape[1]))


@torch.no_grad()
def metrics(logits: Tensor, y: Tensor) -> Metrics:
    """Share of the draws that are classified right, under the noise."""
    return {"accuracy": (logits.argmax(2) == y[:, None]).to(logits.dtype).mean()}
