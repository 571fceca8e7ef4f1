"""Models on disk. Nothing here runs code from a file: safetensors, state dicts read as plain tensors, ONNX graphs."""

import contextlib
import json
import os
import pickle
import uuid
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from holdfast.errors import InputError, StorageError
from holdfast.models.catalog import get_architecture, make_model

_KEY = "holdfast"  # entry of the safetensors header that holds our record, as JSON
_SUFFIXES = (".safetensors", ".pt", ".pth", ".onnx")
State = dict[str, Tensor]
Recipe = tuple[str, dict[str, Any]]


def save_model(model: nn.Module, path: str | Path, **metadata: Any) -> Path:
    """Write weights, architecture, version and `metadata` to a .safetensors file; returns its path.

    The file appears complete or not at all, and an older file of that name stays until then. A model that `make_model`
    did not make is saved without an architecture: to load it again, build it and give it to `load_model`.

    Args:
        model: in any mode, on any device.
        path: ends in .safetensors; its folder exists.
        metadata: JSON values to keep with the model, such as epoch=30; `read_metadata` gives them back.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise InputError(f"models are saved as .safetensors, got '{path}'; use '{path.with_suffix('.safetensors')}'")
    if not isinstance(model, nn.Module):
        raise InputError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    recipe = get_architecture(model)
    state = _tensors_of(model.state_dict(), "the model")
    if recipe is not None:
        _check_recipe(recipe, state)
    record = {"version": version("holdfast"), "architecture": recipe, "metadata": metadata}
    try:
        header = {"format": "pt", _KEY: json.dumps(record)}
    except TypeError as error:
        raise InputError(f"the metadata of a model must be JSON values: {error}") from error
    # Copies: safetensors refuses tensors that share memory or are not contiguous.
    _write({name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in state.items()}, path, header)
    return path


def _check_recipe(recipe: Recipe, state: State) -> None:
    """Refuse to write a file that could not be loaded again because the model was changed after it was made."""
    expected = _build(recipe, "the model").state_dict()
    if {k: v.shape for k, v in expected.items()} != {k: v.shape for k, v in state.items()}:
        raise InputError(
            f"the model says it is '{recipe[0]}' but its weights are not those of '{recipe[0]}': it was changed after "
            "make_model. Use `del model.architecture` to save it without an architecture."
        )


def _write(state: State, path: Path, header: dict[str, str]) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(state, temporary, header)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write '{path}': {error}. Is the folder there, writable, and not full?") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def load_model(path: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The model in a file, in eval mode, on the CPU (or where `model` is).

    Args:
        path: .safetensors; .pt or .pth with a state dict, or with {"architecture": (name, options), "state_dict": ...};
            or .onnx (needs the extra `onnx`).
        model: gets the weights, in its own dtype and on its own device. Needed when the file has no architecture;
            if anything does not fit, it stays as it was.
    """
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        raise InputError(f"cannot tell how to load '{path}': expected a name that ends in {', '.join(_SUFFIXES)}")
    if not path.is_file():
        raise StorageError(f"there is no model file '{path}'")
    if path.suffix == ".onnx":
        if model is not None:
            raise InputError(f"'{path}' holds a whole network, not weights; call load_model without model=")
        return _load_onnx(path)
    state, recipe = _read_safetensors(path)[:2] if path.suffix == ".safetensors" else _read_state_dict(path)
    if model is None:
        if recipe is None:
            raise InputError(f"'{path}' holds weights but no architecture; build the model and give it as model=")
        model = _build(recipe, f"'{path}'")
        _check_state(model, state, path)
        # The new model is on the meta device: its tensors are replaced, so the dtypes are those of the file.
        model.load_state_dict(state, assign=True)
        return model.eval()
    own = get_architecture(model)
    if own is not None and recipe is not None and own != recipe:
        raise InputError(
            f"'{path}' holds {_recipe_text(recipe)}, but model= is {_recipe_text(own)}; call load_model without model="
        )
    _check_state(model, state, path)
    model.load_state_dict(state)
    return model.eval()


