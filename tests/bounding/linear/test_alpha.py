import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import alpha
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.alpha import Ascent
from holdfast.bounding.linear.coefficients import Coefficients
from holdfast.errors import InputError, UnsupportedError

QUICK = Ascent(iterations=5)


def steep(width, classes):
    """Two hidden layers with weights so large that CROWN leaves margins open."""
    model = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes))
    with torch.no_grad():
        for layer in (model[0], model[2], model[4]):
            layer.weight.mul_(1.7)
    return model.eval()


@pytest.mark.parametrize("ascent", [QUICK, Ascent(iterations=4, joint=True)], ids=["fixed", "joint"])
def test_sound_at_ten_thousand_points_and_never_looser_than_crown(net, ascent):
    model, shape = net
    x = torch.rand(1, *shape)
    threat = hf.Linf(0.1)
    crown = hf.bounds(model, x, threat, "crown")
    ours = hf.bounds(model, x, threat, "alpha-crown", ascent=ascent)
    assert bool((ours.lower >= crown.lower - 1e-5).all())
    assert bool((ours.upper <= crown.upper + 1e-5).all())
    lower, upper = threat.box(x)
    outputs = model(lower + (upper - lower) * torch.rand(10_000, *shape))
    assert bool((outputs >= ours.lower).all())
    assert bool((outputs <= ours.upper).all())


def test_slopes_are_worth_optimising():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 3)).eval()
    x = torch.rand(8, 6)
    widths = {}
    for name, method, options in [
        ("crown", "crown", {}),
        ("few", "alpha-crown", {"ascent": Ascent(iterations=2)}),
        ("many", "alpha-crown", {"ascent": Ascent(iterations=30)}),
        ("joint", "alpha-crown", {"ascent": Ascent(iterations=30, joint=True)}),
    ]:
        b = hf.bounds(model, x, hf.Linf(0.2), method, **options)
        widths[name] = (b.upper - b.lower).mean().item()
    assert widths["joint"] < widths["many"] < widths["few"] < widths["crown"]


def test_one_hidden_layer_against_a_search_over_all_slopes():
    """With one neuron and one output the best slope is found on a grid."""
    model = nn.Sequential(nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 2)).eval()
    model[0].weight.data, model[0].bias.data = torch.tensor([[1.0, -2.0]]), torch.tensor([0.3])
    model[2].weight.data, model[2].bias.data = torch.tensor([[1.5], [-0.5]]), torch.zeros(2)
    x, y = torch.tensor([[0.5, 0.4]]), torch.tensor([0])
    r = linear.relaxation(
        trace(model, x), region(hf.Linf(0.3), x, sound=False), slopes="adaptive", hidden=True, sound=False
    )
    node = next(iter(r.lines))
    grid = [
        linear.concretise(r, linear.margin_planes(r, y, {node: torch.full((1, 2, 1), s)}))[0, 1].item()
        for s in torch.linspace(0, 1, 101).tolist()
    ]
    found = alpha.margin_bounds(r.graph, r.region, y, Ascent(iterations=50), sound=False)[0, 1].item()
    assert abs(found - max(grid)) < 1e-4


def test_stable_neurons_keep_their_exact_line_whatever_the_ascent_found():
    """Neurons x + 1, x - 2 and x - 0.5 around x = 0.5: always on, always off, and either. Slope 0.5 is for the last."""
    model = nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    model[0].weight.data, model[0].bias.data = torch.ones(3, 1), torch.tensor([1.0, -2.0, -0.5])
    x = torch.tensor([[0.5]])
    r = linear.relaxation(
        trace(model, x), region(hf.Linf(0.25), x, sound=False), slopes="adaptive", hidden=True, sound=False
    )
    (node,) = r.lines
    rows = Coefficients(torch.ones(1, 2, 3))
    slopes = {node: torch.full((1, 2, 3), 0.5)}
    assert alpha._chosen(r, node, rows, slopes, node).tolist() == [[[1.0, 0.0, 0.5]] * 2]


