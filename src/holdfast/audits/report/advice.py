"""What to do next: rules that turn an audit into sentences and commands."""

import math
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources

from holdfast.audits.bracket import Bracket, Group, percent
from holdfast.audits.plan import PLANS
from holdfast.audits.report.commands import command, data_name, readable
from holdfast.audits.report.next_step import Step
from holdfast.audits.report.unproved import for_the_proof, smoothing, unproved_steps
from holdfast.audits.result import Audit
from holdfast.registry import get
from holdfast.threats import threat as read_threat

SHOWN = 4
"""Inputs named in a command."""
WEAK = 0.8
"""Of the clean accuracy: if attacks leave less, the model is to be trained against them."""
ALL = "holdfast train --list"
"""Shows every recipe, where none fits."""
LOOSE = 0.5
"""Of the accuracy under attack: if less is proved, the model is to be trained for the proof."""
# Recipes by what follows the name of the data, the one to try first in front. They train for a proof, ...
_PROVABLE = {
    "linf": ("crown-ibp", "ibp"),
    "l2": ("gloro", "bcp"),
    "patch": ("patch", "ablation"),
    "sparse": ("sparse", "ablation-pixels"),
}
# ... or against attacks, which keeps more of the clean accuracy.
_ROBUST = {"linf": ("trades", "at")}


def next_steps(audit: Audit) -> tuple[Step, ...]:
    """What to do next, what matters most first; never empty."""
    steps = [*_doubts(audit), *_unfinished(audit)]
    for bracket in audit.brackets:
        steps += _training(audit, bracket)
    steps += _weakest_class(audit)
    # Several threats may ask for the same: its first reason stands.
    unique = {step.command: step for step in reversed(steps)}
    return tuple(unique[command] for command in dict.fromkeys(step.command for step in steps)) or (_keep(audit),)


def _doubts(audit: Audit) -> list[Step]:
    """An attack that cannot be trusted comes first: nothing else means much before it is settled."""
    steps = []
    for bracket in audit.brackets:
        found = bracket.verdict
        if found is None or found.level == "reliable":
            continue
        text = f"The attack at {bracket.threat} is {found.level} ({found.reason}): compare it with a second attack."
        if bracket.levels[-1].certified:
            text += " What is certified does not depend on it."
        steps.append(Step(text, command("attack", audit, [bracket.threat], *_second(audit, bracket))))
    return steps


def _second(audit: Audit, bracket: Bracket) -> tuple[str, ...]:
    """Another attack that works on the model: by many draws, without gradients, or the published ensemble."""
    method = "autoattack"
    options: tuple[str, ...] = ()
    if "draws" in audit.settings:
        method, options = "eot-pgd", ("--option", "samples=100")
    elif audit.settings.get("gradients", "useful") != "useful":
        method = "hopskipjump"
    fits = _norm(bracket.threat) in get("attack", method).threats
    return ("--method", method, *options) if fits else ("--method", "cascade")


def _unfinished(audit: Audit) -> list[Step]:
    """More time for what is undecided, unless all there is has been tried."""
    plan = str(audit.settings.get("plan"))
    # Only a plan with a time limit leaves things for want of time; in the others what was skipped does not fit.
    late = [b.threat for b in audit.brackets if plan not in PLANS and any("no time for" in text for text in b.skipped)]
    if late:
        text = f"The time was not enough for all that could be tried at {', '.join(late)}: give more."
        return [Step(text, command("audit", audit, late, *_drawn(audit), "--budget", "thorough"))]
    undecided = {b.threat: b.levels[-1].attacked - b.levels[-1].certified for b in audit.brackets if b.proved}
    undecided = {threat: count for threat, count in undecided.items() if count}
    if not undecided or plan == "thorough":
        return []
    counts = ", ".join(f"{count} at {threat}" for threat, count in undecided.items())
    text = f"Some inputs are undecided ({counts}): stronger attacks and tighter proofs narrow the bracket."
    return [Step(text, command("audit", audit, list(undecided), *_drawn(audit), "--budget", "thorough"))]


def _drawn(audit: Audit) -> tuple[str, ...]:
    """Option that draws the same inputs again; none where all of the data was audited."""
    return ("--n", str(audit.inputs)) if audit.inputs < audit.total else ()


