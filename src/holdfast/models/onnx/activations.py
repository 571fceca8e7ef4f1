"""Rules for the ONNX operations between the convolutions of modern networks. See `holdfast.models.onnx.convert`."""

import math
import operator
from collections.abc import Callable

import onnx
import torch
from torch import Tensor, nn

from holdfast.models.onnx.network import Network, Node, Operand, Rule, Value, constant_of, optional, value_of


def elementwise(make: Callable[[Node], nn.Module]) -> Rule:
    """A rule for an operation with one operand, which becomes the module that `make` makes."""
    return lambda network, node, inputs: network.module(node.op, make(node), value_of(node, inputs[0]))


def _gelu(node: Node) -> nn.Module:
    return nn.GELU(node.attributes.get("approximate", b"none").decode())


def _hard_sigmoid(node: Node) -> nn.Module:
    alpha, beta = node.attributes.get("alpha", 0.2), node.attributes.get("beta", 0.5)
    if abs(alpha - 1 / 6) > 1e-6 or beta != 0.5:
        raise node.unsupported(f"alpha={alpha:g} and beta={beta:g}; expected torch's, 1/6 and 1/2")
    return nn.Hardsigmoid()


def _cast(network: Network, node: Node, inputs: list[Operand]) -> Value:
    value = value_of(node, inputs[0])
    name = onnx.TensorProto.DataType.Name(node.attributes["to"])
    if {"FLOAT": torch.float32, "DOUBLE": torch.float64, "FLOAT16": torch.float16}.get(name) != value.dtype:
        raise node.unsupported(f"from {value.dtype} to {name.lower()}; export the model in one float dtype")
    return value


def clip(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Clip to constants; with one end it is a shifted ReLU."""
    value = value_of(node, inputs[0])
    ends = []
    for index, name, default in ((1, "min", -math.inf), (2, "max", math.inf)):
        operand = optional(inputs, index)
        given = node.attributes.get(name, default) if operand is None else constant_of(node, operand, name)
        ends.append(float(given))
    low, high = ends
    if math.isfinite(low) and math.isfinite(high):
        return network.module("clip", nn.ReLU6() if (low, high) == (0, 6) else nn.Hardtanh(low, high), value)
    if math.isfinite(low):
        return _above(network, value, torch.tensor(low, dtype=value.dtype))
    return _below(network, value, torch.tensor(high, dtype=value.dtype)) if math.isfinite(high) else value


def _above(network: Network, value: Value, floor: Tensor) -> Value:
    """max(x, c) = relu(x - c) + c."""
    if not bool(floor.any()):
        return network.module("relu", nn.ReLU(), value)
    lifted = network.module("relu", nn.ReLU(), network.function(torch.sub, value, floor))
    return network.function(torch.add, lifted, floor)


def _below(network: Network, value: Value, ceiling: Tensor) -> Value:
    """min(x, c) = c - relu(c - x)."""
    room = network.module("relu", nn.ReLU(), network.function(torch.sub, ceiling, value))
    return network.function(torch.sub, ceiling, room)


def _extreme(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Max or Min of a value with constants and other values, by ReLUs: max(x, y) = y + relu(x - y)."""
    values = [operand for operand in inputs if isinstance(operand, Value)]
    result = values[0]
    for other in values[1:]:
        ends = (result, other) if node.op == "Max" else (other, result)
        more = network.module("relu", nn.ReLU(), network.function(torch.sub, *ends))
        result = network.function(torch.add if node.op == "Max" else torch.sub, other, more)
    for constant in (operand for operand in inputs if isinstance(operand, Tensor)):
        result = (_above if node.op == "Max" else _below)(network, result, constant)
    return result


def _absolute(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """|x| = relu(x) + relu(-x), without rounding."""
    value = value_of(node, inputs[0])
    negative = network.module("relu", nn.ReLU(), network.function(operator.neg, value))
    return network.function(torch.add, network.module("relu", nn.ReLU(), value), negative)


def _power(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Pow with a constant exponent."""
    value, exponent = value_of(node, inputs[0]), constant_of(node, optional(inputs, 1), "exponent")
    if exponent.numel() != 1:
        raise node.unsupported("an exponent of its own for each value")
    power = float(exponent)
    return value if power == 1 else network.function(torch.pow, value, int(power) if power == int(power) else power)


def _layer_norm(network: Network, node: Node, inputs: list[Operand]) -> Value:
    value, scale = value_of(node, inputs[0]), constant_of(node, inputs[1], "scale")
    axis = node.attributes.get("axis", -1) % len(value.shape)
    if axis == 0 or tuple(scale.shape) != value.shape[axis:]:
        raise node.unsupported(f"axis {axis} and a scale of shape {tuple(scale.shape)} for values of {value.shape[1:]}")
    shift = optional(inputs, 2)
    bias: Tensor | None = None if shift is None else constant_of(node, shift, "bias")
    layer = nn.LayerNorm(scale.shape, node.attributes.get("epsilon", 1e-5), bias=bias is not None, dtype=scale.dtype)
    layer.load_state_dict({"weight": scale} if bias is None else {"weight": scale, "bias": bias})
    return network.module("layernorm", layer, value)


ACTIVATIONS: dict[str, Rule] = {
    "Abs": _absolute,
    "Cast": _cast,
    "Celu": elementwise(lambda node: nn.CELU(node.attributes.get("alpha", 1.0))),
    "Clip": clip,
    "Elu": elementwise(lambda node: nn.ELU(node.attributes.get("alpha", 1.0))),
    "Gelu": elementwise(_gelu),
    "HardSigmoid": elementwise(_hard_sigmoid),
    "HardSwish": elementwise(lambda node: nn.Hardswish()),
    "LayerNormalization": _layer_norm,
    "Max": _extreme,
    "Min": _extreme,
    "Neg": lambda network, node, inputs: network.function(operator.neg, value_of(node, inputs[0])),
    "Pow": _power,
    "Softplus": elementwise(lambda node: nn.Softplus()),
    "Softsign": elementwise(lambda node: nn.Softsign()),
}
