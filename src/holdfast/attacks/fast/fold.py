"""The network traced and made lean for attacks: the same function in fewer passes over memory.

Batch norms in eval mode are folded into the layer before them, sums and ReLUs overwrite values that nobody else needs,
and weights of convolutions lie in memory as the processor wants them.
"""

import copy
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from holdfast.attacks.fast.attention import attention
from holdfast.utils.reference import is_reference

_CLOSE = 1e-4  # of the largest logit
_FRESH = (nn.Conv2d, nn.Linear, nn.BatchNorm2d)  # layers whose output neither their way back nor anyone else holds
_RELUS = (F.relu, torch.relu, "relu")
_ADDS = (operator.add, torch.add)


@torch.no_grad()
def folded(model: nn.Module, x: Tensor) -> nn.Module:
    """Copy the model, in eval mode, without the batch norms that follow a linear layer or a convolution.

    It equals the model up to rounding; what an attack finds on it is looked at by the model itself. The model comes
    back as it is where it has no batch norm, has hooks, or cannot be traced.

    Args:
        x: some inputs, shape (B, ...), to compare on.
    """
    if is_reference() or not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return model
    return _checked(model, x[:2], None, _fold)


@torch.no_grad()
def slimmed(model: nn.Module, x: Tensor, logits: Tensor) -> nn.Module:
    """Copy the model, in eval mode, with all that this file does; the model itself where it cannot be traced.

    Args:
        x: two inputs or more, to compare on.  logits: what the model says of them, (B, K).
    """
    return model if is_reference() else _checked(model, x[:2], logits[:2], _slim)


def _checked(model: nn.Module, x: Tensor, logits: Tensor | None, change: Any) -> nn.Module:
    """A copy of the model, traced and changed; the model itself if that fails or gives other logits."""
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return model  # these see the passes of the model, and tracing does not see them
    try:
        traced: nn.Module = change(fx.symbolic_trace(copy.deepcopy(model)))
        same = agrees(traced, x, model(x) if logits is None else logits)
    except Exception:  # whatever tracing or a layer that it does not know raises: the model itself will do
        return model
    return traced if same else model


@torch.no_grad()
def agrees(copy: nn.Module, x: Tensor, logits: Tensor) -> bool:
    """True if the logits of the copy are the given ones up to rounding."""
    ours = copy(x)
    return ours.shape == logits.shape and torch.allclose(ours, logits, rtol=0, atol=_CLOSE * float(logits.abs().max()))


def _fold(traced: fx.GraphModule) -> fx.GraphModule:
    """Replace each pair of a layer and its batch norm by one layer, in place."""
    modules = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        if node.op != "call_module" or not isinstance(modules[str(node.target)], _BatchNorm):
            continue
        before = node.args[0]
        if before.op != "call_module" or len(before.users) > 1:
            continue
        layer, norm = modules[str(before.target)], modules[str(node.target)]
        if isinstance(layer, nn.Conv2d):
            traced.set_submodule(str(before.target), fuse_conv_bn_eval(layer, norm))
        elif isinstance(layer, nn.Linear):
            traced.set_submodule(str(before.target), fuse_linear_bn_eval(layer, norm))
        else:
            continue
        node.replace_all_uses_with(before)
        traced.graph.erase_node(node)
    traced.recompile()
    return traced.eval().requires_grad_(False)


def _slim(traced: fx.GraphModule) -> fx.GraphModule:
    """Fold, overwrite, lay out the weights: in place."""
    traced = _fold(traced)
    modules = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        _overwrite(traced.graph, node, modules)
        if node.op == "call_function" and node.target is F.scaled_dot_product_attention:
            node.target = attention
    traced.recompile()
    slim: fx.GraphModule = traced.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return slim


def _overwrite(graph: fx.Graph, node: fx.Node, modules: dict[str, nn.Module]) -> None:
    """Let a ReLU or a sum write into an argument that it is the only one to use."""
    layer = modules[str(node.target)] if node.op == "call_module" else None
    if type(layer) is nn.ReLU or (layer is None and node.target in _RELUS):
        given = node.args[0]
        if isinstance(given, fx.Node) and _is_fresh(given, modules):
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.call_function(F.relu, (given,), {"inplace": True}))
            graph.erase_node(node)
    elif node.op == "call_function" and node.target in _ADDS and len(node.args) == 2 and not node.kwargs:
        for into, other in (node.args, node.args[::-1]):
            if isinstance(into, fx.Node) and isinstance(other, fx.Node) and _is_fresh(into, modules):
                node.target, node.args = operator.iadd, (into, other)
                break


def _is_fresh(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """True if the value is new, has one user, and its own way back does not need it."""
    if len(node.users) != 1:
        return False
    if node.op == "call_module":
        return type(modules[str(node.target)]) in _FRESH
    return node.op == "call_function" and node.target in (*_ADDS, operator.iadd)
