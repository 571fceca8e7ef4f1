"""The main job: bracket the robust accuracy of a model between what is proved and what is broken."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from holdfast.attacks.core.chance import seeded
from holdfast.audits.bracket import Bracket
from holdfast.audits.case import make_case, read_threats
from holdfast.audits.engine import Engine, local
from holdfast.audits.inputs import to_model, versions_of
from holdfast.audits.job import Job
from holdfast.audits.live import Live
from holdfast.audits.plan import AT_ONCE, PLANS
from holdfast.audits.result import Audit
from holdfast.audits.saved import FILES, save_audit
from holdfast.audits.schedule import carry_out
from holdfast.audits.side import Side, make_side
from holdfast.audits.store import Store, began_with_the_first
from holdfast.audits.words import SMOOTHED
from holdfast.bounding.graph.once import trace_once
from holdfast.certificates import Smoothed
from holdfast.certificates.core.hidden_values import hidden_values
from holdfast.data.draw import Sample, sample
from holdfast.data.given import Given
from holdfast.errors import InputError, argument
from holdfast.threats import L2, Threat
from holdfast.utils import clock
from holdfast.utils.files import remove_leftovers
from holdfast.utils.progress import progress_bars

STORE = "audit.sqlite"
HURRIED = 32  # inputs at a time where time is short and the size of the network is not known
ALPHA = 0.001  # probability that a proof about a model that the audit smooths by itself is wrong
COPIES = 50  # noisy copies in each look at such a model
SAMPLES = {"quick": 1_000, "standard": 10_000, "thorough": 100_000}  # most of each input, to prove something


def audit(
    model: nn.Module,
    data: Given,
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
    source: Mapping[str, Sequence[str]] | None = None,
) -> Audit:
    """Clean, attacked and certified accuracy over a range of budgets, per input and overall.

    The attack also runs on inputs that are already certified: should it break one, the audit stops with a
    `SoundnessError` and keeps the evidence. A model that draws random numbers, or whose gradients are missing or
    useless, is found out and gets the attacks that work on it. docs/audit.md explains the report and the files.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode. Batches are moved to its device and dtype.
        data: a data set, its name or path, a torch Dataset, a DataLoader, or a pair (x, y) of tensors or arrays: inputs
            (N, ...) in the threat's valid range and labels (N,).
        threat: what the adversary may do, at the largest budget; several of them make one bracket each.
        budget: "quick", "standard" or "thorough"; or a time such as "10m", or seconds: then costly steps run on what is
            still undecided until the time is over, and the audit says what it had no time for.
        n: audit n inputs of the split, drawn by `seed` with the classes balanced, or all of them if there are fewer.
        budgets: how many budgets of each threat, up to its own.
        attack: a name from `hf.methods("attack")` instead of the attacks that `budget` stands for.
        certify: likewise from `hf.methods("certify")`; "auto" chooses what fits the model, and where nothing does adds
            a bracket of the smoothed model for an l2 threat; None proves nothing and leaves the lower end of the
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
        source: words of a command line that open the "model" and the "data", for the commands that the report prints,
            such as {"model": ["weights.pt", "--architecture", "mynet.py:MyNet"], "data": ["--data", "photos"]}; those
            that only an "audit" takes too.

    Example:
        >>> import torch
        >>> import holdfast as hf
        >>> model = nn.Linear(2, 2).eval()
        >>> x, y = torch.rand(20, 2), torch.zeros(20, dtype=torch.long)
        >>> result = audit(model, (x, y), hf.Linf(0.1), budgets=2)
        >>> result.certified[-1] <= result.attacked[-1] <= result.clean
        True
    """
    began = clock.now()
    for key, value in (("n", n), ("budgets", budgets), ("batch_size", batch_size)):
        if value < 1:
            raise InputError(f"{key} must be at least 1, got {value}")
    folder = None if out is None else Path(out)
    first = folder is not None and began_with_the_first(folder / STORE)
    taken = sample(data, n, split=split, seed=seed, first=first)
    x, y = taken.x, taken.y
    case = make_case(
        *(model, x, y, tuple(one.select(taken.index) for one in read_threats(threat))),
        budget=budget,
        budgets=budgets,
        attack=attack,
        certify=certify,
        attack_options=attack_options,
        certify_options=certify_options,
        seed=seed,
        batch_size=batch_size if isinstance(budget, str) and budget in PLANS else min(batch_size, HURRIED),
        drawn=None if first else taken.drawn,
    )
    columns = _columns(groups or {}, taken)
    run_on = _engine(engine, address)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    called = name or type(model).__name__
    with (
        Store(folder and folder / STORE, case.fingerprint, created=started) as store,
        progress_bars(progress) as bars,
        seeded(seed, to_model(model, x[:1], y[:1])[0].device),
        trace_once(model),
    ):
        live = Live(folder, {"name": called, "data": taken.name, "created": store.created})
        sides = tuple(make_side(i, one, budgets, case.plan.finer) for i, one in enumerate(case.threats))
        for side in sides:
            side.skipped.extend(case.skipped)
        job = Job(
            *(model, x, y, sides, store, run_on, bars, live, seed),
            batch_size=batch_size if case.plan.seconds is None else min(batch_size, _at_once(model, x, y)),
            folder=folder,
            alpha=case.alpha,
            nature=case.nature,
            draws=case.settings.get("draws", 0),
        )
        try:
            brackets = carry_out(job, case.plan, case.named, began)
            settings = _with_precision(case.settings) if store.rough else case.settings
            if certify == "auto" and case.provable and case.plan.seconds is None and not isinstance(model, Smoothed):
                for side in [side for side in sides if isinstance(side.threat, L2) and not side.tried]:
                    brackets += (_smoothed(job, side, case.plan.name, called),)
                    settings = {**settings, "alpha": ALPHA}
            result = Audit(
                name=called,
                data=taken.name,
                classes=tuple(map(str, taken.classes)),
                brackets=tuple(bracket.placed(taken.index.tolist()) for bracket in brackets),
                settings={**settings, "batch_size": batch_size, "split": split, **_source(source or {})},
                versions=versions_of(model),
                hashes=case.hashes,
                created=store.created,
                groups=columns,
                total=taken.total,
                drawn=taken.drawn,
            )
            if folder is not None:
                remove_leftovers(*(folder / name for name in FILES))  # the lock of the store is held
                save_audit(result, folder)
        except BaseException as error:
            live.end("failed", error=str(error) or type(error).__name__)
            raise
        job.finish()
    return result


def _with_precision(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of an audit whose attacks computed gradients in bfloat16, with a sentence for the reader."""
    note = (
        "Attacks computed gradients far from the decision boundary in bfloat16, which is faster here. Every example is "
        "confirmed in the model's own precision."
    )
    return {**settings, "precision": "bfloat16", "notes": [*settings.get("notes", ()), note]}


