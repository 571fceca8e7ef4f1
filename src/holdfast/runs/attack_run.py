"""One attack on many inputs: stored as it goes, resumed after a kill, summed up at the end."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
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
from holdfast.attacks.core.nearest import nearest_options
from holdfast.audits.inputs import exact_text, to_model, to_numpy, versions_of
from holdfast.audits.job import LEARNED
from holdfast.checks import check_inputs, check_labels, check_logits, check_task
from holdfast.data.draw import sample
from holdfast.data.given import Given
from holdfast.errors import InputError
from holdfast.registry import get
from holdfast.results import AttackResult
from holdfast.runs.attack_files import (
    PNG,
    Found,
    began_with_the_first,
    join,
    open_folder,
    save_part,
    save_results,
)
from holdfast.runs.attack_png import save_pngs
from holdfast.runs.attack_summary import summarize
from holdfast.threats import Threat
from holdfast.utils.hashes import hash_model, hash_tensors
from holdfast.utils.options import check_options
from holdfast.utils.png import is_picture
from holdfast.utils.progress import progress_bars

JSON_VERSION = 1


@dataclass(frozen=True, eq=False)
class AttackRun:
    """A finished run: what was found for each input, the content of `summary.json`, and the folder."""

    found: Found
    summary: dict[str, Any]
    folder: Path


def attack_run(
    model: nn.Module,
    data: Given,
    goal: Threat | str,
    method: str | None = None,
    *,
    out: str | Path,
    options: Mapping[str, Any] | None = None,  # of the method, such as {"steps": 20}
    n: int = 500,  # attack the first n inputs of the split, or all of them if there are fewer
    split: str = "test",
    seed: int = 0,
    resume: bool = False,  # go on with the run of the folder; without it a folder that holds one is refused
    png: bool = False,  # also write each example as a picture, if its 8-bit version still is one
    batch_size: int = 100,  # inputs worked on, and stored, at a time
    progress: bool = True,
    name: str | None = None,  # what to call the model in the summary; its class if not given
) -> AttackRun:
    """Attack n inputs and keep what is found in a folder; `attack_files` lists its files.

    Random numbers belong to the place of an input among the n, and a resumed run cuts its batches as an
    uninterrupted one does: both give the same results.

    Args:
        data: a data set, its name or path, a torch Dataset, a DataLoader, or a pair (x, y) of tensors or arrays.
        goal: a threat, to look for any example in it; or a norm, "linf", "l2" or "l1", to look for the nearest one.
        method: a name from `hf.methods("attack")`, "cascade" if none is given; for a norm one of `hf.nearest`, "auto".
        n: attack n inputs of the split, drawn by `seed` with the classes balanced, or all of them if there are fewer.
    """
    for key, value in (("n", n), ("batch_size", batch_size)):
        if value < 1:
            raise InputError(f"{key} must be at least 1, got {value}")
    threat = goal if isinstance(goal, Threat) else None
    method = method or ("cascade" if threat else "auto")
    chosen = _checked(goal, method, options)
    folder = Path(out)
    first = resume and began_with_the_first(folder)
    taken = sample(data, n, split=split, seed=seed, first=first)
    x, y = taken.x, taken.y
    threat = threat and threat.select(taken.index)
    _check_data(model, x, y, threat or BALLS[str(goal)](0.0), batch_size, png=png)
    hashes = {"model": hash_model(model), "data": hash_tensors({"x": x, "y": y})}
    aim = {"threat": str(threat)} if threat else {"norm": str(goal)}
    settings = {**aim, "method": method, "options": chosen, "seed": seed}
    exact = {"threat": exact_text(threat)} if threat else {}
    drawn = {} if first else {"drawn": taken.drawn}
    fingerprint = {**settings, **exact, **hashes, "n": len(x), **drawn, "holdfast": version("holdfast")}

    parts = open_folder(folder, fingerprint, resume=resume)
    learns = threat is not None and "data" in get("attack", method).options
    given = {**chosen, **({"data": to_model(model, x[:LEARNED], y[:LEARNED])[0]} if learns else {})}
    find = partial(_find, model, goal, method=method, seed=seed, **given)
    with progress_bars(progress, TextColumn("{task.fields[held]} not broken")) as bars:
        parts += _attack_rest(model, x, y, find, parts, folder, batch_size, bars, f"{method} {goal}")
    found = join(parts)
    found = replace(found, index=to_numpy(taken.index[found.index]))
    pictures = save_pngs(model, x, y, found, threat, folder / PNG, batch_size=batch_size) if png else None
    summary = {
        "schema_version": JSON_VERSION,
        "model": name or type(model).__name__,
        "data": taken.name,
        "total": taken.total,
        "drawn": taken.drawn,
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
        return check_options(entry.text_options, options or {}, f"method '{method}'")
    check_norm(goal)
    known = {name: option for name, option in nearest_options(method).items() if option.plain}
    return check_options(known, options or {}, f"method '{method}'")


def _check_data(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, batch_size: int, *, png: bool) -> None:
    """Refuse what cannot be attacked before a folder is made."""
    logits = check_task(model, *to_model(model, x[:batch_size], y[:batch_size]), threat)
    check_inputs(x, threat.low, threat.high)
    check_labels(y, len(x), logits.shape[1])
    if png and not is_picture(tuple(x.shape[1:])):
        raise InputError(f"png needs images of shape (C, H, W), C = 1 or 3; the inputs have {tuple(x.shape[1:])}")


def _find(model: nn.Module, goal: Threat | str, x: Tensor, y: Tensor, **how: Any) -> tuple[AttackResult, Tensor]:
    """What the attack finds, and the distance of each example (B,), infinity where there is none."""
    if isinstance(goal, Threat):
        result = run_attack(model, x, y, goal, chunk=len(x), **how)
        return result, torch.where(result.success, goal.distance(result.x_adv, x), torch.inf)
    near = run_nearest(model, x, y, goal, chunk=len(x), **how)
    success = torch.isfinite(near.distance)
    return AttackResult(near.x_adv, success, near.by, near.gradients, near.queries), near.distance


def _attack_rest(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    find: Callable[..., tuple[AttackResult, Tensor]],
    stored: list[Found],
    folder: Path,
    batch_size: int,
    bars: Progress,
    text: str,
) -> list[Found]:
    """Attack the inputs that are not stored yet, batch by batch, and store them.

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
        result, distance = find(x_part, y_part, index=index)
        prediction = check_logits(model, result.x_adv).argmax(1)
        tensors = {"index": index, "prediction": prediction, "distance": distance}
        tensors |= {key: getattr(result, key) for key in ("x_adv", "success", "gradients", "queries")}
        by, seconds = np.array(result.by, dtype=np.str_), (time.perf_counter() - began) / len(index)
        arrays = {key: to_numpy(tensor) for key, tensor in tensors.items()}
        part = Found(**arrays, by=by, seconds=np.full(len(index), seconds))
        save_part(folder, part)
        parts.append(part)
        held += int((~result.success).sum())
        bars.update(bar, advance=len(index), held=held)
    return parts
