"""What tests of regularisers share."""

import torch
from hypothesis import strategies as st
from torch import nn

from holdfast.training.objectives.alp import alp
from holdfast.training.objectives.at import at
from holdfast.training.objectives.mart import mart
from holdfast.training.objectives.standard import standard
from holdfast.training.objectives.trades import trades

OBJECTIVES = {"standard": standard, "at": at, "trades": trades, "alp": alp, "mart": mart}


batches = st.tuples(st.integers(2, 5), st.integers(1, 6), st.integers(0, 10**6))


def make_model(bias=True, activation=nn.Tanh):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, 3, bias=bias)).double()


def same_weights(a, b):
    pairs = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)
