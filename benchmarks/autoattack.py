"""Our ensembles of attacks against AutoAttack as its authors publish it, and single attacks against those of peers.

Three parts, which can run at different times and are put together in one file of results:

- official: the standard version of AutoAttack on the first test inputs, attack by attack;
- ours: `autoattack` and `cascade` of Holdfast on the same inputs;
- speed: PGD with 40 steps and APGD on the cross-entropy with 100 steps on two batches of 256, against torchattacks,
  foolbox (PGD only), ART, and the authors' APGD (APGD only), as in attacks_speed.py.

One thread everywhere. Every example of the authors' AutoAttack is checked for the budget and for the class before it
counts; the check is not part of its time, while Holdfast's own checks are part of ours. Parameters need no gradients in
the first two parts, which spares the peer what Holdfast spares itself.

AutoAttack is not on PyPI: take a checkout of its repository (github.com/fra31/auto-attack). The other peers:

    pip install --no-deps torchattacks foolbox eagerpy adversarial-robustness-toolbox    # none may replace torch
    pip install requests gitpython scikit-learn six tqdm

    python benchmarks/attack_models.py --folder MODELS --data ROOT
    python benchmarks/autoattack.py --models MODELS --data ROOT --official CHECKOUT              # hours
    python benchmarks/autoattack.py --models MODELS --data ROOT --part ours --only mnist-pgd
"""

import argparse
import contextlib
import importlib
import io
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attacks_speed
import torch
from attack_models import SPECS, load
from attacks_speed import OURS, Attack, Setting, frozen
from common import RESULTS, Neighbours, describe_markdown, describe_run, markdown_table, write_results
from torch import Tensor, nn

import holdfast as hf
from holdfast.data import Split

NAME = "autoattack"
ENSEMBLES = ("autoattack", "cascade")
STANDARD = ("apgd-ce", "apgd-t", "fab-t", "square")  # the standard version, in its order
BATCH = 250  # of the authors' evaluation, which is also their default
PACKAGES = ("holdfast", "torch")
PEERS = ("torchattacks", "foolbox", "adversarial-robustness-toolbox")
ROUNDS = 2  # batches of the part speed

Cell = dict[str, Any]


# --- Results: one file, read and written again with every finished cell -----------------------------------------------


def read_results(folder: Path) -> dict[str, Cell]:
    """What was measured so far, by model; empty if nothing was."""
    path = folder / f"{NAME}.json"
    return json.loads(path.read_text())["models"] if path.exists() else {}


def store(folder: Path, model: str, part: str, key: str, cell: Cell) -> None:
    """Puts one cell among the results; read anew, because another part may have been written meanwhile."""
    models = read_results(folder)
    models.setdefault(model, {}).setdefault(part, {})[key] = cell
    record = {"models": {name: models[name] for name in SPECS if name in models}}
    write_results(NAME, record, to_markdown(record), folder)


@contextlib.contextmanager
def timed(cell: Cell) -> Iterator[None]:
    """Adds the seconds of the processor and of the clock to `cell`, and how many cores others kept busy."""
    neighbours, cpu, wall = Neighbours(), time.process_time(), time.perf_counter()
    yield
    cell["cpu_seconds"] = round(time.process_time() - cpu, 2)
    cell["wall_seconds"] = round(time.perf_counter() - wall, 2)
    cell["others"] = neighbours.cores()


def _flags(robust: Tensor) -> str:
    """One character per input: 1 where it holds."""
    return "".join("1" if holds else "0" for holds in robust.tolist())


def _robust(cell: Cell) -> Tensor:
    return torch.tensor([flag == "1" for flag in cell["robust"]])


# --- The authors' AutoAttack ------------------------------------------------------------------------------------------


def import_official(checkout: Path) -> Any:
    """The package of the checkout; its name is that of this script, so its folder must come first."""
    sys.path.insert(0, str(checkout))
    try:
        return importlib.import_module("autoattack")
    finally:
        sys.path.remove(str(checkout))


