"""HYDRA: exact density after each phase, the mask of the second phase kept in the third."""

import pytest
import torch

import holdfast as hf
from holdfast.errors import InputError
from holdfast.models.masked import fixed_weights, patterns

COMMON = {"threat": "linf:0.05", "epochs": 2, "batch_size": 50, "model": {"name": "mlp", "hidden": [12]}}
COMMON |= {"objective": {"name": "at"}, "attack": {"name": "fgsm"}, "optimizer": {"name": "adam", "lr": 5e-3}}


def test_the_three_phases(tmp_path):
    data = hf.load_data("mnist-mini")
    few = hf.data.Dataset("few", data.train[:150], data.test[:10], data.classes)
    how = {"data": few, "progress": False}
    dense = hf.train(COMMON, out=tmp_path / "dense", **how).model
    prune = {"prune": {"name": "hydra-prune", "rate": 0.9}, "init": str(tmp_path / "dense" / "model.safetensors")}
    kept = hf.train({**COMMON, **prune}, out=tmp_path / "kept", **how).model
    count = (784 * 12 + 120) // 10
    assert sum(int(pattern.sum()) for pattern in patterns(kept).values()) == count
    assert torch.equal(fixed_weights(kept)["1"], dense[1].weight)
    assert torch.equal(kept[1].bias, dense[1].bias)
    tune = {"prune": {"name": "hydra-fine-tune"}, "init": str(tmp_path / "kept" / "model.safetensors")}
    tuned = hf.train({**COMMON, **tune}, out=tmp_path / "tuned", **how).model
    assert all(torch.equal(pattern, patterns(kept)[name]) for name, pattern in patterns(tuned).items())
    assert not torch.equal(fixed_weights(tuned)["1"], fixed_weights(kept)["1"])
    assert not torch.equal(tuned[1].bias, kept[1].bias)
    assert hf.load_model(tmp_path / "tuned" / "model.safetensors")(few.test.x).shape == (10, 10)
    with pytest.raises(InputError, match="prune: the model has no masks to fix"):
        hf.train({**COMMON, **tune, "init": prune["init"]}, **how)
