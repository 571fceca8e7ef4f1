"""The cascade: as strong as the full ensemble, honest about doubt, and not fooled by masked gradients."""

import pytest
import torch
from nets import tiny_nets
from torch import nn
from torch.nn.functional import one_hot

import holdfast as hf
from holdfast.attacks.autoattack import autoattack
from holdfast.attacks.cascade import cascade
from holdfast.attacks.core.chance import mean_prediction
from holdfast.random import Noise


@pytest.fixture(scope="module")
def digits():
    """A standard network that the budget 0.1 breaks on most inputs, and 60 inputs that it gets right."""
    data = hf.load_data("mnist-mini")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 32), nn.ReLU(), nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for start in range(0, 3000, 100):
        x, y = data.train.x[start : start + 100], data.train.y[start : start + 100]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    right = (model(data.test.x[:200]).argmax(1) == data.test.y[:200]).nonzero()[:60, 0]
    return model, data.test.x[right], data.test.y[right]


class Masked(nn.Module):
    def __init__(self, model, before=lambda x: x, after=lambda z: z):
        super().__init__()
        self.model, self.before, self.after = model, before, after

    def forward(self, x):
        return self.after(self.model(self.before(x)))


MASKS = {
    "rounding": {"before": lambda x: (x * 255).round() / 255},
    "scale": {"after": lambda z: 1000 * z},
    "softmax": {"after": lambda z: (100 * z).softmax(1)},
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks_do_not_hide_the_examples(digits, mask, short_autoattack):
    """Plain gradients say that the masked model holds; the cascade reports what it reports without the mask."""
    model, x, y = digits
    threat = hf.Linf(0.13)
    bare = hf.attack(model, x, y, threat).success.float().mean()
    assert 0.75 <= bare < 1  # true robust accuracy of at most a quarter
    masked = Masked(model, **MASKS[mask]).eval()
    leaf = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(masked(leaf).log_softmax(1), y), leaf)
    assert bool((gradient.flatten(1).abs().amax(1) == 0).float().mean() > 0.5)
    found = hf.attack(masked, x, y, threat).success.float().mean()
    assert abs(found - bare) <= 0.03


HIDDEN = {
    "no gradient": {"after": lambda z: one_hot(z.argmax(1), 10).float()},
    "zero gradient": {"after": lambda z: one_hot(z.argmax(1), 10) + 0 * z},
}


@pytest.mark.parametrize("mask", HIDDEN)
@pytest.mark.parametrize("threat", [hf.Linf(0.13), hf.Box(torch.full((1, 28, 28), 0.13)), hf.Patch(7, 7)], ids=str)
def test_decisions_alone_do_not_hide_the_examples(digits, mask, threat, short_autoattack):
    """All that is seen of the model is the one-hot of its largest logit; the logits inside tell the rest."""
    model, x, y = (part[:10] if isinstance(part, torch.Tensor) else part for part in digits)
    short = {"restarts": 8, "probes": 64, "steps": 20} if isinstance(threat, hf.Patch) else {}
    bare = hf.attack(model, x, y, threat, "patch-pgd" if short else "pgd", **short).success.float().mean()
    assert bare >= 0.6
    found = hf.attack(Masked(model, **HIDDEN[mask]).eval(), x, y, threat, queries=50)
    assert found.success.float().mean() >= bare - 0.05


@pytest.mark.parametrize("threat", [hf.Patch(7, 7), hf.Sparse(20), hf.Linf(0.13)], ids=str)
def test_examples_against_a_random_model_fool_draws_that_they_were_not_made_for(digits, threat, short_autoattack):
    """Under patches and sparse changes, and where there is no gradient: confirmed by a thousand other draws."""
    model, x, y = (part[:6] if isinstance(part, torch.Tensor) else part for part in digits)
    cut = torch.Tensor.detach if isinstance(threat, hf.Linf) else lambda z: z
    noisy = Masked(model, before=lambda x: x + 0.2 * torch.randn_like(x), after=cut).eval()
    found = hf.attack(noisy, x, y, threat)
    assert int(found.success.sum()) >= 2
    fooled = mean_prediction(noisy, found.x_adv, 1000, seed=9).argmax(1) != y
    assert int((found.success & ~fooled).sum()) <= 1, "near the boundary a vote goes either way"
    assert torch.equal(found.x_adv, hf.attack(noisy, x, y, threat).x_adv)


def test_it_breaks_at_least_what_the_ensemble_breaks(digits):
    model, x, y = digits
    threat = hf.Linf(0.06)
    ours = hf.attack(model, x[:30], y[:30], threat).success
    theirs = autoattack(model, x[:30], y[:30], threat).success
    assert int(ours.sum()) >= int(theirs.sum()) - 1
    assert 0 < int(theirs.sum()) < 30


def test_only_doubtful_inputs_go_on_to_the_ensemble(monkeypatch):
    """Two kinds of input in one batch: gradients vanish where the first value is above one half."""

    class Half(nn.Module):
        def forward(self, x):
            z = 4 * x[:, 1:].sum(1) - 6.0
            z = torch.where(x[:, 0] > 0.5, z.detach() + 0 * x[:, 1], z)
            return torch.stack([z, torch.zeros_like(z)], 1)

    x = torch.cat([torch.tensor([[0.2], [0.9]]).repeat(4, 1), torch.full((8, 3), 0.6)], 1)
    y = torch.zeros(8, dtype=torch.long)
    asked = []

    def recorded(model, x, y, threat, *, noise):
        asked.extend(noise.index.tolist())
        return autoattack(model, x, y, threat, noise=noise)

    monkeypatch.setitem(cascade.__wrapped__.__globals__, "autoattack", recorded)
    monkeypatch.setitem(cascade.__wrapped__.__globals__, "SHORT", 2)
    cascade(Half().eval(), x, y, hf.Linf(0.05), noise=Noise.for_batch(0, 8), queries=5)
    assert asked == [1, 3, 5, 7]


def test_options_are_checked():
    model, shape = tiny_nets()["mlp"]
    x = torch.rand(2, *shape)
    for option in ("steps", "targets", "queries"):
        with pytest.raises(hf.InputError, match="expected an integer >= 1, got 0"):
            hf.attack(model, x, model(x).argmax(1), hf.Linf(0.1), **{option: 0})
