"""Weights of timm and torchvision that the tests make, against a forward pass and a resize written here."""

import math

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import conv2d, gelu, layer_norm, linear

from holdfast import HoldfastError, InputError
from holdfast.models import load_vit, make_model
from holdfast.models.vit_weights import resize_kernel, resize_positions
from timm_files import CLASSES, DEPTH, HEADS, MLP, D, timm_weights

SIZES = {"dim": D, "heads": HEADS, "depth": DEPTH, "mlp_dim": MLP, "classes": CLASSES}


def torchvision_names(state):
    def renamed(name):
        for old, new in (
            *(("cls_token", "class_token"), ("pos_embed", "encoder.pos_embedding"), ("patch_embed.proj", "conv_proj")),
            *(
                ("blocks.", "encoder.layers.encoder_layer_"),
                ("attn.proj", "self_attention.out_proj"),
                ("head.", "heads.head."),
            ),
            *(
                ("attn.qkv.", "self_attention.in_proj_"),
                ("norm1", "ln_1"),
                ("norm2", "ln_2"),
                ("mlp.fc1", "mlp.0"),
                ("mlp.fc2", "mlp.3"),
            ),
        ):
            name = name.replace(old, new)
        return f"encoder.ln.{name[5:]}" if name.startswith("norm.") else name

    return {renamed(name): tensor for name, tensor in state.items()}


