"""A step for each example."""

import pytest
import torch

from attack_tasks import EPS, NORMS, images, linear, with_margin
from contexts import make_context
from holdfast import Linf
from holdfast.training.attack.atas import atas
from holdfast.training.attack.atta import atta
from holdfast.training.step import fit


def one_step(x, y, state=None, *, epoch=1, threat=None, model=None, **options):
    """One step of atas from x itself, not a fresh start; the context, x', and the gradient of each example's loss."""
    model = model or linear()
    state = {"delta": torch.zeros_like(x)} if state is None else state
    if "delta" in state and "drawn" not in state:
        state["drawn"] = torch.ones(len(x), dtype=torch.int64)
    context = make_context(x, threat or Linf(EPS), epoch=epoch, state=state)
    x_adv = atas(model, x, y, fit, context, **options)
    point = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(fit(model(point), y).sum(), point)
    return context, x_adv, gradient


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("c+sqrt(v)", lambda g, c: 0.5 * c / (c + g)),
        ("sqrt(v+c)", lambda g, c: 0.5 * c / (g**2 + c) ** 0.5),
    ],
)
def test_atas_step_of_one_example_without_memory(form, expected):
    x, y = with_margin(0.7)
    context, x_adv, gradient = one_step(x, y, step=0.5, c=0.3, beta=0.0, form=form)
    size = expected(gradient.norm().item(), 0.3)
    assert context.notes["step"].item() == pytest.approx(size, rel=1e-5)
    assert torch.allclose(x_adv, x + size * EPS * gradient.sign(), atol=1e-7)


def test_atas_remembers_the_squared_gradient_of_the_mean_loss():
    x, y = with_margin(0.7, 0.2)
    state = {"delta": torch.zeros_like(x)}
    _, _, gradient = one_step(x, y, state, beta=0.75, c=0.1)
    first = 0.25 * (gradient / 2).square().sum(1)  # the mean of two examples has half of each gradient
    assert torch.allclose(state["squared gradient"], first)
    state["delta"].zero_()
    context, _, _ = one_step(x, y, state, beta=0.75, c=0.1, epoch=2)
    v = 0.75 * first + 0.25 * (gradient / 2).square().sum(1)
    assert torch.allclose(state["squared gradient"], v)
    assert torch.allclose(context.notes["step"], 2 * 0.1 / (0.1 + v.sqrt()))


@pytest.mark.parametrize("form", ["c+sqrt(v)", "sqrt(v+c)"])
def test_atas_takes_smaller_steps_where_the_gradient_is_larger(form):
    x, y = with_margin(0.9, 0.6, 0.3, 0.0)
    context, _, gradient = one_step(x, y, form=form)
    assert gradient.norm(dim=1).diff().gt(0).all()
    assert context.notes["step"].diff().lt(0).all()


def test_atas_limits_and_warm_up():
    x, y = with_margin(0.9, 0.1)
    free = one_step(x, y, c=1.0)[0].notes["step"].tolist()
    assert 1.9 > free[0] > free[1]
    assert one_step(x, y, c=1.0, smallest=1.9)[0].notes["step"].tolist() == pytest.approx([1.9, 1.9])
    assert one_step(x, y, c=1.0, largest=free[1])[0].notes["step"].tolist() == pytest.approx([free[1], free[1]])
    assert one_step(x, y, c=1.0, warmup=2)[0].notes["step"].tolist() == [1.0, 1.0]
    assert one_step(x, y, c=1.0, warmup=2, epoch=2)[0].notes["step"].tolist() == free


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_atas_with_a_large_c_is_atta(norm):
    model, x, y = images()
    kept: dict[str, dict[str, torch.Tensor]] = {"atta": {}, "atas": {}}
    for epoch in range(3):
        contexts = {name: make_context(x, NORMS[norm], epoch=epoch, state=state) for name, state in kept.items()}
        expected = atta(model, x, y, fit, contexts["atta"], step=0.5)
        assert torch.equal(atas(model, x, y, fit, contexts["atas"], step=0.5, c=2.0**60), expected)
