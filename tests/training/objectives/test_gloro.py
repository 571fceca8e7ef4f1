"""GloRo and Lipschitz-margin training: the losses against plain formulas, gradients, state, recipes, a short run."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from contexts import make_context
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.lipschitz.constants import lipschitz_bound
from holdfast.certificates import lipschitz as _lipschitz  # noqa: F401  (registers the certificates)
from holdfast.data import Dataset, load_data
from holdfast.models.layers import MinMax
from holdfast.models.zoo import liresnet as _liresnet  # noqa: F401  (registers the architectures)
from holdfast.threats import L2
from holdfast.training.objectives.core.lipschitz import RIVAL, VECTORS, estimated, margin_loss
from holdfast.training.objectives.gloro import ce_loss, emma_loss, gloro, ramp_loss, trades_loss
from holdfast.training.objectives.lmt import lmt
from holdfast.training.objectives.lmt_ellipsoid import lmt_ellipsoid
from holdfast.training.recipe.reading import load_recipe

LOSSES = ("emma", "ce", "trades", "margin", "ramp")
RECIPES = (
    *("mnist-gloro", "mnist-gloro-l2-0.3", "mnist-gloro-muon", "cifar10-gloro", "cifar10-gloro-liresnet"),
    *("mnist-mini-gloro", "mnist-mini-lmt", "mnist-mini-lmt-ellipsoid"),
)


def number(value):
    return value.detach().item()


def network(dtype=torch.float64):
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 4, 3, 2, 1), MinMax(), nn.Flatten(), nn.Linear(36, 8), MinMax(), nn.Linear(8, 4))
    return nn.Sequential(*layers).to(dtype)


def task(count=7, classes=4):
    generator = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(count, classes, generator=generator, dtype=torch.float64)
    rows = torch.randn(classes, 3, generator=generator, dtype=torch.float64)
    return z, torch.arange(count) % classes, torch.cdist(rows, rows)


def log_softmax_at(z, y):
    return z[y] - math.log(sum(math.exp(v) for v in z))


def plain(loss, z, y, k, eps, weight):
    """The losses of one example, number by number."""
    others = [i for i in range(len(z)) if i != y]
    j = max(range(len(z)), key=lambda i: z[i])
    rejected = max(z[i] + eps * k[j][i] for i in range(len(z)) if i != j)
    if loss == "ce":
        return -log_softmax_at([*z, rejected], y)
    if loss == "trades":
        total, extended = sum(math.exp(v) for v in z), sum(math.exp(v) for v in [*z, rejected])
        kl = sum(math.exp(v) / total * math.log((math.exp(v) / total) / (math.exp(v) / extended)) for v in z)
        return -log_softmax_at(z, y) + weight * kl
    if loss == "ramp":
        odds = sum(math.exp(weight * (eps - (z[y] - z[i]) / k[y][i])) for i in others)
        return 1 - 1 / (1 + odds)
    raised = list(z)
    for i in others:
        reach = eps if loss == "margin" else min(max((z[y] - z[i]) / k[y][i], 0), eps)
        raised[i] += reach * k[y][i]
    return -log_softmax_at(raised, y)


@pytest.mark.parametrize("eps", [0.0, 0.2, 3.0])
def test_the_losses_are_those_of_the_papers(eps):
    z, y, pairs = task()
    ours = {
        "emma": emma_loss(z, y, pairs, eps),
        "ce": ce_loss(z, y, pairs, eps),
        "trades": trades_loss(z, y, pairs, eps, 1.5),
        "margin": margin_loss(z, y, pairs, eps),
        "ramp": ramp_loss(z, y, pairs, eps, 1.5),
    }
    for name, losses in ours.items():
        expected = [plain(name, z[i].tolist(), int(y[i]), pairs.tolist(), eps, 1.5) for i in range(len(z))]
        assert losses.tolist() == pytest.approx(expected), name


def test_without_a_budget_the_margins_vanish():
    z, y, pairs = task()
    clean = cross_entropy(z, y, reduction="none")
    assert torch.allclose(emma_loss(z, y, pairs, 0.0), clean)
    assert torch.allclose(margin_loss(z, y, pairs, 0.0), clean)
    assert bool((ce_loss(z, y, pairs, 0.0) > clean).all())


def test_the_ramp_is_a_smooth_count_of_what_is_not_verified():
    z, y, pairs = task(200)
    gaps = (z.gather(1, y[:, None]) - z) / pairs[y]
    radius = gaps.scatter(1, y[:, None], math.inf).amin(1)
    eps = float(radius.median())
    assert float(ramp_loss(z, y, pairs, eps, 1e4).mean()) == pytest.approx(
        float((radius < eps).double().mean()), abs=0.01
    )
    assert torch.allclose(ramp_loss(7 * z, y, 7 * pairs, eps, 4.0), ramp_loss(z, y, pairs, eps, 4.0))


def test_the_ramp_of_two_classes_with_the_same_weights_is_finite_with_its_gradient():
    z = torch.tensor([[0.0, 0.0, 1.0], [-2.0, 3.0, 0.0]], requires_grad=True)
    losses = ramp_loss(z, torch.tensor([0, 1]), torch.zeros(3, 3), 0.5, 4.0)
    losses.sum().backward()
    assert bool(torch.isfinite(losses).all())
    assert bool(torch.isfinite(z.grad).all())


def test_emma_lies_between_cross_entropy_and_the_fixed_margin():
    z, y, pairs = task(100)
    clean = cross_entropy(z, y, reduction="none")
    emma, fixed = emma_loss(z, y, pairs, 0.4), margin_loss(z, y, pairs, 0.4)
    assert bool((clean <= emma + 1e-12).all())
    assert bool((emma <= fixed + 1e-12).all())
    assert bool((emma < fixed - 1e-3).any())


def test_emma_is_the_log_of_the_number_of_classes_where_no_margin_is_met():
    z = torch.tensor([[1.0, 0.5, 0.2, 0.0]], dtype=torch.float64, requires_grad=True)
    pairs = 10 * (1 - torch.eye(4, dtype=torch.float64))
    loss = emma_loss(z, torch.tensor([0]), pairs, 0.3)
    assert float(loss.detach()) == pytest.approx(math.log(4))
    loss.sum().backward()
    assert bool((z.grad.abs() > 0.1).all())  # it still pushes


def test_the_budget_of_each_class_has_no_gradient():
    z, y, pairs = task()
    z, pairs = z.requires_grad_(), pairs.requires_grad_()
    emma_loss(z, y, pairs, 0.4).sum().backward()
    with torch.no_grad():
        k = pairs[y]
        reach = torch.where(k > 0, (z.gather(1, y[:, None]) - z) / k, 0.0).clamp(0, 0.4)
        p = (z + reach * k).softmax(1)
        expected = p - nn.functional.one_hot(y, 4)
    assert torch.allclose(z.grad, expected)
    assert bool(pairs.grad.any())


def test_equal_rows_do_not_break_the_losses():
    z, y, pairs = task()
    pairs = torch.zeros_like(pairs).requires_grad_()
    for loss in (emma_loss, margin_loss, ce_loss):
        out = loss(z, y, pairs, 0.3)
        assert bool(out.isfinite().all())


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_finite_differences(loss):
    model = network()
    x, y = torch.rand(6, 1, 6, 6, dtype=torch.float64), torch.arange(6) % 4
    frozen = {}
    if loss == "emma":  # its budgets are constants: hold them where they are
        bound, logits = estimated(model, x, make_context(6, L2(0.3)), 600)
        k = bound.pairs[y].detach()
        frozen = torch.where(k > 0, (logits.gather(1, y[:, None]) - logits).detach() / k, 0.0).clamp(0, 0.3)

    def value():
        if loss != "emma":
            return gloro(model, x, y, make_context(6, L2(0.3)), loss=loss, steps=600)[0]
        bound, logits = estimated(model, x, make_context(6, L2(0.3)), 600)
        return cross_entropy(logits + frozen * bound.pairs[y], y)

    gloro(model, x, y, make_context(6, L2(0.3)), loss=loss, steps=600)[0].backward()
    for weight in (model[0].weight, model[3].weight, model[5].weight):
        place = weight.grad.abs().flatten().argmax()
        slopes = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                weight.view(-1)[place] += step
                slopes.append(float(value()))
                weight.view(-1)[place] -= step
        slope = (slopes[0] - slopes[1]) / 2e-5
        assert float(weight.grad.view(-1)[place]) == pytest.approx(slope, rel=1e-3, abs=1e-6)


def test_margins_of_lmt_are_never_smaller_than_those_of_pairs():
    model = network()
    x, y = torch.rand(6, 1, 6, 6, dtype=torch.float64), torch.arange(6) % 4
    context = make_context(6, L2(0.3))
    loss, metrics = lmt(model, x, y, context, steps=200)
    other, finer = gloro(model, x, y, make_context(6, L2(0.3)), loss="margin", steps=200)
    assert float(loss.detach()) > float(other.detach())
    assert float(metrics["lipschitz"]) > float(finer["lipschitz"])
    k = float(metrics["lipschitz"]) / math.sqrt(2)
    logits = model(x)
    raised = logits + math.sqrt(2) * 0.3 * k * (1 - nn.functional.one_hot(y, 4))
    assert float(loss.detach()) == pytest.approx(float(cross_entropy(raised, y).detach()))
    loss.backward()
    assert all(bool(model[i].weight.grad.any()) for i in (0, 3, 5))


def test_the_ellipsoid_of_a_linear_network_is_exact():
    """The worst point of the ball is known: x - eps (w_y - w_j) / |w_y - w_j| for the nearest of two classes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2)).double()
    x, y, eps = torch.rand(5, 1, 6, 6, dtype=torch.float64), torch.arange(5) % 2, 0.3
    loss, found = lmt_ellipsoid(model, x, y, make_context(5, L2(eps)))
    away = model[1].weight[y] - model[1].weight[1 - y]
    worst = x.flatten(1) - eps * away / away.norm(dim=1, keepdim=True)
    assert number(loss) == pytest.approx(number(cross_entropy(model[1](worst), y)))
    assert float(found["lipschitz"]) == pytest.approx(number(away[0].norm()))


