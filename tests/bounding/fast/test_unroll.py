"""Dense layers on maps as they lie in memory: other weights' order, the same bounds and gradients."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.bounding import interval
from holdfast.bounding.core.region import region
from holdfast.bounding.fast.layout import channels_last
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.trace import trace_batch
from holdfast.bounding.linear import relaxation as linear
from holdfast.errors import UnsupportedError

EPS = 0.1


def network(*, dropout: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.Dropout(0.0)] if dropout else []
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3, stride=2), nn.ReLU(), nn.Flatten(), *middle,
        nn.Linear(5 * 2 * 3, 6), nn.ReLU(), nn.Linear(6, 3),
    )  # fmt: skip


def batch(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 3, 7, 9, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def gradients(model: nn.Module, x: Tensor, y: Tensor, *, unroll: bool) -> tuple[bool, Tensor, list[Tensor]]:
    """Whether maps were unrolled, the margins, and gradients of a loss that looks at logits and margins."""
    graph, logits = trace_batch(model, channels_last(x) if unroll else x, unroll=unroll)
    r = region(hf.Linf(EPS), channels_last(x) if unroll else x, sound=False)
    margins = interval.margin_bounds(graph, r.lower, r.upper, y, sound=False)
    loss = cross_entropy(logits, y) + cross_entropy(-margins, y)
    found = any(isinstance(node.op, ops.Unroll) for node in graph.nodes)
    return found, margins, list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("count", [3, 16])
def test_unrolled_maps_give_the_same_margins_and_gradients(count: int) -> None:
    model, (x, y) = network(), batch(count)
    plain, margins, expected = gradients(model, x, y, unroll=False)
    unrolled, same, found = gradients(model, x, y, unroll=True)
    assert not plain
    assert unrolled
    torch.testing.assert_close(same, margins, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_maps_are_not_unrolled_where_it_takes_longer_or_something_else_reads_them() -> None:
    x, y = batch(2)  # fewer than three inputs for six neurons
    assert not gradients(network(), x, y, unroll=True)[0]
    x, y = batch(16)
    assert not gradients(network(dropout=True), x, y, unroll=True)[0]


def test_a_domain_without_the_rule_refuses_unrolled_maps() -> None:
    x, _ = batch(16)
    graph, _ = trace_batch(network(), channels_last(x), unroll=True)
    box = region(hf.Linf(EPS), x, sound=False)
    with pytest.raises(UnsupportedError, match="Unroll"):
        linear.relaxation(graph, box, slopes="adaptive", hidden=True, sound=False)
