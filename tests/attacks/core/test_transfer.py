"""The transfer matrix: its diagonal, equal models, and its symmetry under renaming the models."""

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.attacks.core.ascent import perturb
from holdfast.attacks.core.transfer import TransferSummary, transfer_matrix, transfer_summary
from holdfast.errors import InputError, UnsupportedError
from holdfast.random import Noise

X = torch.rand(60, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
THREAT = hf.Linf(0.1)


def models(count=4):
    """Networks whose classes are equally likely on X."""
    torch.manual_seed(3)
    nets = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).double().eval() for _ in range(count)]
    for net in nets:
        net[2].bias.data -= net(X).detach().mean(0)
    return nets


def labels(model):
    return model(X).argmax(1)


def test_entries_are_accuracies_of_the_target_on_the_source_s_examples():
    nets = models()
    y = labels(nets[0])
    matrix = transfer_matrix(nets, X, y, THREAT, chunk=17)
    for i, source in enumerate(nets):
        x_adv = perturb(
            source, X, y, THREAT, noise=Noise.for_batch(0, 60), steps=20, step_size=0.025, random_start=False
        )
        for j, target in enumerate(nets):
            assert float(matrix[i, j]) == pytest.approx(float((target(x_adv).argmax(1) == y).double().mean()))


def test_the_diagonal_is_the_white_box_accuracy():
    nets = models(2)
    y = labels(nets[0])
    matrix = transfer_matrix(nets, X, y, THREAT, "fgsm")
    for i, model in enumerate(nets):
        broken = hf.attack(model, X, y, THREAT, "fgsm").success
        assert float(matrix[i, i]) == pytest.approx(1 - float(broken.double().mean()))
    assert float(matrix[0, 0]) < 1


def test_identical_models_give_constant_rows():
    nets = [models()[0], models()[0], models()[1]]
    matrix = transfer_matrix(nets, X, labels(nets[0]), THREAT, random_start=True, steps=3)
    assert torch.equal(matrix[0], matrix[1])
    assert torch.equal(matrix[:, 0], matrix[:, 1])
    same = transfer_matrix(nets[:2], X, labels(nets[0]), THREAT)
    assert bool((same == same[0, 0]).all())


def test_permuting_the_models_permutes_the_matrix():
    nets, order = models(), [2, 0, 3, 1]
    y = labels(nets[0])
    matrix = transfer_matrix(nets, X, y, THREAT)
    permuted = transfer_matrix([nets[i] for i in order], X, y, THREAT)
    assert torch.equal(permuted, matrix[order][:, order])
    assert len(matrix.unique()) > 4


def test_zero_budget_gives_clean_accuracies():
    nets = models(3)
    y = labels(nets[1])
    matrix = transfer_matrix(nets, X, y, hf.L2(0.0))
    clean = torch.stack([(net(X).argmax(1) == y).double().mean() for net in nets])
    assert torch.equal(matrix, clean.expand(3, 3))


def test_summary_leaves_the_diagonal_out():
    matrix = torch.tensor([[9.0, 1.0, 2.0], [3.0, -9.0, 4.0], [5.0, 6.0, 99.0]])
    assert transfer_summary(matrix) == TransferSummary(mean=3.5, min=1.0, max=6.0)
    with pytest.raises(InputError, match="two models or more"):
        transfer_summary(matrix[:1, :1])
    with pytest.raises(InputError, match="two models or more"):
        transfer_summary(matrix[:2])


def test_bad_calls_are_refused():
    nets, y = models(2), torch.zeros(60, dtype=torch.long)
    with pytest.raises(InputError, match="at least one model"):
        transfer_matrix([], X, y, THREAT)
    with pytest.raises(InputError, match="no option 'restarts'"):
        transfer_matrix(nets, X, y, THREAT, restarts=2)
    with pytest.raises(UnsupportedError, match="does not handle"):
        transfer_matrix(nets, X, y, hf.Sparse(1))
    with pytest.raises(InputError, match="training mode"):
        transfer_matrix([nets[0].train()], X, y, THREAT)
