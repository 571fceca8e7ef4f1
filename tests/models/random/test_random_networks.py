"""Random networks: one draw for a batch or for each input, frozen draws, no noise, divergence, files, refusals."""

import math

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.core.chance import is_stochastic, mean_prediction
from holdfast.attacks.core.nature import nature_of
from holdfast.attacks.core.transfer import transfer_matrix
from holdfast.audits.plan import make_plan
from holdfast.models import RandomNetwork, adv_bnn, rse
from holdfast.models.random import GaussianLayer, NoisyInput, draws_noise, gaussian_divergence

SMALL = {"input_shape": (1, 6, 5), "classes": 3, "layers": ((4, 3, 1, 1), "max", (4, 3, 1, 1)), "hidden": (8,)}


def make(name, **options):
    return hf.make_model(name, of="cnn", seed=0, **{**SMALL, **options}).eval()


@pytest.fixture
def x():
    return torch.rand(7, 1, 6, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["adv-bnn", "rse"])
def test_a_frozen_draw_is_bit_equal_and_the_network_itself_is_not(name, x):
    model = make(name)
    one = model.sample(3)
    assert not any(isinstance(module, RandomNetwork) for module in one.modules())
    assert torch.equal(one(x), one(x))
    assert torch.allclose(one(x[:2]), one(x)[:2], atol=1e-6)
    assert torch.equal(model.sample(3)(x), one(x))
    assert not torch.allclose(model.sample(4)(x), one(x))
    assert not torch.allclose(model(x), model(x))
    assert is_stochastic(model, x)
    assert not is_stochastic(one, x)
    with torch.no_grad():  # the draw has weights of its own
        before = [p.clone() for p in model.parameters()]
        for p in one.parameters():
            p.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "options"), [("adv-bnn", {"posterior_std": 0.0}), ("rse", {"first": 0.0, "others": 0.0})]
)
def test_noise_of_scale_zero_is_the_plain_network(name, options, x):
    plain, model = hf.make_model("cnn", seed=0, **SMALL).eval(), make(name, **options)
    y = plain(x).argmax(1)
    assert torch.equal(model(x), plain(x))
    assert torch.equal(model.sample(0)(x), plain(x))
    assert not draws_noise(model)
    assert not is_stochastic(model, x)
    step = {"steps": 4, "seed": 0}
    same, other = (hf.attack(m, x, y, hf.Linf(0.2), "pgd", **step) for m in (plain, model))
    assert torch.allclose(same.x_adv, other.x_adv, atol=1e-6)
    assert torch.equal(same.success, other.success)
    eot = hf.attack(model, x, y, hf.Linf(0.2), "eot-pgd", samples=3, steps=4)
    assert torch.equal(eot.success, hf.attack(plain, x, y, hf.Linf(0.2), "eot-pgd", samples=3, steps=4).success)
    proofs = [hf.certify(m, x, y, hf.Linf(0.001), "ibp") for m in (plain, model)]
    assert torch.equal(proofs[0].certified, proofs[1].certified)
    assert bool(proofs[1].certified.any())


def test_weights_are_shared_by_a_batch_and_activations_are_not():
    x = torch.ones(5, 1, 6, 5)
    z = make("adv-bnn")(x)
    assert torch.allclose(z, z[:1].expand(5, -1), atol=1e-6)
    z = make("rse")(x)
    assert not torch.allclose(z[0], z[1])


