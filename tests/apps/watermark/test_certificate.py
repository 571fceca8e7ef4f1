"""The certificate and the ownership test: closed forms, coverage, and what they refuse."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from holdfast.apps.watermark import (
    TriggerSet,
    WatermarkCertificate,
    certify_watermark,
    noisy_accuracies,
    null_test,
    ownership,
    trigger_accuracy,
    verify_black_box,
    verify_white_box,
)
from holdfast.apps.watermark.certificate_files import count_copies, read_certificate
from holdfast.apps.watermark.ownership import chance, threshold
from holdfast.errors import InputError, StorageError


class HalfSpace(nn.Module):
    """Class 1 if a^T theta > 0, whatever the input: f(theta) = 1[a^T theta > 0] for triggers of class 1."""

    def __init__(self, theta, a):
        super().__init__()
        self.theta = nn.Parameter(torch.as_tensor(theta, dtype=torch.float32))
        self.register_buffer("a", torch.as_tensor(a, dtype=torch.float32))

    def forward(self, x):
        z = (self.a * self.theta).sum().expand(len(x))
        return torch.stack([-z, z], 1)


def one_trigger():
    return TriggerSet(torch.zeros(1, 1, 1, 1), torch.tensor([1]), 2, "noise", False)


def half_space(distance=0.6):
    """Weights at this distance from the plane where the answer flips, and the normal of the plane."""
    a = torch.tensor([3.0, 0.0, -4.0])
    return HalfSpace(distance * a / 5 + torch.tensor([0.0, 2.0, 0.0]), a).eval()


def some_triggers(count=20, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return TriggerSet(
        torch.rand(count, 1, 3, 3, generator=generator),
        torch.randint(classes, (count,), generator=generator),
        classes,
        "unrelated",
        True,
    )


@pytest.fixture
def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def test_the_radius_of_a_half_space_is_its_distance():
    model, triggers, sigma, n = half_space(0.6), one_trigger(), 0.5, 1500
    radii = [0.1 * i for i in range(13)]
    certificate = certify_watermark(model, triggers, radii, sigma=sigma, n=n)
    proved = [r for r, value in zip(radii, certificate.certified, strict=True) if value == 1.0]
    # With n samples: 1 - f errs with probability Phi(-0.6 / sigma), which the rank must stay above.
    exact = max(r for r in radii if r < 0.6)
    assert proved == [r for r in radii if r <= max(proved)]
    assert exact - 0.15 < max(proved) <= exact
    assert certificate.at(0.6) == 0.0
    # At the distance itself, in the worst direction, the median does flip.
    moved = half_space(0.6)
    with torch.no_grad():
        moved.theta -= 0.65 * moved.a / 5
    assert noisy_accuracies(moved, triggers, sigma=sigma, n=401).median() == 0


def test_more_copies_prove_the_radius_up_to_its_distance():
    model = half_space(0.6)
    reach = [
        max(r for r in torch.linspace(0, 0.9, 91).tolist() if certificate.at(r) == 1.0)
        for certificate in (certify_watermark(model, one_trigger(), [0.0], sigma=0.5, n=n) for n in (50, 300, 2000))
    ]
    assert reach[0] < reach[1] < reach[2] <= 0.6
    assert reach[2] > 0.5


def test_radius_and_noise_scale_with_the_weights():
    # A half-space is free of scale: (theta, sigma, epsilon) -> c times each gives the same answer.
    small, large = half_space(0.6), half_space(0.6)
    with torch.no_grad():
        large.theta *= 4
    a = certify_watermark(small, one_trigger(), [0.2, 0.5, 0.7], sigma=0.5, n=500)
    b = certify_watermark(large, one_trigger(), [0.8, 2.0, 2.8], sigma=2.0, n=500)
    assert a.certified == b.certified
    assert a.right == b.right


def test_the_bound_fails_no_more_often_than_it_may():
    # f is the share of 10 independent signs; the exact quantile is that of a binomial distribution.
    sigma, epsilon, n, confidence, runs = 1.0, 0.5, 40, 0.9, 2000
    p = float(stats.norm.cdf(-epsilon / sigma))
    exact = stats.binom.ppf(p, 10, 0.5)  # largest y with P[f < y] <= p
    fails = 0
    draws = torch.distributions.Binomial(10, torch.tensor(0.5)).sample((runs, n)).long()
    values = {
        "radii": (),
        "certified": (),
        "median": 0.5,
        "accuracy": 0.5,
        "sigma": sigma,
        "n": n,
        "seed": 0,
        "confidence": confidence,
        "union": False,
        "triggers": 10,
        "parameters": 10,
        "weight_norm": 0.0,
    }
    for row in draws.sort(1).values.tolist():
        bound = WatermarkCertificate(**values, right=tuple(row)).at(epsilon)
        fails += bound * 10 > exact
    assert 0 < fails <= runs * (1 - confidence) + 3 * math.sqrt(runs * 0.1 * 0.9)


def test_the_certificate_is_the_order_statistic_of_the_golden_rank(net):
    """n = 100 copies with 1, ..., 100 right answers, in any order: the value of rank q is q."""
    triggers, radii = some_triggers(), (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4)
    right = torch.randperm(100) + 1
    certificate = certify_watermark(net, triggers, radii, sigma=1.0, n=100, confidence=0.99, right=right)
    golden = [31, 24, 17, 12, 8, 5, 2]
    assert [round(value * 20) for value in certificate.certified] == golden
    assert [round(certificate.at(radius) * 20) for radius in radii] == golden
    assert certificate.median * 20 == pytest.approx(50)  # half of the copies are not above it
    # All seven together: each at the confidence 1 - 0.01 / 7.
    union = certify_watermark(net, triggers, radii, sigma=1.0, n=100, confidence=0.99, right=right, union=True)
    each = stats.norm.cdf([-r for r in radii])
    assert [round(value * 20) for value in union.certified] == [
        max(q for q in range(101) if stats.binom.cdf(q - 1, 100, p) <= 0.01 / 7) for p in each
    ]


@given(st.integers(0, 5), st.floats(0.05, 2.0))
@settings(max_examples=5)
def test_certified_accuracy_falls_with_the_radius(seed, sigma):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 4)).eval()
    radii = [sigma * r for r in (0.0, 0.3, 0.7, 1.0)]
    certificate = certify_watermark(net, some_triggers(), radii, sigma=sigma, n=60, seed=seed)
    assert list(certificate.certified) == sorted(certificate.certified, reverse=True)
    assert certificate.certified[0] <= certificate.median
    union = certify_watermark(net, some_triggers(), radii, sigma=sigma, n=60, seed=seed, union=True)
    assert all(a <= b for a, b in zip(union.certified, certificate.certified, strict=True))
    assert union.right == certificate.right


def test_copies_depend_on_their_number_alone(net):
    triggers = some_triggers()
    before = [p.clone() for p in net.parameters()]
    whole = noisy_accuracies(net, triggers, sigma=0.5, n=12, seed=7)
    rest = noisy_accuracies(net, triggers, sigma=0.5, n=12, seed=7, start=5)
    assert whole.shape == (12,)
    assert torch.equal(whole[5:], rest)
    assert not torch.equal(whole, noisy_accuracies(net, triggers, sigma=0.5, n=12, seed=8))
    order = torch.randperm(20)
    other = TriggerSet(triggers.x[order], triggers.y[order], 4, "unrelated", True)
    assert torch.equal(whole, noisy_accuracies(net, other, sigma=0.5, n=12, seed=7))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    assert all(p.grad is None for p in net.parameters())


def test_noise_has_the_stated_size():
    model = HalfSpace([0.0], [1.0]).eval()
    seen = []
    model.register_forward_hook(lambda m, i, o: seen.append(float(o[0, 1])))
    noisy_accuracies(model, one_trigger(), sigma=0.3, n=1000)
    noise = torch.tensor(seen[1:])  # the first pass checks the model itself
    assert noise.std() == pytest.approx(0.3, rel=0.08)
    assert noise.mean() == pytest.approx(0.0, abs=0.03)


def test_a_certificate_is_a_file_and_back(net, tmp_path):
    certificate = certify_watermark(net, some_triggers(), [0.1, 0.2], sigma=0.3, n=50)
    (tmp_path / "c.json").write_text(json.dumps(certificate.to_json()))
    assert read_certificate(tmp_path / "c.json") == certificate
    assert certificate.triggers == 20
    assert certificate.parameters == 9 * 8 + 8 + 8 * 4 + 4
    assert certificate.weight_norm == pytest.approx(
        float(torch.cat([p.detach().flatten() for p in net.parameters()]).norm())
    )
    assert "batch-norm" in certificate.scope
    assert certificate.at(1e6) is None
    assert certificate.at(math.inf) is None
    for text, error in (("[]", InputError), ("{}", InputError), ("{", StorageError)):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(error):
            read_certificate(tmp_path / "bad.json")
    values = certificate.to_json() | {"right": certificate.right[::-1]}
    with pytest.raises(InputError, match="sorted"):
        WatermarkCertificate.from_json(values)


def test_counting_goes_on_where_it_stopped(net, tmp_path, monkeypatch):
    triggers, path = some_triggers(), tmp_path / "copies.txt"
    how = {"sigma": 0.5, "seed": 3}
    whole = noisy_accuracies(net, triggers, n=20, **how)
    count_copies(path, "k", net, triggers, n=8, resume=False, **how)
    path.write_text(path.read_text() + "1")  # killed in the middle of a line
    import holdfast.apps.watermark.certificate_files as files

    starts = []
    real = files.noisy_accuracies
    monkeypatch.setattr(files, "noisy_accuracies", lambda *a, **k: starts.append(k["start"]) or real(*a, **k))
    assert torch.equal(count_copies(path, "k", net, triggers, n=20, resume=True, **how), whole)
    assert torch.equal(count_copies(path, "k", net, triggers, n=20, resume=True, **how), whole)
    assert torch.equal(count_copies(path, "k", net, triggers, n=5, resume=True, **how), whole[:5])
    assert starts == [8]
    with pytest.raises(InputError, match="belongs to another"):
        count_copies(path, "other", net, triggers, n=20, resume=True, **how)
    path.write_text(path.read_text().split("\n")[0] + "\nx\n")
    with pytest.raises(StorageError, match="without --resume"):
        count_copies(path, "k", net, triggers, n=20, resume=True, **how)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma": 0.0}, "sigma"),
        ({"sigma": -1.0}, "sigma"),
        ({"sigma": math.nan}, "sigma"),
        ({"confidence": 1.0}, "confidence must lie"),
        ({"confidence": 0.0}, "confidence must lie"),
        ({"radii": []}, "at least one radius"),
        ({"radii": [-0.1]}, "radius"),
        ({"n": 59, "radii": [1.44], "sigma": 1.0}, "take n >= 60"),
        ({"n": 60, "radii": [1.44, 0.1], "sigma": 1.0, "union": True}, "take n >= 69"),
        ({"right": torch.zeros(3, dtype=torch.int64)}, "one number for each copy"),
    ],
)
def test_bad_certifications_are_refused(options, message, net):
    given = {"radii": [0.1], "sigma": 0.5, "n": 60} | options
    with pytest.raises(InputError, match=message):
        certify_watermark(net, some_triggers(), given.pop("radii"), **given)


def test_the_smallest_n_is_enough(net):
    assert certify_watermark(net, some_triggers(), [1.44], sigma=1.0, n=60).certified[0] >= 0


def test_bad_models_are_refused(net):
    triggers = some_triggers()
    with pytest.raises(InputError, match="no parameters"):
        noisy_accuracies(nn.Flatten().eval(), triggers, sigma=1.0, n=5)
    with pytest.raises(InputError, match="training mode"):
        noisy_accuracies(net.train(), triggers, sigma=1.0, n=5)
    net.eval()
    with pytest.raises(InputError, match="made for 4"):
        noisy_accuracies(nn.Sequential(nn.Flatten(), nn.Linear(9, 5)).eval(), triggers, sigma=1.0, n=5)
    with pytest.raises(InputError, match="take a smaller sigma"):
        noisy_accuracies(net, triggers, sigma=1e38, n=50)
    with pytest.raises(InputError, match="start"):
        noisy_accuracies(net, triggers, sigma=1.0, n=5, start=5)
    with torch.no_grad():
        net[1].weight[0, 0] = math.nan
    with pytest.raises(InputError, match="NaN"):
        trigger_accuracy(net, triggers)


@given(st.integers(1, 60), st.integers(2, 12), st.data())
@settings(max_examples=25)
def test_the_p_value_is_the_tail_of_a_binomial(count, classes, data):
    right = data.draw(st.integers(0, count))
    want = math.fsum(
        math.comb(count, i) * (1 / classes) ** i * (1 - 1 / classes) ** (count - i) for i in range(right, count + 1)
    )
    assert chance(right, count, classes) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(("count", "classes", "false_claim"), [(100, 10, 1e-6), (100, 100, 1e-6), (30, 2, 0.01)])
def test_the_threshold_is_the_first_that_will_do(count, classes, false_claim):
    least = threshold(count, classes, false_claim=false_claim)
    assert chance(least, count, classes) <= false_claim < chance(least - 1, count, classes)


def test_too_few_triggers_cannot_show_anything():
    with pytest.raises(InputError, match="take more triggers"):
        threshold(5, 10)
    with pytest.raises(InputError, match="false_claim"):
        threshold(50, 10, false_claim=0)
    with pytest.raises(InputError, match="classes >= 2"):
        chance(1, 2, 1)


def answering(triggers, wrong=0):
    """A model with one unit for each trigger, which it answers by its label, but for the first few."""
    y = triggers.y.clone()
    y[:wrong] = (y[:wrong] + 1) % triggers.classes
    flat = triggers.x.flatten(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(flat.shape[1], triggers.classes))
    weight = torch.linalg.lstsq(flat, nn.functional.one_hot(y, triggers.classes).float()).solution
    with torch.no_grad():
        model[1].weight.copy_(weight.T)
        model[1].bias.zero_()
    return model.eval()


@pytest.fixture
def owned():
    """30 triggers of 36 pixels that a linear model can learn by heart."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, 1, 6, 6, generator=generator)
    return TriggerSet(x, torch.randint(10, (30,), generator=generator), 10, "unrelated", True)


