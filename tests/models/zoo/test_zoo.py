"""Architectures: parameter counts of the papers, shapes, traceability, seeds, options."""

import json
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.errors import InputError
from holdfast.models import ModelInfo, Normalize, count_parameters, get_architecture, list_models, make_model
from holdfast.models.catalog import add_architecture, record_architecture
from holdfast.models.random.random_network import draws_noise
from holdfast.models.zoo.vit import VisionTransformer

MNIST, CIFAR, TINY, IMAGENET = (1, 28, 28), (3, 32, 32), (3, 64, 64), (3, 224, 224)
ROWS = list_models()

# Small enough to run: every family with the options that change its structure.
RUNNABLE = [
    ("linear", (7,), {}),
    ("mlp", (2,), {"hidden": (5, 4), "activation": "arctan"}),
    ("fc1", MNIST, {"activation": "sigmoid"}),
    ("small-star", (2, 12, 16), {"activation": "leaky_relu"}),
    ("cnn", (1, 12, 14), {"layers": ((4, 3, 1, 1), "max", (5, 3, 2, 0), "avg"), "hidden": (), "batch_norm": True}),
    ("lenet", MNIST, {"width": 0.5}),
    ("lenet-padded", MNIST, {"width": 1}),
    ("vgg16", CIFAR, {"width": 1}),
    ("resnet18", (3, 16, 24), {"channels": (4, 5, 6, 7), "last_batch_norm": True}),
    ("resnet18", CIFAR, {"channels": (4, 5, 6, 7), "stem": "imagenet", "bottleneck": True, "affine": False}),
    ("preact-resnet18", (1, 12, 8), {"channels": (4, 5, 6, 7), "stem_channels": 3}),
    ("wrn", (3, 16, 16), {"depth": 10, "width": 1}),
    ("resnet-wong", (3, 8, 12), {}),
    ("vit-ti", (3, 8, 12), {"dim": 8, "depth": 2, "heads": 2, "mlp_dim": 16}),
    ("vit-ti", (1, 8, 8), {"dim": 8, "depth": 1, "heads": 2, "mlp_dim": 9, "stride": 2, "positions": "sincos"}),
    ("vit-ti", (3, 8, 16), {"dim": 8, "depth": 1, "heads": 2, "mlp_dim": 9, "stem": "conv", "pool": "mean"}),
]


def make_small(name: str, shape: tuple[int, ...], options: dict) -> nn.Module:
    return make_model(name, input_shape=shape, classes=3, seed=0, **options).eval()


def count(name: str, shape: tuple[int, ...], classes: int = 10, **options: object) -> int:
    with torch.device("meta"):
        return count_parameters(make_model(name, input_shape=shape, classes=classes, **options))


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("fc1", MNIST, 10, 814_090),
        ("mlp-255", MNIST, 10, 202_735),
        ("mlp-255", CIFAR, 10, 786_175),
        ("cnn-2layer", MNIST, 10, 103_766),
        ("cnn-2layer", CIFAR, 10, 134_614),
        ("cnn-4layer", MNIST, 10, 170_598),
        ("cnn-4layer", CIFAR, 10, 201_390),
        ("cnn-5layer-wide", CIFAR, 10, 17_190_602),
        ("small", MNIST, 10, 550_406),
        ("small", CIFAR, 10, 730_118),
        ("small-star", MNIST, 10, 166_406),
        ("small-star", CIFAR, 10, 214_918),
        ("2c2f", MNIST, 10, 166_406),
        ("medium", MNIST, 10, 1_974_762),
        ("medium", CIFAR, 10, 2_466_858),
        ("4c3f", MNIST, 10, 1_974_762),
        ("4c3f", CIFAR, 10, 2_466_858),
        ("large", MNIST, 10, 13_257_290),
        ("large", CIFAR, 10, 17_190_602),
        ("large-star", MNIST, 10, 13_220_362),
        ("large-star", CIFAR, 10, 17_153_674),
        ("6c2f", CIFAR, 10, 2_250_378),
        ("8c2f", TINY, 200, 4_342_984),
        ("resnet-wong", CIFAR, 10, 4_214_850),
        ("rn34", CIFAR, 10, 21_265_088),
        ("small-rn34-0.1", CIFAR, 10, 201_078),
        ("small-rn34-1.0", CIFAR, 10, 216_360),
        ("resnet18", CIFAR, 10, 11_173_962),
        ("resnet50", IMAGENET, 1000, 25_557_032),
        ("wrn-28-10", CIFAR, 10, 36_479_194),
        ("wrn-34-10", CIFAR, 10, 46_160_474),
        ("vit-b16", IMAGENET, 1000, 86_567_656),
        ("vit-l16", IMAGENET, 1000, 304_326_632),
        ("lenet", MNIST, 10, 44_426),
        ("lenet", CIFAR, 10, 62_006),
        ("lenet-padded", MNIST, 10, 3_274_634),
    ],
)
def test_parameter_counts_of_the_papers(name: str, shape: tuple[int, ...], classes: int, parameters: int) -> None:
    assert count(name, shape, classes) == parameters


