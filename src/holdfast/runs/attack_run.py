"""One attack on many inputs: stored as it goes, resumed after a kill, summed up at the end."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress, TextColumn
from torch import Tensor, nn

from holdfast.attacks import attack as run_attack
from holdfast.attacks import nearest as run_nearest
from holdfast.attacks.core.minimum_norm import BALLS, check_norm
from holdfast.attacks.core.nearest import METHODS
from holdfast.audits.inputs import exact_text, inputs_of, to_model, to_numpy, versions_of
from holdfast.audits.stages import LEARNED
from holdfast.checks import check_inputs, check_labels, check_logits, check_task
from holdfast.data import Dataset
from holdfast.errors import InputError, did_you_mean
from holdfast.registry import get
from holdfast.results import AttackResult
from holdfast.runs.attack_files import PNG, Found, join, open_folder, save_part, save_results
from holdfast.runs.attack_png import save_pngs
from holdfast.runs.attack_summary import summarize
from holdfast.threats import Threat
from holdfast.utils.hashes import hash_model, hash_tensors
from holdfast.utils.options import check_options, options_of
from holdfast.utils.png import is_picture
from holdfast.utils.progress import progress_bars

JSON_VERSION = 1

Find = Callable[[Tensor, Tensor, Tensor], tuple[AttackResult, Tensor]]
"""(x, y, index) -> what was found, and the distance of each example (B,), infinity where there is none."""


@dataclass(frozen=True, eq=False)
class AttackRun:
    """A finished run: what was found for each input, the content of `summary.json`, and the folder."""

    found: Found
    summary: dict[str, Any]
    folder: Path


def attack_run(
    model: nn.Module,
    data: Dataset | str | tuple[Tensor, Tensor],
    goal: Threat | str,
    method: str | None = None,
    *,
    out: str | Path,
    options: Mapping[str, Any] | None = None,
    n: int = 500,
    split: str = "test",
    seed: int = 0,
    resume: bool = False,
    png: bool = False,
    batch_size: int = 100,
    progress: bool = True,
    name: str | None = None,
) -> AttackRun:
    """Attacks the first n inputs and keeps what it finds in a folder; `attack_files` lists its files.

    Random numbers belong to the position of an input in the data, and a resumed run cuts its batches as an
    uninterrupted one does: both give the same results.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode. Batches are moved to its device and dtype.
        data: a data set, its name, or inputs (N, ...) in the valid range with labels (N,).
        goal: a threat, to look for any example in it; or a norm, "linf", "l2" or "l1", to look for the nearest one.
        method: a name from `hf.methods("attack")`, "cascade" if none is given; for a norm one of `hf.nearest`, "auto".
        out: folder of the run.
        options: of the method, such as {"steps": 20}.
        n: attack the first n inputs of the split, or all of them if there are fewer.
        split: "test" or "train", where `data` is a data set.
        seed: fixes every random choice.
        resume: go on with the run of the folder; without it a folder that holds one is refused.
        png: also write each example as a picture, if its 8-bit version still is one.
        batch_size: inputs worked on, and stored, at a time.
        progress: show a bar with the number of survivors, if the error output is a terminal.
        name: what to call the model in the summary; its class if not given.
    """
    for key, value in (("n", n), ("batch_size", batch_size)):
        if value < 1:
            raise InputError(f"{key} must be at least 1, got {value}")
    threat = goal if isinstance(goal, Threat) else None
    method = method or ("cascade" if threat else "auto")
    chosen = _checked(goal, method, options)
    label, _, x, y = inputs_of(data, split, n)
    _check_data(model, x, y, threat or BALLS[str(goal)](0.0), batch_size, png=png)
    hashes = {"model": hash_model(model), "data": hash_tensors({"x": x, "y": y})}
    aim = {"threat": str(threat)} if threat else {"norm": str(goal)}
    settings = {**aim, "method": method, "options": chosen, "seed": seed}
    exact = {"threat": exact_text(threat)} if threat else {}
    fingerprint = {**settings, **exact, **hashes, "n": len(x), "holdfast": version("holdfast")}

    folder = Path(out)
    parts = open_folder(folder, fingerprint, resume=resume)
    search = partial(_in_threat, threat=threat) if threat else partial(_nearest, norm=str(goal))
    given = dict(chosen)
    if threat and "data" in get("attack", method).options:
        given["data"] = to_model(model, x[:LEARNED], y[:LEARNED])[0]
    find = partial(search, model, method=method, seed=seed, options=given)
    with progress_bars(progress, TextColumn("{task.fields[held]} not broken")) as bars:
        parts += _attack_rest(model, x, y, find, parts, folder, batch_size, bars, f"{method} {goal}")
    found = join(parts)
    pictures = save_pngs(model, x, y, found, threat, folder / PNG, batch_size=batch_size) if png else None
    summary = {
        "schema_version": JSON_VERSION,
        "model": name or type(model).__name__,
        "data": label,
        **settings,
        **summarize(found, nearest=threat is None),
        "png": pictures and asdict(pictures),
        "versions": versions_of(model),
        "hashes": hashes,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    save_results(folder, to_numpy(to_model(model, x, y)[0]), to_numpy(y), found, summary)
    return AttackRun(found, summary, folder)


def _checked(goal: Threat | str, method: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options, after a look at the method, at the threat or norm, and at the options themselves."""
    if isinstance(goal, Threat):
        entry = get("attack", method)
        entry.check(goal, {})
        known = entry.text_options
        return check_options(
            {name: known[name] for name in known if name != "goal"}, options or {}, f"method '{method}'"
        )
    check_norm(goal)
    if method not in METHODS:
        raise InputError(f"unknown method '{method}' for the nearest example. " + did_you_mean(method, METHODS))
    known = {name: option for name, option in options_of(METHODS[method]).items() if option.plain and name != "goal"}
    return check_options(known, options or {}, f"method '{method}'")


