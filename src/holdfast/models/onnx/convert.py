"""ONNX graphs as torch.fx modules built of ordinary torch layers, so that bounds can trace them like any other model.

The conversion walks the nodes in order and keeps, for every value, a constant tensor or an fx node with the shape that
it has for a batch of `SAMPLE_BATCH`. The rule for each operation is in `onnx_rules`; a node without a rule is an error.
The batch dimension of the result is free, even where the file has fixed it.
"""

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, fx

from holdfast.errors import HoldfastError, InputError, StorageError, UnsupportedError, did_you_mean
from holdfast.models.onnx.network import LARGEST_VALUE, SAMPLE_BATCH, Network, Node, Value, check_size
from holdfast.models.onnx.operators import RULES
from holdfast.models.onnx.sklearn import to_scores

OLDEST_OPSET = 7
LARGEST_FILE = 2**31 - 1
"""Bytes of an ONNX file: the limit of protobuf."""
# A size read off a value's shape has -1 for the batch; only operations that move sizes about keep that meaning.
_MOVES = frozenset({"Cast", "Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"})


def load_onnx(path: Path) -> fx.GraphModule:
    """The network of an ONNX file, in eval mode.

    Raises:
        StorageError: the file is damaged.
        InputError: the file is not a network of one input and one output with fixed sizes.
        UnsupportedError: a node has no rule; the message names it.
    """
    proto = _read(path)
    opset = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=0)
    if opset < OLDEST_OPSET:
        raise InputError(
            f"'{path}' uses opset {opset}; {OLDEST_OPSET} or newer is needed. "
            f"Convert it with onnx.version_converter.convert_version(model, {max(OLDEST_OPSET, 13)})."
        )
    graph = to_scores(proto.graph)
    values: dict[str, Value | Tensor] = {i.name: _tensor(numpy_helper.to_array(i)) for i in graph.initializer}
    name, sizes, dtype = _input_of(graph, values, path)
    implicit = len(sizes) == 1
    network = Network(fixed_batch=1 if implicit else sizes[0])
    shape = (SAMPLE_BATCH, *(size for size in sizes[not implicit :] if size is not None))
    values[name] = network.add_input(shape, dtype, implicit=implicit)
    from_shape: set[str] = set()
    for node in graph.node:
        _convert(node, opset, network, values, from_shape)
    result = values.get(graph.output[0].name)
    if not isinstance(result, Value):
        raise InputError(f"the output '{graph.output[0].name}' of '{path}' does not depend on its input")
    model = network.finish(result)
    vars(model)["input_shape"] = shape[1:]  # of one input: a property knows only how many values there are
    return model


def _read(path: Path) -> Any:
    try:
        proto = _unpacked(path) if path.suffix == ".gz" else onnx.load(path)
        onnx.checker.check_model(proto)
    except Exception as error:  # protobuf, the checker and external data each fail with errors of their own
        raise StorageError(f"'{path}' is damaged or not an ONNX file ({type(error).__name__}: {error})") from error
    return proto


def _unpacked(path: Path) -> Any:
    """The network of a compressed file, if it is not larger than protobuf allows."""
    with gzip.open(path) as file:
        data = file.read(LARGEST_FILE + 1)
    if len(data) > LARGEST_FILE:
        raise StorageError(f"'{path}' unpacks to more than {LARGEST_FILE:,} bytes")
    return onnx.load_from_string(data)


def _tensor(array: Any) -> Tensor:
    try:
        return torch.from_numpy(np.array(array))
    except TypeError:
        kind = np.asarray(array).dtype
        raise UnsupportedError(f"the ONNX graph holds values of type {kind}; export it in float32 or float64") from None


def _input_of(graph: Any, values: dict[str, Value | Tensor], path: Path) -> tuple[str, list[int | None], torch.dtype]:
    """Name, sizes (None for a free batch) and dtype of the one input."""
    inputs = [i for i in graph.input if i.name not in values]
    for what, found in (("inputs", inputs), ("outputs", list(graph.output))):
        if len(found) != 1:
            names = ", ".join(f"'{value.name}'" for value in found)
            raise InputError(
                f"'{path}' has {len(found)} {what} ({names}); a model needs one. Export the model with only the "
                f"{what[:-1]} that counts."
            )
    kind = inputs[0].type.tensor_type
    sizes = [d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else None for d in kind.shape.dim]
    if not sizes or None in sizes[1:] or sizes == [None]:
        shown = [d.dim_param or d.dim_value or "?" for d in kind.shape.dim]
        raise InputError(
            f"the input '{inputs[0].name}' of '{path}' has shape {shown}; expected the batch, then fixed sizes. "
            "Export the model again with only the batch dimension dynamic."
        )
    dtype = _tensor(np.empty(0, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))).dtype
    if not dtype.is_floating_point:
        raise InputError(f"the input '{inputs[0].name}' of '{path}' has dtype {dtype}; expected a float dtype")
    return inputs[0].name, sizes, dtype


