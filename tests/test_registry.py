import subprocess
import sys

import pytest
import torch

import holdfast as hf
from holdfast import registry
from holdfast.errors import InputError, UnsupportedError, did_you_mean
from holdfast.random import Noise


def test_every_method_says_what_it_is():
    table = hf.methods()
    assert {"fgsm", "pgd", "cascade"} <= {m.name for m in hf.methods("attack")}
    assert {"ibp", "auto"} <= {m.name for m in hf.methods("certify")}
    for m in table:
        assert m.name == m.name.lower()
        assert " " not in m.name
        assert m.summary
        assert m.reference
        assert m.function.__doc__, m.name
        if m.kind in ("attack", "certify", "bounds"):
            assert m.threats, m.name
            assert m.guarantee == "upper bound" if m.kind == "attack" else "proof" in m.guarantee, m.name


def test_unknown_names_suggest_the_nearest():
    model, x, y = torch.nn.Linear(2, 2).eval(), torch.rand(1, 2), torch.zeros(1, dtype=torch.long)
    with pytest.raises(InputError, match="Did you mean 'pgd'"):
        hf.attack(model, x, y, hf.Linf(0.1), "pdg")
    with pytest.raises(InputError, match="Did you mean 'ibp'"):
        hf.certify(model, x, y, hf.Linf(0.1), "ibpp")
    with pytest.raises(InputError, match="Did you mean 'steps'"):
        hf.attack(model, x, y, hf.Linf(0.1), "pgd", step=3)
    with pytest.raises(InputError, match="unknown kind"):
        hf.methods("attacks")
    with pytest.raises(UnsupportedError, match="does not handle the threat 'sparse:1'"):
        hf.attack(model, x, y, hf.Sparse(1), "fgsm")


def test_the_seed_of_the_front_door_is_no_option_and_an_option_called_noise_is_one():
    assert all("noise" not in method.options for method in hf.methods("attack"))
    assert {"smoothing-l1", "n-fgsm"} <= {m.name for m in hf.methods() if "noise" in m.options}
    model, x, y = torch.nn.Linear(2, 2).eval(), torch.rand(1, 2), torch.zeros(1, dtype=torch.long)
    with pytest.raises(InputError, match="method 'pgd' has no option 'noise'"):
        hf.attack(model, x, y, hf.Linf(0.1), "pgd", noise=Noise.for_batch(0, 1))


def test_registering_a_name_twice_is_a_mistake():
    with pytest.raises(ValueError, match="registered twice"):
        registry.Attack("pgd", summary="", reference="")(lambda: None)


def test_did_you_mean_without_a_near_name():
    assert did_you_mean("zzz", ["pgd"]) == "Known: pgd."
    assert did_you_mean("zzz", []) == "Known: none."


def test_importing_holdfast_loads_next_to_nothing():
    loaded = "[m for m in sys.modules if m.startswith('holdfast')], 'torch' in sys.modules"
    code = f"import sys, holdfast; print({loaded})"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "['holdfast'] False"


def test_every_public_name_is_found_where_it_lives():
    for name in hf.__all__:
        assert getattr(hf, name) is not None
        assert name in dir(hf)
    with pytest.raises(AttributeError, match="module 'holdfast' has no attribute 'atack'"):
        _ = hf.atack


def test_a_record_is_lent_for_a_while_and_the_table_is_as_before():
    before = [method.name for method in hf.methods("attack")]
    toy, pgd = (registry.Attack(name, summary="", reference="") for name in ("toy", "pgd"))
    with registry.lend(toy), registry.lend(pgd):
        assert registry.get("attack", "toy") is toy
        assert registry.get("attack", "pgd") is pgd
    assert [method.name for method in hf.methods("attack")] == before
    assert registry.get("attack", "pgd").summary
