"""Is the attack itself to be trusted? Signs that a model resists the attack rather than the adversary.

An input that survives an attack holds, or the attack was misled. A few cheap probes tell these cases apart: Athalye,
Carlini and Wagner, "Obfuscated gradients give a false sense of security", 2018; Carlini et al., "On evaluating
adversarial robustness", 2019; Pintor et al., "Indicators of attack failure: debugging and improving optimization of
adversarial examples", 2022. No sign is a proof in either direction; the certified end of a bracket needs none of them.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from holdfast.attacks.core.auto_pgd import auto_pgd
from holdfast.attacks.core.chance import Steady, is_stochastic, mean_prediction, seeded
from holdfast.attacks.core.gradients import frozen, logits_of, look, masks
from holdfast.attacks.core.losses import cross_entropy, margin
from holdfast.attacks.core.stages import untouched
from holdfast.attacks.core.survivors import broken_by
from holdfast.attacks.square import square
from holdfast.checks import check_task
from holdfast.errors import InputError, UnsupportedError
from holdfast.random import Noise
from holdfast.results import AttackResult
from holdfast.threats import Linf, Threat

Level = Literal["reliable", "suspicious", "unreliable"]

THREATS = ("linf", "l2", "l1")
FEW = 0.02
"""Share of the inputs that chance explains: one of 64, for an attack that is short."""
MANY = 0.1
"""Share of the inputs above which the attack failed, not single inputs."""
UNSTABLE = 0.15
"""Share of the inputs on which two short runs may differ: up to an eighth do for L1 balls around robust models."""
STEPS, POINTS, QUERIES, DRAWS, VOTES = 40, 32, 300, 4, 100
"""Cost of the probes: gradient steps, random points, queries of Square; for a random model, passes averaged, and fresh
passes that confirm an example."""

# Masks that the attacks here see through: a straight-through step, the logits before the softmax, the margin loss.
_SEEN_THROUGH = frozenset({"step-function", "softmax", "saturated-loss"})
_DECISIVE = frozenset(
    {"loss-did-not-rise", "black-box-beats-white-box", "probe-beats-attack", "vanishing-gradients", "huge-budget"}
)


@dataclass(frozen=True)
class Indicator:
    """One sign that an attack cannot be trusted.

    Attributes:
        fired: whether the sign is there.
        value: what was measured, most often a share of the inputs.
        detail: the same in words.
    """

    name: str
    fired: bool
    value: float
    detail: str


class Verdict(NamedTuple):
    """How far the attack can be trusted, and why."""

    level: Level
    reason: str


@torch.no_grad()
def indicators(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    result: AttackResult | None = None,
    *,
    seed: int = 0,
    inputs: int = 64,
) -> tuple[Indicator, ...]:
    """All signs, in a fixed order, from probes on the first inputs that are classified right; see `probe`."""
    return probe(model, x, y, threat, result, seed=seed, inputs=inputs)[0]


@torch.no_grad()
def probe(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    result: AttackResult | None = None,
    *,
    seed: int = 0,
    inputs: int = 64,
) -> tuple[tuple[Indicator, ...], AttackResult]:
    """Probe the first inputs that are classified right: all signs, in a fixed order, and what the probes broke.

    No signs where there is nothing to probe: no such input, or no budget. A model that draws random numbers is probed
    by its mean softmax over a few fixed draws, and what that breaks counts if fresh draws confirm it.

    Args:
        x: inputs in the threat's valid range, shape (B, ...).  y: labels, shape (B,).
        threat: Linf, L2 or L1.
        result: of a finished attack on x, of which `success` is read: the attack in question. Short runs of Auto-PGD
            stand in for it if none is given.
        inputs: how many to probe at most.
    """
    if threat.name not in THREATS:
        raise UnsupportedError(f"the trust in an attack is probed for {', '.join(THREATS)}, not for '{threat}'")
    if inputs < 1:
        raise InputError(f"inputs must be at least 1, got {inputs}")
    if result is not None and len(result.success) != len(x):
        raise InputError(f"the attack's result is for {len(result.success)} inputs, x holds {len(x)}")
    with seeded(seed, x.device):
        check_task(model, x, y, threat)
    by_chance = is_stochastic(model, x)
    steady = Steady(model, DRAWS, seed) if by_chance else model
    right = (steady(x).argmax(1) == y).nonzero()[:inputs, 0]
    examples = untouched(x)
    if len(right) == 0 or threat.budget == 0:
        return (), examples
    x, y, noise = x[right], y[right], Noise(seed, right)
    confirmed = partial(_confirmed, model, seed=seed) if by_chance else _as_found
    runs = [_ascend(steady, x, y, threat, noise.fork(restart), confirmed) for restart in range(2)]
    found = runs[0].broken | runs[1].broken
    broken = found if result is None else result.success[right]
    by_search = _black_box(steady, x, y, threat, broken, noise.fork(2), confirmed)
    signs = (
        _rise(runs),
        _share(
            "black-box-beats-white-box",
            by_search.broken,
            f"the attack left them, {QUERIES} queries of Square broke them",
            FEW,
        ),
        _share("probe-beats-attack", found & ~broken, f"the attack left them, {STEPS} steps of Auto-PGD did not", FEW),
        _vanishing(model, x, y, seed),
        *_masks(model, x, seed),
        _saturated(steady, x, y),
        _huge_budget(steady, x, y, threat, noise.fork(3)),
        _random_noise(steady, x, y, threat, broken, noise.fork(4), confirmed),
        _restarts(runs),
        _flag("stochastic", by_chance, "two passes over the same inputs differ", "two passes give the same"),
    )
    for run in (by_search, *runs):
        at = right[run.broken]
        examples.x_adv[at], examples.success[at] = run.x_adv[run.broken], True
    return signs, replace(examples, by=broken_by("probe", examples.success))


Confirm = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(found, x_adv, y) -> (B,) bool: which of the examples found also fool draws that they were not made for?"""


