"""LiResNet: shapes, parameter counts, blocks that are one convolution, heads with rows of norm one."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from holdfast.bounding.graph.ops import Conv
from holdfast.bounding.graph.trace import trace, trace_batch
from holdfast.bounding.lipschitz.constants import lipschitz_bound, lipschitz_estimate
from holdfast.bounding.lipschitz.spectral import norm_bound
from holdfast.errors import InputError
from holdfast.models import count_parameters, list_models, load_model, make_model, save_model
from holdfast.models.layers import MinMax
from holdfast.models.zoo.liresnet import LinearResidual, NonlinearResidual, NormalizedLinear, liresnet


def test_parameter_counts_are_those_of_the_architecture():
    with torch.device("meta"):
        counts = [count_parameters(make_model("liresnet", neck=neck)) for neck in (2048, 512)]
        large = count_parameters(make_model("liresnet-l18w256"))
    assert counts == [9_831_690, 3_523_338]
    assert large == 29_542_922
    small = count_parameters(make_model("liresnet", input_shape=(1, 28, 28), width=8, depth=2, neck=16))
    by_hand = (25 * 8 + 8) + 2 * (9 * 64 + 8 + 8) + (16 * 8 * 16 + 16) + (9 * 16 * 16 + 16) + (160 + 10)
    assert small == by_hand


def test_all_are_in_the_catalogue():
    rows = {row.name: row for row in list_models()}
    assert {"liresnet", "liresnet-l18w256", "2c2f-minmax", "4c3f-minmax", "6c2f-minmax", "8c2f-minmax"} <= set(rows)
    assert rows["4c3f-minmax"].parameters == rows["4c3f"].parameters
    assert rows["8c2f-minmax"].classes == 200


@pytest.mark.parametrize(
    ("shape", "stem", "side"),
    [
        ((3, 32, 32), (5, 2, 2), 16),
        ((3, 64, 64), (7, 4, 3), 16),
        ((3, 224, 224), (14, 14, 0), 16),
        ((1, 28, 28), (5, 2, 2), 14),
    ],
)
def test_the_stem_gives_maps_of_the_same_size(shape, stem, side):
    model = liresnet(shape, 7, depth=1, width=4, neck=6, stem=stem).eval()
    x = torch.rand(2, *shape)
    with torch.no_grad():
        assert model[:1](x).shape == (2, 4, side, side)
        assert model(x).shape == (2, 7)


def test_a_block_is_the_identity_plus_its_branch():
    torch.manual_seed(0)
    block = LinearResidual(4, 1 / math.sqrt(3))
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    x = torch.rand(5, 4, 6, 7)
    branch = F.conv2d(x, block.weight, block.bias, padding=1) * block.beta[:, None, None] / math.sqrt(3)
    assert torch.allclose(block(x), x + branch, atol=1e-5)
    nn.init.zeros_(block.beta)
    assert torch.equal(block(x), x)


def test_the_norm_of_a_block_is_at_most_one_plus_that_of_its_branch():
    torch.manual_seed(0)
    block = LinearResidual(4, 1.0)
    nn.init.normal_(block.weight, std=0.3)
    shape = ((1, 1), (1, 1), (1, 1), 1, (4, 8, 8))
    branch = norm_bound(Conv(block.weight.detach(), None, *shape))
    whole = norm_bound(Conv((nn.init.dirac_(torch.empty(4, 4, 3, 3)) + block.weight).detach(), None, *shape))
    assert abs(1 - branch) / 1.02 <= whole < 0.98 * (1 + branch)
    model = nn.Sequential(block, MinMax(), nn.Flatten(), nn.Linear(256, 2)).eval()
    assert float(lipschitz_bound(trace(model, torch.rand(1, 4, 8, 8))).body) == pytest.approx(whole, rel=1e-3)


def test_rows_of_the_head_have_norm_one_whatever_the_weights():
    torch.manual_seed(0)
    head = NormalizedLinear(6, 3).eval()
    nn.init.normal_(head.weight)
    nn.init.normal_(head.bias)
    x = torch.rand(4, 6)
    rows = head.weight / head.weight.norm(dim=1, keepdim=True)
    before, bound = head(x), lipschitz_bound(trace(head, x)).pairs
    assert torch.allclose(before, x @ rows.T + head.bias, atol=1e-6)
    assert torch.allclose(bound, torch.cdist(rows, rows).double(), atol=1e-5)
    assert float(bound.max()) <= 2 + 1e-6
    head.weight.data *= torch.tensor([[3.0], [0.1], [70.0]])
    assert torch.allclose(before, head(x), atol=1e-5)
    assert torch.allclose(bound, lipschitz_bound(trace(head, x)).pairs, atol=1e-5)


def test_weights_start_orthogonal_and_the_constant_is_small():
    model = make_model("liresnet", input_shape=(1, 28, 28), width=8, neck=32, seed=0).eval()
    bound = lipschitz_bound(trace(model, torch.rand(1, 1, 28, 28)))
    assert float(bound.body) < 20
    dense = next(m for m in model if isinstance(m, nn.Linear)).weight
    assert torch.allclose(dense @ dense.T, torch.eye(32), atol=1e-5)
    cnn = make_model("2c2f-minmax", seed=0)
    assert torch.allclose(cnn[0].weight.flatten(1) @ cnn[0].weight.flatten(1).T, torch.eye(16), atol=1e-5)
    assert [type(m) for m in cnn].count(MinMax) == 3


def test_saved_and_loaded_it_is_the_same(tmp_path):
    model = make_model(
        "liresnet", input_shape=(1, 8, 8), classes=3, depth=2, width=4, neck=6, stem=(3, 1, 1), seed=0
    ).eval()
    save_model(model, tmp_path / "model.safetensors")
    x = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "model.safetensors").eval()(x), model(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 5}, "even"),
        ({"neck": 7}, "even"),
        ({"depth": 0}, "depth"),
        ({"stem": (3, 1)}, "stem"),
        ({"stem": (28, 28, 0)}, "too small"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        make_model("liresnet", input_shape=(1, 28, 28), **options)
    with pytest.raises(InputError, match="even"):
        make_model("2c2f-minmax", hidden=(5,))


SMALL = {"input_shape": (1, 8, 8), "classes": 3, "depth": 2, "width": 4, "neck": 6, "stem": (3, 1, 1)}


def test_a_nonlinear_block_starts_as_the_identity_and_its_bound_is_one_plus_the_branch():
    torch.manual_seed(0)
    block = NonlinearResidual(4)
    x = torch.rand(2, 4, 8, 7)
    assert torch.equal(block(x), x)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    inner = block.first(x).unflatten(1, (2, 2)).sort(2, descending=True).values.flatten(1, 2)
    branch = F.conv2d(inner, block.weight, block.bias, padding=1) * block.beta[:, None, None]
    assert torch.allclose(block(x), x + branch, atol=1e-5)
    shape = ((1, 1), (1, 1), (1, 1), 1, (4, 8, 7))
    norms = [norm_bound(Conv(w.detach(), None, *shape)) for w in (block.first.weight, block.weight)]
    model = nn.Sequential(block, MinMax(), nn.Flatten(), nn.Linear(224, 2)).eval()
    proved = float(lipschitz_bound(trace(model, x)).body)
    most = 1 + float(block.beta.detach().abs().max()) * math.prod(norms)
    at_x = torch.autograd.functional.jacobian(lambda z: block(z[None])[0].flatten(), x[0]).flatten(1)
    assert float(torch.linalg.matrix_norm(at_x, 2)) < proved <= 1.02 * most


def test_networks_of_the_depth_study_differ_only_in_their_blocks():
    models = {name: make_model(name, seed=0, **SMALL) for name in ("liresnet", "resnet-minmax", "convnet-minmax")}
    kinds = {name: [type(module).__name__ for module in model] for name, model in models.items()}
    rest = [list(kind[:2] + kind[3:4] + kind[5:]) for kind in kinds.values()]
    assert rest[0] == rest[1] == rest[2]
    assert [kind[2] for kind in kinds.values()] == ["LinearResidual", "NonlinearResidual", "Conv2d"]
    count = {name: count_parameters(model) for name, model in models.items()}
    assert count["resnet-minmax"] - count["liresnet"] == 2 * (9 * 16 + 4)
    assert count["convnet-minmax"] - count["liresnet"] == -2 * 4


def test_training_moves_a_branch_that_starts_at_zero_and_its_estimate_follows():
    model = make_model("resnet-minmax", seed=0, **SMALL)
    torch.manual_seed(0)
    x, y = torch.rand(24, 1, 8, 8), torch.arange(24) % 3
    state: dict[str, torch.Tensor] = {}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(12):
        graph, logits = trace_batch(model, x)
        bound, state = lipschitz_estimate(graph, state, steps=5)
        assert step > 0 or float(dict(bound.layers)["conv2d"].detach()) == 0
        loss = F.cross_entropy(logits + 0.05 * bound.pairs[y], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(model[2].beta.detach().abs().min()) > 0
    graph = trace(model.eval(), x)
    estimate = dict(lipschitz_estimate(graph, state, steps=5)[0].layers)
    proved = dict(lipschitz_bound(graph).layers)
    for name in ("conv2d", "conv2d_1"):
        assert 0.8 * proved[name] < estimate[name].detach() <= 1.001 * proved[name]
