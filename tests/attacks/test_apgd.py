"""Auto-PGD: the published schedule, the exact worst case of linear models, and the bookkeeping of a run."""

import itertools

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.attacks.apgd import apgd_ce, apgd_ce_dlr, apgd_dlr, apgd_t
from holdfast.attacks.core.auto_pgd import auto_pgd, checkpoints, halves
from holdfast.attacks.core.losses import cross_entropy, margin, targeted_dlr, targeted_margin
from holdfast.errors import InputError
from holdfast.random import Noise

ATTACKS = {"apgd-ce": apgd_ce, "apgd-dlr": apgd_dlr, "apgd-ce-dlr": apgd_ce_dlr, "apgd-t": apgd_t}
BALLS = [hf.Linf(0.06), hf.L2(0.2), hf.L1(0.5), hf.Box(torch.linspace(0, 0.1, 70).view(2, 7, 5))]


def linear(classes=2, size=9, count=40):
    generator = torch.Generator().manual_seed(classes)
    model = nn.Linear(size, classes).double().eval()
    model.weight.data = torch.randn(classes, size, generator=generator, dtype=torch.float64)
    model.bias.data = 0.1 * torch.randn(classes, generator=generator, dtype=torch.float64)
    x = torch.rand(count, size, generator=generator, dtype=torch.float64)  # some values near the ends of the range
    return model, x, model(x).argmax(1).detach()


