"""Maxima and clippings written as ReLUs, so that branch and bound can split them.

max(a, b) = b + relu(a - b), min(a, b) = a - relu(a - b), and clip(z, l, u) = l + relu(z - l) - relu(z - u). A network
that is run selects, and does not round there; whoever counts the rounding of these sums counts more than there is.
"""

import torch
from torch import Tensor

from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph, Node, Op, Shape

CLIPPINGS = {"hardtanh", "relu6"}
"""Activations that clip their input to a range."""
LARGE = 1e30
"""Beyond the range of every clipping."""


class _Nodes:
    """A graph that grows."""

    def __init__(self, first: Node) -> None:
        self.nodes = [first]

    def add(self, op: Op, inputs: tuple[int, ...], name: str, shape: Shape) -> int:
        """Append a node; its number."""
        self.nodes.append(Node(op, inputs, name, shape))
        return len(self.nodes) - 1

    def maximum(self, gap: int, other: int, name: str) -> int:
        """b + relu(a - b) from the nodes of a - b and b."""
        shape = self.nodes[gap].shape
        return self.add(ops.Add(), (self.add(RELU, (gap,), name, shape), other), name, shape)


RELU = ops.Activation("relu", torch.relu)


def in_pieces(graph: Graph, *, maxima: bool = True) -> Graph:
    """The network with clippings, and with `maxima` also max pooling and MinMax, written as ReLUs where that is easy.

    Max pooling with padding or in ceil mode stays as it is: its windows do not all see as many values.
    """
    made, place = _Nodes(graph.nodes[0]), [0]
    like = next((t for node in graph.nodes for t in vars(node.op).values() if isinstance(t, Tensor)), None)
    for node in graph.nodes[1:]:
        inputs = tuple(place[i] for i in node.inputs)
        match node.op:
            case ops.MaxPool() if maxima and like is not None and _is_plain(node.op):
                place.append(_max_pool(made, node, node.op, inputs[0], like))
            case ops.MinMax() if maxima and like is not None and len(node.shape) in (1, 3):
                place.append(_min_max(made, node, inputs[0], like))
            case ops.Activation() if node.op.kind in CLIPPINGS and not node.op.error:
                place.append(_clipping(made, node, node.op, inputs[0], like))
            case _:
                place.append(made.add(node.op, inputs, node.name, node.shape))
    return Graph(tuple(made.nodes))


def _is_plain(op: ops.MaxPool) -> bool:
    return op.padding == (0, 0) and not op.ceil_mode


def _max_pool(made: _Nodes, node: Node, op: ops.MaxPool, before: int, like: Tensor) -> int:
    """A tournament of the places of each window."""
    channels, places = node.shape[0], op.kernel[0] * op.kernel[1]

    def pick(*signed: tuple[int, float]) -> int:
        """The sum of some places of each window, with signs: a convolution of every channel by itself."""
        kernel = torch.zeros(places, dtype=like.dtype, device=like.device)
        for index, sign in signed:
            kernel[index] = sign
        weight = kernel.view(1, 1, *op.kernel).expand(channels, -1, -1, -1).contiguous()
        conv = ops.Conv(weight, None, op.stride, (0, 0), op.dilation, channels, made.nodes[before].shape)
        return made.add(conv, (before,), node.name, node.shape)

    left = [
        made.maximum(pick((i, 1.0), (i + 1, -1.0)), pick((i + 1, 1.0)), node.name) if i + 1 < places else pick((i, 1.0))
        for i in range(0, places, 2)
    ]
    while len(left) > 1:
        last = left[len(left) // 2 * 2 :]  # has no rival in this round
        pairs = zip(left[0::2], left[1::2], strict=False)
        left = [made.maximum(_less(made, a, b, node, like), b, node.name) for a, b in pairs] + last
    return left[0]


def _less(made: _Nodes, a: int, b: int, node: Node, like: Tensor) -> int:
    """a - b."""
    minus = made.add(_scale(-1.0, 0.0, like), (b,), node.name, node.shape)
    return made.add(ops.Add(), (a, minus), node.name, node.shape)


def _min_max(made: _Nodes, node: Node, before: int, like: Tensor) -> int:
    """(max, min) of pairs of channels: the other one of each pair, plus relu(a - b) and -relu(a - b)."""
    count = node.shape[0]
    one = torch.eye(count, dtype=like.dtype, device=like.device)
    first, second = one[0::2], one[1::2]
    swapped = torch.stack([second, first], 1).flatten(0, 1)
    half = torch.eye(count // 2, dtype=like.dtype, device=like.device)
    signed = torch.stack([half, -half], 1).flatten(0, 1)
    thin = (count // 2, *node.shape[1:])
    gap = made.add(_matrix(first - second, node.shape), (before,), node.name, thin)
    bent = made.add(_matrix(signed, thin), (made.add(RELU, (gap,), node.name, thin),), node.name, node.shape)
    other = made.add(_matrix(swapped, node.shape), (before,), node.name, node.shape)
    return made.add(ops.Add(), (other, bent), node.name, node.shape)


def _matrix(weight: Tensor, shape: Shape) -> ops.Affine:
    """A matrix on the channels of values of a shape."""
    if len(shape) == 1:
        return ops.Linear(weight, None)
    return ops.Conv(weight[:, :, None, None], None, (1, 1), (0, 0), (1, 1), 1, shape)


def _clipping(made: _Nodes, node: Node, op: ops.Activation, before: int, like: Tensor | None) -> int:
    low, high = (float(op.function(torch.tensor(end, dtype=torch.float64))) for end in (-LARGE, LARGE))
    like = torch.zeros(()) if like is None else like
    up, down = (
        made.add(RELU, (made.add(_scale(1.0, -end, like), (before,), node.name, node.shape),), node.name, node.shape)
        for end in (low, high)
    )
    flipped = made.add(_scale(-1.0, low, like), (down,), node.name, node.shape)
    return made.add(ops.Add(), (up, flipped), node.name, node.shape)


def _scale(factor: float, shift: float, like: Tensor) -> ops.Scale:
    return ops.Scale(*(torch.tensor(v, dtype=like.dtype, device=like.device) for v in (factor, shift, abs(shift))))
