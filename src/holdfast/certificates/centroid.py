"""Certificates of centroid networks: what is proved for an input that is answered, and for one that is rejected.

The network answers j only if the features z satisfy ||z - c|| <= rho ||z - c'|| for a centroid c of class j and all c'
of other classes, rho = (1 - eta) / (1 + eta). For one pair of centroids, d apart, this is a ball of Apollonius (half of
the space for rho = 1), and the signed distance of z to its border, positive inside, is

    s_cc'(z) = g / (rho d + sqrt(rho^2 d^2 - (1 - rho^2) g)),    g = rho^2 ||z - c'||^2 - ||z - c||^2.

Class j owns the union over its c of the intersection over all c' of these balls. With

    depth_j(z) = max over c of min over c' of s_cc'(z),

z is at least depth_j away from leaving the region of j, and at least -depth_j from entering it. Features move at most K
times as far as the input, where K is a proven Lipschitz constant of the body. Hence

    the answer j stays within depth_j / K,
    an input that is answered j gets no other answer within the smallest -depth_i / K over i != j, and
    a rejected input is rejected within the smallest -depth_i / K over all i.

Balls of different classes are at least eta d apart. So two inputs that get different answers are at least eta d_min / K
apart, d_min the smallest distance of centroids of different classes (`separation`), and around every answered input the
nearest class stays the same within half of that. Wang ("On the feature alignment of deep vision models", thesis, 2023,
theorems 8 and 9) prints 1 + eta for eta, which is wrong: at eta = 0 nothing is rejected, and two classes meet.

Rounding. The computed features are off by at most E(x) = offset + slope ||x - centre||, so the features of two inputs,
eps apart, are at most eps (K + slope) + 2 E(x) apart. Distances are computed up to a factor 1 +- w, for which the rule
with rho (1 - w) or rho (1 + w) in place of rho accounts. The rest is done in float64, rounded to the safe side.
"""

import math
from collections import OrderedDict
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from holdfast.bounding.core.rounding import gamma, norm_above, unit
from holdfast.certificates.core.lipschitz_margins import NORMS, Constants, lipschitz_constants, reaches, round_down
from holdfast.errors import InputError, UnsupportedError
from holdfast.models.zoo.centroid import Centroid, CentroidNet
from holdfast.registry import Certificate
from holdfast.results import CertifyResult
from holdfast.threats import L2

SAFE = 1 + 1e-12
"""For the float64 arithmetic of constants."""


def border(own: Tensor, other: Tensor, apart: Tensor, ratio: float, *, slack: float = 0.0) -> Tensor:
    """s_cc' from ||z - c||, ||z - c'|| and d, which broadcast; see the top of this file.

    `slack` is the relative error of the distances that is allowed for: a lower bound if > 0, an upper bound if < 0.
    """
    # s grows with ||z - c'|| and falls with ||z - c||; its size falls with d.
    g = (ratio * (1 - slack) * other).square() - ((1 + slack) * own).square()
    wide = 1 + slack * g.sign()
    d = ratio * apart * wide
    square = d.square() - (1 - ratio**2) * g + (wide - 1) * (d.square() + g.abs())
    return g / ((d + square.clamp(min=torch.finfo(g.dtype).tiny).sqrt()) * wide)


@torch.no_grad()
def depths(head: Centroid, features: Tensor, ratio: float, *, slack: float = 0.0) -> Tensor:
    """depth_j of features (B, F) for each class, (B, K) float64; memory grows with the square of the centroids."""
    classes, per_class, _ = head.weight.shape
    c = head.weight.double().flatten(0, 1)
    distance = torch.linalg.vector_norm(features.double()[:, None] - c, dim=2)
    s = border(distance[:, :, None], distance[:, None], _distances(c), ratio, slack=slack)
    s = s.nan_to_num(0.0).view(-1, classes, per_class, classes, per_class)  # 0/0: two centroids in one place
    same = torch.eye(classes, dtype=torch.bool, device=s.device).view(classes, 1, classes, 1)
    return s.masked_fill(same, torch.inf).amin((3, 4)).amax(2)


@torch.no_grad()
def separation(net: CentroidNet, x: Tensor, *, low: float = 0.0, high: float = 1.0, sound: bool = True) -> float:
    """eta d_min / K: two valid inputs that get different answers are at least this far apart in l2.

    A property of the network, in the valid range [low, high], for inputs of the shape and dtype of x (B, ...); the
    certificate proves at least as much for each input.
    """
    net = _centroid_net(net)
    if net.eta is None:
        raise InputError("a network without rejection separates nothing; set eta with models.centroid.with_rejection")
    constants = _constants(net, x, sound=sound)
    ratio, error = net.ratio, 0.0
    if sound:
        ratio = min(1.0, ratio * (1 + _wobble(net, x)))
        farthest = torch.maximum((low - constants.centre).abs(), (high - constants.centre).abs()).double()
        reach = float(torch.linalg.vector_norm(farthest.expand(x.shape[1:])))
        error = float(constants.offset.max()) + float(constants.slope.max()) * reach
    c = net.head.weight.double()
    classes = torch.arange(net.classes, device=c.device).repeat_interleave(c.shape[1])
    nearest = float(_distances(c.flatten(0, 1))[classes[:, None] != classes].min())
    gap = (1 - ratio) / (1 + ratio) * nearest / SAFE - 2 * error / math.sqrt(2)
    return max(0.0, gap / (_constant(constants) * SAFE))


