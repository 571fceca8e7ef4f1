import math
import time
from importlib import resources

import pytest
import torch

from holdfast.data import load_data, mnist_mini, two_moons
from holdfast.errors import InputError


def test_mnist_mini_is_balanced_and_real() -> None:
    data = mnist_mini()
    assert data.train.x.shape == (10_000, 1, 28, 28)
    assert data.test.x.shape == (2_000, 1, 28, 28)
    assert data.train.y.bincount().tolist() == [1000] * 10
    assert data.test.y.bincount().tolist() == [200] * 10
    assert (data.train.x.min(), data.train.x.max()) == (0, 1)
    # The mean pixel of all MNIST training images is 0.1307.
    assert data.train.x.mean().item() == pytest.approx(0.1307, abs=0.003)
    # Digits of one class resemble each other: nearest class mean is right for about four in five.
    means = torch.stack([data.train.x[data.train.y == k].mean(0).flatten() for k in range(10)])
    nearest = torch.cdist(data.test.x.flatten(1), means).argmin(1)
    assert 0.75 < (nearest == data.test.y).float().mean().item() < 0.9


def test_mnist_mini_is_shuffled_and_has_no_twins() -> None:
    data = mnist_mini()
    assert data.train.y[:200].unique().numel() == 10
    images = torch.cat([data.train.x, data.test.x]).flatten(1)
    assert torch.unique(images, dim=0).shape[0] == 12_000


def test_mnist_mini_is_small_quick_and_licensed() -> None:
    folder = resources.files("holdfast.data")
    assert len((folder / "mnist-mini.npz").read_bytes()) < 3_000_000
    text = (folder / "mnist-mini.LICENSE.txt").read_text()
    assert "CC BY-SA 3.0" in text
    assert "LeCun" in text
    start = time.process_time()
    mnist_mini()
    assert time.process_time() - start < 1.0


def test_two_moons_lie_on_their_circles() -> None:
    split = two_moons(200, noise=0.0).train
    points = (split.x - 0.5) * 4 + torch.tensor([0.5, 0.25])
    centre = torch.where(split.y[:, None] == 0, torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.5]))
    assert torch.allclose((points - centre).norm(dim=1), torch.ones(200), atol=1e-5)
    assert bool((points[split.y == 0, 1] >= -1e-5).all())
    assert bool((points[split.y == 1, 1] <= 0.5 + 1e-5).all())


def test_two_moons_noise_has_the_stated_size() -> None:
    quiet, loud = (load_data("two-moons", n=4000, noise=noise, seed=3) for noise in (0.0, 0.1))
    assert (loud.train.x - quiet.train.x).std().item() == pytest.approx(0.1 / 4, rel=0.05)


def test_two_moons_options() -> None:
    data = load_data("two-moons", n=7, seed=1)
    assert data.train.x.shape == data.test.x.shape == (7, 2)
    assert data.classes == ("upper moon", "lower moon")
    assert torch.equal(data.train.x, load_data("two-moons", n=7, seed=1).train.x)
    assert not torch.equal(data.train.x, load_data("two-moons", n=7, seed=2).train.x)
    assert not torch.equal(data.train.x, data.test.x)
    assert len(load_data("two-moons").train) == 1000
    wild = load_data("two-moons", noise=10.0).train.x
    assert (wild.min(), wild.max()) == (0, 1)


@pytest.mark.parametrize(
    ("options", "message"), [({"n": 1}, "n >= 2"), ({"noise": -1.0}, "noise"), ({"noise": math.nan}, "noise")]
)
def test_two_moons_refuses(options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_data("two-moons", **options)
