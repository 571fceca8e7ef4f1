"""Models as people have them: exported to ONNX, of TorchVision, timm and scikit-learn, and lookalikes."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import QUICK
from onnx import TensorProto, helper, numpy_helper, save
from onnx.reference import ReferenceEvaluator
from torch import nn

import holdfast as hf
from holdfast.errors import UnsupportedError
from holdfast.models import Normalize, as_classifier, load_model
from holdfast.random import Noise
from holdfast.registry import Certificate
from lookalikes import (
    MEAN,
    RESIDUAL,
    STD,
    ConvNext,
    Mobile,
    Residual,
    ResNet,
    Stacked,
    Transformer,
    X,
    bracket,
    export,
    optional,
    ready,
    settled,
)

# --- Lookalikes: PyTorch modules, and ONNX files made of them ---------------------------------------------------------


@pytest.mark.parametrize(("make", "method"), [(Residual, "crown"), (Stacked, "crown"), (Mobile, "ibp")])
def test_torchvision_lookalikes_have_both_ends_of_the_bracket(make: Any, method: str) -> None:
    torch.manual_seed(0)
    bracket(as_classifier(ready(make()), mean=MEAN, std=STD), method=method)


@pytest.mark.parametrize(("make", "dynamo"), [(Residual, False), (Residual, True), (Stacked, False), (Mobile, False)])
def test_exported_lookalikes_come_back_with_bounds(tmp_path: Path, make: Any, dynamo: bool) -> None:
    torch.manual_seed(0)
    model = ready(nn.Sequential(Normalize(MEAN, STD), make()))
    loaded = load_model(export(model, tmp_path / "m.onnx", dynamo=dynamo))
    torch.testing.assert_close(loaded(X), model(X), rtol=1e-4, atol=1e-5)
    threat = hf.Linf(1e-3)
    ours, theirs = (hf.bounds(m, X, threat, "ibp") for m in (loaded, model))
    torch.testing.assert_close(ours.lower, theirs.lower, rtol=1e-3, atol=1e-4)


def inside(model: nn.Module, x: torch.Tensor, threat: hf.Threat, found: hf.Bounds) -> None:
    for draw in range(8):
        point = threat.random_start(x, Noise.for_batch(draw, len(x)))
        far = threat.project(x + 50 * (point - x), x)
        for logits in (model(point), model(far)):
            assert bool((found.lower <= logits).all())
            assert bool((logits <= found.upper).all())


@torch.no_grad()
@pytest.mark.parametrize("name", RESIDUAL)
def test_residual_networks_of_all_kinds_have_bounds(name: str) -> None:
    torch.manual_seed(0)
    model, x = settled(RESIDUAL[name]()), X[:2]
    for threat in (hf.Linf(0.02), hf.L2(0.05)):
        for method in ("ibp", "crown"):
            inside(model, x, threat, hf.bounds(model, x, threat, method))
    y = model(X).argmax(1)
    assert bool(hf.certify(model, X, y, hf.Linf(1e-4), "crown").certified.any())


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", RESIDUAL)
def test_residual_networks_of_all_kinds_pass_every_method(name: str) -> None:
    torch.manual_seed(0)
    model, x = settled(RESIDUAL[name]()), X[:2]
    y, used = model(x).argmax(1), set()
    for threat in (hf.Linf(1e-4), hf.L2(2e-3)):
        broken = torch.stack([model(threat.random_start(x, Noise.for_batch(d, 2))).argmax(1) != y for d in range(20)])
        for kind in ("bounds", "certify"):
            for method in hf.methods(kind):
                if threat.name not in method.threats:
                    continue
                if isinstance(method, Certificate) and (method.smoothed or method.needs):
                    continue
                if (
                    method.name in ("nonuniform", "beta-crown") and name != "residual"
                ):  # many passes through the same bounds
                    continue
                options = QUICK.get(method.name, {}) | ({"time_limit": 0.3} if method.name == "milp" else {})
                if method.name == "cap":
                    with pytest.raises(UnsupportedError, match=r"layer '.*': the dual bound covers"):
                        getattr(hf, kind)(*([model, x] + [y] * (kind == "certify")), threat, "cap")
                elif kind == "bounds":
                    inside(model, x, threat, hf.bounds(model, x, threat, method.name, **options))
                else:
                    proved = hf.certify(model, x, y, threat, method.name, **options).certified
                    assert not bool((proved & broken.any(0)).any()), method.name
                used.add(method.name)
    assert {"ibp", "crown", "alpha-crown", "milp", "pec", "gloro", "bcp", "auto"} <= used


@pytest.mark.parametrize("name", ["basic", "pre-activation"])
def test_residual_networks_can_be_audited(name: str) -> None:
    torch.manual_seed(0)
    model = settled(RESIDUAL[name]())
    y = model(X).argmax(1)
    audit = hf.audit(model, (X, y), hf.Linf(1e-4), budget="quick", budgets=2, progress=False)
    assert audit.clean == 1
    assert audit.certified[0] > 0
    assert all(low <= high for low, high in zip(audit.certified, audit.attacked, strict=True))


def test_an_activation_without_bounds_is_named_in_a_residual_network() -> None:
    torch.manual_seed(0)
    model = settled(ResNet(deep=True, activation=nn.SiLU))
    with pytest.raises(UnsupportedError, match=r"layer 'conv1\.0\.2': no rule for the layer type SiLU"):
        hf.bounds(model, X, hf.Linf(0.01), "ibp")


def hardswish() -> nn.Module:
    return Mobile(nn.Hardswish)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (hardswish, "Hardswish"),
        (ConvNext, "LayerNorm"),
        (Transformer, "transformer, whose attention has no bounds.*transpose"),
    ],
)
def test_what_has_no_bounds_is_named_and_can_be_attacked(make: Any, words: str) -> None:
    torch.manual_seed(0)
    model = ready(make())
    y = model(X).argmax(1)
    with pytest.raises(UnsupportedError, match=f"layer '.*{words}.*attack or smoothing"):
        hf.bounds(model, X, hf.Linf(0.01), "ibp")
    found = hf.attack(model, X, y, hf.Linf(1.0), "pgd", steps=10)
    assert bool(found.success.any())
    result = hf.audit(model, (X, y), hf.Linf(0.5), budgets=1, attack="fgsm", certify=None)
    assert result.clean == 1
    assert result.certified == (0.0,)


@pytest.mark.parametrize(("make", "dynamo"), [(hardswish, False), (ConvNext, True)])
def test_smooth_activations_and_layer_norm_come_back_from_onnx(tmp_path: Path, make: Any, dynamo: bool) -> None:
    torch.manual_seed(0)
    model = ready(make())
    loaded = load_model(export(model, tmp_path / "m.onnx", dynamo=dynamo))
    torch.testing.assert_close(loaded(X), model(X), rtol=1e-4, atol=1e-5)
    x = X.clone().requires_grad_(True)
    loaded(x).sum().backward()
    assert bool((x.grad != 0).any())


def test_attention_in_onnx_is_refused_by_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = export(ready(Transformer()), tmp_path / "m.onnx", dynamo=False)
    with pytest.raises(UnsupportedError, match=r"ONNX node '.*' \(\w+\) cannot be converted"):
        load_model(path)


NODES = {
    "Celu": {"alpha": 0.7},
    "Elu": {"alpha": 0.7},
    "Gelu": {"approximate": "tanh"},
    "HardSigmoid": {"alpha": 1 / 6},
    "HardSwish": {},
    "Softplus": {},
    "Softsign": {},
    "Cast": {"to": TensorProto.FLOAT},
}


def write(
    path: Path, nodes: list, constants: dict, outputs: dict[str, int], *, width: int = 6, opset: int = 20
) -> Path:
    """A graph from x (batch, width) to the outputs, each with its type."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("b", width))],
        [
            helper.make_tensor_value_info(name, kind, (None,) * (2 - (name == "label")))
            for name, kind in outputs.items()
        ],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.onnx.ml", 1)]
    save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


