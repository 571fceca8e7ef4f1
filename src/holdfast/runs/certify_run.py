"""One certificate on many inputs: rows for a file; what samples keeps its counts and goes on after a kill."""

import csv
import io
import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from holdfast.audits.inputs import to_model
from holdfast.certificates import certify
from holdfast.certificates.smoothing.votes import TENSORS, Counts, load_counts
from holdfast.errors import InputError, StorageError
from holdfast.registry import get
from holdfast.results import CertifyResult
from holdfast.threats import Threat
from holdfast.utils.hashes import hash_model, hash_tensors
from holdfast.utils.options import check_options
from holdfast.utils.progress import progress_bars

Row = dict[str, object]
SAVE_EVERY = 1.0  # seconds: what a kill can cost


def certify_run(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    method: str,
    *,
    options: Mapping[str, Any] | None = None,
    counts_file: Path | None = None,
    resume: bool = False,
    batch_size: int = 50,
) -> list[Row]:
    """A row for each input: input, label, certified, margin, radius, by; of what samples also alpha and samples.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode. Batches are moved to its device and dtype.
        options: of the method, such as {"sigma": 0.5}.
        counts_file: where a method that samples keeps how far it has come.
        resume: go on with `counts_file`, with the same settings; the radius may be another.
        batch_size: inputs worked on at a time, for a method that does not sample.
    """
    entry = get("certify", method)
    chosen = check_options(entry.text_options, options or {}, f"method '{method}'")
    if resume and (counts_file is None or "counts" not in entry.options):
        raise InputError("--resume needs --out and a method that samples, such as smoothing; others run anew")
    if "counts" in entry.options:
        x, y = to_model(model, x, y)
        result, drawn = _sampled(model, x, y, threat, method, chosen, counts_file, resume)
        extra: list[Row] = [{"alpha": result.alpha, "samples": count} for count in drawn.tolist()]
        return [row | more for row, more in zip(_rows(result, y, 0, method), extra, strict=True)]
    rows: list[Row] = []
    with progress_bars() as bars:
        bar = bars.add_task(f"certify {threat}", total=len(x))
        for start in range(0, len(x), batch_size):
            part = to_model(model, x[start : start + batch_size], y[start : start + batch_size])
            rows += _rows(certify(model, *part, threat, method, **chosen), part[1], start, method)
            bars.advance(bar, len(part[0]))
    return rows


def _rows(result: CertifyResult, y: Tensor, start: int, method: str) -> list[Row]:
    radius = [None] * len(y) if result.radius is None else result.radius.tolist()
    columns = (y, result.certified, result.margin)
    named = zip(*(column.tolist() for column in columns), radius, result.by or (method,) * len(y), strict=True)
    keys = ("input", "label", "certified", "margin", "radius", "by")
    return [dict(zip(keys, (start + i, *row), strict=True)) for i, row in enumerate(named)]


def _sampled(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    method: str,
    options: dict[str, Any],
    path: Path | None,
    resume: bool,
) -> tuple[CertifyResult, Tensor]:
    """The result and the samples drawn for each input; the counts are saved as they come, and when it is stopped."""
    keys = {"model": hash_model(model), "data": hash_tensors({"x": x, "y": y})}
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
            drawn = int(counts.drawn.sum())
            text = f"certify {threat}, {int((left == 0).sum())} of {len(x)} inputs decided, samples"
            bars.update(bar, description=text, completed=drawn, total=drawn + int(left.sum()))
            if time.monotonic() - saved > SAVE_EVERY:
                save()
                saved = time.monotonic()

        try:
            result = certify(model, x, y, threat, method, counts=latest, watch=watch, **options)
        finally:
            save()
    return result, y * 0 if latest is None else latest.drawn


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


def write_rows(path: Path, rows: list[Row]) -> None:
    """Rows as CSV or JSON, by the ending of the path; written whole or not at all."""
    buffer = io.StringIO()
    if path.suffix == ".json":
        # JSON has no infinity, which is what an overflowed bound proves.
        finite = [{k: None if v in (math.inf, -math.inf) else v for k, v in row.items()} for row in rows]
        json.dump(finite, buffer, indent=1, allow_nan=False)
    else:
        writer = csv.DictWriter(buffer, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(buffer.getvalue(), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