def test_noise_has_the_scale_that_was_asked_for_and_stays_on_in_eval_mode():
    model = make("rse", first=0.3, others=0.05)
    assert [m.std for m in model.modules() if isinstance(m, NoisyInput)] == [0.3, 0.05]
    layer = NoisyInput(nn.Identity(), 0.3).eval()
    assert float(layer(torch.zeros(100_000)).std()) == pytest.approx(0.3, rel=0.02)
    gaussian = GaussianLayer(nn.Linear(300, 300), 0.1, 0.02).eval()
    drawn = gaussian.frozen(torch.Generator().manual_seed(0)).weight - gaussian.layer.weight
    assert float(drawn.detach().std()) == pytest.approx(0.02, rel=0.02)
    assert float((drawn / 0.02).detach().pow(4).mean()) == pytest.approx(3, rel=0.1)  # normal, not uniform
    with torch.no_grad():  # the same in a pass of the network itself, and in a frozen draw of the activations
        for p in gaussian.layer.parameters():
            p.zero_()
        moved = gaussian(torch.eye(300))
        fixed = layer.frozen(torch.Generator().manual_seed(0))(torch.zeros(1, 100_000))
    assert float(moved.std()) == pytest.approx(0.02 * 2**0.5, rel=0.02)  # a weight and a bias
    assert float(fixed.std()) == pytest.approx(0.3, rel=0.02)


@torch.no_grad()
def test_divergence_is_the_one_of_torch():
    layer = GaussianLayer(nn.Linear(4, 3), 0.2, 0.07)
    with torch.no_grad():
        for s in layer.log_std.values():
            s += torch.rand_like(s)
    expected = 0.0
    for name, s in layer.log_std.items():
        posterior = torch.distributions.Normal(getattr(layer.layer, name), s.exp())
        expected += float(torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 0.2)).sum())
    assert float(layer.divergence()) == pytest.approx(expected, rel=1e-5)
    model = nn.Sequential(layer, nn.ReLU(), GaussianLayer(nn.Linear(3, 2), 0.2))
    assert float(gaussian_divergence(model)) == pytest.approx(expected + float(model[2].divergence()), rel=1e-5)
    with torch.no_grad():
        for p in layer.layer.parameters():
            p.zero_()
        for s in layer.log_std.values():
            s.fill_(math.log(0.2))
    assert float(layer.divergence()) == pytest.approx(0, abs=1e-6)
    assert gaussian_divergence(nn.Linear(2, 2)) is None


def test_predictions_are_of_the_mean_softmax_and_leave_the_generator(x):
    model = make("adv-bnn", posterior_std=0.3)
    state = torch.get_rng_state()
    found = model.predict(x, draws=20, seed=5)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(found, mean_prediction(model, x, 20, 5).argmax(1))
    with pytest.raises(hf.InputError, match="at least one draw"):
        model.predict(x, draws=0)
    with pytest.raises(hf.InputError, match="input 2 holds NaN"):
        model.predict(x.clone().index_fill_(0, torch.tensor(2), torch.nan))
    with pytest.raises(hf.InputError, match="training mode"):
        model.train().predict(x)


def test_the_mean_is_of_probabilities_not_of_logits():
    shares = torch.tensor([[0.9, 0.1], [0.001, 0.999], [0.7, 0.3]])  # means 0.53 and 0.47

    class Scripted(NoisyInput):
        """Its draws are given."""

        def forward(self, x):
            self.number = (getattr(self, "number", -1) + 1) % 3
            return shares[self.number].log().expand(len(x), 2)

    scripted = RandomNetwork(Scripted(nn.Identity(), 1.0)).eval()
    assert scripted.predict(torch.rand(2, 3), draws=3).tolist() == [0, 0]
    assert int(shares.log().mean(0).argmax()) == 1


def test_spread_of_the_accuracy_shrinks_with_the_ensemble(x):
    model, x = make("adv-bnn", posterior_std=0.4), torch.rand(40, 1, 6, 5)

    def spread(draws):
        return torch.stack([(model.predict(x, draws=draws, seed=s) == 0).double().mean() for s in range(12)]).std()

    assert float(spread(40)) < float(spread(1))


@pytest.mark.parametrize("name", ["adv-bnn", "rse"])
def test_files_keep_the_network_and_its_draws(name, x, tmp_path):
    model = make(name)
    hf.save_model(model, tmp_path / "m.safetensors")
    loaded = hf.load_model(tmp_path / "m.safetensors")
    assert isinstance(loaded, RandomNetwork)
    assert torch.equal(loaded.sample(1)(x), model.sample(1)(x))


