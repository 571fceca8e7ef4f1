"""Input checks: bad input gets an error that says what is wrong, where, and what to do."""

import itertools

import torch
from torch import Tensor, nn

from holdfast.errors import InputError, UnsupportedError, either
from holdfast.threats import Threat
from holdfast.utils.allocator import reuse_blocks

PROVABLE = (torch.float32, torch.float64)
"""Dtypes whose rounding errors leave room for a proof."""
CLONE = "Let its forward() begin with x = x.clone(), or set inplace=False in its first layer."


def modules_in(model: nn.Module) -> list[nn.Module]:
    """The model and every module in it, once. `model.modules()` makes a name for each, which takes most of its time."""
    found, seen = [model], {model}
    for module in found:  # grows under way
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def check_model(model: nn.Module) -> None:
    """Refuse anything but a module in eval mode (in training mode, answers would depend on the batch)."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    if any(module.training for module in modules_in(model)):
        training = [name or "the model itself" for name, m in model.named_modules() if m.training]
        raise InputError(
            f"the model is in training mode (first: {training[0]}). Call model.eval() before you evaluate it."
        )


def check_inputs(x: Tensor, low: float = 0.0, high: float = 1.0) -> None:
    """Refuse an empty batch, a non-float dtype, NaN, infinity, and values outside [low, high]."""
    if not isinstance(x, Tensor):
        raise InputError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.ndim < 2:
        raise InputError(f"x must be a batch of shape (B, ...), got shape {tuple(x.shape)}; use x[None] for one input")
    if x.shape[0] == 0 or x.numel() == 0:
        raise InputError(f"x is an empty batch, shape {tuple(x.shape)}; give at least one input")
    if not x.is_floating_point():
        raise InputError(f"x has dtype {x.dtype}; convert it to float in [{low:g}, {high:g}], e.g. x.float() / 255")
    least, most = torch.aminmax(x.detach())
    if low <= least.item() and most.item() <= high:  # one pass settles the usual case; NaN is in no range
        return
    flat = x.detach().flatten(1)
    bad = ~torch.isfinite(flat).all(1)
    if bool(bad.any()):
        raise InputError(f"input {int(bad.nonzero()[0])} holds NaN or infinite values")
    outside = ((flat < low) | (flat > high)).any(1)
    if bool(outside.any()):
        i = int(outside.nonzero()[0])
        advice = either(
            "put normalisation into the model (holdfast.models.Normalize), or set the threat's range: low= and high=",
            "say with --mean and --std how the model normalises them, or set the range in the threat: linf:8/255@-1:1",
        )
        raise InputError(
            f"input {i} has values from {flat[i].min():.4g} to {flat[i].max():.4g}, outside the valid range "
            f"[{low:g}, {high:g}]. Give inputs in their natural range and {advice}."
        )


def check_precision(x: Tensor) -> None:
    """Refuse to prove anything about a model in half precision, or less; attacks need no such check."""
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype not in PROVABLE:
        raise UnsupportedError(
            f"proofs need float32 or float64, and the model is in {str(x.dtype).removeprefix('torch.')}. Its rounding "
            "errors leave no useful bound. Attacks run on it as it is; model.float() with x.float() certifies and "
            "audits the float32 model, which is another one."
        )


def check_place(model: nn.Module, x: Tensor) -> None:
    """Refuse a model whose parameters or buffers lie on another device, or have another float dtype, than x."""
    device, dtype, modules = x.device, x.dtype, modules_in(model)
    kept = (t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
    if all(t.device == device and (t.dtype == dtype or not t.is_floating_point()) for t in kept):
        return
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.device != x.device:
            raise InputError(f"'{name}' of the model is on {tensor.device} but x is on {x.device}; move one of them")
        if tensor.is_floating_point() and tensor.dtype != x.dtype:
            raise InputError(f"'{name}' of the model is {tensor.dtype} but x is {x.dtype}; convert one of them")


def check_labels(y: Tensor, count: int, classes: int | None = None) -> None:
    """Refuse labels of the wrong shape or dtype, or outside 0 ... classes-1."""
    if not isinstance(y, Tensor) or y.dtype != torch.int64:
        kind = y.dtype if isinstance(y, Tensor) else type(y).__name__
        raise InputError(f"y must be a tensor of int64 class indices, got {kind}")
    if y.shape != (count,):
        raise InputError(f"y must have shape ({count},), one label per input, got {tuple(y.shape)}")
    if count == 0:
        return
    least, most = torch.aminmax(y)
    if least.item() < 0 or (classes is not None and most.item() >= classes):
        bad = (y < 0) if classes is None else (y < 0) | (y >= classes)
        i = int(bad.nonzero()[0])
        raise InputError(f"label {int(y[i])} of input {i} is outside the classes 0 to {(classes or 0) - 1}")


def check_logits(model: nn.Module, x: Tensor, chunk: int | None = None) -> Tensor:
    """Logits of x, shape (B, K), or an error if the model cannot take x or does not return finite logits.

    `chunk` is the number of inputs per forward pass: large batches do not fit into the caches of a CPU.
    """
    if chunk is not None and len(x) > chunk:
        return torch.cat([check_logits(model, part) for part in x.split(chunk)])
    copy = x.detach().clone()  # what the caller holds is never shown to a model that may write into it
    try:
        with torch.no_grad():
            logits = model(copy)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        advice = "Check the rank, the channels and the size that the model expects."
        if "not implemented for" in str(error):
            advice = f"There is no kernel for {x.dtype} on {x.device.type}: take model.float() with x.float()."
        reason = str(error).splitlines()[0].rstrip(". ")
        raise InputError(f"the model failed on a batch of shape {tuple(x.shape)}: {reason}. {advice}") from error
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[0] != x.shape[0]:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise InputError(f"the model must return logits of shape ({x.shape[0]}, K), got {shape}")
    if not torch.equal(copy, x):
        raise InputError(f"the model writes into its input. {CLONE}")
    finite = torch.isfinite(logits).all(1)
    if not bool(finite.all()):
        raise InputError(f"the model returns NaN or infinite logits for input {int((~finite).nonzero()[0])}")
    return logits


def check_task(model: nn.Module, x: Tensor, y: Tensor | None, threat: Threat, *, chunk: int | None = None) -> Tensor:
    """Run all checks of one evaluation; return the clean logits (B, K), `chunk` inputs per forward pass."""
    if not isinstance(threat, Threat):
        raise InputError(
            f"the threat must be one of hf.Linf, hf.L2, ..., got {threat!r}; hf.threat('linf:0.1') reads text"
        )
    reuse_blocks()
    check_model(model)
    check_inputs(x, threat.low, threat.high)
    if y is not None:
        check_labels(y, x.shape[0])
    check_place(model, x)
    logits = check_logits(model, x, chunk)
    if y is None:
        return logits
    if logits.shape[1] < 2:
        raise InputError(
            "the model has one output, and one class cannot be told from another; for a binary score z give the two "
            "logits (0, z), e.g. torch.cat([0 * z, z], 1)"
        )
    check_labels(y, x.shape[0], logits.shape[1])
    return logits
