"""What an audit keeps beside its numbers: whether the attack can be trusted, and what decides in the pictures."""

import json
import time
from dataclasses import asdict, replace
from typing import Any

import torch

from holdfast.attacks.core.indicators import THREATS, Indicator, indicators
from holdfast.attacks.core.nature import Nature
from holdfast.attacks.core.stages import untouched
from holdfast.audits.inputs import to_numpy
from holdfast.audits.job import Job
from holdfast.audits.rows import Example
from holdfast.audits.side import Side
from holdfast.certificates import Smoothed
from holdfast.errors import InputError, StorageError
from holdfast.explanations import explain
from holdfast.utils.limits import parse_json

PROBED = 64  # inputs that tell whether the attack can be trusted: a few seconds for a small network
EXPLAINED = 200  # pictures that say what decides: fifty gradients each


def trust(job: Job, side: Side) -> tuple[Indicator, ...]:
    """Signs that the attack failed for reasons of its own, on the first inputs that are classified right.

    Threats without probes get only the signs that the nature of the model gives away.
    """
    index = torch.tensor(side.right[:PROBED], dtype=torch.long)
    job.show("trust", 0, len(index))
    # The probes would count examples of a smoothed model that fresh noise does not confirm.
    if not len(index) or isinstance(job.model, Smoothed):
        return ()
    if side.threat.name not in THREATS:
        return _signs(job.nature)
    stored = job.store.trust(side.number)
    if stored is not None:
        try:
            return tuple(Indicator(**indicator) for indicator in parse_json(stored, finite=False))
        except (ValueError, TypeError) as error:
            raise StorageError(
                f"the audit store holds indicators that cannot be read ({error}); delete the file to start again"
            ) from error
    start = time.perf_counter()
    x, y = job.take(index)
    broken = [position in side.broken for position in index.tolist()]
    attacked = replace(untouched(x), success=torch.tensor(broken, device=x.device))
    found = indicators(job.model, x, y, side.threat.select(index), attacked, seed=job.seed)
    text = json.dumps([asdict(indicator) for indicator in found])
    job.store.add_trust(side.number, text, inputs=len(x), seconds=time.perf_counter() - start)
    return found


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

    A model that has no gradients, or that averages them over many noisy copies, gets its examples back without.
    """
    if not examples or job.nature != Nature() or isinstance(job.model, Smoothed):
        return examples
    x, y = job.take(torch.tensor([example.position for example in examples]))
    how: dict[str, Any] = {"quantity": "margin", "low": side.threat.low, "high": side.threat.high, "tolerance": None}
    x_adv = torch.stack([torch.tensor(example.x_adv) for example in examples]).to(x)
    try:
        found = explain(job.model, x, y, "integrated-gradients", baseline=x_adv, **how)
    except InputError:
        return examples
    values = to_numpy(found.attribution)
    return tuple(replace(example, attribution=values[i]) for i, example in enumerate(examples))