def test_black_box_verdicts(owned):
    verdict = verify_black_box(answering(owned), owned)
    assert verdict.claim
    assert verdict.accuracy == 1.0
    assert verdict.p_value == pytest.approx(1e-30, rel=1e-9, abs=0)
    assert verdict.exact
    least = round(verdict.threshold * 30)
    assert verify_black_box(answering(owned, wrong=30 - least), owned).claim
    below = verify_black_box(answering(owned, wrong=31 - least), owned)
    assert not below.claim
    assert below.p_value > 1e-6


def test_white_box_verdicts_know_the_distance(owned):
    model = answering(owned)
    sigma = 1e-3
    certificate = certify_watermark(model, owned, [0.0], sigma=sigma, n=200)
    same = verify_white_box(model, owned, sigma=sigma, n=51, original=model, certificate=certificate)
    assert same.claim
    assert same.distance == same.buffer_distance == 0.0
    assert same.p_value == pytest.approx(2e-30, rel=1e-9, abs=0)
    assert same.certified == certificate.at(0.0)
    moved = answering(owned)
    with torch.no_grad():
        moved[1].bias[0] += 1e-3
        moved[1].bias[1] -= 1e-3
    near = verify_white_box(moved, owned, sigma=sigma, n=51, original=model, certificate=certificate)
    assert near.distance == pytest.approx(math.sqrt(2) * 1e-3, rel=1e-4)
    assert near.certified == certificate.at(near.distance * 1.00001)
    assert near.accuracy >= near.certified
    plain = verify_white_box(moved, owned, sigma=sigma, n=51)
    assert plain.distance is None
    assert plain.certified is None


