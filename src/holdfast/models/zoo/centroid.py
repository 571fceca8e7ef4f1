"""Centroid networks: the nearest centroid in feature space gives the class, and too close a call is no answer.

With d_1 the distance from the features to the nearest centroid, and d_2 to the nearest one of another class, the answer
is given if and only if

    d_1 <= (1 - eta) / (1 + eta) d_2,    which is the same as    d_2 - d_1 >= eta (d_1 + d_2).

It is withheld between two classes, where d_1 and d_2 are alike, and far from everything, where they are alike too. For
eta > 0 a class owns a bounded part of feature space; of the inputs only as far as far inputs have far features. (Wang,
"On the feature alignment of deep vision models", thesis, 2023.)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import InputError
from holdfast.models.catalog import add_architecture as add
from holdfast.models.catalog import get_architecture, make_model, record_architecture
from holdfast.utils.options import Count, Unit

_NAME = "centroid"


class Centroid(nn.Module):
    """z_j = - min over the centroids c of class j of ||features - c||, (B, features) -> (B, K).

    Each z_j changes at most as fast as the features. `weight` (K, per_class, features) holds the centroids; number i of
    class j is number j * per_class + i of all.

    Args:
        classes: K, at least 2.
        features: at least 2.
        per_class: centroids of each class.

    >>> layer = Centroid(2, 2)
    >>> layer.weight.data = torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]]])
    >>> layer(torch.tensor([[0.0, 0.0], [3.0, 0.0]])).tolist()
    [[-0.0, -5.0], [-3.0, -4.0]]
    """

    def __init__(self, classes: int, features: int, *, per_class: int = 1) -> None:
        super().__init__()
        sizes = {"classes": (classes, 2), "features": (features, 2), "per_class": (per_class, 1)}
        for name, (size, least) in sizes.items():
            if not isinstance(size, int) or size < least:
                raise InputError(f"{name} of a centroid layer must be an integer >= {least}, got {size!r}")
        # Rows of an orthogonal matrix lie equally far apart, where the features have room for it.
        rows = nn.init.orthogonal_(torch.empty(classes * per_class, features))
        self.weight = nn.Parameter(rows.view(classes, per_class, features))

    def extra_repr(self) -> str:
        classes, per_class, features = self.weight.shape
        return f"{classes}, {features}, per_class={per_class}"

    def distances(self, features: Tensor) -> Tensor:
        """To every centroid, (B, features) -> (B, K, per_class)."""
        classes, per_class, size = self.weight.shape
        # Differences first: |z|^2 - 2 z c + |c|^2 would cancel. `unflatten` refuses features of another size.
        apart = features.unflatten(1, (1, size)) - self.weight.flatten(0, 1)
        distance: Tensor = torch.linalg.vector_norm(apart, dim=2)
        return distance.view(-1, classes, per_class)

    def forward(self, features: Tensor) -> Tensor:
        return -self.distances(features).amin(2)


class CentroidNet(nn.Module):
    """A body, from inputs (B, ...) to features, and a centroid layer.

    Without `eta` it returns the logits (B, K) of the layer. With `eta` it may say "I don't know": (B, K + 1), where the
    last logit is (1 - eta) / (1 + eta) times the second largest of the others. Class K wins if and only if the rule
    at the top of this file withholds the answer; a tie is an answer.

    Args:
        body: from (B, ...) to features (B, F). A normalisation of the inputs belongs in here.
        head: the centroids, of F features.
        eta: between 0, which never rejects, and 1, which rejects all but the centroids themselves; None for a network
            that always answers. `with_rejection` sets it after training.

    Where the body comes from `make_model`, the network can be saved and loaded like any model of the zoo.

    >>> net = CentroidNet(nn.Identity(), Centroid(2, 2), eta=0.5)
    >>> net.head.weight.data = torch.tensor([[[0.0, 0.0]], [[4.0, 0.0]]])
    >>> net(torch.tensor([[0.5, 0.0], [2.5, 0.0], [50.0, 0.0]])).argmax(1).tolist()
    [0, 2, 2]
    """

    def __init__(self, body: nn.Module, head: Centroid, *, eta: float | None = None) -> None:
        super().__init__()
        if not isinstance(body, nn.Module) or not isinstance(head, Centroid):
            raise InputError(
                "a centroid network needs a torch.nn.Module and a Centroid layer, got "
                f"{type(body).__name__} and {type(head).__name__}"
            )
        if eta is not None and not (isinstance(eta, int | float) and 0 <= eta <= 1):
            raise InputError(f"eta must be a number between 0 and 1, or None, got {eta!r}")
        self.body, self.head, self.eta = body, head, None if eta is None else float(eta)
        made = get_architecture(body)
        # The options of the network hold its body's options, so that there is no way to write a nested one down.
        if made is not None and not _KEYS & set(made[1]):
            classes, per_class, features = head.weight.shape
            own = {"body": made[0], "features": features, "per_class": per_class, "eta": self.eta, "classes": classes}
            record_architecture(self, _NAME, {**made[1], **own})

    @property
    def classes(self) -> int:
        """K; also the number of the class "I don't know", if `eta` is set."""
        return int(self.head.weight.shape[0])

    @property
    def ratio(self) -> float:
        """(1 - eta) / (1 + eta): how near an answer must be, relative to its rival; 1 without rejection."""
        return 1.0 if self.eta is None else (1 - self.eta) / (1 + self.eta)

    def extra_repr(self) -> str:
        return f"eta={self.eta}"

    def answer(self, features: Tensor) -> Tensor:
        """The logits of features (B, F)."""
        logits: Tensor = self.head(features)
        if self.eta is None:
            return logits
        second = logits.topk(2, 1).values[:, 1:]
        return torch.cat([logits, self.ratio * second], 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, K), or (B, K + 1) with `eta`."""
        return self.answer(self.body(x))


