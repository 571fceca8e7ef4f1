"""A class in a file, and checkpoints as training scripts leave them."""

import sys

import pytest
import torch
from torch import nn

import holdfast as hf

SOURCE = """
import torch
from torch import nn
from blocks import half

class MyNet(nn.Module):
    def __init__(self, width=4, *, classes=3):
        super().__init__()
        if width < 1:
            raise ValueError("width must be positive")
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x):
        return half(self.layers(x))

def small(): return MyNet(2)
def nothing(): return 3
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "blocks.py").write_text("def half(x):\n    return x / 2\n")
    path = tmp_path / "mynet.py"
    path.write_text(SOURCE)
    yield path
    sys.modules.pop("blocks", None)


@pytest.fixture
def weights():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


def state_of(weights):
    return {f"layers.{name}": value for name, value in weights.state_dict().items()}


WRAPPINGS = {
    "plain": lambda s: s,
    "state_dict": lambda s: {"state_dict": s, "epoch": 3, "optimizer": {"lr": 0.1}},
    "model": lambda s: {"model": s, "args": {"width": 4}},
    "ddp": lambda s: {f"module.{name}": value for name, value in s.items()},
    "compiled ddp": lambda s: {"model": {f"_orig_mod.module.{name}": value for name, value in s.items()}},
    "one of a kind": lambda s: {"student": s, "step": 7},
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_checkpoints_are_understood_as_they_are_found(wrapping, file, weights, tmp_path):
    torch.save(WRAPPINGS[wrapping](state_of(weights)), tmp_path / "weights.pt")
    model = hf.load_model(tmp_path / "weights.pt", architecture=f"{file}:MyNet")
    x = torch.rand(5, 6)
    assert torch.equal(model(x), weights(x) / 2)
    assert not model.training


def test_mean_and_std_become_the_first_layer(file, weights, tmp_path):
    torch.save(state_of(weights), tmp_path / "weights.pt")
    model = hf.load_model(tmp_path / "weights.pt", architecture=f"{file}:MyNet", mean=0.5, std=0.25)
    x = torch.rand(5, 6)
    assert torch.allclose(model(x), weights((x - 0.5) / 0.25) / 2)


def test_a_module_of_your_own_is_taken_as_it_is(weights, tmp_path):
    torch.save(weights.state_dict(), tmp_path / "weights.pt")
    own = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    assert hf.load_model(tmp_path / "weights.pt", architecture=own) is own
    with pytest.raises(hf.InputError, match="not both"):
        hf.load_model(tmp_path / "weights.pt", own, architecture=own)


def test_the_key_chooses_among_several(file, weights, tmp_path):
    state = state_of(weights)
    torch.save({"student": state, "teacher": {n: 0 * v for n, v in state.items()}}, tmp_path / "weights.pt")
    with pytest.raises(hf.InputError, match=r"several state dicts: student, teacher\. Say which one with key"):
        hf.load_model(tmp_path / "weights.pt", architecture=f"{file}:MyNet")
    model = hf.load_model(tmp_path / "weights.pt", architecture=f"{file}:MyNet", key="teacher")
    assert not bool(model(torch.rand(2, 6)).any())
    with pytest.raises(hf.InputError, match=r"no entry 'tacher'\. Did you mean 'teacher'"):
        hf.load_model(tmp_path / "weights.pt", architecture=f"{file}:MyNet", key="tacher")


def test_arguments_of_the_class(file, tmp_path):
    wide = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5))
    torch.save(state_of(wide), tmp_path / "weights.pt")
    model = hf.load_model(tmp_path / "weights.pt", architecture=f"{file}:MyNet", options={"width": 7, "classes": 5})
    assert model(torch.rand(2, 6)).shape == (2, 5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("MyNett", None, "has no class or function 'MyNett'. Did you mean 'MyNet'"),
        ("MyNet", {"depth": 3}, "cannot be built with {'depth': 3}: TypeError"),
        ("MyNet", {"width": 0}, r"ValueError: width must be positive \(line 10\)"),
        ("nothing", None, "must give a torch.nn.Module, got int"),
    ],
)
def test_what_is_wrong_with_the_class_is_said(name, options, message, file, weights, tmp_path):
    torch.save(state_of(weights), tmp_path / "weights.pt")
    with pytest.raises(hf.InputError, match=message):
        hf.load_model(tmp_path / "weights.pt", architecture=f"{file}:{name}", options=options)


def test_weights_that_do_not_fit_name_the_first_three_keys(file, tmp_path):
    torch.save({f"body.{i}": torch.ones(1) for i in range(5)}, tmp_path / "weights.pt")
    lacks = r"lacks 'layers\.0\.weight', 'layers\.0\.bias', 'layers\.2\.weight' \(4 missing\)"
    message = lacks + r"; it has 'body\.0', 'body\.1', 'body\.2', which the model has not \(5 unknown\)"
    with pytest.raises(hf.InputError, match=message):
        hf.load_model(tmp_path / "weights.pt", architecture=f"{file}:MyNet")


def test_a_file_that_raises_names_the_line(weights, tmp_path):
    torch.save(weights.state_dict(), tmp_path / "weights.pt")
    (tmp_path / "bad.py").write_text("import torch\nraise RuntimeError('no licence')\n")
    with pytest.raises(hf.InputError, match=r"cannot be imported: RuntimeError: no licence \(line 2\)"):
        hf.load_model(tmp_path / "weights.pt", architecture=f"{tmp_path}/bad.py:Net")
    with pytest.raises(hf.StorageError, match="there is no file"):
        hf.load_model(tmp_path / "weights.pt", architecture=f"{tmp_path}/none.py:Net")