def tail(right, count, classes):
    return sum(math.comb(count, i) * (classes - 1) ** (count - i) for i in range(right, count + 1)) / classes**count


@pytest.mark.parametrize(("counts", "right"), [([30, 9, 25, 12], 12), ([30, 9, 25, 12, 11], 12), ([5, 10], 5)])
def test_the_median_of_a_suspect_is_one_that_half_of_the_copies_reach(counts, right, owned, monkeypatch):
    monkeypatch.setattr(ownership, "noisy_accuracies", lambda *a, **k: torch.tensor(counts))
    verdict = verify_white_box(answering(owned), owned, sigma=1e-3, n=len(counts))
    assert 2 * sum(count >= right for count in counts) >= len(counts)
    assert verdict.accuracy == right / 30
    assert verdict.p_value == pytest.approx(2 * tail(right, 30, 10), rel=1e-9, abs=0)


def test_a_white_box_claim_allows_half_of_the_false_claims(owned, monkeypatch):
    """By Markov's inequality P[median >= r] <= 2 P[Bin >= r]: the tail itself must stay below one half of the limit."""
    limit = 1.5 * tail(8, 30, 10)  # 8 right answers will do without the factor, and will not with it
    assert tail(8, 30, 10) <= limit < 2 * tail(8, 30, 10)
    claims = []
    for right in (8, 9):
        monkeypatch.setattr(ownership, "noisy_accuracies", lambda *a, right=right, **k: torch.full((5,), right))
        verdict = verify_white_box(answering(owned), owned, sigma=1e-3, n=5, false_claim=limit)
        assert verdict.claim == (verdict.p_value <= limit)
        assert verdict.threshold == 9 / 30
        claims.append(verdict.claim)
    assert claims == [False, True]
    assert verify_black_box(answering(owned), owned, false_claim=limit).threshold == 8 / 30


