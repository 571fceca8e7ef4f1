"""Training on a part of each input."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import holdfast as hf
from contexts import make_context
from holdfast.random import Noise
from holdfast.training.objectives.ablation import ablated_view, ablation
from noisy_tasks import net


@pytest.mark.parametrize(
    ("part", "size", "kept"), [("column", 2, 2 * 3), ("row", 1, 1 * 4), ("block", 2, 4), ("pixels", 5, 5)]
)
def test_ablation_keeps_a_part_of_each_input(part, size, kept):
    x, noise = torch.rand(300, 2, 3, 4) * 0.4, Noise.for_batch(0, 300)
    seen = ablated_view(x, noise, part=part, size=size, null=0.9)
    mask = seen != 0.9
    assert bool((mask.all(1) == mask.any(1)).all())
    mask = mask[:, 0]
    assert bool((mask.flatten(1).sum(1) == kept).all())
    assert torch.equal(seen[mask[:, None].expand_as(x)], x[mask[:, None].expand_as(x)])
    assert float((mask.float().mean(0) - kept / 12).abs().max()) < 0.12  # every pixel is seen equally often
    if part == "column":
        assert bool((mask.any(1).sum(1) == 2).all())
        assert bool((mask[:, :, 0] & mask[:, :, -1]).any())  # around the edge
    model, y = net(inputs=24), torch.zeros(300, dtype=torch.int64)
    loss, metrics = ablation(model, x, y, make_context(x), part=part, size=size, null=0.9)
    assert loss.item() == pytest.approx(cross_entropy(model(seen), y).item(), rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx((model(seen).argmax(1) == y).float().mean().item())


def test_vectors_have_pixels_but_no_columns():
    x = torch.rand(4, 6)
    assert (ablated_view(x, Noise.for_batch(0, 4), part="pixels", size=2, null=-1.0) != -1).sum(1).tolist() == [2] * 4
    with pytest.raises(hf.InputError, match="images"):
        ablated_view(x, Noise.for_batch(0, 4), part="column", size=2, null=0.5)
