"""Attributions that Captum has: DeepLIFT, LRP, occlusion and sampled Shapley values, behind the same call."""

import copy
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.attacks.core.chance import seeded
from holdfast.errors import InputError, UnsupportedError
from holdfast.explanations.core.baselines import Baseline, make_baseline, name_of
from holdfast.explanations.core.paths import completeness_error
from holdfast.explanations.core.quantity import Setting, value, values_at
from holdfast.explanations.saliency import describe
from holdfast.models.layers import Normalize
from holdfast.registry import Explainer, register
from holdfast.results import Explanation


def _captum() -> Any:
    try:
        return importlib.import_module("captum.attr")
    except ImportError as error:
        raise UnsupportedError(
            f"this method comes from Captum, which cannot be imported ({error}). Install it with: pip install captum"
        ) from error


def _in_chunks(x: Tensor, b: Tensor, y: Tensor, setting: Setting, one: Callable[..., Tensor]) -> Tensor:
    """`one(x, b, y)` on parts of the batch; what Captum cannot do becomes an error that says so."""
    rows = torch.arange(len(x), device=x.device).split(setting.chunk)
    try:
        with warnings.catch_warnings(), seeded(setting.noise.seed, x.device), torch.enable_grad():
            warnings.simplefilter(
                "ignore"
            )  # Captum announces the hooks that it sets, and removes, on a copy of the model
            return torch.cat([one(x[r], b[r], y[r]).detach() for r in rows])
    except (RuntimeError, TypeError, AssertionError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedError(f"Captum cannot explain this model by this method: {reason}") from error


def _answer(
    model: nn.Module,
    x: Tensor,
    b: Tensor,
    y: Tensor,
    setting: Setting,
    attribution: Tensor,
    how: str,
    passes: int,
    *,
    complete: bool,
) -> Explanation:
    total = attribution.flatten(1).sum(1)
    error = completeness_error(total, values_at(model, x, y, setting), values_at(model, b, y, setting))
    ok = torch.isfinite(attribution).flatten(1).all(1)
    error = error if complete else torch.full_like(error, torch.nan)
    return Explanation(attribution, ok, error, torch.full_like(y, passes), describe(y, setting, how))


def _logit_alone(setting: Setting, name: str) -> None:
    if setting.quantity != "logit":
        raise UnsupportedError(f"'{name}' explains the logit, not the {setting.quantity}; leave out quantity=")


@register(
    Explainer(
        "deeplift",
        summary="differences from a baseline passed back through each layer; through Captum",
        reference="Shrikumar, Greenside and Kundaje, Learning important features through propagating activation "
        "differences, 2017",
    )
)
def deeplift(
    model: nn.Module, x: Tensor, y: Tensor, setting: Setting, *, baseline: Baseline | Tensor = "black"
) -> Explanation:
    """A(x) by the rescale rule: each nonlinearity passes back the ratio of its change to that of its input.

    The values add up to z_y(x) - z_y(b), in one backward pass. Two networks that compute the same function may get
    different answers.

    Args:
        baseline: as for `integrated-gradients`.
    """
    _logit_alone(setting, "deeplift")
    tool, b = _captum().DeepLift(copy.deepcopy(model)), make_baseline(baseline, x, setting)
    attribution = _in_chunks(x, b, y, setting, lambda x, b, y: tool.attribute(x, b, target=y))
    how = f"changes from {name_of(baseline)}"
    return _answer(model, x, b, y, setting, attribution, how, 1, complete=True)


@register(
    Explainer(
        "lrp",
        summary="relevance passed back layer by layer; through Captum",
        reference="Bach et al., On pixel-wise explanations for non-linear classifier decisions by layer-wise relevance "
        "propagation, 2015",
    )
)
def lrp(model: nn.Module, x: Tensor, y: Tensor, setting: Setting) -> Explanation:
    """A(x) by Captum's default rule, epsilon, for each layer.

    Biases keep a share of the relevance, so the values need not add up to anything.
    """
    _logit_alone(setting, "lrp")
    attr, network = _captum(), copy.deepcopy(model)
    for module in network.modules():
        # Layers that only reshape or normalise have no rule in Captum; epsilon passes all relevance through them.
        if isinstance(module, nn.Flatten | nn.Unflatten | nn.Identity | Normalize):
            module.rule = importlib.import_module("captum.attr._utils.lrp_rules").EpsilonRule()
    tool = attr.LRP(network)
    attribution = _in_chunks(x, x, y, setting, lambda x, b, y: tool.attribute(x.requires_grad_(), target=y))
    return _answer(model, x, x, y, setting, attribution, "relevance", 1, complete=False)


@register(
    Explainer(
        "occlusion",
        summary="how far the answer falls when a window is blotted out; without gradients; through Captum",
        reference="Zeiler and Fergus, Visualizing and understanding convolutional networks, 2014",
    )
)
def occlusion(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    setting: Setting,
    *,
    window: int = 4,
    stride: int | None = None,
    baseline: Baseline | Tensor = "black",
) -> Explanation:
    """A(x)_j = mean of f_y(x) - f_y(x with the window replaced) over the windows that hold j.

    Args:
        window: side of the square, in pixels, over all channels; of inputs that are not images, the number of values.
        stride: distance of two windows; the window itself if none is given.
        baseline: what fills the window, as for `integrated-gradients`.
    """
    step = window if stride is None else stride
    if not 1 <= step <= window:
        raise InputError(f"occlusion needs 1 <= stride <= window, got {step} and {window}")
    b, of = make_baseline(baseline, x, setting), value(setting.quantity)
    sides = [min(window, side) for side in x.shape[1:]]
    steps = [min(step, side) for side in sides]
    if x.ndim == 4:
        sides[0] = steps[0] = x.shape[1]

    def one(x: Tensor, b: Tensor, y: Tensor) -> Tensor:
        tool = _captum().Occlusion(lambda points: of(model(points), y.repeat(len(points) // len(y))))
        result: Tensor = tool.attribute(x, tuple(sides), strides=tuple(steps), baselines=b)
        return result

    with torch.no_grad():
        attribution = _in_chunks(x, b, y, setting, one)
    windows = 1
    for side, size, move in zip(x.shape[1:], sides, steps, strict=True):
        windows *= -(-(side - size) // move) + 1
    return _answer(model, x, b, y, setting, attribution, f"windows of {window} filled with {name_of(baseline)}",
                   windows + 1, complete=False)  # fmt: skip


@register(
    Explainer(
        "shapley-sampling",
        summary="mean effect of each value over random orders; without gradients; through Captum",
        reference="Castro, Gomez and Tejada, Polynomial calculation of the Shapley value based on sampling, 2009",
    )
)
def shapley_sampling(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    setting: Setting,
    *,
    samples: int = 25,
    cell: int = 1,
    baseline: Baseline | Tensor = "black",
) -> Explanation:
    """A(x)_j = mean over random orders of what f_y gains when j joins the values before it; the rest is at baseline.

    The values add up to f_y(x) - f_y(b). Costly: samples times the number of features passes.

    Args:
        samples: random orders.
        cell: images: pixels of a square of this side, over all channels, are one feature and share its value equally.
        baseline: as for `integrated-gradients`.
    """
    if samples < 1 or cell < 1:
        raise InputError(f"shapley-sampling needs samples and cell >= 1, got {samples} and {cell}")
    b, of, mask = make_baseline(baseline, x, setting), value(setting.quantity), _cells(x, cell)

    def one(x: Tensor, b: Tensor, y: Tensor) -> Tensor:
        tool = _captum().ShapleyValueSampling(lambda points: of(model(points), y.repeat(len(points) // len(y))))
        at_once = max(1, setting.chunk // len(x))
        result: Tensor = tool.attribute(x, b, feature_mask=mask, n_samples=samples, perturbations_per_eval=at_once)
        return result / torch.bincount(mask.flatten())[mask]

    with torch.no_grad():
        attribution = _in_chunks(x, b, y, setting, one)
    features = int(mask.max()) + 1
    how = f"{samples} orders of {features} features from {name_of(baseline)}"
    return _answer(model, x, b, y, setting, attribution, how, samples * features, complete=True)


def _cells(x: Tensor, cell: int) -> Tensor:
    """Number of the feature of each value, shape of x[:1], int64."""
    if x.ndim != 4:
        if cell != 1:
            raise InputError(
                f"cells are for images (B, C, H, W), got inputs of shape {tuple(x.shape)}; leave out cell="
            )
        return torch.arange(x[0].numel(), device=x.device).view_as(x[:1])
    rows, columns = (torch.arange(side, device=x.device) // cell for side in x.shape[2:])
    grid = rows[:, None] * (int(columns[-1]) + 1) + columns
    if cell == 1:
        return torch.arange(x[0].numel(), device=x.device).view_as(x[:1])
    return grid.expand_as(x[:1]).contiguous()
