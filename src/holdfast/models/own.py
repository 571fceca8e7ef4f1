"""Models of the user's own: a class in a file, and checkpoints as training scripts leave them."""

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn

from holdfast.errors import InputError, StorageError, argument, did_you_mean
from holdfast.utils.limits import shortened_text

T = TypeVar("T")
_CONTAINERS = ("state_dict", "model", "model_state_dict", "net", "weights")
_PREFIXES = ("module.", "_orig_mod.")  # of DistributedDataParallel and DataParallel, of torch.compile


def build_own(source: str, options: Mapping[str, Any] | None = None) -> nn.Module:
    """The model that a class or function of a Python file makes, as in `mynet.py:MyResNet`.

    The file is the user's own and is run. Modules beside it can be imported from it.

    Args:
        source: FILE.py:NAME, where NAME is a subclass of `torch.nn.Module` or a function that returns one.
        options: keyword arguments of NAME.
    """
    file, _, name = source.rpartition(":")
    if not file.endswith(".py") or not name:
        raise InputError(f"cannot read the architecture '{source}'; write FILE.py:NAME, such as mynet.py:MyResNet")
    module = _run(Path(file).expanduser())
    made = getattr(module, name, None)
    if not callable(made):
        known = [key for key, value in vars(module).items() if _makes_models(value, module)]
        raise InputError(f"'{file}' has no class or function '{name}'. " + did_you_mean(name, known))
    try:
        model = made(**dict(options or {}))
    except Exception as error:  # code of the user's own can fail in any way
        raise InputError(f"{source} cannot be built{_arguments(options)}: {_reason(error, file)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{source} must give a torch.nn.Module, got {type(model).__name__}")
    return model


def _run(path: Path) -> ModuleType:
    """The file as a module; modules beside it can be imported while it runs."""
    if not path.is_file():
        raise StorageError(f"there is no file '{path}' with an architecture")
    name = f"holdfast_own_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"'{path}' cannot be imported as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"'{path}' cannot be imported: {_reason(error, str(path))}") from error
    finally:
        sys.path.pop(0)
    return module


def _makes_models(value: object, module: ModuleType) -> bool:
    """A class of models, or a function, that the file itself defines."""
    own = getattr(value, "__module__", None) == module.__name__
    return own and (inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, nn.Module)))


def _reason(error: Exception, file: str) -> str:
    """The error in one line, with the line of the user's file where it was raised."""
    lines, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith(Path(file).name):
            lines = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {shortened_text(str(error))}{lines}"


def _arguments(options: Mapping[str, Any] | None) -> str:
    return f" with {dict(options)}" if options else " without arguments"


def find_state(content: object, source: str, key: str | None = None) -> dict[str, Tensor]:
    """The state dict inside a checkpoint.

    Tensors may lie at the top, or below one of the usual keys ("state_dict", "model", ...). Prefixes that
    DistributedDataParallel and torch.compile put before every name are taken away.

    Args:
        content: what the file holds.
        source: names the file in errors.
        key: where to look, dotted, if the checkpoint has several state dicts.
    """
    if key is not None:
        for part in key.split("."):
            if not isinstance(content, Mapping) or part not in content:
                if _is_state(content):
                    raise InputError(
                        f"{source} has no entry '{key}': it holds the weights themselves; leave out {argument('key')}"
                    )
                known = [str(name) for name in content] if isinstance(content, Mapping) else []
                raise InputError(f"{source} has no entry '{key}'. " + did_you_mean(part, known))
            content = content[part]
        return _plain(content, source, key)
    if _is_state(content):
        return _plain(content, source, None)
    found = {name: value for name, value in content.items() if _is_state(value)} if isinstance(content, Mapping) else {}
    usual = [name for name in _CONTAINERS if name in found]
    if len(found) == 1 or len(usual) == 1:
        name = usual[0] if usual else next(iter(found))
        return _plain(found[name], source, name)
    if found:
        raise InputError(
            f"{source} holds several state dicts: {', '.join(map(str, found))}. Say which one with {argument('key')}"
        )
    raise InputError(f"{source} holds no state dict: expected names with tensors, got {_kind(content)}")


def _is_state(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items())
    )


def _kind(content: object) -> str:
    if isinstance(content, Mapping):
        return "a table of " + ", ".join(f"{str(name)!r}" for name in list(content)[:5])
    return type(content).__name__


def _plain(content: object, source: str, key: str | None) -> dict[str, Tensor]:
    if not isinstance(content, Mapping) or not _is_state(content):
        where = "" if key is None else f" under '{key}'"
        raise InputError(f"{source} holds no state dict{where}: expected names with tensors, got {_kind(content)}")
    return without_prefixes(content)


def without_prefixes(table: Mapping[str, T]) -> dict[str, T]:
    """The table without the prefixes that DistributedDataParallel and torch.compile put before every name."""
    for prefix in _PREFIXES:
        if table and all(name.startswith(prefix) for name in table):
            return without_prefixes({name.removeprefix(prefix): value for name, value in table.items()})
    return dict(table)
