"""One table of all methods. A method is a plain function; the decorator adds what a user needs to choose it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from holdfast.errors import InputError, UnsupportedError, did_you_mean
from holdfast.random import Noise
from holdfast.threats import Threat

Kind = Literal["attack", "bounds", "certify", "explain", "train"]
KINDS: tuple[Kind, ...] = ("attack", "bounds", "certify", "explain", "train")
Guarantee = Literal["upper bound", "proof", "probabilistic proof", "none"]
Gradients = Literal["needed", "used", "none"]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Method:
    """A registered method.

    Attributes:
        name: lower-case with hyphens, the paper's own.
        summary: one line.
        guarantee: "upper bound" (an attack), "proof", "probabilistic proof", or "none".
        threats: names of the threats that it handles, such as ("linf", "l2").
        reference: author, title, year.
        function: the function itself.
        stochastic: whether it can be trusted on a model that draws random numbers.
        gradients: of an attack: "needed" of the model, "used" where the model has them, or "none" at all.
        part: of a training method, the part of a recipe that it fills: "objective", "attack", "targets", ...
        smoothed: of a certificate, whether it speaks of a smoothed classifier made from the model, not of the model.
        quick: of a certificate, whether it costs next to nothing where the logits are known.
        own_margin: of a certificate, whether its margin is in units of its own, not a difference of logits.
    """

    kind: Kind
    name: str
    summary: str
    guarantee: Guarantee
    threats: tuple[str, ...]
    reference: str
    function: Callable[..., Any]
    stochastic: bool = False
    part: str = ""
    smoothed: bool = False
    quick: bool = False
    own_margin: bool = False
    gradients: Gradients = "needed"

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the keyword-only options; a `Noise` is none: with it the front door hands over the seed."""
        parameters = inspect.signature(self.function).parameters.values()
        taken = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        return tuple(p.name for p in taken if Noise not in (p.annotation, *get_args(p.annotation)))

    def check(self, threat: Threat | None, options: dict[str, Any]) -> None:
        """Refuse a threat or an option that the method does not take."""
        if threat is not None and threat.name not in self.threats:
            raise UnsupportedError(
                f"method '{self.name}' does not handle the threat '{threat}'; "
                f"it handles: {', '.join(self.threats)}. See hf.methods('{self.kind}') for others."
            )
        for option in options:
            if option not in self.options:
                raise InputError(
                    f"method '{self.name}' has no option '{option}'. " + did_you_mean(option, self.options)
                )


_METHODS: dict[Kind, dict[str, Method]] = {kind: {} for kind in KINDS}


def register(
    kind: Kind,
    name: str,
    *,
    summary: str,
    reference: str,
    guarantee: Guarantee = "none",
    threats: tuple[str, ...] = (),
    stochastic: bool = False,
    part: str = "",
    smoothed: bool = False,
    quick: bool = False,
    own_margin: bool = False,
    gradients: Gradients = "needed",
) -> Callable[[F], F]:
    """Decorator that puts a function into the table under `name`."""

    def add(function: F) -> F:
        if name in _METHODS[kind]:
            raise ValueError(f"{kind} '{name}' is registered twice")
        _METHODS[kind][name] = Method(
            kind,
            name,
            summary,
            guarantee,
            threats,
            reference,
            function,
            stochastic,
            part,
            smoothed,
            quick,
            own_margin,
            gradients,
        )
        return function

    return add


def get(kind: Kind, name: str) -> Method:
    """The method of that kind and name, or an error that suggests the nearest one."""
    if name not in _METHODS[kind]:
        raise InputError(f"unknown {kind} method '{name}'. " + did_you_mean(name, _METHODS[kind]))
    return _METHODS[kind][name]


def methods(kind: Kind | None = None) -> list[Method]:
    """All methods of a kind ("attack", "bounds", "certify", "explain", "train"), or all there are."""
    if kind is not None and kind not in KINDS:
        raise InputError(f"unknown kind of method '{kind}'. " + did_you_mean(str(kind), KINDS))
    kinds = KINDS if kind is None else (kind,)
    return [method for k in kinds for method in _METHODS[k].values()]
