"""What global Lipschitz constants prove: one forward pass for each input, whatever the budget.

If |(z_y - z_i)(x) - (z_y - z_i)(x')| <= K_yi ||x - x'|| for all inputs, class y stays ahead of i within

    r_i = (z_y - z_i)(x) / K_yi,

so min_i r_i is a certified radius. `gloro` has a constant for every pair of classes, `lipschitz` one for all of them.

Rounding. The constants hold for the network in real arithmetic; a model is run in floating point. Let E_yi(x) bound how
far the computed z_y - z_i is off at x: E_yi(x) = offset_yi + slope_yi ||x - centre||, from `Rounding`. The margin at x
as computed is at most E_yi(x) above the real one, the real one falls by at most eps K_yi on the way to x', and what
the model computes there is at most E_yi(x') <= E_yi(x) + slope_yi eps below the real one again. So

    m_yi = (z_y - z_i)(x) - eps (K_yi + slope_yi) - 2 E_yi(x) > 0

shows that the model as it is run returns y on the whole ball. It is linear in eps, hence the radius in closed form.
Inputs that fail only by rounding get a second look: E from the values that they have inside the network.
"""

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from holdfast.bounding.core.rounding import gamma, norm_above, unit
from holdfast.bounding.graph import ops
from holdfast.bounding.graph.agreement import check_plain
from holdfast.bounding.graph.ops import Graph, Node
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.lipschitz.constants import lipschitz_bound
from holdfast.certificates.core.logit_error import Rounding
from holdfast.certificates.core.proved_norms import cached_norm
from holdfast.results import CertifyResult
from holdfast.threats import L2

NORMS = ("l2",)
"""Threats that the constants are for."""
CHUNK = 256
"""Inputs of a second look at a time."""


@dataclass(frozen=True, eq=False)
class Constants:
    """What the certificates need to know of a model; all but the centre float64."""

    pairs: Tensor  # (K, K) proven Lipschitz constants K_yi of z_y - z_i
    offset: Tensor  # (K, K); the computed z_y - z_i is off by at most offset + slope ||x - centre||
    slope: Tensor
    centre: Tensor  # broadcasts against one input
    rounding: Rounding | None = None  # where these come from; None without rounding


@dataclass(frozen=True, eq=False)
class _Known:
    """Constants, and the model that they were computed for: its text, with the shape of its inputs, and its tensors."""

    text: str
    tensors: tuple[Tensor, ...]
    constants: Constants

    def holds(self, text: str, tensors: tuple[Tensor, ...]) -> bool:
        if self.text != text or len(self.tensors) != len(tensors):
            return False
        return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(self.tensors, tensors, strict=True))


_KNOWN: WeakKeyDictionary[nn.Module, dict[tuple[bool, bool], _Known]] = WeakKeyDictionary()


@torch.no_grad()
def lipschitz_constants(
    model: nn.Module, x: Tensor, threat: L2 | None = None, *, single: bool = False, sound: bool = True
) -> Constants:
    """The constants of a model for inputs like x (B, ...); computed once, and anew as soon as the model has changed.

    They are kept with a copy of all parameters and buffers, which is compared value by value: cheap beside a forward
    pass, and no change goes unseen, whether made by an optimiser, by `load_state_dict` or through `.data`. What a model
    keeps elsewhere, such as a plain number that its repr does not show, must not change.

    `single`: sqrt(2) times the constant of the map to all logits, for every pair. `sound`: with the rounding of the
    logits, else this is zero. `threat` says where the graph is compared with the model besides x.
    """
    check_plain(model)
    text = f"{x.dtype} {x.device} {tuple(x.shape[1:])} {model!r}"
    tensors = (*model.parameters(), *model.buffers())
    known, key = _KNOWN.setdefault(model, {}), (single, sound)
    if key not in known or not known[key].holds(text, tensors):
        graph = trace(model, x, threat)
        bound = lipschitz_bound(single_constant(graph) if single else graph, norm=cached_norm)
        if sound:
            rounding = Rounding(graph, bound, x.dtype)
            constants = Constants(bound.pairs, *rounding.everywhere(), rounding.centre, rounding)
        else:
            zero = torch.zeros_like(bound.pairs)
            constants = Constants(bound.pairs, zero, zero, x.new_zeros(()))
        known[key] = _Known(text, tuple(tensor.detach().clone() for tensor in tensors), constants)
    return known[key].constants