@pytest.mark.parametrize("op", NODES)
def test_each_new_node_agrees_with_the_reference(tmp_path: Path, op: str) -> None:
    path = write(tmp_path / "m.onnx", [helper.make_node(op, ["x"], ["y"], **NODES[op])], {}, {"y": TensorProto.FLOAT})
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32) * 4
    (expected,) = ReferenceEvaluator(str(path)).run(None, {"x": x})
    np.testing.assert_allclose(load_model(path)(torch.from_numpy(x)).numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "words"),
    [
        ("HardSigmoid", ["x"], {}, "expected torch.s, 1.6 and 1.2"),
        ("Cast", ["x"], {"to": TensorProto.DOUBLE}, "one float dtype"),
        ("LayerNormalization", ["x", "scale"], {"axis": 0}, "axis 0"),
    ],
)
def test_variants_without_a_rule_are_named(tmp_path: Path, op: str, inputs: list, attributes: dict, words: str) -> None:
    nodes = [helper.make_node(op, inputs, ["y"], name="n", **attributes)]
    path = write(tmp_path / "m.onnx", nodes, {"scale": np.ones(6, np.float32)}, {"y": TensorProto.FLOAT})
    with pytest.raises(UnsupportedError, match=words):
        load_model(path)


# --- scikit-learn: graphs as skl2onnx writes them, and those that it writes -------------------------------------------