def _as_found(found: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
    """For a model that draws nothing."""
    del x_adv, y
    return found


def _confirmed(model: nn.Module, found: Tensor, x_adv: Tensor, y: Tensor, *, seed: int) -> Tensor:
    rows, found = found.nonzero()[:, 0], found.clone()
    if len(rows):
        found[rows] = mean_prediction(model, x_adv[rows], VOTES, seed + 1).argmax(1) != y[rows]
    return found


class _Run(NamedTuple):
    x_adv: Tensor  # (B, ...)
    broken: Tensor  # (B,) bool
    rose: Tensor  # (B,) bool: the loss at the end is above the loss at the start, or the input was broken


def _ascend(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, noise: Noise, confirmed: Confirm) -> _Run:
    """Auto-PGD on the margin, which no scale of the logits saturates, from a random point."""
    x_start = threat.random_start(x, noise)
    try:
        run = auto_pgd(model, x, y, threat, x_start, loss=margin, steps=STEPS, name="apgd")
    except (InputError, RuntimeError):  # no gradient at all: what an attack by gradients finds is nothing
        nothing = torch.zeros_like(y, dtype=torch.bool)
        return _Run(x_start, nothing, nothing)
    before, logits = look(model, x_start, y, margin)
    rounding = 1e2 * torch.finfo(logits.dtype).eps * logits.abs().amax(1)
    # A gradient of NaN leads to a point of NaN, which no model gets right.
    broken = run.success & torch.isfinite(run.x_adv).flatten(1).all(1)
    return _Run(run.x_adv, confirmed(broken, run.x_adv, y), broken | (run.loss > before + rounding))


def _share(name: str, hits: Tensor, text: str, above: float) -> Indicator:
    """An indicator that fires where more than the share `above` of the inputs is hit; `hits`: (B,) bool."""
    share = float(hits.double().mean())
    return Indicator(name, share > above, share, f"{int(hits.sum())} of {len(hits)} inputs: {text}")


def _flag(name: str, there: bool, yes: str, no: str) -> Indicator:
    return Indicator(name, there, float(there), yes if there else no)


def _rise(runs: list[_Run]) -> Indicator:
    stuck = ~runs[0].rose & ~runs[1].rose
    return _share("loss-did-not-rise", stuck, "no step of the gradient attack raised its loss", MANY)


def _black_box(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, broken: Tensor, noise: Noise, confirmed: Confirm
) -> _Run:
    """A random search on what the attack left."""
    found, x_adv = torch.zeros_like(broken), x.clone()
    alive = (~broken).nonzero()[:, 0]
    if len(alive):
        search = square(model, x[alive], y[alive], threat, noise=noise[alive], queries=QUERIES)
        found[alive], x_adv[alive] = confirmed(search.success, search.x_adv, y[alive]), search.x_adv
    return _Run(x_adv, found, found)


def _vanishing(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> Indicator:
    """With torch's own gradients of the cross-entropy: what a library without straight-through steps would see."""
    try:
        with frozen(model), torch.enable_grad(), seeded(seed, x.device):
            start = x.clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad(cross_entropy(model(start), y).sum(), start)
    except RuntimeError:  # the answer has no graph that leads back to the input
        gradient = torch.zeros_like(x)
    flat = gradient.flatten(1)
    useless = (flat == 0).all(1) | ~torch.isfinite(flat).all(1)
    return _share("vanishing-gradients", useless, "the gradient of the cross-entropy is zero or not finite", MANY)


def _masks(model: nn.Module, x: Tensor, seed: int) -> tuple[Indicator, Indicator]:
    try:
        with frozen(model), seeded(seed, x.device):
            found = masks(model, x[:1])
    except RuntimeError:  # the model cannot be traced by autograd, and nothing is seen through
        found = set()
    return (
        _flag("step-function", "step" in found, "the model rounds, or takes a floor or a sign", "the model has none"),
        _flag("softmax", "softmax" in found, "the model returns probabilities", "the model returns logits"),
    )


def _saturated(model: nn.Module, x: Tensor, y: Tensor) -> Indicator:
    logits = logits_of(model, x)
    # Beyond this margin the other classes' probabilities, and with them the gradient, are zero or denormal.
    limit = -math.log(torch.finfo(logits.dtype).tiny)
    return _share(
        "saturated-loss", -margin(logits, y) > limit, f"a margin above {limit:.0f}, probability 1 after rounding", MANY
    )


def _huge_budget(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, noise: Noise) -> Indicator:
    """With the range as the only limit all Lp balls are the same set: the box of all valid inputs.

    It asks whether gradients lead anywhere; for that, examples for the draws at hand will do.
    """
    everything = Linf(threat.high - threat.low, low=threat.low, high=threat.high)
    held = ~_ascend(model, x, y, everything, noise, _as_found).broken
    return _share("huge-budget", held, "not broken by gradients with every valid input allowed", MANY)


def _random_noise(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, broken: Tensor, noise: Noise, confirmed: Confirm
) -> Indicator:
    found = torch.zeros_like(broken)
    for number in range(POINTS):
        point = threat.random_start(x, noise.fork(number))
        found |= confirmed(model(point).argmax(1) != y, point, y)
    base = _share("random-noise", found, f"broken by {POINTS} random points; by the attack {int(broken.sum())}", FEW)
    # Where the attack breaks everything, nothing can do better.
    as_well = int(found.sum()) >= int(broken.sum()) and not bool(broken.all())
    return Indicator(base.name, base.fired and as_well, base.value, base.detail)


def _restarts(runs: list[_Run]) -> Indicator:
    return _share(
        "unstable-restarts", runs[0].broken != runs[1].broken, "broken by one of two runs and not the other", UNSTABLE
    )


def _unexplained(fired: set[str]) -> set[str]:
    """Without those that the attacks here see through; a mask that is known also explains gradients that vanish."""
    known = _SEEN_THROUGH | ({"vanishing-gradients"} if fired & _SEEN_THROUGH else set())
    return fired - known


def verdict(indicators: Iterable[Indicator]) -> Verdict:
    """The level and the indicators that decide it.

    "unreliable": the attack fails where another one does not, or cannot have worked. "suspicious": it may have failed,
    or the model holds a mask that these attacks see through and others do not. "reliable": there is no sign against it.
    """
    fired = [indicator.name for indicator in indicators if indicator.fired]
    unexplained = _unexplained(set(fired))
    decisive = [name for name in fired if name in unexplained & _DECISIVE]
    if decisive:
        return Verdict("unreliable", f"fired: {', '.join(decisive)}")
    if fired:
        known = "" if unexplained else "; these attacks see through that"
        return Verdict("suspicious", f"fired: {', '.join(fired)}{known}")
    return Verdict("reliable", "no indicator fired")


def needs_more(indicators: Iterable[Indicator]) -> bool:
    """True if a cheap cascade should go on to the full ensemble: any sign but the masks that it sees through."""
    return bool(_unexplained({i.name for i in indicators if i.fired}) - {"stochastic"})