def describe_official(checkout: Path) -> str:
    """The commit of the checkout, which has no release to name."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()[:12]


def run_official(
    package: Any, model: nn.Module, part: Split, threat: hf.Linf, done: dict[str, Cell], finish: Callable[..., None]
) -> None:
    """The standard version, one attack at a time, each on what the ones before have left.

    That is what one call for all four does too. Asked for one attack, the authors' evaluation repeats its checks of the
    model and one pass over the inputs, well below a hundredth of the time. Attacks in `done` are not repeated.
    """
    attack = package.AutoAttack(
        model, norm="Linf", eps=threat.eps, seed=0, version="standard", device="cpu", verbose=False
    )
    assert tuple(attack.attacks_to_run) == STANDARD
    robust = torch.ones(len(part), dtype=torch.bool)
    for name in ("clean", *STANDARD):
        if name in done and len(done[name]["robust"]) == len(part):
            robust = _robust(done[name])
            continue
        cell: Cell = {"inputs": len(part), "attacked": int(robust.sum())}
        rows = robust.nonzero()[:, 0]
        x_adv = part.x[rows]
        attack.attacks_to_run = [name]
        with timed(cell), contextlib.redirect_stdout(io.StringIO()):
            if name != "clean" and len(rows):
                x_adv = attack.run_standard_evaluation(part.x[rows], part.y[rows], bs=BATCH)
        robust[rows] = ~_broken(model, part[rows], threat, x_adv)
        cell["robust"] = _flags(robust)
        finish(name, cell)


@torch.no_grad()
def _broken(model: nn.Module, part: Split, threat: hf.Linf, x_adv: Tensor) -> Tensor:
    """(B,) bool: the example is misclassified and lies in the threat set. The peer gets some room for rounding."""
    inside = threat.distance(x_adv, part.x) <= threat.eps + 1e-6
    wrong = torch.cat([model(x).argmax(1) for x in x_adv.split(BATCH)]) != part.y
    return wrong & inside


# --- Ours -------------------------------------------------------------------------------------------------------------


def run_ours(model: nn.Module, part: Split, threat: hf.Linf, method: str) -> Cell:
    """One call; which attack of the ensemble broke how many inputs, and the mean work per input."""
    cell: Cell = {"inputs": len(part)}
    with timed(cell):
        result = hf.attack(model, part.x, part.y, threat, method)
    names = [name for name in dict.fromkeys(result.by) if name]
    return {
        **cell,
        "broken_by": {name: result.by.count(name) for name in names},
        "gradients": round(result.gradients.double().mean().item(), 1),
        "queries": round(result.queries.double().mean().item(), 1),
        "robust": _flags(~result.success),
    }


# --- Single attacks ---------------------------------------------------------------------------------------------------


def pgd_contenders(model: nn.Module, setting: Setting) -> dict[str, Attack]:
    """Those of attacks_speed.py, and ART."""
    from art.attacks.evasion import ProjectedGradientDescentPyTorch

    attack = ProjectedGradientDescentPyTorch(
        _art_classifier(model),
        eps=setting.eps,
        eps_step=setting.step_size,
        max_iter=setting.steps,
        num_random_init=1,
        batch_size=setting.batch,
        verbose=False,
    )
    return {**attacks_speed.contenders(model, setting), **_both(model, "ART", _by_art(attack))}


def apgd_contenders(model: nn.Module, setting: Setting, official: Any) -> dict[str, Attack]:
    """APGD on the cross-entropy: one run from a random point, its first step 2 eps as in the paper."""
    import torchattacks
    from art.attacks.evasion import AutoProjectedGradientDescent

    threat = hf.Linf(setting.eps)
    options = {"norm": "Linf", "eps": setting.eps, "n_restarts": 1, "loss": "ce", "verbose": False}
    theirs = importlib.import_module(f"{official.__name__}.autopgd_base").APGDAttack(
        model, n_iter=setting.steps, device="cpu", **options
    )
    copy = torchattacks.APGD(model, steps=setting.steps, **options)
    art = AutoProjectedGradientDescent(
        _art_classifier(model),
        eps=setting.eps,
        eps_step=2 * setting.eps,
        max_iter=setting.steps,
        nb_random_init=1,
        batch_size=setting.batch,
        loss_type="cross_entropy",
        verbose=False,
    )

    def by_holdfast(x: Tensor, y: Tensor, seed: int) -> Tensor:
        return hf.attack(model, x, y, threat, "apgd-ce", seed=seed, steps=setting.steps).x_adv

    def by_authors(x: Tensor, y: Tensor, seed: int) -> Tensor:
        theirs.seed = seed
        x_adv: Tensor = theirs.perturb(x, y)
        return x_adv

    def by_torchattacks(x: Tensor, y: Tensor, seed: int) -> Tensor:
        copy.seed = seed
        x_adv: Tensor = copy(x, y)
        return x_adv

    peers = {"AutoAttack's authors": by_authors, "torchattacks": by_torchattacks, "ART": _by_art(art)}
    variants = [_both(model, name, attack) for name, attack in peers.items()]
    return {OURS: by_holdfast, **{name: attack for pair in variants for name, attack in pair.items()}}


def _both(model: nn.Module, name: str, attack: Attack) -> dict[str, Attack]:
    """A peer as it comes, and spared the gradients of the parameters."""
    return {name: attack, f"{name}, frozen": frozen(model, attack)}


def _art_classifier(model: nn.Module) -> Any:
    from art.estimators.classification import PyTorchClassifier

    shape = tuple(model.architecture[1]["input_shape"])  # type: ignore[index]
    loss = nn.CrossEntropyLoss()
    return PyTorchClassifier(model, loss, input_shape=shape, nb_classes=10, clip_values=(0.0, 1.0), device_type="cpu")


def _by_art(attack: Any) -> Attack:
    import numpy

    def run(x: Tensor, y: Tensor, seed: int) -> Tensor:
        torch.manual_seed(seed)
        numpy.random.seed(seed)  # noqa: NPY002  (ART draws from the global generator)
        return torch.from_numpy(attack.generate(x.numpy(), y.numpy()))

    return run


def run_speed(model: nn.Module, data: hf.Dataset, setting: Setting, attacks: dict[str, Attack]) -> Cell:
    """Medians of each contender, the fastest peer by processor time, and our time divided by its."""
    neighbours = Neighbours()
    figures = attacks_speed.measure(model, data, setting, ROUNDS, attacks)
    cpu = {name: f["median_cpu_seconds"] for name, f in figures.items()}
    wall = {name: f["median_seconds"] for name, f in figures.items()}
    fastest = min((name for name in cpu if name != OURS), key=lambda name: cpu[name])
    return {
        "inputs": ROUNDS * setting.batch,
        "setting": {**vars(setting), "step_size": setting.step_size},
        "fastest_peer": fastest,
        "cpu_ratio": round(cpu[OURS] / cpu[fastest], 3),
        "wall_ratio": round(wall[OURS] / wall[fastest], 3),
        "others": neighbours.cores(),
        "contenders": figures,
    }


# --- The page ---------------------------------------------------------------------------------------------------------


def to_markdown(record: dict[str, Any]) -> str:
    """The results as a page."""
    models: dict[str, Cell] = record["models"]
    ensembles = [row for name, parts in models.items() for row in _ensemble_rows(name, parts)]
    stages = [
        (name, attack, cell["attacked"], _share(cell), _seconds(cell, "cpu"), _seconds(cell, "wall"), cell["others"])
        for name, parts in models.items()
        for attack, cell in parts.get("official", {}).items()
    ]
    ours = [
        (
            name,
            method,
            ", ".join(f"{attack} {count}" for attack, count in cell["broken_by"].items()),
            cell["gradients"],
            cell["queries"],
            _seconds(cell, "wall"),
            cell["others"],
        )
        for name, parts in models.items()
        for method, cell in parts.get("ours", {}).items()
    ]
    speed = [(name, attack, cell) for name, parts in models.items() for attack, cell in parts.get("speed", {}).items()]
    ratios = [
        (n, a, c["fastest_peer"], f"{c['cpu_ratio']:.2f}", f"{c['wall_ratio']:.2f}", c["others"]) for n, a, c in speed
    ]
    details = [
        (n, a, who, f"{f['median_cpu_seconds']:.2f}", f"{f['median_seconds']:.2f}", f"{f['robust']} of {f['inputs']}")
        for n, a, c in speed
        for who, f in c["contenders"].items()
    ]
    cells = [cell for parts in models.values() for part in parts.values() for cell in part.values()]
    runs = dict.fromkeys(_describe(cell["run"]) for cell in cells)
    who = ("model", "inputs", "clean")
    both = ("authors robust", "ours", "ours robust", "only authors broke", "only ours broke")
    times = ("authors CPU s", "ours CPU s", "ratio")
    sections = [
        "# AutoAttack, ours and its authors'",
        "First test inputs, one thread. MNIST models: linf 0.3; CIFAR-10 models: linf 8/255. Robust: share of the "
        "inputs that no attack broke, smaller is a stronger attack. Ratio: our processor time divided by theirs, "
        "smaller is better.",
        markdown_table((*who, *both, *times), ensembles),
        "The authors' standard version, attack by attack, each on what the ones before have left. Others: cores that "
        "other processes kept busy meanwhile.",
        markdown_table(("model", "attack", "attacked", "robust after", "CPU s", "wall s", "others"), stages),
        "Ours: inputs broken by each attack, mean gradients and forward passes per input.",
        markdown_table(("model", "method", "broken by", "gradients", "queries", "wall s", "others"), ours),
        "# Single attacks",
        f"Batches of 256, {ROUNDS} rounds, all contenders in turn in one process. The peer is the fastest by processor "
        "time; frozen: spared the gradients of the parameters.",
        markdown_table(("model", "attack", "fastest peer", "CPU ratio", "wall ratio", "others"), ratios),
        "Median seconds per batch, and the inputs left classified right (fewer is a stronger attack).",
        markdown_table(("model", "attack", "contender", "CPU s", "wall s", "robust"), details),
        "# Runs",
        *runs,
    ]
    return "\n\n".join(sections)


def _describe(run: dict[str, Any]) -> str:
    return describe_markdown(run) + (f"\n- {run['note']}" if run.get("note") else "")


def _ensemble_rows(name: str, parts: Cell) -> Iterator[tuple[object, ...]]:
    """One row for each of our methods; half of it is empty until the other side has run."""
    official = parts.get("official", {})
    complete = all(attack in official for attack in STANDARD)
    theirs = official[STANDARD[-1]] if complete else None
    clean = _share(official["clean"]) if "clean" in official else ""
    spent = sum(cell["cpu_seconds"] for cell in official.values())
    for method, cell in (parts.get("ours") or {"": None}).items():
        row: list[object] = [
            name,
            (cell or theirs or {"inputs": ""})["inputs"],
            clean,
            _share(theirs),
            method,
            _share(cell),
        ]
        if cell is None or theirs is None or cell["inputs"] != theirs["inputs"]:
            yield (*row, "", "", f"{spent:.1f}" if theirs else "", _seconds(cell, "cpu"), "")
            continue
        held, holds = _robust(theirs), _robust(cell)
        counts = int((~held & holds).sum()), int((held & ~holds).sum())
        yield (*row, *counts, f"{spent:.1f}", _seconds(cell, "cpu"), f"{cell['cpu_seconds'] / spent:.2f}")


def _share(cell: Cell | None) -> str:
    return "" if cell is None else f"{statistics.mean(flag == '1' for flag in cell['robust']):.1%}"


def _seconds(cell: Cell | None, clock: str) -> str:
    return "" if cell is None else f"{cell[f'{clock}_seconds']:.1f}"


# --- Command line -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Parses the command line and measures what it asks for, cell by cell."""
    parser = argparse.ArgumentParser(description="Compare our attacks with AutoAttack and other peers.")
    parser.add_argument("--models", type=Path, required=True, help="folder written by attack_models.py")
    parser.add_argument("--data", type=Path, required=True, help="root of MNIST and CIFAR-10")
    parser.add_argument("--official", type=Path, help="checkout of AutoAttack; needed by the parts official and speed")
    parser.add_argument("--part", choices=("official", "ours", "speed"), nargs="+", help="(default: all)")
    parser.add_argument("--only", choices=SPECS, nargs="+", default=list(SPECS), help="models (default: all)")
    parser.add_argument(
        "--methods", nargs="+", default=list(ENSEMBLES), help=f"of ours (default: {' '.join(ENSEMBLES)})"
    )
    parser.add_argument("--inputs", type=int, default=1000, help="of the parts official and ours (default: 1000)")
    parser.add_argument("--resume", action="store_true", help="keep the cells that are there, measure the missing ones")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder for the results (default: benchmarks/results)"
    )
    parser.add_argument("--note", default="", help="a remark on the data or the machine, written with the results")
    options = parser.parse_args()
    parts = options.part or ("official", "ours", "speed")
    if options.official is None and set(parts) != {"ours"}:
        parser.error("the parts official and speed need --official")
    warnings.simplefilter("ignore")  # the peers use names that newer Python and torch have deprecated
    torch.set_num_threads(1)
    for name in options.only:
        for part in parts:
            measure(name, part, options)