def reference_forward(w, x, patch):
    """As Dosovitskiy et al. write it, under timm's names."""
    tokens = (
        conv2d(x, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=patch).flatten(2).transpose(1, 2)
    )
    h = torch.cat([w["cls_token"].expand(len(x), -1, -1), tokens], 1) + w["pos_embed"]

    def normed(h, name):
        return layer_norm(h, (D,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)

    def dense(h, name):
        return linear(h, w[f"{name}.weight"], w[f"{name}.bias"])

    for i in range(DEPTH):
        q, k, v = dense(normed(h, f"blocks.{i}.norm1"), f"blocks.{i}.attn.qkv").chunk(3, -1)
        heads = []
        for part in range(HEADS):
            s = slice(part * D // HEADS, (part + 1) * D // HEADS)
            scores = q[..., s] @ k[..., s].transpose(1, 2) / math.sqrt(D // HEADS)
            heads.append(scores.softmax(-1) @ v[..., s])
        h = h + dense(torch.cat(heads, -1), f"blocks.{i}.attn.proj")
        h = h + dense(gelu(dense(normed(h, f"blocks.{i}.norm2"), f"blocks.{i}.mlp.fc1")), f"blocks.{i}.mlp.fc2")
    return dense(normed(h, "norm")[:, 0], "head")


@pytest.mark.parametrize("naming", ["timm", "torchvision"])
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_logits_are_those_of_the_reference(tmp_path, naming, suffix):
    weights = timm_weights()
    saved = weights if naming == "timm" else torchvision_names(weights)
    path = tmp_path / f"vit.{suffix}"
    save_file(saved, path) if suffix == "safetensors" else torch.save(saved, path)
    model = load_vit(path, make_model("vit-ti", input_shape=(3, 16, 16), patch=4, **SIZES).double())
    x = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    assert torch.allclose(model(x), reference_forward(weights, x, 4))
    assert not model.training


def keys_weights(size, new):
    """Row i: what output i takes of each input, by Keys' cubic kernel with a = -1/2, widened where the size shrinks."""
    scale, a = max(1.0, size / new), -0.5
    rows = torch.zeros(new, size, dtype=torch.float64)
    for i in range(new):
        for j in range(size):
            t = abs((j + 0.5 - (i + 0.5) * size / new) / scale)
            if t < 1:
                rows[i, j] = (a + 2) * t**3 - (a + 3) * t**2 + 1
            elif t < 2:
                rows[i, j] = a * (t**3 - 5 * t**2 + 8 * t - 4)
    return rows / rows.sum(1, keepdim=True)


@pytest.mark.parametrize(("size", "new"), [((16, 16), (4, 4)), ((7, 7), (14, 15)), ((5, 5), (2, 9))])
def test_kernels_and_positions_are_resized_by_definition(size, new):
    image = torch.randn(2, 3, *size, dtype=torch.float64)
    expected = keys_weights(size[0], new[0]) @ image @ keys_weights(size[1], new[1]).T
    area = size[0] * size[1] / (new[0] * new[1])
    assert torch.allclose(resize_kernel(image, *new), area * expected, atol=1e-6)
    table = torch.cat([torch.full((1, 1, 3), 9.0).double(), image[:1].flatten(2).transpose(1, 2)], 1)
    found = resize_positions(table, new, from_token=True, to_token=True)
    assert torch.equal(found[:, :1], table[:, :1])
    assert torch.allclose(found[:, 1:], expected[:1].flatten(2).transpose(1, 2), atol=1e-6)
    assert torch.equal(resize_positions(table, new, from_token=True, to_token=False), found[:, 1:])


def test_a_flat_kernel_answers_a_flat_patch_as_before():
    kernel = torch.full((2, 3, 16, 16), 0.25)
    assert torch.allclose(resize_kernel(kernel, 4, 4).sum((1, 2, 3)), kernel.sum((1, 2, 3)))


def test_cifar_from_imagenet_has_overlapping_patches(tmp_path):
    weights = timm_weights(patch=16, grid=(14, 14))
    torch.save(weights, tmp_path / "vit.pth")
    model = make_model(
        "vit-ti", input_shape=(3, 32, 32), patch=4, stride=2, normalize=[0.47, 0.25], **{**SIZES, "classes": 10}
    )
    head = model[1].head.weight.clone()
    load_vit(tmp_path / "vit.pth", model, new_head=True)
    assert model[1].tokens == 226
    assert torch.equal(model[1].head.weight, head)
    assert model(torch.rand(2, 3, 32, 32)).isfinite().all()
    grid = resize_positions(weights["pos_embed"], (15, 15), from_token=True, to_token=True)
    assert torch.allclose(model[1].positions.double(), grid, atol=1e-6)
    mean = make_model("vit-ti", input_shape=(3, 64, 32), patch=16, pool="mean", **SIZES)
    assert load_vit(tmp_path / "vit.pth", mean).positions.shape == (1, 8, D)


def broken(**changes):
    return {**timm_weights(), **changes}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (broken(pos_embed=torch.zeros(1, 15, D)), "positions of 14 tokens, which are not a square grid"),
        (broken(extra=torch.zeros(1)), "has a tensor 'extra'"),
        (broken(**{"head.weight": torch.zeros(7, D)}), r"'head.weight' has shape \(7, 8\).*new_head=True"),
        (broken(**{"norm.weight": torch.full((D,), torch.nan)}), "'norm.weight' has values that are not finite"),
        ({k: v for k, v in timm_weights().items() if "blocks.1" not in k}, "it lacks 'blocks.1"),
        ({k: v for k, v in timm_weights().items() if k != "cls_token"}, "has no class token"),
        (broken(**{"blocks.0.attn.qkv.bias": torch.zeros(7)}), "which are not three times a width"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_model_stays(tmp_path, state, message):
    torch.save(state, tmp_path / "vit.pt")
    model = make_model("vit-ti", input_shape=(3, 16, 16), patch=4, seed=0, **SIZES)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InputError, match=message):
        load_vit(tmp_path / "vit.pt", model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_damaged_files_and_other_models_are_refused(tmp_path):
    path = tmp_path / "vit.safetensors"
    path.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00not a header....")
    model = make_model("vit-ti", input_shape=(3, 16, 16), patch=4, **SIZES)
    with pytest.raises(HoldfastError, match="damaged"):
        load_vit(path, model)
    with pytest.raises(HoldfastError, match="there is no model file"):
        load_vit(tmp_path / "none.pt", model)
    with pytest.raises(InputError, match="one vision transformer"):
        load_vit(path, make_model("small-star"))
