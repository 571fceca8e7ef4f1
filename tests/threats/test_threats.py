import itertools
import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

import holdfast as hf
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.threats.patch_shapes import shape_masks

BALLS = [hf.Linf(0.1), hf.L2(0.7), hf.L1(1.5)]
ALL = [
    *BALLS,
    hf.Patch(3, 2),
    hf.Sparse(4),
    hf.PatchShape("diamond", 5),
    hf.PatchShape("line", 3),
    hf.Box(torch.rand(2, 5, 4, generator=torch.Generator().manual_seed(0))),
]
shapes = st.tuples(st.integers(1, 3), st.integers(3, 6), st.integers(3, 6))


def images(batch=8, shape=(2, 5, 4), dtype=torch.float32, seed=0):
    return torch.rand(batch, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("threat", ALL, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_projection_and_random_start_stay_in_the_set(threat, dtype):
    x = images(dtype=dtype)
    far = x + 2 * torch.randn_like(x)
    for point in (threat.project(far, x), threat.random_start(x, Noise.for_batch(0, len(x)))):
        assert point.dtype == dtype
        assert bool(threat.contains(point, x).all())
    assert torch.equal(threat.project(x, x), x)


@pytest.mark.parametrize("threat", ALL, ids=str)
def test_projection_is_idempotent(threat):
    x = images()
    once = threat.project(x + torch.randn_like(x), x)
    assert torch.allclose(threat.project(once, x), once, atol=1e-6)


@pytest.mark.parametrize("threat", [hf.Linf(0.2), hf.L2(0.6), hf.L1(0.9)], ids=str)
def test_projection_is_the_nearest_point_by_a_solver(threat):
    x = torch.tensor([[0.1, 0.9, 0.5, 0.02]], dtype=torch.float64)
    for seed in range(4):
        v = x + torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        ours = (threat.project(v, x) - v).norm().item()
        # Split z - x into positive and negative parts, so that every norm is smooth.
        size = {"linf": lambda d: (d[:4] + d[4:]).max(), "l2": lambda d: math.hypot(*(d[:4] - d[4:]))}.get(
            threat.name, lambda d: (d[:4] + d[4:]).sum()
        )
        start, target = x[0].numpy(), v[0].numpy()
        cap = threat.eps if threat.name == "linf" else 1.0
        room = [(0, min(cap, 1 - s)) for s in start] + [(0, min(cap, s)) for s in start]
        constraint = {"type": "ineq", "fun": lambda d: threat.eps - size(d)}
        best = minimize(
            lambda d: ((start + d[:4] - d[4:] - target) ** 2).sum(),
            [0.01] * 8,
            bounds=room,
            constraints=[] if threat.name == "linf" else [constraint],
            method="SLSQP",
            options={"maxiter": 500, "ftol": 1e-12},
        )
        assert ours <= math.sqrt(best.fun) + 1e-4


def test_random_starts_fill_the_ball():
    x = torch.full((4000, 3), 0.5)
    noise = Noise.for_batch(3, len(x))
    # Uniform in a ball of dimension 3: P(|d| <= eps / 2) = 1 / 8 for every norm.
    for threat in (hf.Linf(0.2), hf.L2(0.2), hf.L1(0.2)):
        inner = (threat.distance(threat.random_start(x, noise), x) <= 0.1).float().mean().item()
        assert abs(inner - 1 / 8) < 0.03, threat


@given(shape=shapes, batch=st.integers(1, 4), height=st.integers(1, 3), width=st.integers(1, 3))
def test_patch_membership_agrees_with_enumeration(shape, batch, height, width):
    patch, x = hf.Patch(height, width), images(batch, shape)
    places = patch.locations(shape)
    assert len(places) == (shape[1] - height + 1) * (shape[2] - width + 1)
    changed = patch.random_start(x, Noise.for_batch(1, batch))
    masks = patch.masks(places, shape)
    under_one = torch.stack([((changed == x) | mask).flatten(1).all(1) for mask in masks]).any(0)
    assert bool(under_one.all())
    assert bool(patch.contains(changed, x).all())
    spread = x.clone()
    spread[:, :, 0, 0], spread[:, :, -1, -1] = 2 - x[:, :, 0, 0], 0.5 * x[:, :, -1, -1]
    if height < shape[1] or width < shape[2]:
        assert not bool(patch.contains(spread.clamp(0, 1) + 1e-3, x).any())


def test_patch_boxes_cover_the_patch_and_nothing_else():
    patch, x = hf.Patch(2, 3), images(2, (1, 4, 5))
    places = patch.locations((1, 4, 5))
    lower, upper = patch.boxes(x, places)
    assert lower.shape == (2, len(places), 1, 4, 5)
    inside = patch.masks(places, (1, 4, 5))[None].expand_as(lower)
    assert bool((lower[inside] == 0).all())
    assert bool((upper[inside] == 1).all())
    assert torch.equal(lower[~inside], x[:, None].expand_as(lower)[~inside])
    assert torch.equal(lower[~inside], upper[~inside])


def test_sparse_counts_a_colour_pixel_once_and_a_flat_value_as_itself():
    x = torch.zeros(1, 3, 2, 2)
    changed = x.clone()
    changed[:, :, 0, 0] = 1
    assert hf.Sparse(1).distance(changed, x).item() == 1
    assert hf.Sparse(1).distance(changed.flatten(1), x.flatten(1)).item() == 3


@pytest.mark.parametrize("threat", ALL, ids=str)
def test_dual_norm_bounds_every_perturbation_of_budget_one(threat):
    g = torch.randn(6, 2, 5, 4)
    x = torch.full_like(g, 0.5)
    wide = {"linf": hf.Linf(1.0), "l2": hf.L2(1.0), "l1": hf.L1(1.0)}.get(threat.name, threat)
    wide = type(wide)(**{**vars(wide), "low": -10.0, "high": 10.0})
    dual = wide.dual_norm(g)
    for seed in range(20):
        d = wide.random_start(x, Noise.for_batch(seed, 6)) - x
        if threat.name in ("patch", "patch-shape", "sparse"):
            d = d.sign()  # these allow each value to change by one
        assert bool(((g * d).flatten(1).sum(1) <= dual * (1 + 1e-5) + 1e-5).all())


def test_dual_norm_is_attained_for_balls():
    g = torch.randn(3, 8)
    assert torch.allclose(hf.Linf(1).dual_norm(g), (g * g.sign()).sum(1))
    assert torch.allclose(hf.L2(1).dual_norm(g), (g * g / g.norm(dim=1, keepdim=True)).sum(1))
    assert torch.allclose(hf.L1(1).dual_norm(g), g.abs().max(1).values)
    radius = torch.rand(8) + 0.1
    assert torch.allclose(hf.Box(radius).dual_norm(g), (g * radius * g.sign()).sum(1))


@pytest.mark.parametrize("threat", ALL, ids=str)
def test_box_encloses_the_set(threat):
    x = images()
    lower, upper = threat.box(x)
    for seed in range(5):
        point = threat.random_start(x, Noise.for_batch(seed, len(x)))
        assert bool(((point >= lower) & (point <= upper)).all())


@pytest.mark.parametrize("threat", ALL, ids=str)
def test_budgets_are_nested_and_end_with_the_threat(threat):
    chain = threat.budgets(4)
    assert chain[-1] is threat
    x = images()
    for smaller, larger in itertools.pairwise(chain):
        point = smaller.random_start(x, Noise.for_batch(2, len(x)))
        assert bool(larger.contains(point, x).all())
        assert smaller.budget <= larger.budget


def test_budgets_have_short_texts():
    assert [str(t) for t in hf.Linf(0.1).budgets(5)] == ["linf:0.02", "linf:0.04", "linf:0.06", "linf:0.08", "linf:0.1"]


@given(st.floats(0, 10, allow_subnormal=False), st.sampled_from([hf.Linf, hf.L2, hf.L1]))
def test_text_round_trip(eps, kind):
    assert hf.threat(str(kind(eps))) == kind(eps)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("linf:8/255", hf.Linf(8 / 255)),
        ("l2:0.5", hf.L2(0.5)),
        ("l1:12", hf.L1(12)),
        ("patch:5x5", hf.Patch(5, 5)),
        ("patch:diamond:13", hf.PatchShape("diamond", 13)),
        ("patch:line:4@-1:1", hf.PatchShape("line", 4, low=-1.0, high=1.0)),
        ("sparse:10", hf.Sparse(10)),
        ("linf:0.1@-1:1", hf.Linf(0.1, low=-1, high=1)),
    ],
)
def test_parse_and_print(text, expected):
    assert hf.threat(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize("text", ["linf:2/255", "linf:1/64", "l2:0.50", "l1:1e1", "linf:3/8@-1:1", "patch:5x5"])
def test_a_budget_prints_as_it_was_given_and_is_the_same_threat(text):
    written, plain = hf.threat(text), replace(hf.threat(text))
    assert str(written) == text
    assert written == plain
    assert hash(written) == hash(plain)
    assert repr(written) == repr(plain)
    assert written.canonical == str(plain) == plain.canonical
    assert str(pickle.loads(pickle.dumps(written))) == text
    assert hf.threat(str(written)) == written
    assert str(written.budgets(4)[-1]) == text


def test_parts_of_a_fraction_read_as_fractions():
    levels = hf.threat("linf:2/255").budgets(5)
    assert [level.size for level in levels] == ["0.4/255", "0.8/255", "1.2/255", "1.6/255", "2/255"]
    assert [level.eps for level in levels] == [level.eps for level in hf.Linf(2 / 255).budgets(5)]
    assert [level.size for level in hf.Linf(8 / 255).budgets(2)] == ["4/255", "8/255"]
    # Another budget does not keep the text of the first.
    assert str(replace(levels[-1], eps=0.25)) == "linf:0.25"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("linff:0.1", "Did you mean 'linf'"),
        ("linf:abc", "cannot read the threat"),
        ("linf:", "cannot read the threat"),
        ("linf:1/0", "cannot read the threat"),
        ("linf:-0.1", ">= 0"),
        ("l2:nan", "finite"),
        ("l2:inf", "finite"),
        ("patch:5", "cannot read the threat"),
        ("patch:0x2", "at least 1x1"),
        ("patch:diamnd:5", "unknown shape 'diamnd'. Did you mean 'diamond'"),
        ("patch:diamond:x", "cannot read the threat"),
        ("patch:diamond:0", "at least one pixel"),
        ("patch:square:5", "a square number of pixels"),
        ("patch:rectangle:2", "there is no rectangle of 2 pixels"),
        ("sparse:-1", ">= 0"),
        ("linf:0.1@1:0", "low < high"),
    ],
)
def test_bad_text_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        hf.threat(text)


