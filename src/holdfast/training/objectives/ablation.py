"""Training for classifiers that see a part of the image only: the loss is taken at a random part of each input."""

from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast.certificates.smoothing.ablation import ablate, random_pixels, windows
from holdfast.errors import InputError
from holdfast.random import Noise
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.utils.options import Count

Part = Literal["column", "row", "block", "pixels"]


def ablated_view(x: Tensor, noise: Noise, *, part: Part, size: int, null: float) -> Tensor:
    """x with all ablated but a random part of each input, shape of x; for the options see `ablation`."""
    if part == "pixels":
        return ablate(x, random_pixels(x, size, noise), null)
    if x.ndim != 4:
        raise InputError(
            f"objective.part: a {part} is part of images (B, C, H, W), got inputs of shape {tuple(x.shape)}"
        )
    rows, columns = (axis.to(x.device) for axis in windows(part, size, x.shape[2], x.shape[3]))
    row, column = rows[noise.fork(0).integers(len(rows))], columns[noise.fork(1).integers(len(columns))]
    return ablate(x, (row[:, :, None] & column[:, None, :])[:, None], null)


@Objective(
    "ablation",
    summary="smoothed classifiers: cross-entropy at a random band, block or set of pixels of each input",
    reference="Levine and Feizi, (De)randomized smoothing for certifiable defense against patch attacks, 2020; "
    "Robustness certificates for sparse adversarial attacks by randomized ablation, 2020",
    view=ablated_view,
)
def ablation(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    part: Part = "column",
    size: Count = 4,  # width of the column, height of the row, side of the block, or number of pixels
    null: float = 0.5,  # the value of what is ablated
) -> tuple[Tensor, Metrics]:
    """Mean of CE(z(x ablated), y), what is kept drawn anew for each input in each step.

    The network sees a "column", a "row" or a "block" for the certificate `smoothing-patch`, "pixels" for
    `smoothing-l0`.
    """
    logits = model(ablated_view(x, context.noise, part=part, size=size, null=null))
    return cross_entropy(logits, y), {"accuracy": (logits.argmax(1) == y).to(logits.dtype).mean()}
