"""Models on disk. Nothing here runs code from a file: safetensors, state dicts read as plain tensors, ONNX graphs."""

import contextlib
import json
import math
import os
import pickle
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from holdfast.errors import InputError, StorageError, UnsupportedError, either
from holdfast.models.catalog import get_architecture, make_model
from holdfast.models.layers import Normalize
from holdfast.models.masked.build import own_form, with_form
from holdfast.models.own import build_own, find_state, without_prefixes
from holdfast.models.packed import PackedState, packed_sizes, unpack_state
from holdfast.models.size import Sizes, at_most
from holdfast.utils.limits import SHOWN, UNPACKED, check_values, load_tensors, parse_json, shortened, shortened_text

_KEY = "holdfast"  # entry of the safetensors header that holds our record, as JSON
_HEADER = 8 * 2**20  # bytes of a safetensors header: enough for the names of 80,000 tensors
_RECORD = 2**20  # bytes of our record
_OPTIONS = 100_000  # values in an architecture
NAMED = 3  # keys that an error names, of weights that do not fit
_SUFFIXES = (".safetensors", ".pt", ".pth", ".onnx", ".onnx.gz")
State = dict[str, Tensor]
Recipe = tuple[str, dict[str, Any]]


def save_model(model: nn.Module, path: str | Path, **metadata: Any) -> Path:
    """Write weights, architecture, version and `metadata` to a .safetensors file; returns its path.

    The file appears complete or not at all, and an older file of that name stays until then. A model that `make_model`
    did not make is saved without an architecture: to load it again, build it and give it to `load_model`. A sub-network
    of such a model is loaded with the model that it was made of.

    Args:
        model: in any mode, on any device.
        path: ends in .safetensors; its folder exists.
        metadata: JSON values to keep with the model, such as epoch=30; `read_metadata` gives them back.
    """
    return write_model(model, path, metadata)


