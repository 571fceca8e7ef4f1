"""All regularisers: weight zero is the base run, and several add up."""

from functools import partial

import pytest
import torch

from contexts import make_context
from holdfast import Linf
from holdfast.training import train
from holdfast.training.context import Parts
from holdfast.training.objectives.at import at
from holdfast.training.regularizers.grad_align import grad_align
from holdfast.training.regularizers.s2o import s2o
from holdfast.training.regularizers.trh import trh
from regularizer_tasks import make_model, same_weights


@pytest.fixture
def batch():
    torch.manual_seed(2)
    x = torch.rand(6, 4, dtype=torch.float64)
    return x, (x + 0.2 * torch.randn_like(x)).clamp(0, 1), torch.arange(6) % 3


@pytest.mark.parametrize("name", ["s2o", "grad-align"])
def test_weight_zero_is_the_base_bit_for_bit(toy_recipe, make_toy_model, toy_data, name):
    """Also with batch norm and dropout, which a further pass would disturb."""
    toy_recipe["epochs"] = 2
    base = train(toy_recipe, make_toy_model(), toy_data)
    nothing = train(toy_recipe, make_toy_model(), toy_data, regularizers={name: {"weight": 0.0}})
    something = train(toy_recipe, make_toy_model(), toy_data, regularizers={name: {"weight": 0.5}})
    assert same_weights(base, nothing)
    assert not same_weights(base, something)


def test_several_terms_add_up(batch):
    x, x_adv, y = batch
    model = make_model()
    terms = {"trh": partial(trh, weight=0.1), "s2o": partial(s2o, weight=0.2), "grad-align": grad_align}

    def loss(names):
        regularizers = {name: terms[name] for name in names}
        parts = Parts(attack=lambda *_: x_adv, regularizers=regularizers, top="2")
        return at(model, x, y, make_context(x, Linf(0.1), parts))[0].item()

    base = loss([])
    assert loss(terms) == pytest.approx(base + sum(loss([name]) - base for name in terms))
