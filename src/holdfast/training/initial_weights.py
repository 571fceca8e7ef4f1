"""Fresh weights for certified training."""

import math

import torch
from torch import nn


@torch.no_grad()
def ibp_weights(model: nn.Module, seed: int) -> nn.Module:
    """Draw the weights of all linear and convolutional layers anew, so that intervals keep their width; in place.

    A layer with n inputs for each output turns the width w of an interval into n E|weight| w, and a ReLU halves it on
    average: N(0, 2 pi / n^2) has E|weight| = 2 / n. The usual rules, which keep the variance of activations, let the
    width grow by a factor of about sqrt(n) in every layer. (Shi et al., "Fast certified robust training with short
    warmup", 2021.) Biases become zero.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            fan_in = module.weight[0].numel()
            drawn = torch.randn(module.weight.shape, generator=generator, dtype=torch.float64)
            module.weight.copy_(drawn * (math.sqrt(2 * math.pi) / fan_in))
            if module.bias is not None:
                module.bias.zero_()
    return model
