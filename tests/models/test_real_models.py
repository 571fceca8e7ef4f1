"""Models as people have them: exported to ONNX, of TorchVision, timm, scikit-learn and Hugging Face, and lookalikes."""

import importlib
import inspect
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, save
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.nn import functional as F

import holdfast as hf
from holdfast.errors import InputError, UnsupportedError
from holdfast.models import Normalize, as_classifier, load_model

X = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def convolution(inputs: int, outputs: int, activation: nn.Module, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, bias=False, **options), nn.BatchNorm2d(outputs), activation)


class Residual(nn.Module):
    """A ResNet as TorchVision writes it: in-place ReLU, a shortcut that is added in place, torch.flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, 4, nn.ReLU(inplace=True), stride=2, padding=1), nn.MaxPool2d(3, 2, 1))
        self.one, self.two = nn.Conv2d(4, 6, 3, 2, 1), nn.Conv2d(6, 6, 3, 1, 1)
        self.norm, self.relu = nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        self.shortcut = nn.Conv2d(4, 6, 1, 2)
        self.pool, self.head = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out = self.norm(self.two(self.relu(self.one(x))))
        out += self.shortcut(x)
        return self.head(torch.flatten(self.pool(self.relu(out)), 1))


class Stacked(nn.Module):
    """A VGG: stacked convolutions, max pooling, adaptive pooling, view by the size of the batch, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            convolution(3, 4, nn.ReLU(True), padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.AvgPool2d(2)
        )
        self.pool = nn.AdaptiveAvgPool2d(3)
        self.classifier = nn.Sequential(nn.Linear(36, 8), nn.ReLU(True), nn.Dropout(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).view(x.size(0), -1))


class Mobile(nn.Module):
    """A MobileNetV2: a convolution for each channel, ReLU6 or hardswish, a linear bottleneck, a mean over the image."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU6) -> None:
        super().__init__()
        self.stem = convolution(3, 4, activation(), stride=2, padding=1)
        self.depthwise = convolution(4, 4, activation(), padding=1, groups=4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.depthwise(x)).mean([2, 3]))


class ConvNext(nn.Module):
    """A block of ConvNeXt: large kernels, layer norm over the channels, GELU, a learnt scale of the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 4, 4, 4), nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.gamma, self.head = nn.Parameter(torch.full((4,), 0.5)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(F.gelu(self.up(y)))
        return self.head((x + y.permute(0, 3, 1, 2)).mean((-2, -1)))


class Transformer(nn.Module):
    """A vision transformer with one block and scaled dot-product attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(tokens)).chunk(3, -1)
        return self.head((tokens + F.scaled_dot_product_attention(q, k, v)).mean(1))


def ready(model: nn.Module) -> nn.Module:
    """Statistics and weights as if it were trained, in eval mode."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, generator=generator)
            nn.init.uniform_(module.running_var, 0.5, 2, generator=generator)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0, parameter[0].numel() ** -0.5, generator=generator)
    return model.eval()


