"""Proven bounds of the eigenvalues of Gram matrices: an iteration guesses, a Cholesky factorisation proves.

For a matrix T with the Gram matrix G = T T^*, the norm is at most sqrt(mu) if and only if mu I - G is positive
semidefinite, and a factorisation that runs to its end shows that it is, up to a rounding error with a known bound.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from holdfast.bounding.core.rounding import unit
from holdfast.bounding.graph.ops import Shape
from holdfast.errors import InputError
from holdfast.random import Noise

LARGEST = 2**24
"""Entries of the largest block that is built, 256 MB: finer blocks than that are left out."""
U = unit(torch.float64)


def check_finite(weight: Tensor) -> None:
    """Refuse weights whose norm has no bound."""
    if not bool((weight.abs() < 1e100).all()):  # also refuses NaN; squares must not overflow
        raise InputError("a layer has weights that are not finite, or beyond 1e100: its norm has no bound")


def gram(blocks: Tensor) -> Tensor:
    """T T^* or T^* T, whichever is smaller; (..., m, n) -> (..., k, k)."""
    blocks = blocks if blocks.shape[-2] <= blocks.shape[-1] else blocks.mT
    return blocks @ blocks.mH


def random_unit(shape: Shape, like: Tensor, *, seed: int = 0) -> Tensor:
    """A random unit vector of that shape, with the dtype and device of `like`."""
    noise = Noise.for_batch(seed, 1, like.device).normal(shape, like.dtype)[0]
    return unit_vector(noise, noise)


def unit_vector(x: Tensor, otherwise: Tensor) -> Tensor:
    """x / |x|; where x = 0 the direction is kept, or else no division would ever leave zero again."""
    norm: Tensor = torch.linalg.vector_norm(x)
    return x / norm if norm > 0 else otherwise


def lanczos(multiply: Callable[[Tensor], Tensor], v: Tensor, steps: int) -> Tensor:
    """Largest Ritz value of each symmetric matrix, (F,), from unit vectors v (F, n): a guess, from below."""
    diagonal, beside = [], []
    last, beta = torch.zeros_like(v), v.new_zeros(len(v), 1).real
    for _ in range(steps):
        w = multiply(v) - beta * last
        alpha = (v.conj() * w).sum(1, keepdim=True).real
        w = w - alpha * v
        beta = torch.linalg.vector_norm(w, dim=1, keepdim=True)
        last, v = v, w / beta.clamp(min=1e-300)
        diagonal.append(alpha[:, 0])
        beside.append(beta[:, 0])
    triangle = torch.diag_embed(torch.stack(beside[:-1], 1), -1) if steps > 1 else 0.0  # eigvalsh reads the lower half
    ritz: Tensor = torch.linalg.eigvalsh(torch.diag_embed(torch.stack(diagonal, 1)) + triangle)
    return ritz[:, -1]


def guess(grams: Tensor) -> Tensor:
    """About the largest eigenvalue of each of the matrices (F, n, n), (F,) float64."""
    count, n, _ = grams.shape
    start = random_unit((n,), torch.empty((), dtype=torch.float64, device=grams.device))
    return lanczos(lambda v: (grams @ v[..., None])[..., 0], start.to(grams.dtype).expand(count, n), min(n, 30))


def proved(grams: Tensor, error: float) -> float:
    """The square root of a proven bound of all eigenvalues of matrices within `error` of `grams` (F, n, n) in norm.

    The guess is raised until Cholesky confirms it. A factorisation in floating point that runs to its end is exact for
    a matrix that differs from mu I - G by at most gamma(4 n + 8) times its trace in norm (Higham, "Accuracy and
    stability of numerical algorithms", 2002, theorem 10.3; the factor 4 is for complex numbers), and the trace is at
    most n mu. So every eigenvalue of G is at most mu + 8 u (n + 2) n mu; the last term is for underflow.
    """
    n = grams.shape[-1]
    start, slack = max(float(guess(grams).max()), 1e-290), 1e-6
    while not all(bool(part.all()) for part in _positive_definite(grams.new_full((1,), start * (1 + slack)), grams)):
        slack *= 3
    mu = start * (1 + slack)
    return math.sqrt(mu + 8 * U * (n + 2) * n * mu + error + 1e-290) * (1 + 8 * U)


def proved_each(grams: Tensor, error: Tensor) -> Tensor:
    """As `proved`, for each matrix by itself: (F, n, n) and errors (F,) -> (F,) float64."""
    n = grams.shape[-1]
    start, slack = guess(grams).clamp(min=1e-290), 1e-6
    mu, open_ = start * (1 + slack), torch.arange(len(grams), device=grams.device)
    while len(open_):
        open_ = open_[~torch.cat(list(_positive_definite(mu[open_], grams[open_])))]
        slack *= 3
        mu[open_] = start[open_] * (1 + slack)
    return (mu + 8 * U * (n + 2) * n * mu + error + 1e-290).sqrt() * (1 + 8 * U)


def _positive_definite(mu: Tensor, grams: Tensor) -> Iterator[Tensor]:
    """Whether mu I - G was factorised, for each of the matrices (F, n, n), chunk by chunk; mu is (F,) or (1,)."""
    n = grams.shape[-1]
    identity = torch.eye(n, dtype=grams.dtype, device=grams.device)
    shift, chunk = mu.to(grams.dtype).expand(len(grams)).view(-1, 1, 1), max(1, LARGEST // (4 * n * n))
    for i in range(0, len(grams), chunk):
        yield torch.linalg.cholesky_ex(shift[i : i + chunk] * identity - grams[i : i + chunk])[1] == 0
