"""Each contract suite passes an honest toy, and names the contract that a broken toy breaks."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast import registry
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.results import AttackResult, CertifyResult, Explanation
from holdfast.testing import check_attack, check_bounds, check_certificate, check_explanation, check_objective

FACTS = {"summary": "a toy", "reference": "none"}


def toy_attack(model, x, y, threat, *, noise: Noise, steps: int = 3):
    """Some steps along the sign of the gradient of the margin, and the best point of them."""
    best, found, spent = x.clone(), torch.zeros(len(x), dtype=torch.bool), torch.zeros(len(x), dtype=torch.int64)
    point = x.clone()
    for _ in range(steps):
        point = point.detach().requires_grad_(True)
        logits = model(point)
        others = logits.scatter(1, y[:, None], -torch.inf).amax(1)
        loss = (others - logits.gather(1, y[:, None])[:, 0]).sum()
        gradient = torch.autograd.grad(loss, point, allow_unused=True)[0] if loss.requires_grad else None
        if gradient is None:
            raise InputError("the model has no gradient")
        point = threat.project(point.detach() + threat.budget * gradient.sign(), x)
        with torch.no_grad():
            broken = model(point).argmax(1) != y
        best = torch.where((found | ~broken).view(-1, *[1] * (x.ndim - 1)), best, point)
        spent, found = spent + 1, found | broken
    return AttackResult(best, found, tuple("toy" if f else "" for f in found.tolist()), spent, 2 * spent)


TOY = registry.Attack("toy", **FACTS, threats=("linf",), function=toy_attack)


def with_function(record, change):
    """The record, whose function's answer `change` makes worse."""

    def function(model, x, y, threat, *, noise: Noise, steps: int = 3):
        return change(model, x, y, toy_attack(model, x, y, threat, noise=noise, steps=steps))

    return replace(record, function=function)


def test_an_honest_attack_passes_and_is_not_registered_afterwards():
    check_attack(TOY)
    with pytest.raises(InputError, match="unknown attack method 'toy'"):
        check_attack("toy")


def outside(model, x, y, found):
    return replace(found, x_adv=found.x_adv + 0.5)


def seeded(model, x, y, found):
    torch.manual_seed(0)
    return found


def lies(model, x, y, found):
    return replace(found, success=torch.ones_like(found.success), by=("toy",) * len(x))


def by_the_batch(model, x, y, found):
    if len(x) > 1:
        return found
    return replace(found, x_adv=x, success=torch.zeros_like(found.success), by=("",))


def narrow(model, x, y, found):
    return replace(found, x_adv=found.x_adv.half())


def trained(model, x, y, found):
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    return found


def hooked(model, x, y, found):
    model.register_forward_hook(lambda *_: None)
    return found


def writes(model, x, y, found):
    x.add_(0.01)
    return found


def free_of_charge(model, x, y, found):
    return replace(found, gradients=0 * found.gradients)


@pytest.mark.parametrize(
    ("change", "contract"),
    [
        (outside, "Every point that it returns lies in the threat set"),
        (seeded, "torch's global random state"),
        (lies, "True exactly where the model misclassifies"),
        (by_the_batch, "follows from the seed and its index"),
        (narrow, "x_adv has shape .* torch.float16"),
        (trained, "weight or a buffer of the model"),
        (hooked, "the hooks of a module"),
        (writes, "a tensor of the caller|lies in the threat set"),
        (free_of_charge, 'gradients="none" counts none'),
    ],
)
def test_a_broken_attack_is_told_what_it_breaks(change, contract):
    with pytest.raises(AssertionError, match=f"attack method 'toy' .*breaks a contract.*({contract}).*check_attack"):
        check_attack(with_function(TOY, change))


def test_an_attack_that_finds_nothing_is_caught():
    def idle(model, x, y, threat, *, noise: Noise):
        count = torch.ones(len(x), dtype=torch.int64)
        return AttackResult(x.clone(), torch.zeros(len(x), dtype=torch.bool), ("",) * len(x), count, count)

    with pytest.raises(AssertionError, match="Against a linear model of two classes"):
        check_attack(replace(TOY, function=idle))


def proof(margin):
    return CertifyResult(margin > 0, margin, by=tuple("toy" if m > 0 else "" for m in margin.tolist()))


def toy_certificate(model, x, y, threat, *, sound: bool = True):
    return proof(hf.certify(model, x, y, threat, "ibp", sound=sound).margin)


CERTIFICATE = registry.Certificate("toy", **FACTS, threats=("linf",), function=toy_certificate)


def test_an_honest_certificate_passes():
    check_certificate(CERTIFICATE)


def test_a_certificate_that_ignores_sound_is_caught_by_the_rounding_oracle():
    def function(model, x, y, threat, *, sound: bool = True):
        return toy_certificate(model, x, y, threat, sound=False)

    with pytest.raises(AssertionError, match=r"certify method 'toy'.*rounding is not accounted for"):
        check_certificate(replace(CERTIFICATE, function=function))


def test_a_certificate_that_ignores_sound_is_caught_at_every_threat():
    for threat in ("l2", "l1", "box", "patch", "sparse"):

        def function(model, x, y, threat, *, sound: bool = True):
            return toy_certificate(model, x, y, threat, sound=False)

        with pytest.raises(AssertionError, match="rounding is not accounted for"):
            check_certificate(replace(CERTIFICATE, threats=(threat,), function=function))


