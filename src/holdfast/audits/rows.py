"""What an audit stores: an outcome of each input at each budget that a step looked at, and the examples."""

import json
import math
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.utils.limits import parse_json


class Key(NamedTuple):
    """Which outcomes: the number of the threat, of the step of the plan, and of the level of its budget."""

    bracket: int
    step: int
    level: int


@dataclass(frozen=True)
class Outcome:
    """What one stage found for one input at one budget.

    Attributes:
        position: of the input in the data.
        passed: classified right ("clean"), certified ("certify"), or not broken ("attack").
        prediction: class given to the input ("clean") or to the adversarial example; None where there is no example.
        by: the method that decided; empty where none did.
        size: size of the example, or largest radius proved ("certify"); None where there is neither.
    """

    position: int
    passed: bool
    prediction: int | None = None
    by: str = ""
    size: float | None = None

    def broke(self, stage: str) -> bool:
        """Whether an example was found: an attack did not pass, or a certificate met one on its way."""
        return not self.passed and (stage == "attack" or (stage == "certify" and self.prediction is not None))

    @property
    def is_plain(self) -> bool:
        """Whether the values have the types that an outcome has, and its size is a number."""
        texts = isinstance(self.by, str) and isinstance(self.prediction, int | None)
        return texts and (self.size is None or (isinstance(self.size, float) and 0 <= self.size < math.inf))


@dataclass(frozen=True)
class Ran:
    """What one step of the plan did at one threat.

    Attributes:
        number: of the step in the plan, from 1.
        stage: "certify" or "attack".
        method: its registered name.
        seconds: time it took.
        inputs: how many inputs it looked at.
        decided: how many of them an attack broke, or a certificate proved at the largest budget.
        part: how many it proved at a smaller budget only; 0 for an attack.
        broken: how many a certificate broke that looks for counter-examples too; 0 for an attack.
    """

    number: int
    stage: str
    method: str
    seconds: float
    inputs: int
    decided: int
    part: int
    broken: int = 0


@dataclass(frozen=True, eq=False)
class Example:
    """An input and the adversarial example found for it, if any: arrays of one input's shape.

    `attribution`, of the same shape, says what of the input the model's answer rests on, on the way from the example.
    """

    position: int
    x: npt.NDArray[np.floating]
    x_adv: npt.NDArray[np.floating] | None = None
    attribution: npt.NDArray[np.floating] | None = None


def packed(example: Example) -> tuple[str, str, bytes, bytes]:
    """Shape, dtype, input and adversarial example, as columns of a row."""
    assert example.x_adv is not None
    x, x_adv = example.x, example.x_adv.astype(example.x.dtype)
    return json.dumps(x.shape), x.dtype.str, _pack(x), _pack(x_adv)


def unpacked(position: int, shape: str, dtype: str, x: bytes, x_adv: bytes) -> Example:
    """The example that `packed` packed."""
    size, kind = parse_json(shape), np.dtype(dtype)
    return Example(position, _unpack(x, size, kind), _unpack(x_adv, size, kind))


def _pack(values: npt.NDArray[np.floating]) -> bytes:
    return zlib.compress(np.ascontiguousarray(values).tobytes(), 6)


def _unpack(content: bytes, shape: list[int], kind: np.dtype[np.floating]) -> npt.NDArray[np.floating]:
    """What `_pack` packed; never more of it than the shape has room for."""
    values = zlib.decompressobj().decompress(content, math.prod(shape) * kind.itemsize + 1)
    return np.frombuffer(values, kind).reshape(shape)
