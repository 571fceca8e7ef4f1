"""Muon: the orthogonal factor of the momentum, steps of a known size, a run that can be resumed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.training.muon import Muon, orthogonalize


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 1000))
def test_singular_values_come_close_to_one_and_directions_stay(n, k, seed):
    m = torch.randn(n, k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    u, s, v = torch.linalg.svd(m, full_matrices=False)
    found = u.T @ orthogonalize(m) @ v.T
    kept = s > 0.03 * torch.linalg.matrix_norm(m)  # smaller ones grow, but do not arrive in five steps
    values = found.diagonal()
    assert bool(((values[kept] > 0.65) & (values[kept] < 1.25)).all())
    assert float((found - found.diagonal().diag()).abs().max()) < 1e-8


def test_zero_stays_zero_and_scale_does_not_matter():
    assert not orthogonalize(torch.zeros(3, 5)).any()
    m = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(orthogonalize(1000 * m), orthogonalize(m), rtol=1e-3, atol=1e-4)


def test_a_step_has_the_size_that_it_says_for_matrices_and_kernels_alike():
    torch.manual_seed(0)
    for shape in ((20, 50), (8, 3, 4, 4), (50, 20)):
        p = torch.nn.Parameter(torch.zeros(shape))
        p.grad = torch.randn(shape)
        Muon([p], lr=0.1, momentum=0.9, weight_decay=0.0).step()
        root_mean_square = float(p.detach().flatten(1).square().sum()) ** 0.5 / p.numel() ** 0.5
        assert root_mean_square == pytest.approx(0.1 * 0.2, rel=0.2)


def test_vectors_move_as_with_adamw_and_parameters_without_gradients_stay():
    torch.manual_seed(0)
    ours, theirs, idle = (torch.nn.Parameter(torch.ones(5)) for _ in range(3))
    muon = Muon([ours, idle], lr=0.01, momentum=0.9, weight_decay=0.1)
    adamw = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1)
    for _ in range(3):
        ours.grad = torch.randn(5)
        theirs.grad = ours.grad.clone()
        muon.step()
        adamw.step()
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(idle, torch.ones(5))


def test_weight_decay_shrinks_a_matrix_without_a_gradient_to_speak_of():
    p = torch.nn.Parameter(torch.ones(3, 3))
    p.grad = torch.zeros(3, 3)
    Muon([p], lr=0.1, momentum=0.9, weight_decay=0.5).step()
    torch.testing.assert_close(p.detach(), torch.full((3, 3), 0.95))


def test_a_run_with_muon_learns_and_resumes_where_it_stopped(tmp_path):
    recipe = {
        "name": "m",
        "threat": "l2:0.3",
        "epochs": 2,
        "batch_size": 64,
        "model": {"name": "mlp", "hidden": [32]},
        "objective": {"name": "gloro", "loss": "ramp", "steepness": 10.0},
        "optimizer": {"name": "muon", "lr": 0.02, "weight_decay": 0.5},
        "budget": {"name": "linear", "end": 1},
        "evaluate": {"attack_steps": 0},
    }
    data = hf.load_data("mnist-mini")
    whole = hf.train(recipe, data=data, out=tmp_path / "whole")
    assert whole.history[-1]["train_verified"] > 0.3
    hf.train({**recipe, "epochs": 1}, data=data, out=tmp_path / "parts")
    again = hf.train({**recipe, "epochs": 2}, data=data, out=tmp_path / "parts", resume=True)
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
