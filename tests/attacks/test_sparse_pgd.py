"""sparse-pgd and sparse-rs: the closed form on linear models, pixels counted across channels."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.attacks.core.losses import margin
from holdfast.attacks.sparse_pgd import project_sparse, sparse_pgd
from holdfast.attacks.sparse_rs import sparse_rs
from holdfast.errors import InputError
from holdfast.random import Noise

ATTACKS = {"sparse-pgd": (sparse_pgd, {}), "sparse-rs": (sparse_rs, {"queries": 600})}
both = pytest.mark.parametrize("name", list(ATTACKS))


def linear(shape, classes=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    layer = nn.Linear(torch.Size(shape).numel(), classes).to(dtype)
    layer.weight.data = torch.randn(layer.weight.shape, dtype=dtype, generator=generator)
    layer.bias.data.zero_()
    return nn.Sequential(nn.Flatten(), layer).eval()


def inputs(count, shape, dtype=torch.float64, seed=1):
    return torch.rand(count, *shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def centred(name, count):
    """A tiny network whose classes are equally likely at random inputs, in float64, and such inputs."""
    model, shape = tiny_nets()[name]
    x = inputs(count, shape)
    logits = model.double()(x).detach()
    shift = nn.Linear(logits.shape[1], logits.shape[1]).double()
    shift.weight.data, shift.bias.data = torch.eye(logits.shape[1], dtype=torch.float64), -logits.mean(0)
    model = nn.Sequential(model, shift).eval()
    return model, x, model(x).argmax(1)


def largest_margin(model, x, y, threat):
    """The worst case of a linear model: the k pixels with most to gain, for each other class."""
    weight, worst = model[1].weight.data, []
    for i in range(len(x)):
        per_class = []
        for j in [j for j in range(len(weight)) if j != y[i]]:
            w = (weight[j] - weight[y[i]]).view_as(x[i])
            gain = torch.where(w > 0, w * (threat.high - x[i]), w * (threat.low - x[i]))
            gain = gain.sum(0).flatten() if x.ndim == 4 else gain.flatten()
            best = gain.sort(descending=True).values[: threat.k].sum()
            per_class.append((w * x[i]).sum() + best)
        worst.append(torch.stack(per_class).amax())
    return torch.stack(worst)


@both
@pytest.mark.parametrize(("shape", "k", "low"), [((2, 3, 4), 1, 0.0), ((12,), 2, 0.0), ((2, 3, 3), 1, -1.0)])
def test_exact_on_a_linear_model_of_two_classes(name, shape, k, low):
    attack, options = ATTACKS[name]
    options = options or {"step_size": 100.0}  # short steps stay with pixels that are nearly as good
    threat = hf.Sparse(k, low=low)
    model, x = linear(shape), low + (1 - low) * inputs(40, shape)
    y = model(x).argmax(1)
    worst = largest_margin(model, x, y, threat)
    result = attack(model, x, y, threat, **options)
    assert 0 < int(result.success.sum()) < 40
    assert torch.equal(result.success, worst > 0)
    left = ~result.success
    assert torch.allclose(margin(model(result.x_adv[left]), y[left]), worst[left], atol=1e-9)


@both
@pytest.mark.parametrize("classes", [3, 5, 10])
def test_near_the_worst_case_of_many_classes_and_never_past_it(name, classes):
    attack, options = ATTACKS[name]
    threat, shape = hf.Sparse(2), (1, 4, 4)
    model, x = linear(shape, classes), inputs(30, shape)
    y = model(x).argmax(1)
    worst = largest_margin(model, x, y, threat)
    result = attack(model, x, y, threat, **options)
    assert not bool((result.success & (worst <= 0)).any())
    assert int(result.success.sum()) >= 0.9 * int((worst > 0).sum()) > 0


@both
@pytest.mark.parametrize("net", ["mlp", "smooth", "cnn", "residual"])
def test_inside_the_set_and_the_more_pixels_the_more_broken(name, net):
    attack, _ = ATTACKS[name]
    model, x, y = centred(net, 24)
    broken = []
    for k in (0, 1, 2, 500):
        threat = hf.Sparse(k)
        result = attack(model, x, y, threat, **({"queries": 60} if name == "sparse-rs" else {"restarts": 2}))
        assert bool(threat.contains(result.x_adv, x).all())
        assert torch.equal(model(result.x_adv).argmax(1) != y, result.success)
        assert result.by == tuple(name if s else "" for s in result.success)
        broken.append(int(result.success.sum()))
    assert broken[0] == 0
    assert broken[1] <= broken[2] <= broken[3]
    assert broken[3] > 0


@both
def test_the_answer_does_not_depend_on_the_batch(name):
    attack, _ = ATTACKS[name]
    options = {"queries": 60} if name == "sparse-rs" else {"steps": 4, "restarts": 3}
    model, x, y = centred("cnn", 14)
    noise, threat = Noise.for_batch(2, 14), hf.Sparse(1)
    whole = attack(model, x, y, threat, noise=noise, **options)
    assert 0 < int(whole.success.sum()) < 14
    for rows in [torch.tensor([i]) for i in range(14)] + [torch.randperm(14)]:
        part = attack(model, x[rows], y[rows], threat, noise=noise[rows], **options)
        assert torch.allclose(part.x_adv, whole.x_adv[rows], atol=1e-9)
        assert torch.equal(part.success, whole.success[rows])
        assert torch.equal(part.gradients, whole.gradients[rows])
        assert torch.equal(part.queries, whole.queries[rows])


def test_counts_are_exact():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval()
    model[1].bias.data = torch.tensor([50.0, 0.0])
    x, y = torch.rand(3, 4), torch.tensor([0, 0, 1])
    result = sparse_pgd(model, x, y, hf.Sparse(1), steps=5, restarts=2)
    assert result.gradients.tolist() == [10, 10, 1]
    assert result.queries.tolist() == [12, 12, 1]
    result = sparse_rs(model, x, y, hf.Sparse(1), queries=7)
    assert result.gradients.tolist() == [0, 0, 0]
    assert result.queries.tolist() == [7, 7, 1]


@given(st.integers(0, 999), st.integers(1, 3))
def test_projection_is_the_nearest_point(seed, k):
    """Against all choices of k pixels of an image with two channels."""
    threat, x = hf.Sparse(k), inputs(1, (2, 2, 2), seed=seed)
    x_new = 4 * inputs(1, (2, 2, 2), seed=seed + 1) - 2
    nearest = min(
        float((torch.where(mask, x_new.clamp(0, 1), x) - x_new).square().sum())
        for chosen in itertools.combinations(range(4), k)
        for mask in [torch.tensor([i in chosen for i in range(4)]).view(1, 1, 2, 2)]
    )
    found = project_sparse(threat, x_new, x)
    assert bool(threat.contains(found, x).all())
    assert float((found - x_new).square().sum()) == pytest.approx(nearest)


def test_bad_options_are_refused():
    model, x, y = nn.Linear(4, 2).eval(), torch.rand(2, 4), torch.zeros(2, dtype=torch.long)
    with pytest.raises(InputError, match="expected an integer >= 1, got 0"):
        hf.attack(model, x, y, hf.Sparse(1), "sparse-pgd", restarts=0)
    with pytest.raises(InputError, match="expected an integer >= 1, got 0"):
        hf.attack(model, x, y, hf.Sparse(1), "sparse-rs", queries=0)
    for attack in (sparse_pgd, sparse_rs):
        with pytest.raises(InputError, match="number of pixels"):
            attack(model, x, y, hf.L1(1.0))