def test_a_hidden_row_that_is_behind_has_a_gradient_and_the_value_of_the_maximum():
    known, new = torch.tensor([1.0, -2.0, 0.1]), torch.tensor([0.5, 3.0, 0.1], requires_grad=True)
    larger = linear.straight_maximum(known, new)
    assert larger.tolist() == torch.maximum(known, new).tolist()
    larger.backward(torch.tensor([2.0, 3.0, 5.0]))
    assert new.grad.tolist() == [2.0, 3.0, 5.0]


def test_certified_training_keeps_the_gradient_of_the_maximum():
    """Without rows of an ascent a bound that is behind an interval's has no part in the loss, and no gradient."""
    torch.manual_seed(0)
    model = steep(12, 3)
    x, y = torch.rand(2, 6), torch.tensor([0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "straight_maximum", None)
        r = linear.relaxation(
            trace(model, x), region(hf.Linf(0.1), x, sound=False), slopes="adaptive", hidden=True, sound=False
        )
        assert linear.margin_bounds(r, y).requires_grad


def test_joint_ascent_gains_by_the_gradients_of_rows_that_are_behind(monkeypatch):
    torch.manual_seed(2)
    model = steep(24, 3)
    x = torch.rand(8, 6)
    y = model(x).argmax(1)
    graph, box = trace(model, x), region(hf.Linf(0.25), x, sound=False)

    def total(ascent):
        return alpha.margin_bounds(graph, box, y, ascent, sound=False).sum().item()

    crown, last, joint = (total(ascent) for ascent in (Ascent(0), Ascent(20), Ascent(20, joint=True)))
    monkeypatch.setattr(linear, "straight_maximum", torch.maximum)
    assert joint > total(Ascent(20, joint=True)) > last > crown


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Tanh])
@pytest.mark.parametrize("joint", [False, True])
def test_slopes_of_sigmoid_and_tanh_are_optimised_and_sound(activation, joint):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), activation(), nn.Flatten(), nn.Linear(75, 20), activation())
    model = model.append(nn.Linear(20, 3)).eval()
    with torch.no_grad():
        for layer in (model[0], model[3], model[5]):
            layer.weight.mul_(5.0)
    x, threat = torch.rand(2, 1, 5, 5), hf.Linf(0.15)
    crown = hf.bounds(model, x, threat, "crown")
    ours = hf.bounds(model, x, threat, "alpha-crown", ascent=Ascent(15, joint=joint))
    assert bool((ours.lower >= crown.lower - 1e-4).all())
    assert (ours.upper - ours.lower).mean() < 0.98 * (crown.upper - crown.lower).mean()
    lower, upper = threat.box(x)
    for seed in range(5):
        noise = torch.rand(2000, 2, 1, 5, 5, generator=torch.Generator().manual_seed(seed))
        noise = noise.round() if seed % 2 else noise
        outputs = model((lower + (upper - lower) * noise).flatten(0, 1)).view(2000, 2, 3)
        assert bool((outputs >= ours.lower).all())
        assert bool((outputs <= ours.upper).all())


def test_the_certificate_climbs_for_a_margin_that_is_asked_for():
    torch.manual_seed(0)
    model = steep(30, 3)
    x = torch.rand(60, 6)
    y, threat = model(x).argmax(1), hf.Linf(0.04)
    crown, quick, full = (
        hf.certify(model, x, y, threat, method, **options)
        for method, options in (("crown", {}), ("alpha-crown", {}), ("alpha-crown", {"verdict": False}))
    )
    proved = crown.certified
    assert int(proved.sum()) > 5
    assert torch.allclose(quick.margin[proved], crown.margin[proved])
    assert bool((full.margin[proved] > crown.margin[proved]).any())
    assert bool((full.margin >= quick.margin - 1e-4).all())


