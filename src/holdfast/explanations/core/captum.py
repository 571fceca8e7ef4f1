"""What the methods that Captum computes share: loading it, calling it in chunks, and its answer as an `Explanation`."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks.eot import seeded
from holdfast.errors import UnsupportedError
from holdfast.explanations.core.answers import describe, finite
from holdfast.explanations.core.paths import completeness_error
from holdfast.explanations.core.quantity import Setting, values_at
from holdfast.results import Explanation


def load_captum() -> Any:
    """Import `captum.attr`, or say how to install it."""
    try:
        return importlib.import_module("captum.attr")
    except ImportError as error:
        raise UnsupportedError(
            f"this method comes from Captum, which cannot be imported ({error}). Install it with: pip install captum"
        ) from error


def in_chunks(x: Tensor, b: Tensor, y: Tensor, setting: Setting, one: Callable[..., Tensor]) -> Tensor:
    """Call `one(x, b, y)` on parts of the batch; if Captum fails, say that it cannot explain this model."""
    rows = torch.arange(len(x), device=x.device).split(setting.chunk)
    try:
        with warnings.catch_warnings(), seeded(setting.noise.seed, x.device), torch.enable_grad():
            warnings.simplefilter("ignore")  # Captum announces the hooks that it sets on a copy of the model
            return torch.cat([one(x[r], b[r], y[r]).detach() for r in rows])
    except (RuntimeError, TypeError, AssertionError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedError(f"Captum cannot explain this model by this method: {reason}") from error


def answer(
    model: nn.Module,
    x: Tensor,
    b: Tensor,
    y: Tensor,
    setting: Setting,
    attribution: Tensor,
    how: str,
    passes: int,
    *,
    complete: bool,
) -> Explanation:
    """The attribution as an answer after `passes` through the model; `complete` says that it should add up."""
    total = attribution.flatten(1).sum(1)
    error = completeness_error(total, values_at(model, x, y, setting), values_at(model, b, y, setting))
    error = error if complete else torch.full_like(error, torch.nan)
    return Explanation(attribution, finite(attribution), error, torch.full_like(y, passes), describe(y, setting, how))


def need_logit(setting: Setting, name: str) -> None:
    """Refuse other quantities than the logit."""
    if setting.quantity != "logit":
        raise UnsupportedError(f"'{name}' explains the logit, not the {setting.quantity}; leave out quantity=")
