"""Sub-networks of any model: weights, scales that do not matter, the last batch norm, files, certificates."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.errors import InputError
from holdfast.models import load_model, make_model, save_model
from holdfast.models.layers import Normalize
from holdfast.models.masked import (
    Mask,
    binary_connect,
    computed,
    fixed_weights,
    masked,
    patterns,
    pruned,
    train_weights,
    with_form,
)
from holdfast.models.masked.random_weights import magnitude_scores

X = torch.rand(20, 1, 6, 8, generator=torch.Generator().manual_seed(0))
SMALL = {"input_shape": (1, 6, 8), "classes": 3}


class Own(nn.Module):
    """A model that the catalogue does not know; not square, with a batch norm and a scale of its own."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(96, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().flatten(1) * self.scale)


def trained(model, steps=3):
    """Batch norm has seen some batches."""
    model.train()
    for _ in range(steps):
        model(X)
    return model.eval()


def test_weights_are_binary_and_scores_lie_in_their_range():
    model = masked(make_model("mlp", hidden=(64,), seed=0), rate=0.9, score_scale=0.03, seed=0)
    for name, theta in fixed_weights(model).items():
        scores = computed(model, Mask)[name].scores.detach()
        assert set(theta.unique().tolist()) == {-1.0, 1.0}
        assert abs(float(theta.mean())) < 5 / math.sqrt(theta.numel())
        assert 0.9 * 0.03 < float(scores.abs().max()) <= 0.03


@pytest.mark.parametrize("weights", ["kaiming-constant", "kaiming-normal"])
def test_kaiming_weights_have_the_size_that_pruning_asks_for(weights):
    model = masked(make_model("mlp", hidden=(200,), seed=0), rate=0.75, weights=weights, score_scale=None, seed=0)
    theta, scores = fixed_weights(model)["0.1"], computed(model, Mask)["0.1"].scores.detach()
    size = math.sqrt(2 / (784 * 0.25))
    assert float(theta.std()) == pytest.approx(size, rel=0.02)
    if weights == "kaiming-constant":
        assert torch.allclose(theta.abs(), torch.tensor(size))
    assert 0.99 * math.sqrt(1 / 784) < float(scores.abs().max()) <= math.sqrt(1 / 784)


def test_the_inputs_of_a_convolution_are_counted_with_its_kernel():
    conv = nn.Conv2d(6, 40, 3)
    options = {"rate": 0.75, "weights": "kaiming-constant", "last_batch_norm": False, "seed": 0}
    model = masked(nn.Sequential(conv), **options)
    size, limit = math.sqrt(2 / (54 * 0.25)), math.sqrt(1 / 54)
    assert torch.allclose(fixed_weights(model)["0"].abs(), torch.tensor(size))
    assert 0.98 * limit < float(computed(model, Mask)["0"].scores.detach().abs().max()) <= limit
    assert computed(model, Mask)["0"].scores.min() < -0.9 * limit
    assert float(magnitude_scores(conv.weight).abs().max()) == pytest.approx(math.sqrt(6 / 54))


def test_binary_weights_have_scores_up_to_a_hundredth_unless_told():
    model = masked(make_model("mlp", hidden=(64,), seed=0), rate=0.9, seed=0)
    scores = computed(model, Mask)["0.1"].scores.detach()
    assert 0.0099 < float(scores.max()) <= 0.01
    assert -0.01 <= float(scores.min()) < -0.0099


def test_scores_of_a_trained_model_rank_by_magnitude():
    model = make_model("mlp", hidden=(10,), seed=0, **SMALL)
    kept = masked(model, rate=0.8, gamma=1.0, weights="own", last_batch_norm=False)
    weight, pattern = model[1].weight, patterns(kept)["1"]
    assert weight.abs()[pattern].min() > weight.abs()[~pattern].max()
    assert torch.equal(fixed_weights(kept)["1"], weight)
    assert float(magnitude_scores(weight).abs().max()) == pytest.approx(math.sqrt(6 / 48))
    assert kept[1].bias is not None
    assert not kept[1].bias.requires_grad


