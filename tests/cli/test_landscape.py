"""`holdfast analyze landscape` on small trainings."""

import pytest

import holdfast as hf
from holdfast.training import parse_override


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two finished tiny trainings that differ in their seed, and one of another network."""
    folder = tmp_path_factory.mktemp("runs")
    tiny = ["epochs=1", "validation=0.97", "evaluate.count=20", "evaluate.attack_steps=2"]
    for seed, width in ((0, 4), (1, 4), (2, 5)):
        network = ["model.name=mlp", f"model.hidden=[{width}]", f"seed={seed}", f"log.updates={str(seed < 2).lower()}"]
        overrides = dict(parse_override(text) for text in [*tiny, *network])
        hf.train("mnist-mini-standard", out=folder / str(seed), progress=False, **overrides)
    return folder


FEW = ("--n", 20, "--top", 2, "--cells", 3, "--steps", 2, "--curve-steps", 2, "--threat", "linf:0.1")


def test_figures_pictures_and_the_path_to_another_run(command, runs):
    shown = command("analyze", "landscape", runs / "0", "--against", runs / "1", *FEW)
    assert "top eigenvalues (perturbations frozen)" in shown
    assert "barrier on the path to" in shown
    assert "against: " in shown
    assert "from the start" in shown
    again = command("analyze", "landscape", runs / "0", "--against", runs / "1", *FEW)
    assert again == shown  # read back, not computed
    written = {p.name for p in (runs / "0" / "landscape").iterdir()}
    assert {"path.svg", "surface.csv", "similarity.svg", "updates.svg", "updates.csv"} <= written


def test_a_run_without_the_log_says_how_to_write_it(command, runs, tmp_path):
    with pytest.raises(hf.InputError, match=r"Write one: \[log\] updates = true"):
        command("analyze", "landscape", runs / "2", "--updates", *FEW, "--out", tmp_path / "out")


def test_runs_of_different_networks_have_no_path(command, runs, tmp_path):
    with pytest.raises(hf.InputError, match="architecture"):
        command("analyze", "landscape", runs / "0", "--against", runs / "2", *FEW, "--out", tmp_path / "out")
    with pytest.raises(hf.HoldfastError):
        command("analyze", "landscape", tmp_path / "nowhere", *FEW)
