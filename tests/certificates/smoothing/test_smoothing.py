"""Randomised smoothing: linear models with a known smoothed classifier, batching, resuming, deployment, bad input."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.certificates.smoothing.sample import Sampling, sample, voter
from holdfast.certificates.smoothing.smoothing import gaussian, gaussian_probability, gaussian_radius
from holdfast.certificates.smoothing.votes import load_counts
from holdfast.errors import InputError, StorageError, UnsupportedError

SIGMA = 0.25


@pytest.fixture(scope="module")
def line():
    """A linear classifier of two classes: its smoothed classifier is itself, and the radius is the distance."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, 2).eval()
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 3, generator=generator))
        w = model.weight[1] - model.weight[0]
        model.bias.copy_(torch.stack([0.5 * w.sum(), torch.tensor(0.0)]))
        x = torch.rand(40, 3, generator=generator)
        z = model(x)
    distance = ((z[:, 1] - z[:, 0]).abs() / w.norm()).double()
    return model, x, z.argmax(1), distance


class Count(nn.Module):
    """Counts the noisy copies that pass."""

    def __init__(self, model):
        super().__init__()
        self.model, self.seen = model, 0

    def forward(self, x):
        self.seen += len(x)
        return self.model(x)


def test_the_radius_of_a_linear_model_is_its_distance_from_below(line):
    model, x, y, distance = line
    radius = hf.radius(model, x, y, "l2", "smoothing", sigma=SIGMA, n=20_000, batch=5000)
    assert bool((radius <= distance).all())
    # As far as 20,000 hits can prove.
    reach = float(gaussian_radius(torch.tensor(0.001 ** (1 / 20_000)), SIGMA))
    near = (distance < 0.8 * reach) & (distance > 0.05)  # nearer, the 100 samples may guess the other class
    assert bool(near.any())
    torch.testing.assert_close(radius[near], distance[near], rtol=0.1, atol=0.01)
    assert float(radius.max()) <= reach


@pytest.mark.parametrize("adaptive", [True, False])
def test_certified_is_what_the_distance_allows_and_wrong_labels_are_never_certified(line, adaptive):
    model, x, y, distance = line
    result = hf.certify(model, x, y, hf.L2(0.2), "smoothing", sigma=SIGMA, n=5000, adaptive=adaptive)
    assert result.alpha == 0.001
    assert result.seed == 0
    assert bool((distance[result.certified] > 0.2).all())
    assert bool(result.certified[distance > 0.3].all())
    assert bool((result.certified == (result.margin > 0)).all())
    assert bool((result.radius[result.certified] > 0.2).all())
    assert {by for by, ok in zip(result.by, result.certified.tolist(), strict=True) if ok} == {"smoothing"}
    wrong = hf.certify(model, x, 1 - y, hf.L2(0.0), "smoothing", sigma=SIGMA, n=5000, adaptive=adaptive)
    sure = distance > 0.1
    assert not bool(wrong.certified[sure].any())
    assert wrong.radius[sure].tolist() == [0.0] * int(sure.sum())


def test_the_statement_is_about_the_smoothed_classifier_not_the_model():
    class Needle(nn.Module):
        """Class 1 on a thin slab around 0.5, class 0 elsewhere."""

        def forward(self, x):
            inside = ((x[:, 0] - 0.5).abs() < 0.001).float()
            return torch.stack([1 - inside, inside], 1)

    x = torch.full((1, 2), 0.5)
    model = Needle().eval()
    assert int(model(x).argmax(1)) == 1
    zero, one = (hf.certify(model, x, torch.tensor([c]), hf.L2(0.1), "smoothing", sigma=SIGMA, n=2000) for c in (0, 1))
    assert zero.certified.tolist() == [True]
    assert one.certified.tolist() == [False]
    assert one.radius.tolist() == [0.0]


def test_adaptive_sampling_stops_early_and_agrees(line):
    model, x, y, distance = line
    counted = Count(model).eval()
    options = {"sigma": SIGMA, "n": 20_000, "batch": 5000}
    quick = hf.certify(counted, x, y, hf.L2(0.15), "smoothing", radii=[0.3], **options)
    adaptive_cost, counted.seen = counted.seen, 0
    fixed = hf.certify(counted, x, y, hf.L2(0.15), "smoothing", adaptive=False, **options)
    assert adaptive_cost < 0.3 * counted.seen
    for radius in (0.15, 0.3):
        sure = (distance - radius).abs() > 0.01
        assert bool(((quick.radius > radius) == (fixed.radius > radius))[sure].all())


