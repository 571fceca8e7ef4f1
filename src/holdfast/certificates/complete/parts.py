"""Sub-problems of a search over hidden neurons: what is to be proved, and on which part of the inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph
from holdfast.bounding.linear.relax import PIECEWISE, S_SHAPED
from holdfast.bounding.linear.relaxation import Relaxation

CURVED = 3
"""Numbers of an S-shaped neuron: where the slopes of its lines lie in their range, and a multiplier."""


@dataclass(frozen=True)
class Layer:
    """The neurons of one activation: `neurons` and `columns` say where they lie in the signs and values of a part.

    A (leaky) ReLU has one value for each neuron, an S-shaped function (`curved`) has three.
    """

    node: int
    shape: ops.Shape
    neurons: slice
    columns: slice
    curved: bool


@dataclass(frozen=True)
class Layout:
    """All neurons of a network that can be split."""

    layers: tuple[Layer, ...]

    @property
    def neurons(self) -> int:
        """How many neurons there are."""
        return int(self.layers[-1].neurons.stop) if self.layers else 0

    @property
    def curved(self) -> bool:
        """True if a neuron is split by its range, not by its sign."""
        return any(layer.curved for layer in self.layers)

    def signs(self, flat: Tensor) -> dict[int, Tensor]:
        """A tensor (N, neurons) as (N, *shape) by node."""
        return {layer.node: flat[:, layer.neurons].view(-1, *layer.shape) for layer in self.layers}

    def values(self, flat: Tensor) -> dict[int, Tensor]:
        """A tensor (N, columns) by node: (N, *shape), for a curved layer (N, CURVED, *shape)."""
        return {
            layer.node: flat[:, layer.columns].view(-1, *(CURVED,) * layer.curved, *layer.shape)
            for layer in self.layers
        }


def layout(graph: Graph) -> Layout:
    """The layout of all (leaky) ReLUs and S-shaped activations of a network."""
    layers, first, column = [], 0, 0
    for k, node in enumerate(graph.nodes):
        if isinstance(node.op, ops.Activation) and node.op.kind in PIECEWISE | S_SHAPED:
            size, curved = torch.Size(node.shape).numel(), node.op.kind in S_SHAPED
            width = size * (CURVED if curved else 1)
            layers.append(Layer(k, node.shape, slice(first, first + size), slice(column, column + width), curved))
            first, column = first + size, column + width
    return Layout(tuple(layers))


@dataclass(frozen=True, eq=False)
class Tasks:
    """What is to be proved, each over the region of one input: one of R rows <c, logits> is positive everywhere.

    Which row does may differ from place to place; a mixture of rows proves it for a whole part.

    Attributes:
        fast: the relaxed network on all inputs in the precision of the model, without an account of rounding.
        exact: the same in float64, with an account of all rounding, also when the model is run.
        layout: the neurons that can be split.
        inputs: (T,) which input each task speaks of.
        rows: (T, R, K) float64, coefficients of the logits; a task with fewer rows repeats one.
        scale: (T, layers) unit of the multipliers of each layer.
    """

    fast: Relaxation
    exact: Relaxation
    layout: Layout
    inputs: Tensor
    rows: Tensor
    scale: Tensor


@dataclass(frozen=True, eq=False)
class Parts:
    """Sub-problems: parts of the inputs, cut out by the signs or ranges of some hidden neurons.

    Attributes:
        task: (N,) the task that each belongs to.
        bound: (N,) float64, proved lower bound of a mixture of the rows: positive where it is proved.
        signs: (N, n) int8, 1 where the neuron is at least 0, -1 where it is at most 0, 0 where it is not split; a
            curved neuron that is split has a 1.
        values: (N, columns) slope of the line below where the neuron is not split, else the multiplier of its sign;
            for a curved neuron see CURVED.
        mix: (N, R) weights of the rows.
        ranges: (N, n, 2) float64, range of every neuron in the part; (N, 0, 2) without curved layers.
    """

    task: Tensor
    bound: Tensor
    signs: Tensor
    values: Tensor
    mix: Tensor
    ranges: Tensor

    def __len__(self) -> int:
        return len(self.task)

    def select(self, index: Tensor) -> "Parts":
        """Some of the parts, by index or mask."""
        return Parts(*(getattr(self, name)[index] for name in FIELDS))


FIELDS = tuple(Parts.__dataclass_fields__)


def join(parts: list[Parts]) -> Parts:
    """All parts in one."""
    return Parts(*(torch.cat([getattr(one, name) for one in parts]) for name in FIELDS))
