"""What smoothed classifiers see, and how a run is validated by it."""

import pytest
import torch

import holdfast as hf
from holdfast.random import Noise
from holdfast.training import load_recipe, train
from holdfast.training.objectives.core.noisy_copies import noisy_view
from noisy_tasks import RECIPE


def test_noise_belongs_to_the_example():
    x = torch.rand(6, 1, 3, 4)
    noise = Noise(3, torch.arange(6))
    assert torch.equal(noisy_view(x, noise, sigma=0.2, samples=4)[2:4], noisy_view(x[2:4], noise[2:4], sigma=0.2))
    assert noisy_view(x, noise, sigma=2.0).sub(x).std().item() == pytest.approx(2.0, rel=0.3)
    assert noisy_view(x[:0], noise[:0], sigma=1.0).shape == (0, 1, 3, 4)


@pytest.mark.parametrize(
    "objective",
    [
        {"name": "gaussian", "sigma": 0.1},
        {"name": "smoothadv", "sigma": 0.1},
        {"name": "consistency", "sigma": 0.1},
        {"name": "macer", "sigma": 0.1, "samples": 4},
        {"name": "ablation", "part": "column", "size": 2},
    ],
)
def test_a_run_validates_what_the_smoothed_classifier_sees(objective, make_toy_model, toy_data):
    first, again = (
        train({**RECIPE, "objective": objective}, make_toy_model(), toy_data, progress=False) for _ in range(2)
    )
    assert load_recipe({**RECIPE, "objective": objective}).selects == "noisy"
    for row, same in zip(first.history, again.history, strict=True):
        assert row["validation_noisy"] == same["validation_noisy"]
        assert row["train_loss"] == same["train_loss"]
        assert "validation_robust" not in row
    assert first.history[-1]["validation_noisy"] > 0.4


def test_other_objectives_have_no_noisy_accuracy(toy_recipe, make_toy_model, toy_data):
    assert "validation_noisy" not in train(toy_recipe, make_toy_model(), toy_data, epochs=1, progress=False).history[0]
    with pytest.raises(hf.InputError, match=r"evaluate\.select: 'noisy' needs an objective"):
        load_recipe(toy_recipe, {"evaluate.select": "noisy"})


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"name": "gaussian", "sigma": 0.0}, "objective.sigma: expected a number > 0"),
        ({"name": "gaussian", "samples": 0}, "objective.samples: expected an integer >= 1"),
        ({"name": "consistency", "weight": -1.0}, "objective.weight: expected a number >= 0"),
        ({"name": "ablation", "part": "circle"}, "objective.part: unknown value 'circle'"),
    ],
)
def test_options_out_of_range_are_refused(objective, message):
    with pytest.raises(hf.InputError) as error:
        load_recipe({**RECIPE, "objective": objective})
    assert message in str(error.value)