def test_the_answer_depends_on_neither_batch_nor_company(line):
    model, x, y, _ = line
    options = {"sigma": SIGMA, "n": 1050, "n0": 150}
    one = hf.certify(model, x, y, hf.L2(0.2), "smoothing", batch=700, **options)
    two = hf.certify(model, x, y, hf.L2(0.2), "smoothing", batch=64, chunk=7, **options)
    part = hf.certify(model, x[5:9], y[5:9], hf.L2(0.2), "smoothing", index=torch.arange(5, 9), **options)
    assert one.radius.tolist() == two.radius.tolist()
    assert one.radius[5:9].tolist() == part.radius.tolist()
    other = hf.certify(model, x, y, hf.L2(0.2), "smoothing", seed=1, **options)
    assert one.radius.tolist() != other.radius.tolist()


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_stopped_run_goes_on_and_draws_no_sample_twice(line, after, tmp_path):
    model, x, y, _ = line
    options = {"sigma": SIGMA, "n": 3050, "batch": 500}
    counted = Count(model).eval()
    whole = hf.certify(counted, x, y, hf.L2(0.2), "smoothing", **options)
    cost, counted.seen, calls, path = counted.seen, 0, 0, tmp_path / "deep" / "counts.npz"

    def watch(counts, left):
        nonlocal calls
        calls += 1
        assert left.shape == y.shape
        assert int(left.min()) >= 0
        if calls == after:
            counts.save(path)
            raise Stop

    with pytest.raises(Stop):
        hf.certify(counted, x, y, hf.L2(0.2), "smoothing", watch=watch, **options)
    resumed = hf.certify(counted, x, y, hf.L2(0.2), "smoothing", counts=load_counts(path), **options)
    for name in ("certified", "margin", "radius"):
        assert getattr(resumed, name).tolist() == getattr(whole, name).tolist()
    # The check at the door passes each input once more.
    assert counted.seen == cost + len(x)


def test_finished_counts_answer_another_radius_without_starting_again(line):
    model, x, y, _ = line
    kept = []
    options = {"sigma": SIGMA, "n": 5000}
    hf.certify(model, x, y, hf.L2(0.1), "smoothing", watch=lambda counts, left: kept.append(counts), **options)
    counted = Count(model).eval()
    more = hf.certify(counted, x, y, hf.L2(0.3), "smoothing", counts=kept[-1], **options)
    resumed, counted.seen = counted.seen, 0
    fresh = hf.certify(counted, x, y, hf.L2(0.3), "smoothing", **options)
    assert resumed < counted.seen
    assert more.certified.tolist() == fresh.certified.tolist()


def test_counts_of_another_run_are_refused(line, tmp_path):
    model, x, y, _ = line
    kept = []
    hf.certify(model, x, y, hf.L2(0.1), "smoothing", sigma=SIGMA, n=500, watch=lambda counts, left: kept.append(counts))
    with pytest.raises(InputError, match=r"another run \(noise: was 'gaussian 0.25', is 'gaussian 0.5'"):
        hf.certify(model, x, y, hf.L2(0.1), "smoothing", sigma=0.5, n=500, counts=kept[-1])
    with pytest.raises(InputError, match="of 40 inputs and 2 classes, this run has 3 and 2"):
        hf.certify(model, x[:3], y[:3], hf.L2(0.1), "smoothing", sigma=SIGMA, n=500, counts=kept[-1])
    with pytest.raises(StorageError, match="nothing to resume"):
        load_counts(tmp_path / "none.npz")


@pytest.mark.parametrize(
    "change",
    [
        {"drawn": np.array([-(10**12)] * 3)},
        {"drawn": np.array([10**12] * 3)},
        {"counts": np.array([[-1, 1]] * 3)},
        {"counts": np.zeros((3, 0), np.int64)},
        {"guess": np.array([2, 0, 0])},
        {"guess": np.array([-2, 0, 0])},
        {"guess": np.array([0.5, 0, 0])},
        {"lower": np.array([np.nan, 0, 0])},
        {"lower": np.array([1.5, 0, 0])},
        {"lower": np.zeros(2)},
        {"settings": np.array("[" * 5000)},
        {"settings": np.array("[1]")},
    ],
)
def test_counts_that_no_sampling_gives_are_refused(tmp_path, change):
    """A run that went on with the first one would draw without end."""
    zeros = np.zeros(3, np.int64)
    whole = {"guess": zeros - 1, "counts": np.zeros((3, 2), np.int64), "drawn": zeros, "lower": np.zeros(3)}
    np.savez(tmp_path / "c.npz", settings=np.array("{}"), **whole)
    assert load_counts(tmp_path / "c.npz").settings == {}
    np.savez(tmp_path / "c.npz", **{"settings": np.array("{}"), **whole, **change})
    with pytest.raises(StorageError, match="delete it to start again"):
        load_counts(tmp_path / "c.npz")
    (tmp_path / "bad.npz").write_text("no")
    with pytest.raises(StorageError, match="cannot read"):
        load_counts(tmp_path / "bad.npz")


