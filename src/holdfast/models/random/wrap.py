"""Put other layers in the place of some layers of a copy of a model."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from holdfast.errors import InputError
from holdfast.models.catalog import get_architecture, make_model, record_architecture
from holdfast.models.random.random_network import RandomLayer, RandomNetwork

CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
DENSE: tuple[type[nn.Module], ...] = (nn.Linear,)
AFFINE = (*CONVOLUTIONS, *DENSE)
NORMS: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Change = Callable[[nn.Module, int], nn.Module]
"""From a layer and its number among the chosen ones, in order of registration, to what takes its place."""


def check_inner(model: nn.Module) -> None:
    """Refuse what is no module, and a model that is random already."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    if any(isinstance(module, RandomLayer) for module in model.modules()):
        raise InputError("the model has random layers already; make a random network of the plain one")


def wrap_layers(model: nn.Module, kinds: tuple[type[nn.Module], ...], change: Change) -> nn.Module:
    """A copy of the model in which each layer of these kinds with parameters is changed; a shared one stays shared.

    Only layers of exactly these classes count: a subclass may do something else with its weights.
    """
    model = copy.deepcopy(model)
    if get_architecture(model) is not None:
        del model.architecture
    changed: dict[nn.Module, nn.Module] = {}
    for layer in model.modules():
        if type(layer) in kinds and any(True for _ in layer.parameters(recurse=False)):
            changed[layer] = change(layer, len(changed))
    if not changed:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise InputError(f"the model {type(model).__name__} has no layer to make random, none of: {names}")
    if model in changed:
        return changed[model]
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in changed:
                parent._modules[name] = changed[child]
    return model


def make_inner(of: str, **options: Any) -> nn.Module:
    """A new model to make random; of one architecture, since options of options cannot be told apart."""
    model = make_model(of, **options)
    recipe = get_architecture(model)
    if recipe is not None and "of" in recipe[1]:
        raise InputError(f"a random network is made of a plain architecture, and '{of}' is made of another one itself")
    return model


def recorded(changed: RandomNetwork, model: nn.Module, name: str, options: dict[str, Any]) -> RandomNetwork:
    """The changed model, which remembers how it was made if the model that it was made of does."""
    recipe = get_architecture(model)
    if recipe is not None and "of" not in recipe[1]:
        record_architecture(changed, name, {"of": recipe[0], **options, **recipe[1]})
    return changed
