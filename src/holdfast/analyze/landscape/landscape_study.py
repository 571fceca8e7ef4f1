"""The landscape of one model in a folder: figures as CSV, pictures as SVG; what is there is not computed again.

landscape.json    what decides the figures; a study with other settings cannot go on in the folder
spectrum.npz      top eigenvalues and eigenvectors of the Hessian, perturbations frozen
eigenvalues.csv   the eigenvalues, as they are and divided by the loss of fresh weights
surface.csv       loss along the two top eigenvectors, the attack renewed at every point; surface.svg
filters.csv       loss along a filter-normalised random direction; filters.svg
similarity.csv    cosine of the perturbations for theta ± a v, v the top eigenvector or random; similarity.svg
"""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.analyze.landscape.attacked import Adversary
from holdfast.analyze.landscape.spectrum import Spectrum, initial_loss, spectrum
from holdfast.analyze.landscape.surface import perturbation_similarity, surface
from holdfast.analyze.landscape.weight_directions import filter_direction, random_direction
from holdfast.analyze.plots.charts import path_svg
from holdfast.analyze.plots.heat import heat_svg
from holdfast.utils.files import write_csv, write_json, write_text
from holdfast.utils.hashes import hash_model, hash_tensors
from holdfast.utils.limits import parse_json, read_text
from holdfast.utils.options import Count, Positive, check_fields
from holdfast.utils.resume import as_stored, check_folder, check_same, load_arrays, reading, save_arrays

WAY_OUT = "delete the file to compute it again"


@dataclass(frozen=True)
class Extent:
    """How far and how finely to look.

    Attributes:
        k: eigenpairs.
        span: largest step along an eigenvector or a random unit vector.
        filters: largest step along the filter-normalised direction.
        cells: points on each axis; an odd number has one at the model itself.
    """

    k: Count = 5
    span: Positive = 1.0
    filters: Positive = 1.0
    cells: Count = 11

    def __post_init__(self) -> None:
        check_fields(self)


def study(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    adversary: Adversary,
    folder: Path,
    *,
    extent: Extent = Extent(),  # noqa: B008  (frozen)
    watch: Callable[[str], None] = lambda text: None,
) -> Spectrum:
    """Write the files of the study that are missing; returns the eigenpairs.

    Args:
        model: in eval mode.  x: inputs, shape (N, ...).  y: labels, shape (N,).
        folder: made if it is missing.
        watch: called with what is being computed.
    """
    check_folder(folder)
    settings = {
        "model": hash_model(model),
        "data": hash_tensors({"x": x, "y": y}),
        "threat": str(adversary.threat),
        "steps": adversary.steps,
        "seed": adversary.seed,
        **vars(extent),
    }
    path = folder / "landscape.json"
    if path.exists():
        with reading(path, "choose another folder"):
            check_same(dict(parse_json(read_text(path))), settings, f"'{folder}'")
    else:
        write_json(path, as_stored(settings))
    task = _Task(model, x, y, adversary, folder, extent, watch)
    found = _spectrum(task)
    _surface(task, found)
    _filters(task)
    _similarity(task, found)
    return found


@dataclass(frozen=True, eq=False)
class _Task:
    """What every part of the study needs."""

    model: nn.Module
    x: Tensor
    y: Tensor
    adversary: Adversary
    folder: Path
    extent: Extent
    watch: Callable[[str], None]

    @property
    def subject(self) -> tuple[nn.Module, Tensor, Tensor]:
        """Model, inputs and labels."""
        return self.model, self.x, self.y


