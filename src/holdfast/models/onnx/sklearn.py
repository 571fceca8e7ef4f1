"""ONNX graphs of scikit-learn's classifiers, rewritten with operations of ONNX proper and with scores as their output.

Such a graph returns labels and probabilities, and uses operations of the domain ai.onnx.ml. Labels have no gradient,
and probabilities round to 0 and 1; the scores that they come from give the same classes.
"""

from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from holdfast.errors import UnsupportedError

_DOMAIN = "ai.onnx.ml"
_LABELS = (TensorProto.INT32, TensorProto.INT64, TensorProto.STRING)
# From probabilities or scores to others with the same order: what comes before gives the same classes.
_ORDER = frozenset({"Identity", "Softmax", "ZipMap"})
_TRANSFORMS = (b"NONE", b"LOGISTIC", b"SOFTMAX")


def to_scores(graph: GraphProto) -> GraphProto:
    """The graph that returns the scores behind the probabilities; `graph` itself if it is not of scikit-learn."""
    answers = [output for output in graph.output if output.type.tensor_type.elem_type not in _LABELS]
    if len(answers) != 1 or (len(graph.output) == 1 and not any(node.domain == _DOMAIN for node in graph.node)):
        return graph
    made_by = {name: node for node in graph.node for name in node.output}
    name, binary = _scores(answers[0].name, made_by, graph)
    nodes: list[NodeProto] = []
    constants: list[TensorProto] = []
    for node in _needed(name, made_by, graph):
        nodes += _plain(node, constants)
    if binary:
        constants.append(numpy_helper.from_array(np.array([[0], [1]], np.float32), "holdfast_two"))
        nodes.append(helper.make_node("Gemm", [name, "holdfast_two"], ["holdfast_logits"], transB=1))
        name = "holdfast_logits"
    output = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    return helper.make_graph(nodes, graph.name, graph.input, [output], [*graph.initializer, *constants])


def _scores(name: str, made_by: dict[str, NodeProto], graph: GraphProto) -> tuple[str, bool]:
    """The value that holds the scores, and whether it is one score for two classes."""
    while (node := made_by.get(name)) is not None:
        inner = made_by.get(node.input[0])
        if node.op_type in _ORDER or _divides_by_size(node):
            name = node.input[0]
        elif node.op_type == "ArrayFeatureExtractor" and inner is not None and inner.op_type == "LinearClassifier":
            name = node.input[0]  # only the score of class 1; the score of class 0 is its negative
        elif (score := _before_sigmoid(node, made_by, graph)) is not None:
            return score, True
        else:
            break
    return name, False


def _divides_by_size(node: NodeProto) -> bool:
    """A division by a norm, which is positive; by the maximum, which may not be, is another matter."""
    return node.op_type == "Normalizer" and any(a.name == "norm" and a.s in (b"L1", b"L2") for a in node.attribute)


def _before_sigmoid(node: NodeProto, made_by: dict[str, NodeProto], graph: GraphProto) -> str | None:
    """z where `node` joins (1 - sigmoid(z), sigmoid(z)); else None."""
    if node.op_type != "Concat" or len(node.input) != 2:
        return None
    other, sigmoid = (made_by.get(name) for name in node.input)
    if other is None or sigmoid is None or (other.op_type, sigmoid.op_type) != ("Sub", "Sigmoid"):
        return None
    ones = [numpy_helper.to_array(i) for i in graph.initializer if i.name == other.input[0]]
    joined = other.input[1] == node.input[1] and bool(ones) and bool((ones[0] == 1).all())
    return sigmoid.input[0] if joined else None


def _needed(name: str, made_by: dict[str, NodeProto], graph: GraphProto) -> list[NodeProto]:
    """The nodes that the value depends on, in the order of the graph."""
    wanted, open_names = set(), [name]
    while open_names:
        node = made_by.get(open_names.pop())
        if node is not None and node.output[0] not in wanted:
            wanted.add(node.output[0])
            open_names += node.input
    return [node for node in graph.node if node.output[0] in wanted]


def _plain(node: NodeProto, constants: list[TensorProto]) -> list[NodeProto]:
    """The node in operations of ONNX proper; what they need is added to `constants`."""
    if node.domain != _DOMAIN:
        return [node]
    given: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Scaler":
        offset = _constant(constants, np.array(given["offset"], np.float32))
        scale = _constant(constants, np.array(given["scale"], np.float32))
        moved = f"{node.output[0]}_moved"
        return [
            helper.make_node("Sub", [node.input[0], offset], [moved]),
            helper.make_node("Mul", [moved, scale], list(node.output)),
        ]
    if node.op_type == "LinearClassifier":
        labels = given.get("classlabels_ints") or given.get("classlabels_strings") or []
        rows = len(given["intercepts"])
        if rows != len(labels) or given.get("post_transform", b"NONE") not in _TRANSFORMS:
            raise UnsupportedError(
                f"ONNX node '{node.name}' (LinearClassifier) cannot be converted: {rows} scores for {len(labels)} "
                f"classes, then {given.get('post_transform', b'NONE').decode()}; expected one score for each class, "
                "then nothing, a softmax or a logistic function"
            )
        weight = _constant(constants, np.array(given["coefficients"], np.float32).reshape(rows, -1))
        bias = _constant(constants, np.array(given["intercepts"], np.float32))
        return [helper.make_node("Gemm", [node.input[0], weight, bias], [node.output[1]], transB=1)]
    advice = "trees have no gradient to attack and no bound" if node.op_type.startswith("Tree") else "there is no rule"
    raise UnsupportedError(
        f"ONNX node '{node.name}' ({node.op_type}) cannot be converted: {advice}. Linear models, perceptrons and "
        "standard, min-max and PCA scaling before them can be; to_onnx(..., options={id(model): {'raw_scores': True}}) "
        "leaves out what turns scores into probabilities."
    )


def _constant(constants: list[TensorProto], value: np.ndarray[Any, Any]) -> str:
    name = f"holdfast_{len(constants)}"
    constants.append(numpy_helper.from_array(value, name))
    return name
