"""SABR and MTL-IBP: between adversarial training and intervals."""

import pytest

import holdfast as hf
from certified_tasks import BASE, batch, interval_net, net, small_data
from contexts import make_context
from holdfast.errors import InputError
from holdfast.training.context import Parts
from holdfast.training.objectives.ibp import ibp
from holdfast.training.objectives.mtl_ibp import mtl_ibp
from holdfast.training.objectives.sabr import sabr


def test_small_boxes_lie_between_adversarial_training_and_intervals() -> None:
    model, (x, y) = net(), batch()
    losses = [
        sabr(model, x, y, make_context(5, hf.Linf(0.1)), box=box, kappa_start=0.0)[0].item() for box in (0.0, 0.5, 1.0)
    ]
    assert losses == sorted(losses)
    whole = ibp(model, x, y, make_context(5, hf.Linf(0.1)), kappa_start=0.0)[0].item()
    assert losses[2] == pytest.approx(whole)
    mixture = [mtl_ibp(model, x, y, make_context(5, hf.Linf(0.1)), alpha=a)[0].item() for a in (0.0, 0.5, 1.0)]
    assert mixture[2] == pytest.approx(whole)
    assert mixture[1] == pytest.approx((mixture[0] + mixture[2]) / 2)


def test_the_box_of_sabr_is_around_the_example_and_stays_inside_the_threat_set() -> None:
    model, (x, y), seen = net(), batch(), []

    def attack(model, x, y, loss, context):
        seen.append(context.threat.eps)
        return x + context.threat.eps

    context = make_context(5, hf.Linf(0.1, high=2.0), parts=Parts(attack=attack))
    loss = sabr(model, x, y, context, box=0.4, kappa_start=0.0)[0]
    assert seen == [pytest.approx(0.06)]
    around = ibp(model, x + 0.06, y, make_context(5, hf.Linf(0.04, high=2.0)), kappa_start=0.0)[0]
    assert loss.item() == pytest.approx(around.item())


@pytest.mark.parametrize("name", ["sabr", "mtl-ibp"])
def test_a_layer_that_intervals_alone_cover_is_trained_where_intervals_prove(name: str) -> None:
    change = {"objective.name": name, "attack": {"name": "fgsm"}, "epochs": 1}
    with pytest.raises(InputError, match=r"evaluate\.certify: layer '2': linear bounds have no relaxation.*elu"):
        hf.train(BASE, model=interval_net(), data=small_data(), progress=False, **change)
    change |= {"evaluate.certify": "ibp"}
    history = hf.train(BASE, model=interval_net(), data=small_data(), progress=False, **change).history
    assert 0 <= history[0]["validation_certified"] <= history[0]["validation_robust"]
