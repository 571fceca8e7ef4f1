"""The bracket of one threat: what is proved and what is broken, for each input and for all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from holdfast.attacks.core.indicators import Indicator, Verdict, verdict
from holdfast.audits.rows import Example, Ran
from holdfast.audits.words import condition, counted, parts_of, share
from holdfast.utils.intervals import clopper_pearson
from holdfast.utils.png import is_picture
from holdfast.utils.show import Svg
from holdfast.utils.show import percent as percent

DOUBTS = {"reliable": "", "suspicious": "the attack may be unreliable", "unreliable": "the attack is unreliable"}
"""What a headline says of each verdict."""
UNPROVABLE = "every certificate: "
"""Begins the sentence in `Bracket.skipped` that says why nothing can be proved about the model at all."""
NO_TIME_TO_PROBE = "probes of the attack: no time to tell whether it can be trusted"
"""Sentence in `Bracket.skipped` where the time was over before the attack could be judged."""


@dataclass(frozen=True)
class Record:
    """The bracket of one input: its robust radius is at least `certified` and, if `broken` is known, at most that.

    Attributes:
        position: of the input in the data.
        label: its class.
        prediction: class that the model gives to the unchanged input.
        certified: largest radius at which it is proved to hold, 0 where none is; None where it is not even classified
            right.
        certified_by: the certificate; empty where no radius is proved.
        broken: size of the smallest adversarial example found, 0 where it is misclassified unchanged; None where it
            held.
        broken_by: the attack; "clean" where it is misclassified unchanged, empty where it held.
        prediction_adv: class of the adversarial example; None where there is none.
    """

    position: int
    label: int
    prediction: int
    certified: float | None
    certified_by: str
    broken: float | None
    broken_by: str
    prediction_adv: int | None

    @property
    def gap(self) -> float | None:
        """What is not known of the radius: smallest example found less largest radius proved; None where it held."""
        return None if self.broken is None else self.broken - (self.certified or 0.0)


@dataclass(frozen=True)
class Level:
    """The bracket of all inputs at one budget; counts of `inputs`.

    certified <= inputs that truly hold <= attacked, where attacked counts the inputs that survive the attack.
    """

    threat: str
    budget: float
    inputs: int
    certified: int
    attacked: int

    @property
    def size(self) -> str:
        """The budget as it was written; a share of the largest one where it has no text of its own, as in a box."""
        size = parts_of(self.threat).size
        return size if size and not size.startswith("[") else f"{self.budget:.4g}"

    @property
    def certified_accuracy(self) -> float:
        """Share of inputs proved to hold."""
        return self.certified / self.inputs

    @property
    def attacked_accuracy(self) -> float:
        """Share of inputs that the attack did not break."""
        return self.attacked / self.inputs

    @property
    def certified_interval(self) -> tuple[float, float]:
        """Clopper-Pearson interval of the certified accuracy."""
        return clopper_pearson(self.certified, self.inputs)

    @property
    def attacked_interval(self) -> tuple[float, float]:
        """Clopper-Pearson interval of the accuracy under attack."""
        return clopper_pearson(self.attacked, self.inputs)


def level_of(records: Sequence[Record], threat: str, budget: float) -> Level:
    """The bracket of these inputs at one budget."""
    return Level(
        threat,
        budget,
        len(records),
        sum(r.certified is not None and r.certified >= budget for r in records),
        sum(r.broken is None or r.broken > budget for r in records),
    )


@dataclass(frozen=True)
class Group:
    """Inputs that have something in common: their clean accuracy and their bracket at the largest budget."""

    name: str
    clean: Level
    largest: Level


@dataclass(frozen=True, eq=False, repr=False)
class Bracket:
    """One threat of an audit.

    Attributes:
        threat: the largest threat, as text.
        threats: text of each audited budget, growing; the last one is `threat`.
        budgets: the same as numbers.
        valid_range: lowest and highest valid value of an input.
        records: one per input, in the order of the data.
        trust: signs for and against the attack at the largest budget; empty where there are no probes for the threat.
        seconds: time spent in each step, over all starts of the run.
        skipped: what was not done and why, a sentence each.
        proved: whether any certificate was run.
        examples: adversarial examples, the smallest first.
        steps: what each step did, in the order of the plan; empty for audits of version 0.1.0.
        reach: budget below all audited ones at which half of a few inputs are proved; None where it was not looked for.
    """

    threat: str
    threats: tuple[str, ...]
    budgets: tuple[float, ...]
    valid_range: tuple[float, float]
    records: tuple[Record, ...]
    seconds: Mapping[str, float]
    trust: tuple[Indicator, ...] = ()
    skipped: tuple[str, ...] = ()
    proved: bool = True
    examples: tuple[Example, ...] = field(default=(), repr=False)
    steps: tuple[Ran, ...] = ()
    reach: float | None = None

    @property
    def half(self) -> float | None:
        """Largest budget known at which half of the inputs that are classified right are proved; None if none is."""
        radii = sorted((r.certified for r in self.records if r.certified is not None), reverse=True)
        median = radii[(len(radii) - 1) // 2] if radii else 0.0
        return median or self.reach

    @property
    def inputs(self) -> int:
        """How many inputs were audited."""
        return len(self.records)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The bracket at budget zero (both ends are the clean accuracy) and at each audited budget."""
        rows = zip(("none", *self.threats), (0.0, *self.budgets), strict=True)
        return tuple(level_of(self.records, text, budget) for text, budget in rows)

    @property
    def clean(self) -> float:
        """Accuracy on the unchanged inputs."""
        return self.levels[0].attacked_accuracy

    @property
    def attacked(self) -> tuple[float, ...]:
        """Accuracy under attack at each of `budgets`: the truth on these inputs is no higher."""
        return tuple(level.attacked_accuracy for level in self.levels[1:])

    @property
    def certified(self) -> tuple[float, ...]:
        """Certified accuracy at each of `budgets`: the truth on these inputs is no lower."""
        return tuple(level.certified_accuracy for level in self.levels[1:])

    @property
    def verdict(self) -> Verdict | None:
        """Whether the attack can be trusted, and why; None where it was not probed."""
        return verdict(self.trust) if self.trust else None

    @property
    def unjudged(self) -> str:
        """Why it is not known whether the attack can be trusted; empty where it is."""
        if self.trust:
            return ""
        if NO_TIME_TO_PROBE in self.skipped:
            return "there was no time for the probes"
        return "there are no probes for this threat or model, or there was nothing to attack"

    @property
    def nothing_proved(self) -> bool:
        """Whether certificates were run and none of them proved anything at the largest budget, where inputs held."""
        return self.proved and self.levels[-1].certified == 0 < self.levels[-1].attacked

    @property
    def exact(self) -> bool:
        """Whether every input is proved or broken at the largest budget: both ends of the bracket are the truth."""
        return self.proved and self.levels[-1].certified == self.levels[-1].attacked

    @property
    def answer(self) -> str:
        """The bracket at the largest budget in a few words."""
        last = self.levels[-1]
        low, high = share(last.certified_accuracy), share(last.attacked_accuracy)
        if not self.proved or self.nothing_proved:
            return f"at most {high}"
        return f"exactly {high}" if self.exact else f"between {low} and {high}"

    @property
    def noun(self) -> str:
        """What the inputs are."""
        return "images" if self.examples and is_picture(self.examples[0].x.shape) else "inputs"

    @property
    def condition(self) -> str:
        """What the adversary may do at the largest budget, as the end of a sentence."""
        return condition(self.threat, images=self.noun == "images")

    @property
    def doubt(self) -> str:
        """What is to be said about the attack; empty where there is no sign against it, or it was not probed.

        An exact answer does not depend on how strong the attack was, so that there is nothing to doubt.
        """
        return DOUBTS[self.verdict.level] if self.verdict and not self.exact else ""

    @property
    def unprovable(self) -> str:
        """Why nothing can be proved about the model at all, in one sentence; empty where that was not found out."""
        reasons = [text.removeprefix(UNPROVABLE) for text in self.skipped if text.startswith(UNPROVABLE)]
        return reasons[0].partition(". ")[0].removesuffix(".") if reasons else ""

    @property
    def caveat(self) -> str:
        """What the headline says where nothing is proved, with the reason if one holds for all certificates."""
        if self.proved:
            return "nothing is proved" if self.nothing_proved else ""
        return "no certificate was run" + (f": {self.unprovable}" if self.unprovable else "")

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        return self.sentence(self.noun)

    def sentence(self, noun: str) -> str:
        """The verdict in one sentence that calls the inputs `noun`."""
        answer = f"{self.answer} of the {counted(self.inputs, noun)} keep their label {self.condition}"
        return f"{_capital('; '.join(filter(None, (answer, self.caveat, self.doubt))))}."

    def placed(self, index: Sequence[int]) -> "Bracket":
        """The same bracket with other positions: input i is at `index[i]` in the data."""
        records = tuple(replace(record, position=index[record.position]) for record in self.records)
        examples = tuple(replace(example, position=index[example.position]) for example in self.examples)
        return replace(self, records=records, examples=examples)

    def by(self, values: Sequence[str]) -> tuple[Group, ...]:
        """The groups that share a value, in the order of the values; `values` holds one for each record."""
        members: dict[str, list[Record]] = {}
        for value, record in zip(values, self.records, strict=True):
            members.setdefault(value, []).append(record)
        return tuple(
            Group(value, level_of(members[value], "none", 0.0), level_of(members[value], self.threat, self.budgets[-1]))
            for value in sorted(members)
        )

    def __repr__(self) -> str:
        return f"Bracket: {self.headline}"

    def plot(self) -> Svg:
        """Draw both ends of the bracket against the budget."""
        # Imported here because the picture is built on this file.
        from holdfast.audits.report.notebook import picture

        return picture(self)

    def to_dict(self) -> dict[str, Any]:
        """All but the pictures, as values for JSON."""
        derived = ("certified_accuracy", "certified_interval", "attacked_accuracy", "attacked_interval")
        return {
            "threat": self.threat,
            "threats": self.threats,
            "budgets": self.budgets,
            "valid_range": self.valid_range,
            "headline": self.headline,
            "proved": self.proved,
            "exact": self.exact,
            "levels": [asdict(level) | {key: getattr(level, key) for key in derived} for level in self.levels],
            "verdict": self.verdict and self.verdict._asdict(),
            "trust": [asdict(indicator) for indicator in self.trust],
            "skipped": self.skipped,
            "seconds": dict(self.seconds),
            "steps": [asdict(step) for step in self.steps],
            "reach": self.reach,
            "records": [asdict(record) for record in self.records],
        }


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def interval_text(interval: tuple[float, float]) -> str:
    """Interval of shares as text, in percent.

    >>> interval_text((0.5, 0.61))
    '50.0 to 61.0'
    """
    return f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f}"
