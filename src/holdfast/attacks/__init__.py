"""Find an adversarial example: one file per attack, one front door."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks import (  # noqa: F401  (registers the methods)
    apgd,
    autoattack,
    cascade,
    cw,
    ddn,
    deepfool,
    eot,
    eot_apgd,
    eot_grid,
    eot_nes,
    eot_square,
    fab,
    fgsm,
    fmn,
    hopskipjump,
    multi_targeted,
    nes,
    patch_pgd,
    pgd,
    sparse_pgd,
    sparse_rs,
    spsa,
    square,
    substitute,
)
from holdfast.attacks.core.batches import concatenate, fitting, noise_for
from holdfast.attacks.core.bpda import StraightThrough
from holdfast.attacks.core.chance import mean_prediction, watched
from holdfast.attacks.core.losses import margin
from holdfast.attacks.core.minimum_norm import Nearest
from holdfast.attacks.core.nearest import nearest
from holdfast.attacks.core.precision import Precision, precision_of, quickened
from holdfast.attacks.core.stages import run_stages
from holdfast.attacks.core.survivors import broken_by
from holdfast.attacks.core.transfer import transfer_matrix
from holdfast.checks import check_task
from holdfast.errors import HoldfastError, InputError, UnsupportedError
from holdfast.random import Noise
from holdfast.registry import get
from holdfast.results import AttackResult
from holdfast.threats import Box, Threat
from holdfast.threats import threat as read_threat

__all__ = ["Nearest", "StraightThrough", "attack", "nearest", "transfer_matrix"]

VOTES = 20
"""Draws that decide what a model that draws random numbers predicts."""


def attack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat | str,
    method: str = "cascade",
    *,
    seed: int = 0,
    index: Tensor | None = None,
    chunk: int = 256,
    precision: Precision = "auto",
    **options: Any,
) -> AttackResult:
    """Look for an input of the threat set that the model does not classify as `y`.

    Inputs that are wrong to begin with count as broken, by "clean", and are not attacked. Every example is checked
    before it is returned: it lies in the threat set and the model misclassifies it.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs in the threat's valid range, shape (B, ...).  y: labels, shape (B,), int64.
        threat: what the adversary may do.
        method: a name from `hf.methods("attack")`.
        seed: fixes every random choice.
        index: identity of each input, shape (B,); its random numbers follow from it, so that the answer does not depend
            on the batch. Positions in the batch if none is given.
        chunk: most inputs worked on at a time; large inputs are fewer where a measured gradient takes much memory.
            The answer does not change.
        precision: precision of the gradients. "auto" takes bfloat16 for large networks if the logits agree and a short
            timing favours it; "full" or "bfloat16" decide. Successes are always decided in the model's own precision.
            `AttackResult.precision` says what was used and why.
        **options: options of the method, such as steps=. A method with the option `data` learns from x by default.

    Example:
        >>> import holdfast as hf
        >>> model = torch.nn.Linear(2, 2).eval()
        >>> result = hf.attack(model, torch.rand(4, 2), torch.zeros(4, dtype=torch.long), hf.Linf(0.1), "pgd")
        >>> result.success.shape
        torch.Size([4])
    """
    entry = get("attack", method)
    threat = read_threat(threat)
    options = entry.check(threat, options)
    if chunk < 1:
        raise InputError(f"chunk must be at least 1, got {chunk}")
    if isinstance(threat, Box) and threat.batched:
        raise UnsupportedError("attacks take a Box with one radius for all inputs; attack one input at a time")
    logits, by_chance = watched(model, x, seed, lambda: check_task(model, x, y, threat, chunk=max(chunk, 256)))
    if by_chance and not entry.stochastic:
        raise InputError(
            f"the model draws random numbers: two passes over the same inputs differ, and '{method}' cannot tell luck "
            "from an attack. Use 'cascade', 'eot-pgd', or 'autoattack' with version='rand', which average over draws."
        )
    if by_chance:
        logits = mean_prediction(model, x, VOTES, seed)
    if "data" in entry.options and options.get("data") is None:
        options["data"] = x.detach()  # all of it: the answer must not depend on the chunks
    noise = noise_for(x, seed, index)
    quick = quickened(model, x, logits, entry, "full" if by_chance else precision)
    chunk = fitting(quick, x, chunk)

    def clean(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        wrong = logits.argmax(1) != y
        once = torch.ones(len(x), dtype=torch.int64, device=x.device)
        return AttackResult(x, wrong, broken_by("clean", wrong), 0 * once, once)

    def chunked(x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        parts: list[AttackResult] = [
            entry.function(quick, x[i : i + chunk], y[i : i + chunk], threat, noise=noise[i : i + chunk], **options)
            for i in range(0, len(x), chunk)
        ]
        return concatenate(parts)

    result = run_stages(x.detach(), y, noise, [clean, chunked])
    _check_inside(x, threat, result)
    result = replace(result, precision=precision_of(quick))
    return result if by_chance else _verified(model, x, y, result, chunk)


def _check_inside(x: Tensor, threat: Threat, result: AttackResult) -> None:
    """Check every point: an attack that leaves the threat set has a bug."""
    outside = ~threat.contains(result.x_adv, x)
    if bool(outside.any()):
        raise HoldfastError(
            f"the attack left the threat set '{threat}' at input {int(outside.nonzero()[0])}: "
            "a bug in Holdfast, please report it"
        )


@torch.no_grad()
def _verified(model: nn.Module, x: Tensor, y: Tensor, result: AttackResult, chunk: int) -> AttackResult:
    """Check every success: it must be misclassified when evaluated again.

    A success whose margin is within float rounding may tip over in another batch; it is taken back. Any other success
    that does not repeat means that the model is not a function of its input.
    """
    success, by = result.success.clone(), list(result.by)
    found = [i for i, name in enumerate(by) if name not in ("", "clean")]
    for start in range(0, len(found), chunk):
        part = torch.tensor(found[start : start + chunk], device=x.device)
        logits = model(result.x_adv[part])
        wild = ~torch.isfinite(logits).all(1)
        if bool(wild.any()):
            raise InputError(
                f"the model returns NaN or infinite logits inside the threat set of input {int(part[wild][0])}: "
                "what it predicts there is not defined"
            )
        excess = margin(logits, y[part])
        rounding = 1e3 * torch.finfo(logits.dtype).eps * logits.abs().amax(1)
        clear = part[excess < -rounding].tolist()
        if clear:
            raise HoldfastError(
                f"the adversarial example of input {clear[0]} is classified correctly when evaluated again: "
                "the model's answer depends on chance or on the rest of the batch."
            )
        for i in part[logits.argmax(1) == y[part]].tolist():
            success[i], by[i] = False, ""
    return replace(result, success=success, by=tuple(by))