def read_metadata(path: str | Path) -> dict[str, Any]:
    """What `save_model` was given to keep with the model; empty for a file from elsewhere."""
    if not Path(path).is_file():
        raise StorageError(f"there is no model file '{path}'")
    return _read_safetensors(Path(path), tensors=False)[2]


def _read_safetensors(path: Path, *, tensors: bool = True) -> tuple[State, Recipe | None, dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            # Copies, so that the model does not live in a memory map of a file that may change.
            state = {name: file.get_tensor(name).clone() for name in file.keys()} if tensors else {}  # noqa: SIM118
        record = json.loads(header.get(_KEY, "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise StorageError(f"'{path}' is damaged or not a safetensors file: {error}") from error
    if not isinstance(record, dict):
        raise StorageError(f"'{path}' is damaged: its record is not a table")
    return state, _as_recipe(record.get("architecture"), path), dict(record.get("metadata") or {})


def _read_state_dict(path: Path) -> tuple[State, Recipe | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about formats that are refused below anyway
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refusal(path) from error
    except Exception as error:  # a damaged pickle can fail in any way
        if "TorchScript" in str(error):
            raise _refusal(path) from error
        raise StorageError(f"'{path}' is damaged or not a PyTorch file ({type(error).__name__}: {error})") from error
    recipe = None
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        recipe = _as_recipe(content.get("architecture"), path)
        content = content["state_dict"]
    return _tensors_of(content, f"'{path}'"), recipe


def _refusal(path: Path) -> InputError:
    return InputError(
        f"'{path}' is not a plain state dict: it holds pickled objects or code, and loading it could run anything. "
        "If you trust it, load it yourself in the environment that made it and convert it with "
        "holdfast.models.save_model(model, 'model.safetensors'); then build the same architecture here and call "
        "load_model('model.safetensors', model=...)."
    )


def _tensors_of(content: object, source: str) -> State:
    if not isinstance(content, dict) or not content:
        raise InputError(f"{source} holds no state dict: expected names with tensors, got {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(
                f"{source} holds no plain state dict: entry {name!r} is a {type(value).__name__}, expected a tensor. "
                "Save model.state_dict(), or {'architecture': (name, options), 'state_dict': model.state_dict()}."
            )
    return dict(content)


def _as_recipe(value: object, path: Path) -> Recipe | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[1], dict):
        return str(value[0]), value[1]
    raise InputError(f"'{path}' has an architecture that is not a pair (name, options): {value!r}")


def _recipe_text(recipe: Recipe) -> str:
    return f"'{recipe[0]}' with {recipe[1]}"


def _build(recipe: Recipe, source: str) -> nn.Module:
    """The architecture without weights, on the meta device: it costs no memory and no time."""
    try:
        with torch.device("meta"):
            return make_model(recipe[0], **recipe[1])
    except (InputError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise InputError(f"the architecture of {source} cannot be built, {_recipe_text(recipe)}: {error}") from error


def _check_state(model: nn.Module, state: State, path: Path) -> None:
    own = model.state_dict()
    missing = [name for name in own if name not in state]
    unknown = [name for name in state if name not in own]
    if missing or unknown:
        parts = [f"it lacks '{missing[0]}' ({len(missing)} missing)"] if missing else []
        parts += [f"it has '{unknown[0]}', which the model has not ({len(unknown)} unknown)"] if unknown else []
        if unknown and all(name.startswith("module.") for name in unknown):
            parts.append("remove the prefix 'module.' that DataParallel adds to every name")
        raise InputError(f"the weights in '{path}' are those of another architecture: {'; '.join(parts)}")
    for name, tensor in own.items():
        if tensor.shape != state[name].shape:
            raise InputError(
                f"the weights in '{path}' are those of another architecture: '{name}' has shape "
                f"{tuple(state[name].shape)}, the model needs {tuple(tensor.shape)}"
            )


def _load_onnx(path: Path) -> nn.Module:
    try:
        from holdfast.models.onnx import load_onnx
    except ModuleNotFoundError as error:
        raise InputError(f"'{path}': ONNX files need an extra: pip install 'holdfast[onnx]'") from error
    return load_onnx(path)
