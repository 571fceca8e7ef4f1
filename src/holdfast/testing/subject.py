"""What every contract suite needs: the method under test, short options, and a watch over what must not change."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.registry import Method, get, lend
from holdfast.threats import L1, L2, Box, Linf, Patch, PatchShape, Sparse, Threat

EFFORT: dict[str, float] = {"steps": 5, "iterations": 3, "rounds": 2, "restarts": 2, "starts": 10, "refine": 3}
EFFORT |= {"samples": 4, "queries": 30, "targets": 2, "votes": 3, "probes": 16, "together": 2, "n": 1000, "n0": 20}
EFFORT |= {"initial_evaluations": 10, "max_evaluations": 20, "time_limit": 0.1}
"""Options, by name, that set how much work a method does; a suite lowers them to these values."""
NEEDED: dict[str, Any] = {"sigma": 0.5, "scale": 0.8, "size": 5}
"""Options, by name, that some methods need although their default is None."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A method under test, the threat that it meets, and the options that keep it short."""

    method: Method
    threat: Threat | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def given(self) -> Threat:
        """The threat, for a method that has one."""
        if self.threat is None:
            raise InputError(f"'{self.name}' is checked without a threat")
        return self.threat


def require(holds: object, text: str) -> None:
    """Raise an AssertionError with `text` unless `holds`, also under `python -O`."""
    if not holds:
        raise AssertionError(text)


@contextmanager
def subjects_of(
    record: type[Method],
    method: str | Method,
    options: Mapping[str, Any],
    *,
    threats: Sequence[Threat] | None = None,
    shape: Sequence[int] = (),
    scale: float = 1.0,
) -> Iterator[list[Subject]]:
    """The method under each threat, or under none if it has none; every front door finds it by its name inside."""
    found = get(record.kind, method) if isinstance(method, str) else method
    if not isinstance(found, record):
        raise InputError(f"expected the name or the record of a method of kind '{record.kind}', got {found!r}")
    with lend(found):
        met: Sequence[Threat | None] = threats or threats_for(found, shape, scale=scale) or [None]
        yield [Subject(found, threat, {**short_options(found), **options}) for threat in met]


def run_checks(suite: str, subject: Subject, checks: Sequence[Callable[[Any], None]]) -> None:
    """Run the checks on the subject. The first line of a check's docstring is the contract that a failure names."""
    for check in checks:
        try:
            check(subject)
        except Exception as error:
            contract = (check.__doc__ or check.__name__).splitlines()[0]
            where = "" if subject.threat is None else f" under '{subject.threat}'"
            reason = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            raise AssertionError(
                f"{subject.method.kind} method '{subject.name}'{where} breaks a contract. {contract} Here: {reason} "
                f"To see it: holdfast.testing.{suite}(...), check '{check.__name__}'."
            ) from error


def short_options(method: Method) -> dict[str, Any]:
    """Options that make a method quick: each option of `EFFORT` that it has, if its default asks for more work.

    >>> from holdfast.registry import get
    >>> short_options(get("attack", "pgd"))
    {'steps': 5}
    """
    found = {}
    for name, option in method.typed_options.items():
        value = _shorter(name, option.default)
        if option.default is None:
            made = next((kind() for kind in get_args(option.kind) if _needs_nothing(kind)), None)
            value = _shorter(name, made) if made is not None else NEEDED.get(name)
        if value is not None:
            found[name] = value
    return found


def _needs_nothing(kind: Any) -> bool:
    """Whether `kind` is a dataclass whose fields all have defaults."""
    unset = (MISSING, MISSING)
    return is_dataclass(kind) and all((f.default, f.default_factory) != unset for f in fields(kind))


def _shorter(name: str, default: Any) -> Any:
    """A value that asks for less work than the default, or None."""
    if is_dataclass(default) and not isinstance(default, type):
        values = {f.name: _shorter(f.name, getattr(default, f.name)) for f in fields(default)}
        return replace(default, **{key: value for key, value in values.items() if value is not None})
    if isinstance(default, int | float) and not isinstance(default, bool) and default > EFFORT.get(name, default):
        return EFFORT[name]
    return None


def refuses(call: Callable[[], Any], what: str, kind: type[Exception] = InputError) -> None:
    """Require that the call raises an error of this kind."""
    try:
        call()
    except kind:
        return
    except Exception as error:
        raise AssertionError(f"{what} gave {type(error).__name__} ({error}) instead of {kind.__name__}.") from error
    raise AssertionError(f"{what} was accepted instead of being refused with {kind.__name__}.")


def threats_for(method: Method, shape: Sequence[int], *, scale: float = 1.0) -> list[Threat]:
    """One threat of each kind that the method handles, for inputs of this shape (C, H, W) or (D,)."""
    known: dict[str, Threat] = {"linf": Linf(0.08 * scale), "l2": L2(0.3 * scale), "l1": L1(0.8 * scale)}
    known["box"] = Box(torch.full(tuple(shape), 0.08 * scale))
    if len(shape) == 3:
        known |= {"patch": Patch(3, 3) if scale == 1 else Patch(1, 2), "sparse": Sparse(4 if scale == 1 else 1)}
        known |= {"patch-shape": PatchShape("diamond", 5) if scale == 1 else PatchShape("line", 2)}
    missing = [name for name in method.threats if name not in known]
    if missing and len(shape) == 3:
        raise InputError(f"no example of the threat '{missing[0]}' here; give your own: threats=[...]")
    return [known[name] for name in method.threats if name in known]


def _state(model: nn.Module, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Everything that a method must leave as it was, by the words that name it in an error."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "a weight or a buffer of the model": {k: v.detach().clone() for k, v in model.state_dict().items()},
        "the mode of a module (train or eval)": [module.training for module in model.modules()],
        "requires_grad of a parameter": [p.requires_grad for p in model.parameters()],
        "the gradient of a parameter": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "the hooks of a module": [len(getattr(module, kind)) for module in model.modules() for kind in kinds],
        "a tensor of the caller": [t.detach().clone() for t in tensors],
        "requires_grad of a tensor of the caller": [t.requires_grad for t in tensors],
        "torch's global random state": torch.random.get_rng_state(),
        "NumPy's global random state": np.random.get_state()[1],  # type: ignore[index]  # noqa: NPY002
        "Python's global random state": random.getstate(),
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(_same(one, other) for one, other in zip(a, b, strict=True))
    return bool(a == b)


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Global random states that no method can leave by chance as they were; the old states come back at the end."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(620_112_907)
        random.seed(620_112_907)
        np.random.seed(620_112_907)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


@contextmanager
def untouched(model: nn.Module, *tensors: Tensor, may_change: Sequence[str] = ()) -> Iterator[None]:
    """Require that the block changes neither the model nor the tensors nor a global random state."""
    with _own_random_state():
        before = _state(model, tensors)
        yield
        after = _state(model, tensors)
    changed = [what for what in before if what not in may_change and not _same(before[what], after[what])]
    require(not changed, f"the call changed {', '.join(changed)}.")
