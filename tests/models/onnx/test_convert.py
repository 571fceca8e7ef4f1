"""ONNX graphs as torch modules: exported models, one node of each kind against ONNX's own reference, refusals."""

import gzip
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, save
from onnx.reference import ReferenceEvaluator
from torch import nn

import holdfast as hf
from clock import within
from holdfast.errors import InputError, StorageError, UnsupportedError
from holdfast.models import load_model, make_model

EXPORTED = [
    ("mlp", (5,), {"hidden": (6, 4), "activation": "arctan", "normalize": ((0.1, 0.2, 0.3, 0.4, 0.5), 0.5)}),
    ("small-star", (3, 8, 12), {"normalize": ((0.1, 0.2, 0.3), (0.2, 0.3, 0.4))}),
    ("graddiv-mnist", (1, 8, 8), {"hidden": (8,), "layers": ((4, 3, 1, 1), "max", (4, 3, 1, 1), "avg")}),
    ("resnet18", (3, 16, 16), {"channels": (3, 4, 5, 6), "stem": "imagenet", "last_batch_norm": True}),
    ("preact-resnet18", (1, 8, 12), {"channels": (3, 4, 5, 6), "stem_channels": 3}),
    ("resnet-wong", (1, 8, 8), {}),
]


def export(model: nn.Module, x: torch.Tensor, path: Path, *, dynamo: bool, free_batch: bool = True) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both exporters warn about their own insides
        if dynamo:
            shapes = ({0: torch.export.Dim("batch")},) if free_batch else None
            torch.onnx.export(model, (x,), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
        else:
            axes = {"x": {0: "batch"}} if free_batch else None
            torch.onnx.export(model, (x,), path, dynamo=False, dynamic_axes=axes, input_names=["x"])


@pytest.mark.parametrize(("name", "shape", "options"), EXPORTED)
def test_exported_models_come_back(tmp_path: Path, name: str, shape: tuple[int, ...], options: dict) -> None:
    model = make_model(name, input_shape=shape, classes=3, seed=0, **options).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            nn.init.uniform_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    x = torch.rand(5, *shape)
    export(model, x[:2], tmp_path / "m.onnx", dynamo=False)
    loaded = load_model(tmp_path / "m.onnx")
    assert not loaded.training
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.fx.symbolic_trace(loaded)(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_fixed_batch_becomes_free(tmp_path: Path) -> None:
    model = make_model("lenet", seed=0).eval()
    x = torch.rand(5, 1, 28, 28)
    export(model, x[:1], tmp_path / "m.onnx", dynamo=False, free_batch=False)
    torch.testing.assert_close(load_model(tmp_path / "m.onnx")(x), model(x), rtol=1e-5, atol=1e-5)


class SizesAtRunTime(nn.Module):
    """Reshapes by sizes that are read off the input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.dense = nn.Linear(4 * 6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.conv(x)).view(x.shape[0], 4, -1)
        return self.dense(h.permute(0, 2, 1).reshape(x.size(0), -1))


@pytest.mark.parametrize("dynamo", [True, False])
def test_sizes_computed_in_the_graph(tmp_path: Path, dynamo: bool) -> None:
    model = SizesAtRunTime().double().eval()
    x = torch.rand(5, 2, 2, 3, dtype=torch.float64)
    export(model, x[:2], tmp_path / "m.onnx", dynamo=dynamo)
    torch.testing.assert_close(load_model(tmp_path / "m.onnx")(x), model(x))


RNG = np.random.default_rng(0)


def weights(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def integers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def write(
    path: Path,
    nodes: list,
    constants: dict[str, np.ndarray],
    shape: tuple,
    *,
    opset: int = 13,
    dtype: int = TensorProto.FLOAT,
) -> Path:
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", dtype, ("b", "k"))],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("my.ops", 1)]
    save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def one(op: str, *constants: np.ndarray, opset: int = 13, swap: bool = False, **attributes: object) -> tuple:
    """A graph of one node: op(x, c0, c1, ...), or op(c0, x) if swap."""
    names = {f"c{i}": c for i, c in enumerate(constants)}
    inputs = ["x", *names]
    return [helper.make_node(op, inputs[::-1] if swap else inputs, ["y"], name="node", **attributes)], names, opset


IMAGE, FLAT = ("b", 3, 5, 7), ("b", 6)
NODES = {
    "relu": (one("Relu"), FLAT),
    "leaky": (one("LeakyRelu", alpha=0.3), FLAT),
    "leaky-default": (one("LeakyRelu"), FLAT),
    "sigmoid": (one("Sigmoid"), FLAT),
    "tanh": (one("Tanh"), FLAT),
    "atan": (one("Atan"), FLAT),
    "identity": (one("Identity"), FLAT),
    "dropout": (one("Dropout"), FLAT),
    "clip-relu6": (one("Clip", np.float32(0), np.float32(6)), FLAT),
    "clip": (one("Clip", np.float32(-0.5), np.float32(0.25)), FLAT),
    "clip-relu": (one("Clip", np.float32(0)), FLAT),
    "clip-old": (one("Clip", min=-0.5, max=0.5, opset=10), FLAT),
    "softmax": (one("Softmax"), FLAT),
    "softmax-channels": (one("Softmax", axis=1), IMAGE),
    "softmax-old": (one("Softmax", opset=11), FLAT),
    "add-constant": (one("Add", weights(3, 1, 1)), IMAGE),
    "sub-constant": (one("Sub", weights(1, 3, 1, 1)), IMAGE),
    "constant-sub": (one("Sub", weights(6), swap=True), FLAT),
    "mul-constant": (one("Mul", np.float32(2.5)), FLAT),
    "constant-mul": (one("Mul", weights(6), swap=True), FLAT),
    "div-constant": (one("Div", np.abs(weights(6)) + 1), FLAT),
    "matmul": (one("MatMul", weights(6, 4)), FLAT),
    "matmul-images": (one("MatMul", weights(7, 4)), IMAGE),
    "gemm": (one("Gemm", weights(4, 6), weights(4), transB=1, alpha=0.5, beta=2.0), FLAT),
    "gemm-no-bias": (one("Gemm", weights(6, 4)), FLAT),
    "gemm-scalar": (one("Gemm", weights(6, 4), weights(1)), FLAT),
    "conv": (one("Conv", weights(4, 3, 3, 2), weights(4), strides=[2, 1], pads=[1, 0, 1, 0]), IMAGE),
    "conv-uneven": (one("Conv", weights(4, 3, 3, 2), pads=[0, 1, 2, 0]), IMAGE),
    "conv-same-upper": (one("Conv", weights(4, 3, 4, 3), weights(4), strides=[2, 2], auto_pad="SAME_UPPER"), IMAGE),
    "conv-same-lower": (one("Conv", weights(4, 3, 4, 3), strides=[2, 2], auto_pad="SAME_LOWER"), IMAGE),
    "conv-valid": (one("Conv", weights(4, 3, 2, 2), auto_pad="VALID"), IMAGE),
    "conv-groups": (one("Conv", weights(6, 1, 2, 2), group=3, dilations=[2, 2]), IMAGE),
    # Before opset 14 the reference mixes statistics of the batch into the running ones, which no runtime does.
    "batch-norm": (one("BatchNormalization", *weights(3, 3), np.abs(weights(3)), epsilon=0.01, opset=15), IMAGE),
    "batch-norm-flat": (one("BatchNormalization", *weights(3, 6), np.abs(weights(6)), opset=15), FLAT),
    "max-pool": (one("MaxPool", kernel_shape=[2, 3], strides=[2, 1], pads=[1, 1, 1, 1]), IMAGE),
    "max-pool-same": (one("MaxPool", kernel_shape=[2, 2], strides=[2, 2], auto_pad="SAME_UPPER"), IMAGE),
    "max-pool-ceil": (one("MaxPool", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1), IMAGE),
    "average-pool": (one("AveragePool", kernel_shape=[2, 2], strides=[2, 2], pads=[1, 1, 1, 1]), IMAGE),
    "average-pool-counted": (one("AveragePool", kernel_shape=[2, 2], pads=[0, 1, 1, 0], count_include_pad=1), IMAGE),
    "global-average": (one("GlobalAveragePool"), IMAGE),
    "reduce-mean": (one("ReduceMean", axes=[-1, 2]), IMAGE),
    "reduce-mean-flat": (one("ReduceMean", axes=[2, 3], keepdims=0), IMAGE),
    "reduce-mean-18": (one("ReduceMean", integers(2, 3), opset=18), IMAGE),
    "pad": (one("Pad", integers(0, 0, 1, 2, 0, 0, 0, 1), np.float32(0.5)), IMAGE),
    "pad-old": (one("Pad", pads=[0, 0, 1, 0, 0, 0, 0, 2], opset=9), IMAGE),
    "flatten": (one("Flatten"), IMAGE),
    "flatten-negative": (one("Flatten", axis=-3), IMAGE),
    "reshape": (one("Reshape", integers(0, 5, -1)), IMAGE),
    "reshape-flat": (one("Reshape", integers(-1, 105)), IMAGE),
    "reshape-copy": (one("Reshape", integers(0, 0, 35)), IMAGE),
    "reshape-none": (one("Reshape", integers(-1, 6)), FLAT),
    "squeeze": (one("Squeeze", integers(1)), ("b", 1, 6)),
    "squeeze-old": (one("Squeeze", axes=[2], opset=11), ("b", 6, 1)),
    "unsqueeze": (one("Unsqueeze", integers(1, -1)), FLAT),
    "transpose": (one("Transpose", perm=[0, 2, 3, 1]), IMAGE),
    "clip-low": (one("Clip", np.float32(-1)), FLAT),
    "clip-high": (one("Clip", min=-3.4e38, max=0.5, opset=7), FLAT),
    "abs": (one("Abs"), FLAT),
    "neg": (one("Neg"), FLAT),
    "max": (one("Max", np.float32(0.25)), FLAT),
    "min": (one("Min", weights(6)), FLAT),
    "max-relu": (one("Max", np.float32(0)), FLAT),
    "power": (one("Pow", np.float32(3)), FLAT),
    "power-one": (one("Pow", np.float32(1)), FLAT),
    "slice": (one("Slice", integers(1, -3), integers(3, 9), integers(1, 3), integers(1, 2)), IMAGE),
    "slice-back": (one("Slice", integers(-1), integers(-(2**62)), integers(2), integers(-1)), IMAGE),
    "slice-old": (one("Slice", starts=[0, 1], ends=[2**31, 4], axes=[0, 2], opset=9), IMAGE),
    "gather": (one("Gather", integers(2, 0, -1, 2), axis=2), IMAGE),
    "gather-one": (one("Gather", np.int64(1), axis=1), IMAGE),
    "sum": (one("ReduceSum", integers(1, 2), keepdims=0), IMAGE),
    "sum-old": (one("ReduceSum", axes=[-1], keepdims=1, opset=11), IMAGE),
    "mean-channels": (one("ReduceMean", axes=[1], keepdims=0), IMAGE),
    "pad-channels": (one("Pad", integers(0, 1, 0, 0, 0, 2, 0, 1), np.float32(1.5)), IMAGE),
    "pad-cut": (one("Pad", integers(0, 0, -1, 0, 0, 0, 0, -2)), IMAGE),
    "resize": (
        one(
            "Resize",
            np.float32([]),
            np.float32([1, 1, 2, 3]),
            nearest_mode="floor",
            coordinate_transformation_mode="asymmetric",
        ),
        IMAGE,
    ),
    "upsample": (one("Upsample", np.float32([1, 1, 2, 2]), opset=9), IMAGE),
    "concat-constant": (one("Concat", np.ones((1, 2), np.float32), axis=1), ("b", 6)),
    "left-matrix": (one("MatMul", weights(4, 5), swap=True), ("b", 5, 3)),
    "conv-signal": (one("Conv", weights(2, 3, 3), weights(2), pads=[1, 2], strides=[2]), ("b", 3, 9)),
    "max-pool-signal": (one("MaxPool", kernel_shape=[3], strides=[2]), ("b", 3, 9)),
    "relu-7": (one("Relu", opset=7), FLAT),
    "gemm-7": (one("Gemm", weights(6, 3), weights(3), opset=7), FLAT),
}
BY_HAND = {
    "concat-constant": lambda x: np.concatenate([x, np.ones((len(x), 2), np.float32)], 1),
    "pad-cut": lambda x: x[:, :, 1:, :-2],
}
"""What the reference cannot be asked: constants without a batch, padding that cuts."""


@pytest.mark.parametrize("case", NODES)
def test_each_node_agrees_with_the_reference(tmp_path: Path, case: str) -> None:
    (nodes, constants, opset), shape = NODES[case]
    path = write(tmp_path / "m.onnx", nodes, constants, shape, opset=opset)
    model = load_model(path)
    x = RNG.normal(size=(4, *shape[1:])).astype(np.float32) * 3
    expected = BY_HAND[case](x) if case in BY_HAND else ReferenceEvaluator(str(path)).run(None, {"x": x})[0]
    result = model(torch.from_numpy(x))
    assert result.shape == expected.shape
    np.testing.assert_allclose(result.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(torch.from_numpy(x)), result)


def test_a_split_gives_all_of_its_parts(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Split", ["x", "sizes"], ["a", "b"], axis=1, name="split"),
        node("Relu", "b", "c"),
        node("Concat", "c a", "y", axis=1),
    ]
    model = load_model(write(tmp_path / "m.onnx", nodes, {"sizes": integers(2, 4)}, FLAT))
    x = torch.randn(3, 6)
    assert torch.equal(model(x), torch.cat([x[:, 2:].relu(), x[:, :2]], 1))


LONE = {
    "dense": ([("MatMul", "x w", "a"), ("Add", "a b", "y")], {"w": (6, 3), "b": (3,)}),
    "a batch appears": ([("Add", "x b", "a"), ("MatMul", "a w", "y")], {"b": (1, 6), "w": (6, 3)}),
    "from the left": ([("MatMul", "w x", "y")], {"w": (3, 6)}),
    "unsqueezed": ([("Unsqueeze", "x zero", "a"), ("Gemm", "a w", "b"), ("Squeeze", "b zero", "y")], {"w": (6, 3)}),
    "reshaped": ([("Reshape", "x pair", "a"), ("ReduceSum", "a zero", "y")], {}),
}


@pytest.mark.parametrize("case", LONE)
def test_inputs_without_a_batch_get_one(tmp_path: Path, case: str) -> None:
    steps, sizes = LONE[case]
    constants = {name: weights(*size) for name, size in sizes.items()} | {"zero": integers(0), "pair": integers(2, 3)}
    nodes = [helper.make_node(op, a.split(), [b], name=b) for op, a, b in steps]
    path = write(tmp_path / "m.onnx", nodes, constants, (6,))
    x = RNG.normal(size=(4, 6)).astype(np.float32)
    evaluator = ReferenceEvaluator(str(path))
    expected = np.stack([evaluator.run(None, {"x": row})[0].reshape(-1) for row in x])
    result = load_model(path)(torch.from_numpy(x)).detach().flatten(1)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_bounds_cover_what_the_conversion_makes(tmp_path: Path) -> None:
    """Slice, gather, transpose, maxima and sums have rules in the graph, and the graph is the model."""
    nodes = [
        node("Slice", "x one five axis", "a"),
        node("Transpose", "a", "b", perm=[0, 2, 1, 3]),
        node("Abs", "b", "c"),
        node("Min", "c half", "d"),
        node("ReduceSum", "d axis", "e", keepdims=0),
        node("Gather", "e one", "f", axis=1),
        node("Flatten", "f", "y"),
    ]
    constants = {"one": integers(1), "five": integers(4), "axis": integers(2), "half": np.float32(0.5)}
    model = load_model(write(tmp_path / "m.onnx", nodes, constants, IMAGE))
    x = torch.rand(3, 3, 5, 7)
    found = hf.bounds(model, x, hf.Linf(0.05), "crown")
    for _ in range(20):
        z = model((x + 0.05 * (2 * torch.rand_like(x) - 1)).clamp(0, 1))
        assert bool(((z >= found.lower) & (z <= found.upper)).all())


def test_packed_files_and_onnxruntime_agree(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    path = write(tmp_path / "m.onnx", *one("Gemm", weights(6, 3), weights(3), opset=9)[:2], FLAT, opset=9)
    packed = tmp_path / "m.onnx.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    x = torch.randn(1, 6)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    expected = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
    torch.testing.assert_close(load_model(packed)(x).detach(), expected, rtol=1e-5, atol=1e-5)


def node(op: str, inputs: str, output: str, **attributes: object):
    return helper.make_node(op, inputs.split(), [output], name=f"make_{output}", **attributes)


def test_a_network_by_hand_with_two_paths(tmp_path: Path) -> None:
    nodes = [
        node("Constant", "", "half", value=numpy_helper.from_array(np.float32(0.5))),
        node("Sub", "x half", "centred"),
        node("Transpose", "kernel", "turned", perm=[1, 0]),  # a constant, folded
        node("MatMul", "centred turned", "dense"),
        node("Add", "bias dense", "biased"),
        node("Relu", "biased", "left"),
        node("MatMul", "centred turned", "right"),
        node("Add", "left right", "sum"),
        node("Sub", "sum left", "difference"),
        node("Concat", "sum difference", "joined", axis=-1),
        node("MatMul", "joined last", "y"),
    ]
    constants = {"kernel": weights(5, 6), "bias": weights(5), "last": weights(10, 3)}
    path = write(tmp_path / "m.onnx", nodes, constants, ("b", 6))
    model = load_model(path)
    x = RNG.normal(size=(4, 6)).astype(np.float32)
    (expected,) = ReferenceEvaluator(str(path)).run(None, {"x": x})
    np.testing.assert_allclose(model(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    dense = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert [m.bias is not None for m in dense] == [True, False, False]  # MatMul and Add became one layer


def test_a_bias_is_not_fused_into_a_layer_that_is_used_twice(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", "x kernel", "dense"),
        node("Identity", "dense", "a"),
        node("Identity", "dense", "b"),
        node("Add", "a bias", "biased"),
        node("Concat", "biased b", "y", axis=1),
    ]
    constants = {"kernel": np.eye(2, dtype=np.float32), "bias": np.ones(2, np.float32)}
    model = load_model(write(tmp_path / "m.onnx", nodes, constants, ("b", 2)))
    torch.testing.assert_close(model(torch.zeros(3, 2)), torch.tensor([[1.0, 1.0, 0.0, 0.0]]).expand(3, 4))


def shape_nodes(*middle) -> list:
    return [node("Shape", "x", "shape"), *middle]


ENDLESS = helper.make_graph(
    [helper.make_node("Identity", ["go_in"], ["go_out"]), helper.make_node("Cast", ["turn"], ["last"], to=1)],
    "endless",
    [
        helper.make_tensor_value_info("turn", TensorProto.INT64, ()),
        helper.make_tensor_value_info("go_in", TensorProto.BOOL, ()),
    ],
    [
        helper.make_tensor_value_info("go_out", TensorProto.BOOL, ()),
        helper.make_tensor_value_info("last", TensorProto.FLOAT, ()),
    ],
)

REFUSED = {
    "no rule": ([node("Sin", "x", "y")], {}, FLAT, r"'make_y' \(Sin\).*no rule"),
    "domain": ([node("Relu", "x", "y", domain="my.ops")], {}, FLAT, "domain 'my.ops'"),
    "two values": ([node("Mul", "x x", "y")], {}, FLAT, "one must be a constant"),
    "divide": ([node("Div", "c x", "y")], {"c": weights(6)}, FLAT, "divides by a value"),
    "ranks": ([node("Unsqueeze", "x c", "u"), node("Add", "x u", "y")], {"c": integers(1)}, FLAT, "2 and 3 dimensions"),
    "constant batch": ([node("Add", "x c", "y")], {"c": weights(2, 6)}, FLAT, "batch dimension of its own"),
    "left matrix": ([node("MatMul", "c x", "y")], {"c": weights(3, 2)}, FLAT, "times values of"),
    "batched matrix": ([node("MatMul", "x c", "y")], {"c": weights(2, 6, 3)}, FLAT, "expected a matrix"),
    "transA": ([node("Gemm", "x c", "y", transA=1)], {"c": weights(2, 3)}, FLAT, "transA"),
    "gemm bias": ([node("Gemm", "x c d", "y")], {"c": weights(6, 3), "d": weights(2, 3)}, FLAT, "C has shape"),
    "training": (
        [node("BatchNormalization", "x c c c c", "y", training_mode=1)],
        *({"c": np.ones(6, np.float32)}, FLAT, "in training mode"),
    ),
    "sine": ([node("Sin", "x", "y")], {}, FLAT, r"'make_y' \(Sin\) cannot be converted: there is no rule"),
    "sign": ([node("Sign", "x", "y")], {}, FLAT, r"\(Sign\) cannot be converted"),
    "cut batch": (
        [node("Slice", "x a b c", "y")],
        *({"a": integers(1), "b": integers(2), "c": integers(0)}, FLAT, "cuts the batch"),
    ),
    "split batch": ([helper.make_node("Split", ["x"], ["y", "z"], axis=0)], {}, FLAT, "splits the batch"),
    "gather batch": ([node("Gather", "x c", "y", axis=0)], {"c": integers(0)}, FLAT, "takes parts of the batch"),
    "sum of all": ([node("ReduceSum", "x", "y")], {}, FLAT, "mixes the inputs"),
    "linear resize": (
        [helper.make_node("Resize", ["x", "", "c"], ["y"], mode="linear")],
        *({"c": np.ones(4, np.float32)}, IMAGE, "only nearest"),
    ),
    "softmax batch": ([node("Softmax", "x", "y", axis=0)], {}, FLAT, "axis 0"),
    "flatten batch": ([node("Flatten", "x", "y", axis=0)], {}, FLAT, "axis 0 would mix"),
    "flatten late": ([node("Flatten", "x", "y", axis=2)], {}, IMAGE, "axis 2 would mix"),
    "reshape mixes": ([node("Reshape", "x c", "y")], {"c": integers(-1, 3)}, FLAT, "would mix the inputs"),
    "reshape batch": ([node("Reshape", "x c", "y")], {"c": integers(4, 6)}, FLAT, "begin with the batch"),
    "reshape all": ([node("Reshape", "x c", "y")], {"c": integers(-1)}, FLAT, "would mix the inputs"),
    "transpose batch": ([node("Transpose", "x", "y")], {}, FLAT, "moves the batch"),
    "concat batch": ([node("Concat", "x x", "y", axis=0)], {}, FLAT, "along the batch"),
    "squeeze batch": ([node("Squeeze", "x c", "y")], {"c": integers(0)}, FLAT, "removes the batch"),
    "unsqueeze batch": ([node("Unsqueeze", "x c", "y")], {"c": integers(0)}, FLAT, "before the batch"),
    "reflect": ([node("Pad", "x c", "y", mode="reflect")], {"c": integers(*[0] * 8)}, IMAGE, "only padding with"),
    "pad batch": ([node("Pad", "x c", "y")], {"c": integers(1, *[0] * 7)}, IMAGE, "of the batch dimension"),
    "flat conv": ([node("Conv", "x c", "y")], {"c": weights(2, 6, 1)}, FLAT, "2 dimensions, expected images"),
    "average ceil": ([node("AveragePool", "x", "y", kernel_shape=[2, 2], ceil_mode=1)], {}, IMAGE, "ceil_mode"),
    "max uneven": ([node("MaxPool", "x", "y", kernel_shape=[2, 2], pads=[1, 1, 0, 0])], {}, IMAGE, "uneven padding"),
    "arithmetic on sizes": (
        shape_nodes(node("Mul", "shape shape", "s"), node("Reshape", "x s", "y")),
        *({}, FLAT, "computes with the sizes"),
    ),
    "sizes as values": (
        shape_nodes(node("Cast", "shape", "s", to=1), node("Gather", "s c", "t"), node("Add", "x t", "y")),
        *({"c": integers(0)}, FLAT, "computes with the sizes"),
    ),
    "sizes as indices": (
        shape_nodes(node("Gather", "c shape", "t"), node("Add", "x t", "y")),
        *({"c": weights(6)}, FLAT, "computes with the sizes"),
    ),
    "loop": (
        [node("Loop", "many yes", "c", body=ENDLESS), node("Add", "x c", "y")],
        *({"many": np.int64(2**62), "yes": np.bool_(True)}, FLAT, "is a loop or a branch"),
    ),
    "large constant": (
        [node("ConstantOfShape", "sizes", "c"), node("Add", "x c", "y")],
        *({"sizes": integers(10**6, 10**6)}, FLAT, r"a constant of 1e\+12 values"),
    ),
    "large tile": (
        [node("Tile", "c sizes", "d"), node("Add", "x d", "y")],
        *({"c": weights(6), "sizes": integers(10**12)}, FLAT, r"a constant of 6e\+12 values"),
    ),
    "large input": ([node("Relu", "x", "y")], {}, ("b", 10**6, 10**6), r"value of shape \(2, 1000000, 1000000\)"),
    "second output": (
        [helper.make_node("MaxPool", ["x"], ["p", "i"], kernel_shape=[2, 2]), node("Cast", "i", "y", to=1)],
        *({}, IMAGE, "second output"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_named(tmp_path: Path, case: str) -> None:
    nodes, constants, shape, words = REFUSED[case]
    write(tmp_path / "m.onnx", nodes, constants, shape, opset=14 if case == "training" else 13)
    with within(30), pytest.raises(UnsupportedError, match=words):
        load_model(tmp_path / "m.onnx")


def test_sizes_may_be_sliced_joined_and_reshaped(tmp_path: Path) -> None:
    nodes = shape_nodes(
        node("Slice", "shape zero one", "batch"),
        node("Reshape", "batch one", "again"),
        node("Concat", "again rest", "target", axis=0),
        node("Reshape", "x target", "y"),
    )
    constants = {"zero": integers(0), "one": integers(1), "rest": integers(7, -1)}
    model = load_model(write(tmp_path / "m.onnx", nodes, constants, IMAGE))
    x = torch.rand(4, 3, 5, 7)
    assert torch.equal(model(x), x.reshape(4, 7, 15))


@pytest.mark.parametrize(
    ("nodes", "constants", "shape", "opset", "words"),
    [
        (one("Relu")[0], {}, FLAT, 6, "opset 6; 7 or newer"),
        (one("Relu")[0], {}, ("b", "features"), 13, "expected the batch, then fixed sizes"),
        (one("Relu")[0], {}, ("features",), 13, "expected the batch, then fixed sizes"),
        ([node("Identity", "c", "y")], {"c": weights(6)}, FLAT, 13, "does not depend on its input"),
        ([node("MatMul", "x c", "y")], {"c": weights(5, 3)}, FLAT, 13, "contradicts itself"),
    ],
)
def test_graphs_that_are_no_models(
    tmp_path: Path, nodes: list, constants: dict, shape: tuple, opset: int, words: str
) -> None:
    path = write(tmp_path / "m.onnx", nodes, constants, shape, opset=opset)
    with pytest.raises(InputError, match=words):
        load_model(path)


def test_integer_inputs_two_inputs_and_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("Identity", "x", "y")], {}, FLAT, dtype=TensorProto.INT64)
    with pytest.raises(InputError, match="expected a float dtype"):
        load_model(path)
    path = write(tmp_path / "m.onnx", [node("Identity", "x", "y")], {}, FLAT, dtype=TensorProto.BFLOAT16)
    with pytest.raises(UnsupportedError, match="values of type bfloat16; export it in float32"):
        load_model(path)
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("b", 3)) for name in ("x", "z", "y")]
    graph = helper.make_graph([node("Add", "x z", "y")], "two", infos[:2], infos[2:])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    with pytest.raises(InputError, match=r"has 2 inputs \('x', 'z'\); a model needs one"):
        load_model(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(StorageError, match="damaged or not an ONNX file"):
        load_model(path)