def task(count=12, dtype=torch.float64):
    model, shape = tiny_nets()["cnn"]
    model = model.to(dtype)
    x = torch.rand(count, *shape, dtype=dtype, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():  # several classes, and inputs near their boundaries
        model[-1].bias -= model(x).mean(0)
    return model, x, model(x).argmax(1).detach()


def worst_gain(threat, x, w):
    """Largest <w, d> over the set with its range, (B,), each threat by its own closed form."""
    room, size = torch.where(w > 0, 1 - x, x), w.abs()
    if threat.name == "linf":
        return (size * room.clamp(max=threat.eps)).sum(1)
    if threat.name == "l1":  # a knapsack: the steepest values first, each up to its room
        size, order = size.sort(1, descending=True)
        room = room.gather(1, order)
        spent = (room.cumsum(1) - room).clamp(max=threat.eps)
        return (size * torch.minimum(room, threat.eps - spent)).sum(1)
    low, high = torch.zeros(len(x), 1).double(), torch.full((len(x), 1), 1e6).double()
    for _ in range(200):  # d = min(s |w|, room) with the s that spends the budget
        s = (low + high) / 2
        over = torch.minimum(s * size, room).norm(dim=1, keepdim=True) > threat.eps
        low, high = torch.where(over, low, s), torch.where(over, s, high)
    return (size * torch.minimum(low * size, room)).sum(1)


def test_the_published_checkpoints():
    assert checkpoints(100) == [22, 41, 57, 70, 80, 87, 93, 99]
    assert checkpoints(20) == [5, 9, 12, 14, 16, 18, 19, 20]
    assert checkpoints(1) == [1]


@pytest.mark.parametrize(
    ("history", "best_before", "halved", "expected"),
    [
        ([0.0, 1.0, 2.0, 3.0, 4.0], 0.0, False, False),  # every step rises
        ([0.0, 1.0, 2.0, 3.0, 2.5], 0.0, False, True),  # three of four: not more than 0.75
        ([0.0, 1.0, 0.5, 0.7, 0.6], 0.0, False, True),  # oscillates
        ([0.0, 1.0, 2.0, 3.0, 4.0], 5.0, False, True),  # rises, but below the best at the last checkpoint
        ([0.0, 1.0, 2.0, 3.0, 4.0], 4.0, False, True),  # equals it: no improvement
        ([0.0, 1.0, 2.0, 3.0, 4.0], 5.0, True, False),  # the same right after a halving: a second chance
        ([0.0, 0.0, 0.0, 0.0, 0.0], 0.0, True, True),  # a plateau does not rise
    ],
)
def test_the_step_size_is_halved_as_published(history, best_before, halved, expected):
    values = torch.tensor(history)
    rises = (values[1:] > values[:-1]).sum()[None]
    best = values.max().clamp(min=best_before)[None]
    answer = halves(rises, 4, best, torch.tensor([best_before]), torch.tensor([halved]), 0.75)
    assert answer.tolist() == [expected]


@pytest.mark.parametrize("threat", [hf.Linf(0.1), hf.L2(0.4), hf.L1(0.8)], ids=str)
def test_the_exact_worst_case_of_a_linear_model(threat):
    model, x, y = linear()
    w = (model.weight[1] - model.weight[0]).detach() * (1 - 2 * y[:, None])
    worst = margin(model(x), y).detach() + worst_gain(threat, x, w)
    x_start = threat.random_start(x, Noise.for_batch(0, len(x)))
    result = auto_pgd(model, x, y, threat, x_start, loss=margin, steps=100, name="run")
    assert torch.equal(result.success, worst > 0)
    held = ~result.success
    assert 3 < int(held.sum()) < 37
    assert torch.allclose(result.loss[held], worst[held], rtol=0, atol=5e-3 * threat.eps)
    assert bool((result.loss <= worst + 1e-9).all())
    assert bool(threat.contains(result.x_adv, x).all())


class Waves(nn.Module):
    """Logits (9, waves of <a, x>): a loss with many maxima that never reaches the other class."""

    def forward(self, x):
        a = torch.tensor([3.0, -5.0, 8.0], dtype=x.dtype)
        return torch.stack([torch.full_like(x[:, 0], 9.0), (a * x).sin().sum(1) + (a * x).sum(1).cos()], 1)


def published_auto_pgd(model, x, eps, norm, steps):
    """Algorithm 1 of Croce and Hein (2020) for one input far from the ends of the range, word for word."""

    def value(point):
        point = point.clone().requires_grad_(True)
        logits = model(point)[0]
        (gradient,) = torch.autograd.grad(logits[1] - logits[0], point)
        return float((logits[1] - logits[0]).detach()), gradient

    def project(point):
        d = point - x
        return x + (d.clamp(-eps, eps) if norm == "linf" else d * min(1.0, eps / float(d.norm().clamp(min=1e-12))))

    def ascent(gradient):
        return gradient.sign() if norm == "linf" else gradient / gradient.norm()

    eta, now, old, last_check, rises, halved, before = 2 * eps, x, x, 0, 0, True, -float("inf")
    best, previous, halvings = (-float("inf"), x, None), float("inf"), 0
    for k in range(steps):
        loss, gradient = value(now)
        best = (loss, now, gradient) if loss > best[0] else best
        rises, previous = rises + (loss > previous), loss
        if k in checkpoints(steps):
            halved = rises <= 0.75 * (k - last_check) or (not halved and best[0] <= before)
            if halved:
                eta, now, gradient, halvings = eta / 2, best[1], best[2], halvings + 1
            before, rises, last_check = best[0], 0, k
        z = project(now + eta * ascent(gradient))
        following = z if k == 0 else project(now + 0.75 * (z - now) + 0.25 * (now - old))
        now, old = following, now
    loss, gradient = value(now)
    return (loss, now, gradient) if loss > best[0] else best, halvings


@pytest.mark.parametrize("threat", [hf.Linf(0.7, low=-9.0, high=9.0), hf.L2(0.9, low=-9.0, high=9.0)], ids=str)
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 30])
def test_steps_are_those_of_the_published_algorithm(steps, threat):
    model, x = Waves().eval(), torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)
    y = torch.zeros(8, dtype=torch.int64)
    result = auto_pgd(model, x, y, threat, x, loss=margin, steps=steps, name="run")
    found = [published_auto_pgd(model, x[i : i + 1], threat.eps, threat.name, steps) for i in range(8)]
    assert steps < 30 or sum(halvings for _, halvings in found) > 8
    assert torch.allclose(result.loss, torch.tensor([best[0] for best, _ in found]).double(), atol=1e-9)
    assert torch.allclose(result.x_adv, torch.cat([best[1] for best, _ in found]), atol=1e-9)


