"""Dense adversary generation against a detector, smoothed or not: push every object to a wrong class.

Minimise over ||delta||_2 <= epsilon

    E_G sum over objects o of BCE(s_o(x + delta + G), onehot(t_o)),   t_o a wrong class for o,

by projected gradient steps, with a few draws of the noise G for each (Xie et al., "Adversarial examples for semantic
segmentation and object detection", 2017; Chiang et al., 2020). It shows what a certificate leaves open.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from holdfast.apps.detection.boxes import iou
from holdfast.apps.detection.metrics import Truth
from holdfast.checks import check_inputs
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.threats import L2

Scores = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Images (B, C, H, W) to all candidates before suppression, with gradients: boxes (B, A, 4), class logits (B, A, K)."""


def dag(
    scores: Scores,
    x: Tensor,
    truth: Truth,
    threat: L2,
    *,
    sigma: float = 0.0,
    steps: int = 20,
    samples: int = 5,
    step_size: float = 0.2,
    overlap: float = 0.5,
    seed: int = 0,
) -> Tensor:
    """Images within the threat on which the detector should fail, shape of x.

    Args:
        scores: see `Scores`; with a denoiser in it if the smoothed detector has one.
        x: images, shape (B, C, H, W).  truth: boxes (K, 4) and labels (K,) of the objects of each.
        sigma: standard deviation of the noise of the smoothed detector; 0 attacks the detector itself.
        samples: draws of the noise for each gradient.
        step_size: length of a step as a share of the radius.
        overlap: candidates that overlap an object by this much are attacked, and the nearest one in any case.
        seed: decides the noise and the wrong classes.
    """
    if not isinstance(threat, L2):
        raise InputError(f"the attack moves within an L2 ball; got {threat}")
    check_inputs(x, threat.low, threat.high)
    if len(truth) != len(x):
        raise InputError(f"there are {len(x)} images but true boxes for {len(truth)}")
    if sigma < 0 or steps < 1 or samples < 1:
        raise InputError(f"need sigma >= 0, steps >= 1 and samples >= 1, got {sigma}, {steps} and {samples}")
    samples = samples if sigma > 0 else 1
    noise = Noise.for_batch(seed, len(x), x.device)
    with torch.no_grad():
        boxes, logits = scores(x)
    attacked, target = _targets(boxes, logits.shape[2], truth, noise.fork(0), overlap)
    x_adv = x.clone()
    for step in range(steps):
        x_adv.requires_grad_(True)
        drawn = [noise.fork(1 + step * samples + i).normal(x.shape[1:], x.dtype) for i in range(samples)]
        noisy = torch.cat([x_adv + sigma * g for g in drawn])
        logits, weight = scores(noisy)[1], attacked.repeat(samples, 1)[..., None]
        loss = binary_cross_entropy_with_logits(logits, target.repeat(samples, 1, 1), weight=weight, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, x_adv)
        x_adv = x_adv.detach()
        length = gradient.flatten(1).norm(dim=1).clamp(min=torch.finfo(x.dtype).tiny).view(-1, 1, 1, 1)
        x_adv = threat.project(x_adv - step_size * threat.eps * gradient / length, x)
    return x_adv


def _targets(
    boxes: Tensor, classes: int, truth: Sequence[tuple[Tensor, Tensor]], noise: Noise, overlap: float
) -> tuple[Tensor, Tensor]:
    """Which candidates to attack, (B, A) of zeros and ones, and the one-hot wrong class of each, (B, A, K)."""
    if classes < 2:
        raise InputError("the detector knows one class only, and no wrong one to push towards")
    attacked, target = boxes.new_zeros(boxes.shape[:2]), boxes.new_zeros(*boxes.shape[:2], classes)
    most = max((len(labels) for _, labels in truth), default=0)
    turn = 1 + noise.integers(classes - 1, (most,))  # added to the class, modulo: any other class, each as likely
    for i, (objects, labels) in enumerate(truth):
        if len(labels) == 0:
            continue
        shared = iou(boxes[i][:, None], objects[None].to(boxes))
        near, owner = shared.max(1)
        chosen = near >= overlap
        chosen[shared.argmax(0)], owner[shared.argmax(0)] = True, torch.arange(len(labels), device=owner.device)
        wrong = (labels.to(turn) + turn[i, : len(labels)]) % classes
        attacked[i] = chosen.to(attacked)
        target[i].scatter_(1, wrong[owner][:, None], 1.0)
    return attacked, target
