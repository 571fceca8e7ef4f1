"""Use freed memory again, instead of giving it back to the system and asking for it anew.

The C library of Linux gives freed blocks back to the system once they pass a size, and every page that is asked for
anew costs a fault: for networks on small images that can be half of the time of a forward pass. The library raises that
size by itself, up to 32 MB, when a larger block than before is freed; so one block that nobody touches is enough.
"""

from functools import cache

import torch

from holdfast.utils.reference import is_reference

_BYTES = 31 * 2**20  # just below the largest size that the library adapts to


def reuse_blocks() -> None:
    """Make the process keep up to some tens of MB of freed memory; done once, and not in reference mode."""
    if not is_reference():
        _free_one_block()


@cache
def _free_one_block() -> None:
    torch.empty(_BYTES, dtype=torch.uint8)
