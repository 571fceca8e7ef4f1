"""Certified objectives: closed forms, gradients, and how a run with them is set up."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from certified_tasks import BASE, CROWN, batch, interval_net, net, small_data
from contexts import make_context
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace, trace_batch
from holdfast.bounding.linear import relaxation as linear
from holdfast.errors import HoldfastError, InputError
from holdfast.random import Noise
from holdfast.registry import Objective, get, methods
from holdfast.training import folder as files
from holdfast.training.context import Parts
from holdfast.training.objectives.core.certified import certified_loss, interval_bound, linear_bound
from holdfast.training.objectives.crown_ibp import crown_ibp, slope_rule
from holdfast.training.objectives.ibp import ibp
from holdfast.training.objectives.mtl_ibp import mtl_ibp
from holdfast.training.objectives.sabr import sabr
from holdfast.training.objectives.slope_step import slope_step
from holdfast.training.objectives.standard import standard
from holdfast.training.recipe.reading import load_recipe
from holdfast.training.regularizers.grad_align import grad_align
from holdfast.training.regularizers.l1_weights import l1_weights
from holdfast.training.regularizers.trh import trh

BOUNDED = [method.name for method in methods("train") if isinstance(method, Objective) and method.bounded]


OBJECTIVES = {"ibp": ibp, "crown-ibp": crown_ibp, "slope-step": slope_step, "sabr": sabr, "mtl-ibp": mtl_ibp}


def test_the_graph_of_a_batch_gives_the_logits_and_their_gradients() -> None:
    model, (x, y) = net(), batch()
    graph, logits = trace_batch(model, x)
    assert torch.equal(logits, model(x))
    assert torch.allclose(graph.forward(x), trace(model.eval(), x).forward(x))
    theirs = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    ours = torch.autograd.grad(cross_entropy(logits, y), list(model.parameters()))
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("threat", "order"), [(hf.L2(0.1), 2), (hf.L1(0.1), math.inf)], ids=str)
def test_intervals_of_a_linear_model_on_a_ball_are_its_dual_norm(threat, order) -> None:
    torch.manual_seed(0)
    model, (x, y) = nn.Linear(6, 3).double(), batch()
    inside = x * 0.6 + 0.2  # no point of the ball leaves the valid range
    _, logits, margins, _ = certified_loss(model, inside, y, threat)
    norms = torch.linalg.vector_norm(model.weight[y][:, None] - model.weight, order, dim=2)
    assert torch.allclose(margins, logits.gather(1, y[:, None]) - logits - threat.eps * norms)


def test_logits_that_no_loss_looks_at_cost_no_gradients_and_change_none() -> None:
    model, (x, y) = net(), batch()
    _, logits = trace_batch(model, x, use_logits=False)
    assert not logits.requires_grad
    ours, theirs = (
        torch.autograd.grad(
            certified_loss(model, x, y, hf.Linf(0.1), use_logits=use)[0].sum(), list(model.parameters())
        )
        for use in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    normed = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double().train()
    loss = certified_loss(normed, x, y, hf.Linf(0.1), use_logits=False)[0].sum()
    whole = certified_loss(normed, x, y, hf.Linf(0.1))[0].sum()
    pairs = [torch.autograd.grad(value, list(normed.parameters())) for value in (loss, whole)]
    assert all(torch.allclose(a, b) for a, b in zip(*pairs, strict=True))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_in_training_takes_the_statistics_of_the_batch(momentum: float | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )
    model, x = model.double().train(), torch.rand(6, 1, 4, 4, dtype=torch.float64)
    twin = nn.Sequential(
        *[type(m)(4, momentum=momentum) if isinstance(m, nn.BatchNorm2d) else m for m in model]
    ).double()
    for _ in range(2):
        _, logits = trace_batch(model, x)
        assert torch.allclose(logits, twin(x))
    ours, theirs = model[1], twin[1]
    assert torch.allclose(ours.running_mean, theirs.running_mean)
    assert torch.allclose(ours.running_var, theirs.running_var)
    assert ours.num_batches_tracked == theirs.num_batches_tracked == 2
    wanted = torch.autograd.grad(twin(x).square().sum(), model[0].weight)[0]
    found = torch.autograd.grad(trace_batch(model, x)[1].square().sum(), model[0].weight)[0]
    assert torch.allclose(found, wanted)


def test_batch_norm_of_one_value_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).train()
    with pytest.raises(HoldfastError, match=r"layer '1'.*more than one value"):
        trace_batch(model, torch.rand(1, 4))


@pytest.mark.parametrize("bound", [interval_bound, CROWN, linear_bound(0.3, lambda r, y: None)])
@pytest.mark.parametrize("threat", [hf.Linf(0.1), hf.L2(0.2), hf.L1(0.3)])
def test_the_loss_is_at_least_that_of_every_input_in_the_set(bound, threat) -> None:
    model, (x, y) = net(), batch()
    loss = certified_loss(model, x, y, threat, bound)[0]
    for seed in range(30):
        inside = threat.random_start(x, Noise.for_batch(seed, len(x)))
        assert bool((loss >= cross_entropy(model(inside), y, reduction="none") - 1e-9).all())


def test_the_golden_bounds() -> None:
    """Two ReLUs, one unstable: intervals give +0.30 for z_1 - z_0, every linear bound -0.1125."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
        model[0].bias.copy_(torch.tensor([0.0, -0.1]))
        model[2].weight.copy_(torch.tensor([[1.0, -0.5], [-0.5, 1.0]]))
        model[2].bias.zero_()
    x, y, threat = torch.tensor([[0.5, 0.25]], dtype=torch.float64), torch.tensor([0]), hf.Linf(0.2)
    assert -certified_loss(model, x, y, threat)[2][0, 1].item() == pytest.approx(0.30)
    for rule in ("adaptive", "chord", "random", "bernoulli"):
        bound = linear_bound(1.0, slope_rule(rule, 0.5, 0.5, Noise.for_batch(0, 1)))
        assert -certified_loss(model, x, y, threat, bound)[2][0, 1].item() == pytest.approx(-0.1125)


