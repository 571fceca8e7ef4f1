"""Thousands of networks of one architecture at once: a batch of weights in place of a batch of inputs.

A family is an architecture; a row of P numbers names one of its networks, in the order of `module.parameters()`. Stacks
of dense layers, convolutions, pools and ReLU run on grouped kernels; any other module that
`torch.func.functional_call` takes runs under `torch.func.vmap`. Both give what a loop over the networks gives.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import conv2d, linear
from torch.nn.modules.batchnorm import _NormBase

from holdfast.checks import modules_in
from holdfast.errors import InputError, UnsupportedError
from holdfast.models.layers import Normalize
from holdfast.random import Noise

CHUNK = 64
"""Networks evaluated at a time: few enough for the caches of a CPU."""
Place = tuple[str, slice, torch.Size]
_PLAIN = (nn.ReLU, nn.MaxPool2d, nn.AvgPool2d, nn.Identity, nn.Dropout, Normalize)


@dataclass(frozen=True, eq=False)
class Step:
    """One layer of a stack: its module, and where its weight and its bias lie among the P parameters."""

    module: nn.Module
    weight: slice | None = None
    bias: slice | None = None

    def parameters(self, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight (M, out, ...) and bias (M, out) of M networks, from `weights` (M, P)."""
        shape: torch.Size = self.module.weight.shape  # type: ignore[assignment]
        bias = None if self.bias is None else weights[:, self.bias]
        return weights[:, self.weight].reshape(len(weights), *shape), bias


