"""Results print a few lines, whatever they hold; a history is still the list that it was."""

import copy
import json

import pytest

import holdfast as hf
from holdfast.results import History

ROWS = [
    {"epoch": 1, "train_loss": 2.0, "train_kappa": 0.1, "validation_clean": 0.5, "seconds": 3.25},
    {"epoch": 2, "train_loss": 0.5, "train_kappa": 0.2, "validation_clean": 0.875, "seconds": 3.0},
]


@pytest.fixture(scope="module")
def results():
    """What each front door returns for a small batch."""
    model = hf.make_model("linear", seed=0).eval()
    data = hf.load_data("mnist-mini")
    x, y = data.test.x[:8], data.test.y[:8]
    return {
        "AttackResult": hf.attack(model, x, y, hf.Linf(0.1), "pgd", steps=2),
        "ApgdResult": hf.attack(model, x, y, hf.Linf(0.1), "apgd-ce", steps=4),
        "Bounds": hf.bounds(model, x, hf.Linf(0.1)),
        "CertifyResult": hf.certify(model, x, y, hf.Linf(0.001)),
        "Explanation": hf.explain(model, x, y, "saliency"),
        "Nearest": hf.nearest(model, x, y, "l2"),
        "GuardResult": hf.guard(model, hf.Linf(0.001))(x),
        "Dataset": data,
        "Split": data.test,
        "TrainResult": hf.TrainResult(model, History(ROWS), None),
    }


def test_every_result_prints_a_few_short_lines(results):
    for name, result in results.items():
        text = repr(result)
        assert text.splitlines()[0] in (name, "AttackResult")
        assert "tensor(" not in text
        assert 1 < len(text.splitlines()) <= 10
        assert max(map(len, text.splitlines())) <= 120
        assert result._repr_html_().startswith("<table>")


def test_the_lines_say_what_was_found(results):
    broken = int(results["AttackResult"].success.sum())
    assert f"success    {broken} of 8 (" in repr(results["AttackResult"])
    assert "upper  float32 (8, 10), " in repr(results["Bounds"])
    assert "model    Sequential, 7,850 parameters" in repr(results["TrainResult"])
    assert "history  Training history of 2 epochs" in repr(results["TrainResult"])
    assert "train    x: float32 (10000, 1, 28, 28), 0 to 1; y: 0 to 9" in repr(results["Dataset"])


def test_a_history_is_a_list():
    history = History(ROWS)
    assert history == ROWS
    assert history[-1]["epoch"] == 2
    assert copy.deepcopy(history) == ROWS
    assert json.loads(json.dumps(history)) == ROWS


def test_a_history_shows_its_ends():
    first, *rest = repr(History(ROWS)).splitlines()
    assert first == "Training history of 2 epochs"
    assert rest == [
        "  train_loss        2 in the first epoch, 0.5 in the last",
        "  validation_clean  50.0 % in the first epoch, 87.5 % in the last",
        "  seconds           3.25 in the first epoch, 3 in the last",
    ]
    assert repr(History()) == "Training history of 0 epochs"
    assert "<tbody></tbody>" in History()._repr_html_()


def test_a_history_as_table_picture_and_frame():
    history = History(ROWS)
    assert r"2 & 0.5 & 87.5 \% & 3 \\" in history.to_latex()
    assert r"epoch & train loss & validation clean & seconds \\" in history.to_latex()
    assert "<td>87.5 %</td>" in history._repr_html_()
    assert "data:image/svg+xml" in history._repr_html_()
    assert str(history.plot()).startswith("<svg")
    assert history.to_pandas().to_dict("records") == ROWS


def test_a_long_history_shows_its_last_epochs():
    page = History({"epoch": i, "train_loss": 1.0} for i in range(1, 31))._repr_html_()
    assert page.count("<tr>") == 11
    assert "Training history of 30 epochs; the last 10" in page
    assert ">30</td>" in page


def test_training_returns_a_history():
    model = hf.make_model("linear", input_shape=(2,), classes=2, seed=0)
    data = hf.load_data("two-moons")
    result = hf.train("mnist-mini-standard", model, data, epochs=1, threat="linf:0.01")
    assert isinstance(result.history, History)
    assert len(result.history) == 1
