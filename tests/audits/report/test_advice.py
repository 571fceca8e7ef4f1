"""What to do next: each rule fires on the audit that it is for, and the commands are such as exist."""

import re
import shlex
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.attacks.core.indicators import Indicator
from holdfast.audits.bracket import Bracket, Record
from holdfast.audits.report.advice import next_steps
from holdfast.audits.result import Audit
from holdfast.training import load_recipe


def make_bracket(threat, budget, right, attacked, certified, inputs=100, proved=True, skipped=(), fired=False):
    """`right`, `attacked` and `certified` of the inputs are classified right, survive and are proved."""
    records = []
    for i in range(inputs):
        if i >= right:
            records.append(Record(i, i % 2, 1 - i % 2, None, "", 0.0, "clean", None))
            continue
        low = budget if i < certified else 0.0
        high = None if i < attacked else budget / 2
        records.append(Record(i, i % 2, i % 2, low, "ibp" if low else "", high, "pgd" if high else "", None))
    trust = (Indicator("huge-budget", fired, 0.5, "seen"),)
    return Bracket(
        threat=threat,
        threats=(threat,),
        budgets=(budget,),
        valid_range=(0.0, 1.0),
        records=tuple(records),
        seconds={},
        trust=trust,
        skipped=skipped,
        proved=proved,
    )


def make(*brackets, data="mnist-mini (test)", plan="standard"):
    return Audit("net", data, ("even", "odd"), brackets, {"plan": plan}, {}, {}, "2030-01-01T00:00:00+00:00")


def commands(audit):
    return [step.command for step in next_steps(audit)]


def linf(*counts, **options):
    return make_bracket("linf:0.1", 0.1, *counts, **options)


def test_a_model_without_a_weakness_is_to_be_kept_so():
    (step,) = next_steps(make(linf(100, 100, 100)))
    assert step.command == "holdfast audit MODEL --data mnist-mini --threat linf:0.1 --fail-under certified=0.96"
    assert "every build" in step.text


@pytest.mark.parametrize(
    ("settings", "threat", "command"),
    [
        ({}, "linf:0.1", "--method autoattack"),
        ({"gradients": "none"}, "linf:0.1", "--method hopskipjump"),
        ({"gradients": "useless"}, "l1:3", "--method cascade"),
        ({"gradients": "useful", "draws": 100}, "l1:3", "--method eot-pgd --option samples=100"),
        ({"gradients": "useful", "draws": 100}, "patch:2x2", "--method cascade"),
    ],
)
def test_the_second_attack_is_one_that_works_on_the_model(settings, threat, command):
    audit = make(make_bracket(threat, 0.1, 95, 90, 0, proved=False, fired=True))
    step = next_steps(replace(audit, settings={**audit.settings, **settings}))[0]
    assert step.command == f"holdfast attack MODEL --data mnist-mini --threat {threat} {command}"


def test_a_model_that_breaks_is_to_be_trained():
    found = commands(make(linf(95, 20, 20)))
    assert found == [
        "holdfast train mnist-mini-trades",
        "holdfast train mnist-mini-crown-ibp",
        "holdfast explain MODEL --data mnist-mini --inputs 20,21,22,23",
    ]


def test_a_model_of_which_little_is_proved_is_to_be_trained_for_the_proof():
    first, second, _ = next_steps(make(linf(95, 90, 10)))
    assert first.command == "holdfast audit MODEL --data mnist-mini --threat linf:0.1 --budget thorough"
    assert "80 at linf:0.1" in first.text
    assert second.command == "holdfast train mnist-mini-crown-ibp"
    assert "Only 10.0 %" in second.text


def test_smoothing_is_for_l2_where_nothing_is_proved():
    noisy = (
        "holdfast train own-noise --model MODEL --data mnist-mini --set threat=l2:0.5 --set objective.sigma=0.25 "
        "--out runs/net-noise\n"
        "holdfast audit runs/net-noise/model.safetensors --data mnist-mini --threat l2:0.5 --sigma 0.25 --n 100 "
        "--budget standard"
    )
    for bracket in (
        make_bracket("l2:0.5", 0.5, 95, 90, 0),
        make_bracket("l2:0.5", 0.5, 95, 90, 0, proved=False, skipped=("auto: it does not fit this model",)),
    ):
        assert noisy in commands(make(bracket))
    assert noisy not in commands(make(make_bracket("l2:0.5", 0.5, 95, 90, 5)))
    # The noise is half the budget; at another norm, which smoothing says nothing about, a usual one.
    assert "--sigma 0.5" in commands(make(make_bracket("l2:1", 1.0, 95, 90, 0)))[-2]
    assert "--threat l2:0.5 --sigma 0.25" in commands(make(linf(95, 90, 0)))[-2]
    assert "proves nothing about linf" in next_steps(make(linf(95, 90, 0)))[-2].text


