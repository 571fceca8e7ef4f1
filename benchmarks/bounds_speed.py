"""Bounds against bounds: Holdfast and auto_LiRPA on the same networks, inputs, boxes and threads.

Networks have random weights, but for two residual networks with batch norm and 1x1 shortcuts that are trained
adversarially on CIFAR-10 (linf 2/255) and meet its test images: `--trained`. Each contender of a case lives in a
process of its own, so that its peak memory is its own and a crash is a line in the table; the processes take turns, one
repetition each, so that a busy machine slows all of them. Tracing the network (ours) and building the BoundedModule
(theirs) are not timed. auto_LiRPA runs with both of its representations of convolutions, patches and matrices; Holdfast
is compared with the faster one.

The release of auto_LiRPA on PyPI does not install beside a current torch; take a checkout of its repository, version
0.7 or later, and install it without its pinned requirements:

    pip install --no-deps <checkout of auto_LiRPA>
    pip install appdirs graphviz packaging pyyaml sortedcontainers tqdm

    python benchmarks/bounds_speed.py            # all cases; hours, most of them the peer's
    python benchmarks/bounds_speed.py --quick    # small cases only, about three minutes; writes nothing
    python benchmarks/bounds_speed.py --trained MODELS --data cifar10.npz --train     # weights, four minutes
    python benchmarks/bounds_speed.py --trained MODELS --data cifar10.npz             # writes bounds_resnets

`--data` is an .npz file with x_train, y_train and x_test (uint8).
"""

import argparse
import contextlib
import json
import math
import resource
import select
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import describe_markdown, describe_run, load_average, markdown_table, write_results
from networks_speed import plain_pgd
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import holdfast as hf
from holdfast.bounding import interval
from holdfast.bounding.core.region import region
from holdfast.bounding.graph.trace import trace
from holdfast.bounding.linear import alpha
from holdfast.bounding.linear import relaxation as linear

PACKAGES = ("holdfast", "torch", "auto_LiRPA")
OURS, SOUND, PATCHES, MATRIX = "holdfast", "holdfast, sound", "auto_LiRPA, patches", "auto_LiRPA, matrix"
SOUND_BAR = 2.0  # at most this many times the cost without the account of rounding
EQUAL = 1e-4  # bounds that differ by less than this part of their width count as equal
SHORT = 0.2  # seconds: a repetition calls a fast method as often as fills this

Bounds = tuple[Tensor, Tensor]
Run = Callable[[], Bounds]


@dataclass(frozen=True)
class Method:
    """How auto_LiRPA calls it, how much faster than auto_LiRPA we want to be, and whether memory has a bar too."""

    peer: str
    bar: float
    convolutions: tuple[str, ...] = (PATCHES, MATRIX)
    memory: bool = False
    networks: tuple[str, ...] = ("mlp", "cnn28", "resnet", "6c2f")
    trained: bool = True


ITERATIONS, LEARNING_RATE = 20, 0.1  # of alpha-CROWN; the peer's default of both but the rate, which is 0.5
METHODS = {
    "ibp": Method("IBP", 2.0, convolutions=(PATCHES,)),
    "crown-ibp": Method("CROWN-IBP", 1.5),
    "crown": Method("CROWN", 1.5, memory=True),
    "alpha-crown": Method("CROWN-Optimized", 1.2, trained=False),
    "alpha-crown, joint": Method("CROWN-Optimized", 1.2, networks=("mlp", "cnn28"), trained=False),
}