def with_rejection(net: CentroidNet, eta: float | None) -> CentroidNet:
    """The same network, weights shared, that rejects by `eta`; None for one that always answers."""
    return CentroidNet(net.body, net.head, eta=eta).train(net.training)


@torch.no_grad()
def acceptance(net: CentroidNet, x: Tensor) -> Tensor:
    """(d_2 - d_1) / (d_1 + d_2), (B,): the largest eta at which each input still gets an answer.

    The confidence of a centroid network: rank inputs by it, or choose eta as the value that a wanted share of them
    reaches.
    """
    distance: Tensor = -net.head(net.body(x))
    near, next_ = distance.topk(2, 1, largest=False).values.unbind(1)
    return ((next_ - near) / (next_ + near)).nan_to_num(0.0)  # two centroids in one place


@dataclass(frozen=True, eq=False)
class Prototypes:
    """Why an answer was given.

    Attributes:
        centroid: (B,) int64, number of the centroid nearest to each input.
        label: (B,) int64, its class.
        distance: (B,) from the features of the input to it.
        examples: (B, count) int64, the examples whose features are nearest to that centroid, nearest first.
    """

    centroid: Tensor
    label: Tensor
    distance: Tensor
    examples: Tensor


@torch.no_grad()
def prototypes(net: CentroidNet, x: Tensor, examples: Tensor, *, count: int = 3, chunk: int = 256) -> Prototypes:
    """The centroid that decided about each input, and the examples that stand for it.

    Args:
        net: in eval mode.
        x: inputs to explain (B, ...).
        examples: such as the training set (N, ...).
        count: examples for each input, at most N.
        chunk: examples worked on at a time.
    """
    if not 1 <= count <= len(examples):
        raise InputError(f"count must be between 1 and the {len(examples)} examples, got {count}")
    distance, centroid = net.head.distances(net.body(x)).flatten(1).min(1)
    parts = [net.head.distances(net.body(part)).flatten(1) for part in examples.split(chunk)]
    nearest = torch.cat(parts).topk(count, 0, largest=False).indices.T
    return Prototypes(centroid, centroid // net.head.weight.shape[1], distance, nearest[centroid])


@dataclass(frozen=True, eq=False)
class PrototypeInputs:
    """Inputs made to look, to the network, like the centroid that decided.

    Attributes:
        x: (B, ...), the prototypes.
        centroid: (B,) int64, number of the centroid nearest to each of the inputs explained.
        label: (B,) int64, its class.
        before, distance: (B,) from the features of the start, and of the prototype, to it.
    """

    x: Tensor
    centroid: Tensor
    label: Tensor
    before: Tensor
    distance: Tensor


def prototype_inputs(
    net: CentroidNet,
    x: Tensor,
    *,
    start: Tensor | None = None,
    steps: int = 200,
    rate: float = 0.05,
    low: float = 0.0,
    high: float = 1.0,
) -> PrototypeInputs:
    """x_p = argmin of ||features(x') - c|| over valid inputs, c the centroid nearest to x, by descent with Adam.

    The best point of the whole descent is returned, so the distance never grows. It is a local minimum: other starts
    give other prototypes.

    Args:
        net: in eval mode.
        x: inputs to explain (B, ...).
        start: where the descent begins, shape of x: training images of the class, or noise; x itself if not given.
        steps, rate: of Adam, in the units of the input.
        low, high: the valid range.
    """
    if steps < 1 or rate <= 0:
        raise InputError(f"a descent needs steps >= 1 and rate > 0, got {steps} and {rate}")
    if start is not None and start.shape != x.shape:
        raise InputError(f"start must have the shape of x, {tuple(x.shape)}, got {tuple(start.shape)}")
    with torch.no_grad():
        chosen = net.head.distances(net.body(x)).flatten(1).argmin(1)
        centres = net.head.weight.flatten(0, 1)[chosen]
    point = (x if start is None else start).detach().clone().requires_grad_(True)
    optimizer = torch.optim.Adam([point], lr=rate)
    best, least, before = point.detach().clone(), x.new_full((len(x),), torch.inf), x.new_zeros(len(x))
    for step in range(steps + 1):
        with torch.enable_grad():
            away = torch.linalg.vector_norm(net.body(point) - centres, dim=1)
            (gradient,) = torch.autograd.grad(away.sum(), point)
        now = away.detach()
        before = now if step == 0 else before
        closer = (now < least).view(-1, *[1] * (x.ndim - 1))
        best, least = torch.where(closer, point.detach(), best), torch.minimum(now, least)
        point.grad = gradient.nan_to_num()
        optimizer.step()
        with torch.no_grad():
            point.clamp_(low, high)
    return PrototypeInputs(best, chosen, chosen // net.head.weight.shape[1], before, least)


def centroid(
    *,
    body: str = "2c2f-minmax",
    features: Count = 64,
    per_class: Count = 1,
    eta: Unit | None = None,
    classes: int | None = None,
    **options: Any,
) -> CentroidNet:
    """A body of the zoo, which returns features in place of logits, and centroids.

    Args:
        body: name of its architecture.
        features: how many; at least as many as centroids, so that these can be equally far apart.
        per_class: centroids of each class.
        eta: see `CentroidNet`.
        classes: number of classes; by default 10.
        options: passed to `make_model` for the body: input_shape, normalize and options of its architecture.
    """
    network = make_model(body, classes=features, **options)
    return CentroidNet(network, Centroid(10 if classes is None else classes, features, per_class=per_class), eta=eta)


_KEYS = {"body", "features", "per_class", "eta"}
add(
    *(_NAME, centroid, "nearest centroid in the features of another network; choose body, features, per_class and eta"),
    "Wang, On the feature alignment of deep vision models (thesis), 2023",
    composite=True,
)
