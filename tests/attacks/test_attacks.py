"""The contract of every attack, over the whole registry: `holdfast.testing`, and what errors and counts say."""

import sys

import pytest
import torch
from nets import QUICK_ATTACKS
from torch import Tensor

import holdfast as hf
from holdfast.attacks.core.nearest import nearest_options
from holdfast.errors import InputError
from holdfast.testing import check_attack
from holdfast.testing.networks import images_task, linear_task
from holdfast.testing.subject import threats_for

pytestmark = pytest.mark.usefixtures("short_autoattack")

ATTACKS = hf.methods("attack")
ENTRIES = {entry.name: entry for entry in ATTACKS}
PAIRS = [(entry.name, threat) for entry in ATTACKS for threat in threats_for(entry, (2, 7, 5))]
SHARED = {"fab", "deepfool"}
"""These take several gradients from one pass, and count a query for each."""


@pytest.mark.parametrize("entry", ATTACKS, ids=lambda entry: entry.name)
def test_every_attack_keeps_the_contract(entry):
    check_attack(entry.name)


@pytest.mark.parametrize(("name", "threat"), [pair for pair in PAIRS if pair[0] != "cascade"], ids=str)
def test_every_forward_pass_is_counted(name, threat):
    """Alone in its batch, an input is never carried along: the model sees it as often as `queries` says."""
    model, x, y = images_task()
    seen = []
    model.register_forward_pre_hook(lambda module, arguments: seen.append(len(arguments[0])))
    for i in (1, 2):
        seen.clear()
        index, options = torch.tensor([i]), QUICK_ATTACKS[name]
        result = hf.attack(model, x[i : i + 1], y[i : i + 1], threat, name, index=index, **options)
        # At the door a second pass looks for chance, at the end one more confirms an example.
        checks = 1 + int(result.success) + 2 * (name == "autoattack")
        if name in SHARED:
            assert checks < sum(seen) <= checks + int(result.queries)
        else:
            assert sum(seen) == checks + int(result.queries)
        assert int(result.queries) <= 500, "the short options allow no more"


@pytest.mark.parametrize("entry", [entry for entry in ATTACKS if "targets" in entry.options], ids=lambda e: e.name)
def test_no_target_at_all_is_refused_and_more_than_there_are_is_all(entry):
    (model, x, y), options = linear_task(), QUICK_ATTACKS[entry.name]
    with pytest.raises(InputError, match="targets"):
        hf.attack(model, x, y, hf.Linf(0.1), entry.name, **options | {"targets": 0})
    few, many = (hf.attack(model, x, y, hf.Linf(0.1), entry.name, **options | {"targets": t}) for t in (2, 50))
    assert torch.equal(few.x_adv, many.x_adv)


@pytest.mark.parametrize("entry", ATTACKS, ids=lambda entry: entry.name)
def test_what_is_refused_is_refused_with_the_way_out(entry):
    threat = threats_for(entry, (1, 4, 4))[0]
    bad = linear_task()[2]
    bad[2] = 3
    cases = [(linear_task(after=lambda z: z * torch.nan), "NaN"), ((*linear_task()[:2], bad), "label 3 of input 2")]
    if entry.gradients == "needed":
        cases.append((linear_task(after=Tensor.detach), "'square'"))
    if not entry.stochastic or "version" in entry.options:  # AutoAttack's other versions too
        cases.append((linear_task(after=lambda z: z + torch.randn_like(z)), "eot-pgd"))
    for (model, x, y), words in cases:
        with pytest.raises(InputError, match=words):
            hf.attack(model, x, y, threat, entry.name, **QUICK_ATTACKS[entry.name])


@pytest.mark.parametrize("name", ENTRIES)
def test_every_number_has_a_range(name):
    """A number without a range would be checked by hand, or not at all."""
    plain = {option.name: option.text for option in ENTRIES[name].text_options.values()}
    assert not [option for option, text in plain.items() if text in ("a number", "an integer")]


@pytest.mark.parametrize("name", [m for m, e in ENTRIES.items() if e.nearest is not None])
def test_both_forms_of_a_minimum_norm_attack_have_the_same_options(name):
    entry = ENTRIES[name]
    assert nearest_options(name) == entry.typed_options
    assert entry.function.__name__ == name.replace("-", "_")
    assert getattr(sys.modules[entry.function.__module__], entry.function.__name__) is entry.function
