"""Train a mechanism: batches of profiles, the best lies against it, a step of Adam; resumable."""

import csv
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.apps.auctions.auction_net import AuctionNet
from holdfast.apps.auctions.auction_recipe import AuctionRecipe, load_auction_recipe
from holdfast.apps.auctions.mechanism import FRESH, draw_values
from holdfast.apps.auctions.objective import Multipliers, auction_loss
from holdfast.errors import InputError, Interrupted, StorageError
from holdfast.models import load_model, read_metadata, save_model
from holdfast.training.folder import read_tensors, write_tensors
from holdfast.utils.files import write_text
from holdfast.utils.hashes import hash_tensors
from holdfast.utils.progress import progress_bars
from holdfast.utils.resume import check_folder, check_same
from holdfast.utils.toml import write_toml

SAVE_EVERY = 200
"""Iterations between two checkpoints, and two rows of the history."""
MODEL, STATE, HISTORY, RECIPE, TEACHER = "model.safetensors", "last.pt", "history.csv", "recipe.toml", "teacher"


@dataclass(eq=False)
class _Run:
    """What a checkpoint holds."""

    model: AuctionNet
    optimizer: torch.optim.Optimizer
    multipliers: Multipliers
    iteration: int
    history: list[dict[str, float]]
    data: str
    """Hash of the user's own values; empty for uniform ones."""


@dataclass(frozen=True, eq=False)
class AuctionResult:
    """A trained mechanism in evaluation mode, with one row of figures for every `SAVE_EVERY` iterations."""

    model: AuctionNet
    history: list[dict[str, float]]


def train_auction(
    recipe: AuctionRecipe | str,
    *,
    values: Tensor | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    show: bool = False,
) -> AuctionResult:
    """Train a mechanism by a recipe; with `out`, keep checkpoints, history and model there.

    Args:
        recipe: the recipe or the name of one.
        values: profiles (N, n, k) of the user's own to draw batches from; uniform ones if not given.
        out: folder of the run.
        resume: go on with the checkpoint in that folder.
        show: progress on the error output.
    """
    recipe = load_auction_recipe(recipe) if isinstance(recipe, str) else recipe
    if values is not None:
        _check_own(recipe, values)
    folder = None if out is None else Path(out)
    if folder is not None:
        check_folder(folder)
    torch_state = torch.random.get_rng_state()
    try:
        torch.manual_seed(recipe.seed)
        run = _start(recipe, values)
        if folder is not None:
            _open(folder, recipe, run, resume=resume)
        teacher = _teacher(recipe, values, folder, resume=resume, show=show)
        return _loop(recipe, run, teacher, values, folder, show=show)
    finally:
        torch.random.set_rng_state(torch_state)


def _check_own(recipe: AuctionRecipe, values: Tensor) -> None:
    if values.ndim != 3 or tuple(values.shape[1:]) != (recipe.bidders, recipe.items):
        raise InputError(
            f"values must have shape (profiles, {recipe.bidders}, {recipe.items}) for this recipe, got "
            f"{tuple(values.shape)}"
        )
    recipe.support.check(values)


def _teacher(
    recipe: AuctionRecipe, values: Tensor | None, folder: Path | None, *, resume: bool, show: bool
) -> AuctionNet | None:
    """The softmax network that a student imitates, trained by the same objective; kept in the student's folder."""
    if not recipe.teacher:
        return None
    taught = replace(
        recipe,
        head="softmax",
        payment="share",
        iterations=recipe.teacher,
        teacher=0,
        objective=replace(recipe.objective, stability=0.0),
    )
    out = None if folder is None else folder / TEACHER
    resume = resume and out is not None and (out / RECIPE).exists()
    return train_auction(taught, values=values, out=out, resume=resume, show=show).model.requires_grad_(False)


def _start(recipe: AuctionRecipe, values: Tensor | None) -> _Run:
    model = recipe.network().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=recipe.lr)
    data = "" if values is None else hash_tensors({"values": values})
    return _Run(model, optimizer, Multipliers.start(recipe.objective, recipe.bidders), 0, [], data)


def _loop(
    recipe: AuctionRecipe,
    run: _Run,
    teacher: AuctionNet | None,
    values: Tensor | None,
    folder: Path | None,
    *,
    show: bool,
) -> AuctionResult:
    with progress_bars(show) as bars:
        task = bars.add_task("auction", total=recipe.iterations, completed=run.iteration)
        while run.iteration < recipe.iterations:
            try:
                _step(recipe, run, teacher, values)
            except KeyboardInterrupt:
                raise _interrupted(folder) from None
            bars.advance(task)
            if run.iteration % SAVE_EVERY == 0 and folder is not None:
                _save(folder, run)
    run.model.eval()
    if folder is not None:
        _save(folder, run)
        save_auction(run.model, folder / MODEL, recipe)
    return AuctionResult(run.model, run.history)