def _convert(proto: Any, opset: int, network: Network, values: dict[str, Value | Tensor], from_shape: set[str]) -> None:
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in proto.attribute}
    node = Node(proto.name or proto.output[0], proto.op_type, attributes, opset, len(proto.output))
    for name in proto.input:
        if name and name not in values:
            raise node.unsupported(f"it uses '{name}', a second output of another node")
    inputs = [values[name] if name else None for name in proto.input]
    first = proto.output[0]
    if proto.domain not in ("", "ai.onnx"):
        raise node.unsupported(f"it belongs to the domain '{proto.domain}', not to ONNX")
    if node.op == "Shape" and isinstance(inputs[0], Value):
        sizes = torch.tensor([*([] if inputs[0].implicit else [-1]), *inputs[0].shape[1:]])
        values[first] = sizes[attributes.get("start", 0) : attributes.get("end", len(sizes))]
        from_shape.add(first)
        return
    # The rule for Reshape knows that a -1 in front means the batch; nothing else does.
    if from_shape.intersection(proto.input) and not (node.op == "Reshape" and isinstance(inputs[0], Value)):
        _check_sizes(node, proto, from_shape)
    if not any(isinstance(i, Value) for i in inputs):
        values.update(_fold(proto, inputs, opset))
    elif node.op in RULES:
        values.update(zip(proto.output, _apply(node, network, inputs), strict=False))
    else:
        raise node.unsupported("there is no rule for this operation. " + did_you_mean(node.op, RULES))


def _check_sizes(node: Node, proto: Any, from_shape: set[str]) -> None:
    """Refuse to compute with sizes that may be the -1 of the batch; they may only be moved about."""
    later = set() if node.op == "Concat" else from_shape.intersection(proto.input[1:])
    if node.op not in _MOVES or later:
        raise node.unsupported("it computes with the sizes of a value, of which the batch size is not known")
    from_shape.update(proto.output)


def _apply(node: Node, network: Network, inputs: list[Value | Tensor | None]) -> list[Value]:
    try:
        made = RULES[node.op](network, node, inputs)
    except HoldfastError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
        raise InputError(f"ONNX node '{node.name}' ({node.op}) contradicts itself or its inputs: {error}") from error
    values = [made] if isinstance(made, Value) else made
    if any(value.shape[0] != SAMPLE_BATCH for value in values):
        raise node.unsupported("it changes the batch dimension")
    return values


def _check_cost(proto: Any, arrays: list[Any]) -> None:
    """Refuse constants that a few bytes of a file could make as large, or as slow to compute, as they like."""
    if any(a.HasField("g") or a.graphs for a in proto.attribute):
        raise UnsupportedError(f"ONNX node '{proto.name}' ({proto.op_type}) is a loop or a branch, which is not run")
    try:
        size = _size(proto.op_type, arrays)
    except (ValueError, IndexError, ZeroDivisionError) as error:
        raise InputError(f"ONNX node '{proto.name}' ({proto.op_type}) contradicts itself: {error}") from error
    if size > LARGEST_VALUE:
        raise UnsupportedError(
            f"ONNX node '{proto.name}' ({proto.op_type}) makes a constant of {size:g} values; at most "
            f"{LARGEST_VALUE:,} are made"
        )


def _size(op: str, arrays: list[Any]) -> float:
    """How many values the operations make that can make many of few; 0 for the others."""
    if op == "ConstantOfShape":
        return math.prod(map(float, arrays[0].ravel()))
    if op == "Expand":
        return math.prod(map(float, np.broadcast_shapes(arrays[0].shape, tuple(arrays[1].tolist()))))
    if op == "Tile":
        return float(arrays[0].size * math.prod(map(float, arrays[1].ravel())))
    if op == "Range":
        start, limit, delta = (float(array.ravel()[0]) for array in arrays)
        return (limit - start) / delta
    return 0.0


def _fold(proto: Any, inputs: list[Any], opset: int) -> dict[str, Tensor]:
    """Outputs of a node whose inputs are all constants, by ONNX's own reference implementation."""
    feeds = {name: i.numpy() for name, i in zip(proto.input, inputs, strict=True) if i is not None}
    _check_cost(proto, list(feeds.values()))
    helper = onnx.helper
    typed = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in proto.output]
    graph = helper.make_graph([proto], "constant", typed, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    from onnx.reference import ReferenceEvaluator  # slow to import, and most files need it not

    try:
        results: Any = ReferenceEvaluator(model).run(None, feeds)
    except Exception as error:  # the reference implementation raises whatever numpy does
        raise UnsupportedError(f"ONNX node '{proto.name}' ({proto.op_type}) cannot be evaluated: {error}") from error
    constants = {name: _tensor(r) for name, r in zip(proto.output, results, strict=True)}
    for constant in constants.values():
        check_size(tuple(constant.shape))
    return constants
