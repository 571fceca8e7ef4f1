"""Rules for the ONNX operations that only move values about. The batch dimension stays first, and stays free."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
    """Reshape: the first size is the batch, unless the file has one input at a time and leaves the batch out."""
    value = value_of(node, inputs[0])
    target = [int(i) for i in constant_of(node, optional(inputs, 1), "shape").flatten()]
    features = math.prod(value.shape[1:])
    if network.fixed_batch == 1 and target and target[0] not in (0, 1) and _fits(target, features):
        implicit, rest = True, target
    elif target and (target[0] in (0, -1, network.fixed_batch)):
        implicit, rest = False, target[1:]
    else:
        raise node.unsupported(f"the shape {target} does not begin with the batch dimension")
    skipped = 0 if implicit else 1
    rest = [value.shape[i + 1] if size == 0 and i + skipped < value.rank else size for i, size in enumerate(rest)]
    known = math.prod(size for size in rest if size != -1)
    rest = [features // max(known, 1) if size == -1 else size for size in rest]
    return replace(to_shape(network, node, value, rest), implicit=implicit)


def _fits(target: list[int], features: int) -> bool:
    """True if the sizes, of which one may be -1, hold exactly the values of one input and nothing for a batch."""
    known = math.prod(size for size in target if size != -1)
    return known == features if -1 not in target else len(target) == 1


def flatten(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Flatten: all but the batch."""
    value = value_of(node, inputs[0])
    axis = node.attributes.get("axis", 1)
    single = network.fixed_batch == 1 and axis % max(value.rank, 1) == 0
    if not single and (value.implicit or axis % value.rank != 1):
        raise node.unsupported(f"axis {axis} would mix the inputs of the batch")
    return replace(to_shape(network, node, value, (math.prod(value.shape[1:]),)), implicit=False)


def squeeze(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Squeeze: drop dimensions of size one, also the batch where the file has one input at a time."""
    value = value_of(node, inputs[0])
    given = integers(node, inputs, 1, "axes")
    single = network.fixed_batch == 1 and not value.implicit
    if given is None:
        axes = {i for i in range(1, len(value.shape)) if value.shape[i] == 1} | ({0} if single else set())
    else:
        axes = {value.axis(a) for a in given}
    if 0 in axes and not single:
        raise node.unsupported("it removes the batch dimension")
    rest = [size for i, size in enumerate(value.shape) if i and i not in axes]
    return replace(to_shape(network, node, value, rest or [1]), implicit=value.implicit or 0 in axes)


def unsqueeze(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Unsqueeze: add dimensions of size one; in front of a value without a batch, it is the batch."""
    value = value_of(node, inputs[0])
    axes = integers(node, inputs, 1, "axes") or []
    places = sorted(a % (value.rank + len(axes)) for a in axes)
    implicit = value.implicit and 0 not in places
    if not value.implicit and 0 in places:
        raise node.unsupported("it adds a dimension before the batch")
    sizes = list(value.shape[1:])
    for place in places[value.implicit and not implicit :]:
        sizes.insert(place - (not implicit), 1)
    return replace(to_shape(network, node, value, sizes), implicit=implicit)


def transpose(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Transpose: reorder all dimensions but the batch."""
    value = value_of(node, inputs[0])
    order = tuple(node.attributes.get("perm", tuple(reversed(range(value.rank)))))
    if value.implicit:
        order = (0, *(i + 1 for i in order))
    if order[0] != 0:
        raise node.unsupported(f"the order {order} moves the batch dimension")
    return network.function(torch.permute, value, order)


def concat(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Concat: join values and constants along any dimension but the batch."""
    first = next(operand for operand in inputs if isinstance(operand, Value))
    axis = first.axis(node.attributes["axis"])
    if axis == 0:
        raise node.unsupported("it joins along the batch dimension")
    if any(isinstance(operand, Tensor) for operand in inputs):
        return _with_constants(network, node, inputs, axis, first)
    values = [value_of(node, operand) for operand in inputs]
    shape = list(first.shape)
    shape[axis] = sum(v.shape[axis] for v in values)
    joined = network.graph.call_function(torch.cat, ([v.node for v in values], axis))
    return Value(joined, tuple(shape), first.dtype, first.implicit)


def _with_constants(network: Network, node: Node, inputs: list[Operand], axis: int, first: Value) -> Value:
    """Every value is padded with zeros to the whole size; their sum plus the constants is what was asked for."""
    lead = 1 if first.implicit else 0
    sizes = [o.shape[axis] if isinstance(o, Value) else constant_of(node, o, "part").shape[axis - lead] for o in inputs]
    whole = torch.zeros((1, *first.shape[1:axis], sum(sizes), *first.shape[axis + 1 :]), dtype=first.dtype)
    total: Value | None = None
    for i, (operand, size) in enumerate(zip(inputs, sizes, strict=True)):
        start, end = sum(sizes[:i]), sum(sizes[i + 1 :])
        if isinstance(operand, Tensor):
            whole.narrow(axis, start, size).copy_(operand if lead == 0 else operand[None])
            continue
        sides = [0, 0] * (len(first.shape) - 1 - axis) + [start, end]
        padded = network.function(F.pad, value_of(node, operand), sides)
        total = padded if total is None else network.function(torch.add, total, padded)
    assert total is not None
    return network.function(torch.add, total, whole)
