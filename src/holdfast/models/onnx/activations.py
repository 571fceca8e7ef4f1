"""Rules for the ONNX operations between the convolutions of modern networks. See `holdfast.models.onnx.convert`."""

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
    "Cast": _cast,
    "Celu": elementwise(lambda node: nn.CELU(node.attributes.get("alpha", 1.0))),
    "Elu": elementwise(lambda node: nn.ELU(node.attributes.get("alpha", 1.0))),
    "Gelu": elementwise(_gelu),
    "HardSigmoid": elementwise(_hard_sigmoid),
    "HardSwish": elementwise(lambda node: nn.Hardswish()),
    "LayerNormalization": _layer_norm,
    "Softplus": elementwise(lambda node: nn.Softplus()),
    "Softsign": elementwise(lambda node: nn.Softsign()),
}
