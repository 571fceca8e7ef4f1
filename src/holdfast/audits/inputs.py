"""What a run is given, in the form that its files need: inputs, and texts that identify threat and machine."""

import platform
from importlib.metadata import version
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from holdfast.data import Dataset, load_data
from holdfast.errors import InputError, did_you_mean
from holdfast.threats import Box, Threat
from holdfast.utils.hashes import hash_tensors


def inputs_of(
    data: Dataset | str | tuple[Tensor, Tensor], split: str, n: int
) -> tuple[str, tuple[str, ...], Tensor, Tensor]:
    """Description, class names, and the first n inputs and labels."""
    if isinstance(data, tuple):
        if len(data) != 2 or not all(isinstance(part, Tensor) for part in data):
            kinds = ", ".join(type(part).__name__ for part in data)
            raise InputError(f"data must be a data set, its name, or two tensors (x, y), got ({kinds})")
        return "tensors", (), data[0][:n], data[1][:n]
    dataset = load_data(data) if isinstance(data, str) else data
    if split not in ("train", "test"):
        raise InputError(f"unknown split '{split}'. " + did_you_mean(split, ("train", "test")))
    part = getattr(dataset, split)
    return f"{dataset.name} ({split})", tuple(str(c) for c in dataset.classes), part.x[:n], part.y[:n]


def to_model(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """x and y on the device of the model, x in its dtype; other than float inputs are left for the checks to refuse."""
    like = next((p for p in model.parameters() if p.is_floating_point()), x)
    return (x.to(like) if x.is_floating_point() else x), y.to(like.device)


def to_numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """The same values in NumPy, which has no bfloat16; float32 holds them all."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def exact_text(threat: Threat) -> str:
    """Text that differs whenever the threat does; the plain text of a Box only describes it."""
    return f"{threat} {hash_tensors({'radius': threat.radius})}" if isinstance(threat, Box) else str(threat)


def versions_of(model: nn.Module) -> dict[str, str]:
    """Versions of what the run depends on, and where it ran."""
    device = next((str(p.device) for p in model.parameters()), "cpu")
    return {
        "holdfast": version("holdfast"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
    }
