"""Boxes in which a classifier of the plane provably never changes its mind: equal sides against free sides."""

import argparse
from pathlib import Path

import torch
from torch import nn

import holdfast as hf
from holdfast.analyze.plots.plane import plane_svg
from holdfast.certificates.nonuniform import nonuniform


def main(*, steps: int = 3000, points: int = 20, out: Path = Path("nonuniform_2d.svg")) -> None:
    """Learn which of ten random seeds is nearest, then prove boxes around some points and draw them."""
    torch.manual_seed(0)
    seeds, x = 2 * torch.rand(10, 2) - 1, 2 * torch.rand(10_000, 2) - 1
    y = torch.cdist(x, seeds).argmin(1)
    model = nn.Sequential(nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    for _ in range(steps):
        rows = torch.randint(0, 9000, (500,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        schedule.step()
    accuracy = (model.eval()(x[9000:]).argmax(1) == y[9000:]).float().mean()
    some, label = x[9000 : 9000 + points], y[9000 : 9000 + points]
    found = nonuniform(model, some, label, hf.Linf(0.0, low=-1, high=1))
    sides = {"equal sides": found.uniform[:, None].expand_as(some), "free sides": found.radius}
    out.write_text(plane_svg(model, some, sides, low=-1, high=1))
    print(f"accuracy {accuracy:.1%}; free sides make the area {found.ratio.square().mean():.2f} times as large: {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("nonuniform_2d.svg"))
    main(out=parser.parse_args().out)
