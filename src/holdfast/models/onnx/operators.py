"""One rule per ONNX operation: which torch layer or function it becomes. See `holdfast.models.onnx.convert`."""

import math
import operator
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.models.layers import Arctan
from holdfast.models.onnx.activations import ACTIVATIONS, elementwise
from holdfast.models.onnx.choose import gather, resize, slice_, split
from holdfast.models.onnx.network import (
    Network,
    Node,
    Operand,
    Rule,
    Value,
    constant_of,
    integers,
    optional,
    value_of,
)
from holdfast.models.onnx.shapes import concat, flatten, reshape, squeeze, to_shape, transpose, unsqueeze

# --- elementwise ------------------------------------------------------------------------------------------------------


def _identity(network: Network, node: Node, inputs: list[Operand]) -> Value:
    return value_of(node, inputs[0])


def _softmax(network: Network, node: Node, inputs: list[Operand]) -> Value:
    value = value_of(node, inputs[0])
    axis = node.attributes.get("axis", -1 if node.opset >= 13 else 1) % len(value.shape)
    # Before opset 13 softmax ran over all dimensions from `axis` on.
    if axis == 0 or (node.opset < 13 and axis != len(value.shape) - 1):
        raise node.unsupported(f"axis {axis} of a value of {len(value.shape)} dimensions")
    return network.module("softmax", nn.Softmax(axis), value)


def _arithmetic(function: Callable[..., Tensor]) -> Rule:
    def rule(network: Network, node: Node, inputs: list[Operand]) -> Value:
        left, right = inputs[0], inputs[1]
        if isinstance(left, Value) and isinstance(right, Value):
            if node.op in ("Mul", "Div"):
                raise node.unsupported("both operands depend on the input; one must be a constant")
            if len(left.shape) != len(right.shape):  # also where one of them has no batch in the file
                raise node.unsupported(f"its operands have {len(left.shape)} and {len(right.shape)} dimensions")
            return network.function(function, left, right)
        if node.op == "Div" and isinstance(right, Value):
            raise node.unsupported("it divides by a value that depends on the input")
        first, second = (left, right) if isinstance(left, Value) else (right, left)
        value, constant = value_of(node, first), constant_of(node, second, "other operand")
        rank = len(value.shape)
        if constant.ndim > rank or (constant.ndim == rank and constant.shape[0] != 1):
            raise node.unsupported(f"a constant of shape {tuple(constant.shape)} has a batch dimension of its own")
        made = network.function(function, left, right)
        return replace(made, implicit=value.implicit and constant.ndim < rank)

    return rule


# --- dense and convolution --------------------------------------------------------------------------------------------


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
    if bias is not None:
        layer.bias = nn.Parameter(bias.flatten().expand(weight.shape[0]).clone())
    return layer


def _matmul(network: Network, node: Node, inputs: list[Operand]) -> Value:
    if isinstance(inputs[0], Tensor):
        return _from_the_left(network, node, inputs[0], value_of(node, inputs[1]))
    weight = constant_of(node, inputs[1], "second operand")
    if weight.ndim != 2:
        raise node.unsupported(f"its constant has shape {tuple(weight.shape)}; expected a matrix")
    return network.module("linear", _linear(weight.T, None), value_of(node, inputs[0]))


def _from_the_left(network: Network, node: Node, weight: Tensor, value: Value) -> Value:
    """W x for values (B, n, m): the dimension before the last one is mapped."""
    vector = value.implicit and len(value.shape) == 2
    if weight.ndim != 2 or (len(value.shape) < 3 and not vector):
        raise node.unsupported(f"a constant of shape {tuple(weight.shape)} times values of {value.shape[1:]} per input")
    if vector:
        return network.module("linear", _linear(weight, None), value)
    rank = len(value.shape)
    order = (*range(rank - 2), rank - 1, rank - 2)
    turned = network.module("linear", _linear(weight, None), network.function(torch.permute, value, order))
    return network.function(torch.permute, turned, order)


def _gemm(network: Network, node: Node, inputs: list[Operand]) -> Value:
    if node.attributes.get("transA", 0):
        raise node.unsupported("transA moves the batch dimension")
    weight = constant_of(node, inputs[1], "B") * node.attributes.get("alpha", 1.0)
    weight = weight if node.attributes.get("transB", 0) else weight.T
    bias = None
    if optional(inputs, 2) is not None:
        bias = constant_of(node, inputs[2], "C") * node.attributes.get("beta", 1.0)
        if bias.numel() not in (1, weight.shape[0]) or (bias.ndim == 2 and bias.shape[0] != 1):
            raise node.unsupported(f"C has shape {tuple(bias.shape)}; expected one number per output")
    return network.module("linear", _linear(weight, bias), value_of(node, inputs[0]))


