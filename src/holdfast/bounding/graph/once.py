"""Translate a model once for many proofs, and compare graph and model once at each input."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from holdfast.bounding.graph.ops import Graph
from holdfast.threats import Box, Threat


@dataclass(eq=False)
class Once:
    """What is known of a model that does not change for a while.

    Attributes:
        graphs: translations, by shape, dtype and device of the input.
        compared: the inputs at which graph and model agree, each with its threat.
        answers: inputs and logits that the model returned for them.
    """

    model: nn.Module
    graphs: dict[tuple[object, ...], Graph] = field(default_factory=dict)
    compared: set[tuple[str, bytes]] = field(default_factory=set)
    answers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @staticmethod
    def keys(x: Tensor, threat: Threat | None) -> list[tuple[str, bytes]]:
        """What identifies each input and the threat around it, in `compared`."""
        if isinstance(threat, Box):  # whose radii have no text
            return [
                (threat.name, row) for row in _digests(torch.cat([end.flatten(1) for end in (x, *threat.box(x))], 1))
            ]
        return [(repr(threat), row) for row in _digests(x)]

    def logits_of(self, x: Tensor) -> Tensor | None:
        """What the model returned for x, (B, K), if that is known of every input."""
        for known, logits in self.answers:
            if known is x:
                return logits
        table = {row: z for known, logits in self.answers for row, z in zip(_digests(known), logits, strict=True)}
        rows = _digests(x)
        return torch.stack([table[row] for row in rows]) if all(row in table for row in rows) else None


_ONCE: ContextVar[Once | None] = ContextVar("once", default=None)


def _digests(x: Tensor) -> list[bytes]:
    rows = x.detach().cpu().flatten(1).contiguous().view(torch.uint8).numpy()  # bytes: NumPy has no bfloat16
    return [hashlib.blake2b(row.data, digest_size=16).digest() for row in rows]


def once_of(model: nn.Module) -> Once | None:
    """The `Once` that is open for this model, if there is one."""
    once = _ONCE.get()
    return once if once is not None and once.model is model else None


@contextmanager
def trace_once(model: nn.Module, x: Tensor | None = None, logits: Tensor | None = None) -> Iterator[None]:
    """Inside, `trace` translates this model once, and compares it once at each input for each threat.

    Front doors open it around the methods that they call; it may be opened around several front doors as well. The
    weights must not change inside.

    Args:
        model: the model.
        x: inputs (B, ...) whose `logits` (B, K) the model returned a moment ago: it is not asked again.
        logits: see `x`.
    """
    once = once_of(model) or Once(model)
    token, before = _ONCE.set(once), list(once.answers)
    if x is not None and logits is not None:
        once.answers.append((x, logits))
    try:
        yield
    finally:
        once.answers[:] = before
        _ONCE.reset(token)
