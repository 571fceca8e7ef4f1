"""Parts of a training set by the difficulty that an earlier run measured."""

import pytest
import torch
from torch import nn

from holdfast.data import Dataset, Split
from holdfast.errors import InputError
from holdfast.training import load_recipe, train
from holdfast.training.folder import read_losses
from holdfast.training.logs import read_examples
from holdfast.training.setup import prepare
from holdfast.training.subset import difficulty, mean_losses


def plain_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture
def ranked(toy_recipe, toy_data, tmp_path):
    """A run with a log on data with wrong labels at the first three places of each class."""
    y = toy_data.train.y.clone()
    y[:6] = 1 - y[:6]
    data = Dataset("toy", Split(toy_data.train.x, y), toy_data.test, toy_data.classes)
    recipe = {**toy_recipe, "validation": 0, "optimizer": {"name": "adam", "lr": 0.02}}
    train(recipe, plain_model(), data, out=tmp_path / "run", epochs=8, log={"losses": True})
    return recipe, data, tmp_path / "run"


def test_means_skip_epochs_and_count_errors(ranked):
    _, _, run = ranked
    each, errors = read_examples(run), read_examples(run, "error")
    assert each.shape == (8, 70)
    torch.testing.assert_close(mean_losses(run), each.mean(0))
    torch.testing.assert_close(mean_losses(run, skip=5), each[5:].mean(0))
    torch.testing.assert_close(mean_losses(run, zero_one=True), errors.mean(0))
    assert set(errors.unique().tolist()) <= {0.0, 1.0}
    with pytest.raises(InputError, match="skip must be from 0 to 7"):
        mean_losses(run, skip=8)


def test_the_checkpoint_has_the_same_means_as_the_log(ranked):
    torch.testing.assert_close(mean_losses(ranked[2]), read_losses(ranked[2]), rtol=1e-5, atol=1e-6)


def test_wrong_labels_are_hardest_and_a_hard_subset_has_them(ranked):
    recipe, data, run = ranked
    d = difficulty(mean_losses(run, skip=2))
    assert sorted(d.argsort()[:6].tolist()) == list(range(6))

    def chosen(kind, **more):
        part = {"kind": kind, "share": 0.2, "run": str(run), **more}
        task = prepare(load_recipe(recipe, {"subset": part, "model.name": "linear"}), plain_model(), data, None)
        return task.train

    hard, easy = chosen("hard", skip=2), chosen("easy", skip=2)
    for part in (hard, easy, chosen("random")):
        assert torch.bincount(part.y).tolist() == [7, 7]
    same = [bool((x == data.train.x[:6]).flatten(1).all(1).any()) for x in hard.x]
    assert sum(same) == 6
    assert not any(bool((x == hard.x).flatten(1).all(1).any()) for x in easy.x)


def test_a_run_on_a_subset_trains_and_resumes(ranked, tmp_path):
    recipe, data, run = ranked
    part = {"kind": "easy", "share": 0.4, "run": str(run), "zero_one": True}
    whole = train(recipe, plain_model(), data, subset=part, epochs=2)
    train(recipe, plain_model(), data, subset=part, epochs=1, out=tmp_path / "part")
    resumed = train(recipe, plain_model(), data, subset=part, epochs=2, out=tmp_path / "part", resume=True)
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)


def test_bad_subsets_name_the_key(ranked, toy_data):
    recipe, data, run = ranked
    bad = [
        ({"kind": "hard", "share": 0.5}, data, "subset.run: missing"),
        ({"kind": "hard", "share": 0.0, "run": str(run)}, data, "subset.share: expected a number > 0"),
        ({"kind": "hard", "share": 0.5, "run": str(run)}, toy_data, "subset.run: the run in .* other data"),
        ({"kind": "medium", "share": 0.5}, data, "subset.kind: unknown value"),
    ]
    for part, given, message in bad:
        with pytest.raises(InputError, match=message):
            train(recipe, plain_model(), given, subset=part, epochs=1)
    unequal = Dataset("toy", toy_data.train[torch.arange(70) % 2 * (torch.arange(70) < 60) == 0], *_rest(toy_data))
    with pytest.raises(InputError, match=r"subset.share: size must be a multiple"):
        train(recipe, plain_model(), unequal, subset={"kind": "random", "share": 1.0}, epochs=1)


def _rest(data):
    return data.test, data.classes
