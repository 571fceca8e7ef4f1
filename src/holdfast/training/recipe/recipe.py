"""A recipe: a training set-up as a frozen value, every default written out."""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from holdfast.random import Noise
from holdfast.registry import get, get_objective
from holdfast.threats import Threat
from holdfast.threats import threat as read_threat
from holdfast.utils.options import AT_LEAST_ONE, FRACTION, NOT_NEGATIVE, POSITIVE, SHARE, UNIT, Choice, Rule
from holdfast.utils.toml import write_toml

SECTIONS = ("attack", "targets", "regularizers", "perturb_weights")
"""Sections that an objective may be composed of."""


TEN = Rule("between 0 and 10", lambda value: 0 <= value <= 10)


def _key(rule: Rule, **default: Any) -> Any:
    return field(metadata={"rule": rule}, **default)


@dataclass(frozen=True, kw_only=True)
class OptimizerPart:
    """`[optimizer]`; sgd and muon read `momentum`, sgd reads `nesterov`; `clip_norm` bounds the gradient.

    With `lookahead` steps (0: none), slow weights follow by `lookahead_rate` after so many steps.
    """

    name: Literal["sgd", "adam", "adamw", "nadam", "muon"] = "sgd"
    lr: float = _key(POSITIVE)
    momentum: float = _key(FRACTION, default=0.9)
    nesterov: bool = False
    weight_decay: float = _key(NOT_NEGATIVE, default=0.0)
    clip_norm: float | None = _key(POSITIVE, default=None)
    lookahead: int = _key(NOT_NEGATIVE, default=0)
    lookahead_rate: float = _key(SHARE, default=0.5)


@dataclass(frozen=True, kw_only=True)
class AugmentPart:
    """`[augment]`: `crop` is the padding in pixels (0: no crops), `flip` mirrors left to right.

    `inception` crops rectangles of at least this share of the area to the size of the image (0: none; 0.08 in print);
    `brightness` adds up to so much to all pixels; `randaugment` is a number of operations at `magnitude` 0 to 10;
    `cutout` makes a random square of this side grey (0: none);
    `mixup` is the parameter of the Beta distribution of the weights (0: none), used with `mixup_probability`.
    """

    crop: int = _key(NOT_NEGATIVE, default=0)
    flip: bool = False
    inception: float = _key(UNIT, default=0.0)
    brightness: float = _key(UNIT, default=0.0)
    randaugment: int = _key(NOT_NEGATIVE, default=0)
    magnitude: float = _key(TEN, default=10.0)
    cutout: int = _key(NOT_NEGATIVE, default=0)
    mixup: float = _key(NOT_NEGATIVE, default=0.0)
    mixup_probability: float = _key(UNIT, default=1.0)

    @property
    def images_only(self) -> bool:
        """Whether anything is asked that makes sense for images only."""
        return any((self.crop, self.flip, self.inception, self.brightness, self.randaugment, self.cutout))


@dataclass(frozen=True, kw_only=True)
class AveragePart:
    """`[average]` of the weights: "ema" after every step with `decay`, "swa" after every epoch, from `start_epoch`."""

    name: str = "none"
    decay: float = _key(FRACTION, default=0.999)
    start_epoch: int = _key(NOT_NEGATIVE, default=0)


@dataclass(frozen=True, kw_only=True)
class ExtraPart:
    """`[extra]` training data, a name or path for `load_data`; `share` of every batch comes from it.

    An epoch is then one pass over the additional data.
    """

    data: str
    share: float = _key(UNIT, default=0.5)


@dataclass(frozen=True, kw_only=True)
class SubsetPart:
    """`[subset]` of the training split, with as many examples of each class: a `share` of it, of one `kind`.

    `run` is the folder of a run on the whole split, whose losses say which examples are easy and which are hard; a
    random subset needs none. `skip` leaves out its first epochs, `zero_one` takes errors in place of losses.
    """

    kind: Literal["easy", "random", "hard"]
    share: float = _key(SHARE)
    run: str | None = None
    skip: int = _key(NOT_NEGATIVE, default=0)
    zero_one: bool = False


@dataclass(frozen=True, kw_only=True)
class LogPart:
    """`[log]`: what the run writes into its folder beside the history.

    `updates`: loss, norm of the gradient, distance from the start and dead layers after every update. `losses`: for
    every training example and epoch its loss under the budget, its 0-1 error and the norm of its features. `norms`: the
    product of the norms of all layers, as the column "norms" of the history.
    """

    updates: bool = False
    losses: bool = False
    norms: bool = False


