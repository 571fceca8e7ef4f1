"""With `hf.reference()` the plain code runs: the same verdicts, and points that differ by rounding."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.core.ascent import perturb
from holdfast.attacks.fast.chain import is_chain, well_laid_out
from holdfast.attacks.fast.fold import folded
from holdfast.attacks.fast.thin import _way
from holdfast.attacks.fast.windows import windowed
from holdfast.random import Noise


def task():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 4, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64, 5)
    ).eval()  # fmt: skip
    x = torch.rand(12, 3, 16, 16)
    with torch.no_grad():
        model[-1].bias -= model(x).mean(0)
        return model, x, model(x).argmax(1)


RUNS = {
    "pgd": (hf.Linf(0.004), {"steps": 10}),
    "apgd-ce": (hf.Linf(0.004), {"steps": 10}),
    "apgd-dlr": (hf.L2(0.05), {"steps": 10}),
    "square": (hf.Linf(0.01), {"queries": 60}),
    "patch-pgd": (hf.Patch(3, 3), {"steps": 5, "restarts": 4, "probes": 16}),
    "fmn": (hf.L2(0.05), {"steps": 10}),
    "autoattack": (hf.Linf(0.003), {}),
}


@pytest.mark.usefixtures("short_autoattack")
@pytest.mark.parametrize("method", RUNS)
def test_the_plain_code_gives_the_same_answers(method):
    model, x, y = task()
    threat, options = RUNS[method]
    fast = hf.attack(model, x, y, threat, method, **options)
    with hf.reference():
        plain = hf.attack(model, x, y, threat, method, **options)
    assert int(fast.success.sum()) > 0
    assert torch.equal(fast.success, plain.success)
    assert fast.by == plain.by
    same = ((fast.x_adv - plain.x_adv).abs().flatten(1).amax(1) < 1e-4).float().mean()
    assert float(same) > 0.9, "a sign of a tiny gradient may differ, but not those of many inputs"


def test_the_plain_code_trains_on_the_same_points():
    model, x, y = task()
    options = {"noise": Noise.for_batch(0, len(x)), "steps": 3, "step_size": 0.01}
    fast = perturb(model, x, y, hf.L2(0.1), **options)
    with hf.reference():
        plain = perturb(model, x, y, hf.L2(0.1), **options)
    assert torch.allclose(fast, plain, atol=1e-5)


def test_every_fast_path_is_off():
    model, x, _ = task()
    thin = (x, model[0].weight, model[0].stride, model[0].padding, model[0].dilation, 1)
    assert is_chain(model)
    assert folded(model, x) is not model
    assert windowed(model, x) is not None
    assert _way(*thin) == "folded"
    assert well_laid_out(model, x) is not x
    with hf.reference():
        assert not is_chain(model)
        assert folded(model, x) is model
        assert windowed(model, x) is None
        assert _way(*thin) == ""
        assert well_laid_out(model, x) is x
