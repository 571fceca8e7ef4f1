"""The small set of operations that every network is turned into.

Tensors carry the batch first: (B, *shape). An affine operation offers four views of y = A x + b:
`apply` (A x + b), `apply_abs` (|A| r), `transpose` (A^T g) and `bias_dot` (<g, b>); the domains need nothing else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.bounding.fast.transposed import conv_transpose
from holdfast.errors import UnsupportedError
from holdfast.models.layers import sort_pairs

Shape = tuple[int, ...]


class Op:
    """Base of all operations."""


class Affine(Op, ABC):
    """y = A x + b."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """A x + b, (B, *in) -> (B, *out)."""

    @abstractmethod
    def apply_abs(self, r: Tensor, bias_scale: float = 0.0, constant: float = 0.0) -> Tensor:
        """|A| r + bias_scale |b| + constant, absolute values entry by entry, (B, *in) -> (B, *out)."""

    @abstractmethod
    def transpose(self, g: Tensor) -> Tensor:
        """A^T g, (N, *out) -> (N, *in)."""

    @abstractmethod
    def bias_dot(self, g: Tensor) -> Tensor | None:
        """<g, b>, (N, *out) -> (N,); None where b = 0."""

    @property
    @abstractmethod
    def bias_abs(self) -> Tensor | None:
        """|b|, or a bound of the terms it was computed from; broadcasts against (B, *out). None where b = 0."""

    @property
    @abstractmethod
    def terms(self) -> int:
        """How many products one output adds up, at most: the n of the rounding-error bound."""


def _offset(weight: Tensor, bias: Tensor | None, bias_scale: float, constant: float) -> Tensor | None:
    """bias_scale |b| + constant for each output channel; None for zero."""
    if bias is None:
        return weight.new_full((weight.shape[0],), constant) if constant else None
    return bias.abs() * bias_scale + constant if bias_scale or constant else None


@dataclass(frozen=True, eq=False)
class Linear(Affine):
    """Fully connected layer on (B, in) or (B, ..., in): `weight` (out, in), `bias` (out,) or None."""

    weight: Tensor
    bias: Tensor | None

    def apply(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def apply_abs(self, r: Tensor, bias_scale: float = 0.0, constant: float = 0.0) -> Tensor:
        return F.linear(r, self.weight.abs(), _offset(self.weight, self.bias, bias_scale, constant))

    def transpose(self, g: Tensor) -> Tensor:
        return g @ self.weight

    def bias_dot(self, g: Tensor) -> Tensor | None:
        return None if self.bias is None else (g @ self.bias).flatten(1).sum(1) if g.ndim > 2 else g @ self.bias

    @property
    def bias_abs(self) -> Tensor | None:
        return None if self.bias is None else self.bias.abs()

    @property
    def terms(self) -> int:
        return int(self.weight.shape[1])


@dataclass(frozen=True, eq=False)
class Conv(Affine):
    """2-D convolution: `weight` (out, in / groups, kh, kw), `bias` (out,) or None; inputs of `in_shape` (C, H, W)."""

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    in_shape: Shape

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def apply(self, x: Tensor) -> Tensor:
        return self._convolve(x, self.weight, self.bias)

    def apply_abs(self, r: Tensor, bias_scale: float = 0.0, constant: float = 0.0) -> Tensor:
        return self._convolve(r, self.weight.abs(), _offset(self.weight, self.bias, bias_scale, constant))

    def transpose(self, g: Tensor) -> Tensor:
        """The rows and columns that a strided convolution does not reach come back as zeros: output_padding."""
        rows, columns = (
            self.in_shape[1 + i]
            - ((g.shape[2 + i] - 1) * self.stride[i] - 2 * self.padding[i])
            - (self.dilation[i] * (self.weight.shape[2 + i] - 1) + 1)
            for i in range(2)
        )
        return conv_transpose(g, self.weight, self.stride, self.padding, (rows, columns), self.groups, self.dilation)

    def bias_dot(self, g: Tensor) -> Tensor | None:
        return None if self.bias is None else g.sum((2, 3)) @ self.bias

    @property
    def bias_abs(self) -> Tensor | None:
        return None if self.bias is None else self.bias.abs()[:, None, None]

    @property
    def terms(self) -> int:
        return int(self.weight[0].numel())


@dataclass(frozen=True, eq=False)
class Scale(Affine):
    """Element by element: y = factor * x + shift, both broadcast against one input. Batch norm and normalisation."""

    factor: Tensor
    shift: Tensor
    shift_terms: Tensor
    """Sum of the absolute terms that `shift` was computed from: its own rounding error is relative to this."""

    def apply(self, x: Tensor) -> Tensor:
        return self.factor * x + self.shift

    def apply_abs(self, r: Tensor, bias_scale: float = 0.0, constant: float = 0.0) -> Tensor:
        return torch.addcmul(self.shift_terms * bias_scale + constant, self.factor.abs(), r)

    def transpose(self, g: Tensor) -> Tensor:
        return self.factor * g

    def bias_dot(self, g: Tensor) -> Tensor | None:
        return (g * self.shift).flatten(1).sum(1)

    @property
    def bias_abs(self) -> Tensor | None:
        return self.shift_terms

    @property
    def terms(self) -> int:
        return 8  # the product, and the square root, division and differences behind factor and shift


def is_per_channel(constant: Tensor, channels: int) -> bool:
    """True if a constant that broadcasts against a map (C, H, W) is the same at all of its places."""
    return constant.numel() == 1 or constant.shape == (channels, 1, 1)


def batch_norm(mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ndim: int) -> Scale:
    """Batch norm in eval mode as a Scale, for inputs with `ndim` axes after the batch."""
    factor = (var + eps).rsqrt()
    factor = factor if weight is None else factor * weight
    shift = -mean * factor
    terms = shift.abs()
    if bias is not None:
        shift, terms = shift + bias, terms + bias.abs()
    shape = (-1,) + (1,) * (ndim - 1)
    return Scale(factor.view(shape), shift.view(shape), terms.view(shape))


@dataclass(frozen=True, eq=False)
class Average(Affine):
    """A linear map with non-negative weights and no bias, given as a function: average pooling, mean, zero padding."""

    function: Callable[[Tensor], Tensor]
    in_shape: Shape
    window: int

    def apply(self, x: Tensor) -> Tensor:
        return self.function(x)

    def apply_abs(self, r: Tensor, bias_scale: float = 0.0, constant: float = 0.0) -> Tensor:
        return self.function(r) + constant

    def transpose(self, g: Tensor) -> Tensor:
        with torch.enable_grad():  # torch.func.vjp would do, but loads 80 MB of modules at its first call
            x = g.new_zeros(g.shape[0], *self.in_shape).requires_grad_()
            y = self.function(x)
        return torch.autograd.grad(y, x, g, create_graph=torch.is_grad_enabled())[0]

    def bias_dot(self, g: Tensor) -> Tensor | None:
        return None

    @property
    def bias_abs(self) -> Tensor | None:
        return None

    @property
    def terms(self) -> int:
        return self.window + 1


@dataclass(frozen=True, eq=False)
class Activation(Op):
    """A non-decreasing function of each value; `kind` names it, `parameter` is its slope or alpha if it has one.

    `error` is how far the computed function may be from a non-decreasing one, beyond what rounding does to all of them:
    softplus falls where it turns into the identity.
    """

    kind: str
    function: Callable[[Tensor], Tensor]
    parameter: float = 0.0
    error: float = 0.0

    def ends(self, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of its values on [lower, upper], up to a few units in the last place."""
        low, high = self.function(lower), self.function(upper)
        return (low - self.error, high + self.error) if self.error else (low, high)


