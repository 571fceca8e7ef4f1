"""Certificates by Lipschitz constants: closed forms, rounding, the cache, and attacks inside the radius."""

import gc
import time
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import lipschitz_nets
from torch import nn

import holdfast as hf
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.lipschitz.constants import lipschitz_bound
from holdfast.certificates.core.logit_error import Rounding, _absolute_norm, _tap_norm
from holdfast.certificates.gloro import gloro
from holdfast.certificates.models.gloro import GloRo, bottom
from holdfast.errors import InputError, UnsupportedError
from holdfast.models.layers import MinMax
from holdfast.models.zoo.liresnet import liresnet, minmax_cnn

certificates = import_module("holdfast.certificates.core.lipschitz_margins")
METHODS = ("gloro", "lipschitz")
ATTACKS: tuple[tuple[str, dict[str, int]], ...] = (
    ("pgd", {"steps": 10}),
    ("apgd-ce", {"steps": 12}),
    ("deepfool", {"steps": 10}),
)


def supported():
    found = {}
    for name, (model, shape) in lipschitz_nets().items():
        try:
            lipschitz_bound(trace(model, torch.rand(1, *shape)))
        except UnsupportedError:
            continue
        found[name] = (model, shape)
    return found


NETS = supported()


def inputs(shape, count=30, seed=0):
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))


def predictions(model, x):
    with torch.no_grad():
        return model(x).argmax(1)