def write_model(
    model: nn.Module, path: str | Path, metadata: dict[str, Any], *, pack: Callable[[State], PackedState] | None = None
) -> Path:
    """`save_model`, with tensors that `pack` puts into parts; see `holdfast.models.compact`."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise InputError(f"models are saved as .safetensors, got '{path}'; use '{path.with_suffix('.safetensors')}'")
    if not isinstance(model, nn.Module):
        raise InputError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    recipe = get_architecture(model)
    state = _tensors_of(model.state_dict(), "the model")
    if recipe is not None:
        _check_recipe(recipe, state)
    packed = None if pack is None else pack(state)
    state, parts = (state, {}) if packed is None else (packed.tensors, {"packed": packed.record})
    if recipe is None and (form := own_form(model)) is not None:
        parts["subnetwork"] = form
    header = {"format": "pt", _KEY: _record_text(recipe, metadata, parts)}
    # Copies: safetensors refuses tensors that share memory or are not contiguous.
    _write({name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in state.items()}, path, header)
    return path


def _record_text(recipe: Recipe | None, metadata: dict[str, Any], parts: dict[str, Any]) -> str:
    """Our entry of the header; sorted, so that the same content gives the same bytes."""
    record = {"version": version("holdfast"), "architecture": recipe, "metadata": metadata, **parts}
    try:
        check_values(metadata)
        text = json.dumps(record, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"the metadata of a model must be JSON values: {error}") from error
    if len(text) > _RECORD:
        raise InputError(
            f"architecture and metadata of a model take {len(text):,} characters, more than {_RECORD:,}; "
            "keep large metadata in a file of their own"
        )
    return text


def _check_recipe(recipe: Recipe, state: State) -> None:
    """Refuse to write a file that could not be loaded again because the model was changed after it was made."""
    sizes = _sizes(state)
    expected = _build(recipe, "the model", sizes).state_dict()
    if _sizes(expected) != sizes:
        raise InputError(
            f"the model says it is '{recipe[0]}' but its weights are not those of '{recipe[0]}': it was changed after "
            "make_model. Use `del model.architecture` to save it without an architecture."
        )


def _write(state: State, path: Path, header: dict[str, str]) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        save_file(state, temporary, header)
        _sort_header(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write '{path}': {error}. Is the folder there, writable, and not full?") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _sort_header(path: Path) -> None:
    """Put the entries of the header in order, and the file on the disk: safetensors writes metadata in any order."""
    with path.open("rb+") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        text = json.dumps(header, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) > size:
            raise SafetensorError(f"the header of {size} bytes would grow to {len(text)}")
        file.seek(8)
        file.write(text.ljust(size))
        file.flush()
        os.fsync(file.fileno())


def load_model(
    path: str | Path,
    model: nn.Module | None = None,
    *,
    architecture: nn.Module | str | None = None,
    options: Mapping[str, Any] | None = None,
    key: str | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
) -> nn.Module:
    """The model in a file, in eval mode, on the CPU (or where `model` is).

    Args:
        path: .safetensors; .pt or .pth with a state dict, also one inside a checkpoint or with the prefixes of
            DistributedDataParallel and torch.compile; or .onnx (needs the extra `onnx`).
        model: gets the weights, in its own dtype and on its own device. Needed when the file has no architecture;
            if anything does not fit, it stays as it was. For a sub-network of your own model this may be that model:
            it stays as it was, and a copy becomes the sub-network.
        architecture: the same as `model`, or how to make it: a name of `list_models`, or FILE.py:NAME for a class of
            your own. Such a file is run.
        options: arguments of the architecture, if that is a text.
        key: entry of a checkpoint that holds the state dict, dotted, if there are several.
        mean, std: normalisation of the pixels that the model was trained with; it becomes the first layer, so that the
            model takes inputs in [0, 1].

    Example:
        load_model("weights.pt", architecture="mynet.py:MyResNet", options={"width": 16}, mean=0.47, std=0.25)
    """
    if model is not None and architecture is not None:
        raise InputError("give the model as architecture, or as model, not both")
    target = model if architecture is None else _make(architecture, options)
    if mean is None and std is None:
        return _load(Path(path), target, key)
    first = Normalize(0.0 if mean is None else mean, 1.0 if std is None else std)
    if target is not None and _has_first_layer(Path(path), whole := nn.Sequential(first, target)):
        return _load(Path(path), whole, key)
    return nn.Sequential(first, _load(Path(path), target, key)).eval()


def _has_first_layer(path: Path, whole: nn.Module) -> bool:
    """Whether a file of ours holds the normalisation as well, as training leaves it; its own values then count."""
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    sizes, *_, form = _read_header(path)
    try:
        return set(sizes) == set(_formed(whole, form, path).state_dict())
    except InputError:
        return False


def _formed(model: nn.Module, form: object, path: Path) -> nn.Module:
    """The user's own model as the sub-network that the file holds, if it holds one."""
    if form is None or get_architecture(model) is not None:
        return model
    own = own_form(model)
    if own is None:
        try:
            return with_form(model, form)
        except (InputError, UnsupportedError) as error:
            raise InputError(f"'{path}' holds a sub-network that cannot be made of the model: {error}") from error
    if own != form:
        raise InputError(
            f"'{path}' holds a sub-network of another form than {either('model=', '--architecture')}: "
            f"{shortened(form, 10 * SHOWN)} in place of {own}; give the model that it was made of"
        )
    return model


def _make(architecture: nn.Module | str, options: Mapping[str, Any] | None) -> nn.Module:
    if isinstance(architecture, nn.Module):
        if options:
            raise InputError("options are arguments of an architecture that is given as text; this one is a module")
        return architecture
    return build_own(architecture, options) if ".py" in architecture else make_model(architecture, **(options or {}))


def _load(path: Path, model: nn.Module | None, key: str | None) -> nn.Module:
    if not path.name.endswith(_SUFFIXES):
        raise InputError(f"cannot tell how to load '{path}': expected a name that ends in {', '.join(_SUFFIXES)}")
    if not path.is_file():
        raise StorageError(f"there is no model file '{path}'")
    if path.name.endswith((".onnx", ".onnx.gz")):
        if model is not None:
            raise InputError(
                f"'{path}' holds a whole network, not weights; load it without {either('model=', '--architecture')}"
            )
        return _load_onnx(path)
    if path.suffix == ".safetensors":
        sizes, recipe, _, packed, form = _read_header(path)
        model = model if model is None else _formed(model, form, path)
        model, fresh = _target(model, recipe, without_prefixes(sizes), path)
        state = without_prefixes(_read_tensors(path, packed))
    else:
        state, recipe = _read_state_dict(path, key)
        model, fresh = _target(model, recipe, _sizes(state), path)
    # A fresh model is on the meta device: its tensors are replaced, so the dtypes come from the file.
    if fresh:
        _check_kinds(model, state, path)
    model.load_state_dict(state, assign=fresh)
    return model.eval()


