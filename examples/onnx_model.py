"""Audit an ONNX file that ends in a softmax: load it, take the softmax off, bracket it."""

import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

import holdfast as hf
from holdfast.models import as_classifier


def main(*, epochs: int = 3, n: int = 100, out: Path | None = None) -> None:
    """Export a trained model as another program might have written it, and audit the file."""
    trained = hf.train("mnist-mini-at", epochs=epochs).model.eval()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about itself
        path = Path(folder) / "model.onnx"
        inputs = (torch.rand(1, 1, 28, 28),)
        torch.onnx.export(nn.Sequential(trained, nn.Softmax(1)).eval(), inputs, path, dynamo=False)
        loaded = hf.load_model(path)
    model = as_classifier(loaded, kind="probabilities")
    x = hf.load_data("mnist-mini").test[:n].x
    print(f"largest difference to the model exported: {(model(x) - trained(x)).abs().max():.0e}")
    print(hf.audit(model, "mnist-mini", hf.Linf(0.1), n=n, budget="quick", out=out).headline)


if __name__ == "__main__":
    main(out=Path("runs/onnx-model"))
