"""What an audit keeps beside its numbers: why the attack can be trusted, pictures, and a proof that broke."""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from holdfast.attacks.core.indicators import THREATS, Indicator, indicators
from holdfast.attacks.core.nature import Nature
from holdfast.attacks.core.stages import untouched
from holdfast.audits.inputs import to_numpy
from holdfast.audits.rows import Example, Outcome
from holdfast.audits.store import Store
from holdfast.certificates import Smoothed
from holdfast.errors import InputError, SoundnessError, StorageError
from holdfast.explanations import explain
from holdfast.threats import Threat
from holdfast.utils.limits import parse_json
from holdfast.utils.resume import save_arrays

PROBED = 64  # inputs that tell whether the attack can be trusted: a few seconds for a small network
EXPLAINED = 200  # pictures that say what decides: fifty gradients each


def trust(
    store: Store,
    bracket: int,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    broken: list[bool],
    *,
    seed: int,
    nature: Nature,
) -> tuple[Indicator, ...]:
    """Signs that the attack failed for reasons of its own, on some inputs x, y.

    Threats without probes get only the signs that the nature of the model gives away. `broken` says which of the inputs
    the attack broke.
    """
    # The probes would count examples of a smoothed model that fresh noise does not confirm.
    if not len(x) or isinstance(model, Smoothed):
        return ()
    if threat.name not in THREATS:
        return _signs(nature)
    stored = store.trust(bracket)
    if stored is not None:
        try:
            return tuple(Indicator(**indicator) for indicator in parse_json(stored, finite=False))
        except (ValueError, TypeError) as error:
            raise StorageError(
                f"the audit store holds indicators that cannot be read ({error}); delete the file to start again"
            ) from error
    start = time.perf_counter()
    attacked = replace(untouched(x), success=torch.tensor(broken, device=x.device))
    found = indicators(model, x, y, threat, attacked, seed=seed)
    text = json.dumps([asdict(indicator) for indicator in found])
    store.add_trust(bracket, text, inputs=len(x), seconds=time.perf_counter() - start)
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


def explained(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, examples: tuple[Example, ...]
) -> tuple[Example, ...]:
    """The examples of x, y with what decides between each and its input: integrated gradients from one to the other.

    A model that has no gradients, or that averages them over many noisy copies, gets its examples back without.
    """
    if not examples or isinstance(model, Smoothed):
        return examples
    x_adv = torch.stack([torch.tensor(example.x_adv) for example in examples]).to(x)
    try:
        found = explain(
            *(model, x, y, "integrated-gradients"),
            baseline=x_adv,
            quantity="margin",
            low=threat.low,
            high=threat.high,
            tolerance=None,
        )
    except InputError:
        return examples
    values = to_numpy(found.attribution)
    return tuple(replace(example, attribution=values[i]) for i, example in enumerate(examples))


def unsound(
    folder: Path | None,
    label: int,
    proof: tuple[float, str],
    outcome: Outcome,
    examples: Sequence[Example],
    threat: Threat,
    *,
    alpha: float | None,
) -> SoundnessError:
    """The error for a certified input that was broken; puts the evidence into a file first.

    Args:
        folder: folder of the run, or None.
        label: true class of the input.
        proof: radius and certificate.
        outcome: what broke it.
        examples: may hold the example of the input.
        threat: the largest one.
        alpha: probability that a proof is wrong, if it is not zero.
    """
    (radius, certificate), position = proof, outcome.position
    folder = Path(tempfile.mkdtemp(prefix="holdfast-")) if folder is None else folder
    path = folder / f"soundness-{position}.npz"
    example = next((e for e in examples if e.position == position), None)
    arrays = {} if example is None else {"x": example.x, "x_adv": example.x_adv}
    about = {"label": label, "threat": str(threat), "certified": radius, "broken": outcome.size}
    try:
        save_arrays(path, {**arrays, **about})
        kept = f"the evidence is in '{path}'"
    except OSError as error:
        kept = f"the evidence could not be kept: {error}"
    excuse = f"the proof is wrong with probability {alpha:g}; if you see it twice, " if alpha else ""
    return SoundnessError(
        f"input {position} is certified by '{certificate}' up to {radius:.6g} in {threat.name}, but the attack "
        f"'{outcome.by}' broke it with an example of size {outcome.size:.6g}. One of the two is wrong: {excuse}this is "
        f"a bug in Holdfast, please report it; {kept}."
    )