def _interrupted(folder: Path | None) -> Interrupted:
    kept = (
        "nothing was kept: give a folder" if folder is None else f"go on with the same command and --resume ({folder})"
    )
    return Interrupted(f"stopped; {kept}")


def _step(recipe: AuctionRecipe, run: _Run, teacher: AuctionNet | None, values: Tensor | None) -> None:
    """One batch; what is drawn depends only on the seed and the number of the batch."""
    seed = (recipe.seed * 1_000_003 + run.iteration) % FRESH
    if values is None:
        batch = draw_values(recipe.batch_size, recipe.bidders, recipe.items, support=recipe.support, seed=seed)
    else:
        index = torch.randint(len(values), (recipe.batch_size,), generator=torch.Generator().manual_seed(seed))
        batch = values[index].to(torch.get_default_dtype())
    for group in run.optimizer.param_groups:
        group["lr"] = recipe.lr * _warm(run.iteration / recipe.iterations)
    loss, metrics = auction_loss(run.model, batch, run.multipliers, recipe.objective, teacher=teacher, seed=seed)
    run.optimizer.zero_grad()
    loss.backward()
    run.optimizer.step()
    run.multipliers.renew(recipe.objective, metrics["regret"], metrics["violation"])
    run.iteration += 1
    if run.iteration % SAVE_EVERY == 0 or run.iteration == recipe.iterations:
        row = {name: float(value.mean()) for name, value in metrics.items()}
        run.history.append({"iteration": run.iteration, "loss": float(loss.detach()), **row})


def _warm(done: float) -> float:
    """Learning rate over the run, as a share of the largest: up over the first tenth, then down in a line."""
    return min(10 * done + 0.01, (1 - done) / 0.9, 1.0)


def _save(folder: Path, run: _Run) -> None:
    m = run.multipliers
    write_tensors(
        folder / STATE,
        {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "multipliers": {**vars(m)},
            "iteration": run.iteration,
            "history": run.history,
            "data": run.data,
        },
    )
    text = io.StringIO()
    if run.history:
        writer = csv.DictWriter(text, list(run.history[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(run.history)
    write_text(folder / HISTORY, text.getvalue())


def _open(folder: Path, recipe: AuctionRecipe, run: _Run, *, resume: bool) -> None:
    """Write the recipe of a new run, or go on with an old one."""
    if not resume:
        if (folder / STATE).exists():
            raise InputError(f"'{folder}' holds a run already; go on with resume, or choose another folder")
        write_text(folder / RECIPE, write_toml(recipe.to_dict()))
        return
    try:
        stored = load_auction_recipe(folder / RECIPE)
    except InputError as error:
        raise InputError(f"'{folder}' holds no run to go on with: {error}") from error
    check_same(stored.to_dict(), recipe.to_dict(), f"'{folder}'")
    if not (folder / STATE).exists():
        return
    state = read_tensors(folder / STATE)
    check_same({"values": state["data"]}, {"values": run.data}, f"'{folder}'")
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.multipliers = Multipliers(**state["multipliers"])
    run.iteration, run.history = state["iteration"], state["history"]


def was_trained_on(folder: Path, values: Tensor) -> bool:
    """Whether the run in a folder drew its batches from just these values of the user's own."""
    return (folder / STATE).exists() and read_tensors(folder / STATE)["data"] == hash_tensors({"values": values})


def save_auction(model: AuctionNet, path: str | Path, recipe: AuctionRecipe) -> Path:
    """Write a mechanism to a .safetensors file that `load_auction` reads."""
    return save_model(model, path, auction=recipe.to_dict())


def load_auction(path: str | Path) -> AuctionNet:
    """The mechanism in a file of `save_auction`, or in the folder of a run, in evaluation mode."""
    path = Path(path) / MODEL if Path(path).is_dir() else Path(path)
    record: dict[str, Any] = read_metadata(path)
    if "auction" not in record:
        raise StorageError(f"'{path}' holds no auction; `holdfast auction train` writes one")
    model = load_model(path, load_auction_recipe(record["auction"]).network())
    assert isinstance(model, AuctionNet)
    return model
