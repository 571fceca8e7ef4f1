"""Signs that an attack cannot be trusted: silent on healthy models, each fired by a model built to fire it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.core.ascent import perturb
from holdfast.attacks.core.indicators import Indicator, indicators, needs_more, verdict
from holdfast.attacks.core.stages import untouched
from holdfast.random import Noise

NAMES = (
    "loss-did-not-rise",
    "black-box-beats-white-box",
    "probe-beats-attack",
    "vanishing-gradients",
    "step-function",
    "softmax",
    "saturated-loss",
    "huge-budget",
    "random-noise",
    "unstable-restarts",
    "stochastic",
)
THREAT = hf.Linf(0.1)


class Then(nn.Module):
    """A network between two functions: what comes before it, and what becomes of its logits."""

    def __init__(self, net, before=lambda x: x, after=lambda z: z):
        super().__init__()
        self.net, self.before, self.after = net, before, after
        self.eval()

    def forward(self, x):
        return self.after(self.net(self.before(x)))


class Reversed(torch.autograd.Function):
    """The identity, with the gradient of its negative."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def train(data, eps):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 4, stride=3), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10)
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    for step in range(120):
        rows = torch.randint(len(data.train), (80,))
        x, y = data.train.x[rows], data.train.y[rows]
        if eps:
            now = hf.Linf(eps * min(1, step / 60))
            x = perturb(net, x, y, now, noise=Noise(step, rows), steps=3, step_size=0.5 * now.eps)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return net.eval()


@pytest.fixture(scope="module")
def data():
    return hf.load_data("mnist-mini")


@pytest.fixture(scope="module")
def nets(data):
    return {"standard": train(data, 0.0), "robust": train(data, 0.1)}


@pytest.fixture
def net(nets):
    return nets["standard"]


@pytest.fixture
def task(data):
    return data.test.x[:40], data.test.y[:40]


def fired(found):
    assert tuple(i.name for i in found) == NAMES
    assert all(math.isfinite(i.value) and i.detail for i in found)
    return {i.name for i in found if i.fired}


@pytest.mark.parametrize("threat", [THREAT, hf.L2(1.0), hf.L1(8.0)], ids=str)
@pytest.mark.parametrize("name", ["standard", "robust"])
def test_healthy_models_fire_nothing(nets, task, name, threat):
    found = indicators(nets[name], *task, threat)
    assert fired(found) == set()
    assert verdict(found) == ("reliable", "no indicator fired")
    assert not needs_more(found)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"before": lambda x: (x * 255).round() / 255}, {"step-function", "vanishing-gradients"}),
        ({"after": lambda z: 1000 * z}, {"saturated-loss", "vanishing-gradients"}),
        ({"after": lambda z: z.softmax(1)}, {"softmax"}),
        ({"after": lambda z: (1000 * z).softmax(1)}, {"softmax", "saturated-loss", "vanishing-gradients"}),
    ],
    ids=["rounded", "scaled", "softmax", "scaled-softmax"],
)
def test_masks_that_the_attacks_see_through_are_suspicious(net, task, model, expected):
    found = indicators(Then(net, **model), *task, THREAT)
    assert fired(found) == expected
    level, reason = verdict(found)
    assert level == "suspicious"
    assert "see through" in reason
    assert not needs_more(found)


def test_noise_on_the_input_is_stochastic_and_repeats(net, task):
    model = Then(net, lambda x: x + 0.03 * torch.randn_like(x))
    state = torch.random.get_rng_state()
    found = indicators(model, *task, hf.L2(0.5))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert fired(found) == {"stochastic"}
    assert verdict(found).level == "suspicious"
    torch.manual_seed(99)
    assert indicators(model, *task, hf.L2(0.5)) == found


