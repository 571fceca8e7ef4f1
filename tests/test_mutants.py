"""The list of mutants must not rot: every entry still applies to the source and names tests that exist."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "mutants.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("mutants", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


def test_every_mutant_still_applies_to_the_source(script):
    mutants = script.read_mutants()
    assert len(mutants) > 100
    wrong = []
    for mutant in mutants:
        try:
            mutant.applied((ROOT / mutant.file).read_text())
        except (ValueError, OSError) as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def test_every_mutant_names_its_formula_and_tests_that_exist(script):
    for mutant in script.read_mutants():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", mutant.id), mutant.id
        assert len(mutant.formula) > 5, mutant.id
        assert mutant.tests, mutant.id
        for test in mutant.tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).is_file(), f"{mutant.id}: {test}"
            assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), f"{mutant.id}: {test}"


def test_a_mutant_that_does_not_apply_is_refused(script):
    mutant = script.Mutant("m", "formula", "file.py", "a + b", "a - b", ("tests/x.py",))
    assert mutant.applied("x = a + b\n") == "x = a - b\n"
    with pytest.raises(ValueError, match="occurs 2 times"):
        mutant.applied("x = a + b\ny = a + b\n")
    with pytest.raises(ValueError, match="occurs 0 times"):
        mutant.applied("x = a\n")
    with pytest.raises(ValueError, match="no Python"):
        script.Mutant("m", "formula", "file.py", "a + b", "a -", ("tests/x.py",)).applied("x = a + b\n")
    with pytest.raises(ValueError, match="changes nothing"):
        script.Mutant("m", "formula", "file.py", "a", "a", ("tests/x.py",)).applied("x = a\n")
