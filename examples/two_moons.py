"""Two Moons: does a penalty on the curvature of only the top layer flatten the whole network? Several seeds."""

from statistics import mean

import torch
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.training.curvature import trace_relu_layers

ARMS = {"Standard": (0.0, slice(None)), "Top": (0.5, slice(-1, None)), "Full": (0.05, slice(None))}  # weight, layers


def main(*, seeds: int = 5, epochs: int = 100, width: int = 100) -> None:
    """Train three ways with each seed; compare traces over all weights, as means of the last fifth of the epochs."""
    ends = {arm: [] for arm in ARMS}
    for arm, seed in ((arm, seed) for arm in ARMS for seed in range(seeds)):
        torch.manual_seed(seed)  # the same points, weights and batches for all arms
        y, angle, (weight, layers), traces = torch.arange(500) % 2, torch.pi * torch.rand(500), ARMS[arm], []
        x = torch.stack([angle.cos() * (1 - 2 * y) + y, angle.sin() * (1 - 2 * y) + y / 2], 1)
        x += 0.1 * torch.randn(500, 2)
        model = hf.make_model("mlp", input_shape=(2,), classes=2, hidden=(width, width), seed=seed).eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(epochs):
            for rows in torch.randperm(500).split(50):
                x_adv = hf.attack(model, x[rows], y[rows], hf.Linf(0.02, low=-3, high=4), "fgsm").x_adv
                penalty = weight * trace_relu_layers(model, x_adv)[layers].sum(0).mean()
                optimizer.zero_grad()
                (cross_entropy(model(x_adv), y[rows]) + penalty).backward()
                optimizer.step()
            traces.append(trace_relu_layers(model, x).sum(0).mean().item())
        ends[arm].append(mean(traces[-max(1, epochs // 5) :]))
    for arm, end in ends.items():
        lower = f"{sum(a < b for a, b in zip(end, ends['Standard'], strict=True))} of {seeds} seeds"
        print(f"{arm}: trace {mean(end):.3f} ({min(end):.3f} to {max(end):.3f}); below Standard with {lower}")


if __name__ == "__main__":
    main()