def test_the_ellipsoid_is_gloro_with_the_margin_loss_and_lies_in_the_ball():
    model = network()
    x, y = torch.rand(6, 1, 6, 6, dtype=torch.float64), torch.arange(6) % 4
    ellipsoid, ball, margin = (
        number(f(model, x, y, make_context(6, L2(0.3)), steps=200)[0])
        for f in (lmt_ellipsoid, lmt, partial(gloro, loss="margin"))
    )
    assert ellipsoid == margin
    assert ellipsoid < ball


def test_a_layer_that_is_scaled_scales_what_is_taken_off_the_margins():
    model = network()
    x, y = torch.rand(6, 1, 6, 6, dtype=torch.float64), torch.arange(6) % 4
    before = float(lmt_ellipsoid(model, x, y, make_context(6, L2(0.3)), steps=200)[1]["lipschitz"])
    with torch.no_grad():
        model[3].weight.mul_(3)
    after = float(lmt_ellipsoid(model, x, y, make_context(6, L2(0.3)), steps=200)[1]["lipschitz"])
    assert after == pytest.approx(3 * before)


def test_the_vectors_go_on_from_step_to_step():
    model = network()
    x, y = torch.rand(6, 1, 6, 6, dtype=torch.float64), torch.arange(6) % 4
    exact = float(lipschitz_bound(trace(model.eval(), x)).pairs.max())
    context = make_context(6, L2(0.3))
    figures = [float(gloro(model, x, y, context, steps=1)[1]["lipschitz"]) for _ in range(30)]
    assert all(after >= before * (1 - 1e-12) for before, after in itertools.pairwise(figures))
    assert figures[-1] == pytest.approx(exact, rel=1e-2)
    assert figures[-1] <= exact
    vectors = {key for key in context.state if key.startswith(VECTORS)}
    assert len(vectors) == 2
    assert all(isinstance(value, torch.Tensor) and not value.requires_grad for value in context.state.values())


