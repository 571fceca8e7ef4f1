"""The answer of an audit: the bracket for each input and for all of them, with everything needed to repeat it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from scipy.special import betaincinv

from holdfast.attacks.trust import Indicator, Verdict, verdict
from holdfast.audit.store import Example

JSON_VERSION = 1
CONFIDENCE = 0.95
# What audit.json holds as it is; the levels follow from the records, the examples are in a file of their own.
FIELDS = (
    *("name", "threat", "threats", "budgets", "valid_range", "data", "classes"),
    *("settings", "versions", "hashes", "seconds", "created"),
)


@dataclass(frozen=True)
class Record:
    """The bracket of one input: its robust radius is at least `certified` and, if `broken` is known, at most that.

    Attributes:
        position: of the input in the data.
        label: its class.
        prediction: class that the model gives to the unchanged input.
        certified: largest budget at which it is proved to hold; None where it is not even classified right.
        certified_by: the certificate; empty where no budget is proved.
        broken: smallest budget at which an attack succeeded, 0 where it is misclassified unchanged; None where it held.
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


@dataclass(frozen=True)
class Level:
    """The bracket of all inputs at one budget; counts of `inputs`.

    certified <= inputs that truly hold <= attacked, where attacked counts those that survive the attack.
    """

    threat: str
    budget: float
    inputs: int
    certified: int
    attacked: int

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


def clopper_pearson(count: int, total: int, *, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Exact interval of a probability after `count` hits in `total` draws (Clopper and Pearson, 1934).

    It covers the truth at least as often as it says, unlike the normal and the Wilson interval.

    >>> tuple(round(end, 3) for end in clopper_pearson(0, 10))
    (0.0, 0.308)
    """
    tail = (1 - confidence) / 2
    low = float(betaincinv(count, total - count + 1, tail)) if count else 0.0
    high = float(betaincinv(count + 1, total - count, 1 - tail)) if count < total else 1.0
    return low, high


@dataclass(frozen=True, eq=False)
class Audit:
    """An audited model.

    Attributes:
        name: what the model is called in the report.
        threat: the largest threat, as text.
        threats: text of each audited budget, growing; the last one is `threat`.
        budgets: the same as numbers.
        valid_range: lowest and highest valid value of an input.
        data: name of the data.
        classes: names of the classes; may be empty.
        records: one per input, in the order of the data.
        trust: signs for and against the attack at the largest budget; empty where there are no probes for the threat.
        settings: options of the run.
        versions: of Holdfast, torch, Python, and the device.
        hashes: sha256 of the model (structure and state) and of the data used.
        seconds: time spent in each stage, over all starts of the run.
        created: when the run was first started (UTC).
        examples: adversarial examples for the gallery.
    """

    name: str
    threat: str
    threats: tuple[str, ...]
    budgets: tuple[float, ...]
    valid_range: tuple[float, float]
    data: str
    classes: tuple[str, ...]
    records: tuple[Record, ...]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    hashes: Mapping[str, str]
    seconds: Mapping[str, float]
    created: str
    trust: tuple[Indicator, ...] = ()
    examples: tuple[Example, ...] = field(default=(), repr=False)

    @property
    def inputs(self) -> int:
        """How many inputs were audited."""
        return len(self.records)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The bracket at budget zero (both ends are the clean accuracy) and at each audited budget."""
        rows = zip(("none", *self.threats), (0.0, *self.budgets), strict=True)
        return tuple(
            Level(
                text,
                budget,
                self.inputs,
                sum(r.certified is not None and r.certified >= budget for r in self.records),
                sum(r.broken is None or r.broken > budget for r in self.records),
            )
            for text, budget in rows
        )

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
    def headline(self) -> str:
        """The verdict in one sentence."""
        last = self.levels[-1]
        low, high = percent(last.certified_accuracy), percent(last.attacked_accuracy)
        where = f"of {self.inputs} inputs hold at {self.threat}"
        if self.settings.get("certify") is None:
            return f"At most {high} {where}; no certificate was run."
        return f"Exactly {high} {where}." if last.certified == last.attacked else f"Between {low} and {high} {where}."

    @property
    def verdict(self) -> Verdict | None:
        """Whether the attack can be trusted, and why; None where it was not probed."""
        return verdict(self.trust) if self.trust else None

    def table(self) -> Table:
        """The bracket for the terminal."""
        caption = f"{self.name} on {self.data}; 95 % Clopper-Pearson intervals"
        if self.settings.get("alpha"):
            caption += f"; each proof is wrong with probability {self.settings['alpha']:g} at most"
        if self.verdict is not None:
            caption += f"\nthe attack is {self.verdict.level}: {self.verdict.reason}"
        table = Table(title=self.headline, caption=caption)
        for column in ("budget", "certified", "95 %", "under attack", "95 %", "undecided"):
            table.add_column(column, justify="right", no_wrap=True)
        for level in self.levels:
            table.add_row(
                "clean" if level.budget == 0 else f"{level.budget:.4g}",
                percent(level.certified_accuracy),
                interval_text(level.certified_interval),
                percent(level.attacked_accuracy),
                interval_text(level.attacked_interval),
                str(level.attacked - level.certified),
            )
        return table

    def to_json(self) -> str:
        """All but the pictures, as JSON; docs/audit.md lists the keys."""
        levels = [
            {
                **asdict(level),
                "certified_accuracy": level.certified_accuracy,
                "certified_interval": level.certified_interval,
                "attacked_accuracy": level.attacked_accuracy,
                "attacked_interval": level.attacked_interval,
            }
            for level in self.levels
        ]
        body = {
            "schema_version": JSON_VERSION,
            "headline": self.headline,
            "clean_accuracy": self.clean,
            "levels": levels,
            **{key: getattr(self, key) for key in FIELDS},
            "verdict": self.verdict and self.verdict._asdict(),
            "trust": [asdict(indicator) for indicator in self.trust],
            "records": [asdict(record) for record in self.records],
        }
        return json.dumps(body, indent=1, default=repr) + "\n"

    def to_html(self) -> str:
        """The report, one self-contained page."""
        # Imported here because the report is built on this file.
        from holdfast.audit.report import render

        return render([self])

    def save(self, folder: str | Path) -> Path:
        """Writes `audit.json`, `examples.npz` and `report.html` into `folder`; returns the path of the report."""
        from holdfast.audit.files import save_audit

        return save_audit(self, Path(folder))


def percent(share: float) -> str:
    """Share as text.

    >>> percent(0.7125)
    '71.2 %'
    """
    return f"{100 * share:.1f} %"


def interval_text(interval: tuple[float, float]) -> str:
    """Interval of shares as text, in percent.

    >>> interval_text((0.5, 0.61))
    '50.0 to 61.0'
    """
    return f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f}"
