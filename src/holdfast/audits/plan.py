"""What an audit runs, from cheap to costly, and how long it may take."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from holdfast.attacks import attack as run_attack
from holdfast.attacks.core.nature import Nature
from holdfast.certificates import certify as run_certify
from holdfast.errors import InputError, UnsupportedError, argument
from holdfast.registry import get, methods
from holdfast.threats import Threat

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_OURS = ("model", "x", "y", "threat", "method", "seed", "index", "sound", "data")
LARGEST = 100_000  # hidden values of a network up to which linear bounds pay: about a quarter of a minute per input
SMALL = 5_000  # hidden values at which they take a hundred inputs at a time; fewer for larger networks, for the memory
PROGRAM = 20_000  # hidden values up to which a complete search can end: a program takes 500 unstable ones
FEW = 12  # input values up to which splitting inputs pays
GROUP = 8  # inputs of a complete search that are worked on, and stored, at a time
SHORT, LONG, LONGEST = 2.0, 60.0, 600.0  # seconds for each input of a complete search
AT_ONCE = (
    5_000_000  # hidden values worked on at a time where time is short: one look of an attack takes a second or two
)


@dataclass(frozen=True)
class Step:
    """One certificate or one attack.

    Attributes:
        stage: which of the two.
        method: registered name.
        options: options of the method.
        batch: the most inputs to give it at a time, where it is slow.
        threats: run it for these only; empty for all that it handles.
        fine: look for radii on the finer grid.
        square: its cost grows with the square of the hidden values of a network, as the cost of linear bounds does.
        largest: hidden values of a network up to which a step that is `square` pays.
        widest: input values up to which it pays; None for any number.
    """

    stage: Literal["certify", "attack"]
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: int | None = None
    threats: tuple[str, ...] = ()
    fine: bool = False
    square: bool = False
    largest: int = LARGEST
    widest: int | None = None

    def fits(self, threat: Threat) -> bool:
        """Whether it is run for the threat."""
        return threat.name in (self.threats or get(self.stage, self.method).threats)

    @property
    def name(self) -> str:
        """As tables and bars call it."""
        return f"{self.stage} {self.method}"

    @property
    def complete(self) -> bool:
        """Whether it decides every input, given time: the largest budget and the most promising inputs come first."""
        return self.stage == "certify" and get("certify", self.method).complete

    @property
    def settles_all_levels(self) -> bool:
        """Whether one look at the largest level settles the smaller ones too: a certificate that samples does."""
        return self.stage == "certify" and "radii" in get("certify", self.method).options

    def at_once(self, hidden: int) -> int | None:
        """Most inputs to give it at a time, for a network with `hidden` hidden values."""
        if not self.square:
            return self.batch or (GROUP if self.complete else None)
        return min(self.batch or 100, max(1, int(100 * (SMALL / max(hidden, 1)) ** 2)))

    def to_dict(self) -> dict[str, Any]:
        """For files; options in one order, so that the same plan gives the same bytes."""
        return {"stage": self.stage, "method": self.method, "options": dict(sorted(self.options.items()))}


@dataclass(frozen=True)
class Plan:
    """The steps of an audit, each on the inputs that the steps before it left undecided.

    Attributes:
        name: as it was asked for.
        steps: from cheap to costly.
        finer: grid refinement: radii are searched on `finer` levels for each reported budget.
        seconds: time limit, or None.
    """

    name: str
    steps: tuple[Step, ...]
    finer: int
    seconds: float | None = None

    def tests(self, number: int, threat: Threat) -> bool:
        """Whether the step of this number, from 1, is the first attack on the threat: it tests the certificates."""
        attacks = [i for i, step in enumerate(self.steps, 1) if step.stage == "attack" and step.fits(threat)]
        return attacks[:1] == [number]


def _search(method: str, seconds: float, **more: Any) -> Step:
    """A complete search of so many seconds for each input."""
    options = {"time_limit": seconds, **more.pop("options", {})}
    return Step("certify", method, options, batch=GROUP, square=True, largest=PROGRAM, **more)


_BALLS = ("linf", "l2", "l1", "box")
_PROOFS = (
    Step("certify", "auto", {"tight": False}, threats=_BALLS, fine=True),
    Step("certify", "patch", {"early": True}),
    Step("certify", "sparse"),
)
_CHEAP = (
    *_PROOFS,
    Step("attack", "pgd", {"loss": "margin", "steps": 20}, threats=_BALLS),
    Step("attack", "patch-pgd", {"steps": 20, "step_size": 0.1, "restarts": 8, "probes": 64}),
    Step("attack", "sparse-pgd", {"restarts": 1}),
)
_FULL = (
    *_CHEAP,
    Step("certify", "auto", {"time_limit": 0.0}, threats=_BALLS, square=True),
    Step("attack", "cascade", threats=_BALLS),
    Step("attack", "patch-pgd", {"steps": 40, "restarts": 10, "probes": 256}),
    Step("attack", "sparse-rs", {"queries": 500}),
    _search("input-split", SHORT, widest=FEW),
    _search("beta-crown", SHORT, threats=_BALLS),
)
_COSTLY = (
    Step("attack", "cascade", threats=("patch", "sparse")),
    Step("certify", "auto", {"time_limit": 0.0}, threats=("patch", "sparse"), square=True),
    Step("attack", "autoattack"),
    _search("milp", 20.0, options={"max_binaries": 500}),
    _search("beta-crown", LONG, threats=_BALLS),
)
PLANS = {
    "quick": Plan(
        "quick",
        (*_CHEAP, Step("attack", "cascade", {"steps": 10, "targets": 1, "queries": 100}, threats=_BALLS)),
        finer=1,
    ),
    "standard": Plan("standard", _FULL, finer=2),
    "thorough": Plan("thorough", (*_FULL, *_COSTLY), finer=4),
}
# Attacks on a model that draws random numbers: they average over draws.
_EOT = Step("attack", "eot-pgd")
_LONG_EOT = Step("attack", "eot-pgd", {"average": "outputs", "steps": 40, "restarts": 2, "momentum": 0.75})
_PIXELS = Step("attack", "cascade", threats=("patch", "sparse"))
_BY_DRAWS: dict[str, tuple[Step, ...]] = {
    "quick": (
        Step("attack", "eot-fgsm", {"samples": 10}),
        Step("attack", "eot-pgd", {"samples": 10, "steps": 10}),
        _PIXELS,
    ),
    "standard": (_EOT, _LONG_EOT, _PIXELS),
    "thorough": (_EOT, _LONG_EOT, _PIXELS, Step("attack", "autoattack", {"version": "rand"})),
}
# Attacks on a model without gradients: a stand-in, which is cheap, then more and more queries.
_BY_QUERIES: dict[str, tuple[Step, ...]] = {
    "quick": (
        Step("attack", "substitute", {"rounds": 2}),
        Step("attack", "square", {"queries": 500}),
        Step("attack", "sparse-rs", {"queries": 300}),
        Step("attack", "hopskipjump", {"queries": 1000}),
    ),
    "standard": (
        Step("attack", "substitute"),
        Step("attack", "square", {"queries": 2000}),
        Step("attack", "sparse-rs", {"queries": 1000}),
        Step("attack", "spsa", {"steps": 30, "samples": 64}),
        Step("attack", "hopskipjump", {"queries": 5000}),
    ),
    "thorough": (
        Step("attack", "substitute", {"rounds": 8}),
        Step("attack", "square"),
        Step("attack", "sparse-rs"),
        Step("attack", "spsa"),
        Step("attack", "hopskipjump", {"queries": 20_000}),
    ),
}


def make_plan(
    budget: str | float,
    *,
    nature: Nature = Nature(),  # noqa: B008  (frozen)
    attack: str | None = None,
    certify: str | None = "auto",
    attack_options: Mapping[str, Any] | None = None,
    certify_options: Mapping[str, Any] | None = None,
    earlier: bool = False,
) -> Plan:
    """Make the plan of that name, or one with a time limit; a named method replaces the plan's own.

    A plan with a time limit is one list of steps, whatever the limit, and stops where the time ends: more time adds to
    the answer and changes nothing before. It begins with the steps of "quick" and goes on with those of "thorough".

    A model that draws random numbers gets attacks that average over draws, and no certificate; a model without
    gradients gets attacks by queries; one with useless gradients gets some of these beside the others.

    Args:
        budget: "quick", "standard", "thorough", a time such as "90s", "10m" or "1.5h", or seconds.
        nature: what is known of the model.
        attack: run only this attack; None takes the attacks of the plan.
        certify: run only this certificate; "auto" takes the certificates of the plan, None runs none.
        attack_options: options of the attack; with no attack named, only "cascade" is run.
        certify_options: options of the certificate; with no certificate named, only "auto" is run.
        earlier: with a time limit, the steps in the order of version 0.1.0, for a run that it began.

    >>> make_plan("10m").seconds, [step.method for step in make_plan("quick", attack="fgsm", certify="ibp").steps]
    (600.0, ['ibp', 'fgsm'])
    """
    seconds = None if isinstance(budget, str) and budget in PLANS else _seconds(budget)
    plan = PLANS[str(budget)] if seconds is None else PLANS["thorough"]
    fitting = _for_nature(plan, nature) if seconds is None or earlier else _timed(nature)
    proofs = [step for step in fitting if step.stage == "certify"]
    attacks = [step for step in fitting if step.stage == "attack"]
    only = (attack is not None or bool(attack_options), certify != "auto" or bool(certify_options))
    if only[0]:
        attacks = [Step("attack", attack or "cascade", dict(attack_options or {}))]
        _check_nature(attacks[0], nature)
    if only[1]:
        if nature.random and certify is not None:
            raise UnsupportedError(
                f"{argument('certify', certify)} cannot be run: {NO_PROOF}. {argument('certify', None)} runs only "
                "the attacks."
            )
        proofs = [] if certify is None else [Step("certify", certify, dict(certify_options or {}), fine=True)]
    # An attack that is named comes after the cheap certificates, which it tests, and before the others.
    first = len(proofs) if only[1] else len(_PROOFS)
    steps = (*proofs[:first], *attacks, *proofs[first:]) if any(only) else fitting
    return Plan(str(budget), steps, plan.finer, seconds)


NO_PROOF = (
    "the model draws random numbers, and a proof speaks of a function, which gives one answer to one input; "
    "hf.Smoothed makes one of a model without randomness of its own, and model.sample() of a random network is one draw"
)


def _for_nature(plan: Plan, nature: Nature) -> tuple[Step, ...]:
    """The steps of a plan, with the attacks that such a model needs."""
    if nature.random and nature.gradients == "none":
        return (Step("attack", "cascade"),)
    if nature.random:
        more = (Step("attack", "cascade", threats=_BALLS),) if nature.gradients == "useless" else ()
        return (*_BY_DRAWS[plan.name], *more)
    if nature.gradients == "useful":
        return plan.steps
    queries = _BY_QUERIES[plan.name]
    if nature.gradients == "none":
        proofs = [step for step in plan.steps if step.stage == "certify"]
        return (*proofs[: len(_PROOFS)], *queries, *proofs[len(_PROOFS) :])
    # The cascade is slow where gradients vanish: the stand-in comes before it, and a quick plan goes without.
    first = next(i for i, step in enumerate(plan.steps) if step.method == "cascade")
    if plan.name == "quick":
        return (*plan.steps[:first], *queries)
    chosen = {step.method: step for step in queries}
    last = next(i for i, step in enumerate(plan.steps) if step.complete)
    between = (chosen["substitute"], *plan.steps[first:last], chosen["hopskipjump"])
    return (*plan.steps[:first], *between, *plan.steps[last:])


def _timed(nature: Nature) -> tuple[Step, ...]:
    """The steps of "quick", then the others of "thorough": in each part first the attacks, which settle more.

    AutoAttack seldom breaks what the cascade left: it comes after the proofs that end soon, before those that may not.
    At the end, what is still undecided gets a complete search for as long as there is time.
    """
    quick, thorough = (_for_nature(PLANS[name], nature) for name in ("quick", "thorough"))
    parts = (quick, tuple(step for step in thorough if step not in quick))
    ordered = [sorted(part, key=_turn) for part in parts]
    rest = () if nature.random else (_search("beta-crown", LONGEST, threats=_BALLS),)
    return (*ordered[0], *ordered[1], *rest)


def _turn(step: Step) -> int:
    """Attacks, proofs that end soon, AutoAttack, long searches."""
    if step.stage == "attack":
        return 2 if step.method == "autoattack" else 0
    return 3 if step.complete and step.options["time_limit"] > SHORT else 1


def _check_nature(step: Step, nature: Nature) -> None:
    """Refuse an attack that cannot work on such a model."""
    entry = get("attack", step.method)
    if nature.random and not entry.stochastic:
        fitting = ", ".join(m.name for m in methods("attack") if m.stochastic)
        raise InputError(
            f"the model draws random numbers: two passes over the same inputs differ, and '{step.method}' cannot tell "
            f"luck from an attack. Leave {argument('attack')} away, or give one that averages over draws: {fitting}."
        )
    if nature.gradients == "none" and entry.gradients == "needed":
        fitting = ", ".join(m.name for m in methods("attack") if m.gradients != "needed")
        raise InputError(
            f"the model's answer has no gradient with respect to its input, and '{step.method}' needs one. Leave "
            f"{argument('attack')} away, or give one that needs none: {fitting}."
        )


def check_plan(plan: Plan, threat: Threat, *, named: set[str]) -> None:
    """Validate every step up front; skip unsupported steps unless the user named them."""
    for step in plan.steps:
        # An audit without the rounding-error term of the certificate would prove nothing, so `sound` is no choice here.
        taken = [key for key in step.options if key in _OURS]
        if taken:
            raise InputError(f"{step.stage}_options may not hold '{taken[0]}': the audit sets it itself")
        if step.method not in named and not step.fits(threat):
            continue
        front_door = inspect.signature(run_attack if step.stage == "attack" else run_certify).parameters
        options = {key: value for key, value in step.options.items() if key not in front_door}
        try:
            get(step.stage, step.method).check(threat, options)
        except UnsupportedError as error:
            way_out = (
                f" An audit with {argument('certify', None)} runs only the attack." if step.stage == "certify" else ""
            )
            raise UnsupportedError(f"{error}{way_out}") from error


def _seconds(budget: str | float) -> float:
    """The time limit in seconds.

    >>> _seconds("1.5h"), _seconds(30)
    (5400.0, 30.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", str(budget).strip())
    written = float(found[1]) * _UNITS[found[2]] if found else 0.0
    seconds = written if isinstance(budget, str) else float(budget)
    if not 0 < seconds < float("inf"):
        raise InputError(
            f"budget must be {', '.join(PLANS)}, or a time above zero such as 90s, 10m or 2h; got '{budget}'"
        )
    return seconds
