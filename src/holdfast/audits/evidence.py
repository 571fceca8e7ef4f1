"""What an audit keeps beside its numbers: whether the attack can be trusted, and what decides in the pictures."""

import json
import math
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from holdfast.attacks.core.chance import mean_prediction
from holdfast.attacks.core.indicators import THREATS, Indicator, probe
from holdfast.attacks.core.nature import Nature
from holdfast.attacks.core.stages import untouched
from holdfast.audits.bracket import NO_TIME_TO_PROBE
from holdfast.audits.inputs import to_numpy
from holdfast.audits.job import Job
from holdfast.audits.rows import Example, Key, Outcome
from holdfast.audits.side import Side
from holdfast.certificates import Smoothed
from holdfast.checks import check_logits
from holdfast.errors import InputError, OutOfTime, StorageError
from holdfast.explanations import explain
from holdfast.utils import clock
from holdfast.utils.limits import parse_json

PROBED = 64  # inputs that tell whether the attack can be trusted: a few seconds for a small network
FEWEST = 16  # inputs to be probed: what happens to one of fewer says little
COST = 700  # passes that the probes of one input take: 120 gradients, 300 queries and 32 random points
EXPLAINED = 200  # pictures that say what decides: fifty gradients each
TOGETHER = 10  # pictures between two looks at the clock


def trust(job: Job, side: Side, seconds: float = math.inf) -> tuple[Indicator, ...]:
    """Signs that the attack failed for reasons of its own, on the first inputs that are classified right.

    What the probes break counts as broken. Threats without probes get only the signs that the nature of the model gives
    away; so do all threats if there is no time for the probes.

    Args:
        job: the audit.
        side: the threat.
        seconds: about how long the probes may take.
    """
    index = torch.tensor(side.right[: _affordable(job, seconds)], dtype=torch.long)
    job.show("trust", 0, len(index))
    # The probes would count examples of a smoothed model that fresh noise does not confirm.
    if not side.right or isinstance(job.model, Smoothed):
        return ()
    if side.threat.name not in THREATS:
        return _signs(job.nature)
    stored = job.store.trust(side.number)
    if stored is not None:
        for outcome in job.store.outcomes(_key(side)).values():
            job.note("attack", side, outcome)
        try:
            return tuple(Indicator(**indicator) for indicator in parse_json(stored, finite=False))
        except (ValueError, TypeError) as error:
            raise StorageError(
                f"the audit store holds indicators that cannot be read ({error}); delete the file to start again"
            ) from error
    found = _probe(job, side, index) if len(index) and not clock.over() else ()
    if not found:
        side.skipped.append(NO_TIME_TO_PROBE)
    return found or _signs(job.nature)


def _affordable(job: Job, seconds: float) -> int:
    """How many inputs can be probed in so many seconds, going by the time of a pass; 0 if too few to tell anything."""
    each = job.store.seconds(0).get("clean", 0.0) / len(job.x) * COST
    most = PROBED if each * PROBED <= seconds else int(seconds / each)
    return most if most >= FEWEST else 0


def _key(side: Side) -> Key:
    """Where the store keeps what the probes broke: they are no step of the plan, and work at the largest level."""
    return Key(side.number, 0, len(side.levels))


def _probe(job: Job, side: Side, index: Tensor) -> tuple[Indicator, ...]:
    """The signs, stored with what the probes broke; none if the time ended before them."""
    start = clock.now()
    x, y = job.take(index)
    broken = [position in side.broken for position in index.tolist()]
    attacked = replace(untouched(x), success=torch.tensor(broken, device=x.device))
    threat = side.threat.select(index)
    signs, found = probe(job.model, x, y, threat, attacked, seed=job.seed)
    if clock.over():
        return ()
    new = (found.success & ~attacked.success).nonzero()[:, 0]
    classes = _classes(job, found.x_adv[new]) if len(new) else new
    new, classes = new[classes != y[new]], classes[classes != y[new]]
    sizes = threat.distance(found.x_adv, x).double().clamp(max=side.sizes[-1]).tolist()
    outcomes, examples = [], []
    for i, prediction in zip(new.tolist(), classes.tolist(), strict=True):
        position = int(index[i])
        outcomes.append(Outcome(position, False, prediction, "probe", sizes[i]))
        examples.append(Example(position, to_numpy(x[i]), to_numpy(found.x_adv[i])))
        job.note("attack", side, outcomes[-1], examples)
    seconds = clock.now() - start
    stored = job.store.outcomes(_key(side))  # of a run that was killed between the two
    fresh = [outcome for outcome in outcomes if outcome.position not in stored]
    if fresh:
        job.store.add(_key(side), "trust", fresh, examples, seconds=0.0)
    text = json.dumps([asdict(indicator) for indicator in signs])
    job.store.add_trust(side.number, text, inputs=len(x), seconds=seconds)
    return signs


def _classes(job: Job, x: Tensor) -> Tensor:
    """What the model says, (B,); a random one by its mean softmax over draws that the probes have not seen."""
    logits = mean_prediction(job.model, x, job.draws, job.seed + 1) if job.draws else check_logits(job.model, x)
    return logits.argmax(1)


def _signs(nature: Nature) -> tuple[Indicator, ...]:
    """What the nature of a model says about every attack on it; nothing for a model with useful gradients."""
    found = []
    if nature.gradients != "useful":
        text = {"none": "the model has no gradient", "useless": "no step along the gradient raises the loss"}
        found.append(Indicator("vanishing-gradients", True, 1.0, text[nature.gradients]))
    if nature.random:
        found.append(Indicator("stochastic", True, 1.0, "two passes over the same inputs differ"))
    return tuple(found)


def explained(job: Job, side: Side, examples: tuple[Example, ...]) -> tuple[Example, ...]:
    """The examples with what decides between each and its input: integrated gradients from one to the other.

    A model that has no gradients, or that averages them over many noisy copies, gets its examples back without; so do
    examples for which there is no time.
    """
    parts = [examples[i : i + TOGETHER] for i in range(0, len(examples), TOGETHER)]
    return tuple(one for part in parts for one in (part if clock.over() else _explained(job, side, part)))


def _explained(job: Job, side: Side, examples: tuple[Example, ...]) -> tuple[Example, ...]:
    if not examples or job.nature != Nature() or isinstance(job.model, Smoothed):
        return examples
    x, y = job.take(torch.tensor([example.position for example in examples]))
    how: dict[str, Any] = {"quantity": "margin", "low": side.threat.low, "high": side.threat.high, "tolerance": None}
    x_adv = torch.stack([torch.tensor(example.x_adv) for example in examples]).to(x)
    try:
        found = explain(job.model, x, y, "integrated-gradients", baseline=x_adv, **how)
    except (InputError, OutOfTime):
        return examples
    values = to_numpy(found.attribution)
    return tuple(replace(example, attribution=values[i]) for i, example in enumerate(examples))
