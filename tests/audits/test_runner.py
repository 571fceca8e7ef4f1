"""The bracket itself: against closed forms, and against what each stage was given to do."""

import sys
from dataclasses import replace
from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.audits import audit as full_audit
from holdfast.audits import load_audit
from holdfast.data import load_data
from holdfast.data.draw import sample
from holdfast.errors import OutOfTime
from holdfast.random import Noise
from holdfast.results import AttackResult, CertifyResult

tasks = import_module("holdfast.audits.task")
evidence = import_module("holdfast.audits.evidence")


def audit(model, data, threat, *, attack="pgd", attack_options=None, **options):
    """With an attack that is short but enough for these models."""
    quick = {"pgd": {"steps": 8, "restarts": 4, "loss": "margin"}}
    return full_audit(model, data, threat, attack=attack, attack_options=attack_options or quick.get(attack), **options)


def linear(inputs=6, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(inputs, classes)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layer.eval()


def points(model, count=40, shape=(6,), seed=1):
    """Inputs with the labels of the model, a fifth of them made wrong."""
    x = torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))
    y = model(x).argmax(1)
    y[::5] = (y[::5] + 1) % model(x).shape[1]
    return x, y


def worst_margin(model, x, y, eps):
    """Closed form for a linear model: the worst corner of the clipped box, class by class."""
    low, high = (x - eps).clamp(min=0).double(), (x + eps).clamp(max=1).double()
    weight, bias = model.weight.detach().double(), model.bias.detach().double()
    margins = []
    for i, label in enumerate(y.tolist()):
        others = [k for k in range(len(bias)) if k != label]
        d = weight[label] - weight[others]
        worst = (d.clamp(min=0) * low[i] + d.clamp(max=0) * high[i]).sum(1) + bias[label] - bias[others]
        margins.append(worst.min())
    return torch.stack(margins)


@pytest.mark.parametrize("seed", range(4))
def test_bracket_of_a_linear_model_is_the_truth(seed):
    model = linear(seed=seed)
    x, y = points(model, seed=seed + 10)
    threat = hf.Linf(0.3)
    result = audit(model, (x, y), threat, budgets=4)
    assert result.budgets == tuple(t.eps for t in threat.budgets(4))
    for level in result.levels:
        margin = worst_margin(model, x, y, level.budget)
        assert bool((margin.abs() > 1e-5).all()), "choose a seed without a tie"
        truth = int((margin > 0).sum())
        assert (level.certified, level.attacked) == (truth, truth)
    assert result.headline.startswith("Exactly ")


def test_bracket_of_a_network_is_ordered_and_falls(tmp_path):
    torch.manual_seed(0)
    data = load_data("mnist-mini")
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 20), nn.ReLU(), nn.Linear(20, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.train.x[:200]), data.train.y[:200]).backward()
        optimizer.step()
    model.eval()
    result = audit(model, "mnist-mini", hf.Linf(0.02), n=40, out=tmp_path, name="small", budgets=4)
    assert result.inputs == 40
    taken = sample("mnist-mini", 40)
    assert [record.position for record in result.records] == taken.index.tolist()
    assert (result.total, result.drawn) == (2000, "40 of 2,000, drawn by seed 0 with the classes balanced")
    assert result.levels[0].attacked == int((model(taken.x).argmax(1) == taken.y).sum())
    for level in result.levels:
        assert level.certified <= level.attacked
    for smaller, larger in pairwise(result.levels):
        assert smaller.certified >= larger.certified
        assert smaller.attacked >= larger.attacked
    assert result.certified[0] > result.certified[-1]
    assert result.attacked[-1] < result.clean
    for record in result.records:
        assert record.broken is None or record.certified is None or record.certified < record.broken
    broken = [example for example in result.examples if example.x_adv is not None]
    assert len(broken) == sum(bool(record.broken) for record in result.records)
    assert len(result.examples) == 40
    by_position = {record.position: record for record in result.records}
    for example in broken:
        record = by_position[example.position]
        assert np.array_equal(example.x, data.test.x[example.position].numpy())
        assert np.abs(example.x_adv - example.x).max() <= record.broken + 1e-6
        after = model(torch.from_numpy(example.x_adv.copy())[None]).argmax().item()
        assert after == record.prediction_adv != record.label
    assert result.data == "mnist-mini (test)"
    assert result.classes == data.classes
    assert {path.name for path in tmp_path.iterdir()} == {
        *("audit.sqlite", "audit.json", "report.html", "examples-0.npz", "progress.json"),
        *("results.csv", "badge.svg", "model-card.md"),
    }


