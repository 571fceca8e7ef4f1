"""The graph is the model, or there is no proof: what a graph cannot say is refused, the rest is compared.

A certificate speaks of the traced graph. Tracing sees what forward() computes, not what hooks, random numbers or a
state between calls do to it, so these are refused by name. Then graph and model answer the same questions: every input
of the batch, random points and corners of their threat sets, and the first input by itself. They have
to agree within the rounding of the network: the interval bounds of one point hold every floating-point evaluation of
the graph. In a deep network these are too wide in float32 to tell anything; its copy in float64 then answers instead.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from holdfast.bounding import interval
from holdfast.bounding.core.rounding import unit
from holdfast.bounding.graph.ops import Graph
from holdfast.checks import CLONE, modules_in
from holdfast.errors import UnsupportedError
from holdfast.models.random.random_network import check_function
from holdfast.random import Noise
from holdfast.threats import Box, Linf, Threat

CLOSE = 1e-3
"""Of the largest logit: where the rounding bound is wider than this, it cannot tell a graph from another one."""
ULPS = 16
"""Differences that no rounding bound is needed for, in units of the largest logit's last place."""
SEED = 0

Copies = Callable[[], tuple[Graph, nn.Module] | None]
"""Make copies of graph and model in float64, or None if the model cannot be copied."""
_WAY_OUT = "Export the model to ONNX and load that."


def check_plain(model: nn.Module) -> None:
    """Refuse forward hooks and replaced forward() methods, which tracing does not see, and random layers.

    Hooks of torch.nn.utils (weight norm, spectral norm, pruning) only compute a weight, which tracing does see.
    """
    check_function(model)
    if global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks:
        raise UnsupportedError("a forward hook is registered for all modules; remove it: proofs do not see hooks")
    for module in modules_in(model):
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(not type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks):
            raise UnsupportedError(
                f"layer '{_name(model, module)}' has a forward hook, which a proof does not see. Remove it "
                "(handle.remove()), or write what it does into forward()."
            )
        if "forward" in vars(module) and type(module).__module__.startswith("torch.nn."):
            raise UnsupportedError(
                f"layer '{_name(model, module)}' has a forward() of its own put over that of its class; make it a "
                "class of its own"
            )


def _name(model: nn.Module, module: nn.Module) -> str:
    return next((name or type(model).__name__ for name, m in model.named_modules() if m is module), "?")


def state_of(model: nn.Module) -> dict[tuple[int, str], Any]:
    """What a call might change: plain numbers and texts of every module, and how often each buffer was written."""
    state: dict[tuple[int, str], Any] = {}
    for i, module in enumerate(modules_in(model)):
        state |= {(i, key): value for key, value in vars(module).items() if isinstance(value, int | float | str)}
        buffers = ((key, b) for key, b in module._buffers.items() if b is not None and not b.is_inference())
        state |= {(i, key): (id(buffer), buffer._version) for key, buffer in buffers}
    return state


def check_unchanged(model: nn.Module, before: dict[tuple[int, str], Any]) -> None:
    """Refuse a model that calls have changed since `before`: the next answer may not be the last one."""
    for (i, key), value in state_of(model).items():
        if before.get((i, key)) != value:
            name = _name(model, modules_in(model)[i])
            raise UnsupportedError(
                f"layer '{name}' changes its attribute '{key}' when it is called: the answer for an input may depend "
                "on the calls before. A proof needs a model without such a state."
            )


@torch.no_grad()
def check_agreement(
    graph: Graph,
    model: nn.Module,
    x: Tensor,
    threat: Threat | None,
    copies: Copies = lambda: None,
    logits: Tensor | None = None,
) -> None:
    """Refuse a graph that does not reproduce the model at the inputs x (B, ...), in the threat set, or one by one.

    Args:
        graph: what proofs speak of.
        model: from (B, ...) to logits (B, K).
        x: inputs.
        threat: where to look beside them.
        copies: called where rounding in the dtype of x is too large to tell.
        logits: (B, K), what the model returned for x, if it was asked already.

    Raises:
        UnsupportedError: graph and model differ by more than rounding; the message says where.
    """
    x = x.detach()
    batches = {"input": x}
    if threat is not None:
        batches["a random point of the threat set around input"] = random_points(threat, x)
    if len(x) > 1:
        batches["at batch size one, input"] = x[:1]
    for text, points in batches.items():
        theirs = logits if logits is not None and points is x else _answers(model, points)
        ours = graph.forward(points)
        if ours.shape != theirs.shape:
            raise UnsupportedError(
                f"the translated graph gives {tuple(ours.shape)}, the model {tuple(theirs.shape)}. {_WAY_OUT}"
            )
        off = (ours - theirs).abs()
        scale = theirs.abs().nan_to_num(posinf=0.0).max()
        bad = ~((off <= ULPS * unit(x.dtype) * scale) | (ours == theirs)).all(1)
        if bool(bad.any()):
            index = bad.nonzero()[:, 0]
            _check_rounding(graph, points[index], theirs[index], index, float(CLOSE * scale), text, copies)


def _answers(model: nn.Module, points: Tensor) -> Tensor:
    copy = points.clone()
    logits: Tensor = model(copy)
    if not torch.equal(copy, points):
        raise UnsupportedError(f"the model writes into its input. {CLONE}")
    return logits


def random_points(threat: Threat, x: Tensor) -> Tensor:
    """Points of the threat set: a random one for every other input, a random corner of the box for the rest."""
    point = threat.random_start(x, Noise.for_batch(SEED, len(x), x.device))
    if not isinstance(threat, Linf | Box):
        return point
    lower, upper = threat.box(x)
    corner = torch.where(point < x, lower, upper)
    if len(x) == 1:
        return torch.cat([point, corner])
    odd = (torch.arange(len(x), device=x.device) % 2 == 1).view(-1, *[1] * (x.ndim - 1))
    return torch.where(odd, corner, point)


def _check_rounding(
    graph: Graph, points: Tensor, logits: Tensor, index: Tensor, close: float, text: str, copies: Copies
) -> None:
    """Compare the logits of some points with the interval bounds of the graph, which hold every way to round.

    Args:
        graph: what proofs speak of.
        points: inputs (N, ...).  logits: of the model there, (N, K).  index: (N,), what to call them.
        close: largest difference from the middle of the bounds.
        text: where the points come from.
        copies: in float64, in whose bounds the difference is to be judged if these are too wide for it.
    """
    lower, upper = interval.output_bounds(graph, points, points, sound=True)
    outside = ((logits < lower) | (logits > upper)).any(1)
    wide = ((logits - (lower + upper) / 2).abs() > close).any(1)
    if bool(outside.any()):
        reason = "the model does something that tracing does not see (randomness, state, a batch that matters)"
        raise _differs(text, index[outside], reason)
    if not bool(wide.any()):
        return
    reason = "or rounding is too large to tell: convert model and inputs to float64"
    made = copies()
    if made is None:
        raise _differs(text, index[wide], reason)
    graph, model = made
    points, index = points[wide].double(), index[wide]
    exact = model(points.clone())
    _check_rounding(graph, points, exact, index, close, text, lambda: None)
    far = ((logits[wide] - exact).abs() > close).any(1)
    if bool(far.any()):
        raise _differs(text, index[far], reason)


def _differs(text: str, index: Tensor, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"the translated graph does not reproduce the model's output ({text} {int(index[0])}): {reason}. {_WAY_OUT}"
    )
