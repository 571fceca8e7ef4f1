"""From a recipe to what the loop needs: data, model and folder, all checked before the first step."""

import platform
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from holdfast.certificates import certify
from holdfast.checks import check_labels, check_logits
from holdfast.data import Dataset, Split, load_data, split_validation
from holdfast.errors import HoldfastError, InputError, UnsupportedError, either
from holdfast.models import load_model, make_model
from holdfast.models.catalog import count_parameters, get_architecture
from holdfast.models.size import MOST, MOST_VALUES, at_most
from holdfast.registry import get, get_objective
from holdfast.threats import Threat
from holdfast.training import folder as files
from holdfast.training.augment import check_images
from holdfast.training.context import Parts, in_mode
from holdfast.training.display import check_tensorboard
from holdfast.training.initial_weights import ibp_weights
from holdfast.training.logs import product_of_norms
from holdfast.training.outputs import top_layer
from holdfast.training.recipe.reading import Source, load_recipe
from holdfast.training.recipe.recipe import Recipe, to_table, to_toml
from holdfast.training.state import RunState, read_best
from holdfast.training.subset import take_subset
from holdfast.training.workers import Workers
from holdfast.utils.files import write_json, write_text
from holdfast.utils.options import Choice

T = TypeVar("T")
# What a resumed run may change: how long it goes on, and what has no effect on the weights.
_FREE = ("epochs", "tensorboard", "name", "summary", "needs")


@dataclass(frozen=True, eq=False)
class Task:
    """What is trained on what: `recipe` with the model and the data that were given filled in.

    The last `extra` examples of the training split are the additional data.
    """

    recipe: Recipe
    model: nn.Module
    data: str
    classes: tuple[str, ...]
    train: Split
    validation: Split | None
    threat: Threat | None
    parts: Parts
    extra: int


def run_folder(recipe: Source, out: str | Path | None, *, resume: bool, force: bool) -> Path | None:
    """The folder of the run, checked; a run is resumed where it is if `recipe` is its folder."""
    if resume and force:
        raise InputError("resume and force exclude each other: go on with the run, or replace it")
    if out is None and resume:
        if not isinstance(recipe, str | Path) or not Path(recipe).is_dir():
            raise InputError("resume needs the folder of the run: give out=, or the folder in place of the recipe")
        out = recipe
    if out is None:
        return None
    folder = Path(out)
    files.check_free(folder, resume=resume, force=force)
    if resume and not (folder / files.RECIPE).is_file():
        raise InputError(f"there is no run to resume in {folder}; start it without resume")
    return folder


def prepare(recipe: Recipe, model: nn.Module | None, data: Dataset | str | None, folder: Path | None) -> Task:
    """Load the data, builds the model, and checks that they fit each other and the recipe."""
    dataset = data if isinstance(data, Dataset) else _load(data or recipe.data)
    split, validation = dataset.train, None
    if recipe.validation > 0:
        split, validation = split_validation(dataset.train, recipe.validation, recipe.seed)
    if recipe.subset is not None:
        split = take_subset(split, recipe.subset, fingerprint(split), recipe.seed)
    shape = tuple(split.x.shape[1:])
    check_images(shape, needed=recipe.augment.images_only)
    if recipe.init is not None:  # its weights in the model that was given, or the model that the file describes
        loaded = _checked("init", partial(load_model, recipe.init, model))
        model = _placed(loaded) if model is None else loaded
    model, choice = _model(recipe, model, shape, len(dataset.classes))
    if recipe.prune is not None:
        prune = partial(get("train", recipe.prune.name).function, model, recipe.seed, **recipe.prune.options)
        model = _checked("prune", prune)
    _check_fit(model, split, dataset)
    _check_bounds(recipe, model, split)
    added = 0
    if recipe.extra is not None:
        extra = _load_extra(recipe.extra.data, split, dataset)
        split, added = Split(torch.cat([split.x, extra.x]), torch.cat([split.y, extra.y])), len(extra)
    parts = make_parts(recipe, model, split)
    if recipe.tensorboard:
        check_tensorboard(folder)
    source = data if isinstance(data, str) else recipe.data if data is None else data.name
    recipe = replace(recipe, data=source, model=choice)
    return Task(recipe, model, dataset.name, dataset.classes, split, validation, recipe.adversary, parts, added)