def read_weights(path: str | Path, key: str | None = None) -> State:
    """The tensors of a .safetensors, .pt or .pth file by name; `key` as for `load_model`."""
    path = Path(path)
    if not path.is_file():
        raise StorageError(f"there is no model file '{path}'")
    if path.suffix == ".safetensors":
        return without_prefixes(_read_tensors(path, _read_header(path)[3]))
    if path.suffix not in (".pt", ".pth"):
        raise InputError(f"cannot read weights from '{path}': expected .safetensors, .pt or .pth")
    return _read_state_dict(path, key)[0]


def _target(model: nn.Module | None, recipe: Recipe | None, sizes: Sizes, path: Path) -> tuple[nn.Module, bool]:
    """The module that the tensors of the file fit into, and whether it is a new one, without values."""
    if model is None:
        if recipe is None:
            raise InputError(
                f"'{path}' holds weights but no architecture; "
                + either(
                    "build the model and give it as model=",
                    "give --architecture, a name of `holdfast models` or FILE.py:CLASS of your own",
                )
            )
        built = _build(recipe, f"'{path}'", sizes)
        _check_sizes(built, sizes, path)
        return built, True
    own = get_architecture(model)
    if own is not None and recipe is not None and own != recipe:
        given = either("model=", "--architecture")
        raise InputError(
            f"'{path}' holds {_recipe_text(recipe)}, but {given} is {_recipe_text(own)}; load it without {given}"
        )
    _check_sizes(model, sizes, path)
    return model, False


def read_metadata(path: str | Path) -> dict[str, Any]:
    """What `save_model` was given to keep with the model; empty for a file from elsewhere."""
    if not Path(path).is_file():
        raise StorageError(f"there is no model file '{path}'")
    return _read_header(Path(path))[2]


