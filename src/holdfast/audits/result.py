"""The answer of an audit: one bracket for each threat, with everything needed to repeat it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from holdfast.attacks.core.indicators import Indicator, Verdict
from holdfast.audits.bracket import DOUBTS, Bracket, Level, Record, interval_text, percent
from holdfast.audits.report import notebook
from holdfast.audits.rows import Example
from holdfast.audits.words import EXACT, counted, parts_of
from holdfast.utils.show import Svg

JSON_VERSION = 2
# What audit.json holds as it is, beside the brackets.
FIELDS = ("name", "data", "total", "drawn", "classes", "groups", "settings", "versions", "hashes", "created")
_DOUBT = ("reliable", "suspicious", "unreliable")


@dataclass(frozen=True, eq=False, repr=False)
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
        total: how many inputs the data have, audited or not; 0 if that is not known.
        drawn: how the audited ones were chosen, in words: "500 of 2,000, drawn by seed 0 with the classes balanced".
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
    total: int = 0
    drawn: str = ""

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
            return self.brackets[0].sentence(self.noun)
        caveats = {bracket.caveat for bracket in self.brackets}
        shared = [caveat for caveat in caveats if caveat and len(caveats) == 1]
        answers: list[str] = []
        for bracket in self.brackets:
            own = [bracket.doubt] if shared else [bracket.caveat, bracket.doubt]
            aside = "; ".join(filter(None, own))
            verb = "" if answers else " keep their label"
            answers.append(f"{bracket.answer}{verb} {bracket.condition}" + (f" ({aside})" if aside else ""))
        return f"Of the {counted(self.inputs, self.noun)}, {'; '.join([*answers, *shared])}."

    @property
    def noun(self) -> str:
        """What the inputs are: "test images" of the split for tests, "images" of data without splits, or "inputs"."""
        split = {" (test)": "test ", " (train)": "training "}
        return next((text for end, text in split.items() if self.data.endswith(end)), "") + self.brackets[0].noun

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
    def unjudged(self) -> str:
        """Why it is not known whether any of the attacks can be trusted; empty where it is."""
        return "" if self.verdict else self.brackets[0].unjudged

    @property
    def reliable(self) -> bool:
        """False if the attack on any threat is judged unreliable; the upper end of the bracket may then be too high."""
        return self.verdict is None or self.verdict.level != "unreliable"

    @property
    def doubt(self) -> str:
        """Why not to trust the attacks: "the attack is unreliable (fired: ...)".

        Empty where there is no sign, and where every bracket is exact: nothing depends on the attacks then.
        """
        worst = self.verdict
        if worst is None or not DOUBTS[worst.level] or all(bracket.exact for bracket in self.brackets):
            return ""
        return f"{DOUBTS[worst.level]} ({worst.reason})"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of the model, a few sentences each: that it is random, or has no gradients."""
        return tuple(self.settings.get("notes", ()))

    def table(self) -> Lines:
        """The brackets for the terminal."""
        return Lines(*(self._table(bracket) for bracket in self.brackets), *map(Text, self.notes))

    def _table(self, bracket: Bracket) -> Table:
        drawn = f", inputs: {self.drawn}" if self.drawn else ""
        caption = f"{self.name} on {self.data}{drawn}; 95 % Clopper-Pearson intervals"
        if self.settings.get("alpha"):
            caption += f"; each proof is wrong with probability {self.settings['alpha']:g} at most"
        if bracket.verdict is not None:
            caption += f"\nthe attack is {bracket.verdict.level}: {bracket.verdict.reason}"
        if bracket.exact:
            caption += f"\n{EXACT}"
        for text in bracket.skipped:
            caption += f"\nnot done: {text}"
        table = Table(title=bracket.sentence(self.noun), caption=caption)
        for column in (parts_of(bracket.threat).kind, "certified", "95 %", "attacked", "95 %", "undecided"):
            table.add_column(column, justify="right", no_wrap=True)
        for level in bracket.levels:
            table.add_row(
                "clean" if level.budget == 0 else level.size,
                *(_proof(level) if bracket.proved or level.budget == 0 else ("not run", "")),
                percent(level.attacked_accuracy),
                interval_text(level.attacked_interval),
                str(level.attacked - level.certified),
            )
        return table

    def __repr__(self) -> str:
        return notebook.text(self)

    def _repr_html_(self) -> str:
        return notebook.html(self)

    def plot(self) -> Svg:
        """Draw the bracket of the first threat; `plot()` of one of `brackets` draws another."""
        return self.brackets[0].plot()

    def to_pandas(self, per: Literal["budget", "input"] = "budget") -> Any:
        """Return a `pandas.DataFrame` with one row for each threat and budget, or for each threat and input."""
        return notebook.frame(self, per)

    def to_latex(self) -> str:
        """Return the tables as LaTeX, in the style of booktabs."""
        return notebook.latex(self)

    def to_json(self) -> str:
        """All but the pictures, as JSON; docs/audit.md lists the keys."""
        body = {
            "schema_version": JSON_VERSION,
            "headline": self.headline,
            "verdict": self.verdict and self.verdict._asdict(),
            "reliable": self.reliable,
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


def _proof(level: Level) -> tuple[str, str]:
    """What is certified at a level, and the interval, as text."""
    return percent(level.certified_accuracy), interval_text(level.certified_interval)
