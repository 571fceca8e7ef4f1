"""Guided patch training: a second network learns where the margins are small, and proposes the places to bound."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.optim.adam import adam

from holdfast.bounding.graph.trace import trace_batch
from holdfast.models.zoo.unet import UNet
from holdfast.random import Noise
from holdfast.registry import Objective
from holdfast.training.context import Context, Metrics
from holdfast.training.objectives.core.certified import margin_metrics
from holdfast.training.objectives.patch import need_patch, place_margins
from holdfast.utils.options import Count, Positive

WEIGHT, MEAN, SQUARE, STEPS = "proposal.weight.", "proposal.mean.", "proposal.square.", "proposal.steps"
"""Keys of the state: weights and batch statistics of the second network, moments and steps of its optimiser."""


@Objective(
    "patch-guided",
    summary="interval bounds for a patch at places that a second network proposes, some for each class",
    reference="Chiang et al., Certified defenses for adversarial patches, 2020",
    threats=("patch",),
    certificate="patch",
    ramps=True,
)
def patch_guided(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Context,
    *,
    per_class: Count = 1,  # places for each class; K times as many are bounded for each input
    temperature: Positive = 1.0,  # inverse one, T: how strictly the draw follows the prediction
    width: Count = 10,  # channels of the first level of the U-Net
    rate: Positive = 1.0,  # learning rate of the U-Net, as a multiple of the model's
) -> tuple[Tensor, Metrics]:
    """Mean of CE(-m, y), where m_j is the least lower bound of z_y - z_j over the places that were proposed.

    A U-Net predicts all margins at all places. For each class j, places are drawn from softmax(-temperature * predicted
    margin of j). The U-Net learns by squared error from the margins at these places, with Adam. If the model does not
    train with Adam, choose `rate`: rates of SGD and Muon are some twenty times larger, and at those the U-Net dies. It
    lives in the state of the run; under several processes each has one of its own.

    Departs from the paper's text, which draws from the softmax of the margins: small margins are the dangerous ones.
    """
    threat = need_patch(context.threat, x)
    graph, logits = trace_batch(model, x)
    corners = threat.locations(tuple(x.shape[1:])).to(x.device)
    grid = (x.shape[2] - threat.height + 1, x.shape[3] - threat.width + 1)
    weights = proposal_weights(context, x, logits.shape[1], width)
    predicted = predict(weights, x, logits.shape[1], width)[:, :, : grid[0], : grid[1]].flatten(2)
    places = draw_places(predicted, context.noise, per_class=per_class, temperature=temperature)
    reach = context.ramp * (threat.high - threat.low)
    margins = place_margins(graph, x, y, threat, corners[places][:, :, None], reach)
    error = squared_error(predicted, places, margins)
    learn(context, weights, error, rate)
    worst = margins.amin(1)
    return cross_entropy(-worst, y), {**margin_metrics(logits, worst, y), "proposal_error": error.detach()}


def draw_places(predicted: Tensor, noise: Noise, *, per_class: int, temperature: float) -> Tensor:
    """Different places for each class from softmax(-temperature * predicted), (B, K, L) -> (B, K * per_class).

    The largest values of log-probability plus Gumbel noise are a draw without replacement.
    """
    gumbel = -(-noise.uniform(predicted.shape[1:], predicted.dtype).log()).log()
    score = gumbel - temperature * predicted.detach()
    return score.topk(min(per_class, score.shape[2]), dim=2).indices.flatten(1)


def squared_error(predicted: Tensor, places: Tensor, margins: Tensor) -> Tensor:
    """Mean of (predicted - margin)^2 over the places (B, P) and all classes; predicted (B, K, L), margins (B, P, K)."""
    at = predicted.gather(2, places[:, None].expand(-1, predicted.shape[1], -1))
    return (at - margins.detach().transpose(1, 2)).square().mean()


def proposal_weights(context: Context, x: Tensor, classes: int, width: int) -> dict[str, Tensor]:
    """Weights and batch statistics of the U-Net, which share memory with the state; drawn by the seed at first."""
    state = context.state
    if STEPS not in state:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(context.noise.seed)
            fresh = UNet(x.shape[1], classes, width=width).to(x.device, x.dtype)
        state |= {WEIGHT + name: value for name, value in fresh.state_dict().items()}
        for name, value in fresh.named_parameters():
            state |= {MEAN + name: torch.zeros_like(value.data), SQUARE + name: torch.zeros_like(value.data)}
        state[STEPS] = torch.zeros((), device=x.device)
    weights = {key.removeprefix(WEIGHT): value.detach() for key, value in state.items() if key.startswith(WEIGHT)}
    return {name: value.requires_grad_(MEAN + name in state) for name, value in weights.items()}


def predict(weights: dict[str, Tensor], x: Tensor, classes: int, width: int) -> Tensor:
    """The margins that the U-Net expects for a patch with its corner at each pixel, (B, K, H, W)."""
    with torch.device("meta"):
        network = UNet(x.shape[1], classes, width=width)
    network.train(len(x) > 1)  # one input has no variance where the maps have one pixel
    out: Tensor = functional_call(network, weights, (x,))
    return out


@torch.no_grad()
def learn(context: Context, weights: dict[str, Tensor], error: Tensor, rate: float = 1.0) -> None:
    """One step of Adam on the U-Net at `rate` times the learning rate of the model, in the memory of the state."""
    state = context.state
    moved = [name for name, value in weights.items() if value.requires_grad]
    gradients = list(torch.autograd.grad(error, [weights[name] for name in moved]))
    at, mean, square = ([state[key + name] for name in moved] for key in (WEIGHT, MEAN, SQUARE))
    steps = [state[STEPS].clone() for _ in moved]
    lr = rate * context.optimizer.param_groups[0]["lr"]
    how: dict[str, Any] = {"lr": lr, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    adam(at, gradients, mean, square, [], steps, amsgrad=False, weight_decay=0.0, maximize=False, **how)
    state[STEPS] += 1
