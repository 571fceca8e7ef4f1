"""Architectures by name. A builder is a plain function (input_shape, classes, *, options) -> module.

Every model made here remembers its recipe in `model.architecture`, a pair (name, options) that JSON can hold, so that
`save_model` can write it down and `load_model` can build the model again.
"""

import contextlib
import json
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from holdfast.errors import InputError, did_you_mean
from holdfast.models.layers import Normalize
from holdfast.utils.limits import shortened
from holdfast.utils.options import Count, Option, check_options, convert, options_of

Shape = tuple[int, ...]
Builder = Callable[..., nn.Module]
Normalization = tuple[float | Sequence[float], float | Sequence[float]]


@dataclass(frozen=True)
class _Entry:
    build: Builder
    defaults: dict[str, object]
    summary: str
    reference: str
    input_shape: Shape
    classes: int
    composite: bool

    def options(self) -> dict[str, Option]:
        """Keyword-only options of the builder, with the defaults of this architecture."""
        known = options_of(self.build)
        return {
            name: replace(option, default=self.defaults.get(name, option.default)) for name, option in known.items()
        }


@dataclass(frozen=True)
class ModelInfo:
    """One row of `list_models()`; `parameters` is counted at `input_shape`, `classes` and the default options."""

    name: str
    summary: str
    reference: str
    input_shape: Shape
    classes: int
    parameters: int


_ENTRIES: dict[str, _Entry] = {}


def add_architecture(
    name: str,
    build: Builder,
    summary: str,
    reference: str,
    *,
    input_shape: Shape = (1, 28, 28),
    classes: int = 10,
    composite: bool = False,
    **defaults: object,
) -> None:
    """Put a builder into the table under `name`, with other default options than its own if `defaults` are given.

    The builder of a `composite` makes its parts with `make_model`: it gets all arguments of `make_model` as they came,
    and writes the recipe itself.
    """
    if name in _ENTRIES:
        raise ValueError(f"architecture '{name}' is registered twice")
    _ENTRIES[name] = _Entry(build, defaults, summary, reference, input_shape, classes, composite)


def make_model(
    name: str,
    *,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
    normalize: Normalization | None = None,
    seed: int | None = None,
    **options: Any,
) -> nn.Module:
    """A new model of a named architecture, in training mode, with random weights.

    Args:
        name: see `list_models()`.
        input_shape: shape of one input, (C, H, W) or (D,); by default the one that the architecture was made for,
            which is (1, 28, 28) or (3, 32, 32) for most.
        classes: number of logits; by default 10 for most.
        normalize: (mean, std) of a `Normalize` layer in front, each one number or one per channel.
        seed: fixes the random weights and leaves torch's global generator as it was; None draws from that generator.
        options: options of the architecture, such as `hidden` or `activation`.

    >>> model = make_model("mlp", input_shape=(2,), classes=2, hidden=(100, 100), seed=0)
    >>> count_parameters(model)
    10602
    """
    if name not in _ENTRIES:
        raise InputError(f"unknown architecture '{name}'. " + did_you_mean(str(name), _ENTRIES))
    entry = _ENTRIES[name]
    known, owner = entry.options(), f"architecture '{name}'"
    if entry.composite:
        own = check_options(known, {option: value for option, value in options.items() if option in known}, owner)
        with _seeded(seed):
            return entry.build(input_shape=input_shape, classes=classes, normalize=normalize, **{**options, **own})
    options = {option: given.default for option, given in known.items()} | check_options(known, options, owner)
    shape = _check_shape(entry.input_shape if input_shape is None else input_shape)
    classes = convert(entry.classes if classes is None else classes, Count, "classes")
    with _seeded(seed):
        model = entry.build(shape, classes, **options)
    if normalize is not None:
        model = _with_normalization(model, normalize, shape)
    record_architecture(model, name, {"input_shape": shape, "classes": classes, "normalize": normalize, **options})
    return model


def _check_shape(shape: Sequence[int]) -> Shape:
    try:
        checked = tuple(operator.index(size) for size in shape)
    except TypeError:
        checked = ()
    if len(checked) not in (1, 3) or min(checked) < 1:
        raise InputError(f"input_shape must be (C, H, W) or (D,), every size >= 1, got {shortened(shape)}")
    return checked


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def _with_normalization(model: nn.Module, normalize: Normalization, shape: Shape) -> nn.Module:
    if not isinstance(normalize, tuple | list) or len(normalize) != 2:
        raise InputError(f"normalize must be a pair (mean, std), got {normalize!r}")
    layer = Normalize(*normalize, flat=len(shape) == 1)
    for name, values in (("mean", layer.mean), ("std", layer.std)):
        if values.numel() not in (1, shape[0]):
            raise InputError(
                f"the {name} of normalize has {values.numel()} entries; inputs of shape {shape} need 1 or {shape[0]}"
            )
    return nn.Sequential(OrderedDict(normalize=layer, network=model))


def record_architecture(model: nn.Module, name: str, options: dict[str, Any]) -> None:
    """Write the recipe on the model: `model.architecture = (name, options)`, with lists in place of tuples."""
    try:
        plain = json.loads(json.dumps(options))
    except TypeError as error:
        raise InputError(f"the options of architecture '{name}' must be JSON values: {error}") from error
    cast(Any, model).architecture = (name, plain)


def get_architecture(model: nn.Module) -> tuple[str, dict[str, Any]] | None:
    """The recipe (name, options) that the model was made from, or None if it was not made by `make_model`."""
    recorded = getattr(model, "architecture", None)
    if isinstance(recorded, tuple) and len(recorded) == 2 and isinstance(recorded[1], dict):
        return str(recorded[0]), recorded[1]
    return None


def count_parameters(model: nn.Module) -> int:
    """Number of parameters; a parameter that two layers share counts once, buffers do not count."""
    return sum(parameter.numel() for parameter in model.parameters())


def list_models() -> list[ModelInfo]:
    """All architectures with summary and number of parameters, in alphabetical order."""
    rows = []
    for name, entry in sorted(_ENTRIES.items()):
        with torch.device("meta"):
            parameters = count_parameters(make_model(name))
        rows.append(ModelInfo(name, entry.summary, entry.reference, entry.input_shape, entry.classes, parameters))
    return rows
