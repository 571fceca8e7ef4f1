"""How large a model may become while it is built, so that a file cannot ask for more than it holds."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from holdfast.errors import InputError

Sizes = Mapping[str, tuple[int, ...]]
"""The shape of every tensor in a file, by name."""
MOST = 20_000
"""Tensors of a model that is built from a file: a few seconds of work, and fifty times as many as a large transformer
has."""
MOST_VALUES = 2**36
"""Values of a model that a recipe asks for: 256 GiB in float32."""
_SPARE = 2  # a builder may put one tensor in the place of another


@contextmanager
def at_most(tensors: int, values: int) -> Iterator[None]:
    """Stops a model under construction that needs more tensors, or more values in all of them, than this.

    On the meta device tensors cost no memory, but every one of them takes time.
    """
    thread, count, total = threading.get_ident(), 0, 0

    def note(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal count, total
        if tensor is None or threading.get_ident() != thread:  # the hooks see the whole process
            return
        count, total = count + 1, total + tensor.numel()
        if count > min(_SPARE * tensors, MOST):
            limit = f"the file holds {tensors:,}" if tensors < MOST else f"at most {MOST:,} are built from a file"
            raise InputError(f"it has more than {count - 1:,} tensors; {limit}")
        if total > _SPARE * values:
            limit = "the file holds" if values < MOST_VALUES else "at most"
            raise InputError(f"it needs at least {total:,} values; {limit} {values:,}")

    hooks = [register_module_parameter_registration_hook(note), register_module_buffer_registration_hook(note)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