def test_the_recipe_fits_threat_and_data():
    def recipe(threat, budget, data):
        found = commands(make(make_bracket(threat, budget, 95, 50, 1), data=data))
        return [command for command in found if command.startswith("holdfast train")]

    assert recipe("linf:8/255", 8 / 255, "cifar10 (test)") == [
        "holdfast train cifar10-trades",
        "holdfast train cifar10-crown-ibp-8",
    ]
    assert recipe("linf:2/255", 2 / 255, "cifar10 (test)") == [
        "holdfast train cifar10-trades --set threat=linf:2/255",
        "holdfast train cifar10-crown-ibp-2",
    ]
    assert recipe("linf:0.3", 0.3, "mnist (test)")[1] == "holdfast train mnist-crown-ibp-0.3"
    assert recipe("patch:5x5", 25.0, "mnist (test)") == ["holdfast train mnist-patch-5x5"]
    assert recipe("sparse:4", 4.0, "mnist-mini (test)") == ["holdfast train mnist-mini-sparse"]
    assert recipe("linf:0.1", 0.1, "my photos") == [
        "holdfast train --list",
        "holdfast train own-proof --model MODEL --data 'my photos' --set threat=linf:0.1 --out runs/net-proof\n"
        "holdfast audit runs/net-proof/model.safetensors --data 'my photos' --threat linf:0.1 --n 100 "
        "--budget standard",
    ]
    assert recipe("box:0.1", 0.1, "mnist (test)") == ["holdfast train --list"]


def test_doubts_about_the_attack_come_first():
    first = next_steps(make(linf(95, 20, 10, fired=True)))[0]
    assert first.command == "holdfast attack MODEL --data mnist-mini --threat linf:0.1 --method autoattack"
    assert "unreliable (fired: huge-budget)" in first.text
    assert "What is certified does not depend on it." in first.text
    assert "What is certified" not in next_steps(make(linf(95, 20, 0, fired=True)))[0].text


def test_more_time_is_for_what_time_can_change():
    late = make(
        linf(95, 90, 80, skipped=("milp: no time for 3 inputs",)), make_bracket("l2:1", 1.0, 95, 95, 95), plan="10m"
    )
    assert commands(late)[0] == "holdfast audit MODEL --data mnist-mini --threat linf:0.1 --budget thorough"
    assert "time was not enough" in next_steps(late)[0].text
    assert "thorough" not in " ".join(commands(make(linf(95, 90, 80), plan="thorough")))
    both = make(linf(95, 90, 80), make_bracket("l2:1", 1.0, 95, 90, 85))
    assert (
        commands(both)[0] == "holdfast audit MODEL --data mnist-mini --threat linf:0.1 --threat l2:1 --budget thorough"
    )
    some = replace(late, total=2 * late.inputs)
    assert commands(some)[0].endswith(f"--threat linf:0.1 --n {late.inputs} --budget thorough"), "of the same inputs"
    assert "10 at linf:0.1, 5 at l2:1" in next_steps(both)[0].text


def test_a_missing_certificate_is_named():
    found = commands(make(linf(95, 90, 0, proved=False)))
    assert found[0] == "holdfast certify MODEL --data mnist-mini --threat linf:0.1"


def test_the_class_that_stands_out_is_named():
    records = [
        Record(i, i % 2, i % 2, 0.1 if i % 2 else 0.0, "", None if i % 2 else 0.05, "", None) for i in range(100)
    ]
    base = linf(100, 100, 100)
    one_sided = Bracket(**{**base.__dict__, "records": tuple(records)})
    last = next_steps(make(one_sided))[-1]
    assert last.text.startswith("Of 'even', 0.0 % hold at linf:0.1, of all inputs 50.0 %")
    assert last.command == "holdfast explain MODEL --data mnist-mini --inputs 0,2,4,6"


@settings(max_examples=25)
@given(
    counts=st.lists(st.integers(0, 40), min_size=3, max_size=3).map(lambda found: sorted(found, reverse=True)),
    threat=st.sampled_from([("linf:0.1", 0.1), ("l2:0.5", 0.5), ("patch:2x2", 4.0), ("l1:3", 3.0), ("box", 1.0)]),
    proved=st.booleans(),
    fired=st.booleans(),
    data=st.sampled_from(["mnist-mini (test)", "cifar10 (train)", "a folder; rm -rf x", "tensors"]),
)
def test_there_is_always_a_step_and_every_command_can_be_read(counts, threat, proved, fired, data):
    right, attacked, certified = counts
    bracket = make_bracket(*threat, right, attacked, certified if proved else 0, inputs=40, proved=proved, fired=fired)
    steps = next_steps(make(bracket, data=data))
    assert steps
    assert len({step.command for step in steps}) == len(steps)
    for line in "\n".join(step.command for step in steps).splitlines():
        name, verb, *rest = shlex.split(line)
        assert name == "holdfast"
        assert verb in ("audit", "attack", "certify", "train", "explain")
        assert ";" not in "".join(rest) or data in " ".join(rest)
        if verb == "train" and rest[0] != "--list":
            override = dict(rest[i + 1].split("=", 1) for i, word in enumerate(rest) if word == "--set")
            assert load_recipe(rest[0], override).data in (data.partition(" ")[0], None)
    assert all(re.search(r"[.!]$", step.text) for step in steps)
    assert np.all([step.text[0].isupper() for step in steps])


@pytest.mark.parametrize("verb", ["audit", "attack", "certify", "explain"])
def test_options_of_the_commands_exist(verb):
    """Every option that a step may name is one of the command's."""
    from holdfast.cli import load

    command = load(verb)
    if verb == "explain":
        command = command.commands["pictures"]
    known = {option for parameter in command.params for option in parameter.opts}
    audits = [
        make(linf(100, 100, 100)),
        make(linf(95, 20, 10, fired=True)),
        make(linf(95, 90, 0, proved=False)),
        make(make_bracket("l2:0.5", 0.5, 95, 90, 0)),
    ]
    lines = [line for audit in audits for text in commands(audit) for line in text.splitlines()]
    used = {word for line in lines if line.split()[1] == verb for word in line.split() if word.startswith("--")}
    assert used
    assert used <= known
