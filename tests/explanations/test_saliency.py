"""Saliency, and input x gradient, against autodiff."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import tiny_nets

import holdfast as hf


@given(seed=st.integers(0, 99), quantity=st.sampled_from(["logit", "probability", "margin"]))
@settings(max_examples=10)
def test_saliency_is_the_gradient(seed, quantity):
    torch.manual_seed(seed)
    model, shape = tiny_nets()["smooth"]
    model, x = model.double(), torch.rand(4, *shape, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, 2, (4,))
    z = model(x)
    other = z.gather(1, 1 - y[:, None])[:, 0]
    own = z.gather(1, y[:, None])[:, 0]
    wanted = {"logit": own, "probability": torch.sigmoid(own - other), "margin": own - other}[quantity]
    (gradient,) = torch.autograd.grad(wanted.sum(), x)
    found = hf.explain(model, x.detach(), y, "saliency", quantity=quantity)
    torch.testing.assert_close(found.attribution, gradient)
    product = hf.explain(model, x.detach(), y, "input-x-gradient", quantity=quantity)
    torch.testing.assert_close(product.attribution, x.detach() * gradient)
