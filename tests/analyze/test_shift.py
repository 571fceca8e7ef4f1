import pytest
import torch
from torch import nn

from holdfast import InputError
from holdfast.analyze.shift import mean_corruption_error, shifted_accuracy
from holdfast.data.corruptions import CORRUPTIONS, corrupt
from holdfast.models import rse
from holdfast.utils.progress import progress_bars


class Constant(nn.Module):
    def forward(self, x):
        return torch.tensor([0.0, 1.0]).expand(len(x), 2)


class Mean(nn.Module):
    """Class 1 where the image is bright."""

    def forward(self, x):
        return torch.stack([torch.full((len(x),), 0.5), x.mean((1, 2, 3))], 1)


def test_a_constant_predictor_has_the_error_of_its_class():
    y = torch.tensor([1, 1, 1, 0])
    found = shifted_accuracy(Constant(), torch.rand(4, 1, 6, 6), y, batch_size=3)
    assert found.clean == 3
    assert set(found.correct) == set(CORRUPTIONS)
    assert mean_corruption_error(found.errors()) == pytest.approx(0.25)
    assert mean_corruption_error(found.errors(), found.errors()) == pytest.approx(1)
    row = found.to_dict()["rows"][0]
    assert row["interval"][0] < row["accuracy"] == 0.75 < row["interval"][1]


def test_counts_are_those_of_a_loop():
    x, y = torch.rand(5, 1, 8, 8) * 0.9, torch.ones(5, dtype=torch.int64)
    found = shifted_accuracy(Mean(), x, y, corruptions=["brightness", "fog"], severities=[1, 4], seed=3, batch_size=2)
    for name, counts in found.correct.items():
        for severity, count in zip((1, 4), counts, strict=True):
            assert count == sum(Mean()(corrupt(x, name, severity, seed=3)).argmax(1) == 1)


def test_a_bar_moves_with_each_corruption(monkeypatch):
    bars, seen = progress_bars(show=False), []
    monkeypatch.setattr("holdfast.analyze.shift.progress_bars", lambda: bars)

    class Watched(Mean):
        def forward(self, x):
            seen.extend(task.completed for task in bars.tasks)  # none while the model is probed for random draws
            return super().forward(x)

    shifted_accuracy(Watched(), torch.rand(2, 1, 6, 6), torch.zeros(2, dtype=torch.int64), severities=[1])
    assert seen == [*range(15), 15]  # the last look is at clean inputs
    assert bars.tasks[0].total == 15


def test_both_forms_by_hand():
    errors, base = {"a": [0.1, 0.3], "b": [0.6, 0.6]}, {"a": [0.2, 0.2], "b": [0.9, 0.7]}
    assert mean_corruption_error(errors) == pytest.approx((0.2 + 0.6) / 2)
    assert mean_corruption_error(errors, base) == pytest.approx((0.4 / 0.4 + 1.2 / 1.6) / 2)
    with pytest.raises(InputError, match="no error on 'a'"):
        mean_corruption_error({"a": [0.1]}, {"a": [0.0]})
    with pytest.raises(InputError, match="each of the 2 severities of 'b'"):
        mean_corruption_error(errors, {"a": [0.1, 0.1]})


def test_bad_input_is_refused():
    x, y = torch.rand(2, 1, 6, 6), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InputError, match="unknown corruption 'rain'"):
        shifted_accuracy(Constant(), x, y, corruptions=["rain"])
    with pytest.raises(InputError, match="at least one input"):
        shifted_accuracy(Constant(), x[:0], y[:0])


def test_a_random_network_answers_with_the_mean_of_its_draws():
    torch.manual_seed(0)
    model = rse(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), first=0.5).eval()
    x = torch.rand(40, 1, 8, 8) * 0.9
    y = model.predict(x, draws=20, seed=3)
    found = shifted_accuracy(model, x, y, corruptions=["brightness"], severities=[1], seed=3, batch_size=40)
    assert found.clean == 40
    again = shifted_accuracy(model, x, y, corruptions=["brightness"], severities=[1], seed=3, batch_size=40)
    assert again.correct == found.correct
    assert min(int((model(x).argmax(1) == y).sum()) for _ in range(5)) < 40
