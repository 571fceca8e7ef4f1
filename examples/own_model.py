"""Audit a model of your own on tensors of your own: nothing has to come from Holdfast."""

from pathlib import Path

import torch
from torch import nn

import holdfast as hf


def main(*, steps: int = 500, n: int = 200, out: Path | None = None) -> None:
    """Fit points inside and outside a circle, then bracket how far each point can be pushed."""
    torch.manual_seed(0)
    x = torch.rand(2000, 2)  # inputs in [0, 1]; for another range give the threat low= and high=
    y = ((x - 0.5).norm(dim=1) < 0.35).long()
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    result = hf.audit(model.eval(), (x[:n], y[:n]), hf.Linf(0.05), out=out)
    print(result.headline)
    for level in result.levels:
        certified, attacked = level.certified_accuracy, level.attacked_accuracy
        print(f"change of {level.budget:.2f}: {certified:.1%} certified, {attacked:.1%} under attack")


if __name__ == "__main__":
    main(out=Path("runs/own-model"))