def test_parameter_counts_with_options() -> None:
    widths = [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    swept = [1714, 3447, 6699, 11074, 14954, 21131, 26479, 34521, 43746]
    assert [count("lenet", MNIST, 2, width=w) for w in widths] == swept
    assert count("lenet", CIFAR, 2, width=0.5) == 15_544
    assert count("lenet-padded", MNIST, width=1) == 2 * 25 + 2 + 2 * 4 * 25 + 4 + 196 * 64 + 64 + 64 * 10 + 10
    assert count("mlp", (2,), 2, hidden=(100, 100)) == 10_602
    # The affine scale and shift of the batch norms are what is left out of the printed count of rn34.
    assert count("rn34", CIFAR, affine=True) - 21_265_088 == 2 * (64 * 7 + 128 * 9 + 256 * 13 + 512 * 7)
    assert count("vit-s", IMAGENET, 1000, patch=16) == 22_050_664
    assert count("vit-s16", IMAGENET, 1000) == 22_050_664 - 198 * 384  # no class token, fixed positions


@pytest.mark.parametrize(
    ("name", "shape", "options", "tokens"),
    [
        ("vit-b16", IMAGENET, {}, 197),
        ("vit-s16", IMAGENET, {}, 196),
        ("hybrid-l16", IMAGENET, {}, 197),
        ("vit-l", CIFAR, {"stride": 2}, 226),
        ("vit-s", CIFAR, {}, 65),
        ("vit-s", CIFAR, {"stem": "resnet50"}, 65),
    ],
)
def test_token_counts(name: str, shape: tuple[int, ...], options: dict, tokens: int) -> None:
    with torch.device("meta"):
        model = make_model(name, input_shape=shape, **options)
    assert isinstance(model, VisionTransformer)
    assert model.positions.shape[1] == model.tokens == tokens


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_model_gives_logits_at_its_own_shape_and_can_be_traced(row: ModelInfo) -> None:
    with torch.device("meta"):
        model = make_model(row.name).eval()
        whole = model if draws_noise(model) else torch.fx.symbolic_trace(model)
        logits = whole(torch.empty(2, *row.input_shape))
    assert logits.shape == (2, row.classes)
    assert row.parameters == count_parameters(model)
    assert row.summary
    assert row.reference


@pytest.mark.parametrize(("name", "shape", "options"), RUNNABLE)
def test_models_run_trace_and_treat_inputs_independently(name: str, shape: tuple[int, ...], options: dict) -> None:
    model = make_small(name, shape, options)
    x = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    logits = model(x)
    assert logits.shape == (3, 3)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), logits)
    torch.testing.assert_close(model(x[1:2]), logits[1:2], rtol=1e-4, atol=1e-5)
    assert not torch.equal(logits[0], logits[1])


@pytest.mark.parametrize(("name", "shape", "options"), RUNNABLE)
def test_models_work_in_float64_and_reach_every_parameter(name: str, shape: tuple[int, ...], options: dict) -> None:
    model = make_small(name, shape, options).double()
    model(torch.rand(2, *shape, dtype=torch.float64)).square().sum().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None]
    assert not without


def test_residual_blocks_add_the_shortcut() -> None:
    model = make_small("resnet-wong", (3, 8, 8), {})
    x = torch.rand(2, 3, 8, 8)
    h = x
    for layer in model:
        if hasattr(layer, "shortcut"):
            first, last, skip = layer.body[0], layer.body[2], layer.shortcut
            inner = F.relu(F.conv2d(h, first.weight, first.bias, first.stride, first.padding))
            outer = F.conv2d(inner, last.weight, last.bias, padding=1)
            h = F.relu(outer + F.conv2d(h, skip.weight, skip.bias, skip.stride))
        else:
            h = layer(h)
    torch.testing.assert_close(model(x), h)


def test_preactivation_block_keeps_the_raw_input_on_the_identity_shortcut() -> None:
    block = make_small("preact-resnet18", (3, 8, 8), {"channels": (4, 4, 4, 4), "stem_channels": 4})[1]
    for parameter in block.body.parameters():
        nn.init.zeros_(parameter)
    x = torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(block(x), x)