@dataclass(frozen=True)
class Network:
    """An architecture, the shape of its inputs, the budget, and the larger batch that CROWN can carry."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    eps: float
    crown_batch: int = 64

    def batches(self, method: str, *, quick: bool) -> tuple[int, ...]:
        """The batch sizes of a method; alpha-CROWN multiplies the cost of CROWN by the iterations."""
        if method == "alpha-crown, joint":
            return (1,)
        large = {"crown": self.crown_batch, "alpha-crown": 4}.get(method, 64)
        return (1, min(16, large)) if quick else (1, large)


class Block(nn.Module):
    """Two 3x3 convolutions beside a 1x1 one."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C', H / stride, W / stride)."""
        return torch.relu(self.second(torch.relu(self.first(x))) + self.skip(x))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def _cnn28() -> nn.Module:
    convolutions = [nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 49, 100), nn.ReLU(), nn.Linear(100, 10))


def _resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 16, 3, 1, 1), nn.ReLU()]
    head = [nn.AvgPool2d(4), nn.Flatten(), nn.Linear(32 * 16, 10)]
    return nn.Sequential(*stem, Block(16, 16, 1), Block(16, 32, 2), *head)


NETWORKS = {
    "mlp": Network(_mlp, (784,), 0.1),
    "cnn28": Network(_cnn28, (1, 28, 28), 0.1),
    "resnet": Network(_resnet, (3, 32, 32), 2 / 255, crown_batch=4),
    "6c2f": Network(lambda: hf.make_model("6c2f"), (3, 32, 32), 2 / 255, crown_batch=4),
}
QUICK = ("mlp", "cnn28")


def _with_batch_norm(*channels: int) -> nn.Module:
    """A basic block in each stage; the shortcut is a 1x1 convolution where the shapes differ."""
    return hf.make_model("resnet18", blocks=(1,) * len(channels), channels=channels, seed=0)


TRAINED = {
    "resnet-4-8-16": Network(lambda: _with_batch_norm(4, 8, 16), (3, 32, 32), 1 / 255, crown_batch=16),
    "resnet-8-16-32": Network(lambda: _with_batch_norm(8, 16, 32), (3, 32, 32), 1 / 255, crown_batch=16),
}
TRAINED_BATCHES, TRAINED_BAR = (1, 16), 1.0
TRAINING_EPS, TRAINING_STEPS = 2 / 255, 600


def train(network: str, data: Path) -> nn.Module:
    """Adversarial training: two steps of 0.75 eps, the budget rises over the first third; SGD."""
    with np.load(data) as file:
        images, labels = (torch.from_numpy(file[key][:20_000]) for key in ("x_train", "y_train"))
    model, generator = TRAINED[network].make(), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=5e-4)
    for step in range(TRAINING_STEPS):
        rows = torch.randint(len(labels), (128,), generator=generator)
        x, y = images[rows].float() / 255, labels[rows].long()
        eps = TRAINING_EPS * min(1.0, step / (0.3 * TRAINING_STEPS))
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (step + 1) / 50, (TRAINING_STEPS - step) / (0.9 * TRAINING_STEPS))
        x_adv = plain_pgd(model.eval(), x.flip(3) if step % 2 else x, y, eps, 2, 0.75 * eps)
        optimizer.zero_grad()
        cross_entropy(model.train()(x_adv), y).backward()
        optimizer.step()
    return model.eval()


