"""Two Moons with outliers: GloRo rejects the border between the moons, a centroid network also what is far away."""

from pathlib import Path

import torch

import holdfast as hf
from holdfast.analyze.plane import plane_svg
from holdfast.analyze.selective import outcome, rejecting
from holdfast.certify import GloRo
from holdfast.models.centroid import with_rejection

BODY = {"hidden": [64, 64], "activation": "minmax"}
MODELS = {"gloro": {"name": "mlp"}, "centroid": {"name": "centroid", "body": "mlp", "features": 2, "per_class": 8}}
RUN = {"threat": "l2:0.025", "batch_size": 50, "validation": 0.0, "learning_rate": {"name": "one-cycle"}}


def main(*, epochs: int = 100, eta: float = 0.5, out: Path = Path("runs/two-moons-reject")) -> None:
    """Trains both, moves a fifth of the test points away, says what each model does with them, and draws it."""
    data, losses = hf.load_data("two-moons", n=500), {"gloro": {}, "centroid": {"eta": eta, "scale": 100.0}}
    torch.manual_seed(0)
    moved, y = torch.rand(500) < 0.2, data.test.y
    x = data.test.x + moved[:, None] * 0.5 * torch.randn(500, 2)
    out.mkdir(parents=True, exist_ok=True)
    for name, model in MODELS.items():
        recipe = RUN | {"epochs": epochs, "model": model | BODY, "objective": {"name": name, **losses[name]}}
        net = hf.train(recipe | {"optimizer": {"name": "adam", "lr": 5e-3}}, data=data, progress=False).model
        net = GloRo(net, hf.L2(0.025)).eval() if name == "gloro" else with_rejection(net, eta).eval()
        answer = rejecting(net, 2)(x)
        moons, far = outcome(answer[~moved], y[~moved]), outcome(answer[moved], y[moved])
        print(f"{name}: rejects {moons.rejected:.0%} of the moons and {far.rejected:.0%} of the outliers;", end=" ")
        print(f"{moons.selective_accuracy:.1%} of its answers on the moons are right")
        (out / f"{name}.svg").write_text(plane_svg(net, x, {}, low=-1, high=2))


if __name__ == "__main__":
    main()
