"""Training with Gaussian noise: the loss against its formula."""

import pytest
from torch.nn.functional import cross_entropy

from contexts import make_context
from holdfast.training.objectives.gaussian import gaussian
from noisy_tasks import net, noisy_logits, task


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("count", [1, 5])
def test_gaussian_is_the_cross_entropy_under_noise(samples, count):
    model, (x, y) = net(), task(count)
    loss, metrics = gaussian(model, x, y, make_context(x), sigma=0.5, samples=samples)
    logits = noisy_logits(model, x, 0.5, samples)
    expected = sum(cross_entropy(logits[:, i], y) for i in range(samples)) / samples
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx((logits.argmax(2) == y[:, None]).float().mean().item())
    loss.backward()
    assert model[1].weight.grad.abs().sum() > 0