@dataclass(frozen=True, eq=False)
class MaxPool(Op):
    """Max pooling over `kernel` windows; padding counts as minus infinity."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil_mode: bool

    def apply(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H', W')."""
        return F.max_pool2d(x, self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode)


class MinMax(Op):
    """Sort pairs of neighbouring channels: (2i, 2i+1) becomes (max, min). Linear where the order is known."""

    @staticmethod
    def apply(x: Tensor) -> Tensor:
        """(B, C, ...) -> (B, C, ...), C even."""
        return sort_pairs(x)


class Add(Op):
    """Sum of two nodes, broadcast against each other as torch does."""


@dataclass(frozen=True)
class Reshape(Op):
    """The same values in the same order in another shape (without the batch)."""

    shape: Shape


@dataclass(frozen=True)
class Unroll(Op):
    """Maps of `shape` (C, H, W) as (H W C): their order in memory with channels last, so that nothing is moved.

    Only in training by intervals, in place of a Reshape before dense layers, whose weights are put in that order.
    """

    shape: Shape

    @staticmethod
    def apply(x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, H W C)."""
        return x.permute(0, 2, 3, 1).flatten(1)

    def reorder(self, weight: Tensor) -> Tensor:
        """The weights (out, C H W) of a dense layer for this order."""
        maps: Tensor = weight.unflatten(1, self.shape)
        return maps.permute(0, 2, 3, 1).flatten(1)


@dataclass(frozen=True)
class Concat(Op):
    """Concatenation of two or more nodes along `dim` (batch counted)."""

    dim: int


class Input(Op):
    """The network's input."""


@dataclass(frozen=True, eq=False)
class Node:
    """One operation: what it does, on which earlier nodes, under which name in the model, with which output shape."""

    op: Op
    inputs: tuple[int, ...]
    name: str
    shape: Shape


@dataclass(frozen=True, eq=False)
class Graph:
    """A network as a list of nodes in order of evaluation. Node 0 is the input, the last one the logits."""

    nodes: tuple[Node, ...]

    def forward(self, x: Tensor) -> Tensor:
        """The logits of x, computed through the operations: equals the model up to rounding."""
        logits: Tensor = self.walk(x, lambda node, values: evaluate(node.op, values))[-1]
        return logits

    def after(self, last: int) -> "Graph":
        """The graph from node `last` on, which becomes its input."""
        nodes = [Node(Input(), (), "input", self.nodes[last].shape)]
        nodes += [replace(node, inputs=tuple(i - last for i in node.inputs)) for node in self.nodes[last + 1 :]]
        return Graph(tuple(nodes))

    def walk(self, start: Any, rule: Callable[[Node, list[Any]], Any]) -> list[Any]:
        """Values of all nodes: `start` at the input, `rule(node, values of its inputs)` elsewhere."""
        values = [start]
        for node in self.nodes[1:]:
            values.append(rule(node, [values[i] for i in node.inputs]))
        return values


def evaluate(op: Op, values: list[Tensor]) -> Tensor:
    """The operation itself on tensors (B, *shape)."""
    match op:
        case Affine() | MaxPool() | MinMax() | Unroll():
            return op.apply(values[0])
        case Activation():
            return op.function(values[0])
        case Add():
            return values[0] + values[1]
        case Reshape():
            return values[0].reshape(-1, *op.shape)
        case Concat():
            return torch.cat(values, op.dim)
    raise UnsupportedError(f"no rule to evaluate {type(op).__name__}")
