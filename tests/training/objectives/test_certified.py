"""Certified objectives: what they are in closed form, their gradients, and how a run with them is set up."""

import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from contexts import make_context
from holdfast.bounding.core.region import region
from holdfast.bounding.fast import fused
from holdfast.bounding.fast.fused import bend, box_minimum
from holdfast.bounding.graph.trace import trace, trace_batch
from holdfast.bounding.linear import relaxation as linear
from holdfast.errors import HoldfastError, InputError
from holdfast.random import Noise
from holdfast.registry import Objective, get, methods
from holdfast.training import folder as files
from holdfast.training.context import Parts
from holdfast.training.initial_weights import ibp_weights
from holdfast.training.objectives.core.certified import certified_loss, interval_bound, linear_bound, mixed
from holdfast.training.objectives.crown_ibp import crown_ibp, slope_rule
from holdfast.training.objectives.ibp import ibp
from holdfast.training.objectives.mtl_ibp import mtl_ibp
from holdfast.training.objectives.sabr import sabr
from holdfast.training.objectives.slope_step import slope_step
from holdfast.training.objectives.standard import standard
from holdfast.training.recipe.sources import load_recipe
from holdfast.training.regularizers.grad_align import grad_align
from holdfast.training.regularizers.ibp_warmup import ibp_warmup
from holdfast.training.regularizers.l1_weights import l1_weights
from holdfast.training.regularizers.trh import trh
from holdfast.training.schedules import linear_rise, smooth_rise
from holdfast.training.step import Taken

BOUNDED = [method.name for method in methods("train") if isinstance(method, Objective) and method.bounded]


def net(seed: int = 0, inputs: int = 6, classes: int = 3, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, classes)).to(dtype)


def batch(size: int = 5, inputs: int = 6, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(size, inputs, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, classes, (size,), generator=generator)


OBJECTIVES = {"ibp": ibp, "crown-ibp": crown_ibp, "slope-step": slope_step, "sabr": sabr, "mtl-ibp": mtl_ibp}
CROWN = linear_bound(1.0, lambda r, y: None)


# --- The graph of a batch ---------------------------------------------------------------------------------------------


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


# --- The losses -------------------------------------------------------------------------------------------------------


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


def test_bernoulli_slopes_of_0_and_1_are_those_of_crown() -> None:
    model, (x, y) = net(), batch()
    drawn = linear_bound(1.0, slope_rule("bernoulli", 0.0, 1.0, Noise.for_batch(3, len(x))))
    assert torch.allclose(*(certified_loss(model, x, y, hf.Linf(0.2), bound)[2] for bound in (drawn, CROWN)))


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


def test_kappa_and_beta_move_with_the_budget() -> None:
    model, (x, y), threat = net(), batch(), hf.Linf(0.1)
    natural = cross_entropy(model(x), y).item()
    by_intervals, by_lines = (certified_loss(model, x, y, threat, b) for b in (interval_bound, CROWN))
    loss = ibp(model, x, y, make_context(5, threat, ramp=0.25), kappa_start=1.0, kappa_end=0.2)[0]
    assert loss.item() == pytest.approx(0.8 * natural + 0.2 * by_intervals[0].mean().item())
    loss = crown_ibp(model, x, y, make_context(5, threat, ramp=0.25), kappa_start=0.0, beta_start=1.0, beta_end=0.0)[0]
    both = 0.25 * by_intervals[2] + 0.75 * by_lines[2]
    assert loss.item() == pytest.approx(cross_entropy(-both, y).item())
    assert mixed(1.0, 0.0, make_context(5, threat, ramp=0.25)) == 0.75


def test_optimised_slopes_are_no_worse_than_random_ones_on_average() -> None:
    model, (x, y) = net(seed=2), batch(64)
    context = make_context(64, hf.Linf(0.15))
    ours = slope_step(model, x, y, context, kappa_start=0.0)[0]
    random = crown_ibp(model, x, y, context, kappa_start=0.0, beta_end=1.0, slopes="random")[0]
    several = slope_step(model, x, y, context, kappa_start=0.0, steps=7, step_size=0.1)[0]
    assert ours <= random
    assert several <= random


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


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 6), st.integers(0, 10**6))
def test_any_batch_size_and_any_weights(size: int, seed: int) -> None:
    model, (x, y) = net(seed), batch(size)
    _, logits, margins, _ = certified_loss(model, x, y, hf.Linf(0.1), CROWN)
    assert logits.shape == margins.shape == (size, 3)
    lower = certified_loss(model, x, y, hf.Linf(0.1))[2]
    assert bool((lower <= logits.gather(1, y[:, None]) - logits + 1e-9).all())


