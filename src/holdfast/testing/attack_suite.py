"""The contract of an attack, as checks that anyone can run on an attack of their own."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks import attack
from holdfast.errors import HoldfastError
from holdfast.random import Noise
from holdfast.registry import Attack, Method
from holdfast.results import AttackResult
from holdfast.testing.networks import images_task, linear_task
from holdfast.testing.subject import Subject, refuses, require, run_checks, subjects_of, untouched
from holdfast.threats import L1, L2, Box, Linf, Patch, Sparse, Threat


def check_attack(method: str | Method, *, threats: Sequence[Threat] | None = None, **options: Any) -> None:
    """Check that an attack keeps its contract; raise an AssertionError that says which part is broken.

    Example:
        >>> check_attack("fgsm")
    """
    with subjects_of(Attack, method, options, threats=threats, shape=(2, 7, 5)) as subjects:
        first = subjects[0]
        require(first.threat, f"the record of '{first.name}' names no threat, so that no front door can call it.")
        for subject in subjects:
            run_checks("check_attack", subject, ON_EVERY_THREAT)
        run_checks("check_attack", first, ON_ONE_THREAT)


def _attack(
    s: Subject, model: nn.Module, x: Tensor, y: Tensor, threat: Threat | None = None, **more: Any
) -> AttackResult:
    """Through the front door."""
    return attack(model, x, y, threat or s.given, s.name, **s.options | more)


def _direct(s: Subject, model: nn.Module, x: Tensor, y: Tensor) -> AttackResult:
    """The function itself, whose answer the front door has not corrected."""
    given = {**s.options, **({"data": x} if "data" in s.method.options else {})}
    found: AttackResult = s.method.function(model, x, y, s.threat, noise=Noise.for_batch(0, len(x)), **given)
    return found


def returns_a_row_for_each_input(s: Subject) -> None:
    """The result has one row per input: x_adv as x, success bool, gradients and queries int64, a name in `by`."""
    model, x, y = images_task()
    for count in (len(x), 1):
        found = _direct(s, model, x[:count], y[:count])
        require(isinstance(found, AttackResult), f"the function returned {type(found).__name__}, not AttackResult.")
        require(
            found.x_adv.shape == x[:count].shape and found.x_adv.dtype == x.dtype,
            f"x_adv has shape {tuple(found.x_adv.shape)} and {found.x_adv.dtype} for x of {tuple(x[:count].shape)}.",
        )
        for name, dtype in (("success", torch.bool), ("gradients", torch.int64), ("queries", torch.int64)):
            value = getattr(found, name)
            require(value.shape == (count,) and value.dtype == dtype, f"{name} is {value.dtype} {tuple(value.shape)}.")
        require(not found.x_adv.requires_grad, "x_adv still requires a gradient.")
        require([bool(by) for by in found.by] == found.success.tolist(), "`by` names an attack where success is False.")
        require((found.queries >= found.gradients).all(), "`queries` must count the passes of the gradients too.")


def stays_inside_the_threat_set(s: Subject) -> None:
    """Every point that it returns lies in the threat set, whether it is a success or not."""
    model, x, y = images_task()
    x_adv = _direct(s, model, x, y).x_adv
    outside = (~s.given.contains(x_adv, x)).nonzero()[:, 0].tolist()
    require(not outside, f"threat.contains(x_adv, x) is False for the inputs {outside} of images_task().")


def tells_the_truth_about_success(s: Subject) -> None:
    """`success` is True exactly where the model misclassifies x_adv."""
    model, x, y = images_task()
    for threat in (s.given, s.given.budgets(20)[0]):  # at the smaller budget most inputs hold
        found = _direct(replace(s, threat=threat), model, x, y)
        wrong = ((model(found.x_adv).argmax(1) != y) != found.success).nonzero()[:, 0].tolist()
        at = f"inputs {wrong} of images_task() at {threat}"
        require(not wrong, f"model(x_adv).argmax(1) != y contradicts it for {at}.")
    y = torch.where(torch.arange(len(y)) == 0, (y + 1) % 5, y)
    found = _attack(s, model, x, y)
    left = found.by[0] == "clean" and torch.equal(found.x_adv[0], x[0])
    require(left, "an input that is wrong already was attacked.")


def counts_its_work(s: Subject) -> None:
    """An attack whose record says gradients="none" counts none; any other attack counts some."""
    model, x, y = images_task()
    found = _attack(s, model, x, y)
    require((found.queries > 1).all(), "`queries` is 1 for some input, which is the pass of the front door.")
    free = isinstance(s.method, Attack) and s.method.gradients == "none"
    require((found.gradients == 0).all() if free else (found.gradients > 0).all(), f"gradients: {found.gradients}.")


def depends_on_the_seed_only(s: Subject) -> None:
    """The answer for an input follows from the seed and its index, not from the chunk or from the rest of the batch."""
    model, x, y = images_task(batch=20, dtype=torch.float64)
    learns: dict[str, Any] = {"data": x} if "data" in s.method.options else {}
    whole = _attack(s, model, x, y, seed=3)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    others = [(torch.arange(20), _attack(s, model, x, y, seed=3, chunk=7), "with chunk=7")]
    for rows, how in ((order, "in another order"), (torch.tensor([0]), "alone"), (torch.tensor([7]), "alone")):
        others.append((rows, _attack(s, model, x[rows], y[rows], seed=3, index=rows, **learns), how))
    for rows, other, how in others:
        success, gradients, queries = (
            torch.equal(getattr(whole, key)[rows], getattr(other, key)) for key in ("success", "gradients", "queries")
        )
        same = success and torch.allclose(whole.x_adv[rows], other.x_adv, atol=1e-9)
        require(same, f"inputs {rows.tolist()} {how} get another answer than in the whole batch, at seed=3.")
        require(gradients and queries, f"inputs {rows.tolist()} {how} cost another number of passes.")
        require([whole.by[i] for i in rows.tolist()] == list(other.by), f"`by` differs {how}.")


def leaves_everything_as_it_came(s: Subject) -> None:
    """The model, the tensors of the caller and the global random states are left as they were."""
    model, x, y = images_task()
    next(model.parameters()).requires_grad_(False)
    with untouched(model, x, y):
        _direct(s, model, x, y)


def breaks_nothing_at_budget_zero(s: Subject) -> None:
    """At budget zero it returns x, and breaks only what is wrong already."""
    model, x, y = images_task()
    y = torch.where(torch.arange(len(y)) == 3, (y + 1) % 5, y)
    zero: dict[type[Threat], Threat] = {Linf: Linf(0.0), L2: L2(0.0), L1: L1(0.0), Box: Box(torch.zeros(2, 7, 5))}
    if type(s.given) not in zero:
        return
    found = _attack(s, model, x, y, zero[type(s.given)])
    broken = found.success.nonzero()[:, 0].tolist()
    require(broken == [3], f"success is {found.success.tolist()}, only input 3 is wrong.")
    require(torch.equal(found.x_adv, x), "x_adv differs from x.")


def breaks_a_linear_model_at_a_huge_budget(s: Subject) -> None:
    """Against a linear model of two classes with every pixel free, it breaks every input at its default options."""
    model, x, _ = linear_task(2)
    linear: Any = model.linear
    with torch.no_grad():
        linear.weight[0] = torch.linspace(1, 2, 16)
        linear.weight[1] = -linear.weight[0]
        linear.bias.zero_()
        linear.bias[0] = -2 * float(linear.weight[0].sum()) * 0.45
        y = model(x).argmax(1)
    huge: dict[type[Threat], Threat] = {Linf: Linf(1.0), L2: L2(4.0), L1: L1(16.0), Box: Box(torch.ones(1, 4, 4))}
    huge |= {Patch: Patch(4, 4), Sparse: Sparse(16)}
    if type(s.given) in huge:
        found = attack(model, x, y, huge[type(s.given)], s.name)
        require(found.success.all(), f"the inputs {(~found.success).nonzero()[:, 0].tolist()} hold.")


def takes_any_number_of_classes(s: Subject) -> None:
    """It takes 2 to 100 classes, in double precision, and a model of flat inputs where the threat has no shape."""
    tasks = [linear_task(classes, torch.float64) for classes in (2, 3, 10, 100)]
    if isinstance(s.threat, Linf | L2 | L1):
        tasks.append(linear_task(3, shape=(7,)))
    if isinstance(s.threat, Box):
        return
    for model, x, y in tasks:
        found = _attack(s, model, x, y)
        require(found.x_adv.dtype == x.dtype, f"x_adv is {found.x_adv.dtype} for x of {x.dtype}.")
        truth = model(found.x_adv).argmax(1) != y
        require(torch.equal(truth, found.success), f"success is wrong for x of shape {tuple(x.shape)}.")


def refuses_bad_input(s: Subject) -> None:
    """NaN logits, labels out of range, a model in training mode and unknown options are refused with an InputError."""
    model, x, y = linear_task(after=lambda z: z * torch.nan)
    threat = s.threat if not isinstance(s.threat, Box) else Box(torch.full((1, 4, 4), 0.1))
    call = partial(_attack, s, threat=threat)
    refuses(lambda: call(model, x, y), "a model that returns NaN")
    model, x, y = linear_task()
    for label in (-1, 3):
        bad = y.clone()
        bad[2] = label
        refuses(lambda bad=bad: call(model, x, bad), f"the label {label} of three classes")  # type: ignore[misc]
    refuses(lambda: call(model, x + 1, y), "an input outside the valid range")
    refuses(lambda: call(model, x, y, no_such_option=1), "an option that the method does not have")
    refuses(lambda: call(model.train(), x, y), "a model in training mode")


def survives_nan_away_from_the_input(s: Subject) -> None:
    """Where the model returns NaN inside the threat set, it refuses or stays finite and inside."""
    model, x, _ = linear_task(before=lambda x: torch.where(((x - 0.5).abs().amax(1) > 0.02)[:, None], torch.nan, x))
    x = torch.full_like(x, 0.5)
    if isinstance(s.threat, Box):
        return
    try:
        found = _attack(s, model, x, model(x).argmax(1))
    except HoldfastError:
        return
    require(torch.isfinite(found.x_adv).all() and s.given.contains(found.x_adv, x).all(), "x_adv is NaN or outside.")


def says_what_it_needs_of_gradients(s: Subject) -> None:
    """A model without gradients is attacked without any, or refused if the record says gradients="needed"."""
    if isinstance(s.threat, Box) or not isinstance(s.method, Attack):
        return
    for cut in ({"before": lambda x: (8 * x).long().to(x.dtype)}, {"after": Tensor.detach}):
        model, x, y = linear_task(**cut)
        if s.method.gradients == "needed":
            refuses(lambda task=(model, x, y): _attack(s, *task), "a model without gradients")  # type: ignore[misc]
            continue
        found = _attack(s, model, x, y)
        require(torch.equal(model(found.x_adv).argmax(1) != y, found.success), "success is wrong.")
        require(int(found.gradients.sum()) == 0, "it counts gradients that the model does not have.")


def says_whether_it_takes_random_models(s: Subject) -> None:
    """A model that draws random numbers is refused, or attacked reproducibly if the record says stochastic=True."""
    if isinstance(s.threat, Box) or not isinstance(s.method, Attack):
        return
    model, x, y = linear_task(after=lambda z: z + torch.randn_like(z))
    if not s.method.stochastic:
        refuses(lambda: _attack(s, model, x, y), "a model that draws random numbers")
        return
    rand: dict[str, Any] = {"version": "rand"} if "version" in s.method.options else {}
    first, second = (_attack(s, model, x, y, **rand) for _ in range(2))
    require(torch.equal(first.x_adv, second.x_adv), "two calls with the same seed differ.")
    require(s.given.contains(first.x_adv, x).all(), "x_adv is outside the threat set.")


ON_EVERY_THREAT = (
    leaves_everything_as_it_came,
    returns_a_row_for_each_input,
    stays_inside_the_threat_set,
    tells_the_truth_about_success,
    counts_its_work,
    depends_on_the_seed_only,
    breaks_nothing_at_budget_zero,
)
ON_ONE_THREAT = (
    breaks_a_linear_model_at_a_huge_budget,
    takes_any_number_of_classes,
    refuses_bad_input,
    survives_nan_away_from_the_input,
    says_what_it_needs_of_gradients,
    says_whether_it_takes_random_models,
)
