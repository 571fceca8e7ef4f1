"""How far rounding can move the logits of a network, from norms.

Every node of the graph has two numbers: m, a bound of the norm of its values in real arithmetic, and e, a bound of the
norm of the difference to the values as computed. Both are affine in t = ||x - centre||, so they are found once for each
model and cost nothing for each input. An operation with the Lipschitz constant K takes e to K e plus its own rounding.

Mostly values are smaller than the norms of the layers allow. Around a given input m can come from a pass through the
network: the norm of what is computed there, plus e, plus the Lipschitz constant of the node times the distance.

A layer A x + b with n products for each output adds them up in n steps. Step k rounds a partial sum, relative to its
size: by u ||A_k x||, in norm over all outputs of the layer, where A_k holds the weights that went into it. With

    P >= ||A_k|| for all k,

all steps together are off by gamma(n) (P ||x|| + ||b||), and the products by u || |A| || ||x||. It is assumed that all
outputs of a layer are added up in the same order, whichever it is, as matrix products do. Then A_k is a part of the
columns of a dense layer, and P = ||A||; a convolution uses some of its taps, and P is a sum over these. An order of its
own for every output would replace P by the norm of |A|, which is larger by up to the root of the number of outputs.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.bounding.core.rounding import gamma, norm_above, underflow, unit
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph, Node
from holdfast.bounding.interval import EXACT, ULPS
from holdfast.bounding.lipschitz.constants import LipschitzBound
from holdfast.bounding.lipschitz.single_layers import SLOPES
from holdfast.bounding.lipschitz.spectral import norm_bound
from holdfast.errors import UnsupportedError

Affine = Callable[..., Tensor]
"""(c, s = 0) -> c + s t, t = ||x - centre||: as the pair (c, s), or at given inputs."""
Sizes = tuple[Tensor, Tensor]
"""m and e of a node, float64, of the shape that `Affine` returns."""
SLACK = 1 + 1e-6
"""For the float64 arithmetic of the constants themselves."""


class Rounding:
    """What rounding can do to the logits of a model that is run in `dtype`; norms are computed once.

    Args:
        graph: graph of the model in eval mode.  bound: its proven Lipschitz constants.
        dtype: in which the model is run.
    """

    @torch.no_grad()
    def __init__(self, graph: Graph, bound: LipschitzBound, dtype: torch.dtype) -> None:
        self.graph, self.dtype, self.u = graph, dtype, unit(dtype)
        self.front, self.centre = _front(graph, dtype)
        # Layers that the bound measured by themselves need not be measured again; a merged one is called "a+b".
        count = Counter(node.name for node in graph.nodes) + Counter(name for name, _ in bound.layers)
        norms = {name: float(k) for name, k in bound.layers if count[name] == 2 and "+" not in name}
        self.layers = [
            _norms_of(node, node.op, norms) if isinstance(node.op, ops.Linear | ops.Conv) else None
            for node in graph.nodes
        ]
        self.averages = {
            i: norms[node.name] if node.name in norms else norm_bound(node.op)
            for i, node in enumerate(graph.nodes)
            if isinstance(node.op, ops.Average)
        }
        self.blocks = {end: (start, constant) for end, start, constant in bound.steps}
        last = graph.nodes[-1].op
        self.distances = _distances(last) if isinstance(last, ops.Linear) else torch.empty(0)
        self.pairs = self._sizes(self._pair)

    @torch.no_grad()
    def everywhere(self) -> tuple[Tensor, Tensor]:
        """The computed z_y - z_i is off by at most offset_yi + slope_yi ||x - centre||; (K, K) each, float64."""
        last = self.graph.nodes[-1]
        if isinstance(last.op, ops.Linear):
            own, e = self._last(last.op, self.pairs[last.inputs[0]], self._pair)
            pairs = self.distances * e[..., None] + own[:, :, None] + own[:, None]
        else:
            error = math.sqrt(2) * self.pairs[-1][1]  # |e_y| + |e_i| <= sqrt(2) ||e||
            pairs = error[:, None, None].expand(2, last.shape[0], last.shape[0])
        return pairs[0] * SLACK, pairs[1] * SLACK

    @torch.no_grad()
    def around(self, x: Tensor, y: Tensor, eps: float) -> Tensor:
        """How far the computed z_y - z_i can be off at x, plus at any other input within l2 `eps`; (B, K), float64.

        Never more than by `everywhere`; takes a pass through the network.
        """
        far = norm_above((x - self.centre).flatten(1)) * (1 + gamma(x[0].numel(), x.dtype))
        away = torch.tensor([[0.0], [eps]], dtype=torch.float64, device=x.device)  # at x, and at the other input

        def affine(constant: float, slope: float = 0.0) -> Tensor:
            at: Tensor = constant + slope * (far + away)
            return at

        slopes = [m[1] for m, _ in self.pairs]  # a Lipschitz constant of every node
        values = self.graph.walk(x, lambda node, inputs: ops.evaluate(node.op, inputs))
        norms = [norm_above(v.flatten(1)) * SLACK for v in values]
        sizes = self._sizes(affine, lambda i, e: norms[i] + e[0] + slopes[i] * away)
        last = self.graph.nodes[-1]
        if isinstance(last.op, ops.Linear):
            own, e = self._last(last.op, sizes[last.inputs[0]], affine)
            off = self.distances[y] * e + own.gather(2, y.expand(2, -1)[..., None]) + own
        else:
            off = (math.sqrt(2) * sizes[-1][1])[..., None].expand(2, len(x), last.shape[0])
        total: Tensor = off.sum(0) * SLACK
        return total

    def _pair(self, constant: float, slope: float = 0.0) -> Tensor:
        return torch.tensor([constant, slope], dtype=torch.float64, device=self.centre.device)

    def _sizes(self, affine: Affine, cap: Callable[[int, Tensor], Tensor] | None = None) -> list[Sizes]:
        """m and e of every node; m is at most `cap(node, e)`."""
        start = affine(_norm(self.centre, self.graph.nodes[0].shape), 1.0)
        sizes = [(start, torch.zeros_like(start))]
        for i, node in enumerate(self.graph.nodes[1:], start=1):
            block = self._block(i, sizes, affine)
            m, e = self._step(i, node, [sizes[j] for j in node.inputs], affine) if block is None else block
            sizes.append((m if cap is None else torch.minimum(m, cap(i, e)), e))
        return sizes

    def _block(self, i: int, sizes: list[Sizes], affine: Affine) -> Sizes | None:
        """m and e after a block h with a constant K of its own, from the node before it; None where there is none.

        ||h(x)|| <= K ||x|| + ||h(0)||; and K e, plus the rounding inside the block if it starts from what was computed.
        """
        if i not in self.blocks:
            return None
        start, k = self.blocks[i]
        (m, e), zero = sizes[start], affine(0.0)
        at_zero, inside = {start: (zero, zero)}, {start: (m + e, zero)}
        for j in range(start + 1, i + 1):
            node = self.graph.nodes[j]
            for known in (at_zero, inside):
                if all(index in known for index in node.inputs):
                    known[j] = self._step(j, node, [known[index] for index in node.inputs], affine)
        return (k * m + at_zero[i][0], k * e + inside[i][1]) if i in inside else None

    def _last(self, op: ops.Linear, sizes: Sizes, affine: Affine) -> Sizes:
        """The rounding of each logit by itself, (..., K), and the error before the last layer, (..., 1).

        Differences of its rows are smaller than the whole layer.
        """
        m, e, one = (size[..., None] for size in (*sizes, affine(1.0)))
        weight = op.weight.double()
        bias = 0.0 if op.bias is None else op.bias.double().abs()
        own = gamma(op.terms, self.dtype) * (torch.linalg.vector_norm(weight, dim=1) * (m + e) + bias * one)
        return own + underflow(op.terms, self.dtype) * one, e

    def _step(self, i: int, node: Node, inputs: list[Sizes], affine: Affine) -> Sizes:
        m, e = inputs[0]
        tiny = affine(underflow(0, self.dtype) * math.sqrt(math.prod(node.shape)))
        match node.op:
            case ops.Linear() | ops.Conv():
                return self._layer(i, node, node.op, m, e, affine)
            case ops.Scale():
                k = float(node.op.factor.abs().max())
                terms = affine(_norm(node.op.shift_terms, node.shape))
                local = gamma(node.op.terms, self.dtype) * (k * (m + e) + terms) + tiny
                # In front it is factor (x - centre), up to the rounding of the centre.
                size = affine(0.0, k) + 4 * self.u * terms if node is self.front else k * m + terms
                return size, k * e + local
            case ops.Average():  # positive weights: |A| = A
                k = self.averages[i]
                return k * m, k * e + gamma(node.op.terms, self.dtype) * k * (m + e) + tiny
            case ops.Activation():
                k, zero = SLOPES[node.op.kind](node.op.parameter), torch.zeros(node.shape, dtype=self.dtype)
                shift = affine(_norm(node.op.function(zero), node.shape))
                local = affine(node.op.error * math.sqrt(math.prod(node.shape)))
                if node.op.kind not in EXACT:
                    local = local + 2 * ULPS * self.u * (k * (m + e) + shift) + tiny
                return k * m + shift, k * e + local
            case ops.MaxPool():
                k = math.sqrt(math.prod(_windows(node.op, axis) for axis in range(2)))
                return k * m, k * e
            case ops.MinMax() | ops.Reshape():
                return m, e
            case ops.Add():
                size, error = m + inputs[1][0], e + inputs[1][1]
                return size, error + 4 * self.u * (size + error) + tiny
            case ops.Concat():  # sqrt(sum_i (c_i + s_i t)^2) <= |c| + |s| t
                sizes, errors = (torch.stack(parts) for parts in zip(*inputs, strict=True))
                return torch.linalg.vector_norm(sizes, dim=0), torch.linalg.vector_norm(errors, dim=0)
        raise UnsupportedError(f"layer '{node.name}': no rule for the rounding of {type(node.op).__name__}")

    def _layer(self, i: int, node: Node, op: ops.Linear | ops.Conv, m: Tensor, e: Tensor, affine: Affine) -> Sizes:
        """gamma(n) (P ||x|| + ||b||) + 16 u || |A| || ||x||; the 16 is for weights that are themselves computed."""
        norms = self.layers[i]
        assert norms is not None
        bias = affine(norms.bias)
        local = gamma(op.terms, self.dtype) * (norms.partial * (m + e) + bias) + 16 * self.u * norms.absolute * (m + e)
        tiny = affine(underflow(op.terms, self.dtype) * math.sqrt(math.prod(node.shape)))
        return norms.norm * m + bias, norms.norm * e + local + tiny


@dataclass(frozen=True)
class _Norms:
    """Norms of a layer A x + b: of A, of any part of its columns or taps, of |A|, and of b over all outputs."""

    norm: float
    partial: float
    absolute: float
    bias: float


def _norms_of(node: Node, op: ops.Linear | ops.Conv, known: dict[str, float]) -> _Norms:
    norm = known[node.name] if node.name in known else norm_bound(op, tight=1.2)
    places = math.prod(node.shape) // len(op.weight)
    absolute = _absolute_norm(op)
    partial = norm if isinstance(op, ops.Linear) else min(_tap_norm(op), absolute)
    return _Norms(norm, partial, absolute, 0.0 if op.bias is None else _norm(op.bias, (places, len(op.bias))))


def _distances(op: ops.Linear) -> Tensor:
    """||w_y - w_i||, (K, K)."""
    weight = op.weight.double()
    return torch.stack([norm_above(row - weight) for row in weight])


def _front(graph: Graph, dtype: torch.dtype) -> tuple[Node | None, Tensor]:
    """The scaling of the input, if there is one, and the input that it maps to zero; else zero itself."""
    for node in graph.nodes:
        if isinstance(node.op, ops.Scale) and node.inputs == (0,) and bool((node.op.factor != 0).all()):
            return node, (-node.op.shift / node.op.factor).to(dtype)
    devices = [node.op.weight.device for node in graph.nodes if isinstance(node.op, ops.Linear | ops.Conv)]
    return None, torch.zeros((), dtype=dtype, device=devices[0] if devices else None)


def _norm(values: Tensor, shape: ops.Shape) -> float:
    return float(norm_above(values.expand(shape).reshape(1, -1)))


def _windows(op: ops.MaxPool, axis: int) -> int:
    """How many windows share a value, at most."""
    return -(-(op.dilation[axis] * (op.kernel[axis] - 1) + 1) // op.stride[axis])


def _absolute_norm(op: ops.Linear | ops.Conv) -> float:
    """At least the norm of |A|: the Frobenius norm, or the root of the largest row sum times the largest column sum."""
    weight = op.weight.double().abs()
    if isinstance(op, ops.Linear):
        return float(norm_above(weight.reshape(1, -1))) * SLACK
    rows = weight.flatten(1).sum(1).max()
    columns = weight.unflatten(0, (op.groups, -1)).sum((1, 3, 4)).max()
    return float((rows * columns).sqrt()) * SLACK


def _tap_norm(op: ops.Conv) -> float:
    """At least the norm of every convolution with some of the taps and channels of this one.

    Each tap (a, b) is a matrix from channels to channels at moved places, and leaving out columns makes no norm larger:
    the sum of their norms is a bound. Taps that differ modulo the stride read different inputs: a root of squares.
    """
    taps = op.weight.double().unflatten(0, (op.groups, -1)).permute(3, 4, 0, 1, 2)
    norms = torch.linalg.matrix_norm(taps, 2).amax(2)
    classes: dict[tuple[int, int], float] = defaultdict(float)
    for a, row in enumerate(norms.tolist()):
        for b, norm in enumerate(row):
            classes[a * op.dilation[0] % op.stride[0], b * op.dilation[1] % op.stride[1]] += norm
    return math.hypot(*classes.values()) * SLACK
