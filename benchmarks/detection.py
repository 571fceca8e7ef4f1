"""Certified object detection on digit scenes: average precision as measured, as proved, and under attack in between.

A detector of about 60,000 parameters is trained on scenes of one to four MNIST digits, with noise of the standard
deviation that it is then smoothed with; and once more without noise, to be smoothed as it is, and behind a denoiser.
Parts:

- smoothed: for each detector and encoding the AP of the smoothed detector, and the AP proved at two radii.
- attack: for each radius the AP that the attack DAG leaves, of the smoothed and of the bare detector. At no threshold
  may precision or recall under attack lie below the proved one. Medians that leave their bounds are counted.

One thread. Either training takes four to five minutes of CPU time, the parts then about six and fifteen minutes. The
scenes to judge on are made of other digits than those to train on. AP is pooled over classes, with five thresholds of
objectness: not COCO's.

    python benchmarks/detection.py --models MODELS --part smoothed
    python benchmarks/detection.py --models MODELS --part attack
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    Judgement,
    Neighbours,
    describe_markdown,
    describe_run,
    markdown_table,
    read_results,
    report_claims,
    store_cell,
)
from safetensors.torch import load_file, save_file

import holdfast as hf
from holdfast.apps.detection import (
    CertifiedDetections,
    DnCNN,
    Encoding,
    SmoothedDetector,
    TinyDetector,
    average_precision,
    certified_curve,
    count,
    curve,
    dag,
    tiny_detector,
    train_denoiser,
    train_tiny,
)
from holdfast.apps.detection.smoothed_detector import CERTIFIED, Draws
from holdfast.data import DetectionScenes, detection_scenes

NAME = "detection"
PARTS = ("smoothed", "attack")
PACKAGES = ("holdfast", "torch")
SIGMA, RADII, CONFIDENCE = 0.25, (0.1, 0.25), 0.99999
SCENES, EPOCHS = 8000, 30
ENCODINGS = {
    "location+label, location": Encoding("location+label", "location"),
    "location, location": Encoding("location", "location"),
    "label, location": Encoding("label", "location"),
    "label, objectness": Encoding("label", "objectness"),
    "none, objectness": Encoding("none", "objectness"),
}
Cell = dict[str, Any]


# --- Results: one file, read and written again with every finished cell -----------------------------------------------


def store(folder: Path, part: str, key: str, cell: Cell) -> None:
    """Puts one cell among the results."""
    store_cell(NAME, part, key, {**cell, "run": describe_run(PACKAGES)}, to_markdown=to_markdown, folder=folder)


# --- Detectors --------------------------------------------------------------------------------------------------------


def trained(models: Path, key: str, train: DetectionScenes, epochs: int) -> tuple[TinyDetector, float]:
    """The detector trained with ("noise") or without ("clean") noise, and its CPU seconds; kept for the next part."""
    path, model = models / f"{key}.safetensors", TinyDetector()
    if not path.exists():
        started = time.process_time()
        train_tiny(train, sigma=SIGMA if key == "noise" else 0.0, epochs=epochs, model=model)
        seconds = time.process_time() - started
        models.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), path)
        (models / f"{key}.txt").write_text(f"{seconds:.0f}")
    model.load_state_dict(load_file(path))
    return model.eval(), float((models / f"{key}.txt").read_text())


def denoiser(models: Path, train: DetectionScenes) -> DnCNN:
    """A small denoiser for the noise of the smoothing, trained on 2,000 of the scenes."""
    path, model = models / "denoiser.safetensors", DnCNN(depth=5, width=16)
    if not path.exists():
        train_denoiser(train.x[:2000], SIGMA, model=model)
        save_file(model.state_dict(), path)
    model.load_state_dict(load_file(path))
    return model.eval()


def smoothed_detectors(models: Path, options: argparse.Namespace) -> dict[str, tuple[SmoothedDetector, TinyDetector]]:
    """The detectors by name, each with the network in it."""
    train = detection_scenes(options.scenes)
    noise, clean = (trained(models, key, train, options.epochs)[0] for key in ("noise", "clean"))
    common = {"sigma": SIGMA, "n": options.n}
    return {
        "trained with noise": (SmoothedDetector(tiny_detector(noise), **common), noise),
        "trained without": (SmoothedDetector(tiny_detector(clean), **common), clean),
        "without, denoiser": (
            SmoothedDetector(tiny_detector(clean), **common, denoiser=denoiser(models, train)),
            clean,
        ),
    }


# --- Parts ------------------------------------------------------------------------------------------------------------


def figures(draws: list[Draws], test: DetectionScenes) -> Cell:
    """AP of the smoothed detector, and proved at each radius."""
    truth = test.objects()
    proved = {f"{eps:g}": round(average_precision(certified_curve(draws, truth, eps, CONFIDENCE)), 4) for eps in RADII}
    return {"ap": round(average_precision(curve(draws, truth)), 4), "proved": proved}


def run_smoothed(options: argparse.Namespace, test: DetectionScenes) -> None:
    """Each detector with the best encoding, and the first one with the others."""
    for name, (smoothed, model) in smoothed_detectors(options.models, options).items():
        others, started = Neighbours(), time.process_time()
        draws = smoothed.draw(test.x)
        seconds = time.process_time() - started
        for encoding, value in ENCODINGS.items():
            if name != "trained with noise" and encoding != next(iter(ENCODINGS)):
                continue
            cell = figures([dataclasses.replace(each, encoding=value) for each in draws], test)
            cell |= {
                "sigma": SIGMA,
                "n": smoothed.n,
                "confidence": CONFIDENCE,
                "images": len(test),
                "parameters": sum(p.numel() for p in model.parameters()),
                "training": {"scenes": options.scenes, "epochs": options.epochs},
                "draw_cpu_seconds": round(seconds),
                "others": others.cores(),
            }
            store(options.out, "smoothed", f"{name}; {encoding}", cell)
    for key in ("noise", "clean"):
        print(f"training of '{key}' took {(options.models / f'{key}.txt').read_text()} CPU seconds")


def left(certified: CertifiedDetections, attacked: CertifiedDetections) -> int:
    """How many attacked medians lie outside the bounds; slots are paired by bin and place in it."""

    def places(bins: torch.Tensor) -> list[tuple[int, int]]:
        return [(int(b), int((bins[:i] == b).sum())) for i, b in enumerate(bins)]

    medians = dict(zip(places(attacked.bins), attacked.median[:, CERTIFIED], strict=True))
    bounds = dict(zip(places(certified.bins), zip(certified.lower, certified.upper, strict=True), strict=True))
    empty = torch.full((len(CERTIFIED),), torch.inf)
    outside = 0
    for place in medians.keys() | bounds.keys():
        low, high = bounds.get(place, (empty, empty))
        median = medians.get(place, empty)
        outside += int(((median < low) | (median > high)).sum())
    return outside


def run_attack(options: argparse.Namespace, test: DetectionScenes) -> None:
    """DAG against each smoothed detector and the network in it; the smoothed one is judged with fresh noise."""
    truth = test.objects()
    for name, (smoothed, model) in smoothed_detectors(options.models, options).items():
        draws = smoothed.draw(test.x)
        fresh = dataclasses.replace(smoothed, seed=1)
        front = smoothed.denoiser or (lambda images: images)
        for eps in RADII:
            others, started = Neighbours(), time.process_time()
            threat = hf.L2(eps)
            x_adv = dag(lambda images: model.scores(front(images)), test.x, truth, threat, sigma=SIGMA)  # noqa: B023
            attacked = fresh.draw(x_adv)
            bare = {
                "bare": smoothed.detector(test.x),
                "bare attacked": smoothed.detector(dag(model.scores, test.x, truth, threat)),
            }
            proved = certified_curve(draws, truth, eps, CONFIDENCE)
            under = curve(attacked, truth)
            cell = {
                "proved": round(average_precision(proved), 4),
                "attacked": round(average_precision(under), 4),
                "clean": round(average_precision(curve(draws, truth)), 4),
                "medians outside their bounds": sum(
                    left(a.certify(eps, CONFIDENCE), b.certify(0.0, 0.5)) for a, b in zip(draws, attacked, strict=True)
                ),
                "points below the proved": sum(
                    b.recall < a.recall or b.precision < a.precision for a, b in zip(proved, under, strict=True)
                ),
                **{key: _bare(found, truth) for key, found in bare.items()},
                "images": len(test),
                "cpu_seconds": round(time.process_time() - started),
                "others": others.cores(),
            }
            store(options.out, "attack", f"{name}; l2:{eps:g}", cell)
            if cell["attacked"] < cell["proved"] or cell["points below the proved"]:
                raise SystemExit(f"an attack went below the certificate: {name}, l2:{eps:g}")


def _bare(found: Any, truth: Any) -> float:
    """AP of the detector itself, at the same thresholds."""
    points = [count([each[each[:, 4] >= t] for each in found], truth) for t in (0.1, 0.2, 0.4, 0.6, 0.8)]
    return round(average_precision(points), 4)


# --- Tables -----------------------------------------------------------------------------------------------------------


def to_markdown(record: dict[str, Any]) -> str:
    """The results as a page."""
    lines = ["# Certified detection", "", "Made by benchmarks/detection.py; its docstring says what is done."]
    if "smoothed" in record:
        cells = record["smoothed"]
        first = next(iter(cells.values()))
        header = ("detector", "bins, order", "AP", *(f"proved at l2 {eps}" for eps in first["proved"]), "CPU s")
        rows = [(*key.split("; "), c["ap"], *c["proved"].values(), c["draw_cpu_seconds"]) for key, c in cells.items()]
        setting = (
            f"sigma {first['sigma']:g}, n = {first['n']}, {first['images']} scenes, confidence {first['confidence']}"
        )
        lines += ["", "## smoothed", "", setting + ".", "", markdown_table(header, rows)]
    if "attack" in record:
        header = (
            "detector",
            "threat",
            "AP",
            "attacked",
            "proved",
            "medians outside",
            "bare",
            "bare, attacked",
            "CPU s",
        )
        rows = [
            (
                *key.split("; "),
                *(c[k] for k in ("clean", "attacked", "proved", "medians outside their bounds")),
                *(c[k] for k in ("bare", "bare attacked", "cpu_seconds")),
            )
            for key, c in record["attack"].items()
        ]
        lines += ["", "## attack", "", markdown_table(header, rows)]
    runs = {describe_markdown(cell["run"]) for cells in record.values() for cell in cells.values()}
    return "\n".join([*lines, "", "## Runs", "", *sorted(runs)])


def judge(record: dict[str, Any]) -> Iterator[Judgement]:
    """What the figures say of the claims; networks of one seed decide none of them."""
    open_ = "not decided at this size"
    if "smoothed" in record:
        cells = record["smoothed"]
        with_noise = {key: c["proved"] for key, c in cells.items() if key.startswith("trained with noise")}
        yield "detection-table-bins", open_, f"proved: {with_noise}"
        without = {key: (c["ap"], c["proved"]) for key, c in cells.items() if key not in with_noise}
        yield "detection-denoiser", open_, f"AP, proved: {without}"
    if "attack" in record:
        found = {key: (c["clean"], c["attacked"], c["proved"]) for key, c in record["attack"].items()}
        yield "detection-attack-inside", open_, f"AP clean, attacked, proved: {found}"


# --- Command line -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Runs the part that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder for the trained networks")
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--scenes", type=int, default=SCENES, help="scenes to train on")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--images", type=int, default=200, help="scenes to judge on")
    parser.add_argument("--n", type=int, default=2000, help="noisy copies of each")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    test = detection_scenes(options.images, split="test")
    {"smoothed": run_smoothed, "attack": run_attack}[options.part](options, test)
    report_claims(judge(read_results(NAME, options.out)))


if __name__ == "__main__":
    main()
