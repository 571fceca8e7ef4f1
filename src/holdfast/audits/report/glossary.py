"""The words of a report, each in a line or two, for a reader who gets nothing else."""

from typing import Literal, NamedTuple

from holdfast.audits.result import Audit
from holdfast.audits.words import condition, parts_of
from holdfast.errors import InputError
from holdfast.registry import get

Stage = Literal["attack", "certify"]
_TERMS = {
    "threat": (
        "Threat",
        "What an adversary may do to an input, such as change every pixel by up to 0.1. It is written as a kind and a "
        "budget, such as linf:0.1. Pixels lie between 0 (black) and 1 (white) unless the threat says otherwise: a "
        "change of 1/255 is one step of an ordinary image file.",
    ),
    "budget": (
        "Budget",
        "How large the change may be. The audit looks at several budgets, up to the one of the threat.",
    ),
    "attack": (
        "Attack",
        "A search for a change within the budget that makes the model give another class. What an attack breaks does "
        "not hold. What it does not break may still be broken by a better one.",
    ),
    "certificate": (
        "Certificate",
        "A proof that no change within the budget, by whatever attack, makes the model give another class. What is "
        "not proved may still hold.",
    ),
    "clean": ("Clean accuracy", "Share of the inputs that the model classifies right as they are."),
    "attacked": (
        "Accuracy under attack",
        "Share of the inputs that are classified right and that no attack broke. The truth is no higher.",
    ),
    "certified": (
        "Certified accuracy",
        "Share of the inputs that are classified right and proved to stay so. The truth is no lower.",
    ),
    "undecided": ("Undecided", "Neither broken nor proved: a better attack or a better proof would decide it."),
    "interval": (
        "95 % interval",
        "Where the share of all such data lies with 95 % confidence (Clopper and Pearson, 1934), if the audited inputs "
        "are a random sample of them.",
    ),
    "reliable": (
        "Reliable attack",
        "An attack can fail for reasons of its own, and a model then looks stronger than it is. Probes look for signs "
        "of that. Reliable means that none was found; it says nothing about how well the model holds.",
    ),
}


class Term(NamedTuple):
    """One entry: `key` is where a link leads."""

    key: str
    name: str
    text: str


def glossary(audit: Audit) -> list[Term]:
    """The terms that every report uses, the threats of this one, and the methods that were run."""
    terms = [Term(key, *entry) for key, entry in _TERMS.items()]
    kinds = dict.fromkeys(parts_of(bracket.threat).kind for bracket in audit.brackets)
    for kind in kinds:
        example = next(b for b in audit.brackets if parts_of(b.threat).kind == kind)
        words = condition(example.threat, images=example.noun == "images").removeprefix("when ")
        terms.append(Term(f"kind-{kind}", example.threat, f"{words[0].upper()}{words[1:]}."))
    for stage, name in _methods(audit):
        try:
            summary = get(stage, name).summary
        except InputError:  # a plugin that is not here, or a name from an edited file
            continue
        text = f"{summary[0].upper()}{summary[1:].rstrip('.')}."
        terms.append(Term(f"{stage}-{name}", f"{name} ({'attack' if stage == 'attack' else 'certificate'})", text))
    return terms


def _methods(audit: Audit) -> list[tuple[Stage, str]]:
    """Stage and name of each method that was run or that decided, once, certificates first."""
    found: list[tuple[Stage, str]] = []
    for bracket in audit.brackets:
        found += [("attack" if step.stage == "attack" else "certify", step.method) for step in bracket.steps]
        found += [("certify", record.certified_by) for record in bracket.records if record.certified_by]
        found += [("attack", record.broken_by) for record in bracket.records if record.broken]
    return sorted(dict.fromkeys(found), key=lambda pair: pair[0] == "attack")
