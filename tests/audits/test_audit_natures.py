"""Audits of models that draw random numbers, and of models whose gradients are missing or useless."""

import io
import json
from dataclasses import replace
from importlib import import_module

import jsonschema
import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn.functional import dropout, one_hot

import holdfast as hf
from holdfast.attacks.core.chance import mean_prediction
from holdfast.audits import load_audit
from holdfast.audits.report.advice import next_steps
from holdfast.audits.report.card import badge, model_card
from holdfast.audits.report.page import schema
from holdfast.registry import get

tasks = import_module("holdfast.audits.task")
autoattack = import_module("holdfast.attacks.autoattack")


@pytest.fixture(scope="module")
def net():
    """A small network trained on digits, most of which break at linf 0.1."""
    data = hf.load_data("mnist-mini").train
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.ReLU(), nn.Linear(20, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.x[:400]), data.y[:400]).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval()


class Then(nn.Module):
    """A network between two functions."""

    def __init__(self, net, before=lambda x: x, after=lambda z: z):
        super().__init__()
        self.net, self.before, self.after = net, before, after
        self.eval()

    def forward(self, x):
        return self.after(self.net(self.before(x)))


class Elsewhere(nn.Module):
    """Answers of a network that is no module of it: as from another process, another library or a device."""

    def __init__(self, net, after=lambda z: z):
        super().__init__()
        self.ask, self.after = net.__call__, after
        self.eval()

    def forward(self, x):
        return self.after(torch.from_numpy(self.ask(torch.from_numpy(x.numpy())).detach().numpy()))


def run(model, threat="linf:0.1", **options):
    settings = {"data": "mnist-mini", "n": 20, "budgets": 2, "budget": "quick", "progress": False, **options}
    return hf.audit(model, threat=threat, **settings)


@pytest.fixture(scope="module")
def truth(net):
    """The audit of the network as it is."""
    return run(net)


def printed(result):
    console = Console(width=400, file=io.StringIO(), record=True)
    console.print(result.table())
    return console.export_text()


def forms(result):
    """Everything that a reader may see of an audit, by its name."""
    return {
        "headline": result.headline,
        "terminal": printed(result),
        "page": result.to_html(),
        "json": result.to_json(),
        "headline of the json": json.loads(result.to_json())["headline"],
        "badge": badge(result),
        "card": model_card(result),
    }


HARD = {
    "one-hot": {"after": lambda z: one_hot(z.argmax(1), 10).float()},
    "one-hot with a zero gradient": {"after": lambda z: one_hot(z.argmax(1), 10) + 0 * z},
    "saturated": {"after": lambda z: 2 * (1000 * z).softmax(1) - 1},
    "plateau": {"after": lambda z: (z - z.amax(1, keepdim=True)).clamp(min=-0.1)},
}


@pytest.mark.parametrize("kind", HARD)
def test_a_model_that_hides_its_gradient_is_broken_all_the_same_and_called_unreliable(net, truth, kind):
    assert truth.attacked[-1] < truth.clean - 0.4, "choose a network that breaks"
    assert "unreliable" not in truth.headline + badge(truth)
    hidden = run(Then(net, **HARD[kind]))
    assert hidden.clean == truth.clean
    for found, expected in zip(hidden.attacked, truth.attacked, strict=True):
        assert abs(found - expected) <= 0.05, "one input of twenty"
    assert hidden.verdict.level == "unreliable"
    for name, text in forms(hidden).items():
        assert "unreliable" in text, name


def test_a_model_without_gradients_is_attacked_by_queries_and_the_audit_says_so(net, truth, tmp_path):
    result = run(Elsewhere(net), out=tmp_path)
    assert truth.attacked[-1] <= result.attacked[-1] <= truth.attacked[-1] + 0.15
    assert "substitute" in {step["method"] for step in result.settings["steps"]}
    for step in result.settings["steps"]:
        assert step["stage"] == "certify" or get("attack", step["method"]).gradients == "none"
    assert result.settings["gradients"] == "none"
    (note,) = result.notes
    assert "no gradient" in note
    for name, text in forms(result).items():
        if "headline" not in name and name != "badge":
            assert "attacked by queries" in text, name
        assert "unreliable" in text, name
    jsonschema.validate(json.loads(result.to_json()), schema())
    assert load_audit(tmp_path).to_json() == result.to_json()
    assert any("hopskipjump" in step.command for step in next_steps(result))