def test_attention_matches_the_textbook_formula() -> None:
    model = make_small("vit-ti", (1, 8, 8), {"dim": 6, "depth": 1, "heads": 2, "mlp_dim": 4})
    attention = model.blocks[0].attention
    x = torch.randn(2, 5, 6)
    q, k, v = attention.query(x), attention.key(x), attention.value(x)
    heads = []
    for h in (slice(0, 3), slice(3, 6)):
        weights = torch.softmax(q[..., h] @ k[..., h].mT / 3**0.5, -1)
        heads.append(weights @ v[..., h])
    torch.testing.assert_close(attention(x), attention.out(torch.cat(heads, -1)))


def test_fixed_positions_differ_and_leave_the_class_token_alone() -> None:
    options = {"dim": 16, "depth": 1, "heads": 2, "mlp_dim": 4, "positions": "sincos"}
    positions = make_small("vit-ti", (1, 8, 12), options).positions[0]
    assert positions.shape == (7, 16)
    assert not positions[0].any()
    assert torch.cdist(positions[1:], positions[1:])[~torch.eye(6, dtype=torch.bool)].min() > 0.1


def test_hybrid_kernels_are_standardised() -> None:
    model = make_small("vit-ti", (3, 8, 8), {"dim": 8, "depth": 1, "heads": 2, "mlp_dim": 9, "stem": "resnet50"})
    stem = model.stem
    x = torch.rand(2, 3, 8, 8)
    before = stem[0](x)
    with torch.no_grad():
        stem[0].weight.mul_(3).add_(1)
    torch.testing.assert_close(stem[0](x), before, rtol=1e-3, atol=1e-4)


def test_last_batch_norm_makes_gradients_independent_of_the_scale_of_the_head() -> None:
    def gradient(scale: float) -> torch.Tensor:
        options = {"channels": (4, 4, 4, 4), "last_batch_norm": True, "head_bias": False}
        model = make_small("resnet18", (1, 8, 8), options).double().train()
        with torch.no_grad():
            model[-2].weight.mul_(scale)
        x = torch.rand(8, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        loss = F.cross_entropy(model(x), torch.arange(8) % 3)
        return torch.autograd.grad(loss, x)[0]

    reference = gradient(1e3)
    torch.testing.assert_close(gradient(1e5), reference, rtol=1e-3, atol=1e-9)
    assert reference.abs().max() > 0


def test_seed_decides_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = (make_model("lenet", seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))
    make_model("lenet")
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("mean", "std"), [(0.5, 0.25), ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)), ((0.4, 0.5, 0.6), 0.5)])
def test_normalization_is_the_first_layer(mean: object, std: object) -> None:
    plain = make_model("cnn-2layer", input_shape=(3, 8, 12), seed=3)
    model = make_model("cnn-2layer", input_shape=(3, 8, 12), seed=3, normalize=(mean, std))
    x = torch.rand(2, 3, 8, 12)
    shaped = [torch.tensor(v).view(1, -1, 1, 1) for v in (mean, std)]
    torch.testing.assert_close(model(x), plain((x - shaped[0]) / shaped[1]))
    assert isinstance(next(m for m in model.modules() if not list(m.children())), Normalize)


def test_normalization_of_flat_inputs() -> None:
    model = make_model("mlp", input_shape=(2,), normalize=((1.0, 2.0), (1.0, 2.0)), seed=0)
    plain = make_model("mlp", input_shape=(2,), seed=0)
    torch.testing.assert_close(model(torch.tensor([[3.0, 4.0]])), plain(torch.tensor([[2.0, 1.0]])))


@given(
    st.lists(st.integers(1, 9), max_size=3),
    st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)),
    st.integers(1, 4),
)
@settings(deadline=None, max_examples=30)
def test_mlp_counts(hidden: list[int], shape: tuple[int, int, int], classes: int) -> None:
    model = make_model("mlp", input_shape=shape, classes=classes, hidden=hidden)
    sizes = [shape[0] * shape[1] * shape[2], *hidden, classes]
    assert count_parameters(model) == sum((a + 1) * b for a, b in pairwise(sizes))
    assert model(torch.rand(1, *shape)).shape == (1, classes)


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["max", "avg"]),
            st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2)),
        ),
        max_size=3,
    ),
    st.tuples(st.integers(1, 2), st.integers(1, 12), st.integers(1, 12)),
)
@settings(deadline=None, max_examples=60)
def test_cnn_runs_or_says_that_the_image_is_too_small(layers: list, shape: tuple[int, int, int]) -> None:
    try:
        model = make_model("cnn", input_shape=shape, layers=layers, classes=2)
    except InputError as error:
        assert "too small" in str(error)  # noqa: PT017
    else:
        assert model(torch.rand(2, *shape)).shape == (2, 2)


