"""A network for attacks: a lean copy for its answers and, where that is faster, one in bfloat16 for its gradients.

Gradients may be rough, answers may not: what comes close to the boundary, or beyond it, is evaluated in full precision
before anybody sees it.
"""

import contextlib
import copy
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, fx, nn

from holdfast.attacks.core.losses import margin
from holdfast.attacks.core.survivors import group_size
from holdfast.attacks.fast.chain import is_plain
from holdfast.attacks.fast.fold import agrees, slimmed
from holdfast.utils.reference import is_reference

LARGE = 100_000
"""Parameters from which on a network is worth a copy, and a timing."""
SAMPLE = 8
"""Inputs on which the copies are compared and timed."""
GAIN = 0.85
"""Largest share of the time in full precision at which bfloat16 is taken."""
APART = 0.1
"""Largest error of a logit in bfloat16, as a share of the spread of the logits."""
ALIGNED = 0.8
"""Least mean cosine of the gradients in bfloat16 with those in full precision: below it, they make a weaker attack."""

_TIMED: WeakKeyDictionary[nn.Module, dict[Any, float]] = WeakKeyDictionary()
_COSINES: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()
"""Mean cosine of the gradients, by the network in bfloat16."""
_LAST: list[tuple[ref[nn.Module], nn.Module, nn.Module]] = []
"""The model attacked last and its two copies; they serve again while they give the model's logits."""


