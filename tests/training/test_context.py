"""Modes of modules around a block."""

from torch import nn

from holdfast.training.context import in_mode


def test_modes_are_restored_one_by_one():
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2))
    model.train()
    model[1].eval()  # a frozen batch norm inside a model in training
    with in_mode(model, False):
        assert not model[0].training
        assert not model[1].training
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