def test_selecting_inputs_gives_their_own_bounds():
    model, shape = tiny_nets()["residual"]
    x = torch.rand(6, *shape)
    y = model(x).argmax(1)
    graph = trace(model, x)
    some = torch.tensor([1, 4])
    whole = linear.relaxation(graph, region(hf.L2(0.2), x, sound=True), slopes="adaptive", hidden=True, sound=True)
    part = linear.relaxation(graph, region(hf.L2(0.2), x[some], sound=True), slopes="adaptive", hidden=True, sound=True)
    ours = linear.margin_bounds(alpha.select(whole, some), y[some])
    assert torch.allclose(ours, linear.margin_bounds(part, y[some]), atol=1e-5)


def test_the_certificate_keeps_what_crown_proves_and_proves_more():
    torch.manual_seed(0)
    model = steep(40, 3)
    x = torch.rand(200, 6)
    y = model(x).argmax(1)
    threat = hf.Linf(0.08)
    crown, ours, joint = (
        hf.certify(model, x, y, threat, method, **options)
        for method, options in [
            ("crown", {}),
            ("alpha-crown", {}),
            ("alpha-crown", {"ascent": Ascent(iterations=10, joint=True)}),
        ]
    )
    assert bool((ours.margin >= crown.margin - 1e-5).all())
    assert bool((joint.margin >= crown.margin - 1e-5).all())
    assert int(ours.certified.sum()) > int(crown.certified.sum())
    assert not bool((ours.certified & hf.attack(model, x, y, threat).success).any())


def test_only_classes_that_are_not_ruled_out_are_optimised():
    """Each input has another number of open classes; the open ones end where they would with all rows."""
    torch.manual_seed(1)
    model = steep(20, 6)
    x, ascent = torch.rand(12, 6), Ascent(iterations=6, hope=torch.inf)
    y, threat = model(x).argmax(1), hf.Linf(0.1)
    r = linear.relaxation(trace(model, x), region(threat, x, sound=False), slopes="adaptive", hidden=True, sound=False)
    crown = linear.margin_bounds(r, y)
    every = alpha.optimise(r, linear.margin_rows(r, y), ascent)
    open_ = (crown <= 0).scatter(1, y[:, None], False)
    assert len(set(open_.sum(1).tolist())) > 2
    best = torch.where(open_, every, crown).scatter(1, y[:, None], torch.inf).amin(1)
    ours = hf.certify(model, x, y, threat, "alpha-crown", ascent=ascent, sound=False).margin
    assert torch.allclose(ours, best, atol=1e-4)


def test_auto_is_as_good_as_its_best_step_and_stops_where_it_must():
    model, shape = tiny_nets()["residual"]
    x = torch.rand(40, *shape)
    y = model(x).argmax(1)
    for threat in (hf.Linf(0.02), hf.L2(0.1), hf.Sparse(1), hf.Patch(1, 1)):
        auto = hf.certify(model, x, y, threat, "auto")
        best = hf.certify(model, x, y, threat, "alpha-crown")
        assert torch.equal(auto.certified, best.certified | hf.certify(model, x, y, threat, "ibp").certified)
        assert [bool(name) for name in auto.by] == auto.certified.tolist()
    smooth = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 2)).eval()
    x = torch.rand(5, 4)
    y = smooth(x).argmax(1)
    assert set(hf.certify(smooth, x, y, hf.Linf(0.001), "auto").by) <= {"ibp", ""}
    with pytest.raises(UnsupportedError, match="softplus"):
        hf.certify(smooth, x, y, hf.Linf(0.001), "crown")


@pytest.mark.parametrize("bad", [{"iterations": -1}, {"learning_rate": 0.0}, {"decay": 1.5}, {"hope": -1.0}])
def test_an_ascent_with_settings_out_of_range_is_refused(bad):
    with pytest.raises(InputError, match=next(iter(bad))):
        Ascent(**bad)