def _check_data(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, batch_size: int, *, png: bool) -> None:
    """Refuse what cannot be attacked before a folder is made."""
    logits = check_task(model, *to_model(model, x[:batch_size], y[:batch_size]), threat)
    check_inputs(x, threat.low, threat.high)
    check_labels(y, len(x), logits.shape[1])
    if png and not is_picture(tuple(x.shape[1:])):
        raise InputError(f"png needs images of shape (C, H, W), C = 1 or 3; the inputs have {tuple(x.shape[1:])}")


def _in_threat(
    model: nn.Module, x: Tensor, y: Tensor, index: Tensor, *, threat: Threat, options: dict[str, Any], **how: Any
) -> tuple[AttackResult, Tensor]:
    result = run_attack(model, x, y, threat, index=index, chunk=len(x), **how, **options)
    return result, torch.where(result.success, threat.distance(result.x_adv, x), torch.inf)


def _nearest(
    model: nn.Module, x: Tensor, y: Tensor, index: Tensor, *, norm: str, options: dict[str, Any], **how: Any
) -> tuple[AttackResult, Tensor]:
    near = run_nearest(model, x, y, norm, index=index, chunk=len(x), **how, **options)
    success = torch.isfinite(near.distance)
    return AttackResult(near.x_adv, success, near.by, near.gradients, near.queries), near.distance


def _attack_rest(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    find: Find,
    stored: list[Found],
    folder: Path,
    batch_size: int,
    bars: Progress,
    text: str,
) -> list[Found]:
    """Attacks the inputs that are not stored yet, batch by batch, and stores them.

    A killed run has stored whole batches from the front, so a resumed one cuts the rest just as it would have.
    """
    done = {int(i) for part in stored for i in part.index}
    todo = [i for i in range(len(x)) if i not in done]
    held = len(done) - sum(int(part.success.sum()) for part in stored)
    bar = bars.add_task(text, total=len(x), completed=len(done), held=held)
    parts = []
    for start in range(0, len(todo), batch_size):
        index, began = torch.tensor(todo[start : start + batch_size]), time.perf_counter()
        x_part, y_part = to_model(model, x[index], y[index])
        result, distance = find(x_part, y_part, index)
        prediction = check_logits(model, result.x_adv).argmax(1)
        part = Found(
            index=to_numpy(index),
            x_adv=to_numpy(result.x_adv),
            success=to_numpy(result.success),
            by=np.array(result.by, dtype=np.str_),
            prediction=to_numpy(prediction),
            distance=to_numpy(distance),
            gradients=to_numpy(result.gradients),
            queries=to_numpy(result.queries),
            seconds=np.full(len(index), (time.perf_counter() - began) / len(index)),
        )
        save_part(folder, part)
        parts.append(part)
        held += int((~result.success).sum())
        bars.update(bar, advance=len(index), held=held)
    return parts
