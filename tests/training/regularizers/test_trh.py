"""The trace of the Hessian as a penalty: against its oracle, and the run without it."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from contexts import make_context
from holdfast import InputError, Linf
from holdfast.registry import methods
from holdfast.training import load_recipe, train
from holdfast.training.context import Parts
from holdfast.training.objectives.at import at
from holdfast.training.objectives.pat import pat
from holdfast.training.objectives.standard import standard
from holdfast.training.objectives.upat import upat
from holdfast.training.outputs import Output
from holdfast.training.regularizers.trh import ramp, trh
from holdfast.training.targets import adaptive, self_adaptive, smooth
from holdfast.training.top_curvature import trace_ce
from regularizer_tasks import OBJECTIVES, make_model, same_weights


@pytest.fixture
def batch():
    torch.manual_seed(2)
    x = torch.rand(6, 4, dtype=torch.float64)
    return x, (x + 0.2 * torch.randn_like(x)).clamp(0, 1), torch.arange(6) % 3


# Every objective that may stand beside `trh`, with each value of the options that change the form of its loss.
VARIANTS = {
    "standard": ({},),
    "at": ({}, {"divergence_weight": 3.0}),
    "trades": ({"stop_gradient": False}, {"stop_gradient": True}),
    "alp": tuple({"pair": pair, "stop_gradient": stop} for pair in ("softmax", "logits") for stop in (False, True)),
    "mart": tuple({"fit_at": at, "stop_gradient": stop} for at in ("adv", "clean") for stop in (False, True)),
}


# Objectives of images, tested apart.
PYRAMIDS = {"upat": ({}, {"clean_weight": 0.0}), "pat": ({}, {"weight": 0.5})}


LOSSES = [(name, options) for name, variants in VARIANTS.items() for options in variants]


TARGETS = {
    "labels": None,
    "soft": partial(smooth, amount=0.2),
    "weights on the fit": partial(self_adaptive, momentum=0.5, start=0),
    "weights on the whole loss": partial(adaptive, rho=0.5, beta=0.25, reweight=True, start=0),
}


def hessian_trace(loss, parameters):
    """Of loss(*parameters), by differentiating twice; sum over the blocks of the parameters."""
    blocks = torch.autograd.functional.hessian(loss, tuple(parameters))
    return sum(blocks[i][i].reshape(p.numel(), p.numel()).trace() for i, p in enumerate(parameters))


def trace_as_trained(name, options, model, batch, targets, layers):
    """Trace of the whole objective, as trained, over the parameters whose names start with `layers`."""
    x, x_adv, y = batch
    names = [key for key, _ in model.named_parameters() if key.startswith(layers)]

    def loss_at(*weights):
        moved = {**dict(model.named_parameters()), **dict(zip(names, weights, strict=True))}
        parts = Parts(attack=lambda *_: x_adv, targets=targets, perturb_weights=lambda *_: moved)
        return OBJECTIVES[name](model, x, y, make_context(x, Linf(0.1), parts), **options)[0]

    return hessian_trace(loss_at, [model.get_parameter(key) for key in names]).item()


def penalty_of(name, options, model, batch, targets, **settings):
    """What `trh` of weight 1 adds to the loss, and the trace that it reports."""
    x, x_adv, y = batch

    def step(regularizers):
        parts = Parts(attack=lambda *_: x_adv, targets=targets, regularizers=regularizers, top="2")
        return OBJECTIVES[name](model, x, y, make_context(x, Linf(0.1), parts), **options)

    loss, metrics = step({"trh": partial(trh, **settings)})
    return (loss - step({})[0]).item(), metrics["trh_trace"].item()


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize(("name", "options"), LOSSES)
@pytest.mark.parametrize("bias", [True, False])
def test_penalty_is_the_trace_of_the_objective_as_trained_over_the_top_layer(batch, name, options, bias, targets):
    model, targets = make_model(bias), TARGETS[targets]
    trace = trace_as_trained(name, options, model, batch, targets, "2.")
    added, reported = penalty_of(name, options, model, batch, targets, weight=0.3)
    assert added == pytest.approx(0.3 * trace, rel=1e-9, abs=1e-12)
    assert reported == pytest.approx(trace, rel=1e-9, abs=1e-12)
    assert abs(trace) > 1e-3


@pytest.mark.parametrize("targets", ["soft", "weights on the fit", "weights on the whole loss"])
@pytest.mark.parametrize("name", ["standard", "at"])
def test_exact_penalty_over_all_layers_is_the_trace_as_trained(batch, name, targets):
    model, targets = make_model(activation=nn.ReLU), TARGETS[targets]
    trace = trace_as_trained(name, {}, model, batch, targets, ("0.", "2."))
    added, _ = penalty_of(name, {}, model, batch, targets, weight=1.0, network="full")
    assert added == pytest.approx(trace, rel=1e-9)


@pytest.mark.parametrize(("name", "options"), LOSSES)
def test_hutchinson_estimates_the_trace_of_every_objective_as_trained(batch, name, options):
    """Over the three biases of the top layer, where the estimate has little noise."""
    model, targets = make_model(), TARGETS["weights on the fit"]
    for p in (*model[0].parameters(), model[2].weight):
        p.requires_grad_(False)
    trace = trace_as_trained(name, options, model, batch, targets, "2.bias")
    settings = {"weight": 1.0, "network": "full", "estimator": "hutchinson", "samples": 400}
    added, _ = penalty_of(name, options, model, batch, targets, **settings)
    assert added == pytest.approx(trace, rel=0.15, abs=0.02)


@pytest.mark.parametrize(("name", "options"), [(name, o) for name, variants in PYRAMIDS.items() for o in variants])
def test_penalty_of_pyramid_training_is_the_trace_at_both_inputs(batch, name, options):
    x, y = batch[0].reshape(6, 1, 2, 2), batch[2]
    model = nn.Sequential(nn.Flatten(), *make_model())
    options = {"levels": (1,), "multipliers": (1.0,), "radius": 0.2} | options
    pattern = 0.2 * torch.tensor([[[[1.0, -1.0], [0.5, 1.0]]]], dtype=x.dtype)

    def step(**parts):
        context = make_context(x, parts=Parts(top="3", **parts), state={"pyramid_1": pattern})
        return {"upat": upat, "pat": pat}[name](model, x, y, context, **options)[0]

    top = [model[3].weight, model[3].bias]
    moved = lambda *w: {**dict(model.named_parameters()), "3.weight": w[0], "3.bias": w[1]}  # noqa: E731
    trace = hessian_trace(lambda *w: step(perturb_weights=lambda *_: moved(*w)), top).item()
    added = (step(regularizers={"trh": partial(trh, weight=1.0)}) - step()).item()
    assert added == pytest.approx(trace, rel=1e-9)


THREATS = {"linf": "linf:0.1", "l2": "l2:0.1", "patch": "patch:2x2", "sparse": "sparse:2"}


EVERY_OBJECTIVE = [method for method in methods("train") if method.part == "objective"]


@pytest.mark.parametrize("method", EVERY_OBJECTIVE, ids=lambda method: method.name)
def test_every_objective_either_has_a_tested_trace_or_is_refused_beside_trh(method):
    threat = {"threat": THREATS[method.threats[0]]} if method.threats else {}
    recipe = {"epochs": 1, "optimizer": {"lr": 0.1}, "objective": {"name": method.name}, **threat}
    load_recipe(recipe)  # nothing but the regulariser is wrong with it
    beside = {**recipe, "regularizers": {"trh": {}}}
    tested = VARIANTS | PYRAMIDS
    if method.name not in tested:
        with pytest.raises(InputError, match="regularizers"):
            load_recipe(beside)
        return
    for options in tested[method.name]:
        load_recipe({**beside, "objective": {"name": method.name, **options}})


@pytest.mark.parametrize(("name", "options"), [case for case in LOSSES if case not in (("standard", {}), ("at", {}))])
def test_the_exact_trace_over_all_layers_is_refused_where_the_loss_looks_at_two_inputs(batch, name, options):
    recipe = {"epochs": 1, "optimizer": {"lr": 0.1}, "objective": {"name": name, **options}, "threat": "linf:0.1"}
    with pytest.raises(InputError, match=rf"regularizers\.trh\.estimator: .*'{name}'.*'hutchinson'"):
        load_recipe({**recipe, "regularizers": {"trh": {"network": "full"}}})
    load_recipe({**recipe, "regularizers": {"trh": {"network": "full", "estimator": "hutchinson"}}})
    with pytest.raises(InputError, match="hutchinson"):
        penalty_of(name, options, make_model(activation=nn.ReLU), batch, None, network="full")


def test_energy_and_impurity_are_reported_apart(batch):
    x, _, y = batch
    model = make_model()
    parts = Parts(regularizers={"trh": trh}, top="2")
    _, metrics = standard(model, x[:1], y[:1], make_context(x[:1], Linf(0.1), parts))
    energy, impurity = metrics["trh_features"].item(), metrics["trh_impurity"].item()
    features = model[1](model[0](x[:1]))
    assert energy == pytest.approx(features.square().sum().item())
    assert impurity == pytest.approx(1 - model(x[:1]).softmax(1).square().sum().item())
    assert metrics["trh_trace"].item() == pytest.approx((energy + 1) * impurity)  # one more for the bias


def test_gradient_reaches_the_first_layer(batch):
    """Finite differences of the penalty in one weight of the first layer."""
    x, _, y = batch
    model = make_model()

    def loss(weight):
        return standard(
            model, x, y, make_context(x, Linf(0.1), Parts(regularizers={"trh": partial(trh, weight=weight)}, top="2"))
        )

    with_trh, base = loss(1.0)[0], loss(0.0)[0]
    (gradient,) = torch.autograd.grad(with_trh - base, model[0].weight)
    values = []
    for shift in (1e-5, -2e-5):
        with torch.no_grad():
            model[0].weight[2, 1] += shift
        values.append((loss(1.0)[0] - loss(0.0)[0]).item())
    assert gradient.abs().min() > 0
    assert gradient[2, 1].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5)


def test_schedules_of_the_weight(batch):
    at = [(i + 0.5) / 1000 for i in range(1000)]
    assert [ramp("multistep", p) for p in at] == [0.01] * 100 + [0.1] * 400 + [1.0] * 500
    assert [ramp("linear", p) for p in at] == at
    assert {ramp("constant", p) for p in at} == {1.0}
    x, _, y = batch
    model = make_model()
    for schedule, factor in (("constant", 1.0), ("linear", 0.25), ("multistep", 0.1)):
        parts = Parts(regularizers={"trh": partial(trh, weight=2.0, schedule=schedule)}, top="2")
        loss, metrics = standard(model, x, y, make_context(x, Linf(0.1), parts, progress=0.25))
        base, _ = standard(model, x, y, make_context(x, Linf(0.1)))
        assert (loss - base).item() == pytest.approx(2 * factor * metrics["trh_trace"].item())


def test_the_schedule_runs_over_the_whole_run(toy_recipe, make_toy_model, toy_data, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "holdfast.training.regularizers.trh.ramp", lambda schedule, p: seen.append((schedule, p)) or 1.0
    )
    train(toy_recipe, make_toy_model(), toy_data, regularizers={"trh": {"schedule": "linear"}}, validation=0)
    batches = 4 * 5
    assert [p for _, p in seen] == pytest.approx([(i + 0.5) / batches for i in range(batches)])
    assert {schedule for schedule, _ in seen} == {"linear"}


def test_full_network_of_a_single_layer_is_its_top(batch):
    x, _, y = batch
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    found = []
    for options in ({"network": "top"}, {"network": "full"}):
        parts = Parts(regularizers={"trh": partial(trh, weight=0.5, **options)}, top="1")
        loss, metrics = standard(model, x, y, make_context(x, Linf(0.1), parts))
        found.append((loss.item(), metrics["trh_trace"].item()))
    assert found[0] == pytest.approx(found[1])
    assert found[0][1] == pytest.approx(trace_ce(Output(model(x), x), bias=True).mean().item())


def test_hutchinson_estimates_the_exact_trace_at_the_attacked_inputs(batch):
    x, x_adv, y = batch
    model = make_model(activation=nn.ReLU)
    traces = []
    for options in ({"estimator": "exact"}, {"estimator": "hutchinson", "samples": 300}):
        parts = Parts(attack=lambda *_: x_adv, regularizers={"trh": partial(trh, network="full", **options)})
        traces.append(at(model, x, y, make_context(x, Linf(0.1), parts))[1]["trh_trace"].item())
    weights = {key: p.detach() for key, p in model.named_parameters()}

    def loss(weights):
        return cross_entropy(torch.func.functional_call(model, weights, (x_adv,)), y)

    blocks = torch.func.jacrev(torch.func.grad(loss))(weights)
    exact = sum(blocks[key][key].reshape(p.numel(), p.numel()).trace().item() for key, p in weights.items())
    assert traces[0] == pytest.approx(exact)
    assert traces[1] == pytest.approx(exact, rel=0.15)
    assert traces[1] != traces[0]


def test_hutchinson_leaves_batch_norm_alone_and_trains(toy_recipe, make_toy_model, toy_data):
    model = make_toy_model().train()
    x, y = toy_data.train.x[:16], toy_data.train.y[:16]
    regularizer = partial(trh, weight=0.1, network="full", estimator="hutchinson", samples=2)
    loss, metrics = standard(model, x, y, make_context(x, Linf(0.1), Parts(regularizers={"trh": regularizer})))
    assert model[2].num_batches_tracked == 1
    assert model.training
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert "trh_trace" in metrics
    options = {"network": "full", "estimator": "hutchinson", "weight": 0.01}
    history = train(toy_recipe, make_toy_model(), toy_data, epochs=2, regularizers={"trh": options}).history
    assert all("train_trh_trace" in row for row in history)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_weight_zero_reproduces_the_base_run_bit_for_bit(toy_recipe, make_toy_model, toy_data, name):
    toy_recipe |= {"objective": {"name": name}, "epochs": 2}
    if name == "standard":
        toy_recipe["attack"] = None
    base = train(toy_recipe, make_toy_model(), toy_data)
    nothing = train(toy_recipe, make_toy_model(), toy_data, regularizers={"trh": {"weight": 0.0}})
    something = train(toy_recipe, make_toy_model(), toy_data, regularizers={"trh": {"weight": 0.1}})
    assert same_weights(base, nothing)
    assert not same_weights(base, something)
    assert [row["train_loss"] for row in base.history] == [row["train_loss"] for row in nothing.history]


class Ends(nn.Module):
    """Ends in a matrix product that is not a linear layer's."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(20, 3), nn.Parameter(torch.ones(3, 2))

    def forward(self, x):
        return self.first(x.flatten(1)) @ self.last


@pytest.mark.parametrize(
    ("model", "options", "key"),
    [
        (Ends, {}, r"regularizers\.trh: the model Ends does not end in a linear layer"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(20, 2), nn.ReLU()),
            {},
            r"regularizers\.trh: the model Sequential does not end",
        ),
        (Ends, {"network": "full"}, r"regularizers\.trh: the exact trace is for nn\.Sequential"),
    ],
)
def test_models_without_a_closed_form_are_refused_by_the_name_of_the_key(toy_recipe, toy_data, model, options, key):
    with pytest.raises(InputError, match=key):
        train(toy_recipe, model(), toy_data, regularizers={"trh": options})
