import math

import pytest
import torch
from torch import nn

from holdfast import InputError
from holdfast.analyze.attention_maps import attention_maps
from holdfast.models import make_model

SIZES = {"dim": 8, "depth": 2, "heads": 2, "mlp_dim": 8, "patch": 4, "classes": 3, "input_shape": (1, 8, 12)}


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_maps_explain_the_output_of_the_first_block(pool):
    """Attention times values gives what the layer gives, on images that are not square."""
    model = make_model("vit-ti", seed=0, pool=pool, **SIZES).double().eval()
    x = torch.rand(3, 1, 8, 12, dtype=torch.float64)
    maps = attention_maps(model, x)
    tokens = 6 + (pool == "token")
    assert maps.weights.shape == (3, 2, 2, tokens, tokens)
    assert torch.allclose(maps.weights.sum(-1), torch.ones(()).double())
    layer, seen = model.blocks[0].attention, []
    handle = layer.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    model(x)
    handle.remove()
    value = layer.value(seen[0][0]).unflatten(2, (2, 4))
    mixed = torch.einsum("bhij,bjhd->bihd", maps.weights[:, 0], value).flatten(2)
    assert torch.allclose(layer.out(mixed), seen[0][1])
    assert maps.to_image().shape == (3, 2, 3)
    assert (maps.entropy() <= math.log(tokens) + 1e-12).all()


def test_uniform_attention_has_full_entropy():
    model = make_model("vit-ti", seed=0, **SIZES)
    for block in model.blocks:
        nn.init.zeros_(block.attention.query.weight)
        nn.init.zeros_(block.attention.query.bias)
    maps = attention_maps(model, torch.rand(2, 1, 8, 12))
    assert torch.allclose(maps.entropy(), torch.tensor(math.log(7)))
    assert torch.allclose(maps.to_image(), torch.tensor(1 / 7))


def test_other_models_are_refused():
    with pytest.raises(InputError, match="one vision transformer"):
        attention_maps(nn.Flatten(), torch.rand(1, 1, 2, 2))