def test_one_empty_and_many_inputs():
    model = nn.Linear(2, 3).eval()
    how = Sampling(n=300, batch=250)
    for inputs in (0, 1, 5):
        x, y = torch.rand(inputs, 2), torch.zeros(inputs, dtype=torch.long)
        counts = sample(model, x, y, gaussian(0.5), torch.zeros(0), how, noise="test", classes=3)
        assert counts.counts.shape == (inputs, 3)
        assert bool((counts.drawn[counts.guess == y] == 300).all())
        assert counts.counts.sum(1).tolist() == counts.drawn.tolist()


def test_samples_of_one_input_are_normal_and_never_repeat():
    seen = []

    class Keep(nn.Module):
        def forward(self, x):
            seen.append(x)
            return torch.stack([x[:, 0], 2 + x[:, 0].abs()], 1)

    sample(
        *(Keep().eval(), torch.zeros(2, 1), torch.ones(2, dtype=torch.long), gaussian(0.5), torch.zeros(0)),
        Sampling(n=5000, batch=10_000),
        noise="test",
        classes=2,
    )
    values = torch.cat(seen)[:, 0]
    assert len(values) == 2 * 5100
    assert len(values.unique()) > 0.999 * len(values)
    assert float(values.mean()) == pytest.approx(0, abs=0.02)
    assert float(values.std()) == pytest.approx(0.5, abs=0.02)


def test_probability_and_radius_are_inverse_and_rounded_to_the_safe_side():
    radius = torch.linspace(0, 1, 50).double()
    p = gaussian_probability(radius, SIGMA)
    assert bool((gaussian_radius(p * (1 - 3e-12), SIGMA) <= radius).all())
    torch.testing.assert_close(gaussian_radius(p, SIGMA), radius, rtol=1e-4, atol=1e-9)
    assert gaussian_radius(torch.tensor([0.0, 0.3, 0.5]), SIGMA).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs sigma"),
        ({"sigma": 0.0}, "'sigma'.*expected a number > 0, got 0.0"),
        ({"sigma": -1.0}, "'sigma'.*expected a number > 0, got -1.0"),
        ({"sigma": 0.5, "alpha": 0.0}, "'alpha'.*expected a number > 0 and < 1, got 0.0"),
        ({"sigma": 0.5, "alpha": 1.5}, "'alpha'.*expected a number > 0 and < 1, got 1.5"),
        ({"sigma": 0.5, "n0": 0}, "'n0'.*expected an integer >= 1, got 0"),
        ({"sigma": 0.5, "batch": 0}, "'batch'.*expected an integer >= 1, got 0"),
        ({"sigma": 0.5, "radii": [-1.0]}, "'radii'.*expected a number >= 0, got -1.0"),
        ({"sigma": 0.5, "samples": 3}, "has no option 'samples'"),
        ({"sigma": 0.001}, "out of reach of sampling"),
    ],
)
def test_bad_options_are_refused(line, options, message):
    model, x, y, _ = line
    with pytest.raises(InputError, match=message):
        hf.certify(model, x, y, hf.L2(0.2), "smoothing", **options)


@pytest.mark.parametrize(("eps", "adaptive"), [(0.0, True), (0.1, True), (0.5, True), (0.5, False), (0.9, True)])
def test_an_n_too_small_names_the_smallest_that_works(line, eps, adaptive):
    model, x, y, _ = line
    x, y, options = x[:2], y[:2], {"sigma": SIGMA, "adaptive": adaptive}
    with pytest.raises(InputError, match="the smallest n that can is") as refused:
        hf.certify(model, x, y, hf.L2(eps), "smoothing", n=5, **options)
    smallest = int(str(refused.value).rsplit(" ", 1)[1])
    always = nn.Linear(3, 2).eval()
    with torch.no_grad():
        always.weight.zero_()
        always.bias.copy_(torch.tensor([1.0, 0.0]))
    zero = torch.zeros_like(y)
    assert bool(hf.certify(always, x, zero, hf.L2(eps), "smoothing", n=smallest, **options).certified.all())
    with pytest.raises(InputError, match="the smallest n that can is"):
        hf.certify(always, x, zero, hf.L2(eps), "smoothing", n=smallest - 1, **options)