def export(model: nn.Module, path: Path, *, dynamo: bool, x: Tensor = X) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both exporters warn about their own insides
        if dynamo:
            shapes = ({0: torch.export.Dim("batch")},)
            torch.onnx.export(model, (x[:2],), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
        else:
            axes = {"x": {0: "batch"}}
            torch.onnx.export(model, (x[:2],), path, dynamo=False, dynamic_axes=axes, input_names=["x"])
    return path


def bracket(model: nn.Module, x: Tensor = X, method: str = "crown") -> None:
    """Certify and attack at two budgets: nothing proved breaks, all examples are real, the smaller proves something."""
    y = model(x).argmax(1)
    for eps in (1e-4, 0.3):
        proved = hf.certify(model, x, y, hf.Linf(eps), method).certified
        found = hf.attack(model, x, y, hf.Linf(eps), "pgd", steps=5)
        assert not bool((proved & found.success).any())
        assert bool((model(found.x_adv).argmax(1) != y)[found.success].all())
        if eps < 0.01:
            assert bool(proved.any())


def optional(name: str) -> ModuleType:
    """The package, or a skip; a TorchVision that was built for another torch fails with a RuntimeError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name} cannot be imported: {error}")


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


def hardswish() -> nn.Module:
    return Mobile(nn.Hardswish)


@pytest.mark.parametrize(
    ("make", "words"),
    [(hardswish, "Hardswish"), (ConvNext, "permute"), (Transformer, "transpose")],
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
        ("HardSigmoid", ["x"], {}, "expected those of torch"),
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


# --- The adapter ------------------------------------------------------------------------------------------------------


@dataclass
class Output:
    """What a model of Hugging Face returns: more than its logits."""

    logits: Tensor
    hidden: Any = None


class Wrapped(nn.Module):
    """Returns the logits of a dense layer in the way that `pack` packs them."""

    def __init__(self, pack: Any) -> None:
        super().__init__()
        self.dense, self.pack = nn.Linear(6, 3), pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.dense(x))


FLAT = torch.rand(5, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("pack", "output"),
    [
        (lambda z: z, None),
        (lambda z: Output(z), None),
        (lambda z: {"loss": None, "logits": z}, None),
        (lambda z: {"scores": z}, "scores"),
        (lambda z: Output(None, hidden=z), "hidden"),
        (lambda z: (None, z), 1),
    ],
)
def test_the_logits_are_found_in_what_the_model_returns(pack: Any, output: Any) -> None:
    module = Wrapped(pack)
    model = as_classifier(module, output=output)
    assert not module.training
    torch.testing.assert_close(model(FLAT), module.dense(FLAT))
    bracket(model, FLAT)


@pytest.mark.parametrize(
    ("pack", "output", "words"),
    [
        (lambda z: {"scores": z}, None, "a mapping with the keys 'scores', in which there is no 'logits'"),
        (lambda z: (z, z), None, "a tuple of 2, in which there is no 'logits'"),
        (lambda z: (z, z), 2, "there is no 2"),
        (lambda z: Output(z), "scores", "an? Output, in which there is no 'scores'"),
        (lambda z: z, 0, "leave output=0 away"),
        (lambda z: Output(z), "hidden", "'hidden' of the model is a NoneType"),
    ],
)
def test_an_answer_that_is_not_there_is_named(pack: Any, output: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        as_classifier(Wrapped(pack), output=output)(FLAT)


@pytest.mark.parametrize("kind", ["probabilities", "probability"])
def test_a_last_softmax_or_sigmoid_is_taken_off(tmp_path: Path, kind: Any) -> None:
    outputs, last = (3, nn.Softmax(1)) if kind == "probabilities" else (1, nn.Sigmoid())
    dense = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, outputs)).eval()
    module = nn.Sequential(*dense, last).eval()
    loaded = load_model(export(module, tmp_path / "m.onnx", dynamo=False, x=FLAT))
    for given in (module, loaded):
        model = as_classifier(given, kind=kind)
        expected = dense(FLAT) if outputs == 3 else torch.cat([torch.zeros(5, 1), dense(FLAT)], 1)
        torch.testing.assert_close(model(FLAT), expected)
        bracket(model, FLAT)
        torch.testing.assert_close(given(FLAT), module(FLAT))  # the module itself stays as it was


class Probabilities(nn.Module):
    """Ends in a function, which cannot be taken off."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.dense, self.binary = nn.Linear(6, outputs), outputs == 1

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.dense(x)).squeeze(1) if self.binary else torch.softmax(self.dense(x), 1)


@pytest.mark.parametrize(("kind", "outputs"), [("probabilities", 3), ("probability", 1)])
def test_other_probabilities_become_logits_with_a_warning(kind: Any, outputs: int) -> None:
    module = Probabilities(outputs).double()
    with pytest.warns(UserWarning, match=f"the {kind} of the model are turned into logits by a logarithm"):
        model = as_classifier(module, kind=kind)
    x = FLAT.double()
    z = module.dense(x)
    z = torch.cat([torch.zeros_like(z), z], 1) if outputs == 1 else z
    torch.testing.assert_close(model(x), z - z.logsumexp(1, True) if outputs == 3 else z)
    assert bool(torch.isfinite(model(x * 1e4)).all())
    assert bool(hf.attack(model, x, model(x).argmax(1), hf.Linf(1.0), "pgd", steps=10).success.any())
    with pytest.raises(UnsupportedError, match="layer"):
        hf.bounds(model, x, hf.Linf(0.1), "ibp")


def test_scores_bytes_and_channels_last() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(16 * 16 * 3, 1)).eval()
    model = as_classifier(module, mean=(120, 110, 100), std=(60, 50, 40), high=255, channels_last=True, kind="score")
    shift, scale = torch.tensor([120.0, 110, 100]), torch.tensor([60.0, 50, 40])
    score = module((255 * X.permute(0, 2, 3, 1) - shift) / scale)
    torch.testing.assert_close(model(X), torch.cat([torch.zeros_like(score), score], 1), rtol=1e-4, atol=1e-4)
    y = model(X).argmax(1)
    found = hf.attack(model, X, y, hf.Linf(0.5), "pgd", steps=10)
    assert bool((found.x_adv >= 0).all())
    assert bool(found.success.any())
    assert len(as_classifier(module)) == 1  # nothing before and nothing after what needs neither


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "logit"}, "one of logits, probabilities, score, probability"),
        ({"high": 0}, "high must be a number > 0"),
    ],
)
def test_bad_options_are_named(options: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        as_classifier(nn.Linear(6, 3), **options)
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module, got function"):
        as_classifier(lambda x: x)  # type: ignore[arg-type]


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


# --- The page ---------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "your-model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(python|py)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_code_of_the_page_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kind, code = BLOCKS[number]
    if kind == "py":
        for name in re.findall(r"^(?:import|from) (torchvision|timm|sklearn|skl2onnx)", code, re.MULTILINE):
            optional(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages, about themselves
        exec(compile(code, "docs/your-model.md", "exec"), {})


def test_the_page_names_every_option_of_the_adapter() -> None:
    for option in inspect.signature(as_classifier).parameters:
        assert option == "module" or re.search(rf"`{option}[=`]", PAGE)