@Certificate(
    "centroid",
    summary="centroid networks: distance of the features to where the answer changes, over a Lipschitz constant",
    threats=NORMS,
    reference="Wang, On the feature alignment of deep vision models (thesis), 2023",
    own_margin=True,
    needs="centroid",
    module=CentroidNet,
)
def centroid(
    model: nn.Module, x: Tensor, y: Tensor, threat: L2, *, may_reject: bool = False, sound: bool = True
) -> CertifyResult:
    """Certified if the features stay where the answer is y; with rejection, y = K stands for "I don't know".

    With `may_reject` an answer may turn into a rejection, though not into another answer: proves larger radii. The
    model is a `CentroidNet` whose body has a Lipschitz constant.

    Returns:
        With `radius` (B,), the largest one that is proved; `margin` is in units of the features: what is left of the
        distance to where the answer would change.
    """
    net = _centroid_net(model)
    constants = _constants(net, x, sound=sound)
    features = net.body(x)
    wobble, slack = (_wobble(net, x), 16 * gamma(features.shape[1], torch.float64)) if sound else (0.0, 0.0)
    outside = -depths(net.head, features, net.ratio * (1 + wobble), slack=-slack)
    own = torch.nn.functional.one_hot(y, net.classes + 1)[:, : net.classes].bool()
    room = outside.masked_fill(own, torch.inf).amin(1)
    if net.eta is not None and not may_reject:
        inside = depths(net.head, features, net.ratio * (1 - wobble), slack=slack)
        room = torch.where(y < net.classes, inside.gather(1, y[:, None].clamp(max=net.classes - 1))[:, 0], room)
    return _result(net.answer(features).argmax(1) == y, room, x, threat, constants, sound=sound)


def _result(right: Tensor, room: Tensor, x: Tensor, threat: L2, constants: Constants, *, sound: bool) -> CertifyResult:
    """From the distance `room` (B,) that the features are free to move to the certificate; `right`: answered y."""
    reach, stretch, apart, fixed, speed = threat.eps, 1.0, 0.0, room.new_zeros(()), _constant(constants)
    if sound:
        u = unit(x.dtype)
        slope = float(constants.slope.max()) / math.sqrt(2)
        distance = norm_above((x - constants.centre).flatten(1)) * (1 + gamma(x[0].numel(), x.dtype))
        # Distances below the last term may lose all digits to underflow.
        fixed = 2 * (float(constants.offset.max()) / math.sqrt(2) + slope * distance) * SAFE
        fixed = fixed + 64 * math.sqrt(torch.finfo(x.dtype).tiny / u)
        speed = (speed + slope) * SAFE
        reach, stretch, apart = reaches(threat, x)
    margin = (room - reach * speed - fixed).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    margin = torch.where(right, margin, margin.clamp(max=0))
    radius = (((room - fixed) / speed - apart) / stretch).nan_to_num(0.0, posinf=torch.inf).clamp(min=0)
    radius = torch.where(right, radius, torch.zeros_like(radius))
    margin, radius = round_down(torch.stack([margin, radius]), x.dtype)
    certified = margin > 0
    return CertifyResult(certified, margin, radius, by=tuple("centroid" if c else "" for c in certified.tolist()))


def _centroid_net(model: nn.Module) -> CentroidNet:
    if not isinstance(model, CentroidNet):
        raise UnsupportedError(
            f"the certificate 'centroid' needs a holdfast.models.CentroidNet, got {type(model).__name__}. Put "
            "layers in front of one, such as a normalisation, into its body; for other networks use 'gloro' or 'auto'."
        )
    return model


_BODIES: WeakKeyDictionary[CentroidNet, nn.Sequential] = WeakKeyDictionary()


def _constants(net: CentroidNet, x: Tensor, *, sound: bool) -> Constants:
    """sqrt(2) times the constants of all features together, (F, F) each.

    They are computed for the body with a ReLU behind it. This changes no constant, but hides the last layer, with which
    differences of single features would get smaller ones.
    """
    hidden = _BODIES.get(net)
    if hidden is None or hidden.body is not net.body:
        hidden = _BODIES[net] = nn.Sequential(OrderedDict(body=net.body, end=nn.ReLU()))
    return lipschitz_constants(hidden, x, sound=sound)


def _constant(constants: Constants) -> float:
    """The Lipschitz constant of the features."""
    return float(constants.pairs.max()) / math.sqrt(2) * SAFE


def _distances(c: Tensor) -> Tensor:
    """Of all pairs of centroids, (C, F) -> (C, C), without the cancellation of |a|^2 - 2 a b + |b|^2."""
    return torch.cdist(c, c, compute_mode="donot_use_mm_for_euclid_dist")


def _wobble(net: CentroidNet, x: Tensor) -> float:
    """How far d_1 / d_2, as the network computes it and compares it with rho, may be off, relatively."""
    return 4 * gamma(net.head.weight.shape[2], x.dtype)
