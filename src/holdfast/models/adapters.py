"""Models made elsewhere as models of Holdfast: from inputs in [0, 1], (B, ...), to one logit for each class, (B, K)."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, fx, nn

from holdfast.errors import InputError, either
from holdfast.models.layers import Normalize

Kind = Literal["logits", "probabilities", "score", "probability"]


def as_classifier(
    module: nn.Module,
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    high: float = 1.0,
    channels_last: bool = False,
    output: str | int | None = None,
    kind: Kind = "logits",
) -> nn.Sequential:
    """`module` with layers before and after it, so that it takes inputs in [0, 1] and returns logits; in eval mode.

    The weights are shared with `module`, which is put into eval mode as well. A final softmax or sigmoid is taken off
    where it is a layer that can be taken off: at the end of an `nn.Sequential` or of a network from ONNX. That loses
    nothing, while a logarithm of the probabilities gives attacks weak gradients and bounds no rule.

    Args:
        module: from (B, ...) to whatever `output` and `kind` say.
        mean, std: constants of the normalisation that the module expects before it, one number or one per channel.
        high: largest value of an input of the module, 255 for bytes; `mean` and `std` are in the same unit.
        channels_last: the module takes images (B, H, W, C).
        output: where the module's answer is if it returns more than a tensor: a key or attribute, or the place in a
            tuple. If None, `logits` is looked for.
        kind: what the answer is: "logits" (B, K); "probabilities" (B, K); "score" (B,) or (B, 1), positive for class 1;
            or "probability" (B,) or (B, 1) of class 1.

    >>> model = as_classifier(nn.Linear(2, 1), kind="score")
    >>> model(torch.rand(5, 2)).shape
    torch.Size([5, 2])
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"the model must be a torch.nn.Module, got {type(module).__name__}")
    if kind not in get_args(Kind):
        raise InputError(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    if not 0 < high < float("inf"):
        raise InputError(f"high must be a number > 0, the largest value of an input, got {high!r}")
    layers = _before(mean, std, high)
    if channels_last:
        layers.append(ChannelsLast())
    bare = _without_last(module, _LAST[kind]) if kind in _LAST and output is None else None
    if bare is not None:
        module, kind = bare, "logits" if kind == "probabilities" else "score"
    elif kind in _LAST:
        warnings.warn(
            f"the {kind} of the model are turned into logits by a logarithm: where they round to 0 or 1, attacks get "
            "no gradient and look weaker than they are. Give the module without its last layer if you can.",
            stacklevel=2,
        )
    layers.append(Answer(module, output))
    like = next(module.parameters(), torch.empty(0))
    if kind == "probabilities":
        layers.append(Log(torch.finfo(like.dtype).tiny))
    elif kind == "probability":
        layers.append(LogOdds(torch.finfo(like.dtype).eps))
    if kind in ("score", "probability"):
        layers += [Column(), _two_logits(like)]
    return nn.Sequential(*layers).eval()


def _before(mean: Any, std: Any, high: float) -> list[nn.Module]:
    """high * x, then (. - mean) / std, as one layer; none where that changes nothing."""
    if mean is None and std is None and high == 1:
        return []
    layer = Normalize(0.0 if mean is None else mean, 1.0 if std is None else std)
    layer.mean /= high
    layer.std /= high
    return [layer]


def _two_logits(like: Tensor) -> nn.Linear:
    """From a score z (B, 1) to the logits (0, z): a dense layer, for which every bound has a rule."""
    layer = nn.Linear(1, 2, bias=False, device=like.device, dtype=like.dtype)
    layer.weight = nn.Parameter(torch.tensor([[0.0], [1.0]], device=like.device, dtype=like.dtype), requires_grad=False)
    return layer


_LAST: dict[str, type[nn.Module]] = {"probabilities": nn.Softmax, "probability": nn.Sigmoid}


def _without_last(module: nn.Module, last: type[nn.Module]) -> nn.Module | None:
    """The module without its last layer if that is a `last`; else None."""
    if isinstance(module, nn.Sequential) and len(module) > 1 and isinstance(module[-1], last):
        return module[:-1]
    if not isinstance(module, fx.GraphModule):
        return None
    (end,) = (node for node in module.graph.nodes if node.op == "output")
    final = end.args[0]
    if not isinstance(final, fx.Node) or final.op != "call_module":
        return None
    if not isinstance(module.get_submodule(str(final.target)), last):
        return None
    shorter = copy.deepcopy(module.graph)
    (end,) = (node for node in shorter.nodes if node.op == "output")
    final = end.args[0]
    end.args = (final.args[0],)
    shorter.erase_node(final)
    return fx.GraphModule(module, shorter)


class ChannelsLast(nn.Module):
    """Images (B, C, H, W) as (B, H, W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


class Column(nn.Module):
    """Scores (B,) or (B, 1) as (B, 1)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 1)


class Answer(nn.Module):
    """What `module` returns, or the part of it that holds the answer.

    Args:
        module: returns a tensor, a mapping, a tuple or an object with attributes.
        output: the key, place or attribute; if None a tensor as it is, else what is called `logits`.
    """

    def __init__(self, module: nn.Module, output: str | int | None = None) -> None:
        super().__init__()
        self.module, self.output = module, output

    def forward(self, x: Tensor) -> Tensor:
        answer: Any = self.module(x)
        if self.output is None and _is_tensor(answer):
            return cast(Tensor, answer)
        key = "logits" if self.output is None else self.output
        if isinstance(answer, Tensor):
            raise InputError(f"the model returns one tensor; leave output={key!r} away")
        by_name = isinstance(key, str) and not isinstance(answer, Mapping)
        try:
            found = getattr(answer, str(key)) if by_name else answer[key]
        except (AttributeError, KeyError, IndexError, TypeError):
            raise InputError(
                f"the model returns {_describe(answer)}, in which there is no {key!r}; say where the logits are with "
                "as_classifier(module, output=...): a key, an attribute or a place"
                + either("", "; on the command line --architecture FILE.py:NAME may be a function that returns that")
            ) from None
        if not _is_tensor(found):
            raise InputError(f"the output {key!r} of the model is a {type(found).__name__}, expected a tensor")
        return cast(Tensor, found)


def _is_tensor(value: Any) -> bool:
    """While torch.fx traces, a proxy stands for a tensor."""
    return isinstance(value, Tensor | fx.Proxy)


def _describe(answer: Any) -> str:
    if isinstance(answer, Mapping):
        return f"a mapping with the keys {', '.join(map(repr, answer))}"
    if isinstance(answer, tuple | list):
        return f"a {type(answer).__name__} of {len(answer)}"
    return f"a {type(answer).__name__}"


class Log(nn.Module):
    """The logarithm of probabilities (B, K), of which those below `least` count as that."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=self.least).log()


class LogOdds(nn.Module):
    """log(p / (1 - p)), with p kept at least `margin` away from 0 and 1."""

    def __init__(self, margin: float) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, x: Tensor) -> Tensor:
        return torch.logit(x, eps=self.margin)
