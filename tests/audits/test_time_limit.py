"""An audit keeps its time limit, and more time never gives a wider bracket; by a clock that the test turns."""

import itertools
from importlib import import_module

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.core.nature import Nature
from holdfast.audits.plan import PLANS, make_plan
from holdfast.utils import clock

NATURES = [Nature(), Nature(gradients="useless"), Nature(gradients="none"), Nature(random=True)]
LIMITS = (3.0, 6.0, 12.0, 40.0)


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


def ticking(step=0.02):
    """A clock that goes on by `step` seconds with each look at it: time passes with work, whatever the machine."""
    count = itertools.count()
    return clock.timed_by(lambda: step * next(count))


def run(task, budget, **options):
    """An audit and the time that it took."""
    model, *data = task
    with ticking():
        began = clock.now()
        result = hf.audit(
            model, tuple(data), ["linf:0.12", "l2:0.5"], budget=budget, budgets=2, progress=False, **options
        )
        return result, clock.now() - began


@pytest.fixture(scope="module")
def found(task):
    return {budget: run(task, budget) for budget in ("quick", *LIMITS)}


@pytest.mark.parametrize("limit", LIMITS)
def test_the_time_limit_is_kept(found, limit):
    assert found[limit][1] <= 1.1 * limit + 1


def test_more_time_gives_a_bracket_inside_the_one_of_less_time(found):
    for less, more in itertools.pairwise(found[limit][0] for limit in LIMITS):
        for wide, narrow in zip(less.brackets, more.brackets, strict=True):
            for a, b in zip(wide.levels, narrow.levels, strict=True):
                assert a.certified <= b.certified <= b.attacked <= a.attacked
            for a, b in zip(wide.records, narrow.records, strict=True):
                assert (a.certified or 0) <= (b.certified or 0)
                assert a.broken is None or b.broken <= a.broken + 1e-9
    first, last = (found[limit][0].brackets[0].levels[-1] for limit in (LIMITS[0], LIMITS[-1]))
    assert last.attacked - last.certified < first.attacked - first.certified, "choose limits that make a difference"


def test_a_limit_that_quick_fits_into_is_never_above_quick(found):
    quick, seconds = found["quick"]
    assert seconds < LIMITS[-1], "choose a limit that leaves time"
    for a, b in zip(quick.brackets, found[LIMITS[-1]][0].brackets, strict=True):
        for level, other in zip(a.levels, b.levels, strict=True):
            assert level.certified <= other.certified <= other.attacked <= level.attacked


def test_what_there_was_no_time_for_is_said(found):
    short, whole = found[LIMITS[0]][0], found[LIMITS[-1]][0]
    for bracket in short.brackets:
        assert any("no time for" in text for text in bracket.skipped)
        assert bracket.inputs == 24
        assert len(set(bracket.skipped)) == len(bracket.skipped), "once, however many steps a method has"
    assert len(whole.brackets[0].skipped) < len(short.brackets[0].skipped)


def test_a_limit_too_short_for_a_batch_gives_an_honest_answer(task):
    result, seconds = run(task, 0.8)
    assert seconds <= 1.1 * 0.8 + 1
    for bracket in result.brackets:
        assert not bracket.proved, "no certificate came to anything"
        assert bracket.headline.startswith("At most ")
        assert "no certificate was run" in bracket.headline
        assert "probes of the attack: no time to tell whether it can be trusted" in bracket.skipped
    assert result.verdict is None


def test_the_probes_get_the_time_that_the_steps_left(task, monkeypatch):
    evidence, given = import_module("holdfast.audits.evidence"), []
    monkeypatch.setattr(evidence, "trust", lambda job, side, seconds: given.append(seconds) or ())
    run(task, 30, attack="fgsm", certify=None)
    assert len(given) == 2
    assert min(given) > 0.6 * 30 / 2, "one step takes a few seconds; a tenth of the limit was all that they got before"


def test_a_limit_too_short_to_classify_the_inputs_is_refused(task):
    with pytest.raises(
        hf.InputError, match=r"too short to look at each input once: 0 of 24 .* Give more time or fewer"
    ):
        run(task, 0.01)


@pytest.mark.parametrize(("stage", "method"), [("attack", "pgd"), ("certify", "auto")])
def test_a_task_that_was_cut_short_says_only_what_it_settled(task, stage, method):
    """An input that an attack had no time to break is not one that held, and one without a proof yet may get one."""
    model, x, y = task
    right = (model(x).argmax(1) == y).nonzero()[:, 0]
    tasks = import_module("holdfast.audits.task")
    counts = []
    for seconds in (0.1, 0.2, 0.5, 1000.0):
        one = tasks.Task(stage, method, {}, 0, hf.Linf(0.12), right, x[right], y[right], size=0.12, seconds=seconds)
        with ticking():
            found = tasks.work(model, one)
        counts.append(len(found.outcomes))
        if seconds < 1000:
            assert all(one.broke(stage) or (stage == "certify" and one.passed) for one in found.outcomes)
    assert counts[-1] == len(right)
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


@pytest.mark.parametrize("nature", NATURES)
def test_a_plan_with_a_limit_begins_with_the_steps_of_quick_attacks_first(nature):
    plans = [make_plan(budget, nature=nature) for budget in ("5s", "10m", 3600)]
    quick = make_plan("quick", nature=nature).steps
    assert plans[0].steps == plans[1].steps == plans[2].steps
    begin = plans[0].steps[: len(quick)]
    assert sorted(map(repr, begin)) == sorted(map(repr, quick))
    assert begin[0].stage == "attack"
    stages = [step.stage for step in begin]
    assert stages == sorted(stages), "attacks before certificates"
    rest = plans[0].steps[len(quick) :]
    thorough = make_plan("thorough", nature=nature).steps
    longest = [step for step in rest if step.options.get("time_limit") == 600.0]
    assert [step.method for step in longest] == ([] if nature.random else ["beta-crown"])
    assert sorted(map(repr, rest)) == sorted(repr(step) for step in (*thorough, *longest) if step not in quick)
    after = [step for i, step in enumerate(rest) if "autoattack" in [one.method for one in rest[:i]]]
    assert all(step.complete and step.options["time_limit"] > 5.0 for step in after), "only proofs that may not end"
    assert rest[-1:] == tuple(longest) or nature.random


def test_a_run_that_an_earlier_version_began_keeps_its_order():
    assert make_plan("10m", earlier=True).steps == PLANS["thorough"].steps


def test_a_step_that_cannot_end_is_not_begun(task, monkeypatch):
    schedule, tasks = import_module("holdfast.audits.schedule"), import_module("holdfast.audits.task")
    monkeypatch.setattr(schedule, "hidden_values", lambda model, x: 557_000)
    seen, real = [], tasks.run_certify

    def spy(model, x, y, threat, method, **options):
        seen.append(method)
        return real(model, x, y, threat, method, **options)

    monkeypatch.setattr(tasks, "run_certify", spy)
    result, _ = run(task, 60.0, attack="pgd")
    assert set(seen) == {"ibp"}
    texts = " ".join(result.brackets[0].skipped)
    assert "certify auto: the network has 557,000 hidden values, and linear bounds pay up to 100,000" in texts
    assert "certify milp: the network has 557,000 hidden values, and a search can end up to 20,000" in texts
    assert texts.count("certify beta-crown: the network has") == 1  # though it has several steps
