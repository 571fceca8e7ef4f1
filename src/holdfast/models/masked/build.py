"""Sub-networks: any network with a mask over its weights, with signs for weights, or as the ordinary network it is."""

import copy
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from holdfast.errors import InputError
from holdfast.models.catalog import add_architecture as add
from holdfast.models.catalog import get_architecture, make_model, record_architecture
from holdfast.models.masked.allocation import keep_counts
from holdfast.models.masked.mask import Mask, Sign, Transform, computed, is_maskable, maskable
from holdfast.models.masked.random_weights import Weights, draw_scores, draw_weights, magnitude_scores
from holdfast.utils.options import Count, Fraction, Positive, Share, Unit, check_options, convert, options_of

Form = Literal["masked", "signs", "plain"]
_NAME = "masked"
_OWN = "own_form"  # on a sub-network of the user's own model: how it became one
_BINARY_SCALE = 0.01  # of Table 5.2 of the source; the last batch norm makes the choice uncritical there


def masked(
    model: nn.Module,
    *,
    rate: Fraction = 0.99,
    gamma: Unit = 0.1,
    cap: Share = 1.0,
    weights: Weights = "binary",
    score_scale: Positive | None = None,
    transform: Transform = "abs",
    last_batch_norm: bool = True,
    classes: Count | None = None,
    seed: int | None = None,
) -> nn.Module:
    """A copy of `model` whose dense and convolution layers keep fixed weights and learn which of them to use.

    Biases become 0, batch norms lose their scale and shift, and all parameters but the scores are frozen: training
    learns the mask only. With `weights = "own"` the model stays as it is in all of that, and the scores begin as the
    magnitudes of its weights.

    Args:
        model: any module with `nn.Linear` or convolution layers.
        rate: share of all weights that is pruned.
        gamma, cap: how the kept weights are shared among the layers; see `keep_counts`.
        weights: the fixed weights: "binary" (-1 and 1), "kaiming-constant", "kaiming-normal", or "own".
        score_scale: a of scores drawn from [-a, a]; if None 0.01 for binary weights, sqrt(1 / fan-in) for others.
        transform: rank by |score| ("abs") or by score ("identity").
        last_batch_norm: batch norm on the logits. Weights of -1 and 1 make logits so large that the softmax saturates.
        classes: number of logits for it; by default what the architecture, or else the last dense layer, says.
        seed: fixes weights and scores; None draws from torch's global generator.

    >>> network = masked(make_model("mlp", hidden=(20,), seed=0), rate=0.9, seed=0)
    >>> sum(int(mask.pattern().sum()) for mask in computed(network, Mask).values())  # of 784 * 20 + 20 * 10 weights
    1588
    """
    given: dict[str, Any] = {"rate": rate, "gamma": gamma, "cap": cap, "weights": weights, "score_scale": score_scale}
    given |= {"transform": transform, "classes": classes}
    check_options(options_of(masked), given, "function 'masked'")
    scale = _BINARY_SCALE if score_scale is None and weights == "binary" else score_scale
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    shape = {"rate": rate, "gamma": gamma, "cap": cap, "transform": transform, "bare": weights != "own"}
    shape["last_batch_norm"] = last_batch_norm and not _ends_in_batch_norm(model)

    def theta(weight: Tensor) -> Tensor:
        return draw_weights(weight, weights, rate, generator)

    def scores(weight: Tensor) -> Tensor:
        return magnitude_scores(weight) if weights == "own" else draw_scores(weight, scale, generator)

    return _build(model, "masked", shape, classes, theta, scores)


def binary_connect(model: nn.Module, *, last_batch_norm: bool = False, classes: int | None = None) -> nn.Module:
    """A copy of `model` that computes with the signs of its weights and learns the real weights behind them.

    Biases and batch norms stay real and are trained (Courbariaux, Bengio and David, "BinaryConnect", 2015).
    """
    return _build(model, "signs", {"bare": False, "last_batch_norm": last_batch_norm}, classes)


def pruned(model: nn.Module) -> nn.Module:
    """The ordinary network of the kept weights, in eval mode: a copy without masks, scores and pruned weights.

    It has the same logits, bit for bit, and is what attacks, certificates and other programs run fastest.
    """
    plain = copy.deepcopy(model)
    for name in (*computed(plain, Mask), *computed(plain, Sign)):
        _make_plain(plain.get_submodule(name))
    made = get_architecture(model)
    if made is not None and made[0] == _NAME:
        record_architecture(plain, _NAME, {**made[1], "form": "plain"})
    if (form := own_form(model)) is not None:
        setattr(plain, _OWN, {**form, "form": "plain"})
    return plain.eval()


def _make_plain(layer: nn.Module) -> None:
    """Turn a layer that computes its weight into one that has it, in place.

    `parametrize.remove_parametrizations` would change the class that the copy shares with the original.
    """
    with torch.no_grad():
        weight = cast(Tensor, layer.weight).clone()
    del layer.parametrizations
    layer.__class__ = type(layer).__mro__[1]
    layer.register_parameter("weight", nn.Parameter(weight))


def own_form(model: nn.Module) -> dict[str, Any] | None:
    """How a model that the catalogue does not know became a sub-network, for `with_form`; None for other models."""
    form = getattr(model, _OWN, None)
    return form if isinstance(form, dict) else None


