"""Training an auction: the loss, the recipes, resuming, files."""

import pytest
import torch

from holdfast.apps.auctions import (
    FRESH,
    AuctionNet,
    RegretNet,
    draw_values,
    list_auctions,
    load_auction,
    load_auction_recipe,
    train_auction,
)
from holdfast.apps.auctions.objective import (
    Multipliers,
    Objective,
    auction_loss,
    relu_bounds,
    stability,
    unstable_share,
)
from holdfast.apps.auctions.values import read_values
from holdfast.errors import InputError, Interrupted, StorageError

QUICK = {"hidden": [8], "iterations": 30, "batch_size": 16, "objective.steps": 3}


def test_every_shipped_recipe_loads_and_builds_its_network():
    assert {"auction-1x2", "auction-2x2"} <= set(list_auctions())
    for name in list_auctions():
        recipe = load_auction_recipe(name)
        assert recipe.network().bidders == recipe.bidders


def test_training_lowers_regret_at_some_revenue():
    recipe = load_auction_recipe("auction-1x2", hidden=[16], iterations=60, batch_size=64, **{"objective.starts": 1})
    result = train_auction(recipe)
    assert result.history[-1]["regret"] < 0.05
    assert result.history[-1]["revenue"] > 0.1


def test_resumed_training_ends_at_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.apps.auctions.training.SAVE_EVERY", 10)
    recipe = load_auction_recipe("auction-1x2", **QUICK)
    whole = train_auction(recipe, out=tmp_path / "whole")
    steps = 0

    def stop_at_25(*args, **kwargs):
        nonlocal steps
        steps += 1
        if steps == 25:
            raise KeyboardInterrupt
        return auction_loss(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("holdfast.apps.auctions.training.auction_loss", stop_at_25)
        with pytest.raises(Interrupted, match="--resume"):
            train_auction(recipe, out=tmp_path / "cut")
    with pytest.raises(InputError, match="holds a run already"):
        train_auction(recipe, out=tmp_path / "cut")
    rest = train_auction(recipe, out=tmp_path / "cut", resume=True)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, rest.model.state_dict()[name])
    loaded = load_auction(tmp_path / "cut")
    bids = draw_values(7, 1, 2)
    assert torch.equal(loaded(bids).payment, rest.model(bids).payment)


def test_student_goes_on_with_the_teacher_of_its_folder(tmp_path, monkeypatch):
    recipe = load_auction_recipe("auction-1x2-student", **QUICK, teacher=20)
    whole = train_auction(recipe)
    assert whole.model.payment == "direct"

    def stop(*args, teacher=None, **kwargs):
        if teacher is not None:
            raise KeyboardInterrupt
        return auction_loss(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("holdfast.apps.auctions.training.auction_loss", stop)
        with pytest.raises(Interrupted):
            train_auction(recipe, out=tmp_path)
    teacher = load_auction(tmp_path / "teacher")
    assert isinstance(teacher, RegretNet)

    def taught(model, *args, teacher=None, **kwargs):
        assert teacher is not None, "the teacher was trained again"
        assert not any(p.requires_grad for p in teacher.parameters())
        return auction_loss(model, *args, teacher=teacher, **kwargs)

    monkeypatch.setattr("holdfast.apps.auctions.training.auction_loss", taught)
    rest = train_auction(recipe, out=tmp_path, resume=True)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, rest.model.state_dict()[name])


def test_resuming_with_other_values_is_refused(tmp_path):
    recipe = load_auction_recipe("auction-1x2", **QUICK)
    train_auction(recipe, values=draw_values(20, 1, 2), out=tmp_path)
    with pytest.raises(InputError, match="another run"):
        train_auction(recipe, values=draw_values(20, 1, 2, seed=1), out=tmp_path, resume=True)


def test_loss_of_a_batch_is_the_formula():
    net = AuctionNet(2, 1, hidden=(4,)).train()
    settings = Objective(multiplier=3.0, rate=2.0, steps=5, reduce="sum")
    values = draw_values(50, 2, 1)
    loss, figures = auction_loss(net, values, Multipliers.start(settings, 2), settings)
    r, rest = figures["regret"], (-figures["revenue"] + stability(net, values) / 400).detach()
    assert float(r.sum()) > 0
    assert float(loss.detach()) == pytest.approx(float(rest + (3 * r + r**2).sum()), rel=1e-5)
    mean, _ = auction_loss(net, values, Multipliers.start(settings, 2), Objective("mean", 3.0, 2.0, steps=5))
    assert float(mean.detach()) == pytest.approx(float(rest + (3 * r + r**2).mean()), rel=1e-5)


