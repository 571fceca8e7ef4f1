"""Trace of the Hessian of robust losses with respect to the weights of the linear top layer, in closed form.

How sharply the loss bends around the weights is a term of a PAC-Bayes objective (docs/generalisation.md); here it costs
next to nothing (Wang, Ding, Levinboim, Chen and Soricut, "Improving robust generalization by direct PAC-Bayesian bound
minimization", 2023; several formulas corrected). The trace of a sum of losses is the sum of their traces.

Letters: f features (B, d), the input of the top layer; s softmax of the logits (B, K); h = s - s^2; Phi_k column k of
diag(s) - s s^T; a prime marks the attacked input, which is a constant. Each form takes outputs with features and gives
one value per input, shape (B,), with gradients for features and logits; it computes half precision in float32. `bias`
says that the top layer has a bias, which then counts among its weights.
"""

import torch
from torch import Tensor

from holdfast.errors import InputError
from holdfast.training.outputs import Output


def trace_ce(at: Output, *, bias: bool = False) -> Tensor:
    """Cross-entropy: |f|^2 sum(h), whatever the label, smoothed or not; shape (B,).

    Feature energy times Gini impurity: between 0 (a certain prediction) and |f|^2 (1 - 1/K) (a uniform one).

    >>> trace_ce(Output(logits=torch.zeros(1, 2), features=torch.tensor([[3.0, 4.0]])))
    tensor([12.5000])
    """
    _check(at)
    return inner(at.z, at.z, bias) * _impurity(at.logits)


def trace_kl(clean: Output, adv: Output, *, stop_gradient: bool = True, bias: bool = False) -> Tensor:
    """Divergence KL(s | s'): |f'|^2 sum(h') [+ G], shape (B,).

    G = |f|^2 [sum(h) + sum_k s_k (1 - 2 s_k)(D_k - KL)] - 2 f.f' sum(h), D = log s - log s', is there only if the loss
    has a gradient through its clean logits (`stop_gradient=False`). Without it the trace is never negative.
    """
    _check(clean)
    trace = trace_ce(adv, bias=bias)
    if stop_gradient:
        return trace
    log_s = _log_softmax(clean.logits)
    s, difference = log_s.exp(), log_s - _log_softmax(adv.logits)
    kl = (s * difference).sum(1, keepdim=True)
    bend = (s * (1 - 2 * s) * (difference - kl)).sum(1)
    impurity = _impurity(clean.logits)
    trace = trace + inner(clean.z, clean.z, bias) * (impurity + bend)
    return trace - 2 * inner(clean.z, adv.z, bias) * impurity


def trace_pairing(clean: Output, adv: Output, *, stop_gradient: bool = True, bias: bool = False) -> Tensor:
    """Distance of the softmax outputs, |s - s'|^2, shape (B,); may be negative.

    2 sum_k [A'_k], A'_k = |f'|^2 (|Phi'_k|^2 - (1 - 2 s'_k) Phi'_k.(s - s')). With a gradient through the clean logits:
    2 sum_k [A'_k + A_k - 2 f.f' Phi_k.Phi'_k], A_k being A'_k with the roles of x and x' exchanged.
    |Phi_k|^2 = s_k^2 (1 - 2 s_k + |s|^2) and Phi_k.v = s_k (v_k - s.v), so that no matrix is built.
    """
    _check(clean)
    s, s_adv = _log_softmax(clean.logits).exp(), _log_softmax(adv.logits).exp()
    gap = s - s_adv
    pairing = inner(adv.z, adv.z, bias) * _pairing(s_adv, -gap)
    if not stop_gradient:
        columns = (s * s_adv * (1 - s - s_adv + (s * s_adv).sum(1, keepdim=True))).sum(1)
        pairing = pairing + inner(clean.z, clean.z, bias) * _pairing(s, gap)
        pairing = pairing - 2 * inner(clean.z, adv.z, bias) * columns
    return 2 * pairing


def trace_logit_pairing(clean: Output, adv: Output, *, stop_gradient: bool = True, bias: bool = False) -> Tensor:
    """Distance of the logits, |z - z'|^2, shape (B,): 2 K |f'|^2, or 2 K |f - f'|^2 with a gradient through both."""
    moved = adv.z if stop_gradient else adv.z - clean.z
    return 2 * clean.logits.shape[1] * inner(moved, moved, bias and stop_gradient)  # a bias moves both logits alike