def _load_extra(name: str, split: Split, dataset: Dataset) -> Split:
    """The training split of the additional data, which must be of the same kind as the others."""
    extra = _checked("extra.data", partial(_load, name))
    if extra.train.x.shape[1:] != split.x.shape[1:] or len(extra.classes) != len(dataset.classes):
        raise InputError(
            f"extra.data: '{name}' has inputs of shape {tuple(extra.train.x.shape[1:])} and {len(extra.classes)} "
            f"classes, '{dataset.name}' {tuple(split.x.shape[1:])} and {len(dataset.classes)}; they must be alike"
        )
    return extra.train


def make_parts(recipe: Recipe, model: nn.Module, split: Split) -> Parts:
    """The parts of the recipe as functions with their options, checked against the model."""

    def bound(choice: Choice | None) -> partial[Any] | None:
        return None if choice is None else partial(get("train", choice.name).function, **choice.options)

    x, top = split.x[:2].to(next(model.parameters())), None
    with in_mode(model, False):
        check = get("train", recipe.objective.name).check_model
        if check is not None:  # its errors name the keys themselves
            check(model, x, **recipe.objective.options)
        for where, choice in recipe.parts.items():
            check = get("train", choice.name).check_model
            if check is not None:
                top = _checked(where, partial(check, model, x, **choice.options)) or top
    terms = {name: partial(get("train", name).function, **options) for name, options in recipe.regularizers.items()}
    if recipe.log.norms:
        _checked("log.norms", partial(product_of_norms, model, x))
    watched = _watched(model, x) if recipe.log.losses else None
    return Parts(bound(recipe.attack), bound(recipe.targets), terms, bound(recipe.perturb_weights), top, watched)


def _watched(model: nn.Module, x: Tensor) -> str | None:
    """The top layer whose input the log measures; none where the model does not end in a linear layer."""
    with in_mode(model, False):
        try:
            return top_layer(model, x)
        except UnsupportedError:
            return None


def _checked(where: str, check: Callable[[], T]) -> T:
    """What `check` gives; its error names the key of the recipe that asks for it."""
    try:
        return check()
    except HoldfastError as error:
        raise InputError(f"{where}: {error}") from None


def _load(name: str | None) -> Dataset:
    if name is None:
        raise InputError(f"data: missing; name it in the recipe or give {either('data=', '--set data=NAME')}")
    return load_data(name)


def _model(
    recipe: Recipe, model: nn.Module | None, shape: tuple[int, ...], classes: int
) -> tuple[nn.Module, Choice | None]:
    """The model to train, and what the recipe of the run says about it (nothing, for a module of unknown making)."""
    if model is not None:
        if recipe.weights != "default" and recipe.init is None:
            raise InputError(
                f"weights: '{recipe.weights}' draws fresh weights, but a model was given; set weights = 'default', and "
                "call holdfast.training.initial_weights.ibp_weights(model, seed) first if its weights may be drawn anew"
            )
        if not isinstance(model, nn.Module):
            raise InputError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
        made = get_architecture(model)
        return model, None if made is None else Choice(made[0], made[1])
    if recipe.model is None:
        raise InputError(
            f"model: missing; name an architecture in the recipe or give {either('model=', '--set model.name=NAME')}"
        )
    options = {"input_shape": shape, "classes": classes, **recipe.model.options}
    built = _fresh(recipe.model.name, options, recipe.seed)
    return _placed(ibp_weights(built, recipe.seed) if recipe.weights == "ibp" else built), recipe.model


