"""sparse-rs: its moves, its colours and its schedule; what it shares with sparse-pgd is tested there."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast as hf
from holdfast.attacks.sparse_rs import _move, share_of_pixels, sparse_rs
from holdfast.random import Noise


def inputs(count, shape, dtype=torch.float64, seed=1):
    return torch.rand(count, *shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 999), st.integers(1, 6), st.integers(1, 6))
def test_a_move_paints_so_many_pixels_and_loses_none(seed, k, count):
    total, count = 7, min(count, k)
    noise = Noise.for_batch(seed, 3)
    x = inputs(3, (2, 1, total), seed=seed)
    order = noise.uniform((total,)).argsort(1)
    colours = torch.full((3, 2, k), 0.5, dtype=x.dtype)
    moved, painted = _move(hf.Sparse(k), x, order, colours, count, noise.fork(1))
    assert torch.equal(moved.sort(1).values, torch.arange(total).expand(3, total))
    assert torch.equal((painted != 0.5).any(1).sum(1), torch.full((3,), count))
    assert bool(((painted == 0) | (painted == 1) | (painted == 0.5)).all())
    for before, after in zip(order, moved, strict=True):
        gone = set(before[:k].tolist()) - set(after[:k].tolist())
        assert len(gone) <= min(count, total - k)


def test_pixels_come_from_everywhere():
    """All of the others are as likely to come in, and the one that leaves is as likely to come back."""
    noise, x = Noise.for_batch(0, 8000), torch.zeros(8000, 8)
    order = torch.arange(8).expand(8000, 8)
    moved, _ = _move(hf.Sparse(2), x, order, torch.ones(8000, 1, 2), 1, noise)
    came = moved[:, :2].flatten().bincount(minlength=8) / 8000
    assert came[2:].tolist() == pytest.approx([1 / 7] * 6, abs=0.02)
    assert came[:2].tolist() == pytest.approx([1 / 2 + 1 / 14] * 2, abs=0.02)


def test_a_new_pixel_gets_a_new_colour():
    """A black image of one channel: a random colour would be black half of the time."""
    x = torch.zeros(50, 1, 4, 4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).eval()
    model[1].bias.data = torch.tensor([50.0, 0.0])
    result = sparse_rs(model, x, torch.zeros(50, dtype=torch.long), hf.Sparse(3), queries=1)
    assert result.x_adv.sum((1, 2, 3)).tolist() == [3.0] * 50


def test_schedule_of_the_random_search():
    shares = [share_of_pixels(q, 10_000, 0.3) / 0.3 for q in (0, 1, 50, 51, 200, 201, 8000, 8001, 9999)]
    assert shares == pytest.approx([1, 1 / 2, 1 / 2, 1 / 4, 1 / 4, 1 / 5, 1 / 15, 1 / 20, 1 / 20])
    assert share_of_pixels(401, 500, 0.3) == pytest.approx(0.3 / 20)
