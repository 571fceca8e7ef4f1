"""The contract of a certificate, as checks that anyone can run on a certificate of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks import attack
from holdfast.attacks.core.losses import margin as excess
from holdfast.certificates import certify
from holdfast.errors import HoldfastError, SoundnessError, UnsupportedError
from holdfast.registry import Certificate, Method, methods
from holdfast.results import CertifyResult
from holdfast.testing.bounds_suite import CHAIN, sample
from holdfast.testing.networks import Task, chain_task, images_task
from holdfast.testing.subject import Subject, refuses, require, run_checks, short_options, subjects_of, untouched
from holdfast.testing.traps import THREATS, Trap, some_traps
from holdfast.threats import Threat

ATTACKS = ("pgd", "apgd-dlr", "multi-targeted", "fab", "patch-pgd", "sparse-pgd", "sparse-rs")
"""A strong few, at least one for each threat."""


@dataclass(frozen=True, eq=False)
class Claim(Subject):
    """A certificate under test, and the architecture that it needs."""

    attacks: tuple[str, ...] = ATTACKS

    @property
    def record(self) -> Certificate:
        """The record as a certificate."""
        assert isinstance(self.method, Certificate)
        return self.method

    def task(self, **how: Any) -> Task:
        """A model of the kind that the certificate is made for, inputs and labels."""
        return chain_task(CHAIN, architecture=self.record.needs, **how)


def check_certificate(
    method: str | Method, *, threats: Sequence[Threat] | None = None, attacks: Sequence[str] = ATTACKS, **options: Any
) -> None:
    """Check that a certificate keeps its contract; raise an AssertionError that says which part is broken.

    Attacks try to break what it proves, and a rounding oracle offers networks that fail by a hair, with weights from
    1e-30 to 1e30. A certificate whose record `needs` an architecture meets a model of that architecture. It meets those
    of the `attacks` that handle the threat.

    Example:
        >>> check_certificate("patch")
    """
    with subjects_of(Certificate, method, options, threats=threats, shape=CHAIN, scale=0.1) as subjects:
        for s in subjects:
            run_checks("check_certificate", Claim(s.method, s.threat, s.options, tuple(attacks)), CHECKS)


ENOUGH = 30.0
"""Seconds in which a search on a tiny network ends by itself, also on a busy machine, so that no clock decides."""


def _certify(
    s: Claim, model: nn.Module, x: Tensor, y: Tensor, threat: Threat | None = None, **more: Any
) -> CertifyResult:
    return certify(model, x, y, threat or s.given, s.name, **s.options | more)


def returns_a_row_for_each_input(s: Claim) -> None:
    """The result has one row per input: certified bool, margin of the dtype of x, a name in `by` where it is proved."""
    model, x, y = s.task()
    for count in (len(x), 1):
        found = _certify(s, model, x[:count], y[:count])
        require(isinstance(found, CertifyResult), f"the function returned {type(found).__name__}, not CertifyResult.")
        for name, wanted in (
            ("certified", found.certified.dtype == torch.bool),
            ("margin", found.margin.is_floating_point()),
        ):
            value = getattr(found, name)
            require(wanted and value.shape == (count,), f"{name} is {value.dtype} {tuple(value.shape)}.")
        require(found.radius is None or found.radius.shape == (count,), "radius must be None or of shape (B,).")
        broken = torch.zeros_like(found.certified)
        if found.x_adv is not None:
            require(found.x_adv.shape == x[:count].shape, f"x_adv has the shape {tuple(found.x_adv.shape)}.")
            broken = (found.x_adv != x[:count]).flatten(1).any(1)
        named = [bool(by) for by in found.by]
        require(named == (found.certified | broken).tolist(), "`by` must name the certificate where it decides.")
        fits = 0 < found.alpha < 1 if s.record.guarantee == "probabilistic proof" else found.alpha == 0
        require(fits, f"alpha is {found.alpha} for a {s.record.guarantee}.")
        require(s.record.smoothed or (found.certified <= (found.margin > 0)).all(), "certified with a margin <= 0.")


def proves_nothing_that_is_wrong(s: Claim) -> None:
    """An input that the model puts into another class than y is not certified, and no input for two classes."""
    model, x, y = s.task()
    proved = torch.stack([_certify(s, model, x, torch.full_like(y, label)).certified for label in range(3)], 1)
    require((proved.sum(1) <= 1).all(), "an input of chain_task() is certified for two classes.")
    right = s.record.smoothed or not (proved & (torch.arange(3) != y[:, None])).any()
    require(right, "an input of chain_task() is certified for a class that it does not have.")


def stays_below_the_clean_margin(s: Claim) -> None:
    """The margin that the function returns is at most the margin at x, which lies in the threat set."""
    if s.record.smoothed or s.record.own_margin:
        return
    model, x, y = s.task()
    with torch.no_grad():
        found = s.method.function(model, x, y, s.threat, **s.options).margin
        clean = -excess(model(x), y)
    require((found <= clean).all(), f"the margin exceeds the clean one by {float((found - clean).max()):.3g}.")


def breaks_what_it_says_it_breaks(s: Claim) -> None:
    """A counter-example that it returns lies in the threat set, and the model misclassifies it."""
    model, x, y = s.task()
    found = _certify(s, model, x, y).x_adv
    if found is None:
        return
    moved = (found != x).flatten(1).any(1)
    with torch.no_grad():
        wrong = model(found).argmax(1) != y
    require((wrong | ~moved).all(), "a counter-example in x_adv is classified right.")
    require(s.given.contains(found, x).all(), "a counter-example in x_adv is outside the threat set.")


def is_never_broken(s: Claim) -> None:
    """No attack and no sampled point breaks an input that it certifies."""
    tasks = [s.task()] if s.record.needs else [s.task(), images_task()]
    if s.record.smoothed:
        return
    for i, (model, x, y) in enumerate(tasks):
        try:
            proved = _certify(s, model, x, y).certified
        except UnsupportedError:
            require(i > 0, "it refuses a chain of dense layers and ReLUs, chain_task().")
            continue
        for how, broken in _breaks(s, model, x, y):
            both = (proved & broken).nonzero()[:, 0].tolist()
            require(not both, f"{how} breaks the certified inputs {both} of {('chain_task', 'images_task')[i]}().")


def _breaks(s: Claim, model: nn.Module, x: Tensor, y: Tensor) -> list[tuple[str, Tensor]]:
    """What breaks which inputs: names of attacks and (B,) bool each."""
    found = [
        (f"attack '{entry.name}'", attack(model, x, y, s.given, entry.name, **short_options(entry)).success)
        for entry in methods("attack")
        if entry.name in s.attacks and s.given.name in entry.threats
    ]
    with torch.no_grad():
        points = [model(point).argmax(1) != y for point in sample(s.given, x)]
    return [*found, ("a point of the threat set", torch.stack(points).any(0))]


def agrees_with_its_neighbours(s: Claim) -> None:
    """Two inputs of one threat set are never certified for different classes, smoothed models included."""
    model, x, y = s.task()
    near, proved = sample(s.given, x, 1)[-1], _certify(s, model, x, y).certified
    for label in range(3):
        other = torch.full_like(y, label)
        both = proved & _certify(s, model, near, other).certified & (other != y)
        require(not both.any(), f"x is certified for {y[both].tolist()}, a point of its set for {label}.")


def depends_on_no_chunk(s: Claim) -> None:
    """The answer for an input does not depend on the chunk; with the same options it is the same again."""
    model, x, y = s.task(batch=7)
    enough: dict[str, Any] = {"time_limit": ENOUGH} if "time_limit" in s.options else {}
    whole, pieces, again = (_certify(s, model, x, y, chunk=chunk, **enough) for chunk in (256, 3, 256))
    require(torch.equal(whole.margin, again.margin), "two calls with the same options differ.")
    require(torch.allclose(whole.margin, pieces.margin, atol=1e-5), "margins differ with chunk=3.")


def leaves_everything_as_it_came(s: Claim) -> None:
    """The model, the tensors of the caller and the global random states are left as they were."""
    model, x, y = s.task()
    with untouched(model, x, y), torch.no_grad():
        s.method.function(model, x, y, s.threat, **s.options)


def refuses_bad_input(s: Claim) -> None:
    """NaN, labels out of range, half precision, a model in training mode and unknown options are refused."""
    model, x, y = s.task()
    refuses(lambda: _certify(s, model, x * torch.nan, y), "an input with NaN")
    refuses(lambda: _certify(s, model, x, y + 3), "a label out of range")
    refuses(lambda: _certify(s, model, x, y, no_such_option=1), "an option that the method does not have")
    refuses(lambda: _certify(s, model.half(), x.half(), y), "half precision", UnsupportedError)
    refuses(lambda: _certify(s, model.float().train(), x, y), "a model in training mode")


def survives_the_rounding_oracle(s: Claim) -> None:
    """At its default, sound=True, it proves no network that fails by a hair, as run or in rational arithmetic."""
    if s.record.smoothed or s.record.needs or s.given.name not in THREATS:
        return
    for dtype in (torch.float32, torch.float64):
        proved, met = falsely_proved(s, some_traps(s.given.name, dtype, s.given.name == s.method.threats[0]))
        require(met > 5, f"it refused all but {met} networks of holdfast.testing.traps in {dtype}.")
        require(
            not proved,
            f"it proves {len(proved)} of {met} networks of holdfast.testing.traps in {dtype} that fail within the "
            f"threat set, first {proved[:1]}: rounding is not accounted for.",
        )


def falsely_proved(s: Claim, found: Sequence[Trap], **options: Any) -> tuple[list[str], int]:
    """Names of the networks that the certificate proves although they fail, and how many it did not refuse."""
    wrong, met = [], 0
    for one in found:
        try:
            proved = bool(_certify(s, one.model, one.x, one.y, THREATS[s.given.name], **options).certified)
        except SoundnessError:  # a proof that the front door catches is wrong all the same
            proved = True
        except HoldfastError:  # refusing is sound
            continue
        met += 1
        if proved:
            wrong.append(one.name)
    return wrong, met


CHECKS = (
    leaves_everything_as_it_came,
    returns_a_row_for_each_input,
    proves_nothing_that_is_wrong,
    stays_below_the_clean_margin,
    breaks_what_it_says_it_breaks,
    is_never_broken,
    agrees_with_its_neighbours,
    depends_on_no_chunk,
    refuses_bad_input,
    survives_the_rounding_oracle,
)
