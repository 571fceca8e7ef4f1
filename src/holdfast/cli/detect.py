"""`holdfast detect`: certified object detection."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor

import holdfast as hf
from holdfast.apps.detection import (
    CertifiedDetections,
    SmoothedDetector,
    as_detector,
    certified_count,
    count,
    read_coco,
)
from holdfast.cli.common import (
    AS_IT_IS,
    ModelArgument,
    Opening,
    RootOption,
    SeedOption,
    may_be_quiet,
    opens_model,
    parse_numbers,
    parse_option,
    table,
)
from holdfast.data import load_data
from holdfast.data.draw import sample
from holdfast.data.image_folder import read_images
from holdfast.errors import InputError
from holdfast.models import load_model
from holdfast.models.layers import Normalize
from holdfast.threats import L2
from holdfast.utils.files import write_json
from holdfast.utils.progress import progress_bars

app = typer.Typer(add_completion=False)
PICTURES = (".png", ".jpg", ".jpeg")
EDGES = ("left", "top", "right", "bottom")


@app.command()
@may_be_quiet
@opens_model
def detect(
    model: ModelArgument,
    data: Annotated[str, typer.Option("--data", help="A picture, a folder of pictures, or the name of a data set.")],
    threat: Annotated[str, typer.Option("--threat", help="An l2 ball around each picture, such as l2:0.1.")] = "l2:0.1",
    sigma: Annotated[float, typer.Option(help="Noise of smoothing; use the noise of training.")] = 0.25,
    samples: Annotated[int, typer.Option(min=1, help="Noisy copies of each picture.")] = 2000,
    confidence: Annotated[float, typer.Option(help="Confidence of each bound.")] = 0.999,
    objectness: Annotated[float, typer.Option(help="Leave out what the detector is less sure of.")] = 0.0,
    truth: Annotated[Path | None, typer.Option(help="True boxes, a COCO file: shows the proved recall too.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Number of pictures, the first ones of a folder.")] = 20,
    out: Annotated[Path | None, typer.Option(help="All detections with their bounds: a .json file.")] = None,
    seed: SeedOption = 0,
    opening: Opening = AS_IT_IS,
    root: RootOption = None,
) -> None:
    """Certify an object detector: what it finds in an image, and in every image within a radius.

    The detector gives one tensor (N, 7) for each image (x1, y1, x2, y2, objectness, class score, label), or the
    dictionaries of torchvision's models.
    """
    ball = hf.threat(threat)
    if not isinstance(ball, L2):
        raise InputError(f"--threat must be an l2 ball, such as l2:0.1, got '{ball}'")
    if out is not None and out.suffix != ".json":
        raise InputError(f"--out must end in .json, got '{out}'")
    coco = None if truth is None else read_coco(truth)
    boxes = {} if coco is None else {name: coco.truth[i] for i, (_, name) in enumerate(coco.images)}
    pictures = dict(read_pictures(data, n, root, seed))
    detector = open_detector(model, opening, next(iter(pictures.values())))
    proved: dict[str, CertifiedDetections] = {}
    with progress_bars() as bars:
        bar = bars.add_task(f"detect {ball}", total=len(pictures))
        for i, (name, x) in enumerate(pictures.items()):
            smoothed = SmoothedDetector(detector, sigma, samples, seed=seed + i)
            (proved[name],) = smoothed.certify(x, ball.eps, confidence, objectness=objectness)
            bars.advance(bar)
    rows = [
        [
            name,
            *(str(int(values.sum())) for values in (torch.isfinite(each.median[:, 0]), each.present, each.label >= 0)),
        ]
        for name, each in proved.items()
    ]
    Console().print(table(["picture", "found", "present for sure", "label for sure"], rows))
    typer.echo(f"{len(rows)} pictures at {ball}; each bound of each number holds with confidence {confidence:g}")
    about: dict[str, Any] = {"threat": str(ball), "sigma": sigma, "samples": samples, "confidence": confidence}
    about["seed"] = seed  # of the first picture; each next one adds 1
    known = [name for name in proved if name in boxes]
    if truth is not None and not known:
        raise InputError(f"'{truth}' lists none of the pictures of '{data}' as file_name")
    if known:
        objects = [boxes[name] for name in known]
        least = certified_count([proved[name] for name in known], objects)
        plain = count([proved[name].detections for name in known], objects)
        about |= {"recall": plain.recall, "proved_recall": least.recall, "proved_precision": least.precision}
        typer.echo(
            f"recall {plain.recall:.1%} of {plain.objects} objects; proved: recall {least.recall:.1%}, "
            f"precision {least.precision:.1%}"
        )
    if out is not None:
        write_json(out, {**about, "pictures": [{"picture": k, "detections": slots(v)} for k, v in proved.items()]})
        typer.echo(f"results: {out}")


def read_pictures(data: str, n: int, root: Path | None, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Name and pixels (1, C, H, W) of each picture; the pictures of a folder may differ in size."""
    path = Path(data).expanduser()
    if not path.exists():
        taken = sample(load_data(data, root=root), n, seed=seed)
        yield from ((f"input {i}", x[None]) for i, x in zip(taken.index.tolist(), taken.x, strict=True))
        return
    base = path if path.is_dir() else path.parent
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix.lower() in PICTURES)
    if not files:
        raise InputError(f"there is no picture ({', '.join(PICTURES)}) in '{path}'")
    for file in files[:n]:
        yield file.relative_to(base).as_posix(), torch.from_numpy(read_images([file])).float() / 255


def open_detector(path: Path, opening: Opening, x: Tensor) -> Any:
    """The model in the file as a detector, tried on x (1, C, H, W); --mean and --std come first."""
    options = dict(parse_option(text) for text in opening.arch_args or [])
    network = load_model(path, architecture=opening.architecture, options=options, key=opening.key)
    mean, std = parse_numbers("--mean", opening.mean), parse_numbers("--std", opening.std)
    if mean is None and std is None:
        return as_detector(network, x)
    normal = Normalize(0.0 if mean is None else mean, 1.0 if std is None else std)
    inside = as_detector(network, normal(x))
    return lambda images: inside(normal(images))


def slots(found: CertifiedDetections) -> list[dict[str, Any]]:
    """What is proved of each slot, as JSON: null is "nothing there", and a label that is not proved."""
    listed = []
    for i, label in enumerate(found.label.tolist()):
        middle = None if not bool(torch.isfinite(found.median[i, 0])) else found.median[i]
        ends = [zip(EDGES, _finite(side[i, :4]), strict=True) for side in (found.lower, found.upper)]
        listed.append(
            {
                "label": label if label >= 0 else None,
                "present": bool(found.present[i]),
                "empty": bool(found.empty[i]),
                "found": None if middle is None else {"label": int(middle[6]), "box": middle[:4].tolist()},
                "at_least": dict(ends[0]),
                "at_most": dict(ends[1]),
            }
        )
    return listed


def _finite(values: Tensor) -> list[float | None]:
    return [value if abs(value) != torch.inf else None for value in values.tolist()]
