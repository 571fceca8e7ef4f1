"""HYDRA: prune a trained network by learned scores, then fine-tune what is left. Pre-training is any other recipe."""

from torch import nn

from holdfast.models.masked import masked, train_weights
from holdfast.registry import Part
from holdfast.utils.options import Fraction, Unit

_REFERENCE = "Sehwag et al., HYDRA: pruning adversarially robust neural networks, 2020"


@Part(
    "hydra-prune",
    part="prune",
    summary="learn which weights of a trained model to keep; scores begin as magnitudes (start from it with init)",
    reference=_REFERENCE,
)
def hydra_prune(model: nn.Module, seed: int, *, rate: Fraction = 0.99, gamma: Unit = 0.1) -> nn.Module:
    """The model with its own weights, frozen, and learned scores; biases and batch norms stay as they are."""
    return masked(model, rate=rate, gamma=gamma, weights="own", last_batch_norm=False)


@Part(
    "hydra-fine-tune",
    part="prune",
    summary="train the weights that pruning has kept (start from the pruned model with init)",
    reference=_REFERENCE,
)
def hydra_fine_tune(model: nn.Module, seed: int) -> nn.Module:
    """The pruned model with its masks fixed and everything else trained."""
    return train_weights(model)
