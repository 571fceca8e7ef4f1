"""`holdfast data corrupt`."""

import torch

import holdfast as hf
from holdfast.data.corruptions import corrupt


def test_corrupted_data_are_a_data_set(command, tmp_path):
    out = command("data", "corrupt", "mnist-mini", "--corruption", "pixelate", "--severity", 4, "--out", "shifted.npz")
    assert "with pixelate at severity 4" in out
    found, data = hf.load_data(str(tmp_path / "shifted.npz")), hf.load_data("mnist-mini")
    assert torch.equal(found.test.x, corrupt(data.test.x, "pixelate", 4))
    assert torch.equal(found.train.x, data.train.x)
    assert found.classes == data.classes


def test_bad_input_is_refused(refused):
    options = ("data", "corrupt", "mnist-mini", "--corruption")
    assert "unknown corruption 'mist'" in refused(*options, "mist", "--out", "a.npz")
    assert "from 1 to 5, got 9" in refused(*options, "fog", "--severity", "9", "--out", "a.npz")
    assert "ends in .npz" in refused(*options, "fog", "--out", "a.csv")
