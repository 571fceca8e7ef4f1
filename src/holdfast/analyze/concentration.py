"""How concentrated are the input gradients of a random network over its draws, and what does that say of an attack?

An attack that averages over draws sees the mean gradient. With v_i the directions of the gradients g_i, the mean
resultant length rho = |mean of v_i| says how much of a gradient the mean keeps. Lee's thesis (2021, Theorem 2.2.1)
bounds the first-order gain of a step along the mean gradient by E|g| rho. That needs a condition it does not state: the
norm of the gradient is not correlated with its direction, E[|g| v] = E|g| E[v]. Gradients (1, 0) and (-2, 0) have
rho = 0, and a mean of length 1/2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.attacks.core.chance import seeded
from holdfast.attacks.core.gradients import frozen
from holdfast.checks import check_inputs, check_labels, check_logits, check_model
from holdfast.errors import InputError
from holdfast.utils.directions import (
    Formula,
    kappa_exact,
    kappa_from,
    log_normaliser,
    mean_resultant_length,
    r_dpp,
    r_max,
    r_mean,
    r_smoothmax,
    unit,
)
from holdfast.utils.show import Shown


def draw_gradients(
    model: nn.Module, x: Tensor, y: Tensor, *, draws: int = 100, seed: int = 0, chunk: int = 256
) -> Tensor:
    """Gradients of the cross-entropy for the inputs, one for each draw, shape (B, n, p).

    Args:
        model: from (B, ...) to logits (B, K), in eval mode; each pass is a draw, which a batch may share.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        draws: n, at least 2.
        seed: fixes the draws; torch's generators are left as they were.
    """
    if draws < 2 or chunk < 1:
        raise InputError(f"give at least 2 draws and chunk >= 1, got {draws} and {chunk}")
    check_model(model)
    check_inputs(x, -torch.inf, torch.inf)
    with seeded(seed, x.device):
        check_labels(y, len(x), check_logits(model, x[:1]).shape[1])
        parts = [_gradients(model, *part, draws) for part in zip(x.split(chunk), y.split(chunk), strict=True)]
    return torch.cat(parts)


def _gradients(model: nn.Module, x: Tensor, y: Tensor, draws: int) -> Tensor:
    found = []
    with frozen(model), torch.enable_grad():
        for _ in range(draws):
            point = x.detach().clone().requires_grad_(True)
            loss = cross_entropy(model(point), y, reduction="sum")
            found.append(torch.autograd.grad(loss, point)[0].flatten(1))
    return torch.stack(found, 1)


@dataclass(frozen=True, eq=False, repr=False)
class Concentration(Shown):
    """How much the directions of the gradients agree, for each input, (B,) each.

    Attributes:
        resultant: mean resultant length rho, between 0 and 1.
        kappa: estimated concentration of a von Mises-Fisher distribution.
        r_mean, r_max, r_smoothmax: mean, largest and softly largest cosine of two draws.
        r_dpp: -log of the squared volume that the directions span; None for more draws than dimensions.
        gain: |mean of g|, the first-order gain of a unit step along the mean gradient.
        bound: mean of |g| times rho; bounds the gain where norm and direction are not correlated.
        correlation: |mean of g - (mean of |g|) (mean of v)|; zero where that condition holds.
    """

    resultant: Tensor
    kappa: Tensor
    r_mean: Tensor
    r_max: Tensor
    r_smoothmax: Tensor
    r_dpp: Tensor | None
    gain: Tensor
    bound: Tensor
    correlation: Tensor


def measure(gradients: Tensor, *, formula: Formula = "banerjee") -> Concentration:
    """Measure gradients (B, n, p); those that are zero count as a direction of length zero."""
    v = unit(gradients)
    rho, norm = mean_resultant_length(v), torch.linalg.vector_norm(gradients, dim=-1).mean(-1)
    mean = gradients.mean(-2)
    apart = torch.linalg.vector_norm(mean - norm[:, None] * v.mean(-2), dim=-1)
    volume = r_dpp(v) if v.shape[-2] <= v.shape[-1] else None
    kappa = kappa_from(rho, v.shape[-1], formula)
    gain = torch.linalg.vector_norm(mean, dim=-1)
    return Concentration(rho, kappa, r_mean(v), r_max(v), r_smoothmax(v), volume, gain, norm * rho, apart)


def concentration(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    draws: int = 100,
    formula: Formula = "banerjee",
    seed: int = 0,
    chunk: int = 64,
) -> Concentration:
    """Measure the gradients of a random network over `draws` of its draws; memory grows with chunk * draws.

    Args:
        formula: of kappa: Banerjee's, or as printed in Lee's thesis.

    Example:
        >>> from holdfast.models import make_model
        >>> model = make_model("adv-bnn", of="mlp", input_shape=(4,), classes=3, seed=0).eval()
        >>> found = concentration(model, torch.rand(2, 4), torch.tensor([0, 1]), draws=5)
        >>> bool((found.resultant <= 1).all())
        True
    """
    if chunk < 1:
        raise InputError(f"chunk must be at least 1, got {chunk}")
    parts = [
        measure(draw_gradients(model, part, labels, draws=draws, seed=seed), formula=formula)
        for part, labels in zip(x.split(chunk), y.split(chunk), strict=True)
    ]
    joined = {
        name: None if getattr(parts[0], name) is None else torch.cat([getattr(part, name) for part in parts])
        for name in Concentration.__dataclass_fields__
    }
    return Concentration(**joined)  # type: ignore[arg-type]  # only r_dpp may be None


@dataclass(frozen=True, eq=False, repr=False)
class VonMisesFisher(Shown):
    """Density C_p(kappa) exp(kappa mu.v) on the unit sphere, fitted to directions.

    Attributes:
        mean: mu, (p,).
        kappa: concentration of largest likelihood.
        log_likelihood: mean of the log of the density over the directions.
    """

    mean: Tensor
    kappa: float
    log_likelihood: float


def fit_von_mises_fisher(directions: Tensor) -> VonMisesFisher:
    """Fit a von Mises-Fisher distribution by largest likelihood to vectors (n, p), whose length does not count.

    Raises:
        InputError: there are fewer than two directions, or all are the same, which no finite kappa explains.
    """
    if directions.ndim != 2 or len(directions) < 2 or directions.shape[1] < 2:
        raise InputError(f"expected at least 2 directions in 2 dimensions or more, got shape {tuple(directions.shape)}")
    v = unit(directions.double())
    mean = v.mean(0)
    rho, p = float(torch.linalg.vector_norm(mean)), v.shape[1]
    if rho >= 1 - 1e-12:
        raise InputError("all directions are the same: the concentration is infinite")
    kappa = kappa_exact(rho, p)
    return VonMisesFisher(unit(mean).to(directions), kappa, log_normaliser(kappa, p) + kappa * rho)


def plane_of(first: Tensor, second: Tensor) -> Tensor:
    """Orthonormal basis (2, p) of the plane of two mean gradients (p,), by Gram and Schmidt."""
    a = unit(first)
    b = second - (second @ a) * a
    if float(torch.linalg.vector_norm(b)) <= 1e-6 * float(torch.linalg.vector_norm(second)):
        raise InputError("the two gradients are parallel, and span no plane")
    b = unit(b - (b @ a) * a)  # once more: the first pass leaves what rounding made of it
    return torch.stack([a, b])
