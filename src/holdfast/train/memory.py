"""How much memory a run takes."""

import resource
import sys

import torch


def peak_memory() -> float:
    """Largest memory so far in megabytes: that of the GPU if there is one, else the resident set of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss counts bytes on macOS, kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