def prepared(case: "Case", options: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    """The network of a case and its inputs."""
    torch.manual_seed(0)
    if case.network in NETWORKS:
        network = NETWORKS[case.network]
        return network.make().eval(), torch.rand(case.batch, *network.shape)
    model = TRAINED[case.network].make()
    model.load_state_dict(load_file(options.trained / f"{case.network}.safetensors"))
    with np.load(options.data) as file:
        return model.eval(), torch.from_numpy(file["x_test"][: case.batch]).float() / 255


@dataclass(frozen=True)
class Case:
    """What the contenders of one comparison share."""

    network: str
    method: str
    batch: int
    threads: int

    def contenders(self) -> tuple[str, ...]:
        """Who takes part; a network without convolutions has nothing to choose."""
        peers = METHODS[self.method].convolutions
        # On the trained networks matrices took CROWN more than a minute at batch 1, where patches take seconds.
        one = self.network == "mlp" or (self.network in TRAINED and self.method == "crown")
        return (OURS, *(peers[:1] if one else peers), SOUND)


# --- In the process of one contender ----------------------------------------------------------------------------------


def work(case: Case, contender: str, options: argparse.Namespace) -> None:
    """Prepares, runs once, reports; then runs as often as each line of the standard input says."""
    resource.setrlimit(resource.RLIMIT_DATA, (int(options.memory_limit * 2**30),) * 2)
    torch.set_num_threads(case.threads)
    network = {**NETWORKS, **TRAINED}[case.network]
    model, x = prepared(case, options)
    make = _by_holdfast if contender in (OURS, SOUND) else _by_auto_lirpa
    run = make(model, x, network.eps, case.method, contender)
    before = _reset_peak()
    started = time.perf_counter()
    lower, upper = run()
    first = {"first_seconds": time.perf_counter() - started, "megabytes": _peak() - before}
    _say({**first, "lower": lower.tolist(), "upper": upper.tolist()})
    for line in sys.stdin:
        times = int(line)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(times):
            run()
        _say({"wall": (time.perf_counter() - wall) / times, "cpu": (time.process_time() - cpu) / times})


def _by_holdfast(model: nn.Module, x: Tensor, eps: float, method: str, contender: str) -> Run:
    graph, sound = trace(model, x), contender == SOUND

    def run() -> Bounds:
        with torch.no_grad():
            inputs = region(hf.Linf(eps), x, sound=sound)
            if method.startswith("alpha-crown"):
                ascent = alpha.Ascent(ITERATIONS, LEARNING_RATE, joint=method.endswith("joint"))
                return alpha.output_bounds(graph, inputs, ascent, sound=sound)
            if method == "ibp":
                return interval.output_bounds(graph, inputs.lower, inputs.upper, sound=sound)
            hidden = method == "crown"
            relaxed = linear.relaxation(graph, inputs, slopes="adaptive", hidden=hidden, sound=sound)
            return linear.output_bounds(relaxed)

    return run


def _by_auto_lirpa(model: nn.Module, x: Tensor, eps: float, method: str, contender: str) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses names that newer Python and torch have deprecated
        from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm

        joint = method.endswith("joint")
        # With fixed hidden bounds it wants the slopes made ready by `init_alpha`, which gives these bounds too.
        ascent = {
            "iteration": ITERATIONS,
            "lr_alpha": LEARNING_RATE,
            "fix_interm_bounds": not joint,
            "init_alpha": joint,
        }
        options = {"conv_mode": "matrix" if contender == MATRIX else "patches", "optimize_bound_args": ascent}
        bounded = BoundedModule(model, x, bound_opts=options, device="cpu")
    lower, upper = hf.Linf(eps).box(x)
    inputs = BoundedTensor(x, PerturbationLpNorm(norm=math.inf, x_L=lower, x_U=upper))
    optimised = method.startswith("alpha-crown")

    def run() -> Bounds:
        with torch.set_grad_enabled(optimised):
            hidden = bounded.init_alpha(x=(inputs,))[2] if optimised and not joint else None
            bounds: Bounds = bounded.compute_bounds(x=(inputs,), method=METHODS[method].peer, interm_bounds=hidden)
            return bounds[0].detach(), bounds[1].detach()

    return run


def _reset_peak() -> float:
    """Sets the peak of this process's memory back to what it holds now, in MB (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> float:
    """Peak of resident memory in MB. Not ru_maxrss, which a process inherits from the one that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


# --- In the process that compares -------------------------------------------------------------------------------------


class Refused(Exception):
    """A contender gave no answer: too slow, out of memory, or an error of its own."""


class Contender:
    """A process that runs one contender on demand."""

    def __init__(self, case: Case, name: str, options: argparse.Namespace) -> None:
        task = json.dumps({"case": asdict(case), "contender": name})
        command = [sys.executable, __file__, "--worker", task, "--memory-limit", str(options.memory_limit)]
        if options.trained is not None:
            command += ["--trained", str(options.trained), "--data", str(options.data)]
        self.limit = options.time_limit
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        )

    def answer(self) -> dict[str, Any]:
        """The next line that the process writes; what else it prints is skipped."""
        assert self.process.stdout is not None
        end = time.monotonic() + self.limit
        while True:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise Refused(f"more than {self.limit:g} s")
            line = self.process.stdout.readline()
            if not line:
                raise Refused(self._last_words())
            if line.startswith("{"):
                message: dict[str, Any] = json.loads(line)
                return message

    def repeat(self, times: int) -> dict[str, Any]:
        """Mean wall-clock and processor seconds of `times` calls."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{times}\n")
        return self.answer()

    def _last_words(self) -> str:
        assert self.process.stderr is not None
        text = self.process.stderr.read()
        if self.process.wait() < 0 or "allocate memory" in text or "MemoryError" in text:
            return "out of memory"
        return (text.strip().splitlines() or ["no message"])[-1][:120]

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.communicate()


def measure(case: Case, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures of each contender: median seconds, peak memory and bounds of the first run, or why there are none."""
    figures: dict[str, dict[str, Any]] = {}
    running: dict[str, Contender] = {}
    with contextlib.ExitStack() as stack:
        for name in case.contenders():  # one after the other: memory and the time limit are of one process alone
            contender = Contender(case, name, options)
            stack.callback(contender.close)
            try:
                figures[name] = {**contender.answer(), "wall": [], "cpu": []}
                running[name] = contender
            except Refused as error:
                figures[name] = {"refused": str(error)}
        slowest = max((figures[name]["first_seconds"] for name in running), default=0.0)
        for _ in range(options.repetitions if slowest < 10 else 3):
            for name in list(running):
                times = max(1, math.ceil(SHORT / max(figures[name]["first_seconds"], 1e-4)))
                try:
                    spent = running[name].repeat(min(times, 100))
                except (Refused, BrokenPipeError) as error:
                    figures[name] = {"refused": str(error)}
                    del running[name]
                    continue
                for clock in ("wall", "cpu"):
                    figures[name][clock].append(spent[clock])
    return figures


