"""Bad input meets every front door: one clear error, whichever method was asked for."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.errors import HoldfastError, InputError

MODEL = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 4 * 3, 4)).eval()
X, Y = torch.rand(3, 3, 6, 5), torch.tensor([0, 1, 3])


def put(position, value):
    x = X.clone()
    x[position, 0, 0, 0] = value
    return x


class Broken(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x):
        return self.answer(x)


CASES = [
    ("nan pixel", lambda: (MODEL, put(1, float("nan")), Y), "input 1 holds NaN"),
    ("infinite pixel", lambda: (MODEL, put(2, float("inf")), Y), "input 2 holds NaN or infinite"),
    ("pixel out of range", lambda: (MODEL, put(0, 1.5), Y), "outside the valid range"),
    ("wrong rank", lambda: (MODEL, torch.rand(3, 6, 5), Y), "the model failed on a batch of shape"),
    ("one input without batch", lambda: (MODEL, torch.rand(5), Y), r"use x\[None\]"),
    ("wrong channels", lambda: (MODEL, torch.rand(3, 1, 6, 5), Y), "the model failed"),
    ("integer pixels", lambda: (MODEL, (X * 255).byte(), Y), "dtype"),
    (
        "label too large",
        lambda: (MODEL, X, torch.tensor([0, 1, 4])),
        "label 4 of input 2 is outside the classes 0 to 3",
    ),
    ("negative label", lambda: (MODEL, X, torch.tensor([0, -1, 3])), "label -1 of input 1"),
    ("float labels", lambda: (MODEL, X, Y.float()), "int64"),
    ("labels of wrong length", lambda: (MODEL, X, Y[:2]), "one label per input"),
    ("empty batch", lambda: (MODEL, X[:0], Y[:0]), "empty batch"),
    ("training mode", lambda: (nn.Sequential(nn.Flatten(), nn.Linear(90, 4)).train(), X, Y), r"model.eval\(\)"),
    ("other dtype", lambda: (MODEL, X.double(), Y), "is torch.float32 but x is torch.float64"),
    ("not a tensor", lambda: (MODEL, X.numpy(), Y), "torch.Tensor"),
    ("not a module", lambda: (lambda x: x, X, Y), "torch.nn.Module"),
    (
        "nan logits",
        lambda: (Broken(lambda x: x.flatten(1)[:, :4] * float("nan")).eval(), X, Y),
        "NaN or infinite logits",
    ),
    ("no logits", lambda: (Broken(lambda x: x).eval(), X, Y), "must return logits"),
    ("other device", lambda: (nn.Sequential(nn.Flatten(), nn.Linear(90, 4)).eval().to("meta"), X, Y), "is on meta"),
]


@pytest.mark.parametrize(("make", "message"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
@pytest.mark.parametrize("call", [hf.attack, hf.certify], ids=["attack", "certify"])
def test_bad_input_gets_one_clear_error(make, message, call):
    with pytest.raises(InputError, match=message):
        call(*make(), hf.Linf(0.1))


@pytest.mark.parametrize(("make", "message"), [c[1:] for c in CASES if "label" not in c[0]])
def test_bounds_refuse_the_same(make, message):
    model, x, _ = make()
    with pytest.raises(InputError, match=message):
        hf.bounds(model, x, hf.Linf(0.1))


def test_attacks_refuse_a_radius_for_each_input():
    with pytest.raises(hf.UnsupportedError, match="one radius for all inputs"):
        hf.attack(MODEL, X, Y, hf.Box(torch.full_like(X, 0.1), batched=True), "pgd")


def test_options_of_the_front_doors_are_checked():
    with pytest.raises(InputError, match="chunk"):
        hf.attack(MODEL, X, Y, hf.Linf(0.1), chunk=0)
    with pytest.raises(InputError, match="chunk"):
        hf.certify(MODEL, X, Y, hf.Linf(0.1), chunk=0)
    with pytest.raises(InputError, match="index"):
        hf.attack(MODEL, X, Y, hf.Linf(0.1), index=torch.arange(2))
    y = MODEL(X).argmax(1)  # inputs that are wrong to begin with never reach the method
    with pytest.raises(InputError, match="'steps' of the method 'pgd': expected an integer >= 1, got 0"):
        hf.attack(MODEL, X, y, hf.Linf(0.1), "pgd", steps=0)
    with pytest.raises(InputError, match="unknown loss 'cee'"):
        hf.attack(MODEL, X, y, hf.Linf(0.1), "pgd", loss="cee")


def test_another_valid_range_is_taken_from_the_threat():
    result = hf.attack(MODEL, X * 2 - 1, Y, hf.Linf(0.1, low=-1, high=1), "pgd", steps=2)
    assert bool(hf.Linf(0.1, low=-1).contains(result.x_adv, X * 2 - 1).all())


def test_every_error_is_ours():
    assert issubclass(InputError, HoldfastError)
    assert issubclass(InputError, ValueError)
