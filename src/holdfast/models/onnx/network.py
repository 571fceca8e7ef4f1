"""The torch.fx graph that an ONNX graph becomes, while it is under construction. See `holdfast.models.onnx.convert`."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from holdfast.errors import UnsupportedError

SAMPLE_BATCH = 2
"""Batch size at which shapes are worked out; more than one, so that a mixed-up batch dimension shows."""
LARGEST_VALUE = 2**28
"""Numbers in one value of the network: 1 GiB in float32."""


@dataclass(frozen=True, eq=False)
class Value:
    """A value that depends on the input: its place in the fx graph, and its shape for a batch of SAMPLE_BATCH.

    `implicit` says that the file leaves out the batch dimension: a vector (n,) there is (SAMPLE_BATCH, n) here.
    """

    node: fx.Node
    shape: tuple[int, ...]
    dtype: torch.dtype
    implicit: bool = False

    @property
    def rank(self) -> int:
        """Number of dimensions in the file."""
        return len(self.shape) - self.implicit

    def axis(self, number: int) -> int:
        """The dimension here for a dimension of the file; 0 is the batch, if the file has it."""
        if not -self.rank <= number < self.rank:
            raise IndexError(f"axis {number} of a value of {self.rank} dimensions")
        return number % self.rank + self.implicit


@dataclass(frozen=True)
class Node:
    """An ONNX node, without protobuf."""

    name: str
    op: str
    attributes: dict[str, Any]
    opset: int
    outputs: int = 1

    def unsupported(self, why: str) -> UnsupportedError:
        """The error that names this node."""
        return UnsupportedError(f"ONNX node '{self.name}' ({self.op}) cannot be converted: {why}")


Operand = Value | Tensor | None
Rule = Callable[["Network", Node, list[Operand]], Value | list[Value]]
"""From the operands of a node to its output, or to its outputs in order."""


@dataclass(eq=False)
class Network:
    """The fx graph under construction."""

    fixed_batch: int | None
    """Batch size in the file; None if it is free. 1 for a file that leaves the batch out."""
    graph: fx.Graph = field(default_factory=fx.Graph)
    root: nn.Module = field(default_factory=nn.Module)

    def add_input(self, shape: tuple[int, ...], dtype: torch.dtype, *, implicit: bool = False) -> Value:
        """The input of the network."""
        check_size(shape)
        return Value(self.graph.placeholder("x"), shape, dtype, implicit)

    def module(self, name: str, module: nn.Module, value: Value) -> Value:
        """`module` applied to `value`."""
        key = f"{name.lower()}_{len(self.graph.nodes)}"
        self.root.add_module(key, module.eval())
        with torch.no_grad():
            result = module(torch.zeros(value.shape, dtype=value.dtype))
        return Value(self.graph.call_module(key, (value.node,)), *_kind(result), value.implicit)

    def function(self, function: Callable[..., Tensor], *operands: Any) -> Value:
        """`function` of values, constants and other arguments."""
        sample = [torch.zeros(o.shape, dtype=o.dtype) if isinstance(o, Value) else o for o in operands]
        result = function(*sample)
        node = self.graph.call_function(function, tuple(map(self._argument, operands)))
        return Value(node, *_kind(result), all(o.implicit for o in operands if isinstance(o, Value)))

    def _argument(self, operand: Any) -> Any:
        if isinstance(operand, Value):
            return operand.node
        return self._constant(operand) if isinstance(operand, Tensor) else operand

    def _constant(self, tensor: Tensor) -> fx.Node:
        key = f"constant_{len(self.graph.nodes)}"
        self.root.register_buffer(key, tensor)
        return self.graph.get_attr(key)

    def finish(self, result: Value) -> fx.GraphModule:
        """The finished module, in eval mode."""
        self.graph.output(result.node)
        _fuse_biases(self.graph, self.root)
        self.graph.lint()
        return fx.GraphModule(self.root, self.graph).eval()


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    check_size(tuple(tensor.shape))
    return tuple(tensor.shape), tensor.dtype


def check_size(shape: tuple[int, ...]) -> None:
    """Refuse what would fill the memory while the network is read."""
    if math.prod(shape) > LARGEST_VALUE:
        raise UnsupportedError(
            f"the ONNX graph has a value of shape {shape}; at most {LARGEST_VALUE:,} values are worked out"
        )


def _fuse_biases(graph: fx.Graph, root: nn.Module) -> None:
    """MatMul then Add of a constant is one dense layer: one affine map for bounds, and one rounding error fewer."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not operator.add:
            continue
        dense, constant = node.args if node.args[1].op == "get_attr" else reversed(node.args)
        if dense.op != "call_module" or constant.op != "get_attr" or len(dense.users) != 1:
            continue
        layer, bias = root.get_submodule(dense.target), root.get_buffer(constant.target)
        if isinstance(layer, nn.Linear) and len(list(layer.parameters())) == 1 and _is_bias(bias, layer.out_features):
            layer.bias = nn.Parameter(bias.flatten().clone())
            node.replace_all_uses_with(dense)
            graph.erase_node(node)
            graph.erase_node(constant)
            delattr(root, constant.target)


def _is_bias(constant: Tensor, features: int) -> bool:
    return constant.ndim > 0 and constant.numel() == constant.shape[-1] == features


def value_of(node: Node, operand: Operand) -> Value:
    """The operand, or an error if it is a constant or missing."""
    if not isinstance(operand, Value):
        raise node.unsupported("its first operand is a constant, expected one that depends on the input")
    return operand


def constant_of(node: Node, operand: Operand, what: str) -> Tensor:
    """The operand, or an error if it depends on the input or is missing."""
    if not isinstance(operand, Tensor):
        raise node.unsupported(f"its {what} must be a constant")
    return operand


def optional(inputs: list[Operand], index: int) -> Operand:
    """The operand, or None if the node has not so many."""
    return inputs[index] if index < len(inputs) else None


def integers(node: Node, inputs: list[Operand], index: int, name: str) -> list[int] | None:
    """A list that newer opsets give as an input and older ones as an attribute."""
    operand = optional(inputs, index)
    if operand is not None:
        return [int(i) for i in constant_of(node, operand, name).flatten()]
    return list(node.attributes[name]) if name in node.attributes else None