def test_decisions_alone_are_enough_to_break_some(net):
    """Neither gradients, nor a part to look into, nor logits: a stand-in and a walk along the boundary are left."""
    test = hf.load_data("mnist-mini").test[:15]
    hidden = Elsewhere(net, lambda z: one_hot(z.argmax(1), 10).float())
    result = run(hidden, data=(test.x, test.y), budgets=1, budget="standard")
    broken = {record.broken_by for record in result.records if record.broken}
    assert result.attacked[-1] < result.clean - 0.3
    assert broken & {"substitute", "hopskipjump"}
    assert "square" not in broken, "random search has nothing to go by"


def test_other_threats_without_gradients(net):
    hidden = Then(net, after=lambda z: one_hot(z.argmax(1), 10).float())
    result = run(hidden, ["patch:6x6", "sparse:20", "l1:8"], n=8, budgets=1)
    for bracket in result.brackets:
        assert bracket.attacked[-1] < bracket.clean, bracket.threat
        assert bracket.verdict.level == "unreliable", bracket.threat
    assert result.headline.count("unreliable") == 3
    box = run(hidden, hf.Box(torch.full((1, 28, 28), 0.1)), n=8, budgets=1)
    assert box.attacked[-1] < box.clean
    assert "unreliable" in box.headline