def compare(case: Case, figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ours against the faster peer: how many times as fast, how much wider, how much memory."""
    result: dict[str, Any] = {**asdict(case), "contenders": {n: _summary(f) for n, f in figures.items()}}
    peers = [name for name in (PATCHES, MATRIX) if name in figures and "refused" not in figures[name]]
    if "refused" not in figures[OURS] and "refused" not in figures[SOUND]:
        ours, sound = result["contenders"][OURS], result["contenders"][SOUND]
        result["sound_cost"] = sound["cpu"] / ours["cpu"]
    if not peers or "refused" in figures[OURS]:
        return result
    peer = min(peers, key=lambda name: result["contenders"][name]["cpu"])
    theirs = result["contenders"][peer]
    width = _tensor(figures[peer], "upper") - _tensor(figures[peer], "lower")
    gap = max(float(((_tensor(figures[OURS], s) - _tensor(figures[peer], s)).abs() / width).max()) for s in _SIDES)
    return {
        **result,
        "peer": peer,
        "speed_cpu": theirs["cpu"] / ours["cpu"],
        "speed_wall": theirs["wall"] / ours["wall"],
        "width": ours["mean_width"] / theirs["mean_width"],
        "largest_difference": gap,
        "memory": ours["megabytes"] / max(theirs["megabytes"], 1.0),
    }


_SIDES = ("lower", "upper")


def _tensor(figures: dict[str, Any], side: str) -> Tensor:
    return torch.tensor(figures[side], dtype=torch.float64)


def _summary(figures: dict[str, Any]) -> dict[str, Any]:
    """Medians, and the mean width in place of the bounds themselves."""
    if "refused" in figures:
        return figures
    return {
        "wall": statistics.median(figures["wall"]),
        "cpu": statistics.median(figures["cpu"]),
        "repetitions": len(figures["cpu"]),
        "megabytes": round(figures["megabytes"], 1),
        "mean_width": float((_tensor(figures, "upper") - _tensor(figures, "lower")).mean()),
    }


def verdicts(comparisons: Sequence[dict[str, Any]], *, trained: bool = False) -> list[dict[str, Any]]:
    """For every method the geometric mean of the ratios of all its cases, and whether the bars are met."""
    rows = []
    for name, method in METHODS.items():
        cases = [c for c in comparisons if c["method"] == name and "peer" in c and "sound_cost" in c]
        if not cases:
            continue
        mean = {key: statistics.geometric_mean([c[key] for c in cases]) for key in ("speed_cpu", "speed_wall", "width")}
        # Below this much memory the ratio is one of allocator pages, not of methods.
        large = [c["memory"] for c in cases if c["contenders"][c["peer"]]["megabytes"] >= 16]
        memory = statistics.geometric_mean(large) if large and min(large) > 0 else None
        sound = statistics.geometric_mean([c["sound_cost"] for c in cases])
        bar = TRAINED_BAR if trained else method.bar
        met = mean["speed_cpu"] >= bar and sound <= SOUND_BAR and mean["width"] <= 1 + EQUAL
        met = met and not ((method.memory or trained) and memory is not None and memory > 1)
        rows.append({"method": name, "bar": bar, **mean, "memory": memory, "sound_cost": sound, "met": met})
    return rows


def to_markdown(record: dict[str, Any]) -> str:
    """The results as a page."""
    summary = [
        (
            v["method"],
            f"{v['speed_cpu']:.2f}",
            f"{v['speed_wall']:.2f}",
            v["bar"],
            f"{v['width']:.4f}",
            "" if v["memory"] is None else f"{v['memory']:.2f}",
            f"{v['sound_cost']:.2f}",
            "yes" if v["met"] else "no",
        )
        for v in record["verdicts"]
    ]
    header = ("method", "speed (CPU)", "speed (wall)", "at least", "width", "memory", "cost of sound", "met")
    cases = ("network", "method", "batch", "threads")
    ratios = ("speed (CPU)", "speed (wall)", "width", "largest difference", "memory", "cost of sound", "peer")
    figures = ("contender", "CPU s", "wall s", "peak MB", "mean width")
    return "\n\n".join(
        [
            "# Speed of bounds",
            _setting(record["comparisons"]),
            describe_markdown(record["run"])
            + f"\n- load average before and after: {record['load'][0]} and {record['load'][1]}",
            "Speed: time of auto_LiRPA divided by ours, larger is better, by processor time and by the clock. Width "
            "and memory: ours divided by theirs, smaller is better; memory is what the first call adds to the peak of "
            "its process, in cases where theirs adds 16 MB or more. Cost of sound: our time with the account of "
            "rounding divided by that without. Geometric means over the cases of a method.",
            markdown_table(header, summary),
            "Case by case; the largest difference of two bounds is relative to the width of theirs.",
            markdown_table((*cases, *ratios), [_ratios(c, cases) for c in record["comparisons"]]),
            "Medians of each contender.",
            markdown_table((*cases, *figures), [row for c in record["comparisons"] for row in _figures(c, cases)]),
        ]
    )


def _setting(comparisons: Sequence[dict[str, Any]]) -> str:
    if not any(c["network"] in TRAINED for c in comparisons):
        return "Random weights, uniform random inputs, Linf boxes cut to [0, 1]."
    return (
        "Residual networks with batch norm and 1x1 shortcuts, one basic block in each stage, channels as named, "
        f"trained adversarially on CIFAR-10 (linf 2/255, {TRAINING_STEPS} steps); test images that went through JPEG, "
        "Linf boxes of radius 1/255 cut to [0, 1]."
    )


def _ratios(c: dict[str, Any], cases: Sequence[str]) -> tuple[object, ...]:
    keys = {"speed_cpu": ".2f", "speed_wall": ".2f", "width": ".4f", "largest_difference": ".1e"}
    keys |= {"memory": ".2f", "sound_cost": ".2f"}
    return (*(c[k] for k in cases), *(format(c[k], f) if k in c else "" for k, f in keys.items()), c.get("peer", ""))


def _figures(c: dict[str, Any], cases: Sequence[str]) -> Iterator[tuple[object, ...]]:
    for name, f in c["contenders"].items():
        numbers = (
            (f["refused"], "", "", "")
            if "refused" in f
            else (f"{f['cpu']:.4g}", f"{f['wall']:.4g}", f["megabytes"], f"{f['mean_width']:.4g}")
        )
        yield (*(c[k] for k in cases), name, *numbers)


def main() -> None:
    """Parses the command line, measures, prints and writes."""
    parser = argparse.ArgumentParser(description="Compare bounds with auto_LiRPA in speed, tightness and memory.")
    parser.add_argument("--quick", action="store_true", help="small networks, one thread; writes no results")
    parser.add_argument(
        "--networks", nargs="+", choices=[*NETWORKS, *TRAINED], help="(default: all; with --quick: the small ones)"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="(default: all)")
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes (default: by network and method)")
    parser.add_argument("--threads", type=int, nargs="+", help="thread counts (default: 1 2; with --quick: 1)")
    parser.add_argument("--repetitions", type=int, help="of a case (default: 7; with --quick: 3; 3 if it is slow)")
    parser.add_argument("--time-limit", type=float, default=300, help="seconds for one answer (default: 300)")
    parser.add_argument("--memory-limit", type=float, default=12, help="GB for one process (default: 12)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: benchmarks/results)")
    parser.add_argument("--trained", type=Path, help="folder of weights: compare on the trained ResNets only")
    parser.add_argument("--data", type=Path, help=".npz file of CIFAR-10, for --trained")
    parser.add_argument("--train", action="store_true", help="train the ResNets first, into the folder of --trained")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        task = json.loads(options.worker)
        work(Case(**task["case"]), task["contender"], options)
        return
    if options.train:
        torch.set_num_threads(1)
        for network in options.networks or TRAINED:
            weights = train(network, options.data).state_dict()
            save_file({key: t.contiguous() for key, t in weights.items()}, options.trained / f"{network}.safetensors")
        return

    options.repetitions = options.repetitions or (3 if options.quick else 7)
    before, comparisons = load_average(), []
    for case in cases(options):
        comparisons.append(compare(case, measure(case, options)))
        print(*_ratios(comparisons[-1], ("network", "method", "batch", "threads")), file=sys.stderr)
        page = _report(comparisons, before, options)  # after every case: a run that is ended loses nothing
    print(page)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """What the command line asks for."""
    trained = options.trained is not None
    for network in options.networks or (TRAINED if trained else QUICK if options.quick else NETWORKS):
        for method in options.methods:
            if not (METHODS[method].trained if trained else network in METHODS[method].networks):
                continue
            batches = TRAINED_BATCHES if trained else NETWORKS[network].batches(method, quick=options.quick)
            for batch in options.batches or batches:
                for threads in options.threads or ([1] if options.quick or trained else [1, 2]):
                    yield Case(network, method, batch, threads)


def _report(comparisons: list[dict[str, Any]], load: Any, options: argparse.Namespace) -> str:
    record = {
        "run": describe_run(PACKAGES),
        "load": [load, load_average()],
        "verdicts": verdicts(comparisons, trained=options.trained is not None),
        "comparisons": comparisons,
    }
    page = to_markdown(record)
    if not options.quick:
        name = "bounds_speed" if options.trained is None else "bounds_resnets"
        write_results(name, record, page, **({"folder": options.out} if options.out else {}))
    return page


if __name__ == "__main__":
    main()
