"""The l2 Lipschitz constant of a network, and of every difference of two logits, from the norms of its layers.

Constants multiply along a path and add where paths meet. Runs of affine layers (normalisation, convolution, batch norm,
scaling, the skip of a linear residual block) are merged into one operator first, whose norm is never larger than what
the rules for the parts would give. A layer without a rule is refused: no constant is ever assumed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.bounding.core.rounding import norm_above, unit
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Affine, Graph, Node, Shape
from holdfast.bounding.lipschitz.single_layers import (
    MONOTONE,
    activation_slope,
    in_double,
    merge_affine,
    overlap,
    plus_identity,
    refusal,
    step_down,
)
from holdfast.bounding.lipschitz.spectral import linear_part, norm_bound, norm_estimate
from holdfast.errors import UnsupportedError
from holdfast.utils.show import Shown


@dataclass(frozen=True, eq=False, repr=False)
class LipschitzBound(Shown):
    """Lipschitz constants of a network in the l2 norm; hold for all inputs if proven.

    Attributes:
        body: (), of the map from the input to the features that enter the last affine layer.
        pairs: (K, K), of z_y - z_i: the norm of the difference of their weights, times `body`. Zero on the diagonal.
        layers: name and constant of each layer, in order of evaluation; merged ones have names like "conv+norm".
        proven: upper bounds (float64, rounding included), not estimates.
        steps: for each residual block that steps down a potential, the index of its last node in the graph, the index
            of the node that it starts from, and its constant, less than the sum of the constants of its branches.
    """

    body: Tensor
    pairs: Tensor
    layers: tuple[tuple[str, Tensor], ...]
    proven: bool
    steps: tuple[tuple[int, int, float], ...] = ()


@torch.no_grad()
def lipschitz_bound(graph: Graph, *, tight: float = 1.01, norm: Callable[..., float] = norm_bound) -> LipschitzBound:
    """Proven upper bounds of the Lipschitz constants: for certificates.

    K_yi = ||w_y - w_i|| prod_l K_l bounds how fast the margin z_y - z_i changes (Leino, Wang and Fredrikson, "Globally
    robust neural networks", 2021; Tsuzuku, Sato and Sugiyama, "Lipschitz-margin training", 2018). They hold for the
    network of `graph` in real arithmetic; the rounding of the logits is for the certificate to add. Takes seconds for a
    large network and depends only on the weights: compute it once per model.

    Args:
        graph: graph of the model in eval mode, from `trace`.
        tight: how close the bounds of convolutions must come to their norms; 1.02 is faster.
        norm: proves the norm of one operator, `norm_bound` or one that remembers what it proved.

    Example:
        >>> from holdfast.bounding.graph.trace import trace
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
        >>> bound = lipschitz_bound(trace(model, torch.rand(1, 4)))
        >>> bound.pairs.shape, [name for name, _ in bound.layers]
        (torch.Size([3, 3]), ['0', '1'])
    """
    one = _one(graph).double()
    # 1e-15: in I + A the diagonal of A may cancel, and then its rounding error is relative to I.
    walk = _Walk(graph, one, lambda op, key: one * (norm(op, tight=tight) + 1e-15), in_double)
    body, rows = walk.head()
    # Merging rounds each weight by 4 u or less, which is 4 u sqrt(n) in norm for n rows or columns, as the norm of |A|
    # is at most sqrt(n) times the norm of A: below 1e-12 up to n = 5e6. The distance of two rows adds up one product
    # per feature.
    body = body * (1 + 1e-12 * len(graph.nodes))
    distances = torch.stack([norm_above(row - rows) for row in rows])
    pairs = body * distances * (1 + 8 * unit(torch.float64) * (rows.shape[1] + 8))
    return LipschitzBound(body, pairs, tuple(walk.layers), proven=True, steps=tuple(walk.steps))


def lipschitz_estimate(
    graph: Graph, state: Mapping[str, Tensor], *, steps: int = 1
) -> tuple[LipschitzBound, dict[str, Tensor]]:
    """Estimates with gradients to the weights, by power iteration with a warm start: for training, not for proofs.

    Args:
        graph: graph of the model as it is now, from `trace` or `trace_batch`.
        state: the vectors that the last call returned; {} for the first one, which then wants more steps.
        steps: steps of power iteration for each layer.

    Returns:
        The estimates, and the vectors to start from next time.
    """
    one, vectors = _one(graph), dict[str, Tensor]()

    def norm(op: Affine, key: str) -> Tensor:
        if isinstance(op, ops.Scale):
            return op.factor.abs().amax()
        sigma, vectors[key] = norm_estimate(op, state.get(key), one, steps=steps, first=steps)
        return sigma

    walk = _Walk(graph, one, norm, linear_part)
    body, rows = walk.head()
    return LipschitzBound(body, body * _distances(rows), tuple(walk.layers), proven=False), vectors


def _one(graph: Graph) -> Tensor:
    """1 with the dtype and on the device of the weights."""
    for node in graph.nodes:
        match node.op:
            case ops.Linear() | ops.Conv():
                return torch.ones_like(node.op.weight[:0].sum())
            case ops.Scale():
                return torch.ones_like(node.op.factor.sum())
    return torch.ones(())


def _distances(rows: Tensor) -> Tensor:
    """Euclidean distances of all pairs of rows, without the cancellation of |a|^2 - 2 a b + |b|^2; (K, n) -> (K, K)."""
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")


@dataclass(frozen=True, eq=False)
class _Known:
    """A node whose Lipschitz constant, as a map of the input, is known."""

    constant: Tensor


@dataclass(frozen=True, eq=False)
class _Pending:
    """An operator on a known node, not yet measured because the next layers may be merged into it."""

    source: _Known
    op: Affine
    name: str
    shape: Shape
    """Of what `op` returns; reshapes that follow change neither that nor the norm."""


_Value = _Known | _Pending


class _Walk:
    """The rules, with one way to measure operators: `norm(op, key)`, after `prepare(op)` dropped the bias."""

    def __init__(
        self,
        graph: Graph,
        one: Tensor,
        norm: Callable[[Affine, str], Tensor],
        prepare: Callable[[Affine], Affine],
    ) -> None:
        self.graph, self.one, self.norm, self.prepare = graph, one, norm, prepare
        self.layers: list[tuple[str, Tensor]] = []
        self.steps: list[tuple[int, int, float]] = []
        self.measured: dict[_Pending, _Known] = {}
        self.activated: dict[_Known, _Pending] = {}  # a value after a monotone activation, and the value before

    def head(self) -> tuple[Tensor, Tensor]:
        """The constant of the features that enter the last operator, and its rows (K, n), one for each logit."""
        shape = self.graph.nodes[-1].shape
        if len(shape) != 1:
            raise UnsupportedError(f"the model returns {shape} for each input; Lipschitz bounds need logits (K,)")
        units = torch.eye(shape[0], dtype=self.one.dtype, device=self.one.device)
        last: _Value = self.graph.walk(_Known(self.one), self.step)[-1]
        if isinstance(last, _Known):
            return last.constant, units
        return last.source.constant, last.op.transpose(units.view(-1, *last.shape)).flatten(1)

    def step(self, node: Node, values: list[_Value]) -> _Value:
        """The rule of one operation."""
        match node.op:
            case Affine():
                return self.affine(node, node.op, values[0])
            case ops.Activation():
                return self.activation(node, node.op, values[0])
            case ops.MaxPool():
                return self.scaled(node, values[0], overlap(node.op, node.shape) ** 0.5)
            case ops.MinMax():  # sorting is 1-Lipschitz
                return self.known(values[0])
            case ops.Reshape():
                return values[0]
            case ops.Add():
                return self.add(node, values[0], values[1])
            case ops.Concat():
                constants = torch.stack([self.known(value).constant for value in values])
                return _Known(torch.linalg.vector_norm(constants))
        raise refusal(node, type(node.op).__name__)

    def known(self, value: _Value) -> _Known:
        """The value with its pending operator measured, once for all layers that use it."""
        if isinstance(value, _Known):
            return value
        if value not in self.measured:
            norm = self.norm(value.op, f"{len(self.layers)} {value.name}")
            self.layers.append((value.name, norm))
            self.measured[value] = _Known(value.source.constant * norm)
        return self.measured[value]

    def scaled(self, node: Node, value: _Value, slope: float) -> _Known:
        before = self.known(value)
        self.layers.append((node.name, self.one * slope))
        return _Known(before.constant * slope)

    def activation(self, node: Node, op: ops.Activation, value: _Value) -> _Known:
        after = self.scaled(node, value, activation_slope(node, op))
        if isinstance(value, _Pending) and op.kind in MONOTONE and 0 <= op.parameter <= 1:
            self.activated[after] = value
        return after

    def affine(self, node: Node, op: Affine, value: _Value) -> _Pending:
        op = self.prepare(op)
        if isinstance(value, _Pending) and value.shape == self.graph.nodes[node.inputs[0]].shape:
            merged = merge_affine(value.op, op)
            if merged is not None:
                return _Pending(value.source, merged, f"{value.name}+{node.name}", node.shape)
        return _Pending(self.known(value), op, node.name, node.shape)

    def add(self, node: Node, a: _Value, b: _Value) -> _Known:
        """K_a + K_b; the norm of I + A where one side is A times the other; about 1 for a step down a potential."""
        for side, (skip, branch) in enumerate(((a, b), (b, a))):
            source = self.measured.get(skip) if isinstance(skip, _Pending) else skip
            if source is None or not isinstance(branch, _Pending):
                continue
            known = self.down(node, side, source, branch)
            if known is not None:
                return known
            if branch.source is source:
                merged = plus_identity(branch.op)
                if merged is not None:
                    return self.known(_Pending(source, merged, f"{branch.name}+{node.name}", branch.shape))
        return _Known(self.known(a).constant + self.known(b).constant)

    def down(self, node: Node, side: int, source: _Known, branch: _Pending) -> _Known | None:
        """The constant of x + B f(A x) where B is A^T, scaled and negative; see `step_down`."""
        inner = self.activated.get(branch.source)
        step = step_down(inner.op, branch.op) if inner is not None and inner.source is source else None
        if inner is None or step is None:
            return None
        half, apart = step
        norm = (self.norm(half, f"{len(self.layers)} {node.name}").square() - 1).clamp(min=1)
        self.layers.append((node.name, norm))
        total = source.constant * norm + self.known(inner).constant * apart
        if not total.requires_grad and source.constant > 0:
            index = next(i for i, other in enumerate(self.graph.nodes) if other is node)
            self.steps.append((index, node.inputs[side], float(total / source.constant)))
        return _Known(total)
