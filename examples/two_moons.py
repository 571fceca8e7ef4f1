"""Two Moons: a penalty on the curvature of the top layer alone makes the whole network flatter."""

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.analyze.lines import lines_svg
from holdfast.train.curvature import eigenvalue_spread, trace_relu_layers

ARMS = {"Standard": (0.0, slice(None)), "Top": (0.5, slice(-1, None)), "Full": (0.05, slice(None))}  # weight, layers


def main(*, epochs: int = 100, width: int = 100, small: int = 16, out: Path = Path("runs/two-moons")) -> None:
    """Trains three ways, draws the trace of the Hessian by epoch; compares eigenvalues on networks of `small` width."""
    torch.manual_seed(0)
    y, angle, runs = torch.arange(500) % 2, torch.pi * torch.rand(500), {width: {}, small: {}}
    x = torch.stack([angle.cos() * (1 - 2 * y) + y, angle.sin() * (1 - 2 * y) + y / 2], 1) + 0.1 * torch.randn(500, 2)
    for arm, (weight, layers) in ARMS.items():
        for units in (width, small):
            model = hf.make_model("mlp", input_shape=(2,), classes=2, hidden=(units, units), seed=0).eval()
            optimizer, runs[units][arm] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
            for _ in range(epochs):
                for rows in torch.randperm(500).split(50):
                    x_adv = hf.attack(model, x[rows], y[rows], hf.Linf(0.02, low=-3, high=4), "fgsm").x_adv
                    penalty = weight * trace_relu_layers(model, x_adv)[layers].sum(0).mean()
                    optimizer.zero_grad()
                    (cross_entropy(model(x_adv), y[rows]) + penalty).backward()
                    optimizer.step()
                runs[units][arm].append(trace_relu_layers(model, x).sum(0).mean().item())
        spread = eigenvalue_spread(model, x, y)  # of the small network: the whole Hessian must fit into memory
        print(f"{arm}: trace {runs[width][arm][-1]:.3f}; eigenvalues at width {small} spread by {spread:.4f}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "trace.svg").write_text(lines_svg(runs[width], title="Two Moons", y_label="trace of the Hessian", log=True))


if __name__ == "__main__":
    main()
