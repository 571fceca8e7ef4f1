"""Difficulty: the definition by counting, the scale of distances, groups and subsets, statistics in closed form."""

import itertools
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.analyze.difficulty import (
    choose_subset,
    d_distance,
    difficulty,
    group_means,
    group_statistics,
    groups,
)
from holdfast.analyze.difficulty_page import difficulty_page
from holdfast.analyze.plots.group_charts import groups_svg
from holdfast.errors import InputError, UnsupportedError
from holdfast.models import Ensemble, make_model
from holdfast.training.outputs import forward, top_layer

PAGE = Path(__file__).parents[2] / "docs" / "difficulty.md"
TIED = st.lists(st.integers(-3, 3), min_size=1, max_size=30)


def without_ties(count: int, seed: int = 0) -> torch.Tensor:
    return difficulty(torch.randperm(count, generator=torch.Generator().manual_seed(seed)))


@given(TIED)
def test_difficulty_is_the_probability_of_the_definition(losses: list[int]) -> None:
    d, n = difficulty(torch.tensor(losses)), len(losses)
    for own, value in zip(losses, d.tolist(), strict=True):
        lower, equal = sum(own < other for other in losses), sum(own == other for other in losses)
        assert value == float(Fraction(2 * lower + equal, 2 * n))
    assert d.dtype == torch.float64
    ranks = torch.from_numpy(rankdata(losses, method="average"))
    torch.testing.assert_close(d, 1 - (ranks - 0.5) / n)


@given(TIED)
def test_the_mean_is_one_half_and_monotone_maps_change_nothing(losses: list[int]) -> None:
    g = torch.tensor(losses, dtype=torch.float64)
    d = difficulty(g)
    halves = d * 2 * len(g)  # whole numbers, so that the mean can be tested without rounding
    torch.testing.assert_close(halves, halves.round(), rtol=0, atol=1e-9)
    assert int(halves.round().sum()) == len(g) ** 2
    for monotone in (g.exp(), 3 * g - 7, g**3):
        assert torch.equal(difficulty(monotone), d)
    torch.testing.assert_close(difficulty(-g), 1 - d)


def test_losses_are_averaged_over_the_epochs_that_are_kept() -> None:
    losses = torch.tensor([[9.0, 0.0, 0.0], [1.0, 2.0, 3.0], [1.0, 2.0, 5.0]])
    assert difficulty(losses).tolist() == pytest.approx([1 / 6, 5 / 6, 0.5])
    assert difficulty(losses, skip=1).tolist() == pytest.approx([5 / 6, 0.5, 1 / 6])
    errors = torch.tensor([[True, False, True], [True, False, False]])
    assert difficulty(errors).tolist() == pytest.approx([1 / 6, 5 / 6, 0.5])
    assert difficulty(torch.tensor([float("inf"), 1.0])).tolist() == [0.25, 0.75]
    assert difficulty(torch.tensor([4.0])).tolist() == [0.5]


def test_large_sets_are_ranked_exactly() -> None:
    count = 2**18 + 1
    d = without_ties(count)
    assert torch.equal(d.sort().values, (2 * torch.arange(count).double() + 1) / 2 / count)