@dataclass(frozen=True, kw_only=True)
class EvaluatePart:
    """`[evaluate]` on the validation split: the first `count` inputs, PGD with `attack_steps` (0: no attack).

    `certify` names the certificate that proves them, at the full budget; the default is the certificate that the
    objective trains for, "none" for no proof. The best epoch is the one with the highest `select`: "certified",
    "noisy", "robust" or "clean" accuracy; "auto" is certified if there is a certificate, else noisy if the objective
    trains a smoothed classifier, else robust if the objective has an adversary and there is an attack. Until the budget
    has risen to its end no epoch is the best. "last" keeps the last epoch, whatever its score. With `patience`, the run
    ends after so many epochs in a row that were not the best. `gap` also evaluates as many training inputs, and writes
    by how much accuracy falls from these to the validation split.
    """

    attack_steps: int = _key(NOT_NEGATIVE, default=10)
    certify: str | None = None
    count: int = _key(AT_LEAST_ONE, default=1000)
    select: Literal["auto", "certified", "noisy", "robust", "clean", "last"] = "auto"
    patience: int | None = _key(AT_LEAST_ONE, default=None)
    gap: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training set-up; docs/training.md explains every key."""

    name: str = "custom"
    summary: str = ""  # one line
    needs: str = ""  # what it takes, in words
    data: str | None = None  # name or path for `load_data`
    threat: str | None = None  # as text, such as "linf:8/255"; None if there is no adversary
    epochs: int = _key(AT_LEAST_ONE)
    batch_size: int = _key(AT_LEAST_ONE, default=128)
    seed: int = 0
    validation: float = _key(FRACTION, default=0.1)  # share of the training split held out to choose the best epoch
    tensorboard: bool = False
    init: str | None = None  # file of a model whose weights the run starts from
    weights: Literal["default", "ibp"] = (
        "default"  # fresh ones: by torch's rules, or so that intervals keep their width
    )
    periods: tuple[int, ...] = _key(AT_LEAST_ONE, default=())  # epochs at which schedules start anew, for an ensemble
    model: Choice | None = None  # name and options for `make_model`
    prune: Choice | None = None  # what is learned in place of the weights: a mask over them, or their signs
    objective: Choice  # the loss
    attack: Choice | None = None  # how it finds adversarial examples
    targets: Choice | None = None  # what outputs are compared with
    regularizers: dict[str, dict[str, Any]] = field(default_factory=dict)  # tables of options by name
    perturb_weights: Choice | None = None  # how the weights are moved before the loss is taken
    optimizer: OptimizerPart
    learning_rate: Choice = field(default_factory=lambda: Choice("constant", {}))
    warmup: float = _key(NOT_NEGATIVE, default=0.0)
    budget: Choice = field(default_factory=lambda: Choice("constant", {}))
    augment: AugmentPart = AugmentPart()
    average: AveragePart = AveragePart()
    subset: SubsetPart | None = None
    extra: ExtraPart | None = None
    evaluate: EvaluatePart = EvaluatePart()
    log: LogPart = LogPart()

    @property
    def adversary(self) -> Threat | None:
        return None if self.threat is None else read_threat(self.threat)

    @property
    def parts(self) -> dict[str, Choice]:
        """What the objective is composed of, by the key of its table, such as "attack" or "regularizers.trh"."""
        single = {key: getattr(self, key) for key in SECTIONS if key != "regularizers"}
        tables = {f"regularizers.{name}": Choice(name, options) for name, options in self.regularizers.items()}
        return {key: choice for key, choice in single.items() if choice is not None} | tables

    @property
    def selects(self) -> str:
        """What picks the best epoch: one of the accuracies on the validation split, or "last"."""
        if self.evaluate.select != "auto":
            return self.evaluate.select
        if self.evaluate.certify != "none":
            return "certified"
        if self.view is not None:
            return "noisy"
        adversarial = bool(get("train", self.objective.name).threats) and self.evaluate.attack_steps > 0
        return "robust" if adversarial else "clean"

    @property
    def view(self) -> Callable[[Tensor, Noise], Tensor] | None:
        """What a smoothed classifier sees of x, for an objective that trains one."""
        view = get_objective(self.objective.name).view
        return None if view is None else partial(view, **self.objective.options)

    @property
    def ramps(self) -> bool:
        """Whether the objective follows the rise of the budget by itself, as patches and pixels are not scaled."""
        return get_objective(self.objective.name).ramps

    @property
    def single_step(self) -> bool:
        """Whether the adversarial examples of training come from one step each, so that training may collapse."""
        return any(get("train", choice.name).single_step for choice in (self.objective, *self.parts.values()))

    def period(self, t: float) -> tuple[float, float]:
        """The progress `t` in epochs as a position in its period, and the length of that period."""
        ends = (0, *self.periods) if self.periods else (0, self.epochs)
        last = min(bisect.bisect_right(ends, t), len(ends) - 1)
        return t - ends[last - 1], ends[last] - ends[last - 1]


def to_table(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain nested values; keys that are None are left out."""
    return {f.name: _plain(getattr(recipe, f.name)) for f in fields(recipe) if getattr(recipe, f.name) is not None}


def to_toml(recipe: Recipe) -> str:
    """The recipe as a TOML file that `load_recipe` reads back to an equal one."""
    return write_toml(to_table(recipe))


def _plain(value: Any) -> Any:
    if isinstance(value, Choice):
        return {"name": value.name, **{key: option for key, option in value.options.items() if option is not None}}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        return {key: part for key, part in parts.items() if part is not None}
    return value
