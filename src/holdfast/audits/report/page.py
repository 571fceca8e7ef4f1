"""One self-contained HTML page for one audit, or for several models side by side; and the schema of audit.json."""

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from holdfast.audits.bracket import Bracket, Group, interval_text, percent
from holdfast.audits.report.advice import next_steps
from holdfast.audits.report.commands import source_of
from holdfast.audits.report.gallery import class_namer, gallery, island, state
from holdfast.audits.report.glossary import glossary
from holdfast.audits.report.plot import UNITS, bracket_plot, range_bar
from holdfast.audits.report.unproved import unproved
from holdfast.audits.result import Audit
from holdfast.audits.rows import Ran
from holdfast.audits.words import EXACT, like, parts_of
from holdfast.errors import InputError

PAGE = Path(__file__).parent / "templates"
SCHEMA = Path(__file__).parent / "audit.schema.json"
MOST_GROUPS = 60
"""Rows of a table of groups."""
FIRST = 50
"""Rows of the table of inputs where the page may not run its script."""
MOST_DIFFERENT = 20
"""Rows of the table of inputs on which models differ."""


def render(audits: Sequence[Audit]) -> str:
    """The report as HTML: one file without external resources; light and dark follow the reader's setting.

    Its content security policy allows the one script and the one style sheet of the page, and nothing else. Without
    the script all but the gallery is there.

    Args:
        audits: one for its report; several for a page that compares them, threat by threat.
    """
    if not audits:
        raise InputError("a report needs at least one audit, got none")
    page = _environment()
    if len(audits) == 1:
        return page.get_template("report.html.j2").render(section=_report(audits[0]))
    audits = _told_apart(audits)
    same = len({(audit.hashes.get("data"), audit.inputs) for audit in audits}) == 1
    return page.get_template("compare.html.j2").render(
        sections=[_run(audit) for audit in audits],
        same_inputs=same,
        threats=[_shared(audits, threat, same=same) for threat in _threats(audits)],
    )


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of audit.json."""
    found: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return found


@cache
def _environment() -> Environment:
    page = Environment(
        loader=FileSystemLoader(PAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.filters |= {
        "percent": percent,
        "interval": interval_text,
        "duration": duration,
        "setting": _setting_text,
        "range_bar": lambda clean, largest, proved: Markup(range_bar(clean, largest, has_proof=proved)),
    }
    page.globals["exact"] = EXACT
    for name in ("css", "js"):
        text = (PAGE / f"report.{name}").read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        page.globals |= {name: Markup(text), f"{name}_hash": f"sha256-{digest}"}
    return page


def _report(audit: Audit) -> dict[str, Any]:
    """All that the report of one audit shows."""
    shown = gallery(audit)
    answers = [answer for bracket in audit.brackets if (answer := unproved(audit, bracket)) is not None]
    told = {step.command for answer in answers for step in answer.steps}
    return _run(audit) | {
        "brackets": [
            _bracket(audit, bracket, part["left"])
            for bracket, part in zip(audit.brackets, shown["brackets"], strict=True)
        ],
        "unproved": answers,
        "shift": _shift(audit.settings.get("shift")),
        "next": [step for step in next_steps(audit) if step.command not in told],
        "named": bool(source_of(audit, "model")),
        "glossary": glossary(audit),
        "island": island(shown),
    }


def _run(audit: Audit) -> dict[str, Any]:
    """What was run."""
    settings = {key: value for key, value in audit.settings.items() if key not in ("steps", "notes", "source", "shift")}
    several = len(audit.brackets) > 1
    decided: Counter[str] = Counter()
    for bracket in audit.brackets:
        at = f", {bracket.threat}" if several else ""
        decided.update(f"broken by {r.broken_by}{at}" for r in bracket.records if r.broken)
        decided.update(f"certified by {r.certified_by}{at}" for r in bracket.records if r.certified)
    return {
        "audit": audit,
        "ran": [{"threat": b.threat, "rows": rows} for b in audit.brackets if (rows := _steps(audit, b))],
        "settings": {key: _setting_text(value) for key, value in settings.items()},
        "total": sum(audit.seconds.values()),
        "decided": dict(decided),
    }


def _shift(shift: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Accuracies on shifted data as a table: a row for each corruption, a cell for each severity."""
    if shift is None:
        return None
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in shift["rows"]:
        rows.setdefault(row["corruption"], []).append(row)
    return {"rows": rows, **{key: shift[key] for key in ("severities", "inputs", "clean_accuracy")}} | {
        "error": shift["mean_corruption_error"]
    }


def _steps(audit: Audit, bracket: Bracket) -> list[dict[str, Any]]:
    """What each step did at one threat; of an audit of version 0.1.0 only the time of each method is known."""
    plan = audit.settings.get("steps", ())
    if not bracket.steps:
        known = [(*name.partition(" "), seconds) for name, seconds in bracket.seconds.items() if " " in name]
        rest = {"inputs": "", "result": "", "options": {}}
        return [{"stage": a, "method": b, "time": duration(seconds), **rest} for a, _, b, seconds in known]
    rows: list[dict[str, Any]] = []
    for step in bracket.steps:
        options = plan[step.number - 1]["options"] if step.number <= len(plan) else {}
        row = {"stage": step.stage, "method": step.method, "inputs": step.inputs, "time": duration(step.seconds)}
        rows.append(row | {"result": _result(step), "options": options})
    if "trust" in bracket.seconds:
        broken = sum(r.broken_by == "probe" for r in bracket.records)
        probes = {"stage": "probes", "method": "of the attack", "inputs": "", "options": {}}
        result = f"{broken} broken" if broken else "none broken"
        rows.append(probes | {"result": result, "time": duration(bracket.seconds["trust"])})
    return rows


