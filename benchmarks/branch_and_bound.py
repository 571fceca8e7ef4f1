"""Complete verification: how tight the bounds before the first split are, and what branch and bound decides.

    python benchmarks/branch_and_bound.py alpha --network demo --by holdfast   # or --by auto_LiRPA, to be importable
    python benchmarks/branch_and_bound.py demo --inputs 120 --time-limit 30   # open inputs of the demo model

Networks were trained: `demo` by the recipe of `make demo`; `cnn` and `resnet` by PGD at 2/255 on CIFAR-10, whose file
`--cifar` names. One thread; seconds are processor time. Every run adds a cell to the results.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, describe_run, load_average, markdown_table, store_cell, trained_model
from torch import Tensor, nn
from torch.nn import functional as F

import holdfast as hf
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import alpha
from holdfast.certificates.complete.beta_crown import decide

NETWORKS = {"demo": 0.1, "cnn": 2 / 255, "resnet": 2 / 255}
ITERATIONS, BATCH = 20, 10
Task = tuple[nn.Module, Tensor, Tensor]


class Block(nn.Module):
    """A residual block of two convolutions with batch norm, beside a 1x1 convolution."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after))
        self.b = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """(B, before, H, W) -> (B, after, H / stride, W / stride)."""
        return F.relu(self.b(F.relu(self.a(x))) + self.skip(x))


def architecture(name: str) -> nn.Sequential:
    """The networks for CIFAR-10."""
    if name == "cnn":
        front = [nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*front, nn.Linear(2048, 100), nn.ReLU(), nn.Linear(100, 10))
    stem = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    front = [*stem, Block(8, 16, 2), Block(16, 16, 1), nn.Flatten()]
    return nn.Sequential(*front, nn.Linear(1024, 100), nn.ReLU(), nn.Linear(100, 10))


