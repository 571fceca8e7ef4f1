"""How far rounding can move the logits of a network, from norms alone: no pass over the inputs.

Every node of the graph has two numbers: m, a bound of the norm of its values in real arithmetic, and e, a bound of the
norm of the difference to the values as computed. Both are affine in t = ||x - centre||, so they are found once for each
model and cost nothing for each input. An operation with the Lipschitz constant K takes e to K e plus its own rounding.

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

import torch
from torch import Tensor

from holdfast.bounds import ops
from holdfast.bounds.interval import EXACT, ULPS
from holdfast.bounds.lipschitz import LipschitzBound
from holdfast.bounds.lipschitz_layers import SLOPES
from holdfast.bounds.ops import Graph, Node
from holdfast.bounds.rounding import gamma, underflow, unit
from holdfast.bounds.spectral import norm_bound
from holdfast.errors import UnsupportedError

Sizes = tuple[Tensor, Tensor]
"""m and e of a node, each (2,) float64: c and s of c + s t."""
SLACK = 1 + 1e-6
"""For the float64 arithmetic of the constants themselves."""


@torch.no_grad()
def logit_error(graph: Graph, bound: LipschitzBound, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The difference z_y - z_i, computed in `dtype`, is off by at most offset_yi + slope_yi ||x - centre||.

    Args:
        graph: of the model in eval mode.  bound: its proven Lipschitz constants.
        dtype: in which the model is run.

    Returns:
        centre: of `dtype`, broadcasts against one input; where a normalisation in front maps to zero.
        offset, slope: (K, K), float64.
    """
    front, centre = _front(graph, dtype)
    walk = _Walk(graph, bound, dtype, front, centre.device)
    start = walk.affine(_norm(centre, graph.nodes[0].shape), 1.0)
    last = graph.nodes[-1]
    sizes = graph.walk((start, torch.zeros_like(start)), walk.step)
    if not isinstance(last.op, ops.Linear):
        error = math.sqrt(2) * sizes[-1][1]  # |e_y| + |e_i| <= sqrt(2) ||e||
        pairs = error.expand(last.shape[0], last.shape[0], 2)
    else:  # differences of rows are smaller than the whole layer, and each logit is rounded by itself
        weight = last.op.weight.double()
        m, e = sizes[last.inputs[0]]
        own = torch.linalg.vector_norm(weight, dim=1)[:, None] * (m + e)
        own[:, 0] += 0 if last.op.bias is None else last.op.bias.double().abs()
        own = gamma(last.op.terms, dtype) * own
        own[:, 0] += underflow(last.op.terms, dtype)
        rows = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist")
        pairs = rows[..., None] * e + own[:, None] + own
    return centre, pairs[..., 0] * SLACK, pairs[..., 1] * SLACK


def _front(graph: Graph, dtype: torch.dtype) -> tuple[Node | None, Tensor]:
    """The scaling of the input, if there is one, and the input that it maps to zero; else zero itself."""
    for node in graph.nodes:
        if isinstance(node.op, ops.Scale) and node.inputs == (0,) and bool((node.op.factor != 0).all()):
            return node, (-node.op.shift / node.op.factor).to(dtype)
    devices = [node.op.weight.device for node in graph.nodes if isinstance(node.op, ops.Linear | ops.Conv)]
    return None, torch.zeros((), dtype=dtype, device=devices[0] if devices else None)


class _Walk:
    """The rules, one for each operation."""

    def __init__(
        self, graph: Graph, bound: LipschitzBound, dtype: torch.dtype, front: Node | None, device: torch.device
    ) -> None:
        self.dtype, self.u, self.front, self.device = dtype, unit(dtype), front, device
        # Layers that the bound measured by themselves need not be measured again; a merged one is called "a+b".
        count = Counter(node.name for node in graph.nodes) + Counter(name for name, _ in bound.layers)
        self.norms = {name: float(k) for name, k in bound.layers if count[name] == 2 and "+" not in name}

    def affine(self, constant: float, slope: float = 0.0) -> Tensor:
        return torch.tensor([constant, slope], dtype=torch.float64, device=self.device)

    def step(self, node: Node, inputs: list[Sizes]) -> Sizes:
        m, e = inputs[0]
        tiny = self.affine(underflow(0, self.dtype) * math.sqrt(math.prod(node.shape)))
        match node.op:
            case ops.Linear() | ops.Conv():
                return self.layer(node, node.op, m, e)
            case ops.Scale():
                k = float(node.op.factor.abs().max())
                terms = self.affine(_norm(node.op.shift_terms, node.shape))
                local = gamma(node.op.terms, self.dtype) * (k * (m + e) + terms) + tiny
                # In front it is factor (x - centre), up to the rounding of the centre.
                size = self.affine(0.0, k) + 4 * self.u * terms if node is self.front else k * m + terms
                return size, k * e + local
            case ops.Average():  # positive weights: |A| = A
                k = norm_bound(node.op)
                return k * m, k * e + gamma(node.op.terms, self.dtype) * k * (m + e) + tiny
            case ops.Activation():
                k, zero = SLOPES[node.op.kind](node.op.parameter), torch.zeros(node.shape, dtype=self.dtype)
                shift = self.affine(_norm(node.op.function(zero), node.shape))
                local = 2 * ULPS * self.u * (k * (m + e) + shift) + tiny
                return k * m + shift, k * e + (0 if node.op.kind in EXACT else local)
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

    def layer(self, node: Node, op: ops.Linear | ops.Conv, m: Tensor, e: Tensor) -> Sizes:
        """gamma(n) (P ||x|| + ||b||) + 16 u || |A| || ||x||; the 16 is for weights that are themselves computed."""
        norm = self.norms[node.name] if node.name in self.norms else norm_bound(op, tight=1.2)
        places = math.prod(node.shape) // len(op.weight)
        bias = self.affine(0.0 if op.bias is None else _norm(op.bias, (places, len(op.bias))))
        absolute = _absolute_norm(op)
        partial = norm if isinstance(op, ops.Linear) else min(_tap_norm(op), absolute)
        local = gamma(op.terms, self.dtype) * (partial * (m + e) + bias) + 16 * self.u * absolute * (m + e)
        tiny = self.affine(underflow(op.terms, self.dtype) * math.sqrt(math.prod(node.shape)))
        return norm * m + bias, norm * e + local + tiny


def _norm(values: Tensor, shape: ops.Shape) -> float:
    return float(torch.linalg.vector_norm(values.double().expand(shape)))


def _windows(op: ops.MaxPool, axis: int) -> int:
    """How many windows share a value, at most."""
    return -(-(op.dilation[axis] * (op.kernel[axis] - 1) + 1) // op.stride[axis])


def _absolute_norm(op: ops.Linear | ops.Conv) -> float:
    """At least the norm of |A|: that of Frobenius, or the root of the largest row sum times the largest column sum."""
    weight = op.weight.double().abs()
    if isinstance(op, ops.Linear):
        return float(torch.linalg.vector_norm(weight)) * SLACK
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
