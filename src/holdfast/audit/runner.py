"""The main job: bracket the robust accuracy of a model between what is proved and what is broken."""

import inspect
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks import attack as run_attack
from holdfast.audit import stages
from holdfast.audit.files import save_audit
from holdfast.audit.hashes import hash_model, hash_tensors
from holdfast.audit.result import Audit
from holdfast.audit.stages import Job, to_model
from holdfast.audit.store import Store
from holdfast.bars import progress_bars
from holdfast.certify import Smoothed
from holdfast.certify import certify as run_certify
from holdfast.checks import check_inputs, check_labels, check_task
from holdfast.data import Dataset, load_data
from holdfast.errors import InputError, did_you_mean
from holdfast.registry import Kind, get
from holdfast.threats import Box, Threat

STORE = "audit.sqlite"
GALLERY = 12  # pictures in the report: enough to see what the adversary does, few enough for a phone


def audit(
    model: nn.Module,
    data: Dataset | str | tuple[Tensor, Tensor],
    threat: Threat,
    *,
    n: int = 500,
    budgets: int = 5,
    attack: str = "cascade",
    certify: str | None = "auto",
    split: str = "test",
    out: str | Path | None = None,
    seed: int = 0,
    batch_size: int = 100,
    progress: bool = True,
    name: str | None = None,
    attack_options: Mapping[str, Any] | None = None,
    certify_options: Mapping[str, Any] | None = None,
) -> Audit:
    """Clean, attacked and certified accuracy over a range of budgets, per input and overall.

    The attack also runs on inputs that are already certified: should it break one, the audit stops with a
    `SoundnessError` and keeps the evidence. docs/audit.md explains the report and the files.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode. Batches are moved to its device and dtype.
        data: a data set, its name, or inputs (N, ...) in the threat's valid range with labels (N,).
        threat: what the adversary may do, at the largest budget.
        n: audit the first n inputs of the split, or all of them if there are fewer.
        budgets: how many budgets, up to the threat's own.
        attack: a name from `hf.methods("attack")`.
        certify: a name from `hf.methods("certify")`; None proves nothing and leaves the lower end of the bracket at 0.
            "smoothing" goes with a model of `hf.Smoothed`, whose examples count if fresh noise confirms them.
        split: "test" or "train", where `data` is a data set.
        out: folder of the run: results are stored there as they come, and a killed audit resumes from it.
        seed: fixes every random choice.
        batch_size: inputs worked on, and stored, at a time.
        progress: show bars, if the error output is a terminal.
        name: what to call the model in the report; its class if not given.
        attack_options: further options of the attack, such as {"steps": 100}.
        certify_options: further options of the certificate.

    Example:
        >>> import holdfast as hf
        >>> model = nn.Linear(2, 2).eval()
        >>> x, y = torch.rand(20, 2), torch.zeros(20, dtype=torch.long)
        >>> result = audit(model, (x, y), hf.Linf(0.1), budgets=2)
        >>> result.certified[-1] <= result.attacked[-1] <= result.clean
        True
    """
    for key, value in (("n", n), ("budgets", budgets), ("batch_size", batch_size)):
        if value < 1:
            raise InputError(f"{key} must be at least 1, got {value}")
    if certify is not None and get("certify", certify).smoothed and not isinstance(model, Smoothed):
        raise InputError(
            f"certify='{certify}' proves something about a smoothed classifier, and an attack on the model itself "
            "does not test it; audit hf.Smoothed(model, sigma), with certify='smoothing'"
        )
    label, classes, x, y = _inputs(data, split, n)
    logits = check_task(model, *to_model(model, x[:batch_size], y[:batch_size]), threat)
    check_inputs(x, threat.low, threat.high)
    check_labels(y, len(x), logits.shape[1])
    if threat.budget <= 0:
        raise InputError(f"the threat '{threat}' allows no change at all; give a budget above zero")
    settings = {
        "n": len(x),
        "budgets": budgets,
        "attack": attack,
        "attack_options": _options("attack", attack, threat, attack_options),
        "certify": certify,
        "certify_options": _options("certify", certify, threat, certify_options),
        "seed": seed,
    }
    if certify is not None and get("certify", certify).guarantee == "probabilistic proof":
        settings["alpha"] = (certify_options or {}).get("alpha", getattr(model, "alpha", None))
    hashes = {"model": hash_model(model), "data": hash_tensors({"x": x, "y": y})}
    fingerprint = {**hashes, "threat": _exact(threat), **settings, "holdfast": version("holdfast")}
    folder = None if out is None else Path(out)
    levels = tuple(threat.budgets(budgets))
    started = datetime.now(UTC).isoformat(timespec="seconds")
    with Store(folder and folder / STORE, fingerprint, created=started) as store, progress_bars(progress) as bars:
        job = Job(model, x, y, levels, store, bars, {**settings, "batch_size": batch_size}, folder)
        right = stages.classify(job)
        proofs = stages.certify(job, right)
        stages.attack(job, right, proofs)
        trust = stages.trust(job, right)
        records = stages.records(job, _sizes(levels), proofs)
        broken = sorted((r.broken, r.position) for r in records if r.broken)
        result = Audit(
            name=name or type(model).__name__,
            threat=str(threat),
            threats=tuple(str(t) for t in levels),
            budgets=_sizes(levels),
            valid_range=(threat.low, threat.high),
            data=label,
            classes=classes,
            records=records,
            trust=trust,
            settings={**job.settings, "split": split},
            versions=_versions(model),
            hashes=hashes,
            seconds=store.seconds(),
            created=store.created,
            examples=stages.explained(job, store.examples([position for _, position in broken[:GALLERY]])),
        )
    if folder is not None:
        save_audit(result, folder)
    return result


