"""Every registered explanation and objective keeps its contract.

Attacks meet their suite in tests/attacks/test_attacks.py, bounds and certificates in tests/soundness/test_rounding.py.
"""

import pytest

import holdfast as hf
from holdfast.errors import UnsupportedError
from holdfast.registry import Objective
from holdfast.testing import check_explanation, check_objective


@pytest.mark.parametrize("entry", hf.methods("explain"), ids=lambda entry: entry.name)
def test_every_explanation_keeps_the_contract(entry):
    try:
        check_explanation(entry.name)
    except AssertionError as error:
        if isinstance(error.__cause__, UnsupportedError) and "pip install" in str(error):
            pytest.skip("a package that it needs is not installed")
        raise


@pytest.mark.parametrize("entry", [m for m in hf.methods("train") if isinstance(m, Objective)], ids=lambda m: m.name)
def test_every_objective_keeps_the_contract(entry):
    check_objective(entry.name)