RNG = np.random.default_rng(0)
WEIGHT, BIAS = RNG.normal(size=(3, 6)).astype(np.float32), RNG.normal(size=3).astype(np.float32)
LINEAR = {"coefficients": WEIGHT.flatten().tolist(), "intercepts": BIAS.tolist(), "classlabels_ints": [0, 1, 2]}


def learned(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return helper.make_node(op, inputs, outputs, name=op, domain="ai.onnx.ml", **attributes)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
def test_a_scaled_linear_classifier_gives_its_scores(tmp_path: Path, transform: str) -> None:
    offset, scale = RNG.normal(size=(2, 6)).astype(np.float32)
    nodes = [
        learned("Scaler", ["x"], ["scaled"], offset=offset.tolist(), scale=scale.tolist()),
        learned("LinearClassifier", ["scaled"], ["label", "raw"], **LINEAR, post_transform=transform),
        learned("Normalizer", ["raw"], ["probabilities"], norm="L1"),
    ]
    outputs = {"label": TensorProto.INT64, "probabilities": TensorProto.FLOAT}
    model = load_model(write(tmp_path / "m.onnx", nodes, {}, outputs))
    x = torch.rand(5, 6)
    expected = (x.numpy() - offset) * scale @ WEIGHT.T + BIAS
    np.testing.assert_allclose(model(x).detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    bracket(model, x)


def test_one_sigmoid_becomes_two_logits(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["z"]),
        helper.make_node("Sigmoid", ["z"], ["p"]),
        helper.make_node("Sub", ["one", "p"], ["q"]),
        helper.make_node("Concat", ["q", "p"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["probabilities"], ["label"], axis=1),
    ]
    constants = {"w": WEIGHT[:1].T.copy(), "one": np.ones(1, np.float32)}
    outputs = {"label": TensorProto.INT64, "probabilities": TensorProto.FLOAT}
    x = torch.rand(5, 6) * 100  # far out, where the probability is 0 or 1 but the score is not
    score = x @ torch.from_numpy(WEIGHT[0])
    model = load_model(write(tmp_path / "m.onnx", nodes, constants, outputs))
    torch.testing.assert_close(model(x), torch.stack([torch.zeros(5), score], 1), rtol=1e-4, atol=1e-3)
    # Another constant is another function: nothing is taken off.
    other = load_model(write(tmp_path / "m.onnx", nodes, constants | {"one": np.full(1, 2, np.float32)}, outputs))
    torch.testing.assert_close(other(x)[:, 0], 2 - torch.sigmoid(score), rtol=1e-4, atol=1e-3)


def test_a_division_by_the_maximum_is_not_taken_off(tmp_path: Path) -> None:
    nodes = [
        learned("LinearClassifier", ["x"], ["label", "raw"], **LINEAR, post_transform="NONE"),
        learned("Normalizer", ["raw"], ["probabilities"], norm="MAX"),
    ]
    outputs = {"label": TensorProto.INT64, "probabilities": TensorProto.FLOAT}
    with pytest.raises(UnsupportedError, match=r"'Normalizer' \(Normalizer\) cannot be converted"):
        load_model(write(tmp_path / "m.onnx", nodes, {}, outputs))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"post_transform": "PROBIT"}, "then PROBIT"), ({"classlabels_ints": [0, 1]}, "3 scores for 2 classes")],
)
def test_other_linear_classifiers_are_refused(tmp_path: Path, change: dict, words: str) -> None:
    nodes = [learned("LinearClassifier", ["x"], ["label", "y"], **{**LINEAR, **change})]
    with pytest.raises(UnsupportedError, match=words):
        load_model(write(tmp_path / "m.onnx", nodes, {}, {"label": TensorProto.INT64, "y": TensorProto.FLOAT}))