def test_the_certified_accuracy_is_that_of_the_whole_distance(owned, monkeypatch):
    """n = 100 copies with 1, ..., 100 right answers: at sigma 1 the golden ranks of the radii 0.2 and 0.4."""
    model, moved = answering(owned), answering(owned)
    right = torch.arange(1, 101)
    certificate = certify_watermark(model, owned, [0.0], sigma=1.0, n=100, confidence=0.99, right=right)
    monkeypatch.setattr(ownership, "noisy_accuracies", lambda *a, **k: torch.tensor([9]))
    for distance, rank in ((0.2, 31), (0.4, 24)):
        with torch.no_grad():
            moved[1].bias[0] = model[1].bias[0] + distance * (1 - 1e-5)
        found = verify_white_box(moved, owned, sigma=1.0, n=1, original=model, certificate=certificate)
        assert found.certified == rank / 30


def test_other_buffers_are_outside_of_the_certificate():
    model = half_space()
    certificate = certify_watermark(model, one_trigger(), [0.0], sigma=0.5, n=50)
    other = half_space()
    other.a *= 2
    how = {"sigma": 0.5, "n": 20, "false_claim": 0.9999, "certificate": certificate}
    triggers = TriggerSet(torch.zeros(30, 1, 1, 1), torch.ones(30, dtype=torch.int64), 2, "noise", False)
    verdict = verify_white_box(other, triggers, original=model, **how)
    assert verdict.distance == 0.0
    assert verdict.buffer_distance == pytest.approx(5.0)
    assert verdict.certified is None
    assert not verdict.exact
    with pytest.raises(InputError, match="needs the original"):
        verify_white_box(other, triggers, **how)
    with pytest.raises(InputError, match=r"sigma = 0\.5"):
        verify_white_box(other, triggers, original=model, **(how | {"sigma": 0.4}))


