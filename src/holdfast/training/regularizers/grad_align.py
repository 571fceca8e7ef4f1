"""Alignment of the input gradients in the threat set, which keeps single-step training from collapsing."""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from holdfast.bounding.core.region import BALLS
from holdfast.registry import Part
from holdfast.training.context import Metrics
from holdfast.training.step import Taken
from holdfast.utils.options import NotNegative


@Part(
    "grad-align",
    part="regularizers",
    summary="1 - cosine between the input gradients at x and at a random point of the threat set",
    reference="Andriushchenko and Flammarion, Understanding and improving fast adversarial training, 2020",
    threats=BALLS,
)
def grad_align(taken: Taken, *, weight: NotNegative = 0.2) -> tuple[Tensor, Metrics]:
    """weight * mean of 1 - cos(gradient at x, gradient at x + u), u random in the set; differentiated twice.

    The paper takes a weight of 0.2 for CIFAR-10 at 8/255.
    """
    if weight == 0:  # the base method, without the further passes that would move batch norm's statistics
        return taken.terms.fit.new_zeros(()), {}
    context, y = taken.context, taken.views.y
    moved = context.threat.random_start(taken.x, context.noise.fork(1))
    gradients = []
    for point in (taken.x, moved):
        point = point.detach().requires_grad_(True)
        loss = cross_entropy(taken.at(point).logits, y, reduction="sum")
        gradients.append(torch.autograd.grad(loss, point, create_graph=True)[0].flatten(1))
    misaligned = (1 - cosine_similarity(gradients[0], gradients[1], dim=1)).mean()
    return weight * misaligned, {"misaligned": misaligned}
