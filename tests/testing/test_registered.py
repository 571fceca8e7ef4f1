"""Every registered explanation and objective keeps its contract.

Attacks meet their suite in tests/attacks/test_attacks.py, bounds and certificates in tests/soundness/test_rounding.py.
"""

import pytest

import holdfast as hf
from holdfast.registry import Objective
from holdfast.testing import check_explanation, check_objective


@pytest.mark.parametrize("entry", hf.methods("explain"), ids=lambda entry: entry.name)
def test_every_explanation_keeps_the_contract(entry):
    if entry.package:
        pytest.importorskip(entry.package)
    check_explanation(entry.name)


@pytest.mark.parametrize("entry", [m for m in hf.methods("train") if isinstance(m, Objective)], ids=lambda m: m.name)
def test_every_objective_keeps_the_contract(entry):
    check_objective(entry.name)