def test_bad_use_is_refused():
    with pytest.raises(InputError, match="does not fit"):
        hf.Patch(6, 2).box(images())
    with pytest.raises(InputError, match="needs images"):
        hf.Patch(1, 1).project(torch.rand(2, 5), torch.rand(2, 5))
    with pytest.raises(InputError, match="shape"):
        hf.Box(torch.rand(3)).box(images())
    with pytest.raises(InputError, match=">= 0"):
        hf.Box(torch.tensor([-0.1]))


def test_membership_refuses_what_is_outside():
    x = torch.full((1, 4), 0.5)
    assert not hf.Linf(0.1).contains(x + 0.11, x).item()
    assert not hf.L2(0.1).contains(x + 0.06, x).item()
    assert not hf.L1(0.1).contains(x + 0.026, x).item()
    assert not hf.Linf(1.0).contains(x + 0.6, x).item()  # inside the ball, outside the valid range
    assert not hf.Box(torch.tensor([0.1, 0.0, 0.1, 0.1])).contains(x + 0.05, x).item()
    assert hf.Linf(0.1).contains(x + 0.1, x).item()


def test_wherever_a_threat_is_taken_its_text_is_taken_too():
    model = torch.nn.Linear(2, 2).eval()
    x = torch.rand(6, 2)
    y = model(x).argmax(1)
    given, text = hf.Linf(8 / 255), "linf:8/255"
    assert torch.equal(hf.attack(model, x, y, text, "pgd").x_adv, hf.attack(model, x, y, given, "pgd").x_adv)
    assert torch.equal(hf.certify(model, x, y, text).margin, hf.certify(model, x, y, given).margin)
    assert torch.equal(hf.bounds(model, x, text).lower, hf.bounds(model, x, given).lower)
    assert torch.equal(hf.guard(model, text)(x).prediction, hf.guard(model, given)(x).prediction)
    assert hf.threat(given) is given
    with pytest.raises(hf.InputError, match="or a text such as 'linf:8/255', got 3"):
        hf.attack(model, x, y, 3, "pgd")


