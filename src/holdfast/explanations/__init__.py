"""Which features does a model's answer rest on, and can the explanation be trusted?"""

from typing import Any

from torch import Tensor, nn

from holdfast.attacks.core.batches import fitting, noise_for
from holdfast.attacks.core.gradients import frozen
from holdfast.checks import check_inputs, check_labels, check_logits, check_model, check_place
from holdfast.errors import HoldfastError, InputError
from holdfast.explanations import (  # noqa: F401  (each registers its method)
    agi,
    big,
    bsm,
    deeplift,
    expected_gradients,
    grad_cam,
    guided_backprop,
    input_x_gradient,
    integrated_gradients,
    lrp,
    occlusion,
    saliency,
    shapley,
    shapley_sampling,
    smoothgrad,
)
from holdfast.explanations.core.boundary import PUBLISHED, BoundarySearch
from holdfast.explanations.core.quantity import Quantity, Setting, check_quantity
from holdfast.registry import get
from holdfast.results import Explanation
from holdfast.utils.allocator import reuse_blocks

__all__ = ["PUBLISHED", "BoundarySearch", "Explanation", "explain"]


def explain(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    method: str = "big",
    *,
    quantity: Quantity = "logit",
    low: float = 0.0,
    high: float = 1.0,
    seed: int = 0,
    index: Tensor | None = None,
    chunk: int = 256,
    **options: Any,
) -> Explanation:
    """How much each value of an input counts for the model's answer.

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs in [low, high], shape (B, ...).  y: the classes to explain, shape (B,), int64.
        method: a name from `hf.methods("explain")`.
        quantity: what is explained: the "logit" of class y, its "probability", or its "margin" over the next class.
        low, high: the valid range.
        seed: fixes every random choice.
        index: identity of each input, shape (B,); its random numbers follow from it. Positions in the batch if none is
            given.
        chunk: points in one pass through the model, at most: fewer where inputs are large and memory would run out.
        **options: options of the method, such as steps=.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2).eval()
        >>> x = torch.rand(4, 3)
        >>> result = explain(model, x, model(x).argmax(1), "integrated-gradients")
        >>> bool(result.ok.all()), bool((result.error < 0.01).all())
        (True, True)
    """
    entry = get("explain", method)
    options = entry.check(None, options)
    check_quantity(quantity)
    if chunk < 1:
        raise InputError(f"chunk must be at least 1, got {chunk}")
    reuse_blocks()
    check_model(model)
    check_inputs(x, low, high)
    check_labels(y, len(x))
    check_place(model, x)
    noise = noise_for(x, seed, index)
    try:
        with frozen(model):
            setting = Setting(quantity, low, high, noise, fitting(model, x, chunk))
            result: Explanation = entry.function(model, x.detach(), y, setting, **options)
    except HoldfastError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError):
        # A pass to check the model first would cost as much as some methods; one that fails is looked into afterwards.
        check_labels(y, len(x), check_logits(model, x[:1]).shape[1])
        raise
    return result
