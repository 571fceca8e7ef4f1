"""BPDA, and the two patch defences that fall to it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast as hf
from holdfast.apps.defences import DigitalWatermarking, LocalGradientSmoothing, normalised_gradient
from holdfast.attacks.core.bpda import StraightThrough
from holdfast.attacks.patch_pgd import patch_pgd
from holdfast.errors import InputError

TRANSFORMS = {
    "round": lambda x: (7 * x).round() / 7,
    "step": lambda x: (x > 0.5).to(x.dtype),
    "cut": lambda x: torch.from_numpy(x.detach().numpy() ** 3),
    "third": lambda x: x / 3 + 1e8,
}


@given(st.sampled_from(sorted(TRANSFORMS)), st.integers(0, 99))
def test_value_of_the_transform_and_gradient_of_the_identity(name, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(3, 2, 4, generator=generator, requires_grad=True)
    weight = torch.randn(3, 2, 4, generator=generator)
    out = StraightThrough(TRANSFORMS[name])(x)
    assert torch.equal(out, TRANSFORMS[name](x.detach()))
    (gradient,) = torch.autograd.grad((weight * out).sum(), x)
    assert torch.equal(gradient, weight)


def test_gradient_of_another_function():
    x = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    out = StraightThrough(lambda x: (x > 0.5).double(), backward=lambda x: torch.sigmoid(9 * (x - 0.5)))(x)
    assert torch.equal(out, (x > 0.5).double())
    (gradient,) = torch.autograd.grad(out.sum(), x)
    s = torch.sigmoid(9 * (x - 0.5))
    assert torch.allclose(gradient, 9 * s * (1 - s))


def test_a_stand_in_of_another_shape_is_refused():
    with pytest.raises(InputError, match=r"\(2, 3\) to \(2,\)"):
        StraightThrough(lambda x: x.sum(1))(torch.rand(2, 3))
    pooled = StraightThrough(lambda x: x.amax(1), backward=lambda x: x.mean(1))(torch.rand(2, 3))
    assert pooled.shape == (2,)


def test_an_attack_goes_through_it():
    """Quantised so coarsely that the plain gradient is zero everywhere."""
    step = StraightThrough(lambda x: (3 * x).floor().clamp(max=2) / 2)
    model = nn.Sequential(step, nn.Linear(6, 2)).eval()
    x = torch.rand(30, 6)
    result = hf.attack(model, x, model(x).argmax(1), hf.Linf(0.5), "pgd")
    assert int(result.success.sum()) > 15


def images(count=4, channels=3, height=12, width=9, seed=0):
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(seed))


def test_smoothing_leaves_constant_images_and_does_nothing_without_strength():
    defence = LocalGradientSmoothing(window=5, overlap=2, threshold=0.0)
    flat = torch.full((2, 3, 12, 9), 0.7)
    assert torch.equal(defence(flat), flat)
    x = images()
    assert torch.equal(LocalGradientSmoothing(window=5, overlap=2, strength=0.0)(x), x)
    assert torch.equal(LocalGradientSmoothing(window=5, overlap=2, threshold=1.0)(x), x)


@given(st.floats(0.0, 20.0), st.integers(1, 9), st.integers(0, 8), st.floats(0.0, 0.6), st.integers(0, 99))
def test_smoothing_stays_in_range_and_only_darkens(strength, window, overlap, threshold, seed):
    overlap = min(overlap, window - 1)
    x = images(seed=seed)
    out = LocalGradientSmoothing(window=window, overlap=overlap, threshold=threshold, strength=strength)(x)
    assert bool(((out >= 0) & (out <= x)).all())


def test_smoothing_window_by_window():
    """Against the loop that the paper describes."""
    x, window, stride, threshold, strength = images(2, 1, 11, 9), 4, 3, 0.45, 1.5
    g = normalised_gradient(x)
    kept = torch.zeros_like(g)
    tops, lefts = [0, 3, 6, 7], [0, 3, 5]  # the last window of each row and column ends at the edge
    for i in range(2):
        for top in tops:
            for left in lefts:
                part = (i, 0, slice(top, top + window), slice(left, left + window))
                if float(g[part].mean()) > threshold:
                    kept[part] = g[part]
    assert 0 < int((kept > 0).sum()) < int((g > 0).sum())
    defence = LocalGradientSmoothing(window=window, overlap=window - stride, threshold=threshold, strength=strength)
    assert torch.allclose(defence(x), x * (1 - (strength * kept).clamp(0, 1)))


def test_normalised_gradient_by_hand():
    x = torch.tensor([[0.0, 3.0], [4.0, 3.0]])[None, None]
    assert torch.allclose(normalised_gradient(x), torch.tensor([[5.0, 0.0], [1.0, 0.0]])[None, None] / 5)


def test_smoothing_can_be_differentiated():
    """Windows are constants: the gradient is that of finite differences, and flat regions give no NaN."""
    x = images(2, 1).double()
    x[:, :, 8:] = 0.5
    defence = LocalGradientSmoothing(window=4, overlap=1, threshold=0.2, strength=0.6)
    x.requires_grad_(True)
    (gradient,) = torch.autograd.grad(defence(x).square().sum(), x)
    assert bool(torch.isfinite(gradient).all())
    assert bool((gradient != 0).any())
    direction = torch.zeros_like(x).detach()
    direction[:, :, :6] = torch.randn(2, 1, 6, 9, dtype=torch.float64)
    with torch.no_grad():
        ends = [defence(x + h * direction).square().sum() for h in (1e-6, -1e-6)]
    assert float((gradient * direction).sum()) == pytest.approx(float(ends[0] - ends[1]) / 2e-6, rel=1e-4)


class Roughness(nn.Module):
    """Two classes that weigh the local contrast: its gradient is large where the image is noisy."""

    def forward(self, x):
        contrast = x.diff(dim=2).square().sum((1, 2, 3)) + x.diff(dim=3).square().sum((1, 2, 3))
        return torch.stack([contrast, -contrast], 1) / 1000


def noisy_square(seed):
    x = torch.full((1, 3, 20, 24), 0.5) + 0.01 * images(1, 3, 20, 24, seed)
    x[:, :, 6:13, 9:16] = images(1, 3, 7, 7, seed + 1).round()
    truth = torch.zeros(1, 1, 20, 24, dtype=torch.bool)
    truth[:, :, 6:13, 9:16] = True
    return x, truth


@pytest.mark.parametrize("seed", range(5))
def test_watermarking_finds_a_noisy_square(seed):
    x, truth = noisy_square(seed)
    mask = DigitalWatermarking(Roughness().eval()).mask(x)
    assert float((mask & truth).sum() / (mask | truth).sum()) > 0.5


def test_watermarking_changes_the_mask_alone_and_one_region_of_it():
    x = torch.cat([noisy_square(0)[0], noisy_square(2)[0]])
    x[0, :, 1, 1] = 1.0  # a single salient pixel is eroded
    defence = DigitalWatermarking(Roughness().eval(), fill=0.25)
    mask, out = defence.mask(x), defence(x)
    assert mask.shape == (2, 1, 20, 24)
    assert not bool(mask[0, 0, :3, :3].any())
    assert torch.equal(out[~mask.expand_as(x)], x[~mask.expand_as(x)])
    assert bool((out[mask.expand_as(x)] == 0.25).all())
    assert torch.equal(defence.mask(x[1:]), mask[1:])


def test_bad_parameters_are_refused():
    with pytest.raises(InputError, match="overlap"):
        LocalGradientSmoothing(window=5, overlap=5)
    with pytest.raises(InputError, match="larger than the image"):
        LocalGradientSmoothing(window=15)(images())
    with pytest.raises(InputError, match="odd"):
        DigitalWatermarking(Roughness(), size=4)


@pytest.fixture(scope="module")
def digits():
    """A small CNN trained for a few seconds, and test digits that it gets right."""
    data = hf.load_data("mnist-mini")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(784, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for batch in torch.randperm(6000).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.train.x[batch]), data.train.y[batch]).backward()
        optimizer.step()
    model.eval()
    x, y = data.test.x[:60], data.test.y[:60]
    right = model(x).argmax(1) == y
    return model, x[right], y[right]


@pytest.mark.parametrize("name", ["smoothing", "watermarking"])
def test_the_defences_fall_to_an_attack_that_knows_them(digits, name):
    """The unaware attack follows the gradients of the bare model, and is judged with the defence in place."""
    model, x, y = digits
    options = {"steps": 15, "step_size": 0.1, "restarts": 12}
    if name == "smoothing":
        defence = LocalGradientSmoothing(window=5, overlap=2, threshold=0.1, strength=1.0)
        # The attack of the paper: its patches are rough, which smoothing removes. Ranking also tries flat ones.
        threat, options = hf.Patch(5, 5), options | {"locations": "random"}
    else:
        defence, threat = StraightThrough(DigitalWatermarking(model, density=0.4)), hf.Patch(4, 4)
    defended = nn.Sequential(defence, model).eval()
    clean = defended(x).argmax(1) == y
    x, y = x[clean], y[clean]
    assert len(x) >= 30
    unaware = patch_pgd(model, x, y, threat, **options)
    adaptive = patch_pgd(defended, x, y, threat, **options)
    apparent = float((defended(unaware.x_adv).argmax(1) == y).double().mean())
    assert apparent >= 0.4
    assert 1 - float(adaptive.success.double().mean()) <= apparent - 0.25
    assert bool((defended(adaptive.x_adv).argmax(1) != y)[adaptive.success].all())