def _at_once(model: nn.Module, x: Tensor, y: Tensor) -> int:
    """Inputs at a time where time is short; the same for every limit, so that more time repeats what less time did."""
    hidden = hidden_values(model, to_model(model, x[:1], y[:1])[0])
    return max(1, AT_ONCE // hidden) if hidden else HURRIED


def _smoothed(job: Job, side: Side, plan: str, name: str) -> Bracket:
    """The bracket of the smoothed model, for a model that no other certificate fits.

    The noise is half the budget: with `SAMPLES` samples, proofs reach about three times the noise.
    """
    assert isinstance(side.threat, L2)
    model = Smoothed(job.model, side.threat.eps / 2, n=COPIES, alpha=ALPHA, seed=job.seed).eval()
    by_queries = job.nature.gradients == "none"
    result = audit(
        *(model, (job.x, job.y), side.threat),
        budget=plan,
        n=len(job.x),
        budgets=len(side.levels) // side.finer,
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
    return replace(bracket, threat=f"{side.threat}{SMOOTHED}{model.sigma:g}")


def _source(source: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Setting for the commands of the report; none where nobody said how model and data are opened."""
    return {"source": {key: list(words) for key, words in source.items()}} if source else {}


def _columns(groups: Mapping[str, Sequence[object]], taken: Sample) -> dict[str, tuple[str, ...]]:
    """Group columns as text, for the audited inputs; a column holds one value for each of them, or for all inputs."""
    columns = {}
    for name, values in groups.items():
        if len(values) < taken.total and len(values) != len(taken.x):
            raise InputError(
                f"the group column '{name}' has {len(values)} values for {len(taken.x)} audited inputs of "
                f"{taken.total}; give one for each input of the data"
            )
        chosen = taken.index.tolist() if len(values) >= taken.total else range(len(values))
        columns[str(name)] = tuple(str(values[i]) for i in chosen)
    return columns


def _engine(engine: Literal["local", "ray"] | Engine, address: str | None) -> Engine:
    if callable(engine):
        return engine
    if engine == "ray":
        from holdfast.audits.ray_engine import ray_engine

        return ray_engine(address)
    if engine != "local":
        raise InputError(f"engine must be 'local' or 'ray', got '{engine}'")
    if address is not None:
        raise InputError(f"address goes with {argument('engine', 'ray')}")
    return local