def adversarially_trained(name: str, x: Tensor, y: Tensor, path: Path, epochs: int = 6) -> nn.Module:
    """PGD with two steps at 2/255, Adam, one cycle; read from `path` if it was trained before."""
    torch.manual_seed(0)
    net, eps, size = architecture(name), NETWORKS[name], 128
    if path.exists():
        net.load_state_dict(torch.load(path, weights_only=True))
        return net.eval()
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 3e-3, total_steps=epochs * (len(x) // size))
    for _ in range(epochs):
        for i in torch.randperm(len(x))[: len(x) // size * size].split(size):
            a, change = x[i].flip(3) if torch.rand(()) < 0.5 else x[i], (torch.rand_like(x[i]) * 2 - 1) * eps
            for _ in range(2):
                change.requires_grad_(True)
                loss = F.cross_entropy(net((a + change).clamp(0, 1)), y[i])
                change = (change.detach() + 0.83 * eps * torch.autograd.grad(loss, change)[0].sign()).clamp(-eps, eps)
            adam.zero_grad()
            F.cross_entropy(net((a + change).clamp(0, 1)), y[i]).backward()
            adam.step()
            schedule.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(net.state_dict(), path)
    return net.eval()


def load(options: argparse.Namespace) -> Task:
    """The network, and the first inputs that it classifies right."""
    if options.network == "demo":
        model, data = trained_model("mnist-mini-at", options.models), hf.load_data("mnist-mini")
    else:
        data = hf.load_data(str(options.cifar))
        folder = options.models or Path("runs")
        model = adversarially_trained(options.network, data.train.x, data.train.y, folder / f"{options.network}.pt")
    x, y = data.test.x[:500], data.test.y[:500]
    with torch.no_grad():
        right = (model(x).argmax(1) == y).nonzero()[:, 0][: options.inputs]
    return model, x[right], y[right]


def ours(model: nn.Module, x: Tensor, y: Tensor, eps: float, *, sound: bool) -> Tensor:
    """Margins (B, K) by joint alpha-CROWN; infinite at the label."""
    graph, ascent = trace(model, x), alpha.Ascent(ITERATIONS, joint=True)
    found = alpha.margin_bounds(graph, region(hf.Linf(eps), x, sound=sound), y, ascent, sound=sound)
    return found.scatter(1, y[:, None], torch.inf)


def theirs(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    """The same by auto_LiRPA with its default options."""
    from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm  # type: ignore[import-not-found]

    bounded = BoundedModule(model, x, bound_opts={"optimize_bound_args": {"iteration": ITERATIONS}}, device="cpu")
    box = PerturbationLpNorm(eps=eps, x_L=(x - eps).clamp(0, 1), x_U=(x + eps).clamp(0, 1))
    classes = torch.arange(9).expand(len(y), -1)
    classes, one_hot = classes + (classes >= y[:, None]).long(), torch.eye(10)
    rows = one_hot[y][:, None] - one_hot[classes]
    lower, _ = bounded.compute_bounds(x=(BoundedTensor(x, box),), C=rows, method="alpha-CROWN", bound_upper=False)
    return torch.full((len(y), 10), torch.inf).scatter(1, classes, lower.detach())


def run_alpha(options: argparse.Namespace) -> dict[str, Any]:
    """Margins and seconds of one contender on one network."""
    model, x, y = load(options)
    eps, found = NETWORKS[options.network], []
    methods = {"holdfast": lambda *a: ours(*a, sound=False), "holdfast, sound": lambda *a: ours(*a, sound=True)}
    method = {**methods, "auto_LiRPA": theirs}[options.by]
    method(model, x[:1], y[:1], eps)  # imports and first calls are not counted
    start = time.process_time()
    for i in range(0, len(x), BATCH):
        found.append(method(model, x[i : i + BATCH], y[i : i + BATCH], eps))
    seconds, margins = time.process_time() - start, torch.cat(found)
    return {
        "inputs": len(x),
        "mean_margin": float(margins[margins.isfinite()].mean()),
        "mean_smallest": float(margins.amin(1).mean()),
        "certified": int((margins.amin(1) > 0).sum()),
        "cpu": seconds,
    }


def run_demo(options: argparse.Namespace) -> dict[str, Any]:
    """Branch and bound on the inputs that joint alpha-CROWN and an attack leave open."""
    model, data = trained_model("mnist-mini-at", options.models), hf.load_data("mnist-mini")
    rows = []
    for i in range(options.first, options.inputs):
        start = time.process_time()
        x, y = data.test.x[i : i + 1], data.test.y[i : i + 1]
        found = decide(model, x, y, hf.Linf(NETWORKS["demo"]), time_limit=options.time_limit)
        cpu = time.process_time() - start
        if int(found.parts[0]):
            margin = float(found.margin[0])
            rows.append({"input": i, "status": found.status[0], "parts": int(found.parts[0]), "margin": margin})
            rows[-1] |= {"cpu": cpu, "wall": float(found.seconds[0])}
            print(rows[-1], flush=True)
    return {"time_limit": options.time_limit, "inputs": [options.first, options.inputs], "rows": rows}


def to_markdown(record: dict[str, Any]) -> str:
    """The page."""
    text = ["# Complete verification", "One thread; seconds are processor time. CIFAR-10 pixels went through JPEG."]
    if cells := record.get("alpha"):
        head = ("network", "by", "inputs", "mean margin", "mean smallest margin", "certified", "CPU s")
        text += [f"## Before the first split\nJoint alpha-CROWN, {ITERATIONS} iterations, batches of {BATCH}."]
        text += [markdown_table(head, [_alpha_row(key, cell) for key, cell in sorted(cells.items())])]
    for key, cell in sorted(record.get("demo", {}).items()):
        decided = [row for row in cell["rows"] if row["status"] != "unknown"]
        seconds = sorted(row["cpu"] for row in decided)
        text += [
            f"## Open inputs of the demo model, linf 0.1, {key}\n{len(decided)} of {len(cell['rows'])} inputs that "
            f"need a split are decided within {cell['time_limit']:g} s of wall time each; median "
            f"{seconds[len(seconds) // 2] if seconds else 0:.2f} CPU s."
        ]
        columns = ("input", "status", "parts", "margin", "cpu", "wall")
        text += [markdown_table(columns, [[_short(row[c]) for c in columns] for row in cell["rows"]])]
    return "\n\n".join(text)


def _alpha_row(key: str, cell: dict[str, Any]) -> tuple[object, ...]:
    names = ("inputs", "mean_margin", "mean_smallest", "certified", "cpu")
    return (*key.split(" by "), *(_short(cell[name]) for name in names))


def _short(value: object) -> object:
    return f"{value:.3f}" if isinstance(value, float) else value


def main() -> None:
    """Parses the command line, measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("alpha", "demo"))
    parser.add_argument("--network", choices=NETWORKS, default="demo")
    parser.add_argument("--by", choices=("holdfast", "holdfast, sound", "auto_LiRPA"), default="holdfast")
    parser.add_argument("--inputs", type=int, default=20, help="how many, or for `demo` up to which")
    parser.add_argument("--first", type=int, default=0, help="first input, for `demo`")
    parser.add_argument("--time-limit", type=float, default=30.0, help="wall seconds for each input, for `demo`")
    parser.add_argument("--models", type=Path, help="folder of trained models")
    parser.add_argument("--cifar", type=Path, default=Path("cifar10.npz"), help="CIFAR-10 as .npz")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = load_average()
    if options.part == "alpha":
        key, cell = f"{options.network} by {options.by}", run_alpha(options)
    else:
        key, cell = f"inputs {options.first} to {options.inputs - 1}", run_demo(options)
    cell |= {"run": describe_run(("holdfast", "torch")), "load": [before, load_average()]}
    store_cell(
        "branch_and_bound", options.part, key, cell, to_markdown=to_markdown, folder=options.out, silent=("run", "rows")
    )


if __name__ == "__main__":
    main()
