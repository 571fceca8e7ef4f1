"""Packed tensors come back bit for bit, and take about as many bits as they must."""

import math

import pytest
import torch

from holdfast.models.masked.packing import Packed, pack, unpack


def sparse(n, density, *, signs, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(n, generator=generator) < density
    kept[int(torch.randint(0, n, (1,), generator=generator))] = True
    drawn = torch.randn(n, generator=generator)
    return torch.where(kept, 0.3 * (drawn.sign() if signs else drawn), torch.zeros(())).to(dtype)


@pytest.mark.parametrize("n", [1, 2, 9, 100, 5000])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.1, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("signs", [True, False])
def test_every_bit_comes_back(n, density, signs):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        tensor = sparse(n, density, signs=signs, dtype=dtype).view(1, n)
        packed = pack(tensor)
        if packed is None:
            assert n < 100 or (density > 0.9 and not signs)
            continue
        again = unpack(packed)
        assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_places_take_little_more_than_their_entropy(density):
    tensor = sparse(100_000, density, signs=True)
    packed, kept = pack(tensor), int((tensor != 0).sum())
    d = kept / 100_000
    entropy = -(d * math.log2(d) + (1 - d) * math.log2(1 - d)) * 100_000
    bits = 8 * packed.parts["places"].numel()
    assert entropy - 20 <= bits <= 1.05 * entropy + 50
    assert 8 * packed.parts["signs"].numel() <= kept + 7


def test_what_would_lose_a_bit_or_gain_nothing_stays_whole():
    assert pack(torch.randn(50)) is None
    assert pack(torch.tensor([0.0] * 40 + [-0.0, 1.0])) is None
    assert pack(torch.tensor([0.0] * 40 + [float("nan")])) is None
    assert pack(torch.zeros(40)) is None
    assert pack(torch.ones(40, dtype=torch.int64)) is None


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("places", lambda t: t[:-1]),
        ("signs", lambda t: t[:-1]),
        ("places", lambda t: torch.zeros_like(t)),
        ("places", lambda t: torch.full_like(t, 255)),
    ],
)
def test_parts_that_do_not_fit_are_refused(part, change):
    packed = pack(sparse(1000, 0.05, signs=True))
    with pytest.raises(ValueError, match=r"it has|outside"):
        unpack(Packed({**packed.parts, part: change(packed.parts[part])}, packed.about))
    with pytest.raises(ValueError, match="it "):
        unpack(Packed(packed.parts, {**packed.about, "kept": 10**9}))
