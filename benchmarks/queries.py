"""Do answers with fresh noise hold up a black-box attacker who may ask only so many queries?

Lee, "Robustness of deep neural networks to adversarial attack", 2021, argues so in section 2.4, without an experiment.
RSE networks (noise before every convolution) are trained on 3,000 images of mnist-mini for 4 epochs. Square Attack at
linf 0.15 asks the same network in four ways, with 100, 300 and 1,000 queries for each of 40 test inputs:

- fresh: one new draw for each query; in one search, or in three that share the queries, since a look that is wrong by
  luck ends a search.
- averaged: five new draws for each look, all of which count as queries.
- steady: the mean of five draws that are always the same. The noise of the answers is gone; each look is one query.
- silent: the same weights without noise, as a deterministic network that answers for itself.

All but the last are judged alike, by the mean softmax of 20 fresh draws. One thread. Every network is a cell; finished
cells are left out.

    python benchmarks/queries.py
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    Judgement,
    describe_markdown,
    describe_run,
    markdown_table,
    read_results,
    report_claims,
    store_cell,
    verdict_of,
)
from torch import Tensor, nn

import holdfast as hf
from holdfast.attacks.core.chance import mean_prediction

NAME = "queries"
SEEDS = (0, 1, 2)
BUDGETS = (100, 300, 1000)
THREAT, INPUTS, VOTES = "linf:0.15", 40, 20
RECIPE: dict[str, Any] = {
    "data": "mnist-mini",
    "epochs": 4,
    "batch_size": 64,
    "validation": 0.7,
    "objective": {"name": "rse"},
    "optimizer": {"name": "adam", "lr": 2e-3},
    "learning_rate": {"name": "one-cycle", "peak": 0.3},
    "evaluate": {"attack_steps": 0, "count": 200},
    "model": {"name": "rse", "of": "cnn", "layers": [[8, 4, 2, 1], [16, 4, 2, 1]], "hidden": [100]},
}
NOISY = {"fresh": (1, 1), "fresh, three searches": (1, 3), "averaged": (5, 1)}
"""Draws for each look, and searches that share the queries: a look that is wrong by luck ends a search."""
ORACLES = (*NOISY, "steady", "silent")


def measure(seed: int) -> dict[str, Any]:
    """Train a network and let the attacker ask."""
    model = hf.train({**RECIPE, "seed": seed}, progress=False).model.eval()
    test = hf.load_data("mnist-mini").test[:INPUTS]
    x, y = test.x, test.y
    quiet = silent(model)
    with torch.no_grad():
        clean = mean_prediction(model, x, VOTES, seed).argmax(1) == y
        clean_quiet = quiet(x).argmax(1) == y
    cell: dict[str, Any] = {"clean": share(clean), "clean, silent": share(clean_quiet)}
    for budget in BUDGETS:
        for name, (samples, restarts) in NOISY.items():
            how = {"queries": budget, "samples": samples, "restarts": restarts, "votes": VOTES}
            found = hf.attack(model, x, y, THREAT, "eot-square", seed=seed, **how)
            cell.setdefault(name, {})[str(budget)] = share(clean & ~found.success)
        found = hf.attack(Frozen(model, 5, seed), x, y, THREAT, "square", queries=budget, seed=seed)
        with torch.no_grad():
            held = mean_prediction(model, found.x_adv, VOTES, seed + 1).argmax(1) == y
        cell.setdefault("steady", {})[str(budget)] = share(clean & held)
        broken = hf.attack(quiet, x, y, THREAT, "square", queries=budget, seed=seed).success
        cell.setdefault("silent", {})[str(budget)] = share(clean_quiet & ~broken)
    return {**cell, "run": describe_run(("holdfast", "torch"))}


class Frozen(nn.Module):
    """The log of the mean softmax of a few frozen draws, the same for all inputs."""

    def __init__(self, model: Any, draws: int, seed: int) -> None:
        super().__init__()
        self.draws = nn.ModuleList(model.sample(seed + i) for i in range(draws))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K)."""
        return torch.stack([draw(x).softmax(1) for draw in self.draws]).mean(0).log()


def silent(model: nn.Module) -> nn.Module:
    """The network without its noise layers, with the same weights."""
    plain = hf.make_model("cnn", layers=[[8, 4, 2, 1], [16, 4, 2, 1]], hidden=[100])
    weights = [p.detach() for p in model.parameters()]
    with torch.no_grad():
        for target, source in zip(plain.parameters(), weights, strict=True):
            target.copy_(source)
    return plain.eval()


def share(held: Tensor) -> float:
    """In percent."""
    return round(100 * float(held.double().mean()), 1)


def to_markdown(record: dict[str, Any]) -> str:
    """Accuracy left, by oracle and budget."""
    text = ["# Queries with fresh noise", __doc__.split("\n\n    python")[0].partition("\n\n")[2]]
    cells = list(record["cells"].values())
    text.append(describe_markdown(cells[0]["run"]))
    rows = [
        (name, *(_spread([c[name][str(q)] for c in cells if str(q) in c[name]]) for q in BUDGETS)) for name in ORACLES
    ]
    text.append(f"Accuracy left, means over {len(cells)} seeds, with the smallest and the largest value.")
    text.append(markdown_table(("oracle", *(f"{q} queries" for q in BUDGETS)), rows))
    text.append(
        f"Without an attack: {_spread([c['clean'] for c in cells])}, silent "
        f"{_spread([c['clean, silent'] for c in cells])}."
    )
    return "\n\n".join(text)


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.1f} ({min(values):g} to {max(values):g})" if values else ""


def judge(record: dict[str, Any]) -> Iterator[Judgement]:
    """Fresh noise holds the attacker up if the best noisy search leaves more accuracy than the same draws each time."""
    cells, most = record.get("cells", {}), str(BUDGETS[-1])
    if all(str(seed) in cells for seed in SEEDS):
        pairs = [(min(cells[str(s)][name][most] for name in NOISY), cells[str(s)]["steady"][most]) for s in SEEDS]
        text = "; ".join(f"{fresh:g} against {steady:g} %" for fresh, steady in pairs)
        text = f"accuracy left after {most} queries, fresh against steady draws: {text}"
        yield "queries-noise-hampers", verdict_of([fresh > steady for fresh, steady in pairs]), text


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in SEEDS:
        if str(seed) not in read_results(NAME, args.out).get("cells", {}):
            store_cell(NAME, "cells", str(seed), measure(seed), to_markdown=to_markdown, folder=args.out)
    report_claims(judge(read_results(NAME, args.out)))


if __name__ == "__main__":
    main()
