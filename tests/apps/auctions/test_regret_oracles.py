"""Exact oracles of the regret on small networks: enumeration of all linear pieces, programs, and SCIP."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize

from holdfast.apps.auctions import AuctionNet, certify_regret, draw_values
from holdfast.apps.auctions.mechanism import lying_utility, utility
from holdfast.apps.auctions.regret_milp import milp_regret


def network(payment: str, *, hidden: tuple[int, ...], bidders: int = 1, seed: int = 0) -> AuctionNet:
    torch.manual_seed(seed)
    net = AuctionNet(bidders, 2, hidden=hidden, payment=payment).double().eval()
    for weight in net.parameters():
        weight.data *= 2.5
    return net


def honest_utility(net: AuctionNet, values: torch.Tensor) -> float:
    with torch.no_grad():
        return float(utility(net(values), values)[0, 0])


def subsets(size: int) -> list[tuple[int, ...]]:
    """Supports of sparsemax: all subsets of the rows but the empty one."""
    return [s for r in range(1, size + 1) for s in itertools.combinations(range(size), r)]


def by_enumeration(net: AuctionNet, values: torch.Tensor) -> float:
    """Best utility of the only bidder with direct payments: one linear program for each piece of the mechanism.

    A piece fixes the sign of every ReLU of the one hidden layer, the support of both sparsemaxes, and where the payment
    is clipped. On it, shares and payment are linear in the bids.
    """
    w1, b1, w2, b2 = (p.detach().numpy() for p in net.parameters())
    v, best = values[0, 0].numpy(), -np.inf
    for signs in itertools.product((0.0, 1.0), repeat=len(b1)):
        d = np.array(signs)
        w, b = w2 @ (d[:, None] * w1), w2 @ (d * b1) + b2
        pieces = [((1 - 2 * d)[:, None] * w1, (2 * d - 1) * b1)]  # rows with matrix @ bids <= right
        for supports in itertools.product(subsets(2), repeat=2):
            gain, offset, rows = np.zeros(2), 0.0, list(pieces)
            for item, support in enumerate(supports):
                x, c = w[2 * item : 2 * item + 2], b[2 * item : 2 * item + 2]
                z, e = x - x[list(support)].mean(0), c - (c[list(support)].sum() - 1) / len(support)
                inside = np.array([1.0 if r in support else -1.0 for r in range(2)])
                rows.append((-inside[:, None] * z, inside * e))
                if 0 in support:
                    gain, offset = gain + v[item] * z[0], offset + v[item] * e[0]
            t, f = w[4], b[4]
            for slope, shift, row in (
                (0 * t, 0.0, (t[None], np.array([-f]))),
                (t, f, (np.stack([-t, t]), np.array([f, 2 - f]))),
                (0 * t, 2.0, (-t[None], np.array([f - 2]))),
            ):
                matrix, right = (np.concatenate(part) for part in zip(*rows, row, strict=True))
                found = optimize.linprog(slope - gain, matrix, right, bounds=[(0, 1)] * 2)
                if found.status == 0:
                    best = max(best, offset - shift - found.fun)
    return best


@pytest.mark.parametrize("seed", [0, 1])
def test_enumeration_programs_and_branch_and_bound_agree_on_direct_payments(seed):
    net, values = network("direct", hidden=(3,), seed=seed), draw_values(1, 1, 2, seed=seed).double()
    exact = by_enumeration(net, values) - honest_utility(net, values)
    program, proof = milp_regret(net, values), certify_regret(net, values, tolerance=1e-6)
    assert exact > 1e-3  # lying pays: there is something to find
    assert float(program.found[0, 0]) == pytest.approx(exact, abs=1e-5)
    assert float(proof.found[0, 0]) == pytest.approx(exact, abs=1e-5)
    assert exact - 1e-9 <= float(proof.proved[0, 0]) <= exact + 1e-5
    assert exact - 1e-9 <= float(program.proved[0, 0]) <= exact + 2e-5


@torch.no_grad()
def by_zooming(net: AuctionNet, values: torch.Tensor, points: int = 161, zooms: int = 4) -> float:
    """Best utility of bidder 1 on a grid, and on finer grids around the ten best cells."""
    centre, width, best = torch.full((1, 2), 0.5, dtype=torch.float64), 0.5, -torch.inf
    for _ in range(zooms):
        axis = torch.linspace(-width, width, points, dtype=torch.float64)
        bids = (centre[:, None] + torch.cartesian_prod(axis, axis)).view(-1, 2).clamp(0, 1)
        got = lying_utility(net, values.expand(len(bids), -1, -1), torch.zeros(len(bids), dtype=torch.long), bids)
        top = got.topk(10)
        best, centre, width = max(best, float(top.values[0])), bids[top.indices], 4 * width / points
        points = 41
    return best


@pytest.mark.parametrize(("bidders", "seed"), [(1, 1), (2, 3)])
def test_brute_force_and_branch_and_bound_agree_on_shares_of_the_bids(bidders, seed):
    net, values = network("share", hidden=(8, 8), bidders=bidders, seed=seed), draw_values(1, bidders, 2).double()
    exact = by_zooming(net, values) - honest_utility(net, values)
    proof = certify_regret(net, values, tolerance=2e-6)
    assert exact > 1e-3
    assert float(proof.found[0, 0]) == pytest.approx(exact, abs=1e-5)
    assert exact <= float(proof.proved[0, 0]) <= exact + 1e-5


def scip_utility(net: AuctionNet, values: torch.Tensor, *, limit: float) -> tuple[float, float]:
    """Best utility of the only bidder, found and proved by SCIP: binaries for ReLUs and sparsemax, and products."""
    scip = pytest.importorskip("pyscipopt")
    m: Any = scip.Model()
    m.hideOutput()
    m.setParam("limits/time", limit)
    bids = [m.addVar(lb=0, ub=1) for _ in range(2)]
    x: list[Any] = bids
    linears = [layer for layer in net.scores if isinstance(layer, torch.nn.Linear)]
    low, high = np.zeros(2), np.ones(2)
    for layer in linears:
        weight, bias = layer.weight.detach().numpy(), layer.bias.detach().numpy()
        ends = [np.clip(s * weight, 0, None) for s in (1, -1)]
        low, high = ends[0] @ low - ends[1] @ high + bias, ends[0] @ high - ends[1] @ low + bias
        rows = zip(weight, bias, strict=True)
        x = [scip.quicksum(float(w) * z for w, z in zip(row, x, strict=True)) + float(b) for row, b in rows]
        if layer is not linears[-1]:
            x = [_relu(m, z, a, b) for z, a, b in zip(x, low, high, strict=True)]
            low, high = low.clip(0), high.clip(0)
    shares = []
    for item in range(2):
        at = slice(2 * item, 2 * item + 2)
        tau, z = m.addVar(lb=None), [m.addVar(lb=0, ub=1) for _ in range(2)]
        m.addCons(z[0] + z[1] == 1)
        for score, share in zip(x[at], z, strict=True):
            mu, on = m.addVar(lb=0), m.addVar(vtype="B")
            m.addCons(share - score - mu + tau == 0)
            m.addCons(share <= on)
            m.addCons(mu <= float(high[at].max() - low[at].min() + 1) * (1 - on))
        shares.append(z[0])
    score = x[4] / 10 + 0.5
    bottom, top = low[4] / 10 + 0.5, high[4] / 10 + 0.5
    part = 1 - _relu(m, 1 - _relu(m, score, bottom, top), 1 - max(top, 0), 1 - max(bottom, 0))
    worth, paid, utility = m.addVar(lb=0), m.addVar(lb=0), m.addVar(lb=None)
    m.addCons(worth == shares[0] * bids[0] + shares[1] * bids[1])
    m.addCons(paid == part * worth)
    v = values[0, 0].tolist()
    m.addCons(utility == v[0] * shares[0] + v[1] * shares[1] - paid)
    m.setObjective(utility, "maximize")
    m.optimize()
    return m.getPrimalbound(), m.getDualbound()


def _relu(m: Any, score: Any, low: float, high: float) -> Any:
    low, high = min(low, 0.0), max(high, 0.0)
    out, on = m.addVar(lb=0, ub=float(high)), m.addVar(vtype="B")
    m.addCons(out >= score)
    m.addCons(out <= score - float(low) * (1 - on))
    m.addCons(out <= float(high) * on)
    return out


@pytest.mark.parametrize("hidden", [(8,), (16, 16)])
def test_scip_and_branch_and_bound_agree_on_the_bilinear_program(hidden):
    net, values = network("share", hidden=hidden, seed=2), draw_values(1, 1, 2, seed=3).double()
    found, proved = scip_utility(net, values, limit=60.0)
    honest, regret = honest_utility(net, values), certify_regret(net, values, tolerance=1e-6)
    assert proved - found < 1e-5
    assert found - honest > 1e-3
    assert float(regret.found[0, 0]) == pytest.approx(found - honest, abs=1e-5)
    assert float(regret.proved[0, 0]) == pytest.approx(proved - honest, abs=1e-5)