def test_the_margins_are_those_that_certify() -> None:
    model, (x, y) = net(), batch()
    threat = hf.Linf(0.05)
    for name, bound in (("ibp", interval_bound), ("crown-ibp", CROWN)):
        margins = certified_loss(model, x, y, threat, bound)[2]
        assert bool((margins.gather(1, y[:, None]) == 0).all())
        proved = hf.certify(model.eval(), x, y, threat, name, sound=False).margin
        assert torch.allclose(margins.scatter(1, y[:, None], torch.inf).amin(1), proved)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_without_a_budget_every_objective_is_the_cross_entropy(name: str) -> None:
    model, (x, y) = net(), batch()
    loss, metrics = OBJECTIVES[name](model, x, y, make_context(5, hf.Linf(0.0), ramp=0.0))
    assert loss.item() == pytest.approx(cross_entropy(model(x), y).item())
    assert metrics["verified"] == metrics["accuracy"]


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("threat", [hf.Linf(0.08), hf.L2(0.2)])
def test_gradients_are_finite_differences(name: str, threat: hf.threats.Threat) -> None:
    if name == "sabr" and not isinstance(threat, hf.Linf):
        pytest.skip("small boxes are for linf")
    model, (x, y) = net(seed=4), batch()
    options = {"alpha": 1.0} if name == "mtl-ibp" else {"box": 1.0} if name == "sabr" else {}

    def value() -> torch.Tensor:
        return OBJECTIVES[name](model, x, y, make_context(5, threat, ramp=0.6), **options)[0]

    gradients = torch.autograd.grad(value(), list(model.parameters()))
    step = 1e-6
    for p, g in zip(model.parameters(), gradients, strict=True):
        direction = torch.randn(p.shape, generator=torch.Generator().manual_seed(5), dtype=p.dtype)
        with torch.no_grad():
            p.add_(step * direction)
            up = value().item()
            p.sub_(2 * step * direction)
            down = value().item()
            p.add_(step * direction)
        assert (up - down) / (2 * step) == pytest.approx((g * direction).sum().item(), rel=1e-4, abs=1e-6)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 6), st.integers(0, 10**6))
