"""State dicts of vision transformers under the names of timm."""

import torch

D, HEADS, DEPTH, MLP, CLASSES = 8, 2, 2, 12, 5


def timm_weights(patch=4, grid=(4, 4), token=True):
    torch.manual_seed(0)
    shapes = {"patch_embed.proj.weight": (D, 3, patch, patch), "patch_embed.proj.bias": (D,)}
    shapes |= {"cls_token": (1, 1, D)} if token else {}
    shapes |= {"pos_embed": (1, grid[0] * grid[1] + token, D), "head.weight": (CLASSES, D), "head.bias": (CLASSES,)}
    for i in range(DEPTH):
        sizes = {"attn.qkv": (3 * D, D), "attn.proj": (D, D), "mlp.fc1": (MLP, D), "mlp.fc2": (D, MLP)}
        for name, size in sizes.items():
            shapes |= {f"blocks.{i}.{name}.weight": size, f"blocks.{i}.{name}.bias": size[:1]}
        shapes |= {f"blocks.{i}.{n}.{part}": (D,) for n in ("norm1", "norm2") for part in ("weight", "bias")}
    shapes |= {"norm.weight": (D,), "norm.bias": (D,)}
    return {name: torch.randn(shape, dtype=torch.float64) * 0.3 for name, shape in shapes.items()}
