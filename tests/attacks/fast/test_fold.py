import pytest
import torch
from torch import nn

from holdfast import Linf, attack
from holdfast.attacks.fast.fold import folded


def make_net():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.ReLU(),
        nn.Linear(5, 3),
    )  # fmt: skip
    for norm in (net[1], net[5]):
        norm.running_mean.uniform_(-0.5, 0.5)
        norm.running_var.uniform_(0.5, 2)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
    return net.eval()


def test_same_logits_and_gradients_without_batch_norm():
    net, x = make_net(), torch.rand(6, 1, 6, 6)
    copy = folded(net, x)
    assert copy is not net
    calls = [str(node.target) for node in copy.graph.nodes if node.op == "call_module"]
    assert len(calls) == len(net) - 2
    gradients = []
    for model in (net, copy):
        point = x.clone().requires_grad_(True)
        output = model(point)
        gradients.append((output, torch.autograd.grad(output.square().sum(), point)[0]))
    (z, g), (z_copy, g_copy) = gradients
    assert torch.allclose(z, z_copy, atol=1e-5)
    assert torch.allclose(g, g_copy, atol=1e-4)
    assert net[1].weight.requires_grad
    assert not any(p.requires_grad for p in copy.parameters())


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.top = nn.BatchNorm2d(1), nn.Linear(36, 3)

    def forward(self, x):
        x = self.norm(x)
        return self.top((x if x.sum() > 0 else -x).flatten(1))


def hooked():
    net = make_net()
    net[0].register_forward_hook(lambda *_: None)
    return net


@pytest.mark.parametrize("net", [nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), Branching(), hooked()], ids=type)
def test_the_model_itself_where_it_cannot_be_done(net):
    net.eval()
    assert folded(net, torch.rand(4, 1, 6, 6)) is net


def test_autoattack_answers_for_the_model(short_autoattack):
    net, x = make_net(), torch.rand(8, 1, 6, 6)
    y = net(x).argmax(1)
    result = attack(net, x, y, Linf(0.2), "autoattack")
    assert torch.equal(net(result.x_adv).argmax(1) != y, result.success)