def always(model, x, y, threat):
    return proof(torch.ones(len(x)))


def always_by_a_hair(model, x, y, threat):
    return proof(torch.full((len(x),), 1e-30))


def clean(model, x, y, threat):
    """The margin at x, which says nothing of the other points."""
    z = model(x)
    return proof((z.gather(1, y[:, None]) - z.scatter(1, y[:, None], -torch.inf).amax(1, keepdim=True))[:, 0] - 1e-6)


def short(model, x, y, threat):
    found = toy_certificate(model, x, y, threat)
    return replace(found, by=found.by[:1])


@pytest.mark.parametrize(
    ("function", "contract"),
    [
        (always, "SoundnessError|proved|clean margin"),
        (always_by_a_hair, "SoundnessError|breaks the certified inputs"),
        (clean, "breaks the certified inputs"),
        (short, "one row per input"),
    ],
)
def test_a_certificate_that_proves_too_much_is_caught(function, contract):
    with pytest.raises(AssertionError, match=f"breaks a contract.*({contract})"):
        check_certificate(replace(CERTIFICATE, function=function))


def test_a_smoothed_certificate_that_always_proves_is_caught():
    with pytest.raises(AssertionError, match="certified for two classes"):
        check_certificate(replace(CERTIFICATE, function=always, smoothed=True))


def test_bounds_that_do_not_contain_the_logits_are_caught():
    def narrow(model, x, threat, *, sound: bool = True):
        found = hf.bounds(model, x, threat, "ibp", sound=sound)
        middle = (found.lower + found.upper) / 2
        return hf.Bounds(middle, middle)

    def unsound(model, x, threat, *, sound: bool = True):
        return hf.bounds(model, x, threat, "ibp", sound=False)

    record = registry.Bound("toy", **FACTS, threats=("linf",))
    for function, contract in ((narrow, "logits outside"), (unsound, "leaves its bounds at the pixel")):
        with pytest.raises(AssertionError, match=contract):
            check_bounds(replace(record, function=function))


def toy_objective(model, x, y, context):
    logits = model(x)
    return cross_entropy(logits, y), {"accuracy": (logits.argmax(1) == y).float().mean()}


OBJECTIVE = registry.Objective("toy", **FACTS, function=toy_objective)


def not_a_number(model, x, y, context):
    loss, metrics = toy_objective(model, x, y, context)
    return loss * torch.nan, metrics


def moves_the_weights(model, x, y, context):
    loss, metrics = toy_objective(model, x, y, context)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.01)
    return loss, metrics


def steps_by_itself(model, x, y, context):
    toy_objective(model, x, y, context)[0].backward()
    return toy_objective(model, x, y, context)


def without_gradient(model, x, y, context):
    loss, metrics = toy_objective(model, x, y, context)
    return loss.detach(), metrics


def draws(model, x, y, context):
    return toy_objective(model, x + 0.01 * torch.randn_like(x), y, context)


def one_by_one(model, x, y, context):
    return cross_entropy(model(x), y, reduction="none"), {}


@pytest.mark.parametrize(
    ("function", "contract"),
    [
        (not_a_number, "the loss is nan"),
        (moves_the_weights, "changed the weights by itself"),
        (steps_by_itself, "the gradient of a parameter"),
        (without_gradient, "no gradient"),
        (draws, "torch's global random state"),
        (one_by_one, "must be a scalar"),
    ],
)
def test_a_broken_objective_is_told_what_it_breaks(function, contract):
    check_objective(OBJECTIVE)
    with pytest.raises(AssertionError, match=f"train method 'toy'.*breaks a contract.*({contract})"):
        check_objective(replace(OBJECTIVE, function=function))


def toy_explanation(model, x, y, setting):
    point = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(model(point).gather(1, y[:, None]).sum(), point)
    ones = torch.ones(len(x))
    return Explanation(gradient, ones.bool(), torch.nan * ones, ones.long(), ("toy",) * len(x))


def flat(model, x, y, setting):
    found = toy_explanation(model, x, y, setting)
    return replace(found, attribution=found.attribution.flatten(1))


def random_shares(model, x, y, setting):
    found = toy_explanation(model, x, y, setting)
    return replace(found, attribution=torch.rand(x.shape, generator=torch.Generator().manual_seed(len(x))))


def trains_the_model(model, x, y, setting):
    model.train()
    return toy_explanation(model, x, y, setting)


@pytest.mark.parametrize(
    ("function", "contract"),
    [(flat, "attribution has shape"), (random_shares, "differs"), (trains_the_model, "the mode of a module")],
)
def test_a_broken_explanation_is_told_what_it_breaks(function, contract):
    record = registry.Explainer("toy", **FACTS, function=toy_explanation)
    check_explanation(record)
    with pytest.raises(AssertionError, match=f"explain method 'toy' breaks a contract.*({contract})"):
        check_explanation(replace(record, function=function))


def test_an_option_without_a_type_is_refused():
    def untyped(model, x, y, threat, *, noise: Noise, steps=3): ...

    with pytest.raises(InputError, match="the option 'steps' of the function untyped has no type"):
        check_attack(replace(TOY, function=untyped))


def test_a_record_of_another_kind_is_refused():
    with pytest.raises(InputError, match="expected the name or the record of a method of kind 'attack'"):
        check_attack(CERTIFICATE)
