"""Rules for the ONNX operations that only move values about. The batch dimension stays first, and stays free."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from holdfast.models.onnx.network import Network, Node, Operand, Value, constant_of, integers, optional, value_of


def to_shape(network: Network, node: Node, value: Value, rest: Sequence[int]) -> Value:
    """`value` with the sizes `rest` after the batch dimension."""
    if math.prod(rest) != math.prod(value.shape[1:]) or not rest:
        raise node.unsupported(f"from {value.shape[1:]} to {tuple(rest)} per input would mix the inputs of the batch")
    if tuple(rest) == value.shape[1:]:
        return value
    if len(rest) == 1:
        return network.module("flatten", nn.Flatten(), value)
    return network.function(torch.reshape, value, (-1, *rest))


def reshape(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Reshape: the first size is the batch, whatever the file says."""
    value = value_of(node, inputs[0])
    target = [int(i) for i in constant_of(node, optional(inputs, 1), "shape").flatten()]
    if not target or target[0] not in (0, -1, network.fixed_batch):
        raise node.unsupported(f"the shape {target} does not begin with the batch dimension")
    rest = [value.shape[i + 1] if size == 0 and i + 1 < len(value.shape) else size for i, size in enumerate(target[1:])]
    known = math.prod(size for size in rest if size != -1)
    features = math.prod(value.shape[1:])
    rest = [features // max(known, 1) if size == -1 else size for size in rest]
    return to_shape(network, node, value, rest)


def flatten(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Flatten: all but the batch."""
    value = value_of(node, inputs[0])
    axis = node.attributes.get("axis", 1)
    if axis % len(value.shape) != 1:
        raise node.unsupported(f"axis {axis} would mix the inputs of the batch")
    return to_shape(network, node, value, (math.prod(value.shape[1:]),))


def squeeze(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Squeeze: drop dimensions of size one."""
    value = value_of(node, inputs[0])
    rank = len(value.shape)
    axes = integers(node, inputs, 1, "axes")
    chosen = {i for i in range(1, rank) if value.shape[i] == 1} if axes is None else {a % rank for a in axes}
    if 0 in chosen:
        raise node.unsupported("it removes the batch dimension")
    return to_shape(network, node, value, [s for i, s in enumerate(value.shape) if i and i not in chosen])


def unsqueeze(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Unsqueeze: add dimensions of size one."""
    value = value_of(node, inputs[0])
    axes = integers(node, inputs, 1, "axes") or []
    sizes = list(value.shape)
    for axis in sorted(a % (len(value.shape) + len(axes)) for a in axes):
        if axis == 0:
            raise node.unsupported("it adds a dimension before the batch")
        sizes.insert(axis, 1)
    return to_shape(network, node, value, sizes[1:])


def transpose(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Transpose: reorder all dimensions but the batch."""
    value = value_of(node, inputs[0])
    order = tuple(node.attributes.get("perm", tuple(reversed(range(len(value.shape))))))
    if order[0] != 0:
        raise node.unsupported(f"the order {order} moves the batch dimension")
    return network.function(torch.permute, value, order)


def concat(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Concat: join along any dimension but the batch."""
    values = [value_of(node, operand) for operand in inputs]
    axis = node.attributes["axis"] % len(values[0].shape)
    if axis == 0:
        raise node.unsupported("it joins along the batch dimension")
    shape = list(values[0].shape)
    shape[axis] = sum(v.shape[axis] for v in values)
    joined = network.graph.call_function(torch.cat, ([v.node for v in values], axis))
    return Value(joined, tuple(shape), values[0].dtype)
