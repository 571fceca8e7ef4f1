"""Adam against torch's own."""

import torch

from holdfast.bounding.core.adam import Adam


def test_steps_are_those_of_torch_and_a_missing_gradient_leaves_a_tensor_alone():
    torch.manual_seed(0)
    ours, theirs = [torch.randn(7).double().requires_grad_() for _ in range(2)], []
    theirs = [one.detach().clone().requires_grad_() for one in ours]
    before = ours[1].detach().clone()
    adam, reference = Adam(ours, rate=0.3, decay=0.9), torch.optim.Adam(theirs, lr=0.3)
    for _ in range(6):
        adam.step((*torch.autograd.grad((ours[0] ** 4).sum(), [ours[0]]), None))
        (theirs[0].grad,) = torch.autograd.grad((theirs[0] ** 4).sum(), [theirs[0]])
        reference.step()
        reference.param_groups[0]["lr"] *= 0.9
    assert torch.allclose(ours[0], theirs[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(ours[1].detach(), before)
