"""One vocabulary for options: types, ranges, and errors that say what was expected."""

from typing import Literal

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.utils.options import (
    Count,
    Positive,
    Unit,
    check_options,
    describe,
    fill_options,
    options_from,
    options_of,
)


def example(
    model,
    *,
    steps: Count = 1,
    size: float | None = None,
    rate: Positive | Literal["auto"] = "auto",
    loss: str = "ce",
    start: bool = True,
    share: Unit = 0.5,
    weights: torch.Tensor | None = None,
    sizes: tuple[int, ...] = (1,),
): ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 3}, "method 'example' has no option 'step'. Did you mean 'steps'"),
        ({"steps": 1.5}, "option 'steps' of the method 'example': expected an integer >= 1, got 1.5"),
        ({"steps": "many"}, "expected an integer >= 1, got 'many'"),
        ({"steps": True}, "expected an integer >= 1, got True"),
        ({"steps": 0}, "expected an integer >= 1, got 0"),
        ({"size": "big"}, "expected a number, got 'big'"),
        ({"size": float("nan")}, "expected a number, got nan"),
        ({"rate": 0.0}, "expected a number > 0 or one of 'auto', got 0.0"),
        ({"loss": 3}, "expected a text, got 3"),
        ({"start": 1}, "expected true or false, got 1"),
        ({"share": 1.5}, "expected a number between 0 and 1, got 1.5"),
        ({"weights": 2.0}, "expected a Tensor, got 2.0"),
        ({"sizes": 3}, "expected a list, got 3"),
    ],
)
def test_options_of_wrong_name_type_or_range(options, message):
    with pytest.raises(hf.InputError, match=message):
        check_options(options_of(example), options, "method 'example'")


def test_good_options_pass_unchanged():
    good = {"steps": 3, "size": 1.0, "rate": "auto", "loss": "dlr", "start": False, "sizes": (1, 2)}
    assert check_options(options_of(example), good, "method 'example'") == good
    assert check_options(options_of(example), {"size": None, "rate": 2}, "") == {"size": None, "rate": 2.0}


def test_scalars_of_numpy_are_numbers():
    given = check_options(options_of(example), {"steps": np.int64(3), "size": np.float32(0.5)}, "")
    assert given == {"steps": 3, "size": 0.5}
    assert type(given["steps"]) is int


def test_defaults_fill_what_is_not_given():
    filled = fill_options(example, {"steps": 4}, "attack")
    assert filled["steps"] == 4
    assert filled["loss"] == "ce"
    with pytest.raises(hf.InputError, match=r"attack\.step: unknown option\. Did you mean 'steps'"):
        fill_options(example, {"step": 4}, "attack")


def test_what_a_text_can_give():
    plain = {name for name, option in options_of(example).items() if option.plain}
    assert plain == {"steps", "size", "rate", "loss", "start", "share", "sizes"}
    assert describe(options_of(example)["weights"].kind) == "a Tensor or none"


def test_every_default_of_every_method_is_within_its_own_range():
    for method in hf.methods():
        given = {name: option.default for name, option in method.typed_options.items() if not option.required}
        assert method.check(None, given).keys() == given.keys()


def test_shared_options_follow_the_own_ones_which_win():
    @options_from(example)
    def longer(model, *, extra: Count = 7, steps: Count = 20, **options): ...

    known = options_of(longer)
    assert list(known)[:2] == ["extra", "steps"]
    assert set(known) == {"extra", *options_of(example)}
    assert (known["steps"].default, known["share"].default) == (20, 0.5)
    with pytest.raises(hf.InputError, match="expected a number between 0 and 1, got 2"):
        check_options(known, {"share": 2.0}, "method 'longer'")