def _spectrum(task: _Task) -> Spectrum:
    path = task.folder / "spectrum.npz"
    if path.exists():
        with reading(path, WAY_OUT):
            arrays = load_arrays(path)
            values, vectors = (torch.from_numpy(arrays[name]) for name in ("values", "vectors"))
            return Spectrum(values, vectors.to(task.x), float(arrays["loss"]), int(arrays["products"]))
    task.watch("eigenvalues")
    found = spectrum(
        task.model,
        task.adversary.perturb(*task.subject),
        task.y,
        k=task.extent.k,
        seed=task.adversary.seed,
        chunk=task.adversary.chunk,
        watch=lambda count: task.watch(f"eigenvalues: product {count}"),
    )
    fresh = initial_loss(*task.subject, task.adversary, seed=task.adversary.seed)
    rows = zip(found.values.tolist(), found.normalised(fresh).tolist(), strict=True)
    named = [(i, *row, found.loss, fresh) for i, row in enumerate(rows, 1)]
    write_csv(task.folder / "eigenvalues.csv", [("number", "eigenvalue", "normalised", "loss", "initial loss"), *named])
    arrays = {"values": found.values.numpy(), "vectors": found.vectors.cpu().numpy(), "loss": np.array(found.loss)}
    save_arrays(path, {**arrays, "products": np.array(found.products)})
    return found


def _surface(task: _Task, found: Spectrum) -> None:
    if len(found.vectors) < 2:
        return
    steps, path = _steps(task.extent.span, task.extent.cells), task.folder / "surface.csv"
    rows = _rows(path)
    for number in range(len(rows) // len(steps), len(steps)):  # whole lines of the grid only
        rows = rows[: number * len(steps)]
        task.watch(f"surface: line {number + 1} of {len(steps)}")
        places = [(steps[number], b) for b in steps]
        losses = surface(*task.subject, task.adversary, found.vectors[:2], places)
        rows += [(a, b, loss) for (a, b), loss in zip(places, losses.tolist(), strict=True)]
        write_csv(path, [("first", "second", "loss"), *rows])
    grid = np.array([row[2] for row in rows]).reshape(len(steps), len(steps))
    write_text(task.folder / "surface.svg", heat_svg(grid, steps, title="Loss under attack along two eigenvectors"))


def _filters(task: _Task) -> None:
    path = task.folder / "filters.csv"
    if path.exists():
        return
    task.watch("filter-normalised direction")
    steps = _steps(task.extent.filters, task.extent.cells)
    v = filter_direction(task.model, task.adversary.seed)[None]
    losses = surface(*task.subject, task.adversary, v, [(a,) for a in steps]).tolist()
    title = "Loss under attack along a filter-normalised direction"
    write_text(task.folder / "filters.svg", path_svg({"attack renewed": losses}, steps, title=title))
    write_csv(path, [("step", "loss"), *zip(steps, losses, strict=True)])


def _similarity(task: _Task, found: Spectrum) -> None:
    path = task.folder / "similarity.csv"
    if path.exists() or task.adversary.threat.budget == 0:
        return
    sizes = _steps(task.extent.span, task.extent.cells)[task.extent.cells // 2 :]
    directions = {"top eigenvector": found.vectors[0], "random": random_direction(task.model, task.adversary.seed)}
    lines = {}
    for name, v in directions.items():
        task.watch(f"similarity of perturbations: {name}")
        lines[name] = perturbation_similarity(*task.subject, task.adversary, v, sizes).tolist()
    title = "Cosine of the perturbations for theta + a v and theta - a v"
    write_text(task.folder / "similarity.svg", path_svg(lines, sizes, title=title, y_label="cosine"))
    write_csv(path, [("size", *lines), *zip(sizes, *lines.values(), strict=True)])


def _steps(span: float, cells: int) -> list[float]:
    return [float(step) for step in np.linspace(-span, span, cells)]


def _rows(path: Path) -> list[tuple[float, ...]]:
    """The rows of a CSV file of numbers, without its heading; none if there is no file."""
    if not path.exists():
        return []
    with reading(path, WAY_OUT):
        lines: Iterable[Sequence[str]] = csv.reader(io.StringIO(read_text(path)))
        return [tuple(map(float, line)) for line in list(lines)[1:]]
