"""Votes of a classifier on noisy copies of its inputs: drawn in blocks, many inputs in one forward pass, resumable.

Sample s of input i is the same whatever the batch, the other inputs, or how often the run was stopped: its block of 100
has a generator of its own, seeded by (seed, input, block). That is several times quicker than a hash of each value, and
a fraction of the forward pass of a small network.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.checks import check_logits
from holdfast.errors import InputError, StorageError
from holdfast.random import Noise
from holdfast.utils.limits import parse_json
from holdfast.utils.resume import as_stored, check_same, load_arrays, reading, save_arrays

BLOCK = 100
"""Samples that share a generator."""

Draw = Callable[[Tensor, int, torch.Generator], Tensor]
"""From one input (...), a number and a generator to so many noisy copies of it (number, ...)."""

TENSORS = ("guess", "counts", "drawn", "lower")


@dataclass(frozen=True, eq=False)
class Counts:
    """How far the sampling of each input has come. Give it back to go on: no sample counts twice."""

    guess: Tensor  # (B,) int64, class that the selection samples chose; -1 where they are still to be drawn
    counts: Tensor  # (B, K) int64, votes of the samples after the selection
    drawn: Tensor  # (B,) int64, how many these are
    lower: Tensor  # (B,) float64, largest lower bound so far of the probability of the guess
    settings: Mapping[str, Any]  # what decides the samples and the bounds; a run goes on with the same only

    @property
    def hits(self) -> Tensor:
        """Votes for the guess, (B,)."""
        return self.counts.gather(1, self.guess.clamp(min=0)[:, None])[:, 0]

    def save(self, path: str | Path) -> None:
        """Write an .npz file, whole or not at all."""
        arrays = {name: getattr(self, name).cpu().numpy() for name in TENSORS}
        save_arrays(Path(path), {"settings": np.array(json.dumps(dict(self.settings))), **arrays})


def load_counts(path: str | Path) -> Counts:
    """Read what `Counts.save` wrote."""
    try:
        with reading(Path(path), "delete it to start again"):
            arrays = load_arrays(Path(path))
            tensors: dict[str, Any] = {name: torch.from_numpy(arrays[name]) for name in TENSORS}
            settings = parse_json(str(arrays["settings"]))
            _check_tensors(tensors, settings)
    except FileNotFoundError as error:
        raise StorageError(f"there is nothing to resume: '{path}' does not exist") from error
    return Counts(**tensors, settings=settings)


def _check_tensors(tensors: Mapping[str, Tensor], settings: object) -> None:
    """Refuse counts that no sampling gives: a run that went on with them would draw without end, or prove too much."""
    guess, counts, drawn, lower = (tensors[name] for name in TENSORS)
    kinds = [tensor.dtype for tensor in (guess, counts, drawn, lower)] == [torch.int64] * 3 + [torch.float64]
    if not (kinds and isinstance(settings, dict) and counts.ndim == 2 and counts.shape[1] > 0):
        raise ValueError("it does not hold tables of counts with their settings")
    if any(tensor.shape != counts.shape[:1] for tensor in (guess, drawn, lower)):
        raise ValueError("its tables are not all of as many inputs")
    right = bool((counts >= 0).all()) and torch.equal(counts.sum(1), drawn)
    right = right and bool(((guess >= -1) & (guess < counts.shape[1]) & (lower >= 0) & (lower <= 1)).all())
    if not right:
        raise ValueError("its votes do not add up to the samples drawn, or a class or a probability is out of range")


def new_counts(inputs: int, classes: int, settings: Mapping[str, Any], device: torch.device) -> Counts:
    """Nothing drawn yet."""
    zeros = torch.zeros(inputs, dtype=torch.int64, device=device)
    counts = torch.zeros(inputs, classes, dtype=torch.int64, device=device)
    return Counts(zeros - 1, counts, zeros, zeros.double(), settings)


def check_counts(counts: Counts, inputs: int, classes: int, settings: Mapping[str, Any]) -> None:
    """Refuse counts of another run."""
    if counts.counts.shape != (inputs, classes):
        raise InputError(
            f"the counts are of {counts.counts.shape[0]} inputs and {counts.counts.shape[1]} classes, "
            f"this run has {inputs} and {classes}"
        )
    check_same(as_stored(counts.settings), settings, "the table of counts")


def add_votes(
    model: nn.Module, x: Tensor, draw: Draw, counts: Counts, goal: Tensor, noise: Noise, *, batch: int
) -> Iterator[Counts]:
    """Draw the samples from `counts.drawn` up to `goal` (B,) and yield the counts after each forward pass.

    `noise` names the inputs and the stream, only its seeds are used; `batch` noisy copies are in one forward pass.
    """
    for rows, sizes, votes in _blocks(model, x, draw, counts.drawn, goal, noise, batch=batch):
        # Blocks that share an input add up, so the update is a sum over repeated rows.
        added = counts.counts.index_put((rows.repeat_interleave(sizes), votes), torch.ones_like(votes), accumulate=True)
        drawn = counts.drawn.index_put((rows,), sizes, accumulate=True)
        counts = replace(counts, counts=added, drawn=drawn)
        yield counts


def select(
    model: nn.Module, x: Tensor, draw: Draw, counts: Counts, noise: Noise, *, n0: int, batch: int
) -> Iterator[Counts]:
    """Guess the class of each input that has no guess yet from n0 samples; yield after each group of inputs."""
    todo = (counts.guess < 0).nonzero()[:, 0]
    for group in todo.split(max(1, batch // n0)) if len(todo) else ():
        none = new_counts(len(group), counts.counts.shape[1], {}, x.device)
        *_, full = add_votes(model, x[group], draw, none, torch.full_like(group, n0), noise[group], batch=batch)
        counts = replace(counts, guess=counts.guess.index_put((group,), full.counts.argmax(1)))
        yield counts


def _blocks(
    model: nn.Module, x: Tensor, draw: Draw, start: Tensor, stop: Tensor, noise: Noise, *, batch: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows and sizes of the blocks of each forward pass, (M,) each, and the class of each of their samples."""
    # A goal is the end of a block or the cap, after which nothing is drawn: a run stops in the middle of no block.
    first, last = start // BLOCK, (stop + BLOCK - 1) // BLOCK
    amount = (last - first).clamp(min=0)
    row = torch.arange(len(x), device=x.device).repeat_interleave(amount)
    block = torch.arange(len(row), device=x.device) - (amount.cumsum(0) - amount)[row] + first[row]
    size = torch.minimum(stop[row] - block * BLOCK, torch.full_like(block, BLOCK))
    # Consecutive seeds: no two blocks of one input share their generator, which uses 32 bits of a seed on a CPU.
    seed = (noise.bits((1,))[row, 0] + block) & 0xFFFFFFFF
    generator = torch.Generator(device=x.device)
    for group in torch.arange(len(row), device=x.device).split(max(1, batch // BLOCK)) if len(row) else ():
        work = zip(row[group].tolist(), size[group].tolist(), seed[group].tolist(), strict=True)
        # Whole blocks are drawn, since a generator gives other values for another number.
        noisy = torch.cat([draw(x[i], BLOCK, generator.manual_seed(s))[:m] for i, m, s in work])
        yield row[group], size[group], _classes(model, noisy, batch)


def _classes(model: nn.Module, noisy: Tensor, batch: int) -> Tensor:
    try:
        return check_logits(model, noisy, batch).argmax(1)
    except InputError as error:
        raise InputError(f"on noisy copies of the inputs: {error}") from error
