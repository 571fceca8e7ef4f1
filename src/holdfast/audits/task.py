"""One batch of an audit's work: a function of the model and the task only, wherever and however often it is run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.attacks import attack as run_attack
from holdfast.attacks.core.chance import mean_prediction, seeded
from holdfast.audits.inputs import to_numpy
from holdfast.audits.rows import Example, Outcome
from holdfast.certificates import Smoothed
from holdfast.certificates import certify as run_certify
from holdfast.checks import check_logits
from holdfast.errors import InputError, OutOfTime
from holdfast.threats import L1, L2, Linf, Threat
from holdfast.utils import clock

Stage = Literal["clean", "certify", "attack"]
HALVINGS = 12  # of the way back from an adversarial example to its input: finds its shortest part to 1 in 4,096


@dataclass(frozen=True, eq=False)
class Task:
    """A batch of inputs and what to do with it.

    Attributes:
        stage: classify, prove or attack.
        method: of the attack or the certificate, with its options; empty for "clean".
        seed: fixes every random choice of the attack, together with the positions.
        threat: what the adversary may do; None for "clean".
        size: its budget, as the audit counts it.
        radii: smaller budgets that a certificate which samples settles at once.
        index: (B,) int64, positions of the inputs in the data.
        x, y: inputs (B, ...) and labels (B,), where the model is and in its dtype.
        draws: passes that make up one prediction of a model that draws random numbers; 0 for any other.
        seconds: time there is for it.
    """

    stage: Stage
    method: str
    options: Mapping[str, Any]
    seed: int
    threat: Threat | None
    index: Tensor
    x: Tensor
    y: Tensor
    size: float = 0.0
    radii: tuple[float, ...] = ()
    draws: int = 0
    seconds: float = math.inf


@dataclass(frozen=True, eq=False)
class Found:
    """What became of a task: an outcome for each input, the examples of the inputs that broke, and the time it took.

    A task that ran out of time has outcomes only for the inputs that it settled. `rough` is True if an attack computed
    gradients in bfloat16.
    """

    outcomes: tuple[Outcome, ...]
    examples: tuple[Example, ...]
    seconds: float
    rough: bool = False


Answer = tuple[list[Outcome], list[Example], bool]
"""Outcomes, examples, and whether gradients were computed in bfloat16."""


def work(model: nn.Module, task: Task) -> Found:
    """Do the task."""
    started = clock.now()
    # Whatever a random model draws follows from the task.
    with clock.until(started + task.seconds), seeded(task.seed + int(task.index[0]), task.x.device):
        try:
            does = {"clean": _classify, "certify": _certify, "attack": _attack}[task.stage]
            outcomes, examples, rough = does(model, task)
        except OutOfTime:
            outcomes, examples, rough = [], [], False
        if clock.over() and task.stage != "clean":  # an attack that found nothing yet, or a proof, was cut short
            proof = task.stage == "certify"
            outcomes = [one for one in outcomes if one.broke(task.stage) or (proof and one.passed)]
    return Found(tuple(outcomes), tuple(examples), clock.now() - started, rough)


def _classify(model: nn.Module, task: Task) -> Answer:
    try:
        prediction = _predict(model, task, task.x, task.seed)
    except InputError as error:
        raise InputError(f"in the batch that starts at input {int(task.index[0])}: {error}") from error
    rows = zip(task.index.tolist(), (prediction == task.y).tolist(), prediction.tolist(), strict=True)
    return [Outcome(*row) for row in rows], [], False


def _certify(model: nn.Module, task: Task) -> Answer:
    """`passed` where the threat is proved; `size` is the largest radius proved, or the size of a counter-example."""
    assert task.threat is not None
    asked: dict[str, Any] = {"radii": list(task.radii), "index": task.index} if task.radii else {}
    result = run_certify(model, task.x, task.y, task.threat, task.method, **{**task.options, **asked})
    sizes = [task.size * passed for passed in result.certified.tolist()]
    if result.radius is not None:  # a constant classifier holds for ever, which JSON cannot say
        sizes = [max(size, r if isfinite(r) else 0.0) for size, r in zip(sizes, result.radius.tolist(), strict=True)]
    by = result.by or (task.method,) * len(task.index)
    rows = zip(task.index.tolist(), result.certified.tolist(), sizes, by, strict=True)
    outcomes = [Outcome(i, passed, None, name if size else "", size) for i, passed, size, name in rows]
    if result.x_adv is None:
        return outcomes, [], False
    success = (check_logits(model, result.x_adv).argmax(1) != task.y) & ~result.certified
    x_adv = result.x_adv if task.draws else _nearer(model, task, result.x_adv, success)
    met, examples = _examples(model, task, x_adv, success, by)
    return [one if one.broke("attack") else outcomes[i] for i, one in enumerate(met)], examples, False


def _attack(model: nn.Module, task: Task) -> Answer:
    """`passed` where the input held; else `size` is the size of the example, after the way back to the input is cut."""
    threat = task.threat
    assert threat is not None
    found = run_attack(model, task.x, task.y, threat, task.method, seed=task.seed, index=task.index, **task.options)
    success, x_adv = found.success, found.x_adv.detach()
    after = None
    if isinstance(model, Smoothed):
        success = success & model.differs(x_adv, task.y)
    elif task.draws:
        # Draws that the attack has not seen; and that an input is right, unchanged, was settled before.
        after = _predict(model, task, x_adv, task.seed + 1)
        unchanged = torch.tensor([name == "clean" for name in found.by], device=success.device)
        success = success & (after != task.y) & ~unchanged
    else:
        x_adv = _nearer(model, task, x_adv, success)
    return *_examples(model, task, x_adv, success, found.by, after), found.precision == "bfloat16"


def _examples(
    model: nn.Module, task: Task, x_adv: Tensor, success: Tensor, by: tuple[str, ...], after: Tensor | None = None
) -> tuple[list[Outcome], list[Example]]:
    """Outcomes of an attack with these examples, where it was a success; `after` (B,) are their classes, if known."""
    sizes = [task.size] * len(task.index)
    if isinstance(task.threat, Linf | L2 | L1):
        # An example of the threat is one of size at most its budget, whatever its last digit says.
        sizes = task.threat.distance(x_adv, task.x).double().clamp(max=task.size).tolist()
    classes = (check_logits(model, x_adv).argmax(1) if after is None else after).tolist()
    outcomes, examples = [], []
    for i, position in enumerate(task.index.tolist()):
        if not success[i]:
            outcomes.append(Outcome(position, True))
            continue
        outcomes.append(Outcome(position, False, classes[i], by[i], sizes[i]))
        examples.append(Example(position, to_numpy(task.x[i]), to_numpy(x_adv[i])))
    return outcomes, examples


def _predict(model: nn.Module, task: Task, x: Tensor, seed: int) -> Tensor:
    """Class of each input, (B,); a random model answers with its mean softmax over the draws of this seed."""
    logits = check_logits(model, x)
    return (mean_prediction(model, x, task.draws, seed) if task.draws else logits).argmax(1)


@torch.no_grad()
def _nearer(model: nn.Module, task: Task, x_adv: Tensor, success: Tensor) -> Tensor:
    """Where an example of a ball was found, the nearest misclassified point that halving the way to the input meets."""
    x, y, index = task.x, task.y, success.nonzero()[:, 0]
    if len(index) == 0 or not isinstance(task.threat, Linf | L2 | L1):
        return x_adv
    start, step, label = x[index], x_adv[index] - x[index], y[index]
    low, high = torch.zeros_like(step.flatten(1)[:, 0]), torch.ones_like(step.flatten(1)[:, 0])
    shape = (-1,) + (1,) * (x.dim() - 1)
    for _ in range(HALVINGS):
        if clock.over():
            break
        middle = (low + high) / 2
        wrong = model(start + middle.view(shape) * step).argmax(1) != label
        high, low = torch.where(wrong, middle, high), torch.where(wrong, low, middle)
    nearer = x_adv.clone()
    nearer[index] = start + high.view(shape) * step
    # In another batch the logits may differ in their last digits: a point that is right here stays where it was.
    lost = success & (model(nearer).argmax(1) == y)
    return torch.where(lost.view(shape), x_adv, nearer)
