"""Rules for the ONNX operations that take some of the values, in any order and any number of times."""

import math

import torch

from holdfast.models.onnx.network import Network, Node, Operand, Value, constant_of, integers, optional, value_of
from holdfast.models.onnx.shapes import to_shape


def slice_(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Slice: of each dimension but the batch, every so many values."""
    value = value_of(node, inputs[0])
    starts, ends = integers(node, inputs, 1, "starts"), integers(node, inputs, 2, "ends")
    if starts is None or ends is None:
        raise node.unsupported("starts and ends must be constants")
    axes = integers(node, inputs, 3, "axes") or list(range(len(starts)))
    steps = integers(node, inputs, 4, "steps") or [1] * len(starts)
    for start, end, number, step in zip(starts, ends, axes, steps, strict=True):
        axis = value.axis(number)
        if axis == 0:
            if (start, step) == (0, 1) and (network.fixed_batch or end) <= end:
                continue
            raise node.unsupported("it cuts the batch dimension")
        chosen = range(value.shape[axis])[_slice(start, end, step)]
        value = select(network, node, value, axis, list(chosen))
    return value


def _slice(start: int, end: int, step: int) -> slice:
    """ONNX means by a far negative end, with a negative step, that the first value is included."""
    return slice(start, None if step < 0 and end < -(2**31) + 2 else end, step)


def select(network: Network, node: Node, value: Value, axis: int, index: list[int]) -> Value:
    """The values at some places of a dimension, in that order."""
    if not index:
        raise node.unsupported("it selects nothing")
    if index == list(range(value.shape[axis])):
        return value
    return network.function(torch.index_select, value, axis, torch.tensor(index))


def split(network: Network, node: Node, inputs: list[Operand]) -> list[Value]:
    """Split: parts of a dimension, of equal sizes if none are given."""
    value = value_of(node, inputs[0])
    axis = value.axis(node.attributes.get("axis", 0))
    if axis == 0:
        raise node.unsupported("it splits the batch dimension")
    size, count = value.shape[axis], node.outputs
    sizes = integers(node, inputs, 1, "split")
    if sizes is None:
        part = math.ceil(size / count)
        sizes = [min(part, size - i * part) for i in range(count)]
    if sum(sizes) != size or len(sizes) != count:
        raise node.unsupported(f"parts of the sizes {sizes} do not make up {size}")
    starts = [sum(sizes[:i]) for i in range(count)]
    return [select(network, node, value, axis, list(range(s, s + n))) for s, n in zip(starts, sizes, strict=True)]


def gather(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Gather with constant indices: a list of places of a dimension, or one place, which removes the dimension."""
    value, index = value_of(node, inputs[0]), constant_of(node, optional(inputs, 1), "indices")
    axis = value.axis(node.attributes.get("axis", 0))
    if axis == 0:
        raise node.unsupported("it takes parts of the batch")
    if index.ndim > 1:
        raise node.unsupported(f"indices of {index.ndim} dimensions")
    size = value.shape[axis]
    if bool(((index < -size) | (index >= size)).any()):
        raise IndexError(f"an index is outside of the {size} places")
    chosen = select(network, node, value, axis, [int(i) % size for i in index.flatten()])
    if index.ndim:
        return chosen
    rest = [s for i, s in enumerate(value.shape) if i and i != axis]
    return to_shape(network, node, chosen, rest or [1])


def resize(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Resize and Upsample by whole factors with the nearest value: every value is repeated."""
    value = value_of(node, inputs[0])
    place = {"Upsample": 1, "Resize": 1 if node.opset < 11 else 2}[node.op]
    scales, sizes = optional(inputs, place), optional(inputs, 3)
    if node.attributes.get("mode", b"nearest") != b"nearest":
        raise node.unsupported(f"mode {node.attributes['mode'].decode()}; only nearest has a rule")
    if sizes is not None:
        factors = [float(s) / n for s, n in zip(constant_of(node, sizes, "sizes").tolist(), value.shape, strict=True)]
        factors[0] = 1.0
    elif "scales" in node.attributes:
        factors = [float(s) for s in node.attributes["scales"]]
    else:
        factors = [float(s) for s in constant_of(node, scales, "scales").flatten()]
    if value.implicit or factors[0] != 1 or any(f < 1 or f != int(f) for f in factors) or not _repeats(node):
        raise node.unsupported(f"factors {factors}; expected whole ones, 1 for the batch, and places rounded down")
    for axis, factor in enumerate(map(int, factors[1:]), start=1):
        value = select(network, node, value, axis, [i // factor for i in range(value.shape[axis] * factor)])
    return value


def _repeats(node: Node) -> bool:
    """True if the nearest value of place i, for a whole factor f, is the one at i // f."""
    if node.op == "Upsample" or node.opset < 11:
        return True
    where = node.attributes.get("coordinate_transformation_mode", b"half_pixel")
    nearest = node.attributes.get("nearest_mode", b"round_prefer_floor")
    return (where, nearest) == (b"asymmetric", b"floor") or (
        where in (b"half_pixel", b"pytorch_half_pixel") and nearest in (b"round_prefer_floor", b"round_prefer_ceil")
    )