def test_outputs_that_are_not_finite_are_refused(line):
    _, x, y, _ = line

    class Log(nn.Module):
        def forward(self, x):
            return torch.stack([x[:, 0].log(), x[:, 1]], 1)

    with pytest.raises(InputError, match=r"on noisy copies of the inputs: .* NaN or infinite logits"):
        hf.certify(Log().eval(), x.clamp(min=0.1), y, hf.L2(0.1), "smoothing", sigma=0.5, n=500)
    with pytest.raises(InputError, match="noisy copies"):
        hf.Smoothed(Log(), 0.5, n=50).eval()(x.clamp(min=0.1))


def test_smoothed_is_deterministic_and_independent_of_the_batch(line):
    model, x, _, _ = line
    smoothed = hf.Smoothed(model, SIGMA, n=250).eval()
    logits = smoothed(x)
    assert torch.equal(logits, smoothed(x))
    assert torch.equal(logits[3:5], hf.Smoothed(model, SIGMA, n=250, batch=100).eval()(x[3:5]))
    votes = logits.double().exp() * 252 - 1
    torch.testing.assert_close(votes, votes.round(), atol=1e-3, rtol=0)
    torch.testing.assert_close(votes.sum(1), torch.full((40,), 250.0).double(), atol=1e-3, rtol=0)


def test_smoothed_votes_follow_the_normal_distribution(line):
    model, x, y, distance = line
    shares = hf.Smoothed(model, SIGMA, n=4000).eval()(x).exp().gather(1, y[:, None])[:, 0].double()
    torch.testing.assert_close(shares, gaussian_probability(distance, SIGMA), atol=0.04, rtol=0)


def test_predict_abstains_where_the_vote_is_close(line):
    model, x, y, distance = line
    smoothed = hf.Smoothed(model, SIGMA, n=300, alpha=0.01).eval()
    found = smoothed.predict(x)
    assert found[distance > 0.15].tolist() == y[distance > 0.15].tolist()
    assert set(found.tolist()) <= {-1, 0, 1}
    # On the boundary itself nothing can be said.
    w = (model.weight[1] - model.weight[0]).detach()
    edge = x - (model(x)[:, 1] - model(x)[:, 0])[:, None].detach() * w / w.norm().square()
    assert float((smoothed.predict(edge, seed=3) == -1).double().mean()) > 0.8
    assert not bool(smoothed.differs(x, y)[distance > 0.15].any())
    assert bool(smoothed.differs(x, 1 - y)[distance > 0.15].all())


def test_smoothed_has_the_gradient_of_the_soft_vote_and_the_value_of_the_hard_one(line):
    model, x, _, _ = line
    smoothed = hf.Smoothed(model, SIGMA, n=120).eval()
    leaf = x[:4].clone().requires_grad_()
    logits = smoothed(leaf)
    torch.testing.assert_close(logits.detach(), smoothed(x[:4]), rtol=0, atol=1e-6)
    (found,) = torch.autograd.grad(logits[:, 0].sum(), leaf)
    # By hand, with the same noise: rerun the model on the copies that it sees.
    seen = []
    hook = model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    smoothed(x[:4])
    hook.remove()
    noise = [part.unflatten(0, (4, -1)) - x[:4, None] for part in seen]
    again = x[:4].clone().requires_grad_()
    soft = sum(model(again[:, None] + part).softmax(2).sum(1) for part in noise) / 120
    (expected,) = torch.autograd.grad(soft.log()[:, 0].sum(), again)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_smoothed_goes_through_certify_and_radius(line):
    model, x, y, _ = line
    smoothed = hf.Smoothed(model, SIGMA, alpha=0.01).eval()
    plain = hf.certify(model, x, y, hf.L2(0.2), "smoothing", sigma=SIGMA, alpha=0.01, n=2000)
    for result in (
        hf.certify(smoothed, x, y, hf.L2(0.2), "smoothing", n=2000),
        smoothed.certify(x, y, 0.2, n=2000),
    ):
        assert result.radius.tolist() == plain.radius.tolist()
        assert result.alpha == 0.01
    fixed = hf.radius(smoothed, x, y, "l2", "smoothing", n=1000)
    assert fixed.shape == (40,)
    assert float(fixed.max()) > 0.4
    with pytest.raises(UnsupportedError, match="certified by method='smoothing', not by 'crown'"):
        hf.certify(smoothed, x, y, hf.L2(0.2), "crown")
    with pytest.raises(InputError, match=r"has sigma 0.25, the option says 0.5"):
        hf.certify(smoothed, x, y, hf.L2(0.2), "smoothing", sigma=0.5)
    with pytest.raises(InputError, match="'pec' has no option 'sigma'"):
        hf.radius(model, x, y, "l2", "pec", sigma=0.5)
    with pytest.raises(UnsupportedError, match="does not handle the threat"):
        hf.radius(model, x, y, "linf", "smoothing", sigma=0.5)


