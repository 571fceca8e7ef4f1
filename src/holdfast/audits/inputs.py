"""What a run is given, in the form that its files need: tensors, and texts that identify threat and machine."""

import platform
from importlib.metadata import version
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from holdfast.threats import Box, Threat
from holdfast.utils.hashes import hash_tensors


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
    radius = f" {hash_tensors({'radius': threat.radius})}" if isinstance(threat, Box) else ""
    return f"{threat.canonical}{radius}"


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
