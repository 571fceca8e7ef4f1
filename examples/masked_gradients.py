"""Masked gradients: a model that fools an attack without being robust, and what gives it away."""

from torch import Tensor, autograd, nn

import holdfast as hf
from holdfast.attacks.core.indicators import indicators, verdict


class Masked(nn.Sequential):
    """The same model for 8-bit images; each mask by itself makes gradients of the cross-entropy vanish."""

    def forward(self, x: Tensor) -> Tensor:
        return 1000 * super().forward((255 * x).round() / 255)


def plain_pgd(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    """PGD as many scripts have it: the cross-entropy, and whatever gradient torch gives."""
    x_adv = x
    for _ in range(20):
        x_adv = x_adv.detach().requires_grad_(True)
        (gradient,) = autograd.grad(nn.functional.cross_entropy(model(x_adv), y), x_adv)
        x_adv = (x_adv + eps / 8 * gradient.sign()).clamp(x - eps, x + eps).clamp(0, 1)
    return x_adv.detach()


def main(*, epochs: int = 1, n: int = 60, eps: float = 0.1) -> None:
    """Train a model for a few seconds; attack it as it is, and behind the masks."""
    data, network = hf.load_data("mnist-mini").test, hf.train("mnist-mini-standard", epochs=epochs).model
    x, y = data.x[:n], data.y[:n]
    for name, model in (("as it is", network), ("masked", Masked(network).eval())):
        plain = (model(plain_pgd(model, x, y, eps)).argmax(1) == y).float().mean()
        result = hf.attack(model, x, y, hf.Linf(eps))
        held = 1 - result.success.float().mean()
        level, why = verdict(indicators(model, x, y, hf.Linf(eps), result))
        print(f"{name}: {plain:.0%} hold under plain PGD, {held:.0%} under cascade, which is {level}: {why}")


if __name__ == "__main__":
    main()