@pytest.mark.parametrize("count", range(2, 7))
def test_random_rankings_are_a_third_apart_and_not_three_eighths(count: int) -> None:
    """The source gives 0.375 for two random rankings; the mean over all pairs of them is (N^2 - 1) / (3 N^2)."""
    d = without_ties(count)
    distances = [d_distance(d, d[list(order)]) for order in itertools.permutations(range(count))]
    mean = sum(distances) / len(distances)
    assert mean == pytest.approx((count**2 - 1) / (3 * count**2), abs=1e-12)
    assert mean < 1 / 3 < 0.375
    assert max(distances) == pytest.approx(d_distance(d, 1 - d)) == pytest.approx((count**2 // 2) / count**2)
    assert min(distances) == d_distance(d, d) == 0


def test_the_scale_of_distances_holds_for_large_sets() -> None:
    pairs = [d_distance(without_ties(20_000, seed), without_ties(20_000, seed + 1)) for seed in (0, 2, 4)]
    assert all(abs(distance - 1 / 3) < 0.01 for distance in pairs)


@given(st.integers(1, 300), st.integers(1, 40))
def test_groups_are_those_of_the_definition(size: int, count: int) -> None:
    d = without_ties(size)
    group = groups(d, count=count)
    exact = [min(Fraction(round(2 * size * value), 2 * size) * count // 1, count - 1) for value in d.tolist()]
    assert group.tolist() == exact
    assert all(abs(members - size / count) < 1 for members in torch.bincount(group, minlength=count).tolist())
    assert groups(d.float(), count=count).tolist() == exact


def test_the_ends_and_the_edges_of_groups() -> None:
    assert groups(torch.tensor([0.0, 0.1, 0.3, 0.7, 0.99, 1.0])).tolist() == [0, 1, 3, 7, 9, 9]
    assert groups(torch.tensor([0.29], dtype=torch.float64), count=100).tolist() == [29]  # 0.29 * 100 < 29 as floats
    assert groups(difficulty(torch.ones(7))).tolist() == [5] * 7


@given(st.integers(0, 2**31), st.integers(1, 5))
def test_subsets_are_balanced_and_hold_the_extremes_of_each_class(seed: int, share: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    y = torch.tensor([0, 2, 7])[torch.randint(3, (60,), generator=generator)]
    y[:30] = torch.tensor([0, 2, 7]).repeat(10)
    d = difficulty(torch.randint(8, (60,), generator=generator))  # many ties
    easy, random, hard = (choose_subset(d, y, 3 * share, kind) for kind in ("easy", "random", "hard"))
    for chosen in (easy, random, hard):
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        assert torch.bincount(y[chosen], minlength=8).tolist() == [share, 0, share, 0, 0, 0, 0, share]
    assert not set(easy.tolist()) & set(hard.tolist())
    for label in (0, 2, 7):
        of_class = d[y == label].sort().values
        assert d[easy][y[easy] == label].sort().values.tolist() == of_class[-share:].tolist()
        assert d[hard][y[hard] == label].sort().values.tolist() == of_class[:share].tolist()


def test_the_seed_decides_the_random_subset_alone() -> None:
    d, y = without_ties(1000), torch.arange(1000) % 10
    first, again, other = (choose_subset(d, y, 500, "random", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert 0.4 < torch.isin(first, other).double().mean() < 0.6  # two independent halves share half
    assert abs(d[first].mean() - 0.5) < 0.05
    assert torch.equal(choose_subset(d, y, 500, "hard", seed=1), choose_subset(d, y, 500, "hard", seed=2))
    assert torch.equal(choose_subset(d, y, 1000, "easy"), torch.arange(1000))


def test_wrong_labels_are_ranked_hard() -> None:
    data = hf.load_data("mnist-mini").train
    x, y = data.x[:1000], data.y[:1000].clone()
    wrong = torch.arange(1000) % 20 == 0
    y[wrong] = (y[wrong] + 3) % 10
    model = make_model("linear", seed=0)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        loss = cross_entropy(model(x), y, reduction="none")
        loss.mean().backward()
        optimiser.step()
        losses.append(loss.detach())
    d = difficulty(torch.stack(losses), skip=5)
    assert d[wrong].mean() < 0.1
    assert d[wrong].quantile(0.9) < 0.2


def worst_case(model: nn.Linear, x: torch.Tensor, y: torch.Tensor, eps: float) -> torch.Tensor:
    """The corner of the ball with the largest loss of a linear classifier of two classes."""
    slope = (model.weight[1 - y] - model.weight[y]).detach()
    return x + eps * slope.sign()


@pytest.mark.parametrize("chunk", [3, 256])
def test_statistics_of_a_linear_model_in_closed_form(chunk: int) -> None:
    model = nn.Linear(5, 2).double().eval()
    x, y = 0.3 + 0.4 * torch.rand(40, 5, dtype=torch.float64), torch.arange(40) % 2
    d = without_ties(40)
    found = group_statistics(model, x, y, d, hf.Linf(0.1), count=4, chunk=chunk)
    at = worst_case(model, x, y, 0.1)
    loss, norm = cross_entropy(model(at), y, reduction="none").detach(), at.norm(dim=1)
    for i in range(4):
        members = (d >= i / 4) & (d < (i + 1) / 4)
        assert int(found.size[i]) == int(members.sum()) == 10
        assert float(found.loss[i]) == pytest.approx(float(loss[members].mean()), abs=1e-12)
        assert float(found.feature_norm[i]) == pytest.approx(float(norm[members].mean()), abs=1e-12)


def test_options_of_the_attack_are_used_and_the_model_is_left_as_it_was() -> None:
    model = make_model("lenet", width=0.5, seed=0).eval()
    x, y = torch.rand(12, 1, 28, 28), torch.arange(12) % 10
    d = without_ties(12)

    def loss(**options: object) -> torch.Tensor:
        return group_statistics(model, x, y, d, hf.L2(1.0), count=2, **options).loss

    clean = group_statistics(model, x, y, d, hf.L2(0.0), count=2).loss
    assert bool((clean < loss(steps=1)).all())
    assert bool((loss(steps=1) < loss(steps=10)).all())
    assert bool((loss(step_size=0.0) < loss()).all())
    assert not torch.equal(loss(steps=1, seed=1), loss(steps=1))
    torch.testing.assert_close(loss(steps=1, chunk=5), loss(steps=1), rtol=1e-5, atol=1e-6)
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_empty_groups_are_nan_and_boxes_may_differ_between_inputs() -> None:
    model = nn.Linear(3, 2).eval()
    x, y, d = torch.full((4, 3), 0.5), torch.zeros(4, dtype=torch.int64), torch.tensor([0.0, 0.1, 0.2, 1.0])
    radius = torch.full((4, 3), 0.1)
    radius[3] = 0.0
    found = group_statistics(model, x, y, d, hf.Box(radius, batched=True), count=3, chunk=3)
    assert found.size.tolist() == [3, 0, 1]
    assert found.loss.isnan().tolist() == found.feature_norm.isnan().tolist() == [False, True, False]
    assert found.feature_norm[2] == pytest.approx(0.75**0.5)
    assert found.loss[2] == pytest.approx(cross_entropy(model(x[:1]), y[:1]).item())
    assert found.loss[0] > found.loss[2]


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("mlp", (4,), {"hidden": (6, 5), "normalize": (0.5, 0.2)}),
        ("lenet", (1, 28, 28), {"width": 0.5}),
        ("resnet18", (3, 8, 12), {"channels": (4, 4, 4, 7)}),
        ("vit-ti", (3, 8, 8), {"dim": 8, "depth": 1, "heads": 2, "mlp_dim": 9}),
    ],
)
def test_the_last_dense_layer_makes_the_logits_out_of_the_features(name: str, shape: tuple, options: dict) -> None:
    model = make_model(name, input_shape=shape, classes=3, seed=0, **options).eval()
    x = torch.rand(2, *shape)
    output = forward(model, x, top=top_layer(model, x))
    logits, features = output.logits, output.z
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    assert features.shape == (2, last.in_features)
    torch.testing.assert_close(last(features), model(x))
    torch.testing.assert_close(logits, model(x))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 3), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (4, 1, 1)), nn.Conv2d(4, 3, 1), nn.Flatten()),
        nn.Sequential(nn.Flatten(), nn.Identity()),
        Ensemble([nn.Linear(4, 3)]),
    ],
    ids=["activation", "convolution", "nothing", "ensemble"],
)
def test_models_without_a_dense_output_are_refused(model: nn.Module) -> None:
    x = torch.rand(2, 4)
    with pytest.raises(UnsupportedError, match=rf"the model {type(model).__name__} does not end in a linear layer"):
        top_layer(model.eval(), x)
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_are_removed_when_the_model_fails() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3)).eval()
    with pytest.raises(RuntimeError):
        top_layer(model, torch.rand(2, 4))
    assert not any(module._forward_hooks for module in model.modules())


