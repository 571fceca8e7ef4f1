"""What an audit is asked, checked before any work is done: the model, the inputs, the threats and the plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from torch import Tensor, nn

from holdfast.attacks.core.chance import seeded
from holdfast.attacks.core.nature import Nature, nature_of
from holdfast.audits.bracket import UNPROVABLE
from holdfast.audits.inputs import exact_text, to_model
from holdfast.audits.plan import NO_PROOF, Plan, check_plan, make_plan
from holdfast.certificates import Smoothed
from holdfast.checks import check_inputs, check_labels, check_precision, check_task
from holdfast.errors import InputError, UnsupportedError, argument, either
from holdfast.registry import get
from holdfast.threats import Threat
from holdfast.threats import threat as read_threat
from holdfast.utils.hashes import hash_model, hash_tensors

DRAWS = 100  # passes that make up one prediction of a model that draws random numbers


@dataclass(frozen=True, eq=False)
class Case:
    """A question that can be answered.

    Attributes:
        threats: each at its largest budget.
        nature: what is known of the model.
        plan: the steps.
        named: methods that the user named.
        provable: whether a certificate may fit the model, and one was asked for.
        skipped: why no certificate is run, if one was asked for and none can be.
        settings: what the report and the fingerprint say of the run.
        hashes: sha256 of the model and of the data.
        drawn: how the inputs were chosen, in words; None if the run began with version 0.1.0, which did not say.
    """

    threats: tuple[Threat, ...]
    nature: Nature
    plan: Plan
    named: set[str]
    provable: bool
    skipped: tuple[str, ...]
    settings: dict[str, Any]
    hashes: dict[str, str]
    drawn: str | None

    @property
    def alpha(self) -> float | None:
        """Probability that a proof is wrong, where it is not zero."""
        return self.settings.get("alpha")

    @property
    def fingerprint(self) -> dict[str, Any]:
        """All that decides the results."""
        texts = [exact_text(threat) for threat in self.threats]
        about = {"threats": texts, "finer": self.plan.finer, "holdfast": version("holdfast")}
        drawn = {} if self.drawn is None else {"drawn": self.drawn}
        return {**self.hashes, **about, **self.settings, **drawn}


def make_case(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threats: tuple[Threat, ...],
    *,
    budget: str | float,
    budgets: int,
    attack: str | None,
    certify: str | None,
    attack_options: Mapping[str, Any] | None,
    certify_options: Mapping[str, Any] | None,
    seed: int,
    batch_size: int,
    drawn: str | None,
) -> Case:
    """Check what `audit` is given, find out the nature of the model and make the plan for it."""
    _check_smoothing(model, certify)
    first = to_model(model, x[:batch_size], y[:batch_size])
    unprovable = _unprovable(first[0], certify)
    for threat in threats:
        with seeded(seed, first[0].device):  # what the model draws is put back
            logits = check_task(model, *first, threat)
        check_inputs(x, threat.low, threat.high)
        if threat.budget <= 0:
            raise InputError(f"the threat '{threat}' allows no change at all; give a budget above zero")
    check_labels(y, len(x), logits.shape[1])
    nature = _nature(model, first[0], threats[0])
    if isinstance(model, Smoothed):  # nothing else proves anything about it, and each look costs many passes
        certify = "smoothing" if certify == "auto" else certify
        attack = attack or ("square" if nature.gradients == "none" else "pgd")
    how = {"attack_options": attack_options, "certify_options": certify_options}
    plan = make_plan(budget, nature=nature, attack=attack, certify=certify, earlier=drawn is None, **how)
    if unprovable:
        plan = replace(plan, steps=tuple(step for step in plan.steps if step.stage == "attack"))
    named = {method for method in (attack, certify) if method is not None}
    for threat in threats:
        check_plan(plan, threat, named=named)
    skipped = [f"certify: {NO_PROOF}"] if nature.random and certify is not None else []
    skipped += [UNPROVABLE + unprovable] if unprovable else []
    settings = {
        "plan": plan.name,
        "steps": [step.to_dict() for step in plan.steps],
        "n": len(x),
        "budgets": budgets,
        "seed": seed,
        **_about(nature),
        **_alpha(model, plan),
    }
    hashes = {"model": hash_model(model), "data": hash_tensors({"x": x, "y": y})}
    provable = certify is not None and not skipped
    return Case(threats, nature, plan, named, provable, tuple(skipped), settings, hashes, drawn)


def read_threats(threat: Threat | str | Sequence[Threat | str]) -> tuple[Threat, ...]:
    """The threats, each once."""
    given: list[Any] = list(threat) if isinstance(threat, list | tuple) else [threat]
    found = tuple(read_threat(one) if isinstance(one, str) else one for one in given)
    for i, one in enumerate(found):
        if not isinstance(one, Threat):
            kind = type(one).__name__
            raise InputError(f"threat must be a threat such as hf.Linf(0.1), its text, or several; got {kind}")
        if exact_text(one) in [exact_text(other) for other in found[:i]]:
            raise InputError(f"the threat '{one}' is given twice; give it once")
    if not found:
        raise InputError("give at least one threat, got none")
    return found


def _check_smoothing(model: nn.Module, certify: str | None) -> None:
    if certify is not None and get("certify", certify).smoothed and not isinstance(model, Smoothed):
        raise InputError(
            f"{argument('certify', certify)} proves something about a smoothed classifier, and an attack on the "
            f"model itself does not test it; audit {either('hf.Smoothed(model, sigma)', 'with --sigma')}, with "
            f"{argument('certify', 'smoothing')}"
        )


def _unprovable(x: Tensor, certify: str | None) -> str:
    """Why no certificate fits a model of inputs like x; empty if one may, or none is asked for. Refuses a named one."""
    try:
        check_precision(x)
    except UnsupportedError as error:
        if certify not in (None, "auto"):
            raise UnsupportedError(
                f"{error} An audit with {argument('certify', None)} runs the attacks only."
            ) from error
        return "" if certify is None else str(error)
    return ""


def _nature(model: nn.Module, x: Tensor, threat: Threat) -> Nature:
    """What is known of the model; of a smoothed one, which is a function, what is known of the model inside."""
    if not isinstance(model, Smoothed):
        return nature_of(model, x, low=threat.low, high=threat.high)
    inside = nature_of(model.model, x, low=threat.low, high=threat.high)
    if inside.random:
        raise InputError(
            "the model inside hf.Smoothed draws random numbers of its own: the votes are not those of a function, and "
            "nothing can be proved of them. Audit the model itself, or smooth it without its own randomness."
        )
    return inside if inside.gradients == "none" else Nature()


def _about(nature: Nature) -> dict[str, Any]:
    """Settings that follow from the nature of the model, with sentences for the reader; none for most models."""
    about: dict[str, Any] = {}
    notes = []
    if nature.random:
        about["draws"] = DRAWS
        notes.append(
            f"The model draws random numbers. Its prediction is the class of largest mean softmax over {DRAWS} draws, "
            "which follow from the seed. An input is broken if an example is misclassified in that prediction, with "
            "draws that the attack has not seen. The attacks average over draws."
        )
    if nature.gradients == "none":
        notes.append(
            "The model has no gradient with respect to its input. It was attacked by queries and by examples of a "
            "stand-in; with gradients, more might break."
        )
    if nature.gradients == "useless":
        notes.append(
            "The gradients of the model lead nowhere: they vanish, or no step along them raises the loss. Attacks "
            "without gradients were run beside the others; more might break."
        )
    if notes:
        about |= {"gradients": nature.gradients, "notes": notes}
    return about


def _alpha(model: nn.Module, plan: Plan) -> dict[str, float]:
    """Probability that a proof is wrong, as a setting; none where it is zero."""
    for step in plan.steps:
        if step.stage == "certify" and get("certify", step.method).guarantee == "probabilistic proof":
            alpha = step.options.get("alpha", getattr(model, "alpha", None))
            return {"alpha": alpha} if alpha else {}
    return {}
