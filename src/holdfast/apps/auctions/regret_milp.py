"""Exact regret of a mechanism with direct payments, as a mixed-integer program.

Without the product of payment and bids a mechanism is piecewise linear. ReLUs are encoded as for `milp`; sparsemax by
its optimality conditions: with tau the threshold of an item and M its largest distance to a score,

    z - x - mu + tau = 0,  sum z = 1,  0 <= z <= s,  0 <= mu <= M (1 - s),  s in {0, 1}.

The clipped payment q is only ever too large for the liar, so q >= 0 and "q >= t or q >= top" are enough.
HiGHS works to tolerances: its bound is raised by `SLACK`, which is no proof. `certify_regret` proves; this program is
exact up to the tolerances, and checks it.
"""

import time

import numpy as np
import torch
from scipy import optimize, sparse
from torch import Tensor, nn

from holdfast.apps.auctions.auction_net import AuctionNet
from holdfast.apps.auctions.mechanism import check_bids, check_outcome, lying_utility, utility, with_bids
from holdfast.apps.auctions.misreport import tile
from holdfast.apps.auctions.regret import Regret, check_network
from holdfast.bounding.core.region import Region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import relaxation as linear
from holdfast.certificates.complete.milp_model import Floats, Indices, Program, Rows, program, skeleton
from holdfast.errors import UnsupportedError
from holdfast.utils.options import Positive

SLACK = 1e-5
"""Added to the solver's bound for its tolerances, in parts of the largest value if that is above 1."""


@torch.no_grad()
def milp_regret(mechanism: AuctionNet, values: Tensor, *, timeout: Positive = 60.0) -> Regret:
    """Regret of every bidder in every profile by one program each, in float64.

    Args:
        mechanism: with payment="direct", in evaluation mode.
        values: true values, (B, n, k).
        timeout: seconds for each program.
    """
    if mechanism.payment != "direct":
        raise UnsupportedError(
            "payments that are a share of the bids make the program bilinear; use certify_regret, which bounds them"
        )
    check_network(mechanism)
    check_bids(mechanism, values, "values")
    check_outcome(mechanism, values)
    begin = time.process_time()
    network = AuctionNet(
        mechanism.bidders, mechanism.items, hidden=_hidden(mechanism), payment="direct", support=mechanism.support
    )
    network.load_state_dict(mechanism.state_dict())
    network = network.double().eval()
    tiled, bidder = tile(values.double())
    honest = utility(network(tiled), tiled).gather(1, bidder[:, None])[:, 0]
    found, bids = [], []
    for profile, liar in zip(tiled.split(1), bidder.split(1), strict=True):
        bound, lie = _one(network, profile, liar, timeout)
        found.append(bound)
        bids.append(lie)
    lies = torch.stack(bids)
    gained = torch.maximum(lying_utility(network, tiled, bidder, lies), honest)
    shape = values.shape[:2]
    slack = SLACK * max(1.0, mechanism.support.high)
    upper = torch.maximum(torch.tensor(found, dtype=torch.float64) + slack, gained)
    return Regret(
        (gained - honest).view(shape),
        (upper - honest).view(shape),
        lies.view(values.shape),
        len(tiled),
        time.process_time() - begin,
    )


def _hidden(mechanism: AuctionNet) -> tuple[int, ...]:
    return tuple(layer.out_features for layer in list(mechanism.scores)[:-1] if isinstance(layer, nn.Linear))


