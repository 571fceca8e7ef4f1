"""Write a model as an ONNX file with ordinary weights, for any other program."""

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from holdfast.errors import InputError, StorageError
from holdfast.models.masked.build import pruned
from holdfast.models.onnx.convert import load_onnx

CLOSE = 1e-4
"""Of the largest logit: how far the file may be from the model."""


def write_onnx(model: nn.Module, path: str | Path, input_shape: Sequence[int]) -> Path:
    """Write the network, masks applied, with a batch of any size; read it back and compare.

    Args:
        model: on any device, in any mode; it is written in eval mode.
        path: ends in .onnx; its folder exists.
        input_shape: shape of one input, such as (1, 28, 28).
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise InputError(f"an ONNX file ends in .onnx, got '{path}'")
    if importlib.util.find_spec("onnx") is None:
        raise InputError("ONNX files need an extra: pip install 'holdfast[onnx]'")
    if not path.parent.is_dir():
        raise StorageError(f"cannot write '{path}': there is no folder '{path.parent}'")
    network = pruned(model).cpu()
    like = next(network.parameters())
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((2, *input_shape), generator=generator).to(like)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter warns about itself
        torch.onnx.export(network, (x,), path, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "batch"}})
        _check(load_onnx(path)(x), network(x), path)
    return path


def _check(read: Tensor, logits: Tensor, path: Path) -> None:
    error = float((read - logits).abs().max())
    if not error <= CLOSE * max(1.0, float(logits.abs().max())):
        path.unlink()
        raise StorageError(f"the network in '{path}' differs from the model by {error:g}; it was removed")