def _batch_norm(network: Network, node: Node, inputs: list[Operand]) -> Value:
    value = value_of(node, inputs[0])
    if node.attributes.get("training_mode", 0):
        raise node.unsupported("it is in training mode; export the model after model.eval()")
    if not node.attributes.get("spatial", 1):
        raise node.unsupported("it has statistics of its own for every place (spatial=0)")
    names = ("scale", "bias", "mean", "variance")
    scale, bias, mean, variance = (constant_of(node, i, name) for i, name in zip(inputs[1:], names, strict=True))
    make = nn.BatchNorm2d if len(value.shape) == 4 else nn.BatchNorm1d
    layer = make(len(scale), eps=node.attributes.get("epsilon", 1e-5), dtype=scale.dtype)
    layer.load_state_dict({"weight": scale, "bias": bias, "running_mean": mean, "running_var": variance}, strict=False)
    return network.module("batchnorm", layer, value)


def _conv(network: Network, node: Node, inputs: list[Operand]) -> Value:
    if isinstance(inputs[0], Value) and len(inputs[0].shape) == 3:
        return _in_two_dimensions(_conv, network, node, inputs)
    value, weight = _image(node, inputs[0]), constant_of(node, inputs[1], "kernel")
    bias = None if optional(inputs, 2) is None else constant_of(node, inputs[2], "bias")
    kernel, strides, dilations = _window(node, list(weight.shape[2:]))
    (top, left), (bottom, right) = _pads(node, value, kernel, strides, dilations)
    groups = node.attributes.get("group", 1)
    padding = (top, left) if (top, left) == (bottom, right) else (0, 0)
    if (top, left) != (bottom, right):
        value = network.module("pad", nn.ZeroPad2d((left, right, top, bottom)), value)
    layer = nn.Conv2d(
        *(weight.shape[1] * groups, weight.shape[0]),
        *((kernel[0], kernel[1]), (strides[0], strides[1]), padding, (dilations[0], dilations[1])),
        groups=groups,
        bias=bias is not None,
        device="meta",
    )
    layer.weight = nn.Parameter(weight.clone())
    layer.bias = None if bias is None else nn.Parameter(bias.clone())
    return network.module("conv", layer, value)


# --- images -----------------------------------------------------------------------------------------------------------


def _image(node: Node, operand: Operand) -> Value:
    value = value_of(node, operand)
    if len(value.shape) != 4:
        raise node.unsupported(f"its operand has {len(value.shape)} dimensions, expected images (B, C, H, W)")
    return value


