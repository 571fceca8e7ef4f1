"""One certificate on many inputs: rows for a file; what samples keeps its counts and goes on after a kill."""

import csv
import io
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.audits.inputs import exact_text, to_model
from holdfast.certificates import certify
from holdfast.certificates.smoothing.votes import TENSORS, Counts, load_counts
from holdfast.checks import check_logits
from holdfast.errors import InputError, StorageError
from holdfast.registry import get
from holdfast.results import CertifyResult
from holdfast.runs.journal import Journal
from holdfast.runs.journal import Row as Row
from holdfast.threats import Threat
from holdfast.utils.files import write_text
from holdfast.utils.hashes import hash_model, hash_tensors
from holdfast.utils.options import check_options
from holdfast.utils.progress import heard_by, progress_bars, told

Options = dict[str, Any]
SAVE_EVERY = 1.0  # seconds: what a kill can cost
FEW = 8  # inputs at a time of a method with a time limit for each: what a kill can cost there


def certify_run(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    method: str,
    *,
    index: Tensor | None = None,
    drawn: str | None = None,
    options: Mapping[str, Any] | None = None,
    counts_file: Path | None = None,
    rows_file: Path | None = None,
    resume: bool = False,
    batch_size: int = 50,
) -> list[Row]:
    """A row for each input: input, label, certified, margin, radius, by; of what samples also alpha and samples.

    For patches also worst_row, worst_column and worst_class: where the margin is smallest, and against which class.
    Batches are moved to the device and dtype of the model, `batch_size` inputs at a time for a method that does not
    sample, and fewer for one with a time limit for each. One that samples keeps in `counts_file` how far it has come;
    `resume` goes on with that file, with the same settings, though the radius may be another. Any other keeps its rows
    in `rows_file`; the caller removes it when the output is written. `index` (B,) are the positions of the inputs in
    the data, 0 to B - 1 if not given, and `drawn` says how they were chosen, which both files keep. A method with a
    time limit also looks for counter-examples, and adds the column `broken`.
    """
    entry = get("certify", method)
    chosen = check_options(entry.text_options, options or {}, f"method '{method}'")
    if resume and counts_file is None and rows_file is None:
        raise InputError("--resume needs --out, beside which a run keeps what it has done")
    positions = list(range(len(x))) if index is None else index.tolist()
    if "counts" in entry.options:
        x, y = to_model(model, x, y)
        result, samples = _sampled(model, x, y, threat, method, chosen, counts_file, resume, drawn)
        extra: list[Row] = [{"alpha": result.alpha, "samples": count} for count in samples.tolist()]
        return [row | more for row, more in zip(_rows(result, y, positions, method), extra, strict=True)]
    about = {"model": hash_model(model), "data": hash_tensors({"x": x, "y": y}), "threat": exact_text(threat)}
    journal = Journal(rows_file, about | {"method": method, "options": chosen, "drawn": drawn}, resume=resume)
    todo = torch.tensor([i for i, at in enumerate(positions) if at not in journal.rows], dtype=torch.long)
    searches = "time_limit" in entry.options
    with progress_bars() as bars:
        text = f"certify {threat}"
        bar = bars.add_task(text, total=len(x), completed=len(x) - len(todo))
        for part in todo.split(min(batch_size, FEW) if searches else batch_size):
            inputs, labels = to_model(model, x[part], y[part])
            with heard_by(told(bars, bar, text)):
                found = certify(model, inputs, labels, threat.select(part), method, **chosen)
            rows = _rows(found, labels, [positions[i] for i in part.tolist()], method)
            if searches:  # where it had nothing to search for, only the inputs themselves can be wrong
                wrong = check_logits(model, inputs if found.x_adv is None else found.x_adv).argmax(1) != labels
                rows = [row | {"broken": lost} for row, lost in zip(rows, wrong.tolist(), strict=True)]
            journal.add(rows)
            bars.advance(bar, len(part))
    return [journal.rows[at] for at in positions]