def test_loss_of_direct_payments_adds_squared_violations_and_the_distance_to_the_teacher():
    torch.manual_seed(1)
    net, teacher, values = AuctionNet(2, 1, hidden=(4,), payment="direct"), RegretNet(2, 1), draw_values(50, 2, 1)
    net.scores[-1].bias.data[-2:] = torch.tensor([0.4, 0.7])
    settings = Objective(multiplier=3.0, rate=2.0, steps=5, stability=0.0, distill=0.7, rationality=20.0)
    loss, figures = auction_loss(net, values, Multipliers.start(settings, 2), settings, teacher=teacher)
    outcome, taught = net(values), teacher(values)
    irv = (outcome.payment - (outcome.allocation * values).sum(-1)).clamp(min=0).mean(0)
    r, p = figures["regret"], outcome.payment
    assert float(irv.detach().min()) > 0.01
    distance = torch.nn.functional.mse_loss(outcome.allocation, taught.allocation)
    distance = distance + torch.nn.functional.mse_loss(p, taught.payment)
    want = -p.sum(1).mean() + (3 * r + r**2 + 20 * irv**2).mean() + 0.7 * distance
    assert float(loss.detach()) == pytest.approx(float(want.detach()), rel=1e-5)
    loss.backward()
    assert all(w.grad is None for w in teacher.parameters())


def test_multipliers_are_renewed_every_few_batches():
    settings = Objective(multiplier=5.0, rate=2.0, growth=1.0, every=3, rationality_every=2)
    m = Multipliers.start(settings, 1)
    for _ in range(3):
        m.renew(settings, torch.tensor([0.5]), torch.tensor([0.1]))
    assert m.regret.tolist() == [6.0]
    assert m.violation.tolist() == [21.0]  # the rate has grown from 5 to 10 after two batches
    assert (m.rate, m.violation_rate) == (3.0, 10.0)


def test_no_batch_of_a_training_holds_a_fresh_profile(monkeypatch):
    batches = []

    def kept(*args, **kwargs):
        batches.append(draw_values(*args, **kwargs))
        return batches[-1]

    monkeypatch.setattr("holdfast.apps.auctions.training.draw_values", kept)
    for seed in (0, 2148):  # the second would reach the seeds of fresh profiles
        train_auction(load_auction_recipe("auction-1x2", **{**QUICK, "iterations": 3}, seed=seed))
    assert any(torch.equal(draw_values(16, 1, 2, seed=0), batch) for batch in batches)
    for seed in (*range(30), 2148 * 1_000_003 - FRESH):
        assert not any(torch.equal(draw_values(16, 1, 2, seed=FRESH + seed), batch) for batch in batches)


def test_stability_term_lies_in_its_range_and_its_descent_settles_relus():
    torch.manual_seed(0)
    net, values = AuctionNet(1, 2, hidden=(16, 16)), draw_values(64, 1, 2)
    before = unstable_share(net, values)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        term = stability(net, values)
        assert -1 < float(term.detach()) < 1
        term.backward()
        optimizer.step()
    assert unstable_share(net, values) < 0.5 * before
    low, high = relu_bounds(net, values)[0]
    at = net.scores[0](values.flatten(1))
    assert bool((low <= at + 1e-5).all() and (at <= high + 1e-5).all())


def test_values_of_the_user(tmp_path):
    path = tmp_path / "values.csv"
    path.write_text("a,b\n0.1,0.2\n0.3,0.4\n")
    values = read_values(path, 1, 2)
    assert values.tolist() == [[[pytest.approx(0.1), pytest.approx(0.2)]], [[pytest.approx(0.3), pytest.approx(0.4)]]]
    train_auction(load_auction_recipe("auction-1x2", **QUICK), values=values)
    path.write_text("0.1,0.2\n0.3\n")
    with pytest.raises(InputError, match=r"line 2: expected 2 values"):
        read_values(path, 1, 2)
    path.write_text("0.1,0.2\n0.3,x\n")
    with pytest.raises(InputError, match=r"line 2: 'x' is no number"):
        read_values(path, 1, 2)
    with pytest.raises(InputError, match="support"):
        train_auction(load_auction_recipe("auction-1x2", **QUICK), values=3 * values)
    with pytest.raises(StorageError, match="cannot read"):
        read_values(tmp_path / "missing.csv", 1, 2)


def test_bad_recipes_are_refused():
    with pytest.raises(InputError, match="auction-1x2"):
        load_auction_recipe("auction-1x")
    with pytest.raises(InputError, match="iterations: expected an integer >= 1"):
        load_auction_recipe("auction-1x2", iterations=0)
    with pytest.raises(InputError, match="items: expected an integer >= 1, got 0"):
        load_auction_recipe("auction-1x2", items=0)
    with pytest.raises(InputError, match="high: expected a number, got inf"):
        load_auction_recipe("auction-1x2", support={"low": 0.0, "high": float("inf")})
    with pytest.raises(InputError, match="softmax"):
        load_auction_recipe("auction-1x2", head="softmax", payment="direct")
