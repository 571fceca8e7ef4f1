"""Training without an adversary: the baseline."""

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.registry import register
from holdfast.train.context import Context, Metrics


@register(
    "train",
    "standard",
    summary="cross-entropy on the inputs as they are",
    reference="Goodfellow, Bengio and Courville, Deep Learning, 2016, section 6.2",
)
def standard(model: nn.Module, x: Tensor, y: Tensor, context: Context) -> tuple[Tensor, Metrics]:
    """Mean of -log softmax(z(x))_y. A threat in the recipe is used for validation only.

    Args:
        model: from (B, ...) to logits (B, K).
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        context: of this step; not used.
    """
    logits = model(x)
    return cross_entropy(logits, y), {"accuracy": (logits.argmax(1) == y).float().mean()}
