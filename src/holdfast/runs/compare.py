"""Finished training runs side by side: the same test inputs, the same adversary, one table and one plot.

compare.json, .csv, .md    the table, with every number and as shown
compare.svg                the plot
results/KEY.json           what broke each input of one model, batch by batch: all that going on after a kill needs
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from holdfast.attacks import attack as run_attack
from holdfast.audits.inputs import exact_text, to_model
from holdfast.checks import check_inputs, check_logits
from holdfast.data import Dataset, load_data
from holdfast.data.draw import Sample, part_of, sample
from holdfast.errors import HoldfastError, InputError, did_you_mean
from holdfast.models import load_model
from holdfast.registry import get
from holdfast.runs.compare_plot import FILES, STEPS, Comparison, Row, Score
from holdfast.runs.finished import Run, best_epoch, method_text, read_runs
from holdfast.threats import Threat
from holdfast.threats import threat as read_threat
from holdfast.training.folder import MODEL
from holdfast.utils.files import write_json
from holdfast.utils.hashes import hash_tensors
from holdfast.utils.limits import parse_json, read_text
from holdfast.utils.progress import progress_bars
from holdfast.utils.resume import check_folder, reading

ATTACKS = ("autoattack", "cascade", "none")
PAIR = "apgd-ce-dlr"
RESULTS = "results"
_BATCH = 100  # inputs attacked, and stored, at a time; the answer does not depend on it
_SEED = 0

Settings = dict[str, Any]
Attacks = dict[str, dict[str, Any]]  # the options of each
Broken = dict[str, list[str]]
"""For each attack, what broke each input: "clean" where it is misclassified unchanged, "" where it held."""


def compare(
    runs: Sequence[str | Path],
    *,
    data: Dataset | str | None = None,  # by default the data of the recipes, which must then agree
    threat: Threat | str | None = None,  # at test time; by default the threat of the recipes, which must then agree
    attack: str = "autoattack",  # beside PGD with 40 steps: "autoattack", the quicker "cascade", or "none"
    pair: bool = False,  # also the pair APGD-CE and APGD-DLR, in a column of its own
    inputs: int = 500,  # from the start of the test split, or all of them if there are fewer
    out: str | Path | None = None,
    force: bool = False,  # replace another comparison that is in `out`
    progress: bool = True,
) -> Comparison:
    """Judge the models of finished `runs`, folders of `train(out=...)`, by the same test inputs and the same adversary.

    Results are stored in the folder `out` as they come; a second call does only what is missing. `inputs` test inputs
    are drawn with the classes balanced, or all of them are taken if there are fewer.
    """
    if attack not in ATTACKS:
        raise InputError(f"unknown attack '{attack}' to compare by. " + did_you_mean(attack, ATTACKS))
    if inputs < 1:
        raise InputError(f"inputs must be at least 1, got {inputs}")
    opened = read_runs(runs)
    limit = _threat(opened, threat)
    others = [name for name, wanted in ((PAIR, pair), (attack, attack != "none")) if wanted]
    attacks: Attacks = {"pgd": {"steps": STEPS}, **{name: {} for name in others}}
    for method in attacks:
        get("attack", method).check(limit, {})
    dataset = _data(opened, data)
    _check_models(opened, dataset, given=data is not None)
    folder = None if out is None else Path(out)
    earlier = sample(dataset, inputs, first=True)
    settings, taken = _settings(earlier, limit, attacks), earlier
    if folder is None or not _begun(folder, settings, opened):
        taken = sample(dataset, inputs, seed=_SEED)
        settings = _settings(taken, limit, attacks) | {"drawn": taken.drawn}
    x, y = taken.x, taken.y
    check_inputs(x, limit.low, limit.high)
    keys = [_key(run, settings) for run in opened]
    if folder is not None:
        _check_free(folder, settings, keys, force=force)
    rows = []
    with progress_bars(progress) as bars:
        for run, key in zip(opened, keys, strict=True):
            store = None if folder is None else folder / RESULTS / f"{key}.json"
            rows.append(_row(run, key, _judge(run, x, y, limit, attacks, store, bars)))
    result = Comparison(tuple(rows), dataset.name, str(limit), attack, len(x), settings)
    if folder is not None:
        result.save(folder)
    return result


def _settings(taken: Sample, threat: Threat, attacks: Mapping[str, object]) -> Settings:
    """What decides the results, as far as the models do not."""
    return {
        "data": hash_tensors({"x": taken.x, "y": taken.y}),
        "inputs": len(taken.x),
        "threat": exact_text(threat),
        "attacks": attacks,
        "seed": _SEED,
        "holdfast": version("holdfast"),
    }


def _key(run: Run, settings: Settings) -> str:
    return _hash({"model": run.model, **settings})[:16]


def _begun(folder: Path, settings: Settings, runs: Sequence[Run]) -> bool:
    """Whether the folder has results with these settings: version 0.1.0 began it, with the first inputs."""
    return any((folder / RESULTS / f"{_key(run, settings)}.json").exists() for run in runs)


def default_folder(runs: Sequence[str | Path]) -> Path:
    """Where a comparison goes if no folder is named: the same for the same models, in any order."""
    return Path("runs") / f"compare-{_hash(sorted(run.model for run in read_runs(runs)))[:8]}"


def _threat(runs: Sequence[Run], given: Threat | str | None) -> Threat:
    """The threat that was given, or the one that all recipes share."""
    threats: dict[str, Threat] = {}
    for run in runs if given is None else ():
        text = run.recipe.get("threat")
        if not isinstance(text, str):
            raise InputError(f"the run '{run.name}' has no threat; choose one for all runs: --threat linf:0.1")
        threats[run.name] = read_threat(text)
    if len(set(threats.values())) > 1:
        listed = ", ".join(f"{name}: {threat}" for name, threat in threats.items())
        raise InputError(f"the runs have different threats ({listed}); choose one for all of them: --threat linf:0.1")
    threat = next(iter(threats.values())) if given is None else read_threat(given) if isinstance(given, str) else given
    if threat.budget <= 0:
        raise InputError(f"the threat '{threat}' allows no change at all; give a budget above zero")
    return threat


def _data(runs: Sequence[Run], given: Dataset | str | None) -> Dataset:
    """The data that were given, or the data that all recipes name."""
    if given is not None:
        return given if isinstance(given, Dataset) else load_data(given)
    names = {run.name: run.data for run in runs}
    if len(set(names.values())) > 1:
        listed = ", ".join(f"{run}: {name}" for run, name in names.items())
        raise InputError(f"the runs have different data ({listed}); choose those to judge all of them by: --data NAME")
    name = runs[0].data
    if name is None:
        raise InputError(f"the run '{runs[0].name}' does not say what it was trained on; name the data: --data NAME")
    try:
        return load_data(name)
    except HoldfastError as error:
        raise InputError(f"the data of the runs cannot be loaded; name them: --data NAME. {error}") from error


def _open_model(run: Run) -> nn.Module:
    try:
        model = load_model(run.folder / MODEL)
    except InputError as error:
        raise InputError(
            f"the run '{run.name}' cannot be compared: only models that make_model built come back from a file alone. "
            f"{error}"
        ) from error
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _check_models(runs: Sequence[Run], dataset: Dataset, *, given: bool) -> None:
    """Refuse, before any attack, a model that does not fit the data; `given` data may have fewer classes than it."""
    classes, part = len(dataset.classes), part_of(dataset)
    for run in runs:
        model = _open_model(run)
        try:
            count = check_logits(model, to_model(model, part.x[:1], part.y[:1])[0]).shape[1]
        except InputError as error:
            raise InputError(f"the run '{run.name}' does not fit the data '{dataset.name}': {error}") from error
        if count < classes or (count > classes and not given):
            raise InputError(
                f"the model of the run '{run.name}' has {count} classes, the data '{dataset.name}' have {classes}; "
                "compare runs of one task, or name data that fit all of them: --data NAME"
            )


def _check_free(folder: Path, settings: Settings, keys: Sequence[str], *, force: bool) -> None:
    """Refuse a folder with another comparison; the same one, or one with some of these runs, may grow."""
    check_folder(folder)
    found = [name for name in FILES if (folder / name).exists()]
    if force or not found:
        return
    try:
        body = parse_json(read_text(folder / FILES[0]))
        before = body["settings"]
        lost = [row["name"] for row in body["rows"] if row["key"] not in keys]
        changed = [key for key in settings if before.get(key) != settings[key]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        lost, changed = [found[0]], ["it cannot be read"]
    if lost:
        why = f"other settings: {', '.join(changed)}" if changed else f"of other models: {', '.join(lost)}"
        raise InputError(
            f"out: '{folder}' already holds another comparison ({why}). "
            "Replace it: --force, or force=True; or choose another folder."
        )


def _judge(
    run: Run, x: Tensor, y: Tensor, threat: Threat, attacks: Attacks, store: Path | None, bars: Progress
) -> Broken:
    """Attack the model of a run where no result is stored yet; every batch is stored as it comes."""
    broken = _stored(store, attacks, len(x))
    if all(len(names) == len(x) for names in broken.values()):
        return broken
    model = _open_model(run)
    for method, options in attacks.items():
        done = broken[method]
        bar = bars.add_task(f"{run.name}: {method}", total=len(x), completed=len(done))
        for start in range(len(done), len(x), _BATCH):
            index = torch.arange(start, min(start + _BATCH, len(x)))
            inputs, labels = to_model(model, x[index], y[index])
            # Random numbers belong to the position of an input, so going on gives what one go would have.
            result = run_attack(model, inputs, labels, threat, method, seed=_SEED, index=index, **options)
            done += result.by
            if store is not None:
                write_json(store, {"run": run.name, "model": run.model, "threat": str(threat), "by": broken})
            bars.advance(bar, len(index))
    return broken


def _stored(store: Path | None, attacks: Mapping[str, object], inputs: int) -> Broken:
    """What broke each of the first inputs, as far as it is known."""
    if store is None or not store.exists():
        return {method: [] for method in attacks}
    with reading(store, "delete the file to judge the run again"):
        by = parse_json(read_text(store))["by"]
        broken = {method: [str(name) for name in by[method]] for method in attacks}
        if any(len(names) > inputs for names in broken.values()):
            raise ValueError(f"it has results of more than {inputs} inputs")
    return broken


def _row(run: Run, key: str, broken: Broken) -> Row:
    scores = {"clean": [name != "clean" for name in broken["pgd"]]}
    scores |= {method: [not name for name in names] for method, names in broken.items()}
    seconds = sum(epoch["seconds"] for epoch in run.history)
    images = [epoch["images_per_second"] * epoch["seconds"] for epoch in run.history if "images_per_second" in epoch]
    robust, memory = (
        [epoch[key] for epoch in run.history if key in epoch] for key in ("validation_robust", "peak_memory_mb")
    )
    return Row(
        name=run.name,
        folder=str(run.folder),
        method=method_text(run.recipe),
        scores={name: Score(sum(right), len(right)) for name, right in scores.items()},
        seconds=seconds,
        images_per_second=sum(images) / seconds if len(images) == len(run.history) and seconds > 0 else None,
        peak_memory_mb=max(memory, default=None),
        best_epoch=best_epoch(run),
        epochs=int(run.history[-1]["epoch"]),
        robust_gap=max(robust) - robust[-1] if robust else None,
        key=key,
    )


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
