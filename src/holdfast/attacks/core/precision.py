"""In which precision an attack computes its gradients: the option, its checks, and what is said of it."""

from typing import Literal, get_args

from torch import Tensor, nn

from holdfast.attacks.fast.lean import Lean, has_bfloat16, is_large, lean
from holdfast.errors import InputError, UnsupportedError, did_you_mean
from holdfast.registry import Attack

Precision = Literal["auto", "full", "bfloat16"]


def quickened(model: nn.Module, x: Tensor, logits: Tensor, entry: Attack, precision: str) -> nn.Module:
    """The model in the form that the attack `entry` is fastest on; what it finds is for the model itself to confirm.

    Args:
        x: inputs, shape (B, ...).  logits: what the model says of them, (B, K).
    """
    if precision not in get_args(Precision):
        raise InputError(f"unknown precision '{precision}'. " + did_you_mean(precision, get_args(Precision)))
    if precision == "bfloat16" and not has_bfloat16(x.device):
        raise UnsupportedError(f"this {x.device.type} has no bfloat16; use precision='auto' or 'full'")
    if entry.gradients == "none" and not is_large(model):
        return model
    quick = lean(model, x, logits, precision="full" if entry.gradients == "none" else precision)
    if precision == "bfloat16" and isinstance(quick, Lean) and quick.rough is None and entry.gradients != "none":
        raise UnsupportedError(f"no gradients in bfloat16: {quick.reason}; use precision='auto' or 'full'")
    return quick


def precision_of(model: nn.Module) -> str:
    """What a result says of the precision of its gradients."""
    if not isinstance(model, Lean):
        return "full"
    if model.used:
        return "bfloat16"
    return f"full: {model.reason}" if model.reason else "full"
