"""What an audit runs within its budget, several threats at once, groups, and what others see of it while it goes."""

import json
import time
from importlib import import_module
from itertools import pairwise

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.audits.plan import PLANS, Plan, Step, make_plan
from holdfast.audits.schedule import hidden_values

tasks = import_module("holdfast.audits.task")


@pytest.fixture(scope="module")
def task():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(25, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    x = torch.rand(24, 1, 5, 5, generator=generator)
    y = model(x).argmax(1)
    y[::6] = (y[::6] + 1) % 3
    return model, x, y


THREATS = ["linf:0.05", "l2:0.2", "patch:1x2", "sparse:2"]


def test_several_threats_make_one_bracket_each(task, tmp_path):
    model, x, y = task
    result = hf.audit(model, (x, y), THREATS, budgets=2, budget="quick", out=tmp_path / "run", progress=False)
    assert [bracket.threat for bracket in result.brackets] == THREATS
    assert len({bracket.clean for bracket in result.brackets}) == 1
    for bracket in result.brackets:
        assert bracket.proved
        assert bracket.skipped == ()
        for level in bracket.levels:
            assert level.certified <= level.attacked
        for record in bracket.records:
            assert record.broken is None or (record.certified or 0.0) <= record.broken
    assert any(bracket.certified[0] > 0 for bracket in result.brackets)
    assert any(bracket.attacked[-1] < bracket.clean for bracket in result.brackets)
    assert result.headline.count(" when ") == len(THREATS)
    alone = hf.audit(model, (x, y), "l2:0.2", budgets=2, budget="quick", progress=False)
    assert alone.records == result.brackets[1].records
    again = hf.audit(model, (x, y), THREATS, budgets=2, budget="quick", out=tmp_path / "run", progress=False)
    assert again.to_json() == result.to_json()
    loaded = import_module("holdfast.audits").load_audit(tmp_path / "run")
    assert loaded.to_json() == result.to_json()


def test_standard_is_at_least_as_tight_as_quick_and_thorough_as_standard(task):
    model, x, y = task
    found = [hf.audit(model, (x, y), "linf:0.08", budgets=2, budget=b, progress=False) for b in PLANS]
    for looser, tighter in pairwise(found):
        for a, b in zip(looser.levels, tighter.levels, strict=True):
            assert a.certified <= b.certified <= b.attacked <= a.attacked
    exact = found[-1].levels[-1]
    assert exact.certified == exact.attacked, "mixed-integer programming decides a network of twelve neurons"
    assert found[0].levels[-1].certified < exact.certified, "choose a task that the cheap bound does not decide"


def test_costly_steps_see_only_what_is_undecided(task, monkeypatch):
    model, x, y = task
    seen = {}
    real = tasks.run_attack

    def spy(model, x, y, threat, method, *, index, **options):
        seen.setdefault(method, set()).update(index.tolist())
        return real(model, x, y, threat, method, index=index, **options)

    monkeypatch.setattr(tasks, "run_attack", spy)
    result = hf.audit(model, (x, y), "linf:0.12", budgets=1, progress=False)
    right = {r.position for r in result.records if r.prediction == r.label}
    proved = {r.position for r in result.records if r.certified == 0.12 and r.certified_by in ("ibp", "crown-ibp")}
    assert seen["pgd"] == right
    assert proved
    assert proved & seen["cascade"] == set()


def test_a_time_limit_stops_between_batches_and_says_so(task, monkeypatch):
    model, x, y = task
    real = tasks.run_certify

    def slow(*args, **options):
        time.sleep(0.15)
        return real(*args, **options)

    monkeypatch.setattr(tasks, "run_certify", slow)
    start = time.perf_counter()
    result = hf.audit(model, (x, y), ["linf:0.05", "l2:0.2"], budgets=2, budget=0.6, batch_size=2, progress=False)
    assert time.perf_counter() - start < 8
    assert result.settings["plan"] == "0.6"
    for bracket in result.brackets:
        assert any("no time for" in text for text in bracket.skipped)
        assert bracket.inputs == len(x)
        for level in bracket.levels:
            assert level.certified <= level.attacked
    assert "no time for" in result.to_html()


def test_plans_go_from_cheap_to_costly_and_can_be_replaced():
    assert [step.stage for step in PLANS["quick"].steps if step.fits(hf.Linf(0.1))] == ["certify", "attack", "attack"]
    for name, plan in PLANS.items():
        assert plan.name == name
        for threat in (hf.Linf(0.1), hf.L2(0.1), hf.L1(0.1), hf.Patch(2, 2), hf.Sparse(2)):
            stages = [step.stage for step in plan.steps if step.fits(threat)]
            assert stages[0] == "certify"
            assert "attack" in stages
    assert [s.method for s in make_plan("standard", certify=None).steps if s.fits(hf.L2(1.0))] == ["pgd", "cascade"]
    named = make_plan("standard", attack="fgsm")
    assert [s.method for s in named.steps if s.fits(hf.L2(1.0))] == ["auto", "fgsm", "auto", "beta-crown"]
    assert make_plan("quick", attack_options={"steps": 3}).steps[-1] == Step("attack", "cascade", {"steps": 3})
    assert make_plan("quick", certify="auto", certify_options={"tight": True}).steps[0].options == {"tight": True}
    assert make_plan(90).seconds == make_plan("90s").seconds == make_plan("1.5m").seconds == 90.0
    attacks = Plan("p", (Step("attack", "fgsm"), Step("attack", "pgd")), finer=1)
    assert [attacks.tests(number, hf.Linf(0.1)) for number in (1, 2)] == [True, False]


def test_linear_bounds_are_left_out_where_the_network_is_too_large(task, monkeypatch):
    model, x, y = task
    assert hidden_values(model, x[:1]) == 12
    monkeypatch.setattr(import_module("holdfast.audits.schedule"), "hidden_values", lambda model, x: 100_001)
    result = hf.audit(model, (x, y), "linf:0.08", budgets=1, progress=False)
    text, *others = result.brackets[0].skipped
    assert text.startswith("certify auto: the network has 100,001 hidden values, and linear bounds pay up to 100,000")
    assert [other.partition(",")[0] for other in others] == ["certify beta-crown: the network has 100"]
    assert "a search can end up to 20,000; `certify='beta-crown'` tries it all the same" in others[0]
    assert result.levels[-1].certified > 0, "what costs less is still run"
    step = Step("certify", "auto", square=True)
    assert [step.at_once(hidden) for hidden in (0, 5_000, 10_000, 500_000)] == [100, 100, 25, 1]
    assert Step("certify", "milp", batch=4, square=True).at_once(12) == 4
    assert Step("certify", "auto").at_once(10**6) is None


def test_groups_and_classes_split_the_bracket(task, tmp_path):
    model, x, y = task
    colours = ["red" if i % 3 else "=blue" for i in range(30)]
    result = hf.audit(
        model, (x, y), "linf:0.05", budgets=2, budget="quick", groups={"colour": colours}, out=tmp_path, progress=False
    )
    groups = result.brackets[0].by(result.groups["colour"])
    assert [group.name for group in groups] == ["=blue", "red"]
    assert sum(group.largest.inputs for group in groups) == len(x)
    for end in ("certified", "attacked"):
        assert sum(getattr(group.largest, end) for group in groups) == getattr(result.levels[-1], end)
    classes = result.brackets[0].by([str(record.label) for record in result.records])
    assert sum(group.clean.attacked for group in classes) == result.levels[0].attacked
    assert "red" in (tmp_path / "report.html").read_text()
    assert "\n=blue" not in (tmp_path / "results.csv").read_text()


def test_others_can_watch_a_run(task, tmp_path, monkeypatch):
    model, x, y = task
    monkeypatch.setattr(import_module("holdfast.audits.live"), "_EVERY", 0.0)
    seen, real = [], tasks.run_attack

    def spy(*args, **options):
        path = tmp_path / "run" / "progress.json"
        seen.append(json.loads(path.read_text()))
        return real(*args, **options)

    monkeypatch.setattr(tasks, "run_attack", spy)
    result = hf.audit(
        *(model, (x, y), THREATS[:2]), budgets=2, budget="quick", batch_size=8, out=tmp_path / "run", progress=False
    )
    assert {one["state"] for one in seen} == {"running"}
    assert all(0 <= one["done"] <= one["total"] for one in seen)
    assert [one["threat"] for one in seen[-1]["brackets"]] == THREATS[:2]
    end = json.loads((tmp_path / "run" / "progress.json").read_text())
    assert end["state"] == "finished"
    assert end["brackets"][0]["attacked"] == result.levels[-1].attacked
    assert end["brackets"][0]["certified"] == result.levels[-1].certified

    def fail(*args, **options):
        raise RuntimeError("no more")

    monkeypatch.setattr(tasks, "run_attack", fail)
    with pytest.raises(RuntimeError):
        hf.audit(model, (x, y), "linf:0.05", budgets=2, budget="quick", out=tmp_path / "other", progress=False)
    end = json.loads((tmp_path / "other" / "progress.json").read_text())
    assert (end["state"], end["error"]) == ("failed", "no more")