@dataclass(frozen=True, eq=False)
class Family:
    """An architecture whose networks are evaluated many at a time; see `make_family`.

    Attributes:
        module: the architecture; its own weights do not matter.
        places: name, place among the P parameters and shape of each parameter.
        names: the same for every attribute that holds a parameter; two attributes may hold the same one.
        steps: its layers, if it is a stack that grouped kernels can run; None otherwise.
    """

    module: nn.Module
    places: tuple[Place, ...]
    names: tuple[Place, ...]
    steps: tuple[Step, ...] | None

    @property
    def size(self) -> int:
        """P, the number of parameters of one network."""
        return sum(math.prod(shape) for _, _, shape in self.places)

    @property
    def matrices(self) -> tuple[slice, ...]:
        """Places of W_1 ... W_L: the parameters with two axes or more."""
        return tuple(place for _, place, shape in self.places if len(shape) > 1)

    def logits(self, weights: Tensor, x: Tensor, *, own: bool = False, chunk: int = CHUNK) -> Tensor:
        """Logits (M, B, K) of M networks.

        Args:
            weights: (M, P).
            x: inputs that all networks share, (B, ...), or, with `own`, inputs of each network, (M, B, ...).
            own: see x.
            chunk: networks at a time; memory grows with it, the answer does not change.
        """
        if weights.ndim != 2 or weights.shape[1] != self.size:
            raise InputError(f"weights must have shape (M, {self.size}), got {tuple(weights.shape)}")
        if len(weights) == 0:  # no networks, but as many logits as any would have
            return self.logits(weights.new_zeros(1, self.size), x.new_zeros(1, *x.shape[1:]) if own else x)[:0]
        parts = []
        for start in range(0, len(weights), chunk):
            rows = slice(start, start + chunk)
            given = x[rows] if own else x
            run = self._mapped if self.steps is None else self._grouped
            parts.append(run(weights[rows], given, own))
        return torch.cat(parts)

    def draw(self, count: int, *, seed: int, width: float = 1.0, like: Tensor | None = None) -> Tensor:
        """Weights (count, P), independent and uniform on [-width, width]; in the dtype and on the device of `like`."""
        like = torch.empty(0) if like is None else like
        shape = (count, self.size)
        if like.device.type == "cpu" and like.dtype == torch.float32:
            # Drawing takes most of the time of a small network; this is more than twice as quick as uniform_.
            raw = np.random.SFC64(seed).random_raw((count * self.size + 1) // 2).view(np.int32)
            return torch.from_numpy(raw[: count * self.size]).view(shape).float().mul_(width * 2.0**-31)
        generator = torch.Generator(device=like.device).manual_seed(seed)
        return like.new_empty(shape).uniform_(-width, width, generator=generator)

    def start(self, count: int, *, seed: int, like: Tensor | None = None) -> Tensor:
        """Weights (count, P) as the layers initialise themselves; the module and the global generator stay as they are.

        Every module with parameters must have `reset_parameters`, as the layers of torch do.
        """
        before = [p.detach().clone() for p in self.module.parameters()]
        rows = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for _ in range(count):
                for module in modules_in(self.module):
                    if module._parameters:
                        _reset(module)
                rows.append(torch.cat([p.detach().flatten() for p in self.module.parameters()]))
        with torch.no_grad():
            for p, old in zip(self.module.parameters(), before, strict=True):
                p.copy_(old)
        return torch.stack(rows).to(torch.empty(0) if like is None else like)

    def _mapped(self, weights: Tensor, x: Tensor, own: bool) -> Tensor:
        def one(row: Tensor, inputs: Tensor) -> Tensor:
            named = {name: row[place].view(shape) for name, place, shape in self.names}
            found: Tensor = functional_call(self.module, named, (inputs,), tie_weights=False)
            return found

        try:
            return vmap(one, in_dims=(0, 0 if own else None))(weights, x)
        except RuntimeError as error:
            raise UnsupportedError(
                f"{type(self.module).__name__} cannot be evaluated for many weights at once: "
                f"{str(error).splitlines()[0]}. It must be a module that torch.func.vmap takes."
            ) from error

    def _grouped(self, weights: Tensor, x: Tensor, own: bool) -> Tensor:
        """Images are (B, M C, H, W), features (M, B, F); before the first layer with weights, all networks share x."""
        count, shared = len(weights), not own
        if own and x.ndim == 5:
            x = x.transpose(0, 1).flatten(1, 2)
        for step in self.steps or ():
            if step.weight is None:
                x = _flatten(x, count, shared) if isinstance(step.module, nn.Flatten) else step.module(x)
                continue
            kernel, bias = step.parameters(weights)
            if isinstance(step.module, nn.Conv2d):
                shape = step.module.stride, step.module.padding
                flat = None if bias is None else bias.flatten()
                x = conv2d(x, kernel.flatten(0, 1), flat, *shape, groups=1 if shared else count)  # type: ignore[arg-type]
            elif shared:
                x = linear(x, kernel.flatten(0, 1)).view(len(x), count, -1).transpose(0, 1)
                x = x if bias is None else x + bias[:, None]
            else:
                kernel = kernel.transpose(1, 2)
                x = x @ kernel if bias is None else torch.baddbmm(bias[:, None], x, kernel)
            shared = False
        if x.ndim != 3:
            raise InputError(
                "the architecture must return logits (B, K); add nn.Flatten() and a dense layer at its end"
            )
        return x


def make_family(module: nn.Module) -> Family:
    """The family of all networks with the architecture of `module`.

    Refuses layers with batch statistics: a network then has no answer of its own, which depends only on its weights.

    >>> family = make_family(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).eval())
    >>> family.size, family.logits(family.draw(1000, seed=0), torch.zeros(3, 2)).shape
    (22, torch.Size([1000, 3, 2]))
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"a family needs a torch.nn.Module, got {type(module).__name__}")
    for name, part in module.named_modules():
        if isinstance(part, _NormBase):
            raise UnsupportedError(
                f"'{name or 'the module'}' ({type(part).__name__}) keeps batch statistics, which random weights do not "
                "have; use an architecture without it, such as lenet or mlp"
            )
        if part.training and isinstance(part, nn.Dropout):
            raise InputError(f"'{name}' drops units at random; call module.eval() first")
    places, start = [], 0
    for name, parameter in module.named_parameters():
        places.append((name, slice(start, start + parameter.numel()), parameter.shape))
        start += parameter.numel()
    if not places:
        raise InputError(f"{type(module).__name__} has no parameters, so there is nothing to draw")
    names = _attributes(module, places)
    return Family(module, tuple(places), names, _stack(module, {name: place for name, place, _ in places}))


def block_seed(seed: int, block: int) -> int:
    """Seed of one block of draws: a hash of both numbers, so that blocks can be drawn in any order."""
    return int(Noise(seed, torch.tensor([block])).bits((1,))[0, 0]) & 0x7FFFFFFFFFFFFFFF


def _attributes(module: nn.Module, places: list[Place]) -> tuple[Place, ...]:
    """Place of the parameter in each attribute, once: torch.func would put a module that stands twice back wrongly."""
    by_parameter = {id(module.get_parameter(name)): (place, shape) for name, place, shape in places}
    seen: set[tuple[int, str]] = set()
    found: list[Place] = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner, _, attribute = name.rpartition(".")
        key = (id(module.get_submodule(owner)), attribute)
        if key not in seen:
            seen.add(key)
            found.append((name, *by_parameter[id(parameter)]))
    return tuple(found)


def _stack(module: nn.Module, places: dict[str, slice]) -> tuple[Step, ...] | None:
    """The layers of a Sequential in which each has a grouped kernel, or None."""
    layers = _layers(module, "")
    if layers is None:
        return None
    steps, weighted = [], False
    for name, layer in layers:
        if type(layer) is nn.Linear or _is_plain_convolution(layer):
            weighted = True
            steps.append(Step(layer, places.get(f"{name}weight"), places.get(f"{name}bias")))
            if any(f"{name}{own}" not in places for own, _ in layer.named_parameters()):
                return None  # a parameter that two layers share is listed under one name only
        elif (type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)) or type(layer) in _PLAIN:
            if isinstance(layer, Normalize) and weighted:
                return None
            steps.append(Step(layer))
        else:
            return None
    return tuple(steps)


def _layers(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]] | None:
    """The layers of nested Sequentials with their prefixes; None where a hook could change an answer."""
    if any(getattr(module, name) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")):
        return None
    if type(module) is not nn.Sequential:
        return [(prefix, module)]
    found: list[tuple[str, nn.Module]] = []
    for name, child in module._modules.items():  # named_children() lists a module that stands twice only once
        inner = None if child is None else _layers(child, f"{prefix}{name}.")
        if inner is None:
            return None
        found += inner
    return found


def _is_plain_convolution(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Conv2d
        and layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def _flatten(x: Tensor, count: int, shared: bool) -> Tensor:
    if shared:
        return x.flatten(1)
    return x.view(len(x), count, -1).transpose(0, 1) if x.ndim == 4 else x


def _reset(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise UnsupportedError(f"{type(module).__name__} has parameters but no reset_parameters(); start from draw()")
    reset()