def fitted(model, shape, steps=60):
    """A few steps on blobs, so that margins are not those of chance."""
    torch.manual_seed(0)
    y = torch.arange(120) % 3
    x = (torch.rand(3, *shape)[y] * 0.8 + 0.2 * torch.rand(120, *shape)).clamp(0, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval(), x, y


def test_most_kinds_of_networks_have_constants():
    assert {"minmax", "liresnet", "normalised"} < set(NETS)
    assert len(NETS) >= 6


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("method", METHODS)
def test_no_attack_succeeds_within_the_radius(name, method):
    model, shape = NETS[name]
    x = inputs(shape)
    y = predictions(model, x)
    radius = hf.certify(model, x, y, hf.L2(0.1), method).radius
    assert bool((radius > 0).any())
    for share in (0.3, 1.0):
        threat = hf.L2(0.9999 * float(radius.quantile(share)))
        inside = radius > threat.eps
        for attack, options in ATTACKS:
            assert not bool(hf.attack(model, x[inside], y[inside], threat, attack, **options).success.any())


def test_a_trained_network_is_not_beaten_and_the_radius_says_something():
    model, x, y = fitted(liresnet((1, 8, 8), 3, depth=2, width=4, neck=6, stem=(3, 1, 1)), (1, 8, 8))
    result = hf.certify(model, x, y, hf.L2(0.05), "gloro")
    assert float(result.certified.float().mean()) > 0.5
    eps = float(result.radius[result.certified].median())
    certified = hf.certify(model, x, y, hf.L2(eps), "gloro").certified
    for attack, options in ATTACKS:
        broken = hf.attack(model, x, y, hf.L2(eps), attack, **options).success
        assert not bool((broken & certified).any())
    far = hf.attack(model, x, y, hf.L2(20 * eps), "pgd").success
    assert bool((far & certified).any())  # the attacks would have found something


def test_a_bound_that_is_too_small_is_caught(monkeypatch):
    """The attacks of these tests are strong enough to see a constant that is half of the true one."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3).eval()
    x = inputs((6,))
    y = predictions(model, x)
    true = certificates.lipschitz_bound

    def half(graph, **options):
        bound = true(graph, **options)
        return type(bound)(bound.body / 2, bound.pairs / 2, bound.layers, bound.proven)

    monkeypatch.setattr(certificates, "lipschitz_bound", half)
    threat = hf.L2(0.2, low=-10, high=10)
    certified = hf.certify(model, x, y, threat, "gloro").certified
    assert bool((hf.attack(model, x, y, threat, "pgd").success & certified).any())


def test_the_radius_of_a_linear_model_is_its_distance_to_the_boundary():
    torch.manual_seed(0)
    model = nn.Linear(5, 4).double().eval()
    x = inputs((5,)).double()
    y = predictions(model, x)
    w, b = model.weight.detach(), model.bias.detach()
    away = (w[y][:, None] - w).norm(dim=2)
    distance = ((x @ w.T + b).gather(1, y[:, None]) - (x @ w.T + b)) / away
    exact = distance.scatter(1, y[:, None], torch.inf).amin(1)
    result = hf.certify(model, x, y, hf.L2(0.1), "gloro")
    assert torch.allclose(result.radius, exact, rtol=1e-5)
    assert bool((result.radius < exact).all())
    assert bool((result.certified == (result.radius > 0.1)).all())


@pytest.mark.parametrize("sound", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_radius_and_margin_tell_the_same_story(method, sound):
    model, shape = NETS["liresnet"]
    x = inputs(shape, 60)
    y = torch.arange(60) % 3
    radius = hf.certify(model, x, y, hf.L2(0.1), method, sound=sound).radius
    for eps in (0.0, 0.01, 0.05, 0.2):
        result = hf.certify(model, x, y, hf.L2(eps), method, sound=sound)
        assert bool((result.certified == (radius > eps)).all())
        assert bool((result.margin[y != predictions(model, x)] <= 0).all())
        assert torch.equal(result.radius, radius)
        assert set(result.by) <= {method, ""}


def test_pairs_of_classes_are_never_worse_than_one_constant():
    for model, shape in NETS.values():
        x = inputs(shape, 8)
        pairs, single = (certificates.lipschitz_constants(model, x, single=s).pairs for s in (False, True))
        assert bool((pairs <= single * (1 + 1e-6)).all())
        y = predictions(model, x)
        finer, plain = (hf.certify(model, x, y, hf.L2(0.1), method).radius for method in METHODS)
        assert bool((finer >= 0.999 * plain).all())


def test_one_constant_is_that_of_the_map_to_all_logits():
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    single = certificates.lipschitz_constants(model, torch.rand(1, 5), single=True).pairs
    norms = [float(torch.linalg.matrix_norm(model[i].weight.detach(), 2)) for i in (0, 2)]
    expected = 2**0.5 * norms[0] * norms[1] * (1 - torch.eye(3, dtype=torch.float64))
    assert torch.allclose(single, expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["mlp", "cnn", "liresnet", "normalised"])
@pytest.mark.parametrize("eps", [0.01, 0.1])
def test_local_constants_prove_at_least_as_much_and_no_attack_beats_them(name, eps):
    model, shape = NETS[name]
    x = inputs(shape)
    y = predictions(model, x)
    y[0] = (y[0] + 1) % 3  # one that is wrong
    plain, local = (
        hf.certify(model, x, y, hf.L2(eps), "gloro"),
        hf.certify(model, x, y, hf.L2(eps), "lipschitz", local=True),
    )
    assert bool((local.certified | ~plain.certified).all())
    assert bool((local.margin >= plain.margin).all())
    assert bool((local.radius >= plain.radius).all())
    assert not bool(local.certified[0])
    assert bool((local.certified == (local.radius >= eps * (1 - 1e-6))).all())  # the radius is rounded down
    assert set(local.by) <= {"lipschitz", ""}
    inside = local.certified.nonzero()[:, 0]
    for attack, options in ATTACKS:
        assert not bool(hf.attack(model, x[inside], y[inside], hf.L2(eps), attack, **options).success.any())
    if name in ("mlp", "cnn"):  # with ReLU, and some of them off
        assert float((local.margin - plain.margin)[1:].min()) > 0


def test_a_local_radius_goes_beyond_the_ball_only_where_the_global_constants_do():
    model, shape = NETS["mlp"]
    x = inputs(shape)
    y = predictions(model, x)
    plain = hf.certify(model, x, y, hf.L2(0.02), "gloro").radius
    local = hf.certify(model, x, y, hf.L2(0.02), "lipschitz", local=True).radius
    assert bool((local <= torch.maximum(plain, torch.tensor(0.02))).all())
    assert bool((local > plain).any())
    assert bool((local > 0.02).any())


def test_a_larger_head_or_a_common_shift_of_the_logits_changes_no_radius():
    model, shape = NETS["minmax"]
    x = inputs(shape)
    y = predictions(model, x)
    before = hf.certify(model, x, y, hf.L2(0.1), "gloro", sound=False).radius
    other = nn.Sequential(*model[:-1], nn.Linear(8, 4)).eval()
    other[-1].weight.data, other[-1].bias.data = 7 * model[-1].weight.data, 7 * model[-1].bias.data + 3
    after = hf.certify(other, x, y, hf.L2(0.1), "gloro", sound=False).radius
    assert torch.allclose(before, after, rtol=1e-3, atol=1e-5)


def test_equal_rows_have_a_margin_that_never_moves():
    model = nn.Linear(3, 2).double().eval()
    model.weight.data[1] = model.weight.data[0]
    x = inputs((3,), 2).double()
    model.bias.data = torch.tensor([1.0, 0.0], dtype=torch.float64)
    result = hf.certify(model, x, torch.zeros(2, dtype=torch.long), hf.L2(100.0), "gloro", sound=False)
    assert result.radius.tolist() == [torch.inf, torch.inf]
    assert result.certified.tolist() == [True, True]
    model.bias.data = torch.zeros(2, dtype=torch.float64)
    tie = hf.certify(model, x, torch.zeros(2, dtype=torch.long), hf.L2(0.0), "gloro", sound=False)
    assert tie.certified.tolist() == [False, False]
    assert tie.radius.tolist() == [0, 0]


@pytest.mark.parametrize("name", NETS)
def test_rounding_is_within_its_bound(name):
    """float32 against float64, at random inputs and at the corners of the range."""
    model, shape = NETS[name]
    x = torch.cat([inputs(shape, 200), inputs(shape, 200).round()])
    graph = trace(model, x)
    rounding = Rounding(graph, lipschitz_bound(graph), x.dtype)
    centre, (offset, slope) = rounding.centre, rounding.everywhere()
    with torch.no_grad():
        single = model(x).double()
        exact = model.double()(x.double())
        model.float()
    off = single - exact
    apart = (off[:, :, None] - off[:, None]).abs()
    distance = (x.double() - centre.double()).flatten(1).norm(dim=1)
    bound = offset + slope * distance[:, None, None]
    assert bool((apart <= bound).all())
    assert float(bound.max()) < 0.01 * float(single.abs().max())  # and it is of use
    assert float(apart.max()) > 0


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from([1, 2, 3]))
def test_tap_norms_bound_every_choice_of_taps(seed, stride, kernel):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 3, kernel, kernel, generator=generator)
    op = ops.Conv(weight, None, (stride, stride), (1, 1), (1, 1), 1, (3, 6, 6))
    chosen = weight * (torch.rand(3, kernel, kernel, generator=generator) < 0.7)
    units = torch.eye(108).view(-1, 3, 6, 6)
    part = nn.functional.conv2d(units, chosen, None, stride, 1).flatten(1)
    absolute = nn.functional.conv2d(units, weight.abs(), None, stride, 1).flatten(1)
    assert float(torch.linalg.matrix_norm(part, 2)) <= _tap_norm(op) * (1 + 1e-5)
    assert float(torch.linalg.matrix_norm(absolute, 2)) <= _absolute_norm(op) * (1 + 1e-5)


def test_sound_costs_little_in_float32_and_nothing_in_float64():
    model, x, y = fitted(minmax_cnn((1, 8, 8), 3, layers=((4, 4, 2, 1),), hidden=(6,)), (1, 8, 8))
    threat = hf.L2(0.1)
    radii = [hf.certify(model, x, y, threat, "gloro", sound=s).radius for s in (True, False)]
    assert bool((radii[0] < radii[1])[radii[1] > 0].all())
    assert float((radii[1] - radii[0]).max()) < 0.01 * float(radii[1].max())
    model.double()
    radii = [hf.certify(model, x.double(), y, threat, "gloro", sound=s).radius for s in (True, False)]
    assert torch.allclose(*radii, rtol=1e-9, atol=1e-9)


def count_bounds(monkeypatch):
    calls, true = [], certificates.lipschitz_bound
    monkeypatch.setattr(certificates, "lipschitz_bound", lambda *a, **k: calls.append(1) or true(*a, **k))
    return calls


def change_in_place(model):
    with torch.no_grad():
        model[0].weight.mul_(2)


def change_data(model):
    model[0].weight.data *= 2


def replace_data(model):
    model[0].weight.data = model[0].weight.data * 2


def load(model):
    model.load_state_dict({key: value * 2 for key, value in model.state_dict().items()})


def replace_layer(model):
    model[1] = nn.ELU(alpha=3.0).eval()


@pytest.mark.parametrize("change", [change_in_place, change_data, replace_data, load, replace_layer])
def test_the_constants_are_kept_until_the_model_changes(monkeypatch, change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    x = inputs((5,), 50)
    y = predictions(model, x)
    calls = count_bounds(monkeypatch)
    first = hf.certify(model, x, y, hf.L2(0.1), "gloro", chunk=7)
    hf.certify(model, x, y, hf.L2(0.3), "gloro")
    assert len(calls) == 1
    change(model)
    y = predictions(model, x)
    second = hf.certify(model, x, y, hf.L2(0.1), "gloro")
    assert len(calls) == 2
    fresh = nn.Sequential(*model).eval()
    assert torch.equal(second.radius, hf.certify(fresh, x, y, hf.L2(0.1), "gloro").radius)
    assert not torch.equal(first.radius, second.radius)


def test_inputs_of_another_size_have_constants_of_their_own(monkeypatch):
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
    calls = count_bounds(monkeypatch)
    for size in (6, 8):
        x = inputs((1, size, size), 3)
        hf.certify(model, x, predictions(model, x), hf.L2(0.1), "gloro")
    assert len(calls) == 2


def test_a_model_that_is_gone_leaves_nothing_behind():
    model = nn.Linear(3, 2).eval()
    gc.collect()
    before = len(certificates._KNOWN)
    certificates.lipschitz_constants(model, torch.rand(1, 3))
    assert len(certificates._KNOWN) == before + 1
    del model
    gc.collect()
    assert len(certificates._KNOWN) == before


def test_a_whole_test_set_takes_about_as_long_as_inference():
    model = minmax_cnn((1, 28, 28), 10, layers=((8, 4, 2, 1), (16, 4, 2, 1)), hidden=(32,)).eval()
    x = inputs((1, 28, 28), 2000)
    y = predictions(model, x)
    gloro(model, x[:1], y[:1], hf.L2(0.3))

    def least(work):
        times = []
        for _ in range(5):
            start = time.process_time()
            with torch.no_grad():
                work()
            times.append(time.process_time() - start)
        return min(times)

    plain = least(lambda: [model(part) for part in x.split(256)])
    parts = list(zip(x.split(256), y.split(256), strict=True))
    proved = least(lambda: [gloro(model, a, b, hf.L2(0.3)) for a, b in parts])
    assert proved < 3 * plain


def test_logits_at_hand_are_not_computed_again():
    model, shape = NETS["minmax"]
    x = inputs(shape, 10)
    y = predictions(model, x)
    with torch.no_grad():
        ours = gloro(model, x, y, hf.L2(0.1), logits=model(x))
        raised = gloro(model, x, y, hf.L2(0.1), logits=model(x) + 100 * nn.functional.one_hot(y, 4))
        assert torch.equal(ours.margin, gloro(model, x, y, hf.L2(0.1)).margin)
    assert bool((raised.margin > ours.margin).all())


def test_nothing_is_proved_in_half_precision():
    model = nn.Linear(2000, 2).eval().bfloat16()
    x, y = torch.rand(3, 2000).bfloat16(), torch.zeros(3, dtype=torch.long)
    for sound in (True, False):
        with pytest.raises(UnsupportedError, match="float32 or float64"):
            hf.certify(model, x, y, hf.L2(0.1), "gloro", sound=sound)


def test_what_cannot_be_certified_is_refused():
    x, y = torch.rand(2, 4), torch.zeros(2, dtype=torch.long)
    gelu = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)).eval()
    with pytest.raises(UnsupportedError, match="layer '1'"):
        hf.certify(gelu, x, y, hf.L2(0.1), "gloro")
    with pytest.raises(UnsupportedError, match="linf"):
        hf.certify(nn.Linear(4, 2).eval(), x, y, hf.Linf(0.1), "gloro")


# --- the network with one more class ---


@pytest.mark.parametrize("name", NETS)
def test_the_extra_class_wins_exactly_where_there_is_no_certificate(name):
    model, shape = NETS[name]
    x = inputs(shape, 60)
    y = predictions(model, x)
    radius = hf.certify(model, x, y, hf.L2(0.1), "gloro").radius
    eps = float(radius.median())
    wrapped = GloRo(model, hf.L2(eps)).eval()
    with torch.no_grad():
        out = wrapped(x)
    certified = hf.certify(model, x, y, hf.L2(eps), "gloro").certified
    assert 0 < int(certified.sum()) < 60
    assert torch.equal(out.argmax(1), torch.where(certified, y, out.shape[1] - 1))
    with torch.no_grad():
        assert torch.equal(out[:, :-1], model(x))


def test_the_extra_logit_is_that_of_the_formula():
    model, shape = NETS["minmax"]
    x = inputs(shape, 20)
    pairs = certificates.lipschitz_constants(model, x).pairs
    with torch.no_grad():
        logits = model(x)
        out = GloRo(model, hf.L2(0.2)).eval()(x)
    for z, level in zip(logits.double(), out[:, -1], strict=True):
        j = int(z.argmax())
        plain = max(float(z[i] + 0.2 * pairs[j, i]) for i in range(4) if i != j)
        assert float(level) == pytest.approx(plain, abs=1e-4)
        assert float(level) >= plain - 1e-6  # rounding is on the safe side
    assert torch.allclose(bottom(logits.double(), pairs, 0.2)[:, 0], out[:, -1].double(), atol=1e-4)
    assert torch.equal(bottom(logits, pairs.float(), 0.0)[:, 0], logits.topk(2).values[:, 1])


def test_in_training_mode_the_estimate_converges_to_the_bound_and_has_gradients():
    torch.manual_seed(0)
    model = GloRo(nn.Sequential(nn.Linear(6, 8), MinMax(), nn.Linear(8, 4)), hf.L2(0.2))
    x = inputs((6,), 20)
    trained = model(x)
    trained[:, -1].sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in (model.model[0].weight, model.model[2].weight))
    with torch.no_grad():
        assert torch.allclose(trained, model.eval()(x), atol=1e-3)


def test_certified_inputs_with_different_classes_are_far_apart():
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(2, 16), MinMax(), nn.Linear(16, 3)).eval()
    x = torch.rand(3000, 2)
    with torch.no_grad():
        base[2].bias -= base(x).mean(0)
        eps = 0.02
        label = GloRo(base, hf.L2(eps)).eval()(x).argmax(1)
    kept = label < 3
    assert len(label[kept].unique()) > 1
    apart = torch.cdist(x[kept], x[kept])
    assert float(apart[label[kept][:, None] != label[kept]].min()) > 2 * eps


def test_batches_of_none_and_one():
    model = GloRo(NETS["minmax"][0], hf.L2(0.1)).eval()
    with torch.no_grad():
        assert model(torch.rand(0, 6)).shape == (0, 5)
        assert model(torch.rand(1, 6)).shape == (1, 5)


def test_other_threats_are_refused():
    with pytest.raises(InputError, match="l2"):
        GloRo(nn.Linear(2, 2), hf.Linf(0.1))
    with pytest.raises(InputError, match="steps"):
        GloRo(nn.Linear(2, 2), hf.L2(0.1), steps=0)


@pytest.mark.parametrize("method", ["gloro", "lipschitz"])
def test_the_radius_comes_without_a_search(method):
    model, shape = minmax_cnn((1, 8, 8), 4, layers=((4, 3, 1, 1),), hidden=(8,)).eval(), (1, 8, 8)
    x = inputs(shape, 12)
    y = predictions(model, x)
    y[0] = (y[0] + 1) % 4
    found = hf.radius(model, x, y, "l2", method, chunk=5)
    wanted = hf.certify(model, x, y, hf.L2(0.1), method).radius
    assert found[0] == 0
    assert torch.equal(found[1:], wanted[1:])
    assert bool((hf.radius(model, x, y, "l2", method, eps_max=1e-3) <= 1e-3).all())
    with pytest.raises(UnsupportedError, match="l2"):
        hf.radius(model, x, y, "linf", method)


def test_the_front_door_runs_the_model_once(monkeypatch):
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(64, 4)).eval(), inputs((1, 8, 8), 20)
    y, calls = predictions(model, x), []
    hf.certify(model, x, y, hf.L2(0.1), "gloro")
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, v: calls.append(1) or forward(layer, v))
    hf.certify(model, x, y, hf.L2(0.1), "gloro", chunk=10)
    assert len(calls) == 2  # one for each chunk


@pytest.mark.parametrize("threat", [hf.L2(2e-10, low=-1.0), hf.Linf(2e-10, low=-1.0)], ids=str)
@pytest.mark.parametrize("entry", [m for m in hf.methods("certify") if not m.smoothed], ids=lambda m: m.name)
def test_no_certificate_overlooks_that_softplus_falls_at_its_threshold(entry, threat):
    """At 20 torch's softplus is 20 + 2e-9, just above it x itself: in float64 that is enough to change the class."""
    if threat.name not in entry.threats:
        pytest.skip("another threat")
    model = nn.Sequential(nn.Linear(1, 1), nn.Softplus(), nn.Linear(1, 2)).double().eval()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), ([[1]], [20], [[1], [0]], [0, 20 + 5e-10]), strict=True):
            parameter.copy_(torch.tensor(value, dtype=torch.float64))
    x, y = torch.zeros(1, 1, dtype=torch.float64), torch.tensor([0])
    assert model(x).argmax(1) == 0
    assert model(x + 1e-10).argmax(1) == 1
    try:
        assert not hf.certify(model, x, y, threat, entry.name).certified
    except UnsupportedError:  # no rule for softplus, or none for this kind of model: refusing is right
        assert entry.name not in ("ibp", "gloro", "lipschitz", "bcp", "auto")
    assert hf.certify(model, x + 1.0, y, threat, "ibp").certified  # far from the fall


def test_weights_need_not_be_contiguous():
    model = nn.Sequential(nn.Linear(4, 4), MinMax(), nn.Linear(4, 3)).eval()
    x, y, threat = inputs((4,)), torch.zeros(30, dtype=torch.int64), hf.L2(0.1)
    margin = hf.certify(model, x, y, threat, "gloro").margin
    strided = nn.Sequential(nn.Linear(4, 4), MinMax(), nn.Linear(4, 3)).eval()
    strided.load_state_dict(model.state_dict())
    strided[0].weight.data = model[0].weight.data.T.contiguous().T
    assert not strided[0].weight.is_contiguous()
    torch.testing.assert_close(hf.certify(strided, x, y, threat, "gloro").margin, margin)
