"""Consistency: the loss against its formula, with the same noise."""

import pytest
from torch.nn.functional import cross_entropy, kl_div

from contexts import make_context
from holdfast.training.objectives.consistency import consistency
from noisy_tasks import net, noisy_logits, task


def test_consistency_adds_divergence_and_entropy():
    model, (x, y) = net(), task()
    loss, metrics = consistency(model, x, y, make_context(x), sigma=0.8, samples=3, weight=7.0, entropy_weight=0.4)
    logits = noisy_logits(model, x, 0.8, 3)
    each = logits.softmax(2)
    mean = each.mean(1)
    divergence = sum(kl_div(each[:, i].log(), mean, reduction="batchmean") for i in range(3)) / 3
    entropy = -(mean * mean.log()).sum(1).mean()
    fit = cross_entropy(logits.flatten(0, 1), y.repeat_interleave(3))
    assert loss.item() == pytest.approx((fit + 7 * divergence + 0.4 * entropy).item(), rel=1e-5)
    assert float(metrics["divergence"]) == pytest.approx(divergence.item(), rel=1e-4)
    assert float(metrics["entropy"]) == pytest.approx(entropy.item(), rel=1e-4)


def test_one_sample_agrees_with_itself():
    model, (x, y) = net(), task()
    _, metrics = consistency(model, x, y, make_context(x), samples=1)
    assert float(metrics["divergence"]) == pytest.approx(0.0, abs=1e-6)