def test_what_skl2onnx_writes(tmp_path: Path) -> None:
    skl2onnx = optional("skl2onnx")
    linear, svm, neural = (optional(f"sklearn.{name}") for name in ("linear_model", "svm", "neural_network"))
    pipeline, scaling, trees = (optional(f"sklearn.{name}") for name in ("pipeline", "preprocessing", "ensemble"))
    x = RNG.random((60, 4)).astype(np.float32)
    for classes in (2, 3):
        y = (x[:, 0] * classes).astype(int)
        perceptron = neural.MLPClassifier((5,), max_iter=30, random_state=0)
        scaled = pipeline.make_pipeline(scaling.StandardScaler(), linear.LogisticRegression())
        for model in (
            linear.LogisticRegression(),
            perceptron,
            scaled,
            svm.LinearSVC(),
            linear.SGDClassifier("log_loss"),
        ):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it has not converged
                model.fit(x, y)
            last = model[-1] if model is scaled else model
            raw = isinstance(last, linear.SGDClassifier)
            for options in (
                [{"raw_scores": True}] if raw else [{}] if isinstance(last, svm.LinearSVC) else [{}, {"zipmap": False}]
            ):
                proto = skl2onnx.to_onnx(model, x[:1], options={id(last): options} if options else None)
                (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
                loaded = load_model(tmp_path / "m.onnx")
                assert (loaded(torch.from_numpy(x)).argmax(1).numpy() == model.predict(x)).all()
                bracket(loaded, torch.from_numpy(x[:8]))
    forest = trees.RandomForestClassifier(2).fit(x, y)
    (tmp_path / "m.onnx").write_bytes(skl2onnx.to_onnx(forest, x[:1]).SerializeToString())
    with pytest.raises(UnsupportedError, match="trees have no gradient"):
        load_model(tmp_path / "m.onnx")


# --- The packages themselves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_models_of_torchvision(tmp_path: Path, name: str) -> None:
    models = optional("torchvision.models")
    torch.manual_seed(0)
    module = models.get_model(name, num_classes=3).eval()
    x = torch.rand(2, 3, 32, 32)
    model = as_classifier(module, mean=MEAN, std=STD)
    y = model(x).argmax(1)
    assert bool(hf.attack(model, x, y, hf.Linf(1.0), "pgd", steps=5).success.any())
    lower = hf.bounds(model, x, hf.Linf(1e-6), "ibp").lower
    assert bool((lower <= model(x)).all())
    loaded = load_model(export(model, tmp_path / "m.onnx", dynamo=False, x=x))
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet10t", "convnext_atto", "vit_tiny_patch16_224"])
def test_models_of_timm(name: str) -> None:
    optional("torchvision")
    timm = optional("timm")
    torch.manual_seed(0)
    size = {"img_size": 32, "patch_size": 8, "depth": 1} if name.startswith("vit") else {}
    module = timm.create_model(name, num_classes=3, **size)
    model = as_classifier(module, mean=module.default_cfg["mean"], std=module.default_cfg["std"])
    x = torch.rand(2, 3, 32, 32)
    y = model(x).argmax(1)
    found = hf.attack(model, x, y, hf.Linf(1.0), "fgsm")
    assert found.success.shape == (2,)
    if name == "resnet10t":
        assert bool((hf.bounds(model, x, hf.Linf(1e-6), "ibp").lower <= model(x)).all())
    else:
        with pytest.raises(UnsupportedError):
            hf.bounds(model, x, hf.Linf(1e-6), "ibp")