# --- Steps with a backward pass of their own --------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("block", [1, 100, 10**6])
@pytest.mark.parametrize("last", [False, True])
def test_bending_equals_the_plain_program_and_its_gradients(rows: int, block: int, last: bool, monkeypatch) -> None:
    monkeypatch.setattr(fused, "BLOCK", block)
    torch.manual_seed(0)

    def maps(make, n: int) -> torch.Tensor:
        """In either order of memory."""
        values = make(3, n, 2, 4, 5, dtype=torch.float64)
        values = values.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) if last else values
        return values.requires_grad_()

    a = maps(torch.randn, 3)
    low, up, shift = (maps(torch.rand, n) for n in (rows, 1, 1))
    carried, added = bend(a, low, up, shift)
    assert carried.stride() == a.stride()
    assert torch.allclose(carried, a.clamp(min=0) * low + a.clamp(max=0) * up)
    assert torch.allclose(added, (a.clamp(max=0) * shift).flatten(2).sum(2))
    assert torch.autograd.gradcheck(bend, (a, low, up, shift))
    assert torch.autograd.gradcheck(lambda a: bend(a, *(v.detach() for v in (low, up, shift))), (a,))


def test_bending_the_rows_of_no_input() -> None:
    a, line = torch.zeros(0, 3, 4, requires_grad=True), torch.zeros(0, 1, 4)
    carried, added = bend(a, line, line, line)
    (carried.sum() + added.sum()).backward()
    assert (carried.shape, added.shape) == ((0, 3, 4), (0, 3))
    assert a.grad is not None
    assert a.grad.shape == (0, 3, 4)


def test_the_minimum_over_a_box_equals_that_over_its_corners() -> None:
    torch.manual_seed(0)
    c = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    lower = torch.randn(3, 5, dtype=torch.float64)
    upper = lower + torch.rand_like(lower)
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 5)
    points = lower[:, None] + corners * (upper - lower)[:, None]
    assert torch.allclose(box_minimum(c, lower, upper), torch.einsum("bmn,bpn->bmp", c, points).amin(2))
    assert torch.autograd.gradcheck(lambda c: box_minimum(c, lower, upper), (c,))


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


# --- Initial weights, schedules and recipes ---------------------------------------------------------------------------


