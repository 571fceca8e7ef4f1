"""The part "norms" of lipschitz.py: proven norms of operators, and the estimates of training, against exact ones."""

import copy
import itertools
import math
import time
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse.linalg
import torch
from common import markdown_table
from torch import Tensor, nn

import holdfast as hf
from holdfast.bounding.graph.ops import Affine, Conv, Linear
from holdfast.bounding.graph.trace import trace, trace_batch
from holdfast.bounding.lipschitz.constants import lipschitz_estimate
from holdfast.bounding.lipschitz.single_layers import in_double
from holdfast.bounding.lipschitz.spectral import domain, linear_part, norm_bound, norm_estimate
from holdfast.data import Dataset
from holdfast.models.zoo.liresnet import LinearResidual
from holdfast.training.objectives.gloro import emma_loss, ramp_loss
from holdfast.training.optimizer import make_optimizer
from holdfast.training.recipe.recipe import OptimizerPart

Cell = dict[str, Any]


def exact_norm(op: Affine, largest: int = 4096) -> tuple[float, str]:
    """The largest singular value of the operator in float64, and how it was found.

    The Gram matrix of the smaller side, written out, up to `largest` rows; beyond, Lanczos iteration to machine
    precision, which comes from below.
    """
    inside = domain(op)
    outside = tuple(op.apply(torch.zeros(1, *inside, dtype=torch.float64)).shape[1:])
    n, m = math.prod(inside), math.prod(outside)
    if n <= m:
        size, shape = n, inside

        def gram(v: Tensor) -> Tensor:
            return op.transpose(op.apply(v))
    else:
        size, shape = m, outside

        def gram(v: Tensor) -> Tensor:
            return op.apply(op.transpose(v))

    if size > largest:
        linear = scipy.sparse.linalg.LinearOperator(
            (size, size), matvec=lambda v: gram(torch.from_numpy(v).view(1, *shape)).flatten().numpy(), dtype=np.float64
        )
        start = np.random.default_rng(0).standard_normal(size)
        value = scipy.sparse.linalg.eigsh(linear, k=1, which="LA", v0=start, return_eigenvectors=False)[0]
        return math.sqrt(value), "Lanczos"
    if max(n, m) <= 1024:
        matrix = op.apply(torch.eye(n, dtype=torch.float64).view(n, *inside)).flatten(1)
        return float(torch.linalg.svdvals(matrix)[0]), "SVD"
    rows = torch.eye(size, dtype=torch.float64).view(size, *shape).split(256)
    whole = torch.cat([gram(part).flatten(1) for part in rows]).numpy()
    top = scipy.linalg.eigh(whole, subset_by_index=[size - 1, size - 1], eigvals_only=True, overwrite_a=True)[0]
    return math.sqrt(top), "eigenvalue of the Gram matrix"


def affine_ops(model: nn.Module, x: Tensor) -> list[tuple[str, Affine]]:
    """Convolutions and dense layers of a network but the last, which enters by its rows; linear parts in float64."""
    found = [(node.name, node.op) for node in trace(model, x).nodes if isinstance(node.op, Linear | Conv)]
    return [(name, in_double(op)) for name, op in found[:-1]]


def measure_layers(model: nn.Module, data: Dataset, recipe: Cell) -> Cell:
    """Ratios of the proven bound, and of the estimate of training, to the exact norm, for all layers of one model."""
    layers = []
    for name, op in affine_ops(model, data.test.x[:1]):
        started = time.process_time()
        bound = norm_bound(op)
        seconds = time.process_time() - started
        exact, way = exact_norm(op)
        estimate = float(norm_estimate(op, None, torch.zeros((), dtype=torch.float64), steps=100, first=100)[0])
        layer = {"layer": name, "kind": type(op).__name__, "exact": exact, "by": way, "seconds": round(seconds, 2)}
        layers.append({**layer, "bound / exact": bound / exact, "estimate / exact": estimate / exact})
    powers = {recipe["objective"]["steps"], 5} if recipe["objective"]["name"] == "gloro" else ()  # 5: the default
    moving = [moving_estimate(copy.deepcopy(model), data, recipe, power) for power in sorted(powers)]
    return {"layers": layers, "moving": moving}


