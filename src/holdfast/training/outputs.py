"""What a forward pass gives to a loss: the logits, and the features that the linear top layer sees."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from holdfast.errors import InputError, UnsupportedError
from holdfast.training.context import Precision, in_bfloat16

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Output:
    """Logits (B, K), and the input of the top layer (B, d) where it was asked for."""

    logits: Tensor
    features: Tensor | None = None

    @property
    def z(self) -> Tensor:
        """The features, for a loss that cannot do without them."""
        if self.features is None:
            raise InputError("this loss needs the input of the model's linear top layer; no top layer was named")
        return self.features


def top_layer(model: nn.Module, x: Tensor) -> str:
    """Name of the linear layer whose output is the model's output, found by a pass of any inputs x."""
    last: dict[str, Tensor] = {}
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]

    def keep(name: str) -> object:
        return lambda module, inputs, output: last.__setitem__(name, output)

    handles = [module.register_forward_hook(keep(name)) for name, module in layers]  # type: ignore[arg-type]
    try:
        with torch.no_grad():
            output = model(x)
    finally:
        for handle in handles:
            handle.remove()
    for name, value in last.items():
        if value is output:
            return name
    raise UnsupportedError(
        f"the model {type(model).__name__} does not end in a linear layer (nn.Linear whose output is the model's), "
        "whose input and weights are asked for; use a model that does (of an ensemble, its members one by one)"
    )


def forward(
    model: nn.Module,
    x: Tensor,
    *,
    weights: Weights | None = None,
    top: str | None = None,
    precision: Precision = "full",
) -> Output:
    """The outputs at x, at other weights if these are given; with features if the top layer is named.

    In "bfloat16" the pass is, its outputs have the type of x.
    """

    def call() -> Tensor:
        with in_bfloat16(x, precision):
            logits: Tensor = model(x) if weights is None else functional_call(model, dict(weights), (x,))
        return logits.to(x.dtype)

    if top is None:
        return Output(call())
    seen: list[Tensor] = []
    handle = model.get_submodule(top).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        logits = call()
    finally:
        handle.remove()
    return Output(logits, seen[-1].to(x.dtype))