def test_each_step_gets_only_what_is_left(monkeypatch):
    """Certificates halve the range of budgets; the attack begins at the largest and goes on below what it broke."""
    model = linear()
    x, y = points(model)
    given = {"attack": [], "certify": []}
    for kind in given:
        name, real = f"run_{kind}", getattr(tasks, f"run_{kind}")

        def spy(model, x, y, threat, *args, kind=kind, real=real, **kwargs):
            given[kind].append((threat.eps, len(x)))
            return real(model, x, y, threat, *args, **kwargs)

        monkeypatch.setattr(tasks, name, spy)
    result = audit(model, (x, y), hf.Linf(0.3), budgets=3, budget="quick", certify="ibp")
    right = result.levels[0].attacked
    low, middle, high = result.budgets
    certified = [level.certified for level in result.levels]
    halves = [(low, right - certified[2]), (high, certified[2])]
    assert given["certify"] == [(middle, right), *(half for half in halves if half[1])]
    (first, count), *others = given["attack"]
    assert (first, count) == (high, right), "the largest budget first, certified or not"
    assert others, "choose a seed where inputs break"
    # The largest budget that is proved is attacked too, and nothing below it.
    for eps, count in others:
        open_ = [r for r in result.records if r.broken and r.broken <= high and (r.certified or 0.0) <= eps]
        assert 0 < count <= len(open_)


def test_sizes_are_those_of_the_smallest_example_found():
    """Never below the exact radius of a linear model, which a closed form gives, and most often close to it."""
    model = linear()
    x, y = points(model)
    result = audit(model, (x, y), hf.Linf(0.3), budgets=6)
    broken = [r for r in result.records if r.broken]
    assert len(broken) > 5
    ratios = []
    for record in broken:
        one = x[record.position : record.position + 1], y[record.position : record.position + 1]
        exact, above = 0.0, 0.3
        for _ in range(12):
            middle = (exact + above) / 2
            exact, above = (middle, above) if worst_margin(model, *one, middle) > 0 else (exact, middle)
        assert record.broken > exact - 1e-6
        assert record.certified <= record.broken
        assert record.gap == record.broken - record.certified
        ratios.append(exact / record.broken)
    assert np.median(ratios) > 0.8


def test_batch_size_does_not_matter():
    model = linear()
    data = points(model)
    assert audit(model, data, hf.Linf(0.3), batch_size=7).records == audit(model, data, hf.Linf(0.3)).records


@pytest.mark.parametrize("out", [True, False])
def test_broken_certificate_stops_the_audit_and_keeps_the_evidence(tmp_path, monkeypatch, out):
    model = linear()
    x, y = points(model)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()

    def lie(model, x, y, threat, method, **options):
        return CertifyResult(torch.ones(len(x), dtype=torch.bool), torch.ones(len(x)), by=("oracle",) * len(x))

    monkeypatch.setattr(tasks, "run_certify", lie)
    folder = tmp_path / "run" if out else None
    for _ in range(2):  # a second try must not get past it
        with pytest.raises(hf.SoundnessError) as caught:
            audit(model, (x, y), hf.Linf(0.3), budgets=2, out=folder)
    message = str(caught.value)
    assert "is certified by 'oracle' up to 0.3 in linf" in message
    assert "broke it with an example of size 0." in message
    assert "'pgd'" in message
    where = (tmp_path / "run") if out else (tmp_path / "temporary")
    evidence = next(where.rglob("soundness-*.npz"))
    assert str(evidence.name) in message
    position = int(evidence.stem.split("-")[1])
    with np.load(evidence) as arrays:
        np.testing.assert_array_equal(arrays["x"], x[position].numpy())
        broken = model(torch.from_numpy(arrays["x_adv"])[None]).argmax().item()
        assert broken != int(arrays["label"]) == int(y[position])
    assert not (tmp_path / "run" / "audit.json").exists()


