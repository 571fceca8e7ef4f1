"""An audit in the forms that other places take: a table for spreadsheets, a badge, a snippet for a model card."""

import csv
import io
from html import escape

from holdfast.audits.bracket import DOUBTS, interval_text, percent
from holdfast.audits.report.commands import command
from holdfast.audits.report.gallery import class_namer, state
from holdfast.audits.report.markdown import code, fenced, plain
from holdfast.audits.report.unproved import unproved
from holdfast.audits.result import Audit
from holdfast.audits.words import EXACT

COLUMNS = (
    *("threat", "position", "label", "class", "prediction", "state"),
    *("certified", "certified_by", "broken", "broken_by", "prediction_adv", "gap"),
)
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet takes for the start of one
_BADGE = {
    "attacked": "#a34100",
    "certified": "#005a92",
    "name": "#3d4453",
    "doubt": "#7a1f2b",
}  # apart for every kind of colour vision


def to_csv(audit: Audit) -> str:
    """One row for each threat and input; the columns of the groups last, each after the word "group".

    Empty cells are None. A text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    name = class_namer(audit)
    target = io.StringIO()
    rows = csv.writer(target, lineterminator="\n")
    rows.writerow([*COLUMNS, *(f"group {column}" for column in audit.groups)])
    for bracket in audit.brackets:
        for i, r in enumerate(bracket.records):
            known = (bracket.threat, r.position, r.label, _text(name(r.label)), r.prediction)
            low, high = (r.certified, r.certified_by), (r.broken, r.broken_by, r.prediction_adv)
            groups = (_text(values[i]) for values in audit.groups.values())
            rows.writerow([*known, state(r, bracket.budgets[-1]), *low, *high, r.gap, *groups])
    return target.getvalue()


def _text(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text


def badge(audit: Audit) -> str:
    """SVG of one line: what is certified and what survives at the first threat, and any doubt about the attacks."""
    bracket = audit.brackets[0]
    last = bracket.levels[-1]
    certified = _whole(last.certified_accuracy) if bracket.proved else "not run"
    both = [
        (f"certified {certified}", _BADGE["certified"]),
        (f"attacked {_whole(last.attacked_accuracy)}", _BADGE["attacked"]),
    ]
    ends = [(bracket.answer, _BADGE["certified"])] if bracket.exact else both
    parts = [(f"robust @ {bracket.threat}", _BADGE["name"]), *ends]
    if audit.verdict is not None and audit.doubt:
        parts.append((DOUBTS[audit.verdict.level], _BADGE["doubt"]))
    # Of common sans-serif faces at 11 px a letter takes 6.4 px on average; `textLength` fits the text to its box.
    widths = [6.4 * len(text) + 12 for text, _ in parts]
    total, x = sum(widths), 0.0
    label = escape(", ".join(text for text, _ in parts))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total:.0f}" height="20" role="img" aria-label="{label}">',
        f"<title>{label}</title>",
        f'<clipPath id="r"><rect width="{total:.0f}" height="20" rx="3"/></clipPath><g clip-path="url(#r)">',
    ]
    for (_, colour), width in zip(parts, widths, strict=True):
        lines.append(f'<rect x="{x:.1f}" width="{width:.1f}" height="20" fill="{colour}"/>')
        x += width
    lines.append('</g><g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">')
    x = 0.0
    for (text, _), width in zip(parts, widths, strict=True):
        length = f'textLength="{width - 12:.1f}"'
        lines.append(f'<text x="{x + width / 2:.1f}" y="14" {length}>{escape(text)}</text>')
        x += width
    return "\n".join([*lines, "</g></svg>", ""])


def _whole(share: float) -> str:
    return f"{100 * share:.0f} %"


def model_card(audit: Audit) -> str:
    """Markdown for a model card: the answer, a table, how far to trust it, and what it takes to repeat it."""
    last = [bracket.levels[-1] for bracket in audit.brackets]
    seconds = sum(audit.seconds.values())
    lines = [
        "## Adversarial robustness",
        "",
        f"![{plain(audit.headline)}](badge.svg)",
        "",
        f"**{plain(audit.headline)}** Measured by Holdfast on {plain(audit.data)}, inputs:",
        f"{plain(audit.drawn or str(audit.inputs))}, from both sides: what is certified holds against every attack of",
        "the threat; what an attack broke does not hold.",
        "",
        *_unproved(audit),
        "| threat | clean | certified (95 %) | under attack (95 %) | undecided |",
        "|---|---|---|---|---|",
    ]
    for bracket, level in zip(audit.brackets, last, strict=True):
        proved = f"{percent(level.certified_accuracy)} ({interval_text(level.certified_interval)})"
        lines.append(
            f"| {plain(bracket.threat)} | {percent(bracket.clean)} | {proved if bracket.proved else 'not run'} | "
            f"{percent(level.attacked_accuracy)} ({interval_text(level.attacked_interval)}) | "
            f"{level.attacked - level.certified if bracket.proved else 'not known'} |"
        )
    verdict = audit.verdict
    trust = "not probed" if verdict is None else f"**{verdict.level}** ({plain(verdict.reason)})"
    lines += ["", f"- The attacks: {trust}."]
    lines += [f"- {plain(b.threat)}: {EXACT}." for b in audit.brackets if b.exact]
    lines += [f"- {plain(note)}" for note in audit.notes]
    if audit.settings.get("alpha"):
        lines.append(f"- Each proof is wrong with probability {audit.settings['alpha']:g} at most.")
    lines += [f"- Not done, {plain(b.threat)}: {plain(text)}" for b in audit.brackets for text in b.skipped]
    versions = ", ".join(f"{key} {value}" for key, value in audit.versions.items())
    lines += [f"- sha256 of the {plain(key)}: {code(value)}" for key, value in audit.hashes.items()]
    lines += [f"- {plain(versions)}; {plain(audit.created)}; {seconds:.0f} s of work."]
    lines += ["", "To repeat it, with the same versions:", "", fenced(_repeat(audit)), ""]
    return "\n".join(lines)


def _unproved(audit: Audit) -> list[str]:
    """What it means that nothing is proved, where that is so."""
    found = [answer for bracket in audit.brackets if (answer := unproved(audit, bracket)) is not None]
    return [line for answer in found for line in (f"{plain(answer.meaning)} {plain(answer.reach)}", "")]


def _repeat(audit: Audit) -> str:
    """The command; MODEL stands for the file of the model."""
    known = {"n": audit.inputs, "budget": audit.settings.get("plan"), "seed": audit.settings.get("seed")}
    options = [word for key, value in known.items() if value is not None for word in (f"--{key}", str(value))]
    return command("audit", audit, [bracket.threat for bracket in audit.brackets], *options)
