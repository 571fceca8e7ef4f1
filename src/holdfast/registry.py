"""One table of all methods. A method is a plain function; its record says all that other code must know of it."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, TypeVar, get_args, overload

from holdfast.errors import HoldfastError, InputError, UnsupportedError, did_you_mean
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
    raise HoldfastError("this record was not put into the registry: use @register(record) on a function")


@dataclass(frozen=True)
class Method:
    """What every method has.

    Attributes:
        name: lower-case with hyphens, the paper's own.
        summary: one line.
        reference: author, title, year.
        threats: names of the threats that it handles, such as ("linf", "l2").
        guarantee: "upper bound" (an attack), "proof", "probabilistic proof", or "none".
        function: the function itself; `register` fills it in.
    """

    kind: ClassVar[Kind]

    name: str
    summary: str = field(kw_only=True)
    reference: str = field(kw_only=True)
    threats: tuple[str, ...] = field(default=(), kw_only=True)
    guarantee: Guarantee = field(default="none", kw_only=True)
    function: Callable[..., Any] = field(default=_not_registered, kw_only=True)

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
            raise UnsupportedError(
                f"method '{self.name}' does not handle the threat '{threat}'; "
                f"it handles: {', '.join(self.threats)}. See hf.methods('{self.kind}') for others."
            )
        return check_options(self.typed_options, options, f"method '{self.name}'")


@dataclass(frozen=True)
class Attack(Method):
    """An attack `(model, x, y, threat, *, noise, options) -> AttackResult`.

    Attributes:
        gradients: "needed" of the model, "used" where the model has them, or "none" at all.
        stochastic: whether it can be trusted on a model that draws random numbers.
        nearest: its minimum-norm form `(model, x, y, norm, *, options) -> Nearest`, if it has one.
    """

    kind: ClassVar[Kind] = "attack"

    guarantee: Guarantee = field(default="upper bound", kw_only=True)
    gradients: Gradients = field(default="needed", kw_only=True)
    stochastic: bool = field(default=False, kw_only=True)
    nearest: Callable[..., Any] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Bound(Method):
    """Bounds of every logit: `(model, x, threat, *, sound, options) -> Bounds`."""

    kind: ClassVar[Kind] = "bounds"

    guarantee: Guarantee = field(default="proof", kw_only=True)


@dataclass(frozen=True)
class Certificate(Method):
    """A certificate `(model, x, y, threat, *, sound, options) -> CertifyResult`.

    Attributes:
        needs: name of the architecture that it is made for, "" if it takes any network that has bounds.
        smoothed: whether it speaks of a smoothed classifier made from the model, not of the model.
        quick: whether it costs next to nothing where the logits are known.
        own_margin: whether its margin is in units of its own, not a difference of logits.
        radius: how `hf.radius` finds the largest radius: in "closed form", by a "search" or by "bisection" of linear or
            interval bounds, by "sampling", or "" where it does not.
    """

    kind: ClassVar[Kind] = "certify"

    guarantee: Guarantee = field(default="proof", kw_only=True)
    needs: str = field(default="", kw_only=True)
    smoothed: bool = field(default=False, kw_only=True)
    quick: bool = field(default=False, kw_only=True)
    own_margin: bool = field(default=False, kw_only=True)
    radius: Literal["", "closed form", "search", "bisection", "sampling"] = field(default="", kw_only=True)


@dataclass(frozen=True)
class Explainer(Method):
    """An attribution `(model, x, y, setting, *, options) -> Explanation`.

    Attributes:
        package: name of the package that computes it and has to be installed, "" if none has to be.
    """

    kind: ClassVar[Kind] = "explain"

    package: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Part(Method):
    """A method of training that fills one section of a recipe.

    Attributes:
        part: the section: "attack", "targets", "regularizers", "perturb_weights", "average", ...
    """

    kind: ClassVar[Kind] = "train"

    part: str = field(kw_only=True)


@dataclass(frozen=True)
class Objective(Part):
    """What a run minimises: `(model, x, y, context, *, options) -> (loss, metrics)`.

    Attributes:
        takes: the other sections of a recipe that it is composed of.
        certificate: the certificate that it trains for, which proves the inputs of the validation; "" for none.
        bound: the bound that it trains with, where its certificate is a tighter one.
        bounded: whether its loss is that of bounds, not of outputs, which some regularisers look at.
        ramps: whether it follows the rise of the budget by itself, because its threats have no radius to scale.
        view: what a smoothed classifier sees, `(x, noise, **options) -> inputs`; validated as "noisy" accuracy.
    """

    part: str = field(default="objective", kw_only=True)
    takes: tuple[str, ...] = field(default=(), kw_only=True)
    certificate: str = field(default="", kw_only=True)
    bound: str = field(default="", kw_only=True)
    bounded: bool = field(default=False, kw_only=True)
    ramps: bool = field(default=False, kw_only=True)
    view: Callable[..., Any] | None = field(default=None, kw_only=True)


_METHODS: dict[Kind, dict[str, Method]] = {kind: {} for kind in KINDS}


def register(record: Method) -> Callable[[F], F]:
    """Decorator that puts a function into the table with its record, as in `@register(Attack("pgd", summary=...))`."""

    def add(function: F) -> F:
        if record.name in _METHODS[record.kind]:
            raise ValueError(f"{record.kind} '{record.name}' is registered twice")
        _METHODS[record.kind][record.name] = replace(record, function=function)
        return function

    return add


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
    for point in entry_points(group=ENTRY_POINTS):
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