def _result(step: Ran) -> str:
    if step.stage == "attack":
        return f"{step.decided} broken" if step.decided else "none broken"
    counts = {"proved": step.decided, "at a smaller budget": step.part, "broken": step.broken}
    return ", ".join(f"{count} {text}" for text, count in counts.items() if count) or "none proved"


def _bracket(audit: Audit, bracket: Bracket, left: int) -> dict[str, Any]:
    """What is shown of one threat; `left` examples have no pictures."""
    last, name = bracket.levels[-1], class_namer(audit)
    kind = parts_of(bracket.threat).kind
    return {
        "bracket": bracket,
        "last": last,
        "kind": kind,
        "unit": UNITS.get(kind, ""),
        "attacks": _attacks(bracket),
        "certificates": _certificates(bracket),
        "population": (last.certified_interval[0], last.attacked_interval[1]),
        "plot": Markup(bracket_plot(bracket)),
        "tables": _tables(audit, bracket),
        "broken": sum(bool(r.broken) for r in bracket.records),
        "left": left,
        "first": [
            {
                "record": r,
                "label": name(r.label),
                "prediction": name(r.prediction),
                "state": state(r, bracket.budgets[-1]),
                "certified": like(r.certified or 0.0, bracket.threat),
                "broken": like(r.broken or 0.0, bracket.threat),
            }
            for r in bracket.records[:FIRST]
        ],
    }


def _tables(audit: Audit, bracket: Bracket) -> list[dict[str, Any]]:
    """By class, in the order of their numbers, then by each column of groups; a table of one group says nothing."""
    name = class_namer(audit)
    # Padded, so that sorted texts are sorted numbers.
    by_class = [
        Group(name(int(group.name)), group.clean, group.largest)
        for group in bracket.by([f"{record.label:09d}" for record in bracket.records])
    ]
    found = [("class", by_class), *((column, list(bracket.by(values))) for column, values in audit.groups.items())]
    return [
        {"title": title, "rows": groups[:MOST_GROUPS], "left": max(len(groups) - MOST_GROUPS, 0)}
        for title, groups in found
        if len(groups) > 1
    ]


def _attacks(bracket: Bracket) -> str:
    """Names of the attacks that were run at this threat: what holds held against all of them."""
    found = [step.removeprefix("attack ") for step in bracket.seconds if step.startswith("attack ")]
    return ", ".join(found) or "the attack"


def _certificates(bracket: Bracket) -> str:
    """Names of the certificates that proved something at the largest budget, the most successful first."""
    counts = Counter(r.certified_by for r in bracket.records if (r.certified or 0.0) >= bracket.budgets[-1])
    return ", ".join(name for name, _ in counts.most_common())


def _told_apart(audits: Sequence[Audit]) -> list[Audit]:
    """The audits under names of their own: audits that share a name get numbers."""
    counts = Counter(audit.name for audit in audits)
    return [
        replace(audit, name=f"{audit.name} ({i})") if counts[audit.name] > 1 else audit
        for i, audit in enumerate(audits, 1)
    ]


def _threats(audits: Sequence[Audit]) -> list[str]:
    """Threats that two or more audits share; where they share none, all of them."""
    counts = Counter(bracket.threat for audit in audits for bracket in audit.brackets)
    return [threat for threat, count in counts.items() if count > 1] or list(counts)


def _shared(audits: Sequence[Audit], threat: str, *, same: bool) -> dict[str, Any]:
    """The models at one threat."""
    found = [(audit, bracket) for audit in audits for bracket in audit.brackets if bracket.threat == threat]
    rows = [
        {"name": audit.name, "bracket": b, "last": b.levels[-1], "plot": Markup(bracket_plot(b))} for audit, b in found
    ]
    differ = _differences(found) if same and len(found) > 1 else None
    return {
        "threat": threat,
        "unit": UNITS.get(threat.partition(":")[0], ""),
        "rows": rows,
        "differ": differ if differ is None else differ[:MOST_DIFFERENT],
        "count": len(differ or ()),
    }


def _differences(found: Sequence[tuple[Audit, Bracket]]) -> list[dict[str, Any]]:
    """Inputs that one model is proved to hold and another one does not."""
    name = class_namer(found[0][0])
    rows = []
    for records in zip(*(bracket.records for _, bracket in found), strict=True):
        states = [state(r, bracket.budgets[-1]) for r, (_, bracket) in zip(records, found, strict=True)]
        if "certified" in states and {"broken", "misclassified"} & set(states):
            rows.append({"position": records[0].position, "label": name(records[0].label), "states": states})
    return rows


def _setting_text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={item}" for key, item in value.items()) or "defaults"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def duration(seconds: float) -> str:
    """Time as text.

    >>> duration(0.31), duration(75), duration(7322)
    ('0.3 s', '1 min 15 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours} h {left} min" if hours else f"{minutes} min {rest} s"
