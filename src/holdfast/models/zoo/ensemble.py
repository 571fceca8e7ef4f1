"""Several models that answer as one: the mean of their probabilities."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from holdfast.errors import InputError
from holdfast.models.catalog import Normalization, get_architecture, make_model, record_architecture
from holdfast.models.catalog import add_architecture as add
from holdfast.utils.options import Count

_NAME = "ensemble"


class Ensemble(nn.Module):
    """Logits z_k = log of the mean over the members of softmax(member(x))_k, (B, ...) -> (B, K).

    The softmax of these logits is the mean of the members' probabilities, and gradients go through the mean: an attack
    on the ensemble attacks what the ensemble answers, not its members one by one.

    Args:
        members: at least one; each from (B, ...) to logits (B, K) of the same classes. Where all of them come from
            `make_model` with the same options, the ensemble can be saved and loaded like any model of the zoo.

    >>> members = [make_model("mlp", input_shape=(2,), classes=3, seed=seed) for seed in range(4)]
    >>> Ensemble(members)(torch.rand(5, 2)).exp().sum(1).allclose(torch.ones(5))
    True
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        if not members or not all(isinstance(member, nn.Module) for member in members):
            kinds = ", ".join(type(member).__name__ for member in members) or "none"
            raise InputError(f"an ensemble needs at least one member, each a torch.nn.Module, got {kinds}")
        self.members = nn.ModuleList(members)
        recipes = [get_architecture(member) for member in members]
        first = recipes[0]
        # The options of an ensemble hold its members' options, so that there is no way to write a nested one down.
        if first is not None and first[0] != _NAME and all(recipe == first for recipe in recipes):
            record_architecture(self, _NAME, {"of": first[0], "members": len(members), **first[1]})

    def forward(self, x: Tensor) -> Tensor:
        log_probabilities = torch.stack([log_softmax(member(x), 1) for member in self.members])
        return log_probabilities.logsumexp(0) - math.log(len(self.members))


def ensemble(
    *, of: str = "small-star", members: Count = 3, normalize: Normalization | None = None, **options: Any
) -> Ensemble:
    """Members of one architecture, each with weights of its own.

    Args:
        of: name of the architecture.
        members: how many.
        normalize: (mean, std) of a `Normalize` layer in front of every member.
        options: passed to `make_model` for the members: input_shape, classes and options of their architecture.
    """
    if of == _NAME:
        raise InputError("an ensemble is made of single models; give of= another name and raise members= instead")
    return Ensemble([make_model(of, normalize=normalize, **options) for _ in range(members)])


add(
    *(_NAME, ensemble, "mean probability of several models; choose of and members"),
    "Liu, Towards verifiable, generalizable and efficient robust deep neural networks (thesis), 2022",
    composite=True,
)
