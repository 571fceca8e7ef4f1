"""The stages of an audit: classify, certify by bisection over the budgets, attack from the smallest up, doubt.

Budgets are nested, which saves work and keeps the answers consistent: a proof at a larger budget also counts at the
smaller ones, an example found at a smaller budget also counts at the larger ones.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn

from holdfast.attacks import attack as run_attack
from holdfast.attacks.stages import untouched
from holdfast.attacks.trust import THREATS, Indicator, indicators
from holdfast.audit.files import save_arrays
from holdfast.audit.result import Record
from holdfast.audit.store import Example, Outcome, Stage, Store
from holdfast.certify import Smoothed
from holdfast.certify import certify as run_certify
from holdfast.checks import check_logits
from holdfast.errors import InputError, SoundnessError, StorageError, UnsupportedError
from holdfast.explain import explain
from holdfast.registry import Kind, get
from holdfast.threats import Threat

PROBED = 64  # inputs that tell whether the attack can be trusted: a few seconds for a small network


@dataclass(frozen=True, eq=False)
class Job:
    """One audit under way. Level 0 is the unchanged input, level i is `levels[i - 1]`.

    `folder` is that of the run, or None if the user keeps none.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    levels: tuple[Threat, ...]
    store: Store
    bars: Progress
    settings: Mapping[str, Any]
    folder: Path | None

    def batches(self, stage: Stage, level: int, wanted: list[int]) -> Iterator[Tensor]:
        """Positions of the wanted inputs that are not stored yet, a batch at a time.

        A killed run has stored whole batches from the front, so a resumed one cuts the rest just as it would have.
        """
        stored = self.store.outcomes(stage, level)
        todo = [position for position in wanted if position not in stored]
        text = f"{stage} {self.levels[level - 1]}" if level else stage
        bar = self.bars.add_task(text, total=len(wanted), completed=len(wanted) - len(todo))
        size = self.settings["batch_size"]
        for start in range(0, len(todo), size):
            yield torch.tensor(todo[start : start + size])
            self.bars.advance(bar, min(size, len(todo) - start))

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels at these positions, where the model is and in its dtype."""
        return to_model(self.model, self.x[index], self.y[index])


def to_model(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x and y on the device of the model, x in its dtype; other than float inputs are left for the checks to refuse."""
    like = next((p for p in model.parameters() if p.is_floating_point()), x)
    return (x.to(like) if x.is_floating_point() else x), y.to(like.device)


@contextmanager
def advice(kind: Kind) -> Iterator[None]:
    """Adds the way out to the refusal of a certificate: an audit also works without."""
    try:
        yield
    except UnsupportedError as error:
        way_out = " An audit with certify=None runs the attack alone." if kind == "certify" else ""
        raise UnsupportedError(f"{error}{way_out}") from error


def classify(job: Job) -> list[int]:
    """Positions of the inputs that are classified right, unchanged."""
    for index in job.batches("clean", 0, list(range(len(job.x)))):
        start = time.perf_counter()
        x, y = job.take(index)
        try:
            prediction = check_logits(job.model, x).argmax(1)
        except InputError as error:
            raise InputError(f"in the batch that starts at input {int(index[0])}: {error}") from error
        rows = zip(index.tolist(), (prediction == y).tolist(), prediction.tolist(), strict=True)
        job.store.add("clean", 0, [Outcome(*row) for row in rows], [], seconds=time.perf_counter() - start)
    return [position for position, outcome in job.store.outcomes("clean", 0).items() if outcome.passed]


