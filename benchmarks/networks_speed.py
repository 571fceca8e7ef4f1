"""Attacks, smoothing and adversarial training on the networks that people have: ResNets and transformers.

A pre-activation ResNet-18 of a quarter of the usual width and a small vision transformer, both trained adversarially on
a part of CIFAR-10 (linf 8/255), meet the peers with their best settings: gradients of parameters off, one thread. Every
contender attacks the same inputs in turn; CPU time, medians of the rotations.

    python benchmarks/networks_speed.py --models MODELS --data cifar10.npz --part train          # 25 minutes, one core
    python benchmarks/networks_speed.py --models MODELS --data cifar10.npz --official CHECKOUT   # about an hour
    python benchmarks/networks_speed.py --models MODELS --data cifar10.npz --part large          # 5 minutes

The part "large" audits 100 images of 224 x 224 on a ResNet-50 and a ViT-S/16 with random weights, two minutes each by
the clock of the processor: is the time limit kept, in less than 4 GB?

`--data` is an .npz file with x_train, y_train, x_test, y_test (uint8); `--official` a checkout of the authors'
AutoAttack. Each cell is stored when it is measured; a later run of a part replaces its cells.
"""

import argparse
import contextlib
import importlib
import io
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, describe_run, markdown_table, store_cell
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

import holdfast as hf
from holdfast.certificates.smoothing.sample import Sampling, sample
from holdfast.certificates.smoothing.smoothing import gaussian
from holdfast.training.context import Precision, in_bfloat16
from holdfast.utils import clock

EPS = 8 / 255
MINUTES = {"preact-resnet18": 13.0, "vit": 9.0}
PARTS = ("train", "pgd", "apgd", "ensembles", "smoothing", "training", "large")
LARGE = {"preact-resnet18": "resnet50", "vit": "vit-s16"}  # the large network of each family
KINDS = {"PGD-10": (10, EPS / 4), "FGSM-RS": (1, 1.25 * EPS)}  # of adversarial training: steps and their size
LIMIT, GIGABYTES = 120.0, 4.0  # seconds and memory of an audit of 100 large inputs
BARS = {
    **{f"{n} pgd-40 auto": 0.65 for n in MINUTES},
    **{f"{n} pgd-40 full": 0.95 for n in MINUTES},
    **{f"{n} pgd-5 auto": 1.0 for n in MINUTES},
    **{f"{n} pgd-5 full": 1.0 for n in MINUTES},
    **{f"{n} apgd auto": 0.65 for n in MINUTES},
    **{f"{n} apgd full": 0.95 for n in MINUTES},
    **{f"{n} autoattack": 0.45 for n in MINUTES},
    **{f"{n} cascade": 0.06 for n in MINUTES},
}
Data = dict[str, Tensor]
Run = Callable[[], Any]


def network(name: str) -> nn.Module:
    """The architecture, with random weights."""
    if name == "vit":
        return hf.make_model("vit-ti", dim=128, depth=6, heads=4, mlp_dim=256, patch=4, pool="mean", seed=0)
    return hf.make_model("preact-resnet18", channels=(16, 32, 64, 128), stem_channels=16, seed=0)


def trained(name: str, folder: Path) -> nn.Module:
    """The network with its weights from the folder, gradients of its parameters off: the peers gain by it."""
    model = network(name)
    model.load_state_dict(load_file(folder / f"{name}.safetensors"))
    return model.eval().requires_grad_(False)


def train(name: str, data: Data, minutes: float) -> nn.Module:
    """Adversarial training for so many minutes of CPU time: two steps of 0.75 eps, AdamW, the budget rises first."""
    model, generator = network(name), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.02 if name == "vit" else 5e-4)
    rate, started = 1e-3 if name == "vit" else 3e-3, time.process_time()
    while (used := (time.process_time() - started) / (60 * minutes)) < 1:
        rows = torch.randint(20_000, (128,), generator=generator)
        x, y, eps = data["x_train"][rows], data["y_train"][rows], EPS * min(1.0, used / 0.3)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(used / 0.1, (1 - used) / 0.9 + 1e-3)
        x = x.flip(3) if float(torch.rand((), generator=generator)) < 0.5 else x
        x_adv = plain_pgd(model.eval(), x, y, eps, 2, 0.75 * eps, half=True)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model.train()(x_adv), y)
        loss.backward()
        optimizer.step()
    return model.eval()


