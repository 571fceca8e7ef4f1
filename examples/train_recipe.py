"""Train by a recipe with a few of its settings changed."""

from pathlib import Path

import holdfast as hf


def main(*, epochs: int = 2, validation: float = 0.1, out: Path | None = None) -> None:
    """Adversarial training against a smaller adversary than the recipe's, with a cheaper attack."""
    result = hf.train(
        "mnist-mini-at",
        threat="linf:0.05",
        epochs=epochs,
        validation=validation,  # share of the training split that chooses the best epoch
        attack={"steps": 3},
        optimizer={"lr": 1e-3},
        out=out,
        force=True,  # replaces what an earlier run of this example left in `out`
    )
    for row in result.history:
        clean, robust = row["validation_clean"], row["validation_robust"]
        print(f"epoch {row['epoch']}: {clean:.1%} right on held-out inputs, {robust:.1%} under attack")
    if result.path is not None:
        print(f"the run, with every setting written out: {result.path / 'recipe.toml'}")


if __name__ == "__main__":
    main(out=Path("runs/train-recipe"))