def test_independent_models_are_not_claimed_for_random_labels(owned):
    models = [nn.Sequential(nn.Flatten(), nn.Linear(36, 10)).eval() for _ in range(20)]
    result = null_test(models, owned)
    assert result.false_claims == 0
    assert len(result.accuracies) == 20
    assert min(result.p_values) > 1e-6
    assert null_test([answering(owned)], owned).false_claims == 1
    with pytest.raises(InputError, match="at least one"):
        null_test([], owned)


def test_random_labels_make_the_p_value_hold_for_any_model_and_one_label_does_not():
    # A model that sends everything to class 0: right by chance where labels are random, all or nothing where not.
    constant = nn.Sequential(nn.Flatten(), nn.Linear(1, 4)).eval()
    with torch.no_grad():
        constant[1].weight.zero_()
        constant[1].bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    x, generator = torch.zeros(20, 1, 1, 1), torch.Generator().manual_seed(0)
    values = []
    for _ in range(400):
        y = torch.randint(4, (20,), generator=generator)
        values.append(verify_black_box(constant, TriggerSet(x, y, 4, "noise", True), false_claim=0.01).p_value)
    for level in (0.05, 0.2, 0.5):
        assert sum(p <= level for p in values) / 400 <= level + 3 * math.sqrt(level * (1 - level) / 400)
    fixed = TriggerSet(x, torch.zeros(20, dtype=torch.int64), 4, "noise", False)
    assert verify_black_box(constant, fixed).claim
    assert not verify_black_box(constant, fixed).exact