def _training(audit: Audit, bracket: Bracket) -> list[Step]:
    """A model that breaks, or of which little can be proved, is to be trained for it."""
    last, at = bracket.levels[-1], bracket.threat
    steps = []
    weak = last.attacked_accuracy < WEAK * bracket.clean
    if weak and _norm(at) in _ROBUST:
        text = (
            f"Attacks at {at} leave {percent(last.attacked_accuracy)} of {percent(bracket.clean)}: train against them."
        )
        steps.append(Step(text, _recipe(audit, bracket, _ROBUST)))
    if bracket.unprovable:
        text = f"{bracket.unprovable[0].upper()}{bracket.unprovable[1:]}: save model.float(), and audit that."
        return [*steps, Step(text, command("audit", audit, [at]))]
    if not bracket.proved and not bracket.skipped:
        text = f"No certificate was run at {at}: only one can tell what holds against every attack."
        return [*steps, Step(text, command("certify", audit, [at]))]
    if bracket.nothing_proved:
        return [*steps, *unproved_steps(audit, bracket)]
    if not (weak or last.certified < LOOSE * last.attacked):
        return steps
    share = f"Only {percent(last.certified_accuracy)}" if last.certified else "Nothing"
    text = f"{share} is proved at {at}: train for the proof, and more can be certified."
    shipped, own = _recipe(audit, bracket, _PROVABLE), for_the_proof(audit, bracket)
    steps.append(replace(own, text=f"{text} {own.text}") if own and shipped == ALL else Step(text, shipped))
    if not last.certified and _norm(at) == "l2":
        steps += filter(None, [smoothing(audit, bracket)])
    return steps


def _weakest_class(audit: Audit) -> list[Step]:
    """The class that holds least, if chance does not explain it; else what decides the inputs that break first."""
    bracket = audit.brackets[0]
    broken = sorted((r.broken, r.position) for r in bracket.records if r.broken)
    if not broken:
        return []
    positions = [position for _, position in broken]
    text = "Look at what the model rests on in the inputs that break first."
    groups = bracket.by([str(record.label) for record in bracket.records])
    worst = min(groups, key=lambda group: group.largest.attacked_accuracy)
    if len(groups) > 1 and _stands_out(worst, bracket):
        label = int(worst.name)
        name = audit.classes[label] if label < len(audit.classes) else f"class {label}"
        text = (
            f"Of '{name}', {percent(worst.largest.attacked_accuracy)} hold at {bracket.threat}, of all inputs "
            f"{percent(bracket.attacked[-1])}: look at what the model rests on there."
        )
        mine = {record.position for record in bracket.records if record.label == label}
        positions = [position for position in positions if position in mine] or positions
    inputs = ",".join(str(position) for position in positions[:SHOWN])
    return [Step(text, command("explain", audit, [], "--inputs", inputs))]


def _stands_out(group: Group, bracket: Bracket) -> bool:
    """Whether the interval of the group lies below the interval of all inputs together."""
    return group.largest.attacked_interval[1] < bracket.levels[-1].attacked_interval[0]


def _keep(audit: Audit) -> Step:
    """Nothing is left to improve: see that it stays so."""
    bracket = audit.brackets[0]
    floor = math.floor(100 * bracket.levels[-1].certified_interval[0]) / 100
    text = "Every input is decided, and none that is classified right breaks: hold the model to it in every build."
    return Step(text, command("audit", audit, [bracket.threat], "--fail-under", f"certified={floor:g}"))


def _recipe(audit: Audit, bracket: Bracket, kinds: Mapping[str, Sequence[str]]) -> str:
    """Command of the shipped recipe for these data that fits best: by kind, then by budget; else the list of all."""
    norm, data = _norm(bracket.threat), data_name(audit)
    fitting = []
    for name, made_for, threat, budget in _shipped():
        if made_for != data or _norm(threat) != norm:
            continue
        for rank, kind in enumerate(kinds.get(norm, ())):
            # "crown-ibp" and "crown-ibp-0.3", not "at-wrn34": the plain version at any budget.
            if re.fullmatch(rf"{kind}(-l2)?(-[\d.x]+)?", name.removeprefix(f"{data}-")):
                fitting.append((rank, abs(math.log(budget / bracket.budgets[-1])), name, threat))
    if not fitting:
        return ALL
    *_, name, threat = min(fitting)
    same = threat == bracket.threat or not readable(bracket.threat)
    return shlex.join(["holdfast", "train", name, *([] if same else ["--set", f"threat={bracket.threat}"])])


@cache
def _shipped() -> tuple[tuple[str, str, str, float], ...]:
    """Name, data, threat and its budget of each shipped recipe that has a threat; their files are only read."""
    folder = resources.files("holdfast.training.recipe") / "shipped"
    found = []
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        table = tomllib.loads(file.read_text(encoding="utf-8")) if file.name.endswith(".toml") else {}
        if "threat" in table:
            threat = read_threat(table["threat"])
            found.append((file.name.removesuffix(".toml"), table.get("data", ""), str(threat), threat.budget))
    return tuple(found)


def _norm(text: str) -> str:
    return text.partition(":")[0]
