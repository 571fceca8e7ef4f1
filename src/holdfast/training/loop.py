"""The one training loop. It reads from top to bottom; what changes between methods is the objective."""

import math
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from holdfast.data import Dataset, Split
from holdfast.errors import HoldfastError, Interrupted
from holdfast.models import save_model
from holdfast.random import Noise
from holdfast.registry import get
from holdfast.results import History, TrainResult
from holdfast.threats import per_input
from holdfast.training import folder as files
from holdfast.training.accuracy import evaluate
from holdfast.training.augment import Transform, draw_transform
from holdfast.training.average import make_average, refresh_batch_norm
from holdfast.training.collapse import warn_of_collapse
from holdfast.training.context import Context
from holdfast.training.display import display, write_scalars
from holdfast.training.interrupt import stop_on_signal
from holdfast.training.logs import (
    keep_start,
    log_examples,
    log_update,
    product_of_norms,
    share_examples,
    start_weights,
    write_logs,
)
from holdfast.training.optimizer import gradient_norm, learning_rate, make_optimizer, set_learning_rate
from holdfast.training.periods import pas
from holdfast.training.prune.binary_connect import clip_real_weights
from holdfast.training.randaugment import cutout, inception_crop, mixing_weights, randaugment, random_brightness
from holdfast.training.recipe.reading import Source, load_recipe
from holdfast.training.recipe.recipe import Recipe
from holdfast.training.schedules import BUDGETS, with_budget
from holdfast.training.setup import Task, fingerprint, open_run, prepare, run_folder
from holdfast.training.state import Best, RunState, copy_weights, load_weights
from holdfast.training.workers import Workers, find_workers, make_step
from holdfast.utils.allocator import reuse_blocks
from holdfast.utils.memory import peak_memory

# One seed serves several uses; each draws from a stream of its own.
_ORDER, _ATTACK, _AUGMENT, _VALIDATE = range(4)