def test_scales_of_binary_layers_do_not_change_predictions():
    model = trained(masked(make_model("cnn", batch_norm=True, hidden=(), seed=0, **SMALL), rate=0.5, seed=0))
    scaled = copy.deepcopy(model)
    for module in scaled.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.eps, module.momentum = 1e-12, None
            module.reset_running_stats()
    plain = copy.deepcopy(scaled)
    with torch.no_grad():
        for name, factor in zip(fixed_weights(scaled), (3.0, 0.2, 7.0), strict=True):
            fixed_weights(scaled)[name].mul_(factor)
    assert torch.allclose(trained(scaled)(X), trained(plain)(X), atol=1e-4)


@pytest.mark.parametrize("alpha", [10.0, 100.0])
@pytest.mark.parametrize("training", [True, False])
def test_the_last_batch_norm_takes_the_scale_out_of_the_gradient(alpha, training):
    """W -> alpha W: the gradient for the features grows with alpha without it, and stays with it."""
    torch.manual_seed(0)
    u, w, y = torch.randn(30, 6).double(), torch.randn(3, 6).double(), torch.arange(30) % 3

    def gradient(scale, last):
        features = u.clone().requires_grad_(True)
        norm = nn.BatchNorm1d(3, affine=False, eps=1e-12, momentum=None).double()
        norm.train()(u @ (scale * w).T)
        norm.train(training)
        o = features @ (scale * w).T
        return torch.autograd.grad(cross_entropy(norm(o) if last else o, y), features)[0]

    assert torch.allclose(gradient(alpha, True), gradient(1.0, True), atol=1e-12)
    wrong = (u @ w.T).argmax(1) != y
    assert gradient(alpha, False)[wrong].norm() > 0.5 * alpha * gradient(1.0, False)[wrong].norm()


@pytest.mark.parametrize("options", [{}, {"weights": "own"}, {"last_batch_norm": False, "transform": "identity"}])
def test_files_hold_a_sub_network_and_its_plain_form(tmp_path, options):
    model = trained(masked(make_model("cnn", batch_norm=True, seed=0, **SMALL), rate=0.8, seed=0, **options))
    plain = pruned(model)
    assert torch.equal(plain(X), model(X))
    assert type(plain.get_submodule("0.0" if options.get("last_batch_norm", True) else "0")) is nn.Conv2d
    for name, network in (("masked", model), ("plain", plain)):
        save_model(network, tmp_path / f"{name}.safetensors")
        assert torch.equal(load_model(tmp_path / f"{name}.safetensors")(X), model(X))
    assert isinstance(model.state_dict(), dict)  # the original still computes its weights
    assert len(computed(model, Mask)) == 4


def test_a_model_of_ones_own_is_frozen_but_for_its_scores_and_comes_back(tmp_path):
    model = trained(masked(Own(), rate=0.5, seed=0))
    assert (model[0].conv.bias, model[0].norm.affine, model[0].norm.weight) == (None, False, None)
    assert not model[0].scale.requires_grad
    assert model(X).shape == (20, 3)
    save_model(model, tmp_path / "own.safetensors")
    again = load_model(tmp_path / "own.safetensors", masked(Own(), rate=0.5, seed=5))
    assert torch.equal(again(X), model(X))


@pytest.mark.parametrize("last_batch_norm", [True, False])
def test_a_model_of_ones_own_comes_back_from_the_model_that_it_was_made_of(tmp_path, last_batch_norm):
    """The file says the rate, so that it need not be given again, and cannot be another one by mistake."""
    model = trained(masked(Own(), rate=0.5, last_batch_norm=last_batch_norm, seed=0))
    for network in (model, pruned(model), trained(binary_connect(Own()))):
        path = save_model(network, tmp_path / "own.safetensors")
        base = Own()
        before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
        again = load_model(path, base)
        assert torch.equal(again(X), network(X))
        assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
        assert torch.equal(load_model(save_model(again, path), base)(X), network(X))
    path = save_model(model, tmp_path / "own.safetensors")
    kept = {name: int(pattern.sum()) for name, pattern in patterns(model).items()}
    assert {name: int(pattern.sum()) for name, pattern in patterns(load_model(path, Own())).items()} == kept
    for other in (masked(Own(), rate=0.6, last_batch_norm=last_batch_norm), pruned(model)):
        with pytest.raises(InputError, match="a sub-network of another form than"):
            load_model(path, other)
    with pytest.raises(InputError, match="cannot be made of the model"):
        load_model(path, nn.Sequential(nn.Flatten()))


