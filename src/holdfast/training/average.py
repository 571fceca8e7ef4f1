"""Averages over a run: of the weights (EMA, SWA), and of the outputs of its snapshots (periodic scheduling)."""

import copy
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from holdfast.models.zoo.ensemble import Ensemble
from holdfast.registry import Part, register


@register(
    Part(
        "ema",
        part="average",
        summary="exponential average of the weights, after every step",
        reference="Polyak and Juditsky, Acceleration of stochastic approximation by averaging, 1992",
    )
)
def ema(model: nn.Module, *, decay: float = 0.999) -> AveragedModel:
    """average <- decay average + (1 - decay) weights; it takes the buffers (batch-norm statistics) along."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)


@register(
    Part(
        "swa",
        part="average",
        summary="mean of the weights over epochs",
        reference="Izmailov et al., Averaging weights leads to wider optima and better generalization, 2018",
    )
)
def swa(model: nn.Module) -> AveragedModel:
    """Equal-weight average; `refresh_batch_norm` recomputes the statistics, since it may lie far from every iterate."""
    return AveragedModel(model)


def refresh_batch_norm(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Running statistics of batch norm over the batches (B, ...); does nothing for a model without it."""
    update_bn(batches, model)


@register(
    Part(
        "pas",
        part="periods",
        summary="budget and learning rate start anew in periods; the ensemble of their last models answers",
        reference="Liu et al., On the loss landscape of adversarial training: identifying challenges and how to "
        "overcome "
        "them, 2020",
    )
)
def pas(model: nn.Module, snapshots: Sequence[Mapping[str, Tensor]]) -> Ensemble:
    """The mean of the softmax outputs of the model at each of the snapshots of its weights."""
    members = []
    for weights in snapshots:
        member = copy.deepcopy(model)
        member.load_state_dict(weights)
        members.append(member)
    return Ensemble(members)
