"""A chain of layers is called layer by layer; its logits and gradients are those of the model as a whole."""

import pytest
import torch
from nets import Whole
from torch import nn

from holdfast.attacks.core.gradients import _finite, frozen, input_gradient, logits_of
from holdfast.attacks.core.losses import cross_entropy
from holdfast.attacks.fast.chain import _better_as_maps, well_laid_out
from holdfast.checks import check_model, check_place, modules_in


class Steps(nn.Module):
    def forward(self, x):
        return torch.round(x * 8) / 8


def rgb(*more):
    torch.manual_seed(0)
    last = (nn.Conv2d(32, 8, 4, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), *more, *last).eval()


MODELS = {
    "rgb": (rgb(), (3, 8, 8)),
    "batch norm": (rgb(nn.BatchNorm2d(32), nn.GELU(), nn.AvgPool2d(3, 1, 1)), (3, 8, 8)),
    "unknown layer": (rgb(Steps()), (3, 8, 8)),
    "grey": (nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 4)).eval(), (1, 8, 8)),
    "dense": (nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.ReLU(), nn.Linear(9, 3), nn.Softmax(1)).eval(), (6,)),
}


@pytest.mark.parametrize("held", [True, False], ids=["frozen", "free"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_a_chain_equals_the_whole(name, dtype, held):
    model, shape = MODELS[name]
    model = model.to(dtype).requires_grad_(not held)
    x, y = torch.rand(6, *shape, dtype=dtype), torch.arange(6) % 3
    before = x.clone()
    ours, whole = (input_gradient(m, x, y, cross_entropy) for m in (model, Whole(model)))
    for a, b in zip(ours, whole, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert float(ours[0].abs().max()) > 0
    assert ours[0].is_contiguous()
    assert torch.equal(x, before)
    with torch.no_grad():
        assert torch.equal(logits_of(model, x), ours[2])


def test_maps_lie_channels_last_only_where_it_pays_and_every_layer_is_known():
    def asked(model, x):
        moved = well_laid_out(model, x)
        assert torch.equal(moved, x)
        return moved is not x and not moved.is_contiguous()

    x = torch.rand(2, 3, 8, 8)
    assert asked(rgb(), x)
    assert not asked(rgb(), x.double())
    assert not asked(rgb(), x[0])
    assert not asked(rgb(Steps()), x)
    assert asked(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3, stride=2)), x)
    assert not asked(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3)), x)
    assert not asked(Whole(rgb()), x)
    assert not asked(nn.Sequential(), x)
    assert not asked(nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU()), x[:, :1])
    assert not asked(nn.Sequential(nn.ReLU()), x)


@pytest.mark.parametrize("batch", [1, 2, 3, 6])
def test_dense_layers_behind_maps_see_them_in_their_own_order(batch):
    model, x, y = rgb(), torch.rand(batch, 3, 8, 8), torch.arange(batch) % 5
    maps = model[:-2](well_laid_out(model, x))
    assert _better_as_maps(model[-2], model[-1], maps) == (2 * batch > 5)
    assert not _better_as_maps(nn.Flatten(2), model[-1], maps)
    assert not _better_as_maps(model[-2], model[-1], maps.contiguous())
    ours, whole = (input_gradient(m, x, y, cross_entropy) for m in (model, Whole(model)))
    for a, b in zip(ours, whole, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_padding_that_is_not_zero_is_left_to_the_layer():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.Flatten()).eval()
    x, y = torch.rand(4, 3, 8, 8), torch.arange(4)
    assert torch.equal(logits_of(model, x), model(x))
    assert torch.equal(input_gradient(model, x, y, cross_entropy)[2], model(x))


def test_a_gradient_lies_as_its_images():
    model, x, y = rgb(), torch.rand(4, 3, 8, 8), torch.arange(4)
    last = well_laid_out(model, x)
    with frozen(model):
        plain, moved = (input_gradient(model, images, y, cross_entropy)[0] for images in (x, last))
    assert plain.is_contiguous()
    assert moved.stride() == last.stride()
    assert torch.equal(plain, moved)


def test_hooks_see_every_call_and_values_that_nobody_overwrites():
    model, kept = rgb(), []
    model[0].register_forward_hook(lambda layer, inputs, output: kept.append(output.detach()))
    x, y = torch.rand(4, 3, 8, 8), torch.arange(4)
    input_gradient(model, x, y, cross_entropy)
    assert torch.equal(kept[0], model[0](x))
    assert float(kept[0].min()) < 0
    model.register_forward_hook(lambda layer, inputs, output: kept.append(layer))
    input_gradient(model, x, y, cross_entropy)
    assert kept[-1] is model


def test_a_layer_whose_forward_was_replaced_is_called_through_it():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    model[1].forward = lambda x: torch.round(x) - 5
    x = torch.rand(4, 3)
    gradient, _, logits = input_gradient(model, x, torch.zeros(4, dtype=torch.long), cross_entropy)
    assert torch.equal(logits, model(x))
    assert float(gradient.abs().max()) > 0  # the step passes the gradient on


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_traced_model_gives_the_same_gradient_and_passes_the_checks():
    model = rgb()
    x, y = torch.rand(4, 3, 8, 8), torch.arange(4)
    traced = torch.jit.trace(model, x).eval()
    check_model(traced)
    check_place(traced, x)
    for frame in (traced, nn.Sequential(traced)):
        with frozen(frame):
            found, _, _ = input_gradient(frame, x, y, cross_entropy)
        assert torch.allclose(found, input_gradient(model, x, y, cross_entropy)[0], atol=1e-6)


def test_an_empty_chain_is_the_identity():
    x = torch.rand(3, 4)
    assert torch.equal(logits_of(nn.Sequential(), x), x)


def test_gradients_without_a_value_become_zero():
    nan, inf = torch.nan, torch.inf
    assert _finite(torch.tensor([1.0, nan, inf, -inf, -2.0])).tolist() == [1, 0, 0, 0, -2]
    assert _finite(torch.tensor([inf, -inf])).tolist() == [0, 0]
    largest = torch.full((3,), torch.finfo(torch.float32).max)
    assert torch.equal(_finite(largest), largest)  # only their sum is infinite


def test_every_module_is_found_once():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.ReLU()))
    model.register_module("missing", None)
    assert modules_in(model) == [model, shared, model[1], model[1][1]]
    assert set(modules_in(model)) == set(model.modules())


def test_frozen_gives_back_what_was_free():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[0].bias.requires_grad_(False)
    with frozen(model):
        assert not any(p.requires_grad for p in model.parameters())
    assert [p.requires_grad for p in model.parameters()] == [True, False, True]
