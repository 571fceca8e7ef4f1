"""MTL-IBP: training on a mixture of the adversarial loss and its interval bound, an easier task as that of `sabr`."""

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.bounding.core.region import BALLS
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.certified import certified_loss, margin_metrics, with_penalties
from holdfast.training.schedules import with_budget
from holdfast.training.step import attacked
from holdfast.utils.options import Positive, Unit


@Objective(
    "mtl-ibp",
    summary="certified training on a mixture of the adversarial loss and its interval bound",
    reference="De Palma et al., Expressive losses for verified robustness via convex combinations, 2024",
    threats=BALLS,
    takes=("attack", "regularizers"),
    certificate="crown-ibp",
    bound="ibp",
    bounded=True,
)
def mtl_ibp(
    model: nn.Module, x: Tensor, y: Tensor, context: Context, *, alpha: Unit = 0.1, bound_budget: Positive = 1.0
) -> tuple[Tensor, Metrics]:
    """(1 - alpha) CE(z(x'), y) + alpha CE(-m, y), m by intervals over the whole threat set.

    alpha = 1 is `ibp`, 0 is adversarial training; small values need tight certificates. `bound_budget` is in units of
    the attack's budget (the paper attacks a larger set at small budgets).
    """
    threat = context.threat
    robust, logits, margins, relaxed = certified_loss(model, x, y, with_budget(threat, bound_budget), use_logits=False)
    adversarial = robust
    if threat.budget > 0 and alpha < 1:
        adversarial = cross_entropy(model(attacked(model, x, y, context)), y, reduction="none")
    loss, figures = with_penalties(alpha * robust + (1 - alpha) * adversarial, model, x, y, logits, relaxed, context)
    figures |= {"robust_loss": robust.detach().mean(), "adversarial_loss": adversarial.detach().mean()}
    return loss, {**margin_metrics(logits, margins, y), **figures}