def _inputs(
    data: Dataset | str | tuple[Tensor, Tensor], split: str, n: int
) -> tuple[str, tuple[str, ...], Tensor, Tensor]:
    """Description, class names, inputs and labels."""
    if isinstance(data, tuple):
        if len(data) != 2 or not all(isinstance(part, Tensor) for part in data):
            kinds = ", ".join(type(part).__name__ for part in data)
            raise InputError(f"data must be a data set, its name, or two tensors (x, y), got ({kinds})")
        return "tensors", (), data[0][:n], data[1][:n]
    dataset = load_data(data) if isinstance(data, str) else data
    if split not in ("train", "test"):
        raise InputError(f"unknown split '{split}'. " + did_you_mean(split, ("train", "test")))
    part = getattr(dataset, split)
    return f"{dataset.name} ({split})", tuple(str(c) for c in dataset.classes), part.x[:n], part.y[:n]


def _options(kind: Kind, method: str | None, threat: Threat, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options as a dict, refused before any work is done if the method does not take them."""
    given = dict(options or {})
    if method is None:
        return given
    # An audit without the rounding-error term of the certificate would prove nothing, so `sound` is no choice here.
    taken = [key for key in given if key in ("model", "x", "y", "threat", "method", "seed", "index", "sound")]
    if taken:
        raise InputError(f"{kind}_options may not hold '{taken[0]}': the audit sets it itself")
    front_door = inspect.signature(run_attack if kind == "attack" else run_certify).parameters
    with stages.advice(kind):
        get(kind, method).check(threat, {key: value for key, value in given.items() if key not in front_door})
    return given


def _exact(threat: Threat) -> str:
    """Text that differs whenever the threat does; that of a Box only describes it."""
    return f"{threat} {hash_tensors({'radius': threat.radius})}" if isinstance(threat, Box) else str(threat)


def _sizes(levels: tuple[Threat, ...]) -> tuple[float, ...]:
    """Budgets as growing numbers; where the threat measures in its own size (a Box), shares of the largest one."""
    sizes = tuple(level.budget for level in levels)
    if all(a < b for a, b in pairwise(sizes)):
        return sizes
    return tuple((i + 1) / len(levels) for i in range(len(levels)))


def _versions(model: nn.Module) -> dict[str, str]:
    device = next((str(p.device) for p in model.parameters()), "cpu")
    return {
        "holdfast": version("holdfast"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
    }