def moving_estimate(model: nn.Module, data: Dataset, recipe: Cell, power: int, steps: int = 50) -> Cell:
    """The estimate while the weights move: 50 more steps of training, with its optimiser at the rate of its start.

    Returns:
        The smallest and the largest estimate / exact of a layer, after these steps.
    """
    budget = hf.threat(recipe["threat"]).budget
    optimizer = make_optimizer(OptimizerPart(**recipe["optimizer"]), model)
    state: dict[str, Tensor] = {}
    ramp = recipe["objective"]["loss"] == "ramp"
    batches = zip(data.train.x.split(128), data.train.y.split(128), strict=True)
    for x, y in itertools.islice(batches, steps):
        graph, logits = trace_batch(model.train(), x)
        bound, state = lipschitz_estimate(graph, state, steps=power if state else 100)
        optimizer.zero_grad()
        loss = ramp_loss(logits, y, bound.pairs, budget, 6.0) if ramp else emma_loss(logits, y, bound.pairs, budget)
        loss.mean().backward()
        optimizer.step()
    bound, _ = lipschitz_estimate(trace(model.eval(), x[:1]), state, steps=power)
    sigmas = [sigma.item() for _, sigma in bound.layers if sigma.requires_grad]  # activations have a constant
    ratios = [s / exact_norm(op)[0] for s, (_, op) in zip(sigmas, affine_ops(model, x[:1]), strict=True)]
    return {"power steps": power, "smallest": min(ratios), "largest": max(ratios)}


def measure_sweep() -> Cell:
    """Small operators of every kind: kernels, strides, paddings, dilations, groups; random and constant weights."""
    torch.manual_seed(0)
    kinds: dict[str, list[float]] = {}
    for kernel, stride, padding, dilation, groups in itertools.product(
        (1, 2, 3, 4, 5), (1, 2, 3), (0, 1, 2), (1, 2), (1, 2)
    ):
        if dilation * (kernel - 1) >= 8 + 2 * padding:
            continue
        for constant in (False, True):
            conv = nn.Conv2d(2, 4, kernel, stride, padding, dilation, groups)
            nn.init.constant_(conv.weight, 1.0) if constant else nn.init.normal_(conv.weight)
            kinds.setdefault("convolution", []).append(_ratio(nn.Sequential(conv, nn.Flatten()), (2, 8, 8)))
    for n, m in itertools.product((1, 3, 40, 200), repeat=2):
        kinds.setdefault("dense", []).append(_ratio(nn.Linear(n, m), (n,)))
    for kernel, stride, padding in itertools.product((1, 2, 3), (1, 2, 3), (0, 1)):
        if 2 * padding <= kernel:
            pool = nn.Sequential(nn.AvgPool2d(kernel, stride, padding), nn.Flatten())
            kinds.setdefault("average pooling", []).append(_ratio(pool, (2, 8, 8)))
    for seed in range(10):
        torch.manual_seed(seed)
        norm = nn.BatchNorm2d(3)
        nn.init.normal_(norm.weight)
        norm.running_var = torch.rand(3) + 0.1
        kinds.setdefault("batch norm", []).append(_ratio(nn.Sequential(norm, nn.Flatten()), (3, 6, 6)))
        block = LinearResidual(4, 1.0)
        nn.init.normal_(block.weight)
        kinds.setdefault("linear residual", []).append(_ratio(nn.Sequential(block, nn.Flatten()), (4, 8, 8)))
    return {
        kind: {"operators": len(ratios), "smallest": min(ratios), "largest": max(ratios)}
        for kind, ratios in kinds.items()
    }


def _ratio(model: nn.Module, shape: tuple[int, ...]) -> float:
    """Proven bound / largest singular value of the Jacobian of an affine module, which is written out by autograd."""
    model, x = model.double().eval(), torch.zeros(1, *shape, dtype=torch.float64)
    (op,) = [node.op for node in trace(model, x).nodes if isinstance(node.op, Affine)]
    matrix = torch.autograd.functional.jacobian(model, x).reshape(-1, math.prod(shape))
    return norm_bound(linear_part(op)) / float(torch.linalg.svdvals(matrix)[0])


def norms_table(cells: dict[str, Cell]) -> str:
    """What was measured of small operators, of the layers of each model, and in training."""
    layers, nets, kinds = [], [], []
    for key, cell in cells.items():
        if key == "sweep":
            kinds = [
                (kind, c["operators"], f"{c['smallest']:.7f}", f"{c['largest']:.5f}")
                for kind, c in cell.items()
                if kind != "run"
            ]
            continue
        for c in cell["layers"]:
            figures = (f"{c[name]:.6f}" for name in ("exact", "bound / exact", "estimate / exact"))
            layers.append((key, c["layer"], c["kind"], *figures, c["by"], c["seconds"]))
        for moving in cell["moving"]:
            nets.append((key, moving["power steps"], f"{moving['smallest']:.4f}", f"{moving['largest']:.4f}"))
    tables = [
        (("small operators", "number", "smallest bound / SVD", "largest"), kinds),
        (("model", "layer", "kind", "exact", "bound / exact", "estimate / exact", "exact by", "s"), layers),
        (("model in training", "power steps", "smallest estimate / exact", "largest"), nets),
    ]
    return "\n\n".join(markdown_table(header, rows) for header, rows in tables if rows)
