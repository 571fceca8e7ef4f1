"""Are two trained networks connected by a path of low loss? Bezier curves between their weights.

phi(t) = sum_i C(n, i) (1 - t)^(n - i) t^i theta_i runs from theta_0, one network, to theta_n, the other; the points
between are trained to make the mean of the loss over t in [0, 1] small (Garipov et al., "Loss surfaces, mode
connectivity, and fast ensembling of DNNs", 2018). n = 2, one point between, is
phi(t) = (1 - t)^2 theta_0 + 2 t (1 - t) theta_c + t^2 theta_1. If the best curve found still climbs above both its ends
there is a barrier between the networks, for this loss: certified losses have barriers where others have none (Lee et
al., "Towards better understanding of training certifiably robust models against adversarial examples", 2021).

A loss is a function `loss(model, x, y)` to a scalar, as in `smoothness`. Networks with batch norm are trained with the
statistics of the batch; along the path these are computed anew from the training data.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from holdfast.analyze.smoothness import Loss, flat_gradient
from holdfast.errors import InputError
from holdfast.training.average import refresh_batch_norm

TS = tuple(i / 20 for i in range(21))


@dataclass(frozen=True, eq=False)
class Curve:
    """A Bezier curve in the space of weights.

    Attributes:
        model: the architecture, with what the curve does not change; its weights do not matter.
        points: (n + 1, P), the two ends and between them what bends the curve.
    """

    model: nn.Module
    points: Tensor

    def weights(self, t: float) -> Tensor:
        """phi(t), (P,); exact at both ends."""
        # Not as a matrix product, which a GPU may round even where the weights are 1 and 0.
        return (bernstein(t, len(self.points) - 1).to(self.points)[:, None] * self.points).sum(0)

    def at(self, t: float) -> nn.Module:
        """A new model with the weights phi(t), in eval mode; batch norm keeps the statistics of the first end."""
        model = copy.deepcopy(self.model)
        vector_to_parameters(self.weights(t), model.parameters())
        return model.eval()


def bernstein(t: float, n: int) -> Tensor:
    """C(n, i) (1 - t)^(n - i) t^i for i = 0 ... n, (n + 1,) float64.

    >>> bernstein(0.5, 2).tolist()
    [0.25, 0.5, 0.25]
    """
    if not 0 <= t <= 1:
        raise InputError(f"t must lie in [0, 1], got {t}")
    return torch.tensor([math.comb(n, i) * (1 - t) ** (n - i) * t**i for i in range(n + 1)], dtype=torch.float64)


def segment(model_a: nn.Module, model_b: nn.Module, *, bends: int = 1) -> Curve:
    """The straight line between two networks as a curve with `bends` points between its ends.

    Args:
        model_a, model_b: two models of one architecture.
        bends: points between the ends, n - 1; 1 for small networks, 3 have been used for ResNets.
    """
    if bends < 1:
        raise InputError(f"bends must be at least 1, got {bends}")
    _check_pair(model_a, model_b)
    a, b = (parameters_to_vector(model.parameters()).detach() for model in (model_a, model_b))
    # Not a + (b - a) i / n: its last point could miss b by a rounding error.
    points = torch.stack([a * (1 - i / (bends + 1)) + b * (i / (bends + 1)) for i in range(bends + 2)])
    return Curve(copy.deepcopy(model_a).requires_grad_(True), points)


def connect(
    model_a: nn.Module,
    model_b: nn.Module,
    loss: Loss,
    x_train: Tensor,
    y_train: Tensor,
    *,
    steps: int,
    lr: float,
    batch_size: int = 128,
    seed: int = 0,
    bends: int = 1,
) -> Curve:
    """The curve from `model_a` to `model_b` with the lowest mean loss that Adam finds, from the straight line on.

    Each step draws one t, uniform on [0, 1], and one batch.

    Args:
        model_a, model_b: two models of one architecture; neither is changed.
        loss: see the top of this file.
        x_train: inputs, shape (N, ...).  y_train: labels, shape (N,).
        steps: steps of Adam.  lr: its learning rate.
        batch_size: examples for each step, drawn with replacement.
        seed: fixes t and the batches.
        bends: points between the ends.
    """
    if steps < 1 or batch_size < 1 or len(x_train) == 0 or not lr > 0:
        raise InputError(
            "steps, batch_size and lr must be positive and there must be training data, "
            f"got steps={steps}, batch_size={batch_size}, lr={lr} and {len(x_train)} inputs"
        )
    curve = segment(model_a, model_b, bends=bends)
    # Dropout stays off: it would blur where on the path a loss belongs.
    model = copy.deepcopy(curve.model).eval()
    for module in _batch_norms(model).values():
        module.train()
    inner = curve.points[1:-1].clone().requires_grad_(True)
    optimizer, generator = torch.optim.Adam([inner], lr=lr), torch.Generator().manual_seed(seed)
    for step in range(steps):
        t = float(torch.rand((), generator=generator))
        rows = torch.randint(len(x_train), (batch_size,), generator=generator).to(x_train.device)
        now = Curve(curve.model, torch.cat([curve.points[:1], inner.detach(), curve.points[-1:]]))
        inner.grad = point_gradients(now, loss, x_train[rows], y_train[rows], t, model=model)[1:-1]
        if not bool(inner.grad.isfinite().all()):
            raise InputError(f"the gradient at t = {t:.3f} is not finite in step {step}; take a smaller lr than {lr}")
        optimizer.step()
    return Curve(curve.model, torch.cat([curve.points[:1], inner.detach(), curve.points[-1:]]))


def point_gradients(
    curve: Curve, loss: Loss, x: Tensor, y: Tensor, t: float, *, model: nn.Module | None = None
) -> Tensor:
    """Gradients of loss(phi(t)) for the points of the curve, (n + 1, P): C(n, i) (1 - t)^(n - i) t^i grad loss(phi(t)).

    Args:
        curve, loss: see the top of this file.
        t: in [0, 1].
        model: to work on, in the mode wanted; a copy in eval mode if none is given.
    """
    model = copy.deepcopy(curve.model).eval() if model is None else model
    parameters = list(model.parameters())
    vector_to_parameters(curve.weights(t), parameters)
    with torch.enable_grad():
        g = flat_gradient(loss(model, x, y), parameters)
    return bernstein(t, len(curve.points) - 1).to(curve.points)[:, None] * g


def path_losses(
    curve: Curve,
    losses: Mapping[str, Loss],
    x: Tensor,
    y: Tensor,
    *,
    ts: Sequence[float] = TS,
    x_train: Tensor | None = None,
    chunk: int = 256,
) -> dict[str, Tensor]:
    """Losses and other measures along the curve, by name, (len(ts),) float64 each; all in eval mode.

    Args:
        curve: what `connect` or `segment` gave.
        losses: functions of (model, x, y) that are means over the examples.
        x: inputs, shape (N, ...), N >= 1.  y: labels, shape (N,).
        ts: places on the curve, in [0, 1].
        x_train: training data, from which batch norm gets its statistics at each t; not needed without batch norm.
        chunk: inputs worked on at a time; the answer does not change, but for the statistics of batch norm, which are
            means over chunks of the training data.
    """
    if len(x) == 0 or chunk < 1:
        raise InputError(f"there must be inputs and chunk >= 1, got {len(x)} inputs and chunk={chunk}")
    norms = _batch_norms(curve.model)
    if norms and x_train is None:
        raise InputError(f"layer '{next(iter(norms))}' is a batch norm: give x_train to compute its statistics along t")
    batches = list(zip(x.split(chunk), y.split(chunk), strict=True))
    found: dict[str, list[float]] = {name: [] for name in losses}
    for t in ts:
        # Without gradients for the weights, but not under no_grad: a loss may hold an attack that needs some.
        model = curve.at(t).requires_grad_(False)
        if norms and x_train is not None:
            # Parts of nearly equal size: each counts the same, and a last one of one example would have no variance.
            refresh_batch_norm(model, x_train.tensor_split(-(-len(x_train) // chunk)))
        for name, loss in losses.items():
            found[name].append(sum(float(loss(model, a, b).detach()) * len(a) for a, b in batches) / len(x))
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def barrier(values: Tensor | Sequence[float]) -> float:
    """Largest value on the path less the larger one of its ends; 0 means that nothing on it exceeds both ends.

    >>> barrier([1.0, 3.0, 2.0])
    1.0
    """
    v = torch.as_tensor(values, dtype=torch.float64)
    if v.ndim != 1 or len(v) < 2:
        raise InputError(f"expected the values at two places or more, in order of t, got shape {tuple(v.shape)}")
    return float(v.max() - torch.maximum(v[0], v[-1]))


def _batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def _check_pair(model_a: nn.Module, model_b: nn.Module) -> None:
    """One architecture, and nothing in it that differs and is not on the path."""
    a, b = model_a.state_dict(), model_b.state_dict()
    shapes = [{name: tuple(value.shape) for name, value in state.items()} for state in (a, b)]
    for name in shapes[0] | shapes[1]:
        if shapes[0].get(name) != shapes[1].get(name):
            raise InputError(
                f"the models must be of one architecture: '{name}' has shape {shapes[0].get(name)} in the first and "
                f"{shapes[1].get(name)} in the second"
            )
    statistics = {id(buffer) for norm in _batch_norms(model_a).values() for buffer in norm.buffers()}
    for name, buffer in model_a.named_buffers():
        if id(buffer) not in statistics and name in b and not torch.equal(buffer, b[name]):
            raise InputError(
                f"buffer '{name}' differs between the models and is neither a weight nor a statistic of batch norm; "
                "give both models the same"
            )
