"""The main job: bracket the robust accuracy of a model between what is proved and what is broken."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from holdfast.attacks.core.chance import seeded
from holdfast.attacks.core.nature import Nature, nature_of
from holdfast.audits.bracket import UNPROVABLE, Bracket
from holdfast.audits.engine import Engine, local
from holdfast.audits.inputs import exact_text, inputs_of, to_model, versions_of
from holdfast.audits.live import Live
from holdfast.audits.plan import HURRIED, NO_PROOF, Plan, check_plan, make_plan
from holdfast.audits.result import Audit
from holdfast.audits.rounds import Rounds
from holdfast.audits.saved import remove_leftovers, save_audit
from holdfast.audits.stages import Job, Side
from holdfast.audits.store import Store
from holdfast.certificates import Smoothed
from holdfast.checks import check_inputs, check_labels, check_precision, check_task
from holdfast.data import Dataset
from holdfast.errors import InputError, UnsupportedError
from holdfast.registry import get
from holdfast.threats import L1, L2, Linf, Threat
from holdfast.threats import threat as read_threat
from holdfast.utils.hashes import hash_model, hash_tensors
from holdfast.utils.progress import progress_bars

STORE = "audit.sqlite"
ALPHA, COPIES = 0.001, 50  # of a model that the audit smooths by itself: of each proof, and in each look
DRAWS = 100  # passes that make up one prediction of a model that draws random numbers
SAMPLES = {"quick": 1_000, "standard": 10_000, "thorough": 100_000}  # most of each input, to prove something


def audit(
    model: nn.Module,
    data: Dataset | str | tuple[Tensor, Tensor],
    threat: Threat | str | Sequence[Threat | str],
    *,
    budget: str | float = "standard",
    n: int = 500,
    budgets: int = 5,
    attack: str | None = None,
    certify: str | None = "auto",
    split: str = "test",
    groups: Mapping[str, Sequence[object]] | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    batch_size: int = 100,
    progress: bool = True,
    name: str | None = None,
    attack_options: Mapping[str, Any] | None = None,
    certify_options: Mapping[str, Any] | None = None,
    engine: Literal["local", "ray"] | Engine = "local",
    address: str | None = None,
) -> Audit:
    """Clean, attacked and certified accuracy over a range of budgets, per input and overall.

    The attack also runs on inputs that are already certified: should it break one, the audit stops with a
    `SoundnessError` and keeps the evidence. A model that draws random numbers, or whose gradients are missing or
    useless, is found out and gets the attacks that work on it. docs/audit.md explains the report and the files.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode. Batches are moved to its device and dtype.
        data: a data set, its name, or inputs (N, ...) in the threat's valid range with labels (N,).
        threat: what the adversary may do, at the largest budget; several of them make one bracket each.
        budget: "quick", "standard" or "thorough"; or a time such as "10m", or seconds: then costly steps run on what is
            still undecided until the time is over, and the audit says what it had no time for.
        n: audit the first n inputs of the split, or all of them if there are fewer.
        budgets: how many budgets of each threat, up to its own.
        attack: a name from `hf.methods("attack")` instead of the attacks that `budget` stands for.
        certify: likewise from `hf.methods("certify")`; "auto" chooses what fits the model, and where nothing does adds
            a bracket of the smoothed model to that of an l2 threat; None proves nothing and leaves the lower end of the
            bracket at 0. A model of `hf.Smoothed` gets "smoothing"; its examples count if fresh noise confirms them.
        split: "test" or "train", where `data` is a data set.
        groups: columns to split the results by: for each name one value for each input.
        out: folder of the run: results are stored there as they come, and a killed audit resumes from it.
        seed: fixes every random choice.
        batch_size: inputs worked on, and stored, at a time.
        progress: show bars, if the error output is a terminal.
        name: what to call the model in the report; its class if not given.
        attack_options: further options of the attack, such as {"steps": 100}.
        certify_options: further options of the certificate.
        engine: "local", or "ray" to spread the batches over a Ray cluster, with the same results.
        address: of the Ray cluster; a small one is started on this machine if not given.

    Example:
        >>> import torch
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
    threats = _threats(threat)
    label, classes, x, y = inputs_of(data, split, n)
    first = to_model(model, x[:batch_size], y[:batch_size])
    unprovable = _unprovable(first[0], certify)
    for one in threats:
        with seeded(seed, first[0].device):  # what the model draws is put back
            logits = check_task(model, *first, one)
        check_inputs(x, one.low, one.high)
        if one.budget <= 0:
            raise InputError(f"the threat '{one}' allows no change at all; give a budget above zero")
    check_labels(y, len(x), logits.shape[1])
    nature = _nature(model, first[0], threats[0])
    if isinstance(model, Smoothed):  # nothing else proves anything about it, and each look costs many passes
        certify = "smoothing" if certify == "auto" else certify
        attack = attack or ("square" if nature.gradients == "none" else "pgd")
    plan = make_plan(
        budget,
        nature=nature,
        attack=attack,
        certify=certify,
        attack_options=attack_options,
        certify_options=certify_options,
    )
    if unprovable:
        plan = replace(plan, steps=tuple(step for step in plan.steps if step.stage == "attack"))
    named = {method for method in (attack, certify) if method is not None}
    for one in threats:
        check_plan(plan, one, named=named)
    columns = _columns(groups or {}, len(x))
    settings = {
        "plan": plan.name,
        "steps": [step.to_dict() for step in plan.steps],
        "n": len(x),
        "budgets": budgets,
        "seed": seed,
        **_about(nature),
    }
    alpha = _alpha(model, plan)
    if alpha:
        settings["alpha"] = alpha
    hashes = {"model": hash_model(model), "data": hash_tensors({"x": x, "y": y})}
    texts = [exact_text(one) for one in threats]
    fingerprint = {**hashes, "threats": texts, "finer": plan.finer, **settings, "holdfast": version("holdfast")}
    run_on = _engine(engine, address)
    folder = None if out is None else Path(out)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    called = name or type(model).__name__
    with (
        Store(folder and folder / STORE, fingerprint, created=started) as store,
        progress_bars(progress) as bars,
        seeded(seed, first[0].device),
    ):
        live = Live(folder, {"name": called, "data": label, "created": store.created})
        sides = tuple(_side(i, one, budgets, plan.finer) for i, one in enumerate(threats))
        for side in sides:
            side.skipped.extend([f"certify: {NO_PROOF}"] if nature.random and certify is not None else [])
        for side in sides if unprovable else ():
            side.skipped.append(UNPROVABLE + unprovable)
        run = Rounds(sides, plan, live, store, time.perf_counter() - store.wall())
        most = batch_size if plan.seconds is None else min(batch_size, HURRIED)
        job = Job(
            model, x, y, store, run_on, bars, run.show, seed, most, folder, alpha, nature, settings.get("draws", 0)
        )
        try:
            brackets = run.all(job, named)
            smoothable = certify == "auto" and plan.seconds is None and not nature.random and not unprovable
            for side in [side for side in sides if smoothable and not side.tried]:
                if isinstance(side.threat, L2) and not isinstance(model, Smoothed):
                    brackets += (_smoothed(job, side, side.threat, plan.name, budgets, called),)
                    settings["alpha"] = ALPHA
            result = Audit(
                name=called,
                data=label,
                classes=classes,
                brackets=brackets,
                settings={**settings, "batch_size": batch_size, "split": split},
                versions=versions_of(model),
                hashes=hashes,
                created=store.created,
                groups=columns,
            )
            if folder is not None:
                remove_leftovers(folder)
                save_audit(result, folder)
        except BaseException as error:
            live.end("failed", error=str(error) or type(error).__name__)
            raise
        run.finish()
    return result


