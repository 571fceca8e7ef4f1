"""Measures of trust against closed forms."""

from itertools import pairwise

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

import holdfast as hf
from holdfast.errors import InputError
from holdfast.explanations import BoundarySearch
from holdfast.explanations.evaluate.randomise import randomise_all, randomised, rank_correlation
from holdfast.explanations.evaluate.stability import alignment, explanation_attack, normal_bound
from holdfast.explanations.evaluate.trust import completeness, deletion, infd, insertion, sensitivity
from holdfast.random import Noise

QUICK = BoundarySearch(budgets=(0.5, 4.0), steps=2, starts=1, refine=3, attacks=("deepfool",))


@pytest.fixture
def linear():
    return nn.Linear(6, 3).double().eval()


@pytest.fixture
def curved():
    return nn.Sequential(nn.Linear(6, 12), nn.Softplus(), nn.Linear(12, 3)).double().eval()


@pytest.fixture
def x():
    return 0.3 + 0.4 * torch.rand(5, 6, dtype=torch.float64)


def test_completeness_is_what_explain_reports(curved, x):
    y = curved(x).argmax(1)
    found = hf.explain(curved, x, y, "integrated-gradients", steps=4, tolerance=None)
    error = completeness(curved, x, torch.zeros_like(x), y, found.attribution)
    torch.testing.assert_close(error, found.error)
    doubled = completeness(curved, x, torch.zeros_like(x), y, 2 * found.attribution)
    torch.testing.assert_close(doubled, torch.ones_like(doubled), rtol=0, atol=0.05)


def test_infd_of_linear_models_is_zero_and_the_path_foretells_its_end(linear, curved, x):
    y = linear(x).argmax(1)
    slope = hf.explain(linear, x, y, "saliency").slope
    for sigma in (0.01, 1.0):
        assert float(infd(linear, x, y, slope, sigma=sigma).max()) < 1e-20
    y = curved(x).argmax(1)
    saliency = hf.explain(curved, x, y, "saliency").slope
    big = hf.explain(curved, x, y, "big", search=QUICK, steps=200)
    assert float(infd(curved, x, y, big.slope, moves="end", towards=big.boundary).max()) < 1e-9
    assert float(infd(curved, x, y, saliency, moves="end", towards=big.boundary).max()) > 1e-7
    values = [float(infd(curved, x, y, saliency, sigma=s).mean()) / s**2 for s in (0.3, 0.03, 0.003)]
    assert values[0] > 10 * values[1] > 100 * values[2]
    shifted = nn.Sequential(*curved)
    before = infd(shifted, x, y, saliency)
    shifted[2].bias.data += 3.0
    torch.testing.assert_close(infd(shifted, x, y, saliency), before)


def test_least_squares_is_the_best_slope_for_the_moves_it_was_made_for(curved):
    x = torch.full((1, 6), 0.5, dtype=torch.float64)
    y, towards = torch.tensor([0]), torch.rand(1, 6, dtype=torch.float64)
    saliency = hf.explain(curved, x, y, "saliency").slope
    move = towards - x
    # All moves of "path" lie along one line, so one number, found by regression on it, is the best slope there is.
    grid = torch.linspace(0, 1, 2001, dtype=torch.float64)[:, None]
    change = (curved(x + grid * move) - curved(x)).detach()[:, 0]
    best = (grid[:, 0] * change).sum() / grid.square().sum() * move / move.square().sum()
    scores = [float(infd(curved, x, y, s, moves="path", towards=towards, samples=400)) for s in (best, saliency)]
    assert scores[0] < scores[1]


def test_infd_refuses_moves_without_an_end(linear, x):
    y = torch.zeros(5, dtype=torch.long)
    for bad in ({"moves": "end"}, {"towards": x}, {"moves": "pathh"}):
        with pytest.raises(InputError):
            infd(linear, x, y, x, **bad)


def test_sensitivity(linear, curved, x):
    y = linear(x).argmax(1)
    assert float(sensitivity(linear, x, y).max()) == 0
    small, large = (sensitivity(curved, x, y, radius=r, samples=5) for r in (0.01, 0.2))
    assert bool((large > small).all() & (small > 0).all())
    grown = [sensitivity(curved, x, y, radius=0.1, samples=n) for n in range(1, 8)]  # the same draws and one more
    assert all(bool((b >= a).all()) for a, b in pairwise(grown))
    assert bool((grown[-1] > grown[0]).any())


