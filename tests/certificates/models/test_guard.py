"""Guarded models: they answer what is proved and nothing else, in eval mode, for any batch."""

import pytest
import torch
from nets import tiny_nets
from torch import nn

import holdfast as hf
from holdfast.certificates import centroid as _centroid  # noqa: F401  (registers the certificate)
from holdfast.certificates.models.guard import Guard, GuardResult, guard
from holdfast.errors import InputError, UnsupportedError
from holdfast.models.zoo.centroid import Centroid, CentroidNet, with_rejection


def linear():
    model = nn.Linear(2, 2).eval()
    model.weight.data, model.bias.data = torch.eye(2), torch.zeros(2)
    return model


def test_a_linear_model_answers_exactly_where_it_should():
    x = torch.tensor([[0.9, 0.1], [0.5, 0.45], [0.5, 0.5], [0.1, 0.6]])
    found = guard(linear(), hf.Linf(0.1))(x)
    assert isinstance(found, GuardResult)
    assert found.prediction.tolist() == [0, -1, -1, 1]
    assert found.prediction.dtype == torch.int64
    assert found.certified.tolist() == [True, False, False, True]
    assert found.radius.tolist() == pytest.approx([0.1, 0, 0, 0.1])  # this method has no radius: the budget


def test_a_method_with_a_radius_gives_it():
    x = torch.tensor([[0.9, 0.1], [0.5, 0.45], [0.1, 0.6]])
    found = guard(linear(), hf.L2(0.1), "gloro")(x)
    assert found.prediction.tolist() == [0, -1, 1]
    assert found.radius.tolist() == pytest.approx([0.8 / 2**0.5, 0, 0.5 / 2**0.5], rel=1e-4)
    assert bool((found.radius[found.certified] >= 0.1).all())


@pytest.mark.parametrize("method", ["auto", "ibp", "crown"])
def test_it_says_what_certify_proves(method):
    model, shape = tiny_nets()["mlp"]
    x, threat = torch.rand(30, *shape), hf.Linf(0.03)
    label = model(x).argmax(1)
    found = guard(model, threat, method, chunk=7)(x)
    proved = hf.certify(model, x, label, threat, method).certified
    assert torch.equal(found.certified, proved)
    assert torch.equal(found.prediction, torch.where(proved, label, -1))
    assert torch.equal(found.prediction >= 0, found.certified)
    assert torch.equal(found.radius > 0, found.certified)
    assert 0 < int(proved.sum()) < 30


