"""Complete search in an audit: it proves or breaks what others leave open, and an answer without a rest is exact."""

import json
from dataclasses import replace
from importlib import import_module
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.audits import load_audit
from holdfast.audits.engine import local
from holdfast.audits.report.card import badge, model_card
from holdfast.audits.words import EXACT, share

tasks = import_module("holdfast.audits.task")
THREAT = hf.Linf(0.12)


@pytest.fixture(scope="module")
def task():
    """A network on which CROWN and one gradient step decide little."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(14, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 3)).eval()
    for layer in (model[0], model[2], model[4]):
        layer.weight.data.mul_(2.5)
    x = torch.rand(12, 14)
    return model, x, model(x).argmax(1)


def search(task, **options):
    """An audit whose only proofs are by branch and bound, and whose only attack is one step."""
    model, *data = task
    how = {"attack": "fgsm", "certify": "beta-crown", "budgets": 1, "progress": False}
    return hf.audit(model, tuple(data), THREAT, **how | options)


@pytest.fixture(scope="module")
def found(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exact")
    return search(task, out=folder), folder


def test_what_branch_and_bound_breaks_is_broken_and_the_model_says_so(task, found):
    model, x, _ = task
    result, _ = found
    broken = [r for r in result.records if r.broken_by == "beta-crown"]
    assert broken, "choose a task that one step of an attack does not decide"
    examples = {e.position: e for e in result.examples if e.x_adv is not None}
    for record in broken:
        x_adv = torch.tensor(examples[record.position].x_adv)[None]
        assert int(model(x_adv).argmax()) == record.prediction_adv != record.label
        assert float((x_adv - x[record.position]).abs().max()) == pytest.approx(record.broken)
        assert record.certified < record.broken <= THREAT.eps
    (step,) = [step for step in result.brackets[0].steps if step.method == "beta-crown"]
    assert (step.decided, step.broken) == (result.levels[-1].certified, len(broken))
    part = f" {step.part} at a smaller budget," if step.part else ""
    assert f"{step.decided} proved,{part} {step.broken} broken" in result.to_html()


def test_an_exact_answer_is_called_so_everywhere(task, found):
    model, x, y = task
    result, folder = found
    truth = hf.certify(model, x, y, THREAT, "milp").certified
    assert [r.certified == THREAT.eps for r in result.records] == truth.tolist()
    assert [r.broken is None for r in result.records] == truth.tolist()
    answer = f"exactly {share(float(truth.float().mean()))}"
    assert result.brackets[0].exact
    assert result.headline.startswith(f"E{answer[1:]} of the 12 inputs")
    table = result.table().renderables[0]
    assert table.title == result.headline
    assert EXACT in table.caption
    assert f"Exact:</strong> {EXACT}." in result.to_html()
    assert "Here the two meet." in result.to_html()
    assert json.loads(result.to_json())["brackets"][0]["exact"] is True
    card = model_card(result)
    assert answer in card.lower()
    assert f"{THREAT}: {EXACT}." in card
    texts = ElementTree.fromstring(badge(result)).findall("{*}g/{*}text")
    assert [text.text for text in texts] == [f"robust @ {THREAT}", answer]
    assert load_audit(folder).to_json() == result.to_json()


def test_a_bracket_that_is_open_is_not_called_exact(task):
    result = search(task, certify="crown")
    assert not result.brackets[0].exact
    assert "exact" not in (result.headline + badge(result) + model_card(result)).lower()
    assert EXACT not in result.to_html()
    assert json.loads(result.to_json())["brackets"][0]["exact"] is False


def test_an_exact_answer_does_not_depend_on_the_attack(found):
    result, _ = found
    (bracket,) = result.brackets
    signs = tuple(replace(sign, fired=True) for sign in bracket.trust)
    assert signs, "the attack was probed"
    doubtful = replace(result, brackets=(replace(bracket, trust=signs),))
    assert doubtful.verdict.level == "unreliable"
    assert doubtful.doubt == doubtful.brackets[0].doubt == ""
    assert "unreliable" not in doubtful.headline + badge(doubtful)
    assert "The answer does not depend on it." in doubtful.to_html()


def spy_on(monkeypatch):
    """Positions given to branch and bound, call by call."""
    seen, real = [], tasks._certify

    def certify(model, task):
        seen.extend([(str(task.threat), *task.index.tolist())] if task.method == "beta-crown" else [])
        return real(model, task)

    monkeypatch.setattr(tasks, "_certify", certify)
    return seen


def test_standard_searches_the_most_promising_inputs_first_at_the_largest_budget(task, monkeypatch):
    model, x, y = task
    seen = spy_on(monkeypatch)
    result = hf.audit(model, (x, y), THREAT, budgets=1, progress=False)
    assert result.brackets[0].exact
    order = [position for threat, *group in seen if threat == str(THREAT) for position in group]
    assert seen[0][0] == str(THREAT)
    margins = hf.certify(model, x, y, THREAT, "crown").margin[order].tolist()
    assert len(order) > 1
    assert margins == sorted(margins, reverse=True)
    before = hf.audit(model, (x, y), THREAT, budgets=1, budget="quick", progress=False).levels[-1]
    assert before.certified < result.levels[-1].certified


def test_a_killed_search_goes_on_with_the_next_group(task, found, tmp_path, monkeypatch):
    def dying(model, given):
        for pair in local(model, given):
            yield pair
            if pair[0].method == "beta-crown":
                raise KeyboardInterrupt

    seen = spy_on(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        search(task, out=tmp_path, engine=dying)
    assert [len(group) for group in seen] == [1 + 8], "a group is stored as it comes"
    result = search(task, out=tmp_path)
    done = [(group[0], position) for group in seen for position in group[1:]]
    assert len(done) == len({*done})
    assert result.records == found[0].records


def test_the_progress_says_splits_worst_bound_and_what_is_left(task, tmp_path, monkeypatch):
    texts = []
    monkeypatch.setattr(import_module("holdfast.audits.live").Live, "show", lambda self, **v: texts.append(v["step"]))
    search(task, out=tmp_path)
    told = [text for text in texts if "splits" in text]
    assert told
    assert all(text.startswith("certify beta-crown linf:0.") and text.endswith(" parts left") for text in told)
    assert any("worst bound -" in text for text in told)
