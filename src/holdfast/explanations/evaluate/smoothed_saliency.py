"""How fast the saliency of a smoothed model can change: the lambda of its (lambda, eps)-robustness, in closed form.

With f_s(x) = E f(x + e), e ~ N(0, sigma^2 I), the saliency of f_s is the mean gradient under the noise, and moving x
only moves the noise. Wang, "On the feature alignment of deep vision models" (thesis, 2023), theorem 1: the larger
sigma, the less it can change, so the closer it is to the normal of the nearest boundary (corollary 1).
"""

import math

import torch
from torch import Tensor

from holdfast.errors import InputError


def lambda_sigma(sigma: float, *, lipschitz: float) -> float:
    """lambda with |grad f_s(x) - grad f_s(x')|_2 <= lambda |x - x'|_2 for every f with that l2 Lipschitz constant K.

    Along any unit vector the gradient of f lies between -K and K, so its means under two shifted Gaussians differ by at
    most 2 K times their total variation distance, which is 2 Phi(|x - x'| / (2 sigma)) - 1 <= |x - x'| / (sigma sqrt(2
    pi)):

        lambda = 2 K / (sigma sqrt(2 pi)).

    >>> round(lambda_sigma(0.5, lipschitz=1.0), 4)
    1.5958
    """
    _check(sigma)
    if lipschitz < 0:
        raise InputError(f"a Lipschitz constant is >= 0, got {lipschitz}")
    return 2 * lipschitz / (sigma * math.sqrt(2 * math.pi))


def lambda_sigma_relu(weight: Tensor, sigma: float, out: Tensor | None = None) -> float:
    """lambda for one hidden layer, f(x) = sum_i v_i relu(w_i x + b_i): tighter than `lambda_sigma`, any biases.

    The Hessian of f_s is sum_i v_i w_i w_i^T phi_i / (sigma |w_i|) with 0 < phi_i <= 1 / sqrt(2 pi), so that

        lambda = || sum_i |v_i| w_i w_i^T / |w_i| || / (sigma sqrt(2 pi)),

    which for a single neuron is |w| / (sigma sqrt(2 pi)).

    Args:
        weight: w (H, n).
        out: v (H,); ones if not given.
    """
    _check(sigma)
    w = weight.double()
    v = torch.ones_like(w[:, 0]) if out is None else out.double().abs()
    size = torch.linalg.vector_norm(w, dim=1)
    root = w * torch.where(size > 0, v / size, 0).sqrt()[:, None]
    return float(torch.linalg.matrix_norm(root, 2)) ** 2 / (sigma * math.sqrt(2 * math.pi))


def smoothed_saliency(weight: Tensor, bias: Tensor, out: Tensor, x: Tensor, sigma: float) -> Tensor:
    """The gradient of f_s at x (B, n) for one hidden layer: sum_i v_i w_i Phi((w_i x + b_i) / (sigma |w_i|)), (B, n).

    What `smoothgrad` estimates by sampling.
    """
    _check(sigma)
    size = torch.linalg.vector_norm(weight, dim=1)
    active = torch.special.ndtr((x @ weight.T + bias) / (sigma * size))
    gradient: Tensor = (active * out) @ weight
    return gradient


def _check(sigma: float) -> None:
    if not sigma > 0:
        raise InputError(f"the noise needs sigma > 0, got {sigma}")
