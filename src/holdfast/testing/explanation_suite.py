"""The contract of an explanation, as checks that anyone can run on an explanation of their own."""

from typing import Any

import torch
from torch import Tensor, nn

from holdfast.explanations import explain
from holdfast.registry import Explainer, Method
from holdfast.results import Explanation
from holdfast.testing.networks import images_task
from holdfast.testing.subject import Subject, refuses, require, run_checks, subjects_of, untouched


def check_explanation(method: str | Method, **options: Any) -> None:
    """Check that an explanation keeps its contract; raise an AssertionError that says which part is broken.

    Example:
        >>> check_explanation("saliency")
    """
    with subjects_of(Explainer, method, options) as (subject,):
        if "background" in subject.method.options:
            subject.options.setdefault("background", images_task(7)[1])
        run_checks("check_explanation", subject, CHECKS)


def _explain(s: Subject, model: nn.Module, x: Tensor, y: Tensor, **more: Any) -> Explanation:
    return explain(model, x, y, s.name, seed=3, **s.options | more)


def returns_a_row_for_each_input(s: Subject) -> None:
    """The attribution has the shape and dtype of x; ok, error, gradients and `by` have one entry per input."""
    model, x, y = images_task(5)
    for count in (5, 1):
        found = _explain(s, model, x[:count], y[:count])
        require(isinstance(found, Explanation), f"the function returned {type(found).__name__}, not Explanation.")
        shape = tuple(found.attribution.shape)
        require(found.attribution.dtype == x.dtype, f"the attribution is {found.attribution.dtype}, x is {x.dtype}.")
        require(shape == x[:count].shape, f"the attribution has shape {shape}, x has {tuple(x[:count].shape)}.")
        for name, right in (
            ("ok", found.ok.dtype == torch.bool),
            ("error", found.error.is_floating_point()),
            ("gradients", found.gradients.dtype == torch.int64),
        ):
            value = getattr(found, name)
            require(right and value.shape == (count,), f"{name} is {value.dtype} {tuple(value.shape)}.")
        require(len(found.by) == count, f"`by` has {len(found.by)} entries for {count} inputs.")
        require((found.gradients > 0).all(), "`gradients` must count the passes of every input.")
        require(torch.isfinite(found.attribution[found.ok]).all(), "an attribution with ok=True is not finite.")


def depends_on_the_seed_only(s: Subject) -> None:
    """The answer for an input follows from the seed and its index, not from the chunk or from the rest of the batch."""
    model, x, y = images_task(5)
    whole = _explain(s, model, x, y).attribution
    others = {"chunk=2": (_explain(s, model, x, y, chunk=2).attribution, whole)}
    for i in (0, 3):
        alone = _explain(s, model, x[i : i + 1], y[i : i + 1], index=torch.tensor([i])).attribution
        others[f"x[{i}:{i + 1}]"] = (alone, whole[i : i + 1])
    for how, (found, wanted) in others.items():
        require(torch.allclose(found, wanted, rtol=1e-3, atol=1e-4), f"the attribution with {how} differs.")


def leaves_everything_as_it_came(s: Subject) -> None:
    """The model, the tensors of the caller and the global random states are left as they were."""
    model, x, y = images_task(5)
    with untouched(model, x, y):
        _explain(s, model, x, y)


def refuses_bad_input(s: Subject) -> None:
    """NaN, labels out of range, a model in training mode and unknown options are refused with an InputError."""
    model, x, y = images_task(5)
    refuses(lambda: _explain(s, model, x * torch.nan, y), "an input with NaN")
    refuses(lambda: _explain(s, model, x, y + 5), "a label out of range")
    refuses(lambda: _explain(s, model, x, y, no_such_option=1), "an option that the method does not have")
    refuses(lambda: _explain(s, model.train(), x, y), "a model in training mode")


CHECKS = (leaves_everything_as_it_came, returns_a_row_for_each_input, depends_on_the_seed_only, refuses_bad_input)
