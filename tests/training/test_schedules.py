""""""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import L1, L2, InputError, Linf, Patch
from holdfast.models import make_model
from holdfast.training import load_recipe, schedules
from holdfast.training.loop import budget_factor
from holdfast.training.optimizer import learning_rate
from holdfast.training.schedules import (
    BUDGETS,
    LEARNING_RATES,
    linear_rise,
    log_rise,
    smooth_rise,
    warm_up,
    with_budget,
)

OPTIONS = {
    "constant": {},
    "step": {"every": 3.0, "gamma": 0.5},
    "multistep": {"milestones": (2.0, 5.0)},
    "cosine": {"final": 0.1},
    "one-cycle": {},
    "cyclic": {"period": 4.0, "low": 0.2},
}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("constant", {0: 1, 9: 1}),
        ("step", {0: 1, 2.9: 1, 3: 0.5, 6.1: 0.25}),
        ("multistep", {1.9: 1, 2: 0.1, 4.9: 0.1, 5: 0.01}),
        ("cosine", {0: 1, 5: 0.55, 10: 0.1}),
        ("one-cycle", {0: 0, 2: 0.5, 4: 1, 7: 0.5, 10: 0}),
        ("cyclic", {0: 0.2, 1: 0.6, 2: 1, 3: 0.6, 4: 0.2, 6: 1}),
    ],
)
def test_learning_rates_by_hand(name, values):
    got = {t: LEARNING_RATES[name](t, 10, **OPTIONS[name]) for t in values}
    assert got == pytest.approx(values)


@given(st.floats(0, 10), st.sampled_from(sorted(LEARNING_RATES)))
def test_factors_stay_between_zero_and_one(t, name):
    assert 0 <= LEARNING_RATES[name](t, 10, **OPTIONS[name]) <= 1


def test_budgets_by_hand():
    times = (0, 1, 2, 3, 4, 9)
    assert [BUDGETS["linear"](t, 10, start=1, end=3) for t in times] == [0, 0, 0.5, 1, 1, 1]
    assert [BUDGETS["cosine"](t, 10, start=0, end=4) for t in times] == pytest.approx(
        [0, (1 - math.sqrt(0.5)) / 2, 0.5, (1 + math.sqrt(0.5)) / 2, 1, 1]
    )
    assert BUDGETS["constant"](0, 10) == 1
    doubled = [0.0064, 0.0128, 0.0256, 0.0512, 0.1024]  # of linf 0.1, every 20 epochs
    assert [0.1 * BUDGETS["doubling"](t, 100, first=0.064, every=20, final=1.024) for t in range(0, 100, 20)] == (
        pytest.approx(doubled)
    )
    assert [BUDGETS["doubling"](t, 10, first=0.3, every=2) for t in (0, 1.99, 2, 4, 9)] == [0.3, 0.3, 0.6, 1, 1]


def test_warm_up():
    assert [warm_up(t, 4) for t in (0, 1, 4, 9)] == [0, 0.25, 1, 1]
    assert warm_up(0, 0) == 1


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: schedules.step(0, 1, every=0), "every > 0"),
        (lambda: schedules.multistep(0, 1, milestones=(5, 2)), "rising milestones"),
        (lambda: schedules.cosine(0, 1, final=-1), "final >= 0"),
        (lambda: schedules.one_cycle(0, 1, peak=1), "0 < peak < 1"),
        (lambda: schedules.cyclic(0, 1, period=0), "period > 0"),
        (lambda: schedules.linear_rise(0, 1, start=3, end=2), "start < end"),
        (lambda: schedules.doubling(0, 1, first=0, every=2), "0 < first <= final"),
        (lambda: schedules.doubling(0, 1, first=0.5, every=0), "every > 0"),
    ],
)
def test_bad_options_are_refused(call, text):
    with pytest.raises(InputError, match=text):
        call()


def test_scaled_budget_keeps_the_rest_of_the_threat():
    assert with_budget(Linf(0.2, low=-1), 0.5) == Linf(0.1, low=-1)
    assert with_budget(L2(1.0), 0.25) == L2(0.25)
    assert with_budget(L1(1.0), 0.0) == L1(0.0)
    assert with_budget(Patch(2, 2), 1) == Patch(2, 2)
    with pytest.raises(InputError, match=r"patch:2x2.*cannot be scaled"):
        with_budget(Patch(2, 2), 0.5)