def test_modules_of_ones_own_are_wrapped_and_left_as_they_were(x):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv2d(1, 1, 3, padding=1)
            self.norm = nn.BatchNorm2d(1)
            self.top = nn.Linear(30, 2)

        def forward(self, x):
            return self.top(self.norm(self.inner(self.inner(x))).flatten(1))

    own = Twice().eval()
    assert isinstance(adv_bnn(own, random_norm=True).network.norm, GaussianLayer)
    changed = adv_bnn(own)
    assert isinstance(changed.network.inner, GaussianLayer)
    assert isinstance(changed.network.norm, nn.BatchNorm2d)
    assert type(own.inner) is nn.Conv2d
    noisy = rse(own)
    assert isinstance(noisy.network.inner, NoisyInput)
    assert type(noisy.network.top) is nn.Linear
    assert isinstance(rse(nn.Linear(3, 2)).network, NoisyInput)  # no convolution: dense layers
    assert changed.eval().sample(0)(x).shape == (7, 2)


def test_bad_input_is_refused(x):
    with pytest.raises(hf.InputError, match="no layer to make random"):
        adv_bnn(nn.ReLU())
    with pytest.raises(hf.InputError, match="random layers already"):
        rse(make("adv-bnn"))
    with pytest.raises(hf.InputError, match="is made of another one itself"):
        hf.make_model("adv-bnn", of="ensemble")
    with pytest.raises(hf.InputError, match="prior_std"):
        hf.make_model("adv-bnn", prior_std=0.0)
    with pytest.raises(hf.InputError, match="needs a random layer"):
        RandomNetwork(nn.Linear(2, 2))
    y = torch.zeros(7, dtype=torch.long)
    for name in ("adv-bnn", "rse"):
        model = make(name)
        for method in ("ibp", "auto", "smoothing"):
            threat = hf.L2(0.1) if method == "smoothing" else hf.Linf(0.01)
            with pytest.raises(hf.UnsupportedError, match=r"draws random numbers.*model\.sample"):
                hf.certify(model, x, y, threat, method)
        with pytest.raises(hf.UnsupportedError, match="draws random numbers"):
            hf.bounds(model, x, hf.Linf(0.01), "ibp")
        with pytest.raises(hf.InputError, match="draws random numbers"):
            hf.attack(model, x, y, hf.Linf(0.01), "pgd")
        one = model.sample(0)
        assert hf.certify(one, x, one(x).argmax(1), hf.Linf(1e-5), "ibp").certified.any()


def test_the_audit_plans_attacks_over_draws_and_no_proof(x):
    nature = nature_of(make("rse", first=0.05, others=0.0), x)
    assert nature.random
    steps = make_plan("quick", nature=nature).steps
    assert all(step.stage == "attack" for step in steps)
    assert {step.method for step in steps} >= {"eot-fgsm", "eot-pgd"}
    with pytest.raises(hf.UnsupportedError, match=r"model\.sample\(\)"):
        make_plan("quick", nature=nature, certify="ibp")


@pytest.mark.parametrize("wrap", [adv_bnn, rse])
def test_a_model_that_takes_the_weights_of_its_layers_gets_told(wrap):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.top = nn.Linear(30, 2)

        def forward(self, x):
            return nn.functional.linear(x.flatten(1), self.top.weight)

    changed = wrap(Reader()).eval()
    with pytest.raises(AttributeError, match="reads 'weight' of a layer that is now inside"):
        changed(torch.rand(2, 1, 6, 5))
    with pytest.raises(AttributeError, match="has no attribute 'height'"):
        _ = changed.network.top.height
    assert not hasattr(changed.network.top, "weight")


def test_random_networks_have_no_nearest_point_and_no_row_in_a_transfer_matrix(x):
    model = make("rse")
    y = model.predict(x)
    with pytest.raises(hf.InputError, match=r"draws random numbers.*no nearest point"):
        hf.nearest(model, x, y, "linf")
    one = model.sample(0)
    with pytest.raises(hf.InputError, match=r"model 1 draws random numbers.*model\.sample"):
        transfer_matrix([one, model], x, y, hf.Linf(0.1))
    assert transfer_matrix([one, one], x, y, hf.Linf(0.1)).shape == (2, 2)
