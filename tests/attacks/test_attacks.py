"""The contract of every attack, over the whole registry."""

import sys

import pytest
import torch
from nets import QUICK_ATTACKS, tiny_nets
from torch import Tensor, nn

import holdfast as hf
from holdfast.attacks.core.nearest import nearest_options
from holdfast.errors import HoldfastError, InputError

pytestmark = pytest.mark.usefixtures("short_autoattack")

THREATS = {
    "linf": hf.Linf(0.08),
    "l2": hf.L2(0.3),
    "l1": hf.L1(0.8),
    "box": hf.Box(torch.tensor(0.08).expand(2, 7, 5)),
    "patch": hf.Patch(3, 3),
    "sparse": hf.Sparse(4),
}
ZERO = {"linf": hf.Linf(0.0), "l2": hf.L2(0.0), "l1": hf.L1(0.0), "box": hf.Box(torch.zeros(2, 7, 5))}
ENTRIES = {m.name: m for m in hf.methods("attack")}
# What the cascade does with pixels is to call the attacks for them, which have tests of their own, at full length.
PAIRS = [(m, t) for m, e in ENTRIES.items() for t in e.threats if m != "cascade" or t not in ("patch", "sparse")]
BALLS = [(m, t) for m, t in PAIRS if t in ZERO]
FIRST = [(m, e.threats[0]) for m, e in ENTRIES.items()]
WITHOUT_GRADIENTS = {m for m, e in ENTRIES.items() if e.gradients == "none"}


SHARED = {"fab", "deepfool"}
"""These take several gradients from one pass, and count a query for each."""


def run(name, model, x, y, threat, **options):
    return hf.attack(model, x, y, threat, name, **QUICK_ATTACKS.get(name, {}), **options)