def test_rises_from_a_part_of_the_budget():
    """Hu et al., 2023: (min(2 t / T, 1) 1.9 + 0.1) eps; Leino et al., 2021: along a logarithm from 0.01 to 1.1."""
    for t in (0.0, 3.0, 7.5, 10.0, 15.0, 20.0):
        published = min(2 * t / 20, 1) * 1.9 + 0.1
        assert linear_rise(t, 20, peak=2.0, initial=0.1, final=2.0) == pytest.approx(published)
        along = math.exp(math.log(0.01) + min(2 * t / 20, 1) * (math.log(1.1) - math.log(0.01)))
        assert log_rise(t, 20, end=10, initial=0.01, final=1.1) == pytest.approx(along)
    for rise in (linear_rise, log_rise):
        with pytest.raises(InputError, match="initial <= final"):
            rise(1, 2, initial=2.0)


def test_a_linear_rise_stops_at_one_times_its_final_value():
    """From epoch 2 to 10, up to 1.5 and cut off at 1, all of it doubled."""
    rise = [schedules.linear_rise(t, 10, start=2, end=10, peak=1.5, final=2.0) for t in (1, 4, 6, 9, 12)]
    assert rise == pytest.approx([0.0, 0.75, 1.5, 2.0, 2.0])
    half = [schedules.cosine_rise(t, 8, end=8) for t in (0, 2, 4, 8)]
    assert half == pytest.approx([0.0, (1 - math.sqrt(0.5)) / 2, 0.5, 1.0])


def test_a_smooth_rise_is_a_power_and_then_a_line_that_ends_at_one():
    """c (m^4 + 4 m^3 (1 - m)) = 1 for m = 1/4: c = 256 / 13."""
    rise = [schedules.smooth_rise(t, 8, end=8, middle=0.25, power=4.0) for t in (0, 1, 2, 4, 8)]
    assert rise == pytest.approx([0.0, 1 / 16 / 13, 1 / 13, 5 / 13, 1.0])


def test_the_smooth_rise_is_continuous_and_ends_at_its_final_value() -> None:
    values = [smooth_rise(t / 100, 10, end=8, start=1, final=1.5) for t in range(1001)]
    assert values[100] == 0
    assert values[800] == values[-1] == 1.5
    assert values == sorted(values)
    jumps = [b - a for a, b in itertools.pairwise(values)]
    assert max(jumps) < 0.004
    assert linear_rise(4, 8, final=2.0) == 1.0


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(
    ("budget", "full_at"),
    [
        ({"name": "constant"}, 0.0),
        ({"name": "cosine", "peak": 1.5}, math.acos(-1 / 3) / math.pi),
        ({"name": "linear", "peak": 2.0}, 0.5),
    ],
)
def test_budgets_rates_and_widths_are_compared_by_recipes_alone(budget, full_at, width):
    """The settings of Liu, 2022, Section 4.2.5: linf 0.4, rises to 0.6 (cosine) or 0.8 (linear), cut off at 0.4."""
    changes = {"budget": budget, "model.width": width, "optimizer.lr": 3e-4, "warmup": 5}
    recipe = load_recipe("mnist-pas", changes)
    factors = [budget_factor(recipe, t / 10) for t in range(1001)]
    assert factors == sorted(factors)
    assert factors[-1] == 1.0
    assert factors[0] == (1.0 if full_at == 0 else 0.0)
    assert factors.index(1.0) / 1000 == pytest.approx(full_at, abs=1e-3)
    assert learning_rate(recipe, 50) == pytest.approx(3e-4)
    assert learning_rate(recipe, 2.5) == pytest.approx(1.5e-4)
    w, model = width, make_model(recipe.model.name, input_shape=(1, 28, 28), classes=10, **recipe.model.options)
    count = 2 * w * 25 + 2 * w + 4 * w * 2 * w * 25 + 4 * w + 196 * w * 64 * w + 64 * w + 64 * w * 10 + 10
    assert sum(p.numel() for p in model.parameters()) == count