def test_examples_for_a_few_draws_are_not_held_against_an_attack_that_averages(net, task):
    """Auto-PGD fits the fixed draws of the probe; fresh draws do not confirm most of what it breaks."""
    x, y = (part[:25] for part in task)
    model = Then(net, lambda x: x + 0.3 * torch.randn_like(x))
    found = hf.attack(model, x, y, hf.Linf(0.05), "eot-pgd", samples=10)
    assert 0 < int(found.success.sum()) < 20
    assert fired(indicators(model, x, y, hf.Linf(0.05), found)) == {"stochastic"}


@pytest.mark.parametrize(
    ("model", "threat", "expected"),
    [
        # Nothing changes until another class comes within one of the label.
        (
            {"after": lambda z: (z - z.amax(1, keepdim=True)).clamp(min=-1)},
            THREAT,
            {"loss-did-not-rise", "vanishing-gradients", "black-box-beats-white-box"},
        ),
        ({"before": Reversed.apply}, THREAT, {"black-box-beats-white-box", "huge-budget"}),
        # A sawtooth: it rises with x at its jumps, and falls everywhere else.
        ({"before": lambda x: x - 2 * torch.remainder(x, 0.02)}, THREAT, {"black-box-beats-white-box"}),
        ({"before": lambda x: x + 0 * x.sqrt()}, hf.L2(1.0), {"vanishing-gradients"}),
        (
            {"before": lambda x: (255 * x).int() / 255},
            THREAT,
            {"vanishing-gradients", "loss-did-not-rise", "black-box-beats-white-box"},
        ),
        ({"after": lambda z: 0 * z + torch.arange(10.0)}, THREAT, {"huge-budget", "loss-did-not-rise"}),
    ],
    ids=["plateau", "reversed", "shattered", "nan", "integers", "blind"],
)
def test_masks_that_stop_the_attacks_are_unreliable(net, task, model, threat, expected):
    x, _ = task
    model = Then(net, **model)
    found = indicators(model, x, model(x).argmax(1), threat)
    assert expected <= fired(found)
    assert verdict(found).level == "unreliable"
    assert needs_more(found)


class Cliff(nn.Module):
    """Two classes that change places at x_0 = 0.5, flat on either side: only luck finds the other side."""

    def forward(self, x):
        height = (1e4 * (x[:, 0] - 0.5)).clamp(-1, 1)
        return torch.stack([-height, height], 1)


def test_luck_in_place_of_gradients():
    """A random start crosses the cliff with probability 1/4, so that two runs differ with 3/8; 32 points all do."""
    x = torch.full((64, 2), 0.45)
    found = {i.name: i for i in indicators(Cliff().eval(), x, torch.zeros(64, dtype=torch.long), THREAT)}
    assert 0.2 < found["unstable-restarts"].value < 0.55
    assert 0.4 < found["loss-did-not-rise"].value < 0.75  # both fail with 9/16
    assert found["random-noise"].value > 0.98
    assert all(found[name].fired for name in ("unstable-restarts", "random-noise", "loss-did-not-rise"))


def test_result_is_the_attack_in_question(net, task):
    """Square beats an attack that found nothing, on a model with honest gradients."""
    x, y = task
    nothing = untouched(x)
    weak = {i.name: i for i in indicators(net, x, y, THREAT, nothing)}
    right = net(x).argmax(1) == y
    assert weak["black-box-beats-white-box"].fired
    assert weak["probe-beats-attack"].fired
    assert f"of {int(right.sum())} inputs" in weak["black-box-beats-white-box"].detail
    assert weak["random-noise"].fired == (weak["random-noise"].value > 0.02)
    everything = replace(nothing, success=torch.ones(len(x), dtype=torch.bool))
    assert fired(indicators(net, x, y, THREAT, everything)) == set()
    strong = hf.attack(net, x, y, THREAT, "apgd-ce")
    assert fired(indicators(net, x, y, THREAT, strong)) == set()


