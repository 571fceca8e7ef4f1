"""How smooth are two certified losses while the budget rises, and does a path of low loss lead between their minima?"""

from functools import partial
from pathlib import Path

import torch

import holdfast as hf
from holdfast.analyze import connectivity, smoothness
from holdfast.analyze.plots import charts
from holdfast.training.objectives.certified import certified_loss, interval_bound, linear_bound


def main(*, steps: int = 180, every: int = 15, out: Path = Path("runs/landscape")) -> None:
    """Train with either bound, recording every so many steps; then bend a path from one network to the other."""
    use = {"IBP": interval_bound, "CROWN-IBP": linear_bound(1.0, lambda r, y: None)}
    losses = {k: lambda m, x, y, b=b, e=0.1: certified_loss(m, x, y, hf.Linf(e), b)[0].mean() for k, b in use.items()}
    data, runs, models = hf.load_data("mnist-mini"), {name: [] for name in losses}, {}
    for name, target in losses.items():
        model = models[name] = hf.make_model("mlp", hidden=(64, 64), seed=0)
        optimizer, draw = torch.optim.Adam(model.parameters(), lr=1e-3), torch.Generator().manual_seed(0)
        for step, rows in enumerate(torch.randint(len(data.train.x), (steps, 64), generator=draw)):
            now, batch = partial(target, e=0.1 * min(1, 1.5 * step / steps)), (data.train.x[rows], data.train.y[rows])
            if step % every == 0:
                runs[name].append(smoothness.record(model, now, *batch, step=step, lr=1e-3, target=target))
            optimizer.zero_grad()
            now(model, *batch).backward()
            optimizer.step()
    curve = connectivity.connect(*models.values(), losses["IBP"], data.train.x, data.train.y, steps=steps, lr=1e-3)
    paths = connectivity.path_losses(curve, losses, data.test.x[:500], data.test.y[:500])
    for name, values in paths.items():
        turn = sum(row["gradient_difference"] for row in runs[name]) / len(runs[name])
        print(f"{name}: mean gradient difference {turn:.3f}; barrier {connectivity.barrier(values):.2f}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "smoothness.svg").write_text(charts.smoothness_svg(runs))
    (out / "path.svg").write_text(charts.path_svg(paths, connectivity.TS, y_label="certified loss"))


if __name__ == "__main__":
    main()
