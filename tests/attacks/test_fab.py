"""FAB: exact on linear models, its counts, its limits."""

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.attacks.core.minimum_norm import BALLS, Search
from holdfast.attacks.fab import Walk, _step, fab, fab_nearest, fab_t, fab_t_nearest
from holdfast.errors import InputError
from holdfast.random import Noise


def linear(classes, size=9):
    model = nn.Linear(size, classes).double().eval()
    model.bias.data = -0.5 * model.weight.data.sum(1)  # all classes meet in the middle of the range
    x = 0.3 + 0.4 * torch.rand(20, size, dtype=torch.float64)  # far from the ends of the range
    return model, x, model(x).argmax(1).detach()


def boundary(model, x, y, norm):
    """Distance of the nearest boundary of a linear model, without a range: min_j (z_y - z_j) / |w_y - w_j|_q."""
    logits = model(x).detach()
    distances = []
    for j in range(logits.shape[1]):
        w = (model.weight[y] - model.weight[j]).detach()
        gap = logits.gather(1, y[:, None])[:, 0] - logits[:, j]
        distances.append(torch.where(y == j, torch.inf, gap / BALLS[norm](1.0).dual_norm(w)))
    return torch.stack(distances, 1).amin(1)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("classes", [2, 3, 5, 10])
def test_the_distance_of_a_linear_boundary(norm, classes):
    model, x, y = linear(classes)
    truth = boundary(model, x, y, norm)
    near = truth < {"linf": 0.2, "l2": 0.2, "l1": 0.2}[norm]  # inside the range whatever the direction
    assert int(near.sum()) >= 2
    for method in (fab_nearest, fab_t_nearest):
        found = method(model, x, y, norm, steps=30)
        assert bool((found.distance >= truth - 1e-9).all())
        assert torch.allclose(found.distance[near], truth[near], rtol=0.01)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_success_is_exact_on_a_linear_model(norm):
    model, x, y = linear(5)
    truth = boundary(model, x, y, norm)
    eps = float(truth.clamp(max=0.2).median())
    result = hf.attack(model, x, y, BALLS[norm](eps), "fab-t")
    clear = (truth - eps).abs() > 0.01 * eps
    assert int(clear.sum()) >= 15
    assert torch.equal(result.success[clear], (truth < eps)[clear])
    assert bool(result.success.any())
    assert not bool(result.success.all())


def test_counts_are_exact():
    model, x, y = linear(5)
    untargeted = fab_nearest(model, x, y, "l2", steps=7, restarts=2, n_search=3)
    # two runs of seven Jacobians of four rows, a last check each; the clean pass, and the search with its two ends
    assert untargeted.gradients.tolist() == [2 * 7 * 4] * 20
    assert untargeted.queries.tolist() == [1 + 2 * (7 * 4 + 1) + 2 + 3] * 20
    targeted = fab_t_nearest(model, x, y, "l2", steps=7, targets=9, n_search=0)
    assert targeted.gradients.tolist() == [4 * 7] * 20
    assert targeted.queries.tolist() == [1 + 4 * (7 + 1) + 2] * 20


def test_inputs_that_are_broken_leave():
    model, x, y = linear(5)
    result = fab_t(model, x, y, hf.L2(2.0))
    assert bool(result.success.all())
    assert int(result.gradients.max()) <= 4
    assert int(fab(model, x, y, hf.L2(2.0)).gradients.max()) <= 3 * 4


def test_random_restarts_only_improve_and_follow_the_seed():
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(30, *shape)
    y = model(x).argmax(1)
    once = fab_nearest(model, x, y, "linf", steps=5)
    more = [
        fab_nearest(model, x, y, "linf", steps=5, restarts=4, noise=Noise.for_batch(seed, 30)).distance
        for seed in (0, 0, 1)
    ]
    assert bool((more[0] <= once.distance + 1e-6).all())
    assert bool((more[0] < once.distance - 1e-6).any())
    assert torch.equal(more[0], more[1])
    assert not torch.equal(more[0], more[2])


def test_many_classes_need_targets():
    model = nn.Linear(4, 101).eval()
    x = torch.rand(3, 4)
    y = model(x).argmax(1)
    with pytest.raises(InputError, match=r"101 classes.*use 'fab-t'"):
        fab(model, x, y, hf.L2(0.1))
    assert bool(torch.isfinite(fab_t_nearest(model, x, y, "l2", steps=10).distance).all())


def test_a_flat_model_is_not_broken():
    class Flat(nn.Module):
        def forward(self, x):
            return torch.stack([x.flatten(1).sum(1) * 0 + 1, x.flatten(1).sum(1) * 0], 1)

    x = torch.rand(3, 4)
    found = fab_nearest(Flat().eval(), x, torch.zeros(3, dtype=torch.long), "l2", steps=3)
    assert torch.equal(found.x_adv, x)
    assert bool(torch.isinf(found.distance).all())


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"restarts": 0}, {"n_search": -1}, {"eta": 0.9}, {"beta": 1.0}, {"alpha_max": 2.0}]
)
def test_bad_options_are_refused(options):
    model, x, y = linear(3)
    for name in ("fab", "fab-t"):
        with pytest.raises(InputError, match=f"'{next(iter(options))}' .*: expected"):
            hf.attack(model, x, y, hf.L2(0.1), name, **options)
    with pytest.raises(InputError, match=r"'targets' .*: expected"):
        hf.attack(model, x, y, hf.L2(0.1), "fab-t", targets=0)


@pytest.mark.parametrize(("alpha_max", "alpha"), [(1.0, 0.25), (0.1, 0.1)])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_a_step_mixes_the_ways_from_the_iterate_and_from_the_input_onto_the_plane(norm, alpha_max, alpha):
    """The plane u = 0.8, 0.3 from x and 0.1 from x_t: alpha = 0.1 / (0.1 + 0.3), if alpha_max allows."""
    x, x_t = torch.tensor([[0.5, 0.4]], dtype=torch.float64), torch.tensor([[0.7, 0.6]], dtype=torch.float64)
    search = Search(x, torch.tensor([0]), norm, 0.0, 1.0)
    w, b = torch.tensor([[2.0, 0.0]], dtype=torch.float64), torch.tensor([1.6], dtype=torch.float64)
    from_x_t, from_x = (torch.tensor([[u, v]]).double() for u, v in ((0.7 + 1.05 * 0.1, 0.6), (0.5 + 1.05 * 0.3, 0.4)))
    found = _step(search, x, x_t, w, b, walk=Walk(1, alpha_max, eta=1.05))
    assert torch.allclose(found, (1 - alpha) * from_x_t + alpha * from_x, atol=1e-12)
