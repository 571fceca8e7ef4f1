"""Training of centroid networks: the loss against the certificate's distances, gradients, state, a short run."""

import math

import pytest
import torch
from torch import nn

import holdfast as hf
from contexts import make_context
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.lipschitz.constants import lipschitz_bound
from holdfast.certificates.centroid import depths
from holdfast.data import Dataset, load_data
from holdfast.errors import InputError, UnsupportedError
from holdfast.models.layers import MinMax
from holdfast.models.zoo.centroid import Centroid, CentroidNet, with_rejection
from holdfast.threats import L2
from holdfast.training.objectives.centroid import centroid, margins
from holdfast.training.recipe.reading import load_recipe

RECIPE = "mnist-mini-centroid"


def network(per_class=2, dtype=torch.float64):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(5, 8), MinMax(), nn.Linear(8, 6))
    net = CentroidNet(body, Centroid(3, 6, per_class=per_class))
    nn.init.normal_(net.head.weight)
    return net.to(dtype)


def batch(count=9, dtype=torch.float64):
    return torch.rand(count, 5, dtype=dtype, generator=torch.Generator().manual_seed(1)), torch.arange(count) % 3


@pytest.mark.parametrize("eta", [0.0, 0.2])
@pytest.mark.parametrize("per_class", [1, 2])
def test_margins_are_the_distances_of_the_certificate(eta, per_class):
    net = network(per_class)
    x, y = batch(60)
    z = net.body(x).detach()
    found = margins(net.head, z, y, eta)
    assert bool((found.gather(1, y[:, None]) == 0).all())
    smallest = found.masked_fill(nn.functional.one_hot(y, 3).bool(), torch.inf).amin(1)
    depth = depths(net.head, z, (1 - eta) / (1 + eta)).gather(1, y[:, None])[:, 0]
    assert bool((smallest <= depth + 1e-12).all())  # of one of the centroids of the class, the nearest
    if per_class == 1:
        assert torch.allclose(smallest, depth)


def test_the_loss_is_what_it_says():
    net = network()
    x, y = batch()
    context = make_context(9, L2(0.05))
    loss, metrics = centroid(net, x, y, context, eta=0.1, scale=3.0, steps=200)
    k = float(lipschitz_bound(trace(nn.Sequential(net.body, nn.ReLU()).eval(), x)).body)
    assert float(metrics["lipschitz"]) == pytest.approx(k, rel=1e-3)
    z, c = net.body(x).detach(), net.head.weight.detach()
    total = verified = answered = 0.0
    for point, label in zip(z, y.tolist(), strict=True):
        own = min(c[label], key=lambda one, point=point: float((point - one).norm()))
        d1 = float((point - own).norm())
        rows, accept = [], []
        for j in range(3):
            if j == label:
                rows.append(0.0)
                continue
            far = [(float((point - o).norm()), float((own - o).norm())) for o in c[j]]
            rows.append(min((d2**2 - d1**2) / (2 * d) for d2, d in far) / k - 0.05)
            ratio = 0.9 / 1.1
            g = [(ratio**2 * d2**2 - d1**2, ratio * d) for d2, d in far]
            accept.append(min(a / (d + math.sqrt(d**2 - (1 - ratio**2) * a)) for a, d in g) / k)
        logits = [-3.0 * m for m in (*rows, min(accept))]
        total += math.log(sum(math.exp(v) for v in logits)) - logits[label]
        verified += all(m > 0 for j, m in enumerate(rows) if j != label)
        answered += min(accept) > 0
    assert float(loss.detach()) == pytest.approx(total / 9, rel=1e-3)
    assert float(metrics["verified"]) == pytest.approx(verified / 9)
    assert float(metrics["answered"]) == pytest.approx(answered / 9)
    assert float(metrics["accuracy"]) == float((net(x).argmax(1) == y).double().mean())


def test_gradients_are_those_of_finite_differences():
    net = network()
    x, y = batch()

    def value():
        return centroid(net, x, y, make_context(9, L2(0.1)), eta=0.1, steps=600)[0]

    value().backward()
    for weight in (net.body[0].weight, net.body[2].weight, net.head.weight):
        place = weight.grad.abs().flatten().argmax()
        slopes = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                weight.view(-1)[place] += step
                slopes.append(float(value()))
                weight.view(-1)[place] -= step
        assert float(weight.grad.view(-1)[place]) == pytest.approx((slopes[0] - slopes[1]) / 2e-5, rel=1e-3)


def test_the_scale_of_the_features_drops_out():
    net = network()
    x, y = batch()
    before = float(centroid(net, x, y, make_context(9, L2(0.1)), steps=300)[0].detach())
    with torch.no_grad():
        net.body[2].weight *= 7
        net.body[2].bias *= 7
        net.head.weight *= 7
    assert float(centroid(net, x, y, make_context(9, L2(0.1)), steps=300)[0].detach()) == pytest.approx(
        before, rel=1e-6
    )


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("eta", [0.0, 0.1, 1.0])
def test_any_batch_size_and_features_on_a_centroid(count, eta):
    net = network(dtype=torch.float32)
    x, y = batch(count, torch.float32)
    with torch.no_grad():
        net.head.weight[0, 0] = net.body(x)[0]
    loss, _ = centroid(net, x, y, make_context(count, L2(0.1)), eta=eta)
    loss.backward()
    assert loss.shape == ()
    assert all(bool(p.grad.isfinite().all()) for p in net.parameters())


def test_other_models_are_refused():
    x, y = batch()
    with pytest.raises(UnsupportedError, match=r"trains a holdfast\.models\.CentroidNet, got Linear"):
        centroid(nn.Linear(5, 3).double(), x, y, make_context(9, L2(0.1)))
    with pytest.raises(InputError, match=r"objective 'centroid'.*needs a holdfast\.models\.CentroidNet"):
        hf.train(RECIPE, hf.make_model("2c2f-minmax"), load_data("mnist-mini"), progress=False, epochs=1)


def test_the_shipped_recipe_trains_answers_and_certifies():
    full = load_data("mnist-mini")
    data = Dataset("mnist-mini", full.train[:800], full.test[:100], full.classes)
    recipe = load_recipe(RECIPE)
    assert recipe.evaluate.certify == "centroid"
    assert recipe.selects == "certified"
    changes = {"threat": "l2:0.2", "evaluate.count": 40, "evaluate.attack_steps": 0}
    result = hf.train(RECIPE, data=data, progress=False, epochs=4, **changes)
    assert {"train_answered", "train_verified", "train_lipschitz"} <= set(result.history[-1])
    net, x, y = result.model, data.test.x, data.test.y
    assert float((net(x).argmax(1) == y).float().mean()) > 0.7
    rejecting = with_rejection(net, 0.05).eval()
    proved = {m: hf.certify(rejecting, x, y, hf.L2(0.2), "centroid", may_reject=m).certified for m in (False, True)}
    assert float(proved[True].float().mean()) > 0.3
    assert bool((proved[True] | ~proved[False]).all())
    noise = torch.rand(50, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    rejected = [float((rejecting(inputs).argmax(1) == 10).float().mean()) for inputs in (noise, x)]
    assert rejected[0] > rejected[1]
    broken = hf.attack(rejecting, x, y, hf.L2(0.2), "pgd", steps=10).success
    assert not bool((proved[False] & broken).any())