def plain_pgd(
    model: nn.Module, x: Tensor, y: Tensor, eps: float, steps: int, size: float, *, half: bool = False
) -> Tensor:
    """The loop of the textbook, with gradients of the parameters off."""
    model.requires_grad_(False)
    x_adv = (x + eps * (2 * torch.rand_like(x) - 1)).clamp(0, 1)
    for _ in range(steps):
        x_adv.requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = cross_entropy(model(x_adv), y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, x_adv)
        moved = x_adv.detach() + size * gradient.sign()
        x_adv = torch.min(torch.max(moved, x - eps), x + eps).clamp(0, 1)
    model.requires_grad_(True)
    return x_adv.detach()


def rotate(runs: dict[str, Run], rounds: int) -> dict[str, tuple[float, Any]]:
    """Median CPU seconds of each run, the first one included, and what it returned last."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    last: dict[str, Any] = {}
    for number in range(rounds):
        shift = number % len(runs)
        for name in [*runs, *runs][shift : shift + len(runs)]:
            started = time.process_time()
            last[name] = runs[name]()
            seconds[name].append(time.process_time() - started)
    return {name: (statistics.median(seconds[name]), last[name]) for name in runs}


def robust(model: nn.Module, x_adv: Tensor, y: Tensor) -> int:
    """Inputs that are still classified right."""
    with torch.no_grad():
        return int((model(x_adv).argmax(1) == y).sum())


def peers(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> dict[str, Run]:
    """PGD of torchattacks and foolbox."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import foolbox
        import torchattacks

    size = 2.5 * EPS / steps
    pgd = torchattacks.PGD(model, eps=EPS, alpha=size, steps=steps)
    linf = foolbox.attacks.LinfPGD(abs_stepsize=size, steps=steps, random_start=True)
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1))
    return {"torchattacks": lambda: pgd(x, y), "foolbox": lambda: linf.run(wrapped, x, y, epsilon=EPS)}


def ours(model: nn.Module, x: Tensor, y: Tensor, method: str, precision: str, **options: Any) -> Run:
    """A whole call, with its checks."""
    return lambda: hf.attack(model, x, y, hf.Linf(EPS), method, precision=precision, **options).x_adv  # type: ignore[arg-type]


def versus(model: nn.Module, x: Tensor, y: Tensor, runs: dict[str, Run], rounds: int) -> dict[str, Any]:
    """Seconds and robust inputs of each contender, and our ratios to the fastest peer."""
    found = rotate(runs, rounds)
    best = min(found[name][0] for name in runs if not name.startswith("holdfast"))
    return {
        "inputs": len(x),
        "rounds": rounds,
        "contenders": {
            name: {"cpu_seconds": round(s, 3), "robust": robust(model, x_adv, y), "ratio": round(s / best, 3)}
            for name, (s, x_adv) in found.items()
        },
    }


def measure_pgd(name: str, model: nn.Module, data: Data, options: argparse.Namespace) -> dict[str, Any]:
    """PGD with 5 and 40 steps; with --unbroken on inputs that 40 steps do not break, so that none leaves the batch."""
    x, y = data["x_test"][: options.inputs], data["y_test"][: options.inputs]
    cells, where = {}, ""
    if options.unbroken:
        hold = ~hf.attack(model, x, y, hf.Linf(EPS), "pgd", steps=40).success
        x, y, where = x[hold], y[hold], " unbroken"
    for steps in options.steps:
        runs = {f"holdfast {p}": ours(model, x, y, "pgd", p, steps=steps) for p in ("auto", "full")}
        cells[f"{name} pgd-{steps}{where}"] = versus(model, x, y, {**runs, **peers(model, x, y, steps)}, options.rounds)
    return cells