@pytest.mark.parametrize("threat", [hf.PatchShape("diamond", 5), hf.PatchShape("line", 3), hf.Patch(2, 3)], ids=str)
def test_masks_of_a_patch_are_its_members_at_every_place(threat):
    masks = threat.masks(threat.locations((1, 5, 6)), (1, 5, 6))[:, 0]
    members = (
        [torch.ones(2, 3, dtype=torch.bool)] if threat.name == "patch" else shape_masks(threat.shape, threat.pixels)
    )
    expected = [
        torch.nn.functional.pad(m, (left, 6 - left - m.shape[1], top, 5 - top - m.shape[0]))
        for m in members
        for top in range(5 - m.shape[0] + 1)
        for left in range(6 - m.shape[1] + 1)
    ]
    assert torch.equal(masks, torch.stack(expected))
    values = torch.rand(3, 1, 5, 6, dtype=torch.float64)
    assert torch.allclose(threat.under(values), (values * masks).sum((2, 3)))


def test_a_change_fits_under_a_shape_only_if_all_of_it_does():
    x, diamond = torch.zeros(1, 1, 5, 5), hf.PatchShape("diamond", 5)
    inside, corner = x.clone(), x.clone()
    inside[0, 0, 1:4, 2] = inside[0, 0, 2, 1:4] = 1
    corner[0, 0, 1:3, 1:3] = 1  # four pixels, but no diamond holds a square
    assert diamond.contains(inside, x).tolist() == [True]
    assert diamond.distance(inside, x).tolist() == [5.0]
    assert diamond.contains(corner, x).tolist() == [False]