def test_the_recipe_is_complete_json_and_builds_the_same_model() -> None:
    model = make_model("resnet18", channels=(4, 4, 4, 4), normalize=(0.5, 0.25), input_shape=(1, 8, 8))
    recipe = get_architecture(model)
    assert recipe is not None
    name, options = recipe
    assert json.loads(json.dumps(options)) == options
    assert (name, options["channels"], options["normalize"]) == ("resnet18", [4, 4, 4, 4], [0.5, 0.25])
    assert options["affine"] is True  # defaults are written down too
    again = make_model(name, **options)
    assert get_architecture(again) == recipe
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert get_architecture(nn.Linear(1, 1)) is None


def test_list_is_sorted_and_counted() -> None:
    assert [r.name for r in ROWS] == sorted(r.name for r in ROWS)
    assert {r.name: r.parameters for r in ROWS}["small-star"] == 166_406


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("resnet19", {}, "unknown architecture 'resnet19'. Did you mean 'resnet18'"),
        ("mlp", {"hiden": (3,)}, "no option 'hiden'. Did you mean 'hidden'"),
        ("mlp", {"hidden": 256}, "option 'hidden' of the architecture 'mlp': expected a list, got 256"),
        ("mlp", {"hidden": (0,)}, r"'mlp'\[0\]: expected an integer >= 1, got 0"),
        ("mlp", {"activation": "gelo"}, "unknown activation"),
        ("mlp", {"input_shape": (1, 28)}, "input_shape must be"),
        ("mlp", {"input_shape": 784}, "input_shape must be"),
        ("mlp", {"input_shape": (0,)}, "input_shape must be"),
        ("mlp", {"classes": 0}, "classes: expected an integer >= 1, got 0"),
        ("mlp", {"normalize": 0.5}, "normalize must be a pair"),
        ("small", {"normalize": ((0.1, 0.2), 1.0)}, "2 entries; inputs of shape"),
        ("small", {"input_shape": (784,)}, "needs images"),
        ("vgg16", {"input_shape": MNIST}, "too small"),
        ("cnn", {"layers": ((4, 3),)}, "a layer must be"),
        ("cnn", {"layers": ("mox",)}, "expected a list or one of 'max', 'avg', got 'mox'"),
        ("wrn", {"depth": 29}, "6 n [+] 4"),
        ("resnet18", {"channels": (4, 4)}, "one entry"),
        ("preact-resnet18", {"blocks": (0, 1, 1, 1)}, "expected an integer >= 1, got 0"),
        ("resnet18", {"blocks": (), "channels": ()}, "one entry"),
        ("resnet18", {"stem": "mnist"}, "unknown value 'mnist'"),
        ("resnet-wong", {"input_shape": (3, 30, 32)}, "divisible by 4"),
        ("vit-s", {"patch": 5}, "do not tile"),
        ("vit-s", {"stem": "conv", "input_shape": (3, 30, 32)}, "do not tile"),
        ("vit-s", {"stem": "conv", "patch": 6}, "patch must be 2, 4, 8"),
        ("vit-s", {"stem": "resnet50", "patch": 8}, "patch=16 or"),
        ("vit-s", {"stem": "conv", "stride": 2}, "stride belongs to"),
        ("vit-s", {"heads": 5}, "multiple of heads"),
        ("vit-s", {"heads": -3}, "expected an integer >= 1, got -3"),
        ("vit-s", {"patch": 0}, "expected an integer >= 1, got 0"),
        ("vit-s", {"stride": -1}, "expected an integer >= 1, got -1"),
        ("vit-s", {"heads": 2.0}, "expected an integer >= 1, got 2.0"),
        ("vit-s", {"heads": True}, "expected an integer >= 1, got True"),
        ("resnet18", {"affine": "no"}, "expected true or false, got 'no'"),
        ("resnet-wong", {"blocks": -5}, "expected an integer >= 1, got -5"),
        ("mlp", {"input_shape": "123"}, "input_shape must be"),
        ("mlp", {"input_shape": (1.7, 28, 28)}, "input_shape must be"),
        ("vit-s", {"pool": "max"}, "unknown value 'max'"),
    ],
)
def test_bad_requests_are_refused(name: str, arguments: dict, words: str) -> None:
    with torch.device("meta"), pytest.raises(InputError, match=words):
        make_model(name, **arguments)


def test_a_name_is_taken_once_and_recipes_must_be_json() -> None:
    with pytest.raises(ValueError, match="registered twice"):
        add_architecture("mlp", nn.Identity, "", "")
    with pytest.raises(InputError, match="must be JSON"):
        record_architecture(nn.Identity(), "mlp", {"hidden": {1, 2}})