def test_ibp_weights_keep_the_width_of_intervals() -> None:
    torch.manual_seed(0)
    layers = [module for _ in range(5) for module in (nn.Linear(400, 400), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(400, 10))
    x, threat = torch.rand(4, 400), hf.Linf(0.05)

    def growth() -> float:
        result = hf.bounds(model.eval(), x, threat, "ibp")
        return float((result.upper - result.lower).detach().mean()) / 0.1

    before = growth()
    ibp_weights(model, seed=0)
    assert 0.2 < growth() < 5 < before
    std = float(model[0].weight.detach().std())
    assert std == pytest.approx(math.sqrt(2 * math.pi) / 400, rel=0.02)
    again = ibp_weights(nn.Sequential(nn.Linear(400, 400)), seed=0)
    assert torch.equal(again[0].weight, model[0].weight)


def test_the_smooth_rise_is_continuous_and_ends_at_its_final_value() -> None:
    values = [smooth_rise(t / 100, 10, end=8, start=1, final=1.5) for t in range(1001)]
    assert values[100] == 0
    assert values[800] == values[-1] == 1.5
    assert values == sorted(values)
    jumps = [b - a for a, b in itertools.pairwise(values)]
    assert max(jumps) < 0.004
    assert linear_rise(4, 8, final=2.0) == 1.0


BASE = {
    "data": "mnist-mini",
    "threat": "linf:0.1",
    "epochs": 2,
    "model": {"name": "mlp", "hidden": [16]},
    "objective": {"name": "ibp"},
    "optimizer": {"name": "adam", "lr": 2e-3},
    "budget": {"name": "smooth", "end": 1},
    "evaluate": {"count": 50, "attack_steps": 2},
}


def small_data() -> hf.Dataset:
    data = hf.load_data("mnist-mini")
    return hf.Dataset(data.name, data.train[:400], data.test[:50], data.classes)


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


def interval_net() -> nn.Module:
    """Intervals cover ELU, linear bounds do not."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ELU(), nn.Linear(8, 10))


@pytest.mark.parametrize("name", ["sabr", "mtl-ibp"])
def test_a_layer_that_intervals_alone_cover_is_trained_where_intervals_prove(name: str) -> None:
    change = {"objective.name": name, "attack": {"name": "fgsm"}, "epochs": 1}
    with pytest.raises(InputError, match=r"evaluate\.certify: layer '2': linear bounds have no relaxation.*elu"):
        hf.train(BASE, model=interval_net(), data=small_data(), progress=False, **change)
    change |= {"evaluate.certify": "ibp"}
    history = hf.train(BASE, model=interval_net(), data=small_data(), progress=False, **change).history
    assert 0 <= history[0]["validation_certified"] <= history[0]["validation_robust"]


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


def test_the_warm_up_regularizer_by_hand() -> None:
    """Bounds before four ReLUs, each 0.4 wide, around 2 and 4 (active), -1 (dead) and 0 (neither)."""
    model = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].weight.fill_(2.0)
        model[0].bias.copy_(torch.tensor([1.0, 3.0, -2.0, -1.0]))
    x = torch.full((3, 1), 0.5, dtype=torch.float64)
    context = make_context(5, hf.Linf(0.1), ramp=0.25)
    taken = Taken(model, None, x, x, None, None, None, context, None)  # type: ignore[arg-type]
    penalty, figures = ibp_warmup(taken, weight=2.0, tolerance=0.8)
    tightness = (0.8 - 0.2 / 0.4) / 0.8
    means = 1 / (2 + 4)
    variances = (-1 - 1.25) ** 2 / ((2 - 1.25) ** 2 + (4 - 1.25) ** 2)
    balance = ((0.8 - means) + (0.8 - variances)) / 0.8
    assert figures["tightness"].item() == pytest.approx(tightness)
    assert figures["balance"].item() == pytest.approx(balance)
    assert penalty.item() == pytest.approx(2.0 * 0.75 * (tightness + balance))


def test_the_warm_up_regularizer_prefers_narrow_and_balanced_bounds() -> None:
    def value(scale: float) -> float:
        model, (x, y) = net(), batch()
        with torch.no_grad():
            model[0].weight.mul_(scale)
        context = make_context(5, hf.Linf(0.05), ramp=0.5)
        relaxed = certified_loss(model, x, y, hf.Linf(0.05))[3]
        taken = Taken(model, None, x, x, None, None, None, context, relaxed)  # type: ignore[arg-type]
        penalty, figures = ibp_warmup(taken, weight=2.0)
        assert penalty.item() == pytest.approx((figures["tightness"] + figures["balance"]).item())
        return float(figures["tightness"].detach())

    assert value(10.0) > value(1.0) >= value(0.01) == 0.0
