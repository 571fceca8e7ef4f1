"""Two Moons with outliers: do GloRo and a centroid network reject points near the border, or points far away?"""

from pathlib import Path

import torch

import holdfast as hf
from holdfast.analyze.plots.plane import plane_svg
from holdfast.analyze.selective import outcome, rejecting
from holdfast.certificates import GloRo
from holdfast.models.zoo.centroid import with_rejection

BODY = {"hidden": [64, 64], "activation": "minmax"}
MODELS = {"gloro": {"name": "mlp"}, "centroid": {"name": "centroid", "body": "mlp", "features": 2, "per_class": 8}}
RUN = {"threat": "l2:0.025", "batch_size": 50, "validation": 0.0, "learning_rate": {"name": "one-cycle"}}


def main(*, seeds: int = 5, epochs: int = 100, eta: float = 0.5, out: Path = Path("runs/two-moons-reject")) -> None:
    """Train both, move a fifth of the test points away, say what each model does with them, and draw it."""
    out.mkdir(parents=True, exist_ok=True)
    for name, model in MODELS.items():
        recipe = RUN | {"epochs": epochs, "model": model | BODY, "optimizer": {"name": "adam", "lr": 5e-3}}
        loss, shares = {"name": name} | ({"eta": eta, "scale": 100.0} if name == "centroid" else {}), []
        for seed in range(seeds):
            data, generator = hf.load_data("two-moons", n=500, seed=seed), torch.Generator().manual_seed(seed)
            moved, y = torch.rand(500, generator=generator) < 0.2, data.test.y
            x = data.test.x + moved[:, None] * 0.5 * torch.randn(500, 2, generator=generator)
            net = hf.train(recipe | {"objective": loss, "seed": seed}, data=data, progress=False).model
            net = GloRo(net, hf.L2(0.025)).eval() if name == "gloro" else with_rejection(net, eta).eval()
            (out / f"{name}-{seed}.svg").write_text(plane_svg(net, x, {}, low=-1, high=2))
            moons, away = (outcome(rejecting(net, 2)(x[part]), y[part]) for part in (~moved, moved))
            shares.append((moons.rejected, away.rejected, moons.selective_accuracy))
        near, far, right = (f"{min(share):.1%} to {max(share):.1%}" for share in zip(*shares, strict=True))
        print(f"{name}: rejects {near} of the moons and {far} of the outliers; {right} of its answers are right")


if __name__ == "__main__":
    main()
