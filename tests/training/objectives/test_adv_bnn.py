"""Adv-BNN: the divergence enters the loss, and without noise it is adversarial training."""

import pytest
import torch
from torch import nn

import holdfast as hf
from contexts import make_context
from holdfast.attacks.core.chance import mean_prediction, seeded
from holdfast.models import adv_bnn as make_random
from holdfast.models.random import gaussian_divergence
from holdfast.training.accuracy import evaluate
from holdfast.training.objectives.adv_bnn import adv_bnn
from holdfast.training.objectives.at import at
from holdfast.training.workers import find_workers


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()


def batch():
    torch.manual_seed(1)
    return torch.rand(8, 4, dtype=torch.float64), torch.arange(8) % 3


def test_the_divergence_is_divided_by_the_number_of_examples():
    model, (x, y) = make_random(plain(), prior_std=0.1, posterior_std=0.05), batch()
    losses = []
    for weight in (0.0, 0.5):
        with seeded(0, x.device):
            losses.append(adv_bnn(model, x, y, make_context(x, hf.Linf(0.1), count=50), divergence_weight=weight)[0])
    expected = 0.5 / 50 * gaussian_divergence(model).item()
    assert (losses[1] - losses[0]).item() == pytest.approx(expected, rel=1e-9)
    assert expected > 0


def test_without_noise_it_is_adversarial_training():
    network, (x, y) = plain(), batch()
    expected = at(network, x, y, make_context(x, hf.Linf(0.1)))[0].item()
    assert adv_bnn(network, x, y, make_context(x, hf.Linf(0.1)))[0].item() == expected
    still = make_random(network, posterior_std=0.0)
    loss, _ = adv_bnn(still, x, y, make_context(x, hf.Linf(0.1)), divergence_weight=0.0)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in still.parameters() if p.grad is not None)


def test_validation_judges_the_ensemble_and_leaves_the_generator():
    model, (x, y) = make_random(plain(), posterior_std=0.6).eval(), batch()
    state = torch.get_rng_state()
    how = {"attack_steps": 2, "batch_size": 8, "seed": 3, "team": find_workers()}
    found = evaluate(model, x, y, hf.Linf(0.05), **how)
    assert torch.equal(state, torch.get_rng_state())
    right = mean_prediction(model, x, 20, 3).argmax(1) == y
    assert found["clean"] == pytest.approx(float(right.double().mean()))
    assert found["robust"] <= found["clean"]
    assert evaluate(model, x, y, hf.Linf(0.05), **how) == found


def test_a_run_that_was_resumed_draws_the_same(tmp_path):
    recipe = {
        "epochs": 2,
        "batch_size": 100,
        "data": "two-moons",
        "threat": "linf:0.02",
        "model": {"name": "adv-bnn", "of": "mlp", "hidden": [8]},
        "objective": {"name": "adv-bnn"},
        "attack": {"name": "pgd", "steps": 2},
        "regularizers": {"graddiv-mean": {"warm_up": 0.0, "ramp_up": 0.0, "samples": 2}},
        "optimizer": {"name": "adam", "lr": 0.01},
        "evaluate": {"count": 20, "attack_steps": 1},
    }
    whole = hf.train(recipe, progress=False)
    hf.train(recipe, out=tmp_path / "run", epochs=1, progress=False)
    resumed = hf.train(recipe, out=tmp_path / "run", resume=True, progress=False)
    pairs = zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True)
    assert whole.history[1]["train_loss"] == resumed.history[1]["train_loss"]
    assert all(torch.equal(a, b) for a, b in pairs)
