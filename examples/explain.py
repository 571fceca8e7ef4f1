"""Explain a few digits: what speaks for the class, where the nearest boundary lies, and whether it can be trusted."""

from pathlib import Path

import holdfast as hf
from holdfast.explanations.core.pictures import methods_figure, save_figure
from holdfast.explanations.evaluate.trust import deletion, infd


def main(*, epochs: int = 1, n: int = 4, out: Path = Path("runs/explain")) -> None:
    """Train a model for a few seconds, print one row for each method, and draw them side by side."""
    data = hf.load_data("mnist-mini")
    model = hf.train("mnist-mini-standard", epochs=epochs).model
    x, y = data.test.x[:n], data.test.y[:n]

    print("method                  ok  completeness error  deletion  INFD at the boundary")
    boundary = hf.explain(model, x, y, "big").boundary
    for method in ("saliency", "integrated-gradients", "big"):
        found = hf.explain(model, x, y, method)
        area = float(deletion(model, x, y, found.attribution).area.mean())
        faith = float(infd(model, x, y, found.slope, moves="end", towards=boundary).mean())
        print(f"{method:22s}  {int(found.ok.sum())}  {float(found.error.mean()):18.4f}  {area:8.3f}  {faith:20.6f}")
    print(found.by[0], f"at l2 distance {float(found.distance[0]):.3f}")

    names = [f"a {label}" for label in y.tolist()]
    save_figure(
        methods_figure(model, x, y, ["saliency", "integrated-gradients", "big"], names=names), out / "digits.svg"
    )
    print(f"pictures: {out / 'digits.svg'}")


if __name__ == "__main__":
    main()
