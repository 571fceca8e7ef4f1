"""An installed package adds methods to Python and to the command line; a broken one cannot take Holdfast down."""

import csv

import pytest

import holdfast as hf
from testing.packages import SOURCE, fake_distribution, run_holdfast, run_python
from testing.toys import ATTACK, CERTIFICATE, OBJECTIVE, USE


@pytest.fixture
def plugins(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    for name, text in (("toy_attack", ATTACK), ("toy_certificate", CERTIFICATE), ("toy_objective", OBJECTIVE)):
        fake_distribution(folder, name, text)
    return [folder, SOURCE]


def test_methods_of_an_installed_package_are_used_by_name(plugins):
    assert "all toys work" in run_python(USE, path=plugins)


def test_methods_of_an_installed_package_are_on_the_command_line(plugins, tmp_path):
    assert "a toy attack" in run_holdfast("methods", "attack", path=plugins)
    model = hf.save_model(hf.make_model("linear", seed=0), tmp_path / "m.safetensors")
    out = tmp_path / "run"
    options = ("--method", "toy", "--option", "steps=2", "--threat", "linf:0.3", "--n", "6", "--out", str(out))
    run_holdfast("attack", str(model), *options, path=plugins)
    with open(out / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert {"toy", "clean"} & {row["by"] for row in rows}


def test_a_broken_package_gives_a_warning_and_no_crash(tmp_path):
    broken = {"gone": "import no_such_package", "raises": "raise RuntimeError('broken')", "typo": "def"}
    broken["twice"] = ATTACK.replace('"toy"', '"pgd"')
    for name, code in broken.items():
        fake_distribution(tmp_path, name, code)
    use = "import holdfast as hf; print(len(hf.methods('attack')), 'attacks')"
    said = run_python(use, path=[tmp_path, SOURCE])
    assert f"{len(hf.methods('attack'))} attacks" in said
    for name in broken:
        assert f"UserWarning: the methods of '{name}' cannot be loaded" in said
    assert "attack 'pgd' is registered twice" in said
