"""Averages of the weights over a run."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from holdfast.registry import Part, get
from holdfast.training.recipe.recipe import AveragePart
from holdfast.utils.options import Fraction


@Part(
    "ema",
    part="average",
    summary="exponential average of the weights, after every step",
    reference="Polyak and Juditsky, Acceleration of stochastic approximation by averaging, 1992",
)
def ema(model: nn.Module, *, decay: Fraction = 0.999) -> AveragedModel:
    """average <- decay average + (1 - decay) weights; it takes the buffers (batch-norm statistics) along."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)


@Part(
    "swa",
    part="average",
    summary="mean of the weights over epochs",
    every="epoch",
    reference="Izmailov et al., Averaging weights leads to wider optima and better generalization, 2018",
)
def swa(model: nn.Module) -> AveragedModel:
    """Equal-weight average; `refresh_batch_norm` recomputes the statistics, since it may lie far from every iterate."""
    return AveragedModel(model)


def refresh_batch_norm(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Running statistics of batch norm over the batches (B, ...); does nothing for a model without it."""
    update_bn(batches, model)


def make_average(part: AveragePart, model: nn.Module) -> AveragedModel | None:
    """The average of the weights that the recipe asks for."""
    if part.name == "none":
        return None
    method = get("train", part.name)
    options = {name: getattr(part, name) for name in method.options}
    average: AveragedModel = method.function(model, **options)
    return average