@pytest.mark.parametrize("options", [{"sigma": 0.0}, {"sigma": math.inf}, {"alpha": 2.0}, {"n": 0}])
def test_smoothed_refuses_bad_options(options):
    with pytest.raises(InputError):
        hf.Smoothed(nn.Linear(2, 2), **{"sigma": 0.5, **options})


def test_no_attack_on_the_smoothed_classifier_beats_its_certificate():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    smoothed = hf.Smoothed(model, 0.2, n=100).eval()
    x = torch.rand(30, 4)
    y = smoothed(x).argmax(1)
    radius = hf.certify(smoothed, x, y, hf.L2(0.3), "smoothing", n=3000, radii=[0.1, 0.2]).radius
    broken = 0
    for eps in (0.1, 0.3, 0.6):
        found = hf.attack(smoothed, x, y, hf.L2(eps), "pgd", steps=8)
        differs = found.success & smoothed.differs(found.x_adv, y)
        assert not bool((differs & (radius > eps)).any())
        broken += int(differs.sum())
    assert broken > 0
    assert bool((radius > 0.1).any())


def test_attacks_reach_through_a_smoothed_convolutional_network():
    model = hf.make_model("small-star", seed=0).eval()
    smoothed = hf.Smoothed(model, 0.25, n=150).eval()
    x, y = torch.rand(3, 1, 28, 28), torch.tensor([1, 2, 3])
    result = hf.attack(smoothed, x, y, hf.L2(0.5), "pgd", steps=2)
    assert bool((result.gradients <= 2).all())
    moved = torch.rand(3, 1, 28, 28, requires_grad=True)
    (gradient,) = torch.autograd.grad(smoothed(moved).sum(), moved)
    assert float(gradient.abs().max()) > 0


def test_counts_of_one_label_prove_nothing_for_another():
    class Sure(nn.Module):
        def forward(self, x):
            return torch.stack([torch.ones(len(x)), torch.zeros(len(x))], 1)

    model, x, seen = Sure().eval(), torch.rand(3, 2), []
    how = {"sigma": 0.5, "n": 400, "adaptive": False}
    right = torch.zeros(3, dtype=torch.int64)
    watched = hf.certify(
        model, x, right, hf.L2(0.1), "smoothing", watch=lambda counts, left: seen.append(counts), **how
    )
    assert bool(watched.certified.all())
    again = hf.certify(model, x, right, hf.L2(0.1), "smoothing", counts=seen[-1], **how)
    assert torch.equal(again.radius, watched.radius)
    other = hf.certify(model, x, 1 - right, hf.L2(0.1), "smoothing", counts=seen[-1], **how)
    assert not bool(other.certified.any())
    assert other.radius.tolist() == [0.0] * 3


def test_votes_in_bfloat16_are_votes_of_another_classifier_and_the_certificate_says_so(line):
    model, x, y, _ = line
    copy = voter(model, x, "bfloat16")
    assert voter(model, x, "full") is model
    task = (x, y, gaussian(SIGMA), torch.ones(0))
    how = {"noise": "gaussian", "classes": 2}
    found = sample(model, *task, Sampling(n=500, adaptive=False, precision="bfloat16"), **how)
    expected = sample(copy, *task, Sampling(n=500, adaptive=False), **how)
    own = sample(model, *task, Sampling(n=500, adaptive=False), **how)
    assert torch.equal(found.counts, expected.counts)
    assert not torch.equal(found.counts, own.counts), "some copies lie between the two boundaries"
    with pytest.raises(InputError, match="precision"):
        sample(model, *task, Sampling(n=500, adaptive=False), counts=found, **how)
    result = hf.certify(model, x[:4], y[:4], hf.L2(0.01), "smoothing", sigma=SIGMA, n=500, precision="bfloat16")
    assert set(result.by) <= {"", "smoothing of the model in bfloat16"}
    assert bool(result.certified.any())
    with pytest.raises(InputError, match="precision"):
        hf.certify(model, x[:4], y[:4], hf.L2(0.01), "smoothing", sigma=SIGMA, n=500, precision="half")
