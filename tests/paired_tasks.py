"""What tests of losses at x and x' share."""

import torch
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from holdfast import L1, L2, Linf
from holdfast.training.context import Parts

logits = st.lists(st.floats(-30, 30), min_size=3, max_size=3).map(lambda z: torch.tensor([z], dtype=torch.float64))


THREATS = {"linf": Linf(0.1), "l2": L2(0.2), "l1": L1(0.3)}


def given_points(x_adv):
    """An attack that answers with these points, so that the loss can be computed by hand."""
    return Parts(attack=lambda model, x, y, loss, context: x_adv)


def kl(z, z_adv):
    s, s_adv = z.softmax(1), z_adv.softmax(1)
    return (s * (s.log() - s_adv.log())).sum(1)


def gradients(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def input_gradient(model, x, y):
    point = x.detach().clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(cross_entropy(model(point), y), point)
    return gradient