def _smoothed(job: Job, side: Side, threat: L2, plan: str, budgets: int, name: str) -> Bracket:
    """The bracket of the smoothed model, for a model that no other certificate fits.

    Noise of half the budget: proofs by so many samples reach about three times the noise.
    """
    model = Smoothed(job.model, threat.eps / 2, n=COPIES, alpha=ALPHA, seed=job.seed).eval()
    by_queries = job.nature.gradients == "none"
    result = audit(
        *(model, (job.x, job.y), threat),
        budget=plan,
        n=len(job.x),
        budgets=budgets,
        attack_options={"queries": 100} if by_queries else {"steps": 10},
        certify_options={"n": SAMPLES[plan]},
        out=job.folder and job.folder / f"smoothed-{side.number}",
        seed=job.seed,
        batch_size=job.batch_size,
        progress=False,
        name=name,
        engine=job.engine,
    )
    (bracket,) = result.brackets
    return replace(bracket, threat=f"{threat}, smoothed with noise {model.sigma:g}")


def _nature(model: nn.Module, x: Tensor, threat: Threat) -> Nature:
    """What is known of the model; of a smoothed one, which is a function, what is known of the model inside."""
    if not isinstance(model, Smoothed):
        return nature_of(model, x, low=threat.low, high=threat.high)
    inside = nature_of(model.model, x, low=threat.low, high=threat.high)
    if inside.random:
        raise InputError(
            "the model inside hf.Smoothed draws random numbers of its own: the votes are not those of a function, and "
            "nothing can be proved of them. Audit the model itself, or smooth it without its own randomness."
        )
    return inside if inside.gradients == "none" else Nature()


