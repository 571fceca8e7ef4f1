"""One table of all methods. A method is a plain function; its record says all that other code must know of it.

The record is the decorator that puts the function into the table: `@Attack("pgd", summary=..., reference=...)`.
"""

import shlex
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, TypeVar, get_args, overload

from holdfast.errors import HoldfastError, InputError, UnsupportedError, did_you_mean, either
from holdfast.random import Noise
from holdfast.threats import Threat
from holdfast.utils.options import Option, check_options, options_of

Kind = Literal["attack", "bounds", "certify", "explain", "train"]
KINDS: tuple[Kind, ...] = ("attack", "bounds", "certify", "explain", "train")
Guarantee = Literal["upper bound", "proof", "probabilistic proof", "none"]
Gradients = Literal["needed", "used", "none"]
ENTRY_POINTS = "holdfast.methods"
"""Group of entry points through which an installed package adds methods; each names a module to import."""
F = TypeVar("F", bound=Callable[..., Any])


def _not_registered(*args: Any, **options: Any) -> Any:
    raise HoldfastError("this record was not put into the registry: use the record as the decorator of a function")


@dataclass(frozen=True)
class Method:
    """What every method has."""

    kind: ClassVar[Kind]
    name: str  # lower-case with hyphens, the paper's own
    _: KW_ONLY
    summary: str  # one line
    reference: str  # author, title, year
    threats: tuple[str, ...] = ()  # names of the threats that it handles, such as ("linf", "l2")
    guarantee: Guarantee = "none"
    function: Callable[..., Any] = _not_registered  # filled in when the record decorates the function

    def __call__(self, function: F) -> F:
        """Put the function into the table under this record."""
        if self.name in _METHODS[self.kind]:
            raise ValueError(f"{self.kind} '{self.name}' is registered twice")
        _METHODS[self.kind][self.name] = replace(self, function=function)
        return function

    @property
    def typed_options(self) -> dict[str, Option]:
        """The keyword-only options with types, ranges and defaults; `Noise` is none: the front door hands it over."""
        known = options_of(self.function)
        return {name: o for name, o in known.items() if Noise not in (o.kind, *get_args(o.kind))}

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the keyword-only options."""
        return tuple(self.typed_options)

    @property
    def text_options(self) -> dict[str, Option]:
        """The options that a command line or a file can give."""
        return {name: option for name, option in self.typed_options.items() if option.plain}

    def check(self, threat: Threat | None, options: dict[str, Any]) -> dict[str, Any]:
        """Refuse a threat, an option or a value that the method does not take; return the options."""
        if threat is not None and threat.name not in self.threats:
            others = either(f"hf.methods('{self.kind}')", f"`holdfast methods {shlex.quote(self.kind)}`")
            raise UnsupportedError(
                f"method '{self.name}' does not handle the threat '{threat}'; "
                f"it handles: {', '.join(self.threats)}. See {others} for others."
            )
        return check_options(self.typed_options, options, f"method '{self.name}'")


@dataclass(frozen=True, kw_only=True)
class Attack(Method):
    """An attack `(model, x, y, threat, *, noise, options) -> AttackResult`."""

    kind: ClassVar[Kind] = "attack"
    guarantee: Guarantee = "upper bound"
    gradients: Gradients = "needed"  # of the model, "used" where the model has them, or "none" at all
    stochastic: bool = False  # whether it can be trusted on a model that draws random numbers
    nearest: Callable[..., Any] | None = None  # its minimum-norm form `(model, x, y, norm, *, options) -> Nearest`


@dataclass(frozen=True, kw_only=True)
class Bound(Method):
    """Bounds of every logit: `(model, x, threat, *, sound, options) -> Bounds`."""

    kind: ClassVar[Kind] = "bounds"
    guarantee: Guarantee = "proof"


@dataclass(frozen=True, kw_only=True)
class Certificate(Method):
    """A certificate `(model, x, y, threat, *, sound, options) -> CertifyResult`."""

    kind: ClassVar[Kind] = "certify"
    guarantee: Guarantee = "proof"
    needs: str = ""  # name of the architecture that it is made for, "" if it takes any network that has bounds
    module: type | None = None  # class of that architecture's models, which name their `classes` and may reject beyond
    smoothed: bool = False  # whether it speaks of a smoothed classifier made from the model, not of the model
    quick: bool = False  # whether it costs next to nothing where the logits are known
    complete: bool = False  # whether it decides every input, given time, and returns counter-examples in `x_adv`
    own_margin: bool = False  # whether its margin is in units of its own, not a difference of logits
    radius: Callable[..., Any] | None = None  # finds the largest radius (certificates/core/radius_search.py)


@dataclass(frozen=True, kw_only=True)
class Explainer(Method):
    """An attribution `(model, x, y, setting, *, options) -> Explanation`."""

    kind: ClassVar[Kind] = "explain"
    package: str = ""  # name of the package that computes it and has to be installed, "" if none has to be


@dataclass(frozen=True, kw_only=True)
class Part(Method):
    """A method of training that fills one section of a recipe.

    `check_recipe(recipe, **options)` raises an InputError where other keys of the recipe exclude it;
    `check_model(model, x, **options)` raises an error if the model does not fit, and returns the name of the linear top
    layer if the part needs that layer, else None.
    """

    kind: ClassVar[Kind] = "train"
    part: str  # the section: "attack", "targets", "regularizers", "perturb_weights", "average", ...
    default: bool = False  # whether it fills its section where a recipe names no other
    single_step: bool = False  # whether each adversarial example takes one gradient step, so that training may collapse
    curvature: bool = False  # penalises the curvature of the loss; a loss that pairs two outputs then fixes the first
    every: Literal["step", "epoch"] = "step"  # when an average takes in the weights
    check_recipe: Callable[..., None] | None = None
    check_model: Callable[..., str | None] | None = None


@dataclass(frozen=True, kw_only=True)
class Objective(Part):
    """What a run minimises: `(model, x, y, context, *, options) -> (loss, metrics)`."""

    part: str = "objective"
    takes: tuple[str, ...] = ()  # the other sections of a recipe that it is composed of
    certificate: str = ""  # the certificate that it trains for, which proves the inputs of the validation
    bound: str = ""  # the bound that it trains with, where its certificate is a tighter one
    bounded: bool = False  # whether its loss is taken of bounds; some regularisers need a loss that is taken of outputs
    pairs: Callable[..., bool] | None = None  # `(**options)`: is its loss taken of the outputs at x and at x'?
    random: bool = False  # trains a network that draws weights or activations anew in every pass
    ramps: bool = False  # follows the rise of the budget by itself, because its threats have no radius to scale
    view: Callable[..., Any] | None = None  # `(x, noise, **options)`: what a smoothed classifier sees; "noisy" accuracy


_METHODS: dict[Kind, dict[str, Method]] = {kind: {} for kind in KINDS}


@contextmanager
def lend(record: Method) -> Iterator[None]:
    """Register a record inside only, for tests of a method that is not installed."""
    table = _METHODS[record.kind]
    before = table.get(record.name)
    table[record.name] = record
    try:
        yield
    finally:
        if before is None:
            del table[record.name]
        else:
            table[record.name] = before


_HOMES: dict[Kind, str] = {
    "attack": "holdfast.attacks",
    "bounds": "holdfast.bounding",
    "certify": "holdfast.certificates",
    "explain": "holdfast.explanations",
    "train": "holdfast.training",
}


@cache
def load_methods(kind: Kind) -> None:
    """Import the methods of a kind, and what installed packages add."""
    import_module(_HOMES[kind])
    load_plugins()


@cache
def load_plugins() -> None:
    """Import what installed packages add under the entry point group `holdfast.methods`."""
    points = entry_points(group=ENTRY_POINTS)
    for home in _HOMES.values() if points else ():  # first, so that no package takes the name of one of ours
        import_module(home)
    for point in points:
        try:
            point.load()
        except Exception as error:  # a package of somebody else must not take Holdfast down
            warnings.warn(f"the methods of '{point.value}' cannot be loaded: {error!r}", stacklevel=2)


@overload
def get(kind: Literal["attack"], name: str) -> Attack: ...
@overload
def get(kind: Literal["bounds"], name: str) -> Bound: ...
@overload
def get(kind: Literal["certify"], name: str) -> Certificate: ...
@overload
def get(kind: Literal["explain"], name: str) -> Explainer: ...
@overload
def get(kind: Literal["train"], name: str) -> Part: ...
@overload
def get(kind: Kind, name: str) -> Method: ...
def get(kind: Kind, name: str) -> Method:
    """The method of that kind and name, or an error that suggests the nearest one."""
    if name not in _METHODS[kind]:
        load_methods(kind)
    if name not in _METHODS[kind]:
        raise InputError(f"unknown {kind} method '{name}'. " + did_you_mean(name, _METHODS[kind]))
    return _METHODS[kind][name]


def get_objective(name: str) -> Objective:
    """The objective of that name."""
    method = get("train", name)
    if not isinstance(method, Objective):
        raise InputError(f"'{name}' is no objective; it goes into the section [{method.part}] of a recipe")
    return method


@overload
def methods(kind: Literal["attack"]) -> list[Attack]: ...
@overload
def methods(kind: Literal["bounds"]) -> list[Bound]: ...
@overload
def methods(kind: Literal["certify"]) -> list[Certificate]: ...
@overload
def methods(kind: Literal["explain"]) -> list[Explainer]: ...
@overload
def methods(kind: Literal["train"]) -> list[Part]: ...
@overload
def methods(kind: Kind | None = None) -> list[Method]: ...
def methods(kind: Kind | None = None) -> Sequence[Method]:
    """All methods of a kind ("attack", "bounds", "certify", "explain", "train"), or all there are."""
    if kind is not None and kind not in KINDS:
        raise InputError(f"unknown kind of method '{kind}'. " + did_you_mean(str(kind), KINDS))
    kinds = KINDS if kind is None else (kind,)
    for k in kinds:
        load_methods(k)
    return [method for k in kinds for method in _METHODS[k].values()]
