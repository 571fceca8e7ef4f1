"""Pre-trained vision transformers: weights under the names of timm or torchvision, resized to other images and patches.

Kernels of patches and positions of tokens are images of their own: both are resized by cubic interpolation (Keys'
kernel with a = -1/2, widened where the size shrinks, so that nothing is skipped).
"""

import math
import re
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from holdfast.errors import InputError
from holdfast.models.disk import read_weights
from holdfast.models.zoo.vit import VisionTransformer

# Names there, as patterns of whole names, and names here.
_TIMM = {
    r"cls_token": "token",
    r"pos_embed": "positions",
    r"patch_embed\.proj\.(\w+)": r"stem.\1",
    r"blocks\.(\d+)\.(norm[12])\.(\w+)": r"blocks.\1.\2.\3",
    r"blocks\.(\d+)\.attn\.qkv\.(\w+)": r"blocks.\1.attention.qkv.\2",
    r"blocks\.(\d+)\.attn\.proj\.(\w+)": r"blocks.\1.attention.out.\2",
    r"blocks\.(\d+)\.mlp\.fc1\.(\w+)": r"blocks.\1.mlp.0.\2",
    r"blocks\.(\d+)\.mlp\.fc2\.(\w+)": r"blocks.\1.mlp.2.\2",
    r"(?:fc_)?norm\.(\w+)": r"norm.\1",
    r"head\.(\w+)": r"head.\1",
}
_LAYER = r"encoder\.layers\.encoder_layer_(\d+)\."
_TORCHVISION = {
    r"class_token": "token",
    r"encoder\.pos_embedding": "positions",
    r"conv_proj\.(\w+)": r"stem.\1",
    _LAYER + r"ln_([12])\.(\w+)": r"blocks.\1.norm\2.\3",
    _LAYER + r"self_attention\.in_proj_(\w+)": r"blocks.\1.attention.qkv.\2",
    _LAYER + r"self_attention\.out_proj\.(\w+)": r"blocks.\1.attention.out.\2",
    _LAYER + r"mlp\.(?:0|linear_1)\.(\w+)": r"blocks.\1.mlp.0.\2",
    _LAYER + r"mlp\.(?:3|linear_2)\.(\w+)": r"blocks.\1.mlp.2.\2",
    r"encoder\.ln\.(\w+)": r"norm.\1",
    r"heads\.head\.(\w+)": r"head.\1",
}


def load_vit(path: str | Path, model: nn.Module, *, new_head: bool = False, key: str | None = None) -> nn.Module:
    """Load the weights of a vision transformer from a file of timm or torchvision into `model`; returned in eval mode.

    Kernels and positions are resized where image, patch or stride differ; if anything does not fit, the model stays as
    it was. timm and torchvision normalise outside the model: give `make_model` their mean and deviation as `normalize`.

    Args:
        path: .safetensors, or .pt or .pth with a state dict.
        model: made by `make_model`, such as `make_model("vit-b", patch=4, stride=2)`, with or without `normalize`.
        new_head: keep the model's own last layer, for other classes than the file's.
        key: entry of a checkpoint that holds the state dict, dotted, if there are several.
    """
    found = [module for module in model.modules() if isinstance(module, VisionTransformer)]
    if len(found) != 1 or not isinstance(found[0].stem, nn.Conv2d):
        raise InputError("load_vit needs a model with one vision transformer whose stem is 'patch'; see `vit`")
    found[0].load_state_dict(_fitted(_renamed(read_weights(path, key), path), found[0], new_head, path))
    return model.eval()


