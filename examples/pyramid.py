"""Train with a universal pyramid perturbation, draw its levels, and measure the accuracy on shifted data."""

from pathlib import Path

import torch

import holdfast as hf
from holdfast.analyze.shift import mean_corruption_error, shifted_accuracy
from holdfast.training.objectives.core.pyramid import spread
from holdfast.utils.png import encode_png


def main(*, epochs: int = 6, validation: float = 0.05, n: int = 200, out: Path = Path("runs/pyramid")) -> None:
    """Compare plain training and UPAT, at the same number of epochs."""
    test = hf.load_data("mnist-mini").test[:n]
    for recipe in ("mnist-mini-standard", "mnist-mini-upat"):
        settings = {"epochs": epochs, "validation": validation}
        model = hf.train(recipe, out=out / recipe, force=True, **settings).model
        found = shifted_accuracy(model, test.x, test.y, severities=(3,))
        error = mean_corruption_error(found.errors())
        print(f"{recipe}: clean {found.clean / n:.1%}, mean corruption error {error:.1%}")
    state = torch.load(out / "mnist-mini-upat" / "checkpoints" / "last.pt", weights_only=True)["objective"]
    levels = [spread(state[f"pyramid_{tile}"], tile)[0] for tile in (4, 2, 1)]
    side_by_side = torch.cat([(0.5 + level / (2 * level.abs().max())) for level in levels], 2)
    (out / "levels.png").write_bytes(encode_png(side_by_side.numpy()))
    print(f"levels of the perturbation, coarse to fine: {out / 'levels.png'}")


if __name__ == "__main__":
    main()