def measure_apgd(name: str, model: nn.Module, data: Data, options: argparse.Namespace) -> dict[str, Any]:
    """Auto-PGD on the cross-entropy, 100 steps, against the authors' code and torchattacks."""
    x, y = data["x_test"][: options.inputs], data["y_test"][: options.inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchattacks

    official(options.official)
    base = importlib.import_module("autoattack.autopgd_base")
    how = {"n_iter": 100, "norm": "Linf", "n_restarts": 1, "eps": EPS, "seed": 0, "loss": "ce", "device": "cpu"}
    theirs = base.APGDAttack(model, eot_iter=1, rho=0.75, verbose=False, **how)
    other = torchattacks.APGD(model, eps=EPS, steps=100, n_restarts=1, loss="ce", seed=0)
    runs = {f"holdfast {p}": ours(model, x, y, "apgd-ce", p, steps=100) for p in ("auto", "full")}
    runs |= {"AutoAttack's authors": lambda: theirs.perturb(x, y), "torchattacks": lambda: other(x, y)}
    return {f"{name} apgd": versus(model, x, y, runs, 1)}


def official(checkout: Path) -> Any:
    """The authors' package; this folder has a file of its name."""
    sys.path.insert(0, str(checkout))
    sys.modules.pop("autoattack", None)
    return importlib.import_module("autoattack")


def measure_ensembles(name: str, model: nn.Module, data: Data, options: argparse.Namespace) -> dict[str, Any]:
    """`autoattack` and `cascade` against the authors' standard version, once."""
    x, y = data["x_test"][: options.few], data["y_test"][: options.few]
    package = official(options.official)
    attack = package.AutoAttack(model, norm="Linf", eps=EPS, seed=0, version="standard", device="cpu", verbose=False)

    def theirs() -> Any:
        with contextlib.redirect_stdout(io.StringIO()):
            return attack.run_standard_evaluation(x, y, bs=len(x))

    runs = {f"holdfast {m}": ours(model, x, y, m, "auto") for m in ("cascade", "autoattack")}
    return {f"{name} ensembles": versus(model, x, y, {**runs, "AutoAttack's authors": theirs}, 1)}


def measure_smoothing(name: str, model: nn.Module, data: Data, options: argparse.Namespace) -> dict[str, Any]:
    """Samples a second: votes on noisy copies, by us and by the plain loop."""
    x, y, n = data["x_test"][:4], data["y_test"][:4], 1000

    def plain() -> int:
        with torch.no_grad():
            for one in x:
                for _ in range(n // 100):
                    noisy = one.repeat(100, 1, 1, 1) + 0.25 * torch.randn(100, *one.shape)
                    model(noisy).argmax(1).bincount(minlength=10)
        return len(x) * n

    def by_us(precision: str) -> Run:
        how = Sampling(n=n, n0=100, adaptive=False, batch=100, precision=precision)  # type: ignore[arg-type]

        def run() -> int:
            votes = sample(model, x, y, gaussian(0.25), torch.ones(0), how, noise="gaussian 0.25", classes=10)
            return int(votes.drawn.sum()) + len(x) * how.n0

        return run

    found = rotate(
        {"plain loop": plain, "holdfast full": by_us("full"), "holdfast bfloat16": by_us("bfloat16")}, options.rounds
    )
    rates = {key: drawn / seconds for key, (seconds, drawn) in found.items()}
    return {
        f"{name} smoothing": {
            "samples_per_second": {key: round(rate) for key, rate in rates.items()},
            "times_plain": {key: round(rate / rates["plain loop"], 2) for key, rate in rates.items()},
            "bar": 1.7,
            "rounds": options.rounds,
        }
    }


def measure_training(name: str, model: nn.Module, data: Data, options: argparse.Namespace) -> dict[str, Any]:
    """Images a second of adversarial training with PGD-10 and FGSM-RS: plain loop with torchattacks against ours.

    Also the robust accuracy (PGD-10, the first test inputs) after each of three epochs.
    """
    del model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchattacks

    from holdfast.attacks.core.ascent import perturb
    from holdfast.random import Noise

    cells = {}
    x_all, y_all = data["x_train"][: options.images], data["y_train"][: options.images]
    for kind in options.kinds:
        steps, size = KINDS[kind]
        figures: dict[str, Any] = {}
        for contender in ("torchattacks", "torchattacks bfloat16", "holdfast full", "holdfast bfloat16"):
            precision: Precision = "bfloat16" if contender.endswith("bfloat16") else "full"
            net = network(name).train()
            optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
            peer = torchattacks.PGD(net, eps=EPS, alpha=size, steps=steps)
            generator, seconds, curve = torch.Generator().manual_seed(0), 0.0, []
            for epoch in range(3):
                started = time.process_time()
                for rows in torch.randperm(len(y_all), generator=generator).split(128):
                    x, y = x_all[rows], y_all[rows]
                    optimizer.zero_grad()
                    with in_bfloat16(x, precision):
                        if contender.startswith("torchattacks"):
                            x_adv = peer(x, y)
                        else:
                            noise = Noise(epoch, rows)
                            x_adv = perturb(net.eval(), x, y, hf.Linf(EPS), noise=noise, steps=steps, step_size=size)
                        logits = net.train()(x_adv)
                    cross_entropy(logits.float(), y).backward()
                    optimizer.step()
                seconds += time.process_time() - started
                x, y = data["x_test"][: options.inputs], data["y_test"][: options.inputs]
                curve.append(robust(net.eval(), plain_pgd(net, x, y, EPS, 10, EPS / 4), y) / len(x))
                net.train()
            figures[contender] = {"images_per_second": round(3 * len(y_all) / seconds, 1), "robust_accuracy": curve}
        base = figures["torchattacks"]["images_per_second"]
        for figure in figures.values():
            figure["times_plain"] = round(figure["images_per_second"] / base, 2)
        cells[f"{name} training {kind}"] = {"contenders": figures, "bar": 1.5, "images": len(y_all), "inputs": len(x)}
    return cells


def measure_large(name: str, model: nn.Module, data: Data, options: argparse.Namespace) -> dict[str, Any]:
    """An audit of 100 large inputs with a time limit: what it took, and what it says it could not do.

    The labels are the model's own answers: all weights are random.
    """
    del model
    large = hf.make_model(LARGE[name], seed=0).eval()
    x = interpolate(data["x_test"][: options.inputs], size=(224, 224), mode="bilinear").clamp(0, 1)
    with torch.no_grad():
        y = torch.cat([large(part).argmax(1) for part in x.split(10)])
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory starts anew
    with tempfile.TemporaryDirectory() as out, clock.timed_by(time.process_time):
        started = time.process_time()
        result = hf.audit(large, (x, y), hf.Linf(4 / 255), budget=LIMIT, n=len(x), out=Path(out) / "run")
        seconds = time.process_time() - started
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 2**20
    level = result.levels[-1]
    return {
        f"{LARGE[name]} audit": {
            "inputs": level.inputs,
            "cpu_seconds": round(seconds, 1),
            "most_seconds": 1.1 * LIMIT + 1,
            "gigabytes": round(peak, 2),
            "most_gigabytes": GIGABYTES,
            "certified": level.certified,
            "attacked": level.attacked,
            "not_done": list(result.brackets[0].skipped),
        }
    }


MEASURE = {
    "large": measure_large,
    "pgd": measure_pgd,
    "apgd": measure_apgd,
    "ensembles": measure_ensembles,
    "smoothing": measure_smoothing,
    "training": measure_training,
}


def open_bars(record: dict[str, Any]) -> list[str]:
    """What has a bar and no figure."""
    wanted = [f"{name} {what}" for name in MINUTES for what in ("pgd-5", "pgd-40", "apgd", "ensembles", "smoothing")]
    wanted += [f"{name} training {kind}" for name in MINUTES for kind in ("PGD-10", "FGSM-RS")]
    wanted += [f"{name} audit" for name in LARGE.values()]
    measured = {key for cells in record.values() for key in cells}
    return [key for key in wanted if key not in measured]


def to_markdown(record: dict[str, Any]) -> str:
    """The results as a page."""
    attacks, rates, large, runs = [], [], [], []
    for part, cells in record.items():
        for key, cell in cells.items():
            runs.append(f"- {cell['run']['date']}, {key}: `{cell['run']['command']}`")
            if part in ("pgd", "apgd", "ensembles"):
                for who, figure in cell["contenders"].items():
                    words = key.replace(" ensembles", "").replace(" unbroken", "") + " " + who.removeprefix("holdfast ")
                    bar = BARS.get(words) if who.startswith("holdfast") else None
                    met = "" if bar is None else ("yes" if figure["ratio"] <= bar else "no")
                    left = f"{figure['robust']} of {cell['inputs']}"
                    key_rounds = f"{key}, rounds: {cell['rounds']}"
                    row = (key_rounds, who, figure["cpu_seconds"], f"{figure['ratio']:.2f}", bar or "", met, left)
                    attacks.append(row)
            elif part == "smoothing":
                for who, times in cell["times_plain"].items():
                    met = "" if who == "plain loop" else ("yes" if times >= cell["bar"] else "no")
                    rates.append((key, who, cell["samples_per_second"][who], times, cell["bar"], met, ""))
            elif part == "training":
                for who, figure in cell["contenders"].items():
                    met = (
                        ""
                        if who.startswith("torchattacks")
                        else ("yes" if figure["times_plain"] >= cell["bar"] else "no")
                    )
                    curve = " ".join(f"{share:.3f}" for share in figure["robust_accuracy"])
                    speed = (figure["images_per_second"], figure["times_plain"])
                    rates.append((key, who, *speed, cell["bar"], met, curve))
            elif part == "large":
                kept = cell["cpu_seconds"] <= cell["most_seconds"] and cell["gigabytes"] < cell["most_gigabytes"]
                limits = (f"{cell['most_seconds']:g}", cell["gigabytes"], cell["most_gigabytes"])
                bracket = f"{cell['certified']} to {cell['attacked']} of {cell['inputs']}"
                said = "; ".join(cell["not_done"])
                large.append((key, cell["cpu_seconds"], *limits, "yes" if kept else "no", bracket, said))
    intro = (__doc__ or "").split("\n\n")[1].replace("\n", " ")
    machine = next((cell["run"] for cells in record.values() for cell in cells.values()), None)
    where = (
        "" if machine is None else f"{machine['machine']}; {machine['versions']}. CIFAR-10 images went through JPEG."
    )
    header = ("what", "contender", "CPU s", "ratio to the fastest peer", "at most", "met", "classified right")
    return "\n\n".join(
        [
            "# Speed on ResNets and transformers",
            intro,
            where,
            "[Notes](notes/networks-speed.md): how busy the machine was, and why bars were missed.",
            markdown_table(header, attacks),
            "Samples or images a second, and as a multiple of the plain loop; robust accuracy after each epoch.",
            markdown_table(("what", "contender", "a second", "times plain", "at least", "met", "robust"), rates),
            "An audit of images of 224 x 224 with a limit of two minutes, by the clock of the processor; linf 4/255, "
            "random weights.",
            markdown_table(("what", "CPU s", "at most", "GB", "below", "met", "bracket", "said to be not done"), large),
            "# Not measured",
            "Bars without a figure here, which is not to say that they are met: "
            + ("; ".join(open_bars(record)) or "none")
            + ".",
            "# Runs",
            "\n".join(runs),
        ]
    )


def main() -> None:
    """Parse the command line, measure, store."""
    parser = argparse.ArgumentParser(description="Speed of attacks, smoothing and training on ResNets and ViTs.")
    parser.add_argument("--models", type=Path, required=True, help="folder of the trained weights")
    parser.add_argument("--data", type=Path, required=True, help=".npz file of CIFAR-10")
    parser.add_argument("--official", type=Path, help="checkout of AutoAttack; needed by apgd and ensembles")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS[1:-1])
    parser.add_argument("--only", choices=tuple(MINUTES), nargs="+", default=tuple(MINUTES))
    parser.add_argument("--minutes", type=float, help="of training, each network (default: 13 and 9)")
    parser.add_argument("--inputs", type=int, default=200, help="attacked, or judged after an epoch (default: 200)")
    parser.add_argument("--steps", type=int, nargs="+", default=(5, 40), help="of pgd (default: 5 40)")
    parser.add_argument("--rounds", type=int, default=3, help="rotations of pgd and smoothing (default: 3)")
    parser.add_argument("--unbroken", action="store_true", help="pgd only on inputs that pgd does not break")
    parser.add_argument("--few", type=int, default=64, help="attacked by the ensembles (default: 64)")
    parser.add_argument("--images", type=int, default=2000, help="of an epoch of training (default: 2000)")
    parser.add_argument("--kinds", choices=tuple(KINDS), nargs="+", default=tuple(KINDS), help="of training")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with np.load(options.data) as file:
        keys = ("x_test", "y_test", *(("x_train", "y_train") if {"train", "training"} & set(options.part) else ()))
        pixels = {key: torch.from_numpy(file[key][: 20_000 if "train" in key else 1000].copy()) for key in keys}
    data = {key: t.float() / 255 if key.startswith("x") else t.long() for key, t in pixels.items()}
    for name in options.only:
        if "train" in options.part:
            weights = train(name, data, options.minutes or MINUTES[name]).state_dict()
            save_file({key: t.contiguous() for key, t in weights.items()}, options.models / f"{name}.safetensors")
        for part in (part for part in options.part if part != "train"):
            model = network(name) if part in ("training", "large") else trained(name, options.models)
            for key, cell in MEASURE[part](name, model, data, options).items():
                cell["run"] = describe_run(("torch", "torchattacks", "foolbox"))
                store_cell("networks_speed", part, key, cell, to_markdown=to_markdown, folder=options.out)


if __name__ == "__main__":
    main()