class Lean(nn.Module):
    """A network by two copies that equal it up to rounding.

    Args:
        full: the network in its own precision.
        rough: the same in bfloat16, with logits in the precision of `full`; None if only `full` is used.
        tolerance: margins in bfloat16 above minus this are looked at in full precision.
        reason: why there is no `rough`.
    """

    def __init__(
        self, full: nn.Module, rough: nn.Module | None = None, tolerance: float = 0.0, reason: str = ""
    ) -> None:
        super().__init__()
        self.full, self.rough, self.tolerance, self.reason = full, rough, tolerance, reason
        self.used = False  # whether a gradient was computed in bfloat16
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K) in full precision."""
        out: Tensor = self.full(x)
        return out

    def logits(self, x: Tensor, y: Tensor, call: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        """Logits (B, K) with a rough graph that leads to x; their values are rough only where the margin is clear.

        Args:
            y: labels (B,).
            call: evaluates a network on a batch.
        """
        if self.rough is None:
            return call(self.full, x)
        self.used = True
        logits = call(self.rough, x)
        with torch.no_grad():
            lead = margin(logits, y)
            close = int((~(lead < -self.tolerance)).sum())  # NaN is close
            if close == 0:
                return logits
            group = max(1, group_size(len(x)) // 2)  # few sizes occur: the backend builds new kernels for each new one
            count = min(len(x), group * -(-close // group))
            rows = torch.nan_to_num(lead, nan=torch.inf).topk(count).indices
            shift = torch.zeros_like(logits).index_copy_(0, rows, call(self.full, x[rows]) - logits[rows])
        return logits + shift


def lean(model: nn.Module, x: Tensor, logits: Tensor, *, precision: str = "auto") -> nn.Module:
    """`Lean` of a network that is not a chain and large enough to be worth it, else the model itself.

    Args:
        x: inputs, shape (B, ...).  logits: what the model says of them, (B, K).
        precision: "full"; "bfloat16" if logits and gradients agree with the model's; or "auto": bfloat16 if, besides, a
            short timing favours it.
    """
    if is_plain(model) or is_reference() or x.dtype != torch.float32:
        return model
    if precision == "auto" and not is_large(model):
        return model
    x, logits = x[:SAMPLE], logits[:SAMPLE]
    full, half = _copies(model, x, logits)
    if precision == "full":
        return model if full is model else Lean(full)
    if full is model and not _has_gradient(model, x[:1]):
        return model  # the attack says so
    if not has_bfloat16(x.device):
        return Lean(full, reason=f"no kernels for bfloat16 on this {x.device.type}")
    error = _error(half, x, logits)
    if error == float("inf"):
        return Lean(full, reason="the network does not run in bfloat16")
    spread = float((logits.amax(1) - logits.amin(1)).mean())
    if not error <= APART * spread:
        return Lean(full, reason=f"the logits in bfloat16 are off by {error:.2g}, more than {APART:g} of their spread")
    if not (cosine := _cosine(full, half, x, logits)) >= ALIGNED:
        return Lean(full, reason=f"the gradients in bfloat16 point elsewhere, cosine {cosine:.2f}")
    if precision == "auto" and (ratio := _ratio(model, full, half, x)) > GAIN:
        return Lean(full, reason=f"bfloat16 takes {ratio:.2f} of the time here")
    return Lean(full, half, 3 * error)


def is_large(model: nn.Module) -> bool:
    """Whether a lean copy of the model is worth its making."""
    return sum(p.numel() for p in model.parameters()) >= LARGE


def _copies(model: nn.Module, x: Tensor, logits: Tensor) -> tuple[nn.Module, nn.Module]:
    """The model slimmed, and the same in bfloat16. New ones if the weights have changed since they were made."""
    if _LAST and _LAST[0][0]() is model:
        with contextlib.suppress(RuntimeError):  # the model has moved to another device
            if agrees(_LAST[0][1], x[:2], logits[:2]):
                return _LAST[0][1:]
    _LAST.clear()
    full = slimmed(model, x, logits) if _has_gradient(model, x[:1]) else model
    half = halved(full)
    if full is not model:  # a copy must not keep the model alive
        _LAST.append((ref(model), full, half))
    return full, half


@torch.enable_grad()
def _has_gradient(model: nn.Module, x: Tensor) -> bool:
    """Whether the logits depend on x for autograd: a traced copy would ignore a `no_grad` inside the model."""
    try:
        return bool(model(x.detach().clone().requires_grad_(True)).requires_grad)
    except RuntimeError:  # it leaves torch on the way
        return False


def has_bfloat16(device: torch.device) -> bool:
    """True if the device computes in bfloat16 at all; whether that is fast, a timing says."""
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return device.type == "cuda" and torch.cuda.is_bf16_supported()


class _Halved(nn.Module):
    """The network in bfloat16; logits come out in the precision of the input."""

    def __init__(self, inner: nn.Module, *, cast: bool) -> None:
        super().__init__()
        self.inner, self.cast = inner, cast

    def forward(self, x: Tensor) -> Tensor:
        if not self.cast:
            with torch.autocast(x.device.type, torch.bfloat16):
                out: Tensor = self.inner(x)
            return out.to(x.dtype)
        layout = torch.channels_last if x.ndim == 4 else torch.preserve_format
        out = self.inner(x.to(torch.bfloat16, memory_format=layout))
        return out.to(x.dtype)


def halved(full: nn.Module) -> nn.Module:
    """The network in bfloat16: converted once, but for its last layer, if it is traced; else under autocast."""
    if not isinstance(full, fx.GraphModule):
        return _Halved(full, cast=False).eval()
    inner = copy.deepcopy(full)
    last = next(node for node in inner.graph.nodes if node.op == "output").args[0]
    keep = ""
    if (
        isinstance(last, fx.Node)
        and last.op == "call_module"
        and type(inner.get_submodule(str(last.target))) is nn.Linear
    ):
        with inner.graph.inserting_before(last):
            last.args = (inner.graph.call_method("float", (last.args[0],)),)
        keep = str(last.target)
        inner.recompile()
    head = copy.deepcopy(inner.get_submodule(keep)) if keep else None
    inner = inner.to(torch.bfloat16)
    if head is not None:
        inner.set_submodule(keep, head)
    return _Halved(inner, cast=True).eval()


@torch.no_grad()
def _error(half: nn.Module, x: Tensor, logits: Tensor) -> float:
    """Largest difference of a logit; infinite if the network does not run in bfloat16."""
    try:
        found = half(x)
    except Exception:  # whatever the model's own code raises on values in bfloat16: the full network is there
        return float("inf")
    return float((found - logits).abs().max()) if found.shape == logits.shape else float("inf")


def _cosine(full: nn.Module, half: nn.Module, x: Tensor, logits: Tensor) -> float:
    """Mean cosine of the margin's gradients in both precisions; -1 if bfloat16 fails, 1 if all gradients are zero."""
    if half not in _COSINES:
        y = logits.argmax(1)
        expected = _gradient(full, x, y)
        try:
            found = _gradient(half, x, y)
        except Exception:  # the backward pass is the model's own code, too
            return -1.0
        alive = (expected != 0).any(1)
        # Vanishing or infinite gradients in bfloat16 lead nowhere.
        cosines = torch.cosine_similarity(found[alive], expected[alive]).nan_to_num(0.0)
        _COSINES[half] = float(cosines.mean()) if bool(alive.any()) else 1.0
    return _COSINES[half]


@torch.enable_grad()
def _gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of the margin, (B, P)."""
    point = x.detach().clone().requires_grad_(True)
    return torch.autograd.grad(margin(model(point), y).sum(), point)[0].flatten(1)


def _ratio(model: nn.Module, full: nn.Module, half: nn.Module, x: Tensor) -> float:
    """Time of a gradient in bfloat16 as a share of the time in full precision; measured once for each model."""
    known = _TIMED.setdefault(model, {})
    key = (x.shape, x.device, torch.get_num_threads())
    if key not in known:
        pairs = [(_seconds(half, x), _seconds(full, x)) for _ in range(3)][1:]  # in turn; the first builds kernels
        known[key] = min(pair[0] for pair in pairs) / min(pair[1] for pair in pairs)
    return known[key]


@torch.enable_grad()
def _seconds(model: nn.Module, x: Tensor) -> float:
    """Seconds of a forward and a backward pass; on a processor its own, whatever else runs there."""
    point = x.detach().clone().requires_grad_(True)
    clock = time.perf_counter if x.device.type == "cuda" else time.thread_time
    _wait(x)
    started = clock()
    torch.autograd.grad(model(point).sum(), point)
    _wait(x)
    return clock() - started


def _wait(x: Tensor) -> None:
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
