"""The answer of an audit: one bracket for each threat, with everything needed to repeat it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from holdfast.attacks.core.indicators import Indicator, Verdict
from holdfast.audits.bracket import Bracket, Level, Record, interval_text, percent
from holdfast.audits.rows import Example

JSON_VERSION = 2
# What audit.json holds as it is, beside the brackets.
FIELDS = ("name", "data", "classes", "groups", "settings", "versions", "hashes", "created")
_DOUBT = ("reliable", "suspicious", "unreliable")


@dataclass(frozen=True, eq=False)
class Audit:
    """An audited model. What speaks of one threat (`certified`, `records`, ...) speaks of the first one.

    Attributes:
        name: what the model is called in the report.
        data: name of the data.
        classes: names of the classes; may be empty.
        brackets: one for each threat, in the order asked for, over the same inputs.
        settings: options of the run; "steps" lists what was run, "plan" how it was chosen.
        versions: of Holdfast, torch, Python, and the device.
        hashes: sha256 of the model (structure and state) and of the data used.
        created: when the run was first started (UTC).
        groups: columns given by the user: by name, one text for each record.
    """

    name: str
    data: str
    classes: tuple[str, ...]
    brackets: tuple[Bracket, ...]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    hashes: Mapping[str, str]
    created: str
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def inputs(self) -> int:
        """How many inputs were audited."""
        return self.brackets[0].inputs

    @property
    def clean(self) -> float:
        """Accuracy on the unchanged inputs."""
        return self.brackets[0].clean

    @property
    def threat(self) -> str:
        """The first threat, as text."""
        return self.brackets[0].threat

    @property
    def budgets(self) -> tuple[float, ...]:
        """Audited budgets of the first threat, growing."""
        return self.brackets[0].budgets

    @property
    def attacked(self) -> tuple[float, ...]:
        """Accuracy under attack at each of `budgets`: the truth on these inputs is no higher."""
        return self.brackets[0].attacked

    @property
    def certified(self) -> tuple[float, ...]:
        """Certified accuracy at each of `budgets`: the truth on these inputs is no lower."""
        return self.brackets[0].certified

    @property
    def levels(self) -> tuple[Level, ...]:
        """The first bracket at budget zero and at each of `budgets`."""
        return self.brackets[0].levels

    @property
    def records(self) -> tuple[Record, ...]:
        """The first bracket of each input, in the order of the data."""
        return self.brackets[0].records

    @property
    def trust(self) -> tuple[Indicator, ...]:
        """Signs for and against the attack of the first threat."""
        return self.brackets[0].trust

    @property
    def examples(self) -> tuple[Example, ...]:
        """Adversarial examples of the first threat."""
        return self.brackets[0].examples

    @property
    def seconds(self) -> dict[str, float]:
        """Time spent in each step, over all threats and all starts of the run."""
        total: dict[str, float] = {}
        for bracket in self.brackets:
            for step, seconds in bracket.seconds.items():
                total[step] = total.get(step, 0.0) + seconds
        return total

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        if len(self.brackets) == 1:
            return self.brackets[0].headline
        doubts = [f" ({bracket.doubt})" if bracket.doubt else "" for bracket in self.brackets]
        answers = [f"{b.answer} at {b.threat}{doubt}" for b, doubt in zip(self.brackets, doubts, strict=True)]
        caveats = {bracket.caveat for bracket in self.brackets}
        answers += [caveat for caveat in caveats if caveat and len(caveats) == 1]
        return f"Of {self.inputs} inputs hold: {'; '.join(answers)}."

    @property
    def verdict(self) -> Verdict | None:
        """Whether the attacks can be trusted: the worst verdict of all threats; None where none was probed."""
        found = [(_DOUBT.index(v.level), b.threat, v) for b in self.brackets if (v := b.verdict) is not None]
        if not found:
            return None
        _, threat, worst = max(found, key=lambda item: item[0])
        return (
            worst
            if len(self.brackets) == 1 or worst.level == "reliable"
            else Verdict(worst.level, f"{threat}: {worst.reason}")
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of the model, a few sentences each: that it is random, or has no gradients."""
        return tuple(self.settings.get("notes", ()))

    def table(self) -> Lines:
        """The brackets for the terminal."""
        return Lines(*(self._table(bracket) for bracket in self.brackets), *map(Text, self.notes))

    def _table(self, bracket: Bracket) -> Table:
        caption = f"{self.name} on {self.data}; 95 % Clopper-Pearson intervals"
        if self.settings.get("alpha"):
            caption += f"; each proof is wrong with probability {self.settings['alpha']:g} at most"
        if bracket.verdict is not None:
            caption += f"\nthe attack is {bracket.verdict.level}: {bracket.verdict.reason}"
        for text in bracket.skipped:
            caption += f"\nnot done: {text}"
        table = Table(title=bracket.headline, caption=caption)
        for column in ("budget", "certified", "95 %", "under attack", "95 %", "undecided"):
            table.add_column(column, justify="right", no_wrap=True)
        for level in bracket.levels:
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
        body = {
            "schema_version": JSON_VERSION,
            "headline": self.headline,
            "verdict": self.verdict and self.verdict._asdict(),
            "clean_accuracy": self.clean,
            **{key: getattr(self, key) for key in FIELDS},
            "brackets": [bracket.to_dict() for bracket in self.brackets],
        }
        return json.dumps(body, indent=1, default=repr, allow_nan=False) + "\n"

    def to_html(self) -> str:
        """The report, one self-contained page."""
        # Imported here because the report is built on this file.
        from holdfast.audits.report.page import render

        return render([self])

    def save(self, folder: str | Path) -> Path:
        """Write the report and the results into `folder`; return the path of the report."""
        from holdfast.audits.saved import save_audit

        return save_audit(self, Path(folder))