def _one(network: AuctionNet, profile: Tensor, bidder: Tensor, timeout: float) -> tuple[float, Tensor]:
    """Upper bound of the liar's utility, and its best bids (k,), for one profile (1, n, k)."""
    free = torch.full((1, network.items), network.support.low, dtype=profile.dtype)
    low = with_bids(profile, bidder, free).flatten(1)
    high = with_bids(profile, bidder, torch.full_like(free, network.support.high)).flatten(1)
    graph = trace(network.scores, high)
    relaxed = linear.relaxation(graph, Region(low, high, low), slopes="adaptive", hidden=True, sound=True)
    ends = [(a[0].numpy(), b[0].numpy()) for a, b in (*relaxed.intervals[:-1], linear.output_bounds(relaxed))]
    base = skeleton(graph)
    task = program(base, ends)
    rows, objective, binary, ceiling = _auction(network, base.columns[-1], ends[-1], profile, int(bidder), task)
    extra = rows.columns - len(task.floor)
    matrix = task.matrix.copy()
    matrix.resize(matrix.shape[0], rows.columns)
    answer = optimize.milp(
        -np.concatenate([np.zeros(len(task.floor)), objective]),
        constraints=optimize.LinearConstraint(
            sparse.vstack([matrix, rows.matrix()], format="csc"),
            np.concatenate([task.lower, *rows.lower]),
            np.concatenate([task.upper, *rows.upper]),
        ),
        bounds=optimize.Bounds(
            np.concatenate([task.floor, np.full(extra, -np.inf)]), np.concatenate([task.ceiling, ceiling])
        ),
        integrality=np.concatenate([task.integer, binary]),
        options={"time_limit": timeout, "mip_rel_gap": 0.0},
    )
    at = range(int(bidder) * network.items, (int(bidder) + 1) * network.items)
    bids = profile[0, int(bidder)] if answer.x is None else torch.from_numpy(answer.x[base.columns[0][list(at)]])
    bound = np.inf if answer.mip_dual_bound is None else -float(answer.mip_dual_bound)
    limits = network.support.low, network.support.high
    return min(bound, network.items * network.support.high), bids.clamp(*limits)


def _auction(
    network: AuctionNet,
    scores: Indices,
    ends: tuple[Floats, Floats],
    profile: Tensor,
    bidder: int,
    task: Program,
) -> tuple[Rows, Floats, Floats, Floats]:
    """Rows of sparsemax and payment; objective, integrality and upper bounds of the columns that they add."""
    n, k = network.bidders, network.items
    rows = Rows(len(task.floor))
    x = scores[: (n + 1) * k].reshape(k, n + 1)
    low, high = (end[: (n + 1) * k].reshape(k, n + 1) for end in ends)
    z, mu, s = (rows.new_columns(x.size).reshape(x.shape) for _ in range(3))
    tau, (q, c) = rows.new_columns(k), rows.new_columns(2)
    most = np.maximum(0.0, high.max(1, keepdims=True) - 1 / (n + 1) - low) + 1e-9
    flat = [part.ravel() for part in (z, x, mu, s, np.broadcast_to(tau[:, None], x.shape))]
    rows.add((flat[0], 1.0), (flat[1], -1.0), (flat[2], -1.0), (flat[4], 1.0), lower=0.0, upper=0.0)
    rows.add((flat[0], 1.0), (flat[3], -1.0), lower=-np.inf, upper=0.0)
    rows.add((flat[2], 1.0), (flat[3], most.ravel()), lower=-np.inf, upper=most.ravel())
    rows.add(*((z[:, r], 1.0) for r in range(n + 1)), lower=1.0, upper=1.0)
    pay, top = scores[(n + 1) * k + bidder], k * network.support.high
    reach = max(0.0, float(ends[1][(n + 1) * k + bidder]))
    one = np.array([q])
    rows.add((one, 1.0), (np.array([pay]), -1.0), (np.array([c]), reach), lower=0.0, upper=np.inf)
    rows.add((one, 1.0), (np.array([c]), -top), lower=0.0, upper=np.inf)
    rows.add((np.concatenate([z.ravel(), mu.ravel(), one]), 1.0), lower=0.0, upper=np.inf)
    first = len(task.floor)
    objective, binary = np.zeros(rows.columns - first), np.zeros(rows.columns - first)
    objective[z[:, bidder] - first] = profile[0, bidder].numpy()
    objective[q - first] = -1.0
    binary[s.ravel() - first] = binary[c - first] = 1.0
    return rows, objective, binary, np.where(binary > 0, 1.0, np.inf)