def test_metrics_tell_accuracy_verified_and_churn():
    model = network()
    x, y = torch.rand(8, 1, 6, 6, dtype=torch.float64), torch.arange(8) % 4
    context = make_context(8, L2(0.05))
    metrics = gloro(model, x, y, context)[1]
    logits = model(x)
    assert float(metrics["accuracy"]) == float((logits.argmax(1) == y).double().mean())
    bound, _ = estimated(model, x, context, 100)
    margins = (logits.gather(1, y[:, None]) - logits - 0.05 * bound.pairs[y]).scatter(1, y[:, None], 1.0)
    assert float(metrics["verified"]) == float((margins > 0).all(1).double().mean())
    assert float(metrics["churn"]) == 0
    assert float(gloro(model, x, y, context)[1]["churn"]) == 0  # the same model as before
    rivals = context.state[RIVAL].clone()
    assert torch.equal(rivals, logits.topk(2).indices[:, 1])
    context.state[RIVAL][:2] = (rivals[:2] + 1) % 4
    assert float(gloro(model, x, y, context)[1]["churn"]) == 0.25


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("loss", LOSSES)
def test_any_batch_size_and_float32(loss, count):
    model = network(torch.float32)
    value, _ = gloro(
        model, torch.rand(count, 1, 6, 6), torch.zeros(count, dtype=torch.long), make_context(count, L2(0.3)), loss=loss
    )
    value.backward()
    assert value.shape == ()
    assert bool(value.isfinite())


