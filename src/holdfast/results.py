"""What the methods return: small frozen dataclasses of per-input tensors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class AttackResult:
    """What an attack found.

    Attributes:
        x_adv: the strongest input found inside the threat set, shape of x. Where `success`, it is misclassified.
        success: (B,) bool. True where `x_adv` is not classified as `y`; misclassified clean inputs count.
        by: attack that broke each input: "clean" where x was misclassified already, "" where nothing broke it.
        gradients: (B,) int64, gradient evaluations spent on each input.
        queries: (B,) int64, forward passes spent on each input, including the passes of gradients.
    """

    x_adv: Tensor
    success: Tensor
    by: tuple[str, ...]
    gradients: Tensor
    queries: Tensor


@dataclass(frozen=True, eq=False)
class Bounds:
    """Bounds that hold for every output over the threat set: `lower`, `upper` of shape (B, K)."""

    lower: Tensor
    upper: Tensor


@dataclass(frozen=True, eq=False)
class CertifyResult:
    """What a certificate proved.

    Attributes:
        certified: (B,) bool. True where no input of the threat set changes the class from `y`.
        margin: (B,) proven lower bound of min over classes j != y of z_y - z_j over the threat set.
        radius: (B,) largest radius proved, or None where the method does not search for it.
        alpha: probability that the statement for one input is wrong; 0 for a deterministic proof.
        by: name of the certificate that decided each input; empty where none was needed.
    """

    certified: Tensor
    margin: Tensor
    radius: Tensor | None = None
    alpha: float = 0.0
    by: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Explanation:
    """How much each value of an input contributes to the answer of the model.

    Attributes:
        attribution: signed, shape of x.
        ok: (B,) bool. True where the method kept its promise: a boundary was found, the completeness error is small.
        error: (B,) completeness error |sum A - (f(x) - f(b))| / |f(x) - f(b)|; NaN for methods without a baseline b.
        gradients: (B,) int64, gradient evaluations spent on each input; for methods without gradients, model passes.
        by: what was explained, for each input, and by which fallback where `ok` is False.
        slope: the gradient, averaged over the path (the attribution without its factor x - b), shape of x, or None.
        boundary: the nearest point found that the model puts into another class, shape of x, or None; x itself where
            none was found.
        distance: (B,) distance from x to `boundary`, infinite where none was found; or None.
    """

    attribution: Tensor
    ok: Tensor
    error: Tensor
    gradients: Tensor
    by: tuple[str, ...]
    slope: Tensor | None = None
    boundary: Tensor | None = None
    distance: Tensor | None = None


@dataclass(frozen=True, eq=False)
class TrainResult:
    """A trained model, its history (one row per epoch) and the folder of the run, if it was kept."""

    model: nn.Module
    history: list[dict[str, Any]]
    path: Path | None