def trace_margin(at: Output, y: Tensor, *, bias: bool = False) -> Tensor:
    """Margin of MART, -log(1 - s_k*): |f|^2 (|r|^2 - |s|^2), r the softmax without k*; shape (B,).

    k* is the likeliest class other than y, held fixed. The loss is the log-sum-exp of all logits less the log-sum-exp
    of all but k*: no division by 1 - s_k*, which may underflow.
    """
    _check(at)
    if at.logits.shape[1] < 2:
        raise InputError("MART compares the label with another class; the logits have one class only")
    rival = at.logits.detach().scatter(1, y[:, None], -torch.inf).argmax(1, keepdim=True)
    without = trace_ce(Output(at.logits.scatter(1, rival, -torch.inf), at.z), bias=bias)
    return trace_ce(at, bias=bias) - without


def trace_doubted_kl(
    clean: Output, adv: Output, y: Tensor, *, stop_gradient: bool = True, bias: bool = False
) -> Tensor:
    """Divergence of MART, (1 - s_y) KL(s | s'): (1 - s_y) times `trace_kl`, shape (B,).

    With a gradient through the clean logits the factor a = 1 - s_y bends too: + 2 grad(a).grad(KL) + KL trace(a), where
    ds_y/dz_k = Phi_yk and d^2 s_y/dz_k^2 = (1 - 2 s_k) Phi_yk.
    """
    log_s = _log_softmax(clean.logits)
    s, label = log_s.exp(), y[:, None]
    doubt = _complement(s).gather(1, label)[:, 0]
    trace = doubt * trace_kl(clean, adv, stop_gradient=stop_gradient, bias=bias)
    if stop_gradient:
        return trace
    log_s_adv = _log_softmax(adv.logits)
    difference = log_s - log_s_adv
    kl = (s * difference).sum(1, keepdim=True)
    slope = s.gather(1, label) * (torch.zeros_like(s).scatter(1, label, 1.0) - s)  # Phi_y
    energy, both = inner(clean.z, clean.z, bias), inner(clean.z, adv.z, bias)
    turn = energy * (slope * s * (difference - kl)).sum(1) + both * (slope * (log_s_adv.exp() - s)).sum(1)
    return trace - 2 * turn - energy * (kl * (1 - 2 * s) * slope).sum(1)


def inner(a: Tensor, b: Tensor, bias: bool) -> Tensor:
    """a.b of each input, (B,); a bias is the weight of one more feature, which is always 1."""
    return (_wide(a) * _wide(b)).sum(1) + float(bias)


def _check(at: Output) -> None:
    if at.z.ndim != 2 or at.logits.ndim != 2 or len(at.z) != len(at.logits):
        raise InputError(
            "expected features (B, d), the input of the top layer, and logits (B, K), got shapes "
            f"{tuple(at.z.shape)} and {tuple(at.logits.shape)}"
        )


def _wide(values: Tensor) -> Tensor:
    """Squares of half-precision numbers overflow."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(_wide(logits), 1)


def _complement(s: Tensor) -> Tensor:
    """1 - s; for the likeliest class the sum of the others, as 1 - s would cancel to zero for a certain prediction."""
    top = s.argmax(1, keepdim=True)
    return (1 - s).scatter(1, top, s.scatter(1, top, 0.0).sum(1, keepdim=True))


def _impurity(logits: Tensor) -> Tensor:
    """sum(h) = 1 - |s|^2, (B,)."""
    s = _log_softmax(logits).exp()
    return (s * _complement(s)).sum(1)


def _pairing(s: Tensor, gap: Tensor) -> Tensor:
    """sum_k |Phi_k|^2 + (1 - 2 s_k) Phi_k.gap, (B,)."""
    size = s.square() * (1 - 2 * s + s.square().sum(1, keepdim=True))
    bend = (1 - 2 * s) * s * (gap - (s * gap).sum(1, keepdim=True))
    return (size + bend).sum(1)