def with_form(model: nn.Module, form: Any) -> nn.Module:
    """A copy of the user's own model in the form that `own_form` said, to load the tensors of a file into."""
    if not isinstance(form, dict):
        raise InputError(f"the form of a sub-network must be a table, got {type(form).__name__}")
    given = {key: value for key, value in form.items() if key != "classes"}
    known = {name: option for name, option in options_of(subnetwork).items() if name not in ("of", "options")}
    shape = {name: option.default for name, option in known.items()} | check_options(known, given, "sub-network")
    classes = convert(form.get("classes"), Count | None, "classes")
    return _build(model, shape.pop("form"), shape, classes, scores=torch.zeros_like)


def train_weights(model: nn.Module) -> nn.Module:
    """Freeze the masks and train everything else, weights included, in place: the fine-tuning after pruning."""
    masks = computed(model, Mask)
    if not masks:
        raise InputError("the model has no masks to fix; prune it first (hydra-prune), and start from that (init)")
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    for mask in masks.values():
        mask.scores.requires_grad_(False)
    return model


def _build(
    model: nn.Module,
    form: Form,
    shape: dict[str, Any],
    classes: int | None,
    theta: Callable[[Tensor], Tensor] = lambda weight: weight.detach().clone(),
    scores: Callable[[Tensor], Tensor] = torch.empty_like,
) -> nn.Module:
    """A copy of the model in the given form; `shape` says all that the names and shapes of its tensors depend on."""
    made = get_architecture(model)
    network = copy.deepcopy(model)
    layers = maskable(network)
    if shape["bare"]:
        _strip(network)
    count = (classes or _classes(network, made)) if shape["last_batch_norm"] else None
    if count is not None:
        like = next(network.parameters())
        norm = nn.BatchNorm1d(count, affine=False, device=like.device, dtype=like.dtype)
        network = nn.Sequential(network, norm)
    if form == "signs":
        for module in layers.values():
            parametrize.register_parametrization(module, "weight", Sign(), unsafe=True)
    if form == "masked":
        options = {key: shape[key] for key in ("rate", "gamma", "cap")}
        counts = keep_counts({name: cast(Tensor, m.weight).numel() for name, m in layers.items()}, **options)
        network.requires_grad_(False)
        for name, module in layers.items():
            weight = cast(Tensor, module.weight)
            mask = Mask(scores(weight), counts[name], shape["transform"])
            with torch.no_grad():
                weight.copy_(theta(weight))
            parametrize.register_parametrization(module, "weight", mask, unsafe=True)
    if not model.training:
        network.eval()
    if made is None:
        setattr(network, _OWN, {"form": form, **shape, "classes": count})
    else:
        _record(network, made, form, shape)
    return network


def _strip(model: nn.Module) -> None:
    """Biases of 0 and batch norms without scale and shift, in place."""
    for module in model.modules():
        if is_maskable(module):
            module.register_parameter("bias", None)
        elif isinstance(module, _BatchNorm):
            module.affine = False
            module.register_parameter("weight", None)
            module.register_parameter("bias", None)


def _ends_in_batch_norm(model: nn.Module) -> bool:
    return isinstance(model, nn.Sequential) and len(model) > 0 and isinstance(model[-1], nn.BatchNorm1d)


def _classes(model: nn.Module, made: tuple[str, dict[str, Any]] | None) -> int:
    if made is not None and isinstance(made[1].get("classes"), int):
        return int(made[1]["classes"])
    dense = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not dense:
        raise InputError("the number of classes is unknown: give classes=, or last_batch_norm=False")
    return dense[-1].out_features


def _record(network: nn.Module, made: tuple[str, dict[str, Any]], form: Form, shape: dict[str, Any]) -> None:
    """Say how the network can be built again."""
    known = {key: value for key, value in made[1].items() if value is not None}
    common: dict[str, Any] = {k: known.pop(k) for k in ("input_shape", "classes", "normalize") if k in known}
    record_architecture(network, _NAME, {"of": made[0], **common, "options": known, "form": form, **shape})


def subnetwork(
    *,
    of: str = "small-star",
    options: dict[str, Any] | None = None,
    form: Form = "masked",
    rate: Fraction = 0.99,
    gamma: Unit = 0.1,
    cap: Share = 1.0,
    transform: Transform = "abs",
    bare: bool = True,
    last_batch_norm: bool = True,
    **given: Any,
) -> nn.Module:
    """A network of the catalogue as a sub-network, with binary weights where nothing else is said.

    Args:
        of: name of the architecture.
        options: its options.
        form: "masked", "signs" (BinaryConnect), or "plain", the ordinary network of the kept weights.
        rate, gamma, cap, transform, last_batch_norm: see `masked`.
        bare: biases of 0 and batch norms without scale and shift.
        given: input_shape, classes and normalize, as in `make_model`.
    """
    if of == _NAME:
        raise InputError("a sub-network is made of an ordinary network; give of= another name")
    chosen: dict[str, Any] = {**(options or {}), **{key: value for key, value in given.items() if value is not None}}
    shape = {"rate": rate, "gamma": gamma, "cap": cap, "transform": transform}
    shape = {**(shape if form == "masked" else {}), "bare": bare, "last_batch_norm": last_batch_norm}

    def theta(weight: Tensor) -> Tensor:
        return draw_weights(weight, "binary" if bare else "own", rate, None)

    return _build(make_model(of, **chosen), form, shape, None, theta, lambda w: draw_scores(w, _BINARY_SCALE, None))


add(
    *(_NAME, subnetwork, "sub-network: a mask over fixed weights of another architecture; choose of, rate and gamma"),
    "Liu et al., Robust binary models by pruning randomly-initialized networks, 2022",
    composite=True,
)