def _about(nature: Nature) -> dict[str, Any]:
    """Settings that follow from the nature of the model, with sentences for the reader; none for most models."""
    about: dict[str, Any] = {}
    notes = []
    if nature.random:
        about["draws"] = DRAWS
        notes.append(
            f"The model draws random numbers. Its prediction is the class of largest mean softmax over {DRAWS} draws, "
            "which follow from the seed. An input is broken if an example is misclassified in that prediction, with "
            "draws that the attack has not seen. The attacks average over draws."
        )
    if nature.gradients == "none":
        notes.append(
            "The model has no gradient with respect to its input. It was attacked by queries and by examples of a "
            "stand-in; with gradients, more might break."
        )
    if nature.gradients == "useless":
        notes.append(
            "The gradients of the model lead nowhere: they vanish, or no step along them raises the loss. Attacks "
            "without gradients were run beside the others; more might break."
        )
    if notes:
        about |= {"gradients": nature.gradients, "notes": notes}
    return about


def _unprovable(x: Tensor, certify: str | None) -> str:
    """Why no certificate fits a model of inputs like x; empty if one may, or none is asked for. Refuses a named one."""
    try:
        check_precision(x)
    except UnsupportedError as error:
        if certify not in (None, "auto"):
            raise UnsupportedError(f"{error} An audit with certify=None runs the attacks only.") from error
        return "" if certify is None else str(error)
    return ""


def _threats(threat: Threat | str | Sequence[Threat | str]) -> tuple[Threat, ...]:
    """The threats, each once."""
    given: list[Any] = list(threat) if isinstance(threat, list | tuple) else [threat]
    found = tuple(read_threat(one) if isinstance(one, str) else one for one in given)
    for i, one in enumerate(found):
        if not isinstance(one, Threat):
            kind = type(one).__name__
            raise InputError(f"threat must be a threat such as hf.Linf(0.1), its text, or several; got {kind}")
        if exact_text(one) in [exact_text(other) for other in found[:i]]:
            raise InputError(f"the threat '{one}' is given twice; give it once")
    if not found:
        raise InputError("give at least one threat, got none")
    return found


def _columns(groups: Mapping[str, Sequence[object]], count: int) -> dict[str, tuple[str, ...]]:
    """Group columns as text, cut to the audited inputs."""
    columns = {}
    for name, values in groups.items():
        if len(values) < count:
            raise InputError(f"the group column '{name}' has {len(values)} values for {count} audited inputs")
        columns[str(name)] = tuple(str(value) for value in values[:count])
    return columns


def _alpha(model: nn.Module, plan: Plan) -> float | None:
    """Probability that a proof is wrong, where it is not zero."""
    for step in plan.steps:
        if step.stage == "certify" and get("certify", step.method).guarantee == "probabilistic proof":
            alpha: float | None = step.options.get("alpha", getattr(model, "alpha", None))
            return alpha
    return None


def _engine(engine: Literal["local", "ray"] | Engine, address: str | None) -> Engine:
    if callable(engine):
        return engine
    if engine == "ray":
        from holdfast.audits.ray_engine import ray_engine

        return ray_engine(address)
    if engine != "local":
        raise InputError(f"engine must be 'local' or 'ray', got '{engine}'")
    if address is not None:
        raise InputError("address goes with engine='ray'")
    return local


def _side(number: int, threat: Threat, budgets: int, finer: int) -> Side:
    """Levels on the fine grid for balls, whose radii are continuous; on that of the budgets for other threats."""
    finer = finer if isinstance(threat, Linf | L2 | L1) else 1
    levels = tuple(threat.budgets(budgets * finer))
    return Side(number, levels, _sizes(levels), finer)


def _sizes(levels: tuple[Threat, ...]) -> tuple[float, ...]:
    """Budgets as growing numbers; where the threat measures in its own size (a Box), shares of the largest one."""
    sizes = tuple(level.budget for level in levels)
    if all(a < b for a, b in pairwise(sizes)):
        return sizes
    return tuple((i + 1) / len(levels) for i in range(len(levels)))
