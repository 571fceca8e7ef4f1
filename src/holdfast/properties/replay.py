"""Run an ONNX file by onnxruntime, to confirm a counter-example in an implementation that is not ours."""

import gzip
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.properties.points import Run


def onnx_run(path: Path) -> Run | None:
    """A function that runs the file on one input at a time, (1, ...) -> (1, K); None without onnxruntime."""
    if not path.name.endswith((".onnx", ".onnx.gz")):
        return None
    try:
        import onnxruntime
    except ImportError:
        return None
    onnxruntime.set_default_logger_severity(3)  # its advice on the form of the file is not for our users
    source = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else str(path)
    session: list[Any] = []  # made at the first counter-example: it takes time, and most proofs need none

    def run(x: Tensor) -> Tensor:
        if not session:
            session.append(onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"]))
        entry = session[0].get_inputs()[0]
        shape = [size if isinstance(size, int) else 1 for size in entry.shape]
        (output,) = session[0].run(None, {entry.name: x.reshape(shape).numpy()})
        return torch.from_numpy(output).reshape(1, -1)

    return run
