"""Top eigenpairs of the Hessian of the loss under attack: how sharp is the minimum that training found?

Hessian-vector products, by differentiating twice, feed the Lanczos method of SciPy; the Hessian itself is never built.
Perturbed inputs are made once and kept (Liu, "Towards verifiable, generalizable and efficient robust deep neural
networks", 2022, Section 4.2.3).
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.analyze.landscape.attacked import Adversary, mean_loss
from holdfast.errors import InputError

Array = npt.NDArray[np.float64]
INITIAL = 10
"""Fresh initialisations whose mean loss normalises eigenvalues."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What `spectrum` found.

    Attributes:
        values: (k,) eigenvalues of the frozen loss, largest absolute value first.
        vectors: (k, P) unit eigenvectors, in the order of the model's parameters.
        loss: mean cross-entropy on the perturbed inputs.
        products: Hessian-vector products that were computed.
    """

    values: Tensor
    vectors: Tensor
    loss: float
    products: int

    def normalised(self, initial_loss: float) -> Tensor:
        """Eigenvalues divided by the loss of fresh initialisations under the same adversary: comparable over budgets.

        `initial_loss` is what `initial_loss(...)` returns.
        """
        return self.values / initial_loss


def spectrum(
    model: nn.Module,
    x_adv: Tensor,
    y: Tensor,
    *,
    k: int = 5,
    tolerance: float = 1e-4,
    seed: int = 0,
    chunk: int = 500,
    watch: Callable[[int], None] | None = None,
) -> Spectrum:
    """The k eigenpairs of largest absolute value of the Hessian of the mean cross-entropy at `x_adv`.

    Args:
        model: in eval mode; left as it is.
        x_adv: inputs, perturbed once, shape (N, ...).  y: labels, shape (N,).
        tolerance: relative accuracy of the eigenvalues.
        seed: of the first vector.
        chunk: inputs differentiated at a time; the answer does not change.
        watch: called with the number of products so far.
    """
    net = copy.deepcopy(model).eval().requires_grad_(True)
    parameters = [p for p in net.parameters() if p.is_floating_point()]
    size = sum(p.numel() for p in parameters)
    if not 1 <= k < size:
        raise InputError(f"k must be at least 1 and below the {size} parameters of the model, got {k}")
    like, count = parameters[0], 0

    def product(vector: Array) -> Array:
        nonlocal count
        count += 1
        if watch is not None:
            watch(count)
        v = torch.from_numpy(np.ascontiguousarray(vector).ravel()).to(like)
        return hessian_vector(net, parameters, x_adv, y, v, chunk).double().cpu().numpy()

    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    first = np.random.default_rng(seed).standard_normal(size)
    if size <= 2 * k + 1:  # Lanczos needs room for its vectors
        dense = np.stack([product(row) for row in np.eye(size)])
        values, vectors = np.linalg.eigh((dense + dense.T) / 2)
    else:
        values, vectors = eigsh(operator, k=k, which="LM", tol=tolerance, v0=first)
    order = np.argsort(-np.abs(values))[:k]
    return Spectrum(
        torch.from_numpy(values[order].copy()),
        torch.from_numpy(vectors[:, order].T.copy()).to(like),
        mean_loss(net, x_adv, y, chunk),
        count,
    )


def hessian_vector(
    model: nn.Module, parameters: Sequence[Tensor], x: Tensor, y: Tensor, vector: Tensor, chunk: int
) -> Tensor:
    """H v (P,) for the Hessian of the mean cross-entropy over x; `model` keeps its gradients."""
    total = torch.zeros_like(vector)
    for a, b in zip(x.split(chunk), y.split(chunk), strict=True):
        with torch.enable_grad():
            loss = cross_entropy(model(a), b, reduction="sum") / len(x)
            first = torch.autograd.grad(loss, parameters, create_graph=True)
            slope = _flat(first) @ vector
            second = torch.autograd.grad(slope, parameters, allow_unused=True)
        parts = [torch.zeros_like(p) if s is None else s for s, p in zip(second, parameters, strict=True)]
        total += _flat(parts).detach()
    return total


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """All values in one vector, also of second derivatives of convolutions, which come in any memory layout."""
    return torch.cat([part.flatten() for part in parts])


def initial_loss(model: nn.Module, x: Tensor, y: Tensor, adversary: Adversary, *, seed: int = 0) -> float:
    """Mean loss under attack over ten fresh initialisations of the architecture of `model`.

    Layers draw their weights by their own `reset_parameters`; a model with parameters elsewhere is refused.
    """
    net = copy.deepcopy(model)
    modules = [m for m in net.modules() if callable(getattr(m, "reset_parameters", None))]
    reached = {id(p) for m in modules for p in m.parameters()}
    missed = [name for name, p in net.named_parameters() if id(p) not in reached]
    if missed:
        raise InputError(f"no fresh weights for '{missed[0]}': its module has no reset_parameters()")
    losses = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(INITIAL):
            for module in modules:
                module.reset_parameters()  # type: ignore[operator]
            losses.append(adversary.loss(net.eval(), x, y))
    return sum(losses) / len(losses)
