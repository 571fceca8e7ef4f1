"""Two published defences against patches seem to help until the attack knows about them."""

import torch
from torch import nn

import holdfast as hf
from holdfast.apps.defences import DigitalWatermarking, LocalGradientSmoothing
from holdfast.attacks import StraightThrough


def main(*, epochs: int = 2, n: int = 50, steps: int = 20, restarts: int = 8) -> None:
    """Train a model for a few seconds; attack it bare, then each defended model, without and with knowledge."""
    data, model = hf.load_data("mnist-mini").test, hf.train("mnist-mini-standard", epochs=epochs).model
    x, y = data.x[:n], data.y[:n]

    def attack(network: nn.Module) -> torch.Tensor:
        how = {"steps": steps, "restarts": restarts, "locations": "random"}
        return hf.attack(network.eval(), x, y, hf.Patch(6, 6), "patch-pgd", **how).x_adv

    def accuracy(network: nn.Module, images: torch.Tensor) -> str:
        return f"{(network(images).argmax(1) == y).float().mean():.0%}"

    unaware = attack(model)
    print(f"no defence: clean {accuracy(model, x)}, attacked {accuracy(model, unaware)}")
    smoothing = LocalGradientSmoothing(window=5, overlap=2, threshold=0.4)
    masking = DigitalWatermarking(model, quantile=0.95)
    # Smoothing is differentiable; past the mask of watermarking the gradient goes straight through.
    for name, defence, seen in (("smoothing", smoothing, smoothing), ("watermark", masking, StraightThrough(masking))):
        network, aware = nn.Sequential(defence, model), attack(nn.Sequential(seen, model))
        print(f"{name}: clean {accuracy(network, x)}, attacked as if it were not there {accuracy(network, unaware)},")
        print(f"  attacked with it {accuracy(network, aware)}")


if __name__ == "__main__":
    main()
