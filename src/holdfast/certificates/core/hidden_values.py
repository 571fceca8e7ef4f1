"""How large a network is, for methods whose cost grows with it."""

from math import prod

from torch import Tensor, nn

from holdfast.bounding.graph.ops import Activation, MaxPool, MinMax
from holdfast.bounding.graph.trace import trace
from holdfast.errors import UnsupportedError


def hidden_values(model: nn.Module, x: Tensor) -> int:
    """How many values the activations of the network take for one input; 0 if bounds cannot look into it anyway."""
    try:
        graph = trace(model, x)
    except UnsupportedError:
        return 0
    return sum(prod(node.shape) for node in graph.nodes if isinstance(node.op, Activation | MaxPool | MinMax))