def train(
    recipe: Source,
    model: nn.Module | None = None,
    data: Dataset | str | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
    **overrides: Any,
) -> TrainResult:
    """Train a model by a recipe and returns the best epoch on held-out data.

    The same recipe, seed and machine give the same weights, also when the run was interrupted and resumed. Under
    `torchrun` every process takes its share of each batch; only rank 0 writes files.

    Args:
        recipe: a shipped name, a .toml file, the folder of an earlier run, a dict or a Recipe.
        model: trained in place, on its device; by default the recipe's architecture with fresh weights.
        data: a data set or a name for `load_data`; by default the recipe's.
        out: folder for the run; without it nothing is kept on disk.
        resume: go on with the run in `out`. `epochs` may differ from the recipe of the run, nothing else.
        force: replace a run that is already in `out`.
        progress: show bars, if standard error is a terminal.
        **overrides: keys of the recipe, such as epochs=2, optimizer={"lr": 0.1} or **{"optimizer.lr": 0.1}.

    Returns:
        The model in eval mode (the best epoch on the validation split; the last one if `validation` is 0; the averaged
        weights if the recipe averages), the history, and the folder.

    Example:
        >>> result = train("mnist-mini-standard", epochs=1, validation=0.9, progress=False)
        >>> sorted(result.history[0])[:3]
        ['budget', 'epoch', 'gradient_norm']
    """
    reuse_blocks()
    resolved = load_recipe(recipe, overrides)
    folder = run_folder(recipe, out, resume=resume, force=force)
    team = find_workers()
    team.wait()  # rank 0 creates the folder only once all of them have looked at it
    cuda = range(torch.cuda.device_count())
    with stop_on_signal() as stop, torch.random.fork_rng(devices=cuda):
        # Layers that draw from torch's global generator must differ between the processes, as the examples do.
        torch.manual_seed(resolved.seed + team.rank)
        task = prepare(resolved, model, data, folder)
        plan, model = task.recipe, task.model
        optimizer, average = make_optimizer(plan.optimizer, model), make_average(plan.average, model)
        clip_real_weights(model, optimizer)
        run = RunState(model, optimizer, average, data=fingerprint(task.train))
        step = make_step(model, get("train", plan.objective.name).function, plan.objective.options, team)
        start = None
        if folder is not None:
            start = start_weights(folder, model, resume=resume) if plan.log.updates else None
            open_run(folder, task, run, team, resume=resume)
            if start is not None and team.leads:
                keep_start(folder, start)
            save(folder, run, team)

        batches = shuffled(task, 0)
        with display(progress and team.leads, epochs=plan.epochs, batches=len(batches)) as shown:
            while run.epoch < plan.epochs and not run_out(run, plan):
                shown.show_epoch(run.epoch, run.history[-1] if run.history else {})
                batches = shuffled(task, run.epoch)
                model.train()
                while run.batch < len(batches):
                    started = time.perf_counter()
                    index, fraction = team.share(batches[run.batch])
                    x, y, context = make_batch(task, run, index, len(batches))
                    run.optimizer.zero_grad()
                    loss, metrics = step(x, y, context)

                    values = {"loss": loss.detach(), **metrics}
                    means = [float(value) * fraction for value in values.values()]
                    stopping, *means = team.total([float(stop.is_set), *means])
                    _check_finite(means[0], "loss", run)
                    # DistributedDataParallel divides by the number of processes; the mean is over the global batch.
                    (loss * (fraction * team.count)).backward()
                    norm = gradient_norm(model, plan.optimizer.clip_norm)
                    _check_finite(norm, "gradient", run)
                    run.optimizer.step()

                    update_average(run, plan, "step")
                    run.seconds += time.perf_counter() - started
                    run.count({**dict(zip(values, means, strict=True)), "norm": norm}, len(batches[run.batch]))
                    if plan.log.losses and folder is not None:
                        log_examples(run, x, y, context, plan)
                    if start is not None and team.leads:
                        log_update(run, x, start, {**dict(zip(values, means, strict=True)), "gradient_norm": norm})
                    shown.show_step(run.batch, means[0])
                    if stopping:
                        _leave(folder, run, team, len(batches))

                if update_average(run, plan, "epoch"):
                    refresh_batch_norm(run.judged, inputs(task, batches))
                if folder is not None:
                    write_logs(folder, run, team)
                finish_epoch(task, run, team, len(batches))
                if folder is not None:
                    save(folder, run, team)
                    if plan.tensorboard and team.leads:
                        write_scalars(folder / files.TENSORBOARD, run.history[-1])

        load_weights(model, copy_weights(run.judged) if run.best is None else run.best.weights)
        trained = pas(model, run.snapshots) if plan.periods else model
        trained.eval()
        if folder is not None and team.leads:
            save_model(trained, folder / files.MODEL, recipe=plan.name, threat=plan.threat or "none")
        team.wait()
        return TrainResult(trained, History(run.history), folder)


