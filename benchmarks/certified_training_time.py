"""Time of a step of certified training, by Holdfast and by the same training written with auto_LiRPA.

A part of benchmarks/certified_training.py. Beside them stands what no implementation can do without: the products and
convolutions of the clean input, of centres and of radii, forward and backward, by the same kernels and nothing else.
"""

import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common import Neighbours, describe_run, markdown_table
from torch import nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.training.objectives.core.certified import certified_loss, interval_bound, linear_bound
from holdfast.utils.allocator import reuse_blocks

Cell = dict[str, Any]


def make_step(tool: str, name: str, bound: str, batch: int) -> tuple[nn.Module, Callable[[], None]]:
    """A model and one training step of it, forward and backward, with kappa = 0.5: clean loss and certified loss."""
    torch.manual_seed(0)
    model = hf.make_model(name, input_shape=(1, 28, 28), classes=10, seed=0).train()
    x, y, threat = torch.rand(batch, 1, 28, 28), torch.randint(0, 10, (batch,)), hf.Linf(0.1)
    if tool == "holdfast":
        use = interval_bound if bound == "ibp" else linear_bound(1.0, lambda r, y: None)

        def holdfast() -> None:
            model.zero_grad()
            robust, logits, *_ = certified_loss(model, x, y, threat, use)
            (0.5 * robust.mean() + 0.5 * cross_entropy(logits, y)).backward()

        return model, holdfast

    if tool == "products":
        # Three inputs at once, and the layout that suits convolutions: the fastest of four ways on most models.
        layers = nn.Sequential(*(m for m in model if not isinstance(m, nn.ReLU))).to(memory_format=torch.channels_last)
        three = torch.rand(3 * batch, 1, 28, 28)
        reuse_blocks()  # as Holdfast does

        def products() -> None:
            model.zero_grad()
            layers(three).sum().backward()

        return model, products

    from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm

    peer, eye, first = BoundedModule(model, x[:2]), torch.eye(10), torch.zeros(batch, dtype=torch.long)
    peer.train()
    rows = (eye[y][:, None] - eye)[~eye[y].bool()].view(batch, 9, 10)

    def lirpa() -> None:
        peer.zero_grad()
        ends = {"x_L": (x - 0.1).clamp(min=0), "x_U": (x + 0.1).clamp(max=1)}
        logits = peer(BoundedTensor(x, PerturbationLpNorm(norm=float("inf"), eps=0.1, **ends)))
        if bound == "ibp":
            lower, _ = peer.compute_bounds(IBP=True, C=rows, method=None)
        else:
            lower, _ = peer.compute_bounds(IBP=True, C=rows, method="backward", bound_upper=False)
        robust = cross_entropy(torch.cat([-lower.new_zeros(batch, 1), -lower], 1), first)
        (0.5 * robust + 0.5 * cross_entropy(logits, y)).backward()

    return model, lirpa


TIMED = 3
"""Steps in a row, as in training: the caches then hold what the tool itself left there."""


def serve(pipe: Any, tool: str, name: str, bound: str, batch: int) -> None:
    """A process of its own for each tool; times some steps whenever it is asked, after one to warm up; None ends it."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    model, step = make_step(tool, name, bound, batch)
    for _ in range(3):
        step()
    pipe.send([p.grad for p in model.parameters()])
    while pipe.recv() is not None:
        step()
        started = time.process_time()
        for _ in range(TIMED):
            step()
        pipe.send(1e3 * (time.process_time() - started) / TIMED)


def measure_time(store: Callable[[str, Cell], None], rounds: int = 9) -> None:
    """Median CPU milliseconds of a step, the tools in turn, each in its own process; gradients are compared first."""
    context = multiprocessing.get_context("spawn")
    for name, batch in (("small-star", 128), ("small", 128), ("medium", 64), ("mlp", 128)):
        for bound in ("ibp", "crown-ibp"):
            pipes, workers, others = {}, [], Neighbours()
            for tool in ("holdfast", "auto_LiRPA", *(["products"] if bound == "ibp" else [])):
                pipes[tool], end = context.Pipe()
                workers.append(context.Process(target=serve, args=(end, tool, name, bound, batch), daemon=True))
                workers[-1].start()
                end.close()  # so that a process that dies is noticed
            ours, theirs, *_ = (pipe.recv() for pipe in pipes.values())
            apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
            assert apart < 1e-3, f"the two tools disagree on the gradient by {apart:.1e}"
            taken: dict[str, list[float]] = {tool: [] for tool in pipes}
            for _ in range(rounds):
                for tool, pipe in pipes.items():
                    pipe.send("step")
                    taken[tool].append(pipe.recv())
            for pipe in pipes.values():
                pipe.send(None)
            medians = {tool: round(statistics.median(values), 1) for tool, values in taken.items()}
            ratio = round(medians["holdfast"] / medians["auto_LiRPA"], 3)
            cell = {"batch": batch, "milliseconds": medians, "ratio": ratio, "others": others.cores()}
            store(f"{bound} {name}", {**cell, "run": describe_run(("holdfast", "torch", "auto_LiRPA"))})


def times_table(cells: dict[str, Cell]) -> str:
    """The cells as a table."""
    header = ("training, model", "batch", "Holdfast ms", "auto_LiRPA ms", "ratio", "products alone ms", "others")
    rows = [
        (
            key,
            c["batch"],
            c["milliseconds"]["holdfast"],
            c["milliseconds"]["auto_LiRPA"],
            c["ratio"],
            c["milliseconds"].get("products", ""),
            c["others"],
        )
        for key, c in cells.items()
    ]
    return markdown_table(header, rows)
