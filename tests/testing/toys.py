"""Toy methods as a contributor or a stranger writes them: the text of one file each."""

ATTACK = '''
"""Toy attack: steps along the sign of the gradient of the cross-entropy."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import Attack
from holdfast.results import AttackResult
from holdfast.threats import Threat
from holdfast.utils.options import Count


@Attack("toy", summary="a toy attack", reference="nobody, A toy, 2024", threats=("linf", "l2"))
def toy(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, noise: Noise, steps: Count = 5) -> AttackResult:
    """Take steps of the size of the budget, and keep the last point."""
    x_adv = x
    for _ in range(steps):
        point = x_adv.detach().requires_grad_(True)
        loss = cross_entropy(model(point), y, reduction="sum")
        gradient = torch.autograd.grad(loss, point, allow_unused=True)[0] if loss.requires_grad else None
        if gradient is None:
            raise InputError("the model has no gradient")
        x_adv = threat.project(x_adv + threat.budget * gradient.sign(), x).detach()
    with torch.no_grad():
        success = model(x_adv).argmax(1) != y
    spent = torch.full((len(x),), steps)
    return AttackResult(x_adv, success, tuple("toy" if s else "" for s in success.tolist()), spent, spent + 1)
'''

CERTIFICATE = '''
"""Toy certificate: the lower bound of one logit against the upper bounds of the others."""

import torch
from torch import Tensor, nn

from holdfast.bounding import bounds
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import Threat


@Certificate("toy", summary="a toy certificate", reference="nobody, A toy, 2024", threats=("linf", "l2"))
def toy(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, sound: bool = True) -> CertifyResult:
    """Subtract the bounds of interval arithmetic; the difference is rounded down."""
    found = bounds(model, x, threat, "ibp", sound=sound)
    own = found.lower.gather(1, y[:, None])[:, 0]
    others = found.upper.scatter(1, y[:, None], -torch.inf).amax(1)
    margin = torch.nextafter(own - others, torch.full_like(own, -torch.inf))
    return CertifyResult(margin > 0, margin, by=tuple("toy" if m > 0 else "" for m in margin.tolist()))
'''

OBJECTIVE = '''
"""Toy objective: the cross-entropy at a random point of the threat set."""

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.utils.options import NotNegative


@Objective("toy", summary="a toy objective", reference="nobody, A toy, 2024", threats=("linf", "l2"))
def toy(
    model: nn.Module, x: Tensor, y: Tensor, context: Context, *, weight: NotNegative = 1.0
) -> tuple[Tensor, Metrics]:
    """Weigh the loss at a random point."""
    logits = model(context.threat.random_start(x, context.noise))
    return weight * cross_entropy(logits, y), {"accuracy": (logits.argmax(1) == y).to(x.dtype).mean()}
'''

USE = '''
"""Use all three toys through the front doors."""

import torch

import holdfast as hf

for kind in ("attack", "certify", "train"):
    assert "toy" in {method.name for method in hf.methods(kind)}, kind
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
x = torch.rand(20, 4)
y = model(x).argmax(1)
broken = hf.attack(model, x, y, hf.Linf(0.3), "toy", steps=3).success
assert broken.any()
assert hf.certify(model, x, y, hf.Linf(1e-3), "toy").certified.any()
recipe = {
    "threat": "linf:0.05", "epochs": 1, "batch_size": 50, "optimizer": {"lr": 0.1},
    "model": {"name": "mlp", "hidden": [8]}, "objective": {"name": "toy", "weight": 2.0},
}
assert hf.train(recipe, data=hf.load_data("two-moons", n=200), progress=False).history
print("all toys work")
'''

CONTRACTS = """
import holdfast as hf
from holdfast.testing import check_attack, check_certificate, check_objective

check_attack("toy", threats=[hf.Linf(0.1)])
check_certificate("toy", threats=[hf.L2(0.1)])
check_objective("toy")
print("all toys keep their contracts")
"""