def test_evidence_that_cannot_be_written_is_still_an_error(tmp_path, monkeypatch):
    model = linear()
    monkeypatch.setattr(
        tasks,
        "run_certify",
        lambda model, x, y, *args, **options: CertifyResult(torch.ones(len(x), dtype=torch.bool), torch.ones(len(x))),
    )

    def full(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr("holdfast.audits.job.save_arrays", full)
    with pytest.raises(hf.SoundnessError, match=r"by 'auto'.*no space left"):
        audit(model, points(model), hf.Linf(0.3), out=tmp_path)


def test_indicators_are_about_the_attack_of_the_audit(monkeypatch):
    """They are given the first inputs that are classified right, the largest threat, and what broke at any budget."""
    model = linear()
    x, y = points(model)
    monkeypatch.setattr(evidence, "PROBED", 20)
    given, real = [], evidence.probe

    def spy(model, x, y, threat, result, *, seed):
        given.append((x, y, threat, result.success, seed))
        return real(model, x, y, threat, result, seed=seed)

    monkeypatch.setattr(evidence, "probe", spy)
    result = audit(model, (x, y), hf.Linf(0.3), budgets=3, seed=5)
    ((x_probed, y_probed, threat, broken, seed),) = given
    right = [r for r in result.records if r.prediction == r.label][:20]
    positions = [r.position for r in right]
    assert torch.equal(x_probed, x[positions])
    assert torch.equal(y_probed, y[positions])
    assert (threat, seed) == (hf.Linf(0.3), 5)
    assert broken.tolist() == [r.broken_by == "pgd" for r in right]
    assert 0 < int(broken.sum()) < 20
    assert len({r.broken for r in right}) > 2, "choose a seed where inputs break at several budgets"
    assert [i.name for i in result.trust][:2] == ["loss-did-not-rise", "black-box-beats-white-box"]
    assert "trust" in result.seconds


def test_an_attack_that_finds_nothing_is_unreliable_and_what_the_probes_break_counts(tmp_path):
    model = nn.Sequential(nn.Flatten(), linear(16)).eval()
    x, y = points(model, shape=(1, 4, 4))
    how = {"budgets": 2, "attack": "fake-any", "certify": None, "out": tmp_path}
    result = audit(model, (x, y), hf.Linf(0.3), **how)
    broken = [r for r in result.records if r.broken]
    assert {r.broken_by for r in broken} == {"probe"}
    assert result.attacked[-1] == pytest.approx(result.clean - len(broken) / len(x))
    assert len(broken) > 5
    for example in (e for e in result.examples if e.x_adv is not None):
        record = result.records[example.position]
        assert np.abs(example.x_adv - example.x).max() <= record.broken + 1e-6 <= 0.3 + 1e-5
        after = int(model(torch.tensor(example.x_adv)[None]).argmax())
        assert after == record.prediction_adv != record.label
    assert result.verdict.level == "unreliable"
    assert not result.reliable
    assert result.doubt.startswith("the attack is unreliable (fired: ")
    assert audit(model, (x, y), hf.Linf(0.3), **how).records == result.records
    assert "black-box-beats-white-box" in result.verdict.reason
    assert "The attack is <strong>unreliable</strong>" in result.to_html()


def test_without_a_certificate():
    model = linear()
    result = audit(model, points(model), hf.Linf(0.3), certify=None)
    assert result.certified == (0.0,) * 5
    assert result.headline.startswith("At most ")
    assert "no certificate was run" in result.to_html()
    assert not any(step.startswith("certify") for step in result.seconds)


class Odd(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x).abs()[:, :3]


def test_a_model_that_no_certificate_fits_is_attacked_and_the_page_says_so():
    x = torch.rand(12, 6, generator=torch.Generator().manual_seed(0))
    result = audit(Odd().eval(), (x, Odd()(x).argmax(1)), hf.Linf(0.2), budgets=2)
    assert result.certified == (0.0, 0.0)
    assert result.headline.startswith("At most ")
    assert any(text.startswith("certify auto: it does not fit this model") for text in result.brackets[0].skipped)
    assert "it does not fit this model" in result.to_html()


def test_where_nothing_else_fits_the_smoothed_model_is_audited_too(tmp_path):
    x = torch.rand(8, 6, generator=torch.Generator().manual_seed(0))
    task = (Odd().eval(), (x, Odd()(x).argmax(1)), [hf.L2(0.2), hf.Linf(0.1), hf.L2(0.3)])
    options = {"budgets": 2, "budget": "quick", "out": tmp_path, "progress": False}
    result = full_audit(*task, **options)
    plain, _, _, smoothed, larger = result.brackets
    assert smoothed.threat == "l2:0.2, smoothed with noise 0.1"
    assert larger.threat == "l2:0.3, smoothed with noise 0.15"
    assert not plain.proved
    assert smoothed.proved
    assert smoothed.certified[0] > 0
    assert all(low <= high for low, high in zip(smoothed.certified, smoothed.attacked, strict=True))
    assert result.settings["alpha"] == 0.001
    assert "smoothed with noise 0.1" in (tmp_path / "report.html").read_text()
    assert load_audit(tmp_path).to_json() == result.to_json()
    assert full_audit(*task, **options).brackets[3].records == smoothed.records


def test_a_certificate_that_was_asked_for_must_fit():
    x = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
    with pytest.raises(hf.UnsupportedError):
        audit(Odd().eval(), (x, Odd()(x).argmax(1)), hf.Linf(0.1), certify="crown")
    with pytest.raises(hf.UnsupportedError, match="certify=None"):
        audit(linear(), points(linear()), hf.Linf(0.1), attack="fake-any", certify="fake-none")


@pytest.fixture(autouse=True)
def fake_methods(monkeypatch):
    """Two methods for the tests above: an attack for every threat that finds nothing, a certificate for none."""
    registry = import_module("holdfast.registry")
    for kind, base, name, threats in (
        ("attack", "pgd", "fake-any", ("linf", "box")),
        ("certify", "ibp", "fake-none", ()),
    ):
        table = registry._METHODS[kind]

        def nothing(model, x, y, threat, *, noise: Noise | None = None):
            zero = torch.zeros(len(x), dtype=torch.int64)
            return AttackResult(x, zero.bool(), ("",) * len(x), zero, zero)

        monkeypatch.setitem(table, name, replace(table[base], name=name, threats=threats, function=nothing))


def test_box_budgets_are_shares_of_the_box():
    model = linear()
    x, y = points(model)
    result = audit(model, (x, y), hf.Box(torch.full((6,), 0.2)), budgets=4, attack="fake-any")
    assert result.budgets == (0.25, 0.5, 0.75, 1.0)
    assert result.trust == ()
    assert result.verdict is None
    for level in result.levels:
        assert level.certified == int((worst_margin(model, x, y, 0.2 * level.budget) > 0).sum())


def test_other_box_is_another_run(tmp_path):
    model = linear()
    radius = torch.full((6,), 0.2)
    audit(model, points(model), hf.Box(radius), attack="fake-any", out=tmp_path)
    middle = torch.tensor([0.2, 0.2, 0.2, 0.1, 0.2, 0.2]).minimum(radius)
    audit(model, points(model), hf.Box(middle), attack="fake-any", out=tmp_path / "other")
    swapped = middle.flip(0)
    assert str(hf.Box(swapped)) == str(hf.Box(middle))
    with pytest.raises(hf.InputError, match="threats: was"):
        audit(model, points(model), hf.Box(swapped), attack="fake-any", out=tmp_path / "other")


def test_double_precision_model_gets_double_inputs():
    model = linear().double()
    x, y = points(linear())
    result = audit(model, (x, y), hf.Linf(0.3), budgets=1)
    assert result.examples[0].x_adv.dtype == np.float64


def test_one_output_is_refused_with_a_way_out():
    with pytest.raises(hf.InputError, match="one output"):
        audit(linear(classes=1), (torch.rand(3, 6), torch.zeros(3, dtype=torch.long)), hf.Linf(0.5), budgets=1)


def test_n_above_the_data_takes_all_and_train_split():
    data = load_data("two-moons")
    model = linear(2, 2)
    assert audit(model, data, hf.Linf(0.01), n=10**9, budgets=1, certify=None).inputs == len(data.test)
    result = audit(model, data, hf.Linf(0.01), n=5, budgets=1, split="train")
    assert [r.label for r in result.records] == sample(data, 5, split="train").y.tolist()
    assert result.data == "two-moons (train)"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"budgets": 0}, "budgets must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"attack": "pdg"}, "Did you mean 'pgd'"),
        ({"certify": "idp"}, "Did you mean 'ibp'"),
        ({"attack_options": {"stepz": 1}}, "no option 'stepz'"),
        ({"attack_options": {"seed": 1}}, "may not hold 'seed'"),
        ({"certify_options": {"sound": False}}, "may not hold 'sound'"),
        ({"budget": "fast"}, "quick, standard, thorough, or a time"),
        ({"budget": "0m"}, "a time above zero"),
        ({"budget": -1}, "a time above zero"),
    ],
)
def test_bad_options_are_refused_before_any_work(tmp_path, options, complaint):
    model = linear()
    with pytest.raises(hf.InputError, match=complaint):
        audit(model, points(model), hf.Linf(0.1), out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_bad_inputs_are_refused():
    model = linear()
    x, y = points(model)
    threat = hf.Linf(0.1)
    with pytest.raises(hf.InputError, match="training mode"):
        audit(linear().train(), (x, y), threat)
    with pytest.raises(hf.InputError, match="threat must be"):
        audit(model, (x, y), 0.1)
    with pytest.raises(hf.InputError, match="at least one threat"):
        audit(model, (x, y), [])
    with pytest.raises(hf.InputError, match=r"'linf:0\.1' is given twice"):
        audit(model, (x, y), ["linf:0.1", hf.Linf(0.1)])
    with pytest.raises(hf.InputError, match="'colour' has 3 values for 40"):
        audit(model, (x, y), threat, groups={"colour": "abc"})
    with pytest.raises(hf.InputError, match="goes with engine='ray'"):
        audit(model, (x, y), threat, address="here")
    with pytest.raises(hf.InputError, match="'local' or 'ray', got 'spark'"):
        audit(model, (x, y), threat, engine="spark")
    with pytest.raises(hf.InputError, match="budget above zero"):
        audit(model, (x, y), hf.Linf(0.0))
    with pytest.raises(hf.InputError, match="input 33 has values"):
        audit(model, (torch.where(torch.arange(40)[:, None] == 33, x + 2, x), y), threat, batch_size=10)
    with pytest.raises(hf.InputError, match="label 3 of input 33"):
        audit(model, (x, torch.where(torch.arange(40) == 33, 3, y)), threat, batch_size=10)
    with pytest.raises(hf.InputError, match="uint8 in 0 to 255 or float in"):
        audit(model, (x.long(), y), threat)
    with pytest.raises(hf.InputError, match=r"a pair \(x, y\) of tensors or arrays.*got \(list, Tensor\)"):
        audit(model, (x.tolist(), y), threat)
    with pytest.raises(hf.InputError, match="unknown split 'validation'"):
        audit(model, load_data("two-moons"), threat, split="validation")


def test_model_that_fails_later_names_the_batch():
    class Sometimes(nn.Module):
        def forward(self, x):
            return torch.cat([1 / (x[:, :1] != 0), x], 1)

    x = torch.rand(30, 3) + 0.0
    x[25, 0] = 0
    with pytest.raises(hf.InputError, match=r"starts at input 20: .* input 5"):
        audit(Sometimes().eval(), (x, torch.zeros(30, dtype=torch.long)), hf.Linf(0.1), batch_size=10)


def test_bars_appear_on_a_terminal_only(monkeypatch, capsys):
    model = linear()
    audit(model, points(model), hf.Linf(0.1), budgets=1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    audit(model, points(model), hf.Linf(0.1), budgets=1)
    shown = capsys.readouterr().err
    assert "certify auto linf:0.1" in shown
    assert "attack pgd linf:0.1" in shown
    audit(model, points(model), hf.Linf(0.1), budgets=1, progress=False)
    assert capsys.readouterr().err == ""


def test_examples_say_what_decides_between_them_and_their_inputs(tmp_path):
    model = linear()
    x, y = points(model)
    result = audit(model, (x, y), hf.Linf(0.3), n=40, budgets=1, out=tmp_path / "run")
    broken = [example for example in result.examples if example.x_adv is not None]
    assert len(broken) > 3
    for example in broken:
        before, after = (model(torch.tensor(one)[None])[0].detach() for one in (example.x, example.x_adv))
        label = int(y[example.position])
        others = [k for k in range(3) if k != label]
        change = (before[label] - before[others].max()) - (after[label] - after[others].max())
        # The margin is the least of two linear functions: 50 points on the path leave a small error.
        assert float(example.attribution.sum()) == pytest.approx(float(change), abs=0.1)
    again = {example.position: example for example in load_audit(tmp_path / "run").examples}
    for example in broken:
        assert np.array_equal(again[example.position].attribution, example.attribution)


class Stairs(nn.Module):
    def forward(self, x):
        return torch.stack([x.detach().sum(1), 3 - x.detach().sum(1)], 1)


def test_examples_for_which_the_time_ends_on_the_way_come_without_a_reason(monkeypatch):
    """The time ends in the middle of a quadrature, which looks at the clock at every chunk."""
    model = linear()
    monkeypatch.setattr("holdfast.explanations.core.paths.check_time", late)
    result = audit(model, points(model), hf.Linf(0.3), budgets=1, certify=None)
    assert any(example.x_adv is not None for example in result.examples)
    assert all(example.attribution is None for example in result.examples)


def late():
    raise OutOfTime("the time is over")


def test_a_model_without_gradients_has_examples_without_a_reason():
    x = torch.rand(30, 6, generator=torch.Generator().manual_seed(0))
    y = Stairs()(x).argmax(1)
    result = audit(
        Stairs().eval(),
        (x, y),
        hf.Linf(0.3),
        attack="square",
        attack_options={"queries": 50},
        certify=None,
        n=30,
        budgets=1,
    )
    assert any(example.x_adv is not None for example in result.examples)
    assert all(example.attribution is None for example in result.examples)