def test_an_attack_that_cannot_work_is_refused_before_it_begins(net, tmp_path):
    with pytest.raises(hf.InputError, match=r"no gradient.* 'pgd' needs one.*substitute.*hopskipjump"):
        run(Elsewhere(net), attack="pgd", out=tmp_path / "run")
    with pytest.raises(hf.InputError, match=r"draws random numbers.*'square' cannot tell luck.*eot-pgd"):
        run(Then(net, NOISY["noise"]), attack="square", out=tmp_path / "run")
    with pytest.raises(hf.UnsupportedError, match="certify='crown' cannot be run: the model draws random numbers"):
        run(Then(net, NOISY["noise"]), certify="crown", out=tmp_path / "run")
    with pytest.raises(hf.InputError, match=r"inside hf\.Smoothed draws random numbers"):
        run(hf.Smoothed(Then(net, NOISY["noise"]), 0.1, n=10).eval(), "l2:0.5", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert run(Elsewhere(net), attack="square", attack_options={"queries": 50}, n=5).inputs == 5


def test_the_smoothed_bracket_of_a_model_without_gradients(net):
    result = run(Elsewhere(net), "l2:0.2", n=6, budgets=1)
    _, smoothed = result.brackets
    assert smoothed.threat == "l2:0.2, smoothed with noise 0.1"
    assert smoothed.certified[-1] > 0


NOISY = {
    "noise": lambda x: x + 0.1 * torch.randn_like(x),
    "dropout": lambda x: dropout(x, 0.2),
    "resize": lambda x: nn.functional.pad(x, (k := int(torch.randint(3, ())), 2 - k, 1, 1))[..., 1:29, 1:29],
}


@pytest.mark.parametrize("kind", NOISY)
def test_a_random_model_is_attacked_over_its_draws_and_the_audit_says_so(net, kind, tmp_path):
    model = Then(net, NOISY[kind])
    state = torch.random.get_rng_state()
    result = run(model, out=tmp_path / "one")
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    assert run(model).records == result.records, "the seed of the audit decides, not the generator's state"
    assert result.attacked[-1] < result.clean - 0.3
    assert not result.brackets[0].proved
    assert result.certified == (0.0, 0.0)
    assert {step["method"] for step in result.settings["steps"]} <= {"eot-fgsm", "eot-pgd", "cascade"}
    (reason,) = result.brackets[0].skipped
    assert reason.startswith("certify: the model draws random numbers, and a proof speaks of a function")
    assert result.settings["draws"] == 100
    for name, text in forms(result).items():
        if "headline" not in name and name != "badge":
            assert "mean softmax over 100 draws" in text, name
    jsonschema.validate(json.loads(result.to_json()), schema())
    assert load_audit(tmp_path / "one").to_json() == result.to_json()
    assert any("eot-pgd" in step.command for step in next_steps(result))


def test_examples_of_a_random_model_are_no_luck(net):
    """A thousand other draws agree: with most examples, with the clean answers, and with the class of the example."""
    result = run(Then(net, NOISY["noise"]), n=30, budgets=1)
    data, by_position = hf.load_data("mnist-mini").test, {record.position: record for record in result.records}
    prediction = mean_prediction(Then(net, NOISY["noise"]), data.x[list(by_position)], 1000, seed=77).argmax(1)
    assert sum(a == r.prediction for a, r in zip(prediction.tolist(), result.records, strict=True)) >= 29
    found = [example for example in result.examples if example.x_adv is not None]
    assert len(found) > 8
    x_adv = torch.stack([torch.tensor(example.x_adv) for example in found])
    seen = mean_prediction(Then(net, NOISY["noise"]), x_adv, 1000, seed=77).argmax(1).tolist()
    records = [by_position[example.position] for example in found]
    assert sum(a == r.prediction_adv != r.label for a, r in zip(seen, records, strict=True)) >= len(found) - 1


def test_luck_is_not_an_attack():
    """Two classes at even odds in every draw, one of them ahead in the mean: no point of the set changes that."""

    class Coin(nn.Module):
        def forward(self, x):
            side = 20 * torch.randn(len(x), 1) + 4
            return torch.cat([side, torch.zeros_like(side)], 1) + 0 * x[:, :1]

    x = torch.rand(20, 4)
    data = (x, torch.zeros(20, dtype=torch.long))
    result = hf.audit(Coin().eval(), data, "linf:0.1", attack="eot-pgd", budgets=2, progress=False)
    held = [r for r in result.records if r.prediction == r.label]
    assert len(held) >= 15
    assert sum(r.broken is not None for r in held) <= len(held) // 2
    assert all(r.broken is None or r.broken > 0 for r in held), "what is right unchanged is not broken unchanged"


def test_a_killed_audit_of_a_random_model_goes_on_to_the_same_end(net, tmp_path, monkeypatch):
    model = Then(net, NOISY["noise"])
    whole = run(model, batch_size=6, out=tmp_path / "whole")
    real, calls = tasks.run_attack, []

    def dies(*args, **options):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(tasks, "run_attack", dies)
    with pytest.raises(KeyboardInterrupt):
        run(model, batch_size=6, out=tmp_path / "killed")
    resumed = run(model, batch_size=6, out=tmp_path / "killed")
    assert len(calls) > 4
    assert resumed.records == whole.records
    assert resumed.trust == whole.trust


def test_a_random_model_without_useful_gradients_and_a_random_one_under_patches(net, monkeypatch):
    noisy = Elsewhere(net)
    noisy.ask = Then(net, NOISY["noise"]).__call__
    result = run(noisy, "linf:0.3", n=4, budgets=1)
    assert [step["method"] for step in result.settings["steps"]] == ["cascade"]
    assert result.attacked[-1] < result.clean
    assert len(result.notes) == 2
    flat = Then(net, NOISY["noise"], lambda z: one_hot(z.argmax(1), 10) + 0 * z)
    monkeypatch.setitem(autoattack.VERSIONS, "rand", [])  # averages of gradients that are zero
    result = run(flat, "linf:0.3", n=4, budgets=1)
    assert [step["method"] for step in result.settings["steps"]][-1] == "cascade"
    assert result.attacked[-1] < result.clean
    patches = run(Then(net, NOISY["noise"]), "patch:8x8", n=3, budgets=1, budget="quick")
    assert patches.attacked[-1] <= patches.clean
    assert patches.verdict.level == "suspicious"
    assert "unreliable" in patches.headline


def test_a_model_with_useful_gradients_is_audited_as_before(net):
    result = run(net)
    assert not {"notes", "draws", "gradients"} & set(result.settings)
    assert result.notes == ()
    assert result.verdict.level == "reliable"
    assert [step["method"] for step in result.settings["steps"] if step["stage"] == "attack"][-1] == "cascade"


def test_gradients_in_bfloat16_are_reported_also_after_a_resume(net, tmp_path, monkeypatch):
    attack = tasks.run_attack
    data = hf.load_data("mnist-mini").test
    task = (net, (data.x[:6], data.y[:6]), hf.Linf(0.1))
    how = {"budget": "quick", "budgets": 1, "certify": None, "progress": False}
    plain = hf.audit(*task, **how)
    assert "precision" not in plain.settings
    assert plain.notes == ()
    monkeypatch.setattr(tasks, "run_attack", lambda *a, **k: replace(attack(*a, **k), precision="bfloat16"))
    rough = hf.audit(*task, **how, out=tmp_path / "run")
    monkeypatch.setattr(tasks, "run_attack", None)  # everything is in the store
    again = hf.audit(*task, **how, out=tmp_path / "run")
    for result in (rough, again, load_audit(tmp_path / "run")):
        assert result.settings["precision"] == "bfloat16"
        (note,) = result.notes
        assert "bfloat16" in note
        assert note in model_card(result)
        jsonschema.validate(json.loads(result.to_json()), schema())
        assert result.attacked == plain.attacked