def published_l1_auto_pgd(model, x, eps, low, high, steps):
    """Auto-PGD of Croce and Hein (2021) for l1 and one input: balls of radius 3, 2 and 1 eps, one after the other."""
    start, part = x, 3 * steps // 10
    for factor, count in ((3, part), (2, part), (1, steps - 2 * part)):
        ball = hf.L1(factor * eps, low=low, high=high)
        now = best = ball.project(start, x)
        full = step = factor * eps
        changed, best_loss, every = int((now != x).sum()), -float("inf"), max(4 * count // 100, 1)
        for k in range(count + 1):
            point = now.clone().requires_grad_(True)
            loss = model(point)[0, 1] - model(point)[0, 0]
            (gradient,) = torch.autograd.grad(loss, point)
            if float(loss.detach()) > best_loss:
                best, best_loss, best_gradient = now, float(loss.detach()), gradient
            if k == count:
                break
            if k and k % every == 0:
                sparser = int((best != x).sum()) < 0.95 * changed
                step = full if sparser else max(step / 1.5, full / 10)
                now, gradient = (best, best_gradient) if sparser else (now, gradient)
                changed = int((best != x).sum())
            end = torch.where(gradient > 0, high, low)
            size = torch.where(now == end, 0.0, gradient.abs())
            least = size.flatten().sort(descending=True).values[max(2 * changed // 3, 1) - 1]
            chosen = (size > 0) & (size >= least)
            now = ball.project(now + step * gradient.sign() * chosen / max(int(chosen.sum()), 1), x)
        start = best
    return best, best_loss


class Ripples(nn.Module):
    """As `Waves`, of more values: sparsity needs some."""

    def forward(self, x):
        a = torch.linspace(-6, 7, x.shape[1], dtype=x.dtype)
        return torch.stack([torch.full_like(x[:, 0], 40.0), (a * x).sin().sum(1) + (a * x).sum(1).cos()], 1)


@pytest.mark.parametrize("steps", [1, 5, 20, 60])
def test_l1_steps_are_those_of_the_published_algorithm(steps):
    model, generator = Ripples().eval(), torch.Generator().manual_seed(0)
    x = torch.rand(6, 20, dtype=torch.float64, generator=generator)
    result = auto_pgd(model, x, torch.zeros(6, dtype=torch.int64), hf.L1(0.8), x, loss=margin, steps=steps, name="run")
    found = [published_l1_auto_pgd(model, x[i : i + 1], 0.8, 0.0, 1.0, steps) for i in range(6)]
    assert torch.allclose(result.loss, torch.tensor([loss for _, loss in found]).double(), atol=1e-9)
    assert torch.allclose(result.x_adv, torch.cat([best for best, _ in found]), atol=1e-9)


@pytest.mark.parametrize("threat", BALLS, ids=str)
def test_the_loss_is_the_highest_of_all_iterates(threat):
    model, x, _ = task()
    y = model(x).argmax(1)
    seen = []

    def recorded(logits, y):
        seen.append(cross_entropy(logits, y).detach())
        return cross_entropy(logits, y)

    small = threat.budgets(30)[0]
    result = auto_pgd(model, x, y, small, x, loss=recorded, steps=25, name="run")
    held = ~result.success
    assert int(held.sum()) >= 6
    x, y, seen = x[held], y[held], []
    result = auto_pgd(model, x, y, small, x, loss=recorded, steps=25, name="run")
    last = seen[-12:] if threat.name == "l1" else seen  # L1: 7 and 7 steps on wider balls, then 11
    assert torch.equal(result.loss, torch.stack(last).amax(0))
    assert torch.allclose(cross_entropy(model(result.x_adv), y), result.loss)
    assert bool((result.loss > cross_entropy(model(x), y)).all())
    assert bool(small.contains(result.x_adv, x).all())
    if threat.name != "l1":  # others go on from here, and never lose what was found
        more = auto_pgd(model, x, y, small, result.x_adv, loss=cross_entropy, steps=5, name="run")
        assert bool((more.loss >= result.loss).all())


@pytest.mark.parametrize("classes", [2, 3, 5, 10, 100])
def test_targets_find_all_that_a_linear_model_yields(classes):
    model, x, y = linear(classes)
    threat = hf.Linf(0.05 if classes < 100 else 0.01)
    w = model.weight.detach()[None] - model.weight.detach()[y][:, None]
    gain = torch.stack([worst_gain(threat, x, w[:, k]) for k in range(classes)], 1)
    logits = model(x).detach()
    worst = logits - logits.gather(1, y[:, None]) + gain
    worst = worst.scatter(1, y[:, None], -torch.inf)
    result = apgd_t(model, x, y, threat, steps=20, targets=99)
    assert torch.equal(result.success, worst.amax(1) > 0)
    assert 0 < int(result.success.sum()) < len(x)
    held = ~result.success
    assert result.queries[held].unique().tolist() == [1 + (classes - 1) * 21]
    nine = apgd_t(model, x, y, threat, steps=20)
    assert bool((nine.success <= result.success).all())
    assert nine.queries[~nine.success].unique().tolist() == [1 + min(classes - 1, 9) * 21]


@pytest.mark.parametrize("threat", BALLS, ids=str)
@pytest.mark.parametrize("name", ATTACKS)
def test_the_answer_for_an_input_does_not_depend_on_the_batch(name, threat):
    model, x, y = task(20)
    options = {"steps": 15, "restarts": 2} | ({"targets": 2} if name == "apgd-t" else {})
    noise = Noise(7, torch.arange(20) + 100)
    whole = ATTACKS[name](model, x, y, threat, noise=noise, **options)
    assert 0 < int(whole.success.sum()) < 20
    order = torch.arange(20).flip(0)
    turned = ATTACKS[name](model, x[order], y[order], threat, noise=noise[order], **options)
    assert torch.allclose(turned.x_adv[order], whole.x_adv, atol=1e-9)
    for i in range(0, 20, 3):
        alone = ATTACKS[name](model, x[i : i + 1], y[i : i + 1], threat, noise=noise[i : i + 1], **options)
        assert torch.allclose(alone.x_adv[0], whole.x_adv[i], atol=1e-9)
        assert alone.by[0] == whole.by[i]
        assert bool(whole.by[i]) == bool(whole.success[i])
        assert name == "apgd-ce-dlr" or whole.by[i] in (name, "")
        assert int(alone.gradients[0]) == int(whole.gradients[i])
        assert int(alone.queries[0]) == int(whole.queries[i])


@pytest.mark.parametrize("threat", BALLS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ATTACKS)
def test_points_lie_in_the_set_and_successes_are_misclassified(name, dtype, threat):
    model, x, y = task(dtype=dtype)
    result = ATTACKS[name](model, x, y, threat, steps=12)
    assert result.x_adv.dtype == dtype
    assert bool(threat.contains(result.x_adv, x).all())
    assert torch.equal(model(result.x_adv).argmax(1) != y, result.success)


@pytest.mark.parametrize("threat", [hf.Linf(0.0), hf.L2(0.0), hf.L1(0.0)], ids=str)
@pytest.mark.parametrize("name", ATTACKS)
def test_no_budget_no_change(name, threat):
    model, x, y = task()
    result = ATTACKS[name](model, x, y, threat, steps=5)
    assert not bool(result.success.any())
    assert torch.equal(result.x_adv, x)


@pytest.mark.parametrize(("threat", "stages"), [(hf.Linf(1e-4), 1), (hf.L2(1e-4), 1), (hf.L1(1e-4), 3)], ids=str)
@pytest.mark.parametrize("samples", [1, 3])
def test_counts_are_exact(threat, stages, samples):
    model, x, y = task()
    seen = []
    handle = model.register_forward_hook(lambda *call: seen.append((len(call[2]), call[2].requires_grad)))
    result = apgd_ce(model, x, y, threat, steps=10, restarts=2, samples=samples)
    handle.remove()
    assert not bool(result.success.any())
    assert result.gradients.tolist() == [2 * 10 * samples] * len(x)
    assert result.queries.tolist() == [2 * (10 + stages) * samples] * len(x)
    assert sum(size for size, _ in seen) == int(result.queries.sum())
    assert sum(size for size, with_gradient in seen if with_gradient) == int(result.gradients.sum())


def test_broken_inputs_leave():
    model, x, y = linear()
    result = apgd_ce(model, x, y, hf.Linf(0.9))
    assert bool(result.success.all())
    assert int(result.queries.max()) <= 3


def test_averaging_changes_nothing_for_a_model_without_chance():
    model, x, y = task()
    one = apgd_dlr(model, x, y, hf.Linf(0.05), steps=10)
    four = apgd_dlr(model, x, y, hf.Linf(0.05), steps=10, samples=4)
    assert torch.allclose(one.x_adv, four.x_adv, atol=1e-9)
    assert torch.equal(4 * one.queries, four.queries)


def test_averaging_finds_the_direction_through_noise():
    class Noisy(nn.Module):
        """A linear model whose weights shake so much that one gradient says little."""

        def __init__(self):
            super().__init__()
            self.chance = torch.Generator().manual_seed(0)
            self.register_buffer("weight", torch.tensor([[0.5] * 40, [-0.5] * 40]))

        def forward(self, x):
            return (x - 0.4) @ (self.weight + torch.randn(2, 40, generator=self.chance)).T

    x = torch.full((8, 40), 0.5)
    y = torch.zeros(8, dtype=torch.int64)
    change = []
    for samples in (1, 50):
        model = Noisy().eval()
        x_adv = auto_pgd(model, x, y, hf.L2(0.05), x, loss=margin, steps=5, name="run", samples=samples).x_adv
        change.append(((x_adv - x) @ (model.weight[1] - model.weight[0])).mean())
    full = 0.05 * 40**0.5
    assert float(change[1]) > 0.9 * full
    assert float(change[0]) < 0.7 * full


def test_a_final_softmax_is_seen_through():
    model, x, y = task()
    plain = apgd_ce(model, x, y, hf.Linf(0.03), steps=10)
    masked = apgd_ce(nn.Sequential(model, nn.Softmax(1)).eval(), x, y, hf.Linf(0.03), steps=10)
    assert not bool(plain.success.all())
    assert torch.equal(plain.x_adv, masked.x_adv)


def test_targets_follow_their_inputs_when_the_batch_shrinks():
    model, x, y = linear(5, count=64)
    target = (y + 1 + torch.arange(64) % 4) % 5
    threat = hf.Linf(0.08)
    whole = auto_pgd(model, x, y, threat, x, loss=targeted_dlr, target=target, steps=20, name="run")
    assert 8 < int(whole.success.sum()) < 64
    for i in range(0, 64, 9):
        one = slice(i, i + 1)
        alone = auto_pgd(
            model, x[one], y[one], threat, x[one], loss=targeted_dlr, target=target[one], steps=20, name="run"
        )
        assert torch.allclose(alone.x_adv[0], whole.x_adv[i], atol=1e-9)
        assert torch.allclose(alone.loss[0], whole.loss[i])
    aimed = auto_pgd(model, x, y, hf.Linf(0.01), x, loss=targeted_margin, target=target, steps=20, name="run")
    held = ~aimed.success
    w = (model.weight[target] - model.weight[y]).detach()
    best = targeted_margin(model(x), y, target) + worst_gain(hf.Linf(0.01), x, w)
    assert torch.allclose(aimed.loss[held], best[held])


def test_the_pair_breaks_exactly_what_one_of_its_members_breaks():
    model, x, y = task(40)
    members = [run(model, x, y, hf.L2(0.15), steps=4).success for run in (apgd_ce, apgd_dlr)]
    pair = apgd_ce_dlr(model, x, y, hf.L2(0.15), steps=4)
    assert torch.equal(pair.success, members[0] | members[1])
    assert bool((members[0] != members[1]).any())
    for i, name in enumerate(pair.by):
        assert name == ("apgd-ce" if members[0][i] else "apgd-dlr" if members[1][i] else "")


def test_more_budget_never_breaks_less_of_a_linear_model():
    model, x, y = linear(4)
    broken = [apgd_dlr(model, x, y, hf.L2(eps), steps=30).success for eps in (0.05, 0.1, 0.2, 0.4)]
    assert all(bool((a <= b).all()) for a, b in itertools.pairwise(broken))
    assert int(broken[0].sum()) < int(broken[-1].sum())


@pytest.mark.parametrize("option", [{"steps": 0}, {"restarts": 0}, {"samples": 0}])
@pytest.mark.parametrize("name", ATTACKS)
def test_bad_options_are_refused(name, option):
    model, x, y = linear()
    with pytest.raises(InputError, match="expected an integer >= 1, got 0"):
        hf.attack(model, x, y, hf.Linf(0.1), name, **option)


def test_no_targets_are_refused():
    model, x, y = linear()
    with pytest.raises(InputError, match=r"'targets' .*: expected an integer >= 1, got 0"):
        hf.attack(model, x, y, hf.Linf(0.1), "apgd-t", targets=0)
