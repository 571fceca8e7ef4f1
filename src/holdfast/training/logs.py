"""What a run writes beside its history when `[log]` asks for it: every update, and every example in every epoch.

log/start.pt             the weights that the run started from
log/updates-0001.csv     one row for each update of the epoch
log/examples-0001.npz    one loss, error and norm of the features for each training example

An epoch has files of its own, written before its checkpoint: what a killed run repeats, it writes anew.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.bounding.graph.trace import trace_batch
from holdfast.bounding.lipschitz.constants import lipschitz_estimate
from holdfast.certificates.core.lipschitz_margins import single_constant
from holdfast.errors import InputError
from holdfast.registry import get_objective
from holdfast.training import folder as files
from holdfast.training.attack.pgd import pgd
from holdfast.training.context import Context, in_mode
from holdfast.training.outputs import forward
from holdfast.training.recipe.recipe import Recipe
from holdfast.training.state import RunState, Weights
from holdfast.training.step import describe_examples, fit
from holdfast.training.workers import Workers
from holdfast.utils.files import write_csv
from holdfast.utils.limits import read_text
from holdfast.utils.resume import load_arrays, reading, save_arrays

START = Path(files.LOG) / "start.pt"
EXAMPLES = ("loss", "error", "norm")
"""What is kept of each example."""
POWER_STEPS = 100
_STATE = "log_"  # begins the names of these tensors in the state of the objective
_WAY_OUT = "restore it from a copy, or repeat the run"


def start_weights(folder: Path, model: nn.Module, *, resume: bool) -> Weights:
    """The parameters before the first update; a run that is resumed has them in its folder."""
    if resume and (folder / START).is_file():
        place = next(model.parameters()).device
        return {name: value.to(place) for name, value in files.read_tensors(folder / START).items()}
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def keep_start(folder: Path, start: Weights) -> None:
    """Write the parameters before the first update, once."""
    if not (folder / START).is_file():
        files.write_tensors(folder / START, dict(start))


def distance(model: nn.Module, start: Weights) -> float:
    """|theta - theta_0|_2 over all parameters that are trained."""
    moved = [p.detach() - start[name].to(p) for name, p in model.named_parameters() if p.requires_grad]
    return float(torch.nn.utils.get_total_norm(moved))


def dead_layers(model: nn.Module, x: Tensor) -> list[str]:
    """Names of the `nn.ReLU` layers whose outputs are all zero on x, in eval mode; nothing below them is trained.

    >>> layer = nn.Linear(2, 3)
    >>> _ = layer.bias.data.fill_(-1e3)
    >>> dead_layers(nn.Sequential(layer, nn.ReLU(), nn.Linear(3, 2)), torch.rand(4, 2))
    ['1']
    """
    highest: dict[str, float] = {}

    def watch(name: str) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            highest[name] = min(highest.get(name, torch.inf), float(output.max()))

        return keep

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ReLU)]
    handles = [module.register_forward_hook(watch(name)) for name, module in layers]
    try:
        with torch.no_grad(), in_mode(model, False):
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return [name for name, value in highest.items() if value <= 0]


@torch.no_grad()
def product_of_norms(model: nn.Module, x: Tensor) -> float:
    """prod_l |W_l|_2, with the slopes of the activations, for one layer after the other: a Lipschitz constant.

    An estimate from below by 100 steps of power iteration, so that it proves nothing. Paths that meet add up, as in
    `bounding.lipschitz`. x (B, ...) only says what the inputs look like.

    >>> layer = nn.Linear(2, 2)
    >>> layer.weight.data = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    >>> round(product_of_norms(nn.Sequential(layer, nn.ReLU(), layer), torch.rand(1, 2)), 4)
    9.0
    """
    with in_mode(model, False):
        graph = single_constant(trace_batch(model, x[:1])[0])
    bound, _ = lipschitz_estimate(graph, {}, steps=POWER_STEPS)
    return float(bound.pairs.max()) / math.sqrt(2)  # which `single_constant` puts on the difference of two logits


def log_update(run: RunState, x: Tensor, start: Weights, figures: Mapping[str, float]) -> None:
    """Add a row for the update that was just made on the inputs x; `figures` are its loss, accuracy and gradient."""
    row = {
        "epoch": run.epoch + 1,
        "batch": run.batch,
        **figures,
        "distance": distance(run.model, start),
        "dead": " ".join(dead_layers(run.model, x)),
    }
    run.updates.append(row)


def log_examples(run: RunState, x: Tensor, y: Tensor, context: Context, recipe: Recipe) -> None:
    """Keep loss under the budget, 0-1 error and norm of the features of the examples of this step.

    An objective that is made of parts has left them in the context. For any other one PGD looks for adversarial
    examples once more, after the update and in eval mode.
    """
    found = context.examples or _measure(run.model, x, y, context, recipe)
    for key, value in found.items():
        name = _STATE + key
        if name not in run.objective:
            run.objective[name] = value.new_full((context.count,), torch.nan)
        run.objective[name][context.index] = value.to(run.objective[name])


def _measure(model: nn.Module, x: Tensor, y: Tensor, context: Context, recipe: Recipe) -> dict[str, Tensor]:
    adversarial = context.adversary is not None and bool(get_objective(recipe.objective.name).threats)
    with in_mode(model, False), torch.no_grad():
        x_adv = pgd(model, x, y, fit, context) if adversarial else x
        return describe_examples(forward(model, x_adv, top=context.parts.watched), y)


def write_logs(folder: Path, run: RunState, team: Workers) -> None:
    """Write the files of the epoch that is about to be closed, and forget its examples."""
    share_examples(run, team)
    kept = {key: run.objective.pop(_STATE + key) for key in EXAMPLES if _STATE + key in run.objective}
    if not team.leads:
        return
    number = f"{run.epoch + 1:04d}"
    if run.updates:
        columns = list(run.updates[0])
        rows = [[row.get(key, "") for key in columns] for row in run.updates]
        write_csv(folder / files.LOG / f"updates-{number}.csv", [columns, *rows])
    if kept:
        arrays = {key: value.float().cpu().numpy() for key, value in kept.items()}
        save_arrays(folder / files.LOG / f"examples-{number}.npz", arrays)


def share_examples(run: RunState, team: Workers) -> None:
    """Give every process the examples that the others have seen in this epoch; NaN where nobody has."""
    if team.count == 1:
        return
    for name in [_STATE + key for key in EXAMPLES if _STATE + key in run.objective]:
        own = run.objective[name]
        parts = torch.stack(team.gather(own))
        run.objective[name] = parts.nanmean(0)  # a batch smaller than the number of processes repeats an example


def read_updates(folder: Path) -> list[dict[str, float | str]]:
    """All updates of a run in order: numbers by column, the column "dead" as text."""
    text = [(path, _rows(path)) for path in _epochs(folder, "updates", "csv", "updates")]
    return [_numbers(row, path) for path, rows in text for row in rows]


def read_examples(folder: Path, what: str = "loss") -> Tensor:
    """`what` is known of each training example, one row for each epoch, (epochs, N); NaN where it was not seen.

    Args:
        folder: of the run.
        what: "loss" under the budget, 0-1 "error", or "norm" of the penultimate features.
    """
    rows = []
    for path in _epochs(folder, "examples", "npz", "losses"):
        with reading(path, _WAY_OUT):
            arrays = load_arrays(path)
            if what not in arrays:
                raise InputError(f"the log in '{folder}' has no {what}; the model does not end in a linear layer")
            rows.append(torch.from_numpy(arrays[what]).double())
    if len({len(row) for row in rows}) > 1:
        raise InputError(f"the log in '{folder}' is of runs on different data; {_WAY_OUT}")
    return torch.stack(rows)


def _epochs(folder: Path, kind: str, ending: str, key: str) -> Sequence[Path]:
    """The files of one kind, which must be one for each epoch."""
    found = sorted((folder / files.LOG).glob(f"{kind}-*.{ending}"))
    if not found:
        raise InputError(
            f"the run in '{folder}' has no log of its {key}. Write one: [log] {key} = true in the recipe, or "
            f"holdfast train RECIPE --set log.{key}=true"
        )
    expected = [f"{kind}-{number:04d}.{ending}" for number in range(1, len(found) + 1)]
    missing = [name for name, path in zip(expected, found, strict=True) if path.name != name]
    if missing:
        raise InputError(f"the log in '{folder / files.LOG}' lacks {missing[0]}; {_WAY_OUT}")
    return found


def _rows(path: Path) -> list[dict[str, str]]:
    with reading(path, _WAY_OUT):
        return list(csv.DictReader(io.StringIO(read_text(path))))


def _numbers(row: Mapping[str, str], path: Path) -> dict[str, float | str]:
    with reading(path, _WAY_OUT):
        return {key: value if key == "dead" else float(value) for key, value in row.items()}
