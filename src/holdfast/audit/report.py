"""One self-contained HTML page for one audit or for several models side by side."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from holdfast.audit.plot import bracket_plot
from holdfast.audit.result import Audit, Record, interval_text, percent
from holdfast.errors import InputError
from holdfast.explain.pictures import signed_map
from holdfast.png import data_uri, is_picture

_TEMPLATE = "report.html.j2"


@dataclass(frozen=True)
class _Card:
    """One entry of the gallery; the pictures are empty where an input is no image."""

    record: Record
    label: str
    before: str
    after: str
    pictures: tuple[tuple[str, str], ...]


def render(audits: Sequence[Audit]) -> str:
    """The report as HTML: no script, no external resource; light and dark follow the reader's setting.

    Args:
        audits: at least one; each gets a section, and several get their brackets side by side on top.
    """
    if not audits:
        raise InputError("a report needs at least one audit, got none")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "interval": interval_text, "duration": duration}
    return environment.get_template(_TEMPLATE).render(sections=[_section(audit) for audit in audits])


def _section(audit: Audit) -> dict[str, Any]:
    last = audit.levels[-1]
    return {
        "audit": audit,
        "last": last,
        "population": (last.certified_interval[0], last.attacked_interval[1]),
        "plot": Markup(bracket_plot(audit)),
        "cards": _cards(audit),
        "explained": any(example.attribution is not None for example in audit.examples),
        "broken": sum(bool(r.broken) for r in audit.records),
        "broken_by": Counter(r.broken_by for r in audit.records if r.broken).most_common(),
        "certified_by": Counter(r.certified_by for r in audit.records if r.certified).most_common(),
        "settings": {key: _setting_text(value) for key, value in audit.settings.items()},
        "total": sum(audit.seconds.values()),
    }


def _cards(audit: Audit) -> list[_Card]:
    by_position = {record.position: record for record in audit.records}
    low, high = audit.valid_range

    def class_name(number: int | None) -> str:
        if number is not None and number < len(audit.classes):
            return audit.classes[number]
        return f"class {number}"

    cards = []
    for example in audit.examples:
        record = by_position[example.position]
        pictures: tuple[tuple[str, str], ...] = ()
        if is_picture(example.x.shape):
            change = example.x_adv.astype(np.float64) - example.x
            scale = float(np.abs(change).max()) or 1.0
            pictures = (
                ("original", data_uri(example.x, low=low, high=high)),
                ("attacked", data_uri(example.x_adv, low=low, high=high)),
                # Grey is no change; the scale makes the largest one black or white.
                (f"diff. {(high - low) / (2 * scale):.3g}x", data_uri(change, low=-scale, high=scale)),
            )
            if example.attribution is not None:
                pictures += (("decides", data_uri(signed_map(torch.tensor(example.attribution)))),)
        label, before, after = map(class_name, (record.label, record.prediction, record.prediction_adv))
        cards.append(_Card(record, label, before, after, pictures))
    return cards


def _setting_text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items()) or "defaults"
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