def test_a_normalisation_before_a_model_of_ones_own_comes_back_too(tmp_path):
    model = trained(masked(nn.Sequential(Normalize(0.3, 0.2), Own()), rate=0.5, seed=0))
    path = save_model(model, tmp_path / "own.safetensors")
    assert torch.equal(load_model(path, Own(), mean=0.3, std=0.2)(X), model(X))


@pytest.mark.parametrize(
    "form", [5, {"form": "round"}, {"rate": 2.0}, {"gamma": "x"}, {"classes": -1}, {"of": "lenet"}]
)
def test_forms_that_lie_are_refused(form):
    with pytest.raises(InputError):
        with_form(Own(), form)


@pytest.mark.parametrize("training", [True, False])
def test_a_sub_network_is_in_the_mode_of_its_model(training):
    network = masked(Own().train(training), rate=0.5, seed=0)
    assert {module.training for module in network.modules()} == {training}
    if not training:
        hf.attack(network, X, torch.zeros(20, dtype=torch.int64), "linf:0.01", method="fgsm")


def test_the_seed_decides_and_the_global_generator_is_left_alone():
    base = make_model("mlp", hidden=(10,), seed=0, **SMALL)
    state = torch.get_rng_state()
    one, same, other = (masked(base, rate=0.5, seed=seed).eval() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one(X), same(X))
    assert not torch.equal(one(X), other(X))


def test_a_model_that_ends_in_batch_norm_gets_no_second_one():
    base = make_model("resnet18", blocks=(1,), channels=(4,), last_batch_norm=True, seed=0, **SMALL)
    model = masked(base, rate=0.5, seed=0)
    assert isinstance(model[-1], nn.BatchNorm1d)
    assert not isinstance(model[-2], nn.BatchNorm1d)


def test_certificates_and_attacks_take_it_as_it_is():
    model = trained(masked(make_model("mlp", hidden=(10,), seed=0, **SMALL), rate=0.5, seed=0))
    y = model(X).argmax(1)
    for network in (model, pruned(model)):
        result = hf.certify(network, X[:4], y[:4], "linf:0.001")
        broken = hf.attack(network, X[:4], y[:4], "linf:0.001", method="pgd").success
        assert not (result.certified & broken).any()
    margins = [hf.certify(network, X[:4], y[:4], "linf:0.001", "crown").margin for network in (model, pruned(model))]
    assert torch.equal(*margins)


def test_fine_tuning_fixes_the_mask_and_trains_the_weights():
    model = train_weights(masked(make_model("mlp", hidden=(10,), seed=0, **SMALL), rate=0.5, weights="own"))
    before = {name: pattern.clone() for name, pattern in patterns(model).items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    first = fixed_weights(model)["0.1"].detach().clone()
    cross_entropy(model(X), torch.zeros(20, dtype=torch.int64)).backward()
    optimizer.step()
    assert all(torch.equal(before[name], pattern) for name, pattern in patterns(model).items())
    moved = fixed_weights(model)["0.1"] != first
    assert moved.any()
    assert not (moved & ~before["0.1"]).any()
    with pytest.raises(InputError, match="has no masks to fix"):
        train_weights(make_model("mlp", **SMALL))


def test_binary_connect_computes_with_signs(tmp_path):
    model = binary_connect(make_model("mlp", hidden=(10,), seed=0, **SMALL)).eval()
    assert set(model[1].weight.unique().tolist()) == {-1.0, 1.0}
    assert model[1].parametrizations.weight.original.abs().max() < 1
    save_model(model, tmp_path / "signs.safetensors")
    assert torch.equal(load_model(tmp_path / "signs.safetensors")(X), model(X))
    assert torch.equal(pruned(model)(X), model(X))


def test_options_out_of_range_and_unknown_classes_are_named():
    with pytest.raises(InputError, match="option 'gamma' of the function 'masked': expected a number between 0 and 1"):
        masked(make_model("mlp", **SMALL), gamma=1.5)
    with pytest.raises(InputError, match="leaves no weight of layer '3'"):
        masked(make_model("mlp", hidden=(50,), **SMALL), rate=0.999, gamma=1.0)
    with pytest.raises(InputError, match="the number of classes is unknown"):
        masked(nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), rate=0.5)
    with pytest.raises(InputError, match="give of= another name"):
        make_model("masked", of="masked")
