"""What an account of float32 rounding costs: proofs and margin, against the same bounds of the network in float64.

    python benchmarks/rounding.py --network demo --method crown --inputs 500   # or cnn, resnet: --cifar names the data

The reference bounds a copy of the network in float64, whose own rounding costs nothing. `first look` is float32 with
error terms for network and bound together; `certify` is what a user gets. Networks are trained, see
branch_and_bound.py. One thread; seconds are processor time. Every run adds a cell to the results.
"""

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from branch_and_bound import NETWORKS, load
from common import RESULTS, describe_run, load_average, markdown_table, store_cell
from torch import Tensor, nn

import holdfast as hf
from holdfast.bounding.core.evaluation import doubled
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import relaxation as linear
from holdfast.bounding.linear.alpha import Ascent
from holdfast.certificates.core.margins import linear_margins

BATCH = 50
Certify = Callable[[nn.Module, Tensor, Tensor, hf.Linf], Tensor]


def crown(model: nn.Module, x: Tensor, y: Tensor, threat: hf.Linf) -> Tensor:
    """Smallest margins (B,) as `hf.certify` proves them."""
    return hf.certify(model, x, y, threat, "crown").margin


def alpha_crown(model: nn.Module, x: Tensor, y: Tensor, threat: hf.Linf) -> Tensor:
    """The same with 20 iterations on the slopes of the last pass, on proved inputs as well."""
    return hf.certify(model, x, y, threat, "alpha-crown", verdict=False).margin


def joint(model: nn.Module, x: Tensor, y: Tensor, threat: hf.Linf) -> Tensor:
    """The same on all slopes."""
    return hf.certify(model, x, y, threat, "alpha-crown", ascent=Ascent(20, joint=True), verdict=False).margin


def first_look(model: nn.Module, x: Tensor, y: Tensor, threat: hf.Linf) -> Tensor:
    """CROWN in float32 with error terms for network and bound together."""
    with torch.no_grad():
        inputs = region(threat, x, sound=True)
        found = linear_margins(trace(model, x), inputs, y, slopes="adaptive", hidden=True, sound=True)
    return found.scatter(1, y[:, None], torch.inf).amin(1)


def measured(method: Certify, task: tuple[nn.Module, Tensor, Tensor], threat: hf.Linf) -> dict[str, Any]:
    """Margins and seconds of a method."""
    model, x, y = task
    start = time.process_time()
    pieces = [slice(i, i + BATCH) for i in range(0, len(x), BATCH)]
    margins = torch.cat([method(model, x[i], y[i], threat).double() for i in pieces])
    return {"margins": margins, "cpu": time.process_time() - start}


@torch.no_grad()
def run_error(model: nn.Module, x: Tensor, y: Tensor, threat: hf.Linf) -> dict[str, float]:
    """What the rounding of the run costs the bounds of all margins in float64."""
    graph, box = doubled(trace(model, x)), region(threat, x, sound=True).double()
    exact = linear.relaxation(graph, box, slopes="adaptive", hidden=True, sound=True)
    run = linear.relaxation(graph, box, slopes="adaptive", hidden=True, sound=True, runs_in=x.dtype)
    lost = linear.margin_bounds(exact, y) - linear.margin_bounds(run, y)
    return {"mean": float(lost.mean()), "max": float(lost.max())}


METHODS = {"crown": crown, "alpha-crown": alpha_crown, "alpha-crown, joint": joint}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One method on one network."""
    model, x, y = load(options)
    threat, double = hf.Linf(NETWORKS[options.network]), copy.deepcopy(model).double()
    best = measured(METHODS[options.method], (double, x.double(), y), threat)
    contenders = {"certify": METHODS[options.method]} | (
        {"first look": first_look} if options.method == "crown" else {}
    )
    rows = []
    for by, method in contenders.items():
        found = measured(method, (model, x, y), threat)
        lost, near = best["margins"] - found["margins"], best["margins"].abs() < 0.5
        rows.append(
            {
                "method": options.method,
                "by": by,
                "inputs": len(x),
                "proved_float64": int((best["margins"] > 0).sum()),
                "proved": int((found["margins"] > 0).sum()),
                "mean_lost": float(lost.mean()),
                "near_zero_lost": float(lost[near].mean()) if bool(near.any()) else None,
                "cpu_float64": best["cpu"],
                "cpu": found["cpu"],
            }
        )
    cell = {"network": options.network, "eps": NETWORKS[options.network], "rows": rows}
    return cell | ({"run_error": run_error(model, x[:20], y[:20], threat)} if options.method == "crown" else {})


def to_markdown(record: dict[str, Any]) -> str:
    """The page."""
    text = [
        "# The cost of rounding",
        "Proofs and margins of networks in float32 against the same bounds of their copies in float64, at linf 0.1 for "
        "`demo` and 2/255 for the others. One thread; seconds are processor time.",
    ]
    head = ("network", "method", "by", "inputs", "proved in float64", "proved", "mean margin lost")
    head += ("lost where abs(margin) < 0.5", "CPU s in float64", "CPU s")
    keys = ("method", "by", "inputs", "proved_float64", "proved", "mean_lost", "near_zero_lost", "cpu_float64", "cpu")
    cells = dict(sorted(record.get("networks", {}).items()))
    text.append(
        markdown_table(head, [[c["network"], *(_short(r[n]) for n in keys)] for c in cells.values() for r in c["rows"]])
    )
    text.append(
        "## A bound in float64 of a network that runs in float32\nMargin lost to the rounding of the run, over all "
        "classes of 20 inputs, in one pass of CROWN; parts of branch and bound carry the same terms."
    )
    table = [
        [c["network"], *(_short(c["run_error"][n]) for n in ("mean", "max"))]
        for c in cells.values()
        if "run_error" in c
    ]
    text.append(markdown_table(("network", "mean", "max"), table))
    return "\n\n".join(text)


def _short(value: object) -> object:
    return f"{value:.4f}" if isinstance(value, float) else value


def main() -> None:
    """Parses the command line, measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="demo")
    parser.add_argument("--inputs", type=int, default=500)
    parser.add_argument("--method", choices=METHODS, default="crown")
    parser.add_argument("--models", type=Path, help="folder of trained models")
    parser.add_argument("--cifar", type=Path, default=Path("cifar10.npz"), help="CIFAR-10 as .npz")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = load_average()
    cell = run(options)
    cell |= {"run": describe_run(("holdfast", "torch")), "load": [before, load_average()]}
    store_cell(
        "rounding",
        "networks",
        f"{options.network} by {options.method}",
        cell,
        to_markdown=to_markdown,
        folder=options.out,
        silent=("run",),
    )


if __name__ == "__main__":
    main()
