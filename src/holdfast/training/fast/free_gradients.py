"""The gradient for the input of the first convolution, at little cost beside the gradient for its weights.

Plain training never asks for the gradient of the images, and on a CPU it takes longer than the rest of the layer. But
where one perturbation is added to all images, only the sum of their gradients is needed, and a convolution is linear:
its gradient at the sum of the outputs' gradients is the sum.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from holdfast.attacks.fast.thin import conv2d_gradient
from holdfast.utils.reference import is_reference


class TrainedConvolution(torch.autograd.Function):
    """conv2d with the gradients of weights and bias by torch, and the gradient for x by `conv2d_gradient`.

    If `summed`, the gradient for x is right in its sum over the batch, which lies at the first image.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...], summed: bool) -> Tensor:
        return F.conv2d(x, weight, bias, *geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.geometry, ctx.summed = inputs
        ctx.save_for_backward(x, weight)
        ctx.sizes = None if bias is None else list(bias.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        *geometry, groups = ctx.geometry
        place = (*geometry, False, (0, 0), groups)
        wanted = (False, True, ctx.sizes is not None)
        _, by_weight, by_bias = torch.ops.aten.convolution_backward(gradient, x, weight, ctx.sizes, *place, wanted)
        if not ctx.summed:
            return conv2d_gradient(gradient, x, weight, *ctx.geometry), by_weight, by_bias, None, None
        total = conv2d_gradient(gradient.sum(0, keepdim=True), x[:1], weight, *ctx.geometry)
        return torch.cat([total, torch.zeros_like(x[1:])]), by_weight, by_bias, None, None


# `apply` asks for the signature at every call; read once, it takes a third of the time.
TrainedConvolution.forward.__signature__ = inspect.signature(TrainedConvolution.forward)  # type: ignore[attr-defined]


class FreeGradients(TorchFunctionMode):
    """Inside, the backward pass of a convolution costs little more where its input asks for a gradient too.

    Values stay the same. `shared` is a tensor (B, C, H, W) whose gradient is only used in its sum over the batch.
    """

    def __init__(self, shared: Tensor | None = None) -> None:
        super().__init__()
        self.shared = shared

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv2d and not torch.compiler.is_compiling() and not is_reference():
            return self._conv2d(*args, **kwargs)
        return func(*args, **kwargs)

    def _conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        summed = input is self.shared
        thin = summed or (input.ndim == 4 and input.shape[1] <= 4)
        if not thin or isinstance(padding, str) or not input.requires_grad or not weight.requires_grad:
            return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
        geometry = (*((n, n) if isinstance(n, int) else tuple(n) for n in (stride, padding, dilation)), groups)
        out: Tensor = TrainedConvolution.apply(input, weight, bias, geometry, summed)  # type: ignore[no-untyped-call]
        return out