def certify(job: Job, right: list[int]) -> dict[int, tuple[int, str]]:
    """Largest level proved for each input, and by which certificate; inputs with no proof are left out.

    Bisection over the levels, all inputs at once: a certificate that fails at one level is not tried at larger ones.
    """
    proofs: dict[int, tuple[int, str]] = {}
    if job.settings["certify"] is None:
        return proofs
    if "radii" in get("certify", job.settings["certify"]).options:
        return _certify_once(job, right)
    failed = dict.fromkeys(right, len(job.levels) + 1)
    while True:
        groups: dict[int, list[int]] = {}
        for position in right:
            low, high = proofs.get(position, (0, ""))[0], failed[position]
            if low + 1 < high:
                groups.setdefault((low + high) // 2, []).append(position)
        if not groups:
            return proofs
        for level, group in sorted(groups.items()):
            outcomes = _certify_level(job, level, group)
            for position in group:
                if outcomes[position].passed:
                    proofs[position] = (level, outcomes[position].by)
                else:
                    failed[position] = level


def _certify_once(job: Job, right: list[int]) -> dict[int, tuple[int, str]]:
    """As `certify`, where one sample of each input, and one alpha, settles all levels.

    The row of the largest level holds the largest one proved, as its `prediction`.
    """
    method, options = job.settings["certify"], job.settings["certify_options"]
    *smaller, largest = job.levels
    for index in job.batches("certify", len(job.levels), right):
        start = time.perf_counter()
        asked = {"radii": [level.budget for level in smaller], "index": index}
        radius = run_certify(job.model, *job.take(index), largest, method, **options | asked).radius
        if radius is None:
            raise UnsupportedError(f"'{method}' takes radii but returned none")
        proved = torch.stack([radius > level.budget for level in job.levels]).sum(0)
        rows = zip(index.tolist(), proved.tolist(), strict=True)
        outcomes = [Outcome(i, level == len(job.levels), level, method if level else "") for i, level in rows]
        job.store.add("certify", len(job.levels), outcomes, [], seconds=time.perf_counter() - start)
    stored = job.store.outcomes("certify", len(job.levels))
    return {i: (outcome.prediction, outcome.by) for i, outcome in stored.items() if outcome.prediction}


def _certify_level(job: Job, level: int, group: list[int]) -> dict[int, Outcome]:
    """Runs the certificate at one level; all outcomes that are stored for it, by position."""
    method, options = job.settings["certify"], job.settings["certify_options"]
    for index in job.batches("certify", level, group):
        start = time.perf_counter()
        with advice("certify"):
            result = run_certify(job.model, *job.take(index), job.levels[level - 1], method, **options)
        by = result.by or (method,) * len(index)
        rows = zip(index.tolist(), result.certified.tolist(), by, strict=True)
        outcomes = [Outcome(position, passed, None, name if passed else "") for position, passed, name in rows]
        job.store.add("certify", level, outcomes, [], seconds=time.perf_counter() - start)
    return job.store.outcomes("certify", level)


def attack(job: Job, right: list[int], proofs: dict[int, tuple[int, str]]) -> None:
    """Attacks what still holds, certified or not: the attack is the test of the certificate."""
    for level in range(1, len(job.levels) + 1):
        for index in job.batches("attack", level, right):
            start = time.perf_counter()
            x, y = job.take(index)
            method, options, seed = (job.settings[key] for key in ("attack", "attack_options", "seed"))
            threat = job.levels[level - 1]
            result = run_attack(job.model, x, y, threat, method, seed=seed, index=index, **options)
            if isinstance(job.model, Smoothed):
                result = replace(result, success=result.success & job.model.differs(result.x_adv, y))
            after = check_logits(job.model, result.x_adv).argmax(1).tolist()
            outcomes, examples = [], []
            for i, position in enumerate(index.tolist()):
                broken = bool(result.success[i])
                outcomes.append(Outcome(position, not broken, after[i] if broken else None, result.by[i]))
                if broken:
                    examples.append(Example(position, x[i].cpu().numpy(), result.x_adv[i].detach().cpu().numpy()))
                    if proofs.get(position, (0, ""))[0] >= level:
                        raise _unsound(job, examples[-1], level, result.by[i], *proofs[position])
            job.store.add("attack", level, outcomes, examples, seconds=time.perf_counter() - start)
        held = job.store.outcomes("attack", level)
        right = [position for position in right if held[position].passed]


def trust(job: Job, right: list[int]) -> tuple[Indicator, ...]:
    """Signs that the attack failed for reasons of its own, at the largest budget; none for threats without probes."""
    threat, probed = job.levels[-1], right[:PROBED]
    # The probes would count examples of a smoothed model that fresh noise does not confirm.
    if threat.name not in THREATS or not probed or isinstance(job.model, Smoothed):
        return ()
    stored = job.store.trust()
    if stored is not None:
        try:
            return tuple(Indicator(**indicator) for indicator in json.loads(stored))
        except (ValueError, TypeError) as error:
            raise StorageError(
                f"the audit store holds indicators that cannot be read ({error}); delete the file to start again"
            ) from error
    start = time.perf_counter()
    x, y = job.take(torch.tensor(probed))
    held = job.store.outcomes("attack", len(job.levels))
    broken = torch.tensor([p not in held or not held[p].passed for p in probed], device=x.device)
    bar = job.bars.add_task("trust", total=len(probed))
    found = indicators(job.model, x, y, threat, replace(untouched(x), success=broken), seed=job.settings["seed"])
    job.bars.advance(bar, len(probed))
    text = json.dumps([asdict(indicator) for indicator in found])
    job.store.add_trust(text, inputs=len(probed), seconds=time.perf_counter() - start)
    return found


def explained(job: Job, examples: tuple[Example, ...]) -> tuple[Example, ...]:
    """The examples with what decides between each and its input: integrated gradients from the one to the other.

    They go without for a model that has no gradients, or whose gradients are those of many noisy copies.
    """
    if not examples or isinstance(job.model, Smoothed):
        return examples
    threat = job.levels[-1]
    x, y = job.take(torch.tensor([example.position for example in examples]))
    x_adv = torch.stack([torch.tensor(example.x_adv) for example in examples]).to(x)
    try:
        found = explain(
            *(job.model, x, y, "integrated-gradients"),
            baseline=x_adv,
            quantity="margin",
            low=threat.low,
            high=threat.high,
            tolerance=None,
        )
    except InputError:
        return examples
    values = found.attribution.cpu().numpy()
    return tuple(replace(example, attribution=values[i]) for i, example in enumerate(examples))


def _unsound(job: Job, example: Example, level: int, by: str, proved: int, certificate: str) -> SoundnessError:
    """The error for a certified input that was broken; puts the evidence into a file first."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-")) if job.folder is None else job.folder
    path = folder / f"soundness-{example.position}.npz"
    threat, certified = str(job.levels[level - 1]), str(job.levels[proved - 1])
    label = int(job.y[example.position])
    try:
        save_arrays(path, x=example.x, x_adv=example.x_adv, label=label, threat=threat, certified=certified)
        kept = f"the evidence is in '{path}'"
    except OSError as error:
        kept = f"the evidence could not be written to '{path}': {error}"
    alpha = job.settings.get("alpha")
    excuse = f"the proof is wrong with probability {alpha:g}; if you see it twice, " if alpha else ""
    return SoundnessError(
        f"input {example.position} is certified at {certified} by '{certificate}', but the attack '{by}' broke it at "
        f"{threat}. One of the two is wrong: {excuse}this is a bug in Holdfast, please report it; {kept}."
    )


def records(job: Job, sizes: tuple[float, ...], proofs: dict[int, tuple[int, str]]) -> tuple[Record, ...]:
    """What is stored, as one bracket per input; `sizes` are the budgets as numbers."""
    broken = {
        outcome.position: (size, outcome)
        for level, size in enumerate(sizes, 1)
        for outcome in job.store.outcomes("attack", level).values()
        if not outcome.passed
    }
    rows = []
    for position, clean in job.store.outcomes("clean", 0).items():
        prediction, label = int(clean.prediction or 0), int(job.y[position])
        if not clean.passed:
            rows.append(Record(position, label, prediction, None, "", 0.0, "clean", None))
            continue
        level, certificate = proofs.get(position, (0, ""))
        size, outcome = broken.get(position, (None, Outcome(position, True)))
        proved = sizes[level - 1] if level else 0.0
        rows.append(Record(position, label, prediction, proved, certificate, size, outcome.by, outcome.prediction))
    return tuple(rows)
