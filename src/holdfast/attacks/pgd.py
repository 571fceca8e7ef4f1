"""Projected gradient ascent on the loss: FGSM, PGD, and the inner loop of adversarial training."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from holdfast.attacks.losses import Loss, get_loss
from holdfast.attacks.stages import run_stages
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import register
from holdfast.results import AttackResult
from holdfast.threats import L1, L2, Box, Linf, Threat, norm_2

BALLS = ("linf", "l2", "l1", "box")


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No gradients for the parameters inside: the backward pass then computes the input's gradient alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


class _FoldedConvolution(torch.autograd.Function):
    """conv2d with constant weights; the gradient for its input is a matrix product and a fold."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any) -> Tensor:
        return F.conv2d(x, weight, bias, stride, padding, dilation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, stride, padding, dilation = inputs
        ctx.save_for_backward(weight)
        ctx.shape, ctx.geometry = x.shape, (weight.shape[-2:], dilation, padding, stride)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        columns = weight.flatten(1).T @ gradients[0].flatten(2)
        # All inputs as channels of one: `fold` has a fixed cost for each input, none for each channel.
        folded = F.fold(columns.reshape(1, -1, columns.shape[-1]), ctx.shape[-2:], *ctx.geometry)
        return folded.view(ctx.shape), None, None, None, None, None


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    constant = not weight.requires_grad and (bias is None or not bias.requires_grad)
    by_onednn = input.device.type == "cpu" and input.dtype == torch.float32
    # The columns of the product then take no more memory than the layer's output.
    thin = weight.shape[1] <= 4 and weight[0].numel() <= len(weight)
    plain = input.ndim == 4 and groups == 1 and not isinstance(padding, str)
    if input.requires_grad and constant and by_onednn and thin and plain:
        folded: Tensor = _FoldedConvolution.apply(input, weight, bias, stride, padding, dilation)  # type: ignore[no-untyped-call]
        return folded
    return F.conv2d(input, weight, bias, stride, padding, dilation, groups)


class _ThinConvolutions(TorchFunctionMode):
    """Inside, convolutions of one to four channels (grey, RGB) get a faster gradient for their input on the CPU.

    oneDNN works on blocks of eight channels, so that the gradient for a grey image costs it eight times what it should.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        thin = func is torch.conv2d and not torch.compiler.is_compiling()  # the compiler has kernels of its own
        return (_conv2d if thin else func)(*args, **(kwargs or {}))


def input_gradient(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the loss at x (shape of x), the loss (B,) and the logits (B, K), detached."""
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        with _ThinConvolutions():
            logits = model(x)
        values = loss(logits, y)
        (gradient,) = torch.autograd.grad(values.sum(), x)
    return gradient, values.detach(), logits.detach()


def steepest(threat: Threat, gradient: Tensor, x: Tensor, sparsity: float) -> Tensor:
    """Direction of steepest ascent with one unit of the threat's norm, shape of x.

    Linf: sign(g). L2: g / |g|. L1: equal steps on the share `sparsity` of values with the largest |g| that can still
    move (Tramer and Boneh, "Adversarial training and robustness for multiple perturbations", 2019); at least one value.
    """
    if isinstance(threat, Linf):
        return gradient.sign()
    if isinstance(threat, Box):
        return gradient.sign() * threat.radius.to(x)
    flat = gradient.flatten(1)
    if isinstance(threat, L2):
        norm = norm_2(flat).clamp(min=torch.finfo(x.dtype).tiny)
        return (flat / norm[:, None]).view_as(x)
    if isinstance(threat, L1):
        room = torch.where(flat > 0, threat.high - x.flatten(1), x.flatten(1) - threat.low)
        size = torch.where(room > 0, flat.abs(), torch.zeros_like(flat))
        count = max(1, round(sparsity * flat.shape[1]))
        index = size.topk(count, dim=1).indices
        return torch.zeros_like(flat).scatter(1, index, flat.gather(1, index).sign() / count).view_as(x)
    raise InputError(f"gradient steps are not defined for the threat '{threat}'")


def perturb(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise,
    steps: int,
    step_size: float,
    loss: str | Loss = "ce",
    random_start: bool = True,
    sparsity: float = 0.01,
) -> Tensor:
    """The last iterate of projected gradient ascent, all steps for every input: what adversarial training needs."""
    loss = get_loss(loss)
    x_adv = threat.random_start(x, noise) if random_start else x
    with frozen(model):
        for _ in range(steps):
            gradient, _, _ = input_gradient(model, x_adv, y, loss)
            x_adv = threat.project(x_adv + step_size * steepest(threat, gradient, x_adv, sparsity), x)
    return x_adv.detach()


def _ascend(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    x_start: Tensor,
    *,
    steps: int,
    step_size: float,
    loss: Loss,
    sparsity: float,
    name: str,
) -> AttackResult:
    """One run; an input is done at its first misclassified iterate, and keeps that one.

    Done inputs leave in groups, so that few batch sizes occur: the backend builds new kernels for each new size, which
    costs more than to carry some inputs along. Those are neither changed nor counted.
    """
    group = 2 ** max(0, len(x).bit_length() - 4)  # a power of two, a sixteenth to an eighth of the batch
    found = x_start.clone()
    success = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    queries = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    row = torch.arange(len(x), device=x.device)
    x_adv, best, best_loss, done = x_start, x_start, x.new_full((len(x),), -torch.inf), success
    for step in range(steps + 1):
        queries[row] += ~done
        if step < steps:
            gradient, values, logits = input_gradient(model, x_adv, y, loss)
        else:
            logits = model(x_adv)
            values = loss(logits, y)
        wrong = logits.argmax(1) != y
        better = ~done & (wrong | (values > best_loss))
        best = torch.where(better.view(-1, *[1] * (x.ndim - 1)), x_adv, best)
        best_loss = torch.where(better, values, best_loss)
        done = done | wrong
        count = int(done.sum())
        if step == steps or count == len(done):
            break
        size = group * math.ceil((len(done) - count) / group)
        if size < len(done):
            found[row], success[row] = best, done
            stay = done.byte().argsort(stable=True)[:size]
            row, done, x, y, x_adv = row[stay], done[stay], x[stay], y[stay], x_adv[stay]
            gradient, best, best_loss = gradient[stay], best[stay], best_loss[stay]
        x_adv = threat.project(x_adv + step_size * steepest(threat, gradient, x_adv, sparsity), x)
    found[row], success[row] = best, done
    by = tuple(name if broken else "" for broken in success.tolist())
    return AttackResult(found, success, by, queries.clamp(max=steps), queries)


@register(
    "attack",
    "pgd",
    summary="projected gradient ascent with random restarts",
    guarantee="upper bound",
    threats=BALLS,
    reference="Madry et al., Towards deep learning models resistant to adversarial attacks, 2018",
)
@torch.no_grad()
def pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    steps: int = 40,
    step_size: float | None = None,
    restarts: int = 1,
    loss: str | Loss = "ce",
    random_start: bool = True,
    sparsity: float = 0.01,
) -> AttackResult:
    """Projected gradient ascent; an input leaves the batch once broken, restarts run on the survivors alone.

    Per step: x_adv <- project(x_adv + step_size * steepest(gradient)).

    Args:
        model: from (B, ...) to logits (B, K), in eval mode.
        x: inputs, shape (B, ...).  y: labels, shape (B,).
        threat: an Lp ball.
        noise: source of the random starts; seed 0 for inputs 0 ... B-1 if none is given.
        steps: gradient steps of each run.
        step_size: in the threat's own unit; 2.5 * budget / steps if none is given.
        restarts: runs in all; the first one included.
        loss: "ce", "margin" or a function (logits, y) -> (B,) to maximise.
        random_start: start at a random point of the set instead of x.
        sparsity: share of the values that one L1 step moves.
    """
    if steps < 1 or restarts < 1:
        raise InputError(f"steps and restarts must be at least 1, got {steps} and {restarts}")
    step_size = 2.5 * threat.budget / steps if step_size is None else step_size
    noise = noise or Noise.for_batch(0, len(x), x.device)
    loss_function = get_loss(loss)

    def run(restart: int, x: Tensor, y: Tensor, noise: Noise) -> AttackResult:
        x_start = threat.random_start(x, noise.fork(restart)) if random_start else x
        return _ascend(
            model,
            x,
            y,
            threat,
            x_start,
            steps=steps,
            step_size=step_size,
            loss=loss_function,
            sparsity=sparsity,
            name="pgd",
        )

    with frozen(model):
        return run_stages(x, y, noise, [lambda *task, r=r: run(r, *task) for r in range(restarts)])


@register(
    "attack",
    "fgsm",
    summary="one gradient step of the full budget",
    guarantee="upper bound",
    threats=BALLS,
    reference="Goodfellow, Shlens and Szegedy, Explaining and harnessing adversarial examples, 2015",
)
@torch.no_grad()
def fgsm(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    noise: Noise | None = None,
    loss: str | Loss = "ce",
) -> AttackResult:
    """x + budget * steepest(gradient), projected: exact on linear models, weak elsewhere. Prefer `pgd`.

    For L1 all of the budget goes to the one value with the largest gradient.
    """
    del noise  # deterministic; taken so that every attack can be called in the same way
    with frozen(model):
        return _ascend(
            model, x, y, threat, x, steps=1, step_size=threat.budget, loss=get_loss(loss), sparsity=0.0, name="fgsm"
        )
