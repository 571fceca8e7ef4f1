"""RSE: plain training under the noise that the network adds to its own activations."""

from torch import Tensor, nn

from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.step import cross_entropy_family, robust_step


@Objective(
    "rse",
    summary="cross-entropy on the inputs under the noise of the network itself; for the model 'rse'",
    reference="Liu et al., Towards robust neural networks via random self-ensemble, 2018",
    takes=("regularizers",),
    random=True,
)
def rse(model: nn.Module, x: Tensor, y: Tensor, context: Context) -> tuple[Tensor, Metrics]:
    """Mean of CE(f(x), y) for one draw of the noise; a regulariser of gradients looks at the clean input too."""
    return robust_step(model, x, y, context, cross_entropy_family("none"))
