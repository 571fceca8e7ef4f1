"""BinaryConnect in a run: signs forward, real weights that move and stay in [-1, 1]."""

import torch

import holdfast as hf
from holdfast.models import make_model


def test_real_weights_move_inside_their_range_and_the_network_sees_signs():
    data = hf.load_data("mnist-mini")
    few = hf.data.Dataset("few", data.train[:150], data.test[:10], data.classes)
    recipe = {"threat": "linf:0.05", "epochs": 2, "batch_size": 50, "model": {"name": "mlp", "hidden": [12]}}
    recipe |= {"objective": {"name": "at"}, "attack": {"name": "fgsm"}, "optimizer": {"lr": 2000.0}}
    recipe |= {"prune": {"name": "binary-connect", "last_batch_norm": True}}
    model = hf.train(recipe, data=few, progress=False).model
    layer = model[0][1]
    real = layer.parametrizations.weight.original
    assert set(layer.weight.unique().tolist()) == {-1.0, 1.0}
    assert real.abs().max() == 1  # some weights reach the end of their range at this learning rate
    assert not torch.equal(real, make_model("mlp", hidden=(12,), seed=0)[1].weight)
