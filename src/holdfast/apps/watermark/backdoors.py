"""Two attacks that first reconstruct the trigger: Neural Cleanse and Neural Laundering.

Neural Cleanse (Wang et al., "Neural Cleanse: identifying and mitigating backdoor attacks in neural networks", 2019)
looks, for each class, for the smallest patch that sends clean images to it. A class with an unusually small patch is
taken to have a backdoor, which is unlearnt with patched images and their right labels. Neural Laundering (Aiken et
al., "Neural network laundering: removing black-box backdoor watermarks from deep neural networks", 2021) first resets
the hidden units that the patch excites.
"""

import copy
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.apps.watermark.adversaries import Tuning, train_on
from holdfast.apps.watermark.anatomy import last_layer
from holdfast.attacks.core.gradients import frozen
from holdfast.errors import InputError

_MAD = 1.4826  # makes the median absolute deviation of a normal distribution its standard deviation


@dataclass(frozen=True, eq=False)
class Patches:
    """One patch for each class.

    Attributes:
        mask: (K, 1, H, W) in [0, 1].  pattern: (K, C, H, W) in [0, 1].
        suspects: classes whose mask is unusually small; the class with the smallest if none is.
    """

    mask: Tensor
    pattern: Tensor
    suspects: list[int]

    def put(self, x: Tensor, k: int) -> Tensor:
        """The images (B, C, H, W) with the patch of class k."""
        return (1 - self.mask[k]) * x + self.mask[k] * self.pattern[k]


def reconstruct(
    model: nn.Module,
    x: Tensor,
    *,
    steps: int = 100,
    lr: float = 0.1,
    weight: float = 0.01,
    outlier: float = 2.0,
    seed: int = 0,
) -> Patches:
    """Minimise cross-entropy to class k + weight |mask|_1 over mask and pattern, all classes at once.

    Args:
        model: in eval mode, on images.
        x: clean images (B, C, H, W).
        outlier: deviations (median absolute, scaled) below the median from which on a mask is unusually small.
    """
    if x.ndim != 4 or len(x) == 0:
        raise InputError(f"patches need images of shape (B, C, H, W), got {tuple(x.shape)}")
    with torch.no_grad():
        classes = model(x[:1]).shape[1]
    generator = torch.Generator().manual_seed(seed)
    shape = (classes, 1 + x.shape[1], *x.shape[2:])
    free = (torch.randn(shape, generator=generator) * 0.1).to(x)
    free[:, 0] -= 2.0  # masks start small
    free.requires_grad_(True)
    optimizer = torch.optim.Adam([free], lr)
    labels = torch.arange(classes, device=x.device).repeat_interleave(len(x))
    with frozen(model), torch.enable_grad():
        for _ in range(steps):
            mask, pattern = free[:, :1].sigmoid(), free[:, 1:].sigmoid()
            patched = ((1 - mask)[:, None] * x + (mask * pattern)[:, None]).flatten(0, 1)
            # A sum over classes: each patch has a problem of its own.
            loss = classes * cross_entropy(model(patched), labels) + weight * mask.sum()
            (free.grad,) = torch.autograd.grad(loss, [free])
            optimizer.step()
    mask, pattern = free.detach()[:, :1].sigmoid(), free.detach()[:, 1:].sigmoid()
    size = mask.flatten(1).sum(1)
    spread = _MAD * (size - size.median()).abs().median()
    suspects = (size.median() - size > outlier * spread).nonzero()[:, 0].tolist()
    return Patches(mask, pattern, suspects or [int(size.argmin())])


def neural_cleanse(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    inputs: int = 64,
    share: float = 0.2,
    steps: int = 100,
    **how: Unpack[Tuning],
) -> nn.Module:
    """Fine-tune with the reconstructed patches on the `share` of each batch, with the right labels."""
    model = copy.deepcopy(model).eval().requires_grad_(True)
    patches = reconstruct(model, x[:inputs], steps=steps, seed=how["seed"])
    return _unlearn(model, patches, x, y, share, **how)


def neural_laundering(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    inputs: int = 64,
    share: float = 0.2,
    steps: int = 100,
    reset: float = 0.1,
    **how: Unpack[Tuning],
) -> nn.Module:
    """Cut the head off from the `reset` share of hidden units that the patches excite most, then as Neural Cleanse."""
    model = copy.deepcopy(model).eval().requires_grad_(True)
    patches = reconstruct(model, x[:inputs], steps=steps, seed=how["seed"])
    head = last_layer(model)
    with torch.no_grad():
        clean = _hidden(model, x[:inputs], head)
        excess = torch.stack([_hidden(model, patches.put(x[:inputs], k), head) - clean for k in patches.suspects])
        units = excess.mean((0, 1)).argsort(descending=True)[: round(reset * head.in_features)]
        head.weight[:, units] = 0
    return _unlearn(model, patches, x, y, share, **how)


def _unlearn(
    model: nn.Module, patches: Patches, x: Tensor, y: Tensor, share: float, **how: Unpack[Tuning]
) -> nn.Module:
    def change(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x, count = x.clone(), round(share * len(x))
        for i, k in enumerate(patches.suspects):
            rows = slice(i, count, len(patches.suspects))
            x[rows] = patches.put(x[rows], k)
        return x

    return train_on(model, x, y, change=change, **how)


def _hidden(model: nn.Module, x: Tensor, head: nn.Linear) -> Tensor:
    """What the head reads, (B, D)."""
    seen: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    try:
        model(x)
    finally:
        handle.remove()
    return seen[0]
