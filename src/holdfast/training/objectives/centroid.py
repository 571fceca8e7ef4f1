"""Training of centroid networks: the right centroid must be nearest on the whole ball, and near enough for an answer.

With c the centroid of the right class y that is nearest to the features z, s_cc'(z) the distance from z to the border
beyond which c' keeps the network from answering with c (the one that the certificate takes), and K an estimate of the
Lipschitz constant of the body, with gradients,

    loss = CE(-scale [m, a], y),    m_y = 0,
    m_j = min over the centroids c' of class j of s_cc'(z) / K - eps, without rejection,
    a = min over the centroids c' of all classes but y of s_cc'(z) / K, with rejection at eta.

m_j > 0 proves that y beats j on the ball; a > 0 says that x itself is answered: rejection is one more class, which is
never right. An attack may turn an answer into a rejection, though not into another answer. All is in units of the
input, so that the scale of the features drops out.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from holdfast.certificates.centroid import border
from holdfast.certificates.core.lipschitz_margins import NORMS
from holdfast.errors import UnsupportedError
from holdfast.models.zoo.centroid import Centroid, CentroidNet
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.certified import margin_metrics
from holdfast.training.objectives.core.lipschitz import estimated
from holdfast.utils.options import Count, Positive, Unit


def margins(head: Centroid, features: Tensor, y: Tensor, eta: float) -> Tensor:
    """min over c' of s_cc' for each class, (B, K), zero for y itself; from features (B, F) and labels (B,)."""
    distance = head.distances(features)
    own, nearest = distance[torch.arange(len(y), device=y.device), y].min(1)
    apart = torch.linalg.vector_norm(head.weight[y, nearest][:, None, None] - head.weight, dim=3)
    # Some distances within the class are zero; ones in their place keep the gradients finite.
    same = one_hot(y, distance.shape[1]).bool()[..., None]
    ratio = (1 - eta) / (1 + eta)
    s = border(own[:, None, None], distance.masked_fill(same, 1.0), apart.masked_fill(same, 1.0), ratio)
    return s.masked_fill(same, 0.0).amin(2)


@Objective(
    "centroid",
    summary="centroid networks: the right centroid nearest on the whole ball, by a Lipschitz constant, with rejection",
    reference="Wang, On the feature alignment of deep vision models (thesis), 2023; the loss is Holdfast's own",
    threats=NORMS,
    certificate="centroid",
)
def centroid(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    eta: Unit = 0.1,  # the rejection that is trained for; another one, smaller as a rule, can be set afterwards
    scale: Positive = 8.0,  # how sharply distances count, per unit of the input
    steps: Count = 5,  # power iterations for each batch
) -> tuple[Tensor, Metrics]:
    """See the top of this file. The history has "answered", the share that is right and not rejected at `eta`."""
    if not isinstance(model, CentroidNet):
        raise UnsupportedError(
            f"the objective 'centroid' trains a holdfast.models.CentroidNet, got {type(model).__name__}; name "
            "the architecture 'centroid' in the recipe, with this one as its body"
        )
    # Behind one more layer, the constant covers all features together.
    bound, features = estimated(model.body, x, context, steps, single=True)
    own = one_hot(y, model.classes).bool()
    m = margins(model.head, features, y, 0.0) / bound.body - context.threat.budget * (~own).to(features)
    a = margins(model.head, features, y, eta).masked_fill(own, torch.inf).amin(1, keepdim=True) / bound.body
    metrics = margin_metrics(model.head(features.detach()), m, y)
    shown = {"answered": (a > 0).to(a.dtype).mean(), "lipschitz": bound.body.detach()}
    return cross_entropy(-scale * torch.cat([m, a], 1), y), {**metrics, **shown}
