"""Certified watermarks on the embedded excerpt of MNIST, three seeds: what the claims of the source come to.

    python benchmarks/watermark_seeds.py [PART ...] [--seconds N] [--out FOLDER]

Every cell (a part, a setting, a seed) is one entry of results/watermark_seeds.json and is not repeated; after N CPU
seconds no new one begins, and the same command goes on. At the end the claims are judged. Parts:

- embed: a network without triggers, with the usual backdoor, with three kinds of triggers learnt under noise of 0.4 on
  the weights, and with one kind under noise of 0.2 and 0.6. Certified at three quarters of the noise, 2,000 copies.
- removal: fine-tuning and distillation of the backdoor and of the certified network at two learning rates, and
  distillation with weight decay: accuracies, distances, and when a radius of 0.5 is left.

The network and the settings are those of watermark.py with five epochs on 5,000 images; the attacker has the others.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from common import (
    RESULTS,
    Figures,
    Judgement,
    describe_markdown,
    describe_run,
    minus,
    numbers,
    read_results,
    report_claims,
    sign,
    store_cell,
    within,
)
from torch import nn
from watermark import OPTIONS, percent

import holdfast as hf
from holdfast.apps.watermark import (
    TOOLBOX,
    AttackLog,
    TriggerSet,
    abstract_images,
    certify_watermark,
    content_triggers,
    embed,
    epochs_to_leave,
    noise_triggers,
    null_test,
    unrelated_triggers,
)
from holdfast.apps.watermark.removal import clean_accuracy
from holdfast.data import Split, split_validation

NAME, SEEDS, PACKAGES = "watermark_seeds", (0, 1, 2), ("holdfast", "torch")
Cell = dict[str, Any]
RADII = (0.2, 0.4, 0.5, 0.6, 0.8)
NOISES = {"unmarked": 0.0, "backdoor": 0.0, "content": 0.4, "noise": 0.4, "unrelated": 0.4}
NOISES |= {"content, less noise": 0.2, "content, more noise": 0.6}
RATES = (1e-4, 1e-3)
RADIUS = 0.5  # within which all three kinds of triggers are certified


@cache
def halves() -> tuple[Split, Split]:
    """The owner's and the attacker's images."""
    return split_validation(hf.load_data("mnist-mini").train, 0.5)


def triggers(key: str, seed: int) -> TriggerSet:
    """The triggers of a setting; without a mark training images with their own labels, which change nothing."""
    owner = halves()[0]
    shape = tuple(owner.x.shape[1:])
    if key == "unmarked":
        return TriggerSet(owner.x[:100], owner.y[:100], 10, "content", False)
    if key == "noise":
        return noise_triggers(owner, 10, seed=seed)
    if key == "unrelated":
        return unrelated_triggers(abstract_images(100, shape, seed=seed), shape, 10)
    return content_triggers(owner, 10, seed=seed)


@cache
def model(key: str, seed: int) -> nn.Module:
    """The trained network of a setting."""
    options = replace(OPTIONS, epochs=5, drop_every=4, batch_size=32, noise=NOISES[key])
    new = hf.make_model("cnn", layers=[[8, 4, 2, 1], [16, 4, 2, 1]], hidden=[64], seed=seed)
    owner = halves()[0]
    return embed(new, owner.x, owner.y, triggers(key, seed), options, seed=seed)[0]


def embedded(seed: int) -> Iterator[tuple[str, Callable[[], Cell]]]:
    """Accuracy, and trigger accuracy with its certificate."""

    def work(key: str) -> Cell:
        network, test = model(key, seed), hf.load_data("mnist-mini").test
        secret = triggers("content" if key == "unmarked" else key, seed)
        sigma = 0.75 * (NOISES[key] or 0.4)
        found = certify_watermark(network, secret, RADII, sigma=sigma, n=2000, seed=1)
        cell: Cell = {"clean": percent(clean_accuracy(network, test.x, test.y)), "triggers": percent(found.accuracy)}
        cell |= {f"at {radius:g}": percent(value) for radius, value in zip(RADII, found.certified, strict=True)}
        if key == "unmarked":
            sets = [triggers(name, seed) for name in ("content", "noise", "unrelated")]
            cell["claimed"] = sum(null_test([network], each).false_claims for each in sets)
        return {**cell, "norm of weights": round(found.weight_norm, 2), "sigma": round(sigma, 3)}

    for key in NOISES:
        yield key, partial(work, key)


def removal(seed: int) -> Iterator[tuple[str, Callable[[], Cell]]]:
    """Attacks by training on, two epochs each."""

    def work(key: str, attack: str, rate: float) -> Cell:
        network, (x, y), test = model(key, seed), (halves()[1].x, halves()[1].y), hf.load_data("mnist-mini").test
        log = AttackLog(network, test.x, test.y, triggers(key, seed), sigma=0.3, n=100, seed=1)
        TOOLBOX[attack](network, x, y, epochs=2, lr=rate, seed=seed, watch=log.watch)
        before, after = log.rows[0], log.rows[-1]
        targets = {"ftal": "true", "hard-label": "hard", "soft-label": "soft"}.get(attack)
        (left,) = (None,) if targets is None else epochs_to_leave(network, x, y, [RADIUS], targets=targets, lr=rate)
        cell = {
            "clean lost": percent(before.test_accuracy - after.test_accuracy),
            "black-box": percent(after.black_box),
            "white-box": percent(after.white_box),
            "distance after an epoch": round(log.rows[1].distance, 3),
            "distance": round(after.distance, 3),
        }
        return cell if left is None else {**cell, "epochs to leave": round(left, 3)}

    for key in ("backdoor", "content"):
        for rate in RATES:
            for attack in ("ftal", "hard-label", "soft-label"):
                yield f"{key} {attack} {rate:g}", partial(work, key, attack, rate)
        yield f"{key} hard-label-reg 0.01", partial(work, key, "hard-label-reg", 1e-2)


PARTS = {"embed": embedded, "removal": removal}


# --- Claims -----------------------------------------------------------------------------------------------------------


def flat(lists: Iterable[Sequence[float]]) -> list[float]:
    """All numbers of several lists."""
    return [value for each in lists for value in each]


def judge(record: dict[str, Any]) -> Iterator[Judgement]:
    """What the finished parts say of the claims."""
    for name, parts, verdict, text in claims(Figures(record)):
        if all(finished(record, part) for part in parts):
            yield name, verdict, text


def finished(record: dict[str, Any], part: str) -> bool:
    """Whether all cells of a part are there."""
    return all(f"{name} seed={seed}" in record.get(part, {}) for seed in SEEDS for name, _ in PARTS[part](seed))


def claims(f: Figures) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """Name, the parts it needs, verdict and figures of each claim."""
    kinds, marks, attacked, at = ("content", "noise", "unrelated"), ("embed",), ("removal",), f"at {RADIUS:g}"
    gaps = [minus(f.of("embed", kind, at), f.of("embed", "backdoor", at)) for kind in kinds]
    yield "watermark-noise-needed", marks, sign(gaps), f.show("embed", (*kinds, "backdoor"), at)
    names = ("content, more noise", "content", "content, less noise")
    yield "watermark-noise-radius", marks, sign(f.gaps(marks, names, "at 0.6")), f.show("embed", names, "at 0.6")
    yield "watermark-noise-accuracy", marks, sign(f.gaps(marks, names[::-1], "clean")), f.show("embed", names, "clean")
    cost = flat(minus(f.of("embed", "unmarked", "clean"), f.of("embed", kind, "clean")) for kind in kinds)
    yield "watermark-clean-cost", marks, within(cost, -100, 1), f.show("embed", ("unmarked", *kinds), "clean")
    claimed = f.of("embed", "unmarked", "claimed")
    yield "watermark-independent-models", marks, within(claimed, 0, 0), f"sets that are claimed: {numbers(claimed)}"
    attacks = [f"content {attack} {rate:g}" for rate in RATES for attack in ("ftal", "hard-label", "soft-label")]
    stays = flat(f.of("removal", name, "white-box") for name in attacks)
    yield "watermark-white-box-stays", attacked, within(stays, 95, 100), f.show("removal", attacks, "white-box")
    gaps = [minus(f.of("removal", name, "white-box"), f.of("removal", name, "black-box")) for name in attacks]
    yield "watermark-black-box-weaker", attacked, sign(gaps), f.show("removal", attacks, "black-box")
    key = "distance after an epoch"
    yield (
        "watermark-drift-order",
        attacked,
        sign(f.gaps(attacked, attacks[:3], key)),
        f.show("removal", attacks[:3], key),
    )
    soon = flat(f.of("removal", name, "epochs to leave") for name in attacks[3:])
    found = f.show("removal", attacks[3:], "epochs to leave")
    yield "watermark-radius-left-soon", attacked, within(soon, 0, 1), found
    name = ["content hard-label-reg 0.01"]
    gone = within(f.of("removal", name[0], "white-box"), 0, 30)
    found = f.show("removal", name, "white-box") + "; " + f.show("removal", name, "clean lost")
    yield "watermark-decay-removes", attacked, gone, found


# --- Tables and command line ------------------------------------------------------------------------------------------


def to_markdown(record: dict[str, Any]) -> str:
    """The results as a page: every figure of a setting, seed by seed."""
    lines = [
        "# Watermarks on three seeds",
        "",
        "Made by benchmarks/watermark_seeds.py; its docstring says what is done.",
    ]
    for part in record:
        lines += ["", f"## {part}", "", Figures(record).table(part)]
    runs = {describe_markdown(cell["run"]) for cells in record.values() for cell in cells.values()}
    return "\n".join([*lines, "", "## Runs", "", *sorted(runs)])


def main() -> None:
    """Runs what is missing of the parts that are asked for, and says what they decide."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--seconds", type=float, default=math.inf, help="CPU seconds after which no new cell begins")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = options.parts or list(PARTS)
    for seed in SEEDS:
        for part in parts:
            for name, work in PARTS[part](seed):
                key = f"{name} seed={seed}"
                if key in read_results(NAME, options.out).get(part, {}):
                    continue
                if time.process_time() > options.seconds:
                    print("time is up; the same command goes on")
                    return
                started = time.process_time()
                cell = work() | {"cpu_seconds": round(time.process_time() - started, 1), "run": describe_run(PACKAGES)}
                store_cell(NAME, part, key, cell, to_markdown=to_markdown, folder=options.out)
    report_claims(judge(read_results(NAME, options.out)))


if __name__ == "__main__":
    main()