def measure(name: str, part: str, options: argparse.Namespace) -> None:
    """One part for one model."""
    spec, model = SPECS[name], load(name, options.models)
    data = hf.load_data(spec.data, root=options.data)
    inputs, threat = data.test[: options.inputs], spec.threat
    run = {**describe_run((*PACKAGES, *PEERS) if part == "speed" else PACKAGES), "note": options.note}
    if part != "ours":
        official = import_official(options.official)
        run["versions"]["AutoAttack"] = describe_official(options.official)
    done = read_results(options.out).get(name, {}).get(part, {}) if options.resume else {}

    def finish(key: str, cell: Cell) -> None:
        store(options.out, name, part, key, {**cell, "run": run})
        print(f"{name}, {part}, {key}: {cell.get('cpu_seconds', '')} s {_share(cell) if 'robust' in cell else ''}")

    if part == "speed":
        settings = {"pgd": Setting(spec.eps, steps=40), "apgd-ce": Setting(spec.eps, steps=100)}
        for key, setting in settings.items():
            if key not in done:
                apgd = key == "apgd-ce"
                attacks = apgd_contenders(model, setting, official) if apgd else pgd_contenders(model, setting)
                finish(key, run_speed(model, data, setting, attacks))
        return
    model.requires_grad_(False)
    # The first call is slow. The peer's process sees nothing of what Holdfast does to be fast.
    if part == "official":
        model(data.train.x[:BATCH])
        run_official(official, model, inputs, threat, done, finish)
        return
    hf.attack(model, data.train.x[:BATCH], data.train.y[:BATCH], threat, "pgd", steps=2)
    for method in options.methods:
        if method not in done or done[method]["inputs"] != len(inputs):
            finish(method, run_ours(model, inputs, threat, method))


if __name__ == "__main__":
    main()
