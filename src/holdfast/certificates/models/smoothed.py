"""The smoothed classifier as a module: what a randomised-smoothing certificate speaks of, to deploy and to attack."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from holdfast.attacks.core.gradients import logits_of
from holdfast.certificates.smoothing.percentile import check_sigma
from holdfast.certificates.smoothing.smoothing import gaussian
from holdfast.certificates.smoothing.votes import BLOCK
from holdfast.errors import InputError, UnsupportedError, argument
from holdfast.random import Noise
from holdfast.results import CertifyResult
from holdfast.threats import L2
from holdfast.utils.intervals import binomial_p_value, check_alpha


class Smoothed(nn.Module):
    """Majority vote of a model over n noisy copies of its input, x + G with G ~ N(0, sigma^2 I).

    The copies use the same noise for every input, fixed by the seed: the same input gets the same answer, alone or in
    a batch. n copies stand for infinitely many, so an answer may differ from the true smoothed classifier's
    where the vote is close; `predict` then abstains.

    Args:
        model: from (B, ...) to logits (B, K).
        sigma: standard deviation of the noise in training, in the units of the input.
        n: noisy copies of each input.
        alpha: probability that `predict` gives a class that the true smoothed classifier does not.
        batch: noisy copies in one forward pass; memory grows with it, the answer does not change.

    Example:
        >>> model = Smoothed(nn.Linear(2, 2), 0.5, n=100).eval()
        >>> model(torch.rand(3, 2)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self, model: nn.Module, sigma: float, *, n: int = 1000, alpha: float = 0.001, seed: int = 0, batch: int = 1000
    ) -> None:
        super().__init__()
        check_sigma(sigma)
        check_alpha(alpha)
        if n < 1 or batch < 1:
            raise InputError(f"n and batch must be at least 1, got {n} and {batch}")
        self.model, self.sigma, self.n, self.alpha, self.seed, self.batch = model, sigma, n, alpha, seed, batch

    def extra_repr(self) -> str:
        return f"sigma={self.sigma:g}, n={self.n}, alpha={self.alpha:g}, seed={self.seed}"

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K): log((votes + 1) / (n + K)).

        Votes have no gradient. Where autograd asks for one, it is the gradient of the log of the mean softmax over the
        same copies, the soft classifier that SmoothAdv attacks (Salman et al., 2019); the values still count votes.
        """
        votes, soft = self._votes(x, self.seed, soft=torch.is_grad_enabled() and x.requires_grad)
        hard = ((votes + 1) / (self.n + votes.shape[1])).log().to(x)
        if soft is None:
            return hard
        smooth = soft.clamp(min=torch.finfo(soft.dtype).tiny).log()
        return hard + (smooth - smooth.detach())

    @torch.no_grad()
    def predict(self, x: Tensor, *, seed: int | None = None) -> Tensor:
        """Class of each input (B,), or -1 where the vote is too close to call.

        The two classes with most votes are compared by a two-sided binomial test at `alpha` (Cohen et al., 2019;
        Hung and Fithian, "Rank verification for exponential families", 2019). The statement is about an input that was
        chosen before the noise: for one that comes from an adversary who knows the seed, give another.
        """
        votes, _ = self._votes(x, self.seed if seed is None else seed)
        top = votes.topk(2, 1)
        sure = binomial_p_value(top.values[:, 0], top.values[:, 1]) <= self.alpha
        return torch.where(sure, top.indices[:, 0], -1)

    def differs(self, x: Tensor, y: Tensor) -> Tensor:
        """(B,) bool: is the class shown not to be y, by noise that `forward` does not use?

        An example that was made against `forward` may have been fitted to its noise; this one it has not seen.
        """
        found = self.predict(x, seed=self.seed + 1)
        return (found != y) & (found >= 0)

    def certify(self, x: Tensor, y: Tensor, radius: float, **options: Any) -> CertifyResult:
        """Is y the answer on the whole l2 ball? As `hf.certify(self, x, y, hf.L2(radius), "smoothing", **options)`."""
        # Imported here because the front door is built on this file.
        from holdfast.certificates import certify

        low, high = (float(end) for end in (x.min().clamp(max=0), x.max().clamp(min=1)))
        return certify(self, x, y, L2(radius, low=low, high=high), "smoothing", **options)

    def _votes(self, x: Tensor, seed: int, soft: bool = False) -> tuple[Tensor, Tensor | None]:
        """Votes (B, K), int64, and, if `soft`, the mean softmax (B, K)."""
        votes, shares = [], []
        for part in x.split(max(1, self.batch // BLOCK)):
            passes = [self._block(part, block, seed, soft) for block in range(0, self.n, BLOCK)]
            votes.append(torch.stack([counted for counted, _ in passes]).sum(0))
            if soft:
                shares.append(torch.stack([share for _, share in passes]).sum(0) / self.n)
        return torch.cat(votes), torch.cat(shares) if soft else None

    def _block(self, x: Tensor, start: int, seed: int, soft: bool) -> tuple[Tensor, Tensor]:
        """Votes and summed softmax of the copies from `start` on, (B, K) each."""
        number = min(BLOCK, self.n - start)
        key = Noise(seed, torch.zeros(1, dtype=torch.int64), 3).bits((1,))

        def shares(x: Tensor) -> tuple[Tensor, Tensor]:
            generator = torch.Generator(x.device).manual_seed((int(key) + start // BLOCK) & 0xFFFFFFFF)
            noise = gaussian(self.sigma)(x.new_zeros(x.shape[1:]), BLOCK, generator)[:number]
            copies = (x[:, None] + noise).flatten(0, 1)
            # The gradients that attacks use, also when the backward pass computes the block again by itself.
            logits = logits_of(self.model, copies) if soft else self.model(copies)
            if not bool(logits.isfinite().all()):
                raise InputError("the model returns NaN or infinite logits on noisy copies of its inputs")
            logits = logits.unflatten(0, (len(x), number))
            counted = nn.functional.one_hot(logits.argmax(2), logits.shape[2]).sum(1)
            return counted, logits.softmax(2).sum(1) if soft else counted

        # Only x is kept for the backward pass, not n copies of every layer.
        found: tuple[Tensor, Tensor] = checkpoint(shares, x, use_reentrant=False) if soft else shares(x)
        return found


def unwrap(model: Smoothed, method: str, options: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """The model inside, and the options of the certificate that speaks of `model`."""
    if method != "smoothing":
        raise UnsupportedError(
            f"a Smoothed model is certified by {argument('method', 'smoothing')}, not by '{method}', which would "
            "need its layers."
        )
    if options.get("sigma", model.sigma) != model.sigma:
        raise InputError(f"the Smoothed model has sigma {model.sigma:g}, the option says {options['sigma']:g}")
    own = {"sigma": model.sigma, "alpha": model.alpha, "seed": model.seed, "batch": model.batch}
    return model.model, own | options