def task(batch=12, dtype=torch.float32):
    """A small network whose classes are all within reach of some inputs."""
    model, shape = tiny_nets()["cnn"]
    model = model.to(dtype)
    x = torch.rand(batch, *shape, dtype=dtype, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model[-1].bias -= model(x).mean(0)
        return model, x, model(x).argmax(1)


class Head(nn.Module):
    """A linear layer on flat inputs, between two functions that a test chooses."""

    def __init__(self, size, classes, before=lambda x: x, after=lambda z: z):
        super().__init__()
        self.linear, self.before, self.after = nn.Linear(size, classes), before, after

    def forward(self, x):
        return self.after(self.linear(self.before(x.flatten(1))))


def images(classes=3, dtype=torch.float32, **functions):
    """A linear model of small images that it classifies right."""
    torch.manual_seed(2)
    model = Head(16, classes, **functions).to(dtype).eval()
    x = torch.rand(6, 1, 4, 4, dtype=dtype)
    return model, x, model(x).argmax(1).detach()


@pytest.mark.parametrize(("name", "threat"), PAIRS)
def test_results_are_what_they_claim(name, threat):
    model, x, y = task()
    y[0] = (y[0] + 1) % 5  # one input that is wrong to begin with
    result = run(name, model, x, y, THREATS[threat])
    assert torch.equal(model(result.x_adv).argmax(1) != y, result.success)
    assert bool(THREATS[threat].contains(result.x_adv, x).all())
    assert result.by[0] == "clean"
    assert torch.equal(result.x_adv[0], x[0])
    assert result.success.shape == result.gradients.shape == result.queries.shape == (12,)
    assert [bool(by) for by in result.by] == result.success.tolist()
    assert set(result.by[1:]) <= {name, ""} or name in ("autoattack", "cascade")
    assert int(result.gradients[0]) == 0
    assert bool((result.queries >= result.gradients).all())
    assert bool((result.queries[1:] > 1).all())
    assert bool((result.gradients[1:] == 0).all() if name in WITHOUT_GRADIENTS else (result.gradients[1:] > 0).all())
    assert bool((result.queries <= 500).all()), "the short options allow no more"


@pytest.mark.parametrize(("name", "threat"), [pair for pair in PAIRS if pair[0] != "cascade"])
def test_every_forward_pass_is_counted(name, threat):
    """Alone in its batch, an input is never carried along: the model sees it as often as `queries` says."""
    model, x, y = task()
    seen = []
    model.register_forward_pre_hook(lambda module, arguments: seen.append(len(arguments[0])))
    for i in (1, 2):
        seen.clear()
        result = run(name, model, x[i : i + 1], y[i : i + 1], THREATS[threat], index=torch.tensor([i]))
        # At the door two passes look for chance, at the end one more confirms an example.
        checks = 2 + int(result.success) + 2 * (name == "autoattack")
        if name in SHARED:
            assert checks < sum(seen) <= checks + int(result.queries)
        else:
            assert sum(seen) == checks + int(result.queries)


@pytest.mark.parametrize(("name", "threat"), PAIRS)
def test_the_answer_depends_on_the_seed_and_not_on_the_batch(name, threat):
    model, x, y = task(batch=20, dtype=torch.float64)
    box = THREATS[threat]
    # What learns from its inputs learns from the same ones, whichever of them are attacked.
    learns = {"data": x} if "data" in ENTRIES[name].options else {}
    whole = run(name, model, x, y, box, seed=3)
    order = torch.randperm(len(x))
    others = [(torch.arange(20), run(name, model, x, y, box, seed=3, chunk=7))]
    for rows in (order, torch.tensor([0]), torch.tensor([7])):
        others.append((rows, run(name, model, x[rows], y[rows], box, seed=3, index=rows, **learns)))
    for rows, other in others:
        assert torch.equal(whole.success[rows], other.success)
        assert torch.allclose(whole.x_adv[rows], other.x_adv, atol=1e-9)
        assert torch.equal(whole.gradients[rows], other.gradients)
        assert torch.equal(whole.queries[rows], other.queries)
        assert [whole.by[i] for i in rows.tolist()] == list(other.by)


@pytest.mark.parametrize(("name", "threat"), FIRST)
def test_the_model_is_left_as_it_came(name, threat):
    model, x, y = task()
    model[0].weight.requires_grad_(False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    wanted = [p.requires_grad for p in model.parameters()]
    copy, state = x.clone(), torch.random.get_rng_state()
    run(name, model, x, y, THREATS[threat])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not model.training
    assert torch.equal(x, copy)
    assert x.grad is None
    assert not x.requires_grad


@pytest.mark.parametrize(("name", "threat"), BALLS)
def test_zero_budget_breaks_exactly_what_is_wrong(name, threat):
    model, x, y = task()
    y[3] = (y[3] + 1) % 5
    result = run(name, model, x, y, ZERO[threat])
    assert result.success.nonzero()[:, 0].tolist() == [3]
    assert torch.equal(result.x_adv, x)


@pytest.mark.parametrize(("name", "threat"), FIRST)
def test_a_huge_budget_breaks_what_one_step_breaks(name, threat):
    """Two opposite classes, all pixels free, few changes needed: even short runs must find the way."""
    model, x, _ = images(2)
    with torch.no_grad():
        model.linear.weight[0] = torch.linspace(1, 2, 16)
        model.linear.weight[1] = -model.linear.weight[0]
        model.linear.bias.zero_()
        model.linear.bias[0] = -2 * float(model.linear.weight[0].sum()) * 0.45
    huge = {"linf": hf.Linf(1.0), "l2": hf.L2(4.0), "patch": hf.Patch(4, 4), "sparse": hf.Sparse(16)}[threat]
    options = QUICK_ATTACKS.get(name, {}) | {"spsa": {"step_size": 0.3}, "hopskipjump": {"starts": 50}}.get(name, {})
    assert bool(hf.attack(model, x, model(x).argmax(1), huge, name, **options).success.all())


@pytest.mark.parametrize("classes", [2, 3, 5, 10, 100])
@pytest.mark.parametrize(("name", "threat"), FIRST)
def test_any_number_of_classes_and_double_precision(name, threat, classes):
    model, x, y = images(classes, torch.float64)
    result = run(name, model, x, y, THREATS[threat])
    assert result.x_adv.dtype == torch.float64
    assert torch.equal(model(result.x_adv).argmax(1) != y, result.success)


@pytest.mark.parametrize(("name", "threat"), [(m, t) for m, t in PAIRS if t in ("linf", "l2", "l1")])
def test_flat_inputs(name, threat):
    model = nn.Linear(7, 3).eval()
    x = torch.rand(6, 7)
    y = model(x).argmax(1).detach()
    result = run(name, model, x, y, THREATS[threat])
    assert torch.equal(model(result.x_adv).argmax(1) != y, result.success)


@pytest.mark.parametrize(("name", "threat"), FIRST)
def test_a_model_that_returns_nan_is_refused(name, threat):
    model, x, y = images(after=lambda z: z * torch.nan)
    with pytest.raises(InputError, match="NaN"):
        run(name, model, x, y, THREATS[threat])


@pytest.mark.parametrize(("name", "threat"), FIRST)
def test_nan_away_from_the_input_neither_hangs_nor_leaves_the_set(name, threat):
    def before(x):
        return torch.where(((x - 0.5).abs().amax(1) > 0.02)[:, None], torch.nan, x)

    model, _, _ = images(before=before)
    x = torch.full((6, 1, 4, 4), 0.5)
    y = model(x).argmax(1)
    try:
        result = run(name, model, x, y, THREATS[threat])
    except HoldfastError:  # to refuse is right as well
        return
    assert bool(torch.isfinite(result.x_adv).all())
    assert bool(THREATS[threat].contains(result.x_adv, x).all())


@pytest.mark.parametrize(("name", "threat"), FIRST)
def test_labels_out_of_range_are_refused(name, threat):
    model, x, y = images()
    for label in (-1, 3):
        y[2] = label
        with pytest.raises(InputError, match="input 2"):
            run(name, model, x, y, THREATS[threat])


@pytest.mark.parametrize("name", [m for m, e in ENTRIES.items() if "targets" in e.options])
def test_no_target_at_all_is_refused_and_more_than_there_are_is_all(name):
    model, x, y = images()
    with pytest.raises(InputError, match="targets"):
        hf.attack(model, x, y, hf.Linf(0.1), name, **QUICK_ATTACKS[name] | {"targets": 0})
    few, many = (hf.attack(model, x, y, hf.Linf(0.1), name, **QUICK_ATTACKS[name] | {"targets": t}) for t in (2, 50))
    assert torch.equal(few.x_adv, many.x_adv)


@pytest.mark.parametrize("cut", ["integers", "detached"])
@pytest.mark.parametrize(("name", "threat"), FIRST)
def test_a_model_without_gradients(name, threat, cut):
    functions = {"before": lambda x: (8 * x).long().to(x.dtype)} if cut == "integers" else {"after": Tensor.detach}
    model, x, y = images(**functions)
    if ENTRIES[name].gradients != "needed":
        result = run(name, model, x, y, THREATS[threat])
        assert torch.equal(model(result.x_adv).argmax(1) != y, result.success)
        assert int(result.gradients.sum()) == 0
    else:
        with pytest.raises(InputError, match="'square'"):
            run(name, model, x, y, THREATS[threat])


@pytest.mark.parametrize(("name", "threat"), FIRST)
def test_a_model_that_draws_random_numbers(name, threat):
    """Those that average over draws take it; all others, and AutoAttack's other versions, point to them."""
    model, x, y = images(after=lambda z: z + torch.randn_like(z))
    if ENTRIES[name].stochastic:
        options = {"version": "rand"} if name == "autoattack" else {}
        result = run(name, model, x, y, THREATS[threat], **options)
        again = run(name, model, x, y, THREATS[threat], **options)
        assert torch.equal(result.x_adv, again.x_adv)
        assert bool(THREATS[threat].contains(result.x_adv, x).all())
    if not ENTRIES[name].stochastic or name == "autoattack":
        with pytest.raises(InputError, match="eot-pgd"):
            run(name, model, x, y, THREATS[threat])


@pytest.mark.parametrize("name", ENTRIES)
def test_every_number_has_a_range(name):
    """A number without a range would be checked by hand, or not at all."""
    plain = {option.name: option.text for option in ENTRIES[name].text_options.values()}
    assert not [option for option, text in plain.items() if text in ("a number", "an integer")]


@pytest.mark.parametrize("name", [m for m, e in ENTRIES.items() if e.nearest is not None])
def test_both_forms_of_a_minimum_norm_attack_have_the_same_options(name):
    entry = ENTRIES[name]
    assert nearest_options(name) == entry.typed_options
    assert entry.function.__name__ == name.replace("-", "_")
    assert getattr(sys.modules[entry.function.__module__], entry.function.__name__) is entry.function
