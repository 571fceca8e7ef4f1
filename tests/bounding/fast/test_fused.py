"""The fused steps of linear bounds against the plain program, with their gradients."""

import pytest
import torch

from holdfast.bounding.fast import fused
from holdfast.bounding.fast.fused import bend, box_minimum


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("block", [1, 100, 10**6])
@pytest.mark.parametrize("last", [False, True])
def test_bending_equals_the_plain_program_and_its_gradients(rows: int, block: int, last: bool, monkeypatch) -> None:
    monkeypatch.setattr(fused, "BLOCK", block)
    torch.manual_seed(0)

    def maps(make, n: int) -> torch.Tensor:
        """In either order of memory."""
        values = make(3, n, 2, 4, 5, dtype=torch.float64)
        values = values.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) if last else values
        return values.requires_grad_()

    a = maps(torch.randn, 3)
    low, up, shift = (maps(torch.rand, n) for n in (rows, 1, 1))
    carried, added = bend(a, low, up, shift)
    assert carried.stride() == a.stride()
    assert torch.allclose(carried, a.clamp(min=0) * low + a.clamp(max=0) * up)
    assert torch.allclose(added, (a.clamp(max=0) * shift).flatten(2).sum(2))
    assert torch.autograd.gradcheck(bend, (a, low, up, shift))
    assert torch.autograd.gradcheck(lambda a: bend(a, *(v.detach() for v in (low, up, shift))), (a,))


def test_bending_the_rows_of_no_input() -> None:
    a, line = torch.zeros(0, 3, 4, requires_grad=True), torch.zeros(0, 1, 4)
    carried, added = bend(a, line, line, line)
    (carried.sum() + added.sum()).backward()
    assert (carried.shape, added.shape) == ((0, 3, 4), (0, 3))
    assert a.grad is not None
    assert a.grad.shape == (0, 3, 4)


def test_the_minimum_over_a_box_equals_that_over_its_corners() -> None:
    torch.manual_seed(0)
    c = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    lower = torch.randn(3, 5, dtype=torch.float64)
    upper = lower + torch.rand_like(lower)
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 5)
    points = lower[:, None] + corners * (upper - lower)[:, None]
    assert torch.allclose(box_minimum(c, lower, upper), torch.einsum("bmn,bpn->bmp", c, points).amin(2))
    assert torch.autograd.gradcheck(lambda c: box_minimum(c, lower, upper), (c,))
