"""What every attack is given, as one value, and the call that the attack has from outside."""

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from holdfast.random import Noise
from holdfast.results import AttackResult
from holdfast.threats import Threat

F = TypeVar("F", bound=Callable[..., Any])


class Task(NamedTuple):
    """What an attack works on.

    Attributes:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs in the threat's valid range, shape (B, ...).  y: labels, shape (B,).
        threat: what the adversary may do.
        noise: source of all random choices, one for each input.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    threat: Threat
    noise: Noise


def on_task(run: Callable[..., AttackResult]) -> Callable[..., AttackResult]:
    """The attack `run(task, *, options)` in the form `(model, x, y, threat, *, noise, options)`, free of graphs.

    The noise is the one of seed 0 for inputs 0 ... B-1 if none is given.
    """

    @torch.no_grad()
    def attack(
        model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, noise: Noise | None = None, **options: Any
    ) -> AttackResult:
        return run(Task(model, x, y, threat, noise or Noise.for_batch(0, len(x), x.device)), **options)

    return with_options(attack, run, run.__name__)


def with_options(call: F, run: Callable[..., Any], name: str, without: tuple[str, ...] = ()) -> F:
    """`call`, which takes any options, as a function `name` with the documentation and the options of `run`."""
    form, given = inspect.signature(call), inspect.signature(run).parameters.values()
    own = [p for p in form.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters = own + [o for o in given if o.kind is o.KEYWORD_ONLY and o.name not in without]
    update_wrapper(call, run, assigned=("__module__", "__doc__"))
    call.__name__ = call.__qualname__ = name
    call.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": form.return_annotation}
    call.__signature__ = form.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call