def test_deletion_and_insertion_of_a_linear_model():
    model = nn.Linear(4, 2, bias=False).double().eval()
    model.weight.data = torch.tensor([[4.0, 3.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    x, y = torch.ones(1, 4, dtype=torch.float64), torch.tensor([0])
    good, bad = model.weight.detach()[:1], -model.weight.detach()[:1]
    down = deletion(model, x, y, good, steps=4, quantity="logit")
    assert down.values[:, 0].tolist() == [10, 6, 3, 1, 0]
    up = insertion(model, x, y, good, steps=4, quantity="logit")
    assert up.values[:, 0].tolist() == [0, 4, 7, 9, 10]
    assert float(down.area) == pytest.approx(3.75)
    assert float(deletion(model, x, y, bad, steps=4, quantity="logit").area) > float(down.area)
    assert down.share.tolist() == [0, 0.25, 0.5, 0.75, 1]
    image = torch.rand(2, 3, 4, 5)
    net = nn.Sequential(nn.Flatten(), nn.Linear(60, 2)).eval()
    curve = insertion(net, image, torch.tensor([0, 1]), torch.rand(2, 3, 4, 5), steps=3)
    torch.testing.assert_close(curve.values[-1], net(image).softmax(1).detach()[[0, 1], [0, 1]])
    with pytest.raises(InputError, match="steps >= 1"):
        deletion(model, x, y, good, steps=0)


def test_rank_correlation_is_spearmans():
    a, b = torch.randn(4, 30), torch.randint(0, 5, (4, 30)).float()
    wanted = torch.tensor([spearmanr(r, s).statistic for r, s in zip(a.numpy(), b.numpy(), strict=True)])
    torch.testing.assert_close(rank_correlation(a, b), wanted)
    assert rank_correlation(a, a).tolist() == pytest.approx([1.0] * 4)
    assert rank_correlation(a, torch.zeros(4, 30)).tolist() == [0] * 4
    assert rank_correlation(a[:0], b[:0]).shape == (0,)


def test_randomising_the_weights_destroys_the_explanation():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 3)).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.rand(6, 40)
    found = randomised(model, x, model(x).argmax(1), "saliency")
    assert found.layers == ((), ("4",), ("2",), ("0",))
    assert found.correlation[0].tolist() == pytest.approx([1.0] * 6)
    assert float(found.correlation[-1].abs().mean()) < 0.3
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert randomised(model, x, model(x).argmax(1), "saliency", at_once=2).layers == ((), ("4", "2"), ("0",))
    norms = [p.norm() for p in model.parameters()]
    randomise_all(model)
    torch.testing.assert_close([p.norm() for p in model.parameters()], norms)
    with pytest.raises(InputError, match="no parameters"):
        randomised(nn.Softmax(1).eval(), torch.rand(1, 2), torch.tensor([0]), "saliency")


def test_black_pixels_do_not_hold_up_the_correlation_of_a_network_without_training():
    """Integrated gradients give them zero whatever the weights are; over all pixels the correlation is above 0.9."""
    x = hf.load_data("mnist-mini").test.x[:12]
    model = hf.make_model("mlp", hidden=(50,), seed=0).eval()
    y = model(x).argmax(1)
    share = (x > 0).double().flatten(1).mean(1)
    assert float(share.mean()) < 0.3
    for method in ("integrated-gradients", "input-x-gradient"):
        for seed in range(3):
            found = randomised(model, x, y, method, seed=seed)
            torch.testing.assert_close(found.compared, share)
            assert found.correlation[0].tolist() == pytest.approx([1.0] * 12)
            assert float(found.correlation[-1].mean()) < 0.5
    saliency = randomised(model, x, y, "saliency")
    assert bool((saliency.compared == 1).all())
    assert float(saliency.correlation[-1].mean()) < 0.2


def test_values_that_do_not_count_change_no_rank():
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randint(0, 9, (4, 3, 5), generator=g).double() for _ in range(2))
    among = torch.rand(4, 3, 5, generator=g) < 0.6
    expected = [spearmanr(a[i][among[i]], b[i][among[i]]).statistic for i in range(4)]
    assert rank_correlation(a, b, among=among).tolist() == pytest.approx(expected)
    assert rank_correlation(a, b, among=torch.zeros_like(among)).tolist() == [0.0] * 4


def test_the_explanation_attack_beats_chance_and_keeps_to_its_ball(linear, curved, x):
    y = curved(x).argmax(1)
    still = explanation_attack(linear, x, y, hf.L2(0.1))
    assert float(still.rate.max()) < 1e-12
    for threat in (hf.L2(0.1), hf.Linf(0.05)):
        found = explanation_attack(curved, x, y, threat, steps=10)
        assert bool(threat.contains(found.x_adv, x).all())
        assert torch.equal(curved(found.x_adv).argmax(1), curved(x).argmax(1))
        first, second = (hf.explain(curved, p, y, "saliency").attribution for p in (x, found.x_adv))
        moved = (second - first).norm(dim=1) / (threat.distance(found.x_adv, x))
        torch.testing.assert_close(found.rate, moved)
        random = threat.random_start(x, Noise.for_batch(9, 5))
        chance = (hf.explain(curved, random, y, "saliency").attribution - first).norm(dim=1)
        assert bool((found.rate >= chance / threat.distance(random, x)).all())
        # The rate cannot exceed the largest norm of the Hessian; the second derivative of softplus is at most 1/4.
        hessian = 0.25 * curved[2].weight.abs().amax() * torch.linalg.matrix_norm(curved[0].weight, 2) ** 2
        assert float(found.rate.max()) <= float(hessian.detach()) * (6**0.5 if threat.name == "linf" else 1)
    with pytest.raises(InputError, match="L2 or Linf ball"):
        explanation_attack(curved, x, y, hf.L1(1.0))


def test_saliency_is_normal_to_the_boundary_of_a_linear_model(linear, x):
    y = linear(x).argmax(1)
    found = alignment(linear, x, y, search=QUICK)
    assert bool(found.ok.all())
    assert float(found.saliency.max()) < 1e-12
    torch.testing.assert_close(found.cosine, torch.ones_like(found.cosine))
    point = hf.explain(linear, x, y, "big", search=QUICK).boundary
    torch.testing.assert_close(found.integrated, (point * linear.weight.detach()[y]).norm(dim=1))


def test_proposition_1_holds_and_vanishes_on_linear_models(linear, curved, x):
    y = curved(x).argmax(1)
    found = normal_bound(curved, x, y, search=QUICK, samples=5)
    assert bool((found.left <= found.right * (1 + 1e-9)).all())
    assert bool((found.rate > 0)[found.ok].all())
    torch.testing.assert_close(found.right, found.rate * alignment(curved, x, y, search=QUICK).distance)
    flat = normal_bound(linear, x, linear(x).argmax(1), search=QUICK, samples=3)
    assert float(flat.right.max()) < 1e-10
