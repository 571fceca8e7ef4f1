"""Learn a mask over random weights, put the network into a small file, and prove something about it."""

import tempfile
from pathlib import Path

import torch

import holdfast as hf
from holdfast.analyze.subnetworks import layer_patterns
from holdfast.models.compact import save_compact


def main(*, epochs: int = 12, validation: float = 0.05, n: int = 200, out: Path | None = None) -> None:
    """Keep one weight in a hundred of a random network: the weights are never trained, only chosen."""
    model = hf.train("mnist-mini-subnet", epochs=epochs, validation=validation, out=out, force=out is not None).model
    with tempfile.TemporaryDirectory() as folder:
        compact = save_compact(model, Path(folder) / "model.safetensors")
        loaded = hf.load_model(compact.path)
    print(
        f"{compact.kept:,} of {compact.weights:,} weights in {compact.size:,} bytes, {compact.ratio:.0f} times smaller"
    )
    test = hf.load_data("mnist-mini").test[:n]
    print(f"the same logits: {torch.equal(loaded(test.x), model(test.x))}")
    right = loaded(test.x).argmax(1) == test.y
    broken = hf.attack(loaded, test.x, test.y, "linf:0.1", method="pgd").success
    proved = hf.certify(loaded, test.x, test.y, "linf:0.01", "crown").certified
    print(f"right: {right.float().mean():.1%}, right under PGD at 0.1: {(right & ~broken).float().mean():.1%}")
    print(f"proved right at 0.01: {proved.float().mean():.1%}")
    for name, pattern in layer_patterns(model).items():
        print(f"layer {name}: {pattern.empty_inputs:.0%} of the inputs unused, {pattern.random_inputs:.0%} by chance")


if __name__ == "__main__":
    main(out=Path("runs/subnetwork"))
