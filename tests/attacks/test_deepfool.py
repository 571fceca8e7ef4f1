"""DeepFool: one step on a linear model, and the closed form of that step."""

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.attacks.core.minimum_norm import BALLS
from holdfast.attacks.deepfool import deepfool, deepfool_nearest
from holdfast.errors import InputError


def centred():
    model, shape = tiny_nets()["cnn"]
    x = torch.rand(12, *shape)
    model[-1].bias.data -= model(x).detach().mean(0)  # all classes within reach
    return model, x, model(x).argmax(1)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_one_step_of_the_exact_length_on_a_linear_model(norm, classes):
    model = nn.Linear(9, classes).double().eval()
    model.bias.data = -0.5 * model.weight.data.sum(1)  # all classes meet in the middle of the range
    x = 0.4 + 0.2 * torch.rand(30, 9, dtype=torch.float64)
    y = model(x).argmax(1)
    logits, weight = model(x).detach(), model.weight.detach()
    gap = logits.gather(1, y[:, None]) - logits
    slope = torch.stack([BALLS[norm](1.0).dual_norm(weight[y] - weight[j]) for j in range(classes)], 1)
    length = torch.where(gap > 0, gap / slope, torch.inf)
    truth, j = length.min(1)
    found = deepfool_nearest(model, x, y, norm)
    near = truth < 0.1
    assert int(near.sum()) >= 3
    expected = 1.02 * (truth + 1e-4 / slope.gather(1, j[:, None])[:, 0])
    assert torch.allclose(found.distance[near], expected[near], rtol=1e-6)
    # one clean pass, a gradient for each other class, one check
    assert found.gradients[near].tolist() == [classes - 1] * int(near.sum())
    assert found.queries[near].tolist() == [classes + 1] * int(near.sum())


def test_fewer_candidates_cost_fewer_gradients():
    model, x, y = centred()
    few, all_ = (deepfool_nearest(model, x, y, "l2", candidates=c) for c in (1, 10))
    assert float(few.gradients.float().mean()) < float(all_.gradients.float().mean())
    assert float(all_.distance.mean()) <= float(few.distance.mean())


def test_success_depends_on_the_budget_alone():
    model, x, y = centred()
    found = deepfool_nearest(model, x, y, "l2")
    eps = float(found.distance.median())
    result = deepfool(model, x, y, hf.L2(eps))
    assert torch.equal(result.success, found.distance <= eps)
    assert torch.equal(result.x_adv[result.success], found.x_adv[result.success])


def test_inputs_that_are_all_wrong_need_no_step():
    model = nn.Linear(4, 3).eval()
    x = torch.rand(5, 4)
    found = deepfool_nearest(model, x, (model(x).argmax(1) + 1) % 3, "l2")
    assert found.distance.tolist() == [0.0] * 5
    assert found.by == ("clean",) * 5
    assert found.queries.tolist() == [1] * 5


@pytest.mark.parametrize("options", [{"steps": 0}, {"candidates": 0}, {"overshoot": -0.1}])
def test_bad_options_are_refused(options):
    model = nn.Linear(4, 3).eval()
    with pytest.raises(InputError, match=f"'{next(iter(options))}' .*: expected"):
        hf.attack(model, torch.rand(2, 4), torch.zeros(2, dtype=torch.long), hf.L2(0.1), "deepfool", **options)


class Bowl(nn.Module):
    """Three classes whose logits rise ever more slowly: each step falls short, and several are needed."""

    def forward(self, x):
        u, v = x[:, 0], x[:, 1]
        return torch.stack([4 - 0 * u, 6 * (1 - (-u).exp()) + v / 2, 6 * (v / 3).tanh()], 1)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_moves_are_those_of_the_published_algorithm(norm):
    model = Bowl().eval()
    x, y = torch.tensor([[0.1, 0.2], [0.4, 0.9], [0.3, -0.5]], dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    found = deepfool_nearest(model, x, y, norm, -5.0, 5.0, steps=50, overshoot=0.02)
    for i in range(3):
        r, steps = torch.zeros(2, dtype=torch.float64), 0
        while True:
            point = (x[i] + 1.02 * r).requires_grad_(True)
            z = model(point[None])[0]
            if int(z.argmax()) != 0:
                break
            planes = []
            for j in (1, 2):
                (w,) = torch.autograd.grad(z[j] - z[0], point, retain_graph=True)
                size = w.norm() if norm == "l2" else w.abs().sum()
                planes.append((float((z[0] - z[j]).detach() / size), w, float(size)))
            distance, w, size = min(planes, key=lambda plane: plane[0])
            length = distance + 1e-4 / size
            r, steps = r + length * (w / size if norm == "l2" else w.sign()), steps + 1
        assert steps > 1
        assert torch.allclose(found.x_adv[i], point.detach(), atol=1e-9)
