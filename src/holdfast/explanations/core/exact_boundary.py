"""The nearest decision boundary of a tiny ReLU network, exactly: what the boundary search is measured against.

Where every ReLU keeps its side, the network is affine, and the nearest point of another class is a projection onto a
polytope. Branch and bound decides one ReLU after the other: the distance from x to the polytope of the decisions so
far only grows, and a branch ends where it passes the best point known. Least-distance problems are solved by Lawson
and Hanson's method ("Solving least squares problems", 1974, chapter 23), without tolerances to tune.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from holdfast.errors import InputError, UnsupportedError

Array = npt.NDArray[np.float64]


@dataclass
class _Best:
    """The nearest point so far: its distance and the move to it."""

    distance: float
    move: Array | None = None


def exact_boundary(
    model: nn.Module, x: Tensor, *, low: float = 0.0, high: float = 1.0, max_relus: int = 24
) -> tuple[Tensor, Tensor]:
    """The nearest points of [low, high]^n where another class draws level, shape of x, and their l2 distances (B,).

    The time grows exponentially with the ReLUs that matter near x: for networks of some tens of neurons. Distances are
    infinite, and points x itself, where no valid input has another class.

    Args:
        model: an `nn.Sequential` of Flatten, Linear and ReLU.
        max_relus: a network with more is refused.
    """
    layers = _layers(model)
    relus = sum(len(c) for _, c in layers[:-1])
    if relus > max_relus:
        raise InputError(f"the network has {relus} ReLUs, more than max_relus={max_relus}: too many to enumerate")
    points, distances = [], []
    for one in x.detach().flatten(1).double().cpu().numpy():
        best = _Best(np.inf)
        box_g, box_h = np.concatenate([np.eye(len(one)), -np.eye(len(one))]), np.concatenate([low - one, one - high])
        _branch(layers, one, _label(layers, one), np.eye(len(one)), one, box_g, box_h, [], np.zeros_like(one), best)
        points.append(one if best.move is None else np.clip(one + best.move, low, high))
        distances.append(best.distance)
    return torch.tensor(np.array(points)).to(x).view_as(x), torch.tensor(distances).to(x)


def _layers(model: nn.Module) -> list[tuple[Array, Array]]:
    """Weights and biases of the affine layers; a ReLU stands between every two."""
    if not isinstance(model, nn.Sequential):
        raise UnsupportedError(f"the exact boundary needs an nn.Sequential, got {type(model).__name__}")
    modules = [module for module in model if not isinstance(module, nn.Flatten)]
    expected = [nn.Linear if i % 2 == 0 else nn.ReLU for i in range(len(modules))]
    if len(modules) % 2 == 0 or not all(isinstance(m, kind) for m, kind in zip(modules, expected, strict=True)):
        raise UnsupportedError("the exact boundary needs Linear layers with a ReLU between every two of them")
    linear = [m for m in modules if isinstance(m, nn.Linear)]
    pairs = [(m.weight, torch.zeros(m.out_features) if m.bias is None else m.bias) for m in linear]
    return [(w.detach().double().cpu().numpy(), b.detach().double().cpu().numpy()) for w, b in pairs]


def _label(layers: list[tuple[Array, Array]], x: Array) -> int:
    for i, (weight, bias) in enumerate(layers):
        x = weight @ (np.maximum(x, 0) if i else x) + bias
    return int(x.argmax())


def least_distance(g: Array, h: Array) -> Array | None:
    """The shortest d with g d >= h, or None if there is none; g is (m, n), h is (m,)."""
    if bool((h <= 0).all()):
        return np.zeros(g.shape[1])
    e, f = np.vstack([g.T, h]), np.concatenate([np.zeros(g.shape[1]), [1.0]])
    u, rest = nnls(e, f, maxiter=100 * e.shape[1])
    r = e @ u - f
    return None if rest < 1e-10 else np.asarray(-r[:-1] / r[-1])


def _branch(
    layers: list[tuple[Array, Array]],
    x: Array,
    label: int,
    slope: Array,
    value: Array,
    g: Array,
    h: Array,
    signs: list[bool],
    move: Array,
    best: _Best,
) -> None:
    """Explore all inputs x + d with g d >= h; `move` is the nearest of them.

    Args:
        slope, value: the input of the first layer of `layers`, as an affine function slope d + value of d.
        signs: the sides of that layer's ReLUs that are decided.
    """
    weight, bias = layers[0]
    rows, at_x = weight @ slope, weight @ value + bias
    if len(layers) == 1:
        for rival in set(range(len(at_x))) - {label}:
            found = least_distance(np.vstack([g, rows[rival] - rows[label]]), np.append(h, at_x[label] - at_x[rival]))
            if found is not None and np.linalg.norm(found) < best.distance:
                best.distance, best.move = float(np.linalg.norm(found)), found
        return
    if len(signs) == len(at_x):
        active = np.array(signs, dtype=np.float64)
        _branch(layers[1:], x, label, active[:, None] * rows, active * at_x, g, h, [], move, best)
        return
    row, here = rows[len(signs)], at_x[len(signs)]
    first = bool(row @ move + here >= 0)
    for side in (first, not first):  # the side of the nearest point first: its distance needs no new solution
        sign = 1.0 if side else -1.0
        more_g, more_h = np.vstack([g, sign * row]), np.append(h, -sign * here)
        nearest = move if side == first else least_distance(more_g, more_h)
        if nearest is not None and np.linalg.norm(nearest) < best.distance:
            _branch(layers, x, label, slope, value, more_g, more_h, [*signs, side], nearest, best)