@pytest.mark.parametrize("count", [0, 1, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_batch_size(count, dtype):
    model = linear().to(dtype)
    for threat, method in ((hf.Linf(0.01), "auto"), (hf.L2(0.01), "lipschitz")):
        found = guard(model, threat, method)(torch.rand(count, 2, dtype=dtype))
        assert found.prediction.shape == found.certified.shape == found.radius.shape == (count,)
        assert found.prediction.dtype == torch.int64
        assert found.certified.dtype == torch.bool
        assert found.radius.dtype == dtype


def test_no_attack_changes_an_answer():
    model, shape = tiny_nets()["mlp"]
    x, threat = torch.rand(40, *shape), hf.Linf(0.02)
    found = guard(model, threat)(x)
    answered = found.certified
    assert bool(answered.any())
    result = hf.attack(model, x[answered], found.prediction[answered], threat, "apgd-ce", steps=15)
    assert not bool(result.success.any())


@pytest.mark.parametrize("eta", [None, 0.1])
def test_a_centroid_network_abstains_by_itself_and_where_nothing_is_proved(eta):
    torch.manual_seed(0)
    model = CentroidNet(nn.Linear(4, 6), Centroid(3, 6)).eval()
    nn.init.normal_(model.head.weight, std=0.5)
    model = with_rejection(model, eta)
    x = torch.rand(200, 4)
    label = model(x).argmax(1)
    found = guard(model, hf.L2(0.01))(x)
    assert found.prediction.max() < 3
    assert bool((found.prediction[found.certified] == label[found.certified]).all())
    assert bool(found.certified.any())
    rejected = label == 3
    assert bool(rejected.any()) == (eta is not None)
    assert bool((found.prediction[rejected] == -1).all())
    assert not bool(found.radius[rejected].any())
    # Sure rejections are no answers, and some answers are not proved.
    assert bool((~found.certified & ~rejected).any())
    loose = guard(model, hf.L2(0.01), "centroid", may_reject=True)(x)
    assert bool((loose.certified | ~found.certified).all())
    assert bool((loose.radius >= found.radius).all())


def test_answers_are_apart():
    """Between two different answers lies at least the budget, whatever the inputs."""
    torch.manual_seed(0)
    model = CentroidNet(nn.Identity(), Centroid(3, 2), eta=0.05).eval()
    x = torch.rand(600, 2)
    found = guard(model, hf.L2(0.05))(x)
    points, label = x[found.certified], found.prediction[found.certified]
    assert len(label.unique()) > 1
    assert float(torch.cdist(points, points)[label[:, None] != label].min()) > 0.05


@pytest.mark.parametrize(("method", "passes"), [("gloro", 1), ("lipschitz", 1), ("bcp", None)])
def test_a_certificate_by_the_logits_costs_one_pass(method, passes, monkeypatch):
    model, x, threat = linear(), torch.rand(20, 2), hf.L2(0.05)
    guarded = guard(model, threat, method, chunk=64)
    first = guarded(x)  # the constants of the network are computed once
    seen, forward = [], nn.Linear.forward
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda layer, v: seen.append(v.shape[0]) or forward(layer, v))
        found = guarded(x)
    assert passes is None or seen == [20] * passes
    for result in (first, found, guard(model, threat, method, chunk=7)(x)):
        proved = hf.certify(model, x, model(x).argmax(1), threat, method)
        assert torch.equal(result.certified, proved.certified)
        assert torch.equal(result.prediction, torch.where(proved.certified, model(x).argmax(1), -1))
    assert 0 < int(found.certified.sum()) < 20


def test_models_in_training_mode_are_refused():
    model = linear()
    guarded = guard(model, hf.Linf(0.1))
    assert not guarded.training
    guarded.train()
    with pytest.raises(InputError, match="training mode"):
        guarded(torch.rand(2, 2))
    with pytest.raises(InputError, match="training mode"):
        guarded(torch.rand(0, 2))
    assert guarded.eval()(torch.rand(2, 2)).prediction.shape == (2,)
    with pytest.raises(InputError, match="training mode"):
        guard(model.train(), hf.Linf(0.1))


def test_it_is_a_module_without_gradients():
    guarded = guard(linear(), hf.Linf(0.1))
    assert isinstance(guarded, Guard)
    assert set(guarded.state_dict()) == {"model.weight", "model.bias"}
    assert "linf:0.1" in repr(guarded)
    x = torch.rand(3, 2, requires_grad=True)
    assert not guarded(x).radius.requires_grad
    with torch.no_grad():
        assert guarded(x).prediction.shape == (3,)
    assert torch.is_grad_enabled()
    assert guarded.to(torch.float64)(torch.rand(3, 2, dtype=torch.float64)).radius.dtype == torch.float64


def test_bad_arguments_are_refused_at_once():
    with pytest.raises(UnsupportedError, match="does not handle the threat"):
        guard(linear(), hf.Linf(0.1), "gloro")
    with pytest.raises(InputError, match="has no option 'taut'"):
        guard(linear(), hf.Linf(0.1), taut=True)
    with pytest.raises(InputError, match="unknown certify method 'nothing'"):
        guard(linear(), hf.Linf(0.1), "nothing")
    with pytest.raises(InputError, match=r"'chunk'.*expected an integer >= 1, got 0"):
        guard(linear(), hf.Linf(0.1), chunk=0)
    with pytest.raises(InputError, match="one output"):
        guard(nn.Linear(2, 1).eval(), hf.L2(0.1), "gloro")(torch.rand(2, 2))
    with pytest.raises(InputError, match="threat must be one of"):
        guard(linear(), 0.1)
    with pytest.raises(InputError, match="outside the valid range"):
        guard(linear(), hf.Linf(0.1))(torch.full((2, 2), 3.0))
    with pytest.raises(InputError, match="failed on a batch"):
        guard(linear(), hf.Linf(0.1))(torch.rand(2, 3))


def test_a_smoothed_classifier_is_guarded_and_a_plain_model_not_by_its_certificate():
    with pytest.raises(UnsupportedError, match=r"hf.guard\(hf.Smoothed"):
        guard(linear(), hf.L2(0.1), "smoothing", sigma=0.5)
    answers = guard(hf.Smoothed(linear(), 0.1, n=100).eval(), hf.L2(0.05), "smoothing", n=2000)(
        torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    )
    assert answers.prediction.tolist() == [0, -1]
    assert float(answers.radius[0]) > 0.05
