"""Attention of a lean copy: the values and the gradients of torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import holdfast as hf
from holdfast.attacks.core.gradients import input_gradient
from holdfast.attacks.core.losses import cross_entropy
from holdfast.attacks.fast.attention import attention
from holdfast.attacks.fast.fold import slimmed


def test_attention_in_bfloat16_is_that_of_torch_up_to_its_rounding():
    torch.manual_seed(0)
    parts = [torch.randn(2, 3, 5, 8) for _ in range(3)]
    weights = torch.randn(2, 3, 5, 8)

    def run(function, dtype):
        given = [part.to(dtype).requires_grad_(True) for part in parts]
        out = function(*given)
        return out.detach(), *torch.autograd.grad((out * weights.to(dtype)).sum(), given)

    for exact, rough in zip(
        run(F.scaled_dot_product_attention, torch.float32), run(attention, torch.bfloat16), strict=True
    ):
        assert rough.dtype == torch.bfloat16
        assert torch.allclose(rough.float(), exact, rtol=0, atol=0.02 * float(exact.abs().max()))
        assert not torch.equal(rough.float(), exact)
    with hf.reference():
        assert torch.equal(run(attention, torch.bfloat16)[0], run(F.scaled_dot_product_attention, torch.bfloat16)[0])
    exact, found = run(F.scaled_dot_product_attention, torch.float32), run(attention, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(exact, found, strict=True))


OPTIONS = ({}, {"dropout_p": 0.0, "is_causal": False}, {"is_causal": True}, {"attn_mask": torch.eye(5).bool()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS)
def test_attention_with_a_mask_is_that_of_torch(options, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 8, dtype=dtype) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    assert torch.equal(attention(q, k, v, **options), expected) == (dtype == torch.float32 or options in OPTIONS[2:])
    assert torch.allclose(attention(q, k, v, **options), expected, rtol=0, atol=0.03)


class Mixing(nn.Module):
    """Attention of the input to functions of itself."""

    def __init__(self):
        super().__init__()
        self.top = nn.Linear(4, 2)

    def forward(self, x):
        return self.top(F.scaled_dot_product_attention(x, x.sin(), x.cos()).mean((1, 2)))


def test_attention_is_replaced_in_copies_and_in_passes_under_autocast(monkeypatch):
    torch.manual_seed(0)
    model, x, y = Mixing().eval(), torch.rand(3, 2, 5, 4), torch.zeros(3, dtype=torch.int64)
    copy = slimmed(model, x, model(x).detach())
    assert attention in [node.target for node in copy.graph.nodes]
    assert torch.equal(copy(x), model(x))
    calls = []

    def noted(*given):
        calls.append(given[0].dtype)
        return attention(*given)

    monkeypatch.setattr("holdfast.attacks.core.gradients.attention", noted)
    expected = input_gradient(model, x, y, cross_entropy)[0]
    rough = model.bfloat16(), x.bfloat16(), y
    found = input_gradient(*rough, cross_entropy)[0].float()
    assert calls == [torch.float32, torch.bfloat16]
    assert float(torch.cosine_similarity(found.flatten(), expected.flatten(), 0)) > 0.98