def _renamed(state: dict[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    """The tensors under our names, queries, keys and values taken apart; what has no name there is refused."""
    table = _TORCHVISION if any(name.startswith("encoder.") for name in state) else _TIMM
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        match = next(
            ((re.fullmatch(pattern, name), new) for pattern, new in table.items() if re.fullmatch(pattern, name)), None
        )
        if match is None or match[0] is None:
            raise InputError(
                f"'{path}' has a tensor '{name}', which a plain vision transformer of timm or torchvision does not "
                "have; variants with other parts cannot be loaded"
            )
        new = match[0].expand(match[1])
        if ".qkv." in new:
            if len(tensor) % 3:
                raise InputError(
                    f"'{path}' is damaged: '{name}' has {len(tensor)} rows, which are not three times a width"
                )
            for part, rows in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                renamed[new.replace("qkv", part)] = rows
        else:
            renamed[new] = tensor
    return renamed


def _fitted(state: dict[str, Tensor], vit: VisionTransformer, new_head: bool, path: str | Path) -> dict[str, Tensor]:
    """The tensors that the model has, in its sizes."""
    own = vit.state_dict()
    if new_head:
        state |= {name: own[name] for name in ("head.weight", "head.bias")}
    with_token = "token" in state
    if vit.token is None:
        state.pop("token", None)
    elif not with_token:
        raise InputError(f"'{path}' has no class token; make the model with pool='mean'")
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unknown:
        raise InputError(
            f"'{path}' holds another architecture: "
            + (f"it lacks '{missing[0]}'" if missing else f"the model has no '{unknown[0]}'")
            + "; is the depth the same?"
        )
    assert isinstance(vit.stem, nn.Conv2d)
    if state["stem.weight"].ndim == 4:
        state["stem.weight"] = resize_kernel(state["stem.weight"], *vit.stem.weight.shape[2:])
    state["positions"] = resize_positions(
        state["positions"], vit.grid, from_token=with_token, to_token=vit.token is not None
    )
    for name, tensor in state.items():
        if tensor.shape != own[name].shape:
            hint = "; load with new_head=True for other classes" if name.startswith("head") else ""
            raise InputError(
                f"'{path}' does not fit: '{name}' has shape {tuple(tensor.shape)}, "
                f"the model needs {tuple(own[name].shape)}{hint}"
            )
        if not tensor.isfinite().all():
            raise InputError(f"'{path}' is damaged: '{name}' has values that are not finite")
    return state


def resize_kernel(weight: Tensor, height: int, width: int) -> Tensor:
    """Kernels of patches (D, C, h, w) for patches of height x width, by cubic interpolation.

    The values are multiplied by h w / (height width): a kernel sums over its patch, so that a smooth kernel answers a
    patch of one colour as before.
    """
    before = weight.shape[2] * weight.shape[3]
    return _cubic(weight, height, width) * (before / (height * width))


def resize_positions(positions: Tensor, grid: tuple[int, int], *, from_token: bool, to_token: bool) -> Tensor:
    """Positions (1, N, D) of a square grid of tokens for another grid, by cubic interpolation.

    The position of a class token, which comes first, is kept as it is, or dropped if the model has no such token.
    """
    if positions.ndim != 3 or len(positions) != 1 or positions.shape[1] <= from_token:
        raise InputError(f"the positions must have shape (1, tokens, width), got {tuple(positions.shape)}")
    token, table = positions[:, : int(from_token)], positions[:, int(from_token) :]
    side, wanted = math.isqrt(table.shape[1]), grid[0] * grid[1]
    if side * side == table.shape[1]:
        image = table.transpose(1, 2).unflatten(2, (side, side))
        table = _cubic(image, *grid).flatten(2).transpose(1, 2)
    elif table.shape[1] != wanted:
        raise InputError(
            f"the file has positions of {table.shape[1]} tokens, which are not a square grid and cannot be resized to "
            f"{grid[0]} x {grid[1]}; use the image size that it was trained at"
        )
    return torch.cat([token, table], 1) if to_token else table


def _cubic(image: Tensor, height: int, width: int) -> Tensor:
    """(B, C, h, w) -> (B, C, height, width); the same values where the size is the same."""
    if tuple(image.shape[2:]) == (height, width):
        return image
    wide = image.to(torch.float64 if image.dtype == torch.float64 else torch.float32)
    return interpolate(wide, (height, width), mode="bicubic", antialias=True, align_corners=False).to(image.dtype)