def single_constant(graph: Graph) -> Graph:
    """The network with a ReLU on its logits, which changes no constant but hides the last layer from the pairs.

    All that is known of z_y - z_i is then that it moves by at most sqrt(2) times as much as z.
    """
    relu = ops.Activation("relu", torch.relu)
    return Graph((*graph.nodes, Node(relu, (len(graph.nodes) - 1,), "logits", graph.nodes[-1].shape)))


def certify_logits(
    logits: Tensor,
    x: Tensor,
    y: Tensor,
    threat: L2,
    constants: Constants,
    name: str,
    *,
    sound: bool,
    pairs: Tensor | None = None,
) -> CertifyResult:
    """The certificate from the logits (B, K) that the model returned for x; see the top of this file.

    `pairs` (B, K), if given, are constants of z_y - z_i around each input, in place of the global ones.
    """
    z, k = logits.double(), constants.pairs[y] if pairs is None else pairs
    gap = z.gather(1, y[:, None]) - z
    reach, stretch, apart = threat.eps, 1.0, 0.0
    if sound:
        error, slope = constants.offset[y], constants.slope[y]
        distance = norm_above((x - constants.centre).flatten(1)) * (1 + gamma(x[0].numel(), x.dtype))
        gap = gap - 2 * (error + slope * distance[:, None])
        k = k + slope
        reach, stretch, apart = reaches(threat, x)
    gap = gap.scatter(1, y[:, None], torch.inf)
    margin = (gap - reach * k).amin(1).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    # Where K = 0 the margin is the same everywhere: 0/0 stands for a tie, which proves nothing.
    radius = (gap / k).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).amin(1)
    radius = ((radius - apart) / stretch).clamp(min=0)
    margin, radius = round_down(torch.stack([margin, radius]), x.dtype)
    certified = margin > 0
    return CertifyResult(certified, margin, radius, by=tuple(name if c else "" for c in certified.tolist()))


def round_down(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest number of that dtype that is not larger."""
    near = value.to(dtype)
    return torch.where(near.double() > value, torch.nextafter(near, torch.full_like(near, -torch.inf)), near)


def certify_by_constants(
    model: nn.Module, x: Tensor, y: Tensor, threat: L2, name: str, *, single: bool, sound: bool, logits: Tensor | None
) -> CertifyResult:
    """Certify with the constants of the model; `single` and `sound` as for `lipschitz_constants`."""
    constants = lipschitz_constants(model, x, threat, single=single, sound=sound)
    logits = model(x) if logits is None else logits
    result = certify_logits(logits, x, y, threat, constants, name, sound=sound)
    return second_look(result, logits, x, y, threat, constants, name) if sound else result


@torch.no_grad()
def second_look(
    result: CertifyResult, logits: Tensor, x: Tensor, y: Tensor, threat: L2, constants: Constants, name: str
) -> CertifyResult:
    """Prove some of the inputs that failed only by rounding, with the rounding around each of them."""
    assert constants.rounding is not None
    assert result.radius is not None
    left = (~result.certified).nonzero()[:, 0]
    if len(left) == 0:
        return result
    exact = certify_logits(logits[left], x[left], y[left], threat, constants, name, sound=False)
    left = left[exact.certified]
    if len(left) == 0:
        return result
    reach = reaches(threat, x)[0]
    off = torch.cat([constants.rounding.around(x[part], y[part], reach) for part in left.split(CHUNK)])
    z, rows = logits[left].double(), y[left, None]
    margin = z.gather(1, rows) - z - off - reach * constants.pairs[y[left]]
    margin = margin.scatter(1, rows, torch.inf).amin(1).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    margin = torch.maximum(round_down(margin, x.dtype), result.margin[left])
    proved, eps = margin > 0, round_down(torch.tensor(threat.eps, dtype=torch.float64, device=x.device), x.dtype)
    radius = torch.where(proved, result.radius[left].clamp(min=float(eps)), result.radius[left])
    by = list(result.by)
    for i in left[proved].tolist():
        by[i] = name
    margin, radius = result.margin.index_copy(0, left, margin), result.radius.index_copy(0, left, radius)
    return CertifyResult(result.certified.index_fill(0, left[proved], True), margin, radius, by=tuple(by))


def reaches(threat: L2, x: Tensor) -> tuple[float, float, float]:
    """How far an input can be that counts as inside the ball, as distances round: eps * stretch + apart, and both."""
    stretch = 1 + 64 * unit(x.dtype)
    apart = 4 * unit(x.dtype) * max(abs(threat.low), abs(threat.high)) * math.sqrt(x[0].numel())
    return threat.eps * stretch + apart, stretch, apart