HALF = torch.full((4,), 0.5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: difficulty(torch.zeros(2, 2, 2)), r"shape \(N,\) or \(epochs, N\)"),
        (lambda: difficulty(torch.zeros(3, 0)), r"got \(3, 0\)"),
        (lambda: difficulty(torch.zeros(3, 5), skip=3), "skip must be from 0 to 2"),
        (lambda: difficulty(torch.zeros(3, 5), skip=-1), "skip must be from 0 to 2"),
        (lambda: difficulty(torch.zeros(5), skip=1), "skip must be from 0 to 0"),
        (lambda: difficulty(torch.tensor([1.0, float("nan")])), "loss of instance 1 is NaN"),
        (lambda: d_distance(HALF, HALF[:3]), "the same instances, got 4 and 3"),
        (lambda: d_distance(HALF, HALF[None]), "d2 must be difficulties"),
        (lambda: d_distance(2 * HALF + 1, HALF), r"d1 must lie in \[0, 1\], got 2 for instance 0"),
        (lambda: groups(HALF, count=0), "count must be at least 1"),
        (lambda: groups(torch.tensor([0.5, float("nan")])), "got nan for instance 1"),
        (lambda: groups(torch.tensor([0, 1])), "torch.int64"),
        (lambda: choose_subset(HALF, torch.tensor([0, 1, 1]), 2, "easy"), "one label per input"),
        (lambda: choose_subset(HALF, torch.tensor([0, 1, 1, 1]), 3, "easy"), "multiple of 2"),
        (lambda: choose_subset(HALF, torch.tensor([0, 1, 1, 1]), 4, "hard"), "at most 1 instances"),
        (lambda: choose_subset(HALF, torch.tensor([0, 1, 1, 1]), 0, "hard"), "got 0"),
        (lambda: choose_subset(HALF, torch.tensor([0, 1, 1, 1]), 2, "esy"), "'random' or 'hard', got 'esy'"),
    ],
)
def test_bad_requests_are_refused(call, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


def test_bad_tasks_are_refused() -> None:
    model, x, y = nn.Linear(3, 2).eval(), torch.rand(4, 3), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(InputError, match="one difficulty per input"):
        group_statistics(model, x, y, HALF[:3], hf.Linf(0.1))
    with pytest.raises(InputError, match="steps and chunk"):
        group_statistics(model, x, y, HALF, hf.Linf(0.1), steps=0)
    with pytest.raises(InputError, match="training mode"):
        group_statistics(nn.Linear(3, 2), x, y, HALF, hf.Linf(0.1))
    with pytest.raises(UnsupportedError, match="got 'sparse:1'"):
        group_statistics(model, x, y, HALF, hf.Sparse(1))


def test_the_example_of_the_page_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, "docs/difficulty.md", "exec"), {})


def test_group_means_leave_out_what_an_epoch_did_not_see():
    d, nan = torch.tensor([0.1, 0.2, 0.6, 0.9]), float("nan")
    found = group_means(torch.tensor([[1.0, 3.0, 5.0, 7.0], [nan, 4.0, 6.0, nan]]), d, count=2)
    assert found.tolist() == [[2.0, 6.0], [4.0, 6.0]]
    with pytest.raises(InputError, match=r"shape \(epochs, 4\)"):
        group_means(torch.zeros(4), d)


def test_the_page_of_points_has_no_pictures_and_escapes_names():
    page = difficulty_page(
        torch.rand(5, 2), torch.tensor([0, 0, 1, 1, 1]), torch.linspace(0, 1, 5), ("<a>", "b"), title="t"
    )
    assert "<img" not in page
    assert "&lt;a&gt;" in page


def test_the_plot_of_the_groups_draws_each_measure():
    means = {"loss": torch.rand(6, 10), "norm": torch.full((6, 10), 2.0)}
    assert groups_svg(means, errors={"error": [0.5] * 6}).count("<polyline") == 9
    with pytest.raises(InputError, match="groups that it has"):
        groups_svg(means, shown=(0, 10))