@pytest.mark.parametrize("loss", LOSSES)
def test_bfloat16_keeps_the_norms_and_nearly_the_gradient(loss):
    x, y = torch.rand(6, 1, 6, 6), torch.arange(6) % 4
    gradients, constants = {}, {}
    for precision in ("float32", "bfloat16"):
        model = network(torch.float32)
        value, metrics = gloro(model, x, y, make_context(6, L2(0.3)), loss=loss, precision=precision)
        assert value.dtype == torch.float32
        value.backward()
        gradients[precision] = torch.cat([p.grad.flatten() for p in model.parameters()])
        constants[precision] = float(metrics["lipschitz"])
    assert constants["bfloat16"] == constants["float32"]
    apart = (gradients["bfloat16"] - gradients["float32"]).norm() / gradients["float32"].norm()
    assert 0 < float(apart) < 0.02


def test_bfloat16_refuses_weights_that_it_would_blur():
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(36, 36))
    model = nn.Sequential(nn.Flatten(), layer, nn.ReLU(), nn.Linear(36, 4))
    batch = torch.rand(3, 1, 6, 6), torch.arange(3)
    with pytest.raises(hf.UnsupportedError, match="layer '1' computes its weights"):
        gloro(model, *batch, make_context(3, L2(0.3)), precision="bfloat16")
    assert bool(gloro(model, *batch, make_context(3, L2(0.3)))[0].isfinite())


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_load(name):
    recipe = load_recipe(name)
    certificates = {"gloro": "gloro", "lmt": "lipschitz", "lmt-ellipsoid": "gloro"}
    assert recipe.evaluate.certify == certificates[recipe.objective.name]
    assert recipe.selects == "certified"
    assert recipe.adversary is not None
    assert recipe.adversary.name == "l2"


def test_the_shipped_recipe_trains_and_certifies():
    full = load_data("mnist-mini")
    data = Dataset("mnist-mini", full.train[:800], full.test[:100], full.classes)
    changes = {"threat": "l2:0.2", "evaluate.count": 40, "evaluate.attack_steps": 0}
    result = hf.train("mnist-mini-gloro", data=data, progress=False, epochs=3, **changes)
    model = result.model.eval()
    certified = hf.certify(model, data.test.x, data.test.y, hf.L2(0.2), "gloro").certified
    assert float(certified.float().mean()) > 0.3
    broken = hf.attack(model, data.test.x, data.test.y, hf.L2(0.2), "pgd", steps=10).success
    assert not bool((certified & broken).any())
    assert "train_churn" in result.history[-1]
