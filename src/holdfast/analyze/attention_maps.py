"""Attention maps of vision transformers: what each token looks at, and where attention is sparse."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.models.zoo.vit import Attention, VisionTransformer


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """Attention of every block: `weights` (B, depth, heads, N, N), rows that sum to one; `grid` of the image tokens."""

    weights: Tensor
    grid: tuple[int, int]
    token: bool  # whether the first token is the class token

    def to_image(self) -> Tensor:
        """Where the last block looks, mean over heads, (B, rows, columns), summing to one over image and class token.

        From the class token if there is one, else the mean over the tokens, as the head sees their mean.
        """
        last = self.weights[:, -1].mean(1)
        row = last[:, 0, 1:] if self.token else last.mean(1)
        image: Tensor = row.unflatten(1, self.grid)
        return image

    def entropy(self) -> Tensor:
        """Mean entropy of the rows in nats, (B, depth): 0 looks at one token, log N at all alike."""
        return -(self.weights * self.weights.clamp(min=1e-30).log()).sum(-1).mean((2, 3))


@torch.no_grad()
def attention_maps(model: nn.Module, x: Tensor) -> AttentionMaps:
    """softmax(q k^T / sqrt(d)) of every head of every block at inputs x (B, C, H, W); the model stays as it is.

    Example:
        >>> from holdfast.models import make_model
        >>> vit = make_model("vit-ti", dim=12, depth=2, heads=3, mlp_dim=8, patch=8)
        >>> tuple(attention_maps(vit, torch.rand(1, 3, 32, 32)).weights.shape)
        (1, 2, 3, 17, 17)
    """
    found = [module for module in model.modules() if isinstance(module, VisionTransformer)]
    if len(found) != 1:
        raise InputError("attention maps need a model with one vision transformer of `holdfast models`")
    seen: list[Tensor] = []
    layers = [module for module in found[0].modules() if isinstance(module, Attention)]

    def keep(module: nn.Module, inputs: Sequence[Tensor]) -> None:
        assert isinstance(module, Attention)
        q, k = module._split(module.query(inputs[0])), module._split(module.key(inputs[0]))
        seen.append((q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1))

    handles = [layer.register_forward_pre_hook(keep) for layer in layers]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return AttentionMaps(torch.stack(seen, 1), found[0].grid, found[0].token is not None)
