"""Centroid networks: nearest centroid, the rule of rejection, files on disk, prototypes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast as hf
from holdfast.errors import InputError
from holdfast.models.zoo.centroid import Centroid, CentroidNet, acceptance, prototype_inputs, prototypes, with_rejection


def plain_net(classes=3, features=2, per_class=2, eta=None, seed=0, dtype=torch.float64):
    """Features are the inputs themselves."""
    torch.manual_seed(seed)
    net = CentroidNet(nn.Identity(), Centroid(classes, features, per_class=per_class), eta=eta)
    nn.init.normal_(net.head.weight)
    return net.to(dtype).eval()


def nearest_two(net, z):
    """Distance to the nearest centroid, its class, and distance to the nearest one of another class, by loops."""
    rows = []
    for point in z:
        found = sorted(
            (float((point - c).norm()), label) for label, group in enumerate(net.head.weight.detach()) for c in group
        )
        rows.append((*found[0], next(d for d, label in found if label != found[0][1])))
    return rows


@given(st.integers(2, 4), st.integers(2, 5), st.integers(1, 3), st.integers(0, 99), st.floats(0.0, 0.9))
@settings(max_examples=15)
def test_it_is_the_nearest_neighbour_and_rejects_by_the_rule(classes, features, per_class, seed, eta):
    net = plain_net(classes, features, per_class, eta, seed)
    z = 2 * torch.randn(30, features, dtype=torch.float64)
    logits = net(z).detach()
    assert logits.shape == (30, classes + 1)
    for row, (d1, label, d2) in zip(logits, nearest_two(net, z), strict=True):
        assert float(row[label]) == pytest.approx(-d1)
        accepted = d2 - d1 - eta * (d1 + d2)
        if abs(accepted) > 1e-9:
            assert (int(row.argmax()) == label) == (accepted > 0)
            assert (int(row.argmax()) == classes) == (accepted < 0)


@pytest.mark.parametrize("count", [0, 1, 9])
@pytest.mark.parametrize("eta", [None, 0.0, 0.3])
def test_shapes_and_dtypes(count, eta):
    net = plain_net(eta=eta, dtype=torch.float32)
    x = torch.rand(count, 2)
    logits = net(x)
    assert logits.shape == (count, 3 if eta is None else 4)
    assert logits.dtype == torch.float32
    assert acceptance(net, x).shape == (count,)
    found = prototypes(net, x, torch.rand(5, 2), count=2)
    assert found.examples.shape == (count, 2)
    assert found.label.shape == (count,)


def test_each_logit_moves_no_faster_than_the_features():
    net = plain_net(4, 6, 3)
    a, b = torch.randn(2, 200, 6, dtype=torch.float64)
    moved = (net(a) - net(b)).detach().abs().amax(1)
    assert bool((moved <= (a - b).norm(dim=1) + 1e-12).all())
    assert float((moved / (a - b).norm(dim=1)).max()) > 0.3


def test_the_order_within_a_class_does_not_matter():
    net = plain_net(eta=0.2)
    z = torch.randn(20, 2, dtype=torch.float64)
    before = net(z)
    net.head.weight.data = net.head.weight.data.flip(1)
    assert torch.equal(net(z), before)


def test_coverage_falls_with_eta_and_far_inputs_are_rejected():
    net = plain_net()
    z = torch.randn(300, 2, dtype=torch.float64)
    coverage = []
    for eta in (0.0, 0.1, 0.3, 0.6, 1.0):
        answers = with_rejection(net, eta)(z).argmax(1)
        coverage.append(float((answers < 3).double().mean()))
        assert torch.equal(answers < 3, acceptance(net, z) >= eta)
    assert coverage[0] == 1
    assert coverage[-1] == 0
    assert coverage == sorted(coverage, reverse=True)
    assert len(set(coverage)) == 5
    assert bool((with_rejection(net, 0.01)(1e4 * z).argmax(1) == 3).all())
    centres = net.head.weight.detach().flatten(0, 1)
    assert with_rejection(net, 1.0)(centres).argmax(1).tolist() == [0, 0, 1, 1, 2, 2]


def test_gradients_are_finite_on_a_centroid():
    net = plain_net(eta=0.1)
    z = net.head.weight.detach().flatten(0, 1).clone().requires_grad_()
    net(z).sum().backward()
    assert bool(z.grad.isfinite().all())


def test_two_centroids_in_one_place_are_never_sure():
    net = plain_net(2, 2, 1)
    net.head.weight.data.zero_()
    assert acceptance(net, torch.zeros(1, 2, dtype=torch.float64)).tolist() == [0.0]


def test_with_rejection_shares_the_weights_and_the_mode():
    net = plain_net().train()
    other = with_rejection(net, 0.4)
    assert other.head is net.head
    assert other.training
    assert other.eta == 0.4
    assert net.eta is None
    assert with_rejection(other, None).ratio == 1.0
    assert "eta=0.4" in repr(other)


@pytest.mark.parametrize("eta", [None, 0.25])
def test_it_is_saved_and_loaded(tmp_path, eta):
    options = {"body": "mlp", "hidden": (8,), "activation": "minmax", "features": 4, "per_class": 2}
    net = hf.make_model("centroid", input_shape=(5,), classes=3, normalize=(0.5, 0.25), seed=0, **options)
    changed = with_rejection(net, eta)
    path = hf.save_model(changed, tmp_path / "net.safetensors")
    loaded = hf.load_model(path)
    x = torch.rand(6, 5)
    assert isinstance(loaded, CentroidNet)
    assert loaded.eta == eta
    assert torch.equal(loaded(x), changed(x))
    assert loaded(x).shape == (6, 3 if eta is None else 4)


def test_a_body_of_unknown_making_has_no_recipe():
    assert getattr(plain_net(), "architecture", None) is None
    inner = hf.make_model("centroid", body="mlp", features=4, input_shape=(3,), hidden=(4,))
    assert getattr(CentroidNet(inner, Centroid(2, 10)), "architecture", None) is None


def test_centroids_start_equally_far_apart():
    rows = Centroid(5, 20, per_class=2).weight.detach().flatten(0, 1)
    apart = torch.cdist(rows, rows)[~torch.eye(10, dtype=torch.bool)]
    assert torch.allclose(apart, torch.full_like(apart, 2**0.5), atol=1e-5)


def test_prototypes_are_the_examples_nearest_to_the_centroid_that_decided():
    net = plain_net(3, 2, 2, eta=0.5)
    x, examples = torch.randn(7, 2, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    centres = net.head.weight.detach().flatten(0, 1)
    found = prototypes(net, x, examples, count=3, chunk=7)
    for i in range(7):
        distances = [float((x[i] - c).norm()) for c in centres]
        j = distances.index(min(distances))
        assert int(found.centroid[i]) == j
        assert int(found.label[i]) == j // 2
        assert float(found.distance[i]) == pytest.approx(distances[j])
        order = sorted(range(40), key=lambda n, c=centres[j]: float((examples[n] - c).norm()))
        assert found.examples[i].tolist() == order[:3]


def test_the_centroid_itself_is_its_own_prototype_and_is_answered():
    net = plain_net(eta=0.9)
    centres = net.head.weight.detach().flatten(0, 1)
    found = prototypes(net, centres, centres, count=1)
    assert found.examples[:, 0].tolist() == list(range(6))
    assert net(centres[found.examples[:, 0]]).argmax(1).tolist() == found.label.tolist()


@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 1, 1), (2, 4, 0), (2.5, 4, 1)])
def test_bad_sizes_are_refused(sizes):
    with pytest.raises(InputError, match="must be an integer >="):
        Centroid(sizes[0], sizes[1], per_class=sizes[2])


@pytest.mark.parametrize("eta", [-0.1, 1.5, float("nan"), "0.1"])
def test_a_bad_eta_is_refused(eta):
    with pytest.raises(InputError, match="between 0 and 1"):
        CentroidNet(nn.Identity(), Centroid(2, 2), eta=eta)


def test_other_mistakes_are_refused():
    with pytest.raises(InputError, match="got Identity and Linear"):
        CentroidNet(nn.Identity(), nn.Linear(2, 2))
    net = plain_net(features=4)
    with pytest.raises(InputError, match="the model failed on a batch"):  # one feature must not spread over four
        hf.attack(net, torch.rand(3, 1, dtype=torch.float64), torch.zeros(3, dtype=torch.long), hf.L2(0.1), "pgd")
    with pytest.raises(InputError, match="between 1 and the 3 examples, got 4"):
        prototypes(plain_net(), torch.rand(2, 2).double(), torch.rand(3, 2).double(), count=4)


def test_a_prototype_by_descent_is_the_centroid_where_features_are_inputs():
    torch.manual_seed(0)
    net = CentroidNet(nn.Identity(), Centroid(3, 4, per_class=2), eta=0.9).eval()
    net.head.weight.data = torch.rand(3, 2, 4)
    x = torch.rand(6, 4)
    made = prototype_inputs(net, x, steps=300, rate=0.02)
    centres = net.head.weight.flatten(0, 1)[made.centroid].detach()
    assert torch.equal(made.centroid, prototypes(net, x, x, count=1).centroid)
    assert torch.allclose(made.x, centres, atol=5e-3)
    assert torch.equal(net(made.x).argmax(1), made.label)  # and eta = 0.9 accepts it
    assert bool((made.distance <= made.before).all())
    net.head.weight.data -= 3.0  # out of the range of inputs: the nearest valid input is a corner
    assert bool((prototype_inputs(net, x, steps=300).x < 1e-3).all())


def test_prototypes_by_descent_come_closer_from_any_start():
    torch.manual_seed(1)
    body = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    net = CentroidNet(body, Centroid(2, 4)).eval()
    x = torch.rand(5, 1, 3, 4)
    weights = [p.detach().clone() for p in net.parameters()]
    for start in (None, torch.rand(5, 1, 3, 4)):
        made = prototype_inputs(net, x, start=start, steps=60)
        assert bool((made.distance < made.before).all())
        assert 0 <= float(made.x.min()) <= float(made.x.max()) <= 1
        features = net.body(made.x)
        assert torch.allclose((features - net.head.weight.flatten(0, 1)[made.centroid]).norm(dim=1), made.distance)
    assert all(torch.equal(p, w) and p.grad is None for p, w in zip(net.parameters(), weights, strict=True))
    with pytest.raises(InputError, match="shape of x"):
        prototype_inputs(net, x, start=x[:2])
