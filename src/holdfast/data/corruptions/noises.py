"""Noise of sensors: thermal, of photons, and of dead pixels."""

import torch
from torch import Tensor

from holdfast.random import Noise


def gaussian_noise(x: Tensor, level: int, noise: Noise) -> Tensor:
    """x + N(0, sigma^2)."""
    sigma = (0.08, 0.12, 0.18, 0.26, 0.38)[level]
    return x + sigma * noise.normal(tuple(x.shape[1:]), x.dtype)


def shot_noise(x: Tensor, level: int, noise: Noise) -> Tensor:
    """Poisson(x photons) / photons."""
    photons = (60, 25, 12, 5, 3)[level]
    return poisson(x * photons, noise.uniform(tuple(x.shape[1:]), torch.float64)).to(x.dtype) / photons


def poisson(rate: Tensor, u: Tensor) -> Tensor:
    """Poisson counts by inversion: the number of k with P(count <= k) < u; rates up to some hundred."""
    rate = rate.to(u.dtype)
    term = torch.exp(-rate)
    below, count = term.clone(), torch.zeros_like(rate)
    for k in range(1, int(rate.max()) * 2 + 40):
        more = u > below
        if not bool(more.any()):
            break
        count += more
        term = term * rate / k
        below += term
    return count


def impulse_noise(x: Tensor, level: int, noise: Noise) -> Tensor:
    """A share of the values becomes 0 or 1, as many of each on average."""
    share = (0.03, 0.06, 0.09, 0.17, 0.27)[level]
    u = noise.uniform(tuple(x.shape[1:]), x.dtype)
    return torch.where(u < share / 2, 0.0, torch.where(u < share, 1.0, x))
