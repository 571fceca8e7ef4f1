"""The rules that turn traced torch modules, functions and methods into operations: one small entry each."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.bounding.core.rounding import unit
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.ops import Op
from holdfast.errors import UnsupportedError
from holdfast.models.layers import MinMax

BATCH = 2  # size of the example batch; two, so that a squeeze cannot lose the batch axis
ADVICE = (
    "Bounds cover: linear, conv2d, batch norm (eval), average and max pooling, ReLU and other monotone activations, "
    "addition, concatenation, flatten and reshape, arithmetic with constants, dropout (as identity). "
    "Replace the layer, or use an attack or smoothing, which need no rule."
)


def two(value: Any) -> tuple[int, int]:
    """3 -> (3, 3); (3, 2) stays."""
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


def monotone(kind: str, function: Callable[[Tensor], Tensor], parameter: float = 0.0) -> ops.Activation:
    """An activation that is known to be non-decreasing."""
    return ops.Activation(kind, function, parameter)


def leaky_relu(slope: float) -> ops.Activation:
    """max(x, slope * x); only 0 <= slope <= 1 is monotone and convex."""
    if not 0 <= slope <= 1:
        raise UnsupportedError(f"leaky ReLU with negative_slope={slope}: the rules need a slope in [0, 1]")
    return monotone("leaky_relu", lambda x: F.leaky_relu(x, slope), slope)


def exponential(name: str, alpha: float) -> ops.Activation:
    """ELU or CELU: alpha (e^x - 1) or alpha (e^(x / alpha) - 1) below zero; only alpha > 0 is monotone."""
    if not (alpha > 0 and math.isfinite(alpha)):
        raise UnsupportedError(f"{name} with alpha={alpha:g}: the rules need an alpha above 0")
    function = F.elu if name == "ELU" else F.celu
    return monotone(name.lower(), lambda x: function(x, alpha), alpha)


def clipped(low: float, high: float, dtype: torch.dtype) -> ops.Activation:
    """x clipped to [low, high]; the error is an ulp of these if the dtype cannot hold them."""
    if not low <= high:
        raise UnsupportedError(f"Hardtanh with min_val={low:g} and max_val={high:g}: the rules need min_val <= max_val")
    rounded = [abs(end) for end in (low, high) if float(torch.tensor(end, dtype=dtype)) != end]
    error = 4 * unit(dtype) * max(rounded, default=0.0)
    return ops.Activation("hardtanh", lambda x: F.hardtanh(x, low, high), error=error)


def softplus(beta: float, threshold: float, dtype: torch.dtype) -> ops.Activation:
    """log(1 + e^(beta x)) / beta, and x itself where beta x > threshold, as torch computes it.

    The two differ by log(1 + e^(-beta x)) / |beta|, at most by as much as torch's function falls at the threshold. The
    product beta x is off by 2 u |beta x|; for beta x < 0 that moves the logarithm by 2 u |beta x| sigmoid(beta x) < u.
    """
    if not (math.isfinite(beta) and beta):
        raise UnsupportedError(f"Softplus with beta={beta:g}: the rules need a finite beta other than 0")
    largest = math.log(torch.finfo(dtype).max) - 1
    if not threshold <= largest:
        raise UnsupportedError(
            f"Softplus with threshold={threshold:g}: e^{threshold:g} overflows in {dtype}; the rules need a threshold "
            f"of at most {largest:.0f}"
        )
    fall = (max(-threshold, 0.0) + math.log1p(math.exp(-abs(threshold)))) / abs(beta)
    error = (1 + 1e-9) * fall + 2 * unit(dtype) / abs(beta)
    return ops.Activation("softplus", lambda x: F.softplus(x, beta, threshold), beta, error)


SIMPLE: dict[Any, Callable[[], ops.Activation]] = {
    key: make
    for keys, make in [
        ((nn.ReLU, F.relu, torch.relu, "relu", "relu_"), lambda: monotone("relu", torch.relu)),
        ((nn.Sigmoid, F.sigmoid, torch.sigmoid, "sigmoid"), lambda: monotone("sigmoid", torch.sigmoid)),
        ((nn.Tanh, F.tanh, torch.tanh, "tanh"), lambda: monotone("tanh", torch.tanh)),
        ((torch.atan, torch.arctan, "atan", "arctan"), lambda: monotone("arctan", torch.atan)),
        ((nn.ReLU6, F.relu6), lambda: monotone("relu6", F.relu6)),
        ((nn.Softsign, F.softsign), lambda: monotone("softsign", F.softsign)),
        ((nn.SELU, F.selu), lambda: monotone("selu", F.selu)),
        ((nn.Hardsigmoid, F.hardsigmoid), lambda: monotone("hardsigmoid", F.hardsigmoid)),
    ]
    for key in keys
}


def from_module(module: nn.Module, x: Tensor) -> Op | None:
    """The operation of a leaf module on an input like x (BATCH, ...), or None for the identity."""
    match module:
        case nn.Identity() | nn.Dropout() | nn.Dropout1d() | nn.Dropout2d() | nn.AlphaDropout():
            return None
        case nn.Linear():
            return ops.Linear(module.weight, module.bias)
        case nn.Conv2d():
            if module.padding_mode != "zeros":
                raise UnsupportedError(
                    f"convolution with padding_mode='{module.padding_mode}'; only 'zeros' has a rule"
                )
            return conv(x, module.weight, module.bias, module.stride, module.padding, module.dilation, module.groups)
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            if module.running_mean is None or module.running_var is None:
                raise UnsupportedError("batch norm without running statistics depends on the rest of the batch")
            return ops.batch_norm(
                module.running_mean, module.running_var, module.weight, module.bias, module.eps, x.ndim - 1
            )
        case nn.LeakyReLU():
            return leaky_relu(module.negative_slope)
        case nn.ELU() | nn.CELU():
            return exponential(type(module).__name__, float(module.alpha))
        case nn.Softplus():
            return softplus(float(module.beta), float(module.threshold), x.dtype)
        case nn.Hardtanh():
            return clipped(float(module.min_val), float(module.max_val), x.dtype)
        case nn.AvgPool2d():
            return avg_pool(x, *pool_arguments(module))
        case nn.AdaptiveAvgPool2d():
            return adaptive(x, module.output_size)
        case nn.MaxPool2d():
            return max_pool(*maximum_arguments(module))
        case nn.ZeroPad2d():
            return average(lambda v: F.pad(v, module.padding), x, 1)
        case MinMax():
            return ops.MinMax()
        case nn.Flatten() | nn.Unflatten():
            return reshape(x, module(x))
    if type(module) in SIMPLE:
        return SIMPLE[type(module)]()
    raise UnsupportedError(f"no rule for the layer type {type(module).__name__}. {ADVICE}")


def batch_norm_of(module: nn.BatchNorm1d | nn.BatchNorm2d, x: Tensor) -> ops.Scale:
    """Batch norm with the statistics of x (B, C, ...), as in training; the running ones are updated."""
    axes = [0, *range(2, x.ndim)]
    count = x.numel() // x.shape[1]
    if count < 2:
        raise UnsupportedError("batch norm in training mode needs more than one value per channel; use larger batches")
    var, mean = torch.var_mean(x, axes, correction=0)
    if module.running_mean is not None and module.running_var is not None:
        with torch.no_grad():
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.add_(1)
            # Without a momentum the running statistics average all batches so far, with equal weights.
            share = module.momentum if module.momentum is not None else 1 / float(module.num_batches_tracked or 1)
            # As torch's own batch norm, without a note to autograd: a pass before this one may still be differentiated.
            module.running_mean.data.lerp_(mean.detach(), share)
            module.running_var.data.lerp_(var.detach() * count / (count - 1), share)
    return ops.batch_norm(mean, var, module.weight, module.bias, module.eps, x.ndim - 1)


def normalised(
    x: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> ops.Scale:
    """Batch norm with the arguments of F.batch_norm, which layers call that put an activation behind it."""
    if training or mean is None or var is None:
        raise UnsupportedError("batch norm with the statistics of the batch makes an answer depend on the other inputs")
    return ops.batch_norm(mean, var, weight, bias, eps, x.ndim - 1)


def pool_arguments(module: nn.AvgPool2d) -> tuple[Any, ...]:
    """The arguments of F.avg_pool2d in order."""
    divisor = module.divisor_override
    return module.kernel_size, module.stride, module.padding, module.ceil_mode, module.count_include_pad, divisor


def maximum_arguments(module: nn.MaxPool2d) -> tuple[Any, ...]:
    """The arguments of F.max_pool2d in order."""
    size = module.kernel_size, module.stride, module.padding, module.dilation
    return *size, module.ceil_mode, module.return_indices


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> ops.Conv:
    """A convolution with the arguments of F.conv2d."""
    stride, dilation = two(stride), two(dilation)
    if padding == "same":
        total = [dilation[i] * (weight.shape[2 + i] - 1) for i in range(2)]
        if any(t % 2 for t in total):
            raise UnsupportedError("padding='same' with an even kernel is asymmetric; pad explicitly before the layer")
        padding = (total[0] // 2, total[1] // 2)
    pads = (0, 0) if padding == "valid" else two(padding)
    return ops.Conv(weight, bias, stride, pads, dilation, groups, tuple(x.shape[1:]))


def avg_pool(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> ops.Average:
    """Average pooling with the arguments of F.avg_pool2d."""
    if divisor_override is not None and divisor_override <= 0:
        raise UnsupportedError(
            f"average pooling with divisor_override={divisor_override}: the rules need a divisor above 0; put a factor "
            "behind the layer instead"
        )
    rest = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return average(lambda v: F.avg_pool2d(v, *rest), x, math.prod(two(kernel_size)))


def average(function: Callable[[Tensor], Tensor], x: Tensor, window: int) -> ops.Average:
    """A map with non-negative weights over `window` values."""
    return ops.Average(function, tuple(x.shape[1:]), window)


def adaptive(x: Tensor, output_size: Any) -> ops.Average:
    """Adaptive average pooling; no window is larger than the whole image."""
    return average(lambda v: F.adaptive_avg_pool2d(v, output_size), x, math.prod(x.shape[2:]))


def mean(x: Tensor, dim: Any = None, keepdim: bool = False) -> ops.Average:
    """Mean over axes other than the batch."""
    if dim is None:
        raise UnsupportedError("a mean over all axes mixes the inputs")
    dims = tuple(d % x.ndim for d in ((dim,) if isinstance(dim, int) else dim))
    if 0 in dims:
        raise UnsupportedError("a mean over the batch axis mixes the inputs")
    return average(lambda v: v.mean(dims, keepdim=keepdim), x, math.prod(x.shape[d] for d in dims))


def total(x: Tensor, dim: Any = None, keepdim: bool = False) -> ops.Average:
    """Sum over axes other than the batch."""
    if dim is None:
        raise UnsupportedError("a sum over all axes mixes the inputs")
    dims = tuple(d % x.ndim for d in ((dim,) if isinstance(dim, int) else dim))
    if 0 in dims:
        raise UnsupportedError("a sum over the batch axis mixes the inputs")
    return average(lambda v: v.sum(dims, keepdim=keepdim), x, math.prod(x.shape[d] for d in dims))


def permuted(x: Tensor, *dims: Any) -> ops.Average:
    """The axes of each input in another order."""
    order = tuple(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else dims
    if order[0] % x.ndim != 0:
        raise UnsupportedError("a permutation that moves the batch axis")
    return average(lambda v: v.permute(order), x, 1)


def selected(x: Tensor, dim: int, index: Tensor) -> ops.Average:
    """Some values of one axis, as torch.index_select takes them."""
    if dim % x.ndim == 0:
        raise UnsupportedError("a selection along the batch axis")
    return average(lambda v: v.index_select(dim, index), x, 1)


def power(x: Tensor, exponent: Any) -> ops.Activation:
    """x to an odd whole power, which is increasing."""
    if not isinstance(exponent, int) or exponent < 1 or exponent % 2 == 0:
        raise UnsupportedError(f"a power with the exponent {exponent}: bounds need an odd whole number")
    return monotone("power", lambda v: v.pow(exponent))


def pad(x: Tensor, padding: Any, mode: str = "constant", value: float | None = None) -> ops.Average:
    """Zero padding with the arguments of F.pad; a negative padding cuts off."""
    if mode != "constant" or value not in (None, 0) or len(padding) > 2 * (x.ndim - 1):
        raise UnsupportedError(f"padding with mode='{mode}' and value={value}; only zeros around an input have a rule")
    return average(lambda v: F.pad(v, tuple(padding)), x, 1)


def chosen(x: Tensor, index: Any) -> ops.Average:
    """x[index]: the whole batch, and of each input the same values."""
    parts = index if isinstance(index, tuple) else (index,)
    plain = all(part is None or part is ... or isinstance(part, int | slice) for part in parts)
    axes = sum(isinstance(part, int | slice) for part in parts)
    whole = parts[0] == slice(None) or (parts[0] is ... and axes < x.ndim)
    if not plain or not whole:
        raise UnsupportedError("an index other than numbers and slices behind the whole batch, as in x[:, 0, ::2]")
    return average(lambda v: v[index], x, 1)


def max_pool(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> ops.MaxPool:
    """Max pooling with the arguments of F.max_pool2d."""
    if return_indices:
        raise UnsupportedError("max pooling that returns indices, which have no bounds")
    step = two(kernel_size if stride is None else stride)
    return ops.MaxPool(two(kernel_size), step, two(padding), two(dilation), ceil_mode)


def reshape(x: Tensor, result: Tensor) -> ops.Reshape:
    """A reshape of x to the shape of `result`."""
    if result.shape[0] != x.shape[0]:
        raise UnsupportedError(f"a reshape to {tuple(result.shape)} does not keep the batch axis first")
    return ops.Reshape(tuple(result.shape[1:]))


def constant(value: Any, x: Tensor) -> Tensor:
    """A number or tensor as a tensor that broadcasts against one input."""
    tensor = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    if tensor.ndim == x.ndim:
        if tensor.shape[0] != 1:
            raise UnsupportedError(f"a constant of shape {tuple(tensor.shape)} differs between the inputs of the batch")
        tensor = tensor[0]
    if tensor.ndim >= x.ndim:
        raise UnsupportedError(
            f"a constant of shape {tuple(tensor.shape)} has more axes than the input {tuple(x.shape)}"
        )
    return tensor


def affine(x: Tensor, factor: Any, shift: Any) -> ops.Scale:
    """factor * x + shift with constants."""
    factor, shift = constant(factor, x), constant(shift, x)
    if (factor * x[0] + shift).shape != x.shape[1:]:
        raise UnsupportedError("arithmetic with a constant that enlarges the input by broadcasting")
    return ops.Scale(factor, shift, shift.abs())


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> None:
    """Dropout with the arguments of F.dropout: the identity, or refused where it is left on."""
    if training and p > 0:
        raise UnsupportedError("dropout that is left on draws random numbers; pass training=self.training")


FUNCTIONS: dict[Any, Callable[..., Op | None]] = {
    F.dropout: dropout,
    F.linear: lambda x, weight, bias=None: ops.Linear(weight, bias),
    F.conv2d: conv,
    torch.conv2d: conv,
    F.batch_norm: normalised,
    F.pad: pad,
    operator.getitem: chosen,
    F.leaky_relu: lambda x, negative_slope=0.01, inplace=False: leaky_relu(negative_slope),
    F.avg_pool2d: avg_pool,
    F.adaptive_avg_pool2d: adaptive,
    F.max_pool2d: lambda x, *a, **k: max_pool(*a, **k),
    torch.mean: mean,
    "mean": mean,
    torch.sum: total,
    "sum": total,
    torch.permute: permuted,
    "permute": permuted,
    torch.index_select: selected,
    torch.pow: power,
    "pow": power,
    operator.pow: power,
    torch.flatten: lambda x, *a, **k: reshape(x, torch.flatten(x, *a, **k)),
    torch.unflatten: lambda x, *a, **k: reshape(x, torch.unflatten(x, *a, **k)),
    torch.reshape: lambda x, *a, **k: reshape(x, torch.reshape(x, *a, **k)),
    torch.squeeze: lambda x, *a, **k: reshape(x, torch.squeeze(x, *a, **k)),
    torch.unsqueeze: lambda x, *a, **k: reshape(x, torch.unsqueeze(x, *a, **k)),
    **{
        name: (lambda x, *a, _name=name, **k: reshape(x, getattr(x, _name)(*a, **k)))
        for name in ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
    },
    "contiguous": lambda x, *a, **k: None,
    operator.neg: lambda x: affine(x, -1.0, 0.0),
    torch.neg: lambda x: affine(x, -1.0, 0.0),
}
ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
SUBTRACT = {operator.sub, operator.isub, torch.sub, "sub", "sub_"}
MULTIPLY = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
DIVIDE = {operator.truediv, operator.itruediv, torch.div, "div", "div_"}
IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv}
"""Functions that write into their first argument, besides methods that end in an underscore and `inplace=True`."""
COPY = {torch.clone, "clone"}
CONCATENATE = {torch.cat, torch.concat}