def _window(node: Node, kernel: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Kernel, strides and dilations of a convolution or pool over two dimensions."""
    if len(kernel) != 2:
        raise node.unsupported(f"its window {kernel} does not have two dimensions")
    return kernel, list(node.attributes.get("strides", (1, 1))), list(node.attributes.get("dilations", (1, 1)))


def _pads(
    node: Node, value: Value, kernel: list[int], strides: list[int], dilations: list[int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Padding at the begin (top, left) and at the end (bottom, right) of the image."""
    mode = node.attributes.get("auto_pad", b"NOTSET").decode()
    if mode == "NOTSET":
        top, left, bottom, right = node.attributes.get("pads", (0, 0, 0, 0))
        return (top, left), (bottom, right)
    if mode == "VALID":
        return (0, 0), (0, 0)
    begin, end = [], []
    for size, k, stride, dilation in zip(value.shape[2:], kernel, strides, dilations, strict=True):
        total = max((math.ceil(size / stride) - 1) * stride + dilation * (k - 1) + 1 - size, 0)
        small, large = total // 2, total - total // 2
        begin.append(small if mode == "SAME_UPPER" else large)
        end.append(large if mode == "SAME_UPPER" else small)
    return (begin[0], begin[1]), (end[0], end[1])


def _in_two_dimensions(
    rule: Callable[[Network, Node, list[Operand]], Value], network: Network, node: Node, inputs: list[Operand]
) -> Value:
    """A convolution or pool of signals (B, C, L), as one of images of height one."""
    signal = value_of(node, inputs[0])
    image = to_shape(network, node, signal, (signal.shape[1], 1, signal.shape[2]))
    given = dict(node.attributes)
    for name in ("kernel_shape", "strides", "dilations"):
        if name in given:
            given[name] = [1, *given[name]]
    if "pads" in given:
        given["pads"] = [0, given["pads"][0], 0, given["pads"][1]]
    rest = [i.unsqueeze(2) if isinstance(i, Tensor) and i.ndim == 3 else i for i in inputs[1:]]
    made = rule(network, replace(node, attributes=given), [image, *rest])
    return to_shape(network, node, made, (made.shape[1], made.shape[3]))


def _pool(network: Network, node: Node, inputs: list[Operand]) -> Value:
    if isinstance(inputs[0], Value) and len(inputs[0].shape) == 3:
        return _in_two_dimensions(_pool, network, node, inputs)
    value = _image(node, inputs[0])
    kernel, strides, dilations = _window(node, list(node.attributes["kernel_shape"]))
    begin, end = _pads(node, value, kernel, strides, dilations)
    ceil_mode = bool(node.attributes.get("ceil_mode", 0))
    window, step = (kernel[0], kernel[1]), (strides[0], strides[1])
    if node.op == "MaxPool":
        # Where only the end is padded more, ceil_mode clips the last window instead: the same maximum.
        uneven = begin != end
        layer: nn.Module = nn.MaxPool2d(
            window, step, begin, (dilations[0], dilations[1]), ceil_mode=ceil_mode or uneven
        )
    else:
        counted = bool(node.attributes.get("count_include_pad", 0))
        if dilations != [1, 1] or ceil_mode or (begin != end and not counted):
            raise node.unsupported("average pooling with dilation, ceil_mode, or uneven padding that does not count")
        uneven = False
        if begin != end:
            value = network.module("pad", nn.ZeroPad2d((begin[1], end[1], begin[0], end[0])), value)
            begin = (0, 0)
        layer = nn.AvgPool2d(window, step, begin, count_include_pad=counted)
    result = network.module(node.op, layer, value)
    if uneven:
        sizes = zip(value.shape[2:], begin, end, kernel, dilations, strides, strict=True)
        expected = tuple((size + b + e - d * (k - 1) - 1) // s + 1 for size, b, e, k, d, s in sizes)
        if result.shape[2:] != expected or ceil_mode or any(e < b for b, e in zip(begin, end, strict=True)):
            raise node.unsupported(f"max pooling with uneven padding {begin} and {end}")
    return result


def _global_average(network: Network, node: Node, inputs: list[Operand]) -> Value:
    return network.module("pool", nn.AdaptiveAvgPool2d(1), _image(node, inputs[0]))


def _reduce(network: Network, node: Node, inputs: list[Operand]) -> Value:
    """Mean or sum over any dimensions but the batch."""
    value = value_of(node, inputs[0])
    given = integers(node, inputs, 1, "axes")
    if not given and node.attributes.get("noop_with_empty_axes", 0):
        return value
    axes = sorted(value.axis(a) for a in given) if given else list(range(not value.implicit, len(value.shape)))
    if 0 in axes or (not given and not value.implicit and network.fixed_batch != 1):
        raise node.unsupported("it mixes the inputs of the batch")
    keep = bool(node.attributes.get("keepdims", 1))
    if node.op == "ReduceMean" and axes == [2, 3] and len(value.shape) == 4:
        pooled = network.module("pool", nn.AdaptiveAvgPool2d(1), value)
        return pooled if keep else network.module("flatten", nn.Flatten(), pooled)
    made = network.function(torch.mean if node.op == "ReduceMean" else torch.sum, value, tuple(axes), keep)
    return made if len(made.shape) > 1 else network.function(torch.unsqueeze, made, 1)


def _pad(network: Network, node: Node, inputs: list[Operand]) -> Value:
    value = value_of(node, inputs[0])
    pads = integers(node, inputs, 1, "pads") or []
    given = optional(inputs, 2)
    fill = float(node.attributes.get("value", 0.0) if given is None else constant_of(node, given, "value"))
    if node.attributes.get("mode", b"constant") != b"constant":
        raise node.unsupported(f"mode {node.attributes['mode'].decode()}; only padding with a constant has a rule")
    if optional(inputs, 3) is not None or len(pads) != 2 * value.rank:
        raise node.unsupported(f"padding {pads} for values of {value.rank} dimensions")
    both = list(zip(pads[: value.rank], pads[value.rank :], strict=True))
    if not value.implicit and any(both[0]):
        raise node.unsupported(f"padding {pads} of the batch dimension")
    sides = [side for pair in reversed(both[not value.implicit :]) for side in pair]
    padded = network.function(F.pad, value, sides)
    if not fill:
        return padded
    frame = F.pad(torch.zeros((1, *value.shape[1:]), dtype=value.dtype), sides, value=fill)
    return network.function(torch.add, padded, frame)


RULES: dict[str, Rule] = {
    **ACTIVATIONS,
    "Add": _arithmetic(operator.add),
    "Atan": elementwise(lambda node: Arctan()),
    "AveragePool": _pool,
    "BatchNormalization": _batch_norm,
    "Concat": concat,
    "Conv": _conv,
    "Div": _arithmetic(operator.truediv),
    "Dropout": _identity,
    "Flatten": flatten,
    "Gather": gather,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average,
    "Identity": _identity,
    "LeakyRelu": elementwise(lambda node: nn.LeakyReLU(node.attributes.get("alpha", 0.01))),
    "MatMul": _matmul,
    "MaxPool": _pool,
    "Mul": _arithmetic(operator.mul),
    "Pad": _pad,
    "ReduceMean": _reduce,
    "ReduceSum": _reduce,
    "Relu": elementwise(lambda node: nn.ReLU()),
    "Reshape": reshape,
    "Resize": resize,
    "Sigmoid": elementwise(lambda node: nn.Sigmoid()),
    "Slice": slice_,
    "Softmax": _softmax,
    "Split": split,
    "Squeeze": squeeze,
    "Sub": _arithmetic(operator.sub),
    "Tanh": elementwise(lambda node: nn.Tanh()),
    "Transpose": transpose,
    "Unsqueeze": unsqueeze,
    "Upsample": resize,
}