def test_any_batch_size_and_any_weights(size: int, seed: int) -> None:
    model, (x, y) = net(seed), batch(size)
    _, logits, margins, _ = certified_loss(model, x, y, hf.Linf(0.1), CROWN)
    assert logits.shape == margins.shape == (size, 3)
    lower = certified_loss(model, x, y, hf.Linf(0.1))[2]
    assert bool((lower <= logits.gather(1, y[:, None]) - logits + 1e-9).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_and_certifying_bounds_agree_on_convolutions(dtype: torch.dtype) -> None:
    """With gradients the fused steps are taken, in float32 with channels last; without them windows and buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, 2, 1), nn.ReLU(), nn.Conv2d(3, 4, 3, 1, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)
    )
    model, x = model.to(dtype), torch.rand(4, 1, 8, 8, dtype=dtype)
    y, r = torch.tensor([0, 1, 2, 4]), region(hf.Linf(0.05), x, sound=False)
    relaxed = linear.relaxation(trace(model.eval(), x), r, slopes="adaptive", hidden=False, sound=False)
    with torch.no_grad():
        plain = linear.margin_bounds(relaxed, y)
    loss, _, margins, _ = certified_loss(model, x, y, hf.Linf(0.05), CROWN)
    assert torch.allclose(margins, plain, atol=1e-6)
    loss.mean().backward()
    gradient = model[0].weight.grad.clone()
    model.zero_grad()
    relaxed = linear.relaxation(trace(model, x), r, slopes="adaptive", hidden=False, sound=False)
    cross_entropy(-linear.margin_bounds(relaxed, y), y).backward()
    assert torch.allclose(gradient, model[0].weight.grad, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget.end": 3}, "budget.end: the budget rises until epoch 3, but the run ends after 2"),
        ({"warmup": 5}, "warmup: expected at most the 2 epochs"),
        ({"threat": "linf:0.8", "budget.final": 2.0}, "beyond the range of the inputs"),
        ({"threat": "patch:2x2"}, "cannot be scaled"),
        ({"evaluate.certify": "pec", "threat": "patch:2x2", "objective.name": "patch"}, "evaluate.certify"),
        ({"evaluate.certify": "nothing"}, "evaluate.certify: unknown"),
        ({"evaluate.certify": "none", "evaluate.select": "certified"}, "evaluate.select"),
        ({"attack": {"name": "pgd"}}, "attack: the objective 'ibp' has no such part"),
        *[
            change
            for name in BOUNDED
            for change in (
                ({"objective.name": name, "regularizers.trh": {}}, rf"regularizers\.trh\.network: .*'{name}'.*'full'"),
                ({"objective.name": name, "regularizers.s2o": {}}, rf"regularizers\.s2o: .*'{name}' takes the loss of"),
            )
        ],
        (
            {"objective.name": "standard", "threat": None, "regularizers.grad-align": {}},
            r"threat: missing; regularizers\.grad-align needs one",
        ),
        ({"objective.kappa_end": 1.5}, "objective.kappa_end: expected a number between 0 and 1"),
        ({"weights": "zero"}, "weights: unknown value"),
    ],
)
def test_what_cannot_work_is_refused_at_load_time(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe(BASE, change)


def test_a_layer_without_a_rule_is_refused_before_the_first_epoch() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.GELU(), nn.Linear(8, 10))
    with pytest.raises(InputError, match=r"objective 'ibp'.*layer '2'.*GELU"):
        hf.train(BASE, model=model, data=small_data(), progress=False)


@pytest.mark.parametrize("name", ["at", "standard", "ibp"])
def test_the_certificate_of_the_validation_is_checked_before_the_first_epoch(name: str) -> None:
    change = {"objective.name": name, "evaluate.certify": "crown", "budget": {"name": "constant"}}
    with pytest.raises(InputError, match=r"evaluate\.certify: layer '2': linear bounds have no relaxation"):
        hf.train(BASE, model=interval_net(), data=small_data(), progress=False, **change)


def test_fresh_weights_are_not_drawn_over_a_model_that_was_given() -> None:
    model = hf.make_model("mlp", hidden=(8,))
    with pytest.raises(InputError, match="weights: 'ibp' draws fresh weights"):
        hf.train(BASE, model=model, data=small_data(), weights="ibp", progress=False)


def test_a_run_validates_by_proof_and_keeps_an_epoch_at_the_full_budget() -> None:
    result = hf.train(
        BASE, data=small_data(), epochs=3, weights="ibp", progress=False, **{"regularizers.ibp-warmup": {}}
    )
    assert all(0 <= row["validation_certified"] <= row["validation_robust"] for row in result.history)
    assert result.history[-1]["budget"] == pytest.approx(0.1)
    assert {"train_verified", "train_robust_loss", "train_ibp-warmup_tightness"} <= set(result.history[0])
    assert result.history[-1]["train_ibp-warmup_tightness"] == 0


def test_an_overflow_stops_with_the_checkpoint_before(tmp_path) -> None:
    with pytest.raises(HoldfastError, match="slower rise of the budget"):
        hf.train(BASE, data=small_data(), out=tmp_path / "run", progress=False, **{"optimizer.lr": 1e30})
    assert (tmp_path / "run" / files.LAST).exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["relu-stability", "l1-weights"])
def test_regularizers_of_bounds_also_serve_adversarial_training(name: str) -> None:
    change = {"objective.name": "at", f"regularizers.{name}": {}, "epochs": 1, "attack": {"name": "fgsm"}}
    result = hf.train(BASE, data=small_data(), progress=False, **change)
    figure = "loss" if name == "relu-stability" else "norm"
    assert math.isfinite(result.history[0][f"train_{name}_{figure}"])


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize(
    "term",
    [
        partial(grad_align, weight=0.7),
        partial(trh, weight=0.3, network="full"),
        partial(trh, weight=0.3, network="full", estimator="hutchinson"),
        partial(l1_weights, weight=0.1),
    ],
    ids=["grad-align", "trh", "trh by hutchinson", "l1-weights"],
)
def test_terms_at_the_inputs_are_the_same_on_every_certified_objective(name: str, term) -> None:
    model, (x, y) = net(), batch()

    def step(objective, terms) -> tuple[torch.Tensor, torch.Tensor]:
        context = make_context(5, hf.Linf(0.05), Parts(regularizers=terms))
        loss, _ = objective(model, x, y, context)
        return loss, torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    objective = get("train", name).function
    added = [a - b for a, b in zip(step(objective, {"term": term}), step(objective, {}), strict=True)]
    alone = [a - b for a, b in zip(step(standard, {"term": term}), step(standard, {}), strict=True)]
    assert alone[0].item() > 1e-4
    assert torch.allclose(added[0], alone[0], rtol=1e-9)
    assert torch.allclose(added[1], alone[1], rtol=1e-9, atol=1e-12)