def _read_header(path: Path) -> tuple[Sizes, Recipe | None, dict[str, Any], dict[str, Any] | None, object]:
    """What a safetensors file says of itself: shapes, architecture, metadata, packed tensors, form of a sub-network.

    No tensor is read.
    """
    try:
        _check_header(path)
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            sizes: Sizes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        text = header.get(_KEY, "{}")
        if len(text) > _RECORD:
            raise ValueError(f"its record has {len(text):,} characters, expected at most {_RECORD:,}")
        record = parse_json(text, finite=False)
        packed = record.get("packed") if isinstance(record, dict) else None
        if packed is not None:
            sizes = packed_sizes(sizes, packed, path.stat().st_size)
    except (OSError, SafetensorError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise StorageError(f"'{path}' is damaged or not a safetensors file: {error}") from error
    metadata = (record.get("metadata") or {}) if isinstance(record, dict) else None
    if not isinstance(metadata, dict):
        raise StorageError(f"'{path}' is damaged: its record is not a table, or the metadata in it are not")
    return sizes, _as_recipe(record.get("architecture"), path), metadata, packed, record.get("subnetwork")


def _check_header(path: Path) -> None:
    """Refuse a header so large that even reading it would take long."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > _HEADER:
        raise ValueError(f"its header has {size:,} bytes, expected at most {_HEADER:,}")


def _read_tensors(path: Path, packed: dict[str, Any] | None) -> State:
    try:
        with safe_open(path, framework="pt") as file:
            # Copies, so that the model does not live in a memory map of a file that may change.
            state = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return state if packed is None else unpack_state(state, packed)
    except (OSError, SafetensorError, ValueError) as error:
        raise StorageError(f"'{path}' is damaged or not a safetensors file: {error}") from error


def _read_state_dict(path: Path, key: str | None = None) -> tuple[State, Recipe | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about formats that are refused below anyway
            content = load_tensors(path)
    except pickle.UnpicklingError as error:
        raise _refusal(path) from error
    except Exception as error:  # a damaged pickle can fail in any way
        if "TorchScript" in str(error):
            raise _refusal(path) from error
        raise StorageError(f"'{path}' is damaged or not a PyTorch file ({type(error).__name__}: {error})") from error
    recipe = None
    if key is None and isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        recipe = _as_recipe(content.get("architecture"), path)
    state = find_state(content, f"'{path}'", key)
    # A tensor may repeat a few values without end; to write it out would fill the memory.
    values, size = sum(tensor.numel() for tensor in state.values()), path.stat().st_size
    if values > UNPACKED * size:
        raise InputError(f"'{path}' has {size:,} bytes but tensors of {values:,} values; save them without views")
    return state, recipe


def _refusal(path: Path) -> InputError:
    return InputError(
        f"'{path}' is not a plain state dict: it holds pickled objects or code, and loading it could run anything. "
        "If you trust it, load it yourself in the environment that made it and convert it with "
        "holdfast.models.save_model(model, 'model.safetensors'); then "
        + either(
            "build the same architecture here and call load_model('model.safetensors', model=...).",
            "give that file with --architecture FILE.py:CLASS.",
        )
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
    try:
        check_values(value, most=_OPTIONS)
    except ValueError as error:
        raise InputError(f"'{path}' has an architecture that cannot be read: {error}") from error
    if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[1], dict):
        return str(value[0]), value[1]
    raise InputError(f"'{path}' has an architecture that is not a pair (name, options): {shortened(value)}")


def _recipe_text(recipe: Recipe, *, most: int = 10 * SHOWN) -> str:
    return f"{shortened(recipe[0])} with {shortened(recipe[1], most)}"


def _build(recipe: Recipe, source: str, sizes: Sizes) -> nn.Module:
    """The architecture without weights, on the meta device; refused where it needs more than the file holds."""
    values = sum(math.prod(shape) for shape in sizes.values())
    try:
        with torch.device("meta"), at_most(len(sizes), values):
            return make_model(recipe[0], **recipe[1])
    except Exception as error:  # options from a file can fail in any way
        reason = shortened_text(str(error) or type(error).__name__)
        wanted = _recipe_text(recipe, most=SHOWN)
        raise InputError(f"the architecture of {source} cannot be built: {reason}; it is {wanted}") from error


def _sizes(state: Mapping[str, Tensor]) -> Sizes:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _check_sizes(model: nn.Module, sizes: Sizes, path: Path) -> None:
    own = _sizes(model.state_dict())
    missing = [name for name in own if name not in sizes]
    unknown = [name for name in sizes if name not in own]
    if missing or unknown:
        parts = [f"it lacks {_first(missing)} ({len(missing)} missing)"] if missing else []
        parts += [f"it has {_first(unknown)}, which the model has not ({len(unknown)} unknown)"] if unknown else []
        raise InputError(f"the weights in '{path}' are those of another architecture: {'; '.join(parts)}")
    differ = [
        f"'{name}' has shape {sizes[name]}, the model needs {own[name]}" for name in own if own[name] != sizes[name]
    ]
    if differ:
        more = f" ({len(differ)} differ)" if len(differ) > NAMED else ""
        raise InputError(
            f"the weights in '{path}' are those of another architecture: {'; '.join(differ[:NAMED])}{more}"
        )


def _first(names: list[str]) -> str:
    return ", ".join(shortened(name) for name in names[:NAMED])


def _check_kinds(model: nn.Module, state: State, path: Path) -> None:
    """Refuse whole numbers in the place of weights."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not state[name].is_floating_point():
            raise InputError(
                f"the weights in '{path}' are those of another architecture: '{name}' is {state[name].dtype}, the "
                f"model needs {tensor.dtype}"
            )


def _load_onnx(path: Path) -> nn.Module:
    try:
        from holdfast.models.onnx.convert import load_onnx
    except ModuleNotFoundError as error:
        raise InputError(f"'{path}': ONNX files need an extra: pip install 'holdfast[onnx]'") from error
    return load_onnx(path)
