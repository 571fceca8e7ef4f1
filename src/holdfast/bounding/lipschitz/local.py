"""Lipschitz constants that hold around each input: neurons that cannot move there take no part in the norms.

Over a region of inputs, bounds of the values before a ReLU show which neurons stay off (slope 0). With the
slopes as diagonal matrices, the difference of two outputs in the region is a product W_L D_{L-1} W_{L-1} ... D_1 W_1
times the difference of the inputs, 0 <= D_l <= M_l, where M_l holds the largest slopes in the region. Hence

    K = prod_l || M_l W_l M_{l-1}' ||,    M_{l-1}' = 1 where M_{l-1} > 0, else 0:

rows and columns of neurons that stay off drop out (Huang et al., "Training certifiably robust neural networks with
efficient local Lipschitz bounds", 2021; Zhang, Zhang and Hsieh, "RecurJac: an efficient recursive algorithm for
bounding Jacobian matrix of neural networks and its applications", 2019). The boxes are those of balls and boxes
propagated together (ball_box_sets.py), which also merges runs of affine layers into one operator.

Every input has matrices of its own, so that each is proved by itself. Convolutions are written out as matrices for it;
those that are too large keep their global norm.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.bounding.ball_box.margin import proven_norm
from holdfast.bounding.ball_box.sets import UP, Norm, Propagation
from holdfast.bounding.core.region import Region
from holdfast.bounding.core.rounding import norm_above, unit
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Affine, Graph, Node
from holdfast.bounding.lipschitz.single_layers import activation_slope, in_double, overlap, refusal
from holdfast.bounding.lipschitz.spectral_proof import LARGEST, U, gram, proved_each
from holdfast.utils.show import Shown

LARGEST_MATRIX = 2**20
"""Entries of the largest convolution that is written out for each input."""


@dataclass(frozen=True, eq=False, repr=False)
class LocalLipschitz(Shown):
    """Proven l2 Lipschitz constants over a region around each input; float64.

    Attributes:
        body: (B,), of the map from the input to the features that enter the last affine layer.
        rows: (K, n), the weights of that layer (or run of them).
        live: (B, n) bool; False for features that are the same all over the region.
    """

    body: Tensor
    rows: Tensor
    live: Tensor

    def pairs(self, y: Tensor) -> Tensor:
        """Constants of z_y - z_i for labels y (B,): the norm of what is live of w_y - w_i, times `body`; (B, K)."""
        apart = (self.rows[y][:, None] - self.rows) * self.live[:, None]
        rounding = 1 + 8 * unit(torch.float64) * (self.rows.shape[1] + 8)
        distance = norm_above(apart.flatten(0, 1)).view(apart.shape[:2])
        return distance * self.body[:, None] * rounding


@torch.no_grad()
def local_lipschitz(graph: Graph, r: Region, *, norm: Norm | None = None, sound: bool = True) -> LocalLipschitz:
    """Lipschitz constants over the region around each input; at most the global ones, up to 1e-8 of them.

    They hold in real arithmetic, as the constants of `lipschitz_bound` do. They cost a proof for each input and each
    layer: far more than a forward pass, and more than `bcp`.

    Args:
        graph: graph of the model in eval mode.
        r: the inputs; a ball, a box, or both.
        norm: global norms, `proven_norm` or one that remembers.
        sound: the boxes account for rounding.

    Example:
        >>> import holdfast as hf
        >>> from holdfast.bounding.graph.trace import trace
        >>> from holdfast.bounding.core.region import region
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
        >>> x = torch.rand(5, 4)
        >>> local_lipschitz(trace(model, x), region(hf.L2(0.1), x, sound=True)).body.shape
        torch.Size([5])
    """
    walk = _Walk(graph, r, norm or proven_norm(), sound=sound)
    for index, node in enumerate(graph.nodes[1:], start=1):
        if walk.sets.values[index].op is None:
            walk.step(index, node)
    last = walk.sets.values[-1]
    rows = torch.eye(last.centre.shape[1], dtype=torch.float64, device=r.x.device)
    if last.op is not None:
        rows = in_double(last.op).transpose(rows.view(-1, *last.shape)).flatten(1)
    return LocalLipschitz(walk.reach(last.source) * UP, rows, walk.moves(last.source).flatten(1))


class _Walk:
    """Of each node that is not within a run of affine layers: its constant (B,), and which of its values move."""

    def __init__(self, graph: Graph, r: Region, norm: Norm, *, sound: bool) -> None:
        self.sets = Propagation(graph, r, norm, sound=sound)
        self.constants = {0: torch.ones(len(r.x), dtype=torch.float64, device=r.x.device)}
        self.live = {0: r.upper > r.lower}

    def step(self, index: int, node: Node) -> None:
        inputs = node.inputs
        match node.op:
            case ops.Activation():
                box = self.sets.values[inputs[0]]
                slope = local_slope(node, node.op, box.lower.double(), box.upper.double())
                self.constants[index] = self.reach(inputs[0], slope)
                self.live[index] = (slope > 0) & self.moves(inputs[0])
            case ops.MaxPool():
                self.constants[index] = self.reach(inputs[0]) * overlap(node.op, node.shape) ** 0.5
                self.live[index] = node.op.apply(self.moves(inputs[0]).double()) > 0
            case ops.MinMax():  # sorting is 1-Lipschitz, and mixes two neighbours
                self.constants[index] = self.reach(inputs[0])
                pairs = self.moves(inputs[0]).unflatten(1, (-1, 2))
                self.live[index] = pairs.any(2, keepdim=True).expand_as(pairs).flatten(1, 2)
            case ops.Reshape():
                self.constants[index] = self.constants[inputs[0]]
                self.live[index] = self.live[inputs[0]].reshape(-1, *node.shape)
            case ops.Add():
                self.constants[index] = self.reach(inputs[0]) + self.reach(inputs[1])
                self.live[index] = self.moves(inputs[0]) | self.moves(inputs[1])
            case ops.Concat():
                self.constants[index] = torch.linalg.vector_norm(torch.stack([self.reach(i) for i in inputs]), dim=0)
                self.live[index] = torch.cat([self.moves(i) for i in inputs], node.op.dim)
            case _:
                raise refusal(node, type(node.op).__name__)

    def moves(self, index: int) -> Tensor:
        """Which values of a node may move, (B, *shape): all of them after an affine layer."""
        if self.sets.values[index].op is None:
            return self.live[index]
        return torch.ones_like(self.sets.values[index].centre, dtype=torch.bool)

    def reach(self, index: int, slope: Tensor | None = None) -> Tensor:
        """The constant of a node, or of a function of each of its values with largest slopes (B, *shape); (B,)."""
        value = self.sets.values[index]
        if value.op is not None:
            rows = None if slope is None else slope.reshape(-1, *value.shape)
            norm = masked_norm(value.op, self.sets.norm_of(index), rows, self.moves(value.source))
            return self.reach(value.source) * norm
        largest = 1.0 if slope is None else (slope * self.live[index]).flatten(1).amax(1)
        return self.constants[index] * largest


def local_slope(node: Node, op: ops.Activation, lower: Tensor, upper: Tensor) -> Tensor:
    """The largest slope of an activation over [lower, upper], value by value, float64."""
    everywhere = activation_slope(node, op)
    near = torch.zeros_like(lower).clamp(lower, upper)  # where tanh and sigmoid are steepest
    match op.kind:
        case "relu":
            return (upper > 0).double()
        case "leaky_relu":  # 1.01: torch rounds the slope to the dtype of its inputs
            return torch.where(upper > 0, 1.0, min(1.0, 1.01 * op.parameter)).double()
        case "tanh":
            return (1 - near.tanh().square() + 1e-12).clamp(max=1.0)
        case "sigmoid":
            return (near.sigmoid() * (-near).sigmoid() + 1e-12).clamp(max=0.25)
    return torch.full_like(lower, everywhere)


def masked_norm(op: Affine, norm: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
    """Proven norm of diag(rows) A diag(columns) for each input, (B,) float64; at most `norm` times the largest row.

    Args:
        op: A, without bias, float64.
        norm: its proven norm.
        rows: largest slopes of what follows, (B, *out), or None for 1.
        columns: which values of its input move, (B, *in), bool.
    """
    found = norm.double().expand(len(columns)).clone()
    if rows is not None:
        found = found * rows.flatten(1).amax(1)
    matrix = _matrix(op)
    if matrix is None or matrix.shape[1] != columns[:1].numel():
        return found
    columns = columns.flatten(1).double()
    rows = columns.new_ones(len(columns), len(matrix)) if rows is None else rows.flatten(1)
    open_ = ((rows.amin(1) < rows.amax(1)) | (columns.amin(1) < 1)).nonzero()[:, 0]
    for part in open_.split(max(1, LARGEST // matrix.numel())):
        scaled = rows[part][:, :, None] * matrix * columns[part][:, None]
        error = 4 * U * (max(matrix.shape) + 8) * scaled.square().sum((1, 2))
        # As in `proven_norm`: the merging of layers rounds weights, and I + A may cancel.
        found[part] = torch.minimum(found[part], proved_each(gram(scaled), error) * UP + 1e-15)
    return found


def _matrix(op: Affine) -> Tensor | None:
    """A as a matrix (out, in), if it is small enough."""
    match op:
        case ops.Linear():
            return op.weight.detach().double()
        case ops.Conv():
            part = in_double(op)
            shape = part.apply(torch.zeros(1, *op.in_shape, dtype=torch.float64, device=op.weight.device)).shape[1:]
            count = shape.numel()
            if count * math.prod(op.in_shape) > LARGEST_MATRIX:
                return None
            units = torch.eye(count, dtype=torch.float64, device=op.weight.device).view(-1, *shape)
            return part.transpose(units).flatten(1)  # every entry is one weight or zero: nothing is rounded
    return None
