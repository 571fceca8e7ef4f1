"""How much memory a run takes."""

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_memory() -> float:
    """Return the peak memory in megabytes: of the GPU if there is one, else the resident set of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    if _STATUS.exists():  # on Linux the number below may be that of the process that started this one
        kilobytes = next(line.split()[1] for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(kilobytes) / 1024
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss counts bytes on macOS, kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