def test_saturated_loss_that_stopped_the_attack_is_unreliable(net, task):
    """PGD on the cross-entropy does not see through it, and neither black box nor noise would tell."""
    x, y = task
    model = Then(net, after=lambda z: 1000 * z)
    saturated = hf.attack(model, x, y, THREAT, "pgd")
    found = indicators(model, x, y, THREAT, saturated)
    assert {"saturated-loss", "probe-beats-attack"} <= fired(found)
    assert verdict(found).level == "unreliable"
    margin = hf.attack(model, x, y, THREAT, "pgd", loss="margin")
    assert verdict(indicators(model, x, y, THREAT, margin)).level == "suspicious"


def test_first_right_inputs_decide_and_nothing_is_left_behind(net, task):
    x, y = task
    right = (net(x).argmax(1) == y).nonzero()[:, 0]
    assert len(right) > 8
    found = indicators(net, x, y, THREAT, inputs=8)
    assert indicators(net, x[: right[7] + 1], y[: right[7] + 1], THREAT) == found
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert not net.training
    assert indicators(net, x, y, THREAT, inputs=8, seed=0) == found


def test_double_precision_and_flat_inputs_and_two_classes():
    torch.manual_seed(0)
    model = nn.Linear(6, 2).double().eval()
    model.weight.data *= 4
    model.bias.data = -model.weight.data.sum(1) / 2
    x = torch.rand(30, 6, dtype=torch.float64)
    for threat in (hf.Linf(0.05), hf.L2(0.1), hf.L1(0.2)):
        assert fired(indicators(model, x, model(x).argmax(1), threat)) == set()
    scaled = Then(model, after=lambda z: 1e5 * z)
    assert "saturated-loss" in fired(indicators(scaled, x, model(x).argmax(1), THREAT))


@pytest.mark.parametrize("case", ["wrong", "no budget"])
def test_nothing_to_attack(case):
    model = nn.Linear(3, 2).eval()
    x = torch.rand(5, 3)
    y = model(x).argmax(1)
    found = indicators(model, x, 1 - y if case == "wrong" else y, hf.Linf(0.0 if case == "no budget" else 0.1))
    assert found == ()
    assert verdict(found).level == "reliable"
    assert not needs_more(found)


def test_bad_arguments_are_refused(net, task):
    x, y = task
    with pytest.raises(hf.UnsupportedError, match="linf, l2, l1, not for 'patch:2x2'"):
        indicators(net, x, y, hf.Patch(2, 2))
    with pytest.raises(hf.InputError, match="inputs must be at least 1, got 0"):
        indicators(net, x, y, THREAT, inputs=0)
    with pytest.raises(hf.InputError, match="for 3 inputs, x holds 40"):
        indicators(net, x, y, THREAT, untouched(x[:3]))
    with pytest.raises(hf.InputError, match="label 19 of input 0"):
        indicators(net, x, y + 10 * (y == y.max()), THREAT)


@pytest.mark.parametrize(
    ("names", "level", "more"),
    [
        ((), "reliable", False),
        (("softmax",), "suspicious", False),
        (("stochastic",), "suspicious", False),
        (("step-function", "vanishing-gradients"), "suspicious", False),
        (("vanishing-gradients",), "unreliable", True),
        (("stochastic", "vanishing-gradients"), "unreliable", True),
        (("random-noise",), "suspicious", True),
        (("unstable-restarts", "softmax"), "suspicious", True),
        (("step-function", "vanishing-gradients", "loss-did-not-rise"), "unreliable", True),
        (("black-box-beats-white-box",), "unreliable", True),
        (("huge-budget",), "unreliable", True),
        (("saturated-loss", "probe-beats-attack"), "unreliable", True),
    ],
)
def test_verdict_follows_from_what_fired(names, level, more):
    found = [Indicator(name, name in names, 0.5, "") for name in NAMES]
    assert verdict(found).level == level
    assert needs_more(found) is more
    decisive = [name for name in names if name in verdict(found).reason]
    assert bool(decisive) == (level != "reliable")