def _fresh(name: str, options: dict[str, Any], seed: int) -> nn.Module:
    """A new model; one that is too large to be built is refused before it takes memory."""
    try:
        with torch.device("meta"), at_most(MOST, MOST_VALUES):
            make_model(name, **options)
        return make_model(name, seed=seed, **options)
    except InputError as error:
        raise InputError(f"model: {error}") from error
    except (RuntimeError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise InputError(f"model: '{name}' cannot be built: {error}; look at its options") from error


def _placed(model: nn.Module) -> nn.Module:
    """A model that was not given goes where it trains fastest."""
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _check_fit(model: nn.Module, split: Split, dataset: Dataset) -> None:
    classes = len(dataset.classes)
    check_labels(split.y, len(split), classes)
    if classes < 2:
        raise InputError(f"the data '{dataset.name}' has {classes} class; a classifier needs at least 2")
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise InputError("the model has no parameters: there is nothing to train")
    with in_mode(model, False):
        logits = check_logits(model, split.x[:2].to(parameter))
    if logits.shape[1] != classes:
        raise InputError(
            f"the model returns {logits.shape[1]} logits but the data '{dataset.name}' has {classes} classes; "
            "they must be as many"
        )


def _check_bounds(recipe: Recipe, model: nn.Module, split: Split) -> None:
    """Find a layer that a bound of the objective or of the validation cannot handle before the first step."""
    objective, threat = recipe.objective.name, recipe.adversary
    if threat is None:
        return
    record = get_objective(objective)
    needed = {record.bound or record.certificate or "none": f"objective '{objective}'"}
    needed.setdefault(recipe.evaluate.certify or "none", "evaluate.certify")
    place = next(model.parameters())
    x, y = split.x[:1].to(place), split.y[:1].to(place.device)
    with in_mode(model, False):
        for method, where in needed.items():
            if method != "none":
                _checked(where, partial(certify, model, x, y, threat, method))


def open_run(folder: Path, task: Task, run: RunState, team: Workers, *, resume: bool) -> None:
    """Start the folder of a new run, or brings `run` to where the saved one stopped."""
    if resume:
        _check_same(load_recipe(folder), task.recipe)
        with _reading(folder / files.LAST):
            run.restore(files.read_tensors(folder / files.LAST), team)
        if (folder / files.BEST).is_file():
            with _reading(folder / files.BEST):
                run.best = read_best(files.read_tensors(folder / files.BEST))
    team.wait()
    if not team.leads:
        return
    files.clean(folder)
    if not resume:
        files.clear(folder)
    write_text(folder / files.RECIPE, to_toml(task.recipe))
    write_json(folder / files.RUN, _about(task, team))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What is wrong with a checkpoint shows in many ways while it is put in place; all of them mean the same."""
    try:
        yield
    except HoldfastError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise files.damaged(path, f"{type(error).__name__}: {error}".splitlines()[0][:100]) from error


def _check_same(before: Recipe, now: Recipe) -> None:
    old, new = to_table(before), to_table(now)
    for key in {**old, **new}:
        if key not in _FREE and old.get(key) != new.get(key):
            raise InputError(
                f"{key}: the run has {old.get(key)!r}, the recipe now says {new.get(key)!r}. A resumed run may change "
                "only 'epochs'; start another run for anything else."
            )


def fingerprint(split: Split) -> int:
    """A checksum of the labels and of some inputs: enough to notice that the data changed."""
    return zlib.crc32(split.y.cpu().numpy().tobytes(), zlib.crc32(split.x[:64].cpu().numpy().tobytes()))


def _about(task: Task, team: Workers) -> dict[str, Any]:
    place = next(task.model.parameters())
    return {
        "holdfast": version("holdfast"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seed": task.recipe.seed,
        "device": str(place.device),
        "dtype": str(place.dtype),
        "processes": team.count,
        "threads": torch.get_num_threads(),
        "data": task.data,
        "training examples": len(task.train),
        "validation examples": 0 if task.validation is None else len(task.validation),
        "parameters": count_parameters(task.model),
    }
