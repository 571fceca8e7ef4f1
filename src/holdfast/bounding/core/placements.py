"""From a threat to boxes of inputs, and the layer after which boxes of neighbouring patches may be merged."""

from collections.abc import Iterator

from torch import Tensor

from holdfast.bounding.core.rounding import unit
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Graph
from holdfast.threats import Patch, Threat


def boxes(threat: Threat, x: Tensor, *, sound: bool, chunk: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Boxes that together contain the threat set around each input.

    Yields:
        lower, upper: shape (B * m, ...), the m boxes of the first input first.
        m: boxes per input: 1, or as many patch locations as keep B * m within `chunk`.
    """
    if not isinstance(threat, Patch):
        lower, upper = threat.box(x)
        if sound:  # x -+ eps was rounded, relative to |x| + eps
            slack = 4 * unit(x.dtype) * (max(abs(threat.low), abs(threat.high)) + threat.budget)
            lower, upper = (lower - slack).clamp(min=threat.low), (upper + slack).clamp(max=threat.high)
        yield lower, upper, 1
        return
    for places in threat.locations(x.shape[1:]).split(max(1, chunk // len(x))):
        lower, upper = threat.boxes(x, places)
        yield lower.flatten(0, 1), upper.flatten(0, 1), len(places)


def mixing_layer(graph: Graph) -> int:
    """The first linear or convolutional layer that all later nodes build on; the last node if there is none."""
    for i, node in enumerate(graph.nodes):
        alone = all(j >= i for later in graph.nodes[i + 1 :] for j in later.inputs)
        if isinstance(node.op, ops.Linear | ops.Conv) and alone:
            return i
    return len(graph.nodes) - 1