def one_shot(rows: Sequence[Row], budget: float) -> tuple[float, float]:
    """Certified error and mean certified radius of one evaluation at `budget`: CRE and ACB of Liu et al., 2020.

    A method without radii of its own proves the whole ball or nothing, so that its ACB is budget (1 - CRE).

    >>> one_shot([{"certified": True, "radius": None}, {"certified": False, "radius": None}], 0.1)
    (0.5, 0.05)
    >>> one_shot([{"certified": True, "radius": 0.3}, {"certified": False, "radius": 0.04}], 0.1)
    (0.5, 0.07)
    """
    proved = [bool(row["certified"]) for row in rows]
    own = [row["radius"] for row in rows]
    radii = [
        budget if yes else 0.0 if radius is None else min(budget, float(str(radius)))
        for yes, radius in zip(proved, own, strict=True)
    ]
    return 1 - sum(proved) / len(rows), sum(radii) / len(rows)


def _rows(result: CertifyResult, y: Tensor, positions: list[int], method: str) -> list[Row]:
    radius = [None] * len(y) if result.radius is None else result.radius.tolist()
    columns = (y, result.certified, result.margin)
    named = zip(*(column.tolist() for column in columns), radius, result.by or (method,) * len(y), strict=True)
    keys = ("input", "label", "certified", "margin", "radius", "by")
    rows: list[Row] = [dict(zip(keys, (at, *row), strict=True)) for at, row in zip(positions, named, strict=True)]
    if result.worst_place is None or result.worst_class is None:
        return rows
    worst = zip(result.worst_place.tolist(), result.worst_class.tolist(), strict=True)
    places: list[Row] = [{"worst_row": top, "worst_column": left, "worst_class": k} for (top, left), k in worst]
    return [row | place for row, place in zip(rows, places, strict=True)]


def _sampled(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    method: str,
    options: Options,
    path: Path | None,
    resume: bool,
    drawn: str | None,
) -> tuple[CertifyResult, Tensor]:
    """The result and the samples drawn for each input; the counts are saved as they come, and when it is stopped."""
    keys = {"model": hash_model(model), "data": hash_tensors({"x": x, "y": y})}
    keys |= {} if drawn is None else {"drawn": drawn}
    latest = _stored(path, keys, x) if resume and path is not None else None
    if path is not None and path.exists() and not resume:
        raise InputError(f"'{path}' holds the samples of an earlier run: --resume goes on with them; or delete it")
    saved = time.monotonic()

    def save() -> None:
        if path is not None and latest is not None:
            replace(latest, settings={**latest.settings, **keys}).save(path)

    with progress_bars() as bars:
        bar = bars.add_task(f"certify {threat}", total=None)

        def watch(counts: Counts, left: Tensor) -> None:
            nonlocal latest, saved
            latest = counts
            samples = int(counts.drawn.sum())
            text = f"certify {threat}, {int((left == 0).sum())} of {len(x)} inputs decided, samples"
            bars.update(bar, description=text, completed=samples, total=samples + int(left.sum()))
            if time.monotonic() - saved > SAVE_EVERY:
                save()
                saved = time.monotonic()

        try:
            result = certify(model, x, y, threat, method, counts=latest, watch=watch, **options)
        finally:
            save()
    return result, y * 0 if latest is None else latest.drawn


def began_with_the_first(counts_file: Path) -> bool:
    """Whether version 0.1.0 began to sample, which took the first inputs of the test split; False if there is none."""
    return counts_file.exists() and "drawn" not in load_counts(counts_file).settings


def _stored(path: Path, keys: Mapping[str, str], x: Tensor) -> Counts:
    """The counts of an earlier run of the same model and data."""
    counts = load_counts(path)
    for key, value in keys.items():
        if counts.settings.get(key) != value:
            raise InputError(
                f"'{path}' is of another {key}, or of other inputs; repeat that run or choose another --out"
            )
    own = {key: value for key, value in counts.settings.items() if key not in keys}
    tensors: dict[str, Any] = {name: getattr(counts, name).to(x.device) for name in TENSORS}
    return Counts(**tensors, settings=own)


def _in_json(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def write_rows(path: Path, rows: list[Row]) -> None:
    """Rows as CSV or JSON, by the ending of the path; written whole or not at all."""
    buffer = io.StringIO()
    if path.suffix == ".json":
        # JSON has no infinity, which is what an overflowed bound proves, and no NaN.
        finite = [{k: v if _in_json(v) else None for k, v in row.items()} for row in rows]
        json.dump(finite, buffer, indent=1, allow_nan=False)
    else:
        writer = csv.DictWriter(buffer, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    if not path.parent.is_dir():  # nobody asked for a folder here: it may be a slip of the pen
        raise StorageError(f"cannot write {path}: there is no folder '{path.parent}'")
    write_text(path, buffer.getvalue())
