"""Periods: the schedules start anew in each, and the ensemble of their last models answers."""

import copy
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from holdfast.models.zoo.ensemble import Ensemble
from holdfast.registry import Part


@Part(
    "pas",
    part="periods",
    summary="budget and learning rate start anew in periods; the ensemble of their last models answers",
    reference="Liu et al., On the loss landscape of adversarial training: identifying challenges and how to overcome "
    "them, 2020",
)
def pas(model: nn.Module, snapshots: Sequence[Mapping[str, Tensor]]) -> Ensemble:
    """The mean of the softmax outputs of the model at each of the snapshots of its weights."""
    members = []
    for weights in snapshots:
        member = copy.deepcopy(model)
        member.load_state_dict(weights)
        members.append(member)
    return Ensemble(members)
