"""A certificate that is cut short proves nothing that it does not prove with all the time there is."""

import itertools
from importlib import import_module

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.errors import OutOfTime
from holdfast.utils import clock

milp = import_module("holdfast.certificates.complete.milp")
THREAT = hf.Linf(0.15)


def make_task(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(20, 14), nn.ReLU(), nn.Linear(14, 12), nn.ReLU(), nn.Linear(12, 3))
    x = torch.rand(12, 1, 4, 5)
    return model.eval(), x, model(x).argmax(1)


@pytest.fixture(scope="module")
def task():
    """CROWN proves half of the inputs, and the program all but two."""
    return make_task(3)


def cut(looks, work):
    """What `work` returns if the time is over at the `looks`-th look at the clock; None if there is nothing."""
    seconds = itertools.count()
    with clock.timed_by(lambda: float(next(seconds))), clock.until(looks):
        try:
            return work()
        except OutOfTime:
            return None


@pytest.mark.parametrize("method", ["ibp", "crown", "crown-ibp", "alpha-crown", "auto", "milp"])
def test_less_time_proves_no_more(task, method):
    model, x, y = task
    whole = hf.certify(model, x, y, THREAT, method)
    assert 0 < int(whole.certified.sum()) < len(x) or method == "ibp"
    assert cut(0, lambda: hf.certify(model, x, y, THREAT, method)) is None
    found = [cut(looks, lambda: hf.certify(model, x, y, THREAT, method)) for looks in range(2, 90, 4)]
    for part in (part for part in found if part is not None):
        assert not bool((part.certified & ~whole.certified).any())
        assert bool((part.margin <= whole.margin + 1e-6).all()) or method == "milp"


@pytest.mark.parametrize("method", ["alpha-crown", "auto"])
def test_what_was_proved_before_the_deadline_stands(method):
    """Every number of looks leaves at least what cheaper bounds proved, once these have come to an end."""
    (model, x, y), threat = make_task(1), hf.Linf(0.4)
    cheaper = hf.certify(model, x, y, threat, "crown" if method == "alpha-crown" else "ibp").margin
    whole = hf.certify(model, x, y, threat, method).margin
    found = [cut(looks, lambda: hf.certify(model, x, y, threat, method)) for looks in range(1, 120, 3)]
    begun = [part.margin for part in found if part is not None]
    assert begun, "choose more looks"
    assert all(bool((margin >= cheaper - 1e-4).all()) for margin in begun)  # a last pass in float32 may have to do
    assert any(not torch.allclose(margin, whole) for margin in begun), "some were cut short"


def test_a_program_with_too_many_binaries_is_not_built(task, monkeypatch):
    model, x, y = task

    def build(*_):
        raise AssertionError("it was built")

    monkeypatch.setattr(milp, "program", build)
    hf.certify(model, x, y, hf.Linf(0.3), "milp", max_binaries=3)
    with pytest.raises(AssertionError, match="it was built"):
        hf.certify(model, x, y, hf.Linf(0.3), "milp", max_binaries=100)


def test_sampling_stops_and_keeps_what_it_counted(task):
    model, x, y = task
    options = {"sigma": 0.25, "n": 2000, "n0": 50, "alpha": 0.01, "batch": 100}
    whole = hf.certify(model, x, y, hf.L2(0.1), "smoothing", **options)
    assert bool(whole.certified.any())
    proved = []
    for looks in (0, 3, 10, 10_000):
        part = cut(looks, lambda: hf.certify(model, x, y, hf.L2(0.1), "smoothing", **options))
        assert not bool((part.certified & ~whole.certified).any())
        proved.append(int(part.certified.sum()))
    assert proved[0] == 0
    assert proved == sorted(proved)
    assert proved[-1] == int(whole.certified.sum())