def shuffled(task: Task, epoch: int) -> list[Tensor]:
    """The global batches of an epoch, as indices: an order that only the seed and the epoch decide.

    With additional data, which follow the others in the training split, each batch holds its share of both, and an
    epoch is a pass over the additional data. Batches that the objective replays come as often.
    """
    recipe, seed = task.recipe, task.recipe.seed

    def order(count: int, turn: int) -> Tensor:
        return Noise.for_batch(seed, count).fork(_ORDER).fork(turn).bits(()).argsort()

    if task.extra == 0 or recipe.extra is None:
        batches = list(torch.split(order(len(task.train), epoch), recipe.batch_size))
    else:
        own, size = len(task.train) - task.extra, recipe.batch_size
        new = max(1, min(size - 1, round(recipe.extra.share * size)))
        extra = [own + part for part in torch.split(order(task.extra, epoch), new)]
        need, first = (size - new) * len(extra), (size - new) * len(extra) * epoch
        turns = range(first // own, (first + need - 1) // own + 1)
        stream = torch.cat([order(own, turn) for turn in turns])[first % own :]
        batches = [torch.cat(pair) for pair in zip(torch.split(stream[:need], size - new), extra, strict=True)]
    replays = int(recipe.objective.options.get("replays", 1))
    return [batch for batch in batches for _ in range(replays)]


def run_out(run: RunState, recipe: Recipe) -> bool:
    """Whether the best epoch lies further back than the patience of the recipe."""
    patience = recipe.evaluate.patience
    return patience is not None and run.best is not None and run.epoch - run.best.epoch >= patience


def make_batch(task: Task, run: RunState, index: Tensor, batches: int) -> tuple[Tensor, Tensor, Context]:
    """Augmented inputs and labels on the model's device, and the context; sets the learning rate of this step."""
    recipe, step = task.recipe, run.epoch * batches + run.batch
    t = run.epoch + (run.batch + 0.5) / batches
    set_learning_rate(run.optimizer, learning_rate(recipe, t))
    place = next(run.model.parameters())
    noise = Noise(recipe.seed, index.to(place.device))
    x, transform = augmented(task, noise, step)
    y, mixed = task.train.y[index].to(place.device), None
    if recipe.augment.mixup > 0:
        x, mixed = mixed_up(task, x, noise, step)
    factor = budget_factor(recipe, t)
    context = Context(
        epoch=run.epoch,
        step=step,
        progress=t / recipe.epochs,
        parts=task.parts,
        index=noise.index,
        noise=noise.fork(_ATTACK).fork(step),
        transform=transform,
        state=run.objective,
        mixed=mixed,
        count=len(task.train),
        optimizer=run.optimizer,
        adversary=task.threat if task.threat is None or recipe.ramps else with_budget(task.threat, factor),
        ramp=min(1.0, factor / recipe.budget.options.get("final", 1.0)),
    )
    return x, y, context


def augmented(task: Task, noise: Noise, step: int) -> tuple[Tensor, Transform]:
    """The training images at the places of `noise` as this step sees them, and their crops and flips."""
    chosen, drawn = task.recipe.augment, noise.fork(_AUGMENT).fork(step)
    transform = draw_transform(drawn, crop=chosen.crop, flip=chosen.flip)
    x = transform(task.train.x[noise.index.to(task.train.x.device)].to(next(task.model.parameters())))
    if chosen.inception > 0:
        x = inception_crop(x, drawn.fork(2), least=chosen.inception)
    if chosen.brightness > 0:
        x = random_brightness(x, drawn.fork(3), most=chosen.brightness)
    if chosen.randaugment > 0:
        x = randaugment(x, drawn.fork(4), operations=chosen.randaugment, magnitude=chosen.magnitude)
    if chosen.cutout > 0:
        x = cutout(x, drawn.fork(7), side=chosen.cutout)
    return x, transform


def mixed_up(task: Task, x: Tensor, noise: Noise, step: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """w x + (1 - w) x_j with any training image j for each input, and the labels of j and the weights w.

    (Zhang et al., "mixup: beyond empirical risk minimization", 2018.) The partner does not depend on the batch.
    """
    chosen, drawn = task.recipe.augment, noise.fork(_AUGMENT).fork(step)
    partner = drawn.fork(5).integers(len(task.train))
    weight = mixing_weights(drawn.fork(6), alpha=chosen.mixup, probability=chosen.mixup_probability)
    other, _ = augmented(task, Noise(noise.seed, partner), step)
    labels = task.train.y[partner.to(task.train.y.device)].to(x.device)
    share = per_input(weight.to(x.dtype), x)
    return share * x + (1 - share) * other, (labels, weight)


def budget_factor(recipe: Recipe, t: float) -> float:
    """Share of the threat's budget at the progress `t`, in epochs."""
    return BUDGETS[recipe.budget.name](*recipe.period(t), **recipe.budget.options)


def update_average(run: RunState, recipe: Recipe, when: Literal["step", "epoch"]) -> bool:
    """Add the weights to an average that is due `when` a step or an epoch ends; says whether it did."""
    if run.average is None or run.epoch < recipe.average.start_epoch:
        return False
    if get("train", recipe.average.name).every != when:
        return False
    run.average.update_parameters(run.model)
    return True


def inputs(task: Task, batches: list[Tensor]) -> Iterator[Tensor]:
    """The training inputs as they are, batch by batch."""
    place = next(task.model.parameters())
    return (task.train.x[index].to(place) for index in batches)


def finish_epoch(task: Task, run: RunState, team: Workers, batches: int) -> None:
    """Validate, notes the best epoch (the later one of equals), and closes the epoch with its row of the history."""
    recipe, count = task.recipe, run.examples
    t = run.epoch + (batches - 0.5) / batches
    figures = {key: total / count for key, total in run.totals.items()}
    row: dict[str, Any] = {
        "epoch": run.epoch + 1,
        "learning_rate": learning_rate(recipe, t),
        "budget": 0.0 if task.threat is None else task.threat.budget * budget_factor(recipe, t),
        "gradient_norm": figures.pop("norm"),
        **{f"train_{key}": value for key, value in figures.items()},
    }
    if recipe.log.norms:
        row["norms"] = product_of_norms(run.judged, next(inputs(task, [torch.zeros(1, dtype=torch.long)])))
    scores = validate(task.validation, task, run, team)
    row |= {f"validation_{key}": value for key, value in scores.items()}
    if recipe.evaluate.gap:
        seen = validate(task.train, task, run, team)
        row |= {f"gap_{key}": seen[key] - value for key, value in scores.items()}
    if recipe.single_step and "single" in scores:
        row["collapsed"] = warn_of_collapse(row, run.history)
    row |= {"seconds": run.seconds, "images_per_second": count / run.seconds, "peak_memory_mb": peak_memory()}
    if run.epoch + 1 in recipe.periods:
        run.snapshots.append(copy_weights(run.judged))
    # A model that was not trained for the whole budget is no candidate, however good it looks on the way up.
    risen = recipe.selects != "certified" or budget_factor(recipe, t) >= budget_factor(recipe, recipe.epochs)
    ready = risen and (run.average is None or run.averaging)
    score = scores.get(recipe.selects, float(run.epoch))  # the epoch itself where the last one is kept
    if scores and ready and (run.best is None or score >= run.best.score):
        run.best = Best(run.epoch + 1, score, copy_weights(run.judged))
    run.next_epoch(row)


def validate(split: Split | None, task: Task, run: RunState, team: Workers) -> dict[str, float]:
    """Accuracies on the held-out split, at the full budget; empty without one."""
    if split is None:
        return {}
    recipe = task.recipe
    part = split[: recipe.evaluate.count]
    return evaluate(
        *(run.judged, part.x, part.y, task.threat),
        attack_steps=recipe.evaluate.attack_steps,
        batch_size=recipe.batch_size,
        seed=recipe.seed + _VALIDATE,
        single_step=recipe.single_step,
        certificate=recipe.evaluate.certify or "none",
        view=recipe.view,
        team=team,
    )


def save(folder: Path, run: RunState, team: Workers) -> None:
    """Best weights, checkpoint and history; in this order, so that a crash in between repeats the epoch."""
    share_examples(run, team)
    snapshot = run.snapshot(team)
    if not team.leads:
        return
    if run.best is not None and (not run.history or run.best.epoch == run.history[-1]["epoch"]):
        best = {"epoch": run.best.epoch, "score": run.best.score, "weights": run.best.weights}
        files.write_tensors(folder / files.BEST, best)
    files.write_tensors(folder / files.LAST, snapshot)
    files.write_history(folder, run.history)


def _check_finite(value: float, what: str, run: RunState) -> None:
    if not math.isfinite(value):
        raise HoldfastError(
            f"the {what} became {value} in epoch {run.epoch + 1}, batch {run.batch + 1}. "
            "The last checkpoint is from before. Try a lower optimizer.lr, a warmup, optimizer.clip_norm, or a slower "
            "rise of the budget."
        )


def _leave(folder: Path | None, run: RunState, team: Workers, batches: int) -> None:
    where = f"interrupted in epoch {run.epoch + 1} after {run.batch} of {batches} batches"
    if folder is None:
        raise Interrupted(f"{where}; nothing is kept, as the run has no folder (out=)")
    save(folder, run, team)
    go_on = shlex.join(["holdfast", "train", str(folder), "--resume"])
    raise Interrupted(f"{where}; saved. Go on with: {go_on}")
