import pytest
import torch
from scipy import stats

from holdfast.random import Noise


def test_draws_belong_to_the_input_not_to_the_batch():
    noise = Noise.for_batch(7, 10)
    chosen = torch.tensor([3, 8])
    for draw in (
        lambda n: n.uniform((2, 3)),
        lambda n: n.normal((4,)),
        lambda n: n.integers(5, (6,)),
        lambda n: n.generated_normal((20,)),
    ):
        assert torch.equal(draw(noise)[chosen], draw(noise[chosen]))


def test_seeds_streams_and_inputs_differ():
    noise = Noise.for_batch(0, 2)
    draws = [noise, noise.fork(0), noise.fork(1), noise.fork(0).fork(0), Noise.for_batch(1, 2)]
    values = [n.uniform((50,)) for n in draws]
    assert not torch.equal(values[0][0], values[0][1])
    for i, a in enumerate(values):
        for b in values[i + 1 :]:
            assert not torch.isclose(a, b).all()
            assert abs(torch.corrcoef(torch.stack([a[0], b[0]]))[0, 1].item()) < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distributions(dtype):
    noise = Noise.for_batch(0, 200)
    uniform, normal = noise.uniform((100,), dtype), noise.normal((100,), dtype)
    generated = noise.generated_normal((100,), dtype)
    assert uniform.dtype == normal.dtype == generated.dtype == dtype
    assert stats.kstest(generated.flatten().numpy(), "norm").pvalue > 1e-3
    assert not torch.equal(generated, noise.fork(0).generated_normal((100,), dtype))
    assert 0 < uniform.min() < uniform.max() < 1
    assert stats.kstest(uniform.flatten().double().numpy(), "uniform").pvalue > 0.01
    assert stats.kstest(normal.flatten().double().numpy(), "norm").pvalue > 0.01
    counts = noise.integers(7, (100,)).flatten().bincount(minlength=7)
    assert stats.chisquare(counts.numpy()).pvalue > 0.01


def test_an_empty_batch_draws_nothing():
    assert Noise.for_batch(0, 0).uniform((3,)).shape == (0, 3)
