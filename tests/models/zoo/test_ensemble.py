"""Ensembles: the formula and its gradient, one file on disk, attacks on the mean of the probabilities."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import holdfast as hf
from holdfast.cli import app
from holdfast.errors import InputError
from holdfast.models import Ensemble, get_architecture, list_models, load_model, make_model, read_metadata, save_model

LENET = {"of": "lenet", "width": 0.5, "input_shape": (1, 28, 30), "classes": 3}


def linear(seed: int) -> nn.Module:
    return make_model("linear", input_shape=(4,), classes=3, seed=seed).eval()


@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [0, 1, 7])
def test_copies_of_a_model_answer_as_the_model(members: int, dtype: torch.dtype, batch: int) -> None:
    model = make_model("lenet", seed=0, width=0.5).to(dtype).eval()
    x = torch.rand(batch, 1, 28, 28, dtype=dtype)
    logits, own = Ensemble([model] * members)(x), model(x)
    assert logits.shape == (batch, 10)
    assert logits.dtype == dtype
    torch.testing.assert_close(logits, own.log_softmax(1))
    torch.testing.assert_close(logits.softmax(1), own.softmax(1))
    assert torch.equal(logits.argmax(1), own.argmax(1))


@given(st.integers(1, 5), st.integers(0, 1000))
def test_probabilities_and_gradient_are_those_of_the_mean(members: int, seed: int) -> None:
    parts = [linear(seed + i).double() for i in range(members)]
    x = torch.rand(5, 4, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 1, 2, 0, 1])
    logits = Ensemble(parts)(x)
    mean = sum(part(x).softmax(1) for part in parts) / members
    torch.testing.assert_close(logits.exp(), mean)
    (found,) = torch.autograd.grad(nn.functional.cross_entropy(logits, y, reduction="sum"), x, retain_graph=True)
    (truth,) = torch.autograd.grad(-mean.gather(1, y[:, None]).log().sum(), x, retain_graph=True)
    torch.testing.assert_close(found, truth)
    # By hand: the gradient of log(mean p) is the mean of p (e_y - p) W, over the mean of p.
    weights = [part[1].weight.detach() for part in parts]
    p = [part(x).softmax(1).detach() for part in parts]
    e = nn.functional.one_hot(y, 3).double()
    top = sum(q.gather(1, y[:, None]) * ((e - q) @ w) for q, w in zip(p, weights, strict=True))
    torch.testing.assert_close(found, -top / sum(q.gather(1, y[:, None]) for q in p))


def test_confident_members_do_not_underflow() -> None:
    sure, unsure = linear(0), linear(1)
    with torch.no_grad():
        sure[1].weight.mul_(1e4)
    x = torch.rand(6, 4, requires_grad=True)
    logits = Ensemble([sure, sure])(x)
    assert (logits.exp() == 0).any()  # the probabilities do underflow
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(logits, sure(x).log_softmax(1))
    (gradient,) = torch.autograd.grad(Ensemble([sure, unsure])(x)[:, 0].sum(), x)
    assert torch.isfinite(gradient).all()


def test_round_trip_in_one_file(tmp_path: Path) -> None:
    model = make_model("ensemble", members=3, normalize=(0.2, 0.4), seed=0, **LENET)
    path = save_model(model, tmp_path / "m.safetensors", epochs=200)
    again = load_model(path)
    assert isinstance(again, Ensemble)
    assert not again.training
    assert get_architecture(again) == get_architecture(model)
    x = torch.rand(4, 1, 28, 30)
    assert torch.equal(again(x), model.eval()(x))
    assert read_metadata(path) == {"epochs": 200}
    own = make_model("ensemble", members=3, normalize=(0.2, 0.4), seed=1, **LENET)
    assert torch.equal(load_model(path, own)(x), model(x))
    with pytest.raises(InputError, match="but model= is 'ensemble'"):
        load_model(path, make_model("ensemble", members=2, **LENET))


def test_checkpoints_of_one_architecture_make_an_ensemble_of_the_zoo(tmp_path: Path) -> None:
    paths = [
        save_model(make_model("mlp", input_shape=(4,), hidden=(5,), normalize=(0.5, 0.2), seed=s), tmp_path / name)
        for s, name in enumerate(("a.safetensors", "b.safetensors"))
    ]
    model = Ensemble([load_model(path).double() for path in paths])
    name, options = get_architecture(model)
    assert (name, options["of"], options["members"], options["hidden"]) == ("ensemble", "mlp", 2, [5])
    again = load_model(save_model(model, tmp_path / "all.safetensors"))
    x = torch.rand(3, 4, dtype=torch.float64)
    assert torch.equal(again(x), model.eval()(x))
    assert get_architecture(make_model(name, **options)) == (name, options)


def test_members_share_a_seed_and_not_their_weights() -> None:
    state = torch.get_rng_state()
    first, again = (make_model("ensemble", seed=3, **LENET) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert len(first.members) == 3
    weights = [next(member.parameters()) for member in first.members]
    assert not torch.equal(weights[0], weights[1])
    x = torch.rand(2, 1, 28, 30)
    normalised = make_model("ensemble", seed=3, normalize=(0.5, 0.25), **LENET)
    torch.testing.assert_close(normalised(x), first((x - 0.5) / 0.25))


@pytest.mark.parametrize(
    "members",
    [
        [nn.Linear(4, 3), nn.Linear(4, 3)],
        [linear(0), make_model("mlp", input_shape=(4,), classes=3, hidden=(5,))],
        [linear(0), nn.Linear(4, 3)],
        [make_model("ensemble", of="linear", input_shape=(4,), classes=3)],
    ],
    ids=["own", "different", "mixed", "nested"],
)
def test_other_members_are_saved_without_an_architecture(members: list[nn.Module], tmp_path: Path) -> None:
    model = Ensemble(members).eval()
    assert get_architecture(model) is None
    path = save_model(model, tmp_path / "m.safetensors")
    with pytest.raises(InputError, match="holds weights but no architecture; build the model and give it as model="):
        load_model(path)
    x = torch.rand(2, 4)
    expected = model(x)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert torch.equal(load_model(path, model)(x), expected)


def test_an_ensemble_that_was_changed_is_not_saved_under_its_recipe(tmp_path: Path) -> None:
    model = Ensemble([linear(0), linear(1)])
    model.members.append(linear(2))
    with pytest.raises(InputError, match="it was changed after make_model"):
        save_model(model, tmp_path / "m.safetensors")


@pytest.mark.parametrize("method", ["pgd", "apgd-dlr", "square"])
def test_attacks_break_the_ensemble_and_not_a_member(method: str) -> None:
    torch.manual_seed(0)
    model = Ensemble([linear(i) for i in range(3)]).eval()
    x = torch.rand(20, 4)
    y = model(x).argmax(1)
    found = hf.attack(model, x, y, hf.Linf(0.3), method)
    assert found.success.any()
    mean = sum(member(found.x_adv).softmax(1) for member in model.members)
    assert torch.equal(mean.argmax(1) != y, found.success)


def test_attacks_climb_the_mean_of_the_probabilities() -> None:
    """The second member is sure and flat, so that the first decides the slope; the mean of the logits slopes down."""
    parts = [nn.Linear(1, 2, bias=False).double() for _ in range(2)]
    with torch.no_grad():
        parts[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        parts[1].weight.copy_(torch.tensor([[-6.0], [6.0]]))
    x, y = torch.full((1, 1), 0.5, dtype=torch.float64), torch.tensor([1])
    found = hf.attack(Ensemble(parts).eval(), x, y, hf.Linf(0.1), "fgsm")
    assert not found.success.any()
    assert found.x_adv.item() == pytest.approx(0.6)


def test_the_list_of_architectures_holds_the_ensemble() -> None:
    (row,) = (row for row in list_models() if row.name == "ensemble")
    assert (row.parameters, row.input_shape, row.classes) == (3 * 166_406, (1, 28, 28), 10)
    shown = CliRunner().invoke(app, ["models"], env={"COLUMNS": "200"}).stdout
    assert "ensemble" in shown
    assert "499,218" in shown


def test_defaults_are_those_of_the_member() -> None:
    with torch.device("meta"):
        model = make_model("ensemble", of="8c2f", members=2)
    assert get_architecture(model)[1]["input_shape"] == [3, 64, 64]
    assert get_architecture(model)[1]["classes"] == 200


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"of": "lenett"}, "unknown architecture 'lenett'. Did you mean 'lenet'"),
        ({"of": "lenet", "widht": 2}, "architecture 'lenet' has no option 'widht'. Did you mean 'width'"),
        ({"of": "ensemble"}, "made of single models"),
        ({"members": 0}, "expected an integer >= 1, got 0"),
        ({"members": 2.0}, "expected an integer >= 1, got 2.0"),
        ({"input_shape": (1, 28)}, "input_shape must be"),
        ({"normalize": 0.5}, "normalize must be a pair"),
    ],
)
def test_bad_requests_are_refused(options: dict, words: str) -> None:
    with torch.device("meta"), pytest.raises(InputError, match=words):
        make_model("ensemble", **options)


@pytest.mark.parametrize(("members", "kinds"), [([], "none"), ([nn.Linear(1, 2), "lenet"], "Linear, str")])
def test_bad_members_are_refused(members: list, kinds: str) -> None:
    with pytest.raises(InputError, match=f"at least one member, each a torch.nn.Module, got {kinds}"):
        Ensemble(members)
